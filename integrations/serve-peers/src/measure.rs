//! Medians and quartiles.

pub fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    if sorted.is_empty() {
        return f64::NAN;
    }
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}

pub fn median(values: &[f64]) -> f64 {
    quantile(&sorted(values.to_vec()), 0.5)
}

/// The median, and the quartiles in parentheses.
pub fn with_quartiles(values: &[f64]) -> String {
    let all = sorted(values.to_vec());
    let [low, middle, high] = [0.25, 0.5, 0.75].map(|part| digits(quantile(&all, part)));
    format!("{middle} ({low}-{high})")
}

/// Three significant digits.
pub fn digits(value: f64) -> String {
    match value {
        value if value >= 99.95 => format!("{value:.0}"),
        value if value >= 9.995 => format!("{value:.1}"),
        value if value >= 0.9995 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    }
}
