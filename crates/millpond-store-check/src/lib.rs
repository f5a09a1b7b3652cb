//! What an object store promises of conditional writes, found out by trying.
//!
//! That a second create is refused proves little: stores are known that look first and write then, so that
//! several of those who race win, and others that ignore the condition. So creates and updates are raced
//! here, from many connections, through every endpoint, and replies are lost on purpose.
//!
//! - [`open`]: endpoints from a URL (`s3://bucket/prefix`, `file:///dir`, `memory:///`). For S3 over plain HTTP
//!   each has a twin behind a proxy ([`Proxy`]) that can lose replies.
//! - [`check`]: tries each [`Promise`] under a prefix of its own, removes what it wrote, and returns a
//!   [`Report`].
//!
//! Each object holds, as its content and in its metadata, the id of the one write that made it. So who reads
//! it knows whose it is: a racer's that was told it lost, or one's own whose reply was lost.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use millpond_store_check::{Options, check, open};
//!
//! let endpoints = open("memory:///", &[], &Options::default()).await.unwrap();
//! let report = check(&endpoints, &Options::default()).await.unwrap();
//! assert!(report.is_kept("racing_creates"));
//! # });
//! ```

#![forbid(unsafe_code)]

mod open;
mod promises;
mod proxy;
mod race;
mod report;
mod writes;

use std::time::Duration;

pub use open::{Endpoint, open};
pub use promises::check;
pub use proxy::Proxy;
pub use report::{Promise, Report, Verdict};

/// How much is tried.
#[derive(Debug, Clone)]
pub struct Options {
    /// Writes at once in a race, spread over the endpoints.
    pub racers: usize,
    /// Races of creates, and as many of updates.
    pub rounds: usize,
    /// A request that takes longer has no known outcome.
    pub request_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { racers: 16, rounds: 50, request_timeout: Duration::from_secs(10) }
    }
}
