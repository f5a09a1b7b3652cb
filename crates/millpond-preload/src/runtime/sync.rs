//! The atomics and locks of protocols that are model-checked with loom (`tests/loom.rs`).
//!
//! A normal build has the atomics of `std` and the locks of this crate here. A loom build has loom's.

#[cfg(not(loom))]
mod imp {
    pub use crate::runtime::lock::{Lock, wait, wake};
    pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};
}

#[cfg(loom)]
mod imp {
    pub use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};
    use loom::sync::{Condvar, Mutex, MutexGuard};
    use std::sync::atomic::Ordering::Relaxed;

    loom::lazy_static! {
        static ref SLEEPERS: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    /// The kernel compares the word and queues the sleeper in one step.
    pub fn wait(word: &AtomicU32, expected: u32) {
        let sleepers = SLEEPERS.0.lock().unwrap();
        if word.load(Relaxed) == expected {
            drop(SLEEPERS.1.wait(sleepers).unwrap());
        }
    }

    pub fn wake(_word: &AtomicU32) {
        let _sleepers = SLEEPERS.0.lock().unwrap();
        SLEEPERS.1.notify_all();
    }

    pub struct Lock<T>(Mutex<T>);

    impl<T> Lock<T> {
        pub fn new(value: T) -> Self {
            Self(Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }

        pub unsafe fn reset(&self, value: T) {
            *self.lock() = value;
        }
    }
}

pub use imp::*;
