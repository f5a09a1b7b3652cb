//! Seats: where a page waits in the eviction queues, whatever frame it has.
//!
//! The queues link metadata, not frames. Each frame has one *seat*, the metadata of some frame: its own
//! at first. A write that puts a fresh frame in a page's place swaps the two frames' seats, so the
//! page keeps its seat, and with it its place in the queue: nothing that is linked changes, no neighbour
//! is written, and the queues' lock is not taken.
//!
//! - **QN1** Seats are a permutation of frames: of two that are swapped nobody else has one in hand. One
//!   is in the page's word, put there by the holder of an exclusive guard over it; the other has left
//!   it, and is not free yet.
//! - **QN2** The evictor goes from a queued seat to the page, its word, and the frame in it. That frame
//!   has this seat, or else the page is in transition: its writer has put the frame in place, and
//!   not swapped yet. A frame with this seat is there for good, as far as its writer is
//!   concerned: that has done its last to it. (What the evictor takes is the word that it looked at,
//!   with its version: one of after 2^27 more writes of the page is not told from it, all of them between
//!   its look at the seat and its next instructions.)
//! - **QN3** The seat of a frame that is in no queue belongs to the frame's owner, as the frame does.
//!
//! Locks: none.

use std::sync::atomic::Ordering::Relaxed;

use crate::sync::AtomicU32;
use crate::units::FrameIndex;

/// The seat of a frame, as its distance (by exclusive or) from the frame: memory that was never written
/// says that each has its own.
#[repr(transparent)]
pub(crate) struct QueueNode(AtomicU32);

impl QueueNode {
    #[cfg(loom)]
    pub(crate) fn own() -> QueueNode {
        QueueNode(AtomicU32::new(0))
    }

    /// The seat of `frame`, whose this is.
    #[inline]
    pub(crate) fn of(&self, frame: FrameIndex) -> FrameIndex {
        // Relaxed: who has found the frame in a word (by an acquire) sees the swaps of before it was put
        // there; the one that is not seen yet is QN2's transition. An evictor that sees the seat of a page
        // gives its frame away, and whoever has that then sees no older one.
        FrameIndex(self.0.load(Relaxed) ^ frame.0)
    }

    /// Swaps the seats of two frames (QN1): `old`, whose this is, and `new`, which has taken its place.
    #[inline]
    pub(crate) fn swap(&self, old: FrameIndex, news: &QueueNode, new: FrameIndex) {
        // Relaxed: both are the caller's, but for an evictor's look at the new frame's. Who is given the
        // old frame sees all.
        let (page, spare) = (self.0.load(Relaxed) ^ old.0, news.0.load(Relaxed) ^ new.0);
        self.0.store(spare ^ old.0, Relaxed);
        news.0.store(page ^ new.0, Relaxed);
    }
}
