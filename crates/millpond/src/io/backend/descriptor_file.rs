//! Backing files that are sets of descriptors.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::FallocateFlags;

use crate::file_id::FileId;
use crate::io::backend::descriptors::{Backing, Descriptors};
use crate::io::backend::{BackingFile, OpenedFor, Seek};
use crate::io::transfer::{BackgroundRead, Direction, Transfer, TransferCounts};

/// A backing file that consists of descriptors, with the carrier that performs its transfers.
pub(crate) struct DescriptorFile<C> {
    pub(crate) descriptors: Arc<Descriptors>,
    pub(crate) carrier: C,
}

/// The part in which backends with descriptors differ.
pub(crate) trait TransferDriver: Clone + Send + Sync + Sized {
    /// [`BackingFile::try_all`].
    fn try_all(&self, descriptors: &Descriptors, batch: &mut [Transfer<'_>]);

    /// [`BackingFile::transfer_bytes`].
    const TRANSFER_BYTES: u64;

    /// [`BackingFile::start`].
    fn start(file: Arc<DescriptorFile<Self>>, read: BackgroundRead) -> Result<(), BackgroundRead>;
}

impl<C: TransferDriver> DescriptorFile<C> {
    pub(crate) fn new(
        fd: BorrowedFd<'_>,
        id: FileId,
        backing: Backing,
        untorn_bytes: Option<u32>,
        carrier: &C,
        transfers: &Arc<TransferCounts>,
    ) -> io::Result<DescriptorFile<C>> {
        let descriptors = Descriptors::new(fd, id, backing, untorn_bytes, transfers)?;
        let descriptors = Arc::new(descriptors);
        Ok(DescriptorFile { descriptors, carrier: carrier.clone() })
    }
}

impl<C: TransferDriver> BackingFile for DescriptorFile<C> {
    fn descriptors(&self) -> Option<&Descriptors> {
        Some(&self.descriptors)
    }

    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        match &self.descriptors.untorn {
            Some(blocks) if batch.iter().any(|it| it.direction == Direction::Write) => {
                let end = self.descriptors.durable_length.get();
                blocks.write_all(end, batch, |some| self.carrier.try_all(&self.descriptors, some));
            }
            _ => self.carrier.try_all(&self.descriptors, batch),
        }
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        C::start(self, read)
    }

    fn transfer_bytes(&self) -> u64 {
        C::TRANSFER_BYTES
    }

    fn attach(&self, fd: OwnedFd, opened: OpenedFor) -> io::Result<Option<OwnedFd>> {
        self.descriptors.attach(fd, opened)
    }

    fn len(&self) -> io::Result<u64> {
        self.descriptors.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.descriptors.set_len(len)
    }

    fn zero(&self, offset: u64, len: u64, keep_space: bool) -> io::Result<()> {
        let how = if keep_space { FallocateFlags::ZERO_RANGE } else { FallocateFlags::PUNCH_HOLE };
        self.descriptors.fallocate(how | FallocateFlags::KEEP_SIZE, offset, len)
    }

    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        let keep = FallocateFlags::KEEP_SIZE;
        let flags = if keep_size { keep } else { FallocateFlags::empty() };
        self.descriptors.fallocate(flags, offset, len)
    }

    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
        self.descriptors.seek(offset, to)
    }

    fn sync(&self, data_only: bool) -> io::Result<()> {
        self.descriptors.sync(data_only)
    }
}
