//! The registry of open files: failing opens, and concurrent opens and closes.

mod common;

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use millpond::{BackendChoice, Backing, Error, OpenOptions};

use common::{Random, back_ends, engine, in_own_process, read_write, stress_time, temp_dir};

/// Goal: if an open fails after the file entered the registry, the next one works.
/// Method: direct backing opens additional descriptors; a limit allows only the first one.
/// Incident: the cached file was dropped under the registry's lock, which its drop takes.
#[test]
fn an_open_without_descriptors_fails_cleanly() {
    let name = "an_open_without_descriptors_fails_cleanly";
    in_own_process(name, Duration::from_secs(10), || {
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, "pond").unwrap();
        let engine = engine(1 << 20, BackendChoice::Threads);
        let options = read_write().backing(Backing::Direct);
        let mut spare = Vec::new();
        // Sets the limit so that exactly 0, 1, 2.. more descriptors can be had.
        for room in 0..4 {
            assert!(common::set_limit(libc::RLIMIT_NOFILE, 64, 64));
            while let Ok(file) = std::fs::File::open("/dev/null") {
                spare.push(file);
            }
            spare.truncate(spare.len() - room);
            let outcome = engine.open(&path, &options);
            if let Err(error) = &outcome {
                assert_eq!(error.errno(), libc::EMFILE, "{error}");
            } else {
                assert!(room >= 3, "opened with {room} descriptors");
            }
            drop(outcome);
            spare.clear();
            let file = engine.open(&path, &options).unwrap();
            assert_eq!(file.read_at(&mut [0; 10], 0).unwrap(), 4);
        }
    });
}

/// Goal: an open that is refused, as the file is open with another page size, never drops the last
/// reference of that file under the registry's lock.
/// Method: one thread opens and closes with one size, others with another one.
/// Incident: as above; a refused opener could hold the last reference.
#[test]
fn refused_opens_race_with_the_last_close() {
    let name = "refused_opens_race_with_the_last_close";
    in_own_process(name, stress_time(2.0) + Duration::from_secs(20), || {
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, "pond").unwrap();
        let engine = engine(1 << 20, BackendChoice::Threads);
        let end = Instant::now() + stress_time(2.0);
        std::thread::scope(|scope| {
            for page_bytes in [4096, 8192, 16384] {
                let (engine, path) = (&engine, &path);
                scope.spawn(move || {
                    let options = read_write().page_bytes(page_bytes);
                    while Instant::now() < end {
                        match engine.open(path, &options) {
                            Ok(file) => {
                                let mut bytes = [0; 8];
                                assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 4);
                                assert_eq!(&bytes[..4], b"pond");
                            }
                            Err(Error::InvalidInput { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
        });
        // Free frames of three sizes, as many as were in use at once.
        assert!(engine.stats().memory_bytes < 256 << 10, "{:?}", engine.stats());
    });
}

/// Goal: two engines that open and close the same files at the same time agree about every byte.
/// Method: each thread owns a slot in each file; it opens the file through a random engine, checks
/// the slot, writes it again and closes.
#[test]
fn handles_open_and_close_concurrently() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        // Contents in memory are lost with the last handle, so these back ends keep one open.
        let in_memory = matches!(name, "memory" | "sim");
        let dir = temp_dir();
        let engines = [engine(128 << 10, backend.clone()), engine(256 << 10, backend)];
        let paths: Vec<_> = (0..3).map(|i| dir.path().join(format!("{name}-{i}"))).collect();
        let kept: Vec<_> = paths
            .iter()
            .map(|path| {
                std::fs::write(path, vec![0; 32768]).unwrap();
                in_memory.then(|| engines[0].open(path, &read_write()).unwrap())
            })
            .collect();
        let end = Instant::now() + stress_time(0.7);
        let failed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (engines, paths, failed) = (&engines, &paths, &failed);
                let mut random = random.fork();
                scope.spawn(move || {
                    let mut versions = [0u64; 3];
                    while Instant::now() < end && !failed.load(Relaxed) {
                        let which = random.below(3) as usize;
                        let engine = &engines[random.below(2) as usize];
                        let file = engine.open(&paths[which], &read_write()).unwrap();
                        let at = thread * 8192 + 100;
                        let mut seen = [0; 8];
                        assert_eq!(file.read_at(&mut seen, at).unwrap(), 8);
                        let seen = u64::from_ne_bytes(seen);
                        if seen != versions[which] {
                            failed.store(true, Relaxed);
                            panic!("{name}: {seen}, not {}", versions[which]);
                        }
                        if random.chance(300) {
                            file.advise(0, 0, millpond::Advice::WillNeed).unwrap();
                        }
                        versions[which] += 1;
                        file.write_all_at(&versions[which].to_ne_bytes(), at).unwrap();
                        if random.chance(500) {
                            file.close().unwrap();
                        }
                    }
                });
            }
        });
        drop(kept);
    }
}

/// Goal: an open that began before the last handle was closed gets the file's length as of that
/// close.
/// Method: threads open the same file, append a record and close; at the end all records are there,
/// whole.
/// Incident: the length was read before the registry was locked, so it could be old.
#[test]
fn opens_race_with_appends_through_other_handles() {
    const RECORD: usize = 24;
    let dir = temp_dir();
    let path = dir.path().join("log");
    let engine = engine(1 << 20, BackendChoice::Threads);
    let end = Instant::now() + stress_time(1.5);
    let counts: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3u64)
            .map(|thread| {
                let (engine, path) = (&engine, &path);
                scope.spawn(move || {
                    let mut count = 0u64;
                    while Instant::now() < end {
                        let mut record = [0u8; RECORD];
                        record[..8].copy_from_slice(&thread.to_ne_bytes());
                        record[8..16].copy_from_slice(&count.to_ne_bytes());
                        let file = engine.open(path, &read_write()).unwrap();
                        assert_eq!(file.append(&record).unwrap() % RECORD as u64, 0);
                        count += 1;
                    }
                    count
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let stored = std::fs::read(&path).unwrap();
    let mut next = [0u64; 3];
    for record in stored.chunks(RECORD) {
        let number = |at: usize| u64::from_ne_bytes(record[at..at + 8].try_into().unwrap());
        let thread = number(0) as usize;
        assert_eq!(number(8), next[thread], "a record of thread {thread} was overwritten");
        next[thread] += 1;
    }
    assert_eq!(next[..], counts[..], "records at the end were overwritten");
}

/// Incident: opening a descriptor again for direct I/O may wait for another process's lease. During
/// that wait every open and close of every file of the process waited for a lock.
///
/// Goal: opens and closes of other files end during the wait; those of the same file end after it.
/// Method: a lease on the file, which the open breaks, and which is released at the end.
#[test]
fn an_open_that_blocks_holds_up_no_other_file() {
    let name = "an_open_that_blocks_holds_up_no_other_file";
    in_own_process(name, Duration::from_secs(60), || {
        let dir = temp_dir();
        let (path, other) = (dir.path().join("leased"), dir.path().join("other"));
        std::fs::write(&path, "pond").unwrap();
        std::fs::write(&other, "other").unwrap();
        let leased = std::fs::File::open(&path).unwrap();
        let lease = |kind: i32| {
            // SAFETY: no memory involved; the signal that reports the break is ignored.
            let outcome = unsafe {
                libc::signal(libc::SIGIO, libc::SIG_IGN);
                libc::fcntl(leased.as_raw_fd(), libc::F_SETLEASE, kind)
            };
            assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
        };
        let engine = engine(1 << 20, BackendChoice::Threads);
        let direct = OpenOptions::new().read(true).backing(Backing::Direct);
        lease(libc::F_WRLCK);
        std::thread::scope(|scope| {
            let open = || engine.from_fd(leased.try_clone().unwrap().into(), &direct).unwrap();
            let first = scope.spawn(open);
            // SAFETY: no memory involved.
            while unsafe { libc::fcntl(leased.as_raw_fd(), libc::F_GETLEASE) } == libc::F_WRLCK {
                std::thread::sleep(Duration::from_millis(1));
            }
            let second = scope.spawn(open);
            let (sender, receiver) = std::sync::mpsc::channel();
            let (engine, other) = (&engine, &other);
            scope.spawn(move || {
                let file = engine.open(other, &read_write()).unwrap();
                assert_eq!(file.read_at(&mut [0; 10], 0).unwrap(), 5);
                drop(file);
                sender.send(()).unwrap();
            });
            let outcome = receiver.recv_timeout(Duration::from_secs(20));
            let both_wait = !first.is_finished() && !second.is_finished();
            lease(libc::F_UNLCK);
            let (first, second) = (first.join().unwrap(), second.join().unwrap());
            outcome.expect("the other file is opened and closed during the wait");
            assert!(both_wait);
            assert_eq!(first.read_at(&mut [0; 10], 0).unwrap(), 4);
            assert_eq!(second.read_at(&mut [0; 10], 0).unwrap(), 4);
        });
    });
}
