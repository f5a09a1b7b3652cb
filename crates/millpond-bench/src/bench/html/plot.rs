//! Two kinds of plots: ratios as bars, and lines over a parameter.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::bench::report::short;

type Drawn<T> = std::result::Result<T, Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const WIDTH: u32 = 360;
/// Distinguishable with any colour vision (Okabe and Ito).
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(136, 136, 136),
];
/// Placeholder of the page's text colour.
const INK: RGBColor = RGBColor(1, 2, 3);
const INK_WRITTEN: &str = "#010203";

/// The ratio of a subject to its baseline.
pub struct Ratio {
    pub name: String,
    pub median: f64,
    pub quartiles: (f64, f64),
    pub target: Option<f64>,
    pub is_missed: bool,
}

pub struct Chart {
    pub across: String,
    pub up: String,
    pub series: Vec<Series>,
}

pub struct Series {
    pub name: String,
    pub points: Vec<Point>,
}

#[derive(Debug, Clone, Copy)]
pub struct Point {
    pub at: f64,
    pub up: f64,
    pub least: f64,
    pub most: f64,
}

/// The colour of a series, as the page writes it.
pub fn color(index: usize) -> String {
    let RGBColor(red, green, blue) = COLORS[index % COLORS.len()];
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn text_style(size: u32, horizontal: HPos, vertical: VPos) -> TextStyle<'static> {
    let style = TextStyle::from(("sans-serif", size).into_font()).color(&INK);
    style.pos(Pos::new(horizontal, vertical))
}

fn finished(svg: String) -> String {
    svg.replace(INK_WRITTEN, "currentColor")
}

/// A plot as a separate file: with a neutral colour and the escaped names of its lines, as there is
/// no page around it.
pub fn alone(svg: &str, lines: &[String]) -> String {
    const LINE: usize = 16;
    // Neither black nor white, so that it is readable on either.
    const INK_ALONE: &str = "#808080";
    let height: usize = svg
        .split("height=\"")
        .nth(1)
        .and_then(|rest| rest.split('"').next()?.parse().ok())
        .unwrap_or(0);
    let mut out = svg.replacen(
        &format!("height=\"{height}\""),
        &format!("height=\"{}\"", height + LINE * lines.len()),
        1,
    );
    out = out.replacen(
        &format!("0 0 {WIDTH} {height}"),
        &format!("0 0 {WIDTH} {}", height + LINE * lines.len()),
        1,
    );
    let mut legend = String::new();
    for (index, line) in lines.iter().enumerate() {
        let top = height + LINE * index;
        legend += &format!(
            "<rect x=\"8\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{}\"/>\n<text x=\"24\" y=\"{}\" \
             font-family=\"sans-serif\" font-size=\"10\" fill=\"currentColor\">{}</text>\n",
            top + 2,
            color(index),
            top + 11,
            line
        );
    }
    out.replace("</svg>", &format!("{legend}</svg>")).replace("currentColor", INK_ALONE)
}

/// A name, the value, and below them the bar, for each ratio; bars begin at 1.
pub fn ratios(ratios: &[Ratio]) -> Drawn<String> {
    const ROW: i32 = 38;
    let height = 24 + ROW * ratios.len() as i32;
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (WIDTH, height as u32)).into_drawing_area();
    let values = || {
        let of =
            |one: &Ratio| [one.median, one.quartiles.0, one.quartiles.1, one.target.unwrap_or(1.0)];
        ratios.iter().flat_map(of).filter(|value| value.is_finite() && *value > 0.0)
    };
    let low = (values().fold(0.7, f64::min) / 1.15).ln();
    let high = (values().fold(1.5, f64::max) * 1.15).ln();
    let at = |ratio: f64| {
        let part = (ratio.max(0.001).ln() - low) / (high - low);
        8 + (part.clamp(0.0, 1.0) * f64::from(WIDTH - 16)) as i32
    };
    let bottom = ROW * ratios.len() as i32;
    area.draw(&PathElement::new([(at(1.0), 0), (at(1.0), bottom)], INK.mix(0.35)))?;
    for (tick, label) in ticks(low.exp(), high.exp()) {
        area.draw(&Text::new(
            label,
            (at(tick), bottom + 6),
            text_style(12, HPos::Center, VPos::Top),
        ))?;
    }
    for (index, one) in ratios.iter().enumerate() {
        draw_ratio(&area, one, ROW * index as i32, at)?;
    }
    area.present()?;
    drop(area);
    Ok(finished(svg))
}

fn draw_ratio(area: &Area<'_>, one: &Ratio, top: i32, at: impl Fn(f64) -> i32) -> Drawn<()> {
    /// Characters that fit beside the value.
    const NAME_MAX: usize = 42;
    let mut name = one.name.clone();
    if name.chars().count() > NAME_MAX {
        name = name.chars().take(NAME_MAX - 1).chain(['\u{2026}']).collect();
    }
    let figure = short(one.median);
    let figure = if one.is_missed { format!("{figure} missed") } else { figure };
    area.draw(&Text::new(name, (4, top + 4), text_style(12, HPos::Left, VPos::Top)))?;
    let right = (WIDTH as i32 - 4, top + 4);
    area.draw(&Text::new(figure, right, text_style(12, HPos::Right, VPos::Top)))?;
    let color = if one.is_missed { COLORS[1] } else { COLORS[0] };
    let (from, to) = (at(1.0).min(at(one.median)), at(1.0).max(at(one.median)));
    area.draw(&Rectangle::new([(from, top + 21), (to.max(from + 1), top + 31)], color.filled()))?;
    let (q1, q3) = (at(one.quartiles.0), at(one.quartiles.1));
    area.draw(&PathElement::new([(q1, top + 26), (q3, top + 26)], INK.stroke_width(1)))?;
    if let Some(target) = one.target {
        let at = at(target);
        area.draw(&PathElement::new([(at, top + 18), (at, top + 34)], INK.stroke_width(2)))?;
    }
    Ok(())
}

/// Few enough ticks that their labels do not overlap.
fn ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let tens = [0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0];
    let inside = |tick: &f64| (low * 1.02..=high / 1.02).contains(tick);
    let mut ticks: Vec<f64> = tens.into_iter().filter(inside).collect();
    if high / low < 20.0 {
        ticks.extend([0.5, 2.0, 5.0].into_iter().filter(inside));
    }
    ticks.into_iter().map(|tick| (tick, format!("{tick}"))).collect()
}

/// A line for each series; x positions are equidistant, as the values double.
pub fn chart(chart: &Chart) -> Drawn<String> {
    let mut places: Vec<f64> =
        chart.series.iter().flat_map(|one| &one.points).map(|p| p.at).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let place = |at: f64| places.iter().position(|known| *known == at).unwrap_or(0) as f64;
    let points = || chart.series.iter().flat_map(|one| &one.points);
    let most = points().map(|point| point.most).fold(0.0, f64::max);
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (WIDTH, 220)).into_drawing_area();
    let last = places.len().max(2) as f64 - 1.0;
    let label = |at: &f64| {
        let place = places.get(at.round() as usize).filter(|_| (at - at.round()).abs() < 0.01);
        place.map_or_else(String::new, |place| format!("{place}"))
    };
    let mut drawn = ChartBuilder::on(&area)
        .margin(8)
        .margin_right(16)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(-0.15..last + 0.15, 0.0..(most * 1.08).max(1e-9))?;
    drawn
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.15))
        .axis_style(INK)
        .label_style(text_style(12, HPos::Left, VPos::Top))
        .axis_desc_style(text_style(12, HPos::Left, VPos::Top))
        .x_labels(places.len().max(2))
        .y_labels(5)
        .x_label_formatter(&label)
        .y_label_formatter(&|up| {
            if *up < 1e4 { format!("{up}") } else { format!("{:.0}k", up / 1e3) }
        })
        .x_desc(chart.across.as_str())
        .y_desc(chart.up.as_str())
        .draw()?;
    for (index, series) in chart.series.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let line = series.points.iter().map(|point| (place(point.at), point.up));
        drawn.draw_series(LineSeries::new(line.clone(), color.stroke_width(2)))?;
        drawn.draw_series(line.map(|at| Circle::new(at, 3, color.filled())))?;
        let spread = series.points.iter().filter(|point| point.most > point.least);
        drawn.draw_series(spread.map(|point| {
            let at = place(point.at);
            PathElement::new([(at, point.least), (at, point.most)], color.stroke_width(1))
        }))?;
    }
    area.present()?;
    drop(drawn);
    drop(area);
    Ok(finished(svg))
}
