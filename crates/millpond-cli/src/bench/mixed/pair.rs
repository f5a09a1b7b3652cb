//! Two engines on the same work, in the order A B B A, and the rows and notes that come of it.

use std::io;
use std::time::Duration;

use super::work::{MixedSlice, Ops, Work};
use crate::bench::harness::{Outcome, Row, quantile};
use crate::bench::histogram::Histogram;
use crate::failure::{Context, Result};

/// The names of a case's rows: of its reads, of its writes, and of both together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names {
    pub case: &'static str,
    pub reads: &'static str,
    pub writes: &'static str,
    /// Where the sum is of interest.
    pub total: Option<&'static str>,
}

/// What can carry out the work.
pub struct Side<'a> {
    pub name: String,
    #[expect(clippy::type_complexity, reason = "named here, and nowhere else")]
    slice: Box<dyn FnMut(&Work, Duration) -> io::Result<MixedSlice> + 'a>,
}

impl<'a> Side<'a> {
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

/// Measures `subject` against `peer` on the same work, or on two kinds of work.
pub struct Pair<'a> {
    pub names: Names,
    pub work: [&'a Work; 2],
    pub rounds: u32,
    pub length: Duration,
}

impl Pair<'_> {
    /// Takes slices in the order A B B A, after one of each that does not count.
    pub fn measure(
        &self,
        subject: &mut Side<'_>,
        peer: &mut Side<'_>,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let case = self.names.case;
        let mut a = |length| {
            subject.slice(self.work[0], length).context(format!("{case}: {}", subject.name))
        };
        let mut b =
            |length| peer.slice(self.work[1], length).context(format!("{case}: {}", peer.name));
        a(self.length / 2)?;
        b(self.length / 2)?;
        let (mut own, mut other) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            own.push(a(self.length)?);
            other.push(b(self.length)?);
            other.push(b(self.length)?);
            own.push(a(self.length)?);
        }
        let rows = self.rows([&subject.name, &peer.name], &own, &other);
        outcome.rows.extend(rows);
        for (name, slices) in [(&subject.name, &own), (&peer.name, &other)] {
            outcome.notes.extend(self.note_torn(name, slices));
        }
        Ok(())
    }

    fn rows(&self, names: [&str; 2], own: &[MixedSlice], other: &[MixedSlice]) -> Vec<Row> {
        let mut rows = Vec::new();
        let [work, _] = self.work;
        let mut add = |kind: Kind, case, threads| {
            let [mut row, peer] = [(names[0], own), (names[1], other)]
                .map(|(name, slices)| self.row(kind, case, threads, name, slices));
            // A round's slices lie side by side in both.
            let rate = |slices: &[MixedSlice]| kind.rate(&slices[0]) + kind.rate(&slices[1]);
            let cpu = |slices: &[MixedSlice]| kind.cpu_ns(&slices[0]) + kind.cpu_ns(&slices[1]);
            let rounds = || own.chunks(2).zip(other.chunks(2));
            let mut ratios: Vec<f64> = rounds().map(|(a, b)| rate(a) / rate(b)).collect();
            let mut cpu_ratios: Vec<f64> = rounds().map(|(a, b)| cpu(b) / cpu(a)).collect();
            row.ratio_to = Some(names[1].to_owned());
            row.ratio_median = Some(quantile(&mut ratios, 0.5));
            row.ratio_q1 = Some(quantile(&mut ratios, 0.25));
            row.ratio_q3 = Some(quantile(&mut ratios, 0.75));
            row.cpu_ratio_median = Some(quantile(&mut cpu_ratios, 0.5));
            rows.extend([row, peer]);
        };
        if work.readers > 0 {
            add(Kind::Reads, self.names.reads, work.readers);
        }
        if work.writers > 0 {
            add(Kind::Writes, self.names.writes, work.writers);
        }
        if let Some(total) = self.names.total {
            add(Kind::Both, total, work.readers + work.writers);
        }
        rows
    }

    fn row(
        &self,
        kind: Kind,
        case: &'static str,
        threads: u32,
        engine: &str,
        slices: &[MixedSlice],
    ) -> Row {
        let median = |figure: &dyn Fn(&MixedSlice) -> f64| {
            quantile(&mut slices.iter().map(figure).collect::<Vec<_>>(), 0.5)
        };
        let ops_per_s = median(&|slice| kind.rate(slice));
        let latencies = kind.latencies(slices).latencies();
        let torn = slices.iter().map(|slice| slice.torn).sum();
        Row {
            case,
            engine: engine.to_owned(),
            threads,
            block_bytes: Some(self.work[0].block_bytes),
            queue_depth: None,
            ops_per_s,
            ns_per_op: f64::from(threads) * 1e9 / ops_per_s,
            cpu_ns_per_op: median(&|slice| kind.cpu_ns(slice)),
            context_switches_per_op: median(&|slice| {
                slice.context_switches as f64 / (slice.reads.ops + slice.writes.ops) as f64
            }),
            p50_ns: Some(latencies.p50_ns),
            p99_ns: Some(latencies.p99_ns),
            p999_ns: Some(latencies.p999_ns),
            torn_reads: (kind == Kind::Reads).then_some(torn),
            rounds: self.rounds,
            ratio_to: None,
            ratio_median: None,
            ratio_q1: None,
            ratio_q3: None,
            cpu_ratio_median: None,
        }
    }

    /// How many reads were torn, of those that were looked through.
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

/// What a row is about.
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

    fn rate(self, slice: &MixedSlice) -> f64 {
        self.sum(slice, |ops| ops.ops_per_s)
    }

    fn cpu_ns(self, slice: &MixedSlice) -> f64 {
        let ops = self.sum(slice, |ops| ops.ops as f64);
        self.sum(slice, |ops| ops.cpu.as_nanos() as f64) / ops.max(1.0)
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
        let pair = Pair { names, work: [&work; 2], rounds: 3, length: Duration::from_secs(1) };
        let side = |name: &str, reads: u64, writes: u64, torn| {
            let ops = |ops: u64| Ops {
                ops,
                ops_per_s: ops as f64,
                cpu: Duration::from_micros(ops),
                ..Ops::default()
            };
            let (reads, writes) = (ops(reads), ops(writes));
            let slice = MixedSlice { reads, writes, torn, checked: 10, ..MixedSlice::default() };
            Side::new(name, move |_, _| Ok(slice.clone()))
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
