//! Runs the shuttle suite on this crate's lock.
#![cfg(shuttle)]

mod suite;

use millpond_rangelock::Striped;

#[test]
fn striped_in_one_region() {
    suite::excludes::<Striped>(1);
}

#[test]
fn striped_in_many_regions() {
    suite::excludes::<Striped>(4096);
}
