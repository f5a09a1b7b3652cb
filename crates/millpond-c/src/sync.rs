//! The atomics of the protocol that loom explores; std's everywhere else.

pub(crate) use std::sync::atomic::Ordering;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, fence};

/// Lets others run, after so many times in vain.
#[cfg(not(loom))]
pub(crate) fn yield_now(looks: u32) {
    if looks < 100 {
        std::thread::yield_now();
    } else {
        // Whom it waits for is not running, or waits for memory of the program's.
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
}

#[cfg(loom)]
pub(crate) fn yield_now(_looks: u32) {
    loom::thread::yield_now();
}
