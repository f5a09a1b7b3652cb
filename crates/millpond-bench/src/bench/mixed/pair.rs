//! Measures two engines with the same work, in the order A B B A; produces rows and notes.

use std::io;
use std::time::Duration;

use super::work::{MixedSlice, Ops, Work};
use crate::bench::harness::{self, Slice, alternate};
use crate::bench::histogram::Histogram;
use crate::bench::outcome::{Outcome, Row};
use crate::bench::plan::Rounds;
use crate::failure::{Context, Result};

/// The names of a case's rows: of its reads, of its writes, and of both together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names {
    pub case: &'static str,
    pub reads: &'static str,
    pub writes: &'static str,
    /// The name of the row of both, if it is of interest.
    pub total: Option<&'static str>,
}

/// An engine that can do the work.
pub struct MixedEngine<'a> {
    pub name: String,
    #[expect(clippy::type_complexity, reason = "named here, and nowhere else")]
    slice: Box<dyn FnMut(&Work, Duration) -> io::Result<MixedSlice> + 'a>,
}

impl<'a> MixedEngine<'a> {
    pub fn new(
        name: impl Into<String>,
        slice: impl FnMut(&Work, Duration) -> io::Result<MixedSlice> + 'a,
    ) -> Self {
        Self { name: name.into(), slice: Box::new(slice) }
    }

    pub fn slice(&mut self, work: &Work, length: Duration) -> io::Result<MixedSlice> {
        (self.slice)(work, length)
    }
}

/// Measures `subject` against `baseline` on the same work, or on two kinds of work.
pub struct MixedPair<'a> {
    pub names: Names,
    pub work: [&'a Work; 2],
    pub rounds: Rounds,
    pub length: Duration,
}

impl MixedPair<'_> {
    /// Takes slices in the order A B B A, after one of each that does not count.
    pub fn measure(
        &self,
        subject: &mut MixedEngine<'_>,
        baseline: &mut MixedEngine<'_>,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let case = self.names.case;
        let mut own = |length| {
            subject.slice(self.work[0], length).context(format!("{case}: {}", subject.name))
        };
        let mut other = |length| {
            baseline.slice(self.work[1], length).context(format!("{case}: {}", baseline.name))
        };
        own(self.length / 2)?;
        other(self.length / 2)?;
        let slices = alternate(self.rounds, || own(self.length), || other(self.length))?;
        let names = [&*subject.name, &*baseline.name];
        outcome.rows.extend(self.rows(names, &slices));
        for (name, slices) in names.into_iter().zip(&slices) {
            outcome.notes.extend(self.note_torn(name, slices));
        }
        Ok(())
    }

    fn rows(&self, [subject, baseline]: [&str; 2], slices: &[Vec<MixedSlice>; 2]) -> Vec<Row> {
        let [work, _] = self.work;
        let mut kinds = Vec::new();
        if work.readers > 0 {
            kinds.push((Kind::Reads, self.names.reads, work.readers));
        }
        if work.writers > 0 {
            kinds.push((Kind::Writes, self.names.writes, work.writers));
        }
        if let Some(total) = self.names.total {
            kinds.push((Kind::Both, total, work.readers + work.writers));
        }
        let block_bytes = Some(work.block_bytes);
        let mut rows = Vec::new();
        for (kind, case, threads) in kinds {
            let of_kind =
                [0, 1].map(|side: usize| slices[side].iter().map(|s| kind.slice(s)).collect());
            let pair = harness::Pair { case, threads, block_bytes, subject, baseline };
            for (mut row, slices) in pair.rows(&of_kind).into_iter().zip(slices) {
                let latencies = kind.latencies(slices).latencies();
                row.p50_ns = Some(latencies.p50_ns);
                row.p99_ns = Some(latencies.p99_ns);
                row.p999_ns = Some(latencies.p999_ns);
                let torn = || slices.iter().map(|slice| slice.torn).sum();
                row.torn_reads = (kind == Kind::Reads).then(torn);
                rows.push(row);
            }
        }
        rows
    }

    /// The number of torn reads among the checked ones.
    fn note_torn(&self, engine: &str, slices: &[MixedSlice]) -> Option<String> {
        let sum = |figure: fn(&MixedSlice) -> u64| slices.iter().map(figure).sum::<u64>();
        let (torn, checked) = (sum(|slice| slice.torn), sum(|slice| slice.checked));
        (self.work[0].readers > 0 && self.work[0].writers > 0).then(|| {
            let share = 100.0 * torn as f64 / checked.max(1) as f64;
            format!(
                "{}: {engine}: {torn} torn of {checked} reads looked through ({share:.1}%)",
                self.names.case
            )
        })
    }
}

/// The operations of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reads,
    Writes,
    Both,
}

impl Kind {
    fn sum(self, slice: &MixedSlice, figure: impl Fn(&Ops) -> f64) -> f64 {
        match self {
            Kind::Reads => figure(&slice.reads),
            Kind::Writes => figure(&slice.writes),
            Kind::Both => figure(&slice.reads) + figure(&slice.writes),
        }
    }

    /// The operations of this kind, with their share of all context switches.
    fn slice(self, slice: &MixedSlice) -> Slice {
        let ops = self.sum(slice, |ops| ops.ops as f64);
        let share = ops / Kind::Both.sum(slice, |ops| ops.ops as f64).max(1.0);
        Slice {
            ops: ops as u64,
            ops_per_s: self.sum(slice, |ops| ops.ops_per_s),
            cpu: Duration::from_secs_f64(self.sum(slice, |ops| ops.cpu.as_secs_f64())),
            context_switches: (slice.context_switches as f64 * share) as u64,
        }
    }

    fn latencies(self, slices: &[MixedSlice]) -> Histogram {
        slices.iter().fold(Histogram::new(), |all, slice| match self {
            Kind::Reads => all.merged(slice.reads.latencies.clone()),
            Kind::Writes => all.merged(slice.writes.latencies.clone()),
            Kind::Both => {
                all.merged(slice.reads.latencies.clone()).merged(slice.writes.latencies.clone())
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::mixed::work::{Disturbance, Places};

    #[test]
    fn rows_of_both_kinds_have_ratios_and_torn_reads() {
        let work = Work {
            block_bytes: 8192,
            file_bytes: 1 << 20,
            readers: 2,
            writers: 4,
            places: Places::Random,
            disturbance: Disturbance::None,
            ramp: Duration::ZERO,
        };
        let names =
            Names { case: "c", reads: "c-reads", writes: "c-writes", total: Some("c-total") };
        let pair = MixedPair {
            names,
            work: [&work; 2],
            rounds: Rounds::exactly(3),
            length: Duration::from_secs(1),
        };
        let side = |name: &str, reads: u64, writes: u64, torn| {
            let ops = |ops: u64| Ops {
                ops,
                ops_per_s: ops as f64,
                cpu: Duration::from_micros(ops),
                ..Ops::default()
            };
            let (reads, writes) = (ops(reads), ops(writes));
            let slice = MixedSlice { reads, writes, torn, checked: 10, ..MixedSlice::default() };
            MixedEngine::new(name, move |_, _| Ok(slice.clone()))
        };
        let mut outcome = Outcome::default();
        let (mut a, mut b) = (side("A", 300, 100, 0), side("B", 100, 100, 5));
        pair.measure(&mut a, &mut b, &mut outcome).unwrap();
        let told: Vec<_> = (outcome.rows.iter())
            .map(|row| (row.case, &*row.engine, row.threads, row.ratio_median, row.torn_reads))
            .collect();
        let expected = [
            ("c-reads", "A", 2, Some(3.0), Some(0)),
            ("c-reads", "B", 2, None, Some(30)),
            ("c-writes", "A", 4, Some(1.0), None),
            ("c-writes", "B", 4, None, None),
            ("c-total", "A", 6, Some(2.0), None),
            ("c-total", "B", 6, None, None),
        ];
        assert_eq!(told, expected);
        assert!(outcome.notes[1].contains("B: 30 torn of 60 reads"), "{:?}", outcome.notes);
    }
}
