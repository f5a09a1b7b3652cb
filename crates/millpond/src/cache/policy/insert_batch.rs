//! InsertBatch: pages that became READY, before they are put into the queues of the evictor.
//!
//! The queues have one lock, so pages come into them in batches. Until then a page's node (see `node`) is
//! in a list of the thread that brought it, and carries BATCHED in its tags.
//!
//! - **IB1** The tag says whether the node is a newcomer's, under the queues' lock; the lists only say where
//!   to look. Whoever takes the page out clears the tag, and leaves the entry. So an entry may be of a
//!   node that is none any more, or is one again, with an entry in another list: the first list that is
//!   emptied has it put into a queue.
//! - **IB2** Owner and page are written before the tag (Release), by the thread that fills the page; whoever
//!   finds the tag (Acquire) finds them.
//! - **IB3** InsertBatch can't be evicted. They are few (magazine.MG3, of which this is as much again), and
//!   before somebody is told that nothing can go, all lists are emptied.
//!
//! Locks: one for each list; the queues' is taken under it.

use std::sync::{Mutex, MutexGuard};

use crossbeam_utils::CachePadded;

use crate::thread;
use crate::units::FrameIndex;

/// Half as many pages as the evictor looks at in one hold of the queues' lock.
pub(in crate::cache) const INSERT_BATCH_MAX: usize = 32;

/// The newcomers of some threads.
pub(in crate::cache) struct InsertBatch {
    nodes: [FrameIndex; INSERT_BATCH_MAX],
    len: usize,
}

impl InsertBatch {
    pub(in crate::cache) fn new() -> InsertBatch {
        InsertBatch { nodes: [FrameIndex::NONE; INSERT_BATCH_MAX], len: 0 }
    }

    /// Adds one; how many there are now. The caller empties it at [`INSERT_BATCH_MAX`].
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

    /// The calling thread's.
    pub(in crate::cache) fn mine(&self) -> MutexGuard<'_, InsertBatch> {
        Self::lock(&self.0[thread::shard_of(self.0.len())])
    }

    pub(in crate::cache) fn all(&self) -> impl Iterator<Item = MutexGuard<'_, InsertBatch>> {
        self.0.iter().map(|list| Self::lock(list))
    }

    fn lock(list: &Mutex<InsertBatch>) -> MutexGuard<'_, InsertBatch> {
        list.lock().expect("no panic under the lock")
    }
}
