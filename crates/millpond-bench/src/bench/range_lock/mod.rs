//! The suite `range-lock`: locks on byte ranges, without files.
//!
//! The subject is Millpond's own lock. The baselines are those of the crate
//! `millpond-rangelock-baselines`, `parking_lot::RwLock` (taken shared where ranges don't overlap: the
//! limit) and a `BTreeMap` under a `Mutex`, the floor of locks that store ranges in a tree. An
//! operation is a pair of lock and unlock. [`case`] has the loads, [`slice()`] runs one.

mod case;
mod slice;

use std::thread;
use std::time::Duration;

use self::case::{Lock, LockCase};
use self::slice::{latencies, slice};
use super::harness::Pair;
use super::histogram::Latencies;
use super::outcome::{Outcome, Row, Skipped};
use super::plan::Plan;
use crate::failure::Result;

/// Slices for latencies of single operations: the longest ones are rare.
const LATENCY_SLICES: u32 = 4;

/// With less than this share of the processors, threads run less concurrently than they should, and
/// the results mean little.
const PROCESSORS_SHARE_MIN: f64 = 0.9;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut occupied = Occupied::default();
    for case in case::cases(&case::thread_counts()) {
        if plan.wants(case.load.name) {
            plan.report_progress(&format!("{} with {} thread(s)", case.load.name, case.threads));
            outcome.note(format!("{} is Millpond's own lock", Lock::Striped.name()));
            compare(&case, plan, &mut outcome, &mut occupied)?;
        }
    }
    let steady: Vec<String> = STEADY.iter().filter_map(|case| steady(case, &outcome)).collect();
    outcome.notes.extend(steady);
    outcome.notes.extend(occupied.note());
    Ok(outcome)
}

/// The baseline whose speed should not fall with more threads, according to its authors, and the
/// cases for that.
const STEADY: [&str; 2] = ["100-held-disjoint", "100-held-interleaved"];
const STEADY_SHARE: f64 = 0.8;

/// The rate of the OLC tree with each number of threads, over its best rate with fewer.
fn steady(case: &str, outcome: &Outcome) -> Option<String> {
    let name = Lock::OlcBTree.name();
    let rows = outcome.rows.iter().filter(|row| row.case == case && row.engine == name);
    let mut best = 0.0_f64;
    let mut shares = Vec::new();
    for row in rows {
        if best > 0.0 {
            let share = row.ops_per_s / best;
            let verdict = if share < STEADY_SHARE { ", missed" } else { "" };
            shares.push(format!("{share:.2} with {} threads{verdict}", row.threads));
        }
        best = best.max(row.ops_per_s);
    }
    let told = shares.join("; ");
    (!shares.is_empty()).then(|| {
        format!("{case}: {name} over its own best with fewer threads ({STEADY_SHARE}): {told}")
    })
}

fn compare(
    case: &LockCase,
    plan: &Plan,
    outcome: &mut Outcome,
    occupied: &mut Occupied,
) -> Result<()> {
    let length = plan.slice(50, 5);
    let latencies = all_latencies(case, length * LATENCY_SLICES);
    let subject = Lock::Striped;
    for &baseline in case.locks.iter().filter(|lock| **lock != subject) {
        for lock in [subject, baseline] {
            slice(lock, case, length);
        }
        let pair = Pair {
            case: case.load.name,
            threads: case.threads as u32,
            block_bytes: None,
            subject: subject.name(),
            baseline: baseline.name(),
        };
        let measure = |lock| move || Ok(slice(lock, case, length));
        let [own, other] = pair.measure(plan.rounds(), measure(subject), measure(baseline))?;
        if !case.is_contended() {
            occupied.look_at(&own);
        }
        outcome.rows.push(with_latencies(own, subject, &latencies));
        outcome.rows.push(with_latencies(other, baseline, &latencies));
    }
    for (lock, reason) in &case.gaps {
        // Once for all numbers of threads.
        let told = |gap: &Skipped| gap.case == case.load.name && gap.engine == lock.name();
        if !outcome.skipped.iter().any(told) {
            outcome.skip(case.load.name, lock.name(), reason);
        }
    }
    Ok(())
}

/// Latencies where threads wait for each other, measured separately: reading the clock costs as
/// much as some locks do.
fn all_latencies(case: &LockCase, length: Duration) -> Vec<(Lock, Latencies)> {
    if !case.is_contended() {
        return Vec::new();
    }
    case.locks.iter().map(|&lock| (lock, latencies(lock, case, length))).collect()
}

fn with_latencies(row: Row, lock: Lock, latencies: &[(Lock, Latencies)]) -> Row {
    match latencies.iter().find(|known| known.0 == lock) {
        Some((_, Latencies { p50_ns, p99_ns, p999_ns })) => {
            Row { p50_ns: Some(*p50_ns), p99_ns: Some(*p99_ns), p999_ns: Some(*p999_ns), ..row }
        }
        None => row,
    }
}

/// Whether other programs used the processors during the measurement.
#[derive(Debug, Default)]
struct Occupied {
    pairs: u32,
    short_of_processors: u32,
}

impl Occupied {
    /// `row` is of a lock that never sleeps in its case.
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

#[cfg(test)]
mod tests {
    use super::case::cases;
    use super::*;

    #[test]
    fn a_peer_that_gets_slower_is_told() {
        let mut outcome = Outcome::default();
        for (threads, ops) in [(1, 100), (2, 70), (4, 90)] {
            let pair = Pair {
                case: STEADY[0],
                threads,
                block_bytes: None,
                subject: Lock::OlcBTree.name(),
                baseline: "p",
            };
            let slice =
                crate::bench::harness::Slice { ops_per_s: f64::from(ops), ..Default::default() };
            let [row, _] = pair.rows(&[vec![slice; 2], vec![slice; 2]]);
            outcome.rows.push(row);
        }
        let told = steady(STEADY[0], &outcome).unwrap();
        assert!(told.ends_with("0.70 with 2 threads, missed; 0.90 with 4 threads"), "{told}");
    }

    /// Goal: every lock runs every case that it is listed for, and the others say why not.
    #[test]
    fn every_lock_runs_or_says_why_not() {
        let (cases, length) = (cases(&[1, 2, 3]), Duration::from_millis(1));
        assert_eq!(cases.iter().filter(|case| case.threads == 2).count(), 9);
        for case in &cases {
            assert_eq!(case.locks[0], Lock::Striped);
            assert_eq!(case.locks.len() + case.gaps.len(), 7 + usize::from(case.is_contended()));
            for &lock in &case.locks {
                let slice = slice(lock, case, length);
                assert!(slice.ops > 0 && slice.ops_per_s > 0.0, "{case:?}: {lock:?}");
                if case.is_contended() {
                    let took = latencies(lock, case, length);
                    assert!(took.p50_ns <= took.p99_ns && took.p99_ns <= took.p999_ns);
                    assert!(took.p50_ns > 0.0, "{case:?}: {lock:?}");
                }
            }
        }
    }
}
