//! Queue nodes: the position of a page in the eviction queues, which does not depend on its frame.
//!
//! The queues link metadata, not frames. Each frame has one *queue node*, the metadata of some
//! frame: initially its own. A write that replaces the frame of a page swaps the queue nodes of the
//! two frames. So the page keeps its queue node, and its position in the queue: no link changes, no
//! neighbour is written, and the queues' lock is not acquired.
//!
//! - **QN1** Queue nodes are a permutation of frames, except while frames are replaced. The writer
//!   holds an exclusive guard over the page. Before the fresh frame is in the word, the writer gives
//!   it the node of the page ([`QueueNode::inherit`]). Afterwards the old frame gets the spare node
//!   that the fresh one had. If the page was evicted before, the fresh frame gets it back.
//! - **QN2** So the frame in a READY word, or of a hidden page, always has the node of the page, for
//!   a thread that finds the word unchanged after it has read the node ([`of_page`]). (It can be
//!   fooled only by exactly 2^27 writes of the page in between.)
//! - **QN3** The queue node of a frame that is not queued belongs to the owner of the frame.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::cache::table::page::{PageState, PageWord};
use crate::sync::{AtomicU32, fence};
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
        // Relaxed: a thread that found the frame in a word (by an acquire) sees the node that it had
        // by then. See `of_page` for newer ones.
        FrameIndex(self.0.load(Relaxed) ^ frame.0)
    }

    /// Gives `frame`, which owns this value and is not in a word yet, the queue node `node` of a
    /// page. Returns the spare node.
    #[inline]
    pub(crate) fn inherit(&self, frame: FrameIndex, node: FrameIndex) -> FrameIndex {
        let spare = self.of(frame);
        self.set(frame, node);
        spare
    }

    /// Gives `frame`, which owns this value and is in no word, the queue node `node`.
    #[inline]
    pub(crate) fn set(&self, frame: FrameIndex, node: FrameIndex) {
        // Release: pairs with the fence of `of_page`. The frame has left its last page.
        self.0.store(node.0 ^ frame.0, Release);
    }
}

/// The queue node of a page. `None`: the page is not cached. `queue_node_of` gives the queue node of
/// a frame.
pub(in crate::cache) fn of_page(
    word: &PageWord,
    queue_node_of: impl Fn(FrameIndex) -> FrameIndex,
) -> Option<FrameIndex> {
    loop {
        let seen = word.load();
        let is_cached = matches!(seen.state(), PageState::Ready | PageState::Hidden);
        if !is_cached || seen.frame() == FrameIndex::NONE {
            return None;
        }
        let node = queue_node_of(seen.frame());
        // Pairs with the release of `set`: if the node is one that the frame got after it had left
        // the page, the changed word is seen.
        fence(Acquire);
        if word.is_unchanged(seen) {
            return Some(node);
        }
    }
}
