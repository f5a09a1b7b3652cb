//! Protocol steps that take more than one atomic operation: the transitions of `page` and the
//! counts of `pin`, together with their fences.
//!
//! The engine and the loom models call the same functions, so a fence that is missing here fails a
//! model.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use crate::cache::frames::pin::Pins;
use crate::cache::table::epoch::Epoch;
use crate::cache::table::link::Link;
use crate::cache::table::page::{PageWord, Word};
use crate::sync::{AtomicU64, fence};

/// Last step of a lock-free read, after the copy: whether all `words` are unchanged, so that the
/// copy is consistent with the moment at which the size was loaded. `leaves`: the leaves of the
/// words.
#[inline(always)]
#[must_use]
pub(crate) fn is_consistent<'a>(
    words: impl IntoIterator<Item = (&'a PageWord, Word)>,
    leaves: impl IntoIterator<Item = Followed<'a>>,
    epoch: &Epoch,
    begun: u64,
) -> bool {
    // Keeps the copy above the second loads. Pairs with the release fence of `begin_reuse`.
    fence(Acquire);
    // No branch before the last one: usually nothing has changed.
    let same = words.into_iter().fold(true, |all, (word, seen)| all & word.is_unchanged(seen));
    // epoch.V2, epoch.V4: pairs with the release of the RMW that wrote a word that was just loaded
    // again. If the word belongs to the next life of the leaf, the slot is seen as it was before
    // that.
    fence(Acquire);
    let same = leaves.into_iter().fold(same, |all, leaf| all & leaf.is_unchanged());
    same & epoch.is_unchanged(begun)
}

/// A page whose leaf is held, looked at by a thread that copies from its frame.
pub(crate) struct HeldPage<'a> {
    word: &'a PageWord,
    pub(crate) seen: Word,
    epoch: &'a Epoch,
    begun: u64,
}

impl<'a> HeldPage<'a> {
    #[inline]
    pub(crate) fn begin(word: &'a PageWord, epoch: &'a Epoch) -> HeldPage<'a> {
        let begun = epoch.begin();
        HeldPage { word, seen: word.load(), epoch, begun }
    }

    /// Copies from the frame of the page, which was READY and is not written concurrently. `None`: the page was
    /// evicted, and the frame may have been reused, also if the page has its frame and version again (epoch.V2).
    #[inline]
    #[must_use]
    pub(crate) fn copy_if_unchanged<T>(&self, copy: impl FnOnce() -> T) -> Option<T> {
        let copied = copy();
        // As in `is_consistent`.
        fence(Acquire);
        let is_same = self.word.is_unchanged(self.seen);
        // As in `is_consistent`: the epoch that rose before the word was written is visible.
        fence(Acquire);
        (is_same & self.epoch.is_unchanged(self.begun)).then_some(copied)
    }
}

/// Called after a frame was taken, before its first byte is written. A late reader that sees a byte
/// written from here on also sees, after the acquire fence that follows its copy, that the frame
/// has left its page.
#[inline]
pub(crate) fn begin_reuse() {
    fence(Release);
}

/// The pages that one operation hides before it becomes visible.
#[must_use]
pub(crate) struct Hiding<'a> {
    epoch: &'a Epoch,
    any: bool,
}

impl<'a> Hiding<'a> {
    pub(crate) fn new(epoch: &'a Epoch) -> Hiding<'a> {
        Hiding { epoch, any: false }
    }

    /// See [`PageWord::hide`].
    pub(crate) fn hide(&mut self, word: &PageWord) -> Word {
        self.any = true;
        word.hide(self.epoch)
    }

    /// All pages are hidden: a thread that sees a later effect of the operation finds none of the
    /// old pages.
    pub(crate) fn finish(self) {
        // If no page was hidden, no old page can be found.
        if self.any {
            // After the RMWs that hid pages, before any effect of the operation becomes visible.
            fence(SeqCst);
        }
    }
}

/// The size of a file. Its load is the linearization point of a lock-free read.
#[repr(transparent)]
pub(crate) struct FileSize(AtomicU64);

impl FileSize {
    pub(crate) fn new(size: u64) -> FileSize {
        FileSize(AtomicU64::new(size))
    }

    #[inline]
    pub(crate) fn get(&self) -> u64 {
        // Acquire: pairs with the release of `set`: a reader that sees a size sees the pages that
        // were hidden before.
        self.0.load(Acquire)
    }

    /// A possibly old size, to be compared with [`FileSize::get`].
    #[inline]
    pub(crate) fn hint(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Caller: holds an exclusive guard to the end of the file (write.W5).
    pub(crate) fn set(&self, size: u64) {
        // Release: pages that were hidden before are seen with the new size.
        self.0.store(size, Release);
        // Before the operation returns: otherwise two operations that then look for each other's
        // changes could both miss them.
        fence(SeqCst);
    }
}

/// A place where a node is linked: the root of a page table, or a slot of an inner node.
#[repr(transparent)]
pub(crate) struct LinkSlot(AtomicU64);

impl LinkSlot {
    pub(crate) fn new(link: u64) -> LinkSlot {
        LinkSlot(AtomicU64::new(link))
    }

    #[inline]
    pub(crate) fn follow(&self) -> u64 {
        // Acquire: pairs with the release of `try_link`, so that the zeroed node is visible.
        self.0.load(Acquire)
    }

    /// For a table that no other thread uses, or a slot that is not changed concurrently.
    pub(crate) fn peek(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// For a node that is not linked yet.
    pub(crate) fn init(&self, link: u64) {
        self.0.store(link, Relaxed);
    }

    /// Links a node, or unlinks a root. `Err`: the current link, if it is not `seen`.
    pub(crate) fn try_link(&self, seen: u64, link: u64) -> Result<(), u64> {
        // Release: pairs with `follow`. Argued: the acquire parts, as a thread that finds a link
        // here follows it again when it holds the node.
        self.0.compare_exchange(seen, link, AcqRel, Acquire).map(drop)
    }

    /// Records a predicted frame in a link (see `table`). If the link has changed, the record is
    /// lost.
    pub(crate) fn note(&self, seen: u64, link: u64) {
        // Relaxed: a prediction orders nothing.
        let _ = self.0.compare_exchange(seen, link, Relaxed, Relaxed);
    }

    /// Unlinks a node from an inner node, so that late readers notice it (epoch.V3, epoch.V4).
    /// Caller: has killed the node that the slot names, and holds the inner node.
    pub(crate) fn unlink(&self, is_leaf: bool, epoch: &Epoch) {
        // No other thread changes the slot: predictions are recorded by holders.
        let unlinked = Link(self.peek()).unlinked();
        if unlinked.is_at_turn() {
            epoch.raise();
        }
        // Release: pairs with the acquire of `Followed::is_unchanged`, so that the epoch which rose
        // when the generation wrapped is seen with it; and with the acquire of `try_link`, which
        // passes it on.
        self.0.store(unlinked.0, Release);
        if !is_leaf {
            epoch.raise();
        }
    }

    /// Caller: the last user of the table.
    pub(crate) fn take(&self) -> u64 {
        // Argued: no other thread uses the table.
        self.0.swap(0, AcqRel)
    }
}

/// The link by which a lock-free read has reached a leaf.
#[derive(Clone, Copy)]
pub(crate) struct Followed<'c> {
    slot: &'c LinkSlot,
    link: Link,
}

impl<'c> Followed<'c> {
    #[inline]
    pub(crate) fn new(slot: &'c LinkSlot) -> Followed<'c> {
        Followed { slot, link: Link(slot.follow()) }
    }

    /// As if it had been followed.
    #[cfg(all(test, loom))]
    pub(in crate::cache) fn of(slot: &'c LinkSlot, link: Link) -> Followed<'c> {
        Followed { slot, link }
    }

    #[inline]
    pub(in crate::cache) fn link(self) -> Link {
        self.link
    }

    #[cfg(test)]
    pub(crate) fn node(self) -> crate::units::FrameIndex {
        self.link().node()
    }

    /// Whether the leaf has been linked there all the time (epoch.V4), or the epoch shows that it
    /// has not. Caller: has loaded words of the leaf by Acquire, or has fenced since.
    #[inline]
    pub(in crate::cache) fn is_unchanged(self) -> bool {
        // Acquire: pairs with the release of `unlink`. If the generation has wrapped, the raised
        // epoch, which is compared next, is visible.
        Link(self.slot.0.load(Acquire)).same_generation(self.link)
    }
}

/// Holds the leaf that a lock-free lookup, begun in epoch `begun`, has reached, without holds of
/// the nodes above. False: it is dead, or not linked there any more (table.T2).
#[must_use]
pub(crate) fn try_hold_followed(
    holds: &Pins,
    leaf: Followed<'_>,
    epoch: &Epoch,
    begun: u64,
) -> bool {
    if !holds.try_hold() {
        return false;
    }
    // If the hold was taken in another life of the leaf, its acquire makes the changed slot or
    // epoch visible.
    let is_linked = leaf.is_unchanged() && epoch.is_unchanged(begun);
    if !is_linked {
        holds.unhold();
    }
    is_linked
}

/// Holds the node that `slot` linked. False: it is dead, or not linked there any more (table.T2).
#[must_use]
pub(crate) fn try_hold_linked(
    holds: &Pins,
    slot: &LinkSlot,
    is_same: impl FnOnce(u64) -> bool,
) -> bool {
    if !holds.try_hold() {
        return false;
    }
    let is_linked = is_same(slot.follow());
    if !is_linked {
        holds.unhold();
    }
    is_linked
}
