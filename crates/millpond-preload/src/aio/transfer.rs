//! Carries out a request for a served file on a thread that may wait.

use crate::files::open_file::OpenFile;
use crate::files::segments::{Direction, Segments};
use crate::files::served_io::{Outcome, explain, outcome_of};
use crate::runtime::thread::record;

/// Reads or writes, and waits for the device if necessary; the result in the kernel's form. In a section.
///
/// # Safety
///
/// The caller owns the memory, which may be at any address. The description is pinned.
pub unsafe fn carry_out(
    description: &OpenFile,
    segments: &Segments,
    offset: u64,
    direction: Direction,
) -> isize {
    let append = direction == Direction::Write && description.access().append;
    // SAFETY: the caller's duty.
    unsafe {
        match description.served_file() {
            Some(file) => {
                let moved = segments.transfer(description, file, offset, direction, append);
                let moved = moved.map(|(_, bytes)| bytes);
                explain(description, &moved, direction);
                match outcome_of(record(), moved) {
                    Outcome::Done(result) => result,
                    Outcome::Kernel(_) => -(libc::EIO as isize),
                }
            }
            // OptimisticRead to the kernel since: `open_file.D3`.
            None => segments.through_kernel(description, offset, direction),
        }
    }
}

pub fn count_read(description: &OpenFile, bytes: usize, is_hit: bool) {
    record().count_served(bytes as u64);
    description.row().inspect(|row| row.read(bytes, is_hit));
}
