//! The suite `range-lock`: locks on byte ranges, without files.
//!
//! The subject is Millpond's own lock, the peers are the other locks of the crate
//! `millpond-rangelock`, `parking_lot::RwLock` (where ranges don't overlap, taken shared: the limit)
//! and a `BTreeMap` under a `Mutex`, the floor of what keeps ranges in a tree. Loads and threads are
//! [`rangelock::bench`]'s, an operation is a pair of lock and unlock.

use std::thread;
use std::time::Duration;

use millpond_rangelock::bench::{self as rangelock, Case, Engine, Latencies};

use super::harness::{Outcome, Pair, Plan, Row, Skipped, Slice};
use crate::failure::Result;

/// Slices that are taken to see how long single operations take: the longest are rare.
const LATENCY_SLICES: u32 = 4;

/// With less than this part of the processors, threads don't meet as they would: the figures say
/// little.
const PROCESSORS_SHARE_MIN: f64 = 0.9;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut occupied = Occupied::default();
    for case in rangelock::cases(&rangelock::Options::default()) {
        if plan.wants(case.name) {
            eprintln!("measuring {} with {} thread(s)", case.name, case.threads);
            outcome.note(format!("{} is Millpond's own lock", Engine::Striped.name()));
            compare(&case, plan, &mut outcome, &mut occupied)?;
        }
    }
    outcome.notes.extend(occupied.note());
    Ok(outcome)
}

fn compare(case: &Case, plan: &Plan, outcome: &mut Outcome, occupied: &mut Occupied) -> Result<()> {
    let length = plan.slice(50, 15);
    let latencies = latencies(case, length * LATENCY_SLICES);
    let subject = Engine::Striped;
    for &peer in case.engines.iter().filter(|engine| **engine != subject) {
        for engine in [subject, peer] {
            slice(engine, case, length);
        }
        let pair = Pair {
            case: case.name,
            threads: case.threads as u32,
            block_bytes: None,
            subject: subject.name(),
            peer: peer.name(),
        };
        let measure = |engine| move || Ok(slice(engine, case, length));
        let [own, other] = pair.measure(plan.rounds, measure(subject), measure(peer))?;
        if !case.is_contended() {
            occupied.look_at(&own);
        }
        outcome.rows.push(with_latencies(own, subject, &latencies));
        outcome.rows.push(with_latencies(other, peer, &latencies));
    }
    for (engine, reason) in &case.gaps {
        // Once for all numbers of threads.
        let told = |gap: &Skipped| gap.case == case.name && gap.engine == engine.name();
        if !outcome.skipped.iter().any(told) {
            outcome.skip(case.name, engine.name(), reason);
        }
    }
    Ok(())
}

fn slice(engine: Engine, case: &Case, length: Duration) -> Slice {
    let found = rangelock::slice(engine, case, length);
    Slice {
        ops: found.ops as u64,
        ops_per_s: found.ops_per_s(),
        cpu: Duration::from_nanos(found.cpu_ns as u64),
        context_switches: found.switches as u64,
    }
}

/// How long operations take where threads wait for each other, measured apart from the rest: reading
/// the clock costs as much as some locks do.
fn latencies(case: &Case, length: Duration) -> Vec<(Engine, Latencies)> {
    if !case.is_contended() {
        return Vec::new();
    }
    let found = |engine| (engine, rangelock::latencies(engine, case, length));
    case.engines.iter().map(|engine| found(*engine)).collect()
}

fn with_latencies(row: Row, engine: Engine, latencies: &[(Engine, Latencies)]) -> Row {
    match latencies.iter().find(|known| known.0 == engine) {
        Some((_, Latencies { p50_ns, p99_ns, p999_ns })) => {
            Row { p50_ns: Some(*p50_ns), p99_ns: Some(*p99_ns), p999_ns: Some(*p999_ns), ..row }
        }
        None => row,
    }
}

/// Whether other programs used the processors meanwhile.
#[derive(Debug, Default)]
struct Occupied {
    pairs: u32,
    short_of_processors: u32,
}

impl Occupied {
    /// `row` is of an engine that never sleeps in its case.
    fn look_at(&mut self, row: &Row) {
        let cores = thread::available_parallelism().map_or(1, usize::from) as f64;
        let used = row.cpu_ns_per_op * row.ops_per_s / 1e9;
        self.pairs += 1;
        if used < PROCESSORS_SHARE_MIN * cores.min(f64::from(row.threads)) {
            self.short_of_processors += 1;
        }
    }

    fn note(&self) -> Option<String> {
        let Self { pairs, short_of_processors } = self;
        (*short_of_processors > 0).then(|| {
            format!(
                "other programs used the processors: in {short_of_processors} of {pairs} pairs \
                 without contention more than a tenth of them was missing"
            )
        })
    }
}
