//! Whether a thread has hits: it has none while a request to cancel it is pending (`cancel.C3`).
//!
//! A hit reads one word, `warm`, and makes no call that could act on a request. Libc stores a
//! request in its own word, which is set first. A check of that word takes a call (a *point*), and may end
//! the thread.
//!
//! ```text
//! the thread:      claim -> point -> warm_up -> hits ... -> point, act -> warm_up -> ...
//! another thread:  libc's word -> fence -> ask: asked, not warm
//! ```
//!
//! - Q1. If a thread is warm, no request is pending, or the requester is about to clear `warm`. The thread that warms
//!   up and the requester write both words in opposite order, and one of them sees the other's store.
//! - Q2. After a thread forgets a request, it checks libc's word. A later request sets `asked`
//!   again.
//! - Q3. A requester that does not find the thread's record sets a mark, and searches again. A thread
//!   that claims a record checks the mark afterwards.
//!
//! Locks: none.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::runtime::sync::{AtomicBool, AtomicUsize, fence};

pub struct CancelRequest {
    /// The thread's id in libc; 0 is none.
    thread: AtomicUsize,
    warm: AtomicBool,
    asked: AtomicBool,
}

/// Set if a thread was asked to be cancelled while it had no record yet (Q3).
pub type Mark = AtomicBool;

impl CancelRequest {
    #[inline]
    pub fn is_warm(&self) -> bool {
        self.warm.load(Relaxed)
    }

    /// Called by the thread.
    pub fn warm_up(&self) {
        self.warm.store(true, Relaxed);
        // Pairs with the fence in `ask` (Q1): if this thread does not see `asked`, the store to `warm` there
        // comes after the store above.
        fence(SeqCst);
        if self.is_asked() {
            self.warm.store(false, Relaxed);
        }
    }

    /// Called by the thread, which discards the record's earlier state.
    pub fn claim(&self, thread: usize, mark: &Mark) {
        self.thread.store(thread, Relaxed);
        // Pairs with the fence in `ask_until_found` (Q3).
        fence(SeqCst);
        if mark.load(Relaxed) {
            self.request_cancel();
        }
    }

    /// The thread has ended, or never existed.
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

    /// Called by any thread, after libc's word is set and a fence.
    pub fn request_cancel(&self) {
        self.asked.store(true, Relaxed);
        // Pairs with the fence in `warm_up`.
        fence(SeqCst);
        self.warm.store(false, Relaxed);
    }

    pub fn is_asked(&self) -> bool {
        self.asked.load(Relaxed)
    }

    /// Called by the thread. `look` checks libc's word, and acts on a request if cancellation is enabled; it returns
    /// whether it is enabled.
    pub fn act(&self, look: impl FnOnce() -> bool) {
        self.asked.store(false, Relaxed);
        // Pairs with the fence between libc's word and `request_cancel` (Q2): if `look` does not see the
        // request, `ask` comes after the store above.
        fence(SeqCst);
        if !look() {
            self.request_cancel();
        }
    }
}

/// `ask` asks the thread's record if it finds it, and returns whether it did.
pub fn ask_until_found(ask: impl Fn() -> bool, mark: &Mark) {
    if !ask() {
        mark.store(true, Relaxed);
        // Pairs with the fence in `claim`.
        fence(SeqCst);
        ask();
    }
}

#[cfg(all(test, loom))]
#[path = "cancel_request/loom_tests.rs"]
mod loom_tests;
