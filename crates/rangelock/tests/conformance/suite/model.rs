//! Model test: after every step, a lock has granted and woken exactly the same requests as a naive list.
//!
//! The list defines the lock: requests in FIFO order, each granted when no earlier overlapping request conflicts with it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use millpond_rangelock::{ByteRange, Mode, OwnedGuard, RangeLock, RawRangeLock};

use super::{Random, Subject, seed};

/// Distribution of random ranges.
#[derive(Clone, Copy)]
pub struct Shape {
    unit: u64,
    units: u64,
    long: u64,
}

/// Ranges over some hundred KiB: many regions, some wide ranges.
pub const PAGES: Shape = Shape { unit: 4096, units: 120, long: 60 };

/// Ranges of a few bytes in one region: crowded stripes.
pub const BYTES: Shape = Shape { unit: 1, units: 40, long: 12 };

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

enum Stage<L: RawRangeLock> {
    Waiting(Pin<Box<dyn Future<Output = OwnedGuard<L>>>>, Arc<Woken>),
    Held(OwnedGuard<L>),
}

struct Asked<L: RawRangeLock> {
    range: ByteRange,
    /// The range that the lock uses: the whole file for `WholeFile`.
    counts: ByteRange,
    mode: Mode,
    stage: Stage<L>,
}

impl<L: RawRangeLock> Asked<L> {
    fn conflicts(&self, other: &Asked<L>) -> bool {
        self.counts.overlaps(other.counts) && self.mode.conflicts_with(other.mode)
    }

    fn is_held(&self) -> bool {
        matches!(self.stage, Stage::Held(_))
    }
}

struct World<L: RawRangeLock> {
    lock: Arc<RangeLock<L>>,
    list: Vec<Asked<L>>,
    random: Random,
}

pub fn agrees<L: Subject>(shape: Shape) {
    let seed = seed();
    let rounds = if cfg!(debug_assertions) { 60 } else { 600 };
    for round in 0..rounds {
        let mut world = World::<L> {
            lock: Arc::new(RangeLock::with_raw()),
            list: Vec::new(),
            random: Random(seed.wrapping_add(round)),
        };
        // No offer lapses, even if this thread is preempted for long.
        world.lock.set_offer_grace(Duration::MAX);
        // Few and many concurrent requests, mostly shared and mostly exclusive.
        let crowd = 1 + world.random.below(30) as usize;
        let exclusive_percent = world.random.below(101);
        for _ in 0..300 {
            world.step(shape, crowd, exclusive_percent);
        }
        while !world.list.is_empty() {
            world.leave();
        }
        assert!(
            world.lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(),
            "a range is still locked"
        );
    }
}

impl<L: Subject> World<L> {
    fn step(&mut self, shape: Shape, crowd: usize, exclusive_percent: u64) {
        let full = self.list.len() >= crowd;
        match self.random.below(10) {
            0..4 if !full => self.ask(shape, exclusive_percent),
            4 if !full => self.try_lock(shape, exclusive_percent),
            5 => self.upgrade(),
            6 => self.downgrade(),
            _ => self.leave(),
        }
        self.check();
    }

    fn draw(&mut self, shape: Shape, exclusive_percent: u64) -> Asked<L> {
        let random = &mut self.random;
        let start = random.below(shape.units);
        let units = match random.below(4) {
            0 => 1 + random.below(shape.long),
            _ => 1 + random.below(3),
        };
        let range = match random.below(12) {
            0 => ByteRange::ALL,
            1 => ByteRange::from_start(start * shape.unit).unwrap(),
            // Not aligned to anything.
            2..5 => ByteRange::at(start * shape.unit + random.below(shape.unit), units).unwrap(),
            _ => ByteRange::at(start * shape.unit, units * shape.unit).unwrap(),
        };
        let exclusive = random.below(100) < exclusive_percent;
        let mode = if exclusive { Mode::Exclusive } else { Mode::Shared };
        let counts = if L::WHOLE { ByteRange::ALL } else { range };
        let woken = Arc::new(Woken::default());
        let future = Box::pin(self.lock.lock_owned_async(range, mode));
        Asked { range, counts, mode, stage: Stage::Waiting(future, woken) }
    }

    fn ask(&mut self, shape: Shape, exclusive_percent: u64) {
        let mut asked = self.draw(shape, exclusive_percent);
        let free = !self.list.iter().any(|earlier| earlier.conflicts(&asked));
        poll(&mut asked);
        assert_eq!(asked.is_held(), free, "{:?} {:?}", asked.range, asked.mode);
        self.list.push(asked);
    }

    fn try_lock(&mut self, shape: Shape, exclusive_percent: u64) {
        let mut asked = self.draw(shape, exclusive_percent);
        let free = !self.list.iter().any(|earlier| earlier.conflicts(&asked));
        let guard = self.lock.try_lock_owned(asked.range, asked.mode);
        assert_eq!(guard.is_some(), free, "try {:?} {:?}", asked.range, asked.mode);
        if let Some(guard) = guard {
            asked.stage = Stage::Held(guard);
            self.list.push(asked);
        }
    }

    /// Releases or cancels a random request.
    fn leave(&mut self) {
        if !self.list.is_empty() {
            let at = self.random.below(self.list.len() as u64) as usize;
            self.list.remove(at);
            self.check();
        }
    }

    fn upgrade(&mut self) {
        let Some(at) = self.pick_held(Mode::Shared) else {
            return;
        };
        let counts = self.list[at].counts;
        let others = self.list.iter().enumerate().filter(|(i, _)| *i != at);
        let allowed = others
            .filter(|(_, other)| other.counts.overlaps(counts))
            .all(|(i, other)| !other.is_held() && i > at);
        let Stage::Held(guard) = &mut self.list[at].stage else { unreachable!() };
        let upgraded = guard.try_upgrade();
        assert_eq!(upgraded, allowed, "upgrade");
        assert_eq!(guard.mode() == Mode::Exclusive, upgraded);
        if upgraded {
            self.list[at].mode = Mode::Exclusive;
        }
    }

    fn downgrade(&mut self) {
        let Some(at) = self.pick_held(Mode::Exclusive) else {
            return;
        };
        let Stage::Held(guard) = &mut self.list[at].stage else { unreachable!() };
        guard.downgrade();
        self.list[at].mode = Mode::Shared;
    }

    fn pick_held(&mut self, mode: Mode) -> Option<usize> {
        let held: Vec<usize> = (0..self.list.len())
            .filter(|&i| self.list[i].is_held() && self.list[i].mode == mode)
            .collect();
        (!held.is_empty()).then(|| held[self.random.below(held.len() as u64) as usize])
    }

    /// Checks that each waiter that should be granted was woken once, and no other.
    fn check(&mut self) {
        for at in 0..self.list.len() {
            let (earlier, rest) = self.list.split_at_mut(at);
            let asked = &mut rest[0];
            let Stage::Waiting(_, woken) = &asked.stage else {
                continue;
            };
            let woken = woken.0.load(Ordering::Relaxed);
            let free = !earlier.iter().any(|earlier| earlier.conflicts(asked));
            assert_eq!(woken, usize::from(free), "{:?} {:?}", asked.range, asked.mode);
            if free || self.random.below(4) == 0 {
                poll(asked);
                assert_eq!(asked.is_held(), free, "{:?} {:?}", asked.range, asked.mode);
            }
        }
    }
}

fn poll<L: RawRangeLock>(asked: &mut Asked<L>) {
    let Stage::Waiting(future, woken) = &mut asked.stage else {
        return;
    };
    let waker = Waker::from(Arc::clone(woken));
    if let Poll::Ready(guard) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
        assert_eq!((guard.range(), guard.mode()), (asked.range, asked.mode));
        asked.stage = Stage::Held(guard);
    }
}
