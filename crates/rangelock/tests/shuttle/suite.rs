//! Tests whole locks, which are too large for loom, with random interleavings; `scripts/shuttle` runs it.
//!
//! Three threads make a few random requests each on one lock. A shadow of the file checks exclusion, and shuttle detects
//! threads that wait indefinitely. Shuttle is sequentially consistent, so this tests the protocols and not the orderings.
//! `MILLPOND_SHUTTLE` sets the number of runs.

use std::sync::atomic::{AtomicI32, Ordering};

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::Arc;
use shuttle::thread;

use millpond_rangelock::{ByteRange, Mode, RangeLock, RawRangeLock};

/// Bytes of the file.
const BYTES: u64 = 40;

/// Owners of each byte: -1 for an exclusive owner, else the number of shared ones. These are not shuttle's atomics, so no
/// context switch happens here.
struct Shadow([AtomicI32; BYTES as usize]);

impl Shadow {
    fn enter(&self, range: ByteRange, mode: Mode) {
        for byte in &self.0[range.start() as usize..range.end() as usize] {
            match mode {
                Mode::Exclusive => assert_eq!(byte.swap(-1, Ordering::Relaxed), 0),
                Mode::Shared => assert!(byte.fetch_add(1, Ordering::Relaxed) >= 0),
            }
        }
    }

    fn leave(&self, range: ByteRange, mode: Mode) {
        for byte in &self.0[range.start() as usize..range.end() as usize] {
            match mode {
                Mode::Exclusive => assert_eq!(byte.swap(0, Ordering::Relaxed), -1),
                Mode::Shared => assert!(byte.fetch_sub(1, Ordering::Relaxed) > 0),
            }
        }
    }
}

fn work<L: RawRangeLock>(lock: &RangeLock<L>, shadow: &Shadow, unit: u64) {
    let mut kept = Vec::new();
    for _ in 0..4 {
        let start = thread_rng().gen_range(0..BYTES);
        let len =
            thread_rng().gen_range(1..=(BYTES - start).min(if start % 7 == 0 { 30 } else { 5 }));
        let exclusive = thread_rng().gen_range(0..3) > 0;
        let mode = if exclusive { Mode::Exclusive } else { Mode::Shared };
        let bytes = ByteRange::at(start, len).unwrap();
        let range = ByteRange::at(start * unit, len * unit).unwrap();
        // With another guard held, only without waiting.
        let guard = match kept.is_empty() {
            true => Some(lock.lock(range, mode)),
            false => lock.try_lock(range, mode),
        };
        let Some(mut guard) = guard else { continue };
        shadow.enter(bytes, mode);
        thread::yield_now();
        if mode == Mode::Shared && guard.try_upgrade() {
            shadow.leave(bytes, Mode::Shared);
            shadow.enter(bytes, Mode::Exclusive);
        } else if mode == Mode::Exclusive && start % 3 == 0 {
            shadow.leave(bytes, Mode::Exclusive);
            shadow.enter(bytes, Mode::Shared);
            guard.downgrade();
        }
        if start % 4 == 0 {
            kept.push((bytes, guard));
        } else {
            shadow.leave(bytes, guard.mode());
        }
        while kept.len() > 3 || (kept.len() == 1 && start % 5 == 0) {
            let (bytes, guard) = kept.remove(0);
            shadow.leave(bytes, guard.mode());
        }
    }
    kept.into_iter().for_each(|(bytes, guard)| shadow.leave(bytes, guard.mode()));
}

pub fn excludes<L: RawRangeLock>(unit: u64) {
    let runs = std::env::var("MILLPOND_SHUTTLE").ok().and_then(|runs| runs.parse().ok());
    shuttle::check_pct(
        move || {
            let lock = Arc::new(RangeLock::<L>::with_raw());
            let shadow = Arc::new(Shadow(std::array::from_fn(|_| AtomicI32::new(0))));
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let (lock, shadow) = (Arc::clone(&lock), Arc::clone(&shadow));
                    thread::spawn(move || work(&lock, &shadow, unit))
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(
                lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(),
                "a range is still locked"
            );
        },
        runs.unwrap_or(10_000),
        4,
    );
}
