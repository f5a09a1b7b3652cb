//! Whole-file shared holders, counted in one word.
//!
//! ```text
//! CLOSED, nobody -> open -> OPEN, 1.. -> close -> CLOSED, 1.. -> (the last lowers) -> drained
//!                           OPEN, 0   -> close -> drained
//! ```
//!
//! - A1. `open` and the two `close` run under the lock's mutex; raising and lowering do not.
//! - A2. A thread that raises and finds the word closed holds nothing: it lowers again, and may be the
//!   one that drains. So a closed count can rise from 0 for a moment. Each thread that lowers it, or undoes
//!   a raise, then looks under the mutex whether it is drained; the last of them finds that it is.

use crate::sync::atomic::{AtomicU64, Ordering};

const OPEN: u64 = 1 << 63;

/// See the module.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct WholeFileCounter {
    word: AtomicU64,
}

impl WholeFileCounter {
    pub(crate) fn new() -> WholeFileCounter {
        WholeFileCounter { word: AtomicU64::new(0) }
    }

    /// Counts one more holder, if the word is open.
    #[inline]
    pub(crate) fn try_increment(&self) -> bool {
        if self.word.load(Ordering::Relaxed) & OPEN == 0 {
            return false;
        }
        // Acquire: pairs with the Release in `open`: we see what the last exclusive holder wrote.
        if self.word.fetch_add(1, Ordering::Acquire) & OPEN != 0 {
            return true;
        }
        // A2. If this drains, nobody is told: the caller queues, and looks there.
        // Relaxed: we held nothing.
        self.word.fetch_sub(1, Ordering::Relaxed);
        false
    }

    /// Counts one holder less; true if the caller has to drain.
    #[inline]
    pub(crate) fn decrement(&self) -> bool {
        // Release: pairs with the Acquire in `close` and `is_drained`: the next holder of the file
        // sees that we have finished reading.
        self.word.fetch_sub(1, Ordering::Release) == 1
    }

    /// Whether the word is closed and nobody is counted. Under the mutex.
    pub(crate) fn is_drained(&self) -> bool {
        // Acquire: pairs with the Release in `lower`.
        self.word.load(Ordering::Acquire) == 0
    }

    /// Opens the word, and counts the caller. Under the mutex.
    pub(crate) fn open(&self) {
        // Release: pairs with the Acquire in `try_raise`. An addition, since the word may have
        // been raised for a moment (A2).
        self.word.fetch_add(OPEN + 1, Ordering::Release);
    }

    /// Closes the word; true if nobody is counted. Under the mutex.
    pub(crate) fn close(&self) -> bool {
        // Acquire: pairs with the Release in `lower`.
        self.word.fetch_and(!OPEN, Ordering::Acquire) & !OPEN == 0
    }

    /// Closes the word if nobody is counted. Under the mutex.
    pub(crate) fn close_if_unused(&self) -> bool {
        // Acquire: pairs with the Release in `lower`.
        self.word.compare_exchange(OPEN, 0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Closes the word, if it is not closed already, if exactly one holder is counted, the
    /// caller, which then is not counted any more. Under the mutex.
    pub(crate) fn close_if_alone(&self) -> bool {
        // Relaxed: it only chooses between the two words that the caller may be alone in.
        let open = self.word.load(Ordering::Relaxed) & OPEN;
        // Acquire: pairs with the Release in `lower`.
        self.word.compare_exchange(open + 1, 0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}
