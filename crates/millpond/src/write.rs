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

use std::sync::atomic::Ordering::{Acquire, SeqCst};

use millpond_rangelock::Mode;

use crate::cache::copy;
use crate::cache::evict::Arrival;
use crate::cache::fill::Leaves;
use crate::cache::frame::{Class, FrameIndex};
use crate::cache::page::{PageWord, Shown, State, Word};
use crate::cache::table::{Held, PageIndex};
use crate::cached::CachedFile;
use crate::error::{Error, Op, Result};
use crate::io::request::{self, Direction, Transfer};
use crate::io::segment::{Segment, pieces};
use crate::options::WriteMode;
use crate::range_lock::Guard;
use crate::read::FAR_BYTES_MIN;
use crate::space;
use crate::sync::fence;
use crate::writeback;

/// Pages that a write puts in place together; longer ones are not cached.
const CHUNK_PAGES: usize = 256;
/// From this length on, what is written is not expected to be read soon.
const AWAY_BYTES_MIN: u64 = 256 << 10;
/// How often a write has others written back to get one frame.
const RELIEVED_MAX: usize = 3;

/// Writes `len` bytes at `offset`; returns how many were taken. `durable`: and makes them so.
pub(crate) fn write(
    file: &CachedFile,
    src: &[Segment<'_>],
    len: u64,
    offset: u64,
    durable: bool,
) -> Result<usize> {
    if len == 0 {
        return Ok(0);
    }
    let may_wait = may_wait(file, len)?;
    let (guard, size) = lock_for_write(file, offset, offset + len);
    let moved = write_locked(file, src, len, offset, size, guard, Durable(durable), may_wait)?;
    sync_if(file, durable, offset, moved)?;
    Ok(moved)
}

/// Writes `len` bytes at the end of the file; returns where, and how many were taken.
pub(crate) fn append(
    file: &CachedFile,
    src: &[Segment<'_>],
    len: u64,
    durable: bool,
) -> Result<(u64, usize)> {
    let may_wait = may_wait(file, len)?;
    let appending = file.appending.lock().expect("no panic under the lock");
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
            let moved = write_locked(file, src, len, end, end, guard, Durable(durable), may_wait)?;
            drop(appending);
            sync_if(file, durable, end, moved)?;
            return Ok((end, moved));
        }
    }
}

/// Whether a write may leave its bytes in the cache; waits for room below the dirty limit, while
/// the caller holds no guard.
fn may_wait(file: &CachedFile, len: u64) -> Result<bool> {
    if file.write_mode() == WriteMode::Through {
        return Ok(false);
    }
    writeback::throttle(file, len + 2 * file.core().page_bytes() as u64)
}

/// Ends a durable write of a file whose writes wait in the cache.
fn sync_if(file: &CachedFile, durable: bool, offset: u64, moved: usize) -> Result<()> {
    if !durable || moved == 0 || file.write_mode() == WriteMode::Through {
        return Ok(());
    }
    let (first, last) = (file.page_of(offset), file.page_of(offset + moved as u64 - 1));
    writeback::sync(file, first, last, true)
}

#[derive(Clone, Copy)]
struct Durable(bool);

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

#[allow(clippy::too_many_arguments)]
fn write_locked(
    file: &CachedFile,
    src: &[Segment<'_>],
    len: u64,
    offset: u64,
    size: u64,
    guard: Guard<'_>,
    Durable(durable): Durable,
    may_wait: bool,
) -> Result<usize> {
    let (first, last) = (file.page_of(offset), file.page_of(offset + len - 1));
    let write = Write { file, src, len, offset, size, first, last, durable };
    let fits = last - first < file.chunk_pages(CHUNK_PAGES) as u64;
    let pages = (last - first + 1) as usize;
    // Asked again under the guard.
    let mode = file.write_mode();
    let moved = if fits && may_wait && mode == WriteMode::Back && write.back(pages)? {
        Ok(len as usize)
    } else if fits && mode == WriteMode::Through && !write.meets_writeback() {
        write.through(pages)
    } else {
        write.around()
    };
    drop(guard);
    let done = *moved.as_ref().unwrap_or(&0) as u64;
    if done < len && offset + len > size && mode == WriteMode::Through {
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
    last: PageIndex,
    durable: bool,
}

impl Write<'_> {
    /// A write into the cache, which is written back later. False: it must go to the back end now.
    fn back(&self, pages: usize) -> Result<bool> {
        let mut fresh = [FrameIndex::NONE; CHUNK_PAGES];
        let fresh = &mut fresh[..pages];
        let (start, end) = (self.file.start_of(self.first), self.offset + self.len);
        let end = end.next_multiple_of(self.file.core().page_bytes() as u64);
        if !self.file.keep() {
            self.file.stay_through();
            return Ok(false);
        }
        let leaves = &mut Leaves::new(self.file);
        if !space::reserve(self.file, start, end, self.size) || !self.occupy(leaves, pages) {
            return Ok(false);
        }
        let built = self.build_whole(fresh).and_then(|built| Ok(built && self.close_gap()?));
        if !matches!(built, Ok(true)) {
            self.free(fresh);
            self.vacate(leaves, pages);
            return built;
        }
        self.install(leaves, fresh, self.len, self.size.max(self.offset + self.len), true);
        Ok(true)
    }

    /// Takes a hold for each page on its leaf, so that nothing is missing once the write begins to
    /// be seen; false if there is no memory for the tables.
    fn occupy(&self, leaves: &mut Leaves<'_>, pages: usize) -> bool {
        for (done, page) in (self.first..).take(pages).enumerate() {
            match leaves.hold(page, true) {
                Ok(held) => held.occupy(),
                Err(_) => {
                    self.vacate(leaves, done);
                    return false;
                }
            }
        }
        true
    }

    fn vacate(&self, leaves: &mut Leaves<'_>, pages: usize) {
        for page in (self.first..).take(pages) {
            leaves.hold(page, false).expect("held for the page").vacated();
        }
    }

    /// Builds the new contents of all pages, each in a fresh frame; false if that can't be done.
    fn build_whole(&self, fresh: &mut [FrameIndex]) -> Result<bool> {
        let file = self.file;
        let class = Class::page(file.core().page_shift);
        let taken = file.cache().frames.try_alloc_many(class, fresh);
        for slot in &mut fresh[taken..] {
            let Some(frame) = self.take_frame(class) else { return Ok(false) };
            *slot = frame;
        }
        let edges = [(0, self.first), (fresh.len() - 1, self.last)];
        let edges = &edges[..edges.len().min(fresh.len())];
        let mut missing = Vec::new();
        for &(at, page) in edges {
            let (from, to) = self.part(page);
            let start = file.start_of(page);
            let end = start + file.core().page_bytes() as u64;
            if self.keeps_rest(page) {
                if !self.copy_old(page, fresh[at]) {
                    missing.push((page, fresh[at]));
                }
            } else {
                let bytes = file.cache().frames.bytes(fresh[at]);
                // SAFETY: within our frame.
                unsafe {
                    copy::zero(bytes, (from - start) as usize);
                    copy::zero(bytes.add((to - start) as usize), (end - to) as usize);
                }
            }
        }
        if !self.read_old(&missing)? {
            return Ok(false);
        }
        for (page, &frame) in (self.first..).zip(&*fresh) {
            self.copy_new(page, frame)?;
        }
        Ok(true)
    }

    /// A free frame, written back for if need be.
    fn take_frame(&self, class: Class) -> Option<FrameIndex> {
        for _ in 0..RELIEVED_MAX {
            if let Some(frame) = self.file.cache().take_frame(class) {
                return Some(frame);
            }
            if !writeback::relieve(self.file) {
                break;
            }
        }
        self.file.cache().take_frame(class)
    }

    /// Whether there are bytes in the page, below the size, that the write leaves alone.
    fn keeps_rest(&self, page: PageIndex) -> bool {
        let (from, to) = self.part(page);
        let start = self.file.start_of(page);
        let end = start + self.file.core().page_bytes() as u64;
        (from > start && self.size > start) || (to < end && self.size > to)
    }

    /// Copies a page as it is cached; false if it is not, or not for long enough.
    fn copy_old(&self, page: PageIndex, fresh: FrameIndex) -> bool {
        let frames = &self.file.cache().frames;
        let Ok(held) = self.file.core().hold(self.file.cache(), page, false) else { return false };
        let word = held.word(page);
        let seen = word.load();
        if !seen.is_ready() {
            return false;
        }
        // SAFETY: both frames are a page long; ours is in nobody else's hands, and the other may be
        // evicted and reused meanwhile, which is looked for below.
        unsafe {
            let page_bytes = self.file.core().page_bytes();
            let _ = copy::copy(frames.bytes(fresh), frames.bytes(seen.frame()), page_bytes);
        }
        // Pairs with the release of who took the frame away.
        fence(Acquire);
        word.is_unchanged(seen)
    }

    /// Reads pages from the back end, all at once; false if that can't be done.
    fn read_old(&self, pages: &[(PageIndex, FrameIndex)]) -> Result<bool> {
        let file = self.file;
        if pages.is_empty() {
            return Ok(true);
        }
        if !file.backing.permits(false) {
            return Ok(false);
        }
        let page_bytes = file.core().page_bytes();
        let frames = &file.cache().frames;
        // SAFETY: the frames are ours until they are shown.
        let segments: Vec<_> = pages
            .iter()
            .map(|&(_, frame)| unsafe { [Segment::new(frames.bytes(frame), page_bytes)] })
            .collect();
        let mut batch: Vec<_> = (pages.iter().zip(&segments))
            .map(|(&(page, _), segment)| {
                Transfer::new(Direction::Read, file.start_of(page), segment)
            })
            .collect();
        request::run(&*file.backing, &mut batch);
        for (transfer, &(_, frame)) in batch.into_iter().zip(pages) {
            let valid = (self.size - transfer.offset).min(page_bytes as u64);
            if let Some(error) = transfer.error {
                return Err(Error::io(Op::Write, transfer.offset, page_bytes as u64, error));
            }
            if transfer.moved < valid {
                // Somebody else cut the file: the kernel decides what the write means now.
                return Ok(false);
            }
            // SAFETY: the rest of our frame. W5: nothing but zeros beyond the size.
            unsafe {
                let bytes = frames.bytes(frame);
                copy::zero(bytes.add(valid as usize), page_bytes - valid as usize);
            }
        }
        Ok(true)
    }

    /// Copies what the caller writes of a page into its fresh frame.
    fn copy_new(&self, page: PageIndex, fresh: FrameIndex) -> Result<()> {
        let (from, to) = self.part(page);
        let bytes = self.file.cache().frames.bytes(fresh);
        let mut at = (from - self.file.start_of(page)) as usize;
        let whole = to - from == self.file.core().page_bytes() as u64;
        let away = self.len >= AWAY_BYTES_MIN || (whole && self.size >= FAR_BYTES_MIN);
        for piece in pieces(self.src, from - self.offset, to - from) {
            // SAFETY: within our frame; the source is the caller's promise.
            let left = unsafe {
                if away {
                    copy::copy_away(bytes.add(at), piece.base(), piece.len())
                } else {
                    copy::copy(bytes.add(at), piece.base(), piece.len())
                }
            };
            if left > 0 {
                return Err(Error::Fault { op: Op::Write, offset: self.offset, len: self.len });
            }
            at += piece.len();
        }
        Ok(())
    }

    /// Has the back end extend the file up to the first page of a write beyond its end, so that
    /// what lies between is there to be read (B1 of write-back). False if it refuses.
    fn close_gap(&self) -> Result<bool> {
        let start = self.file.start_of(self.first);
        if self.size < start {
            let extended = self.file.backing.set_len(start).is_ok();
            writeback::passed_metadata(self.file);
            return Ok(extended);
        }
        Ok(true)
    }

    /// Whether a page of the write is DIRTY or under write-back. The caller's guard keeps it so.
    fn meets_writeback(&self) -> bool {
        let mut meets = false;
        if self.file.writeback.has_begun() {
            let (core, cache) = (self.file.core(), self.file.cache());
            core.for_each_page(cache, self.first, self.last, &mut |_, _, word| {
                // One look: a write-back that fails goes from the one to the other.
                let seen = word.load();
                meets |= seen.is_dirty() || seen.is_under_writeback();
            });
        }
        meets
    }

    /// A write to the back end, of few enough pages to cache them.
    fn through(&self, pages: usize) -> Result<usize> {
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
        let failed_syncs = self.file.writeback.failed_syncs();
        let (moved, error) = self.transfer(&segments);
        let cached = !fresh.contains(&FrameIndex::NONE);
        let leaves = &mut Leaves::new(self.file);
        self.install(leaves, fresh, moved, self.size_after(moved), false);
        if !self.durable && moved > 0 {
            let last = self.file.page_of(self.offset + moved - 1);
            writeback::passed(self.file, self.first, last, cached, failed_syncs);
        }
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
            self.copy_new(page, frame)?;
        }
        Ok(())
    }

    /// The size after a write through of which `moved` bytes were acknowledged. The back end may
    /// have kept more of one that failed, and the file is as long as that says: for readers the end
    /// moves at the moment at which they see what was kept before it.
    fn size_after(&self, moved: u64) -> u64 {
        let acknowledged = self.size.max(if moved > 0 { self.offset + moved } else { 0 });
        let end = self.offset + self.len;
        if moved == self.len || end <= self.size {
            return acknowledged;
        }
        // W5: the guard reaches from the old end to that of the write. Where the back end can't
        // say, or others made it longer, `write_locked` sees to it.
        self.file.backing.len().map_or(acknowledged, |kept| acknowledged.max(kept.min(end)))
    }

    /// The size after a write past the cache, in mode Back, of which `moved` bytes were acknowledged
    /// and those before `end` count. The back end may have kept more, and its file is never longer
    /// than ours: that is cut off, or else counts.
    fn size_trimmed(&self, moved: u64, end: u64) -> u64 {
        let size = if end > self.offset { self.size.max(end) } else { self.size };
        let end = self.offset + self.len;
        // Within the file, the guard does not keep others from moving its end; and nothing was kept
        // beyond.
        if moved == self.len || end <= self.size {
            return size;
        }
        match self.file.backing.len() {
            // Not left there: the next write beyond it would have what was kept come back.
            Ok(kept) if kept > size && self.file.backing.set_len(size).is_err() => kept.min(end),
            _ => size,
        }
    }

    /// Puts the pages that were taken in place together, and drops the others.
    fn install(
        &self,
        leaves: &mut Leaves<'_>,
        fresh: &[FrameIndex],
        moved: u64,
        size: u64,
        dirty: bool,
    ) {
        if let [frame] = fresh
            && size == self.size
            && moved == self.len
            && *frame != FrameIndex::NONE
            && self.replace(leaves, *frame, dirty)
        {
            if dirty {
                self.vacate(leaves, 1);
            }
            return;
        }
        let core = self.file.core();
        let cache = self.file.cache();
        let class = Class::page(core.page_shift);
        let shown = Shown { referenced: true, marker: false, dirty };
        let mut old = [FrameIndex::NONE; CHUNK_PAGES];
        let mut was_dirty = dirty;
        for ((page, &frame), old) in (self.first..).zip(fresh).zip(&mut old) {
            let Ok(held) = leaves.hold(page, frame != FrameIndex::NONE) else { continue };
            let word = held.word(page);
            if frame == FrameIndex::NONE && word.load().state() == State::Empty {
                continue;
            }
            // A write that is dirty has done so before.
            if !dirty {
                held.occupy();
            }
            let was = word.hide(&core.epoch);
            if was.is_ready() {
                held.vacated();
                *old = was.frame();
            }
        }
        // After the hiding RMWs and before anything that tells of the write: a reader that learns
        // of it finds no old page (and none is shown half: the models m1, m3 of this protocol).
        fence(SeqCst);
        if dirty {
            let pages = (self.first..).zip(fresh.iter().copied());
            self.file.commit(pages, (size != self.size).then_some(size));
        }
        if size != self.size {
            self.file.set_size(size);
        }
        for ((page, &frame), old) in (self.first..).zip(fresh).zip(&mut old) {
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
                if dirty {
                    self.supersede(word.load());
                }
                let change = word.show(frame, shown);
                was_dirty &= change.was.is_dirty();
                cache.ledger.note(change, core.page_bytes());
                word.wake(change.sleepers());
                if *old == FrameIndex::NONE {
                    let arrival = Arrival { frame, core, page, prefetched: false };
                    cache.arrived(std::iter::once(arrival));
                }
            } else {
                let change = word.drop_hidden();
                cache.ledger.note(change, core.page_bytes());
                word.wake(change.sleepers());
                held.vacated();
                if *old != FrameIndex::NONE {
                    cache.discarded(std::mem::replace(old, FrameIndex::NONE), class);
                }
                if frame != FrameIndex::NONE {
                    cache.frames.free(frame, class);
                }
            }
        }
        // Those that are left have a fresh frame each, which is in place by now.
        cache.replaced(&mut old[..fresh.len()], fresh, class);
        // Pages that were DIRTY before are in the set, or will be put back (B2).
        if dirty && !was_dirty {
            writeback::dirtied(self.file, self.first, self.last);
        }
    }

    /// A newer content of the page was committed and is about to be shown: from then on the old one
    /// must not survive alone (K4 of survival).
    fn supersede(&self, seen: Word) {
        if seen.is_dirty() || seen.is_under_writeback() {
            self.file.forget_frame(seen.frame());
        }
    }

    /// The same of a page that is READY: it may be written back and evicted meanwhile, and the pin
    /// keeps its frame from being used for another page, whose record this would be (K7).
    fn supersede_ready(&self, word: &PageWord) {
        let seen = word.load();
        let owes = seen.is_dirty() || seen.is_under_writeback();
        if !seen.is_ready() || !owes || !self.file.is_kept() {
            return;
        }
        self.file.cache().frames.meta(seen.frame()).pins.pin();
        // As in `writeback::claim`.
        fence(SeqCst);
        let now = word.load();
        if now.is_ready() && now.frame() == seen.frame() {
            self.file.forget_frame(seen.frame());
        }
        writeback::unpin(self.file, seen.frame());
    }

    /// Puts one page in place where it is READY, in one step.
    fn replace(&self, leaves: &mut Leaves<'_>, frame: FrameIndex, dirty: bool) -> bool {
        let core = self.file.core();
        let Ok(held) = leaves.hold(self.first, false) else { return false };
        let shown = Shown { referenced: true, marker: false, dirty };
        let word = held.word(self.first);
        if !word.load().is_ready() {
            return false;
        }
        if dirty {
            self.file.commit(std::iter::once((self.first, frame)), None);
            self.supersede_ready(word);
        }
        match word.try_replace(frame, shown, &core.epoch) {
            Ok(change) => {
                // After the RMW and before this returns: else two writers that then read each
                // other's page could both see the old one (model m11).
                fence(SeqCst);
                let cache = self.file.cache();
                cache.ledger.note(change, core.page_bytes());
                let class = Class::page(core.page_shift);
                cache.replaced(&mut [change.was.frame()], &[frame], class);
                if dirty && !change.was.is_dirty() {
                    writeback::dirtied(self.file, self.first, self.first);
                }
                true
            }
            Err(_) => {
                // Evicted meanwhile, and so clean: the frame is committed anew with its page hidden.
                if dirty {
                    self.file.forget_frame(frame);
                }
                false
            }
        }
    }

    /// A write past the cache: of more pages than are put in place together, or beside pages that
    /// wait to be written back. None of its pages stays cached.
    fn around(&self) -> Result<usize> {
        let file = self.file;
        // Nobody dirties the pages again: the guard is ours.
        if file.is_kept() {
            // Else a keeper could put an old page in the middle of what is written here.
            writeback::write_back(file, self.first, self.last, Op::Write)?;
        }
        for page in [self.first, self.last] {
            if self.keeps_rest(page) {
                writeback::write_back(file, page, page, Op::Write)?;
            }
        }
        hide_pages(file, self.first, self.last);
        writeback::await_ends(file, self.first, self.last);
        let segments: Vec<Segment<'_>> = pieces(self.src, 0, self.len).collect();
        let failed_syncs = file.writeback.failed_syncs();
        let (moved, error) = self.transfer(&segments);
        file.cache().counters.bytes_passed.add(moved);
        let end = self.acknowledged(moved);
        let size = match file.write_mode() {
            WriteMode::Through => self.size_after(moved),
            WriteMode::Back => self.size_trimmed(moved, end),
        };
        if size > self.size {
            file.set_size(size);
        }
        if !self.durable && moved > 0 {
            writeback::passed(file, self.first, self.last, false, failed_syncs);
        }
        self.drop_or_show(end);
        self.result(end - self.offset, error)
    }

    /// Up to where a write past the cache counts: a page that is not durable yet is overwritten
    /// whole, or stays as it was.
    fn acknowledged(&self, moved: u64) -> u64 {
        let end = self.offset + moved;
        let page = self.file.page_of(end);
        let word = self.file.core().hold(self.file.cache(), page, false);
        match word.map(|held| held.word(page).load()) {
            Ok(seen) if moved < self.len && (seen.is_dirty() || seen.is_unstable()) => {
                self.file.start_of(page).max(self.offset)
            }
            _ => end,
        }
    }

    /// Makes the hidden pages EMPTY that the back end has new bytes of up to `end`, and those that
    /// are clean; shows others again. One that is UNSTABLE and was not overwritten whole is DIRTY
    /// then: a device that failed may have lost what no sync has covered, and this is the only copy.
    fn drop_or_show(&self, end: u64) {
        let file = self.file;
        let class = Class::page(file.core().page_shift);
        let shown = Shown { referenced: true, ..Shown::default() };
        file.core().for_each_page(file.cache(), self.first, self.last, &mut |held, page, word| {
            let seen = word.load();
            if seen.state() != State::Hidden {
                return;
            }
            let written = self.part(page).1 <= end;
            if !written && (seen.is_dirty() || seen.is_unstable()) {
                if !seen.is_dirty() {
                    file.commit(std::iter::once((page, seen.frame())), None);
                }
                let change = word.show(seen.frame(), Shown { dirty: true, ..shown });
                file.cache().ledger.note(change, file.core().page_bytes());
                word.wake(change.sleepers());
                writeback::dirtied(file, page, page);
                return;
            }
            drop_hidden(file, held, word);
            if seen.frame() != FrameIndex::NONE {
                file.cache().discarded(seen.frame(), class);
            }
        });
    }

    fn transfer(&self, segments: &[Segment<'_>]) -> (u64, Option<std::io::Error>) {
        let mut batch = [Transfer::new(Direction::Write, self.offset, segments)];
        batch[0].durable = self.durable;
        request::run(&*self.file.backing, &mut batch);
        let [transfer] = batch;
        if let Some(error) = &transfer.error
            && self.durable
            && error.raw_os_error() != Some(libc::EFAULT)
        {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            writeback::durable_failed(self.file, self.offset, self.len, errno);
        }
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
            drop_hidden(file, held, word);
            if seen.frame() != FrameIndex::NONE {
                file.cache().discarded(seen.frame(), class);
            }
        }
    });
}

/// Makes a HIDDEN page EMPTY. Caller: who hid it, and who frees its frame.
pub(crate) fn drop_hidden(file: &CachedFile, held: &Held<'_>, word: &PageWord) {
    let change = word.drop_hidden();
    file.cache().ledger.note(change, file.core().page_bytes());
    word.wake(change.sleepers());
    held.vacated();
}
