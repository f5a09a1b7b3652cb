//! The loads of the suite, and the locks that run each.

use millpond_rangelock::Mode;

/// How the ranges of the threads lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Each thread in a part of the file of its own.
    Disjoint,
    /// Neighbouring ranges belong to different threads.
    Interleaved,
    /// All on one range.
    Same,
    /// All on the whole file.
    Whole,
}

/// The measured locks: range locks, and locks without ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Millpond's own.
    Striped,
    WholeFile,
    IntervalTree,
    MutexBTree,
    OlcBTree,
    /// `parking_lot::RwLock`, shared; for exclusive disjoint ranges the limit, as it excludes no
    /// thread.
    RwLockShared,
    /// `parking_lot::RwLock`, exclusive.
    RwLockExclusive,
    /// The same, handed over by `unlock_fair`: the order of waiters that range locks keep to.
    RwLockFair,
    /// `std`'s `BTreeMap` under its `Mutex`, no waiting: the floor of the trees.
    StdMap,
}

impl Lock {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Lock::Striped => "striped",
            Lock::WholeFile => "whole-file",
            Lock::IntervalTree => "interval-tree",
            Lock::MutexBTree => "mutex-btree",
            Lock::OlcBTree => "olc-btree",
            Lock::RwLockShared => "parking_lot RwLock, shared",
            Lock::RwLockExclusive => "parking_lot RwLock, exclusive",
            Lock::RwLockFair => "parking_lot RwLock, fair",
            Lock::StdMap => "std BTreeMap in a Mutex",
        }
    }

    /// The reason why this lock can't run a load; `None` if it can.
    fn gap(self, load: &LockLoad) -> Option<&'static str> {
        use Lock::{RwLockExclusive, RwLockFair, RwLockShared, StdMap, WholeFile};
        let one_for_all = matches!(self, WholeFile | RwLockShared | RwLockExclusive | RwLockFair);
        let overlap = matches!(load.layout, Layout::Same | Layout::Whole);
        match self {
            _ if one_for_all && load.held > 1 => {
                Some("one lock for the whole file: a second range would wait for the first")
            }
            StdMap if load.mode == Mode::Shared => Some("it has no shared mode"),
            StdMap if overlap => Some("it has no way to wait for a range that is held"),
            _ => None,
        }
    }
}

/// What each thread locks.
#[derive(Clone, Copy, Debug)]
pub struct LockLoad {
    pub name: &'static str,
    pub layout: Layout,
    pub mode: Mode,
    /// Ranges that each thread holds at once.
    pub held: usize,
}

impl LockLoad {
    /// Whether threads wait for each other, so that the time differs from pair to pair.
    fn is_contended(&self) -> bool {
        matches!(self.layout, Layout::Same | Layout::Whole) && self.mode == Mode::Exclusive
    }
}

/// One load on one number of threads.
#[derive(Clone, Debug)]
pub struct LockCase {
    pub load: LockLoad,
    pub threads: usize,
    /// The locks that run it; [`Lock::Striped`] comes first.
    pub locks: Vec<Lock>,
    /// The locks that can't run it, and why.
    pub gaps: Vec<(Lock, &'static str)>,
}

impl LockCase {
    /// Whether its threads wait for each other.
    pub fn is_contended(&self) -> bool {
        self.load.is_contended() && self.threads > 1
    }
}

const fn load(name: &'static str, layout: Layout, mode: Mode, held: usize) -> LockLoad {
    LockLoad { name, layout, mode, held }
}

/// Run with every number of threads; loads with contention with at least two.
const LOADS: [LockLoad; 8] = {
    use Layout::{Disjoint, Interleaved, Same, Whole};
    use Mode::{Exclusive, Shared};
    [
        load("1-held-disjoint", Disjoint, Exclusive, 1),
        load("1-held-interleaved", Interleaved, Exclusive, 1),
        load("100-held-disjoint", Disjoint, Exclusive, 100),
        load("100-held-interleaved", Interleaved, Exclusive, 100),
        load("shared-same-range", Same, Shared, 1),
        load("shared-full-range", Whole, Shared, 1),
        load("same-range", Same, Exclusive, 1),
        load("full-range", Whole, Exclusive, 1),
    ]
};

/// Many held at once, by all threads together.
const MANY: &str = "50000-held";
const MANY_HELD: usize = 50_000;
/// Acquiring them takes long, so this load runs with one number of threads.
const MANY_THREADS: usize = 2;

/// 1, 2, one for each processor, two, four.
pub fn thread_counts() -> Vec<usize> {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let mut threads = vec![1, 2, cores, 2 * cores, 4 * cores];
    threads.sort_unstable();
    threads.dedup();
    threads
}

/// The cases, for so many threads each.
pub fn cases(thread_counts: &[usize]) -> Vec<LockCase> {
    let mut cases = Vec::new();
    for &threads in thread_counts {
        let loads = LOADS.iter().filter(|load| threads > 1 || !load.is_contended());
        cases.extend(loads.map(|load| case(load, threads)));
        if threads == MANY_THREADS {
            let held = MANY_HELD / threads;
            cases.push(case(&load(MANY, Layout::Disjoint, Mode::Exclusive, held), threads));
        }
    }
    cases
}

fn case(load: &LockLoad, threads: usize) -> LockCase {
    use Lock::{IntervalTree, MutexBTree, OlcBTree, RwLockExclusive, RwLockFair, RwLockShared};
    // Exclusive ranges that don't overlap are compared with a lock that excludes no thread: the
    // limit.
    let rwlocks: &[Lock] =
        if load.is_contended() { &[RwLockExclusive, RwLockFair] } else { &[RwLockShared] };
    let range_locks = [Lock::Striped, Lock::WholeFile, IntervalTree, MutexBTree, OlcBTree];
    let (mut locks, mut gaps) = (Vec::new(), Vec::new());
    for &lock in range_locks.iter().chain(rwlocks).chain(&[Lock::StdMap]) {
        match lock.gap(load) {
            None => locks.push(lock),
            Some(reason) => gaps.push((lock, reason)),
        }
    }
    LockCase { load: *load, threads, locks, gaps }
}
