//! Queue nodes: the position of a page in the eviction queues, which does not depend on its frame.
//!
//! The queues link metadata, not frames. Each frame has one *queue node*, the metadata of some
//! frame: initially its own. A write that replaces the frame of a page swaps the queue nodes of the
//! two frames. So the page keeps its queue node, and its position in the queue: no link changes, no
//! neighbour is written, and the queues' lock is not acquired.
//!
//! - **QN1** Queue nodes are a permutation of frames, and the swapping thread has exclusive access
//!   to both frames. One is in the page's word, put there by the holder of an exclusive guard over
//!   it; the other has left the word, and is not free yet.
//! - **QN2** The evictor goes from a queued node to the page, its word, and the frame in it. Either
//!   that frame has this queue node, or the page is in transition: its writer has put the frame in
//!   place, and has not swapped yet. If the frame has the node, its writer has finished with it.
//!   (The evictor's exchange compares the word that it read, with its version. It can be fooled
//!   only by exactly 2^27 further writes of the page between its read of the queue node and its
//!   next instructions.)
//! - **QN3** The queue node of a frame that is not queued belongs to the owner of the frame.
//!
//! Locks: none.

use std::sync::atomic::Ordering::Relaxed;

use crate::sync::AtomicU32;
use crate::units::FrameIndex;

/// The queue node of a frame, as its distance (by exclusive or) from the frame: in memory that was
/// never written, each frame has its own.
#[repr(transparent)]
pub(crate) struct QueueNode(AtomicU32);

impl QueueNode {
    #[cfg(loom)]
    pub(crate) fn own() -> QueueNode {
        QueueNode(AtomicU32::new(0))
    }

    /// The queue node of `frame`, which owns this value.
    #[inline]
    pub(crate) fn of(&self, frame: FrameIndex) -> FrameIndex {
        // Relaxed: a thread that found the frame in a word (by an acquire) sees the swaps that
        // preceded that. A swap that is not visible yet is the transition of QN2. An evictor that
        // sees the queue node of a page frees its frame, and the next owner sees no older node.
        FrameIndex(self.0.load(Relaxed) ^ frame.0)
    }

    /// Swaps the queue nodes of two frames (QN1): `old`, which owns this value, and `new`, which
    /// has replaced it.
    #[inline]
    pub(crate) fn swap(&self, old: FrameIndex, news: &QueueNode, new: FrameIndex) {
        // Relaxed: the caller owns both, except that an evictor may read that of the new frame. The
        // next owner of the old frame sees all.
        let (page, spare) = (self.0.load(Relaxed) ^ old.0, news.0.load(Relaxed) ^ new.0);
        self.0.store(spare ^ old.0, Relaxed);
        news.0.store(page ^ new.0, Relaxed);
    }
}
