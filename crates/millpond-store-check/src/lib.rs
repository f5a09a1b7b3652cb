//! Tests which promises an object store keeps, in particular those of conditional writes.
//!
//! A refused second create proves little. Some stores check the condition before they write, without a lock, so several
//! concurrent writers succeed; others ignore the condition. So this crate makes creates and updates race, from many
//! connections and through every endpoint, and loses replies on purpose.
//!
//! - [`open`]: the endpoints of a URL (`s3://bucket/prefix`, `file:///dir`, `memory:///`). For S3 over plain HTTP, each
//!   endpoint has a second connection through a proxy ([`Proxy`]) that can lose replies.
//! - [`check`]: tests each [`Promise`] below a unique prefix, removes its objects, and returns a [`Report`].
//!
//! Each object contains the ID of the write that created it, in its content and in its metadata. So a reader knows which
//! write created the object: for example one that was refused, or one whose reply was lost.
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

/// Extent of the tests.
#[derive(Debug, Clone)]
pub struct Options {
    /// Concurrent writes of a race, spread over the endpoints.
    pub racers: usize,
    /// Number of races of creates, and of races of updates.
    pub rounds: usize,
    /// A request that takes longer counts as undecided.
    pub request_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { racers: 16, rounds: 50, request_timeout: Duration::from_secs(10) }
    }
}
