//! The duration of operations, counted in buckets of a quarter of an octave of nanoseconds each.
//!
//! A thread records into a [`Recorder`] of its own, by plain loads and stores. A request for statistics merges the
//! recorders of all threads. Of kinds that take less than a microsecond or so only a sample is timed, as the clock
//! costs tens of nanoseconds: [`LatencyKind::one_in`].

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Buckets of an octave: a bucket's upper bound is at most a quarter above the recorded time.
const PER_OCTAVE_BITS: u32 = 2;
const PER_OCTAVE: usize = 1 << PER_OCTAVE_BITS;
/// Longer times than 137 s count as 137 s.
const OCTAVES: usize = 37;
const BUCKETS: usize = (OCTAVES - 1) * PER_OCTAVE;
const KINDS: usize = LatencyKind::ALL.len();

/// The kinds of operations that are timed.
///
/// Not timed are views, blobs and changes of a file's extents.
///
/// # Examples
///
/// ```
/// use millpond::stats::LatencyKind;
///
/// let names = LatencyKind::ALL.map(|kind| kind.name());
/// assert!(names.contains(&"read_miss"));
/// assert_eq!(LatencyKind::ReadMiss.one_in(), 1, "each is timed");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LatencyKind {
    /// A read of cached bytes, without a lock.
    ReadHit,
    /// Any other read through the cache, from the moment at which it turned out not to be a hit.
    ReadMiss,
    /// A write through the cache, or around it; a durable one to its end.
    Write,
    /// A sync that the program requested.
    Sync,
    /// A direct read, also of a pipeline, to its end.
    DirectRead,
    /// A direct write, in the same way.
    DirectWrite,
    /// An open of a file.
    Open,
}

impl LatencyKind {
    /// All kinds.
    pub const ALL: [LatencyKind; 7] = [
        LatencyKind::ReadHit,
        LatencyKind::ReadMiss,
        LatencyKind::Write,
        LatencyKind::Sync,
        LatencyKind::DirectRead,
        LatencyKind::DirectWrite,
        LatencyKind::Open,
    ];

    /// The kind's name in programs and reports: `read_hit`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            LatencyKind::ReadHit => "read_hit",
            LatencyKind::ReadMiss => "read_miss",
            LatencyKind::Write => "write",
            LatencyKind::Sync => "sync",
            LatencyKind::DirectRead => "direct_read",
            LatencyKind::DirectWrite => "direct_write",
            LatencyKind::Open => "open",
        }
    }

    /// The sampling interval: one in this number of a thread's operations is timed.
    #[must_use]
    pub const fn one_in(self) -> u64 {
        match self {
            LatencyKind::ReadHit => 64,
            // A pipeline's direct operations take 4.5 µs each; two reads of the clock would be a hundredth of that. A
            // write into the cache takes 0.4 µs.
            LatencyKind::DirectRead | LatencyKind::DirectWrite | LatencyKind::Write => 16,
            _ => 1,
        }
    }
}

fn bucket_of(ns: u64) -> usize {
    if ns < PER_OCTAVE as u64 {
        return ns as usize;
    }
    let octave = ns.ilog2();
    let part = (ns >> (octave - PER_OCTAVE_BITS)) as usize & (PER_OCTAVE - 1);
    let bucket = (octave - PER_OCTAVE_BITS + 1) as usize * PER_OCTAVE + part;
    bucket.min(BUCKETS - 1)
}

/// The largest number of nanoseconds that counts there.
fn upper_ns(bucket: usize) -> u64 {
    if bucket < PER_OCTAVE {
        return bucket as u64;
    }
    let shift = bucket / PER_OCTAVE - 1;
    (((PER_OCTAVE + bucket % PER_OCTAVE + 1) as u64) << shift) - 1
}

/// Times of one kind.
///
/// # Examples
///
/// ```
/// use millpond::stats::Histogram;
///
/// let (mut one, mut other) = (Histogram::default(), Histogram::default());
/// (0..99).for_each(|_| one.record_ns(1000));
/// other.record_ns(50_000);
/// one.merge(&other);
/// assert_eq!(one.count(), 100);
/// assert!((1000..1250).contains(&one.percentile_ns(50.0)));
/// assert!((50_000..62_500).contains(&one.percentile_ns(100.0)));
/// ```
///
/// ```
/// # let mut times = millpond::stats::Histogram::default();
/// times.record_ns(1000);
/// times.record_ns(1000);
/// for (upper_ns, count) in times.buckets() {
///     println!("{count} took at most {upper_ns} ns");
/// }
/// assert_eq!(times.sum_ns() / times.count(), 1000);
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    sum_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: [0; BUCKETS], sum_ns: 0 }
    }
}

impl Histogram {
    /// Adds one time.
    pub fn record_ns(&mut self, ns: u64) {
        self.counts[bucket_of(ns)] += 1;
        self.sum_ns = self.sum_ns.wrapping_add(ns);
    }

    /// Adds all that another one has.
    pub fn merge(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
    }

    /// How many times there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum, in nanoseconds.
    #[must_use]
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// The time, in nanoseconds, that this percentage of all times did not exceed: up to a quarter too long, never
    /// too short (but for times of more than 137 s). 0 if there are no times.
    #[must_use]
    pub fn percentile_ns(&self, percent: f64) -> u64 {
        let count = self.count();
        let wanted = (count as f64 * percent.clamp(0.0, 100.0) / 100.0).ceil().max(1.0) as u64;
        let mut seen = 0;
        let found = self.buckets().find(|(_, count)| {
            seen += count;
            seen >= wanted
        });
        found.map_or(0, |(upper_ns, _)| upper_ns)
    }

    /// The buckets that are not empty, in ascending order: the largest number of nanoseconds that counts in the
    /// bucket, and the number of times in it.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let counts = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        counts.map(|(bucket, count)| (upper_ns(bucket), *count))
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.buckets()).finish()
    }
}

/// A histogram of each kind of operation.
///
/// # Examples
///
/// ```
/// use millpond::stats::{Latencies, LatencyKind};
/// use millpond::Engine;
///
/// let engines = [
///     Engine::builder().cache_bytes(1 << 20).build()?,
///     Engine::builder().cache_bytes(1 << 20).build()?,
/// ];
/// let mut all = Latencies::default();
/// engines.iter().for_each(|engine| all.merge(&engine.stats().latencies));
/// for kind in LatencyKind::ALL {
///     println!("{}: p99 {} ns, of one in {}", kind.name(), all.of(kind).percentile_ns(99.0), kind.one_in());
/// }
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Latencies(Box<[Histogram]>);

impl Default for Latencies {
    fn default() -> Self {
        Latencies(vec![Histogram::default(); KINDS].into())
    }
}

impl Latencies {
    /// The times of a kind; of a sample of the operations, as [`LatencyKind::one_in`] says.
    #[must_use]
    pub fn of(&self, kind: LatencyKind) -> &Histogram {
        &self.0[kind as usize]
    }

    /// Adds all that another engine has, or the same at another time.
    pub fn merge(&mut self, other: &Latencies) {
        self.0.iter_mut().zip(&*other.0).for_each(|(one, other)| one.merge(other));
    }
}

impl std::fmt::Debug for Latencies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(LatencyKind::ALL.map(|kind| (kind.name(), self.of(kind)))).finish()
    }
}

/// The times recorded by one thread. Only its owner writes it. Threads that are ending share one recorder; there,
/// times may get lost.
///
/// For each kind its buckets and then the sum. It is never on a stack, as threads may have small ones.
pub(crate) struct Recorder(Box<[AtomicU64]>);

const RECORDED: usize = BUCKETS + 1;

impl Default for Recorder {
    fn default() -> Self {
        Recorder(std::iter::repeat_with(AtomicU64::default).take(KINDS * RECORDED).collect())
    }
}

impl Recorder {
    pub(crate) fn record(&self, kind: LatencyKind, took: Duration) {
        let ns = took.as_nanos().min(u128::from(u64::MAX)) as u64;
        let recorded = &self.0[kind as usize * RECORDED..][..RECORDED];
        let add = |to: &AtomicU64, n: u64| to.store(to.load(Relaxed).wrapping_add(n), Relaxed);
        add(&recorded[bucket_of(ns)], 1);
        add(&recorded[BUCKETS], ns);
    }

    /// Adds all times to those of `total`, which no other thread changes now.
    pub(crate) fn merge_into(&self, total: &Recorder) {
        for (to, from) in total.0.iter().zip(&self.0) {
            to.store(to.load(Relaxed).wrapping_add(from.load(Relaxed)), Relaxed);
        }
    }

    pub(crate) fn add_to(&self, all: &mut Latencies) {
        for (to, from) in all.0.iter_mut().zip(self.0.chunks(RECORDED)) {
            to.counts.iter_mut().zip(from).for_each(|(to, from)| *to += from.load(Relaxed));
            to.sum_ns = to.sum_ns.wrapping_add(from[BUCKETS].load(Relaxed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_lies_in_its_bucket_and_no_other() {
        let mut below = None;
        for bucket in 0..BUCKETS {
            let upper = upper_ns(bucket);
            assert_eq!(bucket_of(upper), bucket, "the last one");
            let first = below.map_or(0, |below: u64| below + 1);
            assert_eq!(bucket_of(first), bucket, "the first one");
            assert!(upper - first <= first / 4, "{first} to {upper}");
            below = Some(upper);
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert!(below.unwrap() > 137_000_000_000);
    }

    #[test]
    fn percentiles_are_those_of_all_times() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile_ns(50.0), 0);
        (1..=1000).for_each(|ns| histogram.record_ns(ns));
        for percent in [1.0, 50.0, 90.0, 99.0, 100.0] {
            let exact = percent * 10.0;
            let told = histogram.percentile_ns(percent) as f64;
            assert!((exact..=exact * 1.25).contains(&told), "{percent}: {told}");
        }
        assert_eq!(histogram.percentile_ns(0.0), 1);
        assert_eq!((histogram.count(), histogram.sum_ns()), (1000, 500_500));
    }

    #[test]
    fn recorders_merge() {
        let (one, other) = (Recorder::default(), Recorder::default());
        one.record(LatencyKind::Sync, Duration::from_micros(3));
        other.record(LatencyKind::Sync, Duration::from_micros(3));
        other.record(LatencyKind::Open, Duration::from_secs(1));
        let mut all = Latencies::default();
        one.add_to(&mut all);
        other.add_to(&mut all);
        assert_eq!(all.of(LatencyKind::Sync).count(), 2);
        assert_eq!(all.of(LatencyKind::Sync).sum_ns(), 6000);
        assert_eq!(all.of(LatencyKind::Open).sum_ns(), 1_000_000_000);
        assert_eq!(all.of(LatencyKind::Write).count(), 0);
    }
}
