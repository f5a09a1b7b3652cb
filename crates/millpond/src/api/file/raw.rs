//! [`RawFile`]: reads and writes of memory by its address.

use std::sync::atomic::Ordering::Relaxed;

use crate::api::file::{File, in_range};
use crate::error::Result;
use crate::io::segment::Segment;
use crate::io::segment_list::RawList;
use crate::read::hit::HitPath;
use crate::read::plan::BypassPolicy;

/// The operations of a [`File`] on memory that no Rust type describes: that is not initialised, that may change during
/// the call, or that may fault. For bindings of other languages and for interposers.
///
/// Memory that is read into must be valid for writes, memory that is written from must be valid for reads, and no other
/// code may hold a reference to it during the call. The memory may fault in a process whose handler of memory faults
/// calls [`crate::fault`]; the result is then [`Error::Fault`](crate::Error::Fault), or the kernel's error if the kernel touches the memory.
/// Bytes that change during a write are written with unspecified values.
///
/// # Examples
///
/// ```
/// # use millpond::{Engine, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// # let options = OpenOptions::new().read(true).write(true).create(true);
///
/// let file = engine.open(&path, &options)?;
/// let mut memory = *b"pond";
/// let whole = [libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() }];
/// // SAFETY: an array is valid for reads and writes of its length, and not used elsewhere.
/// unsafe {
///     assert_eq!(file.raw().append(memory.as_ptr(), memory.len())?, (0, 4));
///     assert_eq!(file.raw().append_vectored(&whole)?, (4, 4));
///     assert_eq!(file.raw().write_at(memory.as_ptr(), 2, 8)?, 2);
///     assert_eq!(file.raw().write_vectored_at(&whole, 10)?, 4);
///     assert_eq!(file.raw().read_vectored_at(&whole, 8)?, 4);
/// }
/// assert_eq!(&memory, b"popo");
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct RawFile<'f> {
    file: &'f File,
}

impl std::fmt::Debug for RawFile<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("RawFile").field(self.file).finish()
    }
}

impl File {
    /// The operations on memory by its address.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let path = tempfile::NamedTempFile::new().unwrap();
    /// # std::fs::write(&path, "pond").unwrap();
    /// let file = engine.open(&path, &OpenOptions::new().read(true))?;
    /// let mut bytes = Vec::<u8>::with_capacity(100);
    /// // SAFETY: the vector has room for 100 bytes, and nothing else uses them.
    /// let read = unsafe { file.raw().read_at(bytes.as_mut_ptr(), 100, 0)? };
    /// // SAFETY: the read has written that many.
    /// unsafe { bytes.set_len(read) };
    /// assert_eq!(bytes, b"pond");
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn raw(&self) -> RawFile<'_> {
        RawFile { file: self }
    }
}

impl RawFile<'_> {
    /// [`File::read_at`].
    ///
    /// # Safety
    ///
    /// `dst` is valid for writes of `len` bytes, by the rules of [`RawFile`].
    ///
    /// # Errors
    ///
    /// As for [`File::read_at`], and [`Error::Fault`](crate::Error::Fault).
    #[inline]
    pub unsafe fn read_at(self, dst: *mut u8, len: usize, offset: u64) -> Result<usize> {
        let file = self.file;
        if file.hits && in_range(offset, len as u64) {
            let slot = file.cached.cache().counters.local();
            let path = HitPath::new(&file.cached, slot, file.tries.load(Relaxed));
            // SAFETY: the caller's promise is the same.
            let hit = unsafe { path.try_read(dst, len, offset) };
            if let Some(moved) = hit {
                return Ok(moved);
            }
        }
        // SAFETY: the caller's promise is the same.
        let segment = unsafe { [Segment::new(dst, len)] };
        file.read_mapped_or_missed((&segment).into(), offset, BypassPolicy::Filtered)
    }

    /// [`File::read_vectored_at`].
    ///
    /// # Safety
    ///
    /// As for [`RawFile::read_at`], for each buffer.
    ///
    /// # Errors
    ///
    /// As for [`RawFile::read_at`].
    pub unsafe fn read_vectored_at(self, dst: &[libc::iovec], offset: u64) -> Result<usize> {
        // SAFETY: the caller's promise is the same.
        let list = unsafe { RawList::from_iovecs(dst) };
        self.file.read_segments(list.iter(), offset, BypassPolicy::Filtered)
    }

    /// Assigns counters to the calling thread, which [`RawFile::try_read_hit`] can't do: call it once per
    /// thread and engine, not in a signal handler.
    pub fn prepare_thread(self) {
        self.file.cached.cache().counters.local();
    }

    /// The lock-free part of [`RawFile::read_at`]: takes no lock, makes no system call, and may run in a
    /// signal handler. `None`: a page is not cached, or the read has to wait; the memory is unspecified.
    /// Hits of a thread that last used another engine, or none, share counters and may go uncounted: see
    /// [`RawFile::prepare_thread`].
    ///
    /// # Safety
    ///
    /// As for [`RawFile::read_at`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("data");
    /// # let options = OpenOptions::new().read(true).write(true).create(true);
    ///
    /// let file = engine.open(&path, &options)?;
    /// file.write_all_at(b"pond", 0)?;
    /// file.raw().prepare_thread(); // once a thread; then, in a signal handler, too:
    /// let mut bytes = [0u8; 4];
    /// // SAFETY: an array is valid for writes of its length.
    /// let hit = unsafe { file.raw().try_read_hit(bytes.as_mut_ptr(), bytes.len(), 0) };
    /// if hit.is_none() {
    ///     // SAFETY: as above.
    ///     unsafe { file.raw().read_at(bytes.as_mut_ptr(), bytes.len(), 0)? };
    /// }
    /// assert_eq!(&bytes, b"pond");
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[inline]
    pub unsafe fn try_read_hit(self, dst: *mut u8, len: usize, offset: u64) -> Option<usize> {
        let file = self.file;
        if !file.hits || !in_range(offset, len as u64) {
            return None;
        }
        let slot = file.cached.cache().counters.local_if_known();
        let path = HitPath::new(&file.cached, slot, file.tries.load(Relaxed));
        // SAFETY: the caller's promise is the same.
        unsafe { path.try_read(dst, len, offset) }
    }

    /// [`File::write_at`].
    ///
    /// # Safety
    ///
    /// `src` is valid for reads of `len` bytes, by the rules of [`RawFile`].
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`], and [`Error::Fault`](crate::Error::Fault): no byte was written.
    pub unsafe fn write_at(self, src: *const u8, len: usize, offset: u64) -> Result<usize> {
        // SAFETY: the caller's promise; a write only reads the memory.
        let segment = unsafe { [Segment::new(src.cast_mut(), len)] };
        self.file.write_segments((&segment).into(), offset)
    }

    /// [`File::write_vectored_at`].
    ///
    /// # Safety
    ///
    /// As for [`RawFile::write_at`], for each buffer.
    ///
    /// # Errors
    ///
    /// As for [`RawFile::write_at`].
    pub unsafe fn write_vectored_at(self, src: &[libc::iovec], offset: u64) -> Result<usize> {
        // SAFETY: the caller's promise; a write only reads the memory.
        let list = unsafe { RawList::from_iovecs(src) };
        self.file.write_segments(list.iter(), offset)
    }

    /// [`File::append`]. Returns the offset and the number of bytes written, which may be fewer than `len`.
    ///
    /// # Safety
    ///
    /// As for [`RawFile::write_at`].
    ///
    /// # Errors
    ///
    /// As for [`RawFile::write_at`].
    pub unsafe fn append(self, src: *const u8, len: usize) -> Result<(u64, usize)> {
        let iovec = [libc::iovec { iov_base: src.cast_mut().cast(), iov_len: len }];
        // SAFETY: the caller's promise is the same.
        unsafe { self.append_vectored(&iovec) }
    }

    /// [`File::append_vectored`]; returns as [`RawFile::append`] does.
    ///
    /// # Safety
    ///
    /// As for [`RawFile::write_at`], for each buffer.
    ///
    /// # Errors
    ///
    /// As for [`RawFile::write_at`].
    pub unsafe fn append_vectored(self, src: &[libc::iovec]) -> Result<(u64, usize)> {
        // SAFETY: the caller's promise; a write only reads the memory.
        let list = unsafe { RawList::from_iovecs(src) };
        self.file.append_list(&list)
    }
}
