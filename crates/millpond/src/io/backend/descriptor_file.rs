//! Backing files that are sets of descriptors.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use rustix::fs::FallocateFlags;

use crate::io::backend::descriptors::Descriptors;
use crate::io::backend::driver::Driver;
use crate::io::backend::read_ring::RingRead;
use crate::io::backend::threads::{self, Threads};
use crate::io::backend::uring;
use crate::io::backend::{BackingFile, ChangeObserver, OpenedFor, Seek};
use crate::io::transfer::{BackgroundRead, Direction, Transfer};

/// A backing file that consists of descriptors.
pub(crate) struct DescriptorFile {
    descriptors: Arc<Descriptors>,
    carrier: TransferDriver,
    observer: OnceLock<Arc<dyn ChangeObserver>>,
}

/// The part of a back end that performs the transfers of a file.
pub(crate) enum TransferDriver {
    Uring(Arc<Driver>),
    Threads(Arc<Threads>),
}

impl TransferDriver {
    fn try_all(&self, descriptors: &Descriptors, batch: &mut [Transfer<'_>]) {
        match self {
            TransferDriver::Uring(_) => uring::try_all(descriptors, batch),
            TransferDriver::Threads(threads) => threads.try_all(descriptors, batch),
        }
    }
}

impl DescriptorFile {
    pub(crate) fn new(descriptors: Descriptors, carrier: TransferDriver) -> DescriptorFile {
        DescriptorFile { descriptors: Arc::new(descriptors), carrier, observer: OnceLock::new() }
    }

    /// Calls `act`, which changes the file and makes it no longer than `reach`.
    fn change<R>(&self, reach: u64, act: impl FnOnce() -> R) -> R {
        let Some(observer) = self.observer.get() else { return act() };
        observer.begin(reach);
        let outcome = act();
        observer.end(self.descriptors.descriptor(true));
        outcome
    }

    /// Reports the file's length, with no space reserved beyond.
    fn note_truncation(&self, len: u64) {
        if let Some(observer) = self.observer.get() {
            observer.truncated(len);
        }
    }
}

impl BackingFile for DescriptorFile {
    fn descriptors(&self) -> Option<&Descriptors> {
        Some(&self.descriptors)
    }

    fn observe(&self, observer: Arc<dyn ChangeObserver>) {
        // Called once.
        let _ = self.observer.set(observer);
    }

    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        let descriptors = &*self.descriptors;
        let writes = batch.iter().filter(|transfer| transfer.direction == Direction::Write);
        match writes.map(|transfer| transfer.offset + transfer.segments.left()).max() {
            Some(reach) => self.change(reach, || match &descriptors.untorn {
                Some(blocks) => {
                    let end = descriptors.durable_length.get();
                    blocks.write_all(end, batch, |some| self.carrier.try_all(descriptors, some));
                }
                None => self.carrier.try_all(descriptors, batch),
            }),
            None => self.carrier.try_all(descriptors, batch),
        }
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        match &self.carrier {
            TransferDriver::Uring(driver) => {
                Arc::clone(driver).start(RingRead::new(self, read)).map_err(|job| job.read)
            }
            TransferDriver::Threads(threads) => threads.start(&self.descriptors, read),
        }
    }

    fn transfer_bytes(&self) -> u64 {
        match self.carrier {
            TransferDriver::Uring(_) => uring::TRANSFER_BYTES,
            TransferDriver::Threads(_) => threads::TRANSFER_BYTES,
        }
    }

    fn attach(&self, fd: OwnedFd, opened: OpenedFor) -> io::Result<Option<OwnedFd>> {
        self.descriptors.attach(fd, opened)
    }

    fn len(&self) -> io::Result<u64> {
        self.descriptors.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(len, || {
            let set = self.descriptors.set_len(len);
            if set.is_ok() {
                self.note_truncation(len);
            }
            set
        })
    }

    fn zero(&self, offset: u64, len: u64, keep_space: bool) -> io::Result<()> {
        let how = if keep_space { FallocateFlags::ZERO_RANGE } else { FallocateFlags::PUNCH_HOLE };
        let flags = how | FallocateFlags::KEEP_SIZE;
        self.change(0, || self.descriptors.fallocate(flags, offset, len))
    }

    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        let (flags, reach) = match keep_size {
            true => (FallocateFlags::KEEP_SIZE, 0),
            false => (FallocateFlags::empty(), offset + len),
        };
        if let Some(observer) = self.observer.get().filter(|_| keep_size) {
            observer.reserving();
        }
        self.change(reach, || self.descriptors.fallocate(flags, offset, len))
    }

    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
        self.descriptors.seek(offset, to)
    }

    fn sync(&self, data_only: bool) -> io::Result<()> {
        self.descriptors.sync(data_only)
    }

    fn drop_kernel_copy(&self) {
        // It may change the file's times.
        self.change(0, || self.descriptors.drop_kernel_copy());
    }

    fn free_blocks_beyond(&self, len: u64, leased: bool) {
        if self.change(len, || self.descriptors.free_blocks_beyond(len, leased)) {
            self.note_truncation(len);
        }
    }
}
