//! Stress tests with threads: a shadow of the file with the owners of each byte checks exclusion.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use millpond_rangelock::{ByteRange, Mode, RangeLock, RawRangeLock};

use super::{Random, Subject, number_from_env, seed};

/// The kinds of requests.
#[derive(Clone, Copy)]
pub enum Mix {
    Blocking,
    Timeouts,
    Futures,
    Lapses,
}

/// Cells of the shadow; each cell covers `UNIT` bytes of the file.
const CELLS: usize = 96;
const UNIT: u64 = 4096;

/// -1: one exclusive owner; n > 0: n shared owners.
struct Shadow(Vec<AtomicI32>);

impl Shadow {
    fn new() -> Shadow {
        Shadow((0..CELLS).map(|_| AtomicI32::new(0)).collect())
    }

    fn cells(&self, range: ByteRange) -> &[AtomicI32] {
        let end = range.end().div_ceil(UNIT).min(CELLS as u64);
        &self.0[(range.start() / UNIT) as usize..end as usize]
    }

    fn enter(&self, range: ByteRange, mode: Mode) {
        for cell in self.cells(range) {
            match mode {
                // Relaxed: the lock under test orders the accesses.
                Mode::Exclusive => assert_eq!(cell.swap(-1, Ordering::Relaxed), 0, "{range}"),
                Mode::Shared => assert!(cell.fetch_add(1, Ordering::Relaxed) >= 0, "{range}"),
            }
        }
    }

    fn leave(&self, range: ByteRange, mode: Mode) {
        for cell in self.cells(range) {
            match mode {
                Mode::Exclusive => assert_eq!(cell.swap(0, Ordering::Relaxed), -1, "{range}"),
                Mode::Shared => assert!(cell.fetch_sub(1, Ordering::Relaxed) > 0, "{range}"),
            }
        }
    }
}

fn draw(random: &mut Random) -> (ByteRange, Mode) {
    let cells = CELLS as u64;
    let start = random.below(cells);
    let range = match random.below(64) {
        0 => ByteRange::ALL,
        1 => ByteRange::from_start(start * UNIT).unwrap(),
        2..6 => ByteRange::at(start * UNIT, (1 + random.below(cells - start)) * UNIT).unwrap(),
        _ => ByteRange::at(start * UNIT, (1 + random.below(4.min(cells - start))) * UNIT).unwrap(),
    };
    let mode = if random.below(2) == 0 { Mode::Shared } else { Mode::Exclusive };
    (range, mode)
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls at most `polls` times, then drops the future.
fn block_on<F: Future>(future: F, polls: u64) -> Option<F::Output> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut cx = Context::from_waker(&waker);
    let mut future = pin!(future);
    for _ in 0..polls {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return Some(output);
        }
        thread::park_timeout(Duration::from_secs(30));
    }
    None
}

fn one<L: RawRangeLock>(lock: &RangeLock<L>, shadow: &Shadow, random: &mut Random, mix: Mix) {
    let (range, mode) = draw(random);
    let guard = match (mix, random.below(8)) {
        (_, 0) => lock.try_lock(range, mode),
        (Mix::Timeouts, 1..6) => {
            lock.lock_timeout(range, mode, Duration::from_nanos(random.below(20_000)))
        }
        (Mix::Futures, 1..3) => {
            // Cancelled after 0 or 1 polls.
            let polls = random.below(2);
            let mut future = pin!(lock.lock_async(range, mode));
            let mut cx = Context::from_waker(Waker::noop());
            (0..polls).find_map(|_| match future.as_mut().poll(&mut cx) {
                Poll::Ready(guard) => Some(guard),
                Poll::Pending => None,
            })
        }
        (Mix::Futures, _) | (Mix::Lapses, 1..5) => block_on(lock.lock_async(range, mode), u64::MAX),
        _ => Some(lock.lock(range, mode)),
    };
    let Some(mut guard) = guard else { return };
    shadow.enter(range, mode);
    if random.below(16) == 0 {
        thread::yield_now();
    }
    match (mode, random.below(8)) {
        (Mode::Shared, 0) if guard.try_upgrade() => {
            shadow.leave(range, Mode::Shared);
            shadow.enter(range, Mode::Exclusive);
        }
        (Mode::Exclusive, 0) => {
            shadow.leave(range, Mode::Exclusive);
            shadow.enter(range, Mode::Shared);
            guard.downgrade();
        }
        _ => {}
    }
    shadow.leave(range, guard.mode());
    drop(guard);
}

/// Goal: no two conflicting guards exist at once, for any mix of threads, ranges and modes, and no waiter stays asleep.
pub fn excludes<L: Subject>(mix: Mix) {
    let seed = seed();
    let operations = number_from_env("MILLPOND_OPERATIONS", 200_000);
    let threads = 4;
    // A new lock from time to time, as its table starts small.
    let locks = 8;
    for round in 0..locks {
        let lock = RangeLock::<L>::with_raw();
        if matches!(mix, Mix::Lapses) {
            // Most wake-ups take longer.
            lock.set_offer_grace(Duration::from_micros(round));
        }
        let shadow = Shadow::new();
        thread::scope(|scope| {
            for t in 0..threads {
                let (lock, shadow) = (&lock, &shadow);
                let mut random = Random(seed ^ (round << 32 | t));
                scope.spawn(move || {
                    for _ in 0..operations / threads / locks {
                        one(lock, shadow, &mut random, mix);
                    }
                });
            }
        });
        assert!(
            lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(),
            "a range is still locked"
        );
    }
}

/// Goal: a guard works the same when another thread drops it, also while requests wait for it.
pub fn released_elsewhere<L: Subject>() {
    let lock = Arc::new(RangeLock::<L>::with_raw());
    let shadow = Arc::new(Shadow::new());
    let (sender, receiver) = mpsc::sync_channel(4);
    let mut random = Random(seed());
    let releaser = thread::spawn({
        let shadow = Arc::clone(&shadow);
        move || {
            for guard in receiver {
                let guard: millpond_rangelock::OwnedGuard<L> = guard;
                shadow.leave(guard.range(), guard.mode());
            }
        }
    });
    for _ in 0..20_000 {
        let (range, mode) = draw(&mut random);
        let guard = lock.lock_owned(range, mode);
        shadow.enter(range, mode);
        sender.send(guard).unwrap();
    }
    drop(sender);
    releaser.join().unwrap();
    assert!(lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(), "a range is still locked");
}

/// Two threads keep the range held in `crowd` mode without a gap; a request in the other mode is still granted.
fn does_not_starve<L: Subject>(crowd: Mode, lone: Mode) {
    let lock = RangeLock::<L>::with_raw();
    let range = ByteRange::at(0, 4096).unwrap();
    let stop = AtomicBool::new(false);
    let turns = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut last = lock.lock(range, crowd);
                while !stop.load(Ordering::Relaxed) {
                    // Overlapping holds, if the mode allows them.
                    if crowd == Mode::Exclusive {
                        drop(last);
                        last = lock.lock(range, crowd);
                    } else if let Some(next) = lock.try_lock(range, crowd) {
                        last = next;
                    } else {
                        drop(last);
                        last = lock.lock(range, crowd);
                    }
                    turns.fetch_add(1, Ordering::Relaxed);
                }
                drop(last);
            });
        }
        let begin = Instant::now();
        let mut served = 0;
        while served < 200 && begin.elapsed() < Duration::from_secs(60) {
            drop(lock.lock(range, lone));
            served += 1;
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(served, 200, "starved; the others had {:?} turns", turns);
    });
}

pub fn exclusives_do_not_starve<L: Subject>() {
    does_not_starve::<L>(Mode::Shared, Mode::Exclusive);
}

pub fn shareds_do_not_starve<L: Subject>() {
    does_not_starve::<L>(Mode::Exclusive, Mode::Shared);
}

/// Waiting requests, with the time at which each was in the queue.
#[derive(Default)]
struct Line {
    clock: AtomicU64,
    waiting: Mutex<Vec<(u64, ByteRange, Mode)>>,
}

impl Line {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// Number of conflicting requests that have waited since before `begin`, the start of a request that was just granted.
    fn overtaken(&self, begin: u64, range: ByteRange, mode: Mode) -> usize {
        let waiting = self.waiting.lock().unwrap();
        let before = waiting.iter().filter(|(since, ..)| *since < begin);
        before.filter(|(_, r, m)| r.overlaps(range) && m.conflicts_with(mode)).count()
    }

    fn leave(&self, since: u64) {
        self.waiting.lock().unwrap().retain(|(other, ..)| *other != since);
    }
}

/// Goal: the bound on overtaking is 0. Once a request is in the queue, no conflicting request that starts later is granted
/// before it, by any call. (The bound does not cover the microseconds for which a thread spins before it queues: see
/// `RangeLock::lock`.)
/// Method: each request records its start and the time when it is in the queue. A granted thread searches for requests that
/// were in the queue before its own start.
pub fn overtakes_no_request<L: Subject>() {
    let (seed, lock, line) = (seed(), RangeLock::<L>::with_raw(), Line::default());
    lock.set_offer_grace(Duration::MAX);
    let operations = number_from_env("MILLPOND_OPERATIONS", 200_000) / 10;
    let (overtaken, queued) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for t in 0..4 {
            let (lock, line, overtaken, queued) = (&lock, &line, &overtaken, &queued);
            scope.spawn(move || {
                let mut random = Random(seed ^ t);
                let waker = Waker::from(Arc::new(Unpark(thread::current())));
                let mut cx = Context::from_waker(&waker);
                for _ in 0..operations / 4 {
                    let (range, mode) = draw(&mut random);
                    let begin = line.tick();
                    let guard = if random.below(4) == 0 {
                        let Some(guard) = lock.try_lock(range, mode) else { continue };
                        guard
                    } else {
                        let mut future = pin!(lock.lock_async(range, mode));
                        let mut poll = || future.as_mut().poll(&mut cx);
                        if let Poll::Ready(guard) = poll() {
                            guard
                        } else {
                            let since = line.tick();
                            line.waiting.lock().unwrap().push((since, range, mode));
                            queued.fetch_add(1, Ordering::Relaxed);
                            let guard = loop {
                                if let Poll::Ready(guard) = poll() {
                                    break guard;
                                }
                                thread::park_timeout(Duration::from_secs(30));
                            };
                            line.leave(since);
                            guard
                        }
                    };
                    let count = line.overtaken(begin, range, mode);
                    overtaken.fetch_add(count as u64, Ordering::Relaxed);
                    // Let other requests queue behind this one.
                    if random.below(4) == 0 {
                        thread::yield_now();
                    }
                    drop(guard);
                }
            });
        }
    });
    assert!(queued.into_inner() > operations / 1000, "no request had to wait");
    assert_eq!(overtaken.into_inner(), 0);
}
