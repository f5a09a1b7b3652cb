//! Space for what is written back later: a write that the disk has no room for must fail when it is
//! written, not when nobody is there to be told.
//!
//! Before pages of a range are DIRTY for the first time, the range has its blocks: either the back
//! end says that it lies in data, or it is reserved, without changing the file's length. A file that
//! grows large has space reserved ahead of its end, which is given back when its last handle goes. Where
//! space can't be reserved, the write goes through at once, and the back end says what it thinks of
//! it; so do writes beyond `RLIMIT_FSIZE`, for which the kernel has a signal.
//!
//! What is known to have its blocks is remembered as ranges of bytes, a few thousand at most.
//!
//! Locks: the ranges'; the back end is asked under it, so that a range is asked about once.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard};

use rustix::process::Resource;

use crate::cache::heap::HeapCharge;
use crate::cached::CachedFile;
use crate::io::backend::Seek;

const RANGES_MAX: usize = 4096;
/// Smaller files have nothing reserved ahead: they are many, and giving it back takes time.
const AHEAD_SIZE_MIN: u64 = 256 << 10;
const AHEAD_BYTES_MIN: u64 = 64 << 10;
const AHEAD_BYTES_MAX: u64 = 32 << 20;

/// The blocks that a file is known to have.
#[derive(Default)]
pub(crate) struct Space {
    known: Mutex<Known>,
    /// All before it is known to have its blocks: what most writes ask, without the lock. Who asks
    /// holds the range, so nobody forgets what is asked about meanwhile; that others forget their
    /// own, or learn, does not matter to it.
    prefix: AtomicU64,
    /// What the ranges take.
    pub(crate) heap: HeapCharge,
}

impl Space {
    fn known(&self) -> Locked<'_> {
        Locked { known: self.known.lock().expect("no panic under the lock"), prefix: &self.prefix }
    }
}

/// What is known, under its lock; tells of the prefix in the end.
struct Locked<'a> {
    known: MutexGuard<'a, Known>,
    prefix: &'a AtomicU64,
}

impl Deref for Locked<'_> {
    type Target = Known;

    fn deref(&self) -> &Known {
        &self.known
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Known {
        &mut self.known
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.prefix.store(self.known.ranges.get(&0).copied().unwrap_or(0), Relaxed);
    }
}

#[derive(Default)]
struct Known {
    /// From start to end; they neither touch nor overlap.
    ranges: BTreeMap<u64, u64>,
    /// The end of what was reserved ahead.
    reserved_end: u64,
}

impl Known {
    /// What the ranges take of the heap, at most: nodes of 11, of which but the first five are used.
    fn heap_bytes(&self) -> u64 {
        match self.ranges.len() as u64 {
            0 => 0,
            ranges => 304 + (ranges - 1) * 61,
        }
    }

    fn covers(&self, start: u64, end: u64) -> bool {
        self.ranges.range(..=start).next_back().is_some_and(|(_, &known)| known >= end)
    }

    fn add(&mut self, mut start: u64, mut end: u64) {
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
        self.ranges.insert(start, end);
    }

    fn remove(&mut self, start: u64, end: u64) {
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

/// Sees to it that `start..end` has its blocks; false if that can't be had. Caller: exclusive guard.
pub(crate) fn reserve(file: &CachedFile, start: u64, end: u64, size: u64) -> bool {
    // Relaxed: the guard orders it; see `Space::prefix`.
    if end <= file.space.prefix.load(Relaxed) {
        return true;
    }
    let mut known = file.space.known();
    let reserved = reserve_unknown(file, &mut known, start, end, size);
    let heap_bytes = known.heap_bytes();
    drop(known);
    if !file.space.heap.try_set(file.cache(), heap_bytes) {
        // It can be asked again.
        file.space.known().ranges.clear();
        file.space.heap.set(file.cache(), 0);
    }
    reserved
}

fn reserve_unknown(file: &CachedFile, known: &mut Known, start: u64, end: u64, size: u64) -> bool {
    if known.covers(start, end) {
        return true;
    }
    if end > size
        && rustix::process::getrlimit(Resource::Fsize).current.is_some_and(|max| end > max)
    {
        return false;
    }
    if let Ok(Some(hole)) = file.backing.seek(start, Seek::Hole)
        && hole >= end
    {
        known.add(start, hole);
        return true;
    }
    if end > size && size >= AHEAD_SIZE_MIN {
        let ahead = (size / 8).clamp(AHEAD_BYTES_MIN, AHEAD_BYTES_MAX);
        let reserved = end.saturating_add(ahead).min(i64::MAX as u64);
        // Also if it fails: a part may be reserved then.
        known.reserved_end = known.reserved_end.max(reserved);
        if file.backing.allocate(start, reserved - start, true).is_ok() {
            known.add(start, reserved);
            return true;
        }
    }
    known.reserved_end = known.reserved_end.max(end);
    let reserved = file.backing.allocate(start, end - start, true).is_ok();
    if reserved {
        known.add(start, end);
    }
    reserved
}

/// Whether space may have been reserved since the last [`trim`].
pub(crate) fn is_reserved(file: &CachedFile) -> bool {
    file.space.known().reserved_end > 0
}

/// The blocks of `start..end` are gone.
pub(crate) fn forget(file: &CachedFile, start: u64, end: u64) {
    file.space.known().remove(start, end);
}

/// Gives back what was reserved beyond `size`. Caller: exclusive guard from `size` on, and all that
/// was written is written back.
pub(crate) fn trim(file: &CachedFile, size: u64) {
    let mut known = file.space.known();
    // The rest of the last page is the file's anyhow.
    let kept_end = size.next_multiple_of(file.core().page_bytes() as u64);
    if std::mem::take(&mut known.reserved_end) > kept_end {
        known.remove(size, u64::MAX);
        if file.backing.len().is_ok_and(|len| len != size) {
            // Somebody else writes the file, too, and what lies beyond is theirs.
            return;
        }
        // Where it fails, the file has blocks beyond its end, as after `fallocate`.
        let _ = file.backing.set_len(size);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_and_split() {
        let mut known = Known::default();
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
