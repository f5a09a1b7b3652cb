//! Runs the conformance suite on this crate's lock.

#[macro_use]
mod suite;

use millpond_rangelock::Striped;

impl suite::Subject for Striped {}

for_every_lock! {
    striped: Striped,
}
