//! A file as the engine knows it: one per inode and process, shared by all handles.
//!
//! The [`registry`](mod@registry) finds the cached file of an inode, whichever engine opened it first. Its cache,
//! page size and backing stay as that opener chose them. A cached file lives as long as a handle of it, or another
//! reference to it. Its pages are dropped with it. Without a descriptor, and the lease that goes with one
//! under `millpond run`, the process would not notice changes by other processes, and the inode number may belong to
//! another file at the next open.
//!
//! A file of one page costs a leaf of 4 KiB beside it. Many such files spend half of their memory on that. The gain
//! is a single form of table, with one look-up for all files.
//!
//! - **CF1** When the last close returns, the process has no descriptor of the file open. So the closing thread drops the
//!   last reference, and closes the descriptors itself. Before that it waits for the threads of the engine that have a
//!   reference: for workers of the flusher by flusher.FL8, and for background reads by an exclusive guard over the whole
//!   file ([`CachedFile::release`]). A background read drops its reference to the backing file before its completion
//!   runs. The completion drops the reference to the cached file before it releases the guard of the read. The close
//!   does not wait longer than [`STALL_TIMEOUT`](crate::writeback::state::writer_token::STALL_TIMEOUT) for the reads of
//!   a file without writes.
//!
//! Fields that each operation changes share no cache line with fields that hits read (test `shared_lines`).
//!
//! Lock order of an operation: turn to append -> range guard -> (queues, free lists).

pub(crate) mod open;

mod length;

pub(crate) mod registry;

pub(crate) mod leaves;

pub(crate) mod space;

pub(crate) mod turns;

pub(crate) mod keeper_slot;

pub(crate) mod mapped_pages;

pub(crate) mod optimistic;

pub(crate) mod keeping;

pub(crate) mod untorn;

use std::ptr::NonNull;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, Weak};

use millpond_rangelock::{Budget, ByteRange, Guard, Mode, RangeLock};

use crate::backend::Backend;
use crate::cache::Cache;
use crate::cache::accounting::copies::{Copies, CopyOwner};
use crate::cache::table::FileCore;
use crate::cache::table::page::Change;
use crate::cache::table::wait_queue;
use crate::error::{Error, Op, Result};
use crate::file_id::FileId;
use crate::inode::keeper_slot::KeeperSlot;
use crate::inode::mapped_pages::MappedPages;
use crate::inode::optimistic::Unguarded;
use crate::inode::registry::Registry;
use crate::inode::space::account::Space;
use crate::inode::turns::{Turn, Turns};
use crate::io::backend::BackingFile;
use crate::io::pool::Pool;
use crate::io::read_limit::Flight;
use crate::io::retry;
use crate::io::transfer::{Direction, Transfer};
use crate::options::{Backing, OpenOptions, WriteMode};
use crate::process_local::ProcessStatic;
use crate::recovery::changes::Changes;
use crate::recovery::mark::Marks;
use crate::units::{FrameIndex, PageIndex};
use crate::waits::{TaskWaits, ThreadWaits, WaitFor};
use crate::writeback::state::{Flusher, Writeback, unreported_errors};

/// The memory of an open file beside its core: its object, its range lock with the state kept for waiters, its
/// backing, its entry in the registry and the allocator's overhead, rounded up. In debug builds, also the range
/// lock's records of its holders.
const FILE_BYTES: u64 = (size_of::<CachedFile>() + size_of::<RangeLock>() + 1024) as u64
    + if cfg!(debug_assertions) { 384 } else { 0 };

/// Size of the range lock's regions. A direct request of 16 pages is one piece, and so is a page. With larger
/// regions, many readers of one region would share a word.
const REGION_BYTES: u64 = 64 << 10;

/// Bit of [`CachedFile::through`]: writes go through until the file is closed.
const STAYS_THROUGH: usize = 1 << (usize::BITS - 1);

/// Whether the caller may be made to wait: for range guards, for a flush, for syncs of other threads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocking {
    Wait,
    Try,
}

/// The parts of an engine that all of its handles share.
pub(crate) struct Shared {
    pub(crate) cache: Cache,
    pub(crate) hit_path: AtomicBool,
    pub(crate) backend: Backend,
    pub(crate) marks: Marks,
    pub(crate) readahead_bytes_max: u64,
    pub(crate) pinned_bytes: std::sync::atomic::AtomicU64,
    /// Frames in use by reads without a guard.
    pub(crate) bounces: std::sync::atomic::AtomicU64,
    pub(crate) flusher: Arc<Flusher<CachedFile>>,
    pub(crate) flight: crate::sync::Arc<Flight>,
    pub(crate) workers: Arc<Pool>,
    pub(crate) tasks: TaskWaits,
    pub(crate) copies: Copies,
}

impl Shared {
    /// See [`crate::stats::Stats::has_lost_keeper`].
    pub(crate) fn has_lost_keeper(&self) -> bool {
        self.cache.frames.recovery().is_some_and(|recovery| recovery.has_lost_keeper())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.workers.stop();
        self.flusher.stop();
    }
}

/// What range locks grow by.
impl Budget for Shared {
    fn try_take(&self, bytes: usize) -> bool {
        self.cache.try_charge_locks(bytes as u64)
    }

    fn give_back(&self, bytes: usize) {
        self.cache.uncharge_locks(bytes as u64);
    }
}

impl CopyOwner for Shared {
    fn cache(&self) -> &Cache {
        &self.cache
    }

    fn copies(&self) -> &Copies {
        &self.copies
    }
}

/// One file of this process.
pub(crate) struct CachedFile {
    core: NonNull<FileCore>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) ranges: Arc<RangeLock>,
    pub(crate) backing: Arc<dyn BackingFile>,
    /// Appends take turns, so that each finds the end of the file where it looked for it.
    pub(crate) appending: Turns,
    /// Descriptors are offered to `backing` one at a time. If two descriptors were opened again for one purpose, one
    /// would have to be closed, and that would drop the process's POSIX locks.
    pub(crate) attaching: Mutex<()>,
    pub(crate) opened_mode: WriteMode,
    /// The block that a power cut must not tear, in bytes.
    pub(crate) untorn: Option<u32>,
    /// Number of reasons for writes to go through in any mode (see [`CachedFile::suspend_writeback`]), and
    /// [`STAYS_THROUGH`].
    pub(crate) through: AtomicUsize,
    /// Number of callers that need the descriptors' flags left alone.
    plain: AtomicUsize,
    /// With mapped backing.
    pub(crate) mapped_pages: Option<Box<MappedPages>>,
    pub(crate) unguarded: Unguarded,
    pub(crate) writeback: Writeback,
    pub(crate) space: Space,
    pub(crate) kept: KeeperSlot,
    pub(crate) handles: AtomicUsize,
    pub(crate) this: Weak<CachedFile>,
    pub(crate) id: FileId,
}

// SAFETY: the core consists of atomics, in memory that `shared` keeps alive; only `drop` frees it.
unsafe impl Send for CachedFile {}
// SAFETY: as above.
unsafe impl Sync for CachedFile {}

static REGISTRY: ProcessStatic<Registry<CachedFile>> = ProcessStatic::new();

/// The files that are open in this process.
pub(crate) fn registry() -> &'static Registry<CachedFile> {
    REGISTRY.get_or_create()
}

/// In a forked child: abandons the parent's registry and other state of the parent, in any state of its lock. So a
/// file that the child opens is never taken for a file of the parent.
pub(crate) fn forget_parent() {
    REGISTRY.abandon();
    unreported_errors::forget_parent();
    wait_queue::forget_parent();
}

/// The core of a file, and room for the rest of it.
fn take_core(cache: &Cache, size: u64, page_bytes: u32) -> Option<NonNull<FileCore>> {
    if !cache.try_charge(FILE_BYTES) {
        return None;
    }
    let core = cache.take_core(size, page_bytes.trailing_zeros());
    if core.is_none() {
        cache.frames.uncharge(FILE_BYTES);
    }
    core
}

impl CachedFile {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        backing: Arc<dyn BackingFile>,
        id: FileId,
        size: u64,
        page_bytes: u32,
        options: &OpenOptions,
    ) -> Result<Arc<CachedFile>> {
        let take = || take_core(&shared.cache, size, page_bytes);
        let waited = || {
            shared.flusher.await_dropped();
            take()
        };
        let core = take().or_else(waited).ok_or(Error::NoBuffers { op: Op::Open })?;
        // Weak: a guard may outlive its file, and must not be the last that keeps the engine.
        let budget: Weak<dyn Budget> = Arc::<Shared>::downgrade(shared);
        let mapped_pages = matches!(options.backing, Backing::Mapped);
        let mapped_pages =
            mapped_pages.then(|| Box::new(MappedPages::new(id, shared.backend.has_files())));
        let mut kept = KeeperSlot::default();
        if let Some(recovery) = shared.cache.frames.recovery() {
            kept.changes = Arc::new(Changes::new(recovery));
            backing.observe(Arc::clone(&kept.changes) as _);
        }
        Ok(Arc::new_cyclic(|this| CachedFile {
            core,
            shared: Arc::clone(shared),
            ranges: Arc::new(RangeLock::with_region_bytes(REGION_BYTES).with_budget(budget)),
            backing,
            appending: Turns::default(),
            attaching: Mutex::new(()),
            opened_mode: options.write_mode,
            untorn: options.untorn,
            through: AtomicUsize::new(0),
            plain: AtomicUsize::new(0),
            mapped_pages,
            unguarded: Unguarded::default(),
            writeback: Writeback::default(),
            space: Space::default(),
            kept,
            handles: AtomicUsize::new(0),
            this: Weak::clone(this),
            id,
        }))
    }

    #[inline]
    pub(crate) fn core(&self) -> &FileCore {
        // SAFETY: the core is ours until `drop`.
        unsafe { self.core.as_ref() }
    }

    /// When writes reach the back end. Under a guard: a write that finds `Back` ends before
    /// [`CachedFile::suspend_writeback`] writes back.
    pub(crate) fn write_mode(&self) -> WriteMode {
        // Acquire: the guard orders it; see `suspend_writeback`. Argued: there.
        if self.through.load(Acquire) > 0 { WriteMode::Through } else { self.opened_mode }
    }

    /// Ends one [`CachedFile::suspend_writeback`]; without one, has no effect.
    pub(crate) fn resume_writeback(&self) {
        let less_one = |count: usize| (count & !STAYS_THROUGH > 0).then(|| count - 1);
        // Release: writes past the cache come before later writes that stay in the cache. Argued: the guards under
        // which both are done order them, too.
        if self.through.fetch_update(Release, Relaxed, less_one).is_ok() {
            self.backing.set_plain(false);
        }
    }

    /// Has writes go through for as long as the file is open.
    pub(crate) fn keep_write_through(&self) {
        // Argued: as in `suspend_writeback`.
        self.through.fetch_or(STAYS_THROUGH, AcqRel);
    }

    /// Has the descriptors keep their flags until [`CachedFile::end_plain`].
    pub(crate) fn begin_plain(&self) {
        // Relaxed: a count; the gate below has a lock.
        self.plain.fetch_add(1, Relaxed);
        self.backing.set_plain(true);
    }

    /// Ends one [`CachedFile::begin_plain`]; without one, has no effect, so that it can't end one of the
    /// engine's own.
    pub(crate) fn end_plain(&self) {
        // Relaxed: as in `begin_plain`.
        if self.plain.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1)).is_ok() {
            self.backing.set_plain(false);
        }
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.shared.cache
    }

    /// Frees the frame of a page, which is the caller's.
    pub(crate) fn free_frame(&self, frame: FrameIndex) {
        self.cache().frames.free(frame, self.core().page_class());
    }

    /// Drops a pin of a page's frame, and frees the frame if that was the last reference.
    pub(crate) fn unpin(&self, frame: FrameIndex) {
        if self.cache().frames.meta(frame).pins.unpin() {
            self.free_frame(frame);
        }
    }

    /// Notes a transition of a page.
    pub(crate) fn note(&self, change: Change) {
        let page_bytes = self.core().page_bytes();
        self.writeback.counts.note(change, page_bytes);
        self.cache().writeback_counts.note(change, page_bytes);
    }

    /// The page of byte `offset`.
    #[inline]
    pub(crate) fn page_of(&self, offset: u64) -> PageIndex {
        PageIndex::of_byte(offset, self.core().page_shift)
    }

    #[inline]
    pub(crate) fn start_of(&self, page: PageIndex) -> u64 {
        page.first_byte(self.core().page_shift)
    }

    /// The bytes from `start` to `end`, rounded out to whole pages.
    pub(crate) fn pages(&self, start: u64, end: u64) -> ByteRange {
        let mask = self.core().page_bytes() as u64 - 1;
        ByteRange::new(start & !mask, end.saturating_add(mask) & !mask).expect("start <= end")
    }

    /// Waits for a guard over the pages of the bytes from `start` to `end`.
    pub(crate) fn lock(&self, start: u64, end: u64, mode: Mode) -> FileGuard<'_> {
        let pages = self.pages(start, end);
        let guard = self.ranges.try_lock(pages, mode).unwrap_or_else(|| {
            let _waits = self.waits(WaitFor::Range, start, end.saturating_sub(start));
            self.ranges.lock(pages, mode)
        });
        self.locked(guard)
    }

    /// As [`CachedFile::lock`], if no holder and no waiter is in the way.
    #[inline(always)]
    pub(crate) fn try_lock(&self, start: u64, end: u64, mode: Mode) -> Option<FileGuard<'_>> {
        self.ranges.try_lock(self.pages(start, end), mode).map(|guard| self.locked(guard))
    }

    /// The holder of an exclusive guard may change the file: reads without a guard find that (optimistic.U1,
    /// mapped_pages.MB2).
    #[inline]
    fn locked<'g>(&'g self, guard: Guard<'g>) -> FileGuard<'g> {
        let changing = match guard.mode() {
            Mode::Shared => None,
            Mode::Exclusive => self.begin_exclusive(guard.range()),
        };
        FileGuard { changing, guard }
    }

    #[inline(never)]
    fn begin_exclusive(&self, range: ByteRange) -> Option<&MappedPages> {
        self.unguarded.change(self.page_of(range.start()), self.page_of(range.end() - 1));
        let pages = self.mapped_pages.as_deref();
        pages.inspect(|pages| pages.begin_change(range.start(), range.end()))
    }

    /// Updates the size from the kernel's (mapped_pages.MB3), with mapped backing. The caller has no guard.
    pub(crate) fn refresh_size(&self) -> Result<()> {
        if self.mapped_pages.is_some() { self.adopt_size().map(drop) } else { Ok(()) }
    }

    pub(crate) fn turn_to_append(&self) -> Turn<'_> {
        let _waits = self.waits(WaitFor::Turn, u64::MAX, 0);
        self.appending.take()
    }

    /// Marks the calling thread as waiting, for that many bytes at `offset`, until it is dropped.
    pub(crate) fn waits(&self, what: WaitFor, offset: u64, len: u64) -> ThreadWaits<'_> {
        self.cache().counters.local().wait.begin(what, self.id, offset, len)
    }

    /// Has the back end carry out all transfers of `batch`, and waits for their ends.
    pub(crate) fn carry_out(&self, batch: &mut [Transfer<'_>]) {
        let Some(first) = batch.first() else { return };
        let what = match first.direction {
            Direction::Read => WaitFor::Read,
            Direction::Write => WaitFor::Write,
        };
        let _waits = self.waits(what, first.offset, first.segments.left());
        retry::run(&*self.backing, batch);
    }

    /// [`CachedFile::carry_out`] of one transfer.
    pub(crate) fn carry_out_one<'t>(&self, transfer: Transfer<'t>) -> Transfer<'t> {
        let mut batch = [transfer];
        self.carry_out(&mut batch);
        let [transfer] = batch;
        transfer
    }

    /// The number of pages that an operation takes in one go: the cache's spare memory, at most.
    pub(crate) fn chunk_pages(&self, at_most: usize) -> usize {
        let spare = self.cache().frames.limit_bytes() / 8 / self.core().page_bytes() as u64;
        (spare as usize).clamp(1, at_most)
    }
}

/// A guard over pages of a file.
pub(crate) struct FileGuard<'f> {
    /// The holder may change pages with mapped backing (mapped_pages.MB2).
    changing: Option<&'f MappedPages>,
    guard: Guard<'f>,
}

impl FileGuard<'_> {
    pub(crate) fn range(&self) -> ByteRange {
        self.guard.range()
    }
}

impl Drop for FileGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(pages) = self.changing {
            let range = self.guard.range();
            pages.end_change(range.start(), range.end());
        }
    }
}

impl Drop for CachedFile {
    fn drop(&mut self) {
        self.mapped_pages.as_deref().inspect(|pages| pages.unmap());
        // Before another open of the file: the opener that the failures concerned may have failed.
        self.writeback.forget_failures(self.id, &*self.backing);
        registry().unregister_file(self.id);
        self.writeback.uncharge(self.cache());
        self.space.heap.set(self.cache(), 0);
        self.cache().tear_down(self.core());
        self.cache().slab.free(self.core);
        self.cache().frames.uncharge(FILE_BYTES);
    }
}
