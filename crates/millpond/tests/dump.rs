//! Goal: the dump shows each waiting thread and task: the resource, the range, and the time since
//! it waits. A long wait is reported once.

mod common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use millpond::sim::SimOptions;
use millpond::stats::{Dump, WaitFor, Waiting};
use millpond::{AsyncFile, Engine};

use common::{Simulated, read_write, within, write_back};

const PAGE: usize = 4096;
const LIMIT: Duration = Duration::from_secs(30);

/// The first dump that has all of `wanted`.
fn await_waits(engine: &Engine, wanted: &[WaitFor]) -> Dump {
    let started = Instant::now();
    loop {
        let dump = engine.dump();
        let has = |what: &WaitFor| dump.waiting.iter().any(|waiting| waiting.what == *what);
        if wanted.iter().all(has) {
            return dump;
        }
        assert!(started.elapsed() < LIMIT, "no {wanted:?} in {dump}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn one(dump: &Dump, what: WaitFor) -> &Waiting {
    let found: Vec<_> = dump.waiting.iter().filter(|waiting| waiting.what == what).collect();
    assert_eq!(found.len(), 1, "{what:?} in {dump}");
    found[0]
}

#[test]
fn threads_that_wait_are_shown() {
    within(LIMIT * 2, "a dump", || {
        let sim = Simulated::new(SimOptions::new(1), 4 << 20, &read_write());
        assert!(sim.engine.dump().waiting.is_empty());
        sim.file.write_all_at(&[1; 4 * PAGE], 0).unwrap();
        sim.device.block_writes(true);
        std::thread::scope(|scope| {
            scope.spawn(|| sim.file.write_all_at(&[2; PAGE], PAGE as u64).unwrap());
            assert!(sim.device.wait_for_blocked_write(LIMIT));
            // Overlaps, and so waits for the other's range.
            scope.spawn(|| sim.file.write_all_at(&[3; 100], PAGE as u64 + 50).unwrap());
            let dump = await_waits(&sim.engine, &[WaitFor::Write, WaitFor::Range]);
            let write = one(&dump, WaitFor::Write);
            assert_eq!((write.offset, write.len), (PAGE as u64, PAGE as u64));
            let range = one(&dump, WaitFor::Range);
            assert!(range.offset <= PAGE as u64 + 50 && range.thread != write.thread, "{dump}");
            assert_eq!((write.device, write.inode), (range.device, range.inode));
            let text = dump.to_string();
            assert!(text.contains("a write by the kernel") && text.contains("4096 bytes at 4096"));
            std::thread::sleep(Duration::from_millis(50));
            let later = sim.engine.dump();
            assert!(one(&later, WaitFor::Write).since >= Duration::from_millis(30), "{later}");
            sim.device.block_writes(false);
        });
        sim.device.hold_next_sync();
        std::thread::scope(|scope| {
            scope.spawn(|| sim.file.sync_all().unwrap());
            let dump = await_waits(&sim.engine, &[WaitFor::Sync]);
            assert_eq!(one(&dump, WaitFor::Sync).len, u64::MAX);
            sim.device.release_sync();
        });
        assert!(sim.engine.dump().waiting.is_empty(), "{}", sim.engine.dump());
    });
}

#[test]
fn tasks_that_wait_are_shown() {
    within(LIMIT * 2, "a dump of tasks", || {
        let sim = Simulated::new(SimOptions::new(1), 4 << 20, &read_write());
        sim.file.write_all_at(&[1; 4 * PAGE], 0).unwrap();
        sim.file.invalidate(0, 4 * PAGE as u64).unwrap();
        sim.device.block_writes(true);
        let file = AsyncFile::from(sim.engine.open(&sim.path, &read_write()).unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| sim.file.write_all_at(&[2; PAGE], 0).unwrap());
            assert!(sim.device.wait_for_blocked_write(LIMIT));
            runtime.block_on(async {
                let mut bytes = vec![0; 2 * PAGE];
                {
                    let mut read = std::pin::pin!(file.read_at(&mut bytes, 100));
                    let pending = std::future::poll_fn(|context| {
                        std::task::Poll::Ready(read.as_mut().poll(context).is_pending())
                    });
                    assert!(pending.await);
                    let dump = sim.engine.dump();
                    let range = one(&dump, WaitFor::Range);
                    assert_eq!((range.offset, range.len), (100, 2 * PAGE as u64), "{dump}");
                    assert_eq!(range.thread, None);
                }
                // It was dropped.
                let dump = sim.engine.dump();
                assert!(dump.waiting.iter().all(|waiting| waiting.what == WaitFor::Write));
            });
            sim.device.block_writes(false);
        });
    });
}

#[test]
fn long_waits_are_reported_once() {
    within(LIMIT * 2, "a watched engine", || {
        let reported: Arc<Mutex<Vec<Waiting>>> = Arc::default();
        let report = Arc::clone(&reported);
        let limit = Duration::from_millis(40);
        let report = move |waiting: &Waiting| report.lock().unwrap().push(waiting.clone());
        let builder = Engine::builder().cache_bytes(4 << 20).report_waits_over(limit, report);
        let sim = Simulated::with(SimOptions::new(1), &builder, &write_back());
        for round in 1..=2 {
            sim.file.write_all_at(&[round; PAGE], 0).unwrap();
            sim.device.hold_next_sync();
            std::thread::scope(|scope| {
                scope.spawn(|| sim.file.sync_all().unwrap());
                let started = Instant::now();
                while reported.lock().unwrap().len() < round as usize {
                    assert!(started.elapsed() < LIMIT, "nothing is reported");
                    std::thread::sleep(Duration::from_millis(5));
                }
                // Long enough for a second report.
                std::thread::sleep(4 * limit);
                sim.device.release_sync();
            });
        }
        let reported = reported.lock().unwrap();
        let kinds: Vec<_> = reported.iter().map(|waiting| waiting.what).collect();
        assert_eq!(kinds, [WaitFor::Sync; 2]);
        assert!(reported.iter().all(|waiting| waiting.since >= limit), "{reported:?}");
    });
}
