//! Several handles, engines and threads on one cached file; truncation against fills.

mod common;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use millpond::sim::SimOptions;
use millpond::{Advice, BackendChoice, Backing, Engine, Error};

use common::{
    Random, back_ends, cache_for, engine, read_write, run_and_stop, stress_time, temp_dir, within,
    write_back,
};

/// Goal: two engines and several handles of one file are coherent: each reads the writes of all.
/// Method: writes, appends and truncations through each in turn, read through all others.
#[test]
fn engines_and_handles_share_one_file() {
    for (name, backend) in back_ends(1) {
        let dir = temp_dir();
        let path = dir.path().join("file");
        let engines = [engine(1 << 20, backend.clone()), engine(64 << 10, backend)];
        let open = |number: usize| engines[number % 2].open(&path, &read_write()).unwrap();
        let files: Vec<_> = (0..4).map(open).collect();
        let link = dir.path().join("link");
        std::fs::hard_link(&path, &link).unwrap();
        let other_name = engines[1].open(&link, &read_write()).unwrap();
        let mut expected: Vec<u8> = Vec::new();
        let mut random = Random(5);
        for step in 0..200u64 {
            let file = &files[random.below(4) as usize];
            let at = random.below(30_000) as usize;
            let src = vec![step as u8 + 1; 1 + random.below(9000) as usize];
            match random.below(4) {
                0 => {
                    assert_eq!(file.append(&src).unwrap(), expected.len() as u64);
                    expected.extend(&src);
                }
                1 => {
                    file.truncate(at as u64).unwrap();
                    expected.resize(at, 0);
                }
                _ => {
                    file.write_all_at(&src, at as u64).unwrap();
                    expected.resize(expected.len().max(at + src.len()), 0);
                    expected[at..at + src.len()].copy_from_slice(&src);
                }
            }
            for file in files.iter().chain([&other_name]) {
                assert_eq!(file.len().unwrap(), expected.len() as u64, "{name}");
                let from = random.below(30_000) as usize;
                let mut bytes = vec![0; 10_000];
                let moved = file.read_at(&mut bytes, from as u64).unwrap();
                let end = expected.len().min(from + 10_000);
                assert!(bytes[..moved] == expected[from.min(end)..end], "{name}: step {step}");
            }
        }
    }
}

/// Goal: the first opener's engine owns the file; it stays usable when that engine's handle is gone.
#[test]
fn a_file_outlives_the_engine_that_opened_it() {
    for (name, backend) in back_ends(1) {
        let dir = temp_dir();
        let path = dir.path().join("file");
        let first = engine(1 << 20, backend.clone());
        let second = engine(1 << 20, backend);
        let one = first.open(&path, &read_write()).unwrap();
        one.write_all_at(b"pond", 0).unwrap();
        let two = second.open(&path, &read_write()).unwrap();
        one.advise(0, 0, Advice::WillNeed).unwrap();
        drop(one);
        drop(first);
        let mut bytes = [0; 4];
        assert_eq!(two.read_at(&mut bytes, 0).unwrap(), 4, "{name}");
        assert_eq!(&bytes, b"pond");
        two.write_all_at(&vec![1; 3 << 20], 0).unwrap();
        assert_eq!(second.stats().hits, 0, "{name}: the pages are the first engine's");
        drop(two);
        drop(second);
    }
}

/// Goal: after a truncation and an extension no earlier byte comes back, also if fills and
/// read-ahead were under way (W3).
/// Method: a slow device; readers and read-ahead through other handles, continuously. One thread
/// truncates the file, extends it, and reads zeros, in a loop.
#[test]
fn truncated_bytes_never_come_back() {
    const LEN: usize = 300_000;
    let slow = SimOptions::new(11).delay_us_max(300).short_per_mille(50);
    let mut all = vec![
        ("sim", BackendChoice::Sim(slow), Backing::Buffered),
        ("threads", BackendChoice::Threads, Backing::Buffered),
        ("threads, mapped", BackendChoice::Threads, Backing::Mapped),
        ("threads, direct", BackendChoice::Threads, Backing::Direct),
        ("threads, direct in place", BackendChoice::Threads, Backing::DirectInPlace),
    ];
    if common::has_uring() {
        all.push(("uring", BackendChoice::Uring, Backing::Buffered));
        all.push(("uring, mapped", BackendChoice::Uring, Backing::Mapped));
        all.push(("uring, direct", BackendChoice::Uring, Backing::Direct));
    }
    for (name, backend, backing) in all {
        for cache_pages in [8, 200] {
            let backend = backend.clone();
            let time = stress_time(0.5);
            within(time + Duration::from_secs(60), name, move || {
                truncate_against_fills(name, backend, backing, cache_pages, time);
            });
        }
    }

    fn truncate_against_fills(
        name: &str,
        backend: BackendChoice,
        backing: Backing,
        cache_pages: u64,
        time: Duration,
    ) {
        let dir = temp_dir();
        let path = dir.path().join("file");
        let options = read_write().backing(backing);
        let engine = engine(cache_for(cache_pages, 4096), backend);
        let file = engine.open(&path, &options).unwrap();
        let stop = AtomicBool::new(false);
        let mut rounds = 0;
        std::thread::scope(|scope| {
            for reader in 0..4u64 {
                let (path, options, stop, engine) = (&path, &options, &stop, &engine);
                scope.spawn(move || {
                    let file = engine.open(path, options).unwrap();
                    let mut random = Random(reader);
                    if reader == 0 {
                        file.advise(0, 0, Advice::Sequential).unwrap();
                    }
                    let mut bytes = vec![0; 20_000];
                    while !stop.load(SeqCst) {
                        let at = random.below(LEN as u64);
                        match reader {
                            0 => {
                                for step in 0..20 {
                                    file.read_at(&mut bytes[..4096], step * 4096).unwrap();
                                }
                            }
                            1 => {
                                file.advise(at, 65536, Advice::WillNeed).unwrap();
                                file.advise(at / 2, 65536, Advice::DontNeed).unwrap();
                            }
                            2 => match file.view(at, 4096) {
                                Ok(view) => drop(view.to_vec()),
                                Err(error) => {
                                    assert!(matches!(error, Error::NoBuffers { .. }), "{error}");
                                }
                            },
                            _ => {
                                let len = random.below(20_000) as usize;
                                file.read_at(&mut bytes[..len], at).unwrap();
                            }
                        }
                    }
                });
            }
            run_and_stop(&stop, || {
                let mut random = Random(99);
                let mut bytes = vec![0; LEN];
                let end = Instant::now() + time;
                while Instant::now() < end {
                    rounds += 1;
                    let cut = random.below(LEN as u64) as usize;
                    file.write_all_at(&vec![0xAA; LEN], 0).unwrap();
                    file.truncate(cut as u64).unwrap();
                    if random.chance(500) {
                        file.truncate(LEN as u64).unwrap();
                    } else {
                        file.write_all_at(&[0], LEN as u64 - 1).unwrap();
                    }
                    for _ in 0..2 {
                        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), LEN);
                        assert!(bytes[..cut].iter().all(|&byte| byte == 0xAA), "{name}: lost");
                        let back = bytes[cut..].iter().position(|&byte| byte != 0);
                        assert_eq!(back, None, "{name}: a byte of before came back");
                    }
                }
            });
        });
        println!("{name}: {rounds} rounds; {:?}", engine.stats());
    }
}

/// Goal: many threads that miss the same page cause one fill (W9).
/// Method: a slow device; all threads read the same pages at once.
#[test]
fn concurrent_misses_of_a_page_are_one_fill() {
    let sim = SimOptions::new(3).delay_us_max(3000);
    let engine: Engine = engine(4 << 20, BackendChoice::Sim(sim));
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![7; 64 * 4096]).unwrap();
    let file = engine.open(&path, &read_write()).unwrap();
    file.advise(0, 0, Advice::Random).unwrap();
    let barrier = std::sync::Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut bytes = [0; 4096];
                for page in (0..64).rev() {
                    barrier.wait();
                    assert_eq!(file.read_at(&mut bytes, page * 4096).unwrap(), 4096);
                    assert_eq!(bytes, [7; 4096]);
                }
            });
        }
    });
    assert_eq!(engine.stats().fills, 64);
}

/// Goal: a hit does not wait for guards over other parts of the file, nor for a slow write to other
/// pages. A query of the length never waits.
/// Method: a device with slow writes; hits and length queries during a write.
#[test]
fn hits_do_not_wait_for_the_device() {
    let sim = SimOptions::new(3).delay_us_max(200_000);
    let engine = engine(4 << 20, BackendChoice::Sim(sim));
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![7; 4 * 4096]).unwrap();
    let file = engine.open(&path, &read_write()).unwrap();
    let mut bytes = [0; 4096];
    file.read_at(&mut bytes, 0).unwrap();
    let writing = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..5 {
                file.write_all_at(&[8; 4096], 0).unwrap();
            }
            writing.store(false, SeqCst);
        });
        let mut hits = 0;
        while writing.load(SeqCst) {
            // SAFETY: `bytes` is valid for writes of its length.
            let hit = unsafe { file.raw().try_read_hit(bytes.as_mut_ptr(), 4096, 0) };
            assert_eq!(hit, Some(4096), "a page under a write has its old bytes until the end");
            assert!(bytes == [7; 4096] || bytes == [8; 4096]);
            assert_eq!(file.len().unwrap(), 4 * 4096);
            hits += 1;
        }
        assert!(hits > 1000, "{hits}");
    });
}

/// Goal: an `end_through` without a begin leaves later begins alone.
/// Incident: after one call of `end_through` too many, the count wrapped, and the next `begin_through` left writes in
/// the cache, where other programs did not see them.
#[test]
fn ends_without_a_begin_have_no_effect() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let engine = engine(1 << 20, BackendChoice::Threads);
    let options = write_back().backing(Backing::DirectInPlace);
    let file = engine.open(&path, &options).unwrap();
    let is_below = |value: u8| {
        file.write_all_at(&[value; 4096], 0).unwrap();
        std::fs::read(&path).unwrap().first() == Some(&value)
    };
    file.end_through();
    assert!(!is_below(1), "writes wait");
    file.begin_through().unwrap();
    assert!(is_below(2), "writes go through");
    // The begin above still counts.
    file.begin_through().unwrap();
    file.end_through();
    assert!(is_below(3), "one begin is left");
    file.end_through();
    file.end_through();
    assert!(!is_below(4), "writes wait again");
    file.sync_all().unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), [4; 4096]);
}
