//! What files take of the heap, counted against the memory limit.
//!
//! Sets of pages and ranges grow where nothing can be refused: a page is DIRTY, and has to be in
//! the set. So they grow first, and are counted right after, without the lock that they are under,
//! as that may evict. Where nothing can go for it, as all pages are kept by write-back or pinned,
//! it takes what [`Frames`](crate::cache::frames::Frames) spares of the limit, and nobody gets a
//! frame before that is made up for ([`Cache::take_frame`]): so it is a matter of what was under
//! way. Enough is spared for files of one leaf, and of limits from 1 MiB for others; below, sets of
//! files whose dirty pages lie more than 2 MiB (of small pages) apart can pass the limit.
//!
//! Not counted is what ends with a request, or an operation under way: its guard where it waits for
//! one (150 bytes), its waker, the pages that a flush has in hand (8 bytes each). A long asynchronous
//! read has a buffer that is not counted; nor is a slot of 9 KiB for each living thread that uses the
//! engine. What goes with a file (its entries in the registry and in the flusher's list) is in what it
//! is charged for when it is opened.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::Cache;

/// What is counted for one thing that grows and shrinks.
#[derive(Default)]
pub(crate) struct HeapCharge {
    /// Never more than what was charged.
    bytes: AtomicU64,
}

impl HeapCharge {
    /// What is counted now.
    pub(crate) fn counted(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Counts `bytes` from now on, evicting what must go for it. Of several at once one is the
    /// last, as though they came one after the other: this is called after each change of what is
    /// counted, so a number that is not the newest is soon replaced. The caller holds no lock but
    /// range guards.
    pub(crate) fn set(&self, cache: &Cache, bytes: u64) {
        self.set_if(cache, bytes, &|more| {
            cache.force_charge(more);
            true
        });
    }

    /// The same of what can be given up; false, and nothing is counted, if it does not fit.
    pub(crate) fn try_set(&self, cache: &Cache, bytes: u64) -> bool {
        self.set_if(cache, bytes, &|more| cache.try_charge(more))
    }

    fn set_if(&self, cache: &Cache, bytes: u64, charge: &dyn Fn(u64) -> bool) -> bool {
        // Relaxed: a counter.
        let mut now = self.bytes.load(Relaxed);
        while now != bytes {
            if bytes > now && !charge(bytes - now) {
                return false;
            }
            match self.bytes.compare_exchange(now, bytes, Relaxed, Relaxed) {
                Ok(_) => {
                    cache.frames.uncharge(now.saturating_sub(bytes));
                    return true;
                }
                Err(other) => {
                    cache.frames.uncharge(bytes.saturating_sub(now));
                    now = other;
                }
            }
        }
        true
    }
}
