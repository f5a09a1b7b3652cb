//! What write-back owes: bytes of pages that are DIRTY, under write-back, UNSTABLE, or any of it;
//! in all, and of each file.
//!
//! Follows from the transitions of page words, each of which is noted once, so the sums are exact
//! when nobody is in the middle of one.
//!
//! - **WC1** Two sums change when a page is dirtied, which threads do at the same time in files of their own: what is
//!   DIRTY, and what is unevictable. Those have [locals](crate::cache::accounting::percpu_counter), of a part of the dirty limit all together. A
//!   look at them is exact, and takes the locals back; or says so in its name, is too high by no more than that, and
//!   writes nothing. Who is within a limit by such a look is; who is not looks exactly.
//! - **WC2** Where three quarters of the dirty limit are used up, or, of what is unevictable, of the cache, or it is a small
//!   one, there are no locals: else each look would take back what each write takes anew.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;

use crate::cache::accounting::percpu_counter::PerCpuCounter;
use crate::cache::table::page::{Change, Word};
use crate::thread;

/// Reserves, at least: threads that come one after the other shall not meet on machines of few processors, either.
const LOCALS_MIN: usize = 16;
/// The part of the dirty limit that batches are, one of each local; the locals have twice that at most.
/// Chosen, not measured.
const PART: u64 = 32;
/// What a batch is worth having from, and up to: there is nothing to be gained by a rarer write. Chosen, not measured.
const BATCH_MIN: u64 = 16 << 10;
const BATCH_MAX: u64 = 256 << 10;

pub(crate) struct WritebackCounts {
    dirty: Box<PerCpuCounter>,
    unevictable: Box<PerCpuCounter>,
    /// What is written back, and what no sync has covered: flushes write them, and each write reads the first.
    flushed: Box<CachePadded<[AtomicU64; 2]>>,
    locals: usize,
    /// WC2. Relaxed: hints, which seldom change.
    batch: AtomicU64,
    /// What is dirty, and what is unevictable, has locals below this.
    batched_below: [AtomicU64; 2],
}

impl WritebackCounts {
    /// Without locals, until it is told of a limit.
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

    /// So much may be dirty from now on, and the cache has so much (WC2).
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

    /// The same, and locals (WC1).
    pub(crate) fn dirty_upper_bound(&self) -> u64 {
        self.dirty.upper_bound()
    }

    /// [`WritebackCounts::unwritten`], and locals.
    pub(crate) fn unwritten_upper_bound(&self) -> u64 {
        self.dirty_upper_bound() + sum(&self.flushed[0])
    }

    /// [`WritebackCounts::unevictable`], and locals.
    pub(crate) fn unevictable_upper_bound(&self) -> u64 {
        self.unevictable.upper_bound()
    }

    /// Bytes of pages that are DIRTY, and of those under write-back.
    pub(crate) fn unwritten(&self) -> u64 {
        self.dirty() + sum(&self.flushed[0])
    }

    /// Bytes of pages that no sync has covered yet.
    pub(crate) fn unstable(&self) -> u64 {
        sum(&self.flushed[1])
    }

    /// Bytes of pages that can't be evicted for what write-back owes (page.W4).
    pub(crate) fn unevictable(&self) -> u64 {
        self.unevictable.exact()
    }

    /// Notes a transition of a page of `page_bytes`; the [`FileWritebackCounts`] of its file, if that is still in
    /// use, is told, too.
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

    /// Notes that a page was, and now is, in one of the sums that have locals.
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
        // Of pages that are longer there is never one in local.
        let batch = if page_bytes as u64 > batch { 0 } else { batch };
        let local = thread::shard_of(self.locals);
        if now {
            sum.add(local, page_bytes as u64, batch);
        } else {
            sum.sub(local, page_bytes as u64, batch);
        }
    }
}

/// What one file has of those sums.
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

    /// As [`WritebackCounts::unstable`], but for pages that are DIRTY again.
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

    /// How many write-backs of a page have ended, well or not: as long as it grows, the device
    /// moves.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Relaxed)
    }
}

/// Adds to a sum by how much a transition has changed what `count` says of the page.
fn add(sum: &AtomicU64, change: &Change, page_bytes: usize, count: impl Fn(Word) -> u64) {
    let (was, now) = (count(change.was), count(change.now));
    if was != now {
        let more = now.wrapping_sub(was).wrapping_mul(page_bytes as u64);
        // Wraps around where it is less.
        sum.fetch_add(more, Relaxed);
    }
}

/// A sum may be below zero for a moment, as one transition is noted before the one that it follows.
fn sum(of: &AtomicU64) -> u64 {
    (of.load(Relaxed) as i64).max(0) as u64
}
