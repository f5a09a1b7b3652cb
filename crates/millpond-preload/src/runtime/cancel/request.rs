//! Whether a thread has hits: not while somebody has asked to cancel it (`cancel.C3`).
//!
//! A hit looks at one word, `warm`, and makes no call that could act on a request. Libc knows of a
//! request by a word of its own, set first; looking at that costs a call (a *point*), and may end
//! the thread.
//!
//! ```text
//! the thread:     claim -> point -> warm_up -> hits ... -> point, act -> warm_up -> ...
//! somebody else:  libc's word -> fence -> ask: asked, not warm
//! ```
//!
//! - Q1. A thread that is warm will be made cold, or has none to fear: the thread that warms up and
//!   the one that asks write both words in opposite order, and one of them sees the other.
//! - Q2. A request that is forgotten was looked for after that. A request that comes later asks
//!   again.
//! - Q3. An asker that does not find the thread's record leaves a mark, and looks again; a thread
//!   that claims a record looks for the mark after.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::runtime::sync::{AtomicBool, AtomicUsize, fence};

pub struct CancelRequest {
    /// The thread, as libc names it; 0 is none.
    thread: AtomicUsize,
    warm: AtomicBool,
    asked: AtomicBool,
}

/// A thread was asked to be cancelled that had no record, or not yet (Q3).
pub type Mark = AtomicBool;

impl CancelRequest {
    #[inline]
    pub fn is_warm(&self) -> bool {
        self.warm.load(Relaxed)
    }

    /// By the thread.
    pub fn warm_up(&self) {
        self.warm.store(true, Relaxed);
        // Pairs with the one in `ask` (Q1): if `asked` is not seen here, the store to `warm` there
        // comes after the one above.
        fence(SeqCst);
        if self.is_asked() {
            self.warm.store(false, Relaxed);
        }
    }

    /// By the thread: nothing it finds with the record is its own.
    pub fn claim(&self, thread: usize, mark: &Mark) {
        self.thread.store(thread, Relaxed);
        // Pairs with the one in `ask_until_found` (Q3).
        fence(SeqCst);
        if mark.load(Relaxed) {
            self.ask();
        }
    }

    /// The thread has ended, or never was.
    pub fn reset(&self) {
        self.thread.store(0, Relaxed);
        self.warm.store(false, Relaxed);
        self.asked.store(false, Relaxed);
    }

    pub fn cool_down(&self) {
        self.warm.store(false, Relaxed);
    }

    pub fn is_of(&self, thread: usize) -> bool {
        self.thread.load(Relaxed) == thread
    }

    /// By any thread, after libc's word and a fence.
    pub fn ask(&self) {
        self.asked.store(true, Relaxed);
        // Pairs with the one in `warm_up`.
        fence(SeqCst);
        self.warm.store(false, Relaxed);
    }

    pub fn is_asked(&self) -> bool {
        self.asked.load(Relaxed)
    }

    /// By the thread: `look` looks at libc's word, and acts on a request if it may; returns whether
    /// it might.
    pub fn act(&self, look: impl FnOnce() -> bool) {
        self.asked.store(false, Relaxed);
        // Pairs with the one between libc's word and `ask` (Q2): if the request is not seen by
        // `look`, it asks after the store above.
        fence(SeqCst);
        if !look() {
            self.ask();
        }
    }
}

/// `ask` asks the thread's record if it finds it, and returns whether it did.
pub fn ask_until_found(ask: impl Fn() -> bool, mark: &Mark) {
    if !ask() {
        mark.store(true, Relaxed);
        // Pairs with the one in `claim`.
        fence(SeqCst);
        ask();
    }
}

#[cfg(all(test, loom))]
#[path = "request/loom_tests.rs"]
mod loom_tests;
