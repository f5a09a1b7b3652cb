//! Tests of locks that grow within a budget.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Weak};

use millpond_rangelock::{Budget, ByteRange, Guard, Mode, RangeLock};

struct Purse {
    left: AtomicUsize,
    asked: AtomicUsize,
}

impl Purse {
    fn new(bytes: usize) -> Arc<Purse> {
        Arc::new(Purse { left: AtomicUsize::new(bytes), asked: AtomicUsize::new(0) })
    }

    fn left(&self) -> usize {
        self.left.load(SeqCst)
    }
}

impl Budget for Purse {
    fn try_take(&self, bytes: usize) -> bool {
        self.asked.fetch_add(1, SeqCst);
        self.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(bytes)).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.left.fetch_add(bytes, SeqCst);
    }
}

fn lock_with(purse: &Arc<Purse>) -> RangeLock {
    let budget: Weak<dyn Budget> = Arc::<Purse>::downgrade(purse);
    RangeLock::new().with_budget(budget)
}

fn range(number: u64) -> ByteRange {
    ByteRange::at(number << 13, 100).unwrap()
}

/// Holds `ranges` ranges at once, each in a separate region.
fn hold(lock: &RangeLock, ranges: u64) -> Vec<Guard<'_>> {
    (0..ranges).map(|number| lock.try_lock(range(number), Mode::Exclusive).unwrap()).collect()
}

/// Goal: a lock takes all memory of its growth from the budget, and returns it when it is dropped.
#[test]
fn tables_take_budget_and_return_it() {
    const PLENTY: usize = 64 << 20;
    let purse = Purse::new(PLENTY);
    let lock = lock_with(&purse);
    drop(hold(&lock, 7));
    assert_eq!(purse.left(), PLENTY, "it has not grown");
    drop(hold(&lock, 8));
    // A table of 64 stripes of 128 bytes.
    assert_eq!(PLENTY - purse.left(), 64 * 128);
    drop(hold(&lock, 3000));
    // And the next tables, in addition to the ones they replaced.
    let taken = PLENTY - purse.left();
    assert!(
        [1, 4, 16, 64, 256]
            .iter()
            .scan(0, |sum, part| {
                *sum += part * 64 * 128;
                Some(*sum)
            })
            .any(|sum| sum == taken),
        "{taken}"
    );
    assert!(taken > 64 * 128);
    drop(lock);
    assert_eq!(purse.left(), PLENTY);
}

/// Goal: a lock that may not grow, or whose budget was dropped, still locks and excludes.
#[test]
fn a_lock_without_budget_still_excludes() {
    for gone in [false, true] {
        let purse = Purse::new(64 * 128 + 100);
        let lock = lock_with(&purse);
        drop(hold(&lock, 8));
        assert_eq!(purse.left(), 100);
        let asked = purse.asked.load(SeqCst);
        let purse = if gone { None } else { Some(purse) };
        let guards = hold(&lock, 3000);
        for number in 0..3000 {
            assert!(lock.try_lock(range(number), Mode::Shared).is_none());
        }
        drop(guards);
        assert!(lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some());
        if let Some(purse) = &purse {
            assert!(purse.asked.load(SeqCst) > asked, "it was not full");
            assert_eq!(purse.left(), 100);
        }
        drop(lock);
        assert!(purse.is_none_or(|purse| purse.left() == 64 * 128 + 100));
    }
}
