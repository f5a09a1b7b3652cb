//! Writes: to the back end first, then, whole, into the cache.
//!
//! ```text
//!   exclusive guard over the pages -> build the new frames -> back end -> hide all, fence,
//!   publish the size, show all -> release
//! ```
//!
//! A write is through: it returns after the back end took the bytes, so nothing is lost that the
//! kernel would keep. Readers see the old bytes until the back end is done, then the new ones, all
//! at once; a write to one page that leaves the size alone is a single RMW.
//!
//! - A page that is cached, or whose other bytes are all zero, gets a fresh frame (W2), and the
//!   back end is given that frame's bytes: what is cached and what is written are the same even if
//!   the caller changes its buffer meanwhile. A page that is neither goes straight from the
//!   caller's memory and stays EMPTY; nothing is read in order to write.
//! - After a failed or short write the pages that were not acknowledged become EMPTY.
//! - A write longer than a chunk hides all its cached pages first and drops them in the end.
//! - **W5** A write that moves the end of the file takes its guard from the old end on, so that
//!   nobody else moves it meanwhile and no fill sees it move.

use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};

use millpond_rangelock::Mode;

use crate::cache::copy;
use crate::cache::evict::Arrival;
use crate::cache::fill::Leaves;
use crate::cache::frame::{Class, FrameIndex};
use crate::cache::page::{Shown, State};
use crate::cache::table::PageIndex;
use crate::cached::CachedFile;
use crate::error::{Error, Op, Result};
use crate::io::request::{self, Direction, Transfer};
use crate::io::segment::{Segment, pieces};
use crate::range_lock::Guard;
use crate::sync::fence;

/// Pages that a write puts in place together; longer ones are not cached.
const CHUNK_PAGES: usize = 256;

/// Writes `len` bytes at `offset`; returns how many the back end took.
pub(crate) fn write(
    file: &CachedFile,
    src: &[Segment<'_>],
    len: u64,
    offset: u64,
) -> Result<usize> {
    if len == 0 {
        return Ok(0);
    }
    let (guard, size) = lock_for_write(file, offset, offset + len);
    write_locked(file, src, len, offset, size, guard)
}

/// Writes `len` bytes at the end of the file; returns where, and how many the back end took.
pub(crate) fn append(file: &CachedFile, src: &[Segment<'_>], len: u64) -> Result<(u64, usize)> {
    let _appending = file.appending.lock().expect("no panic under the lock");
    loop {
        let end = file.core().size.load(Acquire);
        if len == 0 {
            return Ok((end, 0));
        }
        if end.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
            return Err(Error::InvalidRange { op: Op::Write, offset: end, len });
        }
        let guard = file.lock(end, end + len, Mode::Exclusive);
        if file.core().size.load(Acquire) == end {
            return write_locked(file, src, len, end, end, guard).map(|moved| (end, moved));
        }
    }
}

/// An exclusive guard for a write, and the size, which cannot change under it if it matters.
fn lock_for_write(file: &CachedFile, offset: u64, end: u64) -> (Guard<'_>, u64) {
    loop {
        let size = file.core().size.load(Acquire);
        let start = if end > size { offset.min(size) } else { offset };
        let guard = file.lock(start, end, Mode::Exclusive);
        let size = file.core().size.load(Acquire);
        if end <= size || guard.range().start() <= offset.min(size) {
            return (guard, size);
        }
    }
}

fn write_locked(
    file: &CachedFile,
    src: &[Segment<'_>],
    len: u64,
    offset: u64,
    size: u64,
    guard: Guard<'_>,
) -> Result<usize> {
    let (first, last) = (file.page_of(offset), file.page_of(offset + len - 1));
    let write = Write { file, src, len, offset, size, first };
    let moved = if last - first < file.chunk_pages(CHUNK_PAGES) as u64 {
        write.chunk((last - first + 1) as usize)
    } else {
        write.long(last)
    };
    drop(guard);
    let done = *moved.as_ref().unwrap_or(&0) as u64;
    if done < len && offset + len > size {
        // The back end may have kept more than it acknowledged, and be longer now than we think.
        file.adopt_size()?;
    }
    file.cache().counters.bytes_slow.add(done);
    moved
}

/// A write under its guard.
struct Write<'a> {
    file: &'a CachedFile,
    src: &'a [Segment<'a>],
    len: u64,
    offset: u64,
    /// Of the file, before the write.
    size: u64,
    first: PageIndex,
}

impl Write<'_> {
    /// A write of few enough pages to cache them.
    fn chunk(&self, pages: usize) -> Result<usize> {
        let mut fresh = [FrameIndex::NONE; CHUNK_PAGES];
        let fresh = &mut fresh[..pages];
        if let Err(fault) = self.build(fresh) {
            self.free(fresh);
            return Err(fault);
        }
        let mut segments: Vec<Segment<'_>> = Vec::with_capacity(pages);
        for (page, &frame) in (self.first..).zip(&*fresh) {
            let (from, to) = self.part(page);
            if frame == FrameIndex::NONE {
                segments.extend(pieces(self.src, from - self.offset, to - from));
                self.file.cache().counters.bytes_passed.add(to - from);
            } else {
                let bytes = self.file.cache().frames.bytes(frame);
                // SAFETY: the part lies within the frame, which is ours until it is shown, and
                // does not change after that (W2).
                segments.push(unsafe {
                    let at = bytes.add((from - self.file.start_of(page)) as usize);
                    Segment::new(at, (to - from) as usize)
                });
            }
        }
        let (moved, error) = self.transfer(&segments);
        self.install(fresh, moved);
        self.result(moved, error)
    }

    /// Builds the new contents of the pages that will be cached, each in a fresh frame.
    fn build(&self, fresh: &mut [FrameIndex]) -> Result<()> {
        let cache = self.file.cache();
        let class = Class::page(self.file.core().page_shift);
        let mut leaves = Leaves::new(self.file);
        for (page, slot) in (self.first..).zip(fresh) {
            let (from, to) = self.part(page);
            let start = self.file.start_of(page);
            let end = start + self.file.core().page_bytes() as u64;
            // Whether all bytes of the page outside the part are beyond the size.
            let rest_is_zero =
                (from == start || self.size <= start) && (to == end || self.size <= to);
            let old = match leaves.hold(page, rest_is_zero) {
                Ok(held) => Some(held.word(page)),
                Err(_) => None,
            };
            let seen = old.map(|word| word.load()).filter(|seen| seen.is_ready());
            let leaf_is_missing = old.is_none() && rest_is_zero;
            if leaf_is_missing || (seen.is_none() && !rest_is_zero) {
                continue;
            }
            let Some(frame) = cache.take_frame(class) else { continue };
            let bytes = cache.frames.bytes(frame);
            let (head, tail) = ((from - start) as usize, (end - to) as usize);
            // SAFETY: all within the two frames; ours is in nobody else's hands, and the old one
            // may be evicted and reused meanwhile, which is looked for below.
            let kept = unsafe {
                let after = bytes.add((to - start) as usize);
                match (seen, old) {
                    (Some(seen), Some(word)) if !rest_is_zero => {
                        let old_bytes = cache.frames.bytes(seen.frame());
                        let _ = copy::copy(bytes, old_bytes, head);
                        let _ = copy::copy(after, old_bytes.add((to - start) as usize), tail);
                        // Pairs with the release of who took the frame away.
                        fence(Acquire);
                        word.is_unchanged(seen)
                    }
                    _ => {
                        copy::zero(bytes, head);
                        copy::zero(after, tail);
                        true
                    }
                }
            };
            if !kept {
                cache.frames.free(frame, class);
                continue;
            }
            *slot = frame;
            let mut at = head;
            for piece in pieces(self.src, from - self.offset, to - from) {
                // SAFETY: within our frame; the source is the caller's promise.
                if unsafe { copy::copy(bytes.add(at), piece.base(), piece.len()) } > 0 {
                    return Err(Error::Fault { op: Op::Write, offset: self.offset, len: self.len });
                }
                at += piece.len();
            }
        }
        Ok(())
    }

    /// Puts the acknowledged pages in place together, and drops the others.
    fn install(&self, fresh: &[FrameIndex], moved: u64) {
        let size = self.size.max(if moved > 0 { self.offset + moved } else { 0 });
        if let [frame] = fresh
            && size == self.size
            && moved == self.len
            && *frame != FrameIndex::NONE
            && self.replace(*frame)
        {
            return;
        }
        let core = self.file.core();
        let cache = self.file.cache();
        let class = Class::page(core.page_shift);
        let shown = Shown { referenced: true, marker: false };
        let mut leaves = Leaves::new(self.file);
        let mut old = [FrameIndex::NONE; CHUNK_PAGES];
        for ((page, &frame), old) in (self.first..).zip(fresh).zip(&mut old) {
            let Ok(held) = leaves.hold(page, frame != FrameIndex::NONE) else { continue };
            let word = held.word(page);
            if frame == FrameIndex::NONE && word.load().state() == State::Empty {
                continue;
            }
            held.occupy();
            let was = word.hide(&core.epoch);
            if was.is_ready() {
                held.vacated();
                *old = was.frame();
            }
        }
        // After the hiding RMWs and before anything that tells of the write: a reader that learns
        // of it finds no old page (and none is shown half: the models m1, m3 of this protocol).
        fence(SeqCst);
        if size != self.size {
            core.size.store(size, Release);
        }
        for ((page, &frame), old) in (self.first..).zip(fresh).zip(old) {
            let Ok(held) = leaves.hold(page, false) else {
                if frame != FrameIndex::NONE {
                    cache.frames.free(frame, class);
                }
                continue;
            };
            let word = held.word(page);
            if word.load().state() != State::Hidden {
                // Had no leaf in the first pass, and was not hidden.
                if frame != FrameIndex::NONE {
                    cache.frames.free(frame, class);
                }
                continue;
            }
            let acknowledged = self.part(page).1 <= self.offset + moved;
            if frame != FrameIndex::NONE && acknowledged {
                word.wake(word.show(frame, shown));
                if old != FrameIndex::NONE {
                    cache.replaced(old, frame, class);
                } else {
                    let arrival = Arrival { frame, core, page, prefetched: false };
                    cache.arrived(std::iter::once(arrival));
                }
            } else {
                word.wake(word.drop_hidden());
                held.vacated();
                if old != FrameIndex::NONE {
                    cache.discarded(old, class);
                }
                if frame != FrameIndex::NONE {
                    cache.frames.free(frame, class);
                }
            }
        }
    }

    /// Puts one page in place where it is READY, in one step.
    fn replace(&self, frame: FrameIndex) -> bool {
        let core = self.file.core();
        let Ok(held) = core.hold(self.file.cache(), self.first, false) else { return false };
        let shown = Shown { referenced: true, marker: false };
        match held.word(self.first).try_replace(frame, shown, &core.epoch) {
            Ok(old) => {
                // After the RMW and before this returns: else two writers that then read each
                // other's page could both see the old one (model m11).
                fence(SeqCst);
                self.file.cache().replaced(old, frame, Class::page(core.page_shift));
                true
            }
            Err(_) => false,
        }
    }

    /// A write of more pages than are put in place together: none of them stays cached.
    fn long(&self, last: PageIndex) -> Result<usize> {
        let core = self.file.core();
        hide_pages(self.file, self.first, last);
        let segments: Vec<Segment<'_>> = pieces(self.src, 0, self.len).collect();
        let (moved, error) = self.transfer(&segments);
        self.file.cache().counters.bytes_passed.add(moved);
        if self.offset + moved > self.size && moved > 0 {
            core.size.store(self.offset + moved, Release);
        }
        drop_pages(self.file, self.first, last);
        self.result(moved, error)
    }

    fn transfer(&self, segments: &[Segment<'_>]) -> (u64, Option<std::io::Error>) {
        let mut batch = [Transfer::new(Direction::Write, self.offset, segments)];
        request::run(&*self.file.backing, &mut batch);
        let [transfer] = batch;
        (transfer.moved, transfer.error)
    }

    fn result(&self, moved: u64, error: Option<std::io::Error>) -> Result<usize> {
        match error {
            Some(error) if moved == 0 => Err(Error::io(Op::Write, self.offset, self.len, error)),
            // A short write, as POSIX has it: the next one meets the error.
            _ => Ok(moved as usize),
        }
    }

    fn free(&self, fresh: &[FrameIndex]) {
        let class = Class::page(self.file.core().page_shift);
        for &frame in fresh.iter().filter(|&&frame| frame != FrameIndex::NONE) {
            self.file.cache().frames.free(frame, class);
        }
    }

    /// The bytes that are written of `page`, as file offsets.
    fn part(&self, page: PageIndex) -> (u64, u64) {
        let start = self.file.start_of(page);
        let end = start + self.file.core().page_bytes() as u64;
        (start.max(self.offset), end.min(self.offset + self.len))
    }
}

/// Hides the READY pages from `first` to `last`, and fences. Caller: exclusive guard.
pub(crate) fn hide_pages(file: &CachedFile, first: PageIndex, last: PageIndex) {
    let core = file.core();
    core.for_each_page(file.cache(), first, last, &mut |held, _, word| {
        if word.load().is_ready() {
            held.occupy();
            let was = word.hide(&core.epoch);
            // Evicted between the look and the hiding: the page's own hold is gone with it.
            if was.is_ready() {
                held.vacated();
            }
        }
    });
    fence(SeqCst);
}

/// Makes the HIDDEN pages from `first` to `last` EMPTY. Caller: who hid them.
pub(crate) fn drop_pages(file: &CachedFile, first: PageIndex, last: PageIndex) {
    let class = Class::page(file.core().page_shift);
    file.core().for_each_page(file.cache(), first, last, &mut |held, _, word| {
        let seen = word.load();
        if seen.state() == State::Hidden {
            word.wake(word.drop_hidden());
            held.vacated();
            if seen.frame() != FrameIndex::NONE {
                file.cache().discarded(seen.frame(), class);
            }
        }
    });
}
