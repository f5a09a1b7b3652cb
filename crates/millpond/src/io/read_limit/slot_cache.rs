//! A cache of free slots per place: a thread returns its slot where it takes the next one, so that
//! misses write to no shared word.
//!
//! There are as many places as processors, which threads share by their number. They hold few
//! slots. A thread that finds no slot there looks at the common word. If that has none either, the
//! thread is about to wait, and takes the slots of all places (read_limit.L8).
//!
//! Locks: none.

use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;

use crate::sync::AtomicUsize;
#[cfg(not(loom))]
use crate::thread::{shard_of, shards};

/// The maximum number of slots in one place: a read of several separate pages takes one for each.
/// Untuned.
const AT_HAND_MAX: usize = 16;
/// The part of all slots that the places may hold, as threads that do not wait overlook them.
/// Untuned.
const PART: usize = 4;

#[cfg(loom)]
loom::thread_local! {
    /// The place of a thread of a model.
    pub(super) static PLACE: std::cell::Cell<usize> = std::cell::Cell::new(0);
}

pub(super) struct SlotCache {
    places: Box<[CachePadded<AtomicUsize>]>,
    /// The limit of each place. 0: none are cached.
    most: usize,
}

impl SlotCache {
    /// For a flight of `slots`.
    #[cfg(not(loom))]
    pub(super) fn new(slots: usize) -> SlotCache {
        SlotCache::of(shards(), (slots / PART / shards()).min(AT_HAND_MAX))
    }

    /// In models, only tests that need the cache enable it.
    #[cfg(loom)]
    pub(super) fn new(_: usize) -> SlotCache {
        const { assert!(PART > 1 && AT_HAND_MAX > 0) };
        SlotCache::of(1, 0)
    }

    pub(super) fn of(places: usize, most: usize) -> SlotCache {
        let places = (0..places).map(|_| CachePadded::new(AtomicUsize::new(0))).collect();
        SlotCache { places, most }
    }

    #[inline]
    fn local(&self) -> &AtomicUsize {
        #[cfg(not(loom))]
        let place = shard_of(self.places.len());
        #[cfg(loom)]
        let place = PLACE.with(std::cell::Cell::get);
        &self.places[place]
    }

    /// Takes a cached slot. Returns whether there was one.
    #[inline]
    pub(super) fn try_take(&self) -> bool {
        let take = |count: usize| count.checked_sub(1);
        self.most > 0 && self.local().fetch_update(Relaxed, Relaxed, take).is_ok()
    }

    /// Adds a slot. False: the place is full.
    #[inline]
    pub(super) fn try_add(&self) -> bool {
        let add = |count: usize| (count < self.most).then_some(count + 1);
        self.most > 0 && self.local().fetch_update(Relaxed, Relaxed, add).is_ok()
    }

    /// Takes all cached slots of all places. Returns their number.
    pub(super) fn take_all(&self) -> usize {
        self.places.iter().map(|place| place.swap(0, Relaxed)).sum()
    }

    /// The number of cached slots.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.places.iter().map(|place| place.load(Relaxed)).sum()
    }
}
