//! A stretch of the library's own work in a program's thread.
//!
//! While a [`Section`] lasts, signals are blocked (a handler may call any hook, and would meet our
//! locks), cancellation is disabled (`cancel`), and the thread counts as *inside*: what std and the
//! engine call by a hooked name then goes straight to the kernel. Signals that the thread's own
//! instructions raise stay open, since the engine's copy relies on SIGSEGV and SIGBUS; so do the
//! two that glibc uses between threads.

use crate::runtime::cancel::state::{disable, restore};
use crate::runtime::sys::sys;
use crate::runtime::thread::{Record, record};

/// Signals 32 and 33: glibc's thread cancellation and set-user-id broadcasts. Threads that the
/// engine starts inherit the mask, and would block them for good.
const GLIBC_INTERNAL: u64 = 0b11 << 31;

const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

const BLOCKED: u64 = !(GLIBC_INTERNAL
    | bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGFPE)
    | bit(libc::SIGILL)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGABRT)
    | bit(libc::SIGSYS));

/// See the module header. Ends when dropped.
pub struct Section {
    record: &'static Record,
    mask: u64,
    cancel_state: i32,
}

impl Section {
    pub fn enter() -> Self {
        let record = record();
        let mask = change_mask(libc::SIG_BLOCK, BLOCKED);
        record.enter_inside();
        Self { record, mask, cancel_state: disable() }
    }

    /// The thread's state.
    pub fn record(&self) -> &'static Record {
        self.record
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        restore(self.cancel_state);
        self.record.exit_inside();
        // Handlers of signals that came meanwhile run now, and may end the thread.
        change_mask(libc::SIG_SETMASK, self.mask);
    }
}

fn change_mask(how: i32, set: u64) -> u64 {
    let mut old = 0u64;
    // SAFETY: both sets are eight bytes, the size the kernel is told.
    unsafe { sys!(libc::SYS_rt_sigprocmask, how, &raw const set, &raw mut old, 8) };
    old
}

/// Runs `work` in a section. A panic ends the process: there is no Rust caller to unwind to.
#[inline]
pub fn run<R>(work: impl FnOnce(&'static Record) -> R) -> R {
    struct Abort;
    impl Drop for Abort {
        fn drop(&mut self) {
            std::process::abort();
        }
    }
    let section = Section::enter();
    let abort = Abort;
    let result = work(section.record());
    std::mem::forget(abort);
    result
}
