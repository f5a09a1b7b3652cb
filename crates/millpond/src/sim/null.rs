//! A storage backend that completes at once and moves no bytes: it measures the cost above a backend.
//!
//! Like the kernel's null block device. A file keeps the length that it had when it was opened; reads leave
//! the caller's memory unchanged, and writes are discarded.
//!
//! Argued: a length is one word, and publishes no other memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, OnceLock};

use crate::io::backend::{Alignment, BackingFile, OpenedFor, Seek};
use crate::io::transfer::{BackgroundRead, Direction, Transfer};
use crate::sim::memory_backend;

/// The alignment of direct I/O: as for a device with small blocks.
const ALIGNMENT: Alignment = Alignment { memory_bytes: 512, offset_bytes: 512 };

pub(crate) struct NullFile {
    len: AtomicU64,
    /// Keeps the inode, by which the registry identifies the file, from being reused.
    inode: OnceLock<OwnedFd>,
}

impl NullFile {
    pub(crate) fn new(len: u64) -> NullFile {
        NullFile { len: AtomicU64::new(len), inode: OnceLock::new() }
    }

    fn moved(&self, transfer: &Transfer<'_>) -> usize {
        let asked = transfer.segments.left();
        match transfer.direction {
            Direction::Read => {
                asked.min(self.len.load(Acquire).saturating_sub(transfer.offset)) as usize
            }
            Direction::Write => {
                let end = transfer.offset + asked;
                if self.len.load(Acquire) < end {
                    self.len.fetch_max(end, AcqRel);
                }
                asked as usize
            }
        }
    }
}

impl BackingFile for NullFile {
    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        for transfer in batch {
            transfer.set(Ok(self.moved(transfer)));
        }
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        let outcome = self.moved(&Transfer::new(Direction::Read, read.offset, &*read.segments));
        read.done.end(Ok(outcome));
        Ok(())
    }

    fn attach(&self, fd: OwnedFd, _: OpenedFor) -> io::Result<Option<OwnedFd>> {
        Ok(self.inode.set(fd).err())
    }

    fn descriptor(&self, writing: bool) -> Option<BorrowedFd<'_>> {
        self.inode.get().filter(|_| !writing).map(|fd| fd.as_fd())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.len.load(Acquire))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.len.store(len, std::sync::atomic::Ordering::Release);
        Ok(())
    }

    fn zero(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        if !keep_size {
            self.len.fetch_max(offset.saturating_add(len), AcqRel);
        }
        Ok(())
    }

    /// There are no holes.
    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
        Ok(memory_backend::seek(self.len.load(Acquire), offset, to))
    }

    fn sync(&self, _data_only: bool) -> io::Result<()> {
        Ok(())
    }

    fn alignment(&self, direct: bool) -> Alignment {
        if direct { ALIGNMENT } else { Alignment::NONE }
    }
}
