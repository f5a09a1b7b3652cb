//! What only Millpond's own crates use, with the feature `internals`. It may change in any version.
//!
//! Most of it is for the preload library. The main part is a read into the caller's memory that outlives the call and ends with a callback. The library has
//! completion queues of its own. As in the contract of Linux AIO, the kernel may write to the program's memory until
//! the completion has been delivered.
//!
//! ```text
//!   start -> a hit: the result, at once
//!         -> a bypass: into the caller's memory -> the callback
//!         -> else `task`, stepped by who ends the fills it waits for -> the callback
//! ```
//!
//! Only in a read that bypasses the cache (`background_read`), and in one that a worker carries out, do the back end and the
//! kernel have the caller's memory. Each step of a task copies cached bytes (`read::miss`).

use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::api::background_read::BackgroundBypass;
use crate::api::engine::{Engine, check_cache_bytes};
use crate::api::file::{File, in_range, release_handle};
use crate::api::shared_cache::SharedCache;
use crate::error::{Error, Op, Result};
use crate::event::event;
use crate::huge_memory::MemoryChoice;
use crate::io::batch;
use crate::io::pool::Pool;
use crate::io::segment::{Segment, SegmentIter};
use crate::io::segment_list::RawList;
use crate::options::{EngineBuilder, OpenOptions, Published};
use crate::queue::task::{Reading, Task};
use crate::read::hit::HitPath;
use crate::read::miss::{PendingRead, StepScope};
use crate::read::optimistic_read;
use crate::read::plan::BypassPolicy;

pub use crate::api::engine::CACHE_BYTES_MIN;
pub use crate::read::optimistic_read::{Begun, KernelRead, UnguardedRead};
pub use crate::stats::kept::HitCounts;

/// One cache for several processes: the engine of one, which others read without a system call (`cache::shared`).
///
/// The server offers its cache by [`EngineBuilder::shared`](crate::EngineBuilder::shared). A client creates a
/// `ClientMemory` and sends its descriptor. The server attaches it and sends a descriptor of the cache, and two numbers
/// for each file. The client maps the cache, and each of its threads reads with a `SharedReader`. How they send is theirs.
pub mod shared {
    pub use crate::api::shared_cache::{
        AttachedClient, ClientAttachment, ClientMemory, SharedCache, SharedClient, SharedFile,
        SharedReader, process_number,
    };
    pub use crate::huge_memory::{MemoryChoice, MemoryKind};
}

/// Reads of the kernel's page cache, of which the preload library has descriptors of its own.
#[cfg(not(loom))]
pub mod page_cache {
    pub use crate::page_cache::file_system::PAGE_CACHED;
    pub use crate::page_cache::{Inode, PAGE_BYTES, WriteExtent, Writing};
}

/// Called with a read's result, on any thread, perhaps the one that started it. It must not wait.
pub type ReadDone = Box<dyn FnOnce(Result<usize>) + Send>;

struct RawReading {
    file: Arc<File>,
    segments: Box<[Segment<'static>]>,
    offset: u64,
    policy: BypassPolicy,
    done: ReadDone,
}

impl Reading for RawReading {
    fn file(&self) -> &Arc<File> {
        &self.file
    }

    fn with_read<T>(&mut self, use_read: impl FnOnce(&PendingRead<'_>) -> T) -> T {
        let dst = (&*self.segments).into();
        let RawReading { file, offset, policy, .. } = self;
        let file = &file.cached;
        use_read(&PendingRead { file, dst, offset: *offset, ring: None, policy: *policy })
    }

    fn end(self, result: Result<usize>) {
        let done = self.done;
        release_handle(self.file, move || done(result));
    }
}

/// Threads for jobs that may block.
pub struct Aside {
    workers: Arc<Pool>,
}

impl Aside {
    /// Has one of the threads carry out `job`, which may wait. If no thread can be started, the calling thread does.
    pub fn run(&self, job: Box<dyn FnOnce() + Send>) {
        self.workers.run(job);
    }
}

impl File {
    /// [`RawFile::read_vectored_at`](crate::file::RawFile::read_vectored_at) that does not wait. Returns the result of a read that hits, or is refused;
    /// otherwise `None`, and `done` is called with the result. Does not block, except for locks that are held for
    /// moments. `fills`: the read is to fill its pages ([`Begun::Fills`]).
    ///
    /// # Safety
    ///
    /// As for [`RawFile::read_at`](crate::file::RawFile::read_at), for each buffer, and until the result has been delivered.
    ///
    /// # Panics
    ///
    /// If the handle's reads are direct.
    ///
    /// # Errors
    ///
    /// As for [`RawFile::read_at`](crate::file::RawFile::read_at).
    pub unsafe fn start_read_raw(
        self: &Arc<File>,
        dst: &[libc::iovec],
        offset: u64,
        fills: bool,
        done: impl FnOnce() -> ReadDone,
    ) -> Option<Result<usize>> {
        assert!(self.hits || !self.read, "reads go through the cache");
        let segments: Box<[Segment<'static>]> = (dst.iter())
            .filter(|one| one.iov_len > 0)
            // SAFETY: the caller's promise: the memory is valid until the read has ended. No thread uses the segments
            // after that.
            .map(|one| unsafe { Segment::new(one.iov_base.cast(), one.iov_len) })
            .collect();
        let len = segments.iter().map(|one| one.len() as u64).sum();
        if let Err(error) = self.check_read(offset, len) {
            return Some(Err(error));
        }
        if len == 0 {
            return Some(Ok(0));
        }
        let dst: SegmentIter<'_> = (&*segments).into();
        let policy = if fills { BypassPolicy::Fills } else { BypassPolicy::Filtered };
        let wanted = PendingRead { file: &self.cached, dst, offset, ring: None, policy };
        if let Some(moved) = wanted.try_hit() {
            return Some(Ok(moved));
        }
        self.read_ahead(offset, len);
        let begin = || BackgroundBypass::begin(Arc::clone(self), dst, offset);
        let file = match if fills { Err(Arc::clone(self)) } else { begin() } {
            Err(file) => file,
            Ok(around) => {
                let (list, done) = (RawList::of_segments(segments), done());
                around.submit(list, offset, None, move |result, _| done(result));
                return None;
            }
        };
        Task::of(RawReading { file, segments, offset, policy, done: done() }).run(StepScope::Full);
        None
    }

    /// Begins a read of `len` bytes at `offset` to `start`. The result may be a read for the kernel to carry out by
    /// Linux AIO: then the caller submits it to the kernel before it closes the handle. At the end,
    /// [`File::end_unguarded`] returns whether the bytes read count; until then no guard is held (`read::optimistic_read`).
    /// Does not block.
    ///
    /// # Safety
    ///
    /// As for [`RawFile::read_at`](crate::file::RawFile::read_at), and until the kernel has completed it. A handle of the file outlives the
    /// read, which is not dropped before that.
    pub unsafe fn begin_unguarded(&self, start: *mut u8, len: usize, offset: u64) -> Begun {
        if !self.hits || self.check_read(offset, len as u64).is_err() {
            return Begun::Not;
        }
        // SAFETY: the caller's promise.
        let begun = unsafe { optimistic_read::begin(&self.cached, start, len, offset) };
        if matches!(begun, Begun::ByKernel(..)) {
            self.read_ahead(offset, len as u64);
        }
        begun
    }

    /// Whether the kernel's bytes, which must be all that were requested, count as read. If so, they are at `start`;
    /// otherwise the read is to be repeated. Does not block.
    ///
    /// # Safety
    ///
    /// `read` and `start` are those of a [`File::begin_unguarded`] of this handle.
    pub unsafe fn end_unguarded(&self, read: UnguardedRead, start: *mut u8) -> bool {
        // SAFETY: the caller's promise.
        unsafe { read.end(&self.cached, start) }
    }

    /// [`RawFile::try_read_hit`](crate::file::RawFile::try_read_hit) with counters that the thread caches; counters of an engine other than
    /// this file's are replaced.
    ///
    /// # Safety
    ///
    /// As for [`RawFile::read_at`](crate::file::RawFile::read_at). The cell belongs to the calling thread, and lives as long as its
    /// thread-local storage.
    #[inline]
    pub unsafe fn try_read_hit_counted(
        &self,
        counts: &Cell<HitCounts>,
        dst: *mut u8,
        len: usize,
        offset: u64,
    ) -> Option<usize> {
        if !self.hits || !in_range(offset, len as u64) {
            return None;
        }
        // SAFETY: the caller's promise is the same.
        let slot = unsafe { self.cached.cache().counters.cell_of_thread(counts) };
        let path = HitPath::new(&self.cached, slot, self.tries.load(Relaxed));
        // SAFETY: the caller's promise is the same.
        unsafe { path.try_read(dst, len, offset) }
    }

    /// [`File::suspend_writeback`] for a caller that ends it elsewhere, by [`File::end_through`]. After an error
    /// write-back is suspended, too.
    ///
    /// # Errors
    ///
    /// As for [`File::write_back`].
    pub fn begin_through(&self) -> Result<()> {
        self.check_process(Op::Sync)?;
        self.cached.suspend_writeback()
    }

    /// Ends a suspension by [`File::begin_through`]. A call without one has no effect.
    pub fn end_through(&self) {
        self.cached.resume_writeback();
    }

    /// The threads of the file's engine.
    pub fn aside(&self) -> Aside {
        Aside { workers: Arc::clone(&self.cached.shared.workers) }
    }

    /// Carries out `work`, which starts several reads: they go to the back end together, when `work` returns. `work`
    /// must not wait for anything unless it has called [`File::start_now`] before: the event may depend on one of
    /// those reads.
    pub fn start_together<R>(work: impl FnOnce() -> R) -> R {
        let batch = batch::open();
        let result = work();
        drop(batch);
        result
    }

    /// Has `telling` called when this thread has submitted, or ended, all requests of its present batch; at once if
    /// it has no batch.
    pub fn at_end(telling: Box<dyn FnOnce()>) {
        batch::defer(telling);
    }

    /// The reads that were started so far in [`File::start_together`] go to the back end.
    pub fn start_now() {
        batch::wake_now();
    }
}

impl Engine {
    /// Changes the memory limit while files are in use: lower, which frees memory to the system, and higher
    /// again, up to the limit that the engine was built with. Limits on dirty and on unsynced bytes change
    /// with it, except for a lower one of [`EngineBuilder::dirty_bytes_max`].
    ///
    /// Lowering evicts pages until the limit is met, in this thread and in steps; reads and writes continue
    /// concurrently. It does not wait for views, nor for dirty pages, which are written back next. So the
    /// limit that is reached and returned may be higher than the requested one; the caller should call
    /// again later. docs/memory-budget.md lists the gaps that keep it internal.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`]: less than the smallest supported limit, or more than the engine was built
    /// with.
    /// [`Error::Forked`]: the engine is the parent's.
    ///
    /// # Examples
    ///
    /// ```
    /// let engine = millpond::Engine::builder().cache_bytes(64 << 20).build()?;
    /// assert_eq!(engine.set_cache_bytes(1 << 20)?, 1 << 20);
    /// assert_eq!(engine.set_cache_bytes(64 << 20)?, 64 << 20);
    /// assert!(engine.set_cache_bytes(65 << 20).is_err());
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn set_cache_bytes(&self, cache_bytes: u64) -> Result<u64> {
        let cache = &self.shared().cache;
        if cache.frames.are_the_parents() {
            return Err(Error::Forked { op: Op::Build });
        }
        let has_keeper = cache.frames.recovery().is_some();
        check_cache_bytes(cache_bytes, cache.limit_bytes_max, has_keeper)?;
        let flusher = &self.shared().flusher;
        flusher.limits.set_cache_bytes(cache_bytes);
        cache.writeback_counts.set_limits(flusher.limits.dirty_bytes_max(), cache_bytes);
        let holds = cache.set_limit(cache_bytes);
        event!(info, cache_bytes, holds, "another limit");
        if holds > cache_bytes {
            flusher.request_reclaim(cache.writeback_counts.unevictable());
        }
        Ok(holds)
    }
}

impl Engine {
    /// The part of an engine that was built with [`EngineBuilder::shared`] for its clients. `None`: it was built
    /// without.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::Engine;
    /// use millpond::internals::shared::{ClientMemory, MemoryChoice, SharedClient};
    /// # use rustix::process::{PidfdFlags, getpid, pidfd_open};
    ///
    /// // The server.
    /// let engine = Engine::builder().cache_bytes(1 << 20).shared(MemoryChoice::Auto).build()?;
    /// let blob = engine.blob(4096, 4096)?;
    /// blob.claim(0..4096).fills.remove(0).bring(&[7; 4096]);
    /// # let client = pidfd_open(getpid(), PidfdFlags::empty()).map_err(std::io::Error::from).unwrap();
    ///
    /// // A client, here in the same process.
    /// let memory = ClientMemory::create().unwrap();
    /// let attached = engine.shared_cache().unwrap().attach(memory.descriptor(), client).unwrap();
    /// let cache = attached.descriptor().try_clone_to_owned().unwrap();
    /// let client = SharedClient::map(memory, &cache).unwrap();
    /// let mut bytes = [0; 10];
    /// let read = client.reader().unwrap().try_read(blob.shared_file().unwrap(), &mut bytes, 5);
    /// assert_eq!((read, bytes), (Some(10), [7; 10]));
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn shared_cache(&self) -> Option<SharedCache> {
        SharedCache::of(&self.shared().cache)
    }

    /// Whether the keeper, if there is one, died before the engine detached from it. Costs one load from memory.
    #[must_use]
    pub fn has_lost_keeper(&self) -> bool {
        self.shared().has_lost_keeper()
    }
}

impl EngineBuilder {
    /// [`EngineBuilder::published`], if possible, with a descriptor number out of the way of the program's.
    #[must_use]
    pub fn published_from(mut self, fd_min: RawFd) -> Self {
        self.published = Published::IfPossible(fd_min);
        self
    }
}

impl EngineBuilder {
    /// Puts the cache into memory that other processes may map read-only ([`shared`]). Not with a keeper.
    ///
    /// The memory limit holds as without it. The cache is in shared memory, which a cgroup charges as it does private
    /// memory, and `/proc/meminfo` counts as `Shmem`.
    #[must_use]
    pub fn shared(mut self, memory: MemoryChoice) -> Self {
        self.shared = Some(memory);
        self
    }
}

impl OpenOptions {
    /// The caller has waited for keepers itself, by [`crate::keeper::await_written`], and an open of this
    /// process that has the file must not wait for long.
    #[must_use]
    pub fn awaited(mut self, on: bool) -> Self {
        self.awaited = on;
        self
    }

    /// `create` and `create_new` need no `write`, as with `open(2)`.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// let options = OpenOptions::new().read(true).create(true);
    /// assert!(engine.open(dir.path().join("new"), &options).is_err());
    /// let file = engine.open(dir.path().join("new"), &options.create_for_reading(true))?;
    /// assert_eq!(file.len()?, 0);
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn create_for_reading(mut self, on: bool) -> Self {
        self.creates_for_reading = on;
        self
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::{BackendChoice, Backing};

    const BLOCK: usize = 4096;

    /// Goal: reads that miss end once, with their bytes, also in a cache of few pages. Reads that hit return at once.
    /// Reads beyond the end, or without permission, return that result at once.
    #[test]
    fn raw_reads_end_once() {
        const BLOCKS: usize = 200;
        let content: Vec<u8> = (0..BLOCKS * BLOCK).map(|at| (at / BLOCK + at) as u8).collect();
        let dir = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, &content).unwrap();
        for backing in [Backing::Buffered, Backing::Direct] {
            let builder = Engine::builder().backend(BackendChoice::Threads);
            let engine = builder.cache_bytes(256 << 10).build().unwrap();
            let options = OpenOptions::new().read(true).backing(backing);
            let file = match engine.open(&path, &options) {
                Ok(file) => Arc::new(file),
                Err(error) => return crate::skip::skip(error),
            };
            let mut memory = vec![0u8; BLOCKS * BLOCK];
            let (send, ended) = mpsc::channel();
            let (mut hits, mut started) = (0, 0);
            let base = memory.as_mut_ptr();
            let start = |block: usize| {
                let at = block * 7 % BLOCKS * BLOCK;
                let half = |from| libc::iovec {
                    // SAFETY: within `memory`.
                    iov_base: unsafe { base.add(at + from) }.cast(),
                    iov_len: BLOCK / 2,
                };
                let send = send.clone();
                let done = move |moved| send.send(moved).unwrap();
                // SAFETY: `memory` is used by the reads alone, until all have ended.
                unsafe {
                    let halves = [half(0), half(BLOCK / 2)];
                    file.start_read_raw(&halves, at as u64, false, || Box::new(done))
                }
            };
            for first in (0..BLOCKS).step_by(20) {
                File::start_together(|| {
                    for block in first..first + 20 {
                        match start(block) {
                            Some(moved) => {
                                assert_eq!(moved.unwrap(), BLOCK);
                                hits += 1;
                            }
                            None => started += 1,
                        }
                    }
                });
            }
            assert!(started > BLOCKS / 2, "{hits} hits of a cold cache");
            for _ in 0..started {
                assert_eq!(ended.recv().unwrap().unwrap(), BLOCK);
            }
            assert!(ended.try_recv().is_err(), "told twice");
            assert!(memory == content);
            let none = || -> ReadDone { unreachable!("told at once") };
            let end = content.len() as u64;
            let vector = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: BLOCK };
            // SAFETY: as above.
            let read = |offset| unsafe { file.start_read_raw(&[vector], offset, false, none) };
            assert_eq!(read(end).unwrap().unwrap(), 0);
            assert_eq!(read(u64::MAX - 1).unwrap().unwrap_err().errno(), libc::EINVAL);
        }
    }

    /// Goal: a read that the kernel carries out without a guard counts unless its pages were changed during the read.
    /// It is aligned for any memory of the reader. Pages that are cached, or missed again, are read in another way.
    #[test]
    fn reads_without_a_guard_tell_whether_they_count() {
        const BLOCKS: usize = 256;
        let content: Vec<u8> = (0..BLOCKS * BLOCK).map(|at| (at / BLOCK + at) as u8).collect();
        let dir = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, &content).unwrap();
        let builder = Engine::builder().backend(BackendChoice::Threads);
        let engine = builder.cache_bytes(16 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).backing(Backing::Direct);
        let file = match engine.open(&path, &options) {
            Ok(file) => file,
            Err(error) => return crate::skip::skip(error),
        };
        let mut memory = vec![0u8; 3 * BLOCK];
        let aligned = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(BLOCK));
        let begin = |at: usize, to: *mut u8| {
            // SAFETY: `memory` is there to the end, and the file.
            unsafe { file.begin_unguarded(to, BLOCK, (at * BLOCK) as u64) }
        };
        let carry_out = |read: &KernelRead, at: usize| {
            // SAFETY: the request that `begin_unguarded` returned.
            let read =
                unsafe { libc::pread(read.fd, read.memory.cast(), read.len, (at * BLOCK) as i64) };
            assert_eq!(read, BLOCK as isize);
        };
        for (at, shift) in [(3, 0), (5, 16), (7, 1)] {
            let to = aligned.wrapping_add(shift);
            let Begun::ByKernel(kernels, read) = begin(at, to) else { panic!("the first miss") };
            assert_eq!(kernels.memory == to, shift == 0);
            carry_out(&kernels, at);
            // SAFETY: of this file, to where it was begun; the bytes are ours.
            unsafe {
                assert!(file.end_unguarded(read, to));
                assert_eq!(std::slice::from_raw_parts(to, BLOCK), &content[at * BLOCK..][..BLOCK]);
            }
            assert!(matches!(begin(at, to), Begun::Fills), "missed again");
        }
        type Change<'c> = (usize, bool, &'c dyn Fn());
        let offset = |at: usize| (at * BLOCK) as u64;
        let changes: [Change<'_>; 6] = [
            (13, true, &|| {}),
            (77, true, &|| file.write_all_at(&[1; BLOCK], offset(12)).unwrap()),
            (141, true, &|| assert_eq!(file.read_at(&mut [0; BLOCK], offset(11)).unwrap(), BLOCK)),
            // Counted with it (optimistic.U3).
            (205, false, &|| file.write_all_at(&[1], offset(13) + 100).unwrap()),
            (18, false, &|| file.punch_hole(0, offset(20)).unwrap()),
            (100, false, &|| file.truncate(5).unwrap()),
        ];
        for (at, counts, change) in changes {
            let Begun::ByKernel(kernels, read) = begin(at, aligned) else { panic!("{at}") };
            carry_out(&kernels, at);
            change();
            // SAFETY: as above.
            assert_eq!(unsafe { file.end_unguarded(read, aligned) }, counts, "{at}");
        }
        assert!(matches!(begin(101, aligned), Begun::Not), "beyond the end");
    }
}
