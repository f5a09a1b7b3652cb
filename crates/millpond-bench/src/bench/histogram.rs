//! A histogram of durations, with buckets of about 3% width.

use std::time::Duration;

/// Buckets for each power of two.
const STEPS: usize = 1 << STEPS_LOG2;
const STEPS_LOG2: u32 = 5;

/// Durations from 1 ns up; those below 32 ns are exact.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
}

/// The durations that half, 99% and 99.9% of all stayed below.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latencies {
    /// The median.
    pub p50_ns: f64,
    /// One of a hundred operations takes longer.
    pub p99_ns: f64,
    /// One of a thousand operations takes longer.
    pub p999_ns: f64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram::new()
    }
}

impl Histogram {
    /// One without durations.
    #[must_use]
    pub fn new() -> Histogram {
        Histogram { counts: vec![0; bucket(u64::MAX) + 1] }
    }

    /// Counts a duration.
    #[inline]
    pub fn add(&mut self, duration: Duration) {
        self.counts[bucket(duration.as_nanos() as u64)] += 1;
    }

    /// The durations of both.
    #[must_use]
    pub fn merged(mut self, other: Histogram) -> Histogram {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        self
    }

    /// NaN where there are no durations.
    #[must_use]
    pub fn latencies(&self) -> Latencies {
        let [p50_ns, p99_ns, p999_ns] = [0.5, 0.99, 0.999].map(|share| self.quantile(share));
        Latencies { p50_ns, p99_ns, p999_ns }
    }

    fn quantile(&self, share: f64) -> f64 {
        let all: u64 = self.counts.iter().sum();
        let wanted = (all as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        let found = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        found.map_or(f64::NAN, |at| middle(at) as f64)
    }
}

#[inline]
fn bucket(ns: u64) -> usize {
    // The leading bits of `ns`, STEPS_LOG2 of them after the first; `power` says how many follow.
    let power = (u64::BITS - STEPS_LOG2 - 1).saturating_sub(ns.leading_zeros());
    power as usize * STEPS + (ns >> power) as usize
}

/// The middle of a bucket's values.
fn middle(bucket: usize) -> u64 {
    let power = (bucket / STEPS).saturating_sub(1);
    let leading = (bucket - power * STEPS) as u64;
    (leading << power) + (1 << power) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_in_order_and_narrow() {
        for ns in (0..10_000).chain([1 << 20, (1 << 40) + 12_345, u64::MAX / 2]) {
            assert!(bucket(ns) <= bucket(ns + 1) && bucket(ns + 1) <= bucket(ns) + 1, "{ns}");
            assert!(middle(bucket(ns)).abs_diff(ns) <= ns / 32, "{ns}: {}", middle(bucket(ns)));
        }
    }

    #[test]
    fn shares_are_counted_from_the_shortest() {
        let mut histogram = Histogram::new();
        (1..=1000).for_each(|ns| histogram.add(Duration::from_nanos(ns)));
        let found = histogram.merged(Histogram::new()).latencies();
        for (found, exact) in [(found.p50_ns, 500.0), (found.p99_ns, 990.0), (found.p999_ns, 999.0)]
        {
            assert!((found / exact - 1.0).abs() < 0.04, "{found} for {exact}");
        }
    }
}
