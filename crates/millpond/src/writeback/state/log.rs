//! Detects files that are written like logs: an appending write, a sync, and again.
//!
//! Appending writes to such a file go to the backend at once, in mode `back` too. The sync follows
//! immediately, so there is nothing to combine the write with, and no space has to be reserved for
//! the time in between. (On ext4, reserved blocks have to be converted to written ones.) The
//! measurement is in `docs/benchmarks.md`.
//!
//! Locks: none. The caller holds the guard over the end of the file.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// Consecutive synced appends before the file counts as a log. Untuned.
const ROW_MIN: u32 = 3;

#[derive(Default)]
pub(crate) struct LogPattern {
    /// The number of successful syncs. Relaxed, as all fields here: a hint.
    syncs: AtomicU32,
    /// The value of `syncs` when the file last became longer.
    seen: AtomicU32,
    /// Consecutive appends that each followed a sync.
    row: AtomicU32,
}

impl LogPattern {
    pub(crate) fn synced(&self) {
        self.syncs.fetch_add(1, Relaxed);
    }

    /// Records that the file becomes longer. Returns whether it is a log.
    pub(crate) fn grows(&self) -> bool {
        let syncs = self.syncs.load(Relaxed);
        let row = match self.seen.load(Relaxed) {
            seen if seen == syncs => 0,
            _ => self.row.load(Relaxed).saturating_add(1),
        };
        self.seen.store(syncs, Relaxed);
        self.row.store(row, Relaxed);
        row > ROW_MIN
    }
}
