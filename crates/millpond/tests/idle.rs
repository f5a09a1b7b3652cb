//! Idle engines and queues do no work.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond::queue::{Queue, Request};
use millpond::{Advice, AsyncFile, BackendChoice, Engine, File};

use common::{context_switches, has_uring, in_own_process, read_write, temp_dir, threads};

const PAGE: u64 = 4096;
const FILE_BYTES: u64 = 16 << 20;

/// Context switches and CPU time of a thread so far.
#[derive(Debug, PartialEq, Eq)]
struct Activity {
    name: String,
    /// Voluntary and other.
    context_switches: (u64, u64),
    /// In user and in system mode.
    cpu_ticks: (u64, u64),
}

/// Of all threads of the process but the test's two.
fn activity() -> Vec<(u64, Activity)> {
    let me = std::fs::read_link("/proc/thread-self").unwrap();
    let me: u64 = me.file_name().unwrap().to_str().unwrap().parse().unwrap();
    let main = u64::from(std::process::id());
    let others = threads().into_iter().filter(|(id, _)| *id != me && *id != main);
    others
        .map(|(id, name)| {
            let (context_switches, cpu_ticks) = (context_switches(id), cpu_ticks(id));
            (id, Activity { name, context_switches, cpu_ticks })
        })
        .collect()
}

fn cpu_ticks(thread: u64) -> (u64, u64) {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    // After the name, which may contain any character, come the third and later fields: proc(5).
    let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
    (fields[14 - 3].parse().unwrap(), fields[15 - 3].parse().unwrap())
}

/// Waits until no thread has run for a while.
fn come_to_rest() {
    let started = Instant::now();
    let mut last = activity();
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let now = activity();
        if now == last {
            return;
        }
        last = now;
        assert!(started.elapsed() < Duration::from_secs(60), "no rest: {last:?}");
    }
}

struct Used {
    engine: Engine,
    file: Arc<File>,
    queue: Queue,
    _dir: tempfile::TempDir,
}

/// An engine all of whose threads have worked: read-ahead, reads and writes of a queue, a future.
fn used(backend: BackendChoice) -> Used {
    let dir = temp_dir();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; FILE_BYTES as usize]).unwrap();
    let engine = common::engine(1 << 20, backend);
    let file = Arc::new(engine.open(&path, &read_write()).unwrap());
    let mut bytes = vec![0; PAGE as usize];
    for page in 0..512 {
        file.read_at(&mut bytes, page * PAGE).unwrap();
    }
    file.advise(8 << 20, 64 << 10, Advice::WillNeed).unwrap();
    let queue = engine.queue(64).unwrap();
    for round in 0..20 {
        let mut requests: Vec<Request> = (0..64)
            .map(|n| match n % 8 {
                0 => Request::write(&file, vec![1; 100], (n * 7 + round) * PAGE),
                _ => Request::read(&file, vec![0; 6000], (n * 7 + round * 64) * PAGE),
            })
            .collect();
        queue.submit_all(requests.drain(..)).unwrap();
        let done = queue.wait(64, 64, None).unwrap();
        assert!(done.iter().all(|one| one.result().is_ok()));
    }
    let future = AsyncFile::from(Arc::clone(&file));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { future.write_at(&[1; 10], 5).await }).unwrap();
    Used { engine, file, queue, _dir: dir }
}

/// Goal: idle engines, and idle queues with a thread asleep in each, use no CPU time.
/// Method: over 10 seconds no thread of the process has a context switch or a tick of CPU time,
/// except for the measuring thread.
#[test]
#[cfg_attr(debug_assertions, ignore = "slow: run by ./test at full speed")]
fn idle_engines_and_queues_do_nothing() {
    let test = "idle_engines_and_queues_do_nothing";
    in_own_process(test, Duration::from_secs(120), || {
        let mut all = vec![used(BackendChoice::Threads)];
        if has_uring() {
            all.push(used(BackendChoice::Uring));
        }
        std::thread::scope(|scope| {
            let waiters: Vec<_> = (all.iter())
                .map(|used| scope.spawn(|| used.queue.wait(1, 1, None).unwrap()))
                .collect();
            come_to_rest();
            let before = activity();
            let named =
                |name: &str| before.iter().filter(|(_, it)| it.name.starts_with(name)).count();
            assert!(named("millpond-") >= 2 * all.len(), "{before:?}");
            assert!(before.len() >= named("millpond-") + waiters.len(), "{before:?}");
            std::thread::sleep(Duration::from_secs(10));
            assert_eq!(activity(), before);
            // The engines and queues still work.
            for (used, waiter) in all.iter().zip(waiters) {
                let mut request = vec![Request::read(&used.file, vec![0; 10], 9 << 20)];
                used.queue.submit_all(request.drain(..)).unwrap();
                assert_eq!(waiter.join().unwrap().len(), 1);
                assert!(used.engine.stats().misses > 0);
            }
        });
    });
}
