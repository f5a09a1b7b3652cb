//! Backing files that are sets of descriptors.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::fs::FallocateFlags;

use crate::file_id::FileId;
use crate::io::backend::alignment::Alignment;
use crate::io::backend::allocation::{self, Blocks, Overwrites};
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

    fn route(&self, transfer: &Transfer<'_>) -> Option<io::Result<(RawFd, i32)>> {
        self.descriptors.ring_route(transfer)
    }

    fn reads_directly(&self) -> bool {
        self.descriptors.reads_directly()
    }

    fn direct_route(&self, read: &Transfer<'_>) -> Option<RawFd> {
        self.descriptors.own_direct_route(read)
    }

    fn transfer_bytes(&self) -> u64 {
        C::TRANSFER_BYTES
    }

    fn alignment(&self, direct: bool) -> Alignment {
        self.descriptors.alignment(direct)
    }

    fn is_direct(&self) -> bool {
        self.descriptors.is_direct()
    }

    fn prepare(&self, fd: BorrowedFd<'_>, opened: OpenedFor) -> io::Result<()> {
        self.descriptors.prepare(fd, opened)
    }

    fn attach(&self, fd: OwnedFd, opened: OpenedFor) -> io::Result<Option<OwnedFd>> {
        self.descriptors.attach(fd, opened)
    }

    fn descriptor(&self, writing: bool) -> Option<BorrowedFd<'_>> {
        self.descriptors.descriptor(writing)
    }

    fn permits(&self, writing: bool) -> bool {
        self.descriptors.permits(writing)
    }

    fn verify(&self) -> io::Result<()> {
        self.descriptors.verify()
    }

    fn is_intact(&self) -> bool {
        self.descriptors.are_intact()
    }

    fn set_plain(&self, on: bool) {
        self.descriptors.set_plain(on);
    }

    fn len(&self) -> io::Result<u64> {
        self.descriptors.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.descriptors.set_len(len)
    }

    fn note_length(&self, len: u64) {
        self.descriptors.durable_length.cut(len);
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

    fn is_beyond_durable_length(&self, end: u64) -> bool {
        self.descriptors.is_beyond_durable_length(end)
    }

    fn note_durable_length(&self, end: u64) {
        self.descriptors.durable_length.grow(end);
    }

    fn drop_kernel_copy(&self) {
        self.descriptors.drop_kernel_copy();
    }

    fn overwrites(&self) -> Overwrites {
        self.descriptors.overwrites()
    }

    fn blocks(&self, start: u64) -> io::Result<Blocks> {
        allocation::blocks(self.descriptors.any()?, start)
    }

    fn has_second_description(&self) -> bool {
        self.descriptors.has_second_description()
    }

    fn free_blocks_beyond(&self, len: u64, leased: bool) {
        if self.has_second_description() && !leased {
            self.descriptors.free_blocks_later();
        } else {
            crate::io::backend::free_blocks_beyond(self, len, leased);
        }
    }
}
