//! The shelf: pages that write-back keeps, out of the evictor's way until it lets them go.
//!
//! Part of the eviction policy (see `evict`). Pages that are kept (page.W4) can't go, and may be most of what
//! is cached. In the queues they were looked at over and over: a quarter of all processor time, where
//! 8 threads read and 8 wrote at random in a file of four caches (14.2 µs an operation, 10.3 without).
//!
//! ```text
//!   queue --- the evictor finds it kept ---> shelf --- write-back lets it go ---> end of its queue
//!     |                                        |
//!     +-- evicted, cut off, torn down          +-- cut off, torn down
//! ```
//!
//! - **UN1** A node with UNEVICTABLE in its tags is on the shelf, and the tags name the queue that it goes back to.
//!   The shelf is a queue like the others, under the same lock: what takes a page out of its word by
//!   another way than eviction takes its node off here, too. So nothing is on it that is not cached.
//! - **UN2** A page that is not kept is not left on it: the evictor puts a kept page there, fences, and
//!   looks at the word again; who lets a page go changes the word, fences, and then looks at its node
//!   ([`find`]). One of them finds the other. A page that the evictor does not find kept in its place, it
//!   takes back.
//! - **UN3** Who lets a page go has no guard over it, and may not find its node: the page is overwritten
//!   meanwhile, and its new frame has not got the node yet (queue_node.QN2). It says that there are [`RescanFlag`]
//!   then, and the evictor goes through the shelf before it says that nothing can go. What is not kept, or
//!   is in transition, goes back to its queue.
//! - **UN4** A node that was found is taken off later, under the lock, and may be of another page then: if it
//!   is on the shelf, it goes back to its queue, where the evictor finds it kept again.
//!
//! Locks: the shelf is under the queues' lock; [`find`] takes none.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use crate::cache::frames::{FrameMeta, Frames};
use crate::cache::policy::fifo::{
    BATCHED, Fifo, QUEUE, QueueName, UNEVICTABLE, class_of, queue_of,
};
use crate::cache::table::page::{Change, PageWord, Word};
use crate::sync::{AtomicBool, fence};
use crate::units::FrameIndex;

/// The shelf.
#[derive(Default)]
pub(in crate::cache) struct UnevictableList {
    pub(in crate::cache) queue: Fifo,
    /// The bytes of the pages that go back to each queue, by its name.
    bytes: [u64; 4],
    /// How many are to be looked at for rescan still.
    unscanned: u64,
}

impl UnevictableList {
    /// Puts a node that is in no queue there; it goes back to `home`.
    pub(in crate::cache) fn insert(&mut self, frames: &Frames, home: QueueName, node: FrameIndex) {
        let meta = frames.meta(node);
        self.queue.push(frames, home, node);
        meta.set_tags(meta.tags() | UNEVICTABLE);
        self.bytes[home as usize] += class_of(meta).bytes() as u64;
    }

    /// Takes a node off; where it goes back to.
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

    /// The next page to be looked at for rescan; `None`: there are none (UN3).
    pub(in crate::cache) fn next_to_rescan(&mut self, rescan: &RescanFlag) -> Option<FrameIndex> {
        if self.unscanned == 0 && rescan.take() {
            self.unscanned = self.queue.frames;
        }
        // Some may have been taken off meanwhile, and those that came are at the end.
        self.unscanned = self.unscanned.min(self.queue.frames).checked_sub(1)?;
        Some(FrameIndex(self.queue.head))
    }

    /// How many pages are to be looked at, where it is gone through.
    pub(in crate::cache) fn frames_to_rescan(&self) -> u64 {
        if self.unscanned > 0 { self.queue.frames } else { 0 }
    }
}

/// Whether pages may be on the shelf that nobody keeps (UN3).
pub(crate) struct RescanFlag(AtomicBool);

impl RescanFlag {
    pub(crate) fn new() -> RescanFlag {
        RescanFlag(AtomicBool::new(false))
    }

    pub(in crate::cache) fn set(&self) {
        // Relaxed: `find` has fenced since the page was let go of, and who goes through the shelf does, in
        // `is_still_unevictable`, before it looks at a word: so it finds the page let go of.
        self.0.store(true, Relaxed);
    }

    /// Whether there are; the caller goes through the shelf.
    pub(in crate::cache) fn take(&self) -> bool {
        // The look spares the write. Relaxed: as above.
        self.0.load(Relaxed) && self.0.swap(false, Relaxed)
    }
}

/// Whether a page that was just put on the shelf may stay there (UN2). `find` loads its word, if that is in no
/// transition.
pub(in crate::cache) fn is_still_unevictable(find: impl FnOnce() -> Option<Word>) -> bool {
    // Pairs with that of `find`: either what let the page go is seen, or the tag is seen there.
    fence(SeqCst);
    find().is_some_and(Word::is_unevictable)
}

/// The node of a page of which `change` was made, to be taken off the shelf: if write-back let it go so, and it
/// is there (UN2). `queue_node_of` gives the node that a frame has now.
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
    // Pairs with that of `is_still_unevictable`.
    fence(SeqCst);
    let frame = change.now.frame();
    let node = queue_node_of(frame);
    let tags = meta(node).tags();
    // Acquire: pairs with the release of `describe`, if the node is another page's by now. Then it was the
    // frame's spare one, which has been swapped for the page's, or the frame has left the page. If
    // neither is seen here, it was the frame's while it was in the page: the page's own, or a spare one
    // still, which is in no queue (queue_node.QN3).
    fence(Acquire);
    let is_sure = word.is_unchanged(change.now) && queue_node_of(frame) == node;
    if !is_sure || tags & (QUEUE | BATCHED) == 0 {
        rescan.set();
        return None;
    }
    (tags & UNEVICTABLE != 0).then_some(node)
}
