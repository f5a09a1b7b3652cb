//! The page table of a file: a radix tree of page words with 512 slots in each node.
//!
//! First stop of a read: from the number of a page to its word. The core of a file holds the root,
//! which names a node and the number of levels. With one level the root is a leaf. Leaves hold page
//! words, inner nodes the frame index of their children. Nodes are frames and count against the
//! memory limit.
//!
//! *Lock-free readers* ([`FileCore::lookup`]) walk down and write nothing. A node on their way may
//! be recycled at any moment, even for another file. Every value that they read is an index within
//! the address range or is rejected, so the walk stays in readable memory, and may end at a wrong
//! word. Two checks at the end of every lock-free read detect this: the slot that named the leaf
//! has another generation after a leaf was unlinked from it, and the file's epoch rises after any
//! other node is unlinked, before the node is used again (epoch.V4).
//!
//! *All other operations* hold the leaf that they work on ([`HeldLeaf`]):
//!
//! - **T1** The hold count of a node counts its users and its non-empty slots. So all nodes on the
//!   way to a held node, or to a word that is not EMPTY, are held as well, and a file without
//!   cached pages has no nodes.
//! - **T2** A hold is valid only if the slot that led to the node still names it afterwards.
//!   Usually the hold is taken on a leaf that a lock-free lookup found, and its checks of slot and
//!   epoch are used. So threads that work on different leaves write to no common memory. (When
//!   holds were taken from the root down, two misses in one file of several leaves wrote to the
//!   root's count twice each.) If there is no leaf, or it is dead, the walk starts again at the
//!   root, and holds each node while it takes a hold on the child.
//! - **T3** The last holder makes the node DEAD in the same step that drops its hold. Then it
//!   unlinks the node, raises the epoch unless the node was a leaf below another node, frees it,
//!   and drops the hold on the parent.
//!
//! *Predicted frames.* Pages that were filled together mostly have adjacent frames. A link to a
//! leaf carries the frame that the leaf's first page would have if all pages were adjacent to the
//! run that was filled last. From it [`FileCore::lookup`] predicts the frame of a page before the
//! word has arrived from memory.
//!
//! Locks: none.

pub(crate) mod page;

pub(crate) mod epoch;

pub(crate) mod step;

pub(in crate::cache) mod link;

pub(crate) mod wait_queue;

pub(crate) mod page_set;

use std::sync::atomic::Ordering::Relaxed;

use crate::cache::frames::class::Class;
use crate::cache::frames::frame_range::FrameRange;
use crate::cache::frames::{FrameSource, Frames};
use crate::cache::table::epoch::Epoch;
use crate::cache::table::link::Link;
use crate::cache::table::page::{PageState, PageWord, Word};
use crate::cache::table::step::{FileSize, Followed, LinkSlot, try_hold_followed, try_hold_linked};
use crate::copy;
use crate::sync::AtomicU64;
#[cfg(not(loom))]
use crate::units::UNIT_BYTES;
use crate::units::{FrameIndex, PageIndex};

const NODE_SHIFT: u32 = 9;
pub(crate) const SLOTS: usize = 1 << NODE_SHIFT;

#[cfg(not(loom))]
const _: () = assert!(SLOTS * size_of::<LinkSlot>() == UNIT_BYTES);

/// The fields of a file that a cached read needs. They are in a slab of the cache's address range,
/// so that they count against the limit. Cached reads do not write them.
#[repr(C, align(64))]
pub(crate) struct FileCore {
    /// In bytes.
    pub(crate) size: FileSize,
    root: LinkSlot,
    pub(crate) epoch: Epoch,
    /// Of the files that had this core (shared.SH5).
    generation: AtomicU64,
    /// Does not change once a file has the core.
    pub(crate) page_shift: u32,
}

type Node = [LinkSlot; SLOTS];

/// The result of a lock-free lookup of a page.
pub(crate) struct FoundSlot<'c> {
    pub(crate) word: &'c PageWord,
    /// The frame that the word is predicted to name.
    pub(crate) predicted: FrameIndex,
    pub(crate) leaf: Followed<'c>,
}

/// Why a leaf could not be held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HoldError {
    /// There is no leaf for the page, so the page is EMPTY.
    Absent,
    /// There is no memory for the missing nodes.
    NoMemory,
}

impl FileCore {
    pub(crate) fn new(size: u64, page_shift: u32) -> FileCore {
        FileCore {
            size: FileSize::new(size),
            root: LinkSlot::new(0),
            epoch: Epoch::new(),
            generation: AtomicU64::new(0),
            page_shift,
        }
    }

    /// The file is closed. Caller: has torn down the table.
    pub(crate) fn retire(&self) {
        // Relaxed: the raise of the epoch in `reopen`, and the size that is stored then, release it. One thread has the
        // core.
        self.generation.store(self.generation() + 1, Relaxed);
    }

    /// Another file, with pages of the same size, has the core from now on. Caller: it was retired.
    pub(crate) fn reopen(&self, size: u64) {
        // Before anything of the next file is visible (shared.SH5).
        self.epoch.raise();
        self.size.set(size);
    }

    /// The number of files that had the core before. Relaxed: compared after the epoch or the size was loaded.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    #[inline]
    pub(crate) fn page_bytes(&self) -> usize {
        1 << self.page_shift
    }

    /// The class of its pages' frames.
    pub(crate) fn page_class(&self) -> Class {
        Class::page(self.page_shift)
    }

    /// Whether this is a child of fork, and the file belongs to its parent. Then the core is all
    /// zeros (see `frames`, "Fork").
    pub(crate) fn is_the_parents(&self) -> bool {
        self.page_shift == 0
    }

    /// The word of `page`, or a wrong word if the table changed concurrently: the caller compares
    /// the leaf and the epoch at the end. `None`: the page is not cached.
    #[inline]
    pub(crate) fn lookup<'c>(
        &'c self,
        frames: &'c FrameRange,
        page: PageIndex,
    ) -> Option<FoundSlot<'c>> {
        let leaf = self.leaf_link(frames, page)?;
        let slot = slot_of(page, 0);
        let word = &words(frames, leaf.link().node())?[slot];
        Some(FoundSlot { word, predicted: leaf.link().predicted(slot, self.page_shift), leaf })
    }

    /// The words of the pages from `first` to `last` that are in the leaf of `first`. They may be
    /// wrong words, as for [`FileCore::lookup`].
    #[inline]
    pub(crate) fn lookup_several<'c>(
        &'c self,
        frames: &'c FrameRange,
        first: PageIndex,
        last: PageIndex,
    ) -> Option<(&'c [PageWord], Followed<'c>)> {
        let leaf = self.leaf_link(frames, first)?;
        let words = words(frames, leaf.link().node())?;
        let end = last.min(last_of_leaf(first));
        Some((&words[slot_of(first, 0)..=slot_of(end, 0)], leaf))
    }

    /// The leaf of `page` at the time of a lookup, its word, and the value of the word. The leaf
    /// may be recycled from then on. `None`: there is no leaf, or a node was recycled concurrently.
    pub(crate) fn lookup_leaf<'c>(
        &self,
        frames: &'c FrameRange,
        page: PageIndex,
    ) -> Option<(FrameIndex, &'c PageWord, Word)> {
        let begun = self.epoch.begin();
        let leaf = self.leaf_link(frames, page)?;
        let node = leaf.link().node();
        let word = &words(frames, node)?[slot_of(page, 0)];
        let seen = word.load();
        // Otherwise a node on the way may have been recycled, and the word may belong to another
        // page (T3).
        (leaf.is_unchanged() && self.epoch.is_unchanged(begun)).then_some((node, word, seen))
    }

    /// Whether `page` was neither cached nor being filled at the time of the call. Also false if a
    /// node was recycled concurrently.
    pub(crate) fn is_absent(&self, frames: &FrameRange, page: PageIndex) -> bool {
        let begun = self.epoch.begin();
        let is_empty = self.lookup(frames, page).is_none_or(|found| {
            // As in `lookup_leaf`.
            found.word.load().state() == PageState::Empty && found.leaf.is_unchanged()
        });
        is_empty && self.epoch.is_unchanged(begun)
    }

    /// Prefetches the memory that a lookup of `page` reads.
    #[inline]
    pub(crate) fn prefetch(&self, frames: &FrameRange, page: PageIndex) {
        if let Some(found) = self.lookup(frames, page) {
            copy::prefetch_line(found.word);
        }
    }

    /// The link to the leaf of `page`. A slot without a node names frame 0, which is not in use and
    /// reads as zeros: as a node without links, and as a leaf without pages.
    #[inline]
    fn leaf_link<'c>(&'c self, frames: &'c FrameRange, page: PageIndex) -> Option<Followed<'c>> {
        let mut followed = Followed::new(&self.root);
        let levels = followed.link().levels();
        if levels == 0 || !is_below(page, levels) {
            return None;
        }
        for level in (1..levels).rev() {
            let slots = slots(frames, followed.link().node())?;
            followed = Followed::new(&slots[slot_of(page, level)]);
        }
        Some(followed)
    }

    /// Whether `is_so` holds for the word of any page from `first` to `last`. The caller knows that
    /// the leaves of the pages it asks for stay. For other leaves, wrong words may be read, or
    /// none.
    pub(crate) fn any_word(
        &self,
        frames: &FrameRange,
        first: PageIndex,
        last: PageIndex,
        is_so: impl Fn(Word) -> bool,
    ) -> bool {
        let mut page = first;
        while page <= last {
            let end = last.min(last_of_leaf(page));
            if let Some(words) = self.leaf(frames, page)
                && words[slot_of(page, 0)..=slot_of(end, 0)].iter().any(|word| is_so(word.load()))
            {
                return true;
            }
            page = end + 1;
        }
        false
    }

    fn leaf<'c>(&self, frames: &'c FrameRange, page: PageIndex) -> Option<&'c [PageWord; SLOTS]> {
        words(frames, self.leaf_link(frames, page)?.link().node())
    }

    /// Holds the leaf of `page`, and creates it if `create` is set.
    pub(crate) fn hold<'c>(
        &'c self,
        source: &'c impl FrameSource,
        page: PageIndex,
        create: bool,
    ) -> Result<HeldLeaf<'c>, HoldError> {
        let frames = source.frames();
        if let Some(held) = self.try_hold_leaf(frames, page) {
            return Ok(held);
        }
        let holds = |node| &frames.meta(node).pins;
        'restart: loop {
            let Some(mut held) = self.try_hold_root(source, page, create)? else {
                // Another thread is about to unlink a dead node.
                std::thread::yield_now();
                continue;
            };
            while held.level > 0 {
                let slot = &held.slots()[slot_of(page, held.level)];
                let link = Link(slot.follow());
                if link.is_none() {
                    if !create {
                        return Err(HoldError::Absent);
                    }
                    let class = if held.level == 1 { Class::LEAF } else { Class::INNER };
                    let new = alloc(source, class).ok_or(HoldError::NoMemory)?;
                    holds(held.node).hold_again();
                    if slot.try_link(link.0, link.naming(new).0).is_ok() {
                        held.descend(new);
                    } else {
                        // Another thread has linked a node here, and may have unlinked it again.
                        holds(held.node).unhold();
                        holds(new).mark_dead(1);
                        frames.free(new, class);
                    }
                    continue;
                }
                let child = link.node();
                let is_same = |now| Link(now).same_node(link);
                if !try_hold_linked(holds(child), slot, is_same) {
                    // Another thread is about to unlink a dead node, or has done so.
                    std::thread::yield_now();
                    continue 'restart;
                }
                held.descend(child);
            }
            return Ok(held);
        }
    }

    /// Holds the leaf of `page`, if it exists and is not recycled concurrently (T2).
    fn try_hold_leaf<'c>(&'c self, frames: &'c Frames, page: PageIndex) -> Option<HeldLeaf<'c>> {
        let begun = self.epoch.begin();
        let leaf = self.leaf_link(frames, page)?;
        let node = leaf.link().node();
        if leaf.link().is_none() || frames.address(node).is_none() {
            return None;
        }
        let holds = &frames.meta(node).pins;
        let is_held = try_hold_followed(holds, leaf, &self.epoch, begun);
        // Not `then_some`, which would create a `HeldLeaf` in any case, and drop it.
        is_held.then(|| HeldLeaf { frames, core: self, node, level: 0, page })
    }

    /// Holds a root that covers `page`. `None`: the root changed concurrently.
    fn try_hold_root<'c>(
        &'c self,
        source: &'c impl FrameSource,
        page: PageIndex,
        create: bool,
    ) -> Result<Option<HeldLeaf<'c>>, HoldError> {
        let root = Link(self.root.follow());
        let levels = root.levels();
        if levels == 0 || !is_below(page, levels) {
            return if create { self.try_grow(source, root, page) } else { Err(HoldError::Absent) };
        }
        let frames = source.frames();
        let holds = &frames.meta(root.node()).pins;
        let is_held = try_hold_linked(holds, &self.root, |now| Link(now).same_node(root));
        Ok(is_held.then(|| HeldLeaf {
            frames,
            core: self,
            node: root.node(),
            level: levels - 1,
            page,
        }))
    }

    /// Puts a new root on top of `root`, or creates the first one, high enough for `page`, and
    /// holds it.
    fn try_grow<'c>(
        &'c self,
        source: &'c impl FrameSource,
        root: Link,
        page: PageIndex,
    ) -> Result<Option<HeldLeaf<'c>>, HoldError> {
        let levels = match root.levels() {
            0 => (u64::BITS - page.0.leading_zeros()).div_ceil(NODE_SHIFT).max(1),
            levels => levels + 1,
        };
        let frames = source.frames();
        let class = if levels == 1 { Class::LEAF } else { Class::INNER };
        let node = alloc(source, class).ok_or(HoldError::NoMemory)?;
        let holds = &frames.meta(node).pins;
        let children = u32::from(root.levels() > 0);
        if children > 0 {
            // The old root may be dead already. Then its last holder finds it here (`unlink`).
            let slot = &slots(frames, node).expect("allocated")[0];
            slot.init(root.without_levels().0);
            holds.hold_again();
        }
        let link = Link::root(node, u64::from(levels));
        if self.root.try_link(root.0, link.0).is_err() {
            holds.mark_dead(1 + children);
            frames.free(node, class);
            return Ok(None);
        }
        let held = HeldLeaf { frames, core: self, node, level: levels - 1, page };
        // One level at a time: the next iteration adds the next.
        Ok(is_below(page, levels).then_some(held))
    }

    /// Calls `visit` with each page from `first` to `last` whose word is not EMPTY, and holds its
    /// leaf during the call. Pages that are added or removed concurrently may be missed.
    pub(crate) fn for_each_page(
        &self,
        source: &impl FrameSource,
        first: PageIndex,
        last: PageIndex,
        visit: &mut dyn FnMut(&HeldLeaf<'_>, PageIndex, &PageWord),
    ) {
        let mut page = first;
        while page <= last {
            page = match self.next_leaf(source.frames(), page) {
                Some(next) if next <= last => next,
                _ => return,
            };
            let leaf_end = last_of_leaf(page);
            if let Ok(held) = self.hold(source, page, false) {
                let words = &held.words()[slot_of(page, 0)..=slot_of(leaf_end.min(last), 0)];
                for (page, word) in page.onwards().zip(words) {
                    if word.load().state() != PageState::Empty {
                        visit(&held, page, word);
                        if held.is_empty() {
                            break;
                        }
                    }
                }
            }
            page = leaf_end + 1;
        }
    }

    /// The first page from `page` on that may have a leaf: `page` itself, or the first page of a
    /// leaf.
    fn next_leaf(&self, frames: &Frames, mut page: PageIndex) -> Option<PageIndex> {
        'restart: loop {
            let mut link = Link(self.root.follow());
            let levels = link.levels();
            if levels == 0 || !is_below(page, levels) {
                return None;
            }
            for level in (1..levels).rev() {
                // A node that was recycled concurrently may hold any value.
                let Some(slots) = slots(frames, link.node()) else { continue 'restart };
                link = Link(slots[slot_of(page, level)].follow());
                if link.is_none() {
                    // Skip all pages of this slot.
                    let shift = NODE_SHIFT * level;
                    page = PageIndex(((page.0 >> shift) + 1) << shift);
                    continue 'restart;
                }
            }
            return Some(page);
        }
    }

    /// Frees all nodes of a file that is not in use any more and whose pages are all EMPTY.
    pub(crate) fn tear_down(&self, frames: &Frames) {
        let root = Link(self.root.take());
        if root.levels() > 0 {
            mark_dead(frames, root.node(), root.levels() - 1);
        }
    }
}

fn mark_dead(frames: &Frames, node: FrameIndex, level: u32) {
    let mut children = 0;
    if level > 0 {
        for slot in slots(frames, node).expect("linked") {
            let link = Link(slot.peek());
            if !link.is_none() {
                children += 1;
                mark_dead(frames, link.node(), level - 1);
            }
        }
    }
    frames.meta(node).pins.mark_dead(children);
    frames.free(node, if level > 0 { Class::INNER } else { Class::LEAF });
}

/// A held leaf. During a walk, a held inner node.
pub(crate) struct HeldLeaf<'c> {
    frames: &'c Frames,
    core: &'c FileCore,
    node: FrameIndex,
    level: u32,
    /// A page below the node.
    page: PageIndex,
}

impl<'c> HeldLeaf<'c> {
    /// The caller emptied the word of `page`, which is in `leaf`. The hold of the word (T1) becomes
    /// this one.
    pub(crate) fn of_emptied(
        frames: &'c Frames,
        core: &'c FileCore,
        leaf: FrameIndex,
        page: PageIndex,
    ) -> HeldLeaf<'c> {
        HeldLeaf { frames, core, node: leaf, level: 0, page }
    }

    /// The word of `page`, which the leaf must cover.
    #[inline]
    pub(crate) fn word(&self, page: PageIndex) -> &PageWord {
        debug_assert!(self.covers(page));
        &self.words()[slot_of(page, 0)]
    }

    #[inline]
    fn words(&self) -> &[PageWord; SLOTS] {
        debug_assert!(self.level == 0);
        words(self.frames, self.node).expect("held")
    }

    /// Whether all words of the leaf are EMPTY: there is no hold but ours (T1). While other threads hold
    /// the leaf, the result is false.
    fn is_empty(&self) -> bool {
        self.frames.meta(self.node).pins.is_held_once()
    }

    pub(crate) fn core(&self) -> &'c FileCore {
        self.core
    }

    pub(crate) fn covers(&self, page: PageIndex) -> bool {
        first_of_leaf(page) == first_of_leaf(self.page)
    }

    /// Called before a word of the leaf leaves EMPTY (T1). [`HeldLeaf::vacated`] undoes it.
    pub(crate) fn occupy(&self) {
        self.frames.meta(self.node).pins.hold_again();
    }

    /// After a word of the leaf became EMPTY (T1).
    pub(crate) fn vacated(&self) {
        let last = self.frames.meta(self.node).pins.unhold();
        debug_assert!(!last, "we hold the leaf ourselves");
    }

    fn slots(&self) -> &'c Node {
        slots(self.frames, self.node).expect("held")
    }

    /// Moves on to a child that was just held.
    fn descend(&mut self, child: FrameIndex) {
        let last = self.frames.meta(self.node).pins.unhold();
        debug_assert!(!last, "the slot of a held child counts as a hold");
        self.node = child;
        self.level -= 1;
    }

    /// The frame that `page` is predicted to have, or that is reserved for it: see "Predicted
    /// frames".
    pub(crate) fn predicted(&self, page: PageIndex) -> FrameIndex {
        let root = Link(self.core.root.follow());
        let link = if root.levels() == 1 { &self.core.root } else { self.parent_slot().1 };
        Link(link.follow()).predicted(slot_of(page, 0), self.core.page_shift)
    }

    pub(crate) fn has_prediction(&self) -> bool {
        self.predicted(first_of_leaf(self.page)) != FrameIndex::NONE
    }

    /// Records that `page` has `frame`, as the last page of a run with adjacent frames.
    pub(crate) fn record_run(&self, page: PageIndex, frame: FrameIndex) {
        let root = Link(self.core.root.follow());
        let link = if root.levels() == 1 { &self.core.root } else { self.parent_slot().1 };
        let seen = Link(link.follow());
        let new = seen.predicting(slot_of(page, 0), self.core.page_shift, frame);
        // Our hold keeps the leaf linked. If the link changes concurrently, by another record or
        // because the root grows, this record is lost, which is harmless.
        if seen.node() == self.node {
            link.note(seen.0, new.0);
        }
    }

    /// Removes the link to our dead node, so that late readers notice it (epoch.V3, epoch.V4).
    /// Returns the parent, whose hold for the link the caller drops. `None`: the node was the root.
    fn unlink(&self) -> Option<FrameIndex> {
        loop {
            let root = self.core.root.follow();
            if Link(root).node() != self.node {
                let (parent, slot) = self.parent_slot();
                debug_assert_eq!(Link(slot.peek()).node(), self.node);
                slot.unlink(self.level == 0, &self.core.epoch);
                return Some(parent);
            }
            // A leaf that was the root may since have been recycled as the leaf of a slot
            // (epoch.V4), and become the root again. A reader that finds it there sees this epoch.
            self.core.epoch.raise();
            // Fails if another thread puts a root on top.
            if self.core.root.try_link(root, 0).is_ok() {
                self.core.epoch.raise();
                return None;
            }
        }
    }

    /// Follows the links to the slot that names our node. The node is linked and not the root, so
    /// all nodes above it are held (T1).
    fn parent_slot(&self) -> (FrameIndex, &'c LinkSlot) {
        let root = Link(self.core.root.follow());
        let mut node = root.node();
        let mut level = root.levels() - 1;
        loop {
            let slots = slots(self.frames, node).expect("linked");
            let slot = &slots[slot_of(self.page, level)];
            if level == self.level + 1 {
                return (node, slot);
            }
            node = Link(slot.follow()).node();
            level -= 1;
        }
    }
}

impl Drop for HeldLeaf<'_> {
    fn drop(&mut self) {
        // T3, upwards while parents become empty.
        while self.frames.meta(self.node).pins.unhold_or_kill() {
            let parent = self.unlink();
            let class = if self.level == 0 { Class::LEAF } else { Class::INNER };
            self.frames.free(self.node, class);
            let Some(parent) = parent else { return };
            self.node = parent;
            self.level += 1;
        }
    }
}

/// Whether the page lies below a root of `levels` levels.
#[inline]
fn is_below(page: PageIndex, levels: u32) -> bool {
    page.0 >> (NODE_SHIFT * levels) == 0
}

#[inline]
fn slot_of(page: PageIndex, level: u32) -> usize {
    (page.0 >> (NODE_SHIFT * level)) as usize & (SLOTS - 1)
}

/// The first page of the leaf that `page` is in.
pub(crate) fn first_of_leaf(page: PageIndex) -> PageIndex {
    PageIndex(page.0 & !(SLOTS as u64 - 1))
}

fn last_of_leaf(page: PageIndex) -> PageIndex {
    PageIndex(page.0 | (SLOTS as u64 - 1))
}

#[inline]
fn slots(frames: &FrameRange, node: FrameIndex) -> Option<&Node> {
    // SAFETY: the address is that of 4 KiB within the address range, which is readable, aligned and
    // mapped as long as `frames`. Any bytes are valid as atomics. Writers hold the node.
    frames.address(node).map(|at| unsafe { &*at.cast::<Node>() })
}

#[inline]
fn words(frames: &FrameRange, node: FrameIndex) -> Option<&[PageWord; SLOTS]> {
    // SAFETY: as in `slots`; a PageWord is a transparent AtomicU64.
    frames.address(node).map(|at| unsafe { &*at.cast::<[PageWord; SLOTS]>() })
}

/// A zeroed node with one hold, the caller's.
fn alloc(source: &impl FrameSource, class: Class) -> Option<FrameIndex> {
    let node = source.take_frame(class)?;
    let frames = source.frames();
    for slot in slots(frames, node).expect("allocated") {
        slot.init(0);
    }
    frames.meta(node).pins.revive();
    Some(node)
}
