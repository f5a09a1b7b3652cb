//! The set of dirty pages of a file, and the flushes that have taken pages from it.
//!
//! The page word decides whether a page is dirty; the set only makes dirty pages easy to find. A
//! flush takes pages out of the set, claims each by its word, and puts back those that it could not
//! write. The pages belong to the flush until it ends.
//!
//! - **DS2** A page enters the set after its word became DIRTY, and before the guard of its writer
//!   is released. A flush that takes the page out of the set claims it, finds it clean, or puts it
//!   back. So a DIRTY page whose writer has returned is in the set or belongs to a flush.
//! - **DS3** A flush gets its number together with its pages. A waiting flush writes the pages of
//!   its range that were DIRTY when it began, and no others: the pages that it took, and the pages
//!   that flushes with smaller numbers had taken. It waits until those of them whose ranges meet
//!   its range have ended, and then writes the pages that they put back.
//! - **DS6** The heap bytes of pages that a flush has taken stay charged until the pages are
//!   recorded as unsynced, or are put back, or the flush ends. Otherwise other allocations could
//!   take that room. As write-back may make the whole cache unevictable, there would be no room to
//!   record the unsynced pages.
//! - **DS7** A flush of a limited number of pages starts where the last such flush ended, and wraps
//!   wrapped. So every page is reached. The pages ahead have been dirty for longest and lie most
//!   densely, so several of them form one write. If each flush started at the first page, pages
//!   dirtied at random at the beginning of the file would be written soon, one by one, and those at
//!   its end would stay dirty.
//!
//! Locks: the lock of the file's write-back state.

use std::ops::RangeInclusive;
use std::time::Instant;

use crate::cache::table::page_set::PageSet;
use crate::units::PageIndex;

/// The number of an active flush.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FlushNumber(u64);

#[derive(Default)]
pub(crate) struct Dirty {
    set: PageSet,
    since: Option<Instant>,
    active: Vec<ActiveFlush>,
    next: u64,
    waiting: Vec<WaitingFlush>,
    /// Where the next limited flush begins (DS7).
    sweep: PageIndex,
}

type Pages = RangeInclusive<PageIndex>;

struct ActiveFlush {
    number: FlushNumber,
    range: Pages,
    /// Heap bytes that stay charged for its pages (DS6).
    heap_bytes: u64,
}

/// A flush that waits for earlier flushes.
struct WaitingFlush {
    number: FlushNumber,
    range: Pages,
    /// Pages that earlier flushes have put back.
    put_back: PageSet,
}

impl Dirty {
    /// Whether the set is empty and no flush is active.
    pub(crate) fn is_clean(&self) -> bool {
        self.set.is_empty() && self.active.is_empty()
    }

    /// An upper bound of the heap bytes of the sets.
    pub(crate) fn heap_bytes(&self) -> u64 {
        let pages = self.waiting.iter().map(|waiting| waiting.put_back.heap_bytes());
        let in_flush = self.active.iter().map(|flush| flush.heap_bytes);
        self.set.heap_bytes() + pages.sum::<u64>() + in_flush.sum::<u64>()
    }

    /// Releases `bytes` of the heap charge of flush `number`, which are charged elsewhere from now
    /// on.
    pub(crate) fn release_heap(&mut self, number: FlushNumber, bytes: u64) {
        if let Some(flush) = self.active.iter_mut().find(|flush| flush.number == number) {
            flush.heap_bytes = flush.heap_bytes.saturating_sub(bytes);
        }
    }

    /// Since when the set has not been empty.
    pub(crate) fn since(&self) -> Option<Instant> {
        self.since
    }

    /// Adds pages to the set (DS2).
    pub(crate) fn insert(&mut self, pages: impl Iterator<Item = PageIndex>) {
        pages.for_each(|page| self.set.insert(page));
        if self.since.is_none() && !self.set.is_empty() {
            // Loom has no clock, so its models have no age.
            self.since = (!cfg!(loom)).then(Instant::now);
        }
    }

    /// Removes pages whose bytes are no longer part of the file.
    pub(crate) fn forget(&mut self, first: PageIndex, last: PageIndex) {
        self.set.take(first, last, usize::MAX);
    }

    /// Begins a flush of the pages of `range`.
    pub(crate) fn begin(&mut self, range: Pages) -> (FlushNumber, Vec<PageIndex>) {
        self.begin_with(range.clone(), |set, _| set.take(*range.start(), *range.end(), usize::MAX))
    }

    /// Begins a flush of about `at_most` pages (DS7). The pages are in ascending order.
    pub(crate) fn begin_some(&mut self, at_most: usize) -> (FlushNumber, Vec<PageIndex>) {
        self.begin_with(PageIndex::FIRST..=PageIndex::LAST, |set, sweep| {
            let ahead = set.take(*sweep, PageIndex::LAST, at_most);
            let wrapped = match at_most - ahead.len().min(at_most) {
                0 => Vec::new(),
                left => set.take(PageIndex::FIRST, *sweep, left),
            };
            *sweep = wrapped.last().or(ahead.last()).map_or(PageIndex::FIRST, |&last| last + 1);
            [wrapped, ahead].concat()
        })
    }

    fn begin_with(
        &mut self,
        range: Pages,
        take: impl FnOnce(&mut PageSet, &mut PageIndex) -> Vec<PageIndex>,
    ) -> (FlushNumber, Vec<PageIndex>) {
        let before = self.set.heap_bytes();
        let pages = take(&mut self.set, &mut self.sweep);
        let number = self.number(range, before - self.set.heap_bytes());
        // The remaining pages keep their age.
        if self.set.is_empty() {
            self.since = None;
        }
        (number, pages)
    }

    /// Begins a flush that waits for earlier flushes (DS3). `None`: there is nothing to write or
    /// wait for.
    pub(crate) fn begin_waiting(&mut self, range: Pages) -> Option<(FlushNumber, Vec<PageIndex>)> {
        let is_in_flush = self.active.iter().any(|other| meet(&other.range, &range));
        if !is_in_flush && !self.set.intersects(*range.start(), *range.end()) {
            return None;
        }
        let (number, pages) = self.begin(range.clone());
        self.waiting.push(WaitingFlush { number, range, put_back: PageSet::default() });
        Some((number, pages))
    }

    /// Puts back pages that flush `number` had taken and leaves DIRTY.
    pub(crate) fn put_back(&mut self, number: FlushNumber, pages: &[PageIndex]) {
        let before = self.set.heap_bytes();
        self.insert(pages.iter().copied());
        self.release_heap(number, self.set.heap_bytes() - before);
        for waiting in self.waiting.iter_mut().filter(|waiting| waiting.number > number) {
            let pages = pages.iter().filter(|page| waiting.range.contains(page));
            pages.for_each(|&page| waiting.put_back.insert(page));
        }
    }

    /// Ends flush `number`. Returns whether a later flush may wait for it (DS3). Usually none does,
    /// and the caller then saves the system call of a wake-up.
    #[must_use]
    pub(crate) fn end(&mut self, number: FlushNumber) -> bool {
        self.active.retain(|flush| flush.number != number);
        self.waiting.iter().any(|waiting| waiting.number > number)
    }

    fn number(&mut self, range: Pages, heap_bytes: u64) -> FlushNumber {
        self.next += 1;
        let number = FlushNumber(self.next);
        self.active.push(ActiveFlush { number, range, heap_bytes });
        number
    }

    /// Whether a flush that is earlier than waiting flush `number` is active in its range.
    pub(crate) fn is_earlier_active(&self, number: FlushNumber) -> bool {
        let waiting = self.waiting.iter().find(|waiting| waiting.number == number);
        let range = &waiting.expect("begun as one that waits").range;
        self.active.iter().any(|other| other.number < number && meet(&other.range, range))
    }

    /// Takes the pages that earlier flushes have put back, after flush `number` has waited for
    /// them. The flush continues under the returned number. `None`: there are no such pages.
    pub(crate) fn take_put_back(
        &mut self,
        number: FlushNumber,
    ) -> Option<(FlushNumber, Vec<PageIndex>)> {
        let at = self.waiting.iter().position(|waiting| waiting.number == number);
        let mut waiting = self.waiting.swap_remove(at.expect("begun as one that waits"));
        if waiting.put_back.is_empty() {
            return None;
        }
        // The pages are in the set, and charged there.
        let number = self.number(waiting.range, 0);
        // The pages also stay in the set. Another flush that takes them finds them claimed or
        // clean.
        Some((number, waiting.put_back.take(PageIndex::FIRST, PageIndex::LAST, usize::MAX)))
    }
}

fn meet(one: &Pages, other: &Pages) -> bool {
    one.start() <= other.end() && other.start() <= one.end()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::ops::Range;

    fn pages(pages: Range<u64>) -> impl Iterator<Item = PageIndex> {
        pages.map(PageIndex)
    }

    /// Goal: the heap bytes of pages that a flush has taken are not given to other allocations
    /// (DS6). Incident: a flush of 2,400 pages that lay far apart needed 460 KiB to record unsynced
    /// pages after other allocations had reached the limit.
    #[test]
    fn pages_of_a_flush_stay_charged() {
        const LEAVES: u64 = 100;
        let mut dirty = Dirty::default();
        dirty.insert((0..LEAVES).map(|leaf| PageIndex(leaf << 20)));
        let all = dirty.heap_bytes();
        let (number, pages) = dirty.begin(PageIndex::FIRST..=PageIndex::LAST);
        assert_eq!(dirty.heap_bytes(), all);
        dirty.put_back(number, &pages[..10]);
        assert_eq!(dirty.heap_bytes(), all);
        dirty.release_heap(number, all / 2);
        assert!((all / 2..=all * 6 / 10).contains(&dirty.heap_bytes()));
        dirty.release_heap(number, all);
        assert!(!dirty.end(number), "no flush waits");
        assert!(dirty.heap_bytes() < all / 5);
    }

    /// Goal: limited flushes wrap wrapped, so that each page is reached (DS7). Method: all pages of
    /// a few leaves are dirtied again after each flush of one leaf. Incident: each flush took the
    /// first leaf.
    #[test]
    fn limited_flushes_wrap_around() {
        let leaf = crate::cache::table::SLOTS as u64;
        let mut dirty = Dirty::default();
        let mut some = |at_most: u64| {
            dirty.insert(pages(0..3 * leaf));
            let (number, taken) = dirty.begin_some(at_most as usize);
            assert!(!dirty.end(number));
            assert!(taken.is_sorted());
            let leaves = taken.chunk_by(|one, other| one.0 / leaf == other.0 / leaf);
            let leaves: Vec<u64> = leaves.map(|pages| pages[0].0 / leaf).collect();
            assert_eq!(taken.len() as u64, leaves.len() as u64 * leaf, "whole ones");
            leaves
        };
        assert_eq!([some(1), some(leaf), some(leaf), some(leaf)], [[0], [1], [2], [0]]);
        assert_eq!([some(2 * leaf), some(2 * leaf)], [[1, 2], [0, 1]]);
        assert_eq!(some(2 * leaf), [0, 2], "wrapped");
        assert_eq!(some(5 * leaf), [0, 1, 2]);
    }

    /// Goal: the work of a waiting flush is bounded by the pages that were DIRTY when it began.
    /// Method: while it waits, pages are dirtied, and put back by flushes that begin later.
    #[test]
    fn a_flush_writes_pages_dirty_at_its_begin() {
        let mut dirty = Dirty::default();
        dirty.insert(pages(0..4));
        let (earlier, taken) = dirty.begin(PageIndex(0)..=PageIndex(1));
        assert_eq!(taken, [0, 1].map(PageIndex));
        let (sync, own) = dirty.begin_waiting(PageIndex(0)..=PageIndex(10)).unwrap();
        assert_eq!(own, [2, 3].map(PageIndex));
        for _ in 0..3 {
            dirty.insert(pages(2..8));
            let (later, taken) = dirty.begin(PageIndex(0)..=PageIndex(10));
            assert_eq!(taken, [2, 3, 4, 5, 6, 7].map(PageIndex));
            dirty.put_back(later, &taken);
            assert!(!dirty.end(later), "an earlier flush does not wait for it");
            assert!(dirty.is_earlier_active(sync));
        }
        dirty.put_back(earlier, &[PageIndex(1)]);
        assert!(dirty.end(earlier), "the waiting flush is woken");
        assert!(!dirty.is_earlier_active(sync));
        assert!(!dirty.end(sync), "the flushes before it have ended");
        let (again, pages) = dirty.take_put_back(sync).unwrap();
        assert_eq!(pages, [PageIndex(1)], "the page that the earlier flush put back");
        assert!(
            dirty.begin_waiting(PageIndex(20)..=PageIndex(30)).is_none(),
            "no flush has taken those"
        );
        assert!(!dirty.end(again));
        assert!(!dirty.is_clean());
    }
}
