//! One measurement: some threads, one lock, for a while.

use std::collections::{BTreeMap, VecDeque};
use std::hint::black_box;
use std::ops::Add;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{RwLock, RwLockWriteGuard};

use super::histogram::{Histogram, Latencies};
use super::{Case, Engine, Layout};
use crate::{ByteRange, Mode, RangeLock, RawRangeLock, Striped, peers};

/// Bytes of a range.
const BLOCK: u64 = 4096;

/// Pairs between two looks at the stop flag.
const BATCH: u64 = 32;

/// What one measurement found.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// Lock and unlock pairs, all threads together.
    pub ops: f64,
    /// How long it took.
    pub seconds: f64,
    /// Processor time of the whole process.
    pub cpu_ns: f64,
    /// Context switches of the threads that were measured.
    pub switches: f64,
}

impl Slice {
    /// Pairs a second, all threads together.
    pub fn ops_per_s(&self) -> f64 {
        self.ops / self.seconds
    }
}

impl Add for Slice {
    type Output = Slice;

    fn add(self, other: Slice) -> Slice {
        Slice {
            ops: self.ops + other.ops,
            seconds: self.seconds + other.seconds,
            cpu_ns: self.cpu_ns + other.cpu_ns,
            switches: self.switches + other.switches,
        }
    }
}

/// The ranges that one thread walks through, round and round.
#[derive(Clone, Copy)]
struct Walk {
    case: Layout,
    thread: u64,
    threads: u64,
    positions: u64,
    at: u64,
}

impl Walk {
    fn new(case: &Case, thread: usize) -> Walk {
        // Twice as many as are held, so that the next is never one that is still held.
        let positions = (2 * case.held as u64).max(16);
        let (thread, threads) = (thread as u64, case.threads as u64);
        Walk { case: case.layout, thread, threads, positions, at: 0 }
    }

    #[inline]
    fn next(&mut self) -> ByteRange {
        let at = self.at;
        self.at = if at + 1 == self.positions { 0 } else { at + 1 };
        let block = match self.case {
            // 1 GiB apart.
            Layout::Disjoint => (self.thread << 18) + at,
            Layout::Interleaved => at * self.threads + self.thread,
            Layout::Same => 0,
            Layout::Whole => return ByteRange::ALL,
        };
        ByteRange::raw(block * BLOCK, (block + 1) * BLOCK)
    }
}

/// Runs `case` on `engine` for about `time`.
pub fn slice(engine: Engine, case: &Case, time: Duration) -> Slice {
    run(engine, &Throughput { case, time })
}

/// How long each pair of `case` takes on `engine`, the clock included, seen for about `time`.
pub fn latencies(engine: Engine, case: &Case, time: Duration) -> Latencies {
    run(engine, &Latency { case, time }).latencies()
}

/// What is measured about a pair.
trait Measurement: Sync {
    type Found;

    fn case(&self) -> &Case;

    /// Has each thread start with `start` and then do what that returns, over and over.
    fn threads<P: FnMut()>(&self, start: impl Fn(usize) -> P + Sync) -> Self::Found;
}

fn run<M: Measurement>(engine: Engine, measurement: &M) -> M::Found {
    let case = measurement.case();
    match engine {
        Engine::Striped => run_lock::<Striped, M>(measurement),
        Engine::WholeFile => run_lock::<peers::WholeFile, M>(measurement),
        Engine::IntervalTree => run_lock::<peers::IntervalTree, M>(measurement),
        Engine::MutexBTree => run_lock::<peers::MutexBTree, M>(measurement),
        Engine::OlcBTree => run_lock::<peers::OlcBTree, M>(measurement),
        Engine::RwLockShared => run_rwlock(measurement, |lock| drop(lock.read())),
        Engine::RwLockExclusive => run_rwlock(measurement, |lock| drop(lock.write())),
        Engine::RwLockFair => {
            run_rwlock(measurement, |lock| RwLockWriteGuard::unlock_fair(lock.write()))
        }
        Engine::StdMap => {
            let map = Mutex::new(BTreeMap::new());
            let lock = || map.lock().expect("no panics under it");
            measurement.threads(|thread| {
                let mut walk = Walk::new(case, thread);
                let mut oldest = walk;
                for _ in 1..case.held {
                    let range = walk.next();
                    lock().insert(range.start(), range.end());
                }
                move || {
                    let range = walk.next();
                    let mut map = lock();
                    let before = map.range(..range.end()).next_back();
                    assert!(before.is_none_or(|(_, &end)| end <= range.start()));
                    map.insert(range.start(), range.end());
                    drop(map);
                    lock().remove(&oldest.next().start());
                }
            })
        }
    }
}

fn run_rwlock<M: Measurement>(measurement: &M, pair: impl Fn(&RwLock<()>) + Sync) -> M::Found {
    let lock = RwLock::new(());
    measurement.threads(|thread| {
        let mut walk = Walk::new(measurement.case(), thread);
        let (lock, pair) = (&lock, &pair);
        move || {
            // The same work around the lock as for the others.
            black_box(walk.next());
            pair(lock);
        }
    })
}

fn run_lock<L: RawRangeLock, M: Measurement>(measurement: &M) -> M::Found {
    let lock = RangeLock::<L>::with_raw();
    let case = measurement.case();
    if case.held > 1 {
        return measurement.threads(|thread| pairs(&lock, Walk::new(case, thread), case));
    }
    let lock = &lock;
    // The mode as a constant, as callers have it.
    match case.mode {
        Mode::Exclusive => measurement.threads(|thread| {
            let mut walk = Walk::new(case, thread);
            move || drop(lock.lock(walk.next(), Mode::Exclusive))
        }),
        Mode::Shared => measurement.threads(|thread| {
            let mut walk = Walk::new(case, thread);
            move || drop(lock.lock(walk.next(), Mode::Shared))
        }),
    }
}

/// One pair: lock the next range, release the one that has been held longest.
fn pairs<'a, L: RawRangeLock>(
    lock: &'a RangeLock<L>,
    mut walk: Walk,
    case: &Case,
) -> impl FnMut() + use<'a, L> {
    let mode: Mode = case.mode;
    let mut held = VecDeque::with_capacity(case.held);
    held.extend((1..case.held).map(|_| lock.lock(walk.next(), mode)));
    move || {
        let guard = lock.lock(walk.next(), mode);
        held.push_back(guard);
        drop(held.pop_front());
    }
}

/// How many pairs, and what they cost.
struct Throughput<'a> {
    case: &'a Case,
    time: Duration,
}

impl Measurement for Throughput<'_> {
    type Found = Slice;

    fn case(&self) -> &Case {
        self.case
    }

    fn threads<P: FnMut()>(&self, start: impl Fn(usize) -> P + Sync) -> Slice {
        let worker = |thread, gate: &Gate, stop: &AtomicBool| {
            let mut pair = start(thread);
            gate.wait();
            let switches = context_switches();
            let mut ops = 0;
            // Once at least, however late this thread comes to run.
            loop {
                (0..BATCH).for_each(|_| pair());
                ops += BATCH;
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
            (ops, context_switches() - switches, Instant::now())
        };
        let found = run_threads(self.case.threads, self.time, worker);
        let mut slice = Slice { ops: 0.0, seconds: 0.0, cpu_ns: found.cpu_ns, switches: 0.0 };
        for (ops, switches, end) in found.threads {
            slice.ops += ops as f64;
            slice.switches += switches as f64;
            slice.seconds = slice.seconds.max((end - found.begin).as_secs_f64());
        }
        slice
    }
}

/// How long each pair takes.
struct Latency<'a> {
    case: &'a Case,
    time: Duration,
}

impl Measurement for Latency<'_> {
    type Found = Histogram;

    fn case(&self) -> &Case {
        self.case
    }

    fn threads<P: FnMut()>(&self, start: impl Fn(usize) -> P + Sync) -> Histogram {
        let worker = |thread, gate: &Gate, stop: &AtomicBool| {
            let mut pair = start(thread);
            let mut histogram = Histogram::new();
            gate.wait();
            loop {
                for _ in 0..BATCH {
                    let begin = Instant::now();
                    pair();
                    histogram.add(begin.elapsed());
                }
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
            histogram
        };
        let found = run_threads(self.case.threads, self.time, worker);
        found.threads.into_iter().fold(Histogram::new(), Histogram::merged)
    }
}

/// Where threads wait until all are ready and the clock runs.
struct Gate {
    ready: Barrier,
    open: Barrier,
}

impl Gate {
    fn wait(&self) {
        self.ready.wait();
        self.open.wait();
    }
}

struct Found<T> {
    threads: Vec<T>,
    begin: Instant,
    cpu_ns: f64,
}

/// Runs `worker` on so many threads: each waits at the gate when it is ready, and then works until
/// it is told to stop.
fn run_threads<T: Send>(
    threads: usize,
    time: Duration,
    worker: impl Fn(usize, &Gate, &AtomicBool) -> T + Sync,
) -> Found<T> {
    let stop = AtomicBool::new(false);
    let gate = Gate { ready: Barrier::new(threads + 1), open: Barrier::new(threads + 1) };
    thread::scope(|scope| {
        let (worker, gate, stop) = (&worker, &gate, &stop);
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    pin(thread);
                    worker(thread, gate, stop)
                })
            })
            .collect();
        gate.ready.wait();
        // Before the others go: this thread may come back from the barrier long after them.
        let (cpu, begin) = (cpu_time(), Instant::now());
        gate.open.wait();
        thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        let joined = workers.into_iter().map(|worker| worker.join().expect("workers don't panic"));
        let threads = joined.collect();
        Found { threads, begin, cpu_ns: (cpu_time() - cpu).as_nanos() as f64 }
    })
}

/// What this process has used of its processors.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Keeps this thread on one processor, each thread on the next: two threads that the scheduler
/// has put on one, while others keep it from the second, do not compete for anything.
fn pin(thread: usize) {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return };
    let allowed: Vec<usize> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect();
    let Some(&cpu) = allowed.get(thread % allowed.len().max(1)) else { return };
    let mut one = rustix::thread::CpuSet::new();
    one.set(cpu);
    // Best effort: unpinned is only noisier.
    let _ = rustix::thread::sched_setaffinity(None, &one);
}

/// How often this thread has left its processor; 0 where the kernel does not say.
fn context_switches() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    status
        .lines()
        .filter(|line| line.contains("ctxt_switches"))
        .filter_map(|line| line.split_whitespace().last()?.parse::<u64>().ok())
        .sum()
}
