//! The epoch of a file, which protects readers from page words whose version has wrapped around.
//!
//! 27 bits of version wrap after 134 million departures from READY. A reader could be descheduled
//! for that long in the middle of a copy. So the version alone is not sufficient:
//!
//! - **V1** A transition that makes a version wrap, or reach half its range, first raises the
//!   file's epoch (64 bits, which never wrap). It is raised twice per wrap, as a reader may begin
//!   between a raise and the transition that it belongs to.
//! - **V2** A reader also compares the epoch, after the words. A word that equals the one seen
//!   before the copy was either not changed or was written after the epoch rose. In the second
//!   case, reading it (Acquire, by the fence between) makes the new epoch visible, and the reader
//!   discards the copy.
//! - **V3** An inner node of the table, or its root, is recycled only after the epoch was raised,
//!   for the same reason.
//! - **V4** A recycled leaf does not raise the epoch. That would make all concurrent reads of the
//!   file fail, and move the cache line with size and root between processors at each miss in a
//!   large file. Instead, the slot in its parent has a *generation*, which is incremented when the
//!   leaf is unlinked, so before the leaf is used again. A reader also compares the slot, after the
//!   words and before the epoch. The generation has 8 bits: as in V1, the epoch rises before the
//!   generation repeats, and halfway to it. The measurement is in `docs/benchmarks.md`.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use crate::sync::AtomicU64;

/// See the module.
#[repr(transparent)]
pub(crate) struct Epoch(AtomicU64);

impl Epoch {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// First step of a lock-free read.
    #[inline]
    pub(crate) fn begin(&self) -> u64 {
        // Acquire: the loads of the words stay below.
        self.0.load(Acquire)
    }

    /// Last step of a lock-free read. Caller: has loaded all words again, and then the links by
    /// Acquire, or has fenced. That pairs with the release of the RMW that wrote the loaded value:
    /// if it came after a wrap, the raised epoch is visible here.
    #[inline]
    pub(crate) fn is_unchanged(&self, begun: u64) -> bool {
        self.0.load(Relaxed) == begun
    }

    /// Raises the epoch, before words of this file can repeat.
    pub(crate) fn raise(&self) {
        // SeqCst (a fence on both sides on every supported target): a thread that sees the
        // following operation, a wrapped word or the reuse of a node, sees the new epoch. Argued:
        // the following operation is an RMW that releases, at the latest the one that ends HIDDEN,
        // or a release of a slot, or passes through a lock.
        self.0.fetch_add(1, SeqCst);
    }
}
