//! Names, by [`crate::face::persist`].

use std::path::Path;

use crate::error::Result;
use crate::face::file::File;
use crate::face::persist;

impl File {
    /// Makes the file durable, renames it from `from` to `to`, in place of what had that name, and
    /// makes the name durable: `fsync`, `rename`, and `fsync` of the directory. After a power cut, at
    /// whatever moment, `to` is what it was or this file as it was when the call began, or later;
    /// never a part of it, and never nothing. When this has returned it is this file.
    ///
    /// The way to replace a file as a whole: write a new one beside it, and persist that. Renaming it
    /// without this is not enough: what waits in the cache ([`crate::WriteMode::Back`]) is not in the
    /// file when the name is stored.
    ///
    /// `from` must be a name of this file; see to it that nobody renames anything else there meanwhile.
    /// Both paths must be on one file system; if they are in two directories, both are made durable. With
    /// `from` equal to `to` nothing is renamed, and all is made durable. If `to` is a hard link
    /// of this very file it stays, and `from` does, too, by the rules of `rename(2)`. What had the name
    /// `to` stays as it is for programs that have it open. Blocks until the device has it all;
    /// other operations of the file go on.
    ///
    /// # Errors
    ///
    /// [`Error::Persist`](crate::Error::Persist), whose [`PersistStep`](crate::PersistStep) says which
    /// step failed, and so what has changed and what is durable.
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
        persist::persist(&self.cached, from.as_ref(), to.as_ref(), true)
    }

    /// As [`File::persist`], but only if there is no `to` yet: of several that persist to one name,
    /// exactly one succeeds. By `RENAME_NOREPLACE`.
    ///
    /// # Errors
    ///
    /// As for [`File::persist`]; with the step [`Rename`](crate::PersistStep::Rename) and EEXIST
    /// where there is a `to`, or with EINVAL where the file system can't tell.
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
    ///     Err(taken) if taken.errno() == libc::EEXIST => println!("somebody else's"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn persist_noclobber(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        persist::persist(&self.cached, from.as_ref(), to.as_ref(), false)
    }
}
