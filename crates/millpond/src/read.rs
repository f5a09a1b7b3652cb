//! Reads: the lock-free hit path, and the way to the slow path.
//!
//! *Hit* (S5, and beyond it: no lock, no reference count, atomic over many pages):
//!
//! ```text
//!   1. epoch          2. size, as a hint     3. words below min(end, hint), all READY
//!   4. SIZE: the linearization point; if it exposes pages whose words were not loaded, from 2
//!   5. clip, copy     6. fence, reload the words, then the epoch: all unchanged, or from 1
//! ```
//!
//! Between 4 and the reloading of 6 every page had one content (W1, W2), and the size was what 4
//! says while the words were those of 3; so the bytes are those of one moment. Nothing is written
//! but the thread's own counters, and REFERENCED where it is clear.
//!
//! *Slow path*: shared guard, fill what is missing, copy (`cache::fill`).

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use millpond_rangelock::Mode;

use crate::cache::copy::{self, Source};
use crate::cache::fill::{self, Shrunk};
use crate::cache::page::{PageWord, Word};
use crate::cache::table::FileCore;
use crate::cached::{CachedFile, Shared};
use crate::error::{Error, Op, Result};
use crate::io::segment::{Segment, pieces};
use crate::stats::Slot;
use crate::sync::fence;

/// Pages that one lock-free read covers; longer reads take the slow path.
pub(crate) const HIT_PAGES_MAX: usize = 64;
/// Files from this size on are taken to be in memory rather than in the processor's caches.
const FAR_BYTES_MIN: u64 = 32 << 20;
/// Lock-free attempts before the slow path.
const TRIES_MAX: usize = 8;
/// Times that a read starts over because the file below shrank under it.
const SHRUNK_MAX: usize = 8;

/// The outcome of one lock-free attempt.
enum Attempt {
    Read(usize),
    /// A page changed meanwhile.
    Retry,
    /// A page is missing, in transition, or marked for the slow path.
    Miss,
    /// The caller's memory faulted.
    Fault,
}

/// Reads into one piece of memory without locks, if all is cached, and counts in `slot`. `None`:
/// take the slow path.
///
/// # Safety
///
/// `dst` must be valid for writes of `len` bytes, save that it may fault where a handler consults
/// [`crate::fault`]; that gives `None`, too.
#[inline]
pub(crate) unsafe fn try_hit(
    shared: &Shared,
    slot: &Slot,
    core: &FileCore,
    dst: *mut u8,
    len: usize,
    offset: u64,
) -> Option<usize> {
    if !shared.hit_path.load(Relaxed) {
        return None;
    }
    for _ in 0..TRIES_MAX {
        let in_page = offset as usize & (core.page_bytes() - 1);
        let attempt = if in_page + len <= core.page_bytes() {
            // SAFETY: the caller's promise is the same.
            unsafe { attempt_page(shared, slot, core, dst, len, offset) }
        } else {
            // SAFETY: the caller's promise is the same.
            let segment = unsafe { [Segment::new(dst, len)] };
            attempt_pages(shared, slot, core, &segment, len as u64, offset)
        };
        match attempt {
            Attempt::Read(moved) => return Some(moved),
            Attempt::Retry => slot.retried(),
            Attempt::Miss | Attempt::Fault => return None,
        }
    }
    None
}

/// The common case: all within one page.
///
/// # Safety
///
/// As for [`try_hit`].
#[inline]
unsafe fn attempt_page(
    shared: &Shared,
    slot: &Slot,
    core: &FileCore,
    dst: *mut u8,
    len: usize,
    offset: u64,
) -> Attempt {
    let frames = &shared.cache.frames;
    let begun = core.epoch.begin();
    let Some((word, guess)) = core.lookup(frames, offset >> core.page_shift) else {
        return at_end(core, offset);
    };
    let seen = word.load();
    if !seen.is_hit() {
        return at_end(core, offset);
    }
    let Some(frame) = frames.address_guessed(seen.frame(), guess) else {
        return Attempt::Retry;
    };
    // The linearization point. Acquire, and after the word's load, which is an acquire, too.
    let size = core.size.load(Acquire);
    let len = (len as u64).min(size.saturating_sub(offset)) as usize;
    let in_page = offset as usize & (core.page_bytes() - 1);
    let source = if size >= FAR_BYTES_MIN { Source::Far } else { Source::Near };
    // SAFETY: the source lies within a page's frame, in the reservation, even if the word was not
    // a page's; it may change under the copy. `dst` is the caller's promise.
    let left = unsafe { copy::copy_from(dst, frame.add(in_page), len, source) };
    // Keeps the copy above the reloading; pairs with the release of who took the frame away.
    fence(Acquire);
    if !word.is_unchanged(seen) || !core.epoch.is_unchanged(begun) {
        return Attempt::Retry;
    }
    if left > 0 {
        return Attempt::Fault;
    }
    word.mark_referenced(seen);
    slot.hit(1, len as u64);
    Attempt::Read(len)
}

/// Nothing is cached at `offset`: a hit all the same if the file ends before it.
#[cold]
fn at_end(core: &FileCore, offset: u64) -> Attempt {
    if offset >= core.size.load(Acquire) { Attempt::Read(0) } else { Attempt::Miss }
}

/// Any number of pages up to [`HIT_PAGES_MAX`], into any number of segments.
fn attempt_pages(
    shared: &Shared,
    slot: &Slot,
    core: &FileCore,
    dst: &[Segment<'_>],
    len: u64,
    offset: u64,
) -> Attempt {
    let frames = &shared.cache.frames;
    let begun = core.epoch.begin();
    let hint = core.size.load(Relaxed);
    let first = offset >> core.page_shift;
    let hinted_end = (offset + len).min(hint);
    let mut words: [Option<(&PageWord, Word)>; HIT_PAGES_MAX] = [None; HIT_PAGES_MAX];
    let mut pages = 0;
    if hinted_end > offset {
        let last = (hinted_end - 1) >> core.page_shift;
        if last - first >= HIT_PAGES_MAX as u64 {
            return Attempt::Miss;
        }
        for page in first..=last {
            let Some((word, _)) = core.lookup(frames, page) else { return Attempt::Miss };
            let seen = word.load();
            if !seen.is_hit() {
                return Attempt::Miss;
            }
            words[pages] = Some((word, seen));
            pages += 1;
        }
    }
    // The linearization point; after all words.
    let end = (offset + len).min(core.size.load(Acquire));
    if end <= offset {
        return Attempt::Read(0);
    }
    if (end - 1) >> core.page_shift >= first + pages as u64 {
        return Attempt::Retry;
    }
    let mut at = offset;
    let mut faulted = false;
    for (word, seen) in words[..pages].iter().flatten() {
        let _ = word;
        let Some(frame) = frames.address(seen.frame()) else { return Attempt::Retry };
        let in_page = at as usize & (core.page_bytes() - 1);
        let part = ((core.page_bytes() - in_page) as u64).min(end.saturating_sub(at));
        // SAFETY: as in `attempt_page`.
        faulted |= unsafe { copy_out(dst, at - offset, frame.add(in_page), part) }.is_err();
        at += part;
    }
    fence(Acquire);
    let words = words[..pages].iter().flatten();
    if !words.clone().all(|(word, seen)| word.is_unchanged(*seen))
        || !core.epoch.is_unchanged(begun)
    {
        return Attempt::Retry;
    }
    if faulted {
        return Attempt::Fault;
    }
    words.for_each(|(word, seen)| word.mark_referenced(*seen));
    slot.hit(pages as u64, end - offset);
    Attempt::Read((end - offset) as usize)
}

/// The caller's memory faulted.
pub(crate) struct Faulted;

/// Copies `len` bytes from `src` to bytes `at..` of the segments.
///
/// # Safety
///
/// As for [`copy::copy`].
pub(crate) unsafe fn copy_out(
    dst: &[Segment<'_>],
    at: u64,
    src: *const u8,
    len: u64,
) -> std::result::Result<(), Faulted> {
    let mut done = 0;
    for piece in pieces(dst, at, len) {
        // SAFETY: the caller's promise; the pieces are `len` bytes together.
        if unsafe { copy::copy(piece.base(), src.add(done), piece.len()) } > 0 {
            return Err(Faulted);
        }
        done += piece.len();
    }
    Ok(())
}

/// Reads into several pieces of memory without locks, if all is cached.
pub(crate) fn try_hit_vectored(
    shared: &Shared,
    slot: &Slot,
    core: &FileCore,
    dst: &[Segment<'_>],
    len: u64,
    offset: u64,
) -> Option<usize> {
    if !shared.hit_path.load(Relaxed) {
        return None;
    }
    for _ in 0..TRIES_MAX {
        match attempt_pages(shared, slot, core, dst, len, offset) {
            Attempt::Read(moved) => return Some(moved),
            Attempt::Retry => slot.retried(),
            Attempt::Miss | Attempt::Fault => return None,
        }
    }
    None
}

/// Reads `len` bytes at `offset` under a shared guard, filling what is missing.
pub(crate) fn read_slow(
    file: &CachedFile,
    dst: &[Segment<'_>],
    len: u64,
    offset: u64,
) -> Result<usize> {
    let mut size = file.core().size.load(Acquire);
    for _ in 0..SHRUNK_MAX {
        if offset >= size {
            return Ok(0);
        }
        let guard = file.lock(offset, offset + len, Mode::Shared);
        // No longer changes as far as it concerns this range (W5).
        size = file.core().size.load(Acquire);
        let end = (offset + len).min(size);
        if end <= offset {
            return Ok(0);
        }
        let outcome = fill::read(file, dst, offset, end, size);
        drop(guard);
        match outcome {
            Ok(Ok(())) => {
                file.cache().counters.bytes_slow.add(end - offset);
                return Ok((end - offset) as usize);
            }
            Ok(Err(Shrunk)) => size = file.adopt_size()?,
            Err(error) => return Err(error),
        }
    }
    // Somebody else keeps cutting the file shorter and longer.
    Err(Error::io(Op::Read, offset, len, std::io::Error::from_raw_os_error(libc::EIO)))
}
