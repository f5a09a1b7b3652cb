//! Back ends: what carries out reads and writes below the cache.
//!
//! One trait, [`BackingFile`], and one conformance suite (`sim::conformance`). `uring` and `threads` work
//! on file descriptors; those that need none are in `sim`.

pub(crate) mod alignment;

pub(crate) mod allocation;

pub(crate) mod in_place;

pub(crate) mod descriptors;

pub(crate) mod descriptor_file;

mod entry;

mod ring;

pub(crate) mod local_ring;

pub(crate) mod fixed_ring;

mod read_ring;

pub(crate) mod driver;

pub(crate) mod shared_ring;

pub(crate) mod uring;

mod aio;

mod aio_reads;

pub(crate) mod readers;

pub(crate) mod threads;

pub(crate) mod nowhere;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

pub(crate) use crate::io::backend::alignment::Alignment;
use crate::io::backend::allocation::{Blocks, Overwrites, alone};
use crate::io::transfer::{BackgroundRead, Transfer};

/// What to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seek {
    Data,
    Hole,
}

/// What a descriptor of a file is offered for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenedFor {
    pub(crate) read: bool,
    pub(crate) write: bool,
    /// Direct transfers as well, by further descriptions of the same file.
    pub(crate) direct: bool,
    /// Nobody else has the description, or changes its flags.
    pub(crate) is_own: bool,
}

/// A file as the cache sees it from above. What is provided is true where there are no descriptors.
pub(crate) trait BackingFile: Send + Sync {
    /// Tries each transfer once, all at once where possible, and notes what was moved or why not.
    /// A read that moves nothing has reached the end of the file. Returns when all have ended;
    /// then nobody touches their memory any more.
    fn try_all(&self, batch: &mut [Transfer<'_>]);

    /// Starts a read and returns at once; gives it back where too many are under way, unless a task
    /// waits for it, or where there is no thread for it. Its end is told on a thread of the back end,
    /// which must not be made to wait for other reads.
    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead>;

    /// The descriptor and flags for a transfer in a ring of the caller's, which keeps the file
    /// until it has ended; `None` where there are none.
    fn route(&self, transfer: &Transfer<'_>) -> Option<io::Result<(RawFd, i32)>> {
        let _ = transfer;
        None
    }

    /// Whether there may be a [`BackingFile::direct_route`].
    fn reads_directly(&self) -> bool {
        false
    }

    /// The same for a direct read that the kernel is told of before this file can be gone.
    fn direct_route(&self, read: &Transfer<'_>) -> Option<RawFd> {
        let _ = read;
        None
    }

    /// How long one transfer of a batch should be at most, so that the device is kept busy.
    fn transfer_bytes(&self) -> u64 {
        1 << 20
    }

    /// Alignment that reads must have, and of a file that was opened for direct transfers, all of those.
    fn alignment(&self, direct: bool) -> Alignment {
        let _ = direct;
        Alignment::NONE
    }

    /// Whether transfers go past the kernel's cache where they are aligned.
    fn is_direct(&self) -> bool {
        false
    }

    /// What of [`BackingFile::attach`] can fail, done before with a descriptor that stays the caller's.
    ///
    /// # Errors
    ///
    /// As for `attach`.
    fn prepare(&self, fd: BorrowedFd<'_>, opened: OpenedFor) -> io::Result<()> {
        let _ = (fd, opened);
        Ok(())
    }

    /// Offers a descriptor of the file; gives it back unless it is kept.
    ///
    /// # Errors
    ///
    /// Of kind `InvalidInput` where it is for direct transfers, and the file system has none.
    fn attach(&self, fd: OwnedFd, opened: OpenedFor) -> io::Result<Option<OwnedFd>>;

    /// A descriptor that permits writing, if there is a file to write to; or else any.
    fn descriptor(&self, writing: bool) -> Option<BorrowedFd<'_>> {
        let _ = writing;
        None
    }

    /// Whether the file was opened for `writing`, or else for reading, by any of its handles.
    fn permits(&self, writing: bool) -> bool {
        let _ = writing;
        true
    }

    /// Fails where the descriptors are no longer those of the file: a program may close all that it
    /// has, and open others by the same numbers. Asked before what was written long ago is written
    /// back.
    fn verify(&self) -> io::Result<()> {
        Ok(())
    }

    /// Whether all descriptors are still the file's (see `verify`). Asked where a transfer takes long (ring.R4).
    fn is_intact(&self) -> bool {
        true
    }

    /// Leaves the descriptors' flags as they were given, until it is set off as often as on: waits for
    /// transfers that need others, and has later ones do without.
    fn set_plain(&self, on: bool) {
        let _ = on;
    }

    fn len(&self) -> io::Result<u64>;

    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Makes `len` bytes at `offset` read as zeros, and keeps or reserves their space, or else gives it up;
    /// the length stays. After an error other than a refusal (EOPNOTSUPP, EBADF and the like) a part may
    /// have been changed.
    fn zero(&self, offset: u64, len: u64, keep_space: bool) -> io::Result<()>;

    /// Reserves space for `len` bytes at `offset`; no byte changes. The file becomes as long as the
    /// range reaches unless `keep_size`; after an error, too, it may have grown.
    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()>;

    /// The first byte from `offset` on that is in data, or in a hole; the end of the file begins a
    /// hole. `None`: there is none before the end, or `offset` is not before it.
    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>>;

    fn sync(&self, data_only: bool) -> io::Result<()>;

    /// Drops the kernel's copy of the file. Called after a write-back below has failed, and before the same
    /// bytes are written again.
    fn drop_kernel_copy(&self) {}

    /// What overwriting bytes takes.
    fn overwrites(&self) -> Overwrites {
        Overwrites::InPlace
    }

    /// What blocks there are from `start` on.
    fn blocks(&self, start: u64) -> io::Result<Blocks> {
        let hole = self.seek(start, Seek::Hole)?;
        Ok(Blocks { there_until: hole.unwrap_or(start), own_until: u64::MAX })
    }

    /// Gives up the space beyond the end of a file that is `len` bytes long, unless another process can
    /// make it longer meanwhile. `leased`: none can.
    ///
    /// There is no call that cuts what lies beyond the end, and nothing else: to cut the file to the length
    /// it has is one, if nobody can append between the look at the length and that. (To punch a hole beyond
    /// the end does nothing on ext4, and takes an append's bytes elsewhere.)
    fn give_back(&self, len: u64, leased: bool) {
        let cut = || {
            if self.len().is_ok_and(|now| now == len) {
                // Where it fails, the file has blocks beyond its end, as after `fallocate`.
                let _ = self.set_len(len);
            }
        };
        match self.descriptor(true) {
            Some(fd) if !leased => drop(alone(fd, cut)),
            _ => cut(),
        }
    }
}
