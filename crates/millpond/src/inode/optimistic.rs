//! Reads by the back end that hold no guard. At its end, such a read checks whether its bytes are those of one
//! moment.
//!
//! The kernel completes such a read in a queue of the program's. For the engine, the read has ended when the program
//! takes the completion, and not before. Under a guard, a program that writes first and takes the completion later
//! would deadlock with itself. So:
//!
//! ```text
//!   begin:  shared guard -> all of its pages EMPTY? -> changes noted -> guard released -> the kernel reads
//!   change: exclusive guard -> changes += 1 -> the change itself
//!   end:    the kernel has read -> no more changes than noted: it counts
//!                               -> else, or where a byte is missing: it is read again, in another way
//! ```
//!
//! - **U1** The holder of an exclusive guard counts a change of its pages before it changes anything
//!   (`CachedFile::lock`).
//! - **U2** If the guard of a change was granted before the read's, the change is done, and its bytes are those that
//!   the back end has for an EMPTY page. If it was granted after the read's, the change was counted after the read
//!   noted the number. So if the number is the same in the end, no change had been counted when the read ended. As
//!   each change is counted before it begins, and there is a system call on both sides, the kernel has read nothing
//!   of a change. The bytes are those of the moment when the number was noted.
//! - **U3** Pages share counts, so a change of one page may have the read of another one repeated. No read is lost to
//!   that.
//!
//! The first such read of the file allocates the counts, before it asks for its guard. The holder of a later guard
//! that conflicts finds them; the holder of an earlier guard need not.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::sync::{AtomicU64, fence};
use crate::units::PageIndex;

/// Counts of a file: eight lines. Chosen, not measured.
const COUNTS: usize = 64;

/// See the module header.
#[derive(Default)]
pub(crate) struct Unguarded {
    counts: OnceLock<Box<[AtomicU64]>>,
}

impl Unguarded {
    /// To be called before the guard is asked for under which [`Unguarded::changes`] is called.
    pub(crate) fn prepare(&self) {
        self.counts.get_or_init(|| (0..COUNTS).map(|_| AtomicU64::new(0)).collect());
    }

    /// The number of changes of these pages, and of pages that share their counts (U3). Caller: has called `prepare`.
    pub(crate) fn changes(&self, first: PageIndex, last: PageIndex) -> u64 {
        let counts = self.counts.get().map_or(&[][..], |counts| counts);
        // Acquire: orders the kernel's read before the loads, so they find each change that the read has seen.
        fence(Acquire);
        // Relaxed: counts only grow, so an equal sum means equal counts.
        places(first, last).filter_map(|at| counts.get(at)).map(|count| count.load(Relaxed)).sum()
    }

    /// U1.
    #[inline]
    pub(crate) fn change(&self, first: PageIndex, last: PageIndex) {
        if let Some(counts) = self.counts.get() {
            count(counts, first, last);
        }
    }
}

#[cold]
fn count(counts: &[AtomicU64], first: PageIndex, last: PageIndex) {
    for at in places(first, last) {
        counts[at].fetch_add(1, Relaxed);
    }
    // Release: orders the count before all changes from here on.
    fence(Release);
}

/// The counts of these pages, each count once.
fn places(first: PageIndex, last: PageIndex) -> impl Iterator<Item = usize> {
    let pages = last.0.saturating_sub(first.0).saturating_add(1).min(COUNTS as u64);
    (0..pages).map(move |at| (first.0.wrapping_add(at) % COUNTS as u64) as usize)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Goal: a change is found by each read of its pages, of any number of pages, and by no read of pages that share
    /// no count with them.
    #[test]
    fn a_change_is_seen_by_reads_of_its_pages() {
        let page = |at: u64| PageIndex(at);
        let unguarded = Unguarded::default();
        unguarded.change(page(0), PageIndex::LAST);
        unguarded.prepare();
        let sums = || {
            [(0, 0), (5, 9), (70, 71), (1 << 40, 1 << 40)]
                .map(|(a, b)| unguarded.changes(page(a), page(b)))
        };
        assert_eq!(sums(), [0; 4], "nobody had begun");
        unguarded.change(page(9), page(9));
        assert_eq!(sums(), [0, 1, 0, 0]);
        unguarded.change(page(6), page(64 + 6));
        assert_eq!(sums(), [1, 6, 2, 1]);
        unguarded.change(page(0), PageIndex::LAST);
        assert_eq!(sums(), [2, 11, 4, 2]);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::atomic::AtomicU8;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;

    const PAGE: PageIndex = PageIndex(3);

    fn counted(unguarded: &Unguarded) {
        unguarded.change(PAGE, PAGE);
    }

    fn looked_at(unguarded: &Unguarded) -> u64 {
        unguarded.changes(PAGE, PAGE)
    }

    /// A read of two bytes beside a write of both, under guards as in the header; `look` when it has read.
    fn read_beside_a_write(
        before: fn(&Unguarded),
        after: fn(&Unguarded),
        look: fn(&Unguarded) -> u64,
    ) {
        loom::model(move || {
            let bytes = [AtomicU8::new(0), AtomicU8::new(0)];
            let shared = Arc::new((Unguarded::default(), Mutex::new(()), bytes));
            shared.0.prepare();
            let writer = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let (unguarded, range, bytes) = &*shared;
                    let guard = range.lock().unwrap();
                    before(unguarded);
                    bytes.iter().for_each(|byte| byte.store(1, Relaxed));
                    after(unguarded);
                    drop(guard);
                }
            });
            let (unguarded, range, bytes) = &*shared;
            let guard = range.lock().unwrap();
            let noted = unguarded.changes(PAGE, PAGE);
            drop(guard);
            let seen = [bytes[0].load(Relaxed), bytes[1].load(Relaxed)];
            if look(unguarded) == noted {
                assert_eq!(seen[0], seen[1], "torn");
            }
            writer.join().unwrap();
        });
    }

    /// U2.
    #[test]
    fn a_read_that_counts_is_of_one_moment() {
        read_beside_a_write(counted, |_| {}, looked_at);
    }

    #[test]
    #[should_panic(expected = "torn")]
    fn twin_that_counts_afterwards() {
        read_beside_a_write(|_| {}, counted, looked_at);
    }

    #[test]
    #[should_panic(expected = "torn")]
    fn twin_without_the_writers_fence() {
        let without = |unguarded: &Unguarded| {
            let counts = unguarded.counts.get().expect("prepared");
            counts[PAGE.0 as usize].fetch_add(1, Relaxed);
        };
        read_beside_a_write(without, |_| {}, looked_at);
    }

    #[test]
    #[should_panic(expected = "torn")]
    fn twin_without_the_readers_fence() {
        let without = |unguarded: &Unguarded| {
            unguarded.counts.get().expect("prepared")[PAGE.0 as usize].load(Relaxed)
        };
        read_beside_a_write(counted, |_| {}, without);
    }
}
