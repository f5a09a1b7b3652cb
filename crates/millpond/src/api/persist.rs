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

use crate::error::{Error, PersistStep, Result};
use crate::inode::CachedFile;
use crate::units::PageIndex;
use crate::writeback;

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
pub(crate) fn persist(file: &CachedFile, from: &Path, to: &Path, replaces: bool) -> Result<()> {
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
