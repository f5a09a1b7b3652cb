//! The lock of a tier's directory: flock of `DIR/lock`.
//!
//! - **DL1** The lock is that of an open file description, which a child of fork has as well. So it would stay locked until the
//!   last child ends. [`forget_parent`] closes the child's descriptors: that leaves the parent's lock in place.
//! - **DL2** The drop of a lock leaves the descriptor open if it is the parent's, as its number may have another use.

use std::fmt;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{FlockOperation, flock};

/// The descriptors of the locks of this process. Without a mutex, which another thread could hold at a fork. More locks than
/// places are not closed in a child.
static LOCKED: [AtomicI32; 256] = [const { AtomicI32::new(NONE) }; 256];
const NONE: RawFd = -1;

/// The source of the error of [`Builder::build`](crate::Builder::build) if another store uses the directory of the disk tier.
///
/// ```
/// use millpond_objects::{CachedStore, DirectoryInUse};
/// use object_store::Error;
///
/// fn build(with_disk: millpond_objects::Builder, without: millpond_objects::Builder) -> object_store::Result<CachedStore> {
///     match with_disk.build() {
///         Err(Error::Generic { source, .. }) if source.is::<DirectoryInUse>() => without.build(),
///         built => built,
///     }
/// }
/// # let store = || std::sync::Arc::new(object_store::memory::InMemory::new());
/// # build(CachedStore::builder(store()), CachedStore::builder(store())).unwrap();
/// ```
#[derive(Debug)]
pub struct DirectoryInUse(pub(crate) PathBuf);

impl fmt::Display for DirectoryInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the disk tier in {}: another store uses this directory", self.0.display())
    }
}

impl std::error::Error for DirectoryInUse {}

/// See the module.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    file: ManuallyDrop<File>,
    process: u32,
}

impl DirectoryLock {
    /// Locks the file. `None`: another store has it.
    pub(crate) fn try_new(file: File) -> rustix::io::Result<Option<DirectoryLock>> {
        match flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error),
        }
        replace(NONE, file.as_raw_fd());
        Ok(Some(DirectoryLock { file: ManuallyDrop::new(file), process: std::process::id() }))
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            replace(self.file.as_raw_fd(), NONE);
            // SAFETY: dropped once, as this is the only place, and the field is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

/// Replaces the first place of a descriptor. Relaxed, here and below: only the fork itself reads the places of another thread.
fn replace(old: RawFd, new: RawFd) {
    LOCKED.iter().find(|place| place.compare_exchange(old, new, Relaxed, Relaxed).is_ok());
}

/// Closes the descriptors that a child of fork has inherited. Called by its only thread.
pub(crate) fn forget_parent() {
    for place in &LOCKED {
        let fd = place.swap(NONE, Relaxed);
        if fd != NONE {
            // SAFETY: in this memory the descriptor is that of a lock, whose drop in this process leaves it (DL2). It may be missing:
            // fork copies the descriptors before the memory, and another thread may have opened the lock in between.
            unsafe { libc::close(fd) };
        }
    }
}
