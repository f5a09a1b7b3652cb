//! The miss path: fills missing pages, and copies them to the reader.
//!
//! Everything here runs under a guard that covers the pages (page.W3), so no page is HIDDEN and the
//! size does not change as far as it concerns them.
//!
//! ```text
//!   claim: each page that is EMPTY gets a frame and becomes FILLING     (single flight, page.W9)
//!   run:   contiguous claimed pages are one vectored transfer, all submitted, then reaped
//!   each:  zero what is beyond the size, hand the bytes to the reader, READY, wake
//!   rest:  pages that others fill, or that were READY or failed with their run, one by one
//! ```
//!
//! A read within one page begins with that page: `fill_one` has the same steps without lists, as most misses of
//! programs that read at random are of one page.
//!
//! - **F1** No thread waits while it has a page FILLING and not submitted: claims are followed by their transfers
//!   before any wait. A slot for each run (`io::read_limit`) is taken before its pages are claimed. Where there are fewer
//!   slots than runs, the rest is claimed when the first runs have ended. Slots are given back before bytes are
//!   copied to the reader, as a fault on the reader's memory may block.
//! - **F2** The filler takes the bytes before the page becomes READY and so evictable: a cache of
//!   very few pages makes progress.
//! - **F3** A run that fails leaves its pages EMPTY, and each is tried again alone; only the error
//!   of its own transfer is a page's error.
//! - **F4** Where no frame is free, the bytes bypass the cache, into the reader's memory. No thread waits for
//!   frames, so frames cause no deadlock.

use std::iter;

use smallvec::SmallVec;

use crate::cache::policy::fifo::{PageOrigin, ReadyPage};
use crate::cache::table::HeldLeaf;
use crate::cache::table::page::{PageState, PublishFlags};
use crate::cache::table::step;
use crate::copy::Source;
use crate::error::{Error, Op, Result};
use crate::inode::CachedFile;
use crate::inode::leaves::Leaves;
use crate::io::read_limit::Slots;
use crate::io::segment::{Segment, SegmentIter};
use crate::io::transfer::{Segments, Transfer};
use crate::read::hit::copy_out;
use crate::read::plan::{ReadExtent, ReadProgress, ReadStop};
use crate::read::run::{self, Claims, FilledPage, Next, Run};
use crate::units::PageIndex;
use crate::waits::WaitFor;

/// Pages that are claimed and read in one go: of small pages, 1 MiB. Chosen, not measured.
const CHUNK_PAGES: usize = 256;

/// Number of attempts on a page that other threads fill, and that is evicted before it was copied. After that it is
/// read by a bypass, so misses of other pages can't delay a read without bound. Chosen, not measured.
const ROUNDS_MAX: u32 = 8;

/// Reads the bytes of `extent` into `dst`.
pub(crate) fn read(file: &CachedFile, dst: SegmentIter<'_>, extent: ReadExtent) -> ReadProgress {
    let ReadExtent { offset, end, size } = extent;
    let (first, last) = extent.pages(file);
    let (reached, touched) = (offset, offset);
    let mut reader = Reader { file, dst, offset, end, size, reached, touched, faulted: false };
    let step = file.chunk_pages(CHUNK_PAGES) as u64;
    let mut page = first;
    let mut stopped = None;
    while page <= last && stopped.is_none() {
        let pages = (last - page + 1).min(step) as usize;
        stopped = reader.chunk(page, pages).err();
        page += pages as u64;
    }
    let touched = reader.touched - offset;
    if reader.faulted {
        let fault = Error::Fault { op: Op::Read, offset, len: end - offset };
        return ReadProgress { moved: 0, touched, stopped: Some(ReadStop::Failed(fault)) };
    }
    ReadProgress { moved: reader.reached - offset, touched, stopped }
}

/// A read under way.
struct Reader<'a> {
    file: &'a CachedFile,
    dst: SegmentIter<'a>,
    offset: u64,
    end: u64,
    size: u64,
    /// All bytes before it were copied.
    reached: u64,
    /// No byte from there on was written to.
    touched: u64,
    faulted: bool,
}

type FillResult = std::result::Result<(), ReadStop>;

impl Reader<'_> {
    fn chunk(&mut self, first: PageIndex, pages: usize) -> FillResult {
        if pages == 1 {
            return self.one(first);
        }
        let mut done = [false; CHUNK_PAGES];
        let file = self.file;
        let mut tried = 0;
        while tried < pages {
            let page = first + tried as u64;
            let part = fill_missing(file, page, pages - tried, self.size, &mut |filled| {
                done[(filled.page - first) as usize] = true;
                self.take(filled);
            });
            tried += part.pages;
            // Another process cut the file: the single pages below show how much of it is left.
            if part.is_cut {
                break;
            }
        }
        for (page, done) in first.onwards().zip(&done[..pages]) {
            if *done {
                self.reached = self.file.start_of(page + 1).min(self.end);
            } else {
                self.one(page)?;
            }
        }
        Ok(())
    }

    /// Reads one page: fills it, or waits for the thread that fills it.
    fn one(&mut self, page: PageIndex) -> FillResult {
        let file = self.file;
        let mut leaves = Leaves::new(file);
        for _ in 0..ROUNDS_MAX {
            let Ok(held) = leaves.hold(page, true) else {
                return self.around(page);
            };
            let word = held.word(page);
            let look = step::HeldPage::begin(word, &file.core().epoch);
            let seen = look.seen;
            let read = match seen.state() {
                PageState::Ready => {
                    let filled = FilledPage { page, frame: seen.frame() };
                    let copied = look.copy_if_unchanged(|| self.take(&filled)).is_some();
                    if copied {
                        word.mark_referenced(seen);
                    }
                    copied
                }
                PageState::Filling | PageState::Hidden => {
                    if let Some(armed) = word.set_waiters(seen) {
                        word.sleep(armed);
                    }
                    false
                }
                PageState::Empty => {
                    let size = self.size;
                    match fill_one(file, held, page, size, Op::Read, |it| self.take(it)) {
                        Ok(Alone::Filled) => true,
                        Ok(Alone::Others) => false,
                        // The page is bad, or missing in part. The caller may want another part of it, and keeps the
                        // bytes before it.
                        Ok(Alone::NoFrame | Alone::Shrunk) | Err(_) => return self.around(page),
                    }
                }
            };
            if read {
                self.reached = file.start_of(page + 1).min(self.end);
                return Ok(());
            }
        }
        self.around(page)
    }

    /// Copies the caller's part of a page.
    fn take(&mut self, filled: &FilledPage) {
        let start = self.file.start_of(filled.page);
        let page_end = start + self.file.core().page_bytes() as u64;
        let (from, to) = (start.max(self.offset), page_end.min(self.end));
        self.touched = self.touched.max(to);
        let frame = self.file.cache().frames.bytes(filled.frame);
        // SAFETY: the part lies within the frame. The frame may be reused during the copy where the caller checks the
        // word afterwards. `dst` is our caller's promise.
        let copied = unsafe {
            let part = self.dst.slice(from - self.offset, to - from);
            copy_out(part, frame.add((from - start) as usize), Source::Near)
        };
        self.faulted |= copied.is_err();
    }

    /// F4: reads the caller's part of a page from the back end, as far as there are bytes.
    fn around(&mut self, page: PageIndex) -> FillResult {
        let file = self.file;
        file.cache().counters.local().read_uncached();
        let start = file.start_of(page);
        let page_bytes = file.core().page_bytes();
        let from = start.max(self.offset);
        let to = (start + page_bytes as u64).min(self.end);
        let alignment = file.backing.alignment(false).offset_bytes;
        let mut slots = Slots::new(&file.shared.flight);
        slots.add();
        // A slot must not be held for the caller's memory (read_limit.L2), and direct I/O needs aligned memory: hence a
        // bounce buffer, allocated with room to align it.
        let (first, len) = match alignment {
            1 => (from, (to - from) as usize),
            _ => (start, page_bytes),
        };
        let mut bounce = vec![0u8; len + 4096];
        let skip = bounce.as_ptr().align_offset(4096);
        let aligned = bounce[skip..skip + len].as_mut_ptr();
        // SAFETY: a part of `bounce`, which outlives the transfer.
        let segment = unsafe { [Segment::new(aligned, len)] };
        let transfer = Transfer::of_pages(first, &segment, self.size);
        let Transfer { moved, error: failure, .. } = file.carry_out_one(transfer);
        slots.give_back();
        let skipped = from - first;
        let moved = moved.saturating_sub(skipped).min(to - from);
        let part = self.dst.slice(from - self.offset, moved);
        // SAFETY: within `bounce`; `dst` is our caller's promise.
        let copied = unsafe { copy_out(part, aligned.add(skipped as usize), Source::Near) };
        self.faulted |= copied.is_err();
        file.cache().counters.local().bypassed(moved);
        self.reached = from + moved;
        self.touched = self.touched.max(self.reached);
        match failure {
            _ if moved == to - from => Ok(()),
            None => Err(ReadStop::Shrunk),
            Some(error) => Err(ReadStop::Failed(Error::io(Op::Read, first, len as u64, error))),
        }
    }
}

/// The result of filling contiguous pages.
struct Tried {
    /// The number of pages looked at.
    pages: usize,
    /// The file ended within the claimed pages, so bytes of them are missing.
    is_cut: bool,
}

/// Fills those of `pages` pages from `first` that are EMPTY, each run as one transfer, and hands each
/// page to `take` before it becomes READY. Pages of runs that failed are EMPTY again. Looks at least at
/// one page, and at as many as there are slots and frames for.
fn fill_missing(
    file: &CachedFile,
    first: PageIndex,
    pages: usize,
    size: u64,
    take: &mut dyn FnMut(&FilledPage),
) -> Tried {
    let mut slots = Slots::new(&file.shared.flight);
    let mut claims = Claims::new(file, first..first + pages as u64, size);
    let mut runs: SmallVec<[Run; 1]> = SmallVec::new();
    let end = loop {
        // Waits for the first only, when nothing is claimed yet (read_limit.L1, read_limit.L5).
        match claims.next_run(&mut || slots.count() > runs.len() || slots.add()) {
            Next::Run(run) => runs.push(run),
            end => break end,
        }
    };
    let mut tried = Tried { pages: (claims.next() - first) as usize, is_cut: false };
    if matches!(end, Next::NoFrame) {
        file.shared.flusher.request_reclaim(file.cache().writeback_counts.unevictable());
        // This page bypasses the cache.
        tried.pages += 1;
    }
    let mut leaves = claims.into_leaves();
    if runs.is_empty() {
        return tried;
    }
    let claimed: usize = runs.iter().map(|run| run.frames.len()).sum();
    file.cache().counters.local().missed(claimed as u64);
    let memory: SmallVec<[Segments; 1]> = runs.iter().map(|run| run.memory(file)).collect();
    let mut transfers: SmallVec<[Transfer<'_>; 1]> = SmallVec::new();
    for (run, memory) in runs.iter().zip(&memory) {
        transfers.push(Transfer::of_pages(file.start_of(run.first), &**memory, size));
    }
    file.carry_out(&mut transfers);
    slots.give_back();
    for (run, transfer) in runs.iter().zip(transfers) {
        let is_whole = run.finish(file, &mut leaves, transfer.moved, take);
        tried.is_cut |= !is_whole && transfer.error.is_none();
    }
    tried
}

/// The outcome of an attempt to fill a single page.
pub(crate) enum Alone {
    Filled,
    Shrunk,
    /// Another thread fills it or has filled it.
    Others,
    NoFrame,
}

/// Fills one page, whose leaf is `held`, if it is EMPTY, and hands it to `take` before it becomes READY.
pub(crate) fn fill_one(
    file: &CachedFile,
    held: &HeldLeaf<'_>,
    page: PageIndex,
    size: u64,
    op: Op,
    take: impl FnOnce(&FilledPage),
) -> Result<Alone> {
    let (cache, page_bytes) = (file.cache(), file.core().page_bytes());
    let word = held.word(page);
    if word.load().state() != PageState::Empty {
        return Ok(Alone::Others);
    }
    // read_limit.L1
    let mut slots = Slots::new(&file.shared.flight);
    slots.add();
    let Some(frame) = cache.take_page_frame(held, page, true) else {
        file.shared.flusher.request_reclaim(cache.writeback_counts.unevictable());
        return Ok(Alone::NoFrame);
    };
    if !run::try_claim(held, word, frame) {
        file.free_frame(frame);
        return Ok(Alone::Others);
    }
    // Before it is published (generations.G5).
    file.writeback.generations.read_back(page, page);
    cache.counters.local().missed(1);
    // SAFETY: the frame of a page that this thread made FILLING.
    let segment = unsafe { [Segment::new(cache.frames.bytes(frame), page_bytes)] };
    let start = file.start_of(page);
    let transfer = Transfer::of_pages(start, &segment, size);
    let Transfer { moved, error, .. } = file.carry_out_one(transfer);
    slots.give_back();
    let (filled, shown) =
        (FilledPage { page, frame }, PublishFlags { referenced: true, ..PublishFlags::default() });
    if run::publish_page(file, held, &filled, size, moved, shown, take) {
        cache.counters.local().filled(1);
        let core = file.core();
        cache.insert_pages(iter::once(ReadyPage { frame, core, page, origin: PageOrigin::Missed }));
        return Ok(Alone::Filled);
    }
    error.map_or(Ok(Alone::Shrunk), |error| Err(Error::io(op, start, page_bytes as u64, error)))
}

/// Waits while another thread fills `page`.
pub(crate) fn wait(file: &CachedFile, page: PageIndex) {
    let mut leaves = Leaves::new(file);
    while let Ok(held) = leaves.hold(page, false) {
        let word = held.word(page);
        let seen = word.load();
        if !matches!(seen.state(), PageState::Filling | PageState::Hidden) {
            return;
        }
        if let Some(armed) = word.set_waiters(seen) {
            let (offset, len) = (file.start_of(page), file.core().page_bytes() as u64);
            let _waits = file.waits(WaitFor::Page, offset, len);
            word.sleep(armed);
        }
    }
}
