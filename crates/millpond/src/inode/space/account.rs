//! The account of the blocks that a file is known to have, as ranges of bytes, a few thousand at most.
//! [`space`](crate::inode::space) has the rules (space.SP1 to space.SP5) and is the only caller that changes it.
//!
//! Locks: the ranges'; the back end is asked under it, so that a range is asked about once.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::process::Resource;

use crate::cache::accounting::heap::HeapCharge;
use crate::sync::MutexExt;
use crate::sync::{AtomicU64, Mutex, MutexGuard};

/// Ranges that are remembered of a file; before there are more, all are forgotten. Chosen, not
/// measured.
const RANGES_MAX: usize = 4096;

/// The blocks that a file is known to have.
#[derive(Default)]
pub(crate) struct Space {
    known: Mutex<KnownBlocks>,
    /// All before it is known to have its blocks: what most writes ask, without the lock. The
    /// caller's guard keeps its range from being forgotten, but for losses.
    prefix: AtomicU64,
    /// How often blocks may have been freed under no guard (space.SP3).
    losses: AtomicU64,
    /// The heap bytes of the ranges.
    pub(crate) heap: HeapCharge,
    /// How often write-back has made the file longer first (`space::reach`).
    #[cfg(test)]
    pub(crate) reached: std::sync::atomic::AtomicU64,
}

/// The losses that a writer has seen.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Losses(u64);

impl Space {
    /// Forgets the blocks beyond the limit on the size of files.
    pub(crate) fn forget_blocks_over_limit(&self) {
        self.known().cut(size_limit());
    }

    /// Whether space may have been reserved since it was given back.
    pub(crate) fn is_reserved(&self) -> bool {
        self.known().reserved_end > 0
    }

    /// The blocks of `start..end` may be gone. Caller: exclusive guard over them.
    pub(crate) fn forget(&self, start: u64, end: u64) {
        self.known().remove(start, end);
    }

    /// The same without a guard (space.SP3).
    pub(crate) fn lose(&self, start: u64, end: u64) {
        self.forget(start, end);
        // Release: pairs with the Acquire of `losses`: a writer that sees this loss before it asks for
        // blocks sees no prefix from before.
        self.losses.fetch_add(1, Release);
    }

    /// For a writer, before it asks for blocks; and after its pages are in the set of dirty ones, when a loss
    /// that it does not see is followed by a flush of the set (the set's lock orders them).
    #[inline]
    pub(crate) fn losses(&self) -> Losses {
        // Acquire: see `lose`.
        Losses(self.losses.load(Acquire))
    }

    /// Whether all before `end` is known to have its blocks. Caller: exclusive guard.
    #[inline]
    pub(crate) fn has_all_before(&self, end: u64) -> bool {
        // Relaxed: the guard orders it; see `prefix` and `lose`.
        end <= self.prefix.load(Relaxed)
    }

    pub(crate) fn known(&self) -> LockedAccount<'_> {
        LockedAccount { known: self.known.acquire(), prefix: &self.prefix }
    }
}

/// The known ranges, under their lock; publishes the prefix when it is dropped.
pub(crate) struct LockedAccount<'a> {
    known: MutexGuard<'a, KnownBlocks>,
    prefix: &'a AtomicU64,
}

impl Deref for LockedAccount<'_> {
    type Target = KnownBlocks;

    fn deref(&self) -> &KnownBlocks {
        &self.known
    }
}

impl DerefMut for LockedAccount<'_> {
    fn deref_mut(&mut self) -> &mut KnownBlocks {
        &mut self.known
    }
}

impl Drop for LockedAccount<'_> {
    fn drop(&mut self) {
        self.prefix.store(self.known.ranges.get(&0).copied().unwrap_or(0), Relaxed);
    }
}

#[derive(Default)]
pub(crate) struct KnownBlocks {
    /// From start to end; they neither touch nor overlap.
    pub(crate) ranges: BTreeMap<u64, u64>,
    /// The end of the furthest reservation.
    pub(crate) reserved_end: u64,
    /// The end of the furthest reservation ahead of the end of the file, for later appends.
    pub(crate) ahead_end: u64,
    /// There was a lease on the file when that was.
    pub(crate) leased: bool,
    /// How long the file was when it was last asked whether another process has it open.
    pub(crate) asked_at: u64,
    /// The answer.
    pub(crate) is_shared: bool,
}

impl KnownBlocks {
    /// The heap bytes of the ranges, at most: nodes of 11, of which but the first five are used.
    pub(crate) fn heap_bytes(&self) -> u64 {
        match self.ranges.len() as u64 {
            0 => 0,
            ranges => 304 + (ranges - 1) * 61,
        }
    }

    pub(crate) fn covers(&self, start: u64, end: u64) -> bool {
        self.ranges.range(..=start).next_back().is_some_and(|(_, &known)| known >= end)
    }

    /// The end of the known range that holds `at`, or `at`.
    pub(crate) fn end_from(&self, at: u64) -> u64 {
        let range = self.ranges.range(..=at).next_back();
        range.map_or(at, |(_, &end)| end.max(at))
    }

    /// The start of the first known range from `at` on.
    pub(crate) fn next_from(&self, at: u64) -> u64 {
        self.ranges.range(at..).next().map_or(u64::MAX, |(&start, _)| start)
    }

    pub(crate) fn add(&mut self, mut start: u64, mut end: u64) {
        if self.ranges.len() >= RANGES_MAX {
            self.ranges.clear();
        }
        while let Some((&from, &to)) = self.ranges.range(..=end).next_back() {
            if to < start {
                break;
            }
            self.ranges.remove(&from);
            start = start.min(from);
            end = end.max(to);
        }
        if start < end {
            self.ranges.insert(start, end);
        }
    }

    /// Forgets the blocks beyond `limit`.
    pub(crate) fn cut(&mut self, limit: u64) {
        if self.ranges.last_key_value().is_some_and(|(_, &end)| end > limit) {
            self.remove(limit, u64::MAX);
        }
    }

    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        let hit: Vec<_> = self.ranges.range(..end).map(|(&from, &to)| (from, to)).collect();
        for (from, to) in hit.into_iter().rev().take_while(|&(_, to)| to > start) {
            self.ranges.remove(&from);
            if from < start {
                self.ranges.insert(from, start);
            }
            if to > end {
                self.ranges.insert(end, to);
            }
        }
    }
}

/// The length beyond which the kernel lets this process write to no file.
pub(crate) fn size_limit() -> u64 {
    let limit = rustix::process::getrlimit(Resource::Fsize).current;
    limit.unwrap_or(u64::MAX).min(i64::MAX as u64)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_and_split() {
        let mut known = KnownBlocks::default();
        let mut model = [false; 64];
        let mut random = 7u64;
        for step in 0..5000u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(step | 1);
            let start = (random >> 40) % 60;
            let end = start + 1 + (random >> 33) % (63 - start).max(1);
            if random >> 20 & 3 == 0 {
                known.remove(start, end);
                model[start as usize..end as usize].fill(false);
            } else if random >> 20 & 3 == 1 {
                known.add(start, end);
                model[start as usize..end as usize].fill(true);
            }
            let all = model[start as usize..end as usize].iter().all(|&has| has);
            assert_eq!(known.covers(start, end), all, "{start}..{end} of {:?}", known.ranges);
        }
    }
}
