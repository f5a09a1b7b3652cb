//! A finished benchmark: the table for display, and the JSON report.

use std::fs;
use std::path::Path;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde::{Deserialize, Serialize};

use super::machine::Machine;
use super::outcome::{Name, Outcome, Row, Skipped, word};
use crate::failure::{Context, Failure, REFUSED, Result};

/// All results of a benchmark; serialized, it is the JSON report.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    #[serde(deserialize_with = "word")]
    pub suite: Name,
    pub machine: Machine,
    /// The arguments of the benchmark.
    #[serde(default)]
    pub command: String,
    pub rows: Vec<Row>,
    pub skipped: Vec<Skipped>,
    pub notes: Vec<String>,
}

/// The table's columns; those after the engine's name hold numbers.
pub const COLUMNS: [&str; 13] = [
    "suite",
    "case",
    "engine",
    "threads",
    "block",
    "depth",
    "ops/s",
    "ns/op",
    "CPU ns/op",
    "switches/op",
    "p50/p99/p99.9 ns",
    "ratio (quartiles)",
    "CPU ratio",
];

impl Report {
    pub fn new(suite: &'static str, machine: Machine, outcome: Outcome) -> Self {
        let Outcome { rows, skipped, notes, .. } = outcome;
        let command: Vec<String> = std::env::args().skip(1).collect();
        let command = format!("millpond-bench {}", command.join(" "));
        Self { suite, machine, command, rows, skipped, notes }
    }

    /// Reads a file that [`Self::json`] wrote.
    pub fn read(file: &Path) -> Result<Self> {
        let text = fs::read(file).context(file.display())?;
        let read = serde_json::from_slice::<Self>(&text);
        read.map_err(|error| {
            let message =
                format!("{}: not a report of `millpond-bench --json`: {error}", file.display());
            Failure::new(REFUSED, message)
        })
    }

    /// Several reports as one, with the machine of the first. At least one is required.
    pub fn together(reports: Vec<Self>) -> Self {
        let mut reports = reports.into_iter();
        let mut all = reports.next().expect("one at least");
        for other in reports {
            all.command += &format!("; {}", other.command);
            all.rows.extend(other.rows);
            all.skipped.extend(other.skipped);
            all.notes.extend(other.notes);
        }
        all
    }

    /// Each row with a ratio, and the row of its baseline, which comes next.
    pub fn pairs(&self) -> impl Iterator<Item = (&Row, &Row)> {
        let rows = self.rows.windows(2).map(|rows| (&rows[0], &rows[1]));
        rows.filter(|(own, baseline)| own.ratio_to.as_deref() == Some(&baseline.engine))
    }

    pub fn json(&self) -> Result<String> {
        let mut text = serde_json::to_string_pretty(self).context("writing JSON")?;
        text.push('\n');
        Ok(text)
    }

    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_preset(NOTHING).set_header(COLUMNS);
        for column in table.column_iter_mut().skip(3).take(8) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for row in &self.rows {
            table.add_row(cells(row));
        }
        let mut text = String::new();
        for (name, value) in self.machine.properties() {
            text += &format!("{name}: {value}\n");
        }
        if !self.rows.is_empty() {
            text += &format!("\n{}\n", table.trim_fmt());
        }
        for skipped in &self.skipped {
            text += &format!("\nnot measured: {}", unmeasured(skipped));
        }
        for note in &self.notes {
            text += &format!("\nnote: {note}");
        }
        text
    }
}

pub fn unmeasured(skipped: &Skipped) -> String {
    let Skipped { suite, case, engine, reason } = skipped;
    format!("{suite}: {case}: {engine}: {reason}")
}

/// A row's cells, in the order of [`COLUMNS`].
pub fn cells(row: &Row) -> [String; COLUMNS.len()] {
    let ratio = match (&row.ratio_to, row.ratio_median, row.ratio_q1, row.ratio_q3) {
        (Some(baseline), Some(median), Some(q1), Some(q3)) => {
            format!("{median:.2} x {baseline} ({q1:.2}-{q3:.2})")
        }
        _ => String::new(),
    };
    let latencies = match (row.p50_ns, row.p99_ns, row.p999_ns) {
        (Some(p50), Some(p99), Some(p999)) => {
            format!("{} / {} / {}", grouped(p50), grouped(p99), grouped(p999))
        }
        _ => String::new(),
    };
    let number = |number: Option<u32>| number.map_or_else(String::new, |number| number.to_string());
    [
        row.suite.into(),
        row.case.into(),
        row.engine.clone(),
        row.threads.to_string(),
        number(row.block_bytes),
        number(row.queue_depth),
        grouped(row.ops_per_s),
        format!("{:.1}", row.ns_per_op),
        format!("{:.1}", row.cpu_ns_per_op),
        format!("{:.4}", row.context_switches_per_op),
        latencies,
        ratio,
        row.cpu_ratio_median.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
    ]
}

/// Three digits are more than the quartiles allow.
pub fn short(ratio: f64) -> String {
    if ratio < 9.995 { format!("{ratio:.2}") } else { format!("{ratio:.1}") }
}

/// A whole number with its digits in groups of three.
fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn sample() -> Report {
        let baseline = Row {
            suite: "",
            case: "random-4k",
            engine: "kernel <pread>".into(),
            threads: 2,
            block_bytes: Some(4096),
            queue_depth: Some(8),
            ops_per_s: 1_234_567.8,
            ns_per_op: 810.0,
            cpu_ns_per_op: 805.5,
            context_switches_per_op: 0.00012,
            p50_ns: Some(800.0),
            p99_ns: Some(2000.0),
            p999_ns: Some(41_000.0),
            torn_reads: None,
            rounds: 5,
            ratio_to: None,
            ratio_median: None,
            ratio_q1: None,
            ratio_q3: None,
            cpu_ratio_median: None,
        };
        let subject = Row {
            engine: "millpond".into(),
            ratio_to: Some(baseline.engine.clone()),
            ratio_median: Some(2.5),
            ratio_q1: Some(2.25),
            ratio_q3: Some(2.75),
            cpu_ratio_median: Some(2.4),
            ..baseline.clone()
        };
        let mut outcome = Outcome { rows: vec![subject, baseline], ..Outcome::default() };
        outcome.skip("cold", "kernel pread", "no O_DIRECT here");
        outcome.note("back end threads".into());
        let mut all = Outcome::default();
        all.extend("cached-read", outcome);
        Report::new("all", Machine::of(Path::new("/")), all)
    }

    #[test]
    fn json_has_the_agreed_names() {
        let report: serde_json::Value = serde_json::from_str(&sample().json().unwrap()).unwrap();
        assert_eq!(report["suite"], "all");
        assert_eq!(report["rows"][1]["suite"], "cached-read");
        assert_eq!(report["skipped"][0]["suite"], "cached-read");
        assert!(report["machine"].is_object());
        let keys: Vec<&str> =
            report["rows"][0].as_object().unwrap().keys().map(String::as_str).collect();
        let mut agreed = vec![
            "suite",
            "case",
            "engine",
            "threads",
            "block_bytes",
            "queue_depth",
            "ops_per_s",
            "ns_per_op",
            "cpu_ns_per_op",
            "context_switches_per_op",
            "p50_ns",
            "p99_ns",
            "p999_ns",
            "torn_reads",
            "rounds",
            "ratio_to",
            "ratio_median",
            "ratio_q1",
            "ratio_q3",
        ];
        agreed.sort_unstable();
        assert_eq!(keys, agreed);
        assert!(report["rows"][1]["ratio_to"].is_null());
        assert_eq!(report["skipped"][0]["reason"], "no O_DIRECT here");
    }

    #[test]
    fn the_table_shows_rows_gaps_and_notes() {
        let table = sample().table();
        assert!(table.contains("2.50 x kernel <pread> (2.25-2.75)"), "{table}");
        assert!(table.contains("1,234,568"), "{table}");
        assert!(table.contains("800 / 2,000 / 41,000"), "{table}");
        assert!(
            table.contains("not measured: cached-read: cold: kernel pread: no O_DIRECT here"),
            "{table}"
        );
        assert!(table.contains("note: back end threads"), "{table}");
    }

    #[test]
    fn digits_are_grouped() {
        assert_eq!(grouped(999.4), "999");
        assert_eq!(grouped(1000.0), "1,000");
        assert_eq!(grouped(12_345_678.0), "12,345,678");
    }
}
