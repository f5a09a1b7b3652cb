//! The report as one web page that needs nothing else: charts are SVG inside it.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::outcome::Row;
use super::report::{COLUMNS, Report, cells, unmeasured};
use crate::failure::{Context, Result};

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;\
    padding:0 1rem;color:#1d2b34;background:#fff}\
    h1,h2{font-weight:600}dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}\
    dt{color:#5b6b75}dd{margin:0}.wide{overflow-x:auto}\
    table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}\
    td,th{padding:.2rem .7rem;text-align:left;border-bottom:1px solid #dde4e8}\
    td:nth-child(n+4):nth-child(-n+11){text-align:right}svg{max-width:100%;height:auto}";

/// Colours told apart by people with any colour vision (Okabe and Ito), the subject's first.
const SUBJECT: RGBColor = RGBColor(0, 114, 178);
const PEER: RGBColor = RGBColor(153, 160, 166);

pub fn page(report: &Report) -> Result<String> {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>millpond bench {0}</title><style>{STYLE}</style></head><body>\n\
         <h1>millpond bench {0}</h1>\n<dl>",
        report.suite
    );
    for (name, value) in report.machine.properties() {
        page += &format!("<dt>{name}</dt><dd>{}</dd>\n", escaped(&value));
    }
    page += "</dl>\n";
    for (suite, case) in cases(&report.rows) {
        let is_of = |row: &&Row| (row.suite, row.case) == (suite, case);
        let rows: Vec<&Row> = report.rows.iter().filter(is_of).collect();
        page += &format!("<h2>{suite}: {}</h2>\n{}\n", escaped(case), chart(&rows)?);
    }
    page += "<h2>Figures</h2>\n<div class=\"wide\"><table><thead><tr>";
    for column in COLUMNS {
        page += &format!("<th>{column}</th>");
    }
    page += "</tr></thead><tbody>\n";
    for row in &report.rows {
        page += "<tr>";
        for cell in cells(row) {
            page += &format!("<td>{}</td>", escaped(&cell));
        }
        page += "</tr>\n";
    }
    page += "</tbody></table></div>\n<ul>\n";
    for skipped in &report.skipped {
        let text = format!("Not measured: {}", unmeasured(skipped));
        page += &format!("<li>{}</li>\n", escaped(&text));
    }
    for note in &report.notes {
        page += &format!("<li>{}</li>\n", escaped(note));
    }
    page += "</ul>\n</body></html>\n";
    Ok(page)
}

/// Each case once, however its rows lie.
fn cases(rows: &[Row]) -> Vec<(&str, &str)> {
    let mut cases = Vec::new();
    for row in rows {
        let case = (row.suite, row.case);
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    cases
}

/// A bar for each engine, number of threads and depth: operations per second.
fn chart(rows: &[&Row]) -> Result<String> {
    let mut bars = bars(rows);
    // The axis goes up, and the first bar belongs on top.
    bars.reverse();
    let max = bars.iter().map(|(_, ops_per_s, _)| *ops_per_s).fold(1.0, f64::max);
    let (unit, name) = if max >= 1e6 { (1e6, "million ops/s") } else { (1e3, "thousand ops/s") };
    let mut svg = String::new();
    let size = (860, 60 + 28 * bars.len() as u32);
    draw(&mut svg, size, &bars, max / unit, unit, name).context("drawing a chart")?;
    Ok(svg)
}

type Bar = (String, f64, bool);

/// The subject is measured once with each peer: its bar shows the mean of those.
fn bars(rows: &[&Row]) -> Vec<Bar> {
    let mut bars: Vec<(String, Vec<f64>, bool)> = Vec::new();
    for row in rows {
        let plural = if row.threads == 1 { "" } else { "s" };
        let mut label = format!("{}, {} thread{plural}", row.engine, row.threads);
        if let Some(depth) = row.queue_depth {
            label += &format!(", depth {depth}");
        }
        match bars.iter_mut().find(|(existing, ..)| *existing == label) {
            Some((_, figures, _)) => figures.push(row.ops_per_s),
            None => bars.push((label, vec![row.ops_per_s], row.ratio_to.is_some())),
        }
    }
    let mean = |figures: &[f64]| figures.iter().sum::<f64>() / figures.len() as f64;
    bars.into_iter().map(|(label, figures, subject)| (label, mean(&figures), subject)).collect()
}

fn draw(
    svg: &mut String,
    size: (u32, u32),
    bars: &[Bar],
    max: f64,
    unit: f64,
    name: &str,
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, size).into_drawing_area();
    let labels = |segment: &SegmentValue<usize>| match segment {
        SegmentValue::CenterOf(index) => bars.get(*index).map_or("", |bar| bar.0.as_str()).into(),
        _ => String::new(),
    };
    let mut chart = ChartBuilder::on(&area)
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(230)
        .build_cartesian_2d(0.0..max * 1.15, (0..bars.len().max(1) - 1).into_segmented())?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(name)
        .y_labels(bars.len())
        .y_label_formatter(&labels)
        .draw()?;
    for (index, (_, ops_per_s, subject)) in bars.iter().enumerate() {
        let value = ops_per_s / unit;
        let color = if *subject { SUBJECT } else { PEER };
        let corners = [(0.0, SegmentValue::Exact(index)), (value, SegmentValue::Exact(index + 1))];
        let mut bar = Rectangle::new(corners, color.filled());
        bar.set_margin(4, 4, 0, 0);
        chart.draw_series([bar])?;
        let at = (value + max * 0.01, SegmentValue::CenterOf(index));
        let style =
            TextStyle::from(("sans-serif", 13).into_font()).pos(Pos::new(HPos::Left, VPos::Center));
        chart.draw_series([Text::new(format!("{value:.2}"), at, style)])?;
    }
    area.present()?;
    drop(chart);
    Ok(())
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

    #[test]
    fn bars_merge_the_measurements_of_one_engine() {
        let report = report::tests::sample();
        let twice: Vec<&Row> = report.rows.iter().chain(&report.rows).collect();
        let bars = bars(&twice);
        assert_eq!(bars.len(), 2);
        assert!(bars[0].2 && !bars[1].2);
    }

    #[test]
    fn cases_of_two_suites_and_depths_stay_apart() {
        let mut rows = report::tests::sample().rows;
        let [deeper, mut elsewhere] =
            [Row { queue_depth: Some(16), ..rows[0].clone() }, rows[0].clone()];
        elsewhere.suite = "async-read";
        rows.extend([elsewhere, deeper]);
        assert_eq!(cases(&rows), [("cached-read", "random-4k"), ("async-read", "random-4k")]);
        let bars = bars(&[&rows[0], &rows[3]]);
        let labels: Vec<&str> = bars.iter().map(|bar| &*bar.0).collect();
        assert_eq!(labels, ["millpond, 2 threads, depth 8", "millpond, 2 threads, depth 16"]);
    }
}
