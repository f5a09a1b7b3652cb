//! A sum of bytes that many threads add to and take from, most of them without a line that all write: each has a
//! *reserve* at hand, of bytes that are in the sum already, and nobody's.
//!
//! ```text
//!   add:  reserve --- as many as are added ---> (owed)     none left: booked += a batch and these; reserve += a batch
//!   sub:  reserve <-- as many as are taken ---- (owed)     over two batches: reserve := a batch; booked -= the rest
//!   settle: each reserve := 0; booked -= what it had
//! ```
//!
//! - **PC1** What is booked is what is owed and all reserves. It is raised before a reserve is, and lowered
//!   after one is: so it never says less than is owed, and as much more as there is in reserves, of two batches
//!   each. The one moment where it does is the one that a sum without reserves has: who takes what another adds
//!   may be the first of them to say so.
//! - **PC2** Who takes from a reserve, sees in the sum what was booked for it, and so does everybody who learns
//!   of what is owed from then on: the reserve is added to with Release, and taken from with Acquire; what is
//!   between is one release sequence.
//! - **PC3** Nothing is stranded: a look that matters settles first, and has the sum as exact as without
//!   reserves. Where the batch is 0, which the caller says of a sum near its limit, or of a small one, no
//!   reserve grows.
//!
//! A reserve is for the threads of a number, of which there are as many as processors or more; two of them may
//! meet there.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crossbeam_utils::CachePadded;

use crate::sync::AtomicU64;

pub(in crate::cache) struct Sum {
    booked: CachePadded<AtomicU64>,
    reserves: Box<[CachePadded<AtomicU64>]>,
}

impl Sum {
    /// With so many reserves.
    pub(in crate::cache) fn new(reserves: usize) -> Sum {
        let zero = || CachePadded::new(AtomicU64::new(0));
        Sum { booked: zero(), reserves: (0..reserves).map(|_| zero()).collect() }
    }

    /// What is owed, and reserves (PC1). Without a write.
    pub(in crate::cache) fn at_most(&self) -> u64 {
        // Below zero for a moment, where what is taken is noted before what was added.
        (self.booked.load(Relaxed) as i64).max(0) as u64
    }

    /// What is owed (PC3).
    pub(in crate::cache) fn exact(&self) -> u64 {
        self.reserves.iter().for_each(|reserve| self.give_back(reserve, 0));
        self.at_most()
    }

    /// So many `bytes` more, by a thread of `reserve`.
    pub(in crate::cache) fn add(&self, reserve: usize, bytes: u64, batch: u64) {
        let take = |has: u64| has.checked_sub(bytes);
        // PC2; pairs with the Release in `put`.
        if self.reserves[reserve].fetch_update(Acquire, Relaxed, take).is_ok() {
            return;
        }
        self.booked.fetch_add(bytes + batch, Relaxed);
        if batch > 0 {
            self.put(reserve, batch, batch);
        }
    }

    /// So many less.
    pub(in crate::cache) fn sub(&self, reserve: usize, bytes: u64, batch: u64) {
        if batch > 0 {
            self.put(reserve, bytes, batch);
        } else {
            self.booked.fetch_sub(bytes, Relaxed);
        }
    }

    fn put(&self, reserve: usize, bytes: u64, batch: u64) {
        let reserve = &self.reserves[reserve];
        // PC2; pairs with the Acquire in `add` and `give_back`.
        if reserve.fetch_add(bytes, Release) + bytes > 2 * batch {
            self.give_back(reserve, batch);
        }
    }

    /// Of what a reserve has, leaves `keep`.
    fn give_back(&self, reserve: &AtomicU64, keep: u64) {
        let lower = |has: u64| (has > keep).then_some(keep);
        // Argued: PC1. Acquire has the sum raised before it is lowered; a model that weakens it sees nothing, as
        // loom's sums are changed in the order in which it runs the threads. Pairs with the Release in `put`.
        if let Ok(has) = reserve.fetch_update(Acquire, Relaxed, lower) {
            self.booked.fetch_sub(has - keep, Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;
    const BATCH: u64 = 4 * PAGE;

    /// Goal: what reserves have is bounded, however much comes and goes, and a look that settles is exact (PC1, PC3).
    #[test]
    fn reserves_are_bounded() {
        let sum = Sum::new(2);
        for _ in 0..100 {
            sum.add(0, PAGE, BATCH);
        }
        assert!((100 * PAGE..=102 * PAGE + BATCH).contains(&sum.at_most()));
        // By another thread than added them.
        for left in (0..100).rev() {
            sum.sub(1, PAGE, BATCH);
            assert!((left * PAGE..=left * PAGE + 4 * BATCH).contains(&sum.at_most()));
        }
        assert!(sum.at_most() > 0);
        assert_eq!(sum.exact(), 0);
        assert_eq!(sum.at_most(), 0, "settled");
    }

    /// Goal: without batches the sum is exact, and what reserves have from before is used.
    #[test]
    fn no_batch_no_reserve() {
        let sum = Sum::new(1);
        sum.add(0, PAGE, 0);
        assert_eq!(sum.at_most(), PAGE);
        sum.sub(0, PAGE, 0);
        assert_eq!(sum.at_most(), 0);
        sum.add(0, PAGE, BATCH);
        for more in 0..4 {
            assert_eq!(sum.at_most(), PAGE + BATCH);
            sum.add(0, PAGE, 0);
            assert!(sum.at_most() >= (2 + more) * PAGE);
        }
        assert_eq!([sum.at_most(), sum.exact()], [5 * PAGE; 2]);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::Arc;
    use loom::thread;

    const BATCH: u64 = 2;

    /// Goal: who has added sees it in the sum, though another thread booked it (PC2); nobody sees less than is owed.
    /// Method: two threads of one reserve add one each.
    #[test]
    fn loom_what_is_taken_was_booked() {
        loom::model(|| {
            let sum = Arc::new(Sum::new(1));
            let other = thread::spawn({
                let sum = Arc::clone(&sum);
                move || {
                    sum.add(0, 1, BATCH);
                    assert!(sum.at_most() >= 1);
                }
            });
            sum.add(0, 1, BATCH);
            assert!(sum.at_most() >= 1);
            other.join().unwrap();
            assert!(sum.at_most() >= 2);
            assert_eq!(sum.exact(), 2);
        });
    }

    /// Goal: one that settles while others add and take neither loses a byte nor sees less than is owed (PC1, PC3).
    /// Method: one byte is owed all the time; a thread adds two and takes them again, in a reserve of its own,
    /// or in that of who settles.
    #[test]
    fn loom_settling_races_who_adds_and_takes() {
        for reserve in [0, 1] {
            loom::model(move || {
                let sum = Arc::new(Sum::new(2));
                sum.add(0, 1, BATCH);
                let other = thread::spawn({
                    let sum = Arc::clone(&sum);
                    move || {
                        sum.add(reserve, 2, BATCH);
                        assert!(sum.at_most() >= 3);
                        sum.sub(reserve, 2, BATCH);
                    }
                });
                assert!(sum.exact() >= 1);
                other.join().unwrap();
                assert!(sum.at_most() >= 1);
                assert_eq!(sum.exact(), 1);
            });
        }
    }
}
