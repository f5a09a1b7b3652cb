//! Backends, which perform reads and writes below the cache.
//!
//! There is one trait, [`BackingFile`], and one conformance suite (`sim::conformance`). `uring` and
//! `threads` work on file descriptors; backends without descriptors are in `sim`.

pub(crate) mod alignment;

pub(crate) mod allocation;

pub(crate) mod in_place;

pub(crate) mod descriptors;

pub(crate) mod descriptor_file;

pub(crate) mod untorn_blocks;

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
pub(crate) use crate::io::backend::allocation::Seek;
use crate::io::backend::allocation::{Blocks, Overwrites};
use crate::io::backend::descriptors::Descriptors;
pub(crate) use crate::io::backend::descriptors::OpenedFor;
use crate::io::transfer::{BackgroundRead, Transfer};

/// Told of the changes of a file below the cache: before each call that may change it, and after it.
pub(crate) trait ChangeObserver: Send + Sync {
    /// A change begins that makes the file no longer than `reach`.
    fn begin(&self, reach: u64);

    /// A change has ended, or failed. `fd` permits writing.
    fn end(&self, fd: Option<BorrowedFd<'_>>);

    /// Space is about to be reserved beyond the end.
    fn reserving(&self);

    /// The file has this length, under a guard to its end, with no space reserved beyond.
    fn truncated(&self, len: u64);
}

/// A file below the cache, as the cache sees it. The default methods ask the file's descriptors, if
/// it has some.
pub(crate) trait BackingFile: Send + Sync {
    /// The file's descriptors. `None`: a simulated file, or one in memory.
    fn descriptors(&self) -> Option<&Descriptors> {
        None
    }

    /// A file with descriptors reports all further changes to `observer`. Called once.
    fn observe(&self, _observer: Arc<dyn ChangeObserver>) {}

    /// Tries each transfer once, concurrently if possible, and records the bytes moved or the
    /// error. A read that moves nothing has reached the end of the file. Returns when all have
    /// ended; their memory is not accessed any more then.
    fn try_all(&self, batch: &mut [Transfer<'_>]);

    /// Starts a read and returns immediately. Gives the read back if too many are in progress,
    /// unless a task waits for it, or if there is no thread for it. Its completion runs on a thread
    /// of the backend, which must not wait for other reads.
    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead>;

    /// The descriptor and flags for a transfer in a ring of the caller, which keeps the file until
    /// the transfer has ended. `None`: there are none.
    fn route(&self, transfer: &Transfer<'_>) -> Option<io::Result<(RawFd, i32)>> {
        self.descriptors()?.ring_route(transfer)
    }

    /// Whether there may be a [`BackingFile::direct_route`].
    fn reads_directly(&self) -> bool {
        self.descriptors().is_some_and(Descriptors::reads_directly)
    }

    /// The same for a direct read that is submitted to the kernel before this file can be dropped.
    fn direct_route(&self, read: &Transfer<'_>) -> Option<RawFd> {
        self.descriptors()?.own_direct_route(read)
    }

    /// The maximum length of one transfer of a batch that keeps the device busy.
    fn transfer_bytes(&self) -> u64 {
        1 << 20
    }

    /// The alignment that reads need; for a file that was opened for direct transfers, all
    /// transfers.
    fn alignment(&self, direct: bool) -> Alignment {
        self.descriptors().map_or(Alignment::NONE, |it| it.alignment(direct))
    }

    /// Whether aligned transfers bypass the kernel's page cache.
    fn is_direct(&self) -> bool {
        self.descriptors().is_some_and(Descriptors::is_direct)
    }

    /// Performs the steps of [`BackingFile::attach`] that can fail, with a descriptor that stays
    /// the caller's.
    ///
    /// # Errors
    ///
    /// As for `attach`.
    fn prepare(&self, fd: BorrowedFd<'_>, opened: OpenedFor) -> io::Result<()> {
        self.descriptors().map_or(Ok(()), |it| it.prepare(fd, opened))
    }

    /// Offers a descriptor of the file. Returns it if it is not kept.
    ///
    /// # Errors
    ///
    /// Of kind `InvalidInput` if it is for direct transfers, and the file system does not support
    /// such transfers.
    fn attach(&self, fd: OwnedFd, opened: OpenedFor) -> io::Result<Option<OwnedFd>>;

    /// A descriptor that permits writing, if the file is writable; otherwise any.
    fn descriptor(&self, writing: bool) -> Option<BorrowedFd<'_>> {
        self.descriptors()?.descriptor(writing)
    }

    /// Whether a handle of the file permits `writing`, or otherwise reading.
    fn permits(&self, writing: bool) -> bool {
        self.descriptors().is_none_or(|it| it.permits(writing))
    }

    /// Fails if the descriptors do not refer to the file any more: a program may close all of its
    /// descriptors, and open other files under the same numbers. Called before old dirty pages are
    /// written back.
    fn verify(&self) -> io::Result<()> {
        self.descriptors().map_or(Ok(()), Descriptors::verify)
    }

    /// Whether all descriptors still refer to the file (see `verify`). Called when a transfer takes
    /// long (ring.R4).
    fn is_intact(&self) -> bool {
        self.descriptors().is_none_or(Descriptors::are_intact)
    }

    /// Restores the original flags of the descriptors, until it is switched off as often as on:
    /// waits for transfers that need other flags, and later transfers do without such flags.
    fn set_plain(&self, on: bool) {
        if let Some(descriptors) = self.descriptors() {
            descriptors.set_plain(on);
        }
    }

    fn len(&self) -> io::Result<u64>;

    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Another program may have set the length to `len`.
    fn note_length(&self, len: u64) {
        if let Some(descriptors) = self.descriptors() {
            descriptors.durable_length.cut(len);
        }
    }

    /// Makes `len` bytes at `offset` read as zeros. Keeps or reserves their space, or else frees
    /// it; the length stays. After an error other than a refusal (EOPNOTSUPP, EBADF and the like) a
    /// part may have been changed.
    fn zero(&self, offset: u64, len: u64, keep_space: bool) -> io::Result<()>;

    /// Reserves space for `len` bytes at `offset`; no byte changes. The file grows to the end of
    /// the range unless `keep_size` is set; it may also have grown after an error.
    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()>;

    /// The first byte from `offset` on that is in data, or in a hole; the end of the file begins a
    /// hole. `None`: there is none before the end, or `offset` is not before it.
    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>>;

    fn sync(&self, data_only: bool) -> io::Result<()>;

    /// Whether bytes before `end` may lie behind the end of the file after a power cut, although a
    /// durable transfer has stored them: an earlier write has extended the file, and no sync has
    /// covered the new length. Called before the transfer.
    fn is_beyond_durable_length(&self, end: u64) -> bool {
        self.descriptors().is_some_and(|it| it.is_beyond_durable_length(end))
    }

    /// The length is durable up to `end`: a durable transfer has extended the file.
    fn note_durable_length(&self, end: u64) {
        if let Some(descriptors) = self.descriptors() {
            descriptors.durable_length.grow(end);
        }
    }

    /// Drops the kernel's copy of the file. Called after a write-back below has failed, and before the same
    /// bytes are written again.
    fn drop_kernel_copy(&self) {}

    /// How the file system overwrites bytes.
    fn overwrites(&self) -> Overwrites {
        self.descriptors().map_or(Overwrites::InPlace, Descriptors::overwrites)
    }

    /// The blocks of the file from `start` on.
    fn blocks(&self, start: u64) -> io::Result<Blocks> {
        if let Some(descriptors) = self.descriptors() {
            return allocation::blocks(descriptors.any()?, start);
        }
        let hole = self.seek(start, Seek::Hole)?;
        Ok(Blocks { there_until: hole.unwrap_or(start), own_until: u64::MAX })
    }

    /// Whether a second description of the engine's own hides whether another process has the file open.
    fn has_second_description(&self) -> bool {
        self.descriptors().is_some_and(Descriptors::has_second_description)
    }

    /// Frees the blocks beyond the end of a file that is `len` bytes long, unless another process can make it
    /// longer concurrently; with a second description, when the file is closed. `leased`: no process can.
    fn free_blocks_beyond(&self, _len: u64, _leased: bool) {}

    /// Runs `body` while no other process can make the file longer, if that can be had. `leased`: none can anyhow.
    fn alone(&self, leased: bool, body: &mut dyn FnMut()) {
        match self.descriptors() {
            Some(descriptors) => descriptors.alone(leased, body),
            None => body(),
        }
    }
}
