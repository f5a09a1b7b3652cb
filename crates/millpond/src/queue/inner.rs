//! What a queue shares with the operations that are under way: the table of them, and those that have
//! just ended (rules queue.U1 to queue.U4 [queue](crate::queue)).

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use slab::Slab;

use crate::io::backend::shared_ring::SharedRing;
use crate::io::batch;
use crate::queue::request::{Completion, Request};
use crate::queue::waiting::Waiting;

/// What a queue shares with the operations that are under way.
pub(super) struct Inner {
    pub(super) waiting: Waiting<Completion>,
    /// Where reads go that miss.
    pub(super) ring: Option<Arc<SharedRing>>,
    pub(super) capacity: usize,
    pub(super) eventfd: Arc<OnceLock<OwnedFd>>,
    pub(super) pending: Mutex<Slab<Pending>>,
    /// Complete, and to be told of at the end of a batch (queue.U4).
    pub(super) arrived: Mutex<VecDeque<Completion>>,
}

/// A read that is under way.
pub(super) trait Cancel: Send + Sync {
    /// Takes the request back; `None` if it is done.
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

    /// Takes the request back, if nobody has it in hand.
    pub(super) fn cancel(&self) -> Option<Request> {
        match self {
            Pending::Read(_, task) => task.cancel(),
            Pending::Job(_, job) => take_request(job),
        }
    }
}

pub(super) fn take_request(job: &Mutex<Option<Request>>) -> Option<Request> {
    job.lock().expect("no panic under the lock").take()
}

impl Inner {
    pub(super) fn pending(&self) -> MutexGuard<'_, Slab<Pending>> {
        self.pending.lock().expect("no panic under the lock")
    }

    /// Completes a pending operation. The caller took its request (queue.U1).
    pub(super) fn finish(self: &Arc<Self>, number: usize, completion: Completion) {
        let pending = self.pending().remove(number);
        self.complete(completion);
        drop(pending);
    }

    pub(super) fn complete(self: &Arc<Self>, completion: Completion) {
        if !batch::is_open() {
            return self.waiting.complete(completion);
        }
        let mut arrived = self.arrived();
        arrived.push_back(completion);
        let first = arrived.len() == 1;
        drop(arrived);
        if first {
            let queue = Arc::clone(self);
            batch::at_end(Box::new(move || queue.tell_arrived()));
        }
    }

    pub(super) fn arrived(&self) -> MutexGuard<'_, VecDeque<Completion>> {
        self.arrived.lock().expect("no panic under the lock")
    }

    /// Completes what arrived in the batches of threads that end fills (queue.U4).
    pub(super) fn tell_arrived(&self) {
        let mut arrived = std::mem::take(&mut *self.arrived());
        self.waiting.complete_all(&mut arrived);
        // Its memory serves again.
        let mut next = self.arrived();
        if next.capacity() == 0 {
            *next = arrived;
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
