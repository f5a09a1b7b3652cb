//! `millpond-bench figures`: writes the results of reports into documents, between markers.
//!
//! ```text
//! <!-- figures: mixed -->       replaced from here: the results of a SUITE, or of the `machine`
//! <!-- end of figures -->
//! ```
//!
//! Text outside the markers is not changed. A marker of a suite without a report keeps its text, so
//! each suite names the commit of its results.

use std::fs;
use std::path::PathBuf;

use super::outcome::Row;
use super::report::{Report, short};
use super::targets::{cpu_ratio, judge};
use super::{catalog, html};
use crate::failure::{Context, Failure, REFUSED, Result};

const BEGIN: &str = "<!-- figures: ";
const END: &str = "<!-- end of figures -->";

/// Writes the results of reports into documents, between markers
#[derive(Debug, clap::Args)]
pub struct FiguresArgs {
    /// JSON reports of `bench --json`, all of one machine
    #[arg(required = true)]
    reports: Vec<PathBuf>,

    /// A document to change
    #[arg(long, value_name = "FILE", required_unless_present_any = ["html", "svg"])]
    into: Vec<PathBuf>,

    /// Write all reports to FILE as one page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Write the plots to DIR, each as a picture of its own
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,

    /// The commit that was measured
    #[arg(long, default_value = "unknown")]
    commit: String,
}

pub fn run(args: &FiguresArgs) -> Result<()> {
    let reports: Vec<Report> =
        args.reports.iter().map(|file| Report::read(file)).collect::<Result<_>>()?;
    let first = &reports[0].machine;
    if reports
        .iter()
        .any(|report| (&report.machine.cpu, report.machine.cores) != (&first.cpu, first.cores))
    {
        return Err(Failure::new(REFUSED, "the reports are of different machines"));
    }
    for file in &args.into {
        let text = fs::read_to_string(file).context(file.display())?;
        let text = filled(&text, |name| match name {
            "machine" => Some(machine(&reports)),
            name => suite(&reports, name).map(|text| format!("Commit {}.\n\n{text}", args.commit)),
        });
        let text =
            text.map_err(|what| Failure::new(REFUSED, format!("{}: {what}", file.display())))?;
        fs::write(file, text).context(file.display())?;
    }
    let all = Report::together(reports);
    if let Some(file) = &args.html {
        fs::write(file, html::page(&all)?).context(file.display())?;
    }
    let Some(dir) = &args.svg else { return Ok(()) };
    fs::create_dir_all(dir).context(dir.display())?;
    for (name, svg) in html::pictures(&all)? {
        let file = dir.join(name);
        fs::write(&file, svg).context(file.display())?;
    }
    Ok(())
}

/// `text` with the results that `figures` returns for the name of each marker, if any.
fn filled(
    text: &str,
    figures: impl Fn(&str) -> Option<String>,
) -> std::result::Result<String, String> {
    let mut out = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        out += &format!("{line}\n");
        let Some(name) = line.strip_prefix(BEGIN).and_then(|rest| rest.strip_suffix(" -->")) else {
            continue;
        };
        let mut old = String::new();
        loop {
            match lines.next() {
                Some(END) => break,
                Some(line) if !line.starts_with(BEGIN) => old += &format!("{line}\n"),
                _ => return Err(format!("no end of the figures of {name}")),
            }
        }
        out += &figures(name).map_or(old, |new| format!("\n{new}\n"));
        out += &format!("{END}\n");
    }
    Ok(out)
}

fn machine(reports: &[Report]) -> String {
    let mut text = "Each suite in one run, of the commit that it names, on this machine:\n\n| | |\n|---|---|\n".to_owned();
    for (name, value) in reports[0].machine.properties() {
        text += &format!("| {name} | {value} |\n");
    }
    text
}

/// `None` if no report has rows of the suite.
fn suite(reports: &[Report], suite: &str) -> Option<String> {
    let pairs: Vec<(&Row, &Row)> =
        reports.iter().flat_map(Report::pairs).filter(|(own, _)| own.suite == suite).collect();
    let gaps: Vec<String> = reports
        .iter()
        .flat_map(|report| &report.skipped)
        .filter(|gap| gap.suite == suite)
        .map(|gap| format!("- Not measured: `{}`, {}: {}\n", gap.case, gap.engine, gap.reason))
        .collect();
    if pairs.is_empty() && gaps.is_empty() {
        return None;
    }
    let mut text = described(&pairs);
    text += "| case | threads, depth | engine | peer | ops/s | ratio (quartiles) | processor time | to be reached |\n";
    text += "|---|---|---|---|---|---|---|---|\n";
    let cases: Vec<&str> = pairs.iter().map(|(own, _)| own.case).collect();
    let (mut missed, mut reached) = (0, 0);
    for (own, baseline) in pairs {
        let judged = judge(own, baseline);
        missed += judged.iter().filter(|one| !one.is_met()).count();
        reached += judged.iter().filter(|one| one.is_met()).count();
        let verdicts: Vec<String> = judged
            .iter()
            .map(|one| match one.is_met() {
                true => one.description(),
                false => format!("{}: **missed** ({:.2})", one.description(), one.found),
            })
            .collect();
        text += &row(own, baseline, &verdicts.join("; "));
    }
    let torn: u64 = reports
        .iter()
        .flat_map(|report| &report.rows)
        .filter(|row| row.suite == suite && row.ratio_to.is_some())
        .filter_map(|row| row.torn_reads)
        .sum();
    if suite == "mixed" {
        text += &format!("\nTorn reads of Millpond in all of these rows: {torn}.\n");
    }
    text += &format!("\nReached {reached}, missed {missed}.\n");
    if !gaps.is_empty() {
        text += &format!("\n{}", gaps.concat());
    }
    Some(text + &notes(reports, &cases))
}

/// The notes of the cases: a note begins with the name of a case, or with a prefix of it.
fn notes(reports: &[Report], cases: &[&str]) -> String {
    let is_of = |note: &str| {
        let name = note.split([':', ',']).next().unwrap_or_default();
        cases.iter().any(|case| *case == name || case.starts_with(&format!("{name}-")))
    };
    let notes = reports.iter().flat_map(|report| &report.notes).filter(|note| is_of(note));
    let notes: Vec<String> = notes.map(|note| format!("- {note}\n")).collect();
    if notes.is_empty() {
        return String::new();
    }
    format!("\n<details><summary>Notes of the run</summary>\n\n{}\n</details>\n", notes.concat())
}

fn described(pairs: &[(&Row, &Row)]) -> String {
    let mut text = String::new();
    let mut listed: Vec<&str> = Vec::new();
    for (own, _) in pairs {
        let Some(case) = catalog::what(own.suite, own.case) else { continue };
        if listed.contains(&case.cases) {
            continue;
        }
        listed.push(case.cases);
        let name = if case.cases.is_empty() { "others" } else { case.cases };
        text += &format!("- `{name}`: {}\n", case.what);
    }
    text + "\n"
}

fn row(own: &Row, baseline: &Row, verdicts: &str) -> String {
    let at = match own.queue_depth.or(baseline.queue_depth) {
        Some(depth) => format!("{}, {depth}", own.threads),
        None => own.threads.to_string(),
    };
    let number = |number: Option<f64>| number.map_or_else(|| "-".into(), short);
    let quartiles = match (own.ratio_q1, own.ratio_q3) {
        (Some(q1), Some(q3)) => format!(" ({}-{})", short(q1), short(q3)),
        _ => String::new(),
    };
    format!(
        "| `{}` | {at} | {} | {} | {} | {}{quartiles} | {} | {verdicts} |\n",
        own.case,
        own.engine,
        baseline.engine,
        thousands(own.ops_per_s),
        number(own.ratio_median),
        number(cpu_ratio(own, baseline)),
    )
}

fn thousands(rate: f64) -> String {
    match rate {
        1e6.. => format!("{:.2}M", rate / 1e6),
        1e4.. => format!("{:.0}k", rate / 1e3),
        1e3.. => format!("{:.1}k", rate / 1e3),
        _ => format!("{rate:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::sample;

    #[test]
    fn what_is_between_markers_is_replaced() {
        let text = "a\n<!-- figures: x -->\nold\n<!-- end of figures -->\n<!-- figures: y -->\nkept\n\
                    <!-- end of figures -->\nb\n";
        let figures = |name: &str| (name == "x").then(|| "new\n".to_owned());
        let once = filled(text, figures).unwrap();
        let expected = "a\n<!-- figures: x -->\n\nnew\n\n<!-- end of figures -->\n<!-- figures: y -->\n\
                        kept\n<!-- end of figures -->\nb\n";
        assert_eq!(once, expected);
        assert_eq!(filled(&once, figures).unwrap(), once);
        for broken in ["<!-- figures: x -->\n", "<!-- figures: x -->\n<!-- figures: y -->\n"] {
            assert!(filled(broken, figures).unwrap_err().contains("figures of x"));
        }
    }

    #[test]
    fn rows_that_miss_say_so() {
        let mut report = sample();
        report.rows[0].ratio_median = Some(1.5);
        report.rows[1].engine = "kernel pread".into();
        report.rows[0].ratio_to = Some("kernel pread".into());
        let text = suite(&[report], "cached-read").unwrap();
        assert!(text.contains("2.3: **missed** (1.50)"), "{text}");
        assert!(text.contains("Reached 0, missed 1."), "{text}");
        assert!(text.contains("1.50 (2.25-2.75) | 1.00 |"), "{text}");
        assert!(text.contains("Not measured: `cold`, kernel pread: no O_DIRECT here"), "{text}");
        assert!(text.contains("- `random-4k`: 4 KiB at random over 256 MiB"), "{text}");
        assert!(suite(&[sample()], "mixed").is_none());
        let mut report = sample();
        report.notes = vec!["random-4k: of it".into(), "rand: no".into(), "random-4k-b: no".into()];
        let text = suite(&[report], "cached-read").unwrap();
        assert!(text.contains("- random-4k: of it\n") && !text.contains("no\n"), "{text}");
    }
}
