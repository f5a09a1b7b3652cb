//! Reads of the back end's that hold no guard, and find out in the end whether what they read is of one moment.
//!
//! A read that the kernel completes in a queue of the program's has ended when the program takes its completion, and not
//! before. Under a guard, a program that writes first and takes the completion then would wait for itself. So:
//!
//! ```text
//!   begin:  shared guard -> all of its pages EMPTY? -> changes noted -> guard let go -> the kernel reads
//!   change: exclusive guard -> changes += 1 -> whatever is changed
//!   end:    the kernel has read -> no more changes than noted: it counts
//!                               -> else, or where a byte is missing: it is read anew, in another way
//! ```
//!
//! - **U1** The holder of an exclusive guard counts a change of its pages before it changes anything
//!   (`CachedFile::lock`).
//! - **U2** A change whose guard came before the read's is done, and its bytes are what an EMPTY page of the
//!   back end's has. One whose guard comes after it is counted after the number was noted. So where the number
//!   is the same in the end, none had been counted when the read ended; and since each is counted first, and
//!   there is a system call on both sides, the kernel has read nothing of it. The bytes are those of the moment
//!   when the number was noted.
//! - **U3** Pages counts counts, so a change of one may have the read of another begun anew. No read is lost to that.
//!
//! The counts are made by the first such read of the file, before it asks for its guard: the holder of a later
//! guard that conflicts finds them, and one of an earlier guard need not.

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
    /// Before a guard is asked for, under which [`Unguarded::changes`] is.
    pub(crate) fn prepare(&self) {
        self.counts.get_or_init(|| (0..COUNTS).map(|_| AtomicU64::new(0)).collect());
    }

    /// How often pages were changed, or others with them (U3). Prepared.
    pub(crate) fn changes(&self, first: PageIndex, last: PageIndex) -> u64 {
        let counts = self.counts.get().map_or(&[][..], |counts| counts);
        // Acquire: what the kernel has read comes before, and changes that it has seen are found.
        fence(Acquire);
        // Relaxed: of a file where nothing is ever counted off, an equal sum is that of equal counts.
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
    // Release: before all that is changed from here on.
    fence(Release);
}

/// The counts of these pages, each once.
fn places(first: PageIndex, last: PageIndex) -> impl Iterator<Item = usize> {
    let pages = last.0.saturating_sub(first.0).saturating_add(1).min(COUNTS as u64);
    (0..pages).map(move |at| (first.0.wrapping_add(at) % COUNTS as u64) as usize)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Goal: a change is seen by the reads of its pages, however many they are, and of no pages that are not
    /// counted with them.
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
