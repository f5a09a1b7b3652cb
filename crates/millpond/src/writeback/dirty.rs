//! The pages of a file that are DIRTY, and the flushes that have taken them to write them back.
//!
//! The page word decides, the set finds. A flush takes pages out of the set, claims each by its
//! word, and puts back what it could not write. What it has taken is in its in_progress until its *flush*
//! ends.
//!
//! - **DS2** A page enters the set when its word is DIRTY already, before the guard of its writer is
//!   released; a flush that takes it out of the set claims it, finds it clean, or puts it back. So
//!   a page that is DIRTY and whose writer has returned is in the set, or in the in_progress of a flush.
//! - **DS3** Each flush has a number, given together with taking its pages. One that waits owes what was
//!   DIRTY of its range when it began, and no more: what it took itself; and what flushes with smaller
//!   numbers had in hand then. It waits for those of them to end whose ranges meet its own, and writes
//!   what they have put back by then.
//!
//! - **DS6** What the set took of the heap for pages that a flush has in hand stays counted until they are in
//!   the set of what a sync owes, or back in this one, or the flush ends: else others are given that room
//!   meanwhile, and as all of the cache may be kept by write-back, what a sync owes has none.
//!
//! - **DS7** A flush that takes some of the pages goes on where the last such one ended, and around. So each page
//!   has its turn; and those ahead, which have been dirty for longest, lie densest, so that several are one write.
//!   Were it the first ones each time, pages that are dirtied at random at the beginning of a file would be written
//!   soon after, each alone, and those at its end would stay.
//!
//! Locks: that of the file's write-back state.

use std::ops::RangeInclusive;
use std::time::Instant;

use crate::cache::pageset::PageSet;
use crate::units::PageIndex;

/// A flush under way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FlushNumber(u64);

#[derive(Default)]
pub(crate) struct Dirty {
    set: PageSet,
    since: Option<Instant>,
    active: Vec<ActiveFlush>,
    next: u64,
    waiting: Vec<WaitingFlush>,
    /// Where the next flush of some pages begins (DS7).
    sweep: PageIndex,
}

type Pages = RangeInclusive<PageIndex>;

struct ActiveFlush {
    number: FlushNumber,
    range: Pages,
    /// What stays counted for its pages (DS6).
    heap_bytes: u64,
}

/// A flush that waits for those before it.
struct WaitingFlush {
    number: FlushNumber,
    range: Pages,
    /// What they have put back.
    put_back: PageSet,
}

impl Dirty {
    /// Whether nothing is in the set, nor in anybody's in_progress.
    pub(crate) fn is_clean(&self) -> bool {
        self.set.is_empty() && self.active.is_empty()
    }

    /// What the sets take of the heap, at most.
    pub(crate) fn heap_bytes(&self) -> u64 {
        let pages = self.waiting.iter().map(|waiting| waiting.put_back.heap_bytes());
        let in_flush = self.active.iter().map(|flush| flush.heap_bytes);
        self.set.heap_bytes() + pages.sum::<u64>() + in_flush.sum::<u64>()
    }

    /// Of what is counted for the pages in the in_progress of a flush, `bytes` are counted elsewhere from now on.
    pub(crate) fn release_heap(&mut self, number: FlushNumber, bytes: u64) {
        if let Some(flush) = self.active.iter_mut().find(|flush| flush.number == number) {
            flush.heap_bytes = flush.heap_bytes.saturating_sub(bytes);
        }
    }

    /// Since when there has been something in the set.
    pub(crate) fn since(&self) -> Option<Instant> {
        self.since
    }

    /// DS2.
    pub(crate) fn insert(&mut self, pages: impl Iterator<Item = PageIndex>) {
        pages.for_each(|page| self.set.insert(page));
        if self.since.is_none() && !self.set.is_empty() {
            // Loom has no clock, and its models no age.
            self.since = (!cfg!(loom)).then(Instant::now);
        }
    }

    /// Forgets pages whose bytes are gone from the file.
    pub(crate) fn forget(&mut self, first: PageIndex, last: PageIndex) {
        self.set.take(first, last, usize::MAX);
    }

    /// Begins a flush of the pages of `range`.
    pub(crate) fn begin(&mut self, range: Pages) -> (FlushNumber, Vec<PageIndex>) {
        self.begin_with(range.clone(), |set, _| set.take(*range.start(), *range.end(), usize::MAX))
    }

    /// Begins one of about `at_most` pages (DS7). They are in ascending order.
    pub(crate) fn begin_some(&mut self, at_most: usize) -> (FlushNumber, Vec<PageIndex>) {
        self.begin_with(PageIndex::FIRST..=PageIndex::LAST, |set, sweep| {
            let ahead = set.take(*sweep, PageIndex::LAST, at_most);
            let around = match at_most - ahead.len().min(at_most) {
                0 => Vec::new(),
                left => set.take(PageIndex::FIRST, *sweep, left),
            };
            *sweep = around.last().or(ahead.last()).map_or(PageIndex::FIRST, |&last| last + 1);
            [around, ahead].concat()
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
        // What is left keeps its age.
        if self.set.is_empty() {
            self.since = None;
        }
        (number, pages)
    }

    /// Begins one that waits for those before it (DS3); `None` if there is nothing to do.
    pub(crate) fn begin_waiting(&mut self, range: Pages) -> Option<(FlushNumber, Vec<PageIndex>)> {
        let is_in_flush = self.active.iter().any(|other| meet(&other.range, &range));
        if !is_in_flush && !self.set.intersects(*range.start(), *range.end()) {
            return None;
        }
        let (number, pages) = self.begin(range.clone());
        self.waiting.push(WaitingFlush { number, range, put_back: PageSet::default() });
        Some((number, pages))
    }

    /// What flush `number` had taken and leaves DIRTY.
    pub(crate) fn put_back(&mut self, number: FlushNumber, pages: &[PageIndex]) {
        let before = self.set.heap_bytes();
        self.insert(pages.iter().copied());
        self.release_heap(number, self.set.heap_bytes() - before);
        for waiting in self.waiting.iter_mut().filter(|waiting| waiting.number > number) {
            let pages = pages.iter().filter(|page| waiting.range.contains(page));
            pages.for_each(|&page| waiting.put_back.insert(page));
        }
    }

    /// Flush `number` ends; whether one that began after it may wait for that (DS3). Most have nobody wait, and
    /// to wake nobody is a system call, too.
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

    /// Whether one that began before flush `number`, which waits, may have pages in hand that it owes.
    pub(crate) fn is_earlier_active(&self, number: FlushNumber) -> bool {
        let waiting = self.waiting.iter().find(|waiting| waiting.number == number);
        let range = &waiting.expect("begun as one that waits").range;
        self.active.iter().any(|other| other.number < number && meet(&other.range, range))
    }

    /// Flush `number` has waited for those before it, and now has in hand what they have put back. It ends
    /// anew, by the number that is returned; `None` if that is nothing.
    pub(crate) fn take_put_back(
        &mut self,
        number: FlushNumber,
    ) -> Option<(FlushNumber, Vec<PageIndex>)> {
        let at = self.waiting.iter().position(|waiting| waiting.number == number);
        let mut waiting = self.waiting.swap_remove(at.expect("begun as one that waits"));
        if waiting.put_back.is_empty() {
            return None;
        }
        // The pages are in the set, and counted there.
        let number = self.number(waiting.range, 0);
        // They stay in the set: a flush that takes them there as well finds them claimed, or clean.
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

    /// Goal: room for the pages that a flush has in hand is given to nobody else (DS6).
    /// Incident: a flush of 2,400 pages that lay far apart had 460 KiB for what a sync owes then, after others
    /// had been given all of the limit.
    #[test]
    fn what_a_flush_has_in_hand_stays_counted() {
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
        assert!(!dirty.end(number), "nobody waits");
        assert!(dirty.heap_bytes() < all / 5);
    }

    /// Goal: flushes of some pages go around, so that each has its turn (DS7).
    /// Method: all of a few leaves are dirtied again after each flush of one leaf.
    /// Incident: it was the first leaf each time.
    #[test]
    fn flushes_of_some_pages_go_around() {
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
        assert_eq!(some(2 * leaf), [0, 2], "around");
        assert_eq!(some(5 * leaf), [0, 1, 2]);
    }

    /// Goal: what a flush owes is bounded by what was DIRTY when it began.
    /// Method: pages are dirtied and put back by flushes that begin after it, for as long as it waits.
    #[test]
    fn a_flush_owes_what_was_dirty_when_it_began() {
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
            assert!(!dirty.end(later), "what began before does not wait for it");
            assert!(dirty.is_earlier_active(sync));
        }
        dirty.put_back(earlier, &[PageIndex(1)]);
        assert!(dirty.end(earlier), "the one that waits is told");
        assert!(!dirty.is_earlier_active(sync));
        assert!(!dirty.end(sync), "it waits for others, and they are over");
        let (again, pages) = dirty.take_put_back(sync).unwrap();
        assert_eq!(pages, [PageIndex(1)], "what the earlier one had in hand, and left");
        assert!(
            dirty.begin_waiting(PageIndex(20)..=PageIndex(30)).is_none(),
            "nobody has those in hand"
        );
        assert!(!dirty.end(again));
        assert!(!dirty.is_clean());
    }
}
