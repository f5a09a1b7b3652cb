//! Write-back counts: bytes of pages that are DIRTY, under write-back, UNSTABLE, or any of these,
//! in total and for each file.
//!
//! They follow from the transitions of page words. Each transition is counted once, so the sums are
//! exact when no transition is in progress.
//!
//! - **WC1** Dirtying a page changes two sums, which threads do concurrently in different files:
//!   DIRTY bytes, and unevictable bytes. These sums are [per-CPU
//!   counters](crate::cache::accounting::percpu_counter), whose local counters together are bounded
//!   by a part of the dirty limit. A read is exact, and drains the local counters; or it returns an
//!   upper bound, as its name says, and writes nothing. If the upper bound is within a limit, no
//!   exact sum is needed; otherwise the caller computes it.
//! - **WC2** The local counters are not used above three quarters of the dirty limit (or, for
//!   unevictable bytes, of the cache), or if the limit is small. Otherwise every exact read would
//!   drain them and every write would refill them.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;

use crate::cache::accounting::percpu_counter::PerCpuCounter;
use crate::cache::table::page::{Change, Word};
use crate::thread;

/// The minimum number of local counters: threads that run one after the other should not share one,
/// even on machines with few processors.
const LOCALS_MIN: usize = 16;
/// The part of the dirty limit that one batch of each local counter makes up. The local counters
/// hold at most twice that. Untuned.
const PART: u64 = 32;
/// The minimum of a useful batch, and the maximum, beyond which rarer writes gain nothing. Untuned.
const BATCH_MIN: u64 = 16 << 10;
const BATCH_MAX: u64 = 256 << 10;

pub(crate) struct WritebackCounts {
    dirty: Box<PerCpuCounter>,
    unevictable: Box<PerCpuCounter>,
    /// Bytes under write-back, and unsynced bytes. Flushes write them, and each write reads the
    /// first.
    flushed: Box<CachePadded<[AtomicU64; 2]>>,
    locals: usize,
    /// The batch (WC2). Relaxed: a hint, which rarely changes.
    batch: AtomicU64,
    /// Dirty bytes, and unevictable bytes, use local counters below this.
    batched_below: [AtomicU64; 2],
}

impl WritebackCounts {
    /// Without local counters until the limits are set.
    pub(crate) fn new() -> WritebackCounts {
        let locals = thread::shards().max(LOCALS_MIN);
        WritebackCounts {
            dirty: Box::new(PerCpuCounter::new(locals)),
            unevictable: Box::new(PerCpuCounter::new(locals)),
            flushed: Box::default(),
            locals,
            batch: AtomicU64::new(0),
            batched_below: [const { AtomicU64::new(0) }; 2],
        }
    }

    /// Sets the dirty limit, and the size of the cache (WC2).
    pub(crate) fn set_limits(&self, max: u64, cache_bytes: u64) {
        let batch = (max / PART / self.locals as u64).min(BATCH_MAX);
        self.batch.store(if batch < BATCH_MIN { 0 } else { batch }, Relaxed);
        for (mark, limit) in self.batched_below.iter().zip([max, cache_bytes]) {
            mark.store(limit / 4 * 3, Relaxed);
        }
        self.dirty.exact();
        self.unevictable.exact();
    }

    /// Bytes of DIRTY pages.
    pub(crate) fn dirty(&self) -> u64 {
        self.dirty.exact()
    }

    /// The same, plus local counters (WC1).
    pub(crate) fn dirty_upper_bound(&self) -> u64 {
        self.dirty.upper_bound()
    }

    /// [`WritebackCounts::unwritten`], plus local counters.
    pub(crate) fn unwritten_upper_bound(&self) -> u64 {
        self.dirty_upper_bound() + sum(&self.flushed[0])
    }

    /// [`WritebackCounts::unevictable`], plus local counters.
    pub(crate) fn unevictable_upper_bound(&self) -> u64 {
        self.unevictable.upper_bound()
    }

    /// Bytes of pages that are DIRTY, plus bytes under write-back.
    pub(crate) fn unwritten(&self) -> u64 {
        self.dirty() + sum(&self.flushed[0])
    }

    /// Bytes of pages that no sync has covered yet.
    pub(crate) fn unstable(&self) -> u64 {
        sum(&self.flushed[1])
    }

    /// Bytes of pages that cannot be evicted because of write-back (page.W4).
    pub(crate) fn unevictable(&self) -> u64 {
        self.unevictable.exact()
    }

    /// Counts a transition of a page of `page_bytes`. The caller also counts it in the
    /// [`FileWritebackCounts`] of its file, if that is still in use.
    pub(crate) fn note(&self, change: Change, page_bytes: usize) {
        let note = |sum: &AtomicU64, is_in: fn(Word) -> bool| {
            add(sum, &change, page_bytes, |word| u64::from(is_in(word)));
        };
        let was_now = (change.was.is_dirty(), change.now.is_dirty());
        self.count(&self.dirty, &self.batched_below[0], was_now, page_bytes);
        note(&self.flushed[0], Word::is_under_writeback);
        note(&self.flushed[1], Word::is_unstable);
        let was_now = (change.was.is_unevictable(), change.now.is_unevictable());
        self.count(&self.unevictable, &self.batched_below[1], was_now, page_bytes);
    }

    /// Counts that a page was, and now is, in one of the sums with local counters.
    fn count(
        &self,
        sum: &PerCpuCounter,
        below: &AtomicU64,
        (was, now): (bool, bool),
        page_bytes: usize,
    ) {
        if was == now {
            return;
        }
        let is_near = sum.upper_bound() > below.load(Relaxed);
        let batch = if is_near { 0 } else { self.batch.load(Relaxed) };
        // Pages larger than a batch are never counted locally.
        let batch = if page_bytes as u64 > batch { 0 } else { batch };
        let local = thread::shard_of(self.locals);
        if now {
            sum.add(local, page_bytes as u64, batch);
        } else {
            sum.sub(local, page_bytes as u64, batch);
        }
    }
}

/// The part of one file in these sums.
#[derive(Default)]
pub(crate) struct FileWritebackCounts {
    unwritten: AtomicU64,
    unevictable: AtomicU64,
    ended: AtomicU64,
}

impl FileWritebackCounts {
    /// As [`WritebackCounts::unwritten`].
    pub(crate) fn unwritten(&self) -> u64 {
        sum(&self.unwritten)
    }

    /// As [`WritebackCounts::unevictable`].
    pub(crate) fn unevictable(&self) -> u64 {
        sum(&self.unevictable)
    }

    /// As [`WritebackCounts::unstable`], except for pages that are DIRTY again.
    pub(crate) fn unstable(&self) -> u64 {
        self.unevictable().saturating_sub(self.unwritten())
    }

    /// As [`WritebackCounts::note`].
    pub(crate) fn note(&self, change: Change, page_bytes: usize) {
        add(&self.unwritten, &change, page_bytes, |word| {
            u64::from(word.is_dirty()) + u64::from(word.is_under_writeback())
        });
        add(&self.unevictable, &change, page_bytes, |word| u64::from(word.is_unevictable()));
        if change.was.is_under_writeback() && !change.now.is_under_writeback() {
            self.ended.fetch_add(1, Relaxed);
        }
    }

    /// The number of ended write-backs of pages, successful or not. While it grows, the device
    /// makes progress.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Relaxed)
    }
}

/// Changes a sum by the difference that a transition makes to `count`.
fn add(sum: &AtomicU64, change: &Change, page_bytes: usize, count: impl Fn(Word) -> u64) {
    let (was, now) = (count(change.was), count(change.now));
    if was != now {
        let more = now.wrapping_sub(was).wrapping_mul(page_bytes as u64);
        // Wraps around for a decrease.
        sum.fetch_add(more, Relaxed);
    }
}

/// A sum may be below zero for a moment, as a transition may be counted before the one that it
/// follows.
fn sum(of: &AtomicU64) -> u64 {
    (of.load(Relaxed) as i64).max(0) as u64
}
