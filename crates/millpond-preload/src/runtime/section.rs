//! A section: a critical section of the library in a thread of the program. No signal handler of the program runs in
//! it.
//!
//! A handler may call any hooked function, which would deadlock on a lock that the thread holds. So a [`Section`] blocks
//! signals. The section of a read or write saves the system call: a signal that arrives is queued, and its handler runs
//! when the section ends (`runtime::handlers`). Thread cancellation is disabled (`runtime::cancel`).
//!
//! The thread counts as *inside* the library: if std or the engine call a hooked function, the call goes directly to
//! the kernel. Synchronous signals stay unblocked: the engine's copy recovers from bad addresses by SIGSEGV and SIGBUS.
//! The two signals that glibc sends between threads stay unblocked, too.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::runtime::cancel::state::{disable, restore};
use crate::runtime::stack;
use crate::runtime::sys::sys;
use crate::runtime::thread::{Record, record};

/// Signals 32 and 33: glibc's thread cancellation and set-user-id broadcasts. Threads that the
/// engine starts inherit the mask, and would otherwise block them permanently.
const GLIBC_INTERNAL: u64 = 0b11 << 31;

const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

pub const BLOCKED: u64 = !(GLIBC_INTERNAL
    | bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGFPE)
    | bit(libc::SIGILL)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGABRT)
    | bit(libc::SIGSYS));

/// Set if there are handlers that can't be deferred: see `handlers`.
static MUST_BLOCK: AtomicBool = AtomicBool::new(false);

/// Whether all sections have to block signals.
pub fn must_block() -> bool {
    MUST_BLOCK.load(Relaxed)
}

/// All sections that begin from now on block signals.
pub fn block_from_now_on() {
    MUST_BLOCK.store(true, Relaxed);
}

/// See the module header. Ends when dropped.
pub struct Section {
    record: &'static Record,
    /// The mask to restore at the end, if signals are blocked.
    mask: Option<u64>,
    cancel_state: i32,
}

impl Section {
    pub fn enter() -> Self {
        Self::enter_with(Some(change_mask(libc::SIG_BLOCK, BLOCKED)))
    }

    /// With signals open, which are deferred as they come.
    fn enter_open() -> Self {
        // stack.ST2.
        let is_blocked = must_block() || record().is_on_handler_stack();
        if is_blocked { Self::enter() } else { Self::enter_with(None) }
    }

    fn enter_with(mask: Option<u64>) -> Self {
        let record = record();
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
        // handlers.S2. If this section is nested, the outer one sets the noted mask.
        let noted = || (self.record.inside_depth() == 0).then(|| self.record.take_mask()).flatten();
        // Handlers of signals that came during the section run now, and may end the thread.
        if let Some(mask) = self.mask.or_else(noted) {
            change_mask(libc::SIG_SETMASK, mask);
        }
    }
}

pub fn change_mask(how: i32, set: u64) -> u64 {
    let mut old = 0u64;
    // SAFETY: both sets are eight bytes, the size passed to the kernel.
    unsafe { sys!(libc::SYS_rt_sigprocmask, how, &raw const set, &raw mut old, 8) };
    old
}

/// Runs `work` in a section. A panic ends the process: there is no Rust caller to unwind to.
#[inline]
pub fn run<R>(work: impl FnOnce(&'static Record) -> R) -> R {
    run_in(Section::enter(), work)
}

/// The same with signals open: for a read or write of the engine, whose system calls may be interrupted
/// (`handlers.S7`).
#[inline]
pub fn open<R>(work: impl FnOnce(&'static Record) -> R) -> R {
    run_in(Section::enter_open(), work)
}

#[inline]
fn run_in<R>(section: Section, work: impl FnOnce(&'static Record) -> R) -> R {
    struct Abort;
    impl Drop for Abort {
        fn drop(&mut self) {
            std::process::abort();
        }
    }
    let abort = Abort;
    let record = section.record();
    let result = match record.stack() {
        // SAFETY: stack.ST1: the outermost section of this thread.
        Some(end) if record.inside_depth() == 1 => unsafe {
            let is_on_handlers = record.is_on_handler_stack();
            stack::run(end, || {
                let _disabled = is_on_handlers.then(stack::Disabled::begin);
                work(record)
            })
        },
        _ => work(record),
    };
    std::mem::forget(abort);
    result
}
