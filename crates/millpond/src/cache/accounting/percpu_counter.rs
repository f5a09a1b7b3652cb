//! A per-CPU counter of bytes with batches: most updates change only a local counter. (Linux has
//! `percpu_counter`.)
//!
//! Each local counter holds bytes that are included in the total, but not in use. An update takes
//! bytes from it or returns bytes to it.
//!
//! ```text
//!   add:   local -= bytes;   if it has too few: total += a batch and the bytes; local += a batch
//!   sub:   local += bytes;   if it exceeds two batches: local := a batch; total -= the rest
//!   drain: local := 0; total -= its bytes
//! ```
//!
//! - **PC1** The total is the exact sum plus all local counters. It is raised before a local
//!   counter is, and lowered after one is. So it is never lower than the exact sum, and higher by
//!   at most two batches for each local counter. As with a plain atomic, a decrement may become
//!   visible before the increment that it cancels, so the total can be too low for a moment.
//! - **PC2** A thread that takes bytes from a local counter sees the total that includes them, and
//!   so does every thread that learns of the update: the local counter is increased with Release,
//!   and decreased with Acquire; the operations between are one release sequence.
//! - **PC3** No count is lost: `exact()` drains all local counters first, and is as exact as
//!   without them. If the batch is 0, which the caller passes for a total near its limit, or a
//!   small limit, no local counter grows.
//!
//! A local counter serves the threads of one shard. There are at least as many shards as
//! processors; two threads may share one.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crossbeam_utils::CachePadded;

use crate::sync::AtomicU64;

pub(in crate::cache) struct PerCpuCounter {
    total: CachePadded<AtomicU64>,
    locals: Box<[CachePadded<AtomicU64>]>,
}

impl PerCpuCounter {
    /// A counter with `locals` local counters.
    pub(in crate::cache) fn new(locals: usize) -> PerCpuCounter {
        let zero = || CachePadded::new(AtomicU64::new(0));
        PerCpuCounter { total: zero(), locals: (0..locals).map(|_| zero()).collect() }
    }

    /// The exact sum plus the local counters (PC1), without a write.
    pub(in crate::cache) fn upper_bound(&self) -> u64 {
        // Below zero for a moment, if a decrement is visible before its increment.
        (self.total.load(Relaxed) as i64).max(0) as u64
    }

    /// The exact sum (PC3).
    pub(in crate::cache) fn exact(&self) -> u64 {
        self.locals.iter().for_each(|local| self.drain(local, 0));
        self.upper_bound()
    }

    /// Adds `bytes`, by a thread of local counter `local`.
    pub(in crate::cache) fn add(&self, local: usize, bytes: u64, batch: u64) {
        let take = |has: u64| has.checked_sub(bytes);
        // PC2; pairs with the Release in `add_local`.
        if self.locals[local].fetch_update(Acquire, Relaxed, take).is_ok() {
            return;
        }
        self.total.fetch_add(bytes + batch, Relaxed);
        if batch > 0 {
            self.add_local(local, batch, batch);
        }
    }

    /// Subtracts `bytes`.
    pub(in crate::cache) fn sub(&self, local: usize, bytes: u64, batch: u64) {
        if batch > 0 {
            self.add_local(local, bytes, batch);
        } else {
            self.total.fetch_sub(bytes, Relaxed);
        }
    }

    fn add_local(&self, local: usize, bytes: u64, batch: u64) {
        let local = &self.locals[local];
        // PC2; pairs with the Acquire in `add` and `drain`.
        if local.fetch_add(bytes, Release) + bytes > 2 * batch {
            self.drain(local, batch);
        }
    }

    /// Reduces a local counter to `keep`.
    fn drain(&self, local: &AtomicU64, keep: u64) {
        let lower = |has: u64| (has > keep).then_some(keep);
        // Argued: PC1. Acquire makes the total be raised before it is lowered. A model with a
        // weaker ordering does not fail, as loom changes atomics in the order in which it runs the
        // threads. Pairs with the Release in `add_local`.
        if let Ok(has) = local.fetch_update(Acquire, Relaxed, lower) {
            self.total.fetch_sub(has - keep, Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;
    const BATCH: u64 = 4 * PAGE;

    /// Goal: the local counters are bounded, however often bytes are added and subtracted, and
    /// `exact` is exact (PC1, PC3).
    #[test]
    fn reserves_are_bounded() {
        let sum = PerCpuCounter::new(2);
        for _ in 0..100 {
            sum.add(0, PAGE, BATCH);
        }
        assert!((100 * PAGE..=102 * PAGE + BATCH).contains(&sum.upper_bound()));
        // By another thread than the one that added them.
        for left in (0..100).rev() {
            sum.sub(1, PAGE, BATCH);
            assert!((left * PAGE..=left * PAGE + 4 * BATCH).contains(&sum.upper_bound()));
        }
        assert!(sum.upper_bound() > 0);
        assert_eq!(sum.exact(), 0);
        assert_eq!(sum.upper_bound(), 0, "settled");
    }

    /// Goal: without batches the sum is exact, and earlier local counts are used up.
    #[test]
    fn no_batch_no_reserve() {
        let sum = PerCpuCounter::new(1);
        sum.add(0, PAGE, 0);
        assert_eq!(sum.upper_bound(), PAGE);
        sum.sub(0, PAGE, 0);
        assert_eq!(sum.upper_bound(), 0);
        sum.add(0, PAGE, BATCH);
        for more in 0..4 {
            assert_eq!(sum.upper_bound(), PAGE + BATCH);
            sum.add(0, PAGE, 0);
            assert!(sum.upper_bound() >= (2 + more) * PAGE);
        }
        assert_eq!([sum.upper_bound(), sum.exact()], [5 * PAGE; 2]);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::Arc;
    use loom::thread;

    const BATCH: u64 = 2;

    /// Goal: a thread that has added sees its bytes in the total, even if another thread raised it
    /// (PC2); the total is never below the exact sum. Method: two threads of one local counter add
    /// one each.
    #[test]
    fn loom_local_bytes_are_in_the_total() {
        loom::model(|| {
            let sum = Arc::new(PerCpuCounter::new(1));
            let other = thread::spawn({
                let sum = Arc::clone(&sum);
                move || {
                    sum.add(0, 1, BATCH);
                    assert!(sum.upper_bound() >= 1);
                }
            });
            sum.add(0, 1, BATCH);
            assert!(sum.upper_bound() >= 1);
            other.join().unwrap();
            assert!(sum.upper_bound() >= 2);
            assert_eq!(sum.exact(), 2);
        });
    }

    /// Goal: draining, concurrent with adding and subtracting, neither loses a byte nor makes the
    /// total too low (PC1, PC3). Method: the sum always includes one byte; a thread adds two and
    /// subtracts them again, at its own local counter, or at the one that is drained.
    #[test]
    fn loom_draining_races_updates() {
        for local in [0, 1] {
            loom::model(move || {
                let sum = Arc::new(PerCpuCounter::new(2));
                sum.add(0, 1, BATCH);
                let other = thread::spawn({
                    let sum = Arc::clone(&sum);
                    move || {
                        sum.add(local, 2, BATCH);
                        assert!(sum.upper_bound() >= 3);
                        sum.sub(local, 2, BATCH);
                    }
                });
                assert!(sum.exact() >= 1);
                other.join().unwrap();
                assert!(sum.upper_bound() >= 1);
                assert_eq!(sum.exact(), 1);
            });
        }
    }
}
