//! The suite `stalls`: how long one operation takes while others do their worst.
//!
//! - [`sync`]: a sync while threads overwrite the file as fast as they can.
//! - [`append`]: an append while threads extend the file as fast as they can.
//! - [`evict`]: a cached write while somebody has to find a page to evict, and none is cold.
//!
//! What counts is not the rate but the longest: rows have quantiles of what one operation took, over all
//! slices, and notes have the longest and what the bar says of it. The first slice of each side is not
//! counted.

mod append;
mod evict;
mod sync;

use std::io;
use std::time::Duration;

use super::harness::{Outcome, Pair, Plan, Slice, quantile};
use crate::failure::{Context, Result};

const KIB: u32 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Whoever disturbs gives up after so long: an operation that would wait for ever is told of, too.
const PATIENCE: Duration = Duration::from_secs(20);

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    sync::run(plan, &mut outcome)?;
    append::run(plan, &mut outcome)?;
    evict::run(plan, &mut outcome)?;
    Ok(outcome)
}

/// What one slice found.
struct Measured {
    slice: Slice,
    /// How long each operation took.
    took: Vec<Duration>,
}

/// One side of a pair.
struct Side<'a> {
    name: &'static str,
    slice: Box<dyn FnMut() -> io::Result<Measured> + 'a>,
}

impl<'a> Side<'a> {
    fn new(name: &'static str, slice: impl FnMut() -> io::Result<Measured> + 'a) -> Self {
        Self { name, slice: Box::new(slice) }
    }
}

/// What operations took in all slices of one side, in nanoseconds.
#[derive(Default)]
struct Times {
    all: Vec<f64>,
    /// The longest of each slice: one that a busy machine has spoilt does not hide the others.
    longest: Vec<f64>,
}

impl Times {
    fn add(&mut self, took: &[Duration]) {
        self.all.extend(took.iter().map(|took| took.as_nanos() as f64));
        self.longest.extend(took.iter().max().map(|took| took.as_nanos() as f64));
    }

    /// 0 where there are none.
    fn quantile(&self, q: f64) -> f64 {
        if self.all.is_empty() { 0.0 } else { quantile(&mut self.all.clone(), q) }
    }

    fn longest(&self) -> f64 {
        self.quantile(1.0)
    }

    /// The longest of a slice in the middle.
    fn longest_median(&self) -> f64 {
        if self.longest.is_empty() { 0.0 } else { quantile(&mut self.longest.clone(), 0.5) }
    }

    fn told(&self) -> String {
        let us = |ns: f64| ns / 1e3;
        format!(
            "{} operations, p50 {:.1}, p99.9 {:.1}, longest {:.1}, longest of the median slice {:.1} us",
            self.all.len(),
            us(self.quantile(0.5)),
            us(self.quantile(0.999)),
            us(self.longest()),
            us(self.longest_median())
        )
    }
}

/// Measures two sides, of whose operations `threads` go on at a time; returns their times. None where one
/// can't be measured, which is told.
fn measure(
    case: &'static str,
    threads: u32,
    mut sides: [Side<'_>; 2],
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<Option<[Times; 2]>> {
    for at in 0..2 {
        if let Err(error) = (sides[at].slice)() {
            outcome.skip(case, sides[at].name, &error);
            let reason = format!("{} failed: {error}", sides[at].name);
            outcome.skip(case, sides[1 - at].name, reason);
            return Ok(None);
        }
    }
    let [subject, peer] = &mut sides;
    let (own_name, peer_name) = (subject.name, peer.name);
    let block_bytes = Some(4 * KIB);
    let pair = Pair { case, threads, block_bytes, subject: own_name, peer: peer_name };
    let mut times = [Times::default(), Times::default()];
    let [own_times, peer_times] = &mut times;
    let slice = |side: &mut Side<'_>, times: &mut Times| {
        let measured = (side.slice)().context(format!("{case}: {}", side.name))?;
        times.add(&measured.took);
        Ok(measured.slice)
    };
    let mut rows =
        pair.measure(plan.rounds, || slice(subject, own_times), || slice(peer, peer_times))?;
    for (row, times) in rows.iter_mut().zip(&times) {
        row.p50_ns = Some(times.quantile(0.5));
        row.p99_ns = Some(times.quantile(0.99));
        row.p999_ns = Some(times.quantile(0.999));
        outcome.note(format!("{case}: {}: {}", row.engine, times.told()));
    }
    outcome.rows.extend(rows);
    Ok(Some(times))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_tell_the_longest() {
        let mut times = Times::default();
        for longest_us in [300, 100, 200] {
            times.add(&[Duration::from_micros(1), Duration::from_micros(longest_us)]);
        }
        assert_eq!((times.longest(), times.longest_median()), (300e3, 200e3));
        assert!(times.told().starts_with("6 operations, "), "{}", times.told());
        assert_eq!(Times::default().longest(), 0.0);
    }
}
