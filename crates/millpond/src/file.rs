//! The public face of an open file.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::advice::Advice;
use crate::cache::readahead::{self, Readahead};
use crate::cached::CachedFile;
use crate::direct::{self, Extent, Operation};
use crate::error::{Error, Op, Result};
use crate::io::backend::Seek;
use crate::io::batch;
use crate::io::request::Direction;
use crate::io::segment::{Segment, SegmentIter};
use crate::io::segment_list::RawList;
use crate::options::OpenOptions;
use crate::read;
use crate::view::View;
use crate::write;
use crate::writeback::{self, LAST_PAGE};

/// An open file.
///
/// All methods take `&self`; any number of threads may use one handle. Every read and write is
/// atomic with respect to every other operation on the same file in this process, through whatever
/// handle, save that raw and vectored forms whose memory faults may have moved some bytes, and reads
/// of handles with [`Advice::TornReads`]. Offsets and lengths are in bytes; nothing needs to be
/// aligned.
///
/// Dropping a handle closes it; [`File::close`] also reports what the kernel says about it.
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
pub struct File {
    pub(crate) cached: Arc<CachedFile>,
    pub(crate) read: bool,
    /// Reads may be served from the cache.
    pub(crate) hits: bool,
    write: bool,
    dsync: bool,
    direct: bool,
    bounce: bool,
    pub(crate) readahead: Readahead,
    /// Lock-free attempts of a read; one where it may be torn ([`Advice::TornReads`]).
    tries: AtomicU32,
    /// The handle's own descriptor, where the cached file uses another one.
    _fd: Option<OwnedFd>,
}

impl File {
    pub(crate) fn new(cached: Arc<CachedFile>, fd: Option<OwnedFd>, options: &OpenOptions) -> File {
        cached.handles.fetch_add(1, Relaxed);
        File {
            cached,
            read: options.read,
            hits: options.read && !options.direct,
            write: options.writable(),
            dsync: options.dsync,
            direct: options.direct,
            bounce: options.bounce,
            readahead: Readahead::new(),
            tries: AtomicU32::new(read::TRIES_MAX),
            _fd: fd,
        }
    }

    /// Reads from byte `offset` into `dst`; returns the bytes read, fewer than `dst.len()` only at
    /// the end of the file.
    ///
    /// Cached bytes are read without locks and without waiting (after FreeBSD's `vn_read_from_obj`,
    /// but atomically). Otherwise blocks until the pages were read, or until a writer of the same
    /// pages is done.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`]: the range ends past `i64::MAX`. [`Error::NotPermitted`]: not open
    /// for reading. [`Error::Io`]: a page could not be read; `dst` is unspecified.
    #[inline]
    pub fn read_at(&self, dst: &mut [u8], offset: u64) -> Result<usize> {
        // SAFETY: an exclusive slice is valid for writes of its length.
        unsafe { self.read_raw_at(dst.as_mut_ptr(), dst.len(), offset) }
    }

    /// Like [`File::read_at`], into several buffers in turn, as one atomic read.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`].
    pub fn read_vectored_at(&self, dst: &mut [IoSliceMut<'_>], offset: u64) -> Result<usize> {
        // SAFETY: IoSliceMut is laid out like iovec, by its documentation, and valid for writes.
        unsafe {
            let iovecs = std::slice::from_raw_parts(dst.as_ptr().cast(), dst.len());
            self.read_vectored_raw_at(iovecs, offset)
        }
    }

    /// [`File::read_at`] of what is cached, in the sense of `RWF_NOWAIT`: never waits, and starts
    /// nothing that would bring the bytes.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`]; [`Error::WouldBlock`]: a page is not cached, or being changed, or the
    /// bytes are more than are read without a lock (64 pages). `dst` is unspecified then.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Engine, Error, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let path = tempfile::NamedTempFile::new().unwrap();
    /// # std::fs::write(&path, "pond").unwrap();
    /// let file = engine.open(&path, &OpenOptions::new().read(true))?;
    /// let mut bytes = [0; 4];
    /// assert!(matches!(file.try_read_at(&mut bytes, 0), Err(Error::WouldBlock { .. })));
    /// file.read_at(&mut bytes, 0)?;
    /// assert_eq!(file.try_read_at(&mut bytes, 0)?, 4);
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn try_read_at(&self, dst: &mut [u8], offset: u64) -> Result<usize> {
        let len = dst.len() as u64;
        check_range(Op::Read, offset, len)?;
        self.check(self.read, Op::Read, offset, len)?;
        self.check_cached()?;
        if len == 0 {
            return Ok(0);
        }
        let shared = &*self.cached.shared;
        let slot = shared.cache.counters.mine();
        let (at, core, tries) = (dst.as_mut_ptr(), self.cached.core(), read::TRIES_MAX);
        // SAFETY: an exclusive slice is valid for writes of its length.
        let hit = unsafe { read::try_hit(shared, slot, core, tries, at, dst.len(), offset) };
        hit.ok_or(Error::WouldBlock { op: Op::Read, offset, len })
    }

    /// Reads exactly `dst.len()` bytes.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`]; [`Error::Io`] of kind `UnexpectedEof` if the file ends before.
    pub fn read_exact_at(&self, dst: &mut [u8], offset: u64) -> Result<()> {
        if self.read_at(dst, offset)? < dst.len() {
            let end = std::io::ErrorKind::UnexpectedEof;
            return Err(Error::io(Op::Read, offset, dst.len() as u64, end));
        }
        Ok(())
    }

    /// Writes `src` at byte `offset`; returns the bytes written. In mode
    /// [`Through`](crate::WriteMode::Through) the back end has taken them when this returns, and
    /// they survive whatever the kernel's survive; in mode [`Back`](crate::WriteMode::Back) they
    /// are in the cache. [`File::sync_data`] makes them durable.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`] and [`Error::NotPermitted`] as for reads. [`Error::Io`]: nothing was
    /// acknowledged. Where the back end took only a part before it failed, the length of that
    /// part is returned instead.
    pub fn write_at(&self, src: &[u8], offset: u64) -> Result<usize> {
        // SAFETY: a shared slice is valid for reads of its length.
        unsafe { self.write_raw_at(src.as_ptr(), src.len(), offset) }
    }

    /// Like [`File::write_at`], and returns when the bytes, and what is needed to find them, are
    /// durable: one write with `RWF_DSYNC`.
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`] and [`File::sync_data`]; the bytes may have been written.
    pub fn write_at_dsync(&self, src: &[u8], offset: u64) -> Result<usize> {
        // SAFETY: a shared slice is valid for reads of its length; a write only reads.
        let segment = unsafe { [Segment::new(src.as_ptr().cast_mut(), src.len())] };
        check_range(Op::Write, offset, src.len() as u64)?;
        self.check(self.write, Op::Write, offset, src.len() as u64)?;
        self.write_checked((&segment).into(), offset, true)
    }

    /// Like [`File::write_at`], from several buffers in turn, as one atomic write.
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`].
    pub fn write_vectored_at(&self, src: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        // SAFETY: IoSlice is laid out like iovec, by its documentation, and valid for reads.
        unsafe {
            let iovecs = std::slice::from_raw_parts(src.as_ptr().cast(), src.len());
            self.write_vectored_raw_at(iovecs, offset)
        }
    }

    /// Writes all of `src`; not atomically if the back end takes it in parts.
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`]; a part may have been written.
    pub fn write_all_at(&self, src: &[u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < src.len() {
            done += self.write_at(&src[done..], offset + done as u64)?;
        }
        Ok(())
    }

    /// Writes `src` at the end of the file; returns the offset at which it begins. Appends never
    /// interleave and leave no gaps.
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`]. [`Error::Io`] of kind `WriteZero`, too, where the back end took
    /// only a part: its `offset` is where the part begins, its `len` the length of that part.
    pub fn append(&self, src: &[u8]) -> Result<u64> {
        self.append_vectored(&[IoSlice::new(src)])
    }

    /// Like [`File::append`], from several buffers in turn.
    ///
    /// # Errors
    ///
    /// As for [`File::append`].
    pub fn append_vectored(&self, src: &[IoSlice<'_>]) -> Result<u64> {
        let total: usize = src.iter().map(|slice| slice.len()).sum();
        // SAFETY: as in `write_vectored_at`.
        let (offset, moved) = unsafe {
            let iovecs = std::slice::from_raw_parts(src.as_ptr().cast(), src.len());
            self.append_vectored_raw(iovecs)?
        };
        if moved < total {
            let part = std::io::ErrorKind::WriteZero;
            return Err(Error::io(Op::Write, offset, moved as u64, part));
        }
        Ok(offset)
    }

    /// Sets the file's length: cuts it, or extends it with zeros. Blocks while operations beyond
    /// the smaller of both lengths are under way; those below are not disturbed.
    ///
    /// # Errors
    ///
    /// [`Error::NotPermitted`]: not open for writing. [`Error::InvalidRange`]: past `i64::MAX`.
    /// [`Error::Io`]: the back end refused; nothing has changed.
    pub fn truncate(&self, len: u64) -> Result<()> {
        check_range(Op::Truncate, len, 0)?;
        self.check(self.write, Op::Truncate, len, 0)?;
        self.cached.truncate(len)
    }

    /// Makes `len` bytes at `offset` read as zeros and gives their space back to the file system:
    /// `fallocate` with `FALLOC_FL_PUNCH_HOLE`. The file's length stays; the part of the range beyond
    /// it is ignored, so a `len` of `i64::MAX as u64 - offset` means all from `offset` on. Readers
    /// see all of the range as it was, or all of it zero.
    ///
    /// Blocks while operations on pages of the range are under way, and until the file system is
    /// done; I/O elsewhere is not disturbed. The cost depends on what is cached and allocated, not
    /// on `len`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`]: the range ends past `i64::MAX`. [`Error::InvalidInput`]: `len` is 0.
    /// [`Error::NotPermitted`]: not open for writing. [`Error::Io`]: the back end failed. With
    /// EOPNOTSUPP, EPERM or another refusal nothing has changed; else each byte of the range may be
    /// as it was or zero.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let options = OpenOptions::new().read(true).write(true).create(true);
    /// let file = engine.open(dir.path().join("disk"), &options)?;
    /// file.write_all_at(&[7; 1 << 20], 0)?;
    /// # if matches!(file.punch_hole(0, 1), Err(ref e) if e.errno() == libc::EOPNOTSUPP) { return Ok(()) }
    /// file.punch_hole(64 << 10, 256 << 10)?;
    /// let mut bytes = [7; 4];
    /// file.read_exact_at(&mut bytes, 100 << 10)?;
    /// assert_eq!((bytes, file.len()?), ([0; 4], 1 << 20));
    /// // How large holes are made is the file system's affair.
    /// if let Some(hole) = file.seek_hole(0)? {
    ///     assert!(hole >= 64 << 10);
    /// }
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn punch_hole(&self, offset: u64, len: u64) -> Result<()> {
        self.check_extent(Op::Punch, offset, len)?;
        self.cached.punch(offset, offset + len)
    }

    /// Makes `len` bytes at `offset` read as zeros: `fallocate` with `FALLOC_FL_ZERO_RANGE`, which
    /// keeps their space reserved and writes nothing. The file's length stays; the range is clipped
    /// to it, and nothing is reserved beyond. Readers see all of the range as it was, or all of it
    /// zero.
    ///
    /// Where the file system can't (tmpfs, for one), zeros are written instead, 1 MiB at a time,
    /// which takes as long as any write of `len` bytes; not before all are written does anyone read
    /// the range. Blocks as [`File::punch_hole`] does.
    ///
    /// # Errors
    ///
    /// As for [`File::punch_hole`].
    pub fn zero_range(&self, offset: u64, len: u64) -> Result<()> {
        self.check_extent(Op::Zero, offset, len)?;
        self.cached.zero(offset, offset + len)
    }

    /// Reserves space for `len` bytes at `offset`, so that writes to them do not fail for lack of
    /// it: `posix_fallocate`, but without its way of writing to every block where the file system
    /// can't reserve. Bytes that exist stay as they are; if the range reaches beyond the end of the
    /// file, the file is extended to there, with zeros.
    ///
    /// Blocks while the bytes of the range are being changed, or, where it extends the file, while
    /// operations from the old end on are under way.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`], [`Error::InvalidInput`] and [`Error::NotPermitted`] as for
    /// [`File::punch_hole`]. [`Error::Io`]: not all could be reserved (ENOSPC, EDQUOT, EFBIG), or
    /// nothing can be (EOPNOTSUPP). No byte has changed, but a part may be reserved, and the file
    /// may have been extended by a part: see [`File::len`].
    pub fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        self.check_extent(Op::Allocate, offset, len)?;
        self.cached.allocate(offset, offset + len)
    }

    /// The first byte from `offset` on that is not in a hole; `None` where only a hole follows, or
    /// `offset` is at or beyond the end of the file. Holes read as zeros; zeros need not be holes,
    /// and a file system that does not know its holes has none.
    ///
    /// May wait for the file system, not for other operations; it may not see the whole of one that
    /// is under way. Writes from `offset` on that wait in the cache are written back first. The first
    /// search in a file opens a descriptor, which is kept with the file.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`]: `offset` is past `i64::MAX`. [`Error::Io`] with what the back end
    /// answered; of kind `Unsupported` where the file can't be opened again by way of
    /// `/proc/self/fd`, as its permissions have changed, somebody has a lease on it, or `/proc` is
    /// not there.
    pub fn seek_data(&self, offset: u64) -> Result<Option<u64>> {
        check_range(Op::Seek, offset, 0)?;
        self.cached.seek(offset, Seek::Data)
    }

    /// The first byte from `offset` on that is in a hole, the length of the file at the latest: its
    /// end counts as one. `None` where `offset` is at or beyond the end. Otherwise like
    /// [`File::seek_data`].
    ///
    /// # Errors
    ///
    /// As for [`File::seek_data`].
    pub fn seek_hole(&self, offset: u64) -> Result<Option<u64>> {
        check_range(Op::Seek, offset, 0)?;
        self.cached.seek(offset, Seek::Hole)
    }

    /// The file's length in bytes. Never blocks.
    ///
    /// # Errors
    ///
    /// None at present.
    pub fn len(&self) -> Result<u64> {
        Ok(self.cached.core().size.load(Acquire))
    }

    /// Whether the file has no bytes.
    ///
    /// # Errors
    ///
    /// None at present.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Makes what was written, through whatever handle, and the file's metadata, durable: `fsync`.
    /// Blocks until the device has it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] with what the back end answered. Nothing is dropped: what could not be written
    /// stays cached, and the next sync, through whatever handle, tries again. [`Error::Lost`] where
    /// an earlier failure concerned bytes that were no longer cached.
    pub fn sync_all(&self) -> Result<()> {
        writeback::sync(&self.cached, 0, LAST_PAGE, false)
    }

    /// Makes what was written durable, and as much metadata as is needed to read it: `fdatasync`.
    ///
    /// # Errors
    ///
    /// As for [`File::sync_all`].
    pub fn sync_data(&self) -> Result<()> {
        writeback::sync(&self.cached, 0, LAST_PAGE, true)
    }

    /// [`File::sync_data`] for what was written to `len` bytes at `offset` (`len` 0: to the end).
    /// Other bytes may become durable, too.
    ///
    /// # Errors
    ///
    /// As for [`File::sync_all`], and [`Error::InvalidRange`].
    pub fn sync_range(&self, offset: u64, len: u64) -> Result<()> {
        check_range(Op::Sync, offset, len)?;
        let (file, end) = (&self.cached, if len == 0 { i64::MAX as u64 } else { offset + len });
        writeback::sync(file, file.page_of(offset), file.page_of(end - 1), true)
    }

    /// Hands what is written and still waits in the cache ([`crate::WriteMode::Back`]) to the back
    /// end, so that others can see it there; unlike a sync, does not make it durable. Blocks until
    /// the back end has taken it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]: what could not be written stays cached, as after a sync.
    pub fn write_back(&self) -> Result<()> {
        writeback::write_back(&self.cached, 0, LAST_PAGE, Op::Sync)
    }

    /// [`File::write_back`], and gives back space that was reserved for writes to come: what the
    /// kernel tells of the file then, its size, its times and its blocks, stays true until somebody
    /// writes.
    ///
    /// # Errors
    ///
    /// As for [`File::write_back`].
    pub fn settle(&self) -> Result<()> {
        self.cached.settle(false)
    }

    /// Has all writes of the file, through whatever handle, go through until
    /// [`File::end_through`]; what waits in the cache is written back before this returns. For a
    /// time in which others look at the file, or change it, below the engine. Calls nest.
    ///
    /// # Errors
    ///
    /// As for [`File::write_back`]; writes go through all the same.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Engine, OpenOptions, WriteMode};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("data");
    /// let options = OpenOptions::new().write(true).create(true).write_mode(WriteMode::Back);
    /// let file = engine.open(&path, &options)?;
    /// file.write_at(b"pond", 0)?;
    /// file.begin_through()?;
    /// assert_eq!(std::fs::read(&path).unwrap(), b"pond");
    /// file.end_through();
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn begin_through(&self) -> Result<()> {
        self.cached.begin_through()
    }

    /// Has the description that the file was opened with keep the flags it was given, until
    /// [`File::end_plain`]; for a time in which others read or write by it, or change its flags.
    /// Waits for transfers that are under way, no longer. Later ones do without `O_DIRECT`. Only
    /// files of [`Backing::DirectInPlace`](crate::Backing::DirectInPlace) need it;
    /// [`File::begin_through`] does the same. Calls nest.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Backing, Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("data");
    /// let described = std::fs::File::create_new(&path).unwrap();
    /// let options = OpenOptions::new().write(true).backing(Backing::DirectInPlace);
    /// let file = engine.from_fd(described.try_clone().unwrap().into(), &options)?;
    /// file.begin_plain();
    /// std::os::unix::fs::FileExt::write_at(&described, b"pond", 0).unwrap();
    /// file.end_plain();
    /// file.invalidate(0, 4)?;
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn begin_plain(&self) {
        self.cached.backing.begin_plain();
    }

    /// Ends what [`File::begin_plain`] began.
    pub fn end_plain(&self) {
        self.cached.backing.end_plain();
    }

    /// Whether transfers go past the kernel's cache where they are aligned, as far as the kernel has
    /// not refused yet.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.cached.backing.is_direct()
    }

    /// Ends what [`File::begin_through`] began.
    pub fn end_through(&self) {
        self.cached.end_through();
    }

    /// Borrows cached bytes, filling the page if need be: at most `len` from `offset` on, and no
    /// further than the end of the page or of the file. The view is a snapshot: it does not change
    /// however the file does. It pins a page of the cache for as long as it lives.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`]; [`Error::NoBuffers`] where views pin half of the cache already.
    pub fn view(&self, offset: u64, len: usize) -> Result<View<'_>> {
        check_range(Op::View, offset, len as u64)?;
        self.check(self.read, Op::View, offset, len as u64)?;
        self.cached.view(offset, len)
    }

    /// Tells how a range will be used (`len` 0: to the end). [`Advice::Normal`],
    /// [`Advice::Sequential`], [`Advice::Random`], [`Advice::TornReads`] and
    /// [`Advice::AtomicReads`] concern all later reads of this handle, whatever the range. Never
    /// blocks, and is never more than a hint; save that `TornReads` gives up a promise.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`]: the range ends past `i64::MAX`.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Advice, Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("share");
    /// let options = OpenOptions::new().read(true).write(true).create(true);
    /// let (server, others) = (engine.open(&path, &options)?, engine.open(&path, &options)?);
    /// // A file server, whose clients have locks of their own.
    /// server.advise(0, 0, Advice::TornReads)?;
    /// others.write_all_at(&[1; 8192], 0)?;
    /// let mut bytes = [0; 8192];
    /// // While `others` writes again, pages of both writes may be seen; each page is of one.
    /// server.read_exact_at(&mut bytes, 0)?;
    /// assert_eq!(bytes, [1; 8192]);
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn advise(&self, offset: u64, len: u64, advice: Advice) -> Result<()> {
        check_range(Op::Advise, offset, len)?;
        let file = &self.cached;
        let end = if len == 0 { i64::MAX as u64 } else { offset + len };
        match advice {
            Advice::Normal | Advice::Sequential | Advice::Random => self.readahead.advise(advice),
            Advice::WillNeed => {
                let first = file.page_of(offset);
                let end = end.min(self.len()?);
                if end > offset && file.backing.permits(false) {
                    let pages = file.page_of(end - 1) - first + 1;
                    readahead::fill_ahead(file, first, pages, false);
                }
            }
            Advice::DontNeed => {
                file.cache().evict_range(file.core(), file.page_of(offset), file.page_of(end - 1));
            }
            // Relaxed: guards nothing; a read that is under way may go by either.
            Advice::TornReads => self.tries.store(read::TRIES_TORN, Relaxed),
            Advice::AtomicReads => self.tries.store(read::TRIES_MAX, Relaxed),
        }
        Ok(())
    }

    /// Tells the cache that something other than this engine changed the file: drops the cached
    /// bytes of the range (`len` 0: none) and adopts the length that the file has now. Blocks
    /// while operations on the range are under way.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`], or [`Error::Io`] if the length can't be had.
    pub fn invalidate(&self, offset: u64, len: u64) -> Result<()> {
        check_range(Op::Stat, offset, len)?;
        self.cached.invalidate(offset, offset + len)
    }

    /// Closes the handle and reports what `Drop` can't: errors of earlier writes that no sync has
    /// mended yet, or that the kernel tells of at close, as network file systems do. Writes back
    /// what waits in the cache, without making it durable.
    ///
    /// # Errors
    ///
    /// As for [`File::sync_all`]; the handle is closed all the same.
    pub fn close(self) -> Result<()> {
        if self.write {
            writeback::close(&self.cached)?;
            self.cached.backing.flush().map_err(|error| Error::io(Op::Close, 0, 0, error))?;
        }
        Ok(())
    }

    /// [`File::read_at`] into memory that need not be initialised.
    ///
    /// # Safety
    ///
    /// `dst` must be valid for writes of `len` bytes, save that they may fault in a process whose
    /// handler of memory faults consults [`crate::fault`]; that gives [`Error::Fault`], or what
    /// the kernel says where it touches the memory.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`], and [`Error::Fault`].
    #[inline]
    pub unsafe fn read_raw_at(&self, dst: *mut u8, len: usize, offset: u64) -> Result<usize> {
        if self.hits && in_range(offset, len as u64) {
            let shared = &*self.cached.shared;
            let slot = shared.cache.counters.mine();
            let (core, tries) = (self.cached.core(), self.tries.load(Relaxed));
            // SAFETY: the caller's promise is the same.
            let hit = unsafe { read::try_hit(shared, slot, core, tries, dst, len, offset) };
            if let Some(moved) = hit {
                return Ok(moved);
            }
        }
        // SAFETY: the caller's promise is the same.
        let segment = unsafe { [Segment::new(dst, len)] };
        self.read_missed((&segment).into(), offset)
    }

    /// Gives the calling thread counters of its own, which [`File::try_read_hit_raw`] can't do:
    /// call it once per thread and engine, not in a signal handler.
    pub fn prepare_thread(&self) {
        self.cached.cache().counters.mine();
    }

    /// The lock-free part of [`File::read_raw_at`]: takes no lock, makes no system call, and may
    /// run in a signal handler. `None`: not all is cached, or something is in the way; the memory
    /// is unspecified. Hits of a thread that used another engine last, or none, share counters and
    /// may go uncounted: see [`File::prepare_thread`].
    ///
    /// # Safety
    ///
    /// As for [`File::read_raw_at`].
    #[inline]
    pub unsafe fn try_read_hit_raw(&self, dst: *mut u8, len: usize, offset: u64) -> Option<usize> {
        if !self.hits || !in_range(offset, len as u64) {
            return None;
        }
        let shared = &*self.cached.shared;
        let slot = shared.cache.counters.mine_if_known();
        let (core, tries) = (self.cached.core(), self.tries.load(Relaxed));
        // SAFETY: the caller's promise is the same.
        unsafe { read::try_hit(shared, slot, core, tries, dst, len, offset) }
    }

    /// [`File::read_vectored_at`] into memory that need not be initialised.
    ///
    /// # Safety
    ///
    /// As for [`File::read_raw_at`], for each buffer.
    ///
    /// # Errors
    ///
    /// As for [`File::read_raw_at`].
    pub unsafe fn read_vectored_raw_at(&self, dst: &[libc::iovec], offset: u64) -> Result<usize> {
        // SAFETY: the caller's promise is the same.
        let list = unsafe { RawList::from_iovecs(dst) };
        let len = list.total();
        if self.hits && in_range(offset, len) {
            let shared = &self.cached.shared;
            let slot = shared.cache.counters.mine();
            let (core, tries) = (self.cached.core(), self.tries.load(Relaxed));
            let hit = read::try_hit_vectored(shared, slot, core, tries, list.iter(), offset);
            if let Some(moved) = hit {
                return Ok(moved);
            }
        }
        self.read_missed(list.iter(), offset)
    }

    #[cold]
    fn read_missed(&self, dst: SegmentIter<'_>, offset: u64) -> Result<usize> {
        let len = dst.left();
        check_range(Op::Read, offset, len)?;
        self.check(self.read, Op::Read, offset, len)?;
        if len == 0 {
            return Ok(0);
        }
        if self.direct {
            return self.direct(Direction::Read, dst, offset, false);
        }
        let file = &self.cached;
        self.readahead.before_read(file, file.page_of(offset), file.page_of(offset + len - 1));
        if self.tries.load(Relaxed) == read::TRIES_TORN {
            return read::read_torn(file, dst, offset);
        }
        read::read_slow(file, dst, offset)
    }

    /// [`File::write_at`] from memory that may change meanwhile; the bytes written are then
    /// unspecified.
    ///
    /// # Safety
    ///
    /// `src` must be valid for reads of `len` bytes, save that they may fault as `dst` of
    /// [`File::read_raw_at`] may.
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`], and [`Error::Fault`]: nothing was written.
    pub unsafe fn write_raw_at(&self, src: *const u8, len: usize, offset: u64) -> Result<usize> {
        // SAFETY: the caller's promise; a write only reads the memory.
        let segment = unsafe { [Segment::new(src.cast_mut(), len)] };
        self.write_segments((&segment).into(), offset)
    }

    /// [`File::write_vectored_at`] from memory that may change meanwhile.
    ///
    /// # Safety
    ///
    /// As for [`File::write_raw_at`], for each buffer.
    ///
    /// # Errors
    ///
    /// As for [`File::write_raw_at`].
    pub unsafe fn write_vectored_raw_at(&self, src: &[libc::iovec], offset: u64) -> Result<usize> {
        // SAFETY: the caller's promise; a write only reads the memory.
        let list = unsafe { RawList::from_iovecs(src) };
        self.write_segments(list.iter(), offset)
    }

    fn write_segments(&self, src: SegmentIter<'_>, offset: u64) -> Result<usize> {
        check_range(Op::Write, offset, src.left())?;
        self.check(self.write, Op::Write, offset, src.left())?;
        self.write_checked(src, offset, self.dsync)
    }

    fn write_checked(&self, src: SegmentIter<'_>, offset: u64, durable: bool) -> Result<usize> {
        if self.direct {
            return self.direct(Direction::Write, src, offset, durable);
        }
        write::write(&self.cached, src, offset, durable)
    }

    fn direct(
        &self,
        direction: Direction,
        segments: SegmentIter<'_>,
        offset: u64,
        durable: bool,
    ) -> Result<usize> {
        let (file, len) = (&*self.cached, segments.left());
        let extent = Extent { file, direction, offset, len, durable };
        let operation = Operation { extent, segments };
        match operation.check_alignment() {
            Ok(()) => operation.run(),
            Err(_) if self.bounce => operation.run_bounced(),
            Err(error) => Err(error),
        }
    }

    /// [`File::append`] from memory that may change meanwhile. Returns the offset and the number
    /// of bytes written, which may be fewer than asked for.
    ///
    /// # Safety
    ///
    /// As for [`File::write_raw_at`].
    ///
    /// # Errors
    ///
    /// As for [`File::write_raw_at`].
    pub unsafe fn append_raw(&self, src: *const u8, len: usize) -> Result<(u64, usize)> {
        let iovec = [libc::iovec { iov_base: src.cast_mut().cast(), iov_len: len }];
        // SAFETY: the caller's promise is the same.
        unsafe { self.append_vectored_raw(&iovec) }
    }

    /// [`File::append_vectored`] from memory that may change meanwhile; see [`File::append_raw`].
    ///
    /// # Safety
    ///
    /// As for [`File::write_raw_at`], for each buffer.
    ///
    /// # Errors
    ///
    /// As for [`File::write_raw_at`].
    pub unsafe fn append_vectored_raw(&self, src: &[libc::iovec]) -> Result<(u64, usize)> {
        // SAFETY: the caller's promise; a write only reads the memory.
        let list = unsafe { RawList::from_iovecs(src) };
        check_range(Op::Write, 0, list.total())?;
        self.check(self.write, Op::Write, 0, list.total())?;
        if self.direct {
            let (file, direction) = (&*self.cached, Direction::Write);
            let (len, durable) = (list.total(), self.dsync);
            let extent = Extent { file, direction, offset: 0, len, durable };
            return direct::append(Operation { extent, segments: list.iter() }, self.bounce);
        }
        write::append(&self.cached, list.iter(), self.dsync)
    }

    /// Checks the arguments of an operation that changes the extent of `len` bytes.
    fn check_extent(&self, op: Op, offset: u64, len: u64) -> Result<()> {
        check_range(op, offset, len)?;
        self.check(self.write, op, offset, len)?;
        if len == 0 {
            let what = format!("the length of the range at offset {offset} is 0; at least 1");
            return Err(Error::InvalidInput { op, what });
        }
        Ok(())
    }

    /// Opened for direct I/O by its caller.
    pub(crate) fn is_for_direct(&self) -> bool {
        self.direct
    }

    /// Whether what is not aligned is served all the same.
    pub(crate) fn bounces(&self) -> bool {
        self.bounce
    }

    /// What a [`crate::DirectRequest`] needs of its file.
    pub(crate) fn check_direct(&self, op: Op, offset: u64, len: u64) -> Result<()> {
        if !self.direct {
            let what = "a request in a pipeline: the file is not open for direct I/O".into();
            return Err(Error::InvalidInput { op, what });
        }
        self.check(if op == Op::Read { self.read } else { self.write }, op, offset, len)
    }

    /// Refuses what only the cache can do without waiting.
    pub(crate) fn check_cached(&self) -> Result<()> {
        if self.direct {
            let what =
                "a read that does not wait, of a handle for direct I/O: read into buffers".into();
            return Err(Error::InvalidInput { op: Op::Read, what });
        }
        Ok(())
    }

    pub(crate) fn is_dsync(&self) -> bool {
        self.dsync
    }

    pub(crate) fn cached(&self) -> &CachedFile {
        &self.cached
    }

    fn check(&self, permitted: bool, op: Op, offset: u64, len: u64) -> Result<()> {
        if permitted { Ok(()) } else { Err(Error::NotPermitted { op, offset, len }) }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // AcqRel: what other handles wrote happens before the last one writes it back.
        if self.cached.handles.fetch_sub(1, AcqRel) == 1 {
            let cached = Arc::clone(&self.cached);
            if batch::is_open() {
                // Who has a batch open must not wait: a fill may be ending here, whose guard it would
                // wait for.
                let workers = Arc::clone(&cached.shared.workers);
                workers.run(Box::new(move || cached.leave()));
            } else {
                cached.leave();
            }
        }
    }
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File")
            .field("len", &self.cached.core().size.load(Acquire))
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
