//! Syncs and write-back, by [`crate::writeback::state`]; and the suspension of write-back and of `O_DIRECT` while
//! other programs use the file below the cache.

use crate::api::file::{File, check_range};
use crate::error::{Op, Result};
use crate::units::PageIndex;
use crate::writeback;

impl File {
    /// Makes the writes of all handles, and the file's metadata, durable: `fsync`. Blocks until the device
    /// has completed.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) with the error of the backend. Nothing is dropped: pages that could
    /// not be written stay cached, and the next sync, through any handle, tries again. The kernel drops its
    /// own copy of the pages, so other programs read the device's bytes until then.
    /// [`Error::Lost`](crate::Error::Lost) if an earlier failure concerned bytes that have since been
    /// evicted from the cache.
    pub fn sync_all(&self) -> Result<()> {
        self.check_process(Op::Sync)?;
        writeback::sync(&self.cached, PageIndex::FIRST, PageIndex::LAST, false)
    }

    /// Makes writes durable, and the metadata that is needed to read them: `fdatasync`. Covers writes to
    /// the file by other programs, too. A concurrent write may be covered or not; until a sync returns,
    /// writes reach the device in any order. Blocks only for the time that it takes to write the pages that
    /// were dirty when it began.
    ///
    /// # Errors
    ///
    /// As for [`File::sync_all`].
    pub fn sync_data(&self) -> Result<()> {
        self.check_process(Op::Sync)?;
        writeback::sync(&self.cached, PageIndex::FIRST, PageIndex::LAST, true)
    }

    /// [`File::sync_data`] for the writes to `len` bytes at `offset` (`len` 0: to the end). Other bytes may
    /// become durable, too.
    ///
    /// # Errors
    ///
    /// As for [`File::sync_all`], and [`Error::InvalidRange`](crate::Error::InvalidRange).
    pub fn sync_range(&self, offset: u64, len: u64) -> Result<()> {
        check_range(Op::Sync, offset, len)?;
        self.check_process(Op::Sync)?;
        let (file, end) = (&self.cached, if len == 0 { i64::MAX as u64 } else { offset + len });
        writeback::sync(file, file.page_of(offset), file.page_of(end - 1), true)
    }

    /// Writes the dirty pages ([`crate::WriteMode::Back`]) to the backend, so that other programs can see
    /// them there; unlike a sync, does not make them durable. Blocks until the backend has accepted them.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io): pages that could not be written stay cached, as after a sync.
    pub fn write_back(&self) -> Result<()> {
        self.check_process(Op::Sync)?;
        writeback::write_back(&self.cached, PageIndex::FIRST, PageIndex::LAST, Op::Sync)
    }

    /// [`File::write_back`], and frees space that was preallocated for later writes: so the kernel's
    /// metadata of the file, its size, its times and its blocks, stays correct until the next write.
    ///
    /// # Errors
    ///
    /// As for [`File::write_back`].
    pub fn settle(&self) -> Result<()> {
        self.check_process(Op::Sync)?;
        self.cached.flush_and_trim(false)
    }

    /// Suspends write-back: all writes of the file, through any handle, are written through until
    /// [`File::end_through`]; dirty pages are written back before this returns. For a time in which other
    /// programs read or change the file below the engine. Calls nest.
    ///
    /// # Errors
    ///
    /// As for [`File::write_back`]; writes are written through in any case.
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
        self.check_process(Op::Sync)?;
        self.cached.suspend_writeback()
    }

    /// Ends a suspension by [`File::begin_through`]. A call without one has no effect.
    pub fn end_through(&self) {
        self.cached.resume_writeback();
    }

    /// Suspends `O_DIRECT`: the description that the file was opened with keeps its original flags until
    /// [`File::end_plain`]; for a time in which other programs read or write by it, or change its flags.
    /// Waits only for transfers in flight. Later ones do not use `O_DIRECT`. Only files of
    /// [`Backing::DirectInPlace`](crate::Backing::DirectInPlace) need it; [`File::begin_through`] does the
    /// same. Calls nest.
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
        self.cached.begin_plain();
    }

    /// Ends a suspension by [`File::begin_plain`]. A call without one has no effect.
    pub fn end_plain(&self) {
        self.cached.end_plain();
    }

    /// Whether aligned transfers bypass the kernel's cache, unless the kernel has refused that.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.cached.backing.is_direct()
    }
}
