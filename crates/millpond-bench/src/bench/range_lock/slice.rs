//! One measurement: some threads, one lock, for a while.

use std::collections::{BTreeMap, VecDeque};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use millpond_bench_peers::Usage;
use millpond_rangelock::{ByteRange, Mode, RangeLock, RawRangeLock, Striped};
use millpond_rangelock_peers::{IntervalTree, MutexBTree, OlcBTree, WholeFile};
use parking_lot::{RwLock, RwLockWriteGuard};

use super::case::{Layout, Lock, LockCase};
use crate::bench::harness::Slice;
use crate::bench::histogram::{Histogram, Latencies};

/// Bytes of a range.
const BLOCK: u64 = 4096;

/// Pairs between two checks of the stop flag.
const BATCH: u64 = 32;

/// The ranges that one thread locks, cyclically.
#[derive(Clone, Copy)]
struct Walk {
    layout: Layout,
    thread: u64,
    threads: u64,
    positions: u64,
    at: u64,
}

impl Walk {
    fn new(case: &LockCase, thread: usize) -> Walk {
        // Twice the number of held ranges, so that the next one is never held.
        let positions = (2 * case.load.held as u64).max(16);
        let (thread, threads) = (thread as u64, case.threads as u64);
        Walk { layout: case.load.layout, thread, threads, positions, at: 0 }
    }

    #[inline]
    fn next(&mut self) -> ByteRange {
        let at = self.at;
        self.at = if at + 1 == self.positions { 0 } else { at + 1 };
        let block = match self.layout {
            // 1 GiB apart.
            Layout::Disjoint => (self.thread << 18) + at,
            Layout::Interleaved => at * self.threads + self.thread,
            Layout::Same => 0,
            Layout::Whole => return ByteRange::ALL,
        };
        ByteRange::at(block * BLOCK, BLOCK).expect("a few blocks")
    }
}

/// Runs `case` on `lock` for about `time`.
pub fn slice(lock: Lock, case: &LockCase, time: Duration) -> Slice {
    run(lock, &Throughput { case, time })
}

/// Latency of each pair of `case` on `lock`, including the clock, measured for about `time`.
pub fn latencies(lock: Lock, case: &LockCase, time: Duration) -> Latencies {
    run(lock, &Latency { case, time }).latencies()
}

/// A measurement of pairs.
trait Measurement: Sync {
    type Found;

    fn case(&self) -> &LockCase;

    /// Each thread calls `start`, and then repeats the returned function.
    fn threads<P: FnMut()>(&self, start: impl Fn(usize) -> P + Sync) -> Self::Found;
}

fn run<M: Measurement>(lock: Lock, measurement: &M) -> M::Found {
    let case = measurement.case();
    match lock {
        Lock::Striped => run_lock::<Striped, M>(measurement),
        Lock::WholeFile => run_lock::<WholeFile, M>(measurement),
        Lock::IntervalTree => run_lock::<IntervalTree, M>(measurement),
        Lock::MutexBTree => run_lock::<MutexBTree, M>(measurement),
        Lock::OlcBTree => run_lock::<OlcBTree, M>(measurement),
        Lock::RwLockShared => run_rwlock(measurement, |lock| drop(lock.read())),
        Lock::RwLockExclusive => run_rwlock(measurement, |lock| drop(lock.write())),
        Lock::RwLockFair => {
            run_rwlock(measurement, |lock| RwLockWriteGuard::unlock_fair(lock.write()))
        }
        Lock::StdMap => {
            let map = Mutex::new(BTreeMap::new());
            let lock = || map.lock().expect("no panics under it");
            measurement.threads(|thread| {
                let mut walk = Walk::new(case, thread);
                let mut oldest = walk;
                for _ in 1..case.load.held {
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
    if case.load.held > 1 {
        return measurement.threads(|thread| pairs(&lock, Walk::new(case, thread), case));
    }
    let lock = &lock;
    // The mode as a constant, as in real callers.
    match case.load.mode {
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

/// One pair: lock the next range, release the one that was held longest.
fn pairs<'a, L: RawRangeLock>(
    lock: &'a RangeLock<L>,
    mut walk: Walk,
    case: &LockCase,
) -> impl FnMut() + use<'a, L> {
    let mode: Mode = case.load.mode;
    let mut held = VecDeque::with_capacity(case.load.held);
    held.extend((1..case.load.held).map(|_| lock.lock(walk.next(), mode)));
    move || {
        let guard = lock.lock(walk.next(), mode);
        held.push_back(guard);
        drop(held.pop_front());
    }
}

/// Counts the pairs and their cost.
struct Throughput<'a> {
    case: &'a LockCase,
    time: Duration,
}

impl Measurement for Throughput<'_> {
    type Found = Slice;

    fn case(&self) -> &LockCase {
        self.case
    }

    fn threads<P: FnMut()>(&self, start: impl Fn(usize) -> P + Sync) -> Slice {
        let worker = |thread, gate: &Gate, stop: &AtomicBool| {
            let mut pair = start(thread);
            gate.wait();
            let before = Usage::of_thread();
            let mut ops = 0;
            // At least once, even if this thread starts late.
            loop {
                (0..BATCH).for_each(|_| pair());
                ops += BATCH;
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
            (ops, Usage::of_thread().since(before).context_switches, Instant::now())
        };
        let found = run_threads(self.case.threads, self.time, worker);
        let (mut slice, mut elapsed) =
            (Slice { cpu: found.cpu, ..Slice::default() }, Duration::ZERO);
        for (ops, context_switches, end) in found.threads {
            slice.ops += ops;
            slice.context_switches += context_switches;
            elapsed = elapsed.max(end - found.begin);
        }
        slice.ops_per_s = slice.ops as f64 / elapsed.as_secs_f64();
        slice
    }
}

/// Measures the time of each pair.
struct Latency<'a> {
    case: &'a LockCase,
    time: Duration,
}

impl Measurement for Latency<'_> {
    type Found = Histogram;

    fn case(&self) -> &LockCase {
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

/// A barrier, where threads wait until all are ready and the clock runs.
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
    cpu: Duration,
}

/// Runs `worker` on `threads` threads: each waits at the gate when it is ready, and then works
/// until the stop flag is set.
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
        // Before the other threads start: this thread may return from the barrier long after them.
        let (before, begin) = (Usage::now(), Instant::now());
        gate.open.wait();
        thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        let joined = workers.into_iter().map(|worker| worker.join().expect("workers don't panic"));
        let threads = joined.collect();
        Found { threads, begin, cpu: Usage::now().since(before).cpu }
    })
}

/// Pins this thread to one processor, each thread to the next one. If the scheduler puts two
/// threads on one processor, because other programs use the second, they do not compete for the
/// lock.
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
