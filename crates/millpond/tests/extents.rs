//! Holes, zeroed ranges, reserved blocks, and the search for data: compared with the file system's
//! view of the file, beside other threads, and where the file system refuses them.

mod common;
#[path = "extents/groups.rs"]
mod groups;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use millpond::sim::SimOptions;
use millpond::{Advice, BackendChoice, Backing, Error, File, Op, OpenOptions, WriteMode};

use common::{Random, back_ends, cache_for, engine, read_write, stress_time, temp_dir};

const PAGE: usize = 4096;

/// Bytes none of which is zero.
fn content(len: usize, stamp: u8) -> Vec<u8> {
    (0..len).map(|i| (i / 512 + i % 7) as u8 ^ stamp.wrapping_mul(37) | 1).collect()
}

fn read(file: &File, len: usize, offset: u64) -> Vec<u8> {
    let mut bytes = vec![0xEE; len];
    let moved = file.read_at(&mut bytes, offset).unwrap();
    bytes.truncate(moved);
    bytes
}

/// In the system's default temporary directory, as a program would use it, not in the build's.
fn ordinary_dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// The ways to clear a range.
#[derive(Clone, Copy, Debug)]
enum Clear {
    Punch,
    Zero,
}

impl Clear {
    fn apply(self, file: &File, offset: u64, len: u64) -> millpond::Result<()> {
        match self {
            Clear::Punch => file.punch_hole(offset, len),
            Clear::Zero => file.zero_range(offset, len),
        }
    }
}

/// Goal: after any extent operation the engine's bytes and length agree with the kernel's.
/// Method: random operations on /tmp. After each, the bytes of a handle, cached and not, are
/// compared with those that std::fs reads; where writes wait in the cache, after occasional syncs.
#[test]
fn the_kernel_agrees_after_each_operation() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(1) {
        if matches!(name, "memory" | "sim") {
            continue;
        }
        for (backing, mode) in [
            (Backing::Buffered, WriteMode::Through),
            (Backing::Mapped, WriteMode::Through),
            (Backing::Direct, WriteMode::Through),
            (Backing::Buffered, WriteMode::Back),
            (Backing::Direct, WriteMode::Back),
            (Backing::DirectInPlace, WriteMode::Back),
        ] {
            let dir = ordinary_dir();
            let path = dir.path().join("file");
            let engine = engine(cache_for(20, 4096), backend.clone());
            let options = read_write().backing(backing).write_mode(mode);
            let file = match engine.open(&path, &options) {
                Ok(file) => file,
                Err(error) => {
                    common::skip(format_args!("{name}, {backing:?}: {error}"));
                    continue;
                }
            };
            let mut expected: Vec<u8> = Vec::new();
            for step in 0..common::scaled(150) {
                let at = random.below(30 * PAGE as u64) as usize;
                let len_max = if random.chance(500) { 9000 } else { 80_000 };
                let len = 1 + random.below(len_max) as usize;
                let end = (at + len).min(expected.len()).max(at.min(expected.len()));
                match random.below(6) {
                    0 | 1 => {
                        let src = content(len, step as u8);
                        file.write_all_at(&src, at as u64).unwrap();
                        expected.resize(expected.len().max(at + len), 0);
                        expected[at..at + len].copy_from_slice(&src);
                    }
                    2 | 3 => {
                        let clear = if random.chance(500) { Clear::Punch } else { Clear::Zero };
                        clear.apply(&file, at as u64, len as u64).unwrap();
                        let at = at.min(expected.len());
                        expected[at..end].fill(0);
                    }
                    4 => {
                        file.allocate(at as u64, len as u64).unwrap();
                        expected.resize(expected.len().max(at + len), 0);
                    }
                    _ => {
                        file.truncate(at as u64).unwrap();
                        expected.resize(at, 0);
                    }
                }
                assert_eq!(file.len().unwrap(), expected.len() as u64, "{name}: step {step}");
                assert!(read(&file, 120_000, 0) == expected[..expected.len().min(120_000)]);
                if mode == WriteMode::Back && random.chance(600) {
                    continue;
                }
                file.sync_all().unwrap();
                assert!(std::fs::read(&path).unwrap() == expected, "{name}: step {step}");
            }
            // The search for data includes dirty pages that only the cache has.
            file.truncate(0).unwrap();
            file.truncate(1 << 20).unwrap();
            file.write_all_at(&content(PAGE, 1), 20 * PAGE as u64).unwrap();
            assert_eq!(file.seek_data(0).unwrap(), Some(20 * PAGE as u64), "{name}");
            assert_eq!(file.seek_hole(20 * PAGE as u64).unwrap(), Some(21 * PAGE as u64));
        }
    }
}

/// Goal: the last page is correct for every position of the end of the file in it.
/// Method: for each length modulo a page: ranges from within the page before, from within the tail
/// and from its start, that end before, at and beyond the end; then the file is extended over it.
#[test]
fn tails_of_every_length() {
    for (name, backend) in back_ends(1) {
        if name == "sim" {
            continue;
        }
        let dir = temp_dir();
        let path = dir.path().join("file");
        let engine = engine(1 << 20, backend);
        let file = engine.open(&path, &read_write()).unwrap();
        let step = if name == "memory" { 1 } else { 37 };
        for tail in (0..=PAGE).step_by(step) {
            let len = PAGE + tail;
            for (number, from) in
                [PAGE - 10, PAGE, PAGE + tail / 2, len - 1].into_iter().enumerate()
            {
                let clear = if (tail + number) % 2 == 0 { Clear::Punch } else { Clear::Zero };
                let src = content(len, tail as u8);
                let to = [len - tail / 3, len, len + 1, len + 3 * PAGE][(tail / 5 + number) % 4];
                file.truncate(0).unwrap();
                file.write_all_at(&src, 0).unwrap();
                let mut expected = src;
                if to > from {
                    clear.apply(&file, from as u64, (to - from) as u64).unwrap();
                    expected[from..to.min(len)].fill(0);
                }
                assert_eq!(file.len().unwrap(), len as u64);
                assert!(read(&file, 10 * PAGE, 0) == expected, "{name}: {from}..{to} of {len}");
                // Extended over the tail, in each possible way.
                let longer = len + 1 + tail;
                match number {
                    0 => file.allocate(from as u64, (longer - from) as u64).unwrap(),
                    1 => file.truncate(longer as u64).unwrap(),
                    2 => file.allocate(longer as u64 - 1, 1).unwrap(),
                    _ => assert_eq!(file.write_at(&[0], longer as u64 - 1).unwrap(), 1),
                }
                expected.resize(longer, 0);
                assert!(read(&file, 10 * PAGE, 0) == expected, "{name}: {len} to {longer}");
                file.invalidate(0, longer as u64).unwrap();
                assert!(read(&file, 10 * PAGE, 0) == expected, "{name}: {len}, from below");
            }
        }
    }
}

/// Goal: data and holes are found where the file system has them, up to the size, for handles of
/// each kind. No descriptor's offset moves.
#[test]
fn data_and_holes_are_found() {
    let dir = ordinary_dir();
    let path = dir.path().join("file");
    for (name, backend) in back_ends(1) {
        std::fs::write(&path, content(64 * PAGE + 100, 1)).unwrap();
        let engine = engine(1 << 20, backend);
        let options = [
            OpenOptions::new().read(true),
            OpenOptions::new().write(true),
            OpenOptions::new().append(true),
        ];
        let writer = engine.open(&path, &read_write()).unwrap();
        writer.punch_hole(16 * PAGE as u64, 16 * PAGE as u64).unwrap();
        let (len, page) = (64 * PAGE as u64 + 100, PAGE as u64);
        for options in &options {
            let file = engine.open(&path, options).unwrap();
            if matches!(name, "memory" | "sim") {
                assert_eq!(file.seek_data(5).unwrap(), Some(5), "{name}");
                assert_eq!(file.seek_hole(5).unwrap(), Some(len), "{name}");
            } else {
                assert_eq!(file.seek_hole(0).unwrap(), Some(16 * page), "{name}");
                assert_eq!(file.seek_data(16 * page + 5).unwrap(), Some(32 * page), "{name}");
                assert_eq!(file.seek_hole(20 * page + 5).unwrap(), Some(20 * page + 5), "{name}");
                assert_eq!(file.seek_hole(40 * page).unwrap(), Some(len), "{name}");
            }
            assert_eq!(file.seek_data(len - 1).unwrap(), Some(len - 1), "{name}");
            assert_eq!(file.seek_hole(len - 1).unwrap(), Some(len), "{name}");
            for beyond in [len, len + 1, 1 << 50, i64::MAX as u64] {
                assert_eq!(file.seek_data(beyond).unwrap(), None, "{name}");
                assert_eq!(file.seek_hole(beyond).unwrap(), None, "{name}");
            }
        }
        // A file that ends in a hole.
        writer.truncate(1 << 20).unwrap();
        if !matches!(name, "memory" | "sim") {
            assert_eq!(writer.seek_data(100 * page).unwrap(), None, "{name}");
            assert_eq!(writer.seek_hole(100 * page).unwrap(), Some(100 * page), "{name}");
        }
    }
    let fd: OwnedFd = std::fs::File::open(&path).unwrap().into();
    let same = fd.try_clone().unwrap();
    rustix::fs::seek(&same, rustix::fs::SeekFrom::Start(77)).unwrap();
    let engine = engine(1 << 20, BackendChoice::Threads);
    let file = engine.from_fd(fd, &OpenOptions::new().read(true)).unwrap();
    assert_eq!(file.seek_hole(3).unwrap(), Some(file.len().unwrap()));
    assert_eq!(rustix::fs::tell(&same).unwrap(), 77, "the caller's offset moved");
}

/// A file of tmpfs, which knows holes but can't zero a range.
fn tmpfs_file(len: usize) -> OwnedFd {
    use rustix::fs::MemfdFlags;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("extents", flags).unwrap();
    let bytes = content(len, 3);
    assert_eq!(rustix::io::pwrite(&fd, &bytes, 0).unwrap(), len);
    fd
}

fn kernel_bytes(fd: impl AsFd, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let moved = rustix::io::pread(fd, &mut bytes, 0).unwrap();
    bytes.truncate(moved);
    bytes
}

/// Goal: where the file system can't zero a range, zeros are written, and nothing else.
/// Method: a file of tmpfs; ranges around the 1 MiB pieces of the writes, the end, and all of it.
#[test]
fn zeros_are_written_where_zeroing_is_unsupported() {
    const LEN: usize = (5 << 20) + 1000;
    const MIB: usize = 1 << 20;
    let engine = engine(1 << 20, BackendChoice::Threads);
    let fd = tmpfs_file(LEN);
    let file = engine.from_fd(fd.try_clone().unwrap(), &read_write().create(false)).unwrap();
    let mut expected = content(LEN, 3);
    for (at, len) in [
        (10, 5),
        (5000, 4096),
        (MIB - 1, 2),
        (MIB + 1, MIB),
        (2 * MIB, MIB),
        (3 * MIB - 5, 2 * MIB + 10),
        (LEN - 10, 1000),
        (0, i64::MAX as usize),
    ] {
        file.zero_range(at as u64, len as u64).unwrap();
        expected[at..(at + len).min(LEN)].fill(0);
        assert!(kernel_bytes(&fd, LEN + 1) == expected, "{len} bytes at {at}");
        assert!(read(&file, LEN + 1, 0) == expected, "{len} bytes at {at}");
    }
}

/// Goal: a refused operation changes nothing, not even the cache, and the error names the
/// operation.
/// Method: a file that the kernel has sealed.
#[test]
fn a_refused_operation_leaves_the_cache_as_it_was() {
    use rustix::fs::SealFlags;
    const LEN: usize = 10 * PAGE + 10;
    let engine = engine(1 << 20, BackendChoice::Threads);
    let fd = tmpfs_file(LEN);
    let file = engine.from_fd(fd.try_clone().unwrap(), &read_write().create(false)).unwrap();
    assert!(read(&file, LEN, 0) == content(LEN, 3));
    rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK)
        .unwrap();
    let fills = engine.stats().fills;
    let refused = [
        (file.punch_hole(5000, 9000), Op::Punch, "punch of 9000 bytes at offset 5000"),
        (file.allocate(5000, 90_000), Op::Allocate, "allocate of 90000 bytes at offset 5000"),
        (file.truncate(5000), Op::Truncate, "truncate"),
    ];
    for (outcome, expected, words) in refused {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Io { op, .. } if op == expected), "{error}");
        assert_eq!(error.errno(), libc::EPERM);
        assert!(error.to_string().contains(words), "{error}");
    }
    assert_eq!(file.len().unwrap(), LEN as u64);
    assert!(read(&file, LEN + 1, 0) == content(LEN, 3));
    assert_eq!(engine.stats().fills, fills, "pages were dropped for nothing");
    // The range may be partly zeroed, so it is read again.
    assert_eq!(file.zero_range(5000, 9000).unwrap_err().errno(), libc::EPERM);
    assert!(read(&file, LEN + 1, 0) == content(LEN, 3));
}

/// Goal: a device that fails in the middle of an operation leaves no stale byte in the cache.
/// Method: a simulated device that fails everything after any part. Reads before and after the
/// cache is dropped return the same bytes.
#[test]
fn after_a_failure_cache_and_device_agree() {
    const LEN: usize = 20 * PAGE + 5;
    let options = SimOptions::new(7).error_per_mille(1000);
    let errors = options.errors_switch();
    errors.store(false, SeqCst);
    let dir = temp_dir();
    let path = dir.path().join("file");
    let engine = engine(1 << 20, BackendChoice::Sim(options));
    let file = engine.open(&path, &read_write()).unwrap();
    let mut random = Random(4);
    let mut partly = 0;
    for round in 0..100 {
        file.truncate(0).unwrap();
        file.write_all_at(&content(LEN, round), 0).unwrap();
        let (at, len) = (random.below(LEN as u64), 1 + random.below(50_000));
        errors.store(true, SeqCst);
        let outcome = match round % 4 {
            0 => file.punch_hole(at, len),
            1 => file.zero_range(at, len),
            2 => file.allocate(at, len),
            _ => file.seek_data(at).map(drop),
        };
        assert_eq!(outcome.unwrap_err().errno(), libc::EIO);
        errors.store(false, SeqCst);
        let before = read(&file, 200_000, 0);
        file.invalidate(0, i64::MAX as u64).unwrap();
        assert!(read(&file, 200_000, 0) == before, "round {round}");
        let old = content(LEN, round);
        for (i, &byte) in before.iter().enumerate() {
            let cleared = round % 4 < 2 && (at..at + len).contains(&(i as u64));
            assert!(byte == *old.get(i).unwrap_or(&0) || cleared && byte == 0, "byte {i}");
        }
        partly += u32::from(before != old);
    }
    assert!(partly > 20, "{partly}");
}

/// Goal: a hole that fails drops no dirty page.
/// Method: on a device that fails half of all requests, holes over whole dirty pages; the last of
/// them is written before.
#[test]
fn a_failed_hole_keeps_dirty_pages() {
    const PAGES: usize = 12;
    let options = SimOptions::new(8).error_per_mille(500);
    let errors = options.errors_switch();
    errors.store(false, SeqCst);
    let dir = temp_dir();
    let engine = engine(1 << 20, BackendChoice::Sim(options));
    let back = read_write().write_mode(WriteMode::Back);
    let file = engine.open(dir.path().join("file"), &back).unwrap();
    let mut failed = 0;
    for round in 0..60 {
        let old = content(PAGES * PAGE, round);
        file.write_all_at(&old, 0).unwrap();
        errors.store(true, SeqCst);
        let outcome = file.punch_hole(2 * PAGE as u64, 8 * PAGE as u64);
        errors.store(false, SeqCst);
        let Err(error) = outcome else { continue };
        assert_eq!(error.errno(), libc::EIO);
        failed += 1;
        let seen = read(&file, PAGES * PAGE, 0);
        assert!(seen[..9 * PAGE] == old[..9 * PAGE], "round {round}");
        assert!(seen[10 * PAGE..] == old[10 * PAGE..], "round {round}");
    }
    assert!(failed > 10, "{failed}");
}

/// Goal: the length of a range alone takes neither time nor memory.
/// Method: the largest ranges, up to the file system's end, on a file with few pages far apart.
#[test]
fn large_sparse_ranges_cost_little() {
    const PLACES: [u64; 4] = [0, 1 << 30, 1 << 40, (1 << 43) + 12_345];
    const END: u64 = PLACES[3] + 1;
    let dir = temp_dir();
    let engine = engine(1 << 20, BackendChoice::Threads);
    let file = engine.open(dir.path().join("file"), &read_write()).unwrap();
    let started = Instant::now();
    for round in 0..50 {
        for at in PLACES {
            file.write_all_at(&[1], at).unwrap();
            assert_eq!(read(&file, 1, at), [1]);
        }
        match round % 3 {
            0 => file.punch_hole(1, i64::MAX as u64 - 1).unwrap(),
            // Zeroing reserves blocks, so the range must fit on the disk.
            1 => file.zero_range(1 << 30, 1 << 20).unwrap(),
            _ => file.truncate(1).unwrap(),
        }
        if round % 3 == 0 {
            assert!(PLACES[1..].iter().all(|&at| read(&file, 1, at) == [0]));
            assert_eq!(file.len().unwrap(), END);
        }
        assert_eq!(read(&file, 1, 0), [1]);
    }
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    let stats = engine.stats();
    assert!(stats.memory_bytes <= 300 << 10, "{stats:?}");
}

/// Goal: an operation on a range does not disturb operations below that range.
/// Method: a reader of cached pages, by the slow path, while another thread continuously punches,
/// zeroes and reserves above; and the reverse.
#[test]
fn reads_below_go_on_while_holes_are_punched_above() {
    for (name, backend) in back_ends(1) {
        let dir = temp_dir();
        let engine = engine(4 << 20, backend);
        let file = engine.open(dir.path().join("file"), &read_write()).unwrap();
        file.write_all_at(&content(200 * PAGE, 9), 0).unwrap();
        let (stop, punches) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random(8);
                while !stop.load(SeqCst) {
                    let at = (100 * PAGE) as u64 + random.below(90 * PAGE as u64);
                    let len = 1 + random.below(200 * PAGE as u64);
                    match random.below(4) {
                        0 => file.allocate(at, len).unwrap(),
                        1 => file.zero_range(at, len).unwrap(),
                        2 => file.write_all_at(&[5; 20_000], at).unwrap(),
                        _ => file.punch_hole(at, len).unwrap(),
                    }
                    punches.fetch_add(1, SeqCst);
                }
            });
            let expected = content(100 * PAGE, 9);
            let mut random = Random(9);
            let end = Instant::now() + stress_time(0.3);
            let mut reads = 0;
            let is_enough = |reads| reads > 100 && punches.load(SeqCst) >= 20 || reads >= 1_000_000;
            while Instant::now() < end || !is_enough(reads) {
                engine.set_hit_path(random.chance(500));
                let at = random.below(90 * PAGE as u64) as usize;
                if random.chance(100) {
                    file.advise(at as u64, 4096, Advice::DontNeed).unwrap();
                }
                assert!(read(&file, 5000, at as u64) == expected[at..at + 5000], "{name}");
                reads += 1;
            }
            stop.store(true, SeqCst);
            println!("{name}: {reads} reads, {} changes", punches.load(SeqCst));
        });
    }
}

/// Goal: while some threads reserve ranges and others truncate and extend the file, all see one
/// length.
/// Method: two threads reserve ranges below, across and beyond the end, one truncates, one appends
/// and writes. After each burst the length is compared with the kernel's.
#[test]
fn the_length_is_the_kernels_when_reserving_meets_cutting() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(1) {
        if matches!(name, "memory" | "sim") {
            continue;
        }
        let dir = temp_dir();
        let path = dir.path().join("file");
        let engine = engine(1 << 20, backend);
        let mode = if random.chance(500) { WriteMode::Back } else { WriteMode::Through };
        let file = engine.open(&path, &read_write().write_mode(mode)).unwrap();
        for _ in 0..common::scaled(150) {
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let (file, mut random) = (&file, random.fork());
                    scope.spawn(move || {
                        for _ in 0..5 {
                            let at = random.below(10 * PAGE as u64);
                            match thread {
                                0 | 1 => file.allocate(at, 1 + random.below(20_000)).unwrap(),
                                2 => file.truncate(at).unwrap(),
                                _ if random.chance(500) => file.write_all_at(&[0; 10], at).unwrap(),
                                _ => assert!(file.append(&[0; 5000]).is_ok()),
                            }
                        }
                    });
                }
            });
            file.sync_all().unwrap();
            let (len, kernel) = (file.len().unwrap(), std::fs::metadata(&path).unwrap().len());
            assert_eq!(len, kernel, "{name}");
            assert_eq!(read(&file, 200_000, 0), vec![0; (len as usize).min(200_000)]);
        }
    }
}
