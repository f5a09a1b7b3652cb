//! Write-back beside readers, writers, truncations and syncs of the same pages.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use millpond::Engine;
use millpond::sim::SimOptions;

use common::{Random, Simulated, cache_for, stress_time, sync_until_success, within, write_back};

const PAGE: usize = 4096;
const LIMIT: Duration = Duration::from_secs(30);

/// Goal: writers and readers of pages under write-back go on, and the device gets whole pages.
/// Method: the device blocks in the middle of write-back; pages are written again, in part, and
/// read; then it continues.
#[test]
fn writers_do_not_wait_for_write_back() {
    const PAGES: usize = 16;
    let sim = Simulated::new(SimOptions::new(1).delay_us_max(100), 4 << 20, &write_back());
    let page = |stamp: u8| [stamp; PAGE];
    for number in 0..PAGES {
        sim.file.write_all_at(&page(1), (number * PAGE) as u64).unwrap();
    }
    sim.device.block_writes(true);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flusher = scope.spawn(|| sim.file.write_back());
        assert!(sim.device.wait_for_blocked_write(LIMIT), "nothing is written back");
        let (sim, done, started) = (&sim, &done, Instant::now());
        let release = scope.spawn(move || {
            // If a writer waits after all, it must not hang the test.
            while started.elapsed() < LIMIT / 3 && !done.load(SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            sim.device.block_writes(false);
        });
        for number in 0..PAGES {
            let at = (number * PAGE) as u64;
            sim.file.write_all_at(&page(2), at).unwrap();
            // Across two pages, the second of which still has its old bytes.
            sim.file.write_all_at(&[3; 200], at + PAGE as u64 - 100).unwrap();
            let mut bytes = [0; PAGE];
            sim.file.read_exact_at(&mut bytes, at).unwrap();
            assert_eq!(bytes[200..PAGE - 100], page(2)[200..PAGE - 100]);
            sim.file.write_all_at(&page(4), at).unwrap();
        }
        let took = started.elapsed();
        done.store(true, SeqCst);
        release.join().unwrap();
        flusher.join().unwrap().unwrap();
        assert!(took < LIMIT / 6, "writers waited for {took:?}");
    });
    sim.assert_stored(&[vec![4; PAGES * PAGE], vec![3; 100]].concat());
}

/// Goal: pages reach the device whole, each with its bytes of one moment.
/// Method: writers fill pages with stamps, while write-back runs continuously.
#[test]
fn the_device_never_sees_half_a_page() {
    const PAGES: u64 = 40;
    let sim = Simulated::new(SimOptions::new(1).delay_us_max(300), 1 << 20, &write_back());
    let mut random = Random::from_environment();
    sim.file.write_all_at(&vec![1; PAGES as usize * PAGE], 0).unwrap();
    let started = Instant::now();
    // Goes on until something was checked, on a slow machine, too.
    let goes_on = || {
        started.elapsed() < stress_time(1.0)
            || (sim.device.writes() <= 10 && started.elapsed() < LIMIT)
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let mut random = random.fork();
            let (sim, goes_on) = (&sim, &goes_on);
            scope.spawn(move || {
                while goes_on() {
                    let count = 1 + random.below(3) as usize;
                    let at = random.below(PAGES - 3) * PAGE as u64;
                    let stamp = random.next() as u8;
                    sim.file.write_all_at(&vec![stamp; count * PAGE], at).unwrap();
                }
            });
        }
        scope.spawn(|| {
            while goes_on() {
                sim.file.write_back().unwrap();
            }
        });
        while goes_on() {
            for (number, page) in sim.device.image().chunks(PAGE).enumerate() {
                let first = page[0];
                assert!(page.iter().all(|&byte| byte == first), "page {number} is torn");
            }
        }
    });
    assert_eq!(sim.device.violations(), [""; 0]);
    assert!(sim.device.writes() > 10);
}

const GROUPS: u64 = 12;
const GROUP_BYTES: u64 = 10_000;

fn group(number: u64, stamp: u64) -> Vec<u8> {
    (number << 40 | stamp).to_ne_bytes().repeat(GROUP_BYTES as usize / 8)
}

/// Goal: writers, readers, syncers and truncaters of one file agree on its contents, with a cache
/// that is far too small and a device that is slow and unordered; at the end the device has the
/// same.
/// Method: each group of bytes, unaligned to pages, has one writer and one stamp; behind the groups
/// the file grows and shrinks.
#[test]
fn many_threads_and_write_back() {
    many_threads(false);
}

/// Goal: the same, and bytes that a sync covered survive a power cut directly after it.
/// Method: transfers are whole, as the device cuts short ones within a word.
/// Incident: a flush that had begun after the sync had the page HIDDEN, and the sync did not wait
/// for it: one run in ten, on a busy machine.
#[test]
fn many_threads_and_power_cuts() {
    many_threads(true);
}

fn many_threads(cut: bool) {
    within(LIMIT * 2, "many threads and write-back", move || {
        let mut random = Random::from_environment();
        for (cache_pages, delay_us, short) in [(6, 50, 0), (16, 200, 100), (200, 100, 0)] {
            let short = if cut { 0 } else { short };
            let device =
                SimOptions::new(random.next()).delay_us_max(delay_us).short_per_mille(short);
            let builder = Engine::builder()
                .admission(common::admission())
                .cache_bytes(cache_for(cache_pages, PAGE as u64))
                .dirty_age_max(Duration::from_millis(30));
            let sim = Simulated::with(device, &builder, &write_back());
            hammer(&sim, &mut random, stress_time(1.0), cut);
            let len = sim.file.len().unwrap() as usize;
            let mut bytes = vec![0; len + 1];
            assert_eq!(sim.file.read_at(&mut bytes, 0).unwrap(), len);
            sim.assert_stored(&bytes[..len]);
            println!("{cache_pages} pages: {} writes", sim.device.writes());
        }
    });
}

fn hammer(sim: &Simulated, random: &mut Random, time: Duration, cut: bool) {
    const END: u64 = GROUPS * GROUP_BYTES;
    for number in 0..GROUPS {
        sim.file.write_all_at(&group(number, 1), number * GROUP_BYTES).unwrap();
    }
    let ended: &Vec<AtomicU64> = &(0..GROUPS).map(|_| AtomicU64::new(1)).collect();
    let until = Instant::now() + time;
    std::thread::scope(|scope| {
        for writer in 0..3 {
            let mut random = random.fork();
            scope.spawn(move || {
                while Instant::now() < until {
                    let number = random.below(GROUPS / 3) * 3 + writer;
                    let stamp = ended[number as usize].load(SeqCst) + 1;
                    let src = group(number, stamp);
                    assert_eq!(sim.file.write_at(&src, number * GROUP_BYTES).unwrap(), src.len());
                    ended[number as usize].store(stamp, SeqCst);
                }
            });
        }
        for _ in 0..2 {
            let mut random = random.fork();
            scope.spawn(move || {
                while Instant::now() < until {
                    let number = random.below(GROUPS);
                    let before = ended[number as usize].load(SeqCst);
                    let mut bytes = vec![0; GROUP_BYTES as usize];
                    sim.file.read_exact_at(&mut bytes, number * GROUP_BYTES).unwrap();
                    let word = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
                    assert!(bytes == group(number, word & 0xFF_FFFF_FFFF), "torn: {word:x}");
                    assert_eq!(word >> 40, number);
                    assert!(word & 0xFF_FFFF_FFFF >= before, "stale: {word:x}, not {before}");
                }
            });
        }
        let mut truncating = random.fork();
        scope.spawn(move || {
            while Instant::now() < until {
                let len = END + truncating.below(40_000);
                sim.file.truncate(len).unwrap();
                assert_eq!(sim.file.len().unwrap(), len);
                let src = vec![9; truncating.below(20_000) as usize];
                let at = sim.file.append(&src).unwrap();
                assert_eq!(at, len);
                let mut bytes = vec![0; src.len() + 1];
                assert_eq!(sim.file.read_at(&mut bytes, at).unwrap(), src.len());
                assert!(bytes[..src.len()] == src, "appended bytes");
            }
        });
        let mut syncing = random.fork();
        scope.spawn(move || {
            while Instant::now() < until {
                match syncing.below(4) {
                    0 => sim.file.write_back().unwrap(),
                    1 => sim.file.sync_range(syncing.below(END), 30_000).unwrap(),
                    2 => sim.file.sync_data().unwrap(),
                    _ if cut => sync_and_check(sim, ended),
                    _ => sync_until_success(&sim.file),
                }
                assert!(sim.engine.stats().memory_bytes <= sim.engine.cache_bytes());
            }
        });
    });
}

/// Bytes acknowledged before a sync are durable after it, or newer ones are.
fn sync_and_check(sim: &Simulated, ended: &[AtomicU64]) {
    let before: Vec<u64> = ended.iter().map(|stamp| stamp.load(SeqCst)).collect();
    sync_until_success(&sim.file);
    let left = sim.device.crash(before[0]);
    for (number, &stamp) in before.iter().enumerate() {
        let from = number * GROUP_BYTES as usize;
        for word in left[from..from + GROUP_BYTES as usize].chunks_exact(8) {
            let word = u64::from_ne_bytes(word.try_into().unwrap());
            assert!(word & 0xFF_FFFF_FFFF >= stamp, "group {number}: {word:x}, not {stamp}");
        }
    }
}
