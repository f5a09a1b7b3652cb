//! Two small counting protocols: the pins of a frame, and the holds of a table node.
//!
//! *Pins.* A viewer raises the count, fences (SeqCst) and checks the page word again. The retirer,
//! which took the frame out of the word, fences (SeqCst), and then reads the count ([`Retiring`]).
//! Either the retirer sees the pin, or the viewer sees that the word changed. A frame with pins
//! becomes an orphan, and the last viewer of an orphan frees it. Exactly one of them frees the
//! frame.
//!
//! A late viewer raises and drops the count of a frame that may be free or reused. This is
//! harmless, and if the frame is retired again in between, that viewer frees it.
//!
//! *Holds.* A table node counts its users: operations on the slow path while they work on one of
//! its words, and each slot that is not empty. The last holder makes the node DEAD in the same
//! step, and recycles it. If these were two steps, a thread delayed between them could kill the
//! next life of the node. A hold on a dead node fails. The hold is taken first and the slot that
//! led to the node is read again afterwards. So a hold that succeeded on a recycled node is
//! detected and dropped ([`Pins::unhold`]), even if the node is used for another purpose.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};

use crate::sync::{AtomicU32, fence};

/// ORPHAN for pins, DEAD for holds.
const MARK: u32 = 1 << 31;

/// Frames that the caller took out of their page words, before their pins are read.
pub(crate) struct Retiring(());

impl Retiring {
    pub(crate) fn begin() -> Retiring {
        // Pairs with the fence of `Pins::pin`: either the pin is seen here, or the viewer sees that
        // the frame has left its page.
        fence(SeqCst);
        Retiring(())
    }

    /// Returns true if the frame is not pinned, so that it can be freed. Otherwise it is an orphan
    /// from now on.
    #[must_use]
    pub(crate) fn try_retire(&self, pins: &Pins) -> bool {
        pins.try_retire()
    }
}

/// A count with a mark.
pub(crate) struct Pins(AtomicU32);

impl Default for Pins {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl Pins {
    /// Raises the pin count. The caller then checks the page word again.
    pub(crate) fn pin(&self) {
        self.0.fetch_add(1, Relaxed);
        // Pairs with the fence of `Retiring`: either the word has changed when the caller checks
        // it, or the pin is seen there.
        fence(SeqCst);
    }

    /// Drops a pin. Returns true if this was the last pin of an orphan: the caller frees the frame.
    #[must_use]
    pub(crate) fn unpin(&self) -> bool {
        let mut seen = self.0.load(Relaxed);
        loop {
            let last = seen == MARK | 1;
            let new = if last { 0 } else { seen - 1 };
            // AcqRel: the reads of every viewer happen before the frame is freed. Mark and pin are
            // dropped in one step; otherwise a late pin and its end could be taken for the last pin
            // again.
            match self.0.compare_exchange_weak(seen, new, AcqRel, Relaxed) {
                Ok(_) => return last,
                Err(now) => seen = now,
            }
        }
    }

    /// See [`Retiring::try_retire`].
    fn try_retire(&self) -> bool {
        let mut seen = self.0.load(Acquire);
        loop {
            if seen == 0 {
                return true;
            }
            // Argued: the fence of `Retiring` releases earlier accesses to the frame; the thread
            // that has marked an orphan does not access it afterwards.
            match self.0.compare_exchange_weak(seen, seen | MARK, AcqRel, Acquire) {
                Ok(_) => return false,
                Err(now) => seen = now,
            }
        }
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    /// Takes a hold. False: the node is dead.
    #[must_use]
    pub(crate) fn try_hold(&self) -> bool {
        // AcqRel: changes by the recycler before the node came alive again are visible, and the
        // second read of the parent's slot stays below. Argued: the release part, as a new holder
        // has done nothing yet, and neither has one that failed.
        if self.0.fetch_add(1, AcqRel) & MARK != 0 {
            self.0.fetch_sub(1, AcqRel);
            return false;
        }
        true
    }

    /// Whether the hold of the caller is the only one.
    pub(crate) fn is_held_once(&self) -> bool {
        // Acquire: pairs with the drops of holds, so that the caller finds the words that were emptied
        // before EMPTY. Argued: callers only skip words.
        self.0.load(Acquire) == 1
    }

    /// Adds a hold. The caller has one already.
    pub(crate) fn hold_again(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// Drops a hold that is not the last one, or that may be on another life of the node. Returns
    /// true if it was the last one nevertheless. The node then stays alive without a hold, until it
    /// is held and released again, or until its table is torn down. So it keeps one frame of the limit,
    /// at most for the life of the file.
    pub(crate) fn unhold(&self) -> bool {
        // Argued: a thread that used the node has another hold, on it or on its child, and drops
        // that later by `unhold_or_kill`, which releases. A thread that did not use it has nothing
        // to release.
        self.0.fetch_sub(1, AcqRel) == 1
    }

    /// Drops a hold. Returns true if it was the last one: the node is DEAD, and the caller recycles
    /// it.
    #[must_use]
    pub(crate) fn unhold_or_kill(&self) -> bool {
        let mut seen = self.0.load(Relaxed);
        loop {
            let last = seen == 1;
            let new = if last { MARK } else { seen - 1 };
            // AcqRel: the accesses of every holder happen before the node is recycled.
            match self.0.compare_exchange_weak(seen, new, AcqRel, Relaxed) {
                Ok(_) => return last,
                Err(now) => seen = now,
            }
        }
    }

    /// Makes a node dead when the last user of its table tears it down. `own` is the number of
    /// holds that belong to it. Late holds by other threads stay counted.
    pub(crate) fn mark_dead(&self, own: u32) {
        // Argued: the table has no other user, and the lock of the free frames passes the node on.
        self.0.fetch_add(MARK - own, AcqRel);
    }

    /// Makes a dead or unused node alive with one hold, which the caller owns. Late holds that are
    /// being dropped stay counted.
    pub(crate) fn revive(&self) {
        // Argued: the acquire part, as the lock of the free frames has passed the node on.
        let mut seen = self.0.load(Relaxed);
        while let Err(now) = self.0.compare_exchange_weak(seen, (seen & !MARK) + 1, AcqRel, Relaxed)
        {
            seen = now;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_pin_of_an_orphan_frees_it() {
        let pins = Pins::default();
        assert!(pins.try_retire());
        pins.pin();
        pins.pin();
        assert!(!pins.try_retire());
        assert!(!pins.unpin());
        assert!(pins.unpin());
        assert!(!pins.is_pinned());
    }

    /// Goal: a thread that dropped the last hold kills this life of the node, and not the next.
    /// Method: the interleaved steps of two threads, one after the other. Incident: the hold was
    /// dropped first, and the node killed in a separate step.
    #[test]
    fn the_last_hold_and_the_life_of_a_node_end_together() {
        let holds = Pins::default();
        holds.revive();
        assert!(holds.try_hold());
        assert!(!holds.unhold_or_kill());
        assert!(holds.unhold_or_kill(), "recycled by the last holder");
        assert!(!holds.try_hold(), "no other thread can hold it");
        holds.revive();
        assert!(holds.try_hold() && !holds.unhold_or_kill());
        assert!(holds.unhold_or_kill());
    }

    #[test]
    fn a_node_without_holds_is_killed_by_the_next_holder() {
        let holds = Pins::default();
        holds.revive();
        assert!(holds.unhold());
        assert!(holds.try_hold());
        assert!(holds.unhold_or_kill());
    }
}
