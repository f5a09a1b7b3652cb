//! A ring of the frames that a client's thread has read (shared.SH3).
//!
//! An entry has the number of its push beside the frame, in one word. So a push is one store, and the server reads the
//! ring without writing to it: an entry with the number that it expects is new.
//!
//! Locks: none.

use std::sync::atomic::Ordering::Relaxed;

use crate::sync::AtomicU64;
use crate::units::{FRAME_BITS, FrameIndex};

/// The hits between two misses of a client whose pages are all cached: beyond that the policy does not learn of them.
/// `tests/hit_rates` has a hot set of 4096 pages that is read three times before a scan. Shrunk under loom.
#[cfg(not(loom))]
pub(crate) const RING_ENTRIES: usize = 16 << 10;
#[cfg(loom)]
pub(crate) const RING_ENTRIES: usize = 2;
/// Entries of a ring that are drained at a time, about half as many as it takes steps, under the queues' lock.
#[cfg(not(loom))]
const DRAINED_MAX: usize = 1024;
#[cfg(loom)]
const DRAINED_MAX: usize = 2;
const PUSH_BITS: u32 = u64::BITS - FRAME_BITS;
const PUSH_MASK: u64 = (1 << PUSH_BITS) - 1;

#[repr(C)]
pub(crate) struct TouchRing {
    entries: [AtomicU64; RING_ENTRIES],
}

impl TouchRing {
    #[cfg(test)]
    pub(crate) fn new() -> TouchRing {
        TouchRing { entries: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// The client's push number `push`, of 1, 2, ...
    #[inline]
    pub(crate) fn push(&self, push: u64, frame: FrameIndex) {
        let entry = (push & PUSH_MASK) << FRAME_BITS | u64::from(frame.0);
        // Relaxed: a hint, of one word.
        self.entries[push as usize % RING_ENTRIES].store(entry, Relaxed);
    }

    /// Calls `visit` with the frames that were pushed after push number `last`, and were not overwritten, the oldest first.
    /// Returns the number of the last push that it has got to. The number of steps is bounded, for any entries.
    pub(crate) fn drain(&self, last: u64, mut visit: impl FnMut(FrameIndex)) -> u64 {
        let mut last = last;
        for _ in 0..2 * DRAINED_MAX {
            let next = last + 1;
            let entry = self.entries[next as usize % RING_ENTRIES].load(Relaxed);
            // By how many pushes the entry is newer than the expected one.
            let newer = (entry >> FRAME_BITS).wrapping_sub(next) & PUSH_MASK;
            if newer > PUSH_MASK / 2 {
                // It is older.
                break;
            }
            if newer > 0 {
                // The client has lapped the server, and the entries between them are lost.
                last += (newer + 1).saturating_sub(RING_ENTRIES as u64).max(1);
                continue;
            }
            visit(FrameIndex((entry & ((1 << FRAME_BITS) - 1)) as u32));
            last = next;
        }
        last
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn drained(ring: &TouchRing, last: &mut u64) -> Vec<u32> {
        let mut seen = Vec::new();
        loop {
            let before = (*last, seen.len());
            *last = ring.drain(*last, |frame| seen.push(frame.0));
            assert!(seen.len() - before.1 <= 2 * DRAINED_MAX);
            if *last == before.0 {
                return seen;
            }
        }
    }

    #[test]
    fn each_push_is_seen_once() {
        let (ring, mut last) = (TouchRing::new(), 0);
        assert!(drained(&ring, &mut last).is_empty());
        (1..=5).for_each(|push| ring.push(push, FrameIndex(push as u32 * 10)));
        assert_eq!(drained(&ring, &mut last), [10, 20, 30, 40, 50]);
        assert!(drained(&ring, &mut last).is_empty());
        ring.push(6, FrameIndex(0x0FFF_FFFF));
        assert_eq!(drained(&ring, &mut last), [0x0FFF_FFFF]);
    }

    #[test]
    fn a_lapped_ring_gives_its_newest_entries() {
        for pushes in [RING_ENTRIES, RING_ENTRIES + 1, 2 * RING_ENTRIES, 7 * RING_ENTRIES + 3] {
            let (ring, mut last) = (TouchRing::new(), 0);
            (1..=pushes as u64).for_each(|push| ring.push(push, FrameIndex(push as u32)));
            let newest: Vec<u32> = (0..=pushes as u32).rev().take(RING_ENTRIES).collect();
            let mut seen = drained(&ring, &mut last);
            seen.reverse();
            assert_eq!(seen, newest, "{pushes}");
            assert_eq!(last, pushes as u64);
        }
    }

    #[test]
    fn numbers_of_pushes_wrap() {
        let ring = TouchRing::new();
        let mut last = PUSH_MASK - 3;
        (last + 1..last + 9).for_each(|push| ring.push(push, FrameIndex(push as u32 & 0xFF)));
        assert_eq!(drained(&ring, &mut last).len(), 8);
    }

    /// Goal: entries that no client of ours would make neither hang the server nor make it panic.
    #[test]
    fn arbitrary_entries_end() {
        let mut random = 7u64;
        for _ in 0..200 {
            let ring = TouchRing::new();
            for entry in &ring.entries {
                random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767);
                entry.store(random, Relaxed);
            }
            let (mut seen, mut last) = (0, random >> 30);
            for _ in 0..10 {
                last = ring.drain(last, |_| seen += 1);
            }
            assert!(seen <= 20 * DRAINED_MAX);
        }
    }
}
