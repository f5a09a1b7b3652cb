//! The unevictable list: pages that write-back keeps, outside of the evictor's queues.
//!
//! Part of the eviction policy (see `evict`; compare Linux's LRU_UNEVICTABLE). Pages that are
//! DIRTY, under write-back or UNSTABLE (page.W4) cannot be evicted, and may be most of the cached
//! pages. In the queues the evictor would scan them again and again. The measurement is in
//! `docs/benchmarks.md`.
//!
//! ```text
//!   queue -- the evictor finds it unevictable --> list -- write-back ends --> tail of its queue
//!     |                                             |
//!     +-- evicted, truncated, torn down             +-- truncated, torn down
//! ```
//!
//! - **UN1** A queue node with UNEVICTABLE in its tags is on the list, and its tags name the queue
//!   to which it returns. The list is a queue like the others, under the same lock: code that
//!   removes a page from its word in another way than by eviction also removes its queue node from
//!   this list. So all pages on it are cached.
//! - **UN2** Evictable pages do not stay on the list. The evictor moves a page to the list, fences,
//!   and reads the word again. The thread that makes a page evictable changes the word, fences, and
//!   then reads its queue node ([`find_to_requeue`]). One of them sees the other. If the evictor
//!   finds that the page is not unevictable any more, it takes it back.
//! - **UN3** The thread that makes a page evictable holds no range lock, so it may fail to find the
//!   queue node: the page may be overwritten concurrently, and its new frame may not have the node
//!   yet (queue_node.QN2). It sets the [`RescanFlag`], and the evictor rescans the list before an
//!   eviction fails. Pages that are evictable, or in transition, return to their queues.
//! - **UN4** A queue node that was found is requeued later, under the lock, and may belong to
//!   another page by then. If it is on the list, it returns to its queue, where the evictor may
//!   find it unevictable again.
//!
//! Locks: the list is under the queues' lock; [`find_to_requeue`] acquires none.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use crate::cache::frames::{FrameMeta, Frames};
use crate::cache::policy::fifo::{
    BATCHED, Fifo, QUEUE, QueueName, UNEVICTABLE, class_of, queue_of,
};
use crate::cache::table::page::{Change, PageWord, Word};
use crate::sync::{AtomicBool, fence};
use crate::units::FrameIndex;

/// The list of unevictable pages.
#[derive(Default)]
pub(in crate::cache) struct UnevictableList {
    pub(in crate::cache) queue: Fifo,
    /// The bytes of the pages that return to each queue, by its name.
    bytes: [u64; 4],
    /// The number of pages that the current rescan has left.
    unscanned: u64,
}

impl UnevictableList {
    /// Adds a queue node that is not queued. It returns to `home`.
    pub(in crate::cache) fn insert(&mut self, frames: &Frames, home: QueueName, node: FrameIndex) {
        let meta = frames.meta(node);
        self.queue.push(frames, home, node);
        meta.set_tags(meta.tags() | UNEVICTABLE);
        self.bytes[home as usize] += class_of(meta).bytes() as u64;
    }

    /// Removes a queue node. Returns the queue to which it returns.
    pub(in crate::cache) fn remove(&mut self, frames: &Frames, node: FrameIndex) -> QueueName {
        let meta = frames.meta(node);
        let home = queue_of(meta);
        self.bytes[home as usize] -= class_of(meta).bytes() as u64;
        self.queue.unlink(frames, node);
        home
    }

    /// The bytes of pages that go back to `home`.
    pub(in crate::cache) fn bytes_of(&self, home: QueueName) -> u64 {
        self.bytes[home as usize]
    }

    /// The next page of a rescan. `None`: no rescan is needed (UN3).
    pub(in crate::cache) fn next_to_rescan(&mut self, rescan: &RescanFlag) -> Option<FrameIndex> {
        if self.unscanned == 0 && rescan.take() {
            self.unscanned = self.queue.frames;
        }
        // Some may have been removed since, and added ones are at the tail.
        self.unscanned = self.unscanned.min(self.queue.frames).checked_sub(1)?;
        Some(FrameIndex(self.queue.head))
    }

    /// The number of pages of a rescan in progress.
    pub(in crate::cache) fn frames_to_rescan(&self) -> u64 {
        if self.unscanned > 0 { self.queue.frames } else { 0 }
    }
}

/// Whether the list may have evictable pages (UN3).
pub(crate) struct RescanFlag(AtomicBool);

impl RescanFlag {
    pub(crate) fn new() -> RescanFlag {
        RescanFlag(AtomicBool::new(false))
    }

    pub(in crate::cache) fn set(&self) {
        // Relaxed: `find_to_requeue` has fenced since the page became evictable, and a rescan
        // fences in `is_still_unevictable` before it reads a word. So it finds the page evictable.
        self.0.store(true, Relaxed);
    }

    /// Whether a rescan is needed; the caller makes it.
    pub(in crate::cache) fn take(&self) -> bool {
        // The read saves the write. Relaxed: as above.
        self.0.load(Relaxed) && self.0.swap(false, Relaxed)
    }
}

/// Whether a page that was just added to the list may stay there (UN2). `find` loads its word,
/// unless the page is in transition.
pub(in crate::cache) fn is_still_unevictable(find: impl FnOnce() -> Option<Word>) -> bool {
    // Pairs with the fence of `find_to_requeue`: either the change of the word is seen here, or the
    // tag is seen there.
    fence(SeqCst);
    find().is_some_and(Word::is_unevictable)
}

/// The queue node to requeue after `change` was made to a page: if the change made the page
/// evictable, and it is on the list (UN2). `queue_node_of` gives the current queue node of a frame.
pub(in crate::cache) fn find_to_requeue<'f>(
    word: &PageWord,
    change: Change,
    rescan: &RescanFlag,
    queue_node_of: impl Fn(FrameIndex) -> FrameIndex,
    meta: impl FnOnce(FrameIndex) -> &'f FrameMeta,
) -> Option<FrameIndex> {
    if !change.was.is_unevictable() || change.now.is_unevictable() {
        return None;
    }
    // Pairs with the fence of `is_still_unevictable`.
    fence(SeqCst);
    let frame = change.now.frame();
    let node = queue_node_of(frame);
    let tags = meta(node).tags();
    // Acquire: pairs with the release of `describe`, if the queue node belongs to another page by
    // now. Then it was the spare node of the frame, which has been swapped for the page's, or the
    // frame has left the page. If neither is seen here, the node belonged to the frame while the
    // frame was in the page: the page's own node, or still a spare one, which is not queued
    // (queue_node.QN3).
    fence(Acquire);
    let is_sure = word.is_unchanged(change.now) && queue_node_of(frame) == node;
    if !is_sure || tags & (QUEUE | BATCHED) == 0 {
        rescan.set();
        return None;
    }
    (tags & UNEVICTABLE != 0).then_some(node)
}
