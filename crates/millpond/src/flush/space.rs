//! Space for what is written back later: a write that the disk has no room for must fail when it is
//! written, not when nobody is there to be told.
//!
//! Before pages of a range are DIRTY for the first time, the range has its blocks: either the back
//! end says that it lies in data, or it is reserved, without changing the file's length. Where
//! space can't be reserved, the write goes through at once, and the back end says what it thinks of
//! it; so do writes beyond `RLIMIT_FSIZE`, for which the kernel has a signal, whether or not the file is
//! longer than that. (A limit that is lowered later counts from the next open of the file for writing on, or the next
//! write that has to ask.)
//!
//! That bytes lie in data is no promise where they are not overwritten in place. Of XFS, ranges are taken
//! whose blocks no other file shares; a file that somebody clones while it is open is as safe as it was
//! until then. On file systems that never overwrite in place, and those nobody knows of, files stay
//! through.
//!
//! A file that grows large has space reserved ahead of its end, which is given back when its last handle
//! goes, if that can be done without cutting off what another process appends: it stays there while
//! another process has the file open or may have, or there is another description of it, like those
//! for direct I/O. So for a file that is not ours alone little is reserved ahead.
//!
//! What is known to have its blocks is remembered ([`Space`](crate::inode::space::Space)).

use crate::inode::CachedFile;
use crate::inode::space::{Known, size_limit};
use crate::io::backend::Seek;
use crate::io::backend::allocation::{self, Company, Overwrites};

/// Smaller files have nothing reserved ahead: they are many, and giving it back takes time. These
/// four are chosen, not measured.
const AHEAD_SIZE_MIN: u64 = 256 << 10;
const AHEAD_BYTES_MIN: u64 = 64 << 10;
const AHEAD_BYTES_MAX: u64 = 32 << 20;
/// Of a file that others have open: it may be left there.
const AHEAD_BYTES_MAX_SHARED: u64 = 1 << 20;

/// Sees to it that `start..end` has its blocks; false if that can't be had. Caller: exclusive guard.
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
