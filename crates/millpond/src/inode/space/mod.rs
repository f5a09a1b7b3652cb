//! The blocks that dirty pages count on: a write for which the disk has no room fails itself, and no later
//! sync does.
//!
//! ```text
//!   write: losses -> reserve -> pages DIRTY, in the set -> losses again: if there are more, write back now
//! ```
//!
//! Before pages of a range become DIRTY, the range has its blocks: either the back end reports them, or they
//! are reserved, without changing the file's length. A write whose blocks cannot be reserved goes through at
//! once, and the back end decides; so does a write beyond `RLIMIT_FSIZE`, for which the kernel has a signal,
//! whether or not the file is longer than that. (A limit that is lowered later counts from the next open of
//! the file for writing, or from the next write that has to ask.)
//!
//! This module owns the account of known blocks ([`Space`](account::Space)) and makes each call that can
//! free blocks of the file:
//!
//! - **SP1** [`set_len`], [`zero`], [`allocate`] and [`trim`] forget each range that the call may have freed, also if
//!   the call fails. (XFS frees a range before it zeroes it; tmpfs, when an allocation fails, frees all pages of the
//!   range that are not written yet.)
//! - **SP2** A write past the cache that moves the end of the file may free all blocks beyond the end: ext4
//!   truncates the file when such a write fails, and may then succeed with the freed blocks. So the dirty
//!   pages beyond the back end's end are written back first (`writeback::at_risk`), and then no dirty page counts
//!   on such blocks; after the write, the ranges beyond the old end are forgotten.
//! - **SP3** A write-back that fails may free them, too, and holds no guard: a writer may be between `reserve`
//!   and its DIRTY pages. [`lost_from`] forgets the blocks, then counts a loss; the flush writes back the
//!   dirty pages there, and a writer that finds more losses than before it asked writes back its own pages. The
//!   set's lock orders both, so one of the two finds the pages.
//! - **SP4** Beyond the end only blocks count that this module reserved. XFS allocates more than a write needs
//!   there, reports it, and takes it back when the disk is full.
//! - **SP5** Where the end moves past blocks that were reserved ahead, they are given back ([`extend`],
//!   [`trim`]): a hole stays a hole.
//!
//! That blocks are there is no promise where they are not overwritten in place. Of XFS, ranges are taken whose
//! blocks no other file shares; a file that is cloned while it is open is as safe as it was until then. Files
//! on file systems that never overwrite in place, and on unknown ones, stay through.
//!
//! A file that grows by appends has space reserved ahead of its end, a small part of the free space. It is given
//! back when the last handle is closed, if that cannot cut off what another process appends: it stays while
//! another process has the file open. So a file that is opened elsewhere has little reserved ahead, unless a second
//! description of the engine's own, for direct I/O, hides that.

pub(crate) mod account;

#[cfg(all(test, loom))]
mod loom_tests;

use std::io;

use crate::inode::CachedFile;
use crate::inode::space::account::{KnownBlocks, size_limit};
use crate::io::backend::Seek;
use crate::io::backend::allocation::{self, Blocks, Company, Overwrites};
use crate::io::backend::descriptors::Descriptors;
use crate::options::WriteMode;

/// Smaller files have nothing reserved ahead: they are many, and giving it back takes time. These
/// are chosen, not measured.
const AHEAD_SIZE_MIN: u64 = 256 << 10;
const AHEAD_BYTES_MIN: u64 = 64 << 10;
const AHEAD_BYTES_MAX: u64 = 32 << 20;
/// Of a file that another process may have open: it may be left there.
const AHEAD_BYTES_MAX_SHARED: u64 = 1 << 20;
/// At most one part in so many of the free space is reserved ahead.
const AHEAD_PART_OF_FREE: u64 = 8;
/// The unit of `st_blocks`: no file system has smaller blocks.
const BLOCK_BYTES_MIN: u64 = 512;

/// Reserves the blocks of `start..end`, as far as they are not known to be there; false if that fails.
/// Caller: exclusive guard.
pub(crate) fn reserve(file: &CachedFile, start: u64, end: u64, size: u64) -> bool {
    // The last page that a file can have is one byte short.
    let end = end.min(i64::MAX as u64);
    if file.space.has_all_before(end) {
        return true;
    }
    let mut known = file.space.known();
    let reserved = reserve_unknown(file, &mut known, start, end, size);
    let heap_bytes = known.heap_bytes();
    drop(known);
    if reserved == Reserved::Failed {
        // SP1: of an allocation that failed, the file system may have freed what earlier ones took.
        file.space.lose(start, end);
    }
    if !file.space.heap.try_set(file.cache(), heap_bytes) {
        // It can be asked again.
        file.space.known().ranges.clear();
        file.space.heap.set(file.cache(), 0);
    }
    reserved == Reserved::All
}

/// What became of a reservation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reserved {
    All,
    /// Nothing was asked for.
    Refused,
    /// An allocation failed, and may have taken or freed a part.
    Failed,
}

fn reserve_unknown(
    file: &CachedFile,
    known: &mut KnownBlocks,
    start: u64,
    end: u64,
    size: u64,
) -> Reserved {
    if known.covers(start, end) {
        return Reserved::All;
    }
    let limit = size_limit();
    known.cut(limit);
    if end > limit {
        return Reserved::Refused;
    }
    if file.backing.overwrites() == Overwrites::Elsewhere {
        file.keep_write_through();
        return Reserved::Refused;
    }
    // Only the unknown gaps: see SP1 of allocations that fail.
    let mut at = known.end_from(start);
    while at < end {
        let gap = Gap { start: at, end: known.next_from(at).min(end), limit, size };
        // A write that leaves a hole behind the end is not expected to be followed by its successor.
        let ahead = if gap.end == end && start <= size { gap.ahead(file, known) } else { 0 };
        match gap.reserve(file, known, ahead) {
            Reserved::All => at = known.end_from(at),
            other => return other,
        }
    }
    Reserved::All
}

/// A range of unknown bytes.
struct Gap {
    start: u64,
    end: u64,
    limit: u64,
    /// Of the file.
    size: u64,
}

impl Gap {
    fn reserve(&self, file: &CachedFile, known: &mut KnownBlocks, ahead: u64) -> Reserved {
        let &Gap { start, end, limit, size } = self;
        let may_be_shared = file.backing.overwrites() == Overwrites::InPlaceUnlessShared;
        let unit = if may_be_shared { BLOCK_BYTES_MIN } else { file.core().page_bytes() as u64 };
        let end_of_file = size.next_multiple_of(unit).max(start);
        // SP4: beyond the end only shared blocks matter in the report.
        let says_nothing = !may_be_shared && end_of_file == start;
        let found = (!says_nothing).then(|| file.backing.blocks(start));
        match found.unwrap_or(Ok(Blocks { there_until: start, own_until: u64::MAX })) {
            Ok(blocks) => {
                let own_until = if may_be_shared { blocks.own_until } else { u64::MAX };
                let there_until = blocks.there_until.min(own_until).min(limit).min(end_of_file);
                known.add(start, there_until);
                if there_until >= end {
                    return Reserved::All;
                }
                // To reserve blocks does not part those that are shared.
                if own_until < end {
                    return Reserved::Refused;
                }
            }
            Err(_) if may_be_shared => return Reserved::Refused,
            // The file system does not report its blocks.
            Err(_) => {}
        }
        if ahead > 0 {
            let reserved = end.saturating_add(ahead).min(limit);
            // Also if it fails: a part may be reserved then.
            known.reserved_end = known.reserved_end.max(reserved);
            known.ahead_end = known.ahead_end.max(reserved);
            if file.backing.allocate(start, reserved - start, true).is_ok() {
                known.add(start, reserved);
                return Reserved::All;
            }
        }
        known.reserved_end = known.reserved_end.max(end);
        match file.backing.allocate(start, end - start, true) {
            Ok(()) => {
                known.add(start, end);
                Reserved::All
            }
            // The file system reserves nothing, but may report where data ends and a hole begins.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                let hole = file.backing.seek(start, Seek::Hole).ok().flatten().unwrap_or(start);
                known.add(start, hole.min(limit));
                if hole >= end { Reserved::All } else { Reserved::Refused }
            }
            Err(_) => Reserved::Failed,
        }
    }

    /// How many bytes are reserved ahead of the gap, which ends a write.
    fn ahead(&self, file: &CachedFile, known: &mut KnownBlocks) -> u64 {
        if self.end <= self.size || self.size < AHEAD_SIZE_MIN {
            return 0;
        }
        let fd = file.backing.descriptor(true);
        known.leased = fd.is_some_and(allocation::is_leased);
        let wanted = (self.size / 8).clamp(AHEAD_BYTES_MIN, AHEAD_BYTES_MAX);
        // To ask takes a write lease for a moment, in which other processes' opens with O_NONBLOCK fail: so
        // files of which little is reserved ahead are not asked about, and others each time they have doubled.
        if wanted > AHEAD_BYTES_MAX_SHARED && self.size / 2 >= known.asked_at {
            known.asked_at = self.size;
            let may_be_inherited =
                file.backing.descriptors().is_some_and(Descriptors::may_be_inherited);
            known.is_shared = may_be_inherited && !known.leased
                || !file.backing.has_second_description()
                    && fd.is_some_and(|fd| allocation::company(fd) == Company::Others);
        }
        let most = if known.is_shared { AHEAD_BYTES_MAX_SHARED } else { AHEAD_BYTES_MAX };
        let free = fd.map_or(u64::MAX, allocation::free_bytes) / AHEAD_PART_OF_FREE;
        match wanted.min(most).min(free) {
            ahead if ahead < AHEAD_BYTES_MIN => 0,
            ahead => ahead,
        }
    }
}

/// Sets the length of the back end's file (SP1): blocks beyond `len` are gone, unless that makes the file
/// longer.
pub(crate) fn set_len(file: &CachedFile, len: u64) -> io::Result<()> {
    let outcome = file.backing.set_len(len);
    file.space.forget(len, u64::MAX);
    outcome
}

/// Makes the back end's file as long as `len`, where it is shorter, with no bytes written from `size` on: gives
/// back the blocks reserved there (SP5). Caller: exclusive guard from `size` to `len`, and no page between is
/// DIRTY.
pub(crate) fn extend(file: &CachedFile, size: u64, len: u64) -> io::Result<()> {
    let gap_start = end_of_last_page(file, size);
    let mut known = file.space.known();
    let gap_end = known.ahead_end.min(len - len % file.core().page_bytes() as u64);
    if gap_end <= gap_start {
        drop(known);
        return lengthen(file, len);
    }
    known.remove(gap_start, gap_end);
    let leased = known.leased;
    drop(known);
    // Between the looks at the length no other process may append to the gap.
    let mut outcome = None;
    let mut give_back = || {
        let is_ours = file.backing.len().is_ok_and(|now| now <= size);
        let lengthened = lengthen(file, len);
        if is_ours && lengthened.is_ok() {
            // Where it fails, the file has blocks in the gap, as after `fallocate`.
            let _ = file.backing.zero(gap_start, gap_end - gap_start, false);
        }
        outcome = Some(lengthened);
    };
    file.backing.alone(leased, &mut give_back);
    outcome.unwrap_or_else(|| lengthen(file, len))
}

fn lengthen(file: &CachedFile, len: u64) -> io::Result<()> {
    match file.backing.len() {
        Ok(now) if now >= len => Ok(()),
        _ => file.backing.set_len(len),
    }
}

/// Makes the back end's file reach `end` before several transfers of a write-back that end there, and never makes it
/// shorter. ext4 has one direct write at a time in flight that moves the end. After a power cut, bytes before
/// `end` may be zeros, as after transfers that end in another order than they began. Caller: has claimed the page before
/// `end`, which is not beyond the size (state.WB5).
pub(crate) fn reach(file: &CachedFile, end: u64) {
    // Without a description of our own for direct writes, the transfers are in flight one at a time anyhow. Of untorn
    // blocks each write moves the end by itself.
    if !file.backing.has_second_description() || file.untorn.is_some() {
        return;
    }
    // Other file systems write zeros to move the end, or change the length in other ways.
    let fd = file.backing.descriptor(true);
    if file.backing.len().is_ok_and(|len| len < end)
        && fd.is_some_and(allocation::has_unwritten_extents)
    {
        #[cfg(test)]
        file.space.reached.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // If it fails, the transfers move the end. No block is lost then.
        let _ = file.backing.allocate(end - 1, 1, false);
    }
}

/// Makes `len` bytes at `offset` zero below the cache (SP1).
pub(crate) fn zero(file: &CachedFile, offset: u64, len: u64, keep_space: bool) -> io::Result<()> {
    let outcome = file.backing.zero(offset, len, keep_space);
    file.space.forget(offset, offset + len);
    outcome
}

/// Allocates blocks for the caller of the engine (SP1). After a failure, the caller writes back the dirty
/// pages of the range.
pub(crate) fn allocate(
    file: &CachedFile,
    offset: u64,
    len: u64,
    keep_size: bool,
) -> io::Result<()> {
    let outcome = file.backing.allocate(offset, len, keep_size);
    if outcome.is_err() {
        file.space.lose(offset, offset + len);
    }
    outcome
}

/// Gives back the blocks reserved beyond `size`. Caller: exclusive guard from `size` on, and no page is
/// DIRTY.
pub(crate) fn trim(file: &CachedFile, size: u64) {
    let mut known = file.space.known();
    let leased = std::mem::take(&mut known.leased);
    let reserved_end = std::mem::take(&mut known.reserved_end);
    known.ahead_end = 0;
    if reserved_end > end_of_last_page(file, size) {
        known.remove(size, u64::MAX);
        file.backing.free_blocks_beyond(size, leased);
    }
}

/// Whether blocks are reserved ahead, beyond `size`.
pub(crate) fn has_reserved_ahead(file: &CachedFile, size: u64) -> bool {
    file.opened_mode == WriteMode::Back
        && file.space.known().ahead_end > end_of_last_page(file, size)
}

/// The rest of the last page is the file's anyhow.
fn end_of_last_page(file: &CachedFile, size: u64) -> u64 {
    size.next_multiple_of(file.core().page_bytes() as u64)
}

/// A write past the cache that moved the end of the file, from `size` on, has ended (SP2). Caller: its guard.
pub(crate) fn end_moved(file: &CachedFile, size: u64, is_whole: bool) {
    if file.opened_mode == WriteMode::Through {
        return;
    }
    file.space.forget(size, u64::MAX);
    if !is_whole {
        // The part of its reservation that the file system could give.
        trim(file, file.core().size.get());
    }
}

/// A write-back of bytes before `failed_end` failed (SP3); returns the back end's end if blocks beyond it may be
/// gone.
pub(crate) fn write_back_failed(file: &CachedFile, failed_end: u64) -> Option<u64> {
    if file.opened_mode == WriteMode::Through {
        return None;
    }
    let len = file.backing.len().unwrap_or(0);
    let is_beyond = failed_end > len;
    if is_beyond {
        // Even if no page is dirty there: a writer may just have reserved them.
        lost_from(file, len);
    }
    is_beyond.then_some(len)
}

/// Blocks from `start` on may be gone without a guard (SP3).
pub(crate) fn lost_from(file: &CachedFile, start: u64) {
    file.space.lose(start, u64::MAX);
}
