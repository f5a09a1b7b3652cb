//! Whether a process forked while one of its threads opened a file. A child may change a file that it shares unseen, so
//! the library must know each such file.
//!
//! ```text
//! open: before -> the kernel's open -> the file enters the table of open files -> has_forked
//! fork: begin  -> a look at that table -> the kernel's fork                    -> end
//! ```
//!
//! - **F1** The count is odd from `begin` to `end`. `has_forked` is true for each file that a child inherits and that
//!   the fork has not found in the table. `begin` and `has_forked` have a fence each, between their stores and their loads.
//!   So either the fork finds the file in the table or the open finds another count. An open after `begin` has
//!   read an odd count.
//! - **F2** A file that is opened after `end` is in no child, and `has_forked` is false for it: the open has read the
//!   count that `end` stored.

use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};

use crate::runtime::sync::{AtomicU32, fence};

/// See the module header.
pub struct Forks(AtomicU32);

/// The count before a file is opened.
#[derive(Clone, Copy)]
pub struct ForkCount(u32);

impl Forks {
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    pub fn before(&self) -> ForkCount {
        // Acquire: pairs with the Release in `end`. The open, which comes after, is after that fork.
        ForkCount(self.0.load(Acquire))
    }

    /// Whether a child may have a file that was opened since `before`, and is in the table.
    pub fn has_forked(&self, before: ForkCount) -> bool {
        // SeqCst: the table comes before the load. Pairs with the fence in `begin`.
        fence(SeqCst);
        before.0 & 1 != 0 || self.0.load(Acquire) != before.0
    }

    /// Before the table is looked at.
    pub fn begin(&self) {
        self.0.fetch_add(1, SeqCst);
        // SeqCst: the count comes before the loads from the table. Pairs with the fence in `has_forked`.
        fence(SeqCst);
    }

    /// In the parent: no child has a file that is opened from now on.
    pub fn end(&self) {
        // Release: pairs with `before`.
        self.0.fetch_add(1, Release);
    }

    /// In a child, which has one thread.
    pub fn reset(&self) {
        self.0.store(0, Release);
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
