//! One measurement: some threads, one lock, for a while.

use std::collections::{BTreeMap, VecDeque};
use std::hint::black_box;
use std::ops::Add;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::{Case, Engine, Layout};
use crate::{ByteRange, Mode, RangeLock, RawRangeLock, Striped, peers};

/// Bytes of a range.
const BLOCK: u64 = 4096;

/// Pairs between two looks at the stop flag.
const BATCH: u64 = 32;

#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) ops: f64,
    pub(super) seconds: f64,
    pub(super) cpu_ns: f64,
    pub(super) switches: f64,
}

impl Sample {
    pub(super) fn ops_per_s(&self) -> f64 {
        self.ops / self.seconds
    }
}

impl Add for Sample {
    type Output = Sample;

    fn add(self, other: Sample) -> Sample {
        Sample {
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
pub(super) fn run(engine: Engine, case: &Case, time: Duration) -> Sample {
    match engine {
        Engine::Striped => run_lock::<Striped>(case, time),
        Engine::WholeFile => run_lock::<peers::WholeFile>(case, time),
        Engine::IntervalTree => run_lock::<peers::IntervalTree>(case, time),
        Engine::MutexBTree => run_lock::<peers::MutexBTree>(case, time),
        Engine::OlcBTree => run_lock::<peers::OlcBTree>(case, time),
        Engine::RwLockShared => {
            let lock = parking_lot::RwLock::new(());
            run_threads(case, time, |thread| {
                let mut walk = Walk::new(case, thread);
                let lock = &lock;
                move || {
                    // The same work around the lock as for the others.
                    black_box(walk.next());
                    drop(lock.read());
                }
            })
        }
        Engine::RwLockFair => {
            let lock = parking_lot::RwLock::new(());
            run_threads(case, time, |thread| {
                let mut walk = Walk::new(case, thread);
                let lock = &lock;
                move || {
                    black_box(walk.next());
                    parking_lot::RwLockWriteGuard::unlock_fair(lock.write());
                }
            })
        }
        Engine::StdMap => {
            let map = Mutex::new(BTreeMap::new());
            let lock = || map.lock().expect("no panics under it");
            run_threads(case, time, |thread| {
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

fn run_lock<L: RawRangeLock>(case: &Case, time: Duration) -> Sample {
    let lock = RangeLock::<L>::with_raw();
    if case.held > 1 {
        return run_threads(case, time, |thread| pairs(&lock, Walk::new(case, thread), case));
    }
    let lock = &lock;
    // The mode as a constant, as callers have it.
    match case.mode {
        Mode::Exclusive => run_threads(case, time, |thread| {
            let mut walk = Walk::new(case, thread);
            move || drop(lock.lock(walk.next(), Mode::Exclusive))
        }),
        Mode::Shared => run_threads(case, time, |thread| {
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

fn run_threads<P: FnMut()>(
    case: &Case,
    time: Duration,
    start: impl Fn(usize) -> P + Sync,
) -> Sample {
    let stop = AtomicBool::new(false);
    let barrier = Barrier::new(case.threads + 1);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..case.threads)
            .map(|thread| {
                let (stop, barrier, start) = (&stop, &barrier, &start);
                scope.spawn(move || {
                    pin(thread);
                    let mut pair = start(thread);
                    barrier.wait();
                    let switches = context_switches();
                    let mut ops = 0;
                    while !stop.load(Ordering::Relaxed) {
                        (0..BATCH).for_each(|_| pair());
                        ops += BATCH;
                    }
                    (ops, context_switches() - switches, Instant::now())
                })
            })
            .collect();
        let cpu = cpu_time();
        barrier.wait();
        let begin = Instant::now();
        thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        let mut sample = Sample { ops: 0.0, seconds: 0.0, cpu_ns: 0.0, switches: 0.0 };
        for worker in workers {
            let (ops, switches, end) = worker.join().expect("workers do not panic");
            sample.ops += ops as f64;
            sample.switches += switches as f64;
            sample.seconds = sample.seconds.max((end - begin).as_secs_f64());
        }
        sample.cpu_ns = (cpu_time() - cpu).as_nanos() as f64;
        sample
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

/// What others take of the processors meanwhile.
pub(super) struct Load {
    begin: Instant,
    own: Duration,
    all: Duration,
}

impl Load {
    pub(super) fn begin() -> Load {
        Load { begin: Instant::now(), own: cpu_time(), all: cpu_time_of_all() }
    }

    /// As a part of what there is; 0 where the kernel does not say.
    pub(super) fn others(&self) -> f64 {
        let all = cpu_time_of_all().saturating_sub(self.all);
        let others = all.saturating_sub(cpu_time() - self.own).as_secs_f64();
        let processors = thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
        others / processors / self.begin.elapsed().as_secs_f64()
    }
}

/// What all processes, and the hypervisor, have used of the processors.
fn cpu_time_of_all() -> Duration {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = stat.lines().next().unwrap_or_default().split_whitespace().skip(1);
    // user nice system idle iowait irq softirq steal; the guests' are in the first two.
    let ticks: Vec<u64> = ticks.take(8).filter_map(|ticks| ticks.parse().ok()).collect();
    let busy = ticks.iter().enumerate().filter(|&(at, _)| at != 3 && at != 4);
    // The kernel's clock tick, as it shows it, is 10 ms everywhere.
    Duration::from_millis(10 * busy.map(|(_, ticks)| ticks).sum::<u64>())
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
