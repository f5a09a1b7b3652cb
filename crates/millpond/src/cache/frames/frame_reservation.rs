//! Nests: a chunk of frames kept for the pages of one leaf, so that they lie in a row.
//!
//! A lock-free read predictions the frame of a page from the leaf that it is in (see `table`,
//! "Guesses"). The predicted is right where a file was filled in order. Where it is filled at random,
//! the first page of a leaf claims a chunk, and each page then takes the frame at its own place.
//!
//! A frame that waits in a nest carries RESERVED in its tags; the thread that clears that bit has the
//! frame. Nothing says whose nest it is but the leaf's predicted, so a leaf that goes away, or is told
//! another predicted, leaves its nest behind. That costs memory and nothing else: reservations count as
//! committed, are made only while half of the limit is free and the class has no free frames, and
//! are broken up before anything is evicted.
//!
//! Locks: the list of reservations; class locks are taken under it.

use std::sync::atomic::Ordering::Relaxed;

use crate::cache::frames::class::Class;
use crate::cache::frames::{CLASS_SHIFT, Frames};
use crate::cache::table::{Held, SLOTS};
use crate::units::{CHUNK_UNITS, FrameIndex, PageIndex};

/// Nests are for pages of one unit: a chunk then has as many frames as a leaf has words.
const CLASS: Class = Class::UNIT_PAGE;
const _: () = assert!(CHUNK_UNITS as usize == SLOTS);

impl Frames {
    /// Takes the frame that waits for `page` in the nest of its leaf.
    pub(crate) fn take_reserved(&self, held: &Held<'_>, page: PageIndex) -> Option<FrameIndex> {
        let frame = held.predicted(page);
        (self.address(frame).is_some() && self.meta(frame).claim_reserved()).then(|| {
            self.prepare_for_use(frame, CLASS);
            frame
        })
    }

    /// Makes a nest for the leaf of `page`, if there is room, and takes the frame for `page`.
    pub(crate) fn make_reservation(&self, held: &Held<'_>, page: PageIndex) -> Option<FrameIndex> {
        let first = self.take_chunk(CLASS)?;
        for unit in first..first + CHUNK_UNITS {
            self.meta(FrameIndex(unit)).reserve(u32::from(CLASS.tag()) << CLASS_SHIFT);
        }
        let mut reservations = self.reservations.lock().expect("no panic under the lock");
        reservations.push(first);
        self.may_have_reservations.store(true, Relaxed);
        drop(reservations);
        held.record_run(page, FrameIndex(first + page.0 as u32 % CHUNK_UNITS));
        self.take_reserved(held, page)
    }

    /// Puts the frames that wait in a nest on the free list; false if there are no reservations.
    pub(crate) fn break_reservation(&self) -> bool {
        if !self.may_have_reservations.load(Relaxed) {
            return false;
        }
        let mut reservations = self.reservations.lock().expect("no panic under the lock");
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
