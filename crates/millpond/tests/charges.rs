//! The memory of asynchronous operations and of threads is counted, bounded, and freed at their
//! end.
//!
//! Each test runs in a child process. `MILLPOND_TEST_SEED` replays a run, `MILLPOND_TEST_SCALE`
//! makes it longer.

mod common;

use std::future::Future;
use std::pin::Pin;
use std::sync::Barrier;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use millpond::{AsyncFile, BackendChoice, Error, WriteMode};

use common::{Random, block_on, in_own_process, read_write, rss_bytes, scaled, temp_dir};

const SLACK_BYTES: u64 = 6 << 20;

fn poll_once<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

type Write<'a> = Pin<Box<dyn Future<Output = Result<usize, Error>> + 'a>>;

/// Goal: pending writes of any number and length take no more memory than the limit, and one copy more.
/// Method: random writes of one source, all pending, polled in random order, some dropped.
/// Incident: 64 pending writes of one source of 16 MiB took 600 MiB beyond a limit of 16 MiB.
#[test]
fn pending_writes_keep_to_the_limit() {
    in_own_process("pending_writes_keep_to_the_limit", Duration::from_secs(300), || {
        let mut random = Random::from_environment();
        // A copy that is freed goes back to the system.
        // SAFETY: changes a setting of the heap.
        assert_eq!(unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10) }, 1);
        for _ in 0..scaled(2) {
            let cache_bytes = [1, 4, 16][random.below(3) as usize] << 20;
            let mode = [WriteMode::Through, WriteMode::Back][random.below(2) as usize];
            let longest = cache_bytes / [1, 8, 64][random.below(3) as usize];
            println!("cache of {cache_bytes}, {mode:?}, writes of up to {longest}");
            let dir = temp_dir();
            let path = dir.path().join("file");
            let engine = common::engine(cache_bytes, BackendChoice::Threads);
            let file = engine.open(&path, &read_write().write_mode(mode)).unwrap();
            let file = AsyncFile::from(file);
            let source: Vec<u8> = (0..longest).map(|at| (at % 251) as u8).collect();
            block_on(file.write_at(&source, 0)).unwrap();
            let base = rss_bytes();
            let mut peak = 0;
            let mut look = || {
                let stats = engine.stats();
                assert!(stats.memory_bytes <= cache_bytes, "{stats:?}");
                peak = peak.max(rss_bytes().saturating_sub(base));
            };
            // Each write has its own range, and is dropped or completed.
            let mut writes: Vec<(u64, usize, Write<'_>)> = Vec::new();
            for number in 0..64 {
                let len = 1 + random.below(longest) as usize;
                let offset = number * longest;
                let mut write: Write<'_> = match random.below(3) {
                    0 => Box::pin(file.write_at_dsync(&source[..len], offset)),
                    _ => Box::pin(file.write_at(&source[..len], offset)),
                };
                match poll_once(&mut write) {
                    Poll::Ready(outcome) => assert_eq!(outcome.unwrap(), len),
                    Poll::Pending => writes.push((offset, len, write)),
                }
                look();
            }
            let mut dropped = Vec::new();
            while !writes.is_empty() {
                let (offset, len, write) =
                    writes.swap_remove(random.below(writes.len() as u64) as usize);
                if random.chance(100) {
                    dropped.push(offset);
                } else {
                    assert_eq!(block_on(write).unwrap(), len);
                    let mut bytes = vec![0; len];
                    file.file().read_exact_at(&mut bytes, offset).unwrap();
                    assert!(bytes == source[..len]);
                }
                look();
            }
            println!("{} dropped, resident set grew by {peak}", dropped.len());
            // One copy beyond the limit, and the bytes that are read back here.
            let most = cache_bytes + 2 * longest + SLACK_BYTES;
            assert!(peak <= most, "{peak} bytes beside the source, of {most}");
            block_on(file.sync_all()).unwrap();
            // With nothing pending, copies take a 64th of the limit at most.
            assert!(engine.stats().memory_bytes <= cache_bytes);
        }
    });
}

/// Goal: a pending write that is not polled blocks no other write.
#[test]
fn a_write_that_is_not_polled_blocks_none() {
    in_own_process("a_write_that_is_not_polled_blocks_none", Duration::from_secs(60), || {
        let dir = temp_dir();
        let engine = common::engine(1 << 20, BackendChoice::Threads);
        let file = AsyncFile::from(engine.open(dir.path().join("file"), &read_write()).unwrap());
        let source = vec![7; 1 << 20];
        let mut writes: Vec<_> =
            (0..16).map(|number| Box::pin(file.write_at(&source, number << 20))).collect();
        // A worker may have ended one at once.
        writes.retain_mut(|write| poll_once(write).is_pending());
        // From the last to the first, each alone.
        while let Some(write) = writes.pop() {
            assert_eq!(block_on(write).unwrap(), source.len());
        }
        assert_eq!(file.file().len().unwrap(), 16 << 20);
    });
}

/// Goal: a thread that has read leaves only its counts when it ends.
/// Incident: each of them left 8 KiB until the engine was dropped: 26 MiB of 3,000 threads, beyond
/// a limit of 1 MiB.
#[test]
fn ended_threads_leave_their_counts_alone() {
    const THREADS: usize = 1000;
    in_own_process("ended_threads_leave_their_counts_alone", Duration::from_secs(120), || {
        let dir = temp_dir();
        let path = dir.path().join("file");
        std::fs::write(&path, [1; 4096]).unwrap();
        let engine = common::engine(1 << 20, BackendChoice::Threads);
        let file = engine.open(&path, &read_write()).unwrap();
        file.read_at(&mut [0; 8], 0).unwrap();
        let run = |reads: bool| {
            let all = Barrier::new(THREADS);
            let body = || {
                if reads {
                    assert_eq!(file.read_at(&mut [0; 8], 0).unwrap(), 8);
                }
                all.wait();
            };
            std::thread::scope(|scope| {
                let spawn = |_| {
                    let thread = std::thread::Builder::new().stack_size(64 << 10);
                    thread.spawn_scoped(scope, body).unwrap()
                };
                let threads: Vec<_> = (0..THREADS).map(spawn).collect();
                // To the end of their thread-local storage.
                threads.into_iter().for_each(|thread| thread.join().unwrap());
            });
            // The heap alone: the C library keeps the stacks of ended threads for later ones.
            // SAFETY: only reads counters of the heap.
            unsafe { libc::mallinfo2() }.uordblks
        };
        run(false);
        let (without, with) = (run(false), run(true));
        println!("heap: {without} after threads that read nothing, {with} after those that read");
        assert!(with < without + (1 << 20), "{without}, {with}");
        assert_eq!(engine.stats().hits, THREADS as u64);
    });
}
