//! The suite of every lock, for this crate's.

#[macro_use]
mod suite;

use millpond_rangelock::Striped;

impl suite::Subject for Striped {}

for_every_lock! {
    striped: Striped,
}
