//! Concurrent direct and cached operations on one file.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use millpond::direct::{DirectRequest, SegmentList};
use millpond::{BackendChoice, Buffer, WriteMode};

use common::requests::each;
use common::{
    Random, back_ends_with_direct, cache_for, direct, engine, is_on_disk, read_write, run_and_stop,
    stress_time, temp_dir, within,
};

/// Fills a page with a number, which identifies its writer.
fn stamp(bytes: &mut [u8], token: u64) {
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&token.to_le_bytes());
    }
}

/// The one number that is in all of `bytes`.
fn token(bytes: &[u8]) -> Result<u64, String> {
    let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    let mut last = None;
    for (at, word) in words.enumerate() {
        if last.is_some_and(|last| last != word) {
            return Err(format!("{last:x?}, and from byte {} {word:x}", at * 8));
        }
        last = Some(word);
    }
    Ok(last.unwrap_or(0))
}

/// Goal: an operation is one step for all other operations, whichever of them bypass the cache. A
/// value that was read once is not replaced by an older one.
/// Method: areas of a few pages, each with a writer that writes increasing numbers to all of its
/// area at once (direct, cached or by a pipeline, in turn) and reads them back. Readers of both
/// kinds see one number, not lower than any number before. Another thread truncates and extends the
/// file behind the areas, punches a hole there, syncs, and drops pages. Neighbouring areas share a
/// folio of the kernel's cache.
#[test]
fn direct_and_cached_operations_are_atomic() {
    let seed = Random::from_environment().next();
    let time = stress_time(0.15);
    for (name, backend) in back_ends_with_direct(seed) {
        for mode in [WriteMode::Through, WriteMode::Back] {
            for (area, page) in
                [(4096, 4096), (12288, 4096), (300_000 / 4096 * 4096, 4096), (32768, 16384)]
            {
                let backend = backend.clone();
                within(time * 20 + Duration::from_secs(60), name, move || {
                    areas(name, backend, mode, area, page, time, seed);
                });
            }
        }
    }
}

fn areas(
    name: &'static str,
    backend: BackendChoice,
    mode: WriteMode,
    area: usize,
    page: u32,
    time: Duration,
    seed: u64,
) {
    const AREAS: usize = 3;
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![0; area * AREAS]).unwrap();
    let pages = [8, 400][seed as usize % 2].max(area as u64 / u64::from(page) * 9);
    let engine = engine(cache_for(pages, u64::from(page)), backend);
    let options = read_write().page_bytes(page).write_mode(mode);
    let cached = engine.open(&path, &options).unwrap();
    let direct = engine.open(&path, &options.direct(true)).unwrap();
    let stop = AtomicBool::new(false);
    let floors: Vec<AtomicU64> = (0..AREAS).map(|_| AtomicU64::new(0)).collect();
    let see = |number: usize, buffer: &[u8], floor: u64, what: &str| {
        let seen = token(buffer).unwrap_or_else(|error| {
            panic!("{name} {mode:?} {area}: area {number} by {what} is a mixture: {error}")
        });
        assert!(
            seen >= floor,
            "{name} {mode:?} {area}: area {number} by {what}: {seen} after {floor}"
        );
        floors[number].fetch_max(seen, SeqCst);
        seen
    };
    let read = |number: usize, buffer: &mut Buffer, way: bool| {
        let floor = floors[number].load(SeqCst);
        let (file, what) = if way { (&direct, "direct") } else { (&cached, "cached") };
        file.read_exact_at(buffer, (number * area) as u64).unwrap();
        see(number, buffer, floor, what)
    };
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for number in 0..AREAS {
            let (engine, direct, cached, stop, floors, read, rounds) =
                (&engine, &direct, &cached, &stop, &floors, &read, &rounds);
            scope.spawn(move || {
                run_and_stop(stop, || {
                    let mut random = Random(seed ^ number as u64);
                    let mut pipeline = engine.pipeline(2).unwrap();
                    let mut buffers = engine.alloc_buffers(2, area).unwrap();
                    let (mut seen, mut buffer) = (buffers.pop().unwrap(), buffers.pop());
                    let at = (number * area) as u64;
                    for next in 1.. {
                        if stop.load(SeqCst) {
                            return;
                        }
                        let mut memory = buffer.take().unwrap();
                        stamp(&mut memory, next);
                        // Areas of even number are mostly written in one way, odd ones in another.
                        match (random.below(8) + number as u64 * 4) % 8 {
                            0..4 => assert_eq!(cached.write_at(&memory, at).unwrap(), area),
                            4..6 => assert_eq!(direct.write_at(&memory, at).unwrap(), area),
                            _ => {
                                let mut list = Some(SegmentList::from_buffers(vec![memory]));
                                let mut back = Vec::new();
                                each(&mut pipeline, |done| {
                                    if let Some(done) = done {
                                        assert_eq!(done.outcome.unwrap(), area);
                                        back = done.request.into_buffers();
                                    }
                                    Some(DirectRequest::write(direct, list.take()?, at))
                                });
                                memory = back.pop().unwrap();
                            }
                        }
                        floors[number].fetch_max(next, SeqCst);
                        assert_eq!(read(number, &mut seen, next % 2 == 0), next);
                        if next % 3 == 0 {
                            cached.advise(at, area as u64, millpond::Advice::DontNeed).unwrap();
                            assert_eq!(read(number, &mut seen, false), next);
                        }
                        buffer = Some(memory);
                        rounds.fetch_add(1, SeqCst);
                    }
                });
            });
        }
        for reader in 0..2u64 {
            let (engine, stop, read) = (&engine, &stop, &read);
            scope.spawn(move || {
                run_and_stop(stop, || {
                    let mut random = Random(seed ^ reader << 8);
                    let mut buffer = engine.alloc_buffers(1, area).unwrap().pop().unwrap();
                    while !stop.load(SeqCst) {
                        read(random.below(AREAS as u64) as usize, &mut buffer, random.chance(500));
                    }
                });
            });
        }
        run_and_stop(&stop, || {
            let mut random = Random(seed);
            let end = Instant::now() + time;
            let (behind, far) = ((AREAS * area) as u64, (AREAS * area + 100_000) as u64);
            while Instant::now() < end && !stop.load(SeqCst) {
                match random.below(5) {
                    0 => cached.truncate(behind + random.below(100_000)).unwrap(),
                    1 => drop(direct.punch_hole(behind, 100_000)),
                    2 => cached.sync_data().unwrap(),
                    3 => drop(direct.append(&[7; 1000])),
                    _ => cached.truncate(far).unwrap(),
                }
                std::thread::sleep(Duration::from_micros(300));
            }
        });
    });
    println!("{name} {mode:?} {area}: {rounds:?} rounds");
    let last: Vec<u64> = floors.iter().map(|floor| floor.load(SeqCst)).collect();
    cached.close().unwrap();
    direct.close().unwrap();
    if is_on_disk(name) {
        let bytes = std::fs::read(&path).unwrap();
        for (number, &last) in last.iter().enumerate() {
            assert_eq!(token(&bytes[number * area..][..area]), Ok(last), "{name}: on the disk");
        }
    }
}

/// Goal: cached readers find directly written bytes, also if the kernel caches them in one folio
/// with neighbours that are written through its cache at the same time.
/// Method: one page is written directly in a loop, and read back through the cache. Its neighbours
/// are written through. Another thread has the kernel read the whole file again, in large pieces.
#[test]
fn neighbours_in_the_kernels_cache() {
    const PAGES: u64 = 256;
    let time = stress_time(0.4);
    for (name, backend) in back_ends_with_direct(1) {
        if !is_on_disk(name) {
            continue;
        }
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![0; PAGES as usize * 4096]).unwrap();
        let engine = engine(1 << 20, backend);
        let cached = engine.open(&path, &read_write()).unwrap();
        let direct = engine.open(&path, &direct()).unwrap();
        let stop = AtomicBool::new(false);
        let at = 37 * 4096;
        let mut rounds = 0;
        std::thread::scope(|scope| {
            for neighbour in [at - 4096, at + 4096, at + 8192] {
                let (cached, stop) = (&cached, &stop);
                scope.spawn(move || {
                    for round in 0u64.. {
                        cached.write_at(&[round as u8; 4096], neighbour).unwrap();
                        if stop.load(SeqCst) {
                            return;
                        }
                    }
                });
            }
            scope.spawn(|| {
                use std::os::fd::AsRawFd;
                let file = std::fs::File::open(&path).unwrap();
                while !stop.load(SeqCst) {
                    // SAFETY: no memory involved.
                    unsafe {
                        libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED);
                        libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_WILLNEED);
                    }
                    let _ = std::fs::read(&path).unwrap();
                }
            });
            run_and_stop(&stop, || {
                let end = Instant::now() + time;
                let mut buffer = engine.alloc_buffers(1, 4096).unwrap().pop().unwrap();
                while Instant::now() < end {
                    rounds += 1;
                    stamp(&mut buffer, rounds);
                    direct.write_at(&buffer, at).unwrap();
                    for _ in 0..3 {
                        cached.advise(at, 4096, millpond::Advice::DontNeed).unwrap();
                        cached.read_exact_at(&mut buffer, at).unwrap();
                        assert_eq!(token(&buffer), Ok(rounds), "{name}: cached");
                    }
                    direct.read_exact_at(&mut buffer, at).unwrap();
                    assert_eq!(token(&buffer), Ok(rounds), "{name}: direct");
                }
            });
        });
        println!("{name}: {rounds} rounds");
    }
}

/// Goal: a reader sees the contents of one write while the file is truncated, punched and written
/// again, up to the end of the file.
/// Method: writers of all kinds write an area at the start of the file, each write with its own
/// number. A thread truncates the file within the area, or makes all of it a hole. Readers of all
/// kinds check it.
#[test]
fn cuts_and_holes_beside_direct_operations() {
    let seed = Random::from_environment().next();
    let time = stress_time(0.3);
    for (name, backend) in back_ends_with_direct(seed) {
        for mode in [WriteMode::Through, WriteMode::Back] {
            let backend = backend.clone();
            within(time * 20 + Duration::from_secs(60), name, move || {
                cuts_and_holes(name, backend, mode, time, seed);
            });
        }
    }
}

fn cuts_and_holes(
    name: &'static str,
    backend: BackendChoice,
    mode: WriteMode,
    time: Duration,
    seed: u64,
) {
    const AREA: usize = 5 * 4096;
    let dir = temp_dir();
    let path = dir.path().join("file");
    let engine = engine(cache_for(10, 4096), backend);
    let cached = engine.open(&path, &read_write().write_mode(mode)).unwrap();
    let direct = engine.open(&path, &direct()).unwrap();
    let stop = AtomicBool::new(false);
    let next = AtomicU64::new(1);
    let rounds = AtomicU64::new(0);
    let work = |thread: u64| {
        let mut random = Random(seed ^ thread);
        let mut pipeline = engine.pipeline(3).unwrap();
        let mut memory = engine.alloc_buffers(1, AREA).unwrap().pop().unwrap();
        while !stop.load(SeqCst) {
            rounds.fetch_add(1, SeqCst);
            let mut moved = 0;
            let way = random.below(3);
            let is_write = thread < 2;
            if is_write {
                stamp(&mut memory, next.fetch_add(1, SeqCst));
            }
            match (way, is_write) {
                (0, true) => assert_eq!(cached.write_at(&memory, 0).unwrap(), AREA),
                (1, true) => assert_eq!(direct.write_at(&memory, 0).unwrap(), AREA),
                (0, false) => moved = cached.read_at(&mut memory, 0).unwrap(),
                (1, false) => moved = direct.read_at(&mut memory, 0).unwrap(),
                (_, is_write) => {
                    let list = SegmentList::from_buffer_mut(&mut memory);
                    let mut request = Some(match is_write {
                        true => DirectRequest::write(&direct, list, 0),
                        false => DirectRequest::read(&direct, list, 0),
                    });
                    each(&mut pipeline, |done| {
                        if let Some(done) = done {
                            moved = done.outcome.unwrap();
                        }
                        request.take()
                    });
                }
            }
            if !is_write && let Err(error) = token(&memory[..moved / 8 * 8]) {
                panic!("{name} {mode:?}: by way {way}, {moved} bytes: {error}");
            }
            if thread == 3 && random.chance(300) {
                match random.below(3) {
                    // No other thread truncates the file at this time.
                    0 => cached.truncate(random.below(cached.len().unwrap() / 8) * 8).unwrap(),
                    1 => drop(direct.punch_hole(0, AREA as u64)),
                    _ => cached.advise(0, AREA as u64, millpond::Advice::DontNeed).unwrap(),
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (work, stop) = (&work, &stop);
            scope.spawn(move || run_and_stop(stop, || work(thread)));
        }
        let end = Instant::now() + time;
        while Instant::now() < end && !stop.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, SeqCst);
    });
    println!("{name} {mode:?}: {rounds:?} rounds");
}
