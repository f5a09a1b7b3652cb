//! The report as one self-contained web page: plots are inline SVG, drawn by [`plot`].
//!
//! Plots are narrow and stand side by side as far as the window has space, so they read the same on
//! a phone, a wide screen and paper. Their ink is the page's, light or dark.

mod plot;

use super::catalog::{Across, Lines, Published, SECTIONS, Section, what};
use super::outcome::Row;
use super::report::{COLUMNS, Report, cells, short, unmeasured};
use super::targets::{TargetResult, judge};
use crate::failure::{Context, Result};

const STYLE: &str = include_str!("style.css");

/// Rows of one plot of ratios.
const RATIOS: usize = 10;

/// Suites with more pairs show only those with a target; the table has all.
const PAIRS_MAX: usize = 60;

pub fn page(report: &Report) -> Result<String> {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <title>millpond-bench {0}</title><style>{STYLE}</style></head><body>\n\
         <h1>millpond-bench {0}</h1>\n<dl>",
        report.suite
    );
    for (name, value) in report.machine.properties() {
        page += &format!("<dt>{name}</dt><dd>{}</dd>\n", escaped(&value));
    }
    if !report.command.is_empty() {
        page += &format!("<dt>command</dt><dd><code>{}</code></dd>\n", escaped(&report.command));
    }
    page += "</dl>\n";
    page += &summary(report);
    for section in &SECTIONS {
        let pairs: Vec<_> =
            report.pairs().filter(|(own, _)| section.suites.contains(&own.suite)).collect();
        if !pairs.is_empty() {
            page += &section_of(section, &pairs, report)?;
        }
    }
    page += &table(report);
    page += "</body></html>\n";
    Ok(page)
}

/// The plots as separate files, by name: of each suite the ratios with targets, and its lines.
pub fn pictures(report: &Report) -> Result<Vec<(String, String)>> {
    let mut pictures = Vec::new();
    for section in &SECTIONS {
        for suite in section.suites {
            let pairs = report.pairs().filter(|(own, _)| own.suite == *suite);
            let judged: Vec<_> = pairs
                .map(|(own, baseline)| ratio(own, baseline))
                .filter(|one| one.target.is_some())
                .collect();
            if !judged.is_empty() {
                let svg = plot::ratios(&judged).context("drawing ratios")?;
                pictures.push((format!("{suite}.svg"), plot::alone(&svg, &[])));
            }
        }
        for lines in section.lines {
            let Some(chart) = measured(lines, &report.rows) else { continue };
            let svg = plot::chart(&chart).context("drawing a chart")?;
            let names: Vec<String> = chart.series.iter().map(|one| escaped(&one.name)).collect();
            let name = format!("{}-{}.svg", lines.suite, lines.cases.trim_end_matches('-'));
            pictures.push((name, plot::alone(&svg, &names)));
        }
    }
    Ok(pictures)
}

fn summary(report: &Report) -> String {
    let judged: Vec<TargetResult> =
        report.pairs().flat_map(|(own, baseline)| judge(own, baseline)).collect();
    let reached = judged.iter().filter(|one| one.is_met()).count();
    let mut text = format!(
        "<p class=\"summary\">Of {} results with a target, {reached} reach it and \
         <b class=\"missed\">{} miss it</b>. Not measured: {}.</p>\n",
        judged.len(),
        judged.len() - reached,
        report.skipped.len()
    );
    text += "<p>Subject and peer take turns, A B B A. A bar is the median of the rounds' ratios of \
             operations a second, its whisker the quartiles; the tick is the target. Published results \
             are of other machines: only their trends are comparable, not their values.</p>\n";
    text
}

fn section_of(section: &Section, pairs: &[(&Row, &Row)], report: &Report) -> Result<String> {
    let mut text = format!(
        "<section><h2>{}</h2>\n<p>{}</p>\n<div class=\"plots\">\n",
        escaped(section.title),
        escaped(section.question)
    );
    for lines in section.lines {
        if let Some(chart) = measured(lines, &report.rows) {
            text += &figure(&format!("{}, here", lines.title), &chart)?;
        }
    }
    for published in section.published {
        text += &figure(&format!("{}, as published", published.title), &of_others(published))?;
    }
    let shown: Vec<plot::Ratio> = pairs
        .iter()
        .map(|(own, baseline)| (own, ratio(own, baseline)))
        .filter(|(_, ratio)| pairs.len() <= PAIRS_MAX || ratio.target.is_some())
        .map(|(_, ratio)| ratio)
        .collect();
    for (index, some) in shown.chunks(RATIOS).enumerate() {
        let svg = plot::ratios(some).context("drawing ratios")?;
        let part =
            if shown.len() > RATIOS { format!(", part {}", index + 1) } else { String::new() };
        text += &format!(
            "<figure><figcaption>Operations a second over the peer's{part}</figcaption>{svg}</figure>\n"
        );
    }
    text += "</div>\n";
    text += &cases(pairs);
    text += &misses(pairs);
    Ok(text + "</section>\n")
}

fn figure(title: &str, chart: &plot::Chart) -> Result<String> {
    let svg = plot::chart(chart).context("drawing a chart")?;
    let mut text =
        format!("<figure><figcaption>{}</figcaption>{svg}\n<ul class=\"legend\">", escaped(title));
    for (index, series) in chart.series.iter().enumerate() {
        let color = plot::color(index);
        text += &format!("<li><i style=\"background:{color}\"></i>{}</li>", escaped(&series.name));
    }
    Ok(text + "</ul></figure>\n")
}

/// Rows of one kind as lines: a line for each engine, whose points are means, with minimum and
/// maximum where it has several baselines.
fn measured(lines: &Lines, rows: &[Row]) -> Option<plot::Chart> {
    /// The results at each point of a line.
    type Found = Vec<(u32, Vec<f64>)>;
    let mut series: Vec<(String, Found)> = Vec::new();
    for row in rows.iter().filter(|row| row.suite == lines.suite) {
        let across = match lines.across {
            Across::Depth => row.queue_depth,
            Across::Threads => Some(row.threads),
            Across::BlockBytes => row.block_bytes,
        };
        let is_case = match lines.across {
            Across::BlockBytes => row.case.starts_with(lines.cases),
            _ => row.case == lines.cases,
        };
        let (true, Some(at)) = (is_case, across) else { continue };
        let points = match series.iter_mut().find(|(name, _)| *name == row.engine) {
            Some((_, points)) => points,
            None => {
                series.push((row.engine.clone(), Vec::new()));
                &mut series.last_mut()?.1
            }
        };
        match points.iter_mut().find(|(known, _)| *known == at) {
            Some((_, found)) => found.push(row.ops_per_s),
            None => points.push((at, vec![row.ops_per_s])),
        }
    }
    // A single point is no line.
    series.retain(|(_, points)| points.len() > 1);
    let most = series.iter().flat_map(|(_, points)| points).flat_map(|(_, found)| found);
    let most = most.copied().fold(0.0, f64::max);
    let (unit, name) = if most >= 1e6 { (1e6, "million/s") } else { (1e3, "thousand/s") };
    let point = |(at, found): &(u32, Vec<f64>)| plot::Point {
        at: f64::from(*at),
        up: found.iter().sum::<f64>() / found.len() as f64 / unit,
        least: found.iter().copied().fold(f64::MAX, f64::min) / unit,
        most: found.iter().copied().fold(0.0, f64::max) / unit,
    };
    let series: Vec<_> = series
        .iter()
        .map(|(name, points)| plot::Series {
            name: name.clone(),
            points: points.iter().map(point).collect(),
        })
        .collect();
    let chart = plot::Chart { across: lines.across.name().into(), up: name.into(), series };
    (!chart.series.is_empty()).then_some(chart)
}

fn of_others(published: &Published) -> plot::Chart {
    let point = |&(at, up): &(f64, f64)| plot::Point { at, up, least: up, most: up };
    let series = published.series.iter().map(|(name, points)| plot::Series {
        name: (*name).into(),
        points: points.iter().map(point).collect(),
    });
    plot::Chart {
        across: published.across.into(),
        up: published.up.into(),
        series: series.collect(),
    }
}

fn ratio(own: &Row, baseline: &Row) -> plot::Ratio {
    let judged = judge(own, baseline);
    let ops = judged.iter().find(|one| one.figure == super::targets::Figure::Ops);
    let mut name = own.case.to_owned();
    if own.threads > 1 {
        name += &format!(" x{}", own.threads);
    }
    if let Some(depth) = own.queue_depth {
        name += &format!(" @{depth}");
    }
    let median = own.ratio_median.unwrap_or(f64::NAN);
    plot::Ratio {
        name: format!("{name} / {}", baseline.engine),
        median,
        quartiles: own.ratio_q1.zip(own.ratio_q3).unwrap_or((median, median)),
        target: ops.map(|one| one.bound),
        is_missed: judged.iter().any(|one| !one.is_met()),
    }
}

fn cases(pairs: &[(&Row, &Row)]) -> String {
    let mut text = "<details><summary>What is measured</summary><ul>\n".to_owned();
    let mut listed = Vec::new();
    for (own, _) in pairs {
        let Some(case) = what(own.suite, own.case) else { continue };
        if !listed.contains(&(case.suite, case.cases)) {
            listed.push((case.suite, case.cases));
            let name = if case.cases.is_empty() { own.suite } else { case.cases };
            text += &format!("<li><code>{}</code>: {}</li>\n", escaped(name), escaped(case.what));
        }
    }
    text + "</ul></details>\n"
}

fn misses(pairs: &[(&Row, &Row)]) -> String {
    let mut text = String::new();
    for (own, baseline) in pairs {
        for one in judge(own, baseline).iter().filter(|one| !one.is_met()) {
            let depth =
                own.queue_depth.map_or_else(String::new, |depth| format!(", depth {depth}"));
            let what = format!(
                "{}, {} thread(s){depth}, {} over {}: {}, to be reached: {}",
                own.case,
                own.threads,
                own.engine,
                baseline.engine,
                short(one.found),
                one.description()
            );
            text += &format!("<li>{}</li>\n", escaped(&what));
        }
    }
    if text.is_empty() {
        return text;
    }
    format!("<h3 class=\"missed\">Missed</h3>\n<ul>{text}</ul>\n")
}

fn table(report: &Report) -> String {
    let mut text = String::from(
        "<section><h2>All figures</h2>\n<div class=\"wide\" tabindex=\"0\"><table><thead><tr>",
    );
    for column in COLUMNS {
        text += &format!("<th>{column}</th>");
    }
    text += "</tr></thead><tbody>\n";
    for row in &report.rows {
        text += "<tr>";
        for cell in cells(row) {
            text += &format!("<td>{}</td>", escaped(&cell));
        }
        text += "</tr>\n";
    }
    text += "</tbody></table></div>\n<ul class=\"notes\">\n";
    for skipped in &report.skipped {
        let gap = format!("Not measured: {}", unmeasured(skipped));
        text += &format!("<li class=\"missed\">{}</li>\n", escaped(&gap));
    }
    for note in &report.notes {
        text += &format!("<li>{}</li>\n", escaped(note));
    }
    text + "</ul></section>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report;

    #[test]
    fn pages_stand_alone_and_escape_what_they_show() {
        let page = page(&report::tests::sample()).unwrap();
        assert!(page.contains("<svg") && page.contains("</svg>"));
        assert!(page.contains("kernel &lt;pread&gt;") && !page.contains("<pread>"));
        assert!(page.contains("no O_DIRECT here"));
        for outside in ["<script", "src=", "@import", "<link"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    /// Goal: a missed target is written in words, not only shown by a colour.
    #[test]
    fn misses_are_told() {
        let mut report = report::tests::sample();
        report.rows[0].ratio_median = Some(1.5);
        report.rows[0].ratio_to = Some("kernel pread".into());
        report.rows[1].engine = "kernel pread".into();
        let page = page(&report).unwrap();
        assert!(page.contains("1 miss it") && page.contains("1.50 missed"), "{page}");
        assert!(page.contains("to be reached: 2.3"), "{page}");
    }

    #[test]
    fn lines_have_a_point_for_each_depth() {
        let row = report::tests::sample().rows[0].clone();
        let row = |depth, ops_per_s| Row {
            suite: "s",
            case: "c",
            queue_depth: Some(depth),
            ops_per_s,
            ..row.clone()
        };
        let lines = Lines { suite: "s", cases: "c", across: Across::Depth, title: "t" };
        assert!(measured(&lines, &[row(1, 10.0)]).is_none());
        let chart = measured(&lines, &[row(1, 1e6), row(2, 2e6), row(2, 4e6)]).unwrap();
        let points = &chart.series[0].points;
        assert_eq!((points.len(), points[1].up, points[1].least), (2, 3.0, 2.0));
    }
}
