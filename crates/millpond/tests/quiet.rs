//! Work that the engine must not do: run while it is idle, and start or wake threads for a miss.
//!
//! Each test runs in a child process, so all its further threads are the engine's.

mod common;

use std::time::{Duration, Instant};

use millpond::{Advice, BackendChoice, Backing, File};

use common::threads;
use common::{Random, context_switches, engine, has_uring, in_own_process, read_write, temp_dir};

fn ours() -> Vec<(u64, String)> {
    threads().into_iter().filter(|(_, name)| name.starts_with("millpond-")).collect()
}

/// Wakes the engine's threads, by read-ahead.
fn use_the_driver(file: &File) {
    let mut bytes = vec![0; 4096];
    for page in 0..512u64 {
        file.read_at(&mut bytes, page * 4096).unwrap();
    }
    file.advise(8 << 20, 1 << 20, Advice::WillNeed).unwrap();
    let mut last = u64::MAX;
    // Waits until no I/O is in flight.
    for _ in 0..200 {
        std::thread::sleep(Duration::from_millis(20));
        let now = ours().iter().map(|(id, _)| context_switches(*id).0).sum();
        if now == last {
            return;
        }
        last = now;
    }
    panic!("the threads do not come to rest");
}

/// The threads of a dropped engine end.
fn all_end(name: &str) {
    let started = Instant::now();
    while !ours().is_empty() {
        assert!(started.elapsed() < Duration::from_secs(10), "{name}: outlive it: {:?}", ours());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn back_ends() -> Vec<(&'static str, BackendChoice)> {
    let mut all = vec![("threads", BackendChoice::Threads)];
    if has_uring() {
        all.push(("uring", BackendChoice::Uring));
    }
    all
}

/// Goal: an engine that has nothing to do takes no CPU, also after its threads were used.
/// Method: the context switches and the CPU time of its threads do not grow for 2 seconds.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn an_idle_engine_does_nothing() {
    in_own_process("an_idle_engine_does_nothing", Duration::from_secs(30), || {
        for (name, backend) in back_ends() {
            let dir = temp_dir();
            let path = dir.path().join("file");
            std::fs::write(&path, vec![1; 16 << 20]).unwrap();
            let engine = engine(64 << 20, backend);
            let file = engine.open(&path, &read_write()).unwrap();
            use_the_driver(&file);
            let threads = ours();
            assert!(!threads.is_empty(), "{name}: read-ahead used no thread");
            let activity = || -> Vec<_> {
                threads.iter().map(|(id, name)| (name.clone(), context_switches(*id))).collect()
            };
            // On a busy machine the engine may not have finished its work yet.
            let mut before = activity();
            for _ in 0..100 {
                std::thread::sleep(Duration::from_millis(100));
                let now = activity();
                if std::mem::replace(&mut before, now) == before {
                    break;
                }
            }
            std::thread::sleep(Duration::from_secs(2));
            assert_eq!(activity(), before, "{name}");
            // The engine still works, and its threads end with it.
            file.advise(12 << 20, 1 << 20, Advice::WillNeed).unwrap();
            drop(file);
            drop(engine);
            all_end(name);
        }
    });
}

/// Goal: dirty pages are written back when they are old, and then no thread runs any more.
/// Method: pages grow old, twice; then no thread of the engine runs for 2 seconds.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn an_engine_that_wrote_back_does_nothing_more() {
    const AGE: Duration = Duration::from_millis(200);
    in_own_process("an_engine_that_wrote_back_does_nothing_more", Duration::from_secs(60), || {
        for (name, backend) in back_ends() {
            let dir = temp_dir();
            let path = dir.path().join("file");
            let engine = common::builder(16 << 20, backend).dirty_age_max(AGE).build().unwrap();
            let file = engine.open(&path, &common::write_back()).unwrap();
            for stamp in [1, 2] {
                let content = vec![stamp; 100_000];
                file.write_all_at(&content, 0).unwrap();
                let started = Instant::now();
                while std::fs::read(&path).unwrap() != content {
                    assert!(started.elapsed() < AGE + Duration::from_secs(5), "{name}: dirty");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            let threads = ours();
            assert!(!threads.is_empty(), "{name}: who wrote back?");
            // Time for the last scan of the files, which finds nothing.
            std::thread::sleep(AGE * 3);
            let activity = || -> Vec<_> {
                threads.iter().map(|(id, name)| (name.clone(), context_switches(*id))).collect()
            };
            let before = activity();
            std::thread::sleep(Duration::from_secs(2));
            assert_eq!(activity(), before, "{name}");
            drop((file, engine));
        }
    });
}

/// Goal: a synchronous miss runs on the caller's thread: no thread is started or woken for it.
/// Method: random reads, of one page and of several with holes between cached ones, through caches
/// that miss; the set of threads does not change, and the engine's threads do not run.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn a_synchronous_miss_wakes_no_thread() {
    in_own_process("a_synchronous_miss_wakes_no_thread", Duration::from_secs(60), || {
        for (name, backend) in back_ends() {
            for backing in [Backing::Buffered, Backing::Direct] {
                let dir = temp_dir();
                let path = dir.path().join("file");
                std::fs::write(&path, vec![1; 16 << 20]).unwrap();
                let engine = engine(1 << 20, backend.clone());
                let options = read_write().backing(backing);
                let file = engine.open(&path, &options).unwrap();
                let before = threads().len();
                let mut random = Random(1);
                let mut read = |count: u64| {
                    let misses = engine.stats().misses;
                    let mut bytes = vec![0; 9 * 4096];
                    for _ in 0..count {
                        // Never two adjacent pages: that would be a sequence.
                        let page = 2 + random.below(2000) * 2;
                        let pages = if random.chance(200) { 9 } else { 1 };
                        let at = page * 4096;
                        assert_eq!(
                            file.read_at(&mut bytes[..pages * 4096], at).unwrap(),
                            pages * 4096
                        );
                    }
                    assert!(engine.stats().misses > misses + count / 2, "{name}: too few misses");
                };
                read(10);
                file.advise(0, 0, Advice::Random).unwrap();
                read(1000);
                assert_eq!(threads().len(), before, "{name}: {:?}", threads());
                file.advise(0, 0, Advice::Normal).unwrap();
                // With a thread that sleeps: it stays asleep.
                use_the_driver(&file);
                file.advise(0, 0, Advice::Random).unwrap();
                let driver = ours();
                assert!(!driver.is_empty());
                let switches =
                    || -> Vec<_> { driver.iter().map(|(id, _)| context_switches(*id).0).collect() };
                let (slept, count) = (switches(), threads().len());
                read(1000);
                assert_eq!(switches(), slept, "{name}: a thread was woken");
                assert_eq!(threads().len(), count, "{name}");
                drop((file, engine));
                all_end(name);
            }
        }
    });
}

/// Goal: building an engine and opening files starts no thread.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn building_and_opening_start_no_thread() {
    in_own_process("building_and_opening_start_no_thread", Duration::from_secs(20), || {
        let before = threads().len();
        for (_, backend) in back_ends() {
            let dir = temp_dir();
            let engine = engine(1 << 20, backend);
            let file = engine.open(dir.path().join("file"), &read_write()).unwrap();
            file.write_all_at(&[1; 100_000], 0).unwrap();
            file.truncate(5).unwrap();
            assert_eq!(threads().len(), before);
        }
    });
}
