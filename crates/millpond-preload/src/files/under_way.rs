//! A call that may end up in the kernel, on a file that may be adopted: `in_flight`.
//!
//! Every hook that reads, writes or changes a file by the kernel, or moves or asks for its offset
//! there, does so between [`begin`] and [`UnderWay::end`]. In between the number is not adopted: who
//! found it watched may have the kernel do it. It may be given back, as ever.

use std::os::fd::RawFd;

use crate::files::registry;
use crate::files::table::{self, Known};
use crate::files::watch::{self, Watch};
use crate::runtime::in_flight::Before;
use crate::runtime::thread::{self, Record};
use crate::runtime::{config, section};

/// Ended by hand: a thread that is cancelled in the call unwinds past it, and its record starts
/// afresh.
#[must_use]
pub struct UnderWay {
    record: &'static Record,
    before: Before,
    /// What the number was at the beginning.
    pub known: Known,
}

/// What to do about a call on `fd`.
pub enum Way {
    /// The kernel's, and nothing to note.
    Kernels,
    /// The kernel's for good: its bytes count.
    Left,
    Open(UnderWay),
}

/// Whether a call on `fd` is the kernel's, and nothing to note.
#[inline(always)]
pub fn is_kernels(fd: RawFd) -> bool {
    match table::get(fd) {
        Known::Foreign | Known::Internal => true,
        Known::Unknown => !config::is_eager(),
        _ => false,
    }
}

/// Begins a call.
#[inline(always)]
pub fn begin(fd: RawFd) -> Way {
    if is_kernels(fd) {
        return Way::Kernels;
    }
    if let Known::Left = table::get(fd) {
        return Way::Left;
    }
    let record = thread::record();
    if record.is_inside() {
        return Way::Kernels;
    }
    loop {
        let before = record.begin_call(fd);
        let known = table::get(fd);
        if !matches!(known, Known::Claimed) {
            return Way::Open(UnderWay { record, before, known });
        }
        // in_flight.I3.
        record.end_call(before);
        await_claimant();
    }
}

/// A claim lasts for a hold of the registry's lock.
#[cold]
pub fn await_claimant() {
    section::run(|_| drop(registry::lock()));
}

impl UnderWay {
    #[inline(always)]
    pub fn end(self) {
        self.record.end_call(self.before);
    }
}

/// Makes `call` on one or two numbers, which are not adopted meanwhile.
#[inline(always)]
pub fn during<R>(fds: [RawFd; 2], call: impl FnOnce() -> R) -> R {
    let first = begin(fds[0]);
    let second = begin(fds[1]);
    let result = call();
    // The other way round: a word is what it was before.
    if let Way::Open(call) = second {
        call.end();
    }
    if let Way::Open(call) = first {
        call.end();
    }
    result
}

/// Does something to the counts of `fd` if it is watched, which it is meanwhile.
pub fn with_watch(fd: RawFd, work: impl FnOnce(&'static Watch)) {
    if let Way::Open(call) = begin(fd) {
        if let (Known::Watched, Some(watch)) = (call.known, watch::of(fd)) {
            work(watch);
        }
        call.end();
    }
}
