//! The atomics and locks of the protocols that loom explores; std's everywhere else. And futexes, which are not
//! the kernel's where one scheduler decides who runs; loom has none.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence,
};
#[cfg(loom)]
pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(loom)]
pub(crate) use loom::thread_local;
#[cfg(not(any(loom, scheduled)))]
pub(crate) use rustix::thread::futex;
#[cfg(all(scheduled, not(loom)))]
pub(crate) use std::futex;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence,
};
#[cfg(not(loom))]
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::thread_local;

/// The lock of a mutex whose data no panic leaves half changed.
pub(crate) trait MutexExt {
    type Guard<'a>
    where
        Self: 'a;

    /// Waits for the lock.
    ///
    /// # Panics
    ///
    /// If a thread has panicked under the lock.
    fn acquire(&self) -> Self::Guard<'_>;
}

impl<T: ?Sized> MutexExt for std::sync::Mutex<T> {
    type Guard<'a>
        = std::sync::MutexGuard<'a, T>
    where
        T: 'a;

    #[inline]
    fn acquire(&self) -> std::sync::MutexGuard<'_, T> {
        self.lock().expect("no panic under the lock")
    }
}

#[cfg(loom)]
impl<T> MutexExt for loom::sync::Mutex<T> {
    type Guard<'a>
        = loom::sync::MutexGuard<'a, T>
    where
        T: 'a;

    fn acquire(&self) -> loom::sync::MutexGuard<'_, T> {
        self.lock().expect("no panic under the lock")
    }
}
