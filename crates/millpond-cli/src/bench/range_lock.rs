//! The suite `range-lock`: locks on byte ranges, without files.
//!
//! The subject is Millpond's own lock, the peers are the other locks of the crate
//! `millpond-rangelock`, `parking_lot::RwLock` (where ranges don't overlap, taken shared: the limit)
//! and a `BTreeMap` under a `Mutex`, the floor of what keeps ranges in a tree. Loads and threads are
//! [`rangelock::bench`]'s, an operation is a pair of lock and unlock.

use std::time::Duration;

use millpond_rangelock::bench::{self as rangelock, Case, Engine, Latencies};

use super::harness::{Outcome, Pair, Plan, Row, Skipped, Slice};
use crate::failure::Result;

/// Slices that are taken to see how long single operations take: the longest are rare.
const LATENCY_SLICES: u32 = 4;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for case in rangelock::cases(&rangelock::Options::default()) {
        if plan.wants(case.name) {
            eprintln!("measuring {} with {} thread(s)", case.name, case.threads);
            outcome.note(format!("{} is Millpond's own lock", Engine::Striped.name()));
            compare(&case, plan, &mut outcome)?;
        }
    }
    Ok(outcome)
}

fn compare(case: &Case, plan: &Plan, outcome: &mut Outcome) -> Result<()> {
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
