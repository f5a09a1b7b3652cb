//! Syncs and write-back, by [`crate::writeback`]; and the suspension of write-back and of `O_DIRECT` while
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
    /// metadata of the file, its size, its times and its blocks, stays correct until the next write. With
    /// [`Backing::Direct`](crate::Backing::Direct) the last close frees the space, and keeps the times.
    ///
    /// # Errors
    ///
    /// As for [`File::write_back`].
    pub fn settle(&self) -> Result<()> {
        self.check_process(Op::Sync)?;
        self.cached.flush_and_trim(false)
    }

    /// Suspends write-back while the result lives: all writes of the file, through any handle, are written
    /// through; dirty pages are written back before this returns. For a time in which other programs read or
    /// change the file below the engine. Calls nest.
    ///
    /// # Errors
    ///
    /// As for [`File::write_back`]; then write-back goes on.
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
    /// let suspended = file.suspend_writeback()?;
    /// assert_eq!(std::fs::read(&path).unwrap(), b"pond");
    /// drop(suspended); // later writes wait in the cache again
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn suspend_writeback(&self) -> Result<WritebackSuspended<'_>> {
        self.check_process(Op::Sync)?;
        let suspended = WritebackSuspended { file: self };
        self.cached.suspend_writeback()?;
        Ok(suspended)
    }

    /// Suspends `O_DIRECT` while the result lives: the description that the file was opened with keeps its
    /// original flags; for a time in which other programs read or write by it, or change its flags. Waits only for
    /// transfers in flight. Later ones do not use `O_DIRECT`. Only files of
    /// [`Backing::DirectInPlace`](crate::Backing::DirectInPlace) need it; [`File::suspend_writeback`] does the
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
    /// let suspended = file.suspend_direct();
    /// std::os::unix::fs::FileExt::write_at(&described, b"pond", 0).unwrap();
    /// drop(suspended);
    /// file.invalidate(0, 4)?;
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn suspend_direct(&self) -> DirectSuspended<'_> {
        self.cached.begin_plain();
        DirectSuspended { file: self }
    }

    /// Whether aligned transfers bypass the kernel's cache, unless the kernel has refused that.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.cached.backing.is_direct()
    }
}

/// Write-back of a file is suspended while this lives: [`File::suspend_writeback`].
#[derive(Debug)]
#[must_use = "write-back is suspended only while this lives"]
pub struct WritebackSuspended<'f> {
    file: &'f File,
}

impl Drop for WritebackSuspended<'_> {
    fn drop(&mut self) {
        // In a child of fork another thread of the parent may have held a lock.
        if !self.file.cached.core().is_the_parents() {
            self.file.cached.resume_writeback();
        }
    }
}

/// `O_DIRECT` of a file's description is suspended while this lives: [`File::suspend_direct`].
#[derive(Debug)]
#[must_use = "O_DIRECT is suspended only while this lives"]
pub struct DirectSuspended<'f> {
    file: &'f File,
}

impl Drop for DirectSuspended<'_> {
    fn drop(&mut self) {
        // As above.
        if !self.file.cached.core().is_the_parents() {
            self.file.cached.end_plain();
        }
    }
}
