//! Runs the shuttle suite on the locks of this crate.
#![cfg(shuttle)]

#[path = "../../rangelock/tests/shuttle/suite.rs"]
mod suite;

use millpond_rangelock_peers::{MutexBTree, OlcBTree, WholeFile};

#[test]
fn whole_file() {
    suite::excludes::<WholeFile>(1);
}

#[test]
fn mutex_btree() {
    suite::excludes::<MutexBTree>(1);
}

#[test]
fn olc_btree() {
    suite::excludes::<OlcBTree>(1);
}
