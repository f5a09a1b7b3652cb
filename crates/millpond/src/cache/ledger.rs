//! What write-back owes: bytes of pages that are DIRTY, under write-back, UNSTABLE, or any of it.
//!
//! Follows from the transitions of page words, each of which is noted once, so the sums are exact
//! when nobody is in the middle of one.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::page::{Change, Word};

#[derive(Default)]
pub(crate) struct Ledger {
    dirty: AtomicU64,
    writing: AtomicU64,
    unstable: AtomicU64,
    kept: AtomicU64,
    released: AtomicU64,
}

impl Ledger {
    /// Bytes of DIRTY pages.
    pub(crate) fn dirty(&self) -> u64 {
        sum(&self.dirty)
    }

    /// Bytes of pages that are DIRTY, and of those under write-back.
    pub(crate) fn unwritten(&self) -> u64 {
        self.dirty() + sum(&self.writing)
    }

    /// Bytes of pages that no sync has covered yet.
    pub(crate) fn unstable(&self) -> u64 {
        sum(&self.unstable)
    }

    /// Bytes of pages that can't be evicted for what write-back owes (W4).
    pub(crate) fn kept(&self) -> u64 {
        sum(&self.kept)
    }

    /// How many pages were kept once and were not any more: grows with each that can go.
    pub(crate) fn released(&self) -> u64 {
        self.released.load(Relaxed)
    }

    /// Notes a transition of a page of `page_bytes`.
    pub(crate) fn note(&self, change: Change, page_bytes: usize) {
        let note = |sum: &AtomicU64, is_in: fn(Word) -> bool| {
            match (is_in(change.was), is_in(change.now)) {
                (false, true) => sum.fetch_add(page_bytes as u64, Relaxed),
                (true, false) => sum.fetch_sub(page_bytes as u64, Relaxed),
                _ => 0,
            };
        };
        note(&self.dirty, Word::is_dirty);
        note(&self.writing, Word::is_under_writeback);
        note(&self.unstable, Word::is_unstable);
        note(&self.kept, Word::is_kept);
        if change.was.is_kept() && !change.now.is_kept() {
            self.released.fetch_add(1, Relaxed);
        }
    }
}

/// A sum may be below zero for a moment, as one transition is noted before the one that it follows.
fn sum(of: &AtomicU64) -> u64 {
    (of.load(Relaxed) as i64).max(0) as u64
}
