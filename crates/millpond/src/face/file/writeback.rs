//! Syncs and write-back, by [`crate::writeback`]; and times in which others look at the file below the
//! cache, or change it there.

use crate::error::{Op, Result};
use crate::face::file::{File, check_range};
use crate::flush;
use crate::units::PageIndex;

impl File {
    /// Makes what was written, through whatever handle, and the file's metadata, durable: `fsync`.
    /// Blocks until the device has it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) with what the back end answered. Nothing is dropped: what could
    /// not be written stays cached, and the next sync, through whatever handle, tries again. The kernel drops
    /// its own copy of the file, so that other programs read the device's bytes until then.
    /// [`Error::Lost`](crate::Error::Lost) where an earlier failure concerned bytes that had left the cache
    /// since they were written.
    pub fn sync_all(&self) -> Result<()> {
        self.check_process(Op::Sync)?;
        flush::sync(&self.cached, PageIndex::FIRST, PageIndex::LAST, false)
    }

    /// Makes what was written durable, and as much metadata as is needed to read it: `fdatasync`. Covers
    /// what others wrote to the file below the engine, too. What is written meanwhile may be covered or
    /// not; until a sync returns, writes reach the device in any order. Blocks, but for no longer than it
    /// takes to write what was dirty when it began.
    ///
    /// # Errors
    ///
    /// As for [`File::sync_all`].
    pub fn sync_data(&self) -> Result<()> {
        self.check_process(Op::Sync)?;
        flush::sync(&self.cached, PageIndex::FIRST, PageIndex::LAST, true)
    }

    /// [`File::sync_data`] for what was written to `len` bytes at `offset` (`len` 0: to the end).
    /// Other bytes may become durable, too.
    ///
    /// # Errors
    ///
    /// As for [`File::sync_all`], and [`Error::InvalidRange`](crate::Error::InvalidRange).
    pub fn sync_range(&self, offset: u64, len: u64) -> Result<()> {
        check_range(Op::Sync, offset, len)?;
        self.check_process(Op::Sync)?;
        let (file, end) = (&self.cached, if len == 0 { i64::MAX as u64 } else { offset + len });
        flush::sync(file, file.page_of(offset), file.page_of(end - 1), true)
    }

    /// Hands what is written and still waits in the cache ([`crate::WriteMode::Back`]) to the back
    /// end, so that others can see it there; unlike a sync, does not make it durable. Blocks until
    /// the back end has taken it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io): what could not be written stays cached, as after a sync.
    pub fn write_back(&self) -> Result<()> {
        self.check_process(Op::Sync)?;
        flush::write_back(&self.cached, PageIndex::FIRST, PageIndex::LAST, Op::Sync)
    }

    /// [`File::write_back`], and gives back space that was reserved for writes to come: what the
    /// kernel tells of the file then, its size, its times and its blocks, stays true until somebody
    /// writes.
    ///
    /// # Errors
    ///
    /// As for [`File::write_back`].
    pub fn settle(&self) -> Result<()> {
        self.check_process(Op::Sync)?;
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
        self.check_process(Op::Sync)?;
        self.cached.begin_through()
    }

    /// Ends what [`File::begin_through`] began. A call without one before has no effect.
    pub fn end_through(&self) {
        self.cached.end_through();
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
        self.cached.begin_plain();
    }

    /// Ends what [`File::begin_plain`] began. A call without one before has no effect.
    pub fn end_plain(&self) {
        self.cached.end_plain();
    }

    /// Whether transfers go past the kernel's cache where they are aligned, as far as the kernel has
    /// not refused yet.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.cached.backing.is_direct()
    }
}
