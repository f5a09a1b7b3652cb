//! Heap memory of files, charged to the memory limit.
//!
//! Sets of pages and ranges grow in places where nothing can be refused: a page is DIRTY, and has
//! to be in the set. So they grow first, and are charged right after, without the lock that
//! protects them, as charging may evict. If nothing is evictable, because all pages are unevictable
//! or pinned, the charge uses the spare bytes of [`Frames`](crate::cache::frames::Frames), and no
//! frame is allocated until that is compensated ([`Cache::take_frame`]). So the excess is bounded
//! by the operations in progress. The spare bytes suffice for files of one leaf, and with limits
//! from 1 MiB on for others. With smaller limits, sets of files whose dirty pages lie more than 2
//! MiB (of small pages) apart can exceed the limit.
//!
//! Memory that ends with a request or an operation in progress is not charged: its guard while it
//! waits for one (150 bytes), its waker, the pages that a flush has taken (8 bytes each). The
//! buffer of a long asynchronous read is not charged, nor is a slot of 9 KiB for each living thread
//! that uses the engine. Memory that ends with a file (its entries in the registry and in the
//! flusher's list) is included in the charge for opening it.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::Cache;

/// The charge for one object that grows and shrinks.
#[derive(Default)]
pub(crate) struct HeapCharge {
    /// Never more than the charged bytes.
    bytes: AtomicU64,
}

impl HeapCharge {
    /// The bytes that are charged now.
    pub(crate) fn counted(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Charges `bytes` from now on, and evicts pages for them if necessary. Of concurrent calls one
    /// is the last, as though they came one after the other: this is called after each change of
    /// the object, so a value that is not the newest is soon replaced. The caller holds no lock
    /// except range guards.
    pub(crate) fn set(&self, cache: &Cache, bytes: u64) {
        self.set_if(cache, bytes, &|more| {
            cache.force_charge(more);
            true
        });
    }

    /// The same for memory that can be given up. False: it does not fit, and the charge is
    /// unchanged.
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
