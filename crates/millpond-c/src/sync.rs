//! The atomics of the handle protocol: loom's under loom, otherwise std's.

pub(crate) use std::sync::atomic::Ordering;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, fence};

/// Yields the processor; sleeps after many attempts.
#[cfg(not(loom))]
pub(crate) fn yield_now(attempts: u32) {
    if attempts < 100 {
        std::thread::yield_now();
    } else {
        // The thread that is waited for does not run, or faults on memory of the program.
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
}

#[cfg(loom)]
pub(crate) fn yield_now(_attempts: u32) {
    loom::thread::yield_now();
}
