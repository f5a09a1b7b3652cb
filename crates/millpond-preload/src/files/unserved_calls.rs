//! Calls on descriptors that the kernel serves for now (`unserved`).
//!
//! Every hook that reads by the kernel at such a descriptor, or uses the kernel's offset, does so between [`begin`] and
//! [`UnderWay::end`]. In between the descriptor is not claimed.

use std::os::fd::RawFd;

use crate::files::registry;
use crate::files::table::{self, NumberState};
use crate::runtime::in_flight::SavedCall;
use crate::runtime::section;
use crate::runtime::thread::{self, Record};

/// Ended by hand: a thread that is cancelled in the call unwinds past it, and its record starts
/// afresh.
#[must_use]
pub struct UnderWay {
    record: &'static Record,
    before: SavedCall,
    /// The state of the number at the beginning.
    pub known: NumberState,
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
    matches!(table::get(fd), NumberState::Foreign | NumberState::Internal | NumberState::Unknown)
}

/// Begins a call.
#[inline(always)]
pub fn begin(fd: RawFd) -> Way {
    if is_kernels(fd) {
        return Way::Kernels;
    }
    if let NumberState::Left = table::get(fd) {
        return Way::Left;
    }
    let record = thread::record();
    if record.is_inside() {
        return Way::Kernels;
    }
    loop {
        let before = record.begin_call(fd);
        let known = table::get(fd);
        if !matches!(known, NumberState::Claimed) {
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

/// Makes `call` on one or two descriptors, which are not claimed before it has ended.
#[inline(always)]
pub fn during<R>(fds: [RawFd; 2], call: impl FnOnce() -> R) -> R {
    let first = begin(fds[0]);
    let second = begin(fds[1]);
    let result = call();
    // In reverse order: each restores its thread's word.
    if let Way::Open(call) = second {
        call.end();
    }
    if let Way::Open(call) = first {
        call.end();
    }
    result
}
