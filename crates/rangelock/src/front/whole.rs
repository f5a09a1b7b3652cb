//! Counts whole-file shared holders in one word.
//!
//! ```text
//! CLOSED, 0 -> open -> OPEN, 1.. -> close -> CLOSED, 1.. -> (last decrement) -> drained
//!                      OPEN, 0   -> close -> drained
//! ```
//!
//! - A1. `open` and the `close` functions run under the lock's mutex; increments and decrements do not.
//! - A2. A thread that increments and then finds the word closed holds nothing. It decrements again, and this may drain
//!   the word. So a closed count can rise from 0 for a moment. Each thread that decrements, or undoes an increment, then
//!   checks under the mutex whether the word is drained; the last of these threads finds that it is.

use crate::sync::atomic::{AtomicU64, Ordering};

const OPEN: u64 = 1 << 63;

/// `OPEN` and the number of holders; see the module.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct WholeFileCounter {
    word: AtomicU64,
}

impl WholeFileCounter {
    pub(crate) fn new() -> WholeFileCounter {
        WholeFileCounter { word: AtomicU64::new(0) }
    }

    /// Counts the caller as a holder, if the word is open.
    #[inline]
    pub(crate) fn try_increment(&self) -> bool {
        if self.word.load(Ordering::Relaxed) & OPEN == 0 {
            return false;
        }
        // Acquire: pairs with the Release in `open`: the caller sees the writes of the last exclusive holder.
        if self.word.fetch_add(1, Ordering::Acquire) & OPEN != 0 {
            return true;
        }
        // A2. If this drains the word, no other thread is notified: the caller queues, and checks there.
        // Relaxed: the caller held nothing.
        self.word.fetch_sub(1, Ordering::Relaxed);
        false
    }

    /// Removes a holder from the count; true if the caller has to check for a drained word.
    #[inline]
    pub(crate) fn decrement(&self) -> bool {
        // Release: pairs with the Acquire in `close` and `is_drained`: the next holder of the file
        // sees that we have finished reading.
        self.word.fetch_sub(1, Ordering::Release) == 1
    }

    /// Whether the word is closed and counts no holder. Under the mutex.
    pub(crate) fn is_drained(&self) -> bool {
        // Acquire: pairs with the Release in `decrement`.
        self.word.load(Ordering::Acquire) == 0
    }

    /// Opens the word, and counts the caller. Under the mutex.
    pub(crate) fn open(&self) {
        // Release: pairs with the Acquire in `try_increment`. An addition, since a thread may have
        // incremented the closed word for a moment (A2).
        self.word.fetch_add(OPEN + 1, Ordering::Release);
    }

    /// Closes the word; true if it counts no holder. Under the mutex.
    pub(crate) fn close(&self) -> bool {
        // Acquire: pairs with the Release in `decrement`.
        self.word.fetch_and(!OPEN, Ordering::Acquire) & !OPEN == 0
    }

    /// Closes the word if it counts no holder. Under the mutex.
    pub(crate) fn close_if_unused(&self) -> bool {
        // Acquire: pairs with the Release in `decrement`.
        self.word.compare_exchange(OPEN, 0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// If the caller is the only counted holder: removes it from the count and closes the word, if it is open. Under the
    /// mutex.
    pub(crate) fn close_if_alone(&self) -> bool {
        // Relaxed: the load only chooses the expected value of the compare-exchange.
        let open = self.word.load(Ordering::Relaxed) & OPEN;
        // Acquire: pairs with the Release in `decrement`.
        self.word.compare_exchange(open + 1, 0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}
