//! The results of a suite: rows, gaps and notes.

use std::fmt::Display;

use serde::{Deserialize, Deserializer, Serialize};

use super::histogram::Latencies;

/// One engine in one case. The names are those of the JSON report, where null says that a figure
/// does not apply.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// The suite; set by [`Outcome::extend`].
    #[serde(deserialize_with = "word")]
    pub suite: Name,
    #[serde(deserialize_with = "word")]
    pub case: Name,
    pub engine: String,
    pub threads: u32,
    pub block_bytes: Option<u32>,
    pub queue_depth: Option<u32>,
    pub ops_per_s: f64,
    /// From start to end of one operation; several threads run at once.
    pub ns_per_op: f64,
    /// Of the whole process, helpers included.
    pub cpu_ns_per_op: f64,
    pub context_switches_per_op: f64,
    pub p50_ns: Option<f64>,
    pub p99_ns: Option<f64>,
    pub p999_ns: Option<f64>,
    pub torn_reads: Option<u64>,
    pub rounds: u32,
    /// The baseline of the ratios.
    pub ratio_to: Option<String>,
    pub ratio_median: Option<f64>,
    pub ratio_q1: Option<f64>,
    pub ratio_q3: Option<f64>,
    /// The baseline's processor time per operation over this engine's: more is better, as for the
    /// other ratios.
    #[serde(skip)]
    pub cpu_ratio_median: Option<f64>,
}

/// An engine that could not be measured, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// As a row's.
    #[serde(deserialize_with = "word")]
    pub suite: Name,
    #[serde(deserialize_with = "word")]
    pub case: Name,
    pub engine: String,
    pub reason: String,
}

/// The results of a suite.
#[derive(Debug, Default)]
pub struct Outcome {
    pub rows: Vec<Row>,
    pub skipped: Vec<Skipped>,
    pub notes: Vec<String>,
    /// Whether a measurement is missing because of an error.
    pub has_failed: bool,
}

/// The name of a suite, a case, a version. A separate type, as serde would otherwise borrow a
/// `&'static str` from its input.
pub type Name = &'static str;

/// A name in a report that is read: leaked, as names are `'static`.
pub fn word<'de, D: Deserializer<'de>>(from: D) -> Result<&'static str, D::Error> {
    Ok(Box::leak(String::deserialize(from)?.into_boxed_str()))
}

impl Row {
    /// The same row for operations of which `depth` were in flight: each takes `depth` times as
    /// long as the throughput suggests.
    #[must_use]
    pub fn in_flight(self, depth: u32) -> Self {
        let ns_per_op = self.ns_per_op * f64::from(depth);
        Self { queue_depth: Some(depth), ns_per_op, ..self }
    }

    /// The row with latencies.
    #[must_use]
    pub fn taking(self, latencies: Latencies) -> Self {
        let Latencies { p50_ns, p99_ns, p999_ns } = latencies;
        Self { p50_ns: Some(p50_ns), p99_ns: Some(p99_ns), p999_ns: Some(p999_ns), ..self }
    }
}

impl Outcome {
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.skipped.is_empty()
    }

    /// Adds the results of `suite`.
    pub fn extend(&mut self, suite: &'static str, other: Self) {
        self.rows.extend(other.rows.into_iter().map(|row| Row { suite, ..row }));
        self.skipped.extend(other.skipped.into_iter().map(|gap| Skipped { suite, ..gap }));
        self.notes.extend(other.notes);
        self.has_failed |= other.has_failed;
    }

    pub fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    pub fn skip(&mut self, case: &'static str, engine: &str, reason: impl ToString) {
        let reason = reason.to_string();
        self.skipped.push(Skipped { suite: "", case, engine: engine.to_owned(), reason });
    }

    /// As [`Self::skip`], for a measurement that should have worked: the benchmark continues, and
    /// fails at the end.
    pub fn fail(&mut self, case: &'static str, engine: &str, reason: impl Display) {
        self.skip(case, engine, format!("WENT WRONG: {reason}"));
        self.has_failed = true;
    }
}
