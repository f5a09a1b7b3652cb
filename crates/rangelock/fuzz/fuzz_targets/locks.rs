//! Fuzz target: compares every lock with a list of held ranges; `cargo +nightly fuzz run locks`.
//!
//! Four bytes of input are one step: lock a range in some mode if this needs no waiting, or release, upgrade or downgrade a
//! held range. The fuzzer exercises mainly the trees: searches, splits, merges and rotations in any order.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use millpond_rangelock::{ByteRange, Mode, OwnedGuard, RangeLock, RawRangeLock, Striped};
use millpond_rangelock_peers::{IntervalTree, MutexBTree, OlcBTree};

fn run<L: RawRangeLock>(steps: &[u8], unit: u64) {
    let lock = Arc::new(RangeLock::<L>::with_raw());
    let mut held: Vec<OwnedGuard<L>> = Vec::new();
    for step in steps.chunks_exact(4) {
        let (kind, a, b, c) = (step[0], u64::from(step[1]), u64::from(step[2]), step[3]);
        let chosen = usize::from(c).checked_rem(held.len());
        match (kind & 7, chosen) {
            (0..4, _) => {
                let range = ByteRange::at((a << 2 | b & 3) * unit, ((b >> 2) / 8 + 1) * unit);
                let range = range.expect("within bounds, not empty");
                let mode = if kind & 8 == 0 { Mode::Exclusive } else { Mode::Shared };
                let free = !held.iter().any(|other| {
                    other.range().overlaps(range) && other.mode().conflicts_with(mode)
                });
                let guard = lock.try_lock_owned(range, mode);
                assert_eq!(guard.is_some(), free, "{} {range} {mode:?}", L::NAME);
                held.extend(guard);
            }
            (4 | 5, Some(at)) => drop(held.swap_remove(at)),
            (6, Some(at)) => held[at].downgrade(),
            (7, Some(at)) => {
                let range = held[at].range();
                let alone = !held
                    .iter()
                    .enumerate()
                    .any(|(i, other)| i != at && other.range().overlaps(range));
                let was_shared = held[at].mode() == Mode::Shared;
                let upgraded = held[at].try_upgrade();
                assert!(!upgraded || alone || !was_shared, "{} upgraded {range}", L::NAME);
            }
            _ => {}
        }
    }
    held.clear();
    assert!(lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(), "{}: a range is still locked", L::NAME);
}

fuzz_target!(|input: &[u8]| {
    let Some((&shape, steps)) = input.split_first() else { return };
    let unit = [1, 512, 4096, 10_000][usize::from(shape & 3)];
    run::<Striped>(steps, unit);
    run::<IntervalTree>(steps, unit);
    run::<MutexBTree>(steps, unit);
    run::<OlcBTree>(steps, unit);
});
