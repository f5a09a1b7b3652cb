//! Engines in a hostile environment: no memory, descriptors or threads are available, or so many
//! files are open that their tables fill the cache.

mod common;

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use millpond::{BackendChoice, Engine, WriteMode};

use common::{
    Random, back_ends, builder, has_uring, in_own_process, read_write, same, scaled, set_limit,
    status_field, temp_dir, within,
};

/// Goal: a hundred thousand files of a few bytes have the written contents, even if the cache holds
/// only few of them, and nothing of them stays in it.
/// Method: they are created, closed, opened again and read by the engine and by std.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn a_hundred_thousand_tiny_files() {
    const SUBS: u32 = 256;
    let files = scaled(100_000);
    within(Duration::from_secs(400), "tiny files", move || {
        let (dir, started) = (temp_dir(), Instant::now());
        for sub in 0..SUBS {
            std::fs::create_dir(dir.path().join(sub.to_string())).unwrap();
        }
        let path = |number: u32| dir.path().join(format!("{}/{number}", number % SUBS));
        let content = |number: u32| format!("{number}").repeat(number as usize % 9).into_bytes();
        let engine = builder(1 << 20, BackendChoice::Auto).build().unwrap();
        let back = read_write().write_mode(WriteMode::Back);
        for number in 0..files {
            let options = if number % 2 == 0 { &back } else { &read_write() };
            let file = engine.open(path(number), options).unwrap();
            file.write_all_at(&content(number), 0).unwrap();
            file.close().unwrap();
        }
        for number in 0..files {
            let file = engine.open(path(number), &read_write()).unwrap();
            let mut bytes = [0; 64];
            let moved = file.read_at(&mut bytes, 0).unwrap();
            same(&bytes[..moved], &content(number), "by the engine");
            same(&std::fs::read(path(number)).unwrap(), &content(number), "by std");
        }
        let stats = engine.stats();
        assert!(stats.memory_bytes <= engine.cache_bytes(), "{stats:?}");
        println!("{files} files: {:.1?}", started.elapsed());
    });
}

/// Goal: at the limit of its address space a process builds an engine or gets an error. An engine
/// that exists keeps serving, and returns an error for an operation that it can't do. No bytes are
/// lost.
/// Method: RLIMIT_AS a little above the present use, in a child process; operations of all kinds,
/// with threads and rings that can't be created.
#[test]
fn no_more_address_space() {
    in_own_process("no_more_address_space", Duration::from_secs(120), || {
        let dir = temp_dir();
        let content: Vec<u8> = (0..1u32 << 20).map(|at| (at / 7) as u8).collect();
        let mut engines = Vec::new();
        for (name, backend) in back_ends(1) {
            let path = dir.path().join(name);
            let engine = builder(256 << 10, backend.clone()).build().unwrap();
            let options = read_write().write_mode(WriteMode::Back);
            let file = engine.open(&path, &options).unwrap();
            engines.push((name, engine, file, path));
        }
        let in_use = status_field("/proc/self/status".as_ref(), "VmSize").unwrap() * 1024;
        assert!(set_limit(libc::RLIMIT_AS, in_use + (1 << 20), libc::RLIM_INFINITY));
        let (mut built, mut refused) = (0, 0);
        for mib in [1u64, 64, 1024] {
            match Engine::builder().cache_bytes(mib << 20).build() {
                Ok(_) => built += 1,
                Err(error) => {
                    assert!(matches!(error.errno(), libc::ENOMEM | libc::EAGAIN), "{error}");
                    refused += 1;
                }
            }
        }
        let mut failed = 0;
        for (name, engine, file, path) in &engines {
            for piece in (0..content.len()).step_by(40_000) {
                let end = (piece + 40_000).min(content.len());
                let mut at = piece;
                for _ in 0..1000 {
                    match file.write_at(&content[at..end], at as u64) {
                        Ok(moved) => at += moved,
                        Err(error) => {
                            assert!(
                                matches!(error.errno(), libc::ENOMEM | libc::EAGAIN),
                                "{name}: {error}"
                            );
                            failed += 1;
                        }
                    }
                    if at == end {
                        break;
                    }
                }
                assert_eq!(at, end, "{name}: never written");
            }
            let mut bytes = vec![0; 10_000];
            for at in (0..content.len() - bytes.len()).step_by(50_000) {
                match file.read_at(&mut bytes, at as u64) {
                    Ok(moved) => same(&bytes[..moved], &content[at..at + moved], name),
                    Err(error) => {
                        assert!(
                            matches!(error.errno(), libc::ENOMEM | libc::EAGAIN),
                            "{name}: {error}"
                        );
                        failed += 1;
                    }
                }
            }
            let opened = engine.open(path.with_extension("other"), &read_write());
            failed += u32::from(opened.is_err());
        }
        assert!(set_limit(libc::RLIMIT_AS, libc::RLIM_INFINITY, libc::RLIM_INFINITY));
        println!("engines: {built} built, {refused} refused; {failed} operations failed");
        for (name, _, file, path) in engines {
            file.sync_all().unwrap();
            let mut bytes = vec![0; content.len()];
            assert_eq!(file.read_at(&mut bytes, 0).unwrap(), content.len());
            same(&bytes, &content, name);
            file.close().unwrap();
            if common::is_on_disk(name) {
                same(&std::fs::read(path).unwrap(), &content, name);
            }
        }
    });
}

/// Goal: a program that closes the engine's descriptors gets errors at most: no operation hangs or
/// returns bytes that are not the file's.
/// Method: all descriptors but the first three are closed during reads and writes of several
/// threads, in a child process.
fn close_descriptors_during_io(test: &str, backend: BackendChoice) {
    in_own_process(test, Duration::from_secs(120), || {
        let dir = temp_dir();
        let mut random = Random::from_environment();
        let content: Vec<u8> = (0..1u32 << 20).map(|at| (at / 11) as u8).collect();
        let path = dir.path().join("file");
        std::fs::write(&path, &content).unwrap();
        let engine = builder(256 << 10, backend).build().unwrap();
        let file = engine.open(&path, &read_write()).unwrap();
        let seeds: Vec<u64> = (0..3).map(|_| random.next()).collect();
        let act = |seed| {
            let (mut random, mut outcomes) = (Random(seed), [0; 2]);
            let mut bytes = vec![0; 20_000];
            for _ in 0..5000 {
                let len = 1 + random.below(20_000) as usize;
                let at = random.below((content.len() - len) as u64) as usize;
                // Each write stores the bytes that the file has already.
                let outcome = match random.chance(300) {
                    true => file.write_at(&content[at..at + len], at as u64),
                    false => file.read_at(&mut bytes[..len], at as u64).inspect(|&moved| {
                        same(&bytes[..moved], &content[at..at + moved], "read");
                    }),
                };
                outcomes[usize::from(outcome.is_err())] += 1;
            }
            outcomes
        };
        let [well, failed] = std::thread::scope(|scope| {
            let act = &act;
            let threads: Vec<_> =
                seeds.iter().map(|&seed| scope.spawn(move || act(seed))).collect();
            std::thread::sleep(Duration::from_millis(5));
            close_all();
            let ended = threads.into_iter().map(|thread| thread.join().unwrap());
            ended.fold([0; 2], |sum, one| [sum[0] + one[0], sum[1] + one[1]])
        });
        println!("{well} operations went well, {failed} failed");
        assert!(failed > 0, "nobody noticed");
        // Dropping them would close descriptors that are closed already.
        std::mem::forget((file, engine));
    });
}

#[test]
fn descriptors_closed_underneath() {
    close_descriptors_during_io("descriptors_closed_underneath", BackendChoice::Threads);
}

#[test]
fn descriptors_closed_under_a_ring() {
    if has_uring() {
        close_descriptors_during_io("descriptors_closed_under_a_ring", BackendChoice::Uring);
    }
}

/// All but standard input, output and error.
fn close_all() {
    let mut open: Vec<RawFd> = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().map_while(Result::ok) {
        open.extend(entry.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok()));
    }
    for fd in open.into_iter().filter(|&fd| fd > 2) {
        // SAFETY: the owners of these descriptors do not expect this, which is the purpose of the
        // test. Each owner only passes the number to the kernel, which checks it.
        unsafe { libc::close(fd) };
    }
}
