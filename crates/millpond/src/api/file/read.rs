//! Reads: cached bytes without a lock, other bytes by [`crate::read`] or directly.

use std::io::IoSliceMut;
use std::num::NonZeroU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::advice::Advice;
use crate::api::file::{File, check_range, in_range};
use crate::api::view::View;
use crate::error::{Error, Op, Result};
use crate::inode::mapped_pages::MappedPages;
use crate::io::segment::{Segment, SegmentIter};
use crate::io::segment_list::SegmentList;
use crate::io::transfer::Direction;
use crate::latency::LatencyKind;
use crate::read;
use crate::read::ahead;
use crate::read::hit::{HitPath, TRIES_MAX, TRIES_TORN};
use crate::read::mapped_read;
use crate::read::plan::BypassPolicy;

impl File {
    /// Reads from byte `offset` into `dst`; returns the bytes read: fewer than `dst.len()` only at the end
    /// of the file, or before bytes that can't be read; a read of those returns the error.
    ///
    /// The rest of `dst` is unchanged; or zero, if the read met a truncation, an error, or changes of the
    /// file by another program. It never has other bytes of this file, or of another one.
    ///
    /// Cached bytes are read without locks and without waiting (after FreeBSD's `vn_read_from_obj`, but
    /// atomically). Otherwise the call blocks until the pages have been read, or until a writer of the same
    /// pages is done.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`]: the range ends past `i64::MAX`. [`Error::NotPermitted`]: not open
    /// for reading. [`Error::Io`]: the first byte could not be read.
    #[inline]
    pub fn read_at(&self, dst: &mut [u8], offset: u64) -> Result<usize> {
        // SAFETY: an exclusive slice is valid for writes of its length.
        unsafe { self.raw().read_at(dst.as_mut_ptr(), dst.len(), offset) }
    }

    /// Like [`File::read_at`], into several buffers in turn, as one atomic read.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`].
    pub fn read_vectored_at(&self, dst: &mut [IoSliceMut<'_>], offset: u64) -> Result<usize> {
        let list = SegmentList::from_io_slices_mut(dst).into_raw();
        self.read_segments(list.iter(), offset, BypassPolicy::Filtered)
    }

    /// [`File::read_at`] of cached bytes, in the sense of `RWF_NOWAIT`: never waits, and starts no read of
    /// missing pages.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`]; [`Error::WouldBlock`]: a page is not cached, or being changed, or the
    /// bytes are more than a lock-free read covers (64 pages). `dst` is unspecified then.
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
        let slot = self.cached.cache().counters.local();
        let would_block = Error::WouldBlock { op: Op::Read, offset, len };
        if let Some(pages) = self.mapped_pages() {
            // SAFETY: an exclusive slice is valid for writes of its length.
            let segment = unsafe { [Segment::new(dst.as_mut_ptr(), dst.len())] };
            let dst = (&segment).into();
            return match mapped_read::try_read(&self.cached, pages, slot, dst, offset) {
                Some(moved) => Ok(moved),
                None => mapped_read::read_without_waiting(&self.cached, dst, offset)
                    .unwrap_or(Err(would_block)),
            };
        }
        let path = HitPath::new(&self.cached, slot, TRIES_MAX);
        // SAFETY: an exclusive slice is valid for writes of its length.
        let hit = unsafe { path.try_read(dst.as_mut_ptr(), dst.len(), offset) };
        hit.ok_or(would_block)
    }

    /// Reads exactly `dst.len()` bytes.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`]; [`Error::Io`] of kind `UnexpectedEof` if the file ends before.
    pub fn read_exact_at(&self, dst: &mut [u8], offset: u64) -> Result<()> {
        let moved = self.read_at(dst, offset)?;
        if moved < dst.len() {
            // Returns the reason: an error, or 0 bytes at the end of the file.
            self.read_at(&mut dst[moved..], offset + moved as u64)?;
            let end = std::io::ErrorKind::UnexpectedEof;
            return Err(Error::io(Op::Read, offset, dst.len() as u64, end));
        }
        Ok(())
    }

    /// Borrows cached bytes, after a read of the page if necessary: at most `len` from `offset`, up to the
    /// end of the page or of the file. The view is a snapshot: later changes of the file do not affect it.
    /// It pins a page of the cache until it is dropped.
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`]; [`Error::NoBuffers`] if views pin half of the cache already.
    pub fn view(&self, offset: u64, len: usize) -> Result<View<'_>> {
        self.check_view(offset, len)?;
        self.cached.view(offset, len)
    }

    pub(crate) fn check_view(&self, offset: u64, len: usize) -> Result<()> {
        check_range(Op::View, offset, len as u64)?;
        self.check(self.read, Op::View, offset, len as u64)
    }

    /// Announces how a range will be used (`len` 0: to the end). [`Advice::Normal`],
    /// [`Advice::Sequential`], [`Advice::Random`], [`Advice::TornReads`] and [`Advice::AtomicReads`] apply
    /// to all later reads of this handle, of any range. Never blocks. Advice is only a hint, except
    /// that `TornReads` gives up the atomicity of reads.
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
        self.check_process(Op::Advise)?;
        let file = &self.cached;
        let end = if len == 0 { i64::MAX as u64 } else { offset + len };
        match advice {
            Advice::Normal | Advice::Sequential | Advice::Random => {
                self.readahead.advise(advice);
                if file.mapped_pages.is_some() {
                    let advice = match advice {
                        Advice::Sequential => rustix::fs::Advice::Sequential,
                        Advice::Random => rustix::fs::Advice::Random,
                        _ => rustix::fs::Advice::Normal,
                    };
                    self.advise_kernel(offset, len, advice);
                }
            }
            Advice::WillNeed => {
                let first = file.page_of(offset);
                let end = end.min(self.len()?);
                if file.mapped_pages.is_some() {
                    self.advise_kernel(offset, len, rustix::fs::Advice::WillNeed);
                } else if end > offset && file.backing.permits(false) {
                    let pages = file.page_of(end - 1) - first + 1;
                    ahead::fill_ahead(file, first, pages, false);
                }
            }
            Advice::DontNeed => {
                if let Some(pages) = &file.mapped_pages {
                    pages.drop_pages(offset, len);
                    self.advise_kernel(offset, len, rustix::fs::Advice::DontNeed);
                }
                file.cache().evict_range(file.core(), file.page_of(offset), file.page_of(end - 1));
            }
            // Relaxed: guards no data; a concurrent read may use either value.
            Advice::TornReads => self.tries.store(TRIES_TORN, Relaxed),
            Advice::AtomicReads => self.tries.store(TRIES_MAX, Relaxed),
        }
        Ok(())
    }

    /// Passes advice on to the kernel, whose pages they are. Advice has no error.
    fn advise_kernel(&self, offset: u64, len: u64, advice: rustix::fs::Advice) {
        if let Some(fd) = self.cached.backing.descriptor(false) {
            let _ = rustix::fs::fadvise(fd, offset, NonZeroU64::new(len), advice);
        }
    }

    /// A read that frames do not serve.
    #[inline]
    pub(super) fn read_mapped_or_missed(
        &self,
        dst: SegmentIter<'_>,
        offset: u64,
        policy: BypassPolicy,
    ) -> Result<usize> {
        if let Some(pages) = self.mapped_pages()
            && in_range(offset, dst.left())
        {
            let slot = self.cached.cache().counters.local();
            if let Some(moved) = mapped_read::try_read(&self.cached, pages, slot, dst, offset) {
                return Ok(moved);
            }
        }
        self.read_missed(dst, offset, policy)
    }

    /// The pages that serve reads of this handle in place of frames.
    #[inline]
    fn mapped_pages(&self) -> Option<&MappedPages> {
        self.cached.mapped_pages.as_deref().filter(|_| self.read && !self.direct)
    }

    /// Reads into all segments.
    pub(crate) fn read_segments(
        &self,
        dst: SegmentIter<'_>,
        offset: u64,
        policy: BypassPolicy,
    ) -> Result<usize> {
        let len = dst.left();
        if self.hits && in_range(offset, len) {
            let slot = self.cached.cache().counters.local();
            let path = HitPath::new(&self.cached, slot, self.tries.load(Relaxed));
            if let Some(moved) = path.try_read_vectored(dst, offset) {
                return Ok(moved);
            }
        }
        self.read_mapped_or_missed(dst, offset, policy)
    }

    /// Before a read that is no hit: continues or starts read-ahead, and takes off the marker that may have sent the
    /// read here although all of its pages are READY.
    pub(crate) fn read_ahead(&self, offset: u64, len: u64) {
        let file = &self.cached;
        self.readahead.before_read(file, file.page_of(offset), file.page_of(offset + len - 1));
    }

    #[cold]
    fn read_missed(
        &self,
        dst: SegmentIter<'_>,
        offset: u64,
        policy: BypassPolicy,
    ) -> Result<usize> {
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
        let begun = Instant::now();
        self.read_ahead(offset, len);
        let is_torn = self.tries.load(Relaxed) == TRIES_TORN && file.mapped_pages.is_none();
        let read = if is_torn {
            read::read_torn(file, dst, offset, policy)
        } else {
            read::read_slow(file, dst, offset, policy)
        };
        file.cache().counters.local().took(LatencyKind::ReadMiss, begun);
        read
    }
}
