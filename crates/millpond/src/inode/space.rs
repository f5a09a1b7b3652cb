//! Space for what is written back later: a write that the disk has no room for must fail when it is
//! written, not when nobody is there to be told.
//!
//! Before pages of a range are DIRTY for the first time, the range has its blocks: either the back
//! end says that it lies in data, or it is reserved, without changing the file's length. Where
//! space can't be reserved, the write goes through at once, and the back end says what it thinks of
//! it; so do writes beyond `RLIMIT_FSIZE`, for which the kernel has a signal, whether or not the file is
//! longer than that. (A limit that is lowered later counts from the next open of the file on, or the next
//! write that has to ask.)
//!
//! That bytes lie in data is no promise where they are not overwritten in place. Of XFS, ranges are taken
//! whose blocks no other file shares; a file that somebody clones while it is open is as safe as it was
//! until then. On file systems that never overwrite in place, and those nobody knows of, files stay
//! through.
//!
//! A file that grows large has space reserved ahead of its end, which is given back when its last handle
//! goes, if that can be done without cutting off what another process appends: who else has the file
//! open, is not known to be gone, or holds another description of it, like those for direct I/O, leaves it
//! there. So for a file that is not ours alone little is reserved ahead.
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
use crate::inode::CachedFile;
use crate::io::backend::Seek;
use crate::io::backend::allocation::{self, Company, Overwrites};

const RANGES_MAX: usize = 4096;
/// Smaller files have nothing reserved ahead: they are many, and giving it back takes time.
const AHEAD_SIZE_MIN: u64 = 256 << 10;
const AHEAD_BYTES_MIN: u64 = 64 << 10;
const AHEAD_BYTES_MAX: u64 = 32 << 20;
/// Of a file that others have open: it may be left there.
const AHEAD_BYTES_MAX_SHARED: u64 = 1 << 20;

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
    /// There was a lease on the file when that was.
    leased: bool,
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
        if start < end {
            self.ranges.insert(start, end);
        }
    }

    /// Forgets what lies beyond `limit`.
    fn cut(&mut self, limit: u64) {
        if self.ranges.last_key_value().is_some_and(|(_, &end)| end > limit) {
            self.remove(limit, u64::MAX);
        }
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
    // The last page that a file can have is one byte short.
    let end = end.min(i64::MAX as u64);
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
    let limit = size_limit();
    known.cut(limit);
    if end > limit {
        return false;
    }
    let overwrites = file.backing.overwrites();
    if overwrites == Overwrites::Elsewhere {
        file.stay_through();
        return false;
    }
    let may_be_shared = overwrites == Overwrites::InPlaceUnlessShared;
    match file.backing.blocks(start) {
        Ok(blocks) => {
            let own_until = if may_be_shared { blocks.own_until } else { u64::MAX };
            let there_until = blocks.there_until.min(own_until).min(limit);
            known.add(start, there_until);
            // To reserve blocks does not part those that are shared.
            if there_until >= end || own_until < end {
                return there_until >= end;
            }
        }
        Err(_) if may_be_shared => return false,
        // It does not tell.
        Err(_) => {}
    }
    if end > size && size >= AHEAD_SIZE_MIN {
        let company = file.backing.descriptor(true).map_or(Company::Alone, allocation::company);
        known.leased = company == Company::Leased;
        let most =
            if company == Company::Others { AHEAD_BYTES_MAX_SHARED } else { AHEAD_BYTES_MAX };
        let ahead = (size / 8).clamp(AHEAD_BYTES_MIN, most);
        let reserved = end.saturating_add(ahead).min(limit);
        // Also if it fails: a part may be reserved then.
        known.reserved_end = known.reserved_end.max(reserved);
        if file.backing.allocate(start, reserved - start, true).is_ok() {
            known.add(start, reserved);
            return true;
        }
    }
    known.reserved_end = known.reserved_end.max(end);
    match file.backing.allocate(start, end - start, true) {
        Ok(()) => {
            known.add(start, end);
            true
        }
        // Nothing can be reserved, but data may be told from holes.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            let hole = file.backing.seek(start, Seek::Hole).ok().flatten().unwrap_or(start);
            known.add(start, hole.min(limit));
            hole >= end
        }
        Err(_) => false,
    }
}

/// The length beyond which the kernel lets this process write to no file.
fn size_limit() -> u64 {
    let limit = rustix::process::getrlimit(Resource::Fsize).current;
    limit.unwrap_or(u64::MAX).min(i64::MAX as u64)
}

/// What lies beyond the limit on the size of files is to be asked about again.
pub(crate) fn look_at_limit(file: &CachedFile) {
    file.space.known().cut(size_limit());
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
    let leased = std::mem::take(&mut known.leased);
    if std::mem::take(&mut known.reserved_end) > kept_end {
        known.remove(size, u64::MAX);
        file.backing.give_back(size, leased);
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
