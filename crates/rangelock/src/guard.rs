//! The guards of held ranges: [`Guard`] and [`OwnedGuard`].
//!
//! A guard belongs to an operation, not to a thread: it is `Send`, and the thread that completes the operation drops it.

use std::fmt;
use std::sync::Arc;

use crate::lock::RangeLock;
use crate::range::{ByteRange, Mode};
use crate::raw::RawRangeLock;
use crate::striped::Striped;

/// A held range of a borrowed [`RangeLock`]; dropping it releases the range.
///
/// ```
/// use millpond_rangelock::{ByteRange, Mode, RangeLock};
/// let lock = RangeLock::new();
/// let guard = lock.lock(ByteRange::at(10, 5)?, Mode::Exclusive);
/// assert_eq!((guard.range(), guard.mode()), (ByteRange::new(10, 15)?, Mode::Exclusive));
/// # Ok::<(), millpond_rangelock::RangeError>(())
/// ```
#[must_use = "the range is released when the guard is dropped"]
pub struct Guard<'a, L: RawRangeLock = Striped> {
    lock: &'a RangeLock<L>,
    state: GuardState<L>,
}

/// A held range that keeps its [`RangeLock`] alive; dropping it releases the range.
///
/// For operations that outlive their caller: a read-ahead keeps one until the I/O is done, and the thread that reaps the
/// completion drops it.
///
/// ```
/// use std::sync::Arc;
/// use millpond_rangelock::{ByteRange, Mode, OwnedGuard, RangeLock};
/// let lock = Arc::new(RangeLock::new());
/// let guard: OwnedGuard = lock.lock_owned(ByteRange::ALL, Mode::Shared);
/// drop(lock);
/// assert_eq!(guard.range(), ByteRange::ALL);
/// ```
#[must_use = "the range is released when the guard is dropped"]
pub struct OwnedGuard<L: RawRangeLock = Striped> {
    lock: Arc<RangeLock<L>>,
    state: GuardState<L>,
}

/// The common part of both guards.
struct GuardState<L: RawRangeLock> {
    range: ByteRange,
    mode: Mode,
    /// `None` only after the release.
    held: Option<L::Held>,
    /// Number of the guard in the lock's list of holders.
    #[cfg(debug_assertions)]
    number: u64,
}

impl<L: RawRangeLock> GuardState<L> {
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    fn new(lock: &RangeLock<L>, range: ByteRange, mode: Mode, held: L::Held) -> GuardState<L> {
        #[cfg(not(debug_assertions))]
        let _ = lock;
        GuardState {
            range,
            mode,
            held: Some(held),
            #[cfg(debug_assertions)]
            number: lock.holders.add(range, mode),
        }
    }

    #[inline(always)]
    fn release(&mut self, lock: &RangeLock<L>) {
        // Before the release, so that the next holder is not reported to conflict with this one.
        #[cfg(debug_assertions)]
        lock.holders.remove(self.number);
        if let Some(held) = self.held.take() {
            lock.raw().release(self.range, self.mode, held);
        }
    }

    fn try_upgrade(&mut self, lock: &RangeLock<L>) -> bool {
        if self.mode == Mode::Exclusive {
            return true;
        }
        let Some(held) = &mut self.held else {
            return false;
        };
        let upgraded = lock.raw().try_upgrade(self.range, held);
        if upgraded {
            self.set_mode(lock, Mode::Exclusive);
        }
        upgraded
    }

    fn downgrade(&mut self, lock: &RangeLock<L>) {
        if self.mode == Mode::Shared {
            return;
        }
        if let Some(held) = &mut self.held {
            lock.raw().downgrade(self.range, held);
            self.set_mode(lock, Mode::Shared);
        }
    }

    fn set_mode(&mut self, lock: &RangeLock<L>, mode: Mode) {
        self.mode = mode;
        #[cfg(debug_assertions)]
        lock.holders.set_mode(self.number, mode);
        #[cfg(not(debug_assertions))]
        let _ = lock;
    }

    fn fmt(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("range", &self.range)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

macro_rules! guard_methods {
    () => {
        /// The held range.
        #[inline]
        pub fn range(&self) -> ByteRange {
            self.state.range
        }

        /// The mode in which it is held.
        #[inline]
        pub fn mode(&self) -> Mode {
            self.state.mode
        }

        /// Makes a shared guard exclusive, if this needs no waiting. Returns whether the guard is exclusive afterwards.
        ///
        /// It fails if another guard overlaps, or if an overlapping request has waited since before this guard was
        /// requested. There is no upgrade that waits, as two holders that wait for each other's upgrade would deadlock.
        /// Later requests continue to wait.
        ///
        /// ```
        /// # use std::sync::Arc;
        /// # use millpond_rangelock::{ByteRange, Mode, RangeLock};
        /// let lock = Arc::new(RangeLock::new());
        /// let mut guard = lock.lock_owned(ByteRange::ALL, Mode::Shared);
        /// let other = lock.lock(ByteRange::ALL, Mode::Shared);
        /// assert!(!guard.try_upgrade());
        /// drop(other);
        /// assert!(guard.try_upgrade());
        /// assert_eq!(guard.mode(), Mode::Exclusive);
        /// ```
        pub fn try_upgrade(&mut self) -> bool {
            self.state.try_upgrade(&self.lock)
        }

        /// Makes an exclusive guard shared, at once and without releasing the range. Shared requests that waited only for
        /// this guard are granted.
        ///
        /// ```
        /// # use std::sync::Arc;
        /// # use millpond_rangelock::{ByteRange, Mode, RangeLock};
        /// let lock = Arc::new(RangeLock::new());
        /// let mut guard = lock.lock_owned(ByteRange::ALL, Mode::Exclusive);
        /// guard.downgrade();
        /// assert!(lock.try_lock(ByteRange::ALL, Mode::Shared).is_some());
        /// ```
        pub fn downgrade(&mut self) {
            self.state.downgrade(&self.lock)
        }
    };
}

impl<'a, L: RawRangeLock> Guard<'a, L> {
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn new(
        lock: &'a RangeLock<L>,
        range: ByteRange,
        mode: Mode,
        held: L::Held,
    ) -> Guard<'a, L> {
        {
            let state = GuardState::new(lock, range, mode, held);
            Guard { lock, state }
        }
    }

    guard_methods!();
}

impl<L: RawRangeLock> OwnedGuard<L> {
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn new(
        lock: Arc<RangeLock<L>>,
        range: ByteRange,
        mode: Mode,
        held: L::Held,
    ) -> OwnedGuard<L> {
        {
            let state = GuardState::new(&lock, range, mode, held);
            OwnedGuard { lock, state }
        }
    }

    guard_methods!();
}

impl<L: RawRangeLock> Drop for Guard<'_, L> {
    #[inline(always)]
    fn drop(&mut self) {
        self.state.release(self.lock);
    }
}

impl<L: RawRangeLock> Drop for OwnedGuard<L> {
    #[inline(always)]
    fn drop(&mut self) {
        self.state.release(&self.lock);
    }
}

impl<L: RawRangeLock> fmt::Debug for Guard<'_, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.fmt("Guard", f)
    }
}

impl<L: RawRangeLock> fmt::Debug for OwnedGuard<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.fmt("OwnedGuard", f)
    }
}
