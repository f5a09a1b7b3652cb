//! The tests' interface to a simulated device: its contents, the requests it received, and violations.
//!
//! - **DV1** No write overlaps another transfer in space and time; nor is the file truncated, or a hole
//!   punched, in a range that is being written.
//! - **DV2** The memory of a write does not change until it ends.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::io::transfer::{Direction, Transfer};
use crate::sim::disk::Disk;
use crate::sim::random::split_mix;
use crate::sync::MutexExt;

/// A write that a simulated device received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimWrite {
    /// Its offset, in bytes.
    pub offset: u64,
    /// Its length, in bytes.
    pub len: u64,
    /// Whether it was a durable write.
    pub durable: bool,
}

/// A test's view and control of a simulated device. Clones are the same device.
///
/// Returned by [`SimOptions::device`](crate::sim::SimOptions::device), which must be called before a file is
/// opened. Contents are those of the file that was opened last, unless [`SimDevice::file`] chose another,
/// and so is the file that [hangs](SimDevice::hang) or [fails](SimDevice::fail_writes); everything else
/// concerns the whole device.
///
/// # Examples
///
/// ```
/// use millpond::sim::SimOptions;
/// use millpond::{BackendChoice, Engine, OpenOptions};
///
/// let options = SimOptions::new(1);
/// let device = options.device();
/// let engine = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Sim(options)).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// let file = engine.open(&path, &OpenOptions::new().write(true).create(true))?;
/// file.write_all_at(b"pond", 0)?;
/// assert_eq!(device.image(), b"pond");
/// assert_eq!(device.durable(), b"");
/// file.sync_all()?;
/// assert_eq!(device.crash(1), b"pond");
/// # Ok::<(), millpond::Error>(())
/// ```
///
/// Requests, blocked and failing operations:
///
/// ```
/// use std::time::Duration;
/// use millpond::sim::{SimOptions, SimWrite};
/// use millpond::{BackendChoice, Engine, OpenOptions};
///
/// let options = SimOptions::new(1);
/// let device = options.device();
/// let engine = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Sim(options)).build()?;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("data");
/// let file = engine.open(&path, &OpenOptions::new().read(true).write(true).create(true))?;
/// assert!(device.is_empty() && device.files() == 1);
/// let second = Duration::from_secs(10);
/// std::thread::scope(|scope| {
///     device.block_writes(true);
///     let write = scope.spawn(|| file.write_all_at(b"pond", 0));
///     assert!(device.wait_for_blocked_write(second));
///     assert!(!write.is_finished());
///     device.block_writes(false);
///     write.join().unwrap()?;
///     device.hold_next_sync();
///     let sync = scope.spawn(|| file.sync_all());
///     assert!(device.wait_for_held_sync(second));
///     device.release_sync();
///     sync.join().unwrap()
/// })?;
/// let written = SimWrite { offset: 0, len: 4, durable: false };
/// assert_eq!(device.take_log(), [written]);
/// assert_eq!((device.writes(), device.syncs(), device.len()), (1, 1, 4));
/// assert_eq!((device.len_max(), device.writes_under_way_max()), (4, 1));
/// // One file of the device fails, or hangs, and others do not.
/// let ill = device.file(0);
/// ill.fail_writes(libc::EIO);
/// assert!(file.write_all_at(b"mill", 0).is_err());
/// ill.fail_writes(0);
/// assert_eq!((device.failed_writes(), device.failed_syncs()), (1, 0));
/// ill.hang(true);
/// assert_eq!(ill.hanging(), 0, "nothing was asked of it since");
/// ill.hang(false);
/// ill.hang_syncs(false);
/// assert!(device.violations().is_empty());
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct SimDevice {
    shared: Arc<SimShared>,
    index: Option<usize>,
}

#[derive(Default)]
struct SimShared {
    watched: AtomicBool,
    files: Mutex<Vec<Arc<Mutex<Disk>>>>,
    writes: AtomicU64,
    syncs: AtomicU64,
    failed_writes: AtomicU64,
    failed_syncs: AtomicU64,
    traffic: Mutex<Traffic>,
    released: Condvar,
    ills: Mutex<Ills>,
    freed: Condvar,
}

impl std::fmt::Debug for SimShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimShared").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Traffic {
    blocked: bool,
    waiting: usize,
    holds_next_sync: bool,
    holds_sync: bool,
    under_way: Vec<UnderWay>,
    writes_max: usize,
    log: Vec<SimWrite>,
    violations: Vec<String>,
}

/// The faults of single files, by their numbers.
#[derive(Default)]
struct Ills {
    hung: HashSet<usize>,
    hung_syncs: HashSet<usize>,
    waiting: HashMap<usize, usize>,
    failing: HashMap<usize, i32>,
    bad_ranges: HashMap<usize, (Range<u64>, i32)>,
}

fn set(files: &mut HashSet<usize>, file: usize, on: bool) {
    if on {
        files.insert(file)
    } else {
        files.remove(&file)
    };
}

struct UnderWay {
    id: u64,
    file: usize,
    direction: Direction,
    bytes: Range<u64>,
}

impl Traffic {
    fn violated(&mut self, what: String) {
        if self.violations.len() < 100 {
            self.violations.push(what);
        }
    }
}

impl SimDevice {
    /// The same device; single-file methods concern the file that was opened as number `index`, from 0.
    #[must_use]
    pub fn file(&self, index: usize) -> SimDevice {
        SimDevice { shared: Arc::clone(&self.shared), index: Some(index) }
    }

    /// The number of files opened so far; a file that is opened again after its last close counts again.
    #[must_use]
    pub fn files(&self) -> usize {
        self.shared.files.acquire().len()
    }

    /// The bytes that reads of the device would return. The file's handles may be closed already.
    #[must_use]
    pub fn image(&self) -> Vec<u8> {
        self.with_disk(|disk| disk.image().to_vec())
    }

    /// The length of the file on the device, in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.with_disk(|disk| disk.len())
    }

    /// Whether the file has no bytes on the device.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The greatest length that the file ever had on the device.
    #[must_use]
    pub fn len_max(&self) -> u64 {
        self.with_disk(|disk| disk.len_max())
    }

    /// The bytes that a power cut can't lose: those that successful syncs covered.
    #[must_use]
    pub fn durable(&self) -> Vec<u8> {
        self.with_disk(|disk| disk.durable())
    }

    /// The state after a power cut now. Each sector of 512 bytes has the content that a successful sync
    /// last covered, or any content since; the length is that of the last successful sync, or any that was
    /// set since, and no sector is older than a truncation before that length. `seed` decides.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Vec<u8> {
        let mut state = seed;
        self.with_disk(|disk| disk.crash(|below| split_mix(&mut state) % below.max(1)))
    }

    /// The number of attempted writes.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.shared.writes.load(Relaxed)
    }

    /// The number of attempted syncs and durable writes.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.shared.syncs.load(Relaxed)
    }

    /// The number of writes that were made to fail; including durable ones, whichever half failed.
    #[must_use]
    pub fn failed_writes(&self) -> u64 {
        self.shared.failed_writes.load(Relaxed)
    }

    /// The number of syncs that were made to fail, without durable writes.
    #[must_use]
    pub fn failed_syncs(&self) -> u64 {
        self.shared.failed_syncs.load(Relaxed)
    }

    /// The maximum number of writes that were in flight at a time.
    #[must_use]
    pub fn writes_under_way_max(&self) -> usize {
        self.shared.traffic.acquire().writes_max
    }

    /// Returns the attempted writes, in order, and clears the log.
    #[must_use]
    pub fn take_log(&self) -> Vec<SimWrite> {
        std::mem::take(&mut self.shared.traffic.acquire().log)
    }

    /// Blocks writes, or releases them.
    pub fn block_writes(&self, on: bool) {
        self.shared.traffic.acquire().blocked = on;
        self.shared.released.notify_all();
    }

    /// Waits until a write is blocked; returns whether one was within `limit`.
    #[must_use]
    pub fn wait_for_blocked_write(&self, limit: Duration) -> bool {
        let started = Instant::now();
        while self.shared.traffic.acquire().waiting == 0 {
            if started.elapsed() > limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Blocks the next sync that will succeed, or durable write, before the device makes its bytes durable,
    /// until [`SimDevice::release_sync`]. Other operations continue.
    pub fn hold_next_sync(&self) {
        self.shared.traffic.acquire().holds_next_sync = true;
    }

    /// Waits until a sync is blocked; returns whether one was within `limit`.
    #[must_use]
    pub fn wait_for_held_sync(&self, limit: Duration) -> bool {
        let started = Instant::now();
        while !self.shared.traffic.acquire().holds_sync {
            if started.elapsed() > limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Releases it.
    pub fn release_sync(&self) {
        let mut traffic = self.shared.traffic.acquire();
        (traffic.holds_next_sync, traffic.holds_sync) = (false, false);
        self.shared.released.notify_all();
    }

    /// Blocks all changes of the one file: writes, syncs, changes of its length and extents; or releases
    /// them.
    pub fn hang(&self, on: bool) {
        let index = self.index();
        set(&mut self.shared.ills.acquire().hung, index, on);
        self.shared.freed.notify_all();
    }

    /// Blocks syncs of the one file, while it accepts writes; or releases them.
    pub fn hang_syncs(&self, on: bool) {
        let index = self.index();
        set(&mut self.shared.ills.acquire().hung_syncs, index, on);
        self.shared.freed.notify_all();
    }

    /// The number of operations that wait because the one file hangs.
    #[must_use]
    pub fn hanging(&self) -> usize {
        self.shared.ills.acquire().waiting.get(&self.index()).copied().unwrap_or(0)
    }

    /// Makes all writes to the one file fail with `errno`; 0: none. Independent of the switch for the
    /// errors.
    pub fn fail_writes(&self, errno: i32) {
        let index = self.index();
        let failing = &mut self.shared.ills.acquire().failing;
        if errno == 0 {
            failing.remove(&index)
        } else {
            failing.insert(index, errno)
        };
    }

    /// Makes each read and write of the one file that touches `bytes` fail with `errno`, after a random
    /// part of them has been moved, while the [switch for the errors](crate::sim::SimOptions::errors_switch) is
    /// on: a bad block. Replaces the last one; 0: none.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::sim::SimOptions;
    /// use millpond::{BackendChoice, Engine, OpenOptions};
    ///
    /// let options = SimOptions::new(1);
    /// let device = options.device();
    /// let engine = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Sim(options)).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("data");
    /// let file = engine.open(&path, &OpenOptions::new().read(true).write(true).create(true))?;
    /// device.fail_range(8192..8704, libc::EIO);
    /// assert!(file.write_all_at(&[7; 20_000], 0).is_err());
    /// file.write_all_at(&[7; 4096], 20_480)?;
    /// device.fail_range(0..0, 0);
    /// file.write_all_at(&[7; 20_000], 0)?;
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn fail_range(&self, bytes: Range<u64>, errno: i32) {
        let index = self.index();
        let bad = &mut self.shared.ills.acquire().bad_ranges;
        if errno == 0 {
            bad.remove(&index)
        } else {
            bad.insert(index, (bytes, errno))
        };
    }

    /// Violations by the engine: transfers that overlap in space and time and are not all reads; a truncate
    /// or a hole in a range that is being written; a write whose memory changes during the write.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.shared.traffic.acquire().violations.clone()
    }

    /// The number of the chosen file, or of the file opened last.
    fn index(&self) -> usize {
        self.index.unwrap_or_else(|| self.shared.files.acquire().len().saturating_sub(1))
    }

    fn with_disk<R>(&self, ask: impl FnOnce(&Disk) -> R) -> R {
        let disk = {
            let index = self.index();
            let disks = self.shared.files.acquire();
            Arc::clone(
                disks.get(index).expect("the file was opened, after the device was asked for"),
            )
        };
        let disk = disk.acquire();
        ask(&disk)
    }

    pub(super) fn watch(&self) {
        self.shared.watched.store(true, Relaxed);
    }

    /// Creates the disk of a file that is being opened, and its number.
    pub(super) fn open(&self, bytes: Vec<u8>) -> (usize, Arc<Mutex<Disk>>) {
        if !self.is_watched() {
            return (0, Arc::new(Mutex::new(Disk::new(bytes, false))));
        }
        let disk = Arc::new(Mutex::new(Disk::new(bytes, true)));
        let mut disks = self.shared.files.acquire();
        disks.push(Arc::clone(&disk));
        (disks.len() - 1, disk)
    }

    pub(super) fn is_watched(&self) -> bool {
        self.shared.watched.load(Relaxed)
    }

    /// Counts a write; returns its number, from 1.
    pub(super) fn count_write(&self) -> u64 {
        self.shared.writes.fetch_add(1, Relaxed) + 1
    }

    pub(super) fn count_sync(&self) -> u64 {
        self.shared.syncs.fetch_add(1, Relaxed) + 1
    }

    pub(super) fn count_failed_write(&self) {
        self.shared.failed_writes.fetch_add(1, Relaxed);
    }

    pub(super) fn count_failed_sync(&self) {
        self.shared.failed_syncs.fetch_add(1, Relaxed);
    }

    /// Records the start of a transfer; returns its id.
    pub(super) fn begin(&self, file: usize, transfer: &Transfer<'_>) -> u64 {
        let len = transfer.segments.left();
        let bytes = transfer.offset..transfer.offset + len;
        let direction = transfer.direction;
        let mut traffic = self.shared.traffic.acquire();
        let other = traffic.under_way.iter().find(|other| {
            other.file == file
                && other.bytes.start < bytes.end
                && bytes.start < other.bytes.end
                && (direction == Direction::Write || other.direction == Direction::Write)
        });
        if let Some(other) = other {
            let what = format!(
                "{direction:?} of {bytes:?} during {:?} of {:?}",
                other.direction, other.bytes
            );
            traffic.violated(what);
        }
        let id = traffic.under_way.iter().map(|other| other.id + 1).max().unwrap_or(0);
        traffic.under_way.push(UnderWay { id, file, direction, bytes });
        if direction == Direction::Write {
            let durable = transfer.durable;
            traffic.log.push(SimWrite { offset: transfer.offset, len, durable });
            let writes = traffic.under_way.iter().filter(|it| it.direction == Direction::Write);
            traffic.writes_max = traffic.writes_max.max(writes.count());
        }
        id
    }

    pub(super) fn end(&self, id: u64) {
        self.shared.traffic.acquire().under_way.retain(|other| other.id != id);
    }

    /// Waits if it is the sync to block.
    pub(super) fn pass_sync(&self) {
        let mut traffic = self.shared.traffic.acquire();
        if std::mem::take(&mut traffic.holds_next_sync) {
            traffic.holds_sync = true;
            while traffic.holds_sync {
                traffic = self.shared.released.wait(traffic).expect("no panic under the lock");
            }
        }
    }

    /// Waits while writes are blocked.
    pub(super) fn pass(&self) {
        let mut traffic = self.shared.traffic.acquire();
        traffic.waiting += 1;
        while traffic.blocked {
            traffic = self.shared.released.wait(traffic).expect("no panic under the lock");
        }
        traffic.waiting -= 1;
    }

    /// Waits while the file hangs, or its syncs do and this is one.
    pub(super) fn pass_file(&self, file: usize, is_sync: bool) {
        let mut ills = self.shared.ills.acquire();
        *ills.waiting.entry(file).or_default() += 1;
        while ills.hung.contains(&file) || is_sync && ills.hung_syncs.contains(&file) {
            ills = self.shared.freed.wait(ills).expect("no panic under the lock");
        }
        *ills.waiting.entry(file).or_default() -= 1;
    }

    /// The errno of a transfer of these bytes, if it is to fail.
    pub(super) fn bad_range(&self, file: usize, bytes: Range<u64>) -> Option<i32> {
        let ills = self.shared.ills.acquire();
        let (bad, errno) = ills.bad_ranges.get(&file)?;
        (bad.start < bytes.end && bytes.start < bad.end).then_some(*errno)
    }

    pub(super) fn failing_file(&self, file: usize) -> Option<i32> {
        self.shared.ills.acquire().failing.get(&file).copied()
    }

    /// Records a change of bytes other than a write: a truncate, or a hole.
    pub(super) fn change(&self, file: usize, bytes: Range<u64>) {
        let mut traffic = self.shared.traffic.acquire();
        let other = traffic.under_way.iter().find(|other| {
            other.file == file
                && other.direction == Direction::Write
                && other.bytes.start < bytes.end
                && bytes.start < other.bytes.end
        });
        if let Some(other) = other {
            let what = format!("cut or hole of {bytes:?} during a write of {:?}", other.bytes);
            traffic.violated(what);
        }
    }

    pub(super) fn changed(&self, transfer: &Transfer<'_>) {
        let what = format!("the memory of a write at {} changed", transfer.offset);
        self.shared.traffic.acquire().violated(what);
    }
}
