//! Free slots that threads have at hand: each gives its slot back where it finds the next one, so that
//! misses write to no word that all write to.
//!
//! As many places as processors, which threads share by their number. What they hold is few: a thread
//! that finds no slot there looks at the common word, and one that finds none there either is about to
//! wait, and takes what all places have (flight.L8).
//!
//! Locks: none.

use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;

use crate::sync::AtomicUsize;
#[cfg(not(loom))]
use crate::thread::{shard_of, shards};

/// The most slots in one place: a read of several pages apart from each other takes one for each. Chosen, not
/// measured.
const AT_HAND_MAX: usize = 16;
/// The part of all slots that the places may hold: what they have is overlooked by threads that don't wait.
/// Chosen, not measured.
const PART: usize = 4;

#[cfg(loom)]
loom::thread_local! {
    /// The place of a thread of a model.
    pub(super) static PLACE: std::cell::Cell<usize> = std::cell::Cell::new(0);
}

pub(super) struct Near {
    places: Box<[CachePadded<AtomicUsize>]>,
    /// In each place. 0: none are kept.
    most: usize,
}

impl Near {
    /// For a flight of `slots`.
    #[cfg(not(loom))]
    pub(super) fn new(slots: usize) -> Near {
        Near::of(shards(), (slots / PART / shards()).min(AT_HAND_MAX))
    }

    /// In models, those that keep some say so.
    #[cfg(loom)]
    pub(super) fn new(_: usize) -> Near {
        const { assert!(PART > 1 && AT_HAND_MAX > 0) };
        Near::of(1, 0)
    }

    pub(super) fn of(places: usize, most: usize) -> Near {
        let places = (0..places).map(|_| CachePadded::new(AtomicUsize::new(0))).collect();
        Near { places, most }
    }

    #[inline]
    fn mine(&self) -> &AtomicUsize {
        #[cfg(not(loom))]
        let place = shard_of(self.places.len());
        #[cfg(loom)]
        let place = PLACE.with(std::cell::Cell::get);
        &self.places[place]
    }

    /// Takes a slot that is at hand; whether there is one.
    #[inline]
    pub(super) fn try_take(&self) -> bool {
        let take = |count: usize| count.checked_sub(1);
        self.most > 0 && self.mine().fetch_update(Relaxed, Relaxed, take).is_ok()
    }

    /// Adds one; false if there are enough.
    #[inline]
    pub(super) fn try_add(&self) -> bool {
        let add = |count: usize| (count < self.most).then_some(count + 1);
        self.most > 0 && self.mine().fetch_update(Relaxed, Relaxed, add).is_ok()
    }

    /// Takes all that are at hand anywhere; how many.
    pub(super) fn take_all(&self) -> usize {
        self.places.iter().map(|place| place.swap(0, Relaxed)).sum()
    }

    /// How many are at hand.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.places.iter().map(|place| place.load(Relaxed)).sum()
    }
}
