//! Storage backends without files, with the feature `sim`: for tests, and to measure the cost above a
//! backend.
//!
//! `memory_backend` keeps the bytes of a file, `null` moves none. This module is a simulated device: memory that a
//! seed makes slow, unordered and faulty.
//!
//! The faults of one file follow from the seed and the order of its transfers, so a single-threaded test
//! replays exactly. `disk` models the stored state, and the state after a failed sync or a power cut;
//! `device` is the tests' interface.

mod device;

mod disk;

pub(crate) mod memory_backend;

mod null;

mod random;

#[cfg(all(test, not(loom)))]
mod conformance;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::io::backend::{BackingFile, OpenedFor, Seek, readers};
use crate::io::pool::Pool;
use crate::io::retry;
use crate::io::transfer::{BackgroundRead, Direction, Transfer};
use crate::sim::disk::Disk;
use crate::sim::memory_backend::MemoryFile;
use crate::sim::null::NullFile;
use crate::sim::random::split_mix;
use crate::sync::MutexExt;

pub use crate::sim::device::{SimDevice, SimWrite};

/// The choice of a simulated backend.
pub(crate) enum Simulated {
    Memory,
    Sim(SimOptions),
    Null,
}

impl Simulated {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Simulated::Memory => "memory",
            Simulated::Sim(_) => "sim",
            Simulated::Null => "null",
        }
    }

    pub(crate) fn open(
        &self,
        fd: BorrowedFd<'_>,
        readers: &Arc<Pool>,
    ) -> io::Result<Arc<dyn BackingFile>> {
        Ok(match self {
            Simulated::Memory => Arc::new(MemoryFile::new(file_contents(fd)?, readers)),
            Simulated::Sim(options) => Arc::new(SimFile::new(file_contents(fd)?, options, readers)),
            Simulated::Null => Arc::new(NullFile::new(file_size(fd)?)),
        })
    }
}

fn file_size(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_size as u64)
}

fn file_contents(fd: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; file_size(fd)? as usize];
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pread(fd, &mut bytes[done..], done as u64)? {
            0 => break,
            moved => done += moved,
        }
    }
    Ok(bytes)
}

/// The faults of a simulated device.
///
/// # Examples
///
/// ```
/// use std::sync::atomic::Ordering::Relaxed;
/// use millpond::sim::SimOptions;
/// use millpond::{BackendChoice, Engine, OpenOptions};
///
/// let options = SimOptions::new(7) // the same seed, the same faults
///     .delay_us_max(100)
///     .short_per_mille(50)
///     .error_per_mille(10)
///     .fail_every_kth_write(100, libc::ENOSPC)
///     .fail_every_kth_sync(3);
/// let (device, errors) = (options.device(), options.errors_switch());
/// let engine = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Sim(options)).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// errors.store(false, Relaxed); // while the file is filled
/// let file = engine.open(&path, &OpenOptions::new().write(true).create(true))?;
/// file.write_all_at(&[7; 64 << 10], 0)?;
/// errors.store(true, Relaxed);
/// println!("{:?}, after {} writes", file.sync_all(), device.writes());
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SimOptions {
    seed: u64,
    delay_us_max: u64,
    short_per_mille: u64,
    error_per_mille: u64,
    failing_write: Option<(u64, i32)>,
    failing_sync: Option<u64>,
    errors_on: Arc<AtomicBool>,
    device: SimDevice,
}

impl SimOptions {
    /// A device without faults; `seed` determines the order of a batch.
    #[must_use]
    pub fn new(seed: u64) -> SimOptions {
        SimOptions {
            seed,
            delay_us_max: 0,
            short_per_mille: 0,
            error_per_mille: 0,
            failing_write: None,
            failing_sync: None,
            errors_on: Arc::new(AtomicBool::new(true)),
            device: SimDevice::default(),
        }
    }

    /// Delays each transfer by at most this many microseconds.
    #[must_use]
    pub fn delay_us_max(mut self, delay_us_max: u64) -> SimOptions {
        self.delay_us_max = delay_us_max;
        self
    }

    /// Makes this many of 1,000 transfers move fewer bytes than requested.
    #[must_use]
    pub fn short_per_mille(mut self, short_per_mille: u64) -> SimOptions {
        self.short_per_mille = short_per_mille;
        self
    }

    /// Makes this many of 1,000 transfers, and of the changes of the file's length and extents, fail with
    /// EIO, after a random part of the bytes has been moved or changed.
    #[must_use]
    pub fn error_per_mille(mut self, error_per_mille: u64) -> SimOptions {
        self.error_per_mille = error_per_mille;
        self
    }

    /// Makes every `k`th write of the device fail with `errno`, after a random part of the bytes has been
    /// moved. 1: all; 0: none.
    #[must_use]
    pub fn fail_every_kth_write(mut self, k: u64, errno: i32) -> SimOptions {
        self.failing_write = (k > 0).then_some((k, errno));
        self
    }

    /// Makes every `k`th sync of the device fail with EIO, where a durable write counts as one. 1: all; 0:
    /// none. Each sector that was written since the last good sync may have been stored or not; later syncs
    /// succeed without the lost ones, though reads of the device may return them.
    #[must_use]
    pub fn fail_every_kth_sync(mut self, k: u64) -> SimOptions {
        self.failing_sync = (k > 0).then_some(k);
        self
    }

    /// The tests' interface to the device of all engines built from these options. Call it before they open
    /// files: only then does the device track which bytes are durable.
    #[must_use]
    pub fn device(&self) -> SimDevice {
        self.device.watch();
        self.device.clone()
    }

    /// A switch for the errors, on at first; it affects all engines built from these options.
    #[must_use]
    pub fn errors_switch(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.errors_on)
    }
}

pub(crate) struct SimFile {
    disk: Arc<Mutex<Disk>>,
    /// The file's number on the device.
    number: usize,
    options: SimOptions,
    random: Mutex<u64>,
    /// Keeps the inode, by which the registry identifies the file, from being reused.
    inode: OnceLock<OwnedFd>,
    readers: Arc<Pool>,
}

impl SimFile {
    pub(crate) fn new(bytes: Vec<u8>, options: &SimOptions, readers: &Arc<Pool>) -> SimFile {
        let (number, disk) = options.device.open(bytes);
        SimFile {
            disk,
            number,
            options: options.clone(),
            random: Mutex::new(options.seed),
            inode: OnceLock::new(),
            readers: Arc::clone(readers),
        }
    }

    /// A random number below `below`.
    fn random(&self, below: u64) -> u64 {
        split_mix(&mut self.random.acquire()) % below.max(1)
    }

    fn is_struck(&self) -> bool {
        let errors_on = self.options.errors_on.load(Relaxed);
        self.random(1000) < self.options.error_per_mille && errors_on
    }

    /// Runs `act` on `len` bytes of the file, or on a part of them before it fails.
    fn act_on(&self, len: u64, act: impl FnOnce(u64) -> io::Result<()>) -> io::Result<()> {
        self.pass(false);
        self.delay();
        if self.is_struck() {
            act(self.random(len))?;
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        act(len)
    }

    fn clear(&self, offset: u64, len: u64) -> io::Result<()> {
        self.act_on(len, |part| {
            if self.options.device.is_watched() {
                self.options.device.change(self.number, offset..offset.saturating_add(part));
            }
            self.disk.acquire().clear(offset, part);
            Ok(())
        })
    }

    /// Waits while the file hangs, or its syncs do and this is one.
    fn pass(&self, is_sync: bool) {
        if self.options.device.is_watched() {
            self.options.device.pass_file(self.number, is_sync);
        }
    }

    /// The errno of the next write, if it is to fail.
    fn failing_write(&self) -> Option<i32> {
        let number = self.options.device.count_write();
        if let Some(errno) = self.options.device.failing_file(self.number) {
            return Some(errno);
        }
        let (k, errno) = self.options.failing_write?;
        let fails = number.is_multiple_of(k) && self.options.errors_on.load(Relaxed);
        fails.then_some(errno)
    }

    /// Counts a sync, or a durable write; returns whether it is to fail.
    fn failing_sync(&self) -> bool {
        let number = self.options.device.count_sync();
        let fails = self.options.failing_sync.is_some_and(|k| number.is_multiple_of(k));
        fails && self.options.errors_on.load(Relaxed)
    }

    fn delay(&self) {
        if self.options.delay_us_max > 0 {
            let delay_us = self.random(self.options.delay_us_max + 1);
            std::thread::sleep(Duration::from_micros(delay_us));
        }
    }

    fn try_one(&self, transfer: &Transfer<'_>) -> io::Result<usize> {
        let writing = transfer.direction == Direction::Write;
        let mut failing = None;
        let mut before = Vec::new();
        if writing {
            failing = self.failing_write();
            if self.options.device.is_watched() {
                before = contents(transfer);
                self.options.device.pass();
                self.pass(false);
            }
        }
        self.delay();
        if before != contents_if(transfer, !before.is_empty()) {
            self.options.device.changed(transfer);
        }
        let total = transfer.segments.left() as usize;
        // At least one byte, unless the file ends: 0 would mean its end.
        let part = |below: u64| 1 + self.random(below.max(1)) as usize;
        if self.is_struck() {
            failing = Some(libc::EIO);
        }
        if self.options.device.is_watched() && self.options.errors_on.load(Relaxed) {
            let bytes = transfer.offset..transfer.offset.saturating_add(total as u64);
            failing = failing.or_else(|| self.options.device.bad_range(self.number, bytes));
        }
        // The part that a write moved before it failed is not durable, even for a durable write.
        let volatile = Transfer { durable: false, error: None, ..*transfer };
        if let Some(errno) = failing {
            if writing {
                self.options.device.count_failed_write();
            }
            self.disk.acquire().transfer(&volatile, part(total as u64) - 1)?;
            return Err(io::Error::from_raw_os_error(errno));
        }
        if writing && transfer.durable && self.failing_sync() {
            // As with any failed sync: other writes may be lost, without another report.
            self.options.device.count_failed_write();
            let mut disk = self.disk.acquire();
            disk.transfer(&volatile, total)?;
            let now = disk.now();
            disk.fail_sync(now, |below| self.random(below));
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let short = self.random(1000) < self.options.short_per_mille;
        let limit = if short { part(total as u64 - total.min(1) as u64) } else { total };
        let mut disk = self.disk.acquire();
        let moved = disk.transfer(transfer, limit)?;
        if writing && transfer.durable && self.options.device.is_watched() {
            let ended = disk.now();
            drop(disk);
            self.options.device.pass_sync();
            self.disk.acquire().sync_range(ended, transfer.offset, moved);
        }
        Ok(moved)
    }
}

/// The bytes of a write.
fn contents(transfer: &Transfer<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for segment in transfer.segments {
        // SAFETY: the segment is valid for reads. Its memory changes during the copy only in a test that
        // looks for that.
        let piece = unsafe { std::slice::from_raw_parts(segment.base(), segment.len()) };
        bytes.extend_from_slice(piece);
    }
    bytes
}

fn contents_if(transfer: &Transfer<'_>, wanted: bool) -> Vec<u8> {
    if wanted { contents(transfer) } else { Vec::new() }
}

impl BackingFile for SimFile {
    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        let mut order: Vec<usize> = (0..batch.len()).collect();
        for last in (1..order.len()).rev() {
            order.swap(last, self.random(last as u64 + 1) as usize);
        }
        let device = &self.options.device;
        let watched = device.is_watched();
        // All count as in flight, though they run one after the other.
        let ids: Vec<u64> = match watched {
            true => batch.iter().map(|transfer| device.begin(self.number, transfer)).collect(),
            false => Vec::new(),
        };
        for at in order {
            let outcome = self.try_one(&batch[at]);
            batch[at].set(outcome);
            if watched {
                device.end(ids[at]);
            }
        }
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        if self.random(1000) < self.options.short_per_mille {
            // The device has no free slot.
            return Err(read);
        }
        let readers = Arc::clone(&self.readers);
        readers::start(&readers, read, move |read| retry::try_one(&*self, read))
    }

    fn attach(&self, fd: OwnedFd, _: OpenedFor) -> io::Result<Option<OwnedFd>> {
        Ok(self.inode.set(fd).err())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.acquire().len())
    }

    fn descriptor(&self, writing: bool) -> Option<BorrowedFd<'_>> {
        self.inode.get().filter(|_| !writing).map(|fd| fd.as_fd())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.pass(false);
        if self.is_struck() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if self.options.device.is_watched() {
            self.options.device.change(self.number, len..u64::MAX);
        }
        self.disk.acquire().set_len(len)
    }

    fn zero(&self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        self.clear(offset, len)
    }

    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        self.act_on(len, |part| {
            let (mut disk, end) = (self.disk.acquire(), offset.saturating_add(part));
            if end > disk.len() && !keep_size { disk.set_len(end) } else { Ok(()) }
        })
    }

    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
        if self.is_struck() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(memory_backend::seek(self.disk.acquire().len(), offset, to))
    }

    fn sync(&self, _data_only: bool) -> io::Result<()> {
        self.pass(true);
        let fails = self.failing_sync();
        let began = self.disk.acquire().now();
        self.delay();
        if fails {
            self.options.device.count_failed_sync();
            self.disk.acquire().fail_sync(began, |below| self.random(below));
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if self.options.device.is_watched() {
            self.options.device.pass_sync();
        }
        self.disk.acquire().sync(began);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::segment::Segment;

    fn file(content: &[u8], options: &SimOptions) -> Arc<SimFile> {
        Arc::new(SimFile::new(content.to_vec(), options, &readers::readers()))
    }

    fn try_writes(file: &SimFile, memory: &mut [u8], writes: &[(u64, usize)]) -> Vec<Option<i32>> {
        let segments: Vec<_> = writes
            .iter()
            // SAFETY: all writes read the same memory, which the caller lends for the call.
            .map(|&(_, len)| [unsafe { Segment::new(memory.as_mut_ptr(), len) }])
            .collect();
        let mut batch: Vec<_> = writes
            .iter()
            .zip(&segments)
            .map(|(&(offset, _), segment)| Transfer::new(Direction::Write, offset, segment))
            .collect();
        file.try_all(&mut batch);
        batch.iter().map(|it| it.error.as_ref().and_then(|error| error.raw_os_error())).collect()
    }

    #[test]
    fn every_kth_write_fails_while_the_switch_is_on() {
        let options = SimOptions::new(1).fail_every_kth_write(3, libc::ENOSPC);
        let device = options.device();
        let file = file(&[0; 512], &options);
        let fails = |count| -> Vec<bool> {
            (0..count)
                .map(|_| match try_writes(&file, &mut [7; 512], &[(0, 512)])[0] {
                    None => false,
                    Some(errno) => errno == libc::ENOSPC,
                })
                .collect()
        };
        assert_eq!(fails(6), [false, false, true, false, false, true]);
        options.errors_switch().store(false, Relaxed);
        assert_eq!(fails(3), [false; 3]);
        assert_eq!((device.writes(), device.failed_writes()), (9, 2));
        assert_eq!(device.image(), [7; 512]);
        assert_eq!(device.durable(), [0; 512]);
        assert_eq!(device.take_log().len(), 9);
        assert_eq!(device.take_log(), []);
    }

    #[test]
    fn every_kth_sync_fails_and_later_ones_succeed_without_what_it_lost() {
        let mut lost = 0;
        for seed in 0..20 {
            let options = SimOptions::new(seed).fail_every_kth_sync(2);
            let device = options.device();
            let file = file(&[0; 512], &options);
            file.sync(true).unwrap();
            assert_eq!(try_writes(&file, &mut [7; 512], &[(0, 512)]), [None]);
            assert_eq!(file.sync(true).unwrap_err().raw_os_error(), Some(libc::EIO));
            file.sync(true).unwrap();
            assert_eq!((device.syncs(), device.failed_syncs()), (3, 1));
            lost += usize::from(device.durable() != [7; 512]);
        }
        assert!(lost > 2, "no failed sync lost anything");
    }

    /// Goal: a device reports writes that overlap in time and space, a truncate concurrent with a write,
    /// and memory that changes during a write.
    #[test]
    fn violations_are_found() {
        let options = SimOptions::new(1);
        let device = options.device();
        let file = file(&[0; 8192], &options);
        try_writes(&file, &mut [1; 4096], &[(0, 4096), (4096, 4096)]);
        try_writes(&file, &mut [1; 4096], &[(0, 4096)]);
        file.set_len(4096).unwrap();
        assert_eq!(device.violations(), [""; 0]);
        assert_eq!(device.writes_under_way_max(), 2);
        try_writes(&file, &mut [1; 4096], &[(0, 4096), (4095, 4096)]);
        assert_eq!(device.violations().len(), 1);
        device.block_writes(true);
        assert!(!device.wait_for_blocked_write(Duration::ZERO));
        let memory: &'static mut [u8] = Box::leak(Box::new([1; 4096]));
        let at = memory.as_mut_ptr() as usize;
        let writer = std::thread::spawn({
            let file = Arc::clone(&file);
            move || try_writes(&file, memory, &[(0, 4096)])
        });
        assert!(device.wait_for_blocked_write(Duration::from_secs(20)));
        file.set_len(4096).unwrap();
        assert_eq!(device.violations().len(), 1);
        file.set_len(4000).unwrap();
        assert_eq!(device.violations().len(), 2);
        // SAFETY: leaked above; the writer waits.
        unsafe { (at as *mut u8).write_volatile(2) };
        device.block_writes(false);
        assert_eq!(writer.join().unwrap(), [None]);
        assert_eq!(device.violations().len(), 3);
    }

    #[test]
    fn each_file_has_a_disk_of_its_own() {
        let options = SimOptions::new(1);
        let device = options.device();
        let _first = file(b"first", &options);
        assert_eq!(device.image(), b"first");
        drop(file(b"second", &options));
        assert_eq!((device.files(), device.image()), (2, b"second".to_vec()));
        assert_eq!(device.file(0).crash(1), b"first");
    }
}
