//! Locks. The actions of a thread between two points are atomic (B2), so a lock consists of plain cells.

use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};
use std::time::Duration;

use crate::scheduler::{block, now, point, wake};
use crate::time::nanos;

/// As std's.
#[derive(Default)]
pub struct Mutex<T: ?Sized> {
    locked: Cell<bool>,
    poisoned: Cell<bool>,
    value: UnsafeCell<T>,
}

// SAFETY: one thread runs at a time (B1), and only the thread that has locked it accesses the value.
unsafe impl<T: ?Sized + Send> Send for Mutex<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized + Send> Sync for Mutex<T> {}

/// As std's.
#[must_use]
pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    was_panicking: bool,
    /// Makes the guard not `Send`.
    _here: std::marker::PhantomData<*const ()>,
}

// SAFETY: as a shared reference to the value.
unsafe impl<T: ?Sized + Sync> Sync for MutexGuard<'_, T> {}

impl<T> Mutex<T> {
    /// As std's.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex {
            locked: Cell::new(false),
            poisoned: Cell::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn into_inner(self) -> LockResult<T> {
        let poisoned = self.poisoned.get();
        let value = self.value.into_inner();
        if poisoned { Err(PoisonError::new(value)) } else { Ok(value) }
    }
}

impl<T: ?Sized> Mutex<T> {
    fn key(&self) -> usize {
        std::ptr::from_ref(&self.locked).addr()
    }

    fn guard(&self) -> LockResult<MutexGuard<'_, T>> {
        self.locked.set(true);
        let was_panicking = std::thread::panicking();
        let guard = MutexGuard { mutex: self, was_panicking, _here: std::marker::PhantomData };
        if self.poisoned.get() { Err(PoisonError::new(guard)) } else { Ok(guard) }
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        point();
        while self.locked.get() {
            block(self.key(), "a mutex", None);
        }
        self.guard()
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        point();
        if self.locked.get() {
            return Err(TryLockError::WouldBlock);
        }
        self.guard().map_err(TryLockError::from)
    }

    fn unlock(&self) {
        self.locked.set(false);
        wake(self.key(), usize::MAX);
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        let poisoned = self.poisoned.get();
        let value = self.value.get_mut();
        if poisoned { Err(PoisonError::new(value)) } else { Ok(value) }
    }

    /// As std's.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.get()
    }

    /// As std's.
    pub fn clear_poison(&self) {
        self.poisoned.set(false);
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.try_lock() {
            Ok(value) => f.debug_struct("Mutex").field("data", &&*value).finish_non_exhaustive(),
            Err(_) => f.debug_struct("Mutex").finish_non_exhaustive(),
        }
    }
}

impl<T> From<T> for Mutex<T> {
    fn from(value: T) -> Mutex<T> {
        Mutex::new(value)
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this thread has locked it.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread has locked it.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T: ?Sized> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.was_panicking {
            self.mutex.poisoned.set(true);
        }
        self.mutex.unlock();
        point();
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// As std's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// As std's.
    #[must_use]
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

/// As std's.
#[derive(Default)]
pub struct Condvar {
    /// A field, so that each condition variable has a distinct address.
    _place: Cell<u8>,
}

// SAFETY: it contains no data.
unsafe impl Sync for Condvar {}

impl Condvar {
    /// As std's.
    #[must_use]
    pub const fn new() -> Condvar {
        Condvar { _place: Cell::new(0) }
    }

    fn key(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn sleep<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        until: Option<u64>,
    ) -> (LockResult<MutexGuard<'a, T>>, bool) {
        let mutex = guard.mutex;
        // Unlocked and asleep in one step (B2).
        std::mem::forget(guard);
        mutex.unlock();
        let woken = block(self.key(), "a condition", until);
        (mutex.lock(), woken)
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        point();
        self.sleep(guard, None).0
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<MutexGuard<'a, T>> {
        while condition(&mut guard) {
            guard = self.wait(guard)?;
        }
        Ok(guard)
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        limit: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let until = now().saturating_add(nanos(limit));
        let (guard, woken) = self.sleep(guard, Some(until));
        let result = WaitTimeoutResult(!woken);
        guard
            .map(|guard| (guard, result))
            .map_err(|poison| PoisonError::new((poison.into_inner(), result)))
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        limit: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let until = now().saturating_add(nanos(limit));
        loop {
            if !condition(&mut guard) {
                return Ok((guard, WaitTimeoutResult(false)));
            }
            let left = until.saturating_sub(now());
            if left == 0 {
                return Ok((guard, WaitTimeoutResult(true)));
            }
            guard = self.wait_timeout(guard, Duration::from_nanos(left))?.0;
        }
    }

    /// As std's.
    pub fn notify_one(&self) {
        point();
        wake(self.key(), 1);
    }

    /// As std's.
    pub fn notify_all(&self) {
        point();
        wake(self.key(), usize::MAX);
    }
}

impl fmt::Debug for Condvar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Condvar").finish_non_exhaustive()
    }
}

/// As std's, without the fallible initialization.
pub struct OnceLock<T> {
    making: Mutex<()>,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    /// As std's.
    #[must_use]
    pub const fn new() -> OnceLock<T> {
        OnceLock { making: Mutex::new(()), value: std::sync::OnceLock::new() }
    }

    /// As std's.
    pub fn get(&self) -> Option<&T> {
        point();
        self.value.get()
    }

    /// As std's.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        self.value.get_mut()
    }

    /// As std's.
    ///
    /// # Errors
    ///
    /// As std's.
    pub fn set(&self, value: T) -> Result<(), T> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        self.value.set(value)
    }

    /// As std's.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        if let Some(value) = self.get() {
            return value;
        }
        // Not in std's `OnceLock`: another thread would wait there in the kernel.
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if self.value.get().is_none() {
            let value = make();
            assert!(self.value.set(value).is_ok(), "made while it was made");
        }
        self.value.get().expect("just made")
    }

    /// As std's.
    pub fn into_inner(self) -> Option<T> {
        self.value.into_inner()
    }

    /// As std's.
    pub fn take(&mut self) -> Option<T> {
        self.value.take()
    }
}

impl<T> Default for OnceLock<T> {
    fn default() -> OnceLock<T> {
        OnceLock::new()
    }
}

impl<T: fmt::Debug> fmt::Debug for OnceLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}
