//! How many hold a description: D2 of `open_file`.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::runtime::sync::AtomicU32;

/// A count that is not raised from zero.
pub struct References(AtomicU32);

impl References {
    pub fn none() -> Self {
        Self(AtomicU32::new(0))
    }

    /// The first reference, of the only thread that can reach it.
    pub fn begin(&self) {
        self.0.store(1, Relaxed);
    }

    /// One more. Relaxed: there is one already; a thread that found the description in a slot has
    /// acquired its fields.
    pub fn pin(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// Gives up a reference; whether it was the last.
    #[must_use]
    pub fn unpin(&self) -> bool {
        // AcqRel: all that others did with the description comes before it ends.
        self.0.fetch_sub(1, AcqRel) == 1
    }

    /// Gives up a reference unless it is the last; whether it was given up.
    pub fn try_unpin(&self) -> bool {
        // AcqRel: as in `unpin`.
        self.0.fetch_update(AcqRel, Acquire, |count| (count > 1).then(|| count - 1)).is_ok()
    }
}

#[cfg(all(test, loom))]
#[path = "references/loom_tests.rs"]
mod loom_tests;
