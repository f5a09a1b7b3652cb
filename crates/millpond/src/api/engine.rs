//! The engine: one cache, one storage backend, many files.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

use millpond_rangelock::callback::contain;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::api::blob::Blob;
use crate::api::file::File;
use crate::api::pipeline::Pipeline;
use crate::api::publish::{self, Gauges};
use crate::api::watch;
use crate::backend::Backend;
use crate::buffers::Buffer;
use crate::cache::Cache;
use crate::cache::accounting::copies::Copies;
use crate::cache::frames::FrameMemory;
use crate::error::{Error, Op, Result};
use crate::event::event;
use crate::inode::open::GivenDescriptor;
use crate::inode::{CachedFile, Shared};
use crate::io::read_limit::{self, Flight};
use crate::latency::LatencyKind;
use crate::options::{EngineBuilder, OpenOptions, Published};
use crate::process_local::ProcessLocal;
use crate::queue::Queue;
use crate::recovery::mark::Marks;
use crate::stats::Stats;
use crate::waits::{Dump, TaskWaits};
use crate::workers::workers;
use crate::writeback::state::{Flusher, Limits};

/// The smallest and largest supported limits: the smallest has room for a page and its tables, the largest
/// is half of the frame index space.
pub const CACHE_BYTES_MIN: u64 = 16 << 10;
const CACHE_BYTES_MAX: u64 = 512 << 30;
const KEEPER_CACHE_BYTES_MIN: u64 = 256 << 10;

/// A cache with a hard memory limit, and the storage backend below it.
///
/// A handle: clones are the same engine. It lives as long as a clone or an open file does. Files opened
/// through several engines of one process share one cached file per inode, which belongs to the engine that
/// opened it first.
///
/// # Examples
///
/// ```
/// use millpond::direct::DirectRequest;
/// use millpond::{Engine, OpenOptions};
///
/// let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// let stats = engine.stats();
/// assert_eq!((stats.hits, stats.misses), (0, 0));
/// assert!(!engine.is_keeper_alive(), "it has none");
/// engine.set_hit_path(false); // to compare; or in an emergency
/// let blob = engine.blob(1 << 30, 16 << 10)?; // bytes that come from somewhere else
/// assert_eq!(blob.len(), 1 << 30);
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// # std::fs::write(&path, "pond").unwrap();
/// let mine = std::fs::File::open(&path).expect("it is there");
/// let file = engine.from_borrowed_fd(std::os::fd::AsFd::as_fd(&mine), &OpenOptions::new().read(true))?;
/// assert_eq!(file.len()?, 4);
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Clone)]
pub struct Engine {
    shared: ProcessLocal<Arc<Shared>>,
}

impl EngineBuilder {
    /// Builds the engine. Starts no thread.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a limit that is too small or too large, [`Error::Io`] if memory can't be
    /// reserved, the chosen backend is refused, or the keeper can't be reached or refuses.
    pub fn build(self) -> Result<Engine> {
        Engine::of(self)
    }
}

impl Engine {
    /// An engine's options; [`EngineBuilder::build`] creates the engine.
    ///
    /// # Examples
    ///
    /// ```
    /// let engine = millpond::Engine::builder().cache_bytes(1 << 20).build()?;
    /// assert_eq!(engine.cache_bytes(), 1 << 20);
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    pub(crate) fn of(options: EngineBuilder) -> Result<Engine> {
        let cache_bytes = options.cache_bytes.unwrap_or_else(crate::memory::default_cache_bytes);
        check_cache_bytes(cache_bytes, CACHE_BYTES_MAX, options.keeper.is_some())?;
        if !(1..=read_limit::READS_MAX).contains(&options.reads_in_flight_max) {
            let (asked, most) = (options.reads_in_flight_max, read_limit::READS_MAX);
            let what = format!("{asked} reads in flight: must be 1 to {most}");
            return Err(Error::InvalidInput { op: Op::Build, what });
        }
        let memory = match (&options.keeper, &options.shared) {
            (None, None) => FrameMemory::Private,
            (Some(keeper), None) => FrameMemory::Kept(keeper),
            (None, Some(choice)) => FrameMemory::Shared(choice),
            (Some(_), Some(_)) => {
                let what = "a shared cache with a keeper".into();
                return Err(Error::InvalidInput { op: Op::Build, what });
            }
        };
        let failed = |error| Error::io(Op::Build, 0, cache_bytes, error);
        let backend = Backend::new(options.backend).map_err(failed)?;
        let limits = Limits::new(options.dirty_bytes_max, options.dirty_age_max, cache_bytes);
        let (published, watch) = (options.published, options.watch);
        let engine = Engine {
            shared: ProcessLocal::new(Arc::new(Shared {
                flusher: Flusher::new(limits),
                cache: Cache::new(cache_bytes, options.admission, memory).map_err(failed)?,
                hit_path: AtomicBool::new(options.hit_path),
                backend,
                marks: Marks::default(),
                readahead_bytes_max: options.readahead_bytes_max,
                pinned_bytes: AtomicU64::new(0),
                bounces: AtomicU64::new(0),
                flight: Flight::new(options.reads_in_flight_max, cache_bytes),
                workers: workers(),
                tasks: TaskWaits::default(),
                copies: Copies::default(),
            })),
        };
        let shared = &engine.shared;
        shared
            .cache
            .writeback_counts
            .set_limits(shared.flusher.limits.dirty_bytes_max(), cache_bytes);
        match published {
            Published::No => {}
            Published::Yes => engine.publish(0, || "").map_err(failed)?,
            // The program works without it.
            Published::IfPossible(fd_min) => _ = engine.publish(fd_min, || ""),
        }
        let backend = &engine.shared.backend;
        let (back_end, reason) = (backend.name(), &backend.reason);
        event!(debug, cache_bytes, back_end, reason, "an engine");
        if let Some(limit) = watch {
            watch::begin(&engine.shared, limit).map_err(failed)?;
        }
        Ok(engine)
    }

    fn publish<S: AsRef<str>>(
        &self,
        fd_min: RawFd,
        more: impl Fn() -> S + Send + 'static,
    ) -> io::Result<()> {
        let shared = Arc::downgrade(&self.shared);
        publish::begin(fd_min, move || {
            let shared = shared.upgrade()?;
            let engine = Engine { shared: ProcessLocal::new(shared) };
            let mut text = engine.text();
            // The callback does not keep the engine alive, and its panic does not stop the publication of
            // the counts.
            contain(|| text += more().as_ref());
            Some(text)
        })
    }

    /// [`EngineBuilder::published`] of an existing engine, with counters of its owner: `more` returns lines of a
    /// name and a number each, which are published behind the engine's. A panic of `more` leaves them out.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]: the system gives no thread or no descriptor.
    ///
    /// # Examples
    ///
    /// ```
    /// # let engine = millpond::Engine::builder().cache_bytes(1 << 20).build()?;
    /// engine.publish_with(|| "requests 7\n".to_string())?;
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn publish_with(&self, more: impl Fn() -> String + Send + 'static) -> Result<()> {
        self.publish(0, more).map_err(|error| Error::io(Op::Build, 0, 0, error))
    }

    /// The published text.
    fn text(&self) -> String {
        let writeback_counts = &self.shared.cache.writeback_counts;
        let dirty_bytes = writeback_counts.dirty();
        let gauges = Gauges {
            limit_bytes: self.cache_bytes(),
            dirty_bytes,
            writeback_bytes: writeback_counts.unwritten().saturating_sub(dirty_bytes),
            unsynced_bytes: writeback_counts.unstable(),
            waiting_reads: self.shared.flight.waiting() as u64,
            waiting_writers: self.shared.flusher.waiting(),
        };
        publish::text_of(&self.stats(), &gauges)
    }

    /// Opens or creates a file with `options`. Descriptors are close-on-exec.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] with the error of `open(2)`, or with EOPNOTSUPP for a file whose length is not the
    /// number of its bytes, as in `/proc` and `/sys`; [`Error::NotRegular`] if it is not a regular file;
    /// [`Error::InvalidInput`] for options that contradict each other or the file as it is already open;
    /// [`Error::NoBuffers`] if the memory limit has no room for another open file.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// let missing = engine.open("/no/such/file", &OpenOptions::new().read(true));
    /// assert_eq!(missing.err().map(|error| error.errno()), Some(2));
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn open(&self, path: impl AsRef<Path>, options: &OpenOptions) -> Result<File> {
        let begun = Instant::now();
        options.check()?;
        let mut flags = match (options.read, options.writable()) {
            (true, true) => OFlags::RDWR,
            (false, true) => OFlags::WRONLY,
            _ => OFlags::RDONLY,
        };
        flags |= OFlags::CLOEXEC;
        if options.create {
            flags |= OFlags::CREATE;
        }
        if options.create_new {
            flags |= OFlags::CREATE | OFlags::EXCL;
        }
        let fd = open_regular(path.as_ref(), flags, Mode::from_raw_mode(options.mode))
            .map_err(|error| Error::io(Op::Open, 0, 0, error))?;
        self.open_descriptor(GivenDescriptor::Opened(fd), options, begun)
    }

    /// Takes ownership of a descriptor, which must permit the access that `options` ask for. The options
    /// that concern the cache apply, and `truncate`. The descriptor's file offset is never used; `O_APPEND`
    /// does not affect positioned writes.
    ///
    /// # Errors
    ///
    /// As for [`Engine::open`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("data");
    /// std::fs::write(&path, "pond").unwrap();
    /// let fd = std::fs::File::open(&path).unwrap().into();
    /// let file = engine.from_fd(fd, &OpenOptions::new().read(true))?;
    /// assert_eq!(file.len()?, 4);
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn from_fd(&self, fd: OwnedFd, options: &OpenOptions) -> Result<File> {
        self.open_descriptor(GivenDescriptor::Owned(fd), options, Instant::now())
    }

    /// [`Engine::from_fd`] of a borrowed descriptor: it is duplicated, as the last step. So a failure
    /// closes no descriptor of the file, which would drop the process's POSIX locks on it; unless the
    /// truncation fails, or the open of further descriptions for direct I/O.
    ///
    /// # Errors
    ///
    /// As for [`Engine::open`].
    pub fn from_borrowed_fd(&self, fd: BorrowedFd<'_>, options: &OpenOptions) -> Result<File> {
        self.open_descriptor(GivenDescriptor::Borrowed(fd), options, Instant::now())
    }

    fn open_descriptor(
        &self,
        fd: GivenDescriptor<'_>,
        options: &OpenOptions,
        begun: Instant,
    ) -> Result<File> {
        options.check()?;
        // A descriptor that the engine opened has the access that the options ask for.
        if !matches!(fd, GivenDescriptor::Opened(_)) {
            check_permits(fd.as_fd(), options)?;
        }
        let (cached, kept) = CachedFile::open(&self.shared, fd, options)?;
        let file = File::new(cached, kept, options);
        if options.truncate {
            file.truncate(0)?;
        }
        self.shared.cache.counters.local().took(LatencyKind::Open, begun);
        Ok(file)
    }

    /// Creates a blob of `len` bytes, none of them cached, in pages of `page_bytes`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`]: `page_bytes` is no supported page size, or `len` is more than `i64::MAX`.
    /// [`Error::NoBuffers`]: the memory limit has no room for another file. [`Error::Forked`]: the engine
    /// is the parent's.
    pub fn blob(&self, len: u64, page_bytes: u32) -> Result<Blob> {
        Blob::new(&self.shared, len, page_bytes)
    }

    /// Allocates `count` buffers of `bytes` bytes each, zeroed and aligned for direct I/O, in regions of a
    /// few MiB that a [`Pipeline`] registers with the kernel as far as `RLIMIT_MEMLOCK` allows. The memory
    /// belongs to the caller and does not count against [`Engine::cache_bytes`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`]: `bytes` is 0, or the product is too large. [`Error::Io`]: no memory.
    pub fn alloc_buffers(&self, count: usize, bytes: usize) -> Result<Vec<Buffer>> {
        crate::buffers::alloc(count, bytes)
    }

    /// Creates a pipeline that keeps up to `depth` direct requests in flight, for the calling thread.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`]: `depth` is 0 or more than [`crate::direct::PIPELINE_DEPTH_MAX`].
    /// [`Error::Io`]: no ring can be created.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::direct::Registration;
    /// # use millpond::Engine;
    /// let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// let buffers = engine.alloc_buffers(8, 64 << 10)?; // of one region
    /// assert!(buffers[0].same_region(&buffers[7]));
    /// let pipeline = engine.pipeline(8)?;
    /// assert_eq!(pipeline.registration(), Registration::default(), "none of them was used yet");
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn pipeline(&self, depth: usize) -> Result<Pipeline> {
        Pipeline::new(&self.shared, depth)
    }

    /// Creates a completion queue. `capacity`, 1 to 1,048,576, is the maximum number of operations that are
    /// in flight, or completed and not returned. Its requests may be for files of any engine.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`]: `capacity` is out of its range. [`Error::Io`]: the system can't start the
    /// thread that the first queue of an engine needs.
    ///
    /// # Examples
    ///
    /// ```
    /// # let engine = millpond::Engine::builder().cache_bytes(1 << 20).build()?;
    /// let queue = engine.queue(32)?;
    /// assert!(queue.wait(0, 32, None)?.is_empty());
    /// assert!(queue.wait(33, 33, None).is_err(), "it could never hold that many");
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn queue(&self, capacity: usize) -> Result<Queue> {
        if self.shared.cache.frames.are_the_parents() {
            return Err(Error::Forked { op: Op::Wait });
        }
        Queue::new(capacity, &self.shared.workers, self.shared.backend.driver())
    }

    /// The memory limit, in bytes.
    #[must_use]
    pub fn cache_bytes(&self) -> u64 {
        self.shared.cache.frames.limit_bytes()
    }

    /// Enables or disables the lock-free path for cached reads of this engine's files. If disabled, every
    /// read takes the slow path: for comparison, and as an emergency switch.
    pub fn set_hit_path(&self, on: bool) {
        self.shared.hit_path.store(on, Relaxed);
    }

    /// The engine's statistics. Takes the lock of the eviction queues briefly. In a child of fork all
    /// counts are zero.
    #[must_use]
    pub fn stats(&self) -> Stats {
        if self.shared.cache.frames.are_the_parents() {
            // Other threads of the parent may have held the locks below.
            let back_end_reason = "of the parent's engine".into();
            return Stats {
                back_end: self.shared.backend.name(),
                back_end_reason,
                ..Stats::default()
            };
        }
        let readahead = self.shared.cache.readahead_use();
        Stats {
            readahead_used: readahead.used,
            readahead_wasted: readahead.wasted,
            memory_bytes: self.shared.cache.frames.committed_bytes(),
            back_end: self.shared.backend.name(),
            back_end_reason: self.shared.backend.reason.clone(),
            has_lost_keeper: self.shared.has_lost_keeper(),
            ..self.shared.cache.counters.snapshot().with_transfers(&self.shared.backend.transfers)
        }
    }

    /// The waiting operations, their reasons and start times: for the diagnosis of hangs. It includes
    /// reads, writes and syncs of threads that wait for the engine or the kernel, and pending reads of
    /// futures and queues; it does not include direct requests of queues and pipelines, opens and closes.
    /// Operations continue concurrently.
    ///
    /// # Examples
    ///
    /// ```
    /// # let engine = millpond::Engine::builder().cache_bytes(1 << 20).build()?;
    /// let dump = engine.dump();
    /// assert!(dump.waiting.is_empty());
    /// println!("{dump}");
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn dump(&self) -> Dump {
        if self.shared.cache.frames.are_the_parents() {
            return Dump::default();
        }
        watch::dump(&self.shared)
    }

    /// Detaches from the keeper, if there is one: writes back the dirty pages, and has the keeper close the
    /// engine's memory and all files; pages that can't be written back are left to the keeper, which tries
    /// to write them, too. Writes that begin after this has returned are written through, also of files
    /// that are already open. Waits for writes in flight. Call it before the process calls exec: otherwise
    /// the keeper would wait for the end of the new program.
    pub fn detach_keeper(&self) {
        // The keeper has the memory of the parent, which continues.
        if !self.shared.cache.frames.are_the_parents() {
            CachedFile::detach_keeper(&self.shared);
        }
    }

    /// Whether dirty pages survive a kill of the process: the engine has a keeper, which lives, and has not
    /// detached from it. If it is false, writes are written through, as after [`Engine::detach_keeper`].
    /// [`Stats::has_lost_keeper`] says whether a keeper has died. Costs one load from memory.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let keeper = millpond::keeper::spawn()?;
    /// let engine = millpond::Engine::builder().cache_bytes(1 << 20).keeper(keeper).build()?;
    /// assert!(engine.is_keeper_alive());
    /// engine.detach_keeper();
    /// assert!(!engine.is_keeper_alive());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn is_keeper_alive(&self) -> bool {
        let recovery = self.shared.cache.frames.recovery();
        recovery.is_some_and(|recovery| recovery.has_keeper())
    }

    /// Call it in a child of `fork` before any other use of the crate there. Files that the child opens
    /// belong to engines that it builds. A child inherits nothing of its parent's cache: operations on its
    /// parent's files and queues fail with [`Error::Forked`], and their views panic (on systems before
    /// Linux 4.14, and some that emulate Linux, it has a copy instead, and must not touch them). The child
    /// may drop its parent's objects: their memory and descriptors stay in the child until it exits or
    /// calls exec.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::Engine;
    ///
    /// let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// // SAFETY: the child does no more than what is here.
    /// match unsafe { libc::fork() } {
    ///     0 => {
    ///         Engine::forget_parent();
    ///         let own = Engine::builder().cache_bytes(1 << 20).build();
    ///         std::process::exit(i32::from(own.is_err()));
    ///     }
    ///     child => {
    ///         let mut status = 0;
    ///         // SAFETY: the status is ours.
    ///         unsafe { libc::waitpid(child, &mut status, 0) };
    ///         assert_eq!(status, 0);
    ///     }
    /// }
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn forget_parent() {
        crate::inode::forget_parent();
    }

    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("cache_bytes", &self.cache_bytes())
            .field("back_end", &self.shared.backend.name())
            .finish_non_exhaustive()
    }
}

pub(crate) fn check_cache_bytes(cache_bytes: u64, most: u64, has_keeper: bool) -> Result<()> {
    // With a keeper, the tables that it reads would fill a smaller limit.
    let least = if has_keeper { KEEPER_CACHE_BYTES_MIN } else { CACHE_BYTES_MIN };
    if (least..=most).contains(&cache_bytes) {
        return Ok(());
    }
    let what = format!("cache of {cache_bytes} bytes: must be {least} to {most}");
    Err(Error::InvalidInput { op: Op::Build, what })
}

fn check_permits(fd: BorrowedFd<'_>, options: &OpenOptions) -> Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|error| Error::io(Op::Open, 0, 0, error))?;
    let access = flags & OFlags::RWMODE;
    let refused = (options.read && access == OFlags::WRONLY)
        || (options.writable() && access == OFlags::RDONLY);
    if refused || flags.contains(OFlags::PATH) {
        let what = "the descriptor does not permit the access that the options ask for".into();
        return Err(Error::InvalidInput { op: Op::Open, what });
    }
    Ok(())
}

/// Opens a file without waiting for the other end of a FIFO, which is refused.
fn open_regular(path: &Path, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    match rustix::fs::open(path, flags | OFlags::NONBLOCK, mode) {
        Ok(fd) => {
            // No other one of the flags that this sets and clears is in use.
            rustix::fs::fcntl_setfl(&fd, OFlags::empty())?;
            Ok(fd)
        }
        // Another process has a lease: waits until it is released, as a normal open does.
        Err(Errno::WOULDBLOCK) => rustix::fs::open(path, flags, mode),
        Err(error) => Err(error),
    }
}
