//! The state that a queue shares with its operations in flight: the table of pending operations, and the
//! completions of open batches (rules queue.QU1 to queue.QU4 [queue](crate::queue)).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock};

use slab::Slab;

use crate::io::backend::shared_ring::SharedRing;
use crate::io::batch;
use crate::queue::request::{Completion, Request};
use crate::queue::waiting::QueueWaiters;
use crate::sync::MutexExt;

/// The initial capacity of a batch's completions.
const TOGETHER: usize = 32;
/// The maximum capacity that a thread keeps for its next batch. Chosen, not measured.
const SPARE_MAX: usize = 256;

/// The state that a queue shares with its operations in flight.
pub(super) struct Inner {
    pub(super) waiting: QueueWaiters<Completion>,
    /// The ring for reads that miss.
    pub(super) ring: Option<Arc<SharedRing>>,
    pub(super) capacity: usize,
    pub(super) eventfd: Arc<OnceLock<OwnedFd>>,
    pub(super) pending: Mutex<Slab<Pending>>,
}

/// The completions of a batch, and their queue.
type Arrived = (Arc<Inner>, VecDeque<Completion>);

thread_local! {
    /// The completions of the batch that this thread has open, to be published at its end (queue.QU4):
    /// rarely of more than one queue.
    static ARRIVED: RefCell<Vec<Arrived>> = const { RefCell::new(Vec::new()) };

    /// A buffer for the next batch.
    static SPARE: Cell<VecDeque<Completion>> = const { Cell::new(VecDeque::new()) };
}

/// A read in flight.
pub(super) trait Cancel: Send + Sync {
    /// Takes the request back; `None` if the read is done.
    fn cancel(&self) -> Option<Request>;
}

/// An operation that has not completed.
#[derive(Clone)]
pub(super) enum Pending {
    Read(u64, Arc<dyn Cancel>),
    /// Until a worker takes it.
    Job(u64, Arc<Mutex<Option<Request>>>),
}

impl Pending {
    pub(super) fn user_data(&self) -> u64 {
        match self {
            Pending::Read(user_data, _) | Pending::Job(user_data, _) => *user_data,
        }
    }

    /// Takes the request back, if no thread is running it.
    pub(super) fn cancel(&self) -> Option<Request> {
        match self {
            Pending::Read(_, task) => task.cancel(),
            Pending::Job(_, job) => take_request(job),
        }
    }
}

pub(super) fn take_request(job: &Mutex<Option<Request>>) -> Option<Request> {
    job.acquire().take()
}

impl Inner {
    /// Completes a pending operation. The caller has taken its request (queue.QU1).
    pub(super) fn finish(self: &Arc<Self>, number: usize, completion: Completion) {
        let pending = self.pending.acquire().remove(number);
        self.complete(completion);
        drop(pending);
    }

    #[inline]
    pub(super) fn complete(self: &Arc<Self>, completion: Completion) {
        let arrived = ARRIVED.try_with(ptr::from_ref);
        // An ending thread no longer has the list.
        let (true, Ok(arrived)) = (batch::is_open(), arrived) else {
            return self.waiting.complete(completion);
        };
        // SAFETY: the list belongs to this thread, which does not end before this function has returned. A
        // reference, as a closure would move the completion two more times.
        let mut arrived = unsafe { &*arrived }.borrow_mut();
        let place = match arrived.iter().position(|(queue, _)| Arc::ptr_eq(queue, self)) {
            Some(place) => place,
            None => self.begin_to_arrive(&mut arrived),
        };
        arrived[place].1.push_back(completion);
    }

    /// Adds an entry for this queue to the thread's batch, with the batch's first completion of the queue.
    #[cold]
    fn begin_to_arrive(self: &Arc<Self>, arrived: &mut Vec<Arrived>) -> usize {
        let mut list = SPARE.try_with(Cell::take).unwrap_or_default();
        list.reserve(TOGETHER);
        arrived.push((Arc::clone(self), list));
        let queue = Arc::clone(self);
        batch::defer(Box::new(move || queue.publish_arrived()));
        arrived.len() - 1
    }

    /// Publishes the completions of this thread's batch (queue.QU4).
    fn publish_arrived(&self) {
        let mine = ARRIVED.try_with(|arrived| {
            let mut arrived = arrived.borrow_mut();
            let place = arrived.iter().position(|(queue, _)| ptr::eq(&**queue, self))?;
            Some(arrived.swap_remove(place))
        });
        // If this was the last reference, the queue is dropped while nothing is borrowed.
        if let Ok(Some((_queue, mut list))) = mine {
            self.waiting.complete_all(&mut list);
            // Reuses the buffer, or the one that it was swapped for.
            if list.capacity() <= SPARE_MAX {
                let _ = SPARE.try_with(|spare| spare.set(list));
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(ring) = &self.ring {
            ring.retire();
        }
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (ready, inflight) = self.waiting.counts();
        f.debug_struct("Queue")
            .field("capacity", &self.capacity)
            .field("ready", &ready)
            .field("inflight", &inflight)
            .finish_non_exhaustive()
    }
}
