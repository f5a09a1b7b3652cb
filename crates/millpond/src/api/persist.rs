//! Durable replacement of a file: sync, rename, sync of the directory.
//!
//! To replace a file by writing a new one and renaming it takes all three steps, in this order, and the
//! caller needs to know which of them failed:
//!
//! ```text
//!              after a power cut, `to` is       seen now, `to` is
//! before       as it was                        as it was
//! file synced  as it was                        as it was
//! renamed      as it was, or the file, whole    the file
//! dir. synced  the file, whole                  the file
//! ```
//!
//! - **PN1** The file is durable before its name is. In another order the name could lead to a file without
//!   its bytes. File systems that write a renamed file's bytes by themselves can do so only for bytes in
//!   the kernel's cache, not for dirty pages of this engine.
//! - **PN2** The directories are opened before anything is changed, and the rename, too, uses those
//!   descriptors: so the synced directory is the one that was changed, even if its path changes, and no
//!   rename happens in a directory that can't be synced.
//! - **PN3** Nothing is undone. After a failed sync of the directory the kernel has the new name already,
//!   and may or may not have stored it; renaming back could fail in the same way.
//!
//! No guards are held: a concurrent write is in the file under either name, and durable if it came before
//! the sync.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};

use crate::api::file::File;
use crate::error::{Error, PersistStep, Result};
use crate::inode::CachedFile;
use crate::units::PageIndex;
use crate::writeback;

impl File {
    /// Makes the file durable, renames it from `from` to `to`, replacing a file of that name, and makes the
    /// name durable: `fsync`, `rename`, and `fsync` of the directory. After a power cut at any moment, `to`
    /// is either the old file or this file with at least the content at the start of the call; never a part
    /// of it, and never missing. After this has returned it is this file.
    ///
    /// This is how to replace a file as a whole: write a new one next to it, and persist that. A rename
    /// alone is not enough: dirty pages of the cache ([`crate::WriteMode::Back`]) are not in the file when
    /// the name is stored.
    ///
    /// `from` must be a name of this file; the caller must prevent a concurrent rename of another file to
    /// `from`. Both paths must be on one file system; if they are in two directories, both are made
    /// durable. If `from` equals `to`, nothing is renamed, and both are made durable. If `to` is a hard
    /// link of this very file it stays, and `from` does, too, by the rules of `rename(2)`. Programs that
    /// have the old file `to` open keep it. Blocks until the device has completed all steps; other
    /// operations of the file continue.
    ///
    /// # Errors
    ///
    /// [`Error::Persist`](crate::Error::Persist), whose [`PersistStep`](crate::PersistStep) is the step
    /// that failed, and so shows which steps are done and durable.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::{Engine, Error, OpenOptions, PersistStep};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let dir = dir.path();
    /// let (new, current) = (dir.join("CURRENT.new"), dir.join("CURRENT"));
    /// let options = OpenOptions::new().write(true).create(true).truncate(true);
    /// let file = engine.open(&new, &options)?;
    /// file.write_all_at(b"MANIFEST-000007\n", 0)?;
    /// match file.persist(&new, &current) {
    ///     Ok(()) => {}
    ///     // Others see the new file, but a power cut may bring the old one back: try again.
    ///     Err(Error::Persist { step: PersistStep::SyncDirectory, .. }) => {
    ///         file.persist(&current, &current)?;
    ///     }
    ///     // Nothing has changed.
    ///     Err(error) => {
    ///         std::fs::remove_file(&new).unwrap();
    ///         return Err(error);
    ///     }
    /// }
    /// assert_eq!(std::fs::read(&current).unwrap(), b"MANIFEST-000007\n");
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn persist(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        persist(&self.cached, from.as_ref(), to.as_ref(), true)
    }

    /// As [`File::persist`], but only if `to` does not exist: of several concurrent calls with one name,
    /// exactly one succeeds. By `RENAME_NOREPLACE`.
    ///
    /// # Errors
    ///
    /// As for [`File::persist`]; with the step [`Rename`](crate::PersistStep::Rename) and EEXIST if `to`
    /// exists, or with EINVAL if the file system does not support it.
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
    /// file.write_all_at(b"the lock is mine", 0)?;
    /// # if matches!(file.persist_noclobber(&path, &path), Err(ref e) if e.errno() == libc::EINVAL) { return Ok(()) }
    /// match file.persist_noclobber(&path, dir.path().join("LOCK")) {
    ///     Ok(()) => {}
    ///     Err(taken) if taken.errno() == libc::EEXIST => println!("another process was first"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn persist_noclobber(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        persist(&self.cached, from.as_ref(), to.as_ref(), false)
    }
}

/// A directory and a name in it.
struct RenamePlace<'a> {
    dir: OwnedFd,
    name: &'a OsStr,
}

impl RenamePlace<'_> {
    fn of(path: &Path) -> io::Result<RenamePlace<'_>> {
        let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "a path without a file name");
        let name = path.file_name().ok_or_else(no_name)?;
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(RenamePlace { dir: rustix::fs::openat(CWD, dir, flags, Mode::empty())?, name })
    }

    /// Fails unless the name leads to `file`.
    fn check(&self, file: &CachedFile) -> io::Result<()> {
        let stat = rustix::fs::statat(&self.dir, self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        if (stat.st_dev, stat.st_ino) != (file.id.device, file.id.inode) {
            let what = format!("{} is not the name of this file", self.name.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(())
    }

    fn has_same_dir(&self, other: &RenamePlace<'_>) -> io::Result<bool> {
        let (one, other) = (rustix::fs::fstat(&self.dir)?, rustix::fs::fstat(&other.dir)?);
        Ok((one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
    }
}

/// Makes `file` durable, renames it from `from` to `to`, and makes that durable.
fn persist(file: &CachedFile, from: &Path, to: &Path, replaces: bool) -> Result<()> {
    let at = |step| move |source: io::Error| Error::Persist { step, source };
    let lookup = at(PersistStep::Lookup);
    let from = RenamePlace::of(from).map_err(lookup)?;
    let to = RenamePlace::of(to).map_err(lookup)?;
    let same_dir = from.has_same_dir(&to).map_err(lookup)?;
    from.check(file).map_err(lookup)?;

    writeback::sync(file, PageIndex::FIRST, PageIndex::LAST, false)
        .map_err(|error| at(PersistStep::Sync)(error.into()))?;

    // Checked again, as a sync may take long. The gap between this check and the rename remains: there is
    // no rename of an open file.
    from.check(file).map_err(at(PersistStep::Rename))?;
    let flags = if replaces { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    rustix::fs::renameat_with(&from.dir, from.name, &to.dir, to.name, flags)
        .map_err(|errno| at(PersistStep::Rename)(errno.into()))?;

    let sync = |dir: &OwnedFd| {
        rustix::fs::fsync(dir).map_err(|errno| at(PersistStep::SyncDirectory)(errno.into()))
    };
    // The new name first: until the old directory is synced, the file may have both.
    sync(&to.dir)?;
    if same_dir { Ok(()) } else { sync(&from.dir) }
}
