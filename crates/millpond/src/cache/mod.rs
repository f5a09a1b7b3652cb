//! The page cache: which pages are in memory, where, and which of them are evicted.
//!
//! In the order of a read: [`table`] finds the page word and has its protocol; [`frames`] has the
//! memory; [`policy`] decides which missed pages get a frame and which pages are evicted; [`shared`]
//! lets other processes read the cache;
//! [`accounting`] counts the memory outside of frames, and the bytes that write-back keeps
//! unevictable.

pub(crate) mod table;

pub(crate) mod frames;

pub(crate) mod policy;

#[cfg_attr(not(feature = "internals"), allow(dead_code, reason = "only internals offer it"))]
pub(crate) mod shared;

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
mod loom_shared_tests;

#[cfg(all(test, loom))]
mod loom_requeue_tests;

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
use crate::cache::frames::{FrameMemory, FrameSource, Frames};
use crate::cache::policy::admission::AdmissionFilter;
use crate::cache::policy::evict::{EvictPass, Queues, ReadaheadUse};
use crate::cache::policy::fifo::ReadyPage;
use crate::cache::policy::insert_batch::{INSERT_BATCH_MAX, InsertBatches};
use crate::cache::policy::queue_node;
use crate::cache::table::page::{Change, PageWord};
use crate::cache::table::{FileCore, HeldLeaf, SLOTS, first_of_leaf};
use crate::copy;
use crate::options::Admission;
use crate::stats::Counters;
use crate::sync::MutexExt;
use crate::units::{FrameIndex, PageIndex};

/// Extra eviction passes beyond a full sweep (evict.E3), as pages are inserted concurrently.
const EXTRA_PASSES: u64 = 8;
/// Pages that are requeued in one hold of the queues' lock.
const REQUEUED_TOGETHER: usize = INSERT_BATCH_MAX;
/// Eviction batches for one frame while the system provides no memory. Untuned.
const TRIES_SHORT_MAX: u32 = 16;
/// Frames of a closed file that are freed together, at most a 16th of the limit: other threads can't use them before. Untuned.
const FREED_TOGETHER: usize = 256;
const FREED_PART: u64 = 16;
/// The part of the limit that tables of range locks may use, which leaves nearly all of it to
/// pages.
const LOCKS_PART: u64 = 16;

/// Frames of pages that were evicted together.
type Victims = SmallVec<[(FrameIndex, Class); BATCH_MAX]>;

/// The cache of one engine.
pub(crate) struct Cache {
    pub(crate) frames: Frames,
    pub(crate) counters: Counters,
    pub(crate) slab: Slab,
    pub(crate) writeback_counts: WritebackCounts,
    /// Decides which missed pages get a frame.
    pub(crate) admission: Arc<AdmissionFilter>,
    queues: Mutex<Queues>,
    insert_batches: InsertBatches,
    /// The bytes of range-lock tables. They are counted against the limit, too.
    locks_bytes: AtomicU64,
    /// The limit at construction, which is the maximum.
    pub(crate) limit_bytes_max: u64,
    /// Held while the limit changes.
    resizing: Mutex<()>,
    /// How often the queues' lock was acquired.
    #[cfg(test)]
    lock_count: AtomicU64,
}

impl Cache {
    pub(crate) fn new(
        limit_bytes: u64,
        admission: Admission,
        memory: FrameMemory<'_>,
    ) -> io::Result<Cache> {
        let frames = Frames::new(limit_bytes, memory)?;
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
            locks_bytes: AtomicU64::new(0),
            limit_bytes_max: limit_bytes,
            resizing: Mutex::default(),
            #[cfg(test)]
            lock_count: AtomicU64::new(0),
        })
    }

    /// Allocates a frame, and evicts pages for it if necessary. Never waits. `None`: nothing is
    /// evictable.
    pub(crate) fn take_frame(&self, class: Class) -> Option<FrameIndex> {
        // Compensates for bytes that were charged beyond the limit.
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
            // Evicting pages of other classes would not help.
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

    /// Frees memory, or returns free memory to the system. False: nothing is evictable.
    fn make_room(&self) -> bool {
        let frames = &self.frames;
        frames.break_reservation() || frames.decommit_one(None) || self.evict(None)
    }

    /// A frame for `page`, whose leaf is `held`: the one reserved for it, or any other. `alone`:
    /// the page is filled on its own, so it may be the first of many pages in random order.
    pub(crate) fn take_page_frame(
        &self,
        held: &HeldLeaf<'_>,
        page: PageIndex,
        alone: bool,
    ) -> Option<FrameIndex> {
        let core = held.core();
        let class = core.page_class();
        if class == Class::UNIT_PAGE {
            if let Some(frame) = self.frames.take_reserved(held, page) {
                return Some(frame);
            }
            // At least half of the leaf's pages must exist.
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

    /// A core for an empty table. `None`: the memory limit has no room.
    pub(crate) fn take_core(&self, size: u64, page_shift: u32) -> Option<NonNull<FileCore>> {
        loop {
            if let Some(core) = self.slab.take(size, page_shift) {
                return Some(core);
            }
            self.slab.add(&self.frames, self.take_frame(Class::SLAB)?);
        }
    }

    /// Charges `bytes` of other memory to the limit, and evicts pages for them if necessary.
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

    /// [`Cache::try_charge`] for memory that is in use already. If nothing is evictable, the limit
    /// is exceeded (see `heap`).
    pub(crate) fn force_charge(&self, bytes: u64) {
        if !self.try_charge(bytes) {
            self.frames.charge_over(bytes);
        }
    }

    /// [`Cache::try_charge`] for tables of range locks, which stay while their files are open. They
    /// may use a small part of the limit; otherwise the tables of many files would leave nothing
    /// for pages.
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

    /// Evicts a page, or a batch of pages if frames of class `wanted` have magazines. Frames of
    /// other classes are put on the free lists, from where they are returned to the system. False:
    /// nothing is evictable.
    fn evict(&self, wanted: Option<Class>) -> bool {
        // insert_batch.IB3
        self.evict_queued(wanted) || self.drain_all_batches() && self.evict_queued(wanted)
    }

    /// [`Cache::evict`] for pages in the queues, or in the insert batch of this thread.
    fn evict_queued(&self, wanted: Option<Class>) -> bool {
        let most = wanted.map_or(1, |class| self.frames.batch(class).max(1));
        let mut inserts = self.insert_batches.local();
        let (mut passes, mut passes_max) = (0, 0);
        let mut victims = Victims::new();
        loop {
            passes += 1;
            let mut queues = self.queues();
            queues.insert_batch(&self.frames, inserts.drain());
            match queues.evict(&self.frames, most, &mut victims) {
                EvictPass::Evicted => {
                    drop((queues, inserts));
                    self.evicted(&victims, wanted);
                    return true;
                }
                EvictPass::Nothing => return false,
                EvictPass::More => passes_max = queues.passes_per_sweep().max(passes_max),
            }
            // The last pass may have requeued pages.
            if passes > passes_max + EXTRA_PASSES {
                return false;
            }
        }
    }

    /// Frees the frames of evicted pages.
    fn evicted(&self, victims: &Victims, wanted: Option<Class>) {
        self.counters.local().evicted(victims.len() as u64);
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

    /// Queues pages that became READY, or adds them to an insert batch. The caller still holds the
    /// guard under which they became READY.
    pub(crate) fn insert_pages<'a>(&self, pages: impl Iterator<Item = ReadyPage<'a>>) {
        let mut inserts = self.insert_batches.local();
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

    /// Inserts the pages of all insert batches. Returns whether there were any.
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

    /// The queue node of a page that `change` made evictable, if the evictor had taken it out of its
    /// queues (evict.E2). The caller passes it to [`Cache::requeue_evictable`].
    pub(crate) fn find_to_requeue(&self, word: &PageWord, change: Change) -> Option<FrameIndex> {
        let queue_node_of = |frame| self.frames.queue_node_of(frame);
        change.must_requeue().then(|| queue_node::of_page(word, queue_node_of)).flatten()
    }

    /// Queues pages again that became evictable, some in each hold of the lock.
    pub(crate) fn requeue_evictable(&self, nodes: &[FrameIndex]) {
        for some in nodes.chunks(REQUEUED_TOGETHER) {
            some.iter().for_each(|&node| copy::prefetch_line(self.frames.meta(node)));
            self.queues().requeue_evictable(&self.frames, some);
        }
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        #[cfg(test)]
        self.lock_count.fetch_add(1, Relaxed);
        self.queues.acquire()
    }

    /// Frees the frame of a page that left its word in another way than by eviction.
    pub(crate) fn release_discarded(&self, frame: FrameIndex, class: Class) {
        self.queues().remove(&self.frames, frame, false);
        self.frames.release(frame, class);
    }

    /// Evicts the pages from `first` to `last` that are not in use.
    pub(crate) fn evict_range(&self, core: &FileCore, first: PageIndex, last: PageIndex) {
        let class = core.page_class();
        core.for_each_page(&self.frames, first, last, &mut |held, _, word| {
            let mut queues = self.queues();
            let used = word.take_referenced();
            let seen = word.load();
            // A READY page is queued, except for moments in which the thread that made it READY has
            // not queued it.
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

    /// Calls `act` while the calling thread holds the locks that all misses and all writes share.
    #[cfg(test)]
    pub(crate) fn with_shared_locks<R>(&self, act: impl FnOnce() -> R) -> R {
        let _queues = self.queues();
        let _free: Vec<_> =
            Class::all().map(|class| self.frames.free_frames(class).lock()).collect();
        act()
    }

    /// How often the shared locks of misses were acquired since the last call: the queues' lock,
    /// and the locks of the free lists.
    #[cfg(test)]
    pub(crate) fn take_lock_counts(&self) -> (u64, u64) {
        let lists =
            Class::all().map(|class| self.frames.free_frames(class).lock_count.swap(0, Relaxed));
        (self.lock_count.swap(0, Relaxed), lists.sum())
    }

    /// The maximum number of pages scanned in one hold of the queues' lock (evict.E4) since the
    /// last call.
    #[cfg(test)]
    pub(crate) fn take_scanned_max(&self) -> u64 {
        std::mem::take(&mut self.queues.lock().unwrap().scanned_max)
    }

    /// The bytes of the pages that are queued, and of those that are not, as write-back keeps them.
    #[cfg(test)]
    pub(crate) fn queued_bytes(&self) -> (u64, u64) {
        self.queues().bytes()
    }

    /// Empties the table of a file that is not in use any more, and frees its nodes.
    pub(crate) fn tear_down(&self, core: &FileCore) {
        let class = core.page_class();
        let (first, last) = (PageIndex::FIRST, PageIndex::LAST);
        // Many at a time: adjacent frames leave the free list in ascending order then (magazine.MG4).
        let mut freed: SmallVec<[FrameIndex; FREED_TOGETHER]> = SmallVec::new();
        let part = self.frames.limit_bytes() / FREED_PART / core.page_bytes() as u64;
        let together = FREED_TOGETHER.min(part as usize).max(1);
        core.for_each_page(&self.frames, first, last, &mut |held, _, word| {
            // evict.E1: out of the queues before the core is freed. Only the evictor can still
            // access a READY page of this file, and it works under the lock.
            let mut queues = self.queues();
            let used = word.take_referenced();
            if word.load().is_unevictable() {
                self.writeback_counts.note(word.forget_writeback(), core.page_bytes());
            }
            if let Some(seen) = word.evict_for_good(&core.epoch) {
                held.vacated();
                queues.remove(&self.frames, seen.frame(), used);
                drop(queues);
                freed.push(seen.frame());
                if freed.len() >= together {
                    self.frames.release_many(&mut freed, class);
                    freed.clear();
                }
            }
        });
        self.frames.release_many(&mut freed, class);
        // An evictor that has just emptied a page of this file may still be leaving its table. It
        // holds the lock throughout, and a later evictor finds no frame of this file.
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
