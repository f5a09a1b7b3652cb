//! What callers call: [`RangeLock`]'s methods.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::budget::Budget;
use crate::future::{Acquire, OwnedAcquire};
use crate::guard::{Guard, OwnedGuard};
use crate::lock::RangeLock;
use crate::range::{ByteRange, Mode};
use crate::raw::RawRangeLock;
use crate::striped::Striped;

impl RangeLock {
    /// A lock that nobody holds. Allocates nothing.
    ///
    /// ```
    /// let lock = millpond_rangelock::RangeLock::new();
    /// ```
    pub fn new() -> RangeLock {
        RangeLock::default()
    }

    /// A lock for ranges that are mostly of about `bytes` bytes: a range is held as one piece for
    /// each region of this size that it touches, and up to 10 pieces cost no more than a
    /// compare-exchange each. Default 8 KiB; rounded up to a power of two, at least 4 KiB. Larger
    /// regions make larger ranges cheaper, and neighbours meet more often, at the cost of a queue
    /// where many hold parts of one region at once. What is granted is exact all the same.
    ///
    /// ```
    /// use millpond_rangelock::{ByteRange, Mode, RangeLock};
    /// let lock = RangeLock::with_region_bytes(64 << 10);
    /// let head = lock.lock(ByteRange::new(0, 4096)?, Mode::Exclusive);
    /// assert!(lock.try_lock(ByteRange::new(4096, 8192)?, Mode::Exclusive).is_some());
    /// # drop(head);
    /// # Ok::<(), millpond_rangelock::RangeError>(())
    /// ```
    pub fn with_region_bytes(bytes: u64) -> RangeLock {
        RangeLock::from_raw(Striped::with_region_bytes(bytes))
    }

    /// The same lock, which grows only as far as `budget` allows it: what it takes for that, it gives
    /// back when it is dropped. Once the budget is gone, the lock grows no more. A lock that can't
    /// grow is slower where many hold parts of it, and nothing else. What requests that wait take, about
    /// 150 bytes each, is not asked for, and freed when none waits, but for that of four.
    ///
    /// ```
    /// use std::sync::{Arc, Weak};
    /// use millpond_rangelock::{Budget, RangeLock};
    ///
    /// struct Nothing;
    ///
    /// impl Budget for Nothing {
    ///     fn try_take(&self, _bytes: usize) -> bool {
    ///         false
    ///     }
    ///
    ///     fn give_back(&self, _bytes: usize) {}
    /// }
    ///
    /// let budget: Arc<dyn Budget> = Arc::new(Nothing);
    /// let lock = RangeLock::new().with_budget(Arc::downgrade(&budget));
    /// ```
    #[must_use]
    pub fn with_budget(self, budget: std::sync::Weak<dyn Budget>) -> RangeLock {
        RangeLock::from_raw(self.into_raw().with_budget(budget))
    }
}

impl<L: RawRangeLock> RangeLock<L> {
    /// A lock of the implementation `L`.
    ///
    /// ```
    /// use millpond_rangelock::{RangeLock, Striped};
    /// let lock = RangeLock::<Striped>::with_raw();
    /// ```
    pub fn with_raw() -> RangeLock<L> {
        RangeLock::default()
    }

    /// Locks `range`, waiting as long as it takes: it spins briefly, then sleeps.
    ///
    /// ```
    /// use millpond_rangelock::{ByteRange, Mode, RangeLock};
    /// let lock = RangeLock::new();
    /// let guard = lock.lock(ByteRange::ALL, Mode::Shared);
    /// assert_eq!(guard.mode(), Mode::Shared);
    /// ```
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn lock(&self, range: ByteRange, mode: Mode) -> Guard<'_, L> {
        Guard::new(self, range, mode, self.acquire(range, mode))
    }

    /// Locks `range` if that needs no waiting.
    ///
    /// `None` means that a conflicting request was held, waited, or was just being made: fairness
    /// holds here too, so it does not overtake waiting requests.
    ///
    /// ```
    /// use millpond_rangelock::{ByteRange, Mode, RangeLock};
    /// let lock = RangeLock::new();
    /// let guard = lock.try_lock(ByteRange::ALL, Mode::Exclusive).unwrap();
    /// assert!(lock.try_lock(ByteRange::at(0, 1).unwrap(), Mode::Shared).is_none());
    /// ```
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn try_lock(&self, range: ByteRange, mode: Mode) -> Option<Guard<'_, L>> {
        let held = self.raw().try_request(range, mode)?;
        Some(Guard::new(self, range, mode, held))
    }

    /// Locks `range`, waiting for at most `timeout`.
    ///
    /// A request that gives up leaves the queue at once, and requests that waited only for it are granted.
    ///
    /// ```
    /// use std::time::Duration;
    /// use millpond_rangelock::{ByteRange, Mode, RangeLock};
    /// let lock = RangeLock::new();
    /// let guard = lock.lock(ByteRange::ALL, Mode::Exclusive);
    /// let late = lock.lock_timeout(ByteRange::ALL, Mode::Shared, Duration::from_millis(1));
    /// assert!(late.is_none());
    /// ```
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn lock_timeout(
        &self,
        range: ByteRange,
        mode: Mode,
        timeout: Duration,
    ) -> Option<Guard<'_, L>> {
        // No deadline at all when it is beyond what the clock can say.
        let held = match Instant::now().checked_add(timeout) {
            Some(deadline) => self.acquire_until(range, mode, deadline)?,
            None => self.acquire(range, mode),
        };
        Some(Guard::new(self, range, mode, held))
    }

    /// Locks `range` without blocking the thread.
    ///
    /// The request joins the queue when the future is first polled. Dropping the future takes
    /// it off the queue, or releases it if it had just been granted: at every point a drop loses
    /// nothing and blocks nobody.
    ///
    /// A future that is granted and woken and then not polled holds others up for no longer
    /// than [`OFFER_GRACE`](crate::OFFER_GRACE): after that, requests that came later may go first.
    /// It keeps its place, before all of them that still wait: its next poll is ready at once, or
    /// waits for those that hold the range by then. No timer runs for that: it is looked
    /// after by threads that wait behind it, and else by the next request, release or poll of
    /// this lock. So where only tasks use a lock, one that is never polled again and never
    /// dropped delays those behind it until anything else happens on the lock.
    ///
    /// ```
    /// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
    /// use millpond_rangelock::{ByteRange, Mode, RangeLock};
    /// let lock = RangeLock::new();
    /// let mut request = pin!(lock.lock_async(ByteRange::ALL, Mode::Exclusive));
    /// # let mut cx = Context::from_waker(Waker::noop());
    /// assert!(request.as_mut().poll(&mut cx).is_ready());
    /// ```
    pub fn lock_async(
        &self,
        range: ByteRange,
        mode: Mode,
    ) -> impl Future<Output = Guard<'_, L>> + Send {
        Acquire::new(self, range, mode)
    }

    /// Sets for how long, at least, a granted [`lock_async`](RangeLock::lock_async) that is not polled
    /// keeps others out: [`OFFER_GRACE`](crate::OFFER_GRACE) if not set, `Duration::MAX` for ever.
    /// For the requests that come from now on.
    ///
    /// ```
    /// use std::time::Duration;
    /// let lock = millpond_rangelock::RangeLock::new();
    /// lock.set_offer_grace(Duration::from_millis(100));
    /// ```
    pub fn set_offer_grace(&self, grace: Duration) {
        self.raw().set_offer_grace(grace);
    }

    /// As [`lock`](RangeLock::lock), with a guard that keeps the lock alive and can go anywhere.
    ///
    /// ```
    /// use std::{sync::Arc, thread};
    /// use millpond_rangelock::{ByteRange, Mode, RangeLock};
    /// let lock = Arc::new(RangeLock::new());
    /// let guard = lock.lock_owned(ByteRange::ALL, Mode::Exclusive);
    /// thread::spawn(move || drop(guard)).join().unwrap();
    /// ```
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn lock_owned(self: &Arc<Self>, range: ByteRange, mode: Mode) -> OwnedGuard<L> {
        let held = self.acquire(range, mode);
        OwnedGuard::new(Arc::clone(self), range, mode, held)
    }

    /// As [`try_lock`](RangeLock::try_lock), with a guard that keeps the lock alive.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use millpond_rangelock::{ByteRange, Mode, RangeLock};
    /// let lock = Arc::new(RangeLock::new());
    /// let guard = lock.try_lock_owned(ByteRange::ALL, Mode::Exclusive);
    /// assert!(guard.is_some());
    /// ```
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn try_lock_owned(self: &Arc<Self>, range: ByteRange, mode: Mode) -> Option<OwnedGuard<L>> {
        let held = self.raw().try_request(range, mode)?;
        Some(OwnedGuard::new(Arc::clone(self), range, mode, held))
    }

    /// As [`lock_async`](RangeLock::lock_async), with a guard and a future that keep the lock
    /// alive.
    ///
    /// ```
    /// # use std::{future::Future, pin::pin, sync::Arc, task::{Context, Poll, Waker}};
    /// use millpond_rangelock::{ByteRange, Mode, RangeLock};
    /// let lock = Arc::new(RangeLock::new());
    /// let mut request = pin!(lock.lock_owned_async(ByteRange::ALL, Mode::Exclusive));
    /// # let mut cx = Context::from_waker(Waker::noop());
    /// assert!(request.as_mut().poll(&mut cx).is_ready());
    /// ```
    pub fn lock_owned_async(
        self: &Arc<Self>,
        range: ByteRange,
        mode: Mode,
    ) -> impl Future<Output = OwnedGuard<L>> + Send + 'static {
        OwnedAcquire::new(Arc::clone(self), range, mode)
    }
}
