//! [`File`]: a handle of an open file, with its permissions.
//!
//! The modules below have its methods by subject. They check the arguments, and call the engine's module of
//! the same subject.

pub(crate) mod raw;

mod read;

mod write;

mod extent;

pub(crate) mod writeback;

pub(crate) mod cursor;

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

use millpond_rangelock::callback;

use crate::direct_io::{DirectRange, Operation};
use crate::error::{Error, Op, Result};
use crate::inode::CachedFile;
use crate::io::backend::descriptors;
use crate::io::batch;
use crate::io::segment::SegmentIter;
use crate::io::transfer::Direction;
use crate::options::OpenOptions;
use crate::read::ahead::Readahead;
use crate::read::hit::TRIES_MAX;

/// An open file.
///
/// All methods take `&self`; any number of threads may use one handle. Every read and write is atomic with
/// respect to every other operation on the same file in this process, through any handle. Exceptions are
/// raw and vectored forms whose memory faults, which may have moved some bytes, and reads of handles with
/// [`Advice::TornReads`](crate::Advice::TornReads). Offsets and lengths are in bytes; no alignment is
/// required.
///
/// Dropping a handle closes it; [`File::close`] also returns the errors of the close.
///
/// # Examples
///
/// ```
/// # use millpond::{Engine, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("log");
/// let log = engine.open(&path, &OpenOptions::new().read(true).append(true).create(true))?;
/// assert_eq!(log.append(b"one")?, 0);
/// assert_eq!(log.append(b"two")?, 3);
/// assert_eq!(&*log.view(0, 100)?, b"onetwo");
/// # Ok::<(), millpond::Error>(())
/// ```
///
/// Vectored reads and writes:
///
/// ```
/// # use std::io::{IoSlice, IoSliceMut};
/// # use millpond::{Engine, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// # let options = OpenOptions::new().read(true).write(true).create(true);
///
/// let file = engine.open(&path, &options)?;
/// assert!(file.is_empty()? && !file.is_direct());
/// file.write_vectored_at(&[IoSlice::new(b"a "), IoSlice::new(b"pond")], 0)?;
/// assert_eq!(file.append_vectored(&[IoSlice::new(b", a "), IoSlice::new(b"mill")])?, 6);
/// let (mut first, mut rest) = ([0; 2], [0; 4]);
/// assert_eq!(file.read_vectored_at(&mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut rest)], 0)?, 6);
/// assert_eq!((&first, &rest), (b"a ", b"pond"));
/// file.close()?;
/// # Ok::<(), millpond::Error>(())
/// ```
///
/// Writes and durability:
///
/// ```
/// # use std::sync::Arc;
/// # use millpond::{Engine, OpenOptions, WriteMode};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// # let options = OpenOptions::new().read(true).write(true).create(true);
///
/// let file = Arc::new(engine.open(&path, &options.write_mode(WriteMode::Back))?);
/// file.write_at_dsync(b"first", 0)?; // durable, as all of these below
/// file.write_all_at(b"second", 4096)?;
/// file.write_back()?; // in the kernel; not yet on the device
/// file.sync_range(4096, 6)?;
/// file.sync_data()?;
/// file.sync_all()?; // its times, too
/// file.settle()?;
/// file.close_shared()?;
/// # Ok::<(), millpond::Error>(())
/// ```
pub struct File {
    /// Taken by `drop` only.
    pub(crate) cached: ManuallyDrop<Arc<CachedFile>>,
    pub(crate) read: bool,
    /// Reads may be served from frames.
    pub(crate) hits: bool,
    write: bool,
    dsync: bool,
    direct: bool,
    bounce: bool,
    pub(crate) readahead: Readahead,
    /// Lock-free attempts of a read; 1 if reads may be torn ([`crate::Advice::TornReads`]).
    pub(crate) tries: AtomicU32,
    /// The handle's own descriptor, if the cached file uses another one.
    fd: Option<OwnedFd>,
}

impl File {
    pub(crate) fn new(cached: Arc<CachedFile>, fd: Option<OwnedFd>, options: &OpenOptions) -> File {
        cached.handles.fetch_add(1, Relaxed);
        let hits = options.read && !options.direct && cached.mapped_pages.is_none();
        File {
            cached: ManuallyDrop::new(cached),
            read: options.read,
            hits,
            write: options.writable(),
            dsync: options.dsync,
            direct: options.direct,
            bounce: options.bounce,
            readahead: Readahead::new(),
            tries: AtomicU32::new(TRIES_MAX),
            fd,
        }
    }

    /// Closes the handle and returns errors that `Drop` can't: errors of earlier writes that no sync has
    /// repaired yet, and errors that the kernel reports at close, as network file systems do. Writes back
    /// the dirty pages, without making them durable.
    ///
    /// # Errors
    ///
    /// As for [`File::sync_all`]; the handle is closed in any case.
    pub fn close(self) -> Result<()> {
        self.end()
    }

    /// [`File::close`] of a shared handle: returns the errors. Operations in flight and requests of queues
    /// continue, and the handle is released with the last of them.
    ///
    /// # Errors
    ///
    /// As for [`File::close`].
    pub fn close_shared(self: Arc<Self>) -> Result<()> {
        self.end()
    }

    fn end(&self) -> Result<()> {
        self.check_process(Op::Close)?;
        if self.write {
            crate::writeback::close(&self.cached)?;
            let flushed = self.cached.backing.descriptor(true).map_or(Ok(()), descriptors::flush);
            flushed.map_err(|error| Error::io(Op::Close, 0, 0, error))?;
        }
        Ok(())
    }

    pub(crate) fn cached(&self) -> &CachedFile {
        &self.cached
    }

    /// Whether reads may be served from frames or from a mapping.
    pub(crate) fn is_for_cached_reads(&self) -> bool {
        self.read && !self.direct
    }

    /// Whether the caller opened it for direct I/O.
    pub(crate) fn is_for_direct(&self) -> bool {
        self.direct
    }

    /// Whether unaligned direct requests are served through an aligned buffer.
    pub(crate) fn bounces(&self) -> bool {
        self.bounce
    }

    pub(crate) fn is_dsync(&self) -> bool {
        self.dsync
    }

    fn check(&self, permitted: bool, op: Op, offset: u64, len: u64) -> Result<()> {
        self.check_process(op)?;
        if permitted { Ok(()) } else { Err(Error::NotPermitted { op, offset, len }) }
    }

    /// Refuses operations of a child of fork on its parent's file.
    pub(crate) fn check_process(&self, op: Op) -> Result<()> {
        if self.cached.core().is_the_parents() { Err(Error::Forked { op }) } else { Ok(()) }
    }

    /// Checks a read without running it.
    pub(crate) fn check_read(&self, offset: u64, len: u64) -> Result<()> {
        check_range(Op::Read, offset, len)?;
        self.check(self.read, Op::Read, offset, len)
    }

    /// Checks the conditions of a [`crate::direct::DirectRequest`] on its file.
    pub(crate) fn check_direct(&self, op: Op, offset: u64, len: u64) -> Result<()> {
        if !self.direct {
            let what = "a request in a pipeline: the file is not open for direct I/O".into();
            return Err(Error::InvalidInput { op, what });
        }
        self.check(if op == Op::Read { self.read } else { self.write }, op, offset, len)
    }

    /// Refuses operations that can avoid waiting only through the cache.
    pub(crate) fn check_cached(&self) -> Result<()> {
        if self.direct {
            let what =
                "a read that does not wait, of a handle for direct I/O: read into buffers".into();
            return Err(Error::InvalidInput { op: Op::Read, what });
        }
        Ok(())
    }

    /// Moves bytes past the cache.
    fn direct(
        &self,
        direction: Direction,
        segments: SegmentIter<'_>,
        offset: u64,
        durable: bool,
    ) -> Result<usize> {
        let (file, len) = (&*self.cached, segments.left());
        let extent = DirectRange { file, direction, offset, len, durable };
        let operation = Operation { extent, segments };
        match operation.check_alignment() {
            Ok(()) => operation.run(),
            Err(_) if self.bounce => operation.run_bounced(),
            Err(error) => Err(error),
        }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        if self.cached.core().is_the_parents() {
            // The state to write back, free and wait for is the parent's.
            return;
        }
        // SAFETY: not used again.
        let cached = unsafe { ManuallyDrop::take(&mut self.cached) };
        // AcqRel: the writes of other handles happen before the last handle's write-back. Argued: a count
        // of handles, as in an `Arc`; the writes are recorded in sets under locks as well.
        if cached.handles.fetch_sub(1, AcqRel) > 1 {
            return;
        }
        // Before the release: a second description hides whether another process has the file open.
        let fd = self.fd.take();
        if batch::is_open() || callback::is_running() {
            // A thread with an open batch must not wait: it may be completing a fill, whose guard it would
            // wait for. The same holds in a waker (`millpond_rangelock::callback`).
            let workers = Arc::clone(&cached.shared.workers);
            workers.run(Box::new(move || {
                drop(fd);
                cached.release();
            }));
        } else {
            drop(fd);
            cached.release();
        }
    }
}

/// A descriptor of the file, for calls that `File` does not have: `fstat`, `flock`, `fsetxattr`. It may be shared with
/// other handles of the file, and may permit more or less than this one.
///
/// Calls that read, write, cut or map the file by it bypass the cache. So dirty pages are not seen, and cached bytes are
/// not updated: call [`File::suspend_writeback`] before, and [`File::invalidate`] after changes. Do not change its
/// flags. Closing a duplicate drops the process's POSIX locks on the file.
///
/// # Examples
///
/// ```
/// # use millpond::{Engine, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let path = tempfile::NamedTempFile::new().unwrap();
/// let file = engine.open(&path, &OpenOptions::new().read(true))?;
/// assert_eq!(rustix::fs::fstat(&file).expect("it is open").st_size, 0);
/// # Ok::<(), millpond::Error>(())
/// ```
impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let own = self.fd.as_ref().map(AsFd::as_fd);
        let shared = || self.cached.backing.descriptor(self.write);
        let any = || self.cached.backing.descriptor(false);
        own.or_else(shared).or_else(any).expect("an open file has a descriptor")
    }
}

/// For code that is generic over files; [`File`]'s own methods of these names return [`Error`].
impl FileExt for File {
    fn read_at(&self, dst: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(File::read_at(self, dst, offset)?)
    }

    fn write_at(&self, src: &[u8], offset: u64) -> io::Result<usize> {
        Ok(File::write_at(self, src, offset)?)
    }

    fn read_exact_at(&self, dst: &mut [u8], offset: u64) -> io::Result<()> {
        Ok(File::read_exact_at(self, dst, offset)?)
    }

    fn write_all_at(&self, src: &[u8], offset: u64) -> io::Result<()> {
        Ok(File::write_all_at(self, src, offset)?)
    }
}

/// Drops a handle on a thread that must not wait, and then calls `end`. Dropping the last handle of a file
/// writes back: a worker does that, and then calls `end`, which finds the bytes written.
#[inline]
pub(crate) fn release_handle(handle: Arc<File>, end: impl FnOnce() + Send + 'static) {
    match Arc::into_inner(handle) {
        None => end(),
        Some(last) => release_last_handle(last, end),
    }
}

/// [`release_handle`] of a handle that is known to be the last.
#[cold]
pub(crate) fn release_last_handle(last: File, end: impl FnOnce() + Send + 'static) {
    let workers = Arc::clone(&last.cached.shared.workers);
    workers.run(Box::new(move || {
        drop(last);
        end();
    }));
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File")
            .field("len", &self.cached.core().size.get())
            .field("page_bytes", &self.cached.core().page_bytes())
            .field("read", &self.read)
            .field("write", &self.write)
            .finish_non_exhaustive()
    }
}

#[inline]
pub(crate) fn in_range(offset: u64, len: u64) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= i64::MAX as u64)
}

pub(crate) fn check_range(op: Op, offset: u64, len: u64) -> Result<()> {
    if in_range(offset, len) { Ok(()) } else { Err(Error::InvalidRange { op, offset, len }) }
}
