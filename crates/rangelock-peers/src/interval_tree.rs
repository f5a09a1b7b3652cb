//! An interval tree under one lock, as Davidlohr Bueso proposed for Linux.
//!
//! All requests, held and waiting, are nodes of one tree that is ordered by start and records the largest end below each
//! node. A request counts the conflicting nodes and waits until the count reaches zero. The lock is exact and fair. Its
//! limit: every operation is a critical section of two or three tree walks, so one processor at a time runs it.
//!
//! The tree is the queue of the other implementations (`queue`), without a front.

use std::time::Duration;

use millpond_rangelock::parts::sync::{Mutex, MutexGuard, lock};
use millpond_rangelock::parts::{Notify, Queue, Ticket, unlock_and_wake};
use millpond_rangelock::{ByteRange, Mode, RawRangeLock, Request};

/// An interval tree under a mutex.
///
/// ```
/// use millpond_rangelock::{ByteRange, Mode, RangeLock};
/// use millpond_rangelock_peers::IntervalTree;
/// let lock = RangeLock::<IntervalTree>::with_raw();
/// let guard = lock.lock(ByteRange::ALL, Mode::Shared);
/// ```
#[derive(Debug)]
pub struct IntervalTree {
    queue: Mutex<Queue>,
}

impl Default for IntervalTree {
    fn default() -> IntervalTree {
        IntervalTree { queue: Mutex::new(Queue::default()) }
    }
}

impl IntervalTree {
    #[inline]
    fn insert(
        &self,
        range: ByteRange,
        mode: Mode,
        notify: &mut Option<Notify>,
    ) -> Option<Request<Ticket, Ticket>> {
        let mut queue = lock(&self.queue);
        let request = queue.insert(range, mode, 0, notify);
        self.unlock(queue);
        request
    }

    fn unlock(&self, queue: MutexGuard<'_, Queue>) {
        unlock_and_wake(&self.queue, queue, |queue| queue);
    }
}

impl RawRangeLock for IntervalTree {
    type Held = Ticket;
    type Queued = Ticket;

    const NAME: &'static str = "interval-tree";

    fn request(
        &self,
        range: ByteRange,
        mode: Mode,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Ticket, Ticket> {
        self.insert(range, mode, &mut None).unwrap_or_else(|| {
            self.insert(range, mode, &mut Some(notify())).expect("a waiter was passed")
        })
    }

    fn try_request(&self, range: ByteRange, mode: Mode) -> Option<Ticket> {
        match self.insert(range, mode, &mut None)? {
            Request::Granted(held) => Some(held),
            Request::Queued(_) => unreachable!("queued without a waiter"),
        }
    }

    fn patience(queued: &Ticket) -> Option<Duration> {
        queued.patience()
    }

    fn set_offer_grace(&self, grace: Duration) {
        lock(&self.queue).set_grace(grace);
    }

    fn expire(&self) {
        let mut queue = lock(&self.queue);
        queue.expire();
        self.unlock(queue);
    }

    fn poll(
        &self,
        _range: ByteRange,
        _mode: Mode,
        queued: Ticket,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Ticket, Ticket> {
        let mut notify = Some(notify());
        let mut queue = lock(&self.queue);
        let request = queue.poll(queued, 0, &mut notify);
        self.unlock(queue);
        request
    }

    fn cancel(&self, _range: ByteRange, _mode: Mode, queued: Ticket) -> Option<Ticket> {
        let mut queue = lock(&self.queue);
        if queue.is_granted(&queued) {
            return Some(queued);
        }
        let notify = queue.remove(queued);
        self.unlock(queue);
        drop(notify);
        None
    }

    fn release(&self, _range: ByteRange, _mode: Mode, held: Ticket) {
        let mut queue = lock(&self.queue);
        drop(queue.remove(held));
        self.unlock(queue);
    }

    fn try_upgrade(&self, _range: ByteRange, held: &mut Ticket) -> bool {
        lock(&self.queue).try_upgrade(held)
    }

    fn downgrade(&self, _range: ByteRange, held: &mut Ticket) {
        let mut queue = lock(&self.queue);
        queue.downgrade(held);
        self.unlock(queue);
    }
}
