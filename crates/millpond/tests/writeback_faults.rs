//! Write-back on a failing device: no acknowledged byte is lost, and every failure is reported.

mod common;
#[path = "writeback_faults/failed_syncs.rs"]
mod failed_syncs;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use millpond::sim::SimOptions;
use millpond::{BackendChoice, Backing, Engine, Error, OpenOptions};

use common::mount::Mount;
use common::{
    Random, Simulated, cache_for, engine, has_uring, read_write, same, scaled, sync_until_success,
    within, write_back,
};

const PAGE: usize = 4096;
const LIMIT: Duration = Duration::from_secs(30);

/// The contents of a file, and the alternatives for each byte after a failed write.
#[derive(Default)]
struct Expected {
    bytes: Vec<u8>,
    others: BTreeMap<usize, Vec<u8>>,
    len_max: usize,
}

impl Expected {
    fn write(&mut self, at: usize, src: &[u8]) {
        let end = (at + src.len()).max(self.bytes.len());
        self.bytes.resize(end, 0);
        self.len_max = self.len_max.max(end);
        self.bytes[at..at + src.len()].copy_from_slice(src);
        while let Some((&known, _)) = self.others.range(at..at + src.len()).next() {
            self.others.remove(&known);
        }
    }

    fn write_failed(&mut self, at: usize, src: &[u8]) {
        self.len_max = self.len_max.max(at + src.len());
        for (i, &byte) in src.iter().enumerate() {
            self.others.entry(at + i).or_default().push(byte);
        }
    }

    /// Checks that the file may have the bytes `seen` from `offset` on.
    fn check(&self, offset: usize, seen: &[u8], what: &str) {
        for (number, piece) in seen.chunks(256).enumerate() {
            let from = offset + number * 256;
            if self.bytes.get(from..from + piece.len()) == Some(piece) {
                continue;
            }
            for (at, &byte) in (from..).zip(piece) {
                let expected = self.bytes.get(at).copied().unwrap_or(0);
                let others = self.others.get(&at);
                assert!(
                    byte == expected || others.is_some_and(|others| others.contains(&byte)),
                    "{what}: byte {at} is {byte:#x}, not {expected:#x} or one of {others:x?}"
                );
            }
        }
    }

    fn check_all(&self, seen: &[u8], what: &str) {
        let lens = self.bytes.len()..=self.len_max;
        assert!(lens.contains(&seen.len()), "{what}: {} bytes, not {lens:?}", seen.len());
        self.check(0, seen, what);
    }
}

/// A file, its expected contents, and random operations on it.
struct Subject {
    sim: Simulated,
    expected: Expected,
    random: Random,
    errno: i32,
    stamp: u8,
    failed_writes: u64,
    failed_syncs: u64,
    case: String,
}

impl Drop for Subject {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.case);
        }
    }
}

impl Subject {
    fn new(sim: Simulated, random: Random, errno: i32) -> Subject {
        let expected = Expected::default();
        let case = String::new();
        Subject { sim, expected, random, errno, stamp: 0, failed_writes: 0, failed_syncs: 0, case }
    }

    fn is_injected(&self, error: &Error) {
        assert_eq!(error.errno(), self.errno, "{error}");
        assert!(self.sim.device.failed_writes() + self.sim.device.failed_syncs() > 0, "{error}");
    }

    fn write(&mut self, at: usize, len: usize) {
        self.stamp = self.stamp.wrapping_add(1);
        let stamp = self.stamp;
        let mut src = vec![stamp | 1; len];
        src[len / 2..].fill(stamp ^ (at / PAGE) as u8);
        match self.sim.file.write_at(&src, at as u64) {
            Ok(moved) => {
                self.expected.write(at, &src[..moved]);
                if moved < len {
                    self.expected.write_failed(at + moved, &src[moved..]);
                }
            }
            Err(error) => {
                self.is_injected(&error);
                self.failed_writes += 1;
                self.expected.write_failed(at, &src);
            }
        }
    }

    /// A sync returns each failure of the device, and the bytes that it covers are durable.
    fn sync(&mut self) {
        match self.sim.file.sync_data() {
            Ok(()) => {
                self.expected.check_all(&self.sim.device.durable(), "durable");
            }
            Err(error) => {
                self.is_injected(&error);
                self.failed_syncs += 1;
            }
        }
    }

    fn read(&mut self) {
        let mut bytes = vec![0; self.expected.len_max + 1];
        let moved = self.sim.file.read_at(&mut bytes, 0).unwrap();
        self.expected.check_all(&bytes[..moved], "read");
    }

    /// Without faults, the file has all acknowledged bytes.
    fn settle(mut self) {
        self.sim.errors(false);
        sync_until_success(&self.sim.file);
        let stored = self.sim.device.durable();
        self.expected.check_all(&stored, "in the end");
        same(&self.sim.device.image(), &stored, "image");
        self.read();
        self.sim.file.invalidate(0, self.expected.len_max as u64).unwrap();
        self.read();
        assert!(self.sim.engine.stats().memory_bytes <= self.sim.engine.cache_bytes());
        assert_eq!(self.sim.device.violations(), [""; 0]);
    }
}

/// Goal: bytes of a failed write beyond the end of the file become visible at once, or never.
/// Method: a write past the cache fails after a part was transferred, and so does the truncation
/// that removes this part; then the file grows. (Once that brought bytes of the failed write into a
/// file that had ended before them.)
#[test]
fn bytes_of_a_failed_write_do_not_come_back() {
    let mut random = Random::from_environment();
    for _ in 0..scaled(20) {
        let device = SimOptions::new(random.next()).error_per_mille(1000);
        let sim = Simulated::new(device, cache_for(6, PAGE as u64), &write_back());
        sim.errors(false);
        sim.file.write_all_at(&[1; 3 * PAGE], 0).unwrap();
        sim.file.write_back().unwrap();
        sim.errors(true);
        sim.file.write_at(&vec![2; 40 * PAGE], 5 * PAGE as u64).unwrap_err();
        sim.errors(false);
        let len = sim.file.len().unwrap() as usize;
        assert!((3 * PAGE..45 * PAGE).contains(&len), "{len}");
        sim.file.write_all_at(&[3; PAGE], 50 * PAGE as u64).unwrap();
        let mut expected = [vec![1; 3 * PAGE], vec![0; 47 * PAGE], vec![3; PAGE]].concat();
        if len > 5 * PAGE {
            expected[5 * PAGE..len].fill(2);
        }
        sim.assert_stored(&expected);
    }
}

/// Goal: a device that fails every k-th write, after transferring any part of it, loses nothing
/// once a later sync succeeds. No sync succeeds without storing the bytes that it covers.
/// Method: k from 1 to 500, EIO and ENOSPC; random writes of up to two pages to a file that is
/// larger than the cache, until some writes have failed.
#[test]
fn every_kth_write_fails() {
    let mut random = Random::from_environment();
    let step = if common::scale() < 1.0 { (1.0 / common::scale()) as usize } else { 1 };
    for k in (1..=500).step_by(step) {
        for errno in [libc::EIO, libc::ENOSPC] {
            kth_write(k, errno, write_back(), random.fork());
            if k % 8 == 1 {
                kth_write(k, errno, read_write(), random.fork());
            }
        }
    }
}

fn kth_write(k: u64, errno: i32, options: OpenOptions, random: Random) {
    const PAGES: u64 = 24;
    let sim = SimOptions::new(k).fail_every_kth_write(k, errno);
    let sim = Simulated::new(sim, cache_for(10, PAGE as u64), &options);
    let mut subject = Subject::new(sim, random, errno);
    subject.case = format!("k = {k}, errno {errno}, {options:?}");
    let wanted = if k < 20 { 8 } else { 1 };
    for number in 0..20 * k + 200 {
        let at = subject.random.below((PAGES - 2) * PAGE as u64) as usize;
        let len = if subject.random.chance(300) { PAGE + at % PAGE } else { 1 + at % 700 };
        subject.write(at, len);
        match subject.random.below(40) {
            0 => subject.sync(),
            1 => subject.read(),
            2 | 3 => match subject.sim.file.write_back() {
                Ok(()) => {}
                Err(error) => subject.is_injected(&error),
            },
            // Appends with syncs, as of a log, which are written at once.
            4 => (0..6).for_each(|_| {
                subject.write(subject.expected.bytes.len(), 1 + at % 900);
                subject.sync();
            }),
            _ => {}
        }
        if subject.sim.device.failed_writes() >= wanted && number > 50 {
            break;
        }
    }
    assert!(subject.sim.device.failed_writes() > 0, "none failed");
    subject.settle();
}

/// Goal: after a failed sync, the next successful one has written all pages since the last
/// successful one again, though the device had accepted them and reports no more error.
/// Method: every second or third sync fails and loses sectors; all pages stay cached.
#[test]
fn the_next_sync_repairs_a_failed_one() {
    let mut random = Random::from_environment();
    let mut failed = 0;
    for round in 0..scaled(60) {
        let options = if round % 2 == 0 { write_back() } else { read_write() };
        let sim = SimOptions::new(random.next()).fail_every_kth_sync(2 + u64::from(round) % 3);
        let sim = Simulated::new(sim, 4 << 20, &options);
        let mut subject = Subject::new(sim, random.fork(), libc::EIO);
        subject.case = format!("{options:?}");
        // The first sync succeeds, and the cached pages stay cached.
        subject.write(0, 33 * PAGE);
        subject.sync();
        subject.read();
        let mut settled = 0;
        for _ in 0..60 {
            let at = subject.random.below(30 * PAGE as u64) as usize;
            let len = 1 + subject.random.below(9000) as usize;
            subject.write(at, len);
            match subject.random.below(8) {
                0 => {
                    // The cache is large, so no other sync runs.
                    let failures = [subject.failed_syncs, subject.sim.device.failed_syncs()];
                    subject.sync();
                    let reported = subject.failed_syncs - failures[0];
                    let failed = subject.sim.device.failed_syncs() - failures[1];
                    assert!(reported >= failed, "a failure is not reported");
                }
                1 => subject.read(),
                2 => subject.sim.file.write_back().unwrap(),
                _ => {}
            }
            // A write through over bytes that a failed sync left dirty may leave no copy of them.
            while round % 2 == 1 && subject.failed_syncs > settled {
                settled = subject.failed_syncs;
                subject.sync();
            }
        }
        assert_eq!(subject.failed_writes, 0);
        assert!(subject.failed_syncs >= subject.sim.device.failed_syncs());
        failed += subject.failed_syncs;
        subject.settle();
    }
    assert!(failed > 20 * scaled(60) as u64 / 60, "{failed} syncs failed");
}

/// Goal: if no page is clean and all writes fail, writers get the error soon; no acknowledged byte
/// is dropped; the memory limit holds. Without the fault, all bytes are stored.
#[test]
fn writers_get_the_error_of_a_failing_device() {
    within(LIMIT * 2, "writers to a device that takes nothing", || {
        for errno in [libc::EIO, libc::ENOSPC] {
            for (cache_bytes, dirty_bytes) in [(64 << 10, 1 << 30), (1 << 20, 128 << 10)] {
                let builder = Engine::builder()
                    .admission(common::admission())
                    .cache_bytes(cache_bytes)
                    .dirty_bytes_max(dirty_bytes);
                let sim = SimOptions::new(1).fail_every_kth_write(1, errno);
                let sim = Simulated::with(sim, &builder, &write_back());
                with_failing_writes(sim, errno);
            }
        }
    });
}

fn with_failing_writes(sim: Simulated, errno: i32) {
    let mut subject = Subject::new(sim, Random(1), errno);
    let mut longest = Duration::ZERO;
    let mut at = 0;
    while subject.failed_writes < 5 {
        let started = Instant::now();
        subject.write(at, 3000);
        longest = longest.max(started.elapsed());
        at += 3000;
        let stats = subject.sim.engine.stats();
        assert!(stats.memory_bytes <= subject.sim.engine.cache_bytes(), "{stats:?}");
        assert!(at < 8 << 20, "{at} bytes acknowledged, and no error");
    }
    println!("an error after {at} bytes, and at most {longest:?}");
    assert!(longest < LIMIT / 6, "a writer waited for {longest:?}");
    let started = Instant::now();
    subject.sim.file.sync_all().unwrap_err();
    subject.sim.file.write_back().unwrap_err();
    assert!(started.elapsed() < LIMIT / 3);
    // Acknowledged bytes can be read. Cached ones can be written again, or the write fails.
    let (mut bytes, wanted) = ([0; 3000], subject.expected.bytes[..3000].to_vec());
    subject.sim.file.read_exact_at(&mut bytes, 0).unwrap();
    same(&bytes, &wanted, "read");
    subject.write(100, 100);
    subject.sim.errors(false);
    sync_until_success(&subject.sim.file);
    subject.write(at, 5000);
    subject.settle();
}

/// Goal: the syncs of every handle return a failure, until one succeeds; and so does close.
#[test]
fn every_handle_returns_a_failure() {
    for options in [write_back(), read_write()] {
        let sim = SimOptions::new(1).fail_every_kth_sync(1);
        let sim = Simulated::new(sim, 1 << 20, &options);
        let open = || sim.engine.open(&sim.path, &options).unwrap();
        let (second, third, fourth) = (open(), open(), open());
        sim.file.write_all_at(&[7; 9000], 100).unwrap();
        sim.file.sync_all().unwrap_err();
        second.sync_data().unwrap_err();
        third.sync_all().unwrap_err();
        assert_eq!(fourth.close().unwrap_err().errno(), libc::EIO);
        // Close returns the error, and does not clear it.
        second.sync_data().unwrap_err();
        sim.errors(false);
        sync_until_success(&third);
        let expected = [vec![0; 100], vec![7; 9000]].concat();
        sim.is_durable(&expected);
        second.sync_all().unwrap();
        sim.file.sync_all().unwrap();
        second.close().unwrap();
        third.close().unwrap();
        open().close().unwrap();
        sim.assert_stored(&expected);
    }
}

/// Goal: the next sync or close returns an error of write-back in the background, unless the bytes
/// have reached the device by then.
#[test]
fn background_failures_are_returned() {
    let builder = Engine::builder()
        .admission(common::admission())
        .cache_bytes(1 << 20)
        .dirty_age_max(Duration::from_millis(20));
    let sim = SimOptions::new(1).fail_every_kth_write(1, libc::EIO);
    let sim = Simulated::with(sim, &builder, &write_back());
    sim.file.write_all_at(&[7; 9000], 100).unwrap();
    let started = Instant::now();
    while sim.device.failed_writes() == 0 {
        assert!(started.elapsed() < LIMIT, "nobody writes back");
        std::thread::sleep(Duration::from_millis(5));
    }
    let other = sim.engine.open(&sim.path, &write_back()).unwrap();
    sim.file.sync_all().unwrap_err();
    other.close().unwrap_err();
    sim.errors(false);
    sim.assert_stored(&[vec![0; 100], vec![7; 9000]].concat());
    // Retried with back-off, not continuously.
    let tried = sim.device.failed_writes();
    assert!(tried < 1000, "{tried} attempts in {:?}", started.elapsed());
}

/// Goal: a failing sync does not lose a write longer than a chunk, or the error persists.
#[test]
fn long_writes_and_failing_syncs() {
    for seed in 0..u64::from(scaled(10)) {
        let sim = SimOptions::new(seed).fail_every_kth_sync(2);
        let sim = Simulated::new(sim, 128 << 10, &write_back());
        let mut subject = Subject::new(sim, Random(seed), libc::EIO);
        let mut unsettled = false;
        for number in 0..12 {
            let at = subject.random.below(300_000) as usize;
            subject.write(at, 150_000);
            subject.sim.errors(number < 9);
            unsettled |= number == 11 && subject.sim.file.sync_all().is_err();
            subject.sync();
        }
        if unsettled {
            // Chunks without a copy: the error persists.
            subject.sim.file.sync_all().unwrap_err();
            let another = subject.sim.engine.open(&subject.sim.path, &write_back()).unwrap();
            another.close().unwrap_err();
        } else {
            subject.settle();
        }
    }
}

/// Goal: on a full file system the write that finds no space returns the error, and not a later
/// sync. Acknowledged bytes are stored.
/// Method: ext4 of a few MiB, on a loop device, filled by writes of several sizes in mode back.
#[test]
fn writes_to_a_full_file_system_fail() {
    let mut back_ends = vec![BackendChoice::Threads];
    if has_uring() {
        back_ends.push(BackendChoice::Uring);
    }
    let Some(mount) = Mount::ext4(6 << 20) else { return };
    for backend in back_ends {
        for backing in [Backing::Buffered, Backing::Direct, Backing::DirectInPlace] {
            for (len, cache_bytes) in [(64 << 10, 1 << 20), (3000, 32 << 20), (2 << 20, 1 << 20)] {
                let case = format!("{backend:?}, {backing:?}, writes of {len}");
                let engine = engine(cache_bytes, backend.clone());
                fill_up(&engine, &mount, &write_back().backing(backing), len, &case);
            }
        }
    }
}

fn fill_up(engine: &Engine, mount: &Mount, options: &OpenOptions, len: usize, case: &str) {
    let path = mount.point.join("file");
    let free = mount.free_blocks();
    let file = engine.open(&path, options).unwrap();
    let mut stored: Vec<u8> = Vec::new();
    let refused = loop {
        let stamp = (stored.len() / len) as u8;
        let src: Vec<u8> = (0..len).map(|i| (i / 512) as u8 ^ stamp | 1).collect();
        match file.write_at(&src, stored.len() as u64) {
            Ok(moved) => stored.extend_from_slice(&src[..moved]),
            Err(error) => break error,
        }
        assert!(stored.len() < 6 << 20, "{case}: more than the disk has was acknowledged");
    };
    assert_eq!(refused.errno(), libc::ENOSPC, "{case}: {refused}");
    assert!(stored.len() > 1 << 20, "{case}: full after {} bytes", stored.len());
    // Bytes that have blocks can be written again.
    for at in [0, 4096, stored.len() / 2, stored.len() - 100] {
        assert_eq!(file.write_at(&[0xEE; 100], at as u64).unwrap(), 100, "{case}");
        stored[at..at + 100].fill(0xEE);
    }
    file.sync_all().unwrap_or_else(|error| panic!("{case}: {error}"));
    assert_eq!(file.len().unwrap(), stored.len() as u64, "{case}");
    file.close().unwrap();
    same(&std::fs::read(&path).unwrap(), &stored, case);
    std::fs::remove_file(&path).unwrap();
    // Its blocks are free once a thread of the engine has closed the file and the journal has been
    // committed.
    let begun = Instant::now();
    while mount.free_blocks() < free && begun.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(1));
    }
    rustix::fs::syncfs(std::fs::File::open(&mount.point).unwrap()).unwrap();
}

/// Goal: a long write that fails does not undo a concurrent growth of the file.
/// Incident: it truncated the file below the cache to the size from before the write.
#[test]
fn a_failed_write_below_the_end_cuts_nothing_off() {
    let sim = SimOptions::new(1).fail_every_kth_write(1, libc::EIO);
    let sim = Simulated::new(sim, 128 << 10, &write_back());
    sim.errors(false);
    sim.file.write_all_at(&[7; 300_000], 0).unwrap();
    sim.device.block_writes(true);
    sim.errors(true);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| sim.file.write_at(&[8; 200_000], 0));
        assert!(sim.device.wait_for_blocked_write(LIMIT));
        sim.file.truncate(600_000).unwrap();
        sim.device.block_writes(false);
        writer.join().unwrap().unwrap_err();
    });
    assert_eq!((sim.file.len().unwrap(), sim.device.len()), (600_000, 600_000));
    assert_eq!(sim.device.violations(), [""; 0]);
}
