//! Descriptors that are open for reading only, in mode back without `--eager`: the kernel serves them.
//!
//! An open for reading makes no system call of the library's, and its reads cost a few instructions more than on the
//! kernel. The library remembers the descriptor for one reason: when the program opens the same file for writing, the
//! file is served to both (`several`). Until then each read names its descriptor while it lasts (`in_flight`).
//!
//! ```text
//! open -> READ_ONLY -> CLAIMED -> a description        the program opens the file for writing
//!                      CLAIMED -> LEFT                 that was refused
//!         READ_ONLY -> LEFT                            a second number, a lock, a mapping, fork, exec, sent away
//! ```
//!
//! A descriptor that is LEFT is the kernel's until it is closed.

use std::os::fd::RawFd;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::Relaxed;

use crate::files::identity;
use crate::files::table::{self, Known};
use crate::report::accounts::{self, Row};
use crate::report::counts;
use crate::report::reason::Reason;
use crate::runtime::{config, link, section};

/// Descriptors with higher numbers have no row in the report.
const ROWS: usize = 1 << 16;

/// The row of each descriptor in the report by file, where that was asked for.
static TABLE: [AtomicPtr<Row>; ROWS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; ROWS];

/// `fd` was just opened for reading only.
pub fn note_open(fd: RawFd) {
    counts::count_file_passed(Reason::ReadOnly);
    if config::is_explained()
        && let Some(word) = TABLE.get(fd as usize)
    {
        let row = section::run(|_| row_of(fd));
        row.inspect(|row| row.left(Reason::ReadOnly));
        word.store(row.map_or(std::ptr::null(), std::ptr::from_ref).cast_mut(), Relaxed);
    }
    table::set(fd, Known::ReadOnly);
}

/// The row of `fd`, which is READ_ONLY or LEFT.
pub fn row(fd: RawFd) -> Option<&'static Row> {
    // SAFETY: null, or a row, which is never freed (`accounts.C2`).
    unsafe { TABLE.get(fd as usize)?.load(Relaxed).as_ref() }
}

/// The file is served from now on, and counted so.
pub fn note_served() {
    counts::uncount_file_passed(Reason::ReadOnly);
}

/// The program closes `fd`, which is `slot`. False where the registry has to be asked.
#[inline]
pub fn forget(fd: RawFd, slot: Known) -> bool {
    table::try_change(fd, slot, Known::Unknown)
}

/// The row of the file behind `fd`, which was just opened. In a section.
pub fn row_of(fd: RawFd) -> Option<&'static Row> {
    let identity = identity::identify(fd).filter(|identity| identity.is_regular)?;
    if !identity::is_in_served_directory(fd) {
        accounts::count_outside();
        return None;
    }
    let path = &mut [0; libc::PATH_MAX as usize];
    accounts::open(identity.id, link::path_of(fd, path))
}
