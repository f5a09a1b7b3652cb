//! A sum of bytes that many threads add to and take from, most of them without a line that all write: each has a
//! *local* at hand, of bytes that are in the sum already, and nobody's.
//!
//! ```text
//!   add:  local --- as many as are added ---> (owed)     none left: total += a batch and these; local += a batch
//!   sub:  local <-- as many as are taken ---- (owed)     over two batches: local := a batch; total -= the rest
//!   settle: each local := 0; total -= what it had
//! ```
//!
//! - **PC1** What is total is what is owed and all locals. It is raised before a local is, and lowered
//!   after one is: so it never says less than is owed, and as much more as there is in locals, of two batches
//!   each. The one moment where it does is the one that a sum without locals has: who takes what another adds
//!   may be the first of them to say so.
//! - **PC2** Who takes from a local, sees in the sum what was total for it, and so does everybody who learns
//!   of what is owed from then on: the local is added to with Release, and taken from with Acquire; what is
//!   between is one release sequence.
//! - **PC3** Nothing is stranded: a look that matters settles first, and has the sum as exact as without
//!   locals. Where the batch is 0, which the caller says of a sum near its limit, or of a small one, no
//!   local grows.
//!
//! A local is for the threads of a number, of which there are as many as processors or more; two of them may
//! meet there.
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
    /// With so many locals.
    pub(in crate::cache) fn new(locals: usize) -> PerCpuCounter {
        let zero = || CachePadded::new(AtomicU64::new(0));
        PerCpuCounter { total: zero(), locals: (0..locals).map(|_| zero()).collect() }
    }

    /// What is owed, and locals (PC1). Without a write.
    pub(in crate::cache) fn upper_bound(&self) -> u64 {
        // Below zero for a moment, where what is taken is noted before what was added.
        (self.total.load(Relaxed) as i64).max(0) as u64
    }

    /// What is owed (PC3).
    pub(in crate::cache) fn exact(&self) -> u64 {
        self.locals.iter().for_each(|local| self.drain(local, 0));
        self.upper_bound()
    }

    /// So many `bytes` more, by a thread of `local`.
    pub(in crate::cache) fn add(&self, local: usize, bytes: u64, batch: u64) {
        let take = |has: u64| has.checked_sub(bytes);
        // PC2; pairs with the Release in `put`.
        if self.locals[local].fetch_update(Acquire, Relaxed, take).is_ok() {
            return;
        }
        self.total.fetch_add(bytes + batch, Relaxed);
        if batch > 0 {
            self.add_local(local, batch, batch);
        }
    }

    /// So many less.
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

    /// Of what a local has, leaves `keep`.
    fn drain(&self, local: &AtomicU64, keep: u64) {
        let lower = |has: u64| (has > keep).then_some(keep);
        // Argued: PC1. Acquire has the sum raised before it is lowered; a model that weakens it sees nothing, as
        // loom's sums are changed in the order in which it runs the threads. Pairs with the Release in `put`.
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

    /// Goal: what locals have is bounded, however much comes and goes, and a look that settles is exact (PC1, PC3).
    #[test]
    fn reserves_are_bounded() {
        let sum = PerCpuCounter::new(2);
        for _ in 0..100 {
            sum.add(0, PAGE, BATCH);
        }
        assert!((100 * PAGE..=102 * PAGE + BATCH).contains(&sum.upper_bound()));
        // By another thread than added them.
        for left in (0..100).rev() {
            sum.sub(1, PAGE, BATCH);
            assert!((left * PAGE..=left * PAGE + 4 * BATCH).contains(&sum.upper_bound()));
        }
        assert!(sum.upper_bound() > 0);
        assert_eq!(sum.exact(), 0);
        assert_eq!(sum.upper_bound(), 0, "settled");
    }

    /// Goal: without batches the sum is exact, and what locals have from before is used.
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

    /// Goal: who has added sees it in the sum, though another thread total it (PC2); nobody sees less than is owed.
    /// Method: two threads of one local add one each.
    #[test]
    fn loom_what_is_taken_was_booked() {
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

    /// Goal: one that settles while others add and take neither loses a byte nor sees less than is owed (PC1, PC3).
    /// Method: one byte is owed all the time; a thread adds two and takes them again, in a local of its own,
    /// or in that of who settles.
    #[test]
    fn loom_settling_races_who_adds_and_takes() {
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
