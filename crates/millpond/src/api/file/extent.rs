//! Truncation, holes and allocation of a file, and the invalidation of pages that another program has changed. All
//! are done by [`crate::write::extent_change`].

use crate::api::file::{File, check_range};
use crate::error::{Error, Op, Result};
use crate::inode::untorn;
use crate::io::backend::Seek;

impl File {
    /// The file's length in bytes. Does not block, except with [`Backing::Mapped`](crate::Backing::Mapped): there the
    /// kernel is asked, and a length that another process has changed waits for operations of this process.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] with [`Backing::Mapped`](crate::Backing::Mapped), with the kernel's error.
    pub fn len(&self) -> Result<u64> {
        self.check_process(Op::Stat)?;
        self.cached.refresh_size()?;
        Ok(self.cached.core().size.get())
    }

    /// The largest block for [`OpenOptions::untorn`](crate::OpenOptions::untorn) that the file system offers for this
    /// file (`STATX_WRITE_ATOMIC`); 0: none. Does not block.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] of the system call.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// let options = OpenOptions::new().read(true).write(true).create(true);
    /// let file = engine.open(dir.path().join("table"), &options)?;
    /// match file.untorn_bytes_max()? {
    ///     0 => println!("a power cut may tear pages"),
    ///     bytes => println!("pages of up to {bytes} bytes stay whole"),
    /// }
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn untorn_bytes_max(&self) -> Result<u32> {
        self.check_process(Op::Stat)?;
        let Some(fd) = self.cached.backing.descriptor(false) else { return Ok(0) };
        untorn::bytes_max(fd).map_err(|error| Error::io(Op::Stat, 0, 0, error))
    }

    /// Whether the file has no bytes.
    ///
    /// # Errors
    ///
    /// As for [`File::len`].
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Sets the file's length: truncates the file, or extends it with zeros. Blocks for operations beyond
    /// the smaller of both lengths; those below continue.
    ///
    /// # Errors
    ///
    /// [`Error::NotPermitted`]: not open for writing. [`Error::InvalidRange`]: past `i64::MAX`.
    /// [`Error::Io`]: the backend refused; nothing has changed.
    pub fn truncate(&self, len: u64) -> Result<()> {
        check_range(Op::Truncate, len, 0)?;
        self.check(self.write, Op::Truncate, len, 0)?;
        self.cached.refresh_size()?;
        self.cached.truncate(len)
    }

    /// Makes `len` bytes at `offset` read as zeros and frees their space in the file system: `fallocate`
    /// with `FALLOC_FL_PUNCH_HOLE`. The file's length stays; the part of the range beyond it is ignored, so
    /// a `len` of `i64::MAX as u64 - offset` means all bytes from `offset` on. A reader sees the whole
    /// change or none of it.
    ///
    /// Blocks for operations on pages of the range, and until the file system is done; I/O elsewhere
    /// continues. The cost depends on the cached and allocated bytes, not on `len`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`]: the range ends past `i64::MAX`. [`Error::InvalidInput`]: `len` is 0.
    /// [`Error::NotPermitted`]: not open for writing. [`Error::Io`]: the backend failed. With EOPNOTSUPP,
    /// EPERM or another refusal nothing has changed; otherwise each byte of the range may be as it was or
    /// zero.
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

    /// Makes `len` bytes at `offset` read as zeros: `fallocate` with `FALLOC_FL_ZERO_RANGE`, which keeps
    /// their space reserved and writes nothing. The file's length stays; the range is clipped to it, and no
    /// space is reserved beyond. A reader sees the whole change or none of it.
    ///
    /// If the file system does not support it (tmpfs, for one), zeros are written instead, 1 MiB at a time,
    /// which takes as long as any write of `len` bytes; readers of the range wait until all are written.
    /// Blocks as [`File::punch_hole`] does.
    ///
    /// # Errors
    ///
    /// As for [`File::punch_hole`].
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
    /// # if matches!(file.allocate(0, 1), Err(ref e) if e.errno() == libc::EOPNOTSUPP) { return Ok(()) }
    /// file.allocate(0, 64 << 10)?; // its blocks are there, and read as zeros
    /// file.write_all_at(&[7; 8192], 0)?;
    /// file.zero_range(4096, 4096)?;
    /// let mut bytes = [7; 2];
    /// file.read_exact_at(&mut bytes, 4095)?;
    /// assert_eq!(bytes, [7, 0]);
    /// file.truncate(4096)?;
    /// assert_eq!(file.seek_data(0)?, Some(0));
    /// assert_eq!(file.seek_hole(0)?, Some(4096), "the end counts as one");
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn zero_range(&self, offset: u64, len: u64) -> Result<()> {
        self.check_extent(Op::Zero, offset, len)?;
        self.cached.zero(offset, offset + len)
    }

    /// Reserves space for `len` bytes at `offset`, so that writes to them do not fail for lack of space:
    /// `posix_fallocate`, but without its fallback of writing to every block if the file system can't
    /// reserve. Existing bytes stay as they are; if the range reaches beyond the end of the file, the file
    /// is extended to there, with zeros.
    ///
    /// Blocks while the bytes of the range are being changed, or, if it extends the file, for operations
    /// from the old end on.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`], [`Error::InvalidInput`] and [`Error::NotPermitted`] as for
    /// [`File::punch_hole`]. [`Error::Io`]: the space is insufficient (ENOSPC, EDQUOT, EFBIG), or the
    /// operation is unsupported (EOPNOTSUPP). No byte has changed, but a part may be reserved, and the file
    /// may have been extended by a part: see [`File::len`].
    pub fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        self.check_extent(Op::Allocate, offset, len)?;
        self.cached.allocate(offset, offset + len)
    }

    /// Finds the first byte from `offset` on that is not in a hole; `None` if only a hole follows, or
    /// `offset` is at or beyond the end of the file. Holes read as zeros; zeros need not be holes, and a
    /// file system that does not track holes reports none.
    ///
    /// May wait for the file system, not for other operations; it may see a part of a concurrent one. Dirty
    /// pages from `offset` on are written back first. The first search in a file opens a descriptor, which
    /// is kept with the file.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`]: `offset` is past `i64::MAX`. [`Error::Io`] with the error of the backend;
    /// of kind `Unsupported` if the file can't be opened again through `/proc/self/fd`: its permissions
    /// have changed, another process has a lease on it, or `/proc` is not mounted.
    pub fn seek_data(&self, offset: u64) -> Result<Option<u64>> {
        self.seek(offset, Seek::Data)
    }

    /// Finds the first byte from `offset` on that is in a hole; the end of the file counts as one. `None`
    /// if `offset` is at or beyond the end. Otherwise like [`File::seek_data`].
    ///
    /// # Errors
    ///
    /// As for [`File::seek_data`].
    pub fn seek_hole(&self, offset: u64) -> Result<Option<u64>> {
        self.seek(offset, Seek::Hole)
    }

    fn seek(&self, offset: u64, to: Seek) -> Result<Option<u64>> {
        check_range(Op::Seek, offset, 0)?;
        self.check_process(Op::Seek)?;
        self.cached.refresh_size()?;
        self.cached.seek(offset, to)
    }

    /// Invalidates cached bytes after another program changed the file: drops the cached bytes of the range
    /// (`len` 0: none) and loads the file's current length. Blocks for operations on the range.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`], or [`Error::Io`] if the length can't be read.
    pub fn invalidate(&self, offset: u64, len: u64) -> Result<()> {
        check_range(Op::Stat, offset, len)?;
        self.check_process(Op::Stat)?;
        self.cached.invalidate(offset, offset + len)
    }

    /// Checks the arguments of an operation that changes the extent of `len` bytes.
    fn check_extent(&self, op: Op, offset: u64, len: u64) -> Result<()> {
        check_range(op, offset, len)?;
        self.check(self.write, op, offset, len)?;
        if len == 0 {
            let what = format!("the length of the range at offset {offset} is 0; at least 1");
            return Err(Error::InvalidInput { op, what });
        }
        self.cached.refresh_size()
    }
}
