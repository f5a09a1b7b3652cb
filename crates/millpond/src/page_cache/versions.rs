//! The counters by which a read knows that no write of this process overlapped it.
//!
//! One table for the process, hashed by file and page, in memory that the kernel zeroes in a child of fork. Two
//! pages that share a counter cost a retry, nothing else. A file's consecutive pages have consecutive counters.
//!
//! ```text
//! writer                                   reader
//! flag = written                           E = sum of ended             Acquire
//! begun += 1 for each page   Relaxed       B = sum of begun             Relaxed; E != B: a write is in flight
//! fence                      Release       copy
//! pwrite                                   fence                        Acquire
//! ended += 1 for each page   SeqCst        sum of begun still B?        Relaxed
//! ```
//!
//! - **PV1** A reader that copied a byte of a write sees that write's `begun`: the writer's fence comes before the
//!   byte, the reader's fence after it.
//! - **PV2** A reader that starts after a write has returned sees the write's bytes: it loads `ended` with Acquire, or
//!   the program's own order has made the write visible.
//! - **PV3** `ended` is loaded before `begun`. Each counter only rises and `ended` never passes `begun`, so equal
//!   sums mean that each page was quiet when `begun` was loaded; an unchanged sum means that no counter rose.
//! - **PV4** Counters wrap at 2^32. A reader would have to sleep for exactly that many writes of one page inside a
//!   copy.
//! - **PV5** A reader announces itself (`Inode::waiting`) and then loads `ended`; a writer adds to `ended` and then loads
//!   `waiting`. All four are SeqCst, so the reader sees the end or the writer sees the reader and wakes it.
//! - **PV6** A jump (`longjmp`) may take a writer away between two of its steps, and leave its page busy. A thread notes
//!   that it writes before it adds to `begun`, and after it has added to `ended` that it does not. So a reader
//!   that loads `begun`, then finds no thread writing, and then finds `begun` unchanged knows that each write it has
//!   counted has ended or was abandoned: it sets `ended` to `begun`.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use crate::sync::{AtomicBool, AtomicU32, fence};

/// The unit of the counters: the smallest page of the kernel.
pub const PAGE_BYTES: u64 = 4096;
/// Counters in the table: 64 KiB, which a processor's cache keeps beside the data of writes. With 512 KiB, a write at
/// random waited for memory.
pub(crate) const COUNTERS: usize = 1 << 13;
/// The most pages that one mark covers: more would count a counter twice.
pub(crate) const PAGES_MAX: u64 = COUNTERS as u64;

/// The writes of one page.
#[repr(C, align(8))]
pub(crate) struct PageWrites {
    begun: AtomicU32,
    ended: AtomicU32,
}

impl PageWrites {
    #[cfg(not(loom))]
    const fn new() -> PageWrites {
        PageWrites { begun: AtomicU32::new(0), ended: AtomicU32::new(0) }
    }
}

/// See the module header.
#[derive(Clone, Copy)]
pub(crate) struct CounterTable<'t> {
    /// A power of two.
    counters: &'t [PageWrites],
}

/// Consecutive counters.
#[derive(Clone, Copy)]
pub(crate) struct CounterRange {
    first: u64,
    count: u64,
}

/// The counters that a read depends on: of its pages, of the whole file, and of the tail if it reaches there.
pub(crate) struct Span {
    pages: CounterRange,
    whole: CounterRange,
    tail: Option<CounterRange>,
}

const WHOLE: u64 = 0x5851_F42D_4C95_7F2D;
const TAIL: u64 = 0x1405_7B7E_F767_814F;

impl CounterRange {
    /// The pages from `offset` to `end`.
    #[inline]
    pub(crate) fn range(salt: u64, offset: u64, end: u64) -> CounterRange {
        let first = offset / PAGE_BYTES;
        let count = end.div_ceil(PAGE_BYTES) - first;
        CounterRange { first: salt.wrapping_add(first), count: count.min(PAGES_MAX) }
    }

    #[inline]
    pub(crate) fn whole(salt: u64) -> CounterRange {
        CounterRange { first: salt.wrapping_mul(WHOLE) >> 32, count: 1 }
    }

    #[inline]
    pub(crate) fn tail(salt: u64) -> CounterRange {
        CounterRange { first: salt.wrapping_mul(TAIL) >> 32, count: 1 }
    }
}

impl Span {
    #[inline]
    pub(crate) fn new(salt: u64, offset: u64, end: u64, reaches_tail: bool) -> Span {
        Span {
            pages: CounterRange::range(salt, offset, end),
            whole: CounterRange::whole(salt),
            tail: reaches_tail.then(|| CounterRange::tail(salt)),
        }
    }

    #[inline]
    fn marks(&self) -> impl Iterator<Item = &CounterRange> {
        [Some(&self.pages), Some(&self.whole), self.tail.as_ref()].into_iter().flatten()
    }
}

impl<'t> CounterTable<'t> {
    #[inline]
    fn each(self, mark: &CounterRange) -> impl Iterator<Item = &'t PageWrites> + use<'t> {
        let (counters, mask) = (self.counters, self.counters.len() - 1);
        let (first, count) = (mark.first as usize, mark.count as usize);
        (0..count).map(move |step| &counters[first.wrapping_add(step) & mask])
    }

    /// Before the first byte of a write can change.
    #[inline]
    pub(crate) fn begin(self, is_written: &AtomicBool, marks: &[Option<CounterRange>; 2]) {
        if !is_written.load(Relaxed) {
            is_written.store(true, Relaxed);
        }
        for counter in marks.iter().flatten().flat_map(|mark| self.each(mark)) {
            // Release: PV6. The thread's note of the write comes before.
            counter.begun.fetch_add(1, Release);
        }
        // Release: PV1. Pairs with the fences in `is_unchanged` and `is_unchanged_flag`.
        fence(Release);
    }

    /// After the last byte of a write has changed.
    #[inline]
    pub(crate) fn end(self, marks: &[Option<CounterRange>; 2]) {
        for counter in marks.iter().flatten().flat_map(|mark| self.each(mark)) {
            // SeqCst: Release for PV2, pairs with the Acquire in `observe`; and for PV5.
            counter.ended.fetch_add(1, SeqCst);
        }
        order_for_loom();
    }

    /// The count of begun writes, if none is in flight.
    #[inline]
    pub(crate) fn observe(self, span: &Span) -> Option<u64> {
        // SeqCst: Acquire for PV2, pairs with the additions in `end`; and for PV5.
        let ended = self.sum(span, |counter| counter.ended.load(SeqCst));
        let begun = self.sum(span, |counter| counter.begun.load(Relaxed));
        (begun == ended).then_some(begun)
    }

    /// Whether no write of `span` has begun since `observe` returned `begun`. Bytes that were copied in between
    /// count then.
    #[inline]
    pub(crate) fn is_unchanged(self, span: &Span, begun: u64) -> bool {
        // Acquire: PV1. Pairs with the fence in `begin`.
        fence(Acquire);
        self.sum(span, |counter| counter.begun.load(Relaxed)) == begun
    }

    /// The same for a file that no write had begun on.
    #[inline]
    pub(crate) fn is_unchanged_flag(self, is_written: &AtomicBool) -> bool {
        // Acquire: PV1. Pairs with the fence in `begin`.
        fence(Acquire);
        !is_written.load(Relaxed)
    }

    /// Ends the writes of `span` that no thread carries out any more: PV6. `is_any_writing`: whether a thread is in a
    /// write; its loads are Acquire.
    #[cold]
    pub(crate) fn end_abandoned(self, span: &Span, is_any_writing: &dyn Fn() -> bool) {
        for counter in span.marks().flat_map(|mark| self.each(mark)) {
            // Acquire: PV6. Pairs with the Release in `begin`.
            let begun = counter.begun.load(Acquire);
            if counter.ended.load(Relaxed) == begun {
                continue;
            }
            if is_any_writing() {
                return;
            }
            let ended = counter.ended.load(Relaxed);
            if counter.begun.load(Relaxed) == begun && ended != begun {
                // A lost race means that another reader has done it.
                let _ = counter.ended.compare_exchange(ended, begun, SeqCst, Relaxed);
            }
        }
    }

    #[inline]
    fn sum(self, span: &Span, count: impl Fn(&PageWrites) -> u32) -> u64 {
        span.marks().flat_map(|mark| self.each(mark)).map(|counter| u64::from(count(counter))).sum()
    }
}

/// PV5: loom gives SeqCst accesses no common order, and fences one.
#[inline(always)]
pub(super) fn order_for_loom() {
    #[cfg(loom)]
    fence(SeqCst);
}

/// The table of this process: whole pages of zeros, which take memory where files are written.
#[cfg(not(loom))]
#[repr(C, align(4096))]
struct Table([PageWrites; COUNTERS]);

#[cfg(not(loom))]
static TABLE: Table = Table([const { PageWrites::new() }; COUNTERS]);

/// The counters of this process.
#[cfg(not(loom))]
#[inline]
pub(crate) fn table() -> CounterTable<'static> {
    CounterTable { counters: &TABLE.0 }
}

/// Whether the kernel zeroes the counters in each child of fork (Linux 4.14). The first call asks it to.
#[cfg(not(loom))]
pub(crate) fn are_wiped_in_children() -> bool {
    static ARE_WIPED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *ARE_WIPED.get_or_init(|| {
        let at = (&raw const TABLE).cast_mut().cast();
        let advice = rustix::mm::Advice::LinuxWipeOnFork;
        // SAFETY: advice about whole pages of a static; it changes nothing in this process.
        unsafe { rustix::mm::madvise(at, size_of::<Table>(), advice) }.is_ok()
    })
}

#[cfg(all(test, loom))]
mod loom_tests;
