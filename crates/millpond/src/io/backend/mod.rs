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

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

pub(crate) use crate::io::backend::alignment::Alignment;
use crate::io::backend::allocation::{Blocks, Company, Overwrites};
use crate::io::transfer::{BackgroundRead, Transfer};

/// What to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seek {
    Data,
    Hole,
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

    /// Offers a descriptor of the file; gives it back unless it is kept.
    fn attach(&self, fd: OwnedFd, read: bool, write: bool) -> io::Result<Option<OwnedFd>>;

    fn len(&self) -> io::Result<u64>;

    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Makes `len` bytes at `offset` read as zeros and gives up their space; the length stays.
    /// After an error other than a refusal (EOPNOTSUPP, EBADF and the like) a part may have been
    /// changed.
    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes `len` bytes at `offset` read as zeros and keeps or reserves their space; the length
    /// stays. Errors as for `punch`.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Reserves space for `len` bytes at `offset`; no byte changes. The file becomes as long as the
    /// range reaches unless `keep_size`; after an error, too, it may have grown.
    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()>;

    /// The first byte from `offset` on that is in data, or in a hole; the end of the file begins a
    /// hole. `None`: there is none before the end, or `offset` is not before it.
    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>>;

    fn sync(&self, data_only: bool) -> io::Result<()>;

    /// What overwriting bytes takes.
    fn overwrites(&self) -> Overwrites {
        Overwrites::InPlace
    }

    /// What blocks there are from `start` on.
    fn blocks(&self, start: u64) -> io::Result<Blocks> {
        let hole = self.seek(start, Seek::Hole)?;
        Ok(Blocks { there_until: hole.unwrap_or(start), own_until: u64::MAX })
    }

    /// Who else may make the file longer.
    fn company(&self) -> Company {
        Company::Alone
    }

    /// Gives up the space beyond the end of a file that is `len` bytes long, unless another process can
    /// make it longer meanwhile. `leased`: none can.
    fn give_back(&self, len: u64, leased: bool) {
        let _ = leased;
        if self.len().is_ok_and(|now| now == len) {
            // Where it fails, the file has blocks beyond its end, as after `fallocate`.
            let _ = self.set_len(len);
        }
    }

    /// Asks for the errors that closing a descriptor of the file would tell of.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// Fails where the descriptors are no longer those of the file: a program may close all that it
    /// has, and open others by the same numbers. Asked before what was written long ago is written
    /// back.
    fn verify(&self) -> io::Result<()> {
        Ok(())
    }

    /// Whether a write that is not durable may be told of an error of earlier ones, as on NFS. Asked after
    /// an error.
    fn tells_of_others(&self) -> bool {
        false
    }

    /// When the inode was made, in seconds and nanoseconds, where that can be told: with its number, what
    /// tells it from others.
    fn made(&self) -> Option<(i64, u32)> {
        None
    }

    /// A descriptor that permits writing, if there is a file to write to.
    fn write_descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether the file was opened for `writing`, or else for reading, by any of its handles.
    fn permits(&self, writing: bool) -> bool {
        let _ = writing;
        true
    }

    /// Alignment that reads must have. Writes may have any.
    fn read_alignment(&self) -> Alignment {
        Alignment::NONE
    }

    /// Makes ready for direct transfers, by way of a descriptor of the file that permits them.
    ///
    /// # Errors
    ///
    /// Of kind `InvalidInput` where the file system has no direct I/O.
    fn attach_direct(&self, fd: BorrowedFd<'_>, read: bool, write: bool) -> io::Result<()> {
        let _ = (fd, read, write);
        Ok(())
    }

    /// The descriptor and flags for a transfer in a ring of the caller's, who keeps the file until it has
    /// ended; `None` where there are none.
    fn route(&self, transfer: &Transfer<'_>) -> Option<io::Result<(RawFd, i32)>> {
        let _ = transfer;
        None
    }

    /// Alignment that direct transfers must have, once made ready for.
    fn direct_alignment(&self) -> Alignment {
        Alignment::NONE
    }

    /// How long one transfer of a batch should be at most, so that the device is kept busy.
    fn transfer_bytes(&self) -> u64 {
        1 << 20
    }

    /// Leaves the descriptors' flags as they were given, until [`BackingFile::end_plain`]: waits for
    /// transfers that need others, and has later ones do without.
    fn begin_plain(&self) {}

    /// Ends what [`BackingFile::begin_plain`] began.
    fn end_plain(&self) {}

    /// Whether transfers go past the kernel's cache where they are aligned.
    fn is_direct(&self) -> bool {
        false
    }
}
