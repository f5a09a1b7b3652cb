//! The public methods of [`RangeLock`].

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
    /// Creates an unlocked lock. Allocates nothing.
    ///
    /// ```
    /// let lock = millpond_rangelock::RangeLock::new();
    /// ```
    pub fn new() -> RangeLock {
        RangeLock::default()
    }

    /// Creates a lock for ranges of about `bytes` bytes: a range is held as one piece per region of this size, and up to
    /// 10 pieces cost one compare-exchange each. Default 8 KiB; rounded up to a power of two, at least 4 KiB. Larger
    /// regions make larger ranges cheaper, but more neighbouring ranges share a region, and requests queue when many
    /// ranges of one region are held at once. Locking is exact with any region size.
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

    /// Limits the growth of the lock by `budget`. The lock returns the bytes that it took when it is dropped. It stops
    /// growing if the budget itself is dropped. A lock that can't grow works, but is slower when many ranges are held at
    /// once. Waiting requests, about 150 bytes each, do not count; their memory is freed when the queue is empty, except
    /// for four of them.
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
    /// Creates a lock with the implementation `L`.
    ///
    /// ```
    /// use millpond_rangelock::{RangeLock, Striped};
    /// let lock = RangeLock::<Striped>::with_raw();
    /// ```
    pub fn with_raw() -> RangeLock<L> {
        RangeLock::default()
    }

    /// Locks `range`. Waits without a time limit: it spins briefly, then sleeps.
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

    /// Locks `range` if this needs no waiting.
    ///
    /// `None` means that a conflicting request was held, waiting, or in progress. Fairness holds here, too: the call does
    /// not overtake waiting requests.
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

    /// Locks `range`, waiting at most `timeout`.
    ///
    /// A request that times out leaves the queue at once, and requests that waited only for it are granted.
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
        // No deadline if it exceeds the range of the clock.
        let held = match Instant::now().checked_add(timeout) {
            Some(deadline) => self.acquire_until(range, mode, deadline)?,
            None => self.acquire(range, mode),
        };
        Some(Guard::new(self, range, mode, held))
    }

    /// Locks `range` without blocking the thread.
    ///
    /// The request joins the queue when the future is first polled. Dropping the future removes the request from the queue,
    /// or releases the range if it was just granted. A drop at any point is safe, and blocks no other request.
    ///
    /// A granted and woken future that is not polled delays other requests for [`OFFER_GRACE`](crate::OFFER_GRACE). After
    /// that, later requests may overtake it. It keeps its place before all later requests that still wait: its next poll is
    /// ready at once, or waits for the present holders of the range. No timer enforces this, but threads that wait behind
    /// the future, or the next request, release or poll of the lock. So if only tasks use the lock, a future that is
    /// neither polled nor dropped delays the requests behind it until the next call on the lock.
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

    /// Sets the minimum time for which a granted [`lock_async`](RangeLock::lock_async) that is not polled excludes other
    /// requests: [`OFFER_GRACE`](crate::OFFER_GRACE) by default; `Duration::MAX` means indefinitely. Applies to requests
    /// made after this call.
    ///
    /// ```
    /// use std::time::Duration;
    /// let lock = millpond_rangelock::RangeLock::new();
    /// lock.set_offer_grace(Duration::from_millis(100));
    /// ```
    pub fn set_offer_grace(&self, grace: Duration) {
        self.raw().set_offer_grace(grace);
    }

    /// As [`lock`](RangeLock::lock), with a guard that keeps the lock alive and has no lifetime.
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
