//! The page table of a file: a radix of page words, 512 to a node.
//!
//! First stop of a read: from a page's number to its word. A file's core holds the root, which
//! names a node and the number of levels; one level is a leaf. Leaves hold page words, inner nodes
//! the frame index of their children. Nodes are frames and count in the memory limit.
//!
//! *Lock-free readers* ([`FileCore::lookup`]) walk down and write nothing. A node that they stand
//! on may be recycled and used again at any moment, for another file, too; whatever they read is
//! an index within the reservation or is refused, so the walk stays in memory that is readable,
//! and ends at a word that may be the wrong one. The file's epoch tells them: it rises after a
//! node is unlinked and before it is used again, and every lock-free read compares it at its end.
//!
//! *Everyone else* holds the leaf that it works on ([`Held`]):
//!
//! - **T1** A node's holds count its users, its slots that are not empty, and one if it is the
//!   root. So a node that can be reached from a held one or a READY word is held itself.
//! - **T2** A hold is taken on a child while the parent is held, and counts only if the slot
//!   still names that child afterwards. Who finds a dead child restarts at the root.
//! - **T3** Who drops the last hold makes the node DEAD in the same step, unlinks it, raises the
//!   epoch, frees the node, and drops the hold that it had on its parent.
//!
//! Locks: none.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crate::cache::Cache;
use crate::cache::frame::{Class, FrameIndex, Frames, UNIT_BYTES};
use crate::cache::page::{Epoch, PageWord};

const NODE_SHIFT: u32 = 9;
const SLOTS: usize = 1 << NODE_SHIFT;
const LEVELS: u64 = 0xff;
const ROOT_SHIFT: u32 = 8;

const _: () = assert!(SLOTS * size_of::<AtomicU64>() == UNIT_BYTES);

/// The number of a page within its file.
pub(crate) type PageIndex = u64;

/// What a cached read needs to know of a file. Lives in a slab of the frame reservation, so that
/// its memory counts in the limit, and is not written by cached reads.
#[repr(C, align(64))]
pub(crate) struct FileCore {
    /// The size of the file, in bytes; its load is a cached read's linearization point. Changed
    /// under an exclusive guard (W5).
    pub(crate) size: AtomicU64,
    root: AtomicU64,
    pub(crate) epoch: Epoch,
    pub(crate) page_shift: u32,
}

type Node = [AtomicU64; SLOTS];

/// Why a leaf could not be held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unheld {
    /// There is no leaf for the page, so the page is EMPTY.
    Absent,
    /// No memory for the nodes on the way.
    NoMemory,
}

impl FileCore {
    pub(crate) fn new(size: u64, page_shift: u32) -> FileCore {
        FileCore {
            size: AtomicU64::new(size),
            root: AtomicU64::new(0),
            epoch: Epoch::new(),
            page_shift,
        }
    }

    #[inline]
    pub(crate) fn page_bytes(&self) -> usize {
        1 << self.page_shift
    }

    /// The word of `page`, or a wrong one if the table changed meanwhile: the caller compares the
    /// epoch in the end. `None`: the page is not cached.
    #[inline]
    pub(crate) fn lookup<'c>(&self, frames: &'c Frames, page: PageIndex) -> Option<&'c PageWord> {
        let root = self.root.load(Acquire);
        let levels = (root & LEVELS) as u32;
        if levels == 0 || page >> (NODE_SHIFT * levels) != 0 {
            return None;
        }
        let mut node = FrameIndex((root >> ROOT_SHIFT) as u32);
        for level in (1..levels).rev() {
            // Acquire: pairs with the release that linked the child.
            let child = slots(frames, node)?[slot_of(page, level)].load(Acquire);
            if child == 0 {
                return None;
            }
            node = FrameIndex(child as u32);
        }
        words(frames, node).map(|words| &words[slot_of(page, 0)])
    }

    /// Holds the leaf of `page`, creating it where `create` says so.
    pub(crate) fn hold<'c>(
        &'c self,
        cache: &'c Cache,
        page: PageIndex,
        create: bool,
    ) -> Result<Held<'c>, Unheld> {
        'restart: loop {
            let root = self.root.load(Acquire);
            let levels = (root & LEVELS) as u32;
            if levels == 0 || page >> (NODE_SHIFT * levels) != 0 {
                if !create {
                    return Err(Unheld::Absent);
                }
                self.grow(cache, root)?;
                continue;
            }
            let node = FrameIndex((root >> ROOT_SHIFT) as u32);
            let holds = |node| &cache.frames.meta(node).pins;
            if !holds(node).try_hold() {
                continue;
            }
            let mut held = Held { cache, core: self, node, level: levels - 1, page };
            // T2. Acquire: see `try_hold`.
            if self.root.load(Acquire) != root {
                held.give_back();
                continue;
            }
            while held.level > 0 {
                let slot = &held.slots()[slot_of(page, held.level)];
                let mut child = slot.load(Acquire);
                if child == 0 {
                    if !create {
                        return Err(Unheld::Absent);
                    }
                    let class = if held.level == 1 { Class::LEAF } else { Class::INNER };
                    let new = alloc(cache, class).ok_or(Unheld::NoMemory)?;
                    holds(held.node).hold_again();
                    // Release: the zeroed node is visible to who follows the link.
                    match slot.compare_exchange(0, u64::from(new.0), AcqRel, Acquire) {
                        Ok(_) => {
                            held.descend(new);
                            continue;
                        }
                        Err(now) => {
                            holds(held.node).unhold();
                            holds(new).bury(1);
                            cache.frames.free(new, class);
                            child = now;
                        }
                    }
                }
                let child_node = FrameIndex(child as u32);
                if !holds(child_node).try_hold() {
                    continue 'restart;
                }
                if slot.load(Acquire) != child {
                    holds(child_node).unhold();
                    continue 'restart;
                }
                held.descend(child_node);
            }
            return Ok(held);
        }
    }

    /// Adds a level on top of `root`, or makes the first leaf.
    fn grow(&self, cache: &Cache, root: u64) -> Result<(), Unheld> {
        let levels = root & LEVELS;
        let class = if levels == 0 { Class::LEAF } else { Class::INNER };
        let new = alloc(cache, class).ok_or(Unheld::NoMemory)?;
        // The hold that `alloc` left is the root's own (T1).
        let holds = &cache.frames.meta(new).pins;
        if levels > 0 {
            slots(&cache.frames, new).expect("allocated")[0].store(root >> ROOT_SHIFT, Relaxed);
            holds.hold_again();
        }
        let value = u64::from(new.0) << ROOT_SHIFT | (levels + 1);
        if self.root.compare_exchange(root, value, AcqRel, Relaxed).is_err() {
            holds.bury(if levels > 0 { 2 } else { 1 });
            cache.frames.free(new, class);
        } else if levels > 0 {
            // The old root's own hold goes, and the old root with it if it is empty.
            let node = FrameIndex((root >> ROOT_SHIFT) as u32);
            drop(Held { cache, core: self, node, level: levels as u32 - 1, page: 0 });
        }
        Ok(())
    }

    /// Calls `visit` with each page from `first` to `last` whose word is not EMPTY, holding its
    /// leaf. Pages that come or go meanwhile may be missed.
    pub(crate) fn for_each_page(
        &self,
        cache: &Cache,
        first: PageIndex,
        last: PageIndex,
        visit: &mut dyn FnMut(&Held<'_>, PageIndex, &PageWord),
    ) {
        let mut page = first;
        while page <= last {
            let Some(next) = self.next_leaf(&cache.frames, page) else { return };
            page = next;
            let leaf_end = page | (SLOTS as u64 - 1);
            if let Ok(held) = self.hold(cache, page, false) {
                while page <= leaf_end.min(last) {
                    let word = held.word(page);
                    if word.load().state() != crate::cache::page::State::Empty {
                        visit(&held, page, word);
                    }
                    page += 1;
                }
            }
            page = leaf_end + 1;
        }
    }

    /// The first page from `page` on that may have a leaf: `page` itself, or the start of a leaf.
    fn next_leaf(&self, frames: &Frames, mut page: PageIndex) -> Option<PageIndex> {
        'restart: loop {
            let root = self.root.load(Acquire);
            let levels = (root & LEVELS) as u32;
            if levels == 0 || page >> (NODE_SHIFT * levels) != 0 {
                return None;
            }
            let mut node = FrameIndex((root >> ROOT_SHIFT) as u32);
            for level in (1..levels).rev() {
                let child = slots(frames, node)?[slot_of(page, level)].load(Acquire);
                if child == 0 {
                    // Skip all that this slot stands for.
                    page = ((page >> (NODE_SHIFT * level)) + 1) << (NODE_SHIFT * level);
                    continue 'restart;
                }
                node = FrameIndex(child as u32);
            }
            return Some(page);
        }
    }

    /// Frees all nodes of a file that nobody uses any more and whose pages are all EMPTY.
    pub(crate) fn tear_down(&self, cache: &Cache) {
        let root = self.root.swap(0, AcqRel);
        if root & LEVELS != 0 {
            let levels = (root & LEVELS) as u32;
            bury(cache, FrameIndex((root >> ROOT_SHIFT) as u32), levels - 1, 1);
        }
    }
}

fn bury(cache: &Cache, node: FrameIndex, level: u32, own: u32) {
    let mut children = 0;
    if level > 0 {
        for slot in slots(&cache.frames, node).expect("linked") {
            let child = slot.load(Relaxed);
            if child != 0 {
                children += 1;
                bury(cache, FrameIndex(child as u32), level - 1, 0);
            }
        }
    }
    cache.frames.meta(node).pins.bury(own + children);
    cache.frames.free(node, if level > 0 { Class::INNER } else { Class::LEAF });
}

/// A held leaf; during a walk, an inner node.
pub(crate) struct Held<'c> {
    cache: &'c Cache,
    core: &'c FileCore,
    node: FrameIndex,
    level: u32,
    /// A page below the node.
    page: PageIndex,
}

impl<'c> Held<'c> {
    /// The word of `page`, which the leaf must cover.
    #[inline]
    pub(crate) fn word(&self, page: PageIndex) -> &PageWord {
        debug_assert!(self.covers(page) && self.level == 0);
        &words(&self.cache.frames, self.node).expect("held")[slot_of(page, 0)]
    }

    pub(crate) fn core(&self) -> &'c FileCore {
        self.core
    }

    pub(crate) fn covers(&self, page: PageIndex) -> bool {
        page >> NODE_SHIFT == self.page >> NODE_SHIFT
    }

    /// Before a word of the leaf leaves EMPTY (T1); [`Held::vacated`] if it does not after all.
    pub(crate) fn occupy(&self) {
        self.cache.frames.meta(self.node).pins.hold_again();
    }

    /// After a word of the leaf became EMPTY (T1).
    pub(crate) fn vacated(&self) {
        let last = self.cache.frames.meta(self.node).pins.unhold();
        debug_assert!(!last, "we hold the leaf ourselves");
    }

    fn slots(&self) -> &'c Node {
        slots(&self.cache.frames, self.node).expect("held")
    }

    /// Goes on to a child that was just held for us.
    fn descend(&mut self, child: FrameIndex) {
        let last = self.cache.frames.meta(self.node).pins.unhold();
        debug_assert!(!last, "the slot of a held child counts as a hold");
        self.node = child;
        self.level -= 1;
    }

    /// Drops a hold that may be on a node which is not ours any more: never recycles.
    fn give_back(self) {
        self.cache.frames.meta(self.node).pins.unhold();
        std::mem::forget(self);
    }

    /// Follows the links to the parent of our node, which is dead but still linked, so that all
    /// nodes above are held (T1).
    fn parent(&self) -> FrameIndex {
        let root = self.core.root.load(Acquire);
        let mut node = FrameIndex((root >> ROOT_SHIFT) as u32);
        let mut level = (root & LEVELS) as u32 - 1;
        while level > self.level + 1 {
            let slots = slots(&self.cache.frames, node).expect("linked");
            node = FrameIndex(slots[slot_of(self.page, level)].load(Acquire) as u32);
            level -= 1;
        }
        node
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // T3, upwards as long as parents become empty.
        loop {
            let holds = &self.cache.frames.meta(self.node).pins;
            if !holds.unhold_or_kill() {
                return;
            }
            let parent = self.parent();
            let slots = slots(&self.cache.frames, parent).expect("linked");
            let slot = &slots[slot_of(self.page, self.level + 1)];
            debug_assert_eq!(slot.load(Relaxed), u64::from(self.node.0));
            slot.store(0, Release);
            self.core.epoch.raise();
            let class = if self.level == 0 { Class::LEAF } else { Class::INNER };
            self.cache.frames.free(self.node, class);
            self.node = parent;
            self.level += 1;
        }
    }
}

fn slot_of(page: PageIndex, level: u32) -> usize {
    (page >> (NODE_SHIFT * level)) as usize & (SLOTS - 1)
}

#[inline]
fn slots(frames: &Frames, node: FrameIndex) -> Option<&Node> {
    // SAFETY: the address is that of 4 KiB within the reservation, which is readable, aligned and
    // mapped as long as `frames`; any bytes are valid as atomics. Who writes has held the node.
    frames.address(node).map(|at| unsafe { &*at.cast::<Node>() })
}

#[inline]
fn words(frames: &Frames, node: FrameIndex) -> Option<&[PageWord; SLOTS]> {
    // SAFETY: as in `slots`; a PageWord is a transparent AtomicU64.
    frames.address(node).map(|at| unsafe { &*at.cast::<[PageWord; SLOTS]>() })
}

/// A zeroed node with one hold, the caller's.
fn alloc(cache: &Cache, class: Class) -> Option<FrameIndex> {
    let node = cache.take_frame(class)?;
    for slot in slots(&cache.frames, node).expect("allocated") {
        slot.store(0, Relaxed);
    }
    cache.frames.meta(node).pins.revive();
    Some(node)
}
