//! What write-back owes: bytes of pages that are DIRTY, under write-back, UNSTABLE, or any of it;
//! in all, and of each file.
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

    /// Bytes of pages that can't be evicted for what write-back owes (page.W4).
    pub(crate) fn kept(&self) -> u64 {
        sum(&self.kept)
    }

    /// Notes a transition of a page of `page_bytes`; the [`Share`] of its file, if that is still in
    /// use, is told, too.
    pub(crate) fn note(&self, change: Change, page_bytes: usize) {
        let note = |sum: &AtomicU64, is_in: fn(Word) -> bool| {
            add(sum, &change, page_bytes, |word| u64::from(is_in(word)));
        };
        note(&self.dirty, Word::is_dirty);
        note(&self.writing, Word::is_under_writeback);
        note(&self.unstable, Word::is_unstable);
        note(&self.kept, Word::is_kept);
    }
}

/// What one file has of those sums.
#[derive(Default)]
pub(crate) struct Share {
    unwritten: AtomicU64,
    kept: AtomicU64,
    ended: AtomicU64,
}

impl Share {
    /// As [`Ledger::unwritten`].
    pub(crate) fn unwritten(&self) -> u64 {
        sum(&self.unwritten)
    }

    /// As [`Ledger::kept`].
    pub(crate) fn kept(&self) -> u64 {
        sum(&self.kept)
    }

    /// As [`Ledger::unstable`], but for pages that are DIRTY again.
    pub(crate) fn unstable(&self) -> u64 {
        self.kept().saturating_sub(self.unwritten())
    }

    /// As [`Ledger::note`].
    pub(crate) fn note(&self, change: Change, page_bytes: usize) {
        add(&self.unwritten, &change, page_bytes, |word| {
            u64::from(word.is_dirty()) + u64::from(word.is_under_writeback())
        });
        add(&self.kept, &change, page_bytes, |word| u64::from(word.is_kept()));
        if change.was.is_under_writeback() && !change.now.is_under_writeback() {
            self.ended.fetch_add(1, Relaxed);
        }
    }

    /// How many write-backs of a page have ended, well or not: as long as it grows, the device
    /// moves.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Relaxed)
    }
}

/// Adds to a sum by how much a transition has changed what `count` says of the page.
fn add(sum: &AtomicU64, change: &Change, page_bytes: usize, count: impl Fn(Word) -> u64) {
    let (was, now) = (count(change.was), count(change.now));
    if was != now {
        let more = now.wrapping_sub(was).wrapping_mul(page_bytes as u64);
        // Wraps around where it is less.
        sum.fetch_add(more, Relaxed);
    }
}

/// A sum may be below zero for a moment, as one transition is noted before the one that it follows.
fn sum(of: &AtomicU64) -> u64 {
    (of.load(Relaxed) as i64).max(0) as u64
}
