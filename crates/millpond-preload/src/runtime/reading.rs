//! Reading sections: how a thread finds that no lock-free reader still uses a block of memory.
//!
//! With them a hit makes no shared write. A hit does
//!
//! ```text
//! enter: depth += 1;  load the table slot;  use what it points to;  exit: depth -= 1
//! ```
//!
//! and freeing the memory that a slot pointed to takes
//!
//! ```text
//! clear the slot;  membarrier();  read every thread's depth;  free when each was seen outside
//! ```
//!
//! `membarrier` runs a full fence on every thread of the process. A reader whose increment came
//! before that fence is seen by the loads after it; a reader whose increment came after it also
//! loads the slot after it, and finds it cleared. So the reader needs only a compiler fence. Where the
//! kernel refuses `membarrier`, readers fence themselves; loom, which knows no `membarrier`, explores
//! that way.
//!
//! A signal handler nests in its own thread: the depth counts the levels. Above it a sequence
//! grows whenever the depth returns to zero. So a reader seen outside *once* since the slot was
//! cleared is known to be done, however busy it is. A handler that `longjmp`s out of a hit leaves the
//! depth raised permanently: frees are then deferred permanently, which costs only memory.

use std::ops::Deref;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::compiler_fence;

use crate::runtime::sync::{AtomicU64, fence};

const DEPTH_MASK: u64 = 0xff;
const SEQUENCE_ONE: u64 = 0x100;

/// The sections of one thread, which alone changes it. Zero bytes: outside.
pub struct Sections(AtomicU64);

impl Sections {
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Enters a section. Paired with [`Sections::exit`].
    #[inline]
    pub fn enter(&self, is_fenced: bool) {
        // Its order before the slot load is the module header's. Release: a thread that sees this
        // section, and so that the one before is over, may free what that read (partner: the
        // Acquire in `current`). The Release in `exit` is not enough: a later store does not carry
        // it on.
        self.0.store(self.0.load(Relaxed) + 1, Release);
        compiler_fence(SeqCst);
        if is_fenced {
            fence(SeqCst);
        }
    }

    /// Whether the thread is in a section: a signal handler may have interrupted one.
    pub fn is_inside(&self) -> bool {
        self.0.load(Relaxed) & DEPTH_MASK != 0
    }

    /// Leaves a section.
    #[inline]
    pub fn exit(&self) {
        let mut word = self.0.load(Relaxed) - 1;
        if word & DEPTH_MASK == 0 {
            word = word.wrapping_add(SEQUENCE_ONE);
        }
        // Release: the reads of this section come before any thread sees its end (partner: the
        // Acquire in `current`).
        self.0.store(word, Release);
    }

    /// The sequence of the current section.
    fn current(&self) -> Option<u64> {
        // Acquire: pairs with the Release in `exit`.
        let word = self.0.load(Acquire);
        (word & DEPTH_MASK != 0).then_some(word & !DEPTH_MASK)
    }
}

/// Sections that were under way at some moment.
pub struct Readers<R>(Vec<(R, u64)>);

impl<R: Deref<Target = Sections>> Readers<R> {
    /// Notes the threads that are reading now, of those that `visit_all` passes on. Memory that was
    /// unpublished before this call is unreachable for all others. `membarrier` is a fence on all
    /// threads, or nothing if readers fence themselves.
    pub fn take(membarrier: impl FnOnce(), visit_all: impl FnOnce(&mut dyn FnMut(R))) -> Self {
        fence(SeqCst);
        membarrier();
        let mut readers = Vec::new();
        visit_all(&mut |sections| {
            if let Some(sequence) = sections.current() {
                readers.push((sections, sequence));
            }
        });
        Self(readers)
    }

    /// Whether all of them have been seen outside since.
    pub fn is_over(&mut self) -> bool {
        self.0.retain(|(sections, sequence)| sections.current() == Some(*sequence));
        self.0.is_empty()
    }
}

#[cfg(all(test, loom))]
#[path = "reading/loom_tests.rs"]
mod loom_tests;
