//! Insert batches: pages that became READY and are not yet in the evictor's queues.
//!
//! The queues have one lock, so pages are inserted in batches (compare Linux's `folio_batch`).
//! Until then the queue node of a page is in a list of the thread that filled it, and has BATCHED
//! in its tags.
//!
//! - **IB1** The tag decides whether a queue node is in a batch, under the queues' lock; the lists
//!   only say where to look. The thread that removes the page clears the tag, and leaves the entry.
//!   So an entry may name a queue node that is not batched any more, or is batched again, with an
//!   entry in another list: the first list that is drained inserts it.
//! - **IB2** Owner and page are written before the tag (Release), by the thread that fills the
//!   page. A thread that finds the tag (Acquire) finds them.
//! - **IB3** Pages in batches cannot be evicted. They are few (at most as many as in magazine.MG3),
//!   and before an eviction fails, all lists are drained.
//!
//! Locks: one for each list; the queues' lock is acquired under it.

use std::sync::{Mutex, MutexGuard};

use crossbeam_utils::CachePadded;

use crate::sync::MutexExt;
use crate::thread;
use crate::units::FrameIndex;

/// Half as many pages as the evictor scans in one hold of the queues' lock.
pub(in crate::cache) const INSERT_BATCH_MAX: usize = 32;

/// The batch of some threads.
pub(in crate::cache) struct InsertBatch {
    nodes: [FrameIndex; INSERT_BATCH_MAX],
    len: usize,
}

impl InsertBatch {
    pub(in crate::cache) fn new() -> InsertBatch {
        InsertBatch { nodes: [FrameIndex::NONE; INSERT_BATCH_MAX], len: 0 }
    }

    /// Adds a queue node. Returns the length; the caller drains the batch at [`INSERT_BATCH_MAX`].
    pub(in crate::cache) fn push(&mut self, node: FrameIndex) -> usize {
        self.nodes[self.len] = node;
        self.len += 1;
        self.len
    }

    pub(in crate::cache) fn drain(&mut self) -> &[FrameIndex] {
        &self.nodes[..std::mem::take(&mut self.len)]
    }
}

pub(in crate::cache) struct InsertBatches(Box<[CachePadded<Mutex<InsertBatch>>]>);

impl InsertBatches {
    pub(in crate::cache) fn new() -> InsertBatches {
        let list = || CachePadded::new(Mutex::new(InsertBatch::new()));
        let lists = (0..thread::shards()).map(|_| list());
        InsertBatches(lists.collect())
    }

    /// The batch of the calling thread.
    pub(in crate::cache) fn local(&self) -> MutexGuard<'_, InsertBatch> {
        self.0[thread::shard_of(self.0.len())].acquire()
    }

    pub(in crate::cache) fn all(&self) -> impl Iterator<Item = MutexGuard<'_, InsertBatch>> {
        self.0.iter().map(|list| list.acquire())
    }
}
