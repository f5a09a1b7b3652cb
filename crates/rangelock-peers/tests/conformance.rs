//! Runs the conformance suite on the locks of this crate.

#[macro_use]
#[path = "../../rangelock/tests/conformance/suite/mod.rs"]
mod suite;

use millpond_rangelock_peers::{IntervalTree, MutexBTree, OlcBTree, WholeFile};

impl suite::Subject for IntervalTree {}
impl suite::Subject for MutexBTree {}
impl suite::Subject for OlcBTree {}
impl suite::Subject for WholeFile {
    const WHOLE: bool = true;
}

for_every_lock! {
    interval_tree: IntervalTree,
    mutex_btree: MutexBTree,
    olc_btree: OlcBTree,
    whole_file: WholeFile,
}
