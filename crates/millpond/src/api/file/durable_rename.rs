//! Durable renames of a file, by [`crate::api::persist`].

use std::path::Path;

use crate::api::file::File;
use crate::api::persist;
use crate::error::Result;

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
        persist::persist(&self.cached, from.as_ref(), to.as_ref(), true)
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
        persist::persist(&self.cached, from.as_ref(), to.as_ref(), false)
    }
}
