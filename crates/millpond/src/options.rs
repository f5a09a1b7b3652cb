//! Options for building an engine and for opening a file.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

#[cfg(doc)]
use crate::Engine;
use crate::error::{Error, Op, Result};
use crate::huge_memory::MemoryChoice;
pub use crate::io::backend::descriptors::Backing;
use crate::io::read_limit;
use crate::recovery::Address;
#[cfg(feature = "sim")]
use crate::sim::SimOptions;
pub use crate::units::{PAGE_BYTES_MAX, PAGE_BYTES_MIN};
use crate::waits::{Waiting, Watch};

/// Which back end carries out the I/O of an engine.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum BackendChoice {
    /// `Uring` where a ring can be set up and reads a byte, on Linux 5.11 and later, else `Threads` (the default).
    #[default]
    Auto,
    /// io_uring; building the engine fails where the system refuses it, and before Linux 5.11.
    Uring,
    /// `preadv` and `pwritev` by the caller, and a small pool of threads for read-ahead.
    Threads,
    /// The bytes of a file are read from its descriptor when it is opened and then live in memory;
    /// nothing is written back. For tests, with the feature `sim`.
    #[cfg(feature = "sim")]
    Memory,
    /// `Memory` with seeded delays, reordering, short transfers and errors. For tests, with the feature
    /// `sim`.
    #[cfg(feature = "sim")]
    Sim(SimOptions),
    /// Completes at once and moves no bytes: to measure the way to it. Reads leave memory as it is,
    /// writes are forgotten. With the feature `sim`.
    #[cfg(feature = "sim")]
    Null,
}

/// Which pages are cached when a read misses them; see [`EngineBuilder::admission`].
///
/// A read of 1 to 16 whole pages, none of which is cached, may *bypass* the cache: its bytes are read in one
/// transfer, into the caller's memory if it waits, and no page is kept. It is as atomic as any other read. Pages are
/// cached in any case by read-ahead, longer reads, writes, and reads that are not aligned as the file's back end
/// requires.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Admission {
    /// All pages, until pages leave the cache before they are read again. While that is so, only pages that are
    /// missed a second time within a short history, and a sample of others, which shows whether it is still so. For
    /// caches of 4 MiB and more.
    #[default]
    Adaptive,
    /// All.
    Always,
    /// None.
    Never,
}

/// When a write reaches the back end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteMode {
    /// Before it returns (the default).
    #[default]
    Through,
    /// Later: written pages stay in the cache, and reach the back end by age, by amount, or with a
    /// sync. They are written back, too, when the last handle of the file is dropped, before the drop returns, or
    /// before the completion of the request that had it; of a handle that a waker drops, a moment later by another
    /// thread. A process that is killed before loses them, unless the engine has a keeper.
    ///
    /// Writes that make a file longer reach it before they return, too, where each of the last ones was followed by
    /// a sync: nothing would be written with them.
    ///
    /// The file system reserves the blocks first, so that a full disk fails the write and no later sync. Ahead
    /// of a file that grows by appends up to 32 MiB are reserved. They are given back when the last handle is
    /// dropped, or when the end of the file moves past them, unless another process has the file open or there
    /// is another description of it, as with direct backing; a write lease is on the file in that moment, and
    /// an `open` with `O_NONBLOCK` of another process fails with EWOULDBLOCK.
    Back,
}

/// The default for the largest read-ahead window. Chosen, not measured.
pub(crate) const READAHEAD_BYTES_MAX: u64 = 1 << 20;

/// Options of an [`Engine`]; see [`Engine::builder`].
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use millpond::{BackendChoice, Engine};
///
/// let engine = Engine::builder()
///     .cache_bytes(256 << 20)
///     .backend(BackendChoice::Auto)
///     .dirty_bytes_max(64 << 20)
///     .dirty_age_max(Duration::from_secs(5))
///     .readahead_bytes_max(256 << 10)
///     .reads_in_flight_max(128)
///     .hit_path(true)
///     .build()?;
/// println!("{}: {}", engine.stats().back_end, engine.stats().back_end_reason);
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct EngineBuilder {
    pub(crate) cache_bytes: Option<u64>,
    pub(crate) backend: BackendChoice,
    pub(crate) hit_path: bool,
    pub(crate) admission: Admission,
    pub(crate) readahead_bytes_max: u64,
    pub(crate) reads_in_flight_max: usize,
    pub(crate) dirty_bytes_max: Option<u64>,
    pub(crate) dirty_age_max: Duration,
    pub(crate) keeper: Option<Address>,
    pub(crate) shared: Option<MemoryChoice>,
    pub(crate) published: Published,
    pub(crate) watch: Option<Watch>,
}

/// Whether the engine publishes its state to other processes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Published {
    No,
    Yes,
    /// With a descriptor of at least that number.
    IfPossible(RawFd),
}

impl Default for EngineBuilder {
    fn default() -> Self {
        Self {
            cache_bytes: None,
            backend: BackendChoice::Auto,
            hit_path: true,
            admission: Admission::Adaptive,
            readahead_bytes_max: READAHEAD_BYTES_MAX,
            reads_in_flight_max: read_limit::READS_MAX,
            dirty_bytes_max: None,
            dirty_age_max: Duration::from_secs(30),
            keeper: None,
            shared: None,
            published: Published::No,
            watch: None,
        }
    }
}

impl EngineBuilder {
    /// The hard memory limit, in bytes: 16 KiB to 512 GiB, with a keeper at least 256 KiB. Default: a quarter of the
    /// machine's memory or of the cgroup's limit, whichever is less.
    ///
    /// It covers page frames, the tables that find them, the objects of open files with all that grows with them, and
    /// the copies of pending asynchronous writes, which get an eighth of it. It does not cover:
    ///
    /// - about 150 bytes for each operation that waits, and 8 for each page that is being written back;
    /// - of those copies, one that is longer than the rest of the eighth;
    /// - for an asynchronous read of more than 64 pages, or of more than an eighth of the cache, a buffer of its
    ///   length until its future is polled or dropped;
    /// - 9 KiB for each living thread that uses the engine, and the stacks of the engine's threads;
    /// - the caller's own buffers.
    ///
    /// Below 1 MiB, sets of dirty pages that lie more than 2 MiB apart in a file may pass the limit by a few KiB
    /// while write-back keeps all of the cache; frames never do.
    #[must_use]
    pub fn cache_bytes(mut self, cache_bytes: u64) -> Self {
        self.cache_bytes = Some(cache_bytes);
        self
    }

    /// Which back end to use; [`crate::stats::Stats::back_end`] has the choice made.
    #[must_use]
    pub fn backend(mut self, backend: BackendChoice) -> Self {
        self.backend = backend;
        self
    }

    /// Whether the engine publishes [`crate::stats::Stats`] and its dirty files to other processes of the same user, four
    /// times a second, for `millpond top`. This takes a thread and a descriptor, and costs reads and writes nothing.
    /// Building the engine fails where the system gives neither. Default: no.
    ///
    /// # Examples
    ///
    /// ```
    /// let engine = millpond::Engine::builder().cache_bytes(1 << 20).published(true).build()?;
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn published(mut self, on: bool) -> Self {
        self.published = if on { Published::Yes } else { Published::No };
        self
    }

    /// Has a thread report each operation that waits for `limit` or longer, once, to `report` and as a warning of
    /// `tracing`. The thread checks twice in that time, every 5 ms at most, and every second at least. `report` may
    /// be slow, but must not wait for the operation. After a panic of `report` the thread goes on with the next
    /// operation. Default: no such thread.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let engine = millpond::Engine::builder()
    ///     .cache_bytes(1 << 20)
    ///     .report_waits_over(Duration::from_secs(30), |waiting| eprintln!("{waiting}"))
    ///     .build()?;
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn report_waits_over(
        mut self,
        limit: Duration,
        report: impl Fn(&Waiting) + Send + Sync + 'static,
    ) -> Self {
        self.watch = Some(Watch { limit, report: Arc::new(report) });
        self
    }

    /// Whether cached reads take the lock-free path from the start (the default).
    #[must_use]
    pub fn hit_path(mut self, on: bool) -> Self {
        self.hit_path = on;
        self
    }

    /// Which pages are cached when a read misses them. Default: [`Admission::Adaptive`].
    ///
    /// ```
    /// use millpond::{Admission, Engine};
    ///
    /// // To read all of many files once, and keep what others have cached.
    /// let engine = Engine::builder().cache_bytes(64 << 20).admission(Admission::Never).build()?;
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// The largest read-ahead window, in bytes; 0 turns read-ahead off. Default 1 MiB, and never more than 1/128 of
    /// the cache.
    #[must_use]
    pub fn readahead_bytes_max(mut self, bytes: u64) -> Self {
        self.readahead_bytes_max = bytes;
        self
    }

    /// The number of reads of pages that the back end is given at a time, 1 to 1024 (the default). Beyond that,
    /// synchronous operations wait until a read ends, and asynchronous ones are pending, in the order of their
    /// arrival. Contiguous missing pages are one read. Never more than a quarter of the pages that the cache can
    /// hold. Read-ahead and direct I/O do not count.
    #[must_use]
    pub fn reads_in_flight_max(mut self, reads: usize) -> Self {
        self.reads_in_flight_max = reads;
        self
    }

    /// The limit of bytes in the cache that wait to be written back. Beyond it, writers write back pages themselves
    /// before they go on. Default, and at most: three quarters of the cache. A single file may have four fifths of
    /// it, and each of several files less, so that a file that can't be written back leaves room for others.
    #[must_use]
    pub fn dirty_bytes_max(mut self, bytes: u64) -> Self {
        self.dirty_bytes_max = Some(bytes);
        self
    }

    /// How long a written page may wait to be written back. Default 30 s.
    #[must_use]
    pub fn dirty_age_max(mut self, age: Duration) -> Self {
        self.dirty_age_max = age;
        self
    }

    /// The keeper, which writes back this process's dirty pages when the process dies; see [`crate::keeper`]. Cached
    /// pages are then in memory that is shared with the keeper, for which the system may not give huge pages, and the
    /// cache has at least 256 KiB. The keeper takes a file for each 32 KiB of the cache, 64 to 16,384 files; writes of
    /// further files go through. Default: none.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::{Engine, keeper};
    ///
    /// # fn demo() -> Result<(), Box<dyn std::error::Error>> {
    /// // `millpond keeper /run/pond` runs on this machine.
    /// let address: keeper::Address = "/run/pond".parse()?;
    /// let engine = Engine::builder().cache_bytes(64 << 20).keeper(address).build()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn keeper(mut self, address: Address) -> Self {
        self.keeper = Some(address);
        self
    }
}

/// How a file is opened, in the manner of [`std::fs::OpenOptions`].
///
/// # Examples
///
/// ```
/// use millpond::{Backing, Engine, OpenOptions, WriteMode};
///
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir_in(".").unwrap();
/// # let dir = dir.path();
/// let read_write = OpenOptions::new().read(true).write(true);
/// let table = read_write.clone().create(true).mode(0o600).page_bytes(16 << 10).write_mode(WriteMode::Back);
/// let table = engine.open(dir.join("table"), &table)?;
/// let log = OpenOptions::new().append(true).create_new(true).dsync(true);
/// let log = engine.open(dir.join("log"), &log)?;
/// log.append(b"durable when this returns")?;
/// let scratch = read_write.clone().create(true).truncate(true).backing(Backing::Buffered);
/// let scratch = engine.open(dir.join("scratch"), &scratch)?;
/// // Past the cache, aligned or not:
/// match engine.open(dir.join("table"), &read_write.direct(true).bounce(true)) {
///     Ok(direct) => drop(direct.write_at(b"any length", 3)?),
///     Err(error) => println!("no direct I/O here: {error}"),
/// }
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct OpenOptions {
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) append: bool,
    pub(crate) create: bool,
    pub(crate) create_new: bool,
    pub(crate) truncate: bool,
    pub(crate) mode: u32,
    pub(crate) page_bytes: Option<u32>,
    pub(crate) backing: Backing,
    pub(crate) write_mode: WriteMode,
    pub(crate) untorn: Option<u32>,
    pub(crate) dsync: bool,
    pub(crate) direct: bool,
    pub(crate) bounce: bool,
    pub(crate) awaited: bool,
    pub(crate) creates_for_reading: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenOptions {
    /// Nothing set: at least one of `read`, `write` and `append` must be.
    #[must_use]
    pub fn new() -> Self {
        Self {
            read: false,
            write: false,
            append: false,
            create: false,
            create_new: false,
            truncate: false,
            mode: 0o666,
            page_bytes: None,
            backing: Backing::Buffered,
            write_mode: WriteMode::Through,
            untorn: None,
            dsync: false,
            direct: false,
            bounce: false,
            awaited: false,
            creates_for_reading: false,
        }
    }

    /// Opens for reading.
    #[must_use]
    pub fn read(mut self, on: bool) -> Self {
        self.read = on;
        self
    }

    /// Opens for writing.
    #[must_use]
    pub fn write(mut self, on: bool) -> Self {
        self.write = on;
        self
    }

    /// Opens for writing; [`crate::File::append`] is the call that appends. As on POSIX systems other than Linux,
    /// `write_at` keeps writing at its offset.
    #[must_use]
    pub fn append(mut self, on: bool) -> Self {
        self.append = on;
        self
    }

    /// Creates the file if there is none; needs `write` or `append`.
    #[must_use]
    pub fn create(mut self, on: bool) -> Self {
        self.create = on;
        self
    }

    /// Creates the file and fails if there is one (`O_EXCL`); needs `write` or `append`.
    #[must_use]
    pub fn create_new(mut self, on: bool) -> Self {
        self.create_new = on;
        self
    }

    /// Cuts the file to no bytes; needs `write`.
    #[must_use]
    pub fn truncate(mut self, on: bool) -> Self {
        self.truncate = on;
        self
    }

    /// Permission bits of a file that is created, before the umask. Default 0o666.
    #[must_use]
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = mode;
        self
    }

    /// The page size: a power of two from 4 KiB to 64 KiB. A page is read, cached and seen by readers as one piece.
    /// (Units larger than a sector are atomic in memory only: after a power cut the file may have a part of a page
    /// that was in flight to the device, as with the kernel's cache.) Default 4 KiB, or the page size of the file
    /// where it is open already; any other size for such a file is an error. With direct backing it is at least the
    /// kernel's page size, 16 or 64 KiB on some AArch64 systems.
    #[must_use]
    pub fn page_bytes(mut self, bytes: u32) -> Self {
        self.page_bytes = Some(bytes);
        self
    }

    /// How the engine reaches the file below its cache. Where the file is open already, the first
    /// opener's choice stands.
    #[must_use]
    pub fn backing(mut self, backing: Backing) -> Self {
        self.backing = backing;
        self
    }

    /// When writes reach the back end. Where the file is open already, the first opener's choice
    /// stands. [`WriteMode::Back`] goes best with [`Backing::Direct`]: else each byte is cached
    /// twice.
    #[must_use]
    pub fn write_mode(mut self, mode: WriteMode) -> Self {
        self.write_mode = mode;
        self
    }

    /// A power cut tears no block of `bytes` of the file: a power of two from 4 KiB to the page size of the file. Each
    /// aligned block is, after a power cut, all as it was before a write or all as the write left it, whether or not a sync
    /// has covered the write. Several blocks of one write are not changed together.
    ///
    /// This needs direct backing, a file that is open for reading, too, and a file system that writes such blocks as a
    /// whole (`RWF_ATOMIC`): XFS with reflink from Linux 6.16 on, on any device, or XFS and ext4 on a device that does so.
    /// [`File::untorn_bytes_max`](crate::File::untorn_bytes_max) returns the largest block, and `millpond check-untorn`
    /// lists the sizes for a directory. The page size is at least `bytes`, and the file's length is always a
    /// multiple of `bytes`: operations that would give it another length fail. Other programs must not
    /// write to the file. docs/untorn.md has the details.
    ///
    /// Where the file is open already, the first opener's choice stands; another block size for such a file is an error.
    ///
    /// # Errors
    ///
    /// Of the open: [`Error::Unsupported`] names the missing requirement. Where the file system refuses a block later, the
    /// write fails, or the sync and each sync after it; no block is ever written in another way.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::{Backing, Engine, Error, OpenOptions, WriteMode};
    ///
    /// # let dir = tempfile::tempdir_in(".").unwrap();
    /// # let dir = dir.path();
    /// let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// let options = OpenOptions::new().read(true).write(true).create(true);
    /// let options = options.backing(Backing::Direct).write_mode(WriteMode::Back).untorn(16 << 10);
    /// match engine.open(dir.join("table"), &options) {
    ///     Ok(table) => table.write_all_at(&[7; 16 << 10], 0)?,
    ///     Err(Error::Unsupported { what, .. }) => println!("write each page twice: {what}"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn untorn(mut self, bytes: u32) -> Self {
        self.untorn = Some(bytes);
        self
    }

    /// Each write through this handle returns when it is durable, as with `O_DSYNC`.
    #[must_use]
    pub fn dsync(mut self, on: bool) -> Self {
        self.dsync = on;
        self
    }

    /// Reads and writes through this handle go past the cache, straight between the caller's memory and the device
    /// (`O_DIRECT`). They are coherent with cached reads and writes of other handles. Offsets, and addresses and
    /// lengths of memory, must be aligned as the file system requires, mostly to 512 or 4096 bytes:
    /// [`crate::Error::Unaligned`] has the limit. [`crate::Engine::alloc_buffers`] returns aligned memory. The file
    /// is opened a second time, by way of `/proc/self/fd`; where the file system has no direct I/O, opening fails
    /// with EINVAL.
    #[must_use]
    pub fn direct(mut self, on: bool) -> Self {
        self.direct = on;
        self
    }

    /// Has a [`direct`](OpenOptions::direct) handle serve unaligned requests, too, by way of an aligned buffer, or of
    /// the kernel's cache for partly written blocks. [`crate::stats::Stats::bounced`] counts them. Requests of a
    /// [`crate::direct::Pipeline`] must be aligned.
    #[must_use]
    pub fn bounce(mut self, on: bool) -> Self {
        self.bounce = on;
        self
    }

    pub(crate) fn writable(&self) -> bool {
        self.write || self.append
    }

    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |what: &str| Err(Error::InvalidInput { op: Op::Open, what: what.into() });
        if !self.read && !self.writable() {
            return refuse("one of read, write and append must be set");
        }
        let creates = self.create || self.create_new;
        if creates && !self.writable() && !self.creates_for_reading {
            return refuse("create needs write or append");
        }
        if self.bounce && !self.direct {
            return refuse("bounce needs direct");
        }
        if self.backing == Backing::Mapped && self.write_mode == WriteMode::Back {
            return refuse(
                "mapped backing needs WriteMode::Through: its dirty pages are the kernel's",
            );
        }
        if self.truncate && !self.write {
            return refuse("truncate needs write");
        }
        if let Some(bytes) = self.page_bytes
            && (!bytes.is_power_of_two() || !(PAGE_BYTES_MIN..=PAGE_BYTES_MAX).contains(&bytes))
        {
            return Err(Error::InvalidInput {
                op: Op::Open,
                what: format!("page size {bytes} is not a power of two from 4096 to 65536"),
            });
        }
        self.untorn.map_or(Ok(()), |bytes| self.check_untorn(bytes))
    }

    fn check_untorn(&self, bytes: u32) -> Result<()> {
        let page_bytes_max = self.page_bytes.unwrap_or(PAGE_BYTES_MAX);
        if !bytes.is_power_of_two() || !(PAGE_BYTES_MIN..=page_bytes_max).contains(&bytes) {
            let what = format!(
                "untorn block of {bytes} bytes: not a power of two from 4096 to the page size, \
                 {page_bytes_max} at most"
            );
            return Err(Error::InvalidInput { op: Op::Open, what });
        }
        let unsupported = |what: &str| Err(Error::Unsupported { op: Op::Open, what: what.into() });
        if self.backing != Backing::Direct {
            return unsupported("untorn writes need O_DIRECT: open the file with Backing::Direct");
        }
        if !self.read {
            return unsupported(
                "untorn writes need a file that is open for reading, too: the rest of a block \
                 that is written in part is read",
            );
        }
        Ok(())
    }
}
