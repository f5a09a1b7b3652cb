//! The page cache: what is cached, where, and what leaves.
//!
//! In the order of a read: `table` finds the page word, `page` knows its protocol, `copy` takes
//! the bytes; on a miss `fill` brings the page into a frame of `frame`, `readahead` predictions what
//! comes next, and `evict` decides what makes room.

pub(crate) mod table;

pub(crate) mod frames;

pub(crate) mod policy;

pub(crate) mod accounting;

#[cfg(all(test, loom))]
mod loom_tests;

#[cfg(all(test, loom))]
mod loom_multi_tests;

#[cfg(all(test, loom))]
mod loom_table_tests;

#[cfg(all(test, loom))]
mod loom_pin_tests;

#[cfg(all(test, loom))]
mod loom_writeback_tests;

#[cfg(all(test, loom))]
mod loom_queue_node_tests;

#[cfg(all(test, loom))]
mod loom_batch_tests;

#[cfg(all(test, loom))]
mod loom_unevictable_tests;

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};

use smallvec::SmallVec;

use crate::cache::accounting::writeback_counts::WritebackCounts;
use crate::cache::frames::class::Class;
use crate::cache::frames::magazine::BATCH_MAX;
use crate::cache::frames::slab::Slab;
use crate::cache::frames::{FrameSource, Frames};
use crate::cache::policy::admission::AdmissionFilter;
use crate::cache::policy::evict::{EvictPass, Queues, ReadaheadUse};
use crate::cache::policy::fifo::ReadyPage;
use crate::cache::policy::insert_batch::{INSERT_BATCH_MAX, InsertBatches};
use crate::cache::policy::unevictable::{self, RescanFlag};
use crate::cache::table::page::{Change, PageWord};
use crate::cache::table::{FileCore, Held, SLOTS, first_of_leaf};
use crate::copy;
use crate::options::Admission;
use crate::stats::Counters;
use crate::survival::Address;
use crate::units::{FrameIndex, PageIndex};

/// So many passes at the queues are made beyond a turn (evict.E3), as pages come in meanwhile.
const EXTRA_PASSES: u64 = 8;
/// Pages that are taken off the shelf in one hold of the queues' lock: as many as inserts are put in.
const REQUEUED_TOGETHER: usize = INSERT_BATCH_MAX;
/// Batches of pages that are evicted for one frame while the system gives no memory. Chosen, not measured.
const TRIES_SHORT_MAX: u32 = 16;
/// The part of the limit that tables of range locks may take, so that pages have nearly all of it.
const LOCKS_PART: u64 = 16;

/// Frames of pages that were evicted together.
type Victims = SmallVec<[(FrameIndex, Class); BATCH_MAX]>;

/// The cache of one engine.
pub(crate) struct Cache {
    pub(crate) frames: Frames,
    pub(crate) counters: Counters,
    pub(crate) slab: Slab,
    pub(crate) writeback_counts: WritebackCounts,
    /// Which pages get a frame.
    pub(crate) admission: Arc<AdmissionFilter>,
    queues: Mutex<Queues>,
    insert_batches: InsertBatches,
    rescan: RescanFlag,
    /// What the tables of range locks take (counted against the limit, too).
    locks_bytes: AtomicU64,
    /// The limit that it was built with.
    pub(crate) limit_bytes_max: u64,
    /// Held while the limit changes.
    resizing: Mutex<()>,
    /// How often the queues' lock was taken.
    #[cfg(test)]
    lock_count: AtomicU64,
}

impl Cache {
    pub(crate) fn new(
        limit_bytes: u64,
        admission: Admission,
        keeper: Option<&Address>,
    ) -> io::Result<Cache> {
        let frames = Frames::new(limit_bytes, keeper)?;
        let admission_filter = Arc::new(AdmissionFilter::new(admission, limit_bytes)?);
        let queues = Queues::new(limit_bytes, Arc::clone(&admission_filter))?;
        frames.try_charge(queues.ghost_bytes() + admission_filter.bytes());
        Ok(Cache {
            frames,
            counters: Counters::new(),
            slab: Slab::default(),
            writeback_counts: WritebackCounts::new(),
            admission: admission_filter,
            queues: Mutex::new(queues),
            insert_batches: InsertBatches::new(),
            rescan: RescanFlag::new(),
            locks_bytes: AtomicU64::new(0),
            limit_bytes_max: limit_bytes,
            resizing: Mutex::default(),
            #[cfg(test)]
            lock_count: AtomicU64::new(0),
        })
    }

    /// A frame, evicting what must go for it; never waits. `None`: nothing can go now.
    pub(crate) fn take_frame(&self, class: Class) -> Option<FrameIndex> {
        // For what was charged anyway.
        while self.frames.is_overdrawn() {
            if !self.make_room() {
                return None;
            }
        }
        let mut tries_short = 0;
        loop {
            if let Some(frame) = self.frames.try_alloc(class) {
                return Some(frame);
            }
            // Pages of other classes would be evicted in vain.
            if self.frames.is_short() {
                tries_short += 1;
                if self.frames.has_no_memory(class) || tries_short > TRIES_SHORT_MAX {
                    return None;
                }
            }
            let found = self.frames.break_reservation()
                || self.frames.decommit_unspared(class)
                || self.evict(Some(class))
                || self.frames.decommit_one(Some(class))
                || self.frames.empty_magazines();
            if !found {
                return None;
            }
        }
    }

    /// Frees something, or gives the system the memory of something that is free; false if nothing can
    /// go now.
    fn make_room(&self) -> bool {
        let frames = &self.frames;
        frames.break_reservation() || frames.decommit_one(None) || self.evict(None)
    }

    /// A frame for `page`, whose leaf is `held`: the one that waits for it, or any other. `alone`:
    /// the page is filled on its own, and so may be the first of many that come in no order.
    pub(crate) fn take_page_frame(
        &self,
        held: &Held<'_>,
        page: PageIndex,
        alone: bool,
    ) -> Option<FrameIndex> {
        let core = held.core();
        let class = Class::page(core.page_shift);
        if class == Class::UNIT_PAGE {
            if let Some(frame) = self.frames.take_reserved(held, page) {
                return Some(frame);
            }
            // Most of the leaf's pages must exist.
            let half = (first_of_leaf(page) + SLOTS as u64 / 2).first_byte(core.page_shift);
            let fits = core.size.hint() >= half && !held.has_prediction();
            if let Some(frame) =
                (alone && fits).then(|| self.frames.make_reservation(held, page)).flatten()
            {
                return Some(frame);
            }
        }
        self.take_frame(class)
    }

    /// A core for an empty table; `None` if the memory limit has no room.
    pub(crate) fn take_core(&self, size: u64, page_shift: u32) -> Option<NonNull<FileCore>> {
        loop {
            if let Some(core) = self.slab.take(size, page_shift) {
                return Some(core);
            }
            self.slab.add(&self.frames, self.take_frame(Class::SLAB)?);
        }
    }

    /// Counts `bytes` of other memory against the limit, evicting what must go for it.
    pub(crate) fn try_charge(&self, bytes: u64) -> bool {
        loop {
            if self.frames.try_charge(bytes) {
                return true;
            }
            if !self.make_room() {
                return false;
            }
        }
    }

    /// [`Cache::try_charge`] for what is there already: where nothing can go for it, the limit is
    /// passed (see `heap`).
    pub(crate) fn force_charge(&self, bytes: u64) {
        if !self.try_charge(bytes) {
            self.frames.charge_over(bytes);
        }
    }

    /// [`Cache::try_charge`] for tables of range locks, which stay as long as their files are open:
    /// they get a small part of the limit, else those of many files would leave nothing for pages.
    pub(crate) fn try_charge_locks(&self, bytes: u64) -> bool {
        let max = self.frames.limit_bytes() / LOCKS_PART;
        let taken = self
            .locks_bytes
            .fetch_update(Relaxed, Relaxed, |now| now.checked_add(bytes).filter(|&sum| sum <= max));
        if taken.is_err() {
            return false;
        }
        let charged = self.try_charge(bytes);
        if !charged {
            self.locks_bytes.fetch_sub(bytes, Relaxed);
        }
        charged
    }

    pub(crate) fn uncharge_locks(&self, bytes: u64) {
        self.frames.uncharge(bytes);
        self.locks_bytes.fetch_sub(bytes, Relaxed);
    }

    /// Evicts a page, or a batch where frames of class `wanted` go to a magazine; those of other classes
    /// are put on the free lists, to be given to the system. False: nothing can go now.
    fn evict(&self, wanted: Option<Class>) -> bool {
        // insert_batch.IB3
        self.evict_queued(wanted) || self.drain_all_batches() && self.evict_queued(wanted)
    }

    /// [`Cache::evict`] of what is queued, or comes into the queues with this thread.
    fn evict_queued(&self, wanted: Option<Class>) -> bool {
        let most = wanted.map_or(1, |class| self.frames.batch(class).max(1));
        let mut inserts = self.insert_batches.mine();
        let (mut passes, mut passes_max) = (0, 0);
        let mut victims = Victims::new();
        loop {
            passes += 1;
            let mut queues = self.queues();
            queues.insert_batch(&self.frames, inserts.drain());
            // Else each attempt would go through all pages in vain.
            let bytes = queues.bytes();
            if self.writeback_counts.unevictable_upper_bound() >= bytes
                && self.writeback_counts.unevictable() >= bytes
            {
                return false;
            }
            match queues.evict(&self.frames, &self.rescan, most, &mut victims) {
                EvictPass::Evicted => {
                    drop((queues, inserts));
                    self.evicted(&victims, wanted);
                    return true;
                }
                EvictPass::Nothing => return false,
                EvictPass::More => passes_max = queues.passes_per_sweep().max(passes_max),
            }
            // RescanFlag may have been found by the last one.
            if passes > passes_max + EXTRA_PASSES {
                return false;
            }
        }
    }

    /// Frees the frames of pages that were evicted.
    fn evicted(&self, victims: &Victims, wanted: Option<Class>) {
        self.counters.mine().evicted(victims.len() as u64);
        self.admission.note_eviction();
        for same in victims.chunk_by(|(_, one), (_, other)| one == other) {
            let class = same[0].1;
            let mut frames: SmallVec<[FrameIndex; BATCH_MAX]> =
                same.iter().map(|(frame, _)| *frame).collect();
            if wanted == Some(class) {
                self.frames.release_many(&mut frames, class);
            } else {
                self.frames.release_listed(&mut frames, class);
            }
        }
    }

    /// Queues pages that became READY, or has that done soon; the caller still holds the guard under
    /// which they did.
    pub(crate) fn insert_pages<'a>(&self, pages: impl Iterator<Item = ReadyPage<'a>>) {
        let mut inserts = self.insert_batches.mine();
        let mut batch = INSERT_BATCH_MAX;
        for page in pages {
            batch = self.frames.batch(page.prepare(&self.frames));
            let most = if batch == 0 { INSERT_BATCH_MAX } else { batch };
            if inserts.push(self.frames.queue_node_of(page.frame)) >= most {
                self.queues().insert_batch(&self.frames, inserts.drain());
            }
        }
        if batch == 0 {
            self.queues().insert_batch(&self.frames, inserts.drain());
        }
    }

    /// Puts all inserts into the queues; whether there were any.
    fn drain_all_batches(&self) -> bool {
        self.insert_batches.all().fold(false, |any, mut inserts| {
            let frames = inserts.drain();
            if !frames.is_empty() {
                let mut queues = self.queues();
                queues.insert_batch(&self.frames, frames);
            }
            any | !frames.is_empty()
        })
    }

    /// Whether a transition of a page, just made, says that write-back lets it go, and it is on the shelf: the
    /// node that the caller has taken off soon, by [`Cache::requeue_evictable`].
    pub(crate) fn find_to_requeue(&self, word: &PageWord, change: Change) -> Option<FrameIndex> {
        let frames = &self.frames;
        let queue_node_of = |frame| frames.queue_node_of(frame);
        unevictable::find_to_requeue(word, change, &self.rescan, queue_node_of, |node| {
            frames.meta(node)
        })
    }

    /// Puts pages that were found on the shelf back into their queues. Some in each hold of the lock.
    pub(crate) fn requeue_evictable(&self, nodes: &[FrameIndex]) {
        for some in nodes.chunks(REQUEUED_TOGETHER) {
            some.iter().for_each(|&node| copy::prefetch_line(self.frames.meta(node)));
            self.queues().requeue_evictable(&self.frames, some);
        }
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        #[cfg(test)]
        self.lock_count.fetch_add(1, Relaxed);
        self.queues.lock().expect("no panic under the lock")
    }

    /// Fresh frames took the places of the `old` ones, and take their nodes (queue_node.QN1); the old ones are
    /// freed. Where one is NONE, there was none. Caller: still has the guard under which it replaced them.
    pub(crate) fn release_replaced(
        &self,
        old: &mut [FrameIndex],
        new: &[FrameIndex],
        class: Class,
    ) {
        let mut any = false;
        for (&old, &new) in old.iter().zip(new).filter(|(old, _)| **old != FrameIndex::NONE) {
            self.frames.swap_queue_nodes(old, new);
            any = true;
        }
        if any {
            self.frames.release_many(old, class);
        }
    }

    /// Frees the frame of a page that was taken out of its word otherwise than by eviction.
    pub(crate) fn release_discarded(&self, frame: FrameIndex, class: Class) {
        self.queues().remove(&self.frames, frame, false);
        self.frames.release(frame, class);
    }

    /// Evicts the pages from `first` to `last` that are not in use.
    pub(crate) fn evict_range(&self, core: &FileCore, first: PageIndex, last: PageIndex) {
        let class = Class::page(core.page_shift);
        core.for_each_page(&self.frames, first, last, &mut |held, _, word| {
            let mut queues = self.queues();
            let used = word.take_referenced();
            let seen = word.load();
            // A page is queued from the time it is READY until it is not, but for moments in
            // which its owner has it in hand.
            if seen.is_ready()
                && queues.is_queued(&self.frames, seen.frame())
                && !self.frames.meta(seen.frame()).pins.is_pinned()
                && word.try_evict(seen, &core.epoch)
            {
                held.vacated();
                queues.remove(&self.frames, seen.frame(), used);
                drop(queues);
                self.frames.release(seen.frame(), class);
            }
        });
    }

    pub(crate) fn readahead_use(&self) -> ReadaheadUse {
        self.queues().readahead_use()
    }

    /// Does `act` while the calling thread has the locks that all misses share, and all writes.
    #[cfg(test)]
    pub(crate) fn with_shared_locks<R>(&self, act: impl FnOnce() -> R) -> R {
        let _queues = self.queues();
        let _free: Vec<_> =
            Class::all().map(|class| self.frames.free_frames(class).lock()).collect();
        act()
    }

    /// How often the locks that all misses share were taken, and forgets it: the queues', and those of the
    /// free lists.
    #[cfg(test)]
    pub(crate) fn take_lock_counts(&self) -> (u64, u64) {
        let lists =
            Class::all().map(|class| self.frames.free_frames(class).lock_count.swap(0, Relaxed));
        (self.lock_count.swap(0, Relaxed), lists.sum())
    }

    /// The most pages that one hold of the queues' lock looked at (evict.E4), and forgets it.
    #[cfg(test)]
    pub(crate) fn take_scanned_max(&self) -> u64 {
        std::mem::take(&mut self.queues.lock().unwrap().scanned_max)
    }

    /// The bytes of the pages that are queued or on the shelf, and how many pages are there.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> (u64, u64) {
        let queues = self.queues();
        (queues.bytes(), queues.unevictable_frames())
    }

    /// Empties a file that nobody uses any more and gives its nodes back.
    pub(crate) fn tear_down(&self, core: &FileCore) {
        let class = Class::page(core.page_shift);
        let (first, last) = (PageIndex::FIRST, PageIndex::LAST);
        core.for_each_page(&self.frames, first, last, &mut |held, _, word| {
            // evict.E1: out of the queues before the core passes. Nobody else can touch a READY page
            // of this file but the evictor, which works under the lock.
            let mut queues = self.queues();
            let used = word.take_referenced();
            if word.load().is_unevictable() {
                self.writeback_counts.note(word.forget_writeback(), core.page_bytes());
            }
            if let Some(seen) = word.evict_for_good(&core.epoch) {
                held.vacated();
                queues.remove(&self.frames, seen.frame(), used);
                drop(queues);
                self.frames.release(seen.frame(), class);
            }
        });
        // An evictor that emptied a page of ours just before may still be on its way out of the
        // table. It works under the lock all the time, and a later one finds no frame of ours.
        drop(self.queues());
        self.admission.start_admitting();
        core.tear_down(&self.frames);
    }
}

impl FrameSource for Cache {
    fn frames(&self) -> &Frames {
        &self.frames
    }

    fn take_frame(&self, class: Class) -> Option<FrameIndex> {
        self.take_frame(class)
    }
}
