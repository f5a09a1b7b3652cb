//! A mutex that can be reset in a forked child.
//!
//! The library's few locks are taken only inside a [`crate::runtime::section::Section`], that is
//! with signals blocked, so no handler ever finds a lock that its own thread holds. A child of fork
//! inherits each lock in the state of the parent's other threads; [`Lock::reset`] initialises it again.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::runtime::sys::sys;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;

/// A futex mutex around a value.
pub struct Lock<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and only one guard exists at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Self { state: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    pub fn lock(&self) -> LockGuard<'_, T> {
        self.acquire();
        LockGuard { lock: self }
    }

    /// Takes the lock without a guard; [`Lock::release`] gives it back.
    pub fn acquire(&self) {
        // Acquire: pairs with the Release in `release`.
        if self.state.compare_exchange(FREE, HELD, Acquire, Relaxed).is_err() {
            while self.state.swap(CONTENDED, Acquire) != FREE {
                wait(&self.state, CONTENDED);
            }
        }
    }

    /// Gives back what [`Lock::acquire`] took.
    pub fn release(&self) {
        // Release: pairs with the Acquire in `acquire`.
        if self.state.swap(FREE, Release) == CONTENDED {
            wake(&self.state);
        }
    }

    /// Forgets the value and the lock's state, and starts with `value`.
    ///
    /// # Safety
    ///
    /// No other thread exists: a forked child before it does anything else. The old value is not
    /// dropped, since it may be half changed.
    pub unsafe fn reset(&self, value: T) {
        // SAFETY: the caller is the only thread.
        unsafe { self.value.get().write(value) };
        self.state.store(FREE, Relaxed);
    }
}

pub struct LockGuard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: a guard exists, so no other thread has the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and the guard is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for LockGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.release();
    }
}

/// Sleeps while `word` is `expected`; may return early.
pub fn wait(word: &AtomicU32, expected: u32) {
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel only reads the word.
    unsafe { sys!(libc::SYS_futex, word.as_ptr(), operation, expected, 0) };
}

/// Wakes all that sleep on `word`.
pub fn wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel uses only the word's address.
    unsafe { sys!(libc::SYS_futex, word.as_ptr(), operation, i32::MAX) };
}
