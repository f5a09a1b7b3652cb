//! Parts of benchmarks with several processes and `millpond serve`, over the server of `scripts/store-server versitygw`.
#![allow(dead_code, unused_imports, reason = "each program uses a part")]

mod child;
mod request_log;
mod serve;

pub use child::Worker;
pub use request_log::{RequestLog, Requests};
pub use serve::Serve;

pub type Done<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The value of a variable that `scripts/store-server` sets.
pub fn variable(name: &str) -> Done<String> {
    std::env::var(name).map_err(|error| format!("{name}: {error}; see scripts/store-server").into())
}

fn proportional_mib(process: u32) -> Done<f64> {
    let path = format!("/proc/{process}/smaps_rollup");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    Ok(kib.ok_or_else(|| format!("{path}: no line of the proportional memory"))? / 1024.0)
}
