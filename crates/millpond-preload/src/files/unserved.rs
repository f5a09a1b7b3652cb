//! Descriptors of mode back that the kernel serves for now.
//!
//! - Those that are open for reading only, without `--eager`. Their open makes no system call of the library's.
//! - Those that are open for writing, and whose lease was refused because another description of the file is open.
//!
//! The library remembers both for one reason: when the process has a file open for writing, the file is served to all its
//! descriptors (`multi_open`). That is tried when the program opens the file for writing, and again after [`CALLS`] calls
//! by such a descriptor. Until then each call names its descriptor while it lasts (`in_flight`).
//!
//! ```text
//! open -> UNSERVED -> CLAIMED -> a description         all descriptors of the file are this process's
//!                     CLAIMED -> UNSERVED              another process has the file open
//!         UNSERVED -> LEFT                             a second number, a lock, a mapping, fork, exec, sent away
//! ```
//!
//! A descriptor that is LEFT is the kernel's until it is closed.
//!
//! Calls on them: see `unserved_calls`.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicPtr, AtomicU32};

use crate::files::identity;
use crate::files::table::{self, NumberState};
use crate::report::accounts::{self, Row};
use crate::report::counts;
use crate::report::reason::Reason;
use crate::runtime::{link, section};

/// Descriptors with higher numbers have no row in the report, and are not tried again.
const NUMBERS: usize = 1 << 16;
/// Calls until the file is tried again; four times as many the next time. Chosen, not measured: a try makes about ten
/// system calls for each descriptor.
const CALLS: u32 = 64;

/// The state of an unserved descriptor.
struct Counted {
    row: AtomicPtr<Row>,
    /// Zero: it is open for reading only.
    calls_to_try: AtomicU32,
    calls: AtomicU32,
}

static TABLE: [Counted; NUMBERS] = [const {
    Counted {
        row: AtomicPtr::new(std::ptr::null_mut()),
        calls_to_try: AtomicU32::new(0),
        calls: AtomicU32::new(0),
    }
}; NUMBERS];

fn number(fd: RawFd) -> Option<&'static Counted> {
    TABLE.get(fd as usize)
}

/// `fd` was just opened for reading only.
pub fn note_reader(fd: RawFd) {
    let row = if accounts::is_kept() { section::run(|_| row_of(fd)) } else { None };
    note(fd, row, Reason::ReadOnly, 0);
}

/// `fd` was just opened for writing, and its lease was refused. In a section.
pub fn note_writer(fd: RawFd, row: Option<&'static Row>) {
    note(fd, row, Reason::OpenElsewhere, CALLS);
}

fn note(fd: RawFd, row: Option<&'static Row>, reason: Reason, calls: u32) {
    counts::count_file_passed(reason);
    row.inspect(|row| row.left(reason));
    if let Some(number) = number(fd) {
        number.row.store(row.map_or(std::ptr::null(), std::ptr::from_ref).cast_mut(), Relaxed);
        number.calls_to_try.store(calls, Relaxed);
        number.calls.store(0, Relaxed);
    }
    table::set(fd, NumberState::Unserved);
}

/// Why the kernel serves `fd`, which is UNSERVED or LEFT.
pub fn reason(fd: RawFd) -> Reason {
    let is_writer = number(fd).is_some_and(|number| number.calls_to_try.load(Relaxed) != 0);
    if is_writer { Reason::OpenElsewhere } else { Reason::ReadOnly }
}

/// Counts a call. Whether the file is to be tried. Additions of other threads may be lost.
#[inline]
pub fn is_due(fd: RawFd) -> bool {
    let Some(number) = number(fd) else { return false };
    let wanted = number.calls_to_try.load(Relaxed);
    if wanted == 0 {
        return false;
    }
    let calls = number.calls.load(Relaxed) + 1;
    let is_due = calls >= wanted;
    number.calls.store(if is_due { 0 } else { calls }, Relaxed);
    if is_due {
        number.calls_to_try.store(wanted.saturating_mul(4), Relaxed);
    }
    is_due
}

/// The row of `fd` in the report by file, which is UNSERVED or LEFT.
pub fn row(fd: RawFd) -> Option<&'static Row> {
    // SAFETY: null, or a row, which is never freed (`accounts.C2`).
    unsafe { number(fd)?.row.load(Relaxed).as_ref() }
}

/// It is served from now on, or counted with another reason.
pub fn uncount(fd: RawFd) {
    counts::uncount_file_passed(reason(fd));
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
