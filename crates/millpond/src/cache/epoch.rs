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
//! - **V3** A leaf of the table is recycled only after the epoch was raised, for the same reason.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use crate::sync::{AtomicU64, fence};

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

    /// Last step of a lock-free read, after all words were reloaded.
    #[inline]
    pub(crate) fn is_unchanged(&self, begun: u64) -> bool {
        // Pairs with the release of the RMW that wrote the word which was just reloaded: if that
        // word came after a wrap, the raise of the epoch is visible here.
        fence(Acquire);
        self.0.load(Relaxed) == begun
    }

    /// Before words of this file can repeat.
    pub(crate) fn raise(&self) {
        // SeqCst (a fence on both sides on every target we run on): what follows, a wrapped word
        // or the reuse of a leaf, is seen by nobody who does not see this. Argued: what follows is an RMW
        // that releases, at the latest that which ends HIDDEN, or passes through a lock.
        self.0.fetch_add(1, SeqCst);
    }
}
