//! Medians.

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The median, and the least and the largest value in parentheses.
pub fn with_range(values: Vec<f64>) -> String {
    let (least, largest) = values.iter().fold((f64::MAX, f64::MIN), |(least, largest), &value| {
        (least.min(value), largest.max(value))
    });
    format!("{:.3} ({least:.3} to {largest:.3})", median(values))
}
