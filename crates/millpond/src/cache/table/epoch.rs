//! The epoch of a file: why a page word that wraps around misleads nobody.
//!
//! 27 bits of version wrap after 134 million departures from READY, which a reader that was
//! descheduled in mid-copy could sleep through. So the version alone is not trusted:
//!
//! - **V1** A transition that makes a version wrap, or reach half its range, first raises the
//!   file's epoch (64 bits: never wraps). Twice a round, as a reader may begin between a raise and
//!   the transition that it belongs to.
//! - **V2** A reader compares the epoch, too, after the words. A word that equals the one seen
//!   before the copy was either never changed or was written after the epoch rose; reading it
//!   (Acquire, by the fence between) makes the new epoch visible, and the reader discards the copy.
//! - **V3** An inner node of the table, or its root, is recycled only after the epoch was raised, for the
//!   same reason.
//! - **V4** A leaf that is recycled raises no epoch: that would fail all reads of the file that are under way,
//!   and take from each processor the line that size and root are in, as often as a page is read where few
//!   others are cached. Its parent's slot has a *generation* instead, which grows when the leaf is
//!   unlinked, and so before it is used again; a reader compares the slot, too, after the words and before
//!   the epoch. Of 8 bits: as for V1, the epoch rises before the generation repeats, and half-way to it.
//!   (4 KiB hits by one thread beside misses at random by another, in a file of 2,048 caches: of 8.3 million
//!   a second 416,000 failed, now 3,000 of 9.2 million; of 512 caches 180,000, now 1,200; of one that is
//!   cached for a third, none either way.)
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

    /// Last step of a lock-free read. Caller: has reloaded all words, and then the links by Acquire, or
    /// fenced. That pairs with the release of the RMW that wrote what was reloaded: if it came after a
    /// wrap, the raise of the epoch is visible here.
    #[inline]
    pub(crate) fn is_unchanged(&self, begun: u64) -> bool {
        self.0.load(Relaxed) == begun
    }

    /// Before words of this file can repeat.
    pub(crate) fn raise(&self) {
        // SeqCst (a fence on both sides on every target we run on): what follows, a wrapped word
        // or the reuse of a node, is seen by nobody who does not see this. Argued: what follows is an RMW
        // that releases, at the latest that which ends HIDDEN, or a release of a slot, or passes through a
        // lock.
        self.0.fetch_add(1, SeqCst);
    }
}
