//! The lock that all faces share: an implementation, and how a thread waits for its answer.
//!
//! `guard` releases what is taken here, `future` takes it without a thread, and `face` is what callers
//! call.

use std::time::Instant;

use crate::range::{ByteRange, Mode};
use crate::raw::{RawRangeLock, Request};
use crate::striped::Striped;
use crate::wait::{Backoff, ThreadWait};

/// Locks on ranges of bytes, shared or exclusive.
///
/// - **Exact**: requests for ranges that share no byte never wait for each other.
/// - **Fair**: a request waits for what is held and for every conflicting request that queued
///   before it, and for nothing that came after; so neither readers nor writers starve. (A thread
///   spins for a few microseconds before it queues, unless others wait already.)
/// - **Free of threads**: a [`Guard`](crate::Guard) may be moved to, and released by, any thread.
///
/// A lock neither orders nor checks several guards of one caller: a caller that holds a range and then
/// waits for an overlapping one waits for itself, and two that lock several ranges in different
/// orders may wait for each other. Debug builds report a thread that waits for its own guard.
///
/// `L` is the implementation: [`Striped`], unless it is to be compared with another.
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

    /// Tries again for some microseconds, unless others wait already.
    ///
    /// A short hold is over before a queue is built and taken down, and while nobody queues,
    /// holders need no hand-over: so two threads that fight for one range take turns of hundreds
    /// of holds each, rather than of one. It is the only way to be overtaken, and bounded by its
    /// time.
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
        // `request` asked for the notification before it queued.
        let wait = wait.expect("a queued request has somebody to tell");
        #[cfg(debug_assertions)]
        self.report_self_deadlock(range, mode, &queued, &wait);
        self.wait(&queued, &wait, None);
        self.collect(range, mode, queued)
    }

    /// Waits until told; false when `deadline` has passed first.
    fn wait(&self, queued: &L::Queued, wait: &ThreadWait, deadline: Option<Instant>) -> bool {
        let Some(patience) = L::patience(queued) else {
            return wait.wait(deadline);
        };
        loop {
            let now = Instant::now();
            if deadline.is_some_and(|deadline| deadline <= now) {
                return wait.wait(deadline);
            }
            // No bound where the clock has none.
            let soon = now.checked_add(patience);
            if wait.wait(deadline.into_iter().chain(soon).min()) {
                return true;
            }
            self.raw.expire();
        }
    }

    /// Says so if this thread turns out to wait for itself.
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
                let wait = wait.expect("a queued request has somebody to tell");
                if self.wait(&queued, &wait, Some(deadline)) {
                    Some(self.collect(range, mode, queued))
                } else {
                    // A grant that races with the timeout is a grant.
                    self.raw.cancel(range, mode, queued)
                }
            }
        }
    }

    /// Turns a request that has been told of its grant into a hold.
    fn collect(&self, range: ByteRange, mode: Mode, queued: L::Queued) -> L::Held {
        // There is nothing left to cancel.
        self.raw.cancel(range, mode, queued).expect("told when granted")
    }
}
