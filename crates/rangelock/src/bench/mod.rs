//! The benchmark behind `millpond bench range-lock` (feature `bench`).
//!
//! Every case runs all its engines in one process, interleaved: each round measures them in
//! order and then in reverse (A B C C B A), so that drift of the machine cancels, and a ratio is
//! taken within its round. What is reported is the median of the rounds.
//!
//! ```no_run
//! use millpond_rangelock::bench::{Options, cases, measure};
//! for case in cases(&Options::default()) {
//!     for row in measure(&case, &Options::default()) {
//!         println!("{} {} {}: {:.1} ns", row.case, row.engine, row.threads, row.ns_per_op);
//!     }
//! }
//! ```

mod workload;

use std::time::Duration;

use workload::{Load, Sample, run};

/// How long, and how often.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rounds; each measures every engine twice.
    pub rounds: usize,
    /// The time of one measurement.
    pub slice: Duration,
    /// Thread counts; a case may restrict them.
    pub threads: Vec<usize>,
    /// Rounds in which other processes took more than this part of the processors are made
    /// again, until there have been twice `rounds`; then the least disturbed count.
    pub others_max: f64,
}

impl Default for Options {
    /// By the contract: 15 rounds, up to four threads for each processor.
    fn default() -> Options {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = [1, 2, cores, 2 * cores, 4 * cores];
        let mut threads: Vec<usize> = threads.into();
        threads.sort_unstable();
        threads.dedup();
        Options { rounds: 15, slice: Duration::from_millis(50), threads, others_max: 0.05 }
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
    /// `parking_lot::RwLock`, shared.
    RwLockShared,
    /// `parking_lot::RwLock`, exclusive, handed over by `unlock_fair`.
    RwLockFair,
    /// `std`'s `BTreeMap` under its `Mutex`, no waiting: the yardstick of the trees.
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
            Engine::RwLockShared => "parking_lot-shared",
            Engine::RwLockFair => "parking_lot-fair",
            Engine::StdMap => "std-btreemap-mutex",
        }
    }
}

/// One load on one number of threads.
#[derive(Clone, Debug)]
pub struct Case {
    /// The name in tables.
    pub name: String,
    /// Threads.
    pub threads: usize,
    /// Ranges that each thread holds at once.
    pub held: usize,
    /// Where they lie.
    pub layout: Layout,
    /// Shared or exclusive.
    pub mode: crate::Mode,
    /// Who takes part.
    pub engines: Vec<Engine>,
    /// Which of them the ratios are to.
    pub peer: Engine,
}

/// One line of the result, in the fields of the contract.
#[derive(Clone, Debug)]
pub struct Row {
    /// The case.
    pub case: String,
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

/// The cases of the contract.
pub fn cases(options: &Options) -> Vec<Case> {
    use crate::Mode::{Exclusive, Shared};
    let locks = [
        Engine::Striped,
        Engine::WholeFile,
        Engine::IntervalTree,
        Engine::MutexBTree,
        Engine::OlcBTree,
    ];
    let mut cases = Vec::new();
    let mut add = |name: &str, threads, held, layout, mode, engines: &[Engine], peer| {
        let (name, engines) = (name.to_string(), engines.to_vec());
        cases.push(Case { name, threads, held, layout, mode, engines, peer });
    };
    for &threads in &options.threads {
        let with = |peer| [&locks[..], &[peer]].concat();
        let shared = with(Engine::RwLockShared);
        // Trees that hold many cannot take the whole file for every range.
        let many: Vec<Engine> =
            locks.iter().copied().filter(|&lock| lock != Engine::WholeFile).collect();
        let yardstick = [&many[..], &[Engine::StdMap]].concat();
        let peer = Engine::RwLockShared;
        add("1-held-disjoint", threads, 1, Layout::Disjoint, Exclusive, &shared, peer);
        add("1-held-interleaved", threads, 1, Layout::Interleaved, Exclusive, &shared, peer);
        let peer = Engine::IntervalTree;
        add("100-held-disjoint", threads, 100, Layout::Disjoint, Exclusive, &yardstick, peer);
        add("100-held-interleaved", threads, 100, Layout::Interleaved, Exclusive, &yardstick, peer);
        add("shared-whole", threads, 1, Layout::Whole, Shared, &shared, Engine::RwLockShared);
        if threads > 1 {
            let fair = with(Engine::RwLockFair);
            add("same-range", threads, 1, Layout::Same, Exclusive, &fair, Engine::RwLockFair);
        }
        if threads == 2 {
            let peer = Engine::IntervalTree;
            add("50000-held", threads, 25_000, Layout::Disjoint, Exclusive, &yardstick, peer);
        }
    }
    cases
}

/// Measures one case: a row for each engine.
pub fn measure(case: &Case, options: &Options) -> Vec<Row> {
    let engines = &case.engines;
    // Warm-up: caches, the locks' own growth, the clock of the processor.
    for &engine in engines {
        run(engine, case, options.slice / 4);
    }
    let mut tries: Vec<(f64, Vec<Sample>)> = Vec::new();
    let is_quiet = |&&(others, _): &&(f64, _)| others <= options.others_max;
    while tries.iter().filter(is_quiet).count() < options.rounds && tries.len() < 2 * options.rounds
    {
        let load = Load::begin();
        let there: Vec<Sample> = engines.iter().map(|&e| run(e, case, options.slice)).collect();
        let back = engines.iter().rev().map(|&e| run(e, case, options.slice));
        let back: Vec<Sample> = back.collect();
        let both = there.iter().zip(back.iter().rev()).map(|(&there, &back)| there + back);
        tries.push((load.others(), both.collect()));
    }
    tries.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    tries.truncate(options.rounds);
    let rounds: Vec<Vec<Sample>> =
        (0..engines.len()).map(|at| tries.iter().map(|(_, round)| round[at]).collect()).collect();
    let peer = engines.iter().position(|&e| e == case.peer).unwrap_or(0);
    (0..engines.len())
        .map(|at| row(case, engines[at], &rounds[at], engines[peer], &rounds[peer]))
        .collect()
}

fn row(case: &Case, engine: Engine, own: &[Sample], peer: Engine, theirs: &[Sample]) -> Row {
    let median = |f: &dyn Fn(&Sample) -> f64| quantile(own.iter().map(f).collect(), 0.5);
    let ratios: Vec<f64> =
        own.iter().zip(theirs).map(|(a, b)| a.ops_per_s() / b.ops_per_s()).collect();
    let ops_per_s = median(&Sample::ops_per_s);
    Row {
        case: case.name.clone(),
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
