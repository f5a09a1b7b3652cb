//! Backing files that are sets of descriptors.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::fs::FallocateFlags;

use crate::io::backend::alignment::Alignment;
use crate::io::backend::allocation::{self, Blocks, Company, Overwrites};
use crate::io::backend::descriptors::{Backing, Descriptors, is_of_this_machine, made};
use crate::io::backend::{BackingFile, Seek};
use crate::io::transfer::{BackgroundRead, Transfer, TransferCounts};

/// A backing file that is a set of descriptors, and who carries out its transfers.
pub(crate) struct DescriptorFile<C> {
    pub(crate) descriptors: Arc<Descriptors>,
    pub(crate) carrier: C,
}

/// In what a back end on descriptors differs from another.
pub(crate) trait Carrier: Clone + Send + Sync + Sized {
    /// [`BackingFile::try_all`].
    fn try_all(&self, descriptors: &Descriptors, batch: &mut [Transfer<'_>]);

    /// [`BackingFile::transfer_bytes`].
    const TRANSFER_BYTES: u64;

    /// [`BackingFile::start`].
    fn start(file: Arc<DescriptorFile<Self>>, read: BackgroundRead) -> Result<(), BackgroundRead>;
}

impl<C: Carrier> DescriptorFile<C> {
    pub(crate) fn new(
        fd: BorrowedFd<'_>,
        backing: Backing,
        carrier: &C,
        transfers: &Arc<TransferCounts>,
    ) -> io::Result<DescriptorFile<C>> {
        let descriptors = Arc::new(Descriptors::new(fd, backing, transfers)?);
        Ok(DescriptorFile { descriptors, carrier: carrier.clone() })
    }
}

impl<C: Carrier> BackingFile for DescriptorFile<C> {
    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        self.carrier.try_all(&self.descriptors, batch);
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        C::start(self, read)
    }

    fn attach(&self, fd: OwnedFd, read: bool, write: bool) -> io::Result<Option<OwnedFd>> {
        self.descriptors.attach(fd, read, write)
    }

    fn len(&self) -> io::Result<u64> {
        self.descriptors.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.descriptors.set_len(len)
    }

    fn verify(&self) -> io::Result<()> {
        self.descriptors.verify()
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.descriptors.fallocate(flags, offset, len)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        self.descriptors.fallocate(flags, offset, len)
    }

    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        let keep = FallocateFlags::KEEP_SIZE;
        let flags = if keep_size { keep } else { FallocateFlags::empty() };
        self.descriptors.fallocate(flags, offset, len)
    }

    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
        self.descriptors.seek(offset, to)
    }

    fn overwrites(&self) -> Overwrites {
        self.descriptors.overwrites()
    }

    fn blocks(&self, start: u64) -> io::Result<Blocks> {
        allocation::blocks(self.descriptors.any()?, start)
    }

    fn company(&self) -> Company {
        self.descriptors.write_descriptor().map_or(Company::Others, allocation::company)
    }

    fn give_back(&self, len: u64, leased: bool) {
        self.descriptors.give_back(len, leased);
    }

    fn sync(&self, data_only: bool) -> io::Result<()> {
        self.descriptors.sync(data_only)
    }

    fn flush(&self) -> io::Result<()> {
        self.descriptors.flush()
    }

    fn tells_of_others(&self) -> bool {
        !self.descriptors.any().is_ok_and(is_of_this_machine)
    }

    fn made(&self) -> Option<(i64, u32)> {
        made(self.descriptors.any().ok()?)
    }

    fn write_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptors.write_descriptor()
    }

    fn permits(&self, writing: bool) -> bool {
        self.descriptors.permits(writing)
    }

    fn read_alignment(&self) -> Alignment {
        self.descriptors.read_alignment()
    }

    fn attach_direct(&self, fd: BorrowedFd<'_>, read: bool, write: bool) -> io::Result<()> {
        self.descriptors.attach_direct(fd, read, write)
    }

    fn direct_alignment(&self) -> Alignment {
        self.descriptors.direct_alignment()
    }

    fn route(&self, transfer: &Transfer<'_>) -> Option<io::Result<(RawFd, i32)>> {
        self.descriptors.ring_route(transfer)
    }

    fn transfer_bytes(&self) -> u64 {
        C::TRANSFER_BYTES
    }

    fn begin_plain(&self) {
        self.descriptors.set_plain(true);
    }

    fn end_plain(&self) {
        self.descriptors.set_plain(false);
    }

    fn is_direct(&self) -> bool {
        self.descriptors.is_direct()
    }
}
