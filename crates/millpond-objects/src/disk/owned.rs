//! Opens the tier's directory and files, and rejects those that another user may control.
//!
//! Checksums have no key, and a file without a valid head is truncated. So a user that can put a file or a link into the
//! directory could choose the bytes of objects, or have another file truncated.
//!
//! - **O1** The directory belongs to the effective user or to root, and neither its group nor other users may write to
//!   it. It is checked by its descriptor, and its files are opened relative to that, so it cannot be exchanged between
//!   the check and the opens.
//! - **O2** A file is a regular file of the effective user, not a link, and only that user may write to it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, fstat, open, openat};
use rustix::process::geteuid;

/// Writable by the group or by other users.
const SHARED_WRITE: u32 = 0o022;

/// The directory of a tier.
pub(crate) struct OwnedDirectory(OwnedFd);

fn refused(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}

impl OwnedDirectory {
    /// Opens a directory under O1; creates it, and those above, for this user alone.
    pub(crate) fn open(path: &Path) -> io::Result<OwnedDirectory> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = open(path, flags, Mode::empty())?;
        let stat = fstat(&dir)?;
        let user = geteuid().as_raw();
        if ![user, 0].contains(&stat.st_uid) {
            let owner = stat.st_uid;
            return Err(refused(format!(
                "it belongs to user {owner}, and this process is user {user}"
            )));
        }
        if stat.st_mode & SHARED_WRITE != 0 {
            let mode = stat.st_mode & 0o7777;
            return Err(refused(format!(
                "its mode is {mode:o}, so other users may replace its files: use a directory of mode 700, such as a new one \
                 in it"
            )));
        }
        Ok(OwnedDirectory(dir))
    }

    /// Opens a file of the directory to read and write, under O2; creates it if it does not exist.
    pub(crate) fn open_file(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)?;
        let stat = fstat(&file)?;
        let user = geteuid().as_raw();
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refused(format!("{name} is no regular file")));
        }
        if stat.st_uid != user {
            let owner = stat.st_uid;
            return Err(refused(format!(
                "{name} belongs to user {owner}, and this process is user {user}"
            )));
        }
        if stat.st_mode & SHARED_WRITE != 0 {
            let mode = stat.st_mode & 0o7777;
            return Err(refused(format!(
                "{name} has mode {mode:o}, so other users may write to it"
            )));
        }
        Ok(file.into())
    }
}
