//! A file as the engine knows it: one per inode and process, shared by all handles.
//!
//! The [`registry`] finds the cached file of an inode, whichever engine opened it first; its cache,
//! page size and backing stay as that opener chose them. A cached file lives as long as a handle
//! of it, or a background read into it, does.
//!
//! Lock order of an operation: turn to append -> range guard -> (queues, free lists).

pub(crate) mod registry;

pub(crate) mod space;

pub(crate) mod turns;

pub(crate) mod kept;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, Weak};

use millpond_rangelock::{Budget, ByteRange, Mode};

use crate::backend::Backend;
use crate::cache::Cache;
use crate::cache::parked;
use crate::cache::slab::Slab;
use crate::cache::table::{FileCore, PageIndex};
use crate::error::{Error, Op, Result};
use crate::inode::kept::Kept;
use crate::inode::registry::{FileId, Found};
use crate::inode::space::Space;
use crate::inode::turns::Turns;
use crate::io::backend::{BackingFile, OpenedFor, uring};
use crate::io::flight::Flight;
use crate::io::pool::Pool;
use crate::options::{OpenOptions, PAGE_BYTES_MIN, WriteMode};
use crate::range_lock::{Guard, Kind, LOCK_BYTES, Ranges};
use crate::survival::changes::Told;
use crate::survival::{Survival, mark};
use crate::writeback::{self, Flusher, LAST_PAGE, Writeback};

/// What an open file costs beside its core: its object and range lock, with what that keeps for those who
/// wait; its backing, its entry in the registry and what the allocator adds, rounded up; and in debug builds
/// what the range lock remembers of its holders.
const FILE_BYTES: u64 = (size_of::<CachedFile>() + LOCK_BYTES + 1024) as u64
    + if cfg!(debug_assertions) { 384 } else { 0 };

/// What the handles of an engine share.
pub(crate) struct Shared {
    pub(crate) cache: Cache,
    pub(crate) hit_path: AtomicBool,
    pub(crate) backend: Backend,
    pub(crate) range_lock: Kind,
    pub(crate) readahead_bytes_max: u64,
    pub(crate) pinned_bytes: std::sync::atomic::AtomicU64,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) flight: crate::sync::Arc<Flight>,
    pub(crate) workers: Arc<Pool>,
}

impl Shared {
    /// See [`crate::Stats::has_lost_keeper`].
    pub(crate) fn has_lost_keeper(&self) -> bool {
        self.cache.frames.survival().is_some_and(Survival::has_lost_keeper)
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

fn file_size(fd: &OwnedFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_size as u64)
}

/// One file of this process.
pub(crate) struct CachedFile {
    core: NonNull<FileCore>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) ranges: Ranges,
    pub(crate) backing: Arc<dyn BackingFile>,
    /// Appends take turns, so that each finds the end where it looked for it.
    pub(crate) appending: Turns,
    /// Descriptors are offered to `backing` one at a time: of two that it opened again for one purpose,
    /// one would have to be closed, and the process's POSIX locks would go with it.
    attaching: Mutex<()>,
    opened_mode: WriteMode,
    /// How many want writes to go through, whatever the mode; see [`CachedFile::begin_through`].
    through: AtomicUsize,
    pub(crate) writeback: Writeback,
    pub(crate) space: Space,
    pub(crate) kept: Kept,
    pub(crate) handles: AtomicUsize,
    pub(crate) this: Weak<CachedFile>,
    pub(crate) id: FileId,
}

// SAFETY: the core is of atomics, in memory that `shared` keeps; it is freed by `drop` alone.
unsafe impl Send for CachedFile {}
// SAFETY: as above.
unsafe impl Sync for CachedFile {}

/// In a forked child: leaves behind what is the parent's.
pub(crate) fn forget_parent() {
    registry::forget_parent();
    writeback::forget_parent();
    parked::forget_parent();
    uring::forget_parent();
}

impl CachedFile {
    /// Finds or makes the cached file of `fd`. Returns the descriptor, too, where the file does
    /// not need it: the handle keeps it, as closing it could drop the process's POSIX locks.
    pub(crate) fn open(
        shared: &Arc<Shared>,
        fd: OwnedFd,
        options: &OpenOptions,
    ) -> Result<(Arc<CachedFile>, Option<OwnedFd>)> {
        if shared.cache.frames.are_the_parents() {
            return Err(Error::Forked { op: Op::Open });
        }
        let failed = |source: io::Error| Error::io(Op::Open, 0, 0, source);
        let stat = rustix::fs::fstat(&fd).map_err(|error| failed(error.into()))?;
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::RegularFile => {}
            kind => {
                let directory = kind == rustix::fs::FileType::Directory;
                return Err(Error::NotRegular { directory });
            }
        }
        let id = FileId { device: stat.st_dev, inode: stat.st_ino };
        let file = match registry::find(id) {
            Found::Open(known) => {
                let page_bytes = known.core().page_bytes() as u32;
                if options.page_bytes.is_some_and(|bytes| bytes != page_bytes) {
                    let what =
                        format!("the file is open already, with pages of {page_bytes} bytes");
                    return Err(Error::InvalidInput { op: Op::Open, what });
                }
                known
            }
            // From here until it is entered, nobody else opens the file.
            Found::Place(place) => {
                // Who has the file open already has waited.
                if shared.backend.has_files() && !options.awaited {
                    mark::await_written(&stat, mark::PATIENCE).map_err(failed)?;
                }
                let backing = shared.backend.open(&fd, options.backing).map_err(failed)?;
                let page_bytes = options.page_bytes.unwrap_or(PAGE_BYTES_MIN);
                // Asked for only now: the last handle of the file may have changed it since `stat`.
                let size = match backing.len() {
                    Ok(size) => size,
                    Err(_) => file_size(&fd).map_err(failed)?,
                };
                let file = Self::new(shared, backing, id, size, page_bytes, options.write_mode)?;
                file.writeback.inherit(id, fd.as_fd());
                place.enter(&file);
                file
            }
        };
        let attaching = file.attaching.lock().expect("no panic under the lock");
        let opened =
            OpenedFor { read: options.read, write: options.writable(), direct: options.direct };
        let kept = file.backing.attach(fd, opened).map_err(failed)?;
        drop(attaching);
        space::look_at_limit(&file);
        Ok((file, kept))
    }

    /// A file that is not in the registry, on any back end.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn on(
        shared: &Arc<Shared>,
        backing: Arc<dyn BackingFile>,
        options: &OpenOptions,
    ) -> Result<Arc<CachedFile>> {
        static INODE: AtomicUsize = AtomicUsize::new(0);
        let inode = INODE.fetch_add(1, AcqRel) as u64;
        let id = FileId { device: u64::MAX, inode };
        let size = backing.len().map_err(|error| Error::io(Op::Open, 0, 0, error))?;
        let page_bytes = options.page_bytes.unwrap_or(PAGE_BYTES_MIN);
        Self::new(shared, backing, id, size, page_bytes, options.write_mode)
    }

    fn new(
        shared: &Arc<Shared>,
        backing: Arc<dyn BackingFile>,
        id: FileId,
        size: u64,
        page_bytes: u32,
        write_mode: WriteMode,
    ) -> Result<Arc<CachedFile>> {
        let no_buffers = || Error::NoBuffers { op: Op::Open };
        if !shared.cache.try_charge(FILE_BYTES) {
            return Err(no_buffers());
        }
        let Some(core) = Slab::alloc(&shared.cache, size, page_bytes.trailing_zeros()) else {
            shared.cache.frames.uncharge(FILE_BYTES);
            return Err(no_buffers());
        };
        // Weak: a guard may outlive its file, and must not be the last that keeps the engine.
        let budget: Weak<dyn Budget> = Arc::<Shared>::downgrade(shared);
        let kept = Kept::default();
        let backing = match shared.cache.frames.survival() {
            Some(_) => Arc::new(Told::new(backing, &kept.changes, shared)),
            None => backing,
        };
        Ok(Arc::new_cyclic(|this| CachedFile {
            core,
            shared: Arc::clone(shared),
            ranges: shared.range_lock.lock(budget),
            backing,
            appending: Turns::default(),
            attaching: Mutex::new(()),
            opened_mode: write_mode,
            through: AtomicUsize::new(0),
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

    /// When writes reach the back end. Under a guard, a write that finds `Back` is over before
    /// [`CachedFile::begin_through`] writes back.
    pub(crate) fn write_mode(&self) -> WriteMode {
        // Acquire: the guard orders it; see `begin_through`.
        if self.through.load(Acquire) > 0 { WriteMode::Through } else { self.opened_mode }
    }

    /// Has writes go through until [`CachedFile::end_through`], and writes back what waits: when
    /// this returns, the back end has it all, and the keeper has nothing to do with the file, which
    /// others may change; and the flags of its descriptors are as they were given.
    pub(crate) fn begin_through(&self) -> Result<()> {
        // AcqRel: before the guard is asked for. Who has one that conflicts may not have seen it,
        // and is waited for; who gets one later has.
        self.through.fetch_add(1, AcqRel);
        let settled = self.settle(true);
        self.backing.set_plain(true);
        settled
    }

    pub(crate) fn end_through(&self) {
        // Release: what went past the cache meanwhile comes before writes that wait again.
        self.through.fetch_sub(1, Release);
        self.backing.set_plain(false);
    }

    /// Writes back what waits, and gives back space that was reserved for more: nothing is left to
    /// be done later that would show in the file's times.
    pub(crate) fn settle(&self, let_go: bool) -> Result<()> {
        if self.opened_mode == WriteMode::Through {
            return Ok(());
        }
        let guard = self.lock(0, u64::MAX, Mode::Exclusive);
        writeback::write_back(self, 0, LAST_PAGE, Op::Sync)?;
        space::trim(self, self.core().size.load(Acquire));
        if let_go {
            self.let_go();
        }
        drop(guard);
        Ok(())
    }

    /// Parts all files of the engine from its keeper, which writes what is dirty: writes that begin later
    /// go through.
    ///
    /// Files are written back first, so that the keeper finds nothing to write. What can't be written
    /// back now it may have more luck with; until it is done the guards of those files are held, so that
    /// no write comes in between, and the flusher writes nothing but what the keeper writes.
    pub(crate) fn leave_keeper(shared: &Arc<Shared>) {
        let Some(survival) = shared.cache.frames.survival() else { return };
        survival.part();
        let files: Vec<_> = registry::all()
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|file| Arc::ptr_eq(&file.shared, shared))
            .collect();
        let mut held = Vec::new();
        for file in &files {
            // Before the guard is asked for, as in `begin_through`.
            file.stay_through();
            if file.settle(true).is_err() {
                held.push(file.lock(0, u64::MAX, Mode::Exclusive));
            }
        }
        survival.goodbye();
        drop(held);
    }

    /// Has writes go through for as long as the file is open.
    pub(crate) fn stay_through(&self) {
        self.through.fetch_add(1, AcqRel);
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.shared.cache
    }

    /// The page of byte `offset`.
    #[inline]
    pub(crate) fn page_of(&self, offset: u64) -> PageIndex {
        offset >> self.core().page_shift
    }

    #[inline]
    pub(crate) fn start_of(&self, page: PageIndex) -> u64 {
        page << self.core().page_shift
    }

    /// The bytes from `start` to `end`, rounded out to whole pages.
    pub(crate) fn pages(&self, start: u64, end: u64) -> ByteRange {
        let mask = self.core().page_bytes() as u64 - 1;
        ByteRange::new(start & !mask, end.saturating_add(mask) & !mask).expect("start <= end")
    }

    /// Waits for a guard over the pages of the bytes from `start` to `end`.
    pub(crate) fn lock(&self, start: u64, end: u64, mode: Mode) -> Guard<'_> {
        self.ranges.lock(self.pages(start, end), mode)
    }

    /// How many pages an operation takes in one go: what the cache can spare.
    pub(crate) fn chunk_pages(&self, at_most: usize) -> usize {
        let spare = self.cache().frames.limit_bytes() / 8 / self.core().page_bytes() as u64;
        (spare as usize).clamp(1, at_most)
    }
}

impl Drop for CachedFile {
    fn drop(&mut self) {
        // Before somebody else opens the file anew: the one whom it concerned may have failed to open it.
        writeback::forget_failures(self);
        registry::leave(self.id);
        self.writeback.uncharge(self.cache());
        self.space.heap.set(self.cache(), 0);
        self.cache().tear_down(self.core());
        Slab::free(self.cache(), self.core);
        self.cache().frames.uncharge(FILE_BYTES);
    }
}
