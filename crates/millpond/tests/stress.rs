//! Many threads on the same files, with data that shows errors.
//!
//! Each write fills a *group* of pages, unaligned to them, with one stamp. So a read of a group
//! shows whether it was atomic, and the stamps that were started and ended around the read show
//! whether it was current. `MILLPOND_TEST_SCALE` makes the tests longer.

mod common;

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use millpond::sim::SimOptions;
use millpond::{Advice, BackendChoice, Backing, Engine, Error, File, WriteMode};

use common::{Random, back_ends, cache_for, engine, read_write, stress_time, temp_dir, within};

const GROUPS: u64 = 24;

/// The groups of one file: the stamps of started and ended writes.
struct Groups {
    bytes: u64,
    begun: Vec<AtomicU64>,
    ended: Vec<AtomicU64>,
}

impl Groups {
    fn new(bytes: u64) -> Groups {
        let stamps = || (0..GROUPS).map(|_| AtomicU64::new(1)).collect();
        Groups { bytes, begun: stamps(), ended: stamps() }
    }

    fn fill(&self, group: u64, stamp: u64) -> Vec<u8> {
        (group << 40 | stamp).to_ne_bytes().repeat(self.bytes as usize / 8)
    }

    fn write_all(&self, file: &File) {
        for group in 0..GROUPS {
            file.write_all_at(&self.fill(group, 1), group * self.bytes).unwrap();
        }
    }

    /// Only one thread writes a group.
    fn write(&self, file: &File, group: u64, random: &mut Random) {
        let stamp = self.ended[group as usize].load(SeqCst) + 1;
        let src = self.fill(group, stamp);
        self.begun[group as usize].store(stamp, SeqCst);
        let at = group * self.bytes;
        let moved = if random.chance(300) {
            let cut = random.below(src.len() as u64) as usize;
            let slices = [IoSlice::new(&src[..cut]), IoSlice::new(&src[cut..])];
            file.write_vectored_at(&slices, at).unwrap()
        } else {
            file.write_at(&src, at).unwrap()
        };
        assert_eq!(moved, src.len());
        self.ended[group as usize].store(stamp, SeqCst);
    }

    /// Reads whole groups from `group` on, or words within the first.
    fn read(&self, file: &File, group: u64, random: &mut Random) {
        let count = 1 + random.below(3).min(GROUPS - group - 1);
        let (from, to) = if count == 1 && random.chance(500) {
            let words = self.bytes / 8;
            let from = random.below(words);
            (from * 8, (from + 1 + random.below(words - from)) * 8)
        } else {
            (0, count * self.bytes)
        };
        let ended: Vec<u64> =
            (group..group + count).map(|group| self.ended[group as usize].load(SeqCst)).collect();
        let at = group * self.bytes + from;
        let mut bytes = vec![0; (to - from) as usize];
        let moved = if random.chance(300) {
            let cut = random.below(to - from) as usize;
            let (head, tail) = bytes.split_at_mut(cut);
            file.read_vectored_at(&mut [IoSliceMut::new(head), IoSliceMut::new(tail)], at).unwrap()
        } else {
            file.read_at(&mut bytes, at).unwrap()
        };
        assert_eq!(moved as u64, to - from);
        for (number, part) in bytes.chunks(self.bytes as usize).enumerate() {
            self.check(group + number as u64, part, ended[number]);
        }
    }

    fn view(&self, file: &File, group: u64, random: &mut Random) {
        let from = random.below(self.bytes / 8) * 8;
        let ended = self.ended[group as usize].load(SeqCst);
        match file.view(group * self.bytes + from, (self.bytes - from) as usize) {
            Ok(view) => {
                assert!(!view.is_empty());
                let begun = self.begun[group as usize].load(SeqCst);
                // Pages begin within words of a group, so whole words only.
                for _ in 0..2 {
                    let whole = view.len() / 8 * 8;
                    self.check_until(group, &view[..whole], ended, begun);
                    std::thread::yield_now();
                }
            }
            Err(Error::NoBuffers { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn check(&self, group: u64, bytes: &[u8], ended: u64) {
        self.check_until(group, bytes, ended, self.begun[group as usize].load(SeqCst));
    }

    /// All of `bytes` were written by one write, not before `ended` and not after `begun`.
    fn check_until(&self, group: u64, bytes: &[u8], ended: u64, begun: u64) {
        if bytes.is_empty() {
            return;
        }
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        let first = word(0);
        for at in (0..bytes.len()).step_by(8) {
            let now = word(at);
            assert!(
                now == first,
                "torn: group {group}: stamp {first:#x}, but {now:#x} at byte {at} of {}",
                bytes.len()
            );
        }
        let (of, stamp) = (first >> 40, first & ((1 << 40) - 1));
        assert_eq!(of, group, "bytes of another group: {first:#x}");
        assert!(
            (ended..=begun).contains(&stamp),
            "group {group}: stamp {stamp}, but {ended} had ended and {begun} was the last begun"
        );
    }
}

/// Causes fills and evictions: hints, invalidation, the hit path's switch.
fn disturb(engine: &Engine, file: &File, len: u64, random: &mut Random) {
    let (at, part) = (random.below(len), random.below(len / 4));
    match random.below(8) {
        0 => engine.set_hit_path(random.chance(700)),
        1 => file.advise(at, part, Advice::DontNeed).unwrap(),
        2 => file.advise(at, part, Advice::WillNeed).unwrap(),
        3 => file.invalidate(at, part).unwrap(),
        4 => {
            let advice = [Advice::Normal, Advice::Sequential, Advice::Random];
            file.advise(0, 0, advice[random.below(3) as usize]).unwrap();
        }
        5 => {
            // A sequence, for read-ahead.
            let mut bytes = vec![0; 4096];
            for step in 0..16 {
                file.read_at(&mut bytes, (at + step * 4096) % len).unwrap();
            }
        }
        6 => {
            let stats = engine.stats();
            assert!(stats.memory_bytes <= engine.cache_bytes(), "{stats:?}");
        }
        _ => std::thread::sleep(Duration::from_micros(random.below(300))),
    }
}

struct Setup {
    name: String,
    backend: BackendChoice,
    backing: Backing,
    page_bytes: u64,
    cache_pages: u64,
    files: usize,
    write_mode: WriteMode,
}

fn readers_and_writers(setup: &Setup, random: &mut Random, time: Duration) {
    let dir = temp_dir();
    // One and a half pages, or some more: never aligned.
    let bytes = (setup.page_bytes * (1 + random.below(6)) + setup.page_bytes / 2) & !7;
    let len = GROUPS * bytes;
    let cache_bytes = cache_for(setup.cache_pages, setup.page_bytes);
    let options = read_write()
        .page_bytes(setup.page_bytes as u32)
        .backing(setup.backing)
        .write_mode(setup.write_mode);
    let engine = engine(cache_bytes, setup.backend.clone());
    let paths: Vec<_> = (0..setup.files).map(|i| dir.path().join(format!("file-{i}"))).collect();
    let groups: Vec<Groups> = paths.iter().map(|_| Groups::new(bytes)).collect();
    let open = |which: usize| engine.open(&paths[which], &options).unwrap();
    let in_memory = matches!(setup.backend, BackendChoice::Memory | BackendChoice::Sim(_));
    let mut kept: Vec<File> = Vec::new();
    for (which, groups) in groups.iter().enumerate() {
        let file = open(which);
        groups.write_all(&file);
        kept.push(file);
    }
    if !in_memory && random.chance(500) {
        kept.clear();
    }
    let end = Instant::now() + time;
    let counts: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..7u64)
            .map(|thread| {
                let mut random = random.fork();
                let (open, groups, engine) = (&open, &groups, &engine);
                scope.spawn(move || {
                    let mut which = random.below(groups.len() as u64) as usize;
                    let mut file = open(which);
                    let mut count = 0;
                    while Instant::now() < end {
                        count += 1;
                        if random.chance(10) {
                            which = random.below(groups.len() as u64) as usize;
                            file = open(which);
                        }
                        let group = random.below(GROUPS);
                        match thread {
                            0 | 1 => {
                                groups[which].write(&file, group & !1 | thread, &mut random);
                            }
                            2 => disturb(engine, &file, len, &mut random),
                            3 => groups[which].view(&file, group, &mut random),
                            _ => groups[which].read(&file, group, &mut random),
                        }
                    }
                    count
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (which, groups) in groups.iter().enumerate() {
        let file = open(which);
        file.write_back().unwrap();
        for group in 0..GROUPS {
            let ended = groups.ended[group as usize].load(SeqCst);
            let mut bytes = vec![0; bytes as usize];
            file.read_exact_at(&mut bytes, group * groups.bytes).unwrap();
            groups.check_until(group, &bytes, ended, ended);
            if !in_memory {
                let stored = std::fs::read(&paths[which]).unwrap();
                let at = (group * groups.bytes) as usize;
                assert!(stored[at..at + bytes.len()] == bytes, "the file differs");
            }
        }
    }
    println!("{}: operations {counts:?}; {:?}", setup.name, engine.stats());
}

/// Goal: reads and writes of many pages are atomic and current, beside evictions, fills,
/// read-ahead, views and opens.
/// Method: writers, readers, viewers and a disturbing thread over files of groups, on every back
/// end, with caches of a few pages up to most of a file.
#[test]
fn reads_are_atomic_and_current() {
    let mut random = Random::from_environment();
    let all = back_ends(random.next());
    let rounds = 3;
    for round in 0..rounds {
        for (name, backend) in &all {
            let page_bytes = 4096 << random.below(5);
            let backing =
                [Backing::Direct, Backing::Buffered, Backing::Mapped][random.below(3) as usize];
            let setup = Setup {
                name: format!("{name}, pages of {page_bytes}"),
                backend: backend.clone(),
                backing,
                page_bytes,
                cache_pages: [3, 12, 100][round],
                files: [1, 1, 3][round],
                write_mode: write_mode(backing, &mut random),
            };
            let time = stress_time(0.6);
            let mut random = random.fork();
            within(time + Duration::from_secs(60), "readers and writers", move || {
                readers_and_writers(&setup, &mut random, time);
            });
        }
    }
}

/// A write mode that goes with `backing`.
fn write_mode(backing: Backing, random: &mut Random) -> WriteMode {
    match backing {
        Backing::Mapped => WriteMode::Through,
        _ => [WriteMode::Back, WriteMode::Through][random.below(2) as usize],
    }
}

const RECORD: u64 = 5000;

/// Every record of `bytes`, which begin with one, has one stamp.
fn check_records(bytes: &[u8], what: &str) {
    assert_eq!(bytes.len() as u64 % RECORD, 0, "{what}: half a record");
    for record in bytes.chunks(RECORD as usize) {
        let first = &record[..8];
        assert!(record.chunks(8).all(|word| word == first), "{what}: torn record");
    }
}

/// Goal: appends, truncations and extensions are atomic, also for readers at the end of the file.
/// Method: records are appended, one or a few at a time, and the file is truncated and extended to
/// whole records; a reader sees whole records with one stamp each, or zeros.
#[test]
fn the_end_of_the_file_moves_in_whole_records() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        for (page_bytes, cache_pages) in [(4096u64, 4), (16384, 40)] {
            let backing = [Backing::Buffered, Backing::Mapped][random.below(2) as usize];
            let setup = Setup {
                name: format!("{name}, pages of {page_bytes}, {backing:?}"),
                backend: backend.clone(),
                backing,
                page_bytes,
                cache_pages,
                files: 1,
                write_mode: write_mode(backing, &mut random),
            };
            let time = stress_time(0.5);
            let mut random = random.fork();
            within(time + Duration::from_secs(60), name, move || {
                records(&setup, &mut random, time);
            });
        }
    }
}

fn records(setup: &Setup, random: &mut Random, time: Duration) {
    let Setup { name, backend, page_bytes, cache_pages, write_mode, .. } = setup;
    let dir = temp_dir();
    let engine = engine(cache_for(*cache_pages, *page_bytes), backend.clone());
    let options = read_write().page_bytes(*page_bytes as u32).write_mode(*write_mode);
    let file = engine.open(dir.path().join("file"), &options).unwrap();
    let end = Instant::now() + time;
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let (file, engine) = (&file, &engine);
            let mut random = random.fork();
            scope.spawn(move || {
                let mut stamp = thread << 40;
                while Instant::now() < end {
                    match thread {
                        0 | 1 => {
                            let mut src = Vec::new();
                            for _ in 0..1 + random.below(4) {
                                stamp += 1;
                                let words = RECORD as usize / 8;
                                src.extend(stamp.to_ne_bytes().repeat(words));
                            }
                            let at = file.append(&src).unwrap();
                            assert_eq!(at % RECORD, 0);
                        }
                        2 => {
                            let records = file.len().unwrap() / RECORD;
                            let to = if random.chance(300) {
                                records + random.below(4)
                            } else {
                                records - random.below(records.min(20) + 1)
                            };
                            file.truncate(to.min(60) * RECORD).unwrap();
                        }
                        3 => {
                            let len = file.len().unwrap().max(RECORD);
                            disturb(engine, file, len, &mut random);
                        }
                        _ => read_records(file, &mut random),
                    }
                }
            });
        }
    });
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    check_records(&bytes, "in the end");
    println!("{name}: {:?}", engine.stats());
}

fn read_records(file: &File, random: &mut Random) {
    let last = file.len().unwrap() / RECORD;
    let from = last.saturating_sub(random.below(6)) * RECORD;
    if random.chance(250) {
        match file.view(from, RECORD as usize) {
            Ok(view) => {
                let words = view.len() / 8 * 8;
                let first = &view[..8.min(words)];
                assert!(view[..words].chunks(8).all(|word| word == first), "torn view");
            }
            Err(Error::NoBuffers { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        return;
    }
    let mut bytes = vec![0; (RECORD * (1 + random.below(5))) as usize];
    let moved = file.read_at(&mut bytes, from).unwrap();
    check_records(&bytes[..moved], "read");
}

/// Goal: a view at an offset that a truncation removes shows nothing, or the earlier bytes.
/// Method: one page, whose length jumps to both sides of the offset; hints evict it continuously.
/// Incident: the length was not checked again after the page had been filled for the view.
#[test]
fn views_race_with_truncation_in_the_same_page() {
    for (name, backend) in back_ends(7) {
        let dir = temp_dir();
        let engine = engine(1 << 20, backend);
        let file = engine.open(dir.path().join("file"), &read_write()).unwrap();
        file.write_all_at(&[7; 100], 0).unwrap();
        let end = Instant::now() + stress_time(0.4);
        std::thread::scope(|scope| {
            let file = &file;
            scope.spawn(move || {
                while Instant::now() < end {
                    file.truncate(4096).unwrap();
                    file.advise(0, 0, Advice::DontNeed).unwrap();
                    file.truncate(100).unwrap();
                    file.advise(0, 0, Advice::DontNeed).unwrap();
                }
            });
            for _ in 0..3 {
                scope.spawn(move || {
                    while Instant::now() < end {
                        let view = file.view(2000, 50).unwrap();
                        assert!(matches!(view.len(), 0 | 50), "{name}: {}", view.len());
                        assert!(view.iter().all(|&byte| byte == 0));
                    }
                });
            }
        });
    }
}

/// Goal: with a device that fails at random, a read returns the correct bytes or the error, also if
/// it waited for another thread's fill or for read-ahead. After the errors all bytes are there.
/// Method: a file that does not change, a tiny cache, readers in sequence and at random.
#[test]
fn failing_fills_fail_only_readers_of_the_page() {
    let mut random = Random::from_environment();
    let sim =
        SimOptions::new(random.next()).delay_us_max(50).short_per_mille(100).error_per_mille(100);
    let errors = sim.errors_switch();
    errors.store(false, SeqCst);
    let dir = temp_dir();
    let engine = engine(cache_for(12, 4096), BackendChoice::Sim(sim));
    let file = engine.open(dir.path().join("file"), &read_write()).unwrap();
    let groups = Groups::new(4096 * 3 + 8);
    groups.write_all(&file);
    errors.store(true, SeqCst);
    let end = Instant::now() + stress_time(1.0);
    let total = |bytes: &AtomicU64| bytes.load(SeqCst);
    let (read, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..5u64 {
            let mut random = random.fork();
            let (file, groups, read, failed) = (&file, &groups, &read, &failed);
            scope.spawn(move || {
                let mut group = thread;
                while Instant::now() < end {
                    group = if thread < 2 { (group + 1) % GROUPS } else { random.below(GROUPS) };
                    let mut bytes = vec![0; groups.bytes as usize];
                    match file.read_at(&mut bytes, group * groups.bytes) {
                        Ok(moved) => {
                            // Or the part before a page that can't be read.
                            assert!((1..=bytes.len()).contains(&moved));
                            if moved == bytes.len() {
                                groups.check(group, &bytes, 1);
                                read.fetch_add(1, SeqCst);
                            } else {
                                failed.fetch_add(1, SeqCst);
                            }
                        }
                        Err(error) => {
                            assert_eq!(error.errno(), libc::EIO, "{error}");
                            failed.fetch_add(1, SeqCst);
                        }
                    }
                }
            });
        }
    });
    println!("{} reads, {} failed; {:?}", total(&read), total(&failed), engine.stats());
    assert!(total(&read) > 0 && total(&failed) > 0);
    errors.store(false, SeqCst);
    for group in 0..GROUPS {
        let mut bytes = vec![0; groups.bytes as usize];
        file.read_exact_at(&mut bytes, group * groups.bytes).unwrap();
        groups.check(group, &bytes, 1);
    }
}

/// Goal: leaves and inner nodes of the page table may be recycled at any moment: a reader sees its
/// own file's pages, and the memory of the tables is reused.
/// Method: sparse files, in which each page has its own leaf, through a cache of a few pages; at
/// the end one page of each can be cached repeatedly.
#[test]
fn tables_of_sparse_files_are_recycled() {
    const STEP: u64 = 512 * 4096;
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        if matches!(name, "memory" | "sim") {
            continue;
        }
        let dir = temp_dir();
        let engine = engine(160 << 10, backend);
        let paths = [dir.path().join("one"), dir.path().join("two")];
        let files = paths.each_ref().map(|path| engine.open(path, &read_write()).unwrap());
        // Up to three levels.
        let places: Vec<u64> =
            (0..48).map(|i| i * STEP + if i % 5 == 0 { i * 600 * STEP } else { 0 }).collect();
        for (number, file) in files.iter().enumerate() {
            for &at in &places {
                file.write_all_at(&(at | number as u64).to_ne_bytes(), at).unwrap();
            }
        }
        let end = Instant::now() + stress_time(1.0);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                let mut random = random.fork();
                let (files, places) = (&files, &places);
                scope.spawn(move || {
                    while Instant::now() < end {
                        let number = random.below(2);
                        let file = &files[number as usize];
                        let at = places[random.below(places.len() as u64) as usize];
                        let expected = at | number;
                        let mut bytes = [0; 8];
                        match random.below(20) {
                            0 => file.advise(at, 4096, Advice::DontNeed).unwrap(),
                            1 => file.invalidate(at, 4096).unwrap(),
                            2 => file.write_all_at(&expected.to_ne_bytes(), at).unwrap(),
                            3 => match file.view(at, 8) {
                                Ok(view) => assert_eq!(view[..], expected.to_ne_bytes()),
                                Err(Error::NoBuffers { .. }) => {}
                                Err(error) => panic!("{error}"),
                            },
                            _ => {
                                assert_eq!(file.read_at(&mut bytes, at).unwrap(), 8);
                                assert_eq!(u64::from_ne_bytes(bytes), expected, "{name}");
                            }
                        }
                    }
                });
            }
        });
        println!("{name}: {:?}", engine.stats());
        for file in &files {
            file.advise(0, 0, Advice::DontNeed).unwrap();
        }
        // All but a few pages of the limit are free for pages that share a leaf.
        let dense = engine.open(dir.path().join("dense"), &read_write()).unwrap();
        dense.advise(0, 0, Advice::Random).unwrap();
        let pages = 24u64;
        dense.write_all_at(&vec![1; pages as usize * 4096], 0).unwrap();
        let mut bytes = [0; 8];
        for _ in 0..3 {
            for page in 0..pages {
                dense.read_at(&mut bytes, page * 4096).unwrap();
            }
        }
        let before = engine.stats();
        for page in 0..pages {
            dense.read_at(&mut bytes, page * 4096).unwrap();
        }
        let hits = engine.stats().hits - before.hits;
        assert_eq!(hits, pages, "{name}: memory of tables was lost: {before:?}");
    }
}
