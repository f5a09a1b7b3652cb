//! `millpond-bench compare`: compares two reports of the same cases.
//!
//! It compares the ratios to the baselines, which were measured in turns with the subject: they
//! stay the same if the machine as a whole is faster. Their quartiles are the noise. If those of
//! both reports overlap, or the medians differ by less than [`LEAST`], the case has not changed.

use std::fs;
use std::path::{Path, PathBuf};

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use serde::Serialize;

use super::outcome::Row;
use super::report::Report;
use crate::failure::{Context, FAILED, Failure, REFUSED, Result};

/// Noise between two runs of one program: in 141 rows of two equivalent builds, medians of suites
/// were 0.99 to 1.02.
const LEAST: f64 = 0.03;

/// Compares two reports: fails if a case got slower, or is missing in the second
#[derive(Debug, clap::Args)]
pub struct CompareArgs {
    /// The JSON report before the change
    before: PathBuf,

    /// The JSON report after the change
    after: PathBuf,

    /// Write the verdicts to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Slower,
    /// Measured before, but not after.
    Gone,
    Faster,
    New,
    /// Fewer than three rounds, so no quartiles.
    Unclear,
    Same,
}

#[derive(Debug, Serialize)]
struct Change {
    verdict: Verdict,
    suite: &'static str,
    case: &'static str,
    engine: String,
    threads: u32,
    queue_depth: Option<u32>,
    ratio_to: String,
    ratio_before: Option<f64>,
    ratio_after: Option<f64>,
    /// After over before.
    change: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Comparison {
    same_machine: bool,
    changes: Vec<Change>,
}

pub fn run(args: &CompareArgs) -> Result<()> {
    let [before, after] = [Report::read(&args.before)?, Report::read(&args.after)?];
    let compared = comparison(&before, &after);
    if compared.changes.is_empty() {
        return Err(Failure::new(REFUSED, "neither report has rows with a ratio"));
    }
    println!("{}", text(&compared));
    if let Some(file) = &args.json {
        write_json(file, &compared)?;
    }
    let is_bad = |change: &Change| matches!(change.verdict, Verdict::Slower | Verdict::Gone);
    let bad = compared.changes.iter().filter(|change| is_bad(change)).count();
    if bad > 0 {
        return Err(Failure::new(FAILED, format!("{bad} rows are slower, or gone")));
    }
    Ok(())
}

fn write_json(file: &Path, compared: &Comparison) -> Result<()> {
    let json = serde_json::to_string_pretty(compared).context("writing JSON")?;
    fs::write(file, json + "\n").context(file.display())
}

fn comparison(before: &Report, after: &Report) -> Comparison {
    let with_ratio = |report: &Report| -> Vec<Row> {
        report.rows.iter().filter(|row| row.ratio_median.is_some()).cloned().collect()
    };
    let (old, mut new) = (with_ratio(before), with_ratio(after));
    let mut changes = Vec::new();
    for row in &old {
        // Each row is used once: a case may have the same pair twice.
        let partner = new.iter().position(|other| key(other) == key(row));
        let partner = partner.map(|at| new.remove(at));
        changes.push(change(Some(row), partner.as_ref()));
    }
    changes.extend(new.iter().map(|row| change(None, Some(row))));
    let [own, other] = [&before.machine, &after.machine];
    let same_machine =
        (&own.cpu, own.cores, &own.file_system) == (&other.cpu, other.cores, &other.file_system);
    Comparison { same_machine, changes }
}

fn key(row: &Row) -> (&str, &str, &str, u32, Option<u32>, Option<u32>, Option<&str>) {
    let Row { suite, case, engine, threads, block_bytes, queue_depth, ratio_to, .. } = row;
    (suite, case, engine, *threads, *block_bytes, *queue_depth, ratio_to.as_deref())
}

fn change(before: Option<&Row>, after: Option<&Row>) -> Change {
    let row = after.or(before).expect("one of them is there");
    let verdict = match (before, after) {
        (Some(before), Some(after)) => verdict(before, after),
        (Some(_), None) => Verdict::Gone,
        _ => Verdict::New,
    };
    let [old, new] = [before, after].map(|row| row.and_then(|row| row.ratio_median));
    Change {
        verdict,
        suite: row.suite,
        case: row.case,
        engine: row.engine.clone(),
        threads: row.threads,
        queue_depth: row.queue_depth,
        ratio_to: row.ratio_to.clone().unwrap_or_default(),
        ratio_before: old,
        ratio_after: new,
        change: old.zip(new).map(|(old, new)| new / old),
    }
}

fn verdict(before: &Row, after: &Row) -> Verdict {
    let quartiles = |row: &Row| Some((row.ratio_q1?, row.ratio_median?, row.ratio_q3?));
    let (Some(old), Some(new)) = (quartiles(before), quartiles(after)) else {
        return Verdict::Unclear;
    };
    if before.rounds.min(after.rounds) < 3 {
        return Verdict::Unclear;
    }
    let change = new.1 / old.1;
    if change < 1.0 - LEAST && new.2 < old.0 {
        Verdict::Slower
    } else if change > 1.0 + LEAST && new.0 > old.2 {
        Verdict::Faster
    } else {
        Verdict::Same
    }
}

fn text(compared: &Comparison) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(["", "case", "engine", "peer", "before", "after", ""]);
    let number =
        |ratio: Option<f64>| ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
    for change in compared.changes.iter().filter(|change| change.verdict != Verdict::Same) {
        let mut case = format!("{}: {}, {} thread(s)", change.suite, change.case, change.threads);
        if let Some(depth) = change.queue_depth {
            case += &format!(", depth {depth}");
        }
        let percent = change.change.map(|change| format!("{:+.0}%", (change - 1.0) * 100.0));
        table.add_row([
            format!("{:?}", change.verdict).to_lowercase(),
            case,
            change.engine.clone(),
            change.ratio_to.clone(),
            number(change.ratio_before),
            number(change.ratio_after),
            percent.unwrap_or_default(),
        ]);
    }
    let count = |verdict| compared.changes.iter().filter(|one| one.verdict == verdict).count();
    let mut text = String::new();
    if !compared.same_machine {
        text += "These are of different machines or file systems: even ratios say little.\n\n";
    }
    if table.row_iter().next().is_some() {
        text += &format!("{}\n\n", table.trim_fmt());
    }
    use Verdict::{Faster, Gone, New, Same, Slower, Unclear};
    let counts = [Slower, Gone, Faster, New, Unclear, Same]
        .map(|verdict| format!("{} {}", count(verdict), format!("{verdict:?}").to_lowercase()));
    text + &counts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::sample;

    fn report(case: &'static str, [q1, median, q3]: [f64; 3], rounds: u32) -> Report {
        let mut report = sample();
        report.rows.truncate(1);
        let row = &mut report.rows[0];
        (row.case, row.rounds) = (case, rounds);
        (row.ratio_q1, row.ratio_median, row.ratio_q3) = (Some(q1), Some(median), Some(q3));
        report
    }

    /// Goal: each verdict, from made-up quartiles.
    #[test]
    fn noise_is_taken_into_account() {
        let verdict = |before, after, rounds| {
            let compared = comparison(&report("a", before, 5), &report("a", after, rounds));
            assert_eq!(compared.changes.len(), 1);
            compared.changes[0].verdict
        };
        let before = [0.95, 1.0, 1.05];
        assert_eq!(verdict(before, [1.1, 1.2, 1.3], 5), Verdict::Faster);
        assert_eq!(verdict(before, [0.7, 0.8, 0.9], 5), Verdict::Slower);
        // Quartiles overlap.
        assert_eq!(verdict(before, [1.0, 1.2, 1.3], 5), Verdict::Same);
        assert_eq!(verdict(before, [0.7, 0.8, 0.96], 5), Verdict::Same);
        // They don't, but the difference is too small.
        assert_eq!(verdict([1.0, 1.0, 1.0], [1.02, 1.02, 1.02], 5), Verdict::Same);
        assert_eq!(verdict(before, [0.1, 0.1, 0.1], 1), Verdict::Unclear);
    }

    #[test]
    fn rows_of_one_report_alone_are_told() {
        let (a, b) = (report("a", [1.0; 3], 5), report("b", [1.0; 3], 5));
        let compared = comparison(&a, &b);
        let verdicts: Vec<_> = compared.changes.iter().map(|one| (one.case, one.verdict)).collect();
        assert_eq!(verdicts, [("a", Verdict::Gone), ("b", Verdict::New)]);
        let text = text(&compared);
        assert!(text.contains("0 slower, 1 gone, 0 faster, 1 new, 0 unclear, 0 same"), "{text}");
        assert!(!text.contains("different machines"));
    }

    #[test]
    fn other_machines_are_told() {
        let (a, mut b) = (report("a", [1.0; 3], 5), report("a", [1.0; 3], 5));
        b.machine.cores += 1;
        assert!(text(&comparison(&a, &b)).contains("different machines"));
    }
}
