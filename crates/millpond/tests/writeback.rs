//! Write-back on a simulated device: which writes reach it, when, and in which sizes; which bytes
//! are durable.
//!
//! Threads are in `writeback_threads.rs`, faults in `writeback_faults.rs`, power cuts in
//! `crash.rs`.

mod common;

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use millpond::sim::SimOptions;
use millpond::{Engine, Error, File, OpenOptions, WriteMode};

use common::{Random, Simulated, cache_for, read_write, same, scaled, write_back};

const PAGE: usize = 4096;

fn modes() -> [OpenOptions; 2] {
    [write_back(), read_write().write_mode(WriteMode::Through)]
}

fn pattern(at: usize, stamp: usize) -> u8 {
    (at / 512 * 7 + at % 251 + stamp * 13) as u8 | 1
}

/// The expected bytes of a file.
#[derive(Clone, Default)]
struct Expected(Vec<u8>);

impl Expected {
    fn write(&mut self, file: &File, at: usize, len: usize, stamp: usize) {
        let src: Vec<u8> = (at..at + len).map(|i| pattern(i, stamp)).collect();
        assert_eq!(file.write_at(&src, at as u64).unwrap(), len);
        self.note(at, &src);
    }

    fn note(&mut self, at: usize, src: &[u8]) {
        if self.0.len() < at + src.len() {
            self.0.resize(at + src.len(), 0);
        }
        self.0[at..at + src.len()].copy_from_slice(src);
    }
}

/// Goal: a write in mode back returns before any request reaches the device. `write_back` writes it
/// there without making it durable; a sync makes it durable.
#[test]
fn a_write_stays_in_the_cache_until_write_back() {
    let sim = Simulated::new(SimOptions::new(1), 4 << 20, &write_back());
    let mut expected = Expected::default();
    expected.write(&sim.file, 100, 3 * PAGE, 1);
    assert_eq!((sim.device.writes(), sim.device.syncs()), (0, 0));
    sim.file.write_back().unwrap();
    same(&sim.device.image(), &expected.0, "written back");
    assert_eq!(sim.device.syncs(), 0);
    assert_eq!(sim.device.durable(), []);
    let writes = sim.device.writes();
    sim.file.sync_data().unwrap();
    assert_eq!((sim.device.writes(), sim.device.syncs()), (writes, 1), "only the dirty page");
    sim.assert_stored(&expected.0);
}

/// Goal: a write in mode through is on the device when it returns; a sync makes it durable.
#[test]
fn a_write_through_is_on_the_device_at_once() {
    let sim = Simulated::new(SimOptions::new(1), 4 << 20, &read_write());
    let mut expected = Expected::default();
    expected.write(&sim.file, 100, 3 * PAGE, 1);
    same(&sim.device.image(), &expected.0, "through");
    assert_eq!(sim.device.durable(), []);
    sim.assert_stored(&expected.0);
}

/// Goal: closing the last handle writes all dirty pages to the device.
#[test]
fn close_writes_back() {
    for explicitly in [true, false] {
        let sim = Simulated::new(SimOptions::new(1), 4 << 20, &write_back());
        let mut expected = Expected::default();
        expected.write(&sim.file, 5, 9 * PAGE, 1);
        let device = sim.device.clone();
        if explicitly {
            sim.file.close().unwrap();
        } else {
            drop(sim.file);
        }
        same(&device.image(), &expected.0, "closed");
    }
}

/// Goal: for every length of a file within its last page, the device gets its bytes, and never
/// becomes longer than the file.
/// Method: every remainder, on page sizes of one and of several kernel pages: write, write back,
/// extend, truncate, sync.
#[test]
fn tails_of_every_length() {
    for options in modes() {
        for page in [PAGE, 4 * PAGE] {
            let mut sim = None;
            // Every remainder where pages are kernel pages, and a share of them where not.
            for (number, rest) in (0..page).step_by(page / PAGE * 3 - 2).enumerate() {
                if number % 64 == 0 {
                    let options = options.clone().page_bytes(page as u32);
                    sim = Some(Simulated::new(SimOptions::new(1), 1 << 20, &options));
                }
                let sim = sim.as_ref().unwrap();
                let path = sim.path.with_extension(number.to_string());
                let options = options.clone().page_bytes(page as u32);
                let file = sim.engine.open(&path, &options).unwrap();
                tail_of(&file, sim, rest + page * (number % 3));
            }
        }
    }
}

fn tail_of(file: &File, sim: &Simulated, len: usize) {
    let device = &sim.device;
    let mut expected = Expected::default();
    let mut len_max = 0;
    let check = |expected: &Expected, len_max: &mut u64, what: &str| {
        let now = expected.0.len() as u64;
        *len_max = now.max(*len_max);
        assert_eq!(file.len().unwrap(), now);
        assert!(device.len_max() <= *len_max, "{what}: {} > {len_max}", device.len_max());
    };
    if len > 0 {
        expected.write(file, 0, len, 1);
    }
    check(&expected, &mut len_max, "written");
    file.write_back().unwrap();
    check(&expected, &mut len_max, "written back");
    same(&device.image(), &expected.0, "written back");
    // The tail again, then bytes behind a gap.
    if len > 0 {
        expected.write(file, len - 1, 1, 2);
    }
    expected.write(file, len + 700, 1 + len % 900, 3);
    check(&expected, &mut len_max, "extended");
    file.write_back().unwrap();
    check(&expected, &mut len_max, "extended and written back");
    same(&device.image(), &expected.0, "extended and written back");
    // Truncated in the dirty tail, and extended by truncation.
    expected.write(file, len, 300, 4);
    let cut = len + 150;
    file.truncate(cut as u64).unwrap();
    expected.0.truncate(cut);
    check(&expected, &mut len_max, "cut");
    file.truncate(cut as u64 + 50).unwrap();
    expected.0.resize(cut + 50, 0);
    check(&expected, &mut len_max, "longer");
    file.sync_all().unwrap();
    check(&expected, &mut len_max, "synced");
    same(&device.durable(), &expected.0, "synced");
    same(&device.image(), &expected.0, "synced");
    assert_eq!(device.violations(), [""; 0]);
}

/// Goal: consecutive dirty pages reach the device as few large writes; scattered ones as several
/// concurrent writes.
#[test]
fn dirty_pages_in_a_row_are_written_together() {
    let builder = Engine::builder()
        .admission(common::admission())
        .cache_bytes(16 << 20)
        .dirty_bytes_max(8 << 20);
    let sim = Simulated::with(SimOptions::new(1), &builder, &write_back());
    let mut expected = Expected::default();
    const PAGES: usize = 256;
    // In random order.
    for number in 0..PAGES {
        expected.write(&sim.file, number * 77 % PAGES * PAGE, PAGE, number);
    }
    sim.file.write_back().unwrap();
    let log = sim.device.take_log();
    assert_eq!(log.iter().map(|write| write.len).sum::<u64>(), (PAGES * PAGE) as u64);
    assert!(log.len() <= PAGES / 16, "{} writes for {PAGES} pages", log.len());
    for number in 0..64 {
        expected.write(&sim.file, number * 3 * PAGE, PAGE, number + 1);
    }
    sim.file.write_back().unwrap();
    let log = sim.device.take_log();
    // Clean pages between them may be written along, but not more than the whole file.
    assert!(log.iter().map(|write| write.len).sum::<u64>() <= (PAGES * PAGE) as u64);
    assert!(log.len() == 1 || sim.device.writes_under_way_max() > 1, "one by one: {}", log.len());
    sim.assert_stored(&expected.0);
}

/// Goal: a page that is dirtied repeatedly between syncs is written once.
#[test]
fn a_page_is_written_once_however_often_it_was_dirtied() {
    let sim = Simulated::new(SimOptions::new(1), 4 << 20, &write_back());
    let mut expected = Expected::default();
    for stamp in 0..1000 {
        expected.write(&sim.file, stamp * 31 % (PAGE - 100), 100, stamp);
    }
    sim.file.sync_all().unwrap();
    assert_eq!(sim.device.writes(), 1);
    sim.assert_stored(&expected.0);
}

/// Goal: the dirty pages never exceed the limit by more than one write.
/// Method: single-page writes to a device that hangs; the writer stops at the limit, and continues
/// when the device does.
#[test]
fn writers_stop_at_the_dirty_limit() {
    for dirty_pages in [16, 100] {
        let builder = Engine::builder()
            .admission(common::admission())
            .cache_bytes(4 << 20)
            .dirty_bytes_max(dirty_pages * 4096);
        let sim = Simulated::with(SimOptions::new(1), &builder, &write_back());
        sim.device.block_writes(true);
        let written = AtomicU64::new(0);
        let pages = 400;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for page in 0..pages {
                    sim.file.write_all_at(&[page as u8; PAGE], page * PAGE as u64).unwrap();
                    written.fetch_add(1, SeqCst);
                }
            });
            let mut last = u64::MAX;
            let stuck_at = loop {
                std::thread::sleep(Duration::from_millis(100));
                let now = written.load(SeqCst);
                if now == last {
                    break now;
                }
                last = now;
            };
            sim.device.block_writes(false);
            let expected = dirty_pages / 2..=dirty_pages + 1;
            assert!(expected.contains(&stuck_at), "stopped after {stuck_at}, not {dirty_pages}");
        });
        let expected: Vec<u8> = (0..pages as usize * PAGE).map(|i| (i / PAGE) as u8).collect();
        sim.assert_stored(&expected);
    }
}

/// Goal: the same over time: at every moment the device has all but the limit's number of pages.
#[test]
fn the_dirty_limit_holds_at_every_moment() {
    const DIRTY_PAGES: usize = 8;
    const PAGES: usize = 48;
    let builder = Engine::builder()
        .admission(common::admission())
        .cache_bytes(cache_for(PAGES as u64 * 2, PAGE as u64))
        .dirty_bytes_max((DIRTY_PAGES * PAGE) as u64);
    let sim = Simulated::with(SimOptions::new(1).delay_us_max(200), &builder, &write_back());
    let mut random = Random::from_environment();
    let mut expected = Expected::default();
    for stamp in 0..scaled(400) {
        let at = random.below((PAGES * PAGE) as u64 - 5000) as usize;
        expected.write(&sim.file, at, 1 + random.below(5000) as usize, stamp as usize);
        let image = sim.device.image();
        let dirty = (0..expected.0.len().div_ceil(PAGE))
            .filter(|page| {
                let range = page * PAGE..((page + 1) * PAGE).min(expected.0.len());
                image.get(range.clone()) != Some(&expected.0[range])
            })
            .count();
        // One write is of three pages at most.
        assert!(dirty <= DIRTY_PAGES + 3, "{dirty} pages are dirty");
    }
    sim.assert_stored(&expected.0);
}

/// Goal: dirty pages without a sync are on the device when they reach their age, and not much
/// earlier.
#[test]
fn old_pages_are_written_back_by_themselves() {
    const AGE: Duration = Duration::from_millis(200);
    let builder =
        Engine::builder().admission(common::admission()).cache_bytes(4 << 20).dirty_age_max(AGE);
    let sim = Simulated::with(SimOptions::new(1), &builder, &write_back());
    let mut expected = Expected::default();
    for round in 0..3 {
        let started = Instant::now();
        expected.write(&sim.file, round * 5 * PAGE, 2 * PAGE + 77, round);
        let writes = sim.device.writes();
        std::thread::sleep(AGE / 8);
        if started.elapsed() < AGE / 4 {
            assert_eq!(sim.device.writes(), writes, "written back at once");
        }
        while sim.device.image() != expected.0 {
            // Machines are busy: the limit excludes the default age of 30 seconds, and a page that
            // is never written.
            assert!(started.elapsed() < AGE + Duration::from_secs(2), "still dirty");
            std::thread::sleep(Duration::from_millis(5));
        }
        println!("on the device after {:?}", started.elapsed());
    }
}

/// Goal: a durable write is durable when it returns, with its size, for every way to request it,
/// and also if a part of its page was dirty before.
#[test]
fn durable_writes_are_durable_when_they_return() {
    for options in modes() {
        let sim = Simulated::new(SimOptions::new(1), 1 << 20, &options);
        let durable = sim.engine.open(&sim.path, &options.clone().dsync(true)).unwrap();
        let mut random = Random::from_environment();
        let mut expected = Expected::default();
        for round in 0..scaled(200) as usize {
            let at = random.below(20 * PAGE as u64) as usize;
            let len = 1 + random.below(3 * PAGE as u64) as usize;
            let src: Vec<u8> = (at..at + len).map(|i| pattern(i, round)).collect();
            let at = match random.below(4) {
                0 => {
                    assert_eq!(sim.file.write_at_dsync(&src, at as u64).unwrap(), len);
                    at
                }
                1 => {
                    assert_eq!(durable.write_at(&src, at as u64).unwrap(), len);
                    at
                }
                2 => durable.append(&src).unwrap() as usize,
                _ => {
                    expected.write(&sim.file, at, len, round);
                    continue;
                }
            };
            expected.note(at, &src);
            for seed in 0..3 {
                let left = sim.device.crash(seed);
                assert!(left.len() >= at + len, "{} bytes left, not {}", left.len(), at + len);
                same(&left[at..at + len], &src, "written durably");
            }
        }
        sim.assert_stored(&expected.0);
    }
}

/// Goal: a sync of a range makes its bytes durable.
#[test]
fn a_sync_of_a_range_covers_it() {
    for options in modes() {
        let sim = Simulated::new(SimOptions::new(1), 1 << 20, &options);
        let mut random = Random::from_environment();
        let mut expected = Expected::default();
        for round in 0..scaled(100) as usize {
            for _ in 0..5 {
                let at = random.below(30 * PAGE as u64) as usize;
                expected.write(&sim.file, at, 1 + random.below(9000) as usize, round);
            }
            let at = random.below(30 * PAGE as u64) as usize;
            let len = random.below(5 * PAGE as u64) as usize;
            sim.file.sync_range(at as u64, len as u64).unwrap();
            let end = (at + len).min(expected.0.len());
            let left = sim.device.crash(round as u64);
            if at < end {
                assert!(left.len() >= end, "{} bytes left, not {end}", left.len());
                same(&left[at..end], &expected.0[at..end], "synced range");
            }
        }
        sim.assert_stored(&expected.0);
    }
}

/// Goal: writes that do not fit into the cache, one long or many short ones, succeed.
#[test]
fn writes_larger_than_the_cache() {
    for cache_bytes in [32 << 10, 256 << 10] {
        for options in modes() {
            let sim = Simulated::new(SimOptions::new(1), cache_bytes, &options);
            let mut expected = Expected::default();
            for (stamp, at, len) in [(1, 0, 1 << 20), (2, 1001, 700_000), (3, 900_000, 500_000)] {
                expected.write(&sim.file, at, len, stamp);
                expected.write(&sim.file, at / 2, 100, stamp);
                assert!(sim.engine.stats().memory_bytes <= cache_bytes);
                let mut bytes = vec![0; expected.0.len() + 1];
                assert_eq!(sim.file.read_at(&mut bytes, 0).unwrap(), expected.0.len());
                same(&bytes[..expected.0.len()], &expected.0, "read");
                if stamp == 2 {
                    sim.file.sync_data().unwrap();
                    sim.is_durable(&expected.0);
                }
            }
            assert!(sim.device.len_max() <= expected.0.len() as u64);
            sim.assert_stored(&expected.0);
        }
    }
}

/// Goal: an operation without permission fails in mode back, too.
#[test]
fn writes_need_a_writable_handle() {
    let sim = Simulated::new(SimOptions::new(1), 1 << 20, &write_back());
    let reader = sim.engine.open(&sim.path, &OpenOptions::new().read(true)).unwrap();
    assert!(matches!(reader.write_at_dsync(b"x", 0), Err(Error::NotPermitted { .. })));
    assert!(matches!(reader.write_at(b"x", 0), Err(Error::NotPermitted { .. })));
    assert!(matches!(sim.file.sync_range(u64::MAX, 1), Err(Error::InvalidRange { .. })));
    assert_eq!(sim.device.writes(), 0);
    assert!(sim.device.is_empty());
}

/// Goal: closing a file releases blocks reserved beyond its end, and no bytes that another process
/// has written there.
#[test]
fn close_keeps_bytes_of_other_processes() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let dir = common::temp_dir();
    let engine = common::engine(4 << 20, millpond::BackendChoice::Threads);
    for appended in [0, 100] {
        let path = dir.path().join(appended.to_string());
        let file = engine.open(&path, &write_back()).unwrap();
        file.write_all_at(&[1; 5000], 0).unwrap();
        file.sync_all().unwrap();
        let other = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        other.write_all_at(&vec![2; appended], 5000).unwrap();
        file.close().unwrap();
        let mut expected = vec![1; 5000];
        expected.resize(5000 + appended, 2);
        same(&std::fs::read(&path).unwrap(), &expected, "closed");
        if appended == 0 {
            assert!(other.metadata().unwrap().blocks() <= 16, "space beyond the end");
        }
    }
}

/// Goal: writes that extend a file and are synced one by one go to the device at once, before the
/// sync needs them. Other writes wait, also of the same file.
/// Method: the device counts writes.
#[test]
fn a_log_is_written_at_once() {
    let sim = Simulated::new(SimOptions::new(1), 4 << 20, &write_back());
    let mut expected = Expected::default();
    let waits = |at: usize, len: usize, expected: &mut Expected| {
        let before = sim.device.writes();
        expected.write(&sim.file, at, len, at / 100 + len);
        sim.device.writes() == before
    };
    let mut end = 0;
    for number in 0..12 {
        let len = 700 * number + 100;
        let waited = waits(end, len, &mut expected);
        assert_eq!(waited, number < 4, "write {number}");
        sim.file.sync_data().unwrap();
        same(&sim.device.durable(), &expected.0, "synced");
        end += len;
    }
    assert!(waits(100, 5000, &mut expected), "it makes nothing longer");
    assert!(waits(end, 5000, &mut expected), "something waits");
    assert!(waits(end + 5000, 5000, &mut expected), "no sync came before");
    sim.file.sync_data().unwrap();
    end += 10_000;
    for number in 0..8 {
        assert!(waits(end, 10, &mut expected) && waits(end + 10, 10, &mut expected), "{number}");
        sim.file.sync_data().unwrap();
        end += 20;
    }
    sim.assert_stored(&expected.0);
}
