//! A B-tree with optimistic lock coupling (OLC): Dave Chinner's second proposal, after Leis and others.
//!
//! Requests descend by comparing versions, without writing to any node above the leaf, and lock only the leaf that they
//! change. Epoch-based reclamation frees nodes. So requests in different leaves run concurrently. But with few held ranges
//! there is one leaf, and all requests write its version.
//!
//! The front is the tree (`tree`) of disjoint held ranges. Other requests go to the queue under a mutex. While the queue
//! has an entry, the gate is set, and every change of the tree is made under the mutex as well. So blockers can be counted
//! (queue.Q3).

#[cfg(all(test, loom))]
mod loom_tests;
mod node;
mod tree;

use std::time::Duration;

use millpond_rangelock::parts::sync::atomic::Ordering;
use millpond_rangelock::parts::sync::{Mutex, MutexGuard, lock};
use millpond_rangelock::parts::{Notify, Queue, Ticket, unlock_and_wake};
use millpond_rangelock::{ByteRange, Mode, RawRangeLock, Request};
use node::EXCLUSIVE;
use tree::{Outcome, Tree};

/// A B-tree with optimistic lock coupling.
///
/// ```
/// use millpond_rangelock::{ByteRange, Mode, RangeLock};
/// use millpond_rangelock_peers::OlcBTree;
/// let lock = RangeLock::<OlcBTree>::with_raw();
/// let guard = lock.lock(ByteRange::ALL, Mode::Shared);
/// ```
#[derive(Debug)]
pub struct OlcBTree {
    tree: Tree,
    queue: Mutex<Queue>,
}

/// Where a guard's range is held.
#[derive(Debug)]
pub enum OlcBTreeHold {
    /// In the tree.
    Tree,
    /// In the queue.
    Queue(Ticket),
}

impl Default for OlcBTree {
    fn default() -> OlcBTree {
        OlcBTree { tree: Tree::new(), queue: Mutex::new(Queue::default()) }
    }
}

impl OlcBTree {
    /// Locks the mutex and sets the gate.
    fn lock_gated(&self) -> MutexGuard<'_, Queue> {
        let queue = lock(&self.queue);
        // Relaxed: the leaf locks order it (tree.O5).
        self.tree.gate.store(1, Ordering::Relaxed);
        queue
    }

    /// Ends a critical section: opens the gate if the queue is empty.
    fn unlock_queue(&self, queue: MutexGuard<'_, Queue>) {
        if queue.is_empty() {
            // Release: pairs with the Acquire in `Tree::insert`.
            self.tree.gate.store(0, Ordering::Release);
        }
        unlock_and_wake(&self.queue, queue, |queue| queue);
    }

    fn conflicts(&self, range: ByteRange, mode: Mode) -> u32 {
        let mut count = 0;
        self.tree.for_each_overlap(range, |record| {
            count += match (record.shares, mode) {
                (EXCLUSIVE, _) => 1,
                (shares, Mode::Exclusive) => shares,
                (_, Mode::Shared) => 0,
            };
        });
        count
    }

    #[cold]
    fn enqueue(
        &self,
        range: ByteRange,
        mode: Mode,
        notify: &mut Option<Notify>,
    ) -> Option<Request<OlcBTreeHold, Ticket>> {
        let mut queue = self.lock_gated();
        // No range enters the tree over a queue entry (queue.Q3).
        if !queue.overlaps(range) && self.tree.insert(range, mode, true) == Outcome::Done {
            self.unlock_queue(queue);
            return Some(Request::Granted(OlcBTreeHold::Tree));
        }
        let in_front = self.conflicts(range, mode);
        let request = queue.insert(range, mode, in_front, notify);
        self.unlock_queue(queue);
        Some(match request? {
            Request::Granted(ticket) => Request::Granted(OlcBTreeHold::Queue(ticket)),
            Request::Queued(ticket) => Request::Queued(ticket),
        })
    }

    #[cold]
    fn release_gated(&self, range: ByteRange, mode: Mode) {
        let mut queue = self.lock_gated();
        let removed = self.tree.remove(range, true);
        debug_assert_eq!(removed, Outcome::Done);
        queue.front_released(range, mode);
        self.unlock_queue(queue);
    }
}

impl RawRangeLock for OlcBTree {
    type Held = OlcBTreeHold;
    type Queued = Ticket;

    const NAME: &'static str = "olc-btree";

    #[inline]
    fn request(
        &self,
        range: ByteRange,
        mode: Mode,
        notify: impl FnOnce() -> Notify,
    ) -> Request<OlcBTreeHold, Ticket> {
        match self.tree.insert(range, mode, false) {
            Outcome::Done => Request::Granted(OlcBTreeHold::Tree),
            _ => self.enqueue(range, mode, &mut Some(notify())).expect("a waiter was passed"),
        }
    }

    fn try_request(&self, range: ByteRange, mode: Mode) -> Option<OlcBTreeHold> {
        if self.tree.insert(range, mode, false) == Outcome::Done {
            return Some(OlcBTreeHold::Tree);
        }
        match self.enqueue(range, mode, &mut None)? {
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
        let mut queue = self.lock_gated();
        queue.expire();
        self.unlock_queue(queue);
    }

    fn poll(
        &self,
        range: ByteRange,
        mode: Mode,
        queued: Ticket,
        notify: impl FnOnce() -> Notify,
    ) -> Request<OlcBTreeHold, Ticket> {
        let mut notify = Some(notify());
        let mut queue = self.lock_gated();
        let in_front = if queue.is_lapsed(&queued) { self.conflicts(range, mode) } else { 0 };
        let request = queue.poll(queued, in_front, &mut notify);
        self.unlock_queue(queue);
        match request {
            Request::Granted(ticket) => Request::Granted(OlcBTreeHold::Queue(ticket)),
            Request::Queued(ticket) => Request::Queued(ticket),
        }
    }

    fn cancel(&self, _range: ByteRange, _mode: Mode, queued: Ticket) -> Option<OlcBTreeHold> {
        let mut queue = self.lock_gated();
        if queue.is_granted(&queued) {
            return Some(OlcBTreeHold::Queue(queued));
        }
        let notify = queue.remove(queued);
        self.unlock_queue(queue);
        drop(notify);
        None
    }

    #[inline]
    fn release(&self, range: ByteRange, mode: Mode, held: OlcBTreeHold) {
        match held {
            OlcBTreeHold::Tree => {
                if self.tree.remove(range, false) == Outcome::Gated {
                    self.release_gated(range, mode);
                }
            }
            OlcBTreeHold::Queue(ticket) => {
                let mut queue = self.lock_gated();
                drop(queue.remove(ticket));
                self.unlock_queue(queue);
            }
        }
    }

    fn try_upgrade(&self, range: ByteRange, held: &mut OlcBTreeHold) -> bool {
        let mut queue = self.lock_gated();
        let upgraded = match held {
            OlcBTreeHold::Tree => {
                let upgraded =
                    queue.count_held(range) == 0 && self.tree.replace_shares(range, 1, EXCLUSIVE);
                if upgraded {
                    queue.front_upgraded(range);
                }
                upgraded
            }
            OlcBTreeHold::Queue(ticket) => {
                self.conflicts(range, Mode::Exclusive) == 0 && queue.try_upgrade(ticket)
            }
        };
        self.unlock_queue(queue);
        upgraded
    }

    fn downgrade(&self, range: ByteRange, held: &mut OlcBTreeHold) {
        let mut queue = self.lock_gated();
        match held {
            OlcBTreeHold::Tree => {
                let replaced = self.tree.replace_shares(range, EXCLUSIVE, 1);
                debug_assert!(replaced);
                queue.front_downgraded(range);
            }
            OlcBTreeHold::Queue(ticket) => queue.downgrade(ticket),
        }
        self.unlock_queue(queue);
    }
}
