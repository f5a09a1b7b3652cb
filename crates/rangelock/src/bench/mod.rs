//! The benchmark behind `millpond bench range-lock` (feature `bench`).
//!
//! [`cases`] says what is measured, and who takes part. [`slice()`] and [`latencies`] measure one
//! engine once; the command orders them in pairs. [`measure`] does a whole case, interleaved: each
//! round measures all engines in order and then in reverse (A B C C B A), so that drift of the
//! machine cancels, and a ratio is taken within its round. What is reported is the median of the
//! rounds.
//!
//! ```no_run
//! use millpond_rangelock::bench::{Options, cases, measure};
//! for case in cases(&Options::default()) {
//!     for row in measure(&case, &Options::default()) {
//!         println!("{} {} {}: {:.1} ns", row.case, row.engine, row.threads, row.ns_per_op);
//!     }
//! }
//! ```

mod histogram;
mod workload;

use std::time::Duration;

use crate::Mode;

pub use histogram::{Histogram, Latencies};
pub use workload::{Slice, latencies, slice};

/// How long, and how often.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rounds; each measures every engine twice.
    pub rounds: usize,
    /// The time of one measurement.
    pub slice: Duration,
    /// Thread counts; a case may restrict them.
    pub threads: Vec<usize>,
}

impl Default for Options {
    /// By the contract: 15 rounds, up to four threads for each processor.
    fn default() -> Options {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = [1, 2, cores, 2 * cores, 4 * cores];
        let mut threads: Vec<usize> = threads.into();
        threads.sort_unstable();
        threads.dedup();
        Options { rounds: 15, slice: Duration::from_millis(50), threads }
    }
}

impl Options {
    /// As the default, with 5 rounds.
    pub fn quick() -> Options {
        Options { rounds: 5, slice: Duration::from_millis(20), ..Options::default() }
    }
}

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

/// Who is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// [`Striped`](crate::Striped).
    Striped,
    /// [`WholeFile`](crate::peers::WholeFile).
    WholeFile,
    /// [`IntervalTree`](crate::peers::IntervalTree).
    IntervalTree,
    /// [`MutexBTree`](crate::peers::MutexBTree).
    MutexBTree,
    /// [`OlcBTree`](crate::peers::OlcBTree).
    OlcBTree,
    /// `parking_lot::RwLock`, shared; where ranges are exclusive, the limit: it excludes nobody.
    RwLockShared,
    /// `parking_lot::RwLock`, exclusive.
    RwLockExclusive,
    /// The same, handed over by `unlock_fair`: the order of waiters that range locks keep to.
    RwLockFair,
    /// `std`'s `BTreeMap` under its `Mutex`, no waiting: the floor of the trees.
    StdMap,
}

impl Engine {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Striped => "striped",
            Engine::WholeFile => "whole-file",
            Engine::IntervalTree => "interval-tree",
            Engine::MutexBTree => "mutex-btree",
            Engine::OlcBTree => "olc-btree",
            Engine::RwLockShared => "parking_lot RwLock, shared",
            Engine::RwLockExclusive => "parking_lot RwLock, exclusive",
            Engine::RwLockFair => "parking_lot RwLock, fair",
            Engine::StdMap => "std BTreeMap in a Mutex",
        }
    }

    /// Why this one can't run a load; `None` where it can.
    fn gap(self, layout: Layout, held: usize, mode: Mode) -> Option<&'static str> {
        use Engine::{RwLockExclusive, RwLockFair, RwLockShared, StdMap, WholeFile};
        let one_for_all = matches!(self, WholeFile | RwLockShared | RwLockExclusive | RwLockFair);
        let overlap = matches!(layout, Layout::Same | Layout::Whole);
        match self {
            _ if one_for_all && held > 1 => {
                Some("one lock for the whole file: a second range would wait for the first")
            }
            StdMap if mode == Mode::Shared => Some("it has no shared mode"),
            StdMap if overlap => Some("it has no way to wait for a range that is held"),
            _ => None,
        }
    }
}

/// One load on one number of threads.
#[derive(Clone, Debug)]
pub struct Case {
    /// The name in tables.
    pub name: &'static str,
    /// Threads.
    pub threads: usize,
    /// Ranges that each thread holds at once.
    pub held: usize,
    /// Where they lie.
    pub layout: Layout,
    /// Shared or exclusive.
    pub mode: Mode,
    /// Who takes part; [`Engine::Striped`] comes first.
    pub engines: Vec<Engine>,
    /// Who can't, and why.
    pub gaps: Vec<(Engine, &'static str)>,
    /// Which of the engines the ratios are to.
    pub peer: Engine,
}

impl Case {
    /// Whether threads wait for each other, so that how long it takes differs from pair to pair.
    pub fn is_contended(&self) -> bool {
        let overlap = matches!(self.layout, Layout::Same | Layout::Whole);
        overlap && self.mode == Mode::Exclusive && self.threads > 1
    }
}

/// One line of the result, in the fields of the contract.
#[derive(Clone, Debug)]
pub struct Row {
    /// The case.
    pub case: &'static str,
    /// The engine.
    pub engine: &'static str,
    /// Threads.
    pub threads: usize,
    /// Lock and unlock pairs a second, all threads together.
    pub ops_per_s: f64,
    /// Nanoseconds for each pair of one thread: `threads / ops_per_s`.
    pub ns_per_op: f64,
    /// Processor time for each pair.
    pub cpu_ns_per_op: f64,
    /// Context switches for each pair.
    pub context_switches_per_op: f64,
    /// Rounds measured.
    pub rounds: usize,
    /// What the ratios are to.
    pub ratio_to: &'static str,
    /// Median over the rounds of `ops_per_s` against the peer's.
    pub ratio_median: f64,
    /// First quartile of it.
    pub ratio_q1: f64,
    /// Third quartile of it.
    pub ratio_q3: f64,
}

/// The loads of the contract; [`cases`] gives each to every number of threads.
struct Load {
    name: &'static str,
    held: usize,
    layout: Layout,
    mode: Mode,
    peer: Engine,
}

const fn load(name: &'static str, layout: Layout, mode: Mode, held: usize, peer: Engine) -> Load {
    Load { name, held, layout, mode, peer }
}

const LOADS: [Load; 8] = {
    use Engine::{IntervalTree, RwLockFair, RwLockShared};
    use Layout::{Disjoint, Interleaved, Same, Whole};
    use Mode::{Exclusive, Shared};
    [
        load("1-held-disjoint", Disjoint, Exclusive, 1, RwLockShared),
        load("1-held-interleaved", Interleaved, Exclusive, 1, RwLockShared),
        load("100-held-disjoint", Disjoint, Exclusive, 100, IntervalTree),
        load("100-held-interleaved", Interleaved, Exclusive, 100, IntervalTree),
        load("shared-same-range", Same, Shared, 1, RwLockShared),
        load("shared-full-range", Whole, Shared, 1, RwLockShared),
        load("same-range", Same, Exclusive, 1, RwLockFair),
        load("full-range", Whole, Exclusive, 1, RwLockFair),
    ]
};

/// Many held at once, by all threads together.
const MANY: &str = "50000-held";
const MANY_HELD: usize = 50_000;
/// The filling takes its time: not for every number of threads.
const MANY_THREADS: usize = 2;

/// The cases of the contract.
pub fn cases(options: &Options) -> Vec<Case> {
    let mut cases = Vec::new();
    for &threads in &options.threads {
        // Alone, there is nobody to wait for.
        let loads = LOADS.iter().filter(|load| threads > 1 || load.peer != Engine::RwLockFair);
        cases.extend(loads.map(|load| case(load, threads)));
        if threads == MANY_THREADS {
            let held = MANY_HELD / threads;
            let tree = Engine::IntervalTree;
            cases.push(case(&load(MANY, Layout::Disjoint, Mode::Exclusive, held, tree), threads));
        }
    }
    cases
}

fn case(load: &Load, threads: usize) -> Case {
    let &Load { name, held, layout, mode, peer } = load;
    // Exclusive ranges that don't overlap meet the lock that excludes nobody: the limit.
    let waits = peer == Engine::RwLockFair;
    let rwlocks: &[Engine] = if waits {
        &[Engine::RwLockExclusive, Engine::RwLockFair]
    } else {
        &[Engine::RwLockShared]
    };
    let locks = [
        Engine::Striped,
        Engine::WholeFile,
        Engine::IntervalTree,
        Engine::MutexBTree,
        Engine::OlcBTree,
    ];
    let (mut engines, mut gaps) = (Vec::new(), Vec::new());
    for &engine in locks.iter().chain(rwlocks).chain(&[Engine::StdMap]) {
        match engine.gap(layout, held, mode) {
            None => engines.push(engine),
            Some(reason) => gaps.push((engine, reason)),
        }
    }
    Case { name, threads, held, layout, mode, engines, gaps, peer }
}

/// Measures one case: a row for each engine.
pub fn measure(case: &Case, options: &Options) -> Vec<Row> {
    let engines = &case.engines;
    // Warm-up: caches, the locks' own growth, the clock of the processor.
    for &engine in engines {
        slice(engine, case, options.slice / 4);
    }
    let mut rounds: Vec<Vec<Slice>> = vec![Vec::new(); engines.len()];
    for _ in 0..options.rounds {
        let there: Vec<Slice> = engines.iter().map(|&e| slice(e, case, options.slice)).collect();
        let back = engines.iter().rev().map(|&e| slice(e, case, options.slice));
        let back: Vec<Slice> = back.collect();
        for (at, samples) in rounds.iter_mut().enumerate() {
            samples.push(there[at] + back[engines.len() - 1 - at]);
        }
    }
    let peer = engines.iter().position(|&e| e == case.peer).unwrap_or(0);
    (0..engines.len())
        .map(|at| row(case, engines[at], &rounds[at], engines[peer], &rounds[peer]))
        .collect()
}

fn row(case: &Case, engine: Engine, own: &[Slice], peer: Engine, theirs: &[Slice]) -> Row {
    let median = |f: &dyn Fn(&Slice) -> f64| quantile(own.iter().map(f).collect(), 0.5);
    let ratios: Vec<f64> =
        own.iter().zip(theirs).map(|(a, b)| a.ops_per_s() / b.ops_per_s()).collect();
    let ops_per_s = median(&Slice::ops_per_s);
    Row {
        case: case.name,
        engine: engine.name(),
        threads: case.threads,
        ops_per_s,
        ns_per_op: case.threads as f64 * 1e9 / ops_per_s,
        cpu_ns_per_op: median(&|s| s.cpu_ns / s.ops),
        context_switches_per_op: median(&|s| s.switches / s.ops),
        rounds: own.len(),
        ratio_to: peer.name(),
        ratio_median: quantile(ratios.clone(), 0.5),
        ratio_q1: quantile(ratios.clone(), 0.25),
        ratio_q3: quantile(ratios, 0.75),
    }
}

fn quantile(mut values: Vec<f64>, q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(((values.len() - 1) as f64 * q).round() as usize).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every engine runs every case that it is listed for, and the others say why not.
    #[test]
    fn every_engine_runs_or_says_why_not() {
        let options = Options { threads: vec![1, 2, 3], ..Options::quick() };
        let cases = cases(&options);
        for name in LOADS.iter().map(|load| load.name).chain([MANY]) {
            assert!(cases.iter().any(|case| case.name == name && case.threads == 2), "{name}");
        }
        for case in &cases {
            assert_eq!(case.engines[0], Engine::Striped);
            assert!(case.engines.contains(&case.peer), "{case:?}");
            assert_eq!(case.engines.len() + case.gaps.len(), 7 + usize::from(case.is_contended()));
            for &engine in &case.engines {
                let slice = slice(engine, case, Duration::from_millis(1));
                assert!(slice.ops > 0.0 && slice.ops_per_s() > 0.0, "{case:?}: {engine:?}");
                if case.is_contended() {
                    let took = latencies(engine, case, Duration::from_millis(1));
                    assert!(took.p50_ns <= took.p99_ns && took.p99_ns <= took.p999_ns);
                    assert!(took.p50_ns > 0.0, "{case:?}: {engine:?}");
                }
            }
        }
    }
}
