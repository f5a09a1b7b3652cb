//! [`RangeLock`]: the lock that guards and futures share, and how a thread waits for a range.
//!
//! `guard` releases ranges, `future` acquires them without blocking a thread, `api` has the public methods.

use std::time::Instant;

use crate::range::{ByteRange, Mode};
use crate::raw::{RawRangeLock, Request};
use crate::striped::Striped;
use crate::wait::{Backoff, ThreadWait};

/// Locks on ranges of bytes, shared or exclusive.
///
/// - **Exact**: requests for ranges that share no byte never wait for each other.
/// - **Fair**: a request waits for conflicting guards and for every conflicting request that queued before it, and never
///   for a later request. So neither readers nor writers starve. (A thread spins for a few microseconds before it queues,
///   unless other requests already wait.)
/// - **Independent of threads**: a [`Guard`](crate::Guard) may be moved to any thread, and released there.
///
/// The lock does not order several guards of one caller. A caller that waits for a range that overlaps its own guard
/// deadlocks, and two callers that lock several ranges in different orders may deadlock. Debug builds report a thread
/// that waits for its own guard.
///
/// `L` is the implementation: [`Striped`], except in comparisons with other locks.
///
/// ```
/// use millpond_rangelock::{ByteRange, Mode, RangeLock};
///
/// let lock = RangeLock::new();
/// let head = ByteRange::new(0, 4096)?;
/// let tail = ByteRange::from_start(4096)?;
///
/// let writer = lock.lock(head, Mode::Exclusive);
/// let truncate = lock.lock(tail, Mode::Exclusive); // disjoint: does not wait
/// assert!(lock.try_lock(head, Mode::Shared).is_none());
/// drop(writer);
/// assert!(lock.try_lock(head, Mode::Shared).is_some());
/// # drop(truncate);
/// # Ok::<(), millpond_rangelock::RangeError>(())
/// ```
#[derive(Debug, Default)]
pub struct RangeLock<L: RawRangeLock = Striped> {
    raw: L,
    #[cfg(debug_assertions)]
    pub(crate) holders: crate::holders::Holders,
}

impl<L: RawRangeLock> RangeLock<L> {
    pub(crate) fn from_raw(raw: L) -> RangeLock<L> {
        RangeLock {
            raw,
            #[cfg(debug_assertions)]
            holders: crate::holders::Holders::default(),
        }
    }

    pub(crate) fn into_raw(self) -> L {
        self.raw
    }

    pub(crate) fn raw(&self) -> &L {
        &self.raw
    }

    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub(crate) fn acquire(&self, range: ByteRange, mode: Mode) -> L::Held {
        match self.raw.claim(range, mode) {
            Some(held) => held,
            None => self.acquire_slow(range, mode),
        }
    }

    #[cold]
    #[cfg_attr(debug_assertions, track_caller)]
    fn acquire_slow(&self, range: ByteRange, mode: Mode) -> L::Held {
        if let Some(held) = self.spin_for_claim(range, mode) {
            return held;
        }
        let mut wait = None;
        let notify = || wait.insert(ThreadWait::start()).notify();
        match self.raw.request(range, mode, notify) {
            Request::Granted(held) => held,
            Request::Queued(queued) => self.sleep(range, mode, queued, wait),
        }
    }

    /// Retries the claim for some microseconds, unless other requests already wait.
    ///
    /// A short hold ends sooner than a request can be queued and granted, and without a queue there is no hand-over. So two
    /// threads that compete for one range alternate after hundreds of holds rather than after each hold. A request can be
    /// overtaken only while it spins, so the time of spinning bounds it.
    fn spin_for_claim(&self, range: ByteRange, mode: Mode) -> Option<L::Held> {
        let mut backoff = Backoff::new();
        while !self.raw.is_crowded() && backoff.pause() {
            if let Some(held) = self.raw.claim(range, mode) {
                return Some(held);
            }
        }
        None
    }

    #[cfg_attr(debug_assertions, track_caller)]
    fn sleep(
        &self,
        range: ByteRange,
        mode: Mode,
        queued: L::Queued,
        wait: Option<ThreadWait>,
    ) -> L::Held {
        // `request` called `notify` before it queued.
        let wait = wait.expect("a queued request has a waiter");
        #[cfg(debug_assertions)]
        self.report_self_deadlock(range, mode, &queued, &wait);
        self.wait(&queued, &wait, None);
        self.collect(range, mode, queued)
    }

    /// Waits until the request is granted; false if `deadline` passes first.
    fn wait(&self, queued: &L::Queued, wait: &ThreadWait, deadline: Option<Instant>) -> bool {
        let Some(patience) = L::patience(queued) else {
            return wait.wait(deadline);
        };
        loop {
            let now = Instant::now();
            if deadline.is_some_and(|deadline| deadline <= now) {
                return wait.wait(deadline);
            }
            // No bound if it exceeds the range of the clock.
            let soon = now.checked_add(patience);
            if wait.wait(deadline.into_iter().chain(soon).min()) {
                return true;
            }
            self.raw.expire();
        }
    }

    /// Waits for a while, and prints a message if this thread waits for its own guard.
    #[cfg(debug_assertions)]
    #[track_caller]
    fn report_self_deadlock(
        &self,
        range: ByteRange,
        mode: Mode,
        queued: &L::Queued,
        wait: &ThreadWait,
    ) {
        let deadline = Instant::now() + crate::holders::REPORT_AFTER;
        if cfg!(any(loom, shuttle)) || self.wait(queued, wait, Some(deadline)) {
            return;
        }
        let location = std::panic::Location::caller();
        if let Some(message) = self.holders.self_deadlock_message(range, mode, location) {
            eprintln!("{message}");
        }
    }

    pub(crate) fn acquire_until(
        &self,
        range: ByteRange,
        mode: Mode,
        deadline: Instant,
    ) -> Option<L::Held> {
        if let Some(held) = self.raw.claim(range, mode).or_else(|| self.spin_for_claim(range, mode))
        {
            return Some(held);
        }
        let mut wait = None;
        let notify = || wait.insert(ThreadWait::start()).notify();
        match self.raw.request(range, mode, notify) {
            Request::Granted(held) => Some(held),
            Request::Queued(queued) => {
                let wait = wait.expect("a queued request has a waiter");
                if self.wait(&queued, &wait, Some(deadline)) {
                    Some(self.collect(range, mode, queued))
                } else {
                    // A grant that races with the timeout wins.
                    self.raw.cancel(range, mode, queued)
                }
            }
        }
    }

    /// Takes the grant of a request whose thread has been woken.
    fn collect(&self, range: ByteRange, mode: Mode, queued: L::Queued) -> L::Held {
        // The request is granted, so `cancel` returns the hold.
        self.raw.cancel(range, mode, queued).expect("woken when granted")
    }
}
