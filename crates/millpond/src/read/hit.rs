//! A hit: the fast path of a read whose pages are all cached. It takes no lock and no reference.
//!
//! The read copies optimistically and then validates, as the reader of a seqlock does. It is atomic with respect to
//! writes, for any number of pages:
//!
//! ```text
//!   1. load the file's epoch, which rises before a version in a page word can repeat (`cache::table::epoch`)
//!   2. load the size of the file, as a hint, which chooses the pages
//!   3. load the page words below the hint; a word that is not READY makes the read a miss
//!   4. load the size again: the linearization point; if the file has grown by pages that 3 left out, go to 2
//!   5. shorten the read to the end of the file, and copy
//!   6. acquire fence; load the page words, the links to their leaves and the epoch again:
//!      if one has changed, go to 1
//! ```
//!
//! The words in 6 are those of 3, so no page changed in between (page.W1, page.W2: the rules of `cache::table::page`). The size was
//! loaded in between, too. So bytes and size belong to one moment. A hit writes only the thread's own counters, and the
//! page's REFERENCED bit where it is clear.
//!
//! *Bytes of the buffer after the returned count.* An attempt copies before it validates, and frames are reused. So an
//! attempt that fails may have copied bytes of another file, which other threads of the program can see in the buffer
//! for a moment. If the read then returns fewer bytes, because the file was truncated, the read zeroes the copied bytes
//! after the count. These bytes change only if the read meets a truncation, an error of the device, or a change by
//! another process. To preserve them, each hit would have to copy the bytes twice.

use std::mem::MaybeUninit;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::cache::frames::frame_range::FrameRange;
use crate::cache::table::page::{PageWord, Word};
use crate::cache::table::step;
use crate::cache::table::{FileCore, FoundSlot, SLOTS};
use crate::copy::{self, Source};
use crate::inode::{CachedFile, Shared};
use crate::io::segment::{Segment, SegmentIter};
use crate::latency::LatencyKind;
use crate::stats::ThreadCounts;
use crate::units::PageIndex;

/// Pages that one lock-free read covers; longer reads take the slow path. Chosen, not measured.
pub(crate) const HIT_PAGES_MAX: usize = 64;
/// Files from this size on are taken to be in memory rather than in the processor's caches: chosen. The gain was
/// measured: reads of 4 KiB at random over 256 MiB went from 2.26 to 2.32 times the speed of `pread`, and 8 KiB
/// writes over 1 GiB from 2.15 to 1.65 µs each.
pub(crate) const FAR_BYTES_MIN: u64 = 32 << 20;
/// The number of pages that a read of several pages prefetches before it copies the first. Chosen, not measured.
const AHEAD_PAGES_MAX: usize = 4;
/// Lock-free attempts before the slow path. Chosen, not measured.
pub(crate) const TRIES_MAX: u32 = 8;
/// Attempts at the whole of a read that may be torn; after them each page has [`TRIES_MAX`].
pub(crate) const TRIES_TORN: u32 = 1;

/// The outcome of one lock-free attempt.
pub(super) enum Attempt {
    Read(usize),
    /// A page changed during the copy. That many bytes were copied, and don't count.
    Retry(usize),
    /// A page is missing, in transition, or marked for the slow path.
    Miss,
    /// The caller's memory faulted.
    Fault,
}

/// The source of a lock-free read, and the place where its outcome is noted: in the process of the cache ([`HitPath`]),
/// or in a process that maps it read-only (`shared_hit`).
pub(super) trait HitView<'f>: Copy {
    fn core(self) -> &'f FileCore;

    /// Where the frames are in this process.
    fn range(self) -> &'f FrameRange;

    /// Attempts before the slow path.
    fn tries(self) -> u32;

    /// Whether the core is still that of the file. Called after the epoch or the size was loaded by Acquire.
    fn is_current(self) -> bool;

    /// A page was read.
    fn touch(self, word: &PageWord, seen: Word);

    /// Bytes of one page were read.
    fn count_page(self, bytes: u64);

    fn count_pages(self, pages: u64, bytes: u64);

    fn retried(self);
}

/// The file of a lock-free read, the counters of its thread, and its number of attempts.
#[derive(Clone, Copy)]
pub(crate) struct HitPath<'f> {
    file: &'f CachedFile,
    slot: &'f ThreadCounts,
    tries: u32,
}

impl<'f> HitView<'f> for HitPath<'f> {
    #[inline(always)]
    fn core(self) -> &'f FileCore {
        self.file.core()
    }

    #[inline(always)]
    fn range(self) -> &'f FrameRange {
        &self.file.cache().frames
    }

    #[inline(always)]
    fn tries(self) -> u32 {
        self.tries
    }

    /// A handle keeps its core.
    #[inline(always)]
    fn is_current(self) -> bool {
        true
    }

    #[inline(always)]
    fn touch(self, word: &PageWord, seen: Word) {
        word.mark_referenced(seen);
    }

    #[inline(always)]
    fn count_page(self, bytes: u64) {
        self.slot.hit(bytes);
    }

    #[inline(always)]
    fn count_pages(self, pages: u64, bytes: u64) {
        self.slot.hit_several(pages, bytes);
    }

    #[inline(always)]
    fn retried(self) {
        self.slot.retried();
    }
}

impl<'f> HitPath<'f> {
    #[inline]
    pub(crate) fn new(file: &'f CachedFile, slot: &'f ThreadCounts, tries: u32) -> HitPath<'f> {
        HitPath { file, slot, tries }
    }

    /// Reads into one piece of memory without locks, if all pages are cached, and counts the read. `None`: take the
    /// slow path.
    ///
    /// # Safety
    ///
    /// `dst` must be valid for writes of `len` bytes, except that it may fault where a handler consults
    /// [`crate::fault`]. A fault returns `None`, too.
    #[inline]
    pub(crate) unsafe fn try_read(self, dst: *mut u8, len: usize, offset: u64) -> Option<usize> {
        if !self.file.shared.hit_path.load(Relaxed) {
            return None;
        }
        // The functions called below take their arguments in registers: otherwise a hit, too, would spill them to
        // memory.
        let HitPath { file, slot, tries } = self;
        let page_bytes = file.core().page_bytes();
        if (offset as usize & (page_bytes - 1)) + len > page_bytes {
            // SAFETY: the caller's promise is the same.
            return unsafe { try_read_pages(file, slot, tries, dst, len, offset) };
        }
        if slot.is_sampled() {
            // SAFETY: the caller's promise is the same.
            return unsafe { try_read_timed(file, slot, tries, dst, len, offset) };
        }
        // SAFETY: the caller's promise is the same.
        unsafe { self.try_read_page(dst, len, offset) }
    }

    /// [`HitPath::try_read`] of bytes of one page.
    ///
    /// # Safety
    ///
    /// As for [`HitPath::try_read`].
    #[inline]
    unsafe fn try_read_page(self, dst: *mut u8, len: usize, offset: u64) -> Option<usize> {
        let HitPath { file, slot, tries } = self;
        // SAFETY: the caller's promise is the same.
        match unsafe { attempt_page(self, dst, len, offset) } {
            Attempt::Read(moved) => Some(moved),
            Attempt::Retry(copied) => {
                // SAFETY: the caller's promise is the same.
                unsafe { try_read_again(file, slot, tries, dst, len, offset, copied) }
            }
            Attempt::Miss | Attempt::Fault => None,
        }
    }

    /// Reads into several pieces of memory without locks, if all pages are cached.
    pub(crate) fn try_read_vectored(self, dst: SegmentIter<'_>, offset: u64) -> Option<usize> {
        if !self.file.shared.hit_path.load(Relaxed) {
            return None;
        }
        self.try_pages(dst, offset)
    }

    // Always inlined: a call, with its arguments in memory, costs 25 to 40 instructions of a read of two pages.
    #[inline(always)]
    fn try_pages(self, dst: SegmentIter<'_>, offset: u64) -> Option<usize> {
        let since = self.slot.several_begins();
        let read = match attempt_pages(self, dst, offset) {
            Attempt::Read(moved) => Some(moved),
            Attempt::Retry(copied) => try_again(self, dst, offset, copied),
            Attempt::Miss | Attempt::Fault => None,
        };
        self.slot.took_if(LatencyKind::ReadHit, since.filter(|_| read.is_some()));
        read
    }
}

/// The common case: all within one page.
///
/// # Safety
///
/// As for [`HitPath::try_read`].
#[inline]
pub(super) unsafe fn attempt_page<'f>(
    view: impl HitView<'f>,
    dst: *mut u8,
    len: usize,
    offset: u64,
) -> Attempt {
    let (core, frames) = (view.core(), view.range());
    let begun = core.epoch.begin();
    if !view.is_current() {
        return Attempt::Miss;
    }
    let page = PageIndex::of_byte(offset, core.page_shift);
    let Some(FoundSlot { word, predicted, leaf }) = core.lookup(frames, page) else {
        return at_end(view, offset);
    };
    let seen = word.load();
    if !seen.is_hit() {
        return at_end(view, offset);
    }
    let Some(frame) = frames.address_predicted(seen.frame(), predicted) else {
        return Attempt::Retry(0);
    };
    // The linearization point; after the word, whose load is an acquire.
    let size = core.size.get();
    let len = (len as u64).min(size.saturating_sub(offset)) as usize;
    let in_page = offset as usize & (core.page_bytes() - 1);
    let source = if size >= FAR_BYTES_MIN { Source::Far } else { Source::Near };
    // SAFETY: the source lies within a page's frame, in the reservation, even if the word was not
    // a page's; it may change under the copy. `dst` is the caller's promise.
    let left = unsafe { copy::copy_from(dst, frame.add(in_page), len, source) };
    if !step::is_consistent([(word, seen)], [leaf], &core.epoch, begun) {
        return Attempt::Retry(len);
    }
    if left > 0 {
        return Attempt::Fault;
    }
    view.touch(word, seen);
    view.count_page(len as u64);
    Attempt::Read(len)
}

/// Any number of pages up to [`HIT_PAGES_MAX`], into any number of segments.
#[inline(always)]
pub(super) fn attempt_pages<'f>(
    view: impl HitView<'f>,
    mut dst: SegmentIter<'_>,
    offset: u64,
) -> Attempt {
    let (core, frames) = (view.core(), view.range());
    let len = dst.left();
    let begun = core.epoch.begin();
    if !view.is_current() {
        return Attempt::Miss;
    }
    let hint = core.size.hint();
    let first = PageIndex::of_byte(offset, core.page_shift);
    let hinted_end = (offset + len).min(hint);
    // Initialised up to `pages`: clearing all of it would cost as much as a page.
    let mut words: [MaybeUninit<(&PageWord, Word)>; HIT_PAGES_MAX] =
        [const { MaybeUninit::uninit() }; HIT_PAGES_MAX];
    let mut pages = 0;
    // `HIT_PAGES_MAX` pages lie in at most two leaves.
    const { assert!(HIT_PAGES_MAX <= SLOTS) };
    let mut leaves = [None; 2];
    if hinted_end > offset {
        let last = PageIndex::of_byte(hinted_end - 1, core.page_shift);
        if last - first >= HIT_PAGES_MAX as u64 {
            return Attempt::Miss;
        }
        while first + pages as u64 <= last {
            let next = first + pages as u64;
            let Some((found, leaf)) = core.lookup_several(frames, next, last) else {
                return Attempt::Miss;
            };
            let place = usize::from(pages > 0);
            leaves[place] = Some(leaf);
            for word in found {
                let seen = word.load();
                if !seen.is_hit() {
                    return Attempt::Miss;
                }
                if pages < AHEAD_PAGES_MAX && hint >= FAR_BYTES_MIN {
                    // Prefetches while the other words are loaded, and the earlier pages are copied.
                    frames.address(seen.frame()).inspect(|&at| copy::ask_for(at));
                }
                words[pages].write((word, seen));
                pages += 1;
            }
        }
    }
    // SAFETY: those elements were set; a MaybeUninit has the layout of its value.
    let words = unsafe { &*(&raw const words[..pages] as *const [(&PageWord, Word)]) };
    // The linearization point; after all words.
    let size = core.size.get();
    let end = (offset + len).min(size);
    if end <= offset {
        return if len == 0 { Attempt::Read(0) } else { at_end(view, offset) };
    }
    if PageIndex::of_byte(end - 1, core.page_shift) >= first + pages as u64 {
        return Attempt::Retry(0);
    }
    let source = if size >= FAR_BYTES_MIN { Source::Far } else { Source::Near };
    let mut at = offset;
    let mut faulted = false;
    for (_, seen) in words {
        let Some(frame) = frames.address(seen.frame()) else {
            return Attempt::Retry((at - offset) as usize);
        };
        let in_page = at as usize & (core.page_bytes() - 1);
        let part = ((core.page_bytes() - in_page) as u64).min(end.saturating_sub(at));
        // SAFETY: as in `attempt_page`.
        let copied = unsafe { copy_out(dst.split(part), frame.add(in_page), source) };
        faulted |= copied.is_err();
        at += part;
    }
    let leaves = leaves.into_iter().flatten();
    if !step::is_consistent(words.iter().copied(), leaves, &core.epoch, begun) {
        return Attempt::Retry((end - offset) as usize);
    }
    if faulted {
        return Attempt::Fault;
    }
    words.iter().for_each(|(word, seen)| view.touch(word, *seen));
    view.count_pages(pages as u64, end - offset);
    Attempt::Read((end - offset) as usize)
}

/// Goes on after a failed first attempt that copied that many bytes. Zeroes those that no later attempt has
/// validated.
#[cold]
pub(super) fn try_again<'f>(
    view: impl HitView<'f>,
    dst: SegmentIter<'_>,
    offset: u64,
    mut copied: usize,
) -> Option<usize> {
    view.retried();
    let mut read = None;
    for _ in 1..view.tries() {
        match attempt_pages(view, dst, offset) {
            Attempt::Read(moved) => {
                read = Some(moved);
                break;
            }
            Attempt::Retry(more) => {
                view.retried();
                copied = copied.max(more);
            }
            Attempt::Miss | Attempt::Fault => break,
        }
    }
    wipe(dst, read.unwrap_or(0) as u64, copied as u64);
    read
}

/// [`HitPath::try_read_page`] that is timed.
///
/// # Safety
///
/// As for [`HitPath::try_read`].
#[cold]
#[inline(never)]
unsafe fn try_read_timed(
    file: &CachedFile,
    slot: &ThreadCounts,
    tries: u32,
    dst: *mut u8,
    len: usize,
    offset: u64,
) -> Option<usize> {
    let since = Instant::now();
    // SAFETY: the caller's promise is the same.
    let read = unsafe { HitPath { file, slot, tries }.try_read_page(dst, len, offset) };
    slot.took_if(LatencyKind::ReadHit, read.map(|_| since));
    read
}

/// [`HitPath::try_read`] of more than one page.
///
/// # Safety
///
/// As for [`HitPath::try_read`].
#[inline(never)]
unsafe fn try_read_pages(
    file: &CachedFile,
    slot: &ThreadCounts,
    tries: u32,
    dst: *mut u8,
    len: usize,
    offset: u64,
) -> Option<usize> {
    // SAFETY: the caller's promise is the same.
    let segment = unsafe { [Segment::new(dst, len)] };
    HitPath { file, slot, tries }.try_pages((&segment).into(), offset)
}

/// [`try_again`] of a read of one piece.
///
/// # Safety
///
/// As for [`HitPath::try_read`].
#[cold]
#[inline(never)]
unsafe fn try_read_again(
    file: &CachedFile,
    slot: &ThreadCounts,
    tries: u32,
    dst: *mut u8,
    len: usize,
    offset: u64,
    copied: usize,
) -> Option<usize> {
    // SAFETY: the caller's promise is the same.
    let segment = unsafe { [Segment::new(dst, len)] };
    try_again(HitPath { file, slot, tries }, (&segment).into(), offset, copied)
}

/// Nothing is cached at `offset`. That is still a hit if the file ends before it, unless the file has no size because
/// it is the parent's: the slow path finds that out.
#[cold]
fn at_end<'f>(view: impl HitView<'f>, offset: u64) -> Attempt {
    let core = view.core();
    // In this order: a size of the core's next file comes after its generation (shared.SH5).
    if offset >= core.size.get() && !core.is_the_parents() && view.is_current() {
        Attempt::Read(0)
    } else {
        Attempt::Miss
    }
}

/// Zeroes bytes `from..to` of the segments, as far as their memory is writable.
pub(crate) fn wipe(dst: SegmentIter<'_>, from: u64, to: u64) {
    if from >= to {
        return;
    }
    for piece in dst.slice(from, to - from) {
        // SAFETY: the segments are valid for writes, or may fault, as their maker vouched.
        if unsafe { copy::copy_zeros(piece.base(), piece.len()) } > 0 {
            return;
        }
    }
}

/// The caller's memory faulted.
pub(crate) struct Faulted;

/// Copies from `src` to all bytes of the segments.
///
/// # Safety
///
/// As for [`copy::copy`].
pub(crate) unsafe fn copy_out(
    dst: SegmentIter<'_>,
    src: *const u8,
    source: Source,
) -> std::result::Result<(), Faulted> {
    let mut done = 0;
    for piece in dst {
        // SAFETY: the caller's promise; `src` holds as many bytes as the pieces.
        if unsafe { copy::copy_from(piece.base(), src.add(done), piece.len(), source) } > 0 {
            return Err(Faulted);
        }
        done += piece.len();
    }
    Ok(())
}

/// Whether the page at `offset` can probably be read without a guard.
pub(super) fn may_hit(shared: &Shared, core: &FileCore, offset: u64) -> bool {
    let found = core.lookup(&shared.cache.frames, PageIndex::of_byte(offset, core.page_shift));
    shared.hit_path.load(Relaxed) && found.is_some_and(|found| found.word.load().is_hit())
}
