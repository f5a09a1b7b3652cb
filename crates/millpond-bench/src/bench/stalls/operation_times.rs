//! Measures the operations of two engines one by one, and their times.

use std::io;
use std::time::Duration;

use crate::bench::data::KIB;
use crate::bench::harness::{Pair, Slice, quantile};
use crate::bench::outcome::Outcome;
use crate::bench::plan::Plan;
use crate::failure::{Context, Result};

/// Time limit of a disturbing thread, so that an operation that never ends is reported, too.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The result of one slice.
pub struct Measured {
    pub slice: Slice,
    /// Duration of each operation.
    pub took: Vec<Duration>,
}

/// One of two measured engines.
pub struct TimedEngine<'a> {
    name: &'static str,
    slice: Box<dyn FnMut() -> io::Result<Measured> + 'a>,
}

impl<'a> TimedEngine<'a> {
    pub fn new(name: &'static str, slice: impl FnMut() -> io::Result<Measured> + 'a) -> Self {
        Self { name, slice: Box::new(slice) }
    }
}

/// Times of the operations in all slices of one engine, in nanoseconds.
#[derive(Default)]
pub struct Times {
    all: Vec<f64>,
    /// The longest of each slice, so that one slice disturbed by other programs does not hide the
    /// others.
    longest: Vec<f64>,
}

impl Times {
    fn add(&mut self, took: &[Duration]) {
        self.all.extend(took.iter().map(|took| took.as_nanos() as f64));
        self.longest.extend(took.iter().max().map(|took| took.as_nanos() as f64));
    }

    /// 0 where there are none.
    pub fn quantile(&self, q: f64) -> f64 {
        if self.all.is_empty() { 0.0 } else { quantile(&mut self.all.clone(), q) }
    }

    pub fn longest(&self) -> f64 {
        self.quantile(1.0)
    }

    /// The median of the slices' longest times.
    pub fn longest_median(&self) -> f64 {
        if self.longest.is_empty() { 0.0 } else { quantile(&mut self.longest.clone(), 0.5) }
    }

    fn summary(&self) -> String {
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

/// Measures two engines with `threads` concurrent operations; returns their times. `None`, with a
/// recorded reason, if one can't be measured.
pub fn measure(
    case: &'static str,
    threads: u32,
    mut engines: [TimedEngine<'_>; 2],
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<Option<[Times; 2]>> {
    let [subject, baseline] = &mut engines;
    let (own_name, baseline_name) = (subject.name, baseline.name);
    let block_bytes = Some(4 * KIB);
    let pair = Pair { case, threads, block_bytes, subject: own_name, baseline: baseline_name };
    (subject.slice)().context(format!("{case}: {own_name}"))?;
    if !pair.try_baseline((baseline.slice)(), outcome) {
        return Ok(None);
    }
    let mut times = [Times::default(), Times::default()];
    let [own_times, baseline_times] = &mut times;
    let slice = |engine: &mut TimedEngine<'_>, times: &mut Times| {
        let measured = (engine.slice)()?;
        times.add(&measured.took);
        Ok(measured.slice)
    };
    let mut rows = pair.measure(
        plan.rounds(),
        || slice(subject, own_times),
        || slice(baseline, baseline_times),
    )?;
    for (row, times) in rows.iter_mut().zip(&times) {
        row.p50_ns = Some(times.quantile(0.5));
        row.p99_ns = Some(times.quantile(0.99));
        row.p999_ns = Some(times.quantile(0.999));
        outcome.note(format!("{case}: {}: {}", row.engine, times.summary()));
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
        assert!(times.summary().starts_with("6 operations, "), "{}", times.summary());
        assert_eq!(Times::default().longest(), 0.0);
    }
}
