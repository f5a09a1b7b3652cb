//! Frame reservations: a chunk of frames that is reserved for the pages of one leaf, so that these
//! pages have adjacent frames. (FreeBSD reserves superpages in the same way.)
//!
//! A lock-free read predicts the frame of a page from its leaf (see `table`, "Predicted frames").
//! The prediction is right if a file was filled in order. If it is filled at random, the first page
//! of a leaf reserves a chunk, and each page then takes the frame at its index.
//!
//! A frame in a reservation has RESERVED in its tags. The thread that clears the bit owns the
//! frame. Only the prediction of the leaf leads to a reservation. So a leaf that is freed, or gets
//! another prediction, abandons its reservation. That costs memory only: reservations count as
//! committed, are made only while half of the limit is free and the class has no free frames, and
//! are broken before anything is evicted.
//!
//! Locks: the list of reservations; class locks are acquired under it.

use std::sync::atomic::Ordering::Relaxed;

use crate::cache::frames::class::Class;
use crate::cache::frames::{CLASS_SHIFT, Frames};
use crate::cache::table::{HeldLeaf, SLOTS};
use crate::sync::MutexExt;
use crate::units::{CHUNK_UNITS, FrameIndex, PageIndex};

/// Reservations are for pages of one unit: a chunk then has as many frames as a leaf has words.
const CLASS: Class = Class::UNIT_PAGE;
const _: () = assert!(CHUNK_UNITS as usize == SLOTS);

impl Frames {
    /// Takes the frame that is reserved for `page` by its leaf.
    pub(crate) fn take_reserved(&self, held: &HeldLeaf<'_>, page: PageIndex) -> Option<FrameIndex> {
        let frame = held.predicted(page);
        (self.address(frame).is_some() && self.meta(frame).claim_reserved()).then(|| {
            self.prepare_for_use(frame, CLASS);
            frame
        })
    }

    /// Reserves a chunk for the leaf of `page`, if there is room, and takes the frame for `page`.
    pub(crate) fn make_reservation(
        &self,
        held: &HeldLeaf<'_>,
        page: PageIndex,
    ) -> Option<FrameIndex> {
        let first = self.take_chunk(CLASS)?;
        for unit in first..first + CHUNK_UNITS {
            self.meta(FrameIndex(unit)).reserve(u32::from(CLASS.tag()) << CLASS_SHIFT);
        }
        let mut reservations = self.reservations.acquire();
        reservations.push(first);
        self.may_have_reservations.store(true, Relaxed);
        drop(reservations);
        held.record_run(page, FrameIndex(first + page.0 as u32 % CHUNK_UNITS));
        self.take_reserved(held, page)
    }

    /// Puts the unused frames of a reservation on the free list. False: there are no reservations.
    pub(crate) fn break_reservation(&self) -> bool {
        if !self.may_have_reservations.load(Relaxed) {
            return false;
        }
        let mut reservations = self.reservations.acquire();
        let Some(first) = reservations.pop() else {
            self.may_have_reservations.store(false, Relaxed);
            return false;
        };
        for frame in (first..first + CHUNK_UNITS).map(FrameIndex) {
            if self.meta(frame).claim_reserved() {
                self.free(frame, CLASS);
            }
        }
        true
    }
}
