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
