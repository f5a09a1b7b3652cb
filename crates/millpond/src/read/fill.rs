//! The miss path: bringing pages into frames, and reading them on the way.
//!
//! Everything here runs under a guard that covers the pages (W3), so no page is HIDDEN and the
//! size does not change as far as it concerns them.
//!
//! ```text
//!   claim: each page that is EMPTY gets a frame and becomes FILLING     (single flight, W9)
//!   run:   contiguous claimed pages are one vectored transfer, all submitted, then reaped
//!   each:  zero what is beyond the size, hand the bytes to the reader, READY, wake
//!   rest:  pages that others fill, or that were READY or failed with their run, one by one
//! ```
//!
//! - **F1** Nobody waits with a page FILLING and not submitted: claims are followed by their
//!   transfers before anything is waited for. A slot for each run (`io::flight`) is taken before its
//!   pages are claimed; where there are fewer than runs, the rest is claimed when those have ended.
//!   Slots are given back before bytes are handed to the reader, whose memory may have to be waited for.
//! - **F2** The filler takes the bytes before the page becomes READY and so evictable: a cache of
//!   very few pages makes progress.
//! - **F3** A run that fails leaves its pages EMPTY, and each is tried again alone; only the error
//!   of its own transfer is a page's error.
//! - **F4** Where no frame is to be had, the bytes go around the cache, into the reader's memory.
//!   Nobody waits for frames, so nobody deadlocks over them.

use crate::cache::copy::{self, Source};
use crate::cache::evict::Arrival;
use crate::cache::frame::{Class, FrameIndex};
use crate::cache::page::{PageWord, Shown, State};
use crate::cache::table::{Held, PageIndex, Unheld};
use crate::error::{Error, Op, Result};
use crate::inode::CachedFile;
use crate::io::flight::Slots;
use crate::io::request::{self, Direction, Transfer};
use crate::io::segment::{Segment, SegmentIter};
use crate::read::copy_out;
use crate::sync::fence;
use crate::writeback;
use std::io;
use std::sync::atomic::Ordering::Acquire;

/// Pages that are claimed and read in one go.
const CHUNK_PAGES: usize = 256;

/// A run of at least so many pages counts as frames in a row.
const RUN_NOTED: usize = 16;

/// The file turned out shorter than it should be: someone else cut it.
pub(crate) struct Shrunk;

/// Why a read ended before its end.
pub(crate) enum Stopped {
    /// [`Shrunk`].
    Shrunk,
    Failed(Error),
}

/// How often a page that others fill, and that is evicted before it was copied, is looked at, before it
/// is read around the cache: other pages' misses can't keep a read from its end.
const ROUNDS_MAX: u32 = 8;

/// What became of a page in `claim`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// Ours to fill, with this frame.
    Own(FrameIndex),
    /// READY, or being filled by others, or not tried yet.
    Later,
    /// There is no frame for it.
    Around,
}

/// A page whose bytes are complete, before anyone else can see it.
pub(crate) struct Filled {
    pub(crate) page: PageIndex,
    pub(crate) frame: FrameIndex,
}

/// The leaf that was used last.
pub(crate) struct Leaves<'c> {
    file: &'c CachedFile,
    held: Option<Held<'c>>,
}

impl<'c> Leaves<'c> {
    pub(crate) fn new(file: &'c CachedFile) -> Leaves<'c> {
        Leaves { file, held: None }
    }

    pub(crate) fn hold(
        &mut self,
        page: PageIndex,
        create: bool,
    ) -> std::result::Result<&Held<'c>, Unheld> {
        if !self.held.as_ref().is_some_and(|held| held.covers(page)) {
            self.held = None;
            self.held = Some(self.file.core().hold(self.file.cache(), page, create)?);
        }
        Ok(self.held.as_ref().expect("just set"))
    }
}

/// How far a read came.
pub(crate) struct Came {
    /// Bytes that were read, from the first on.
    pub(crate) moved: u64,
    /// Up to where its memory may have been written to.
    pub(crate) touched: u64,
    /// Why not all were read.
    pub(crate) stopped: Option<Stopped>,
}

/// Reads bytes `offset..end`, which lie below `size`, into `dst`.
pub(crate) fn read(
    file: &CachedFile,
    dst: SegmentIter<'_>,
    offset: u64,
    end: u64,
    size: u64,
) -> Came {
    let (first, last) = (file.page_of(offset), file.page_of(end - 1));
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
        return Came { moved: 0, touched, stopped: Some(Stopped::Failed(fault)) };
    }
    Came { moved: reader.reached - offset, touched, stopped }
}

/// A read under way.
struct Reader<'a> {
    file: &'a CachedFile,
    dst: SegmentIter<'a>,
    offset: u64,
    end: u64,
    size: u64,
    /// All before it was taken.
    reached: u64,
    /// Nothing from there on was written to.
    touched: u64,
    faulted: bool,
}

type Outcome = std::result::Result<(), Stopped>;

impl Reader<'_> {
    fn chunk(&mut self, first: PageIndex, pages: usize) -> Outcome {
        let mut done = [false; CHUNK_PAGES];
        let file = self.file;
        let mut tried = 0;
        while tried < pages {
            let page = first + tried as u64;
            let part = fill_missing(file, page, pages - tried, self.size, &mut |filled| {
                done[(filled.page - first) as usize] = true;
                self.take(&filled);
            });
            match part {
                Ok(part) => tried += part,
                // Which page it is, and what there is of it, is found out below.
                Err(Shrunk) => break,
            }
        }
        for (page, done) in (first..).zip(&done[..pages]) {
            if !done {
                self.one(page)?;
            }
            self.reached = self.file.start_of(page + 1).min(self.end);
        }
        Ok(())
    }

    /// Reads one page, whoever fills it.
    fn one(&mut self, page: PageIndex) -> Outcome {
        let file = self.file;
        let mut leaves = Leaves::new(file);
        for _ in 0..ROUNDS_MAX {
            let Ok(held) = leaves.hold(page, true) else {
                return self.around(page);
            };
            let word = held.word(page);
            let seen = word.load();
            match seen.state() {
                State::Ready => {
                    self.take(&Filled { page, frame: seen.frame() });
                    // Pairs with the release of who took the frame away meanwhile.
                    fence(Acquire);
                    if word.is_unchanged(seen) {
                        word.mark_referenced(seen);
                        return Ok(());
                    }
                }
                State::Filling | State::Hidden => {
                    if let Some(armed) = word.arm(seen) {
                        word.sleep(armed);
                    }
                }
                State::Empty => {
                    let filled =
                        fill_one(file, page, self.size, Op::Read, &mut |filled| self.take(&filled));
                    match filled {
                        Ok(Alone::Filled) => return Ok(()),
                        Ok(Alone::Others) => {}
                        // Of a page that is bad or missing in part, the caller may want another part,
                        // and has what comes before.
                        Ok(Alone::NoFrame | Alone::Shrunk) | Err(_) => return self.around(page),
                    }
                }
            }
        }
        self.around(page)
    }

    /// Copies the part of a page that the caller wants.
    fn take(&mut self, filled: &Filled) {
        let start = self.file.start_of(filled.page);
        let page_end = start + self.file.core().page_bytes() as u64;
        let (from, to) = (start.max(self.offset), page_end.min(self.end));
        self.touched = self.touched.max(to);
        let frame = self.file.cache().frames.bytes(filled.frame);
        // SAFETY: the part lies within the frame, which may be reused meanwhile where the caller
        // checks the word afterwards; `dst` is our caller's promise.
        let copied = unsafe {
            let part = self.dst.slice(from - self.offset, to - from);
            copy_out(part, frame.add((from - start) as usize), Source::Near)
        };
        self.faulted |= copied.is_err();
    }

    /// F4: reads the part of a page that the caller wants from the back end, or what there is of it.
    fn around(&mut self, page: PageIndex) -> Outcome {
        let file = self.file;
        file.cache().counters.uncached_reads.add(1);
        let start = file.start_of(page);
        let page_bytes = file.core().page_bytes();
        let from = start.max(self.offset);
        let to = (start + page_bytes as u64).min(self.end);
        let alignment = file.backing.alignment(false).offset_bytes;
        let mut slots = Slots::new(&file.shared.flight);
        slots.add();
        // A slot is not for the caller's memory (L2 of `flight`), and direct I/O wants aligned memory: a
        // bounce buffer, aligned by taking more.
        let (first, len) = match alignment {
            1 => (from, (to - from) as usize),
            _ => (start, page_bytes),
        };
        let mut bounce = vec![0u8; len + 4096];
        let skip = bounce.as_ptr().align_offset(4096);
        let aligned = bounce[skip..skip + len].as_mut_ptr();
        // SAFETY: a part of `bounce`, which outlives the transfer.
        let segment = unsafe { [Segment::new(aligned, len)] };
        let (moved, failure) = read_alone(file, first, (&segment).into());
        slots.give_back();
        let skipped = from - first;
        let moved = moved.saturating_sub(skipped).min(to - from);
        let part = self.dst.slice(from - self.offset, moved);
        // SAFETY: within `bounce`; `dst` is our caller's promise.
        let copied = unsafe { copy_out(part, aligned.add(skipped as usize), Source::Near) };
        self.faulted |= copied.is_err();
        file.cache().counters.bytes_passed.add(moved);
        self.reached = from + moved;
        self.touched = self.touched.max(self.reached);
        match failure {
            _ if moved == to - from => Ok(()),
            None => Err(Stopped::Shrunk),
            Some(error) => Err(Stopped::Failed(Error::io(Op::Read, first, len as u64, error))),
        }
    }
}

/// Reads with a slot that the caller has: the bytes moved, and why not all.
fn read_alone(
    file: &CachedFile,
    offset: u64,
    segments: SegmentIter<'_>,
) -> (u64, Option<io::Error>) {
    let mut batch = [Transfer::new(Direction::Read, offset, segments)];
    request::run(&*file.backing, &mut batch);
    let [transfer] = batch;
    (transfer.moved, transfer.error)
}

/// Fills those of `pages` pages from `first` that are EMPTY and for which there are frames, each
/// run as one transfer, and hands each to `take` before it becomes READY. Pages of runs that
/// failed are EMPTY again. Tries at least one page, and as many as there are slots for; how many.
fn fill_missing(
    file: &CachedFile,
    first: PageIndex,
    pages: usize,
    size: u64,
    take: &mut dyn FnMut(Filled),
) -> std::result::Result<usize, Shrunk> {
    let mut claims = [Claim::Later; CHUNK_PAGES];
    let mut slots = Slots::new(&file.shared.flight);
    let (tried, claimed) = claim(file, first, &mut claims[..pages], &mut slots);
    if claimed == 0 {
        return Ok(tried);
    }
    let claims = &claims[..tried];
    file.cache().counters.misses.add(claimed);
    let page_bytes = file.core().page_bytes();
    // SAFETY: the frames are ours until the pages are READY or EMPTY again, after the transfers.
    let segments: Vec<Segment<'_>> = frames_of(claims)
        .map(|frame| unsafe { Segment::new(file.cache().frames.bytes(frame), page_bytes) })
        .collect();
    let mut transfers: Vec<Transfer<'_>> = Vec::new();
    let mut used = 0;
    for (start, len) in runs(claims) {
        let page = first + start as u64;
        writeback::read_back(file, page, page + len as u64 - 1);
        let offset = file.start_of(page);
        transfers.push(Transfer::new(Direction::Read, offset, &segments[used..used + len]));
        used += len;
    }
    request::run(&*file.backing, &mut transfers);
    slots.give_back();
    let mut outcome = Ok(tried);
    for ((start, len), transfer) in runs(claims).zip(&transfers) {
        let frames = frames_of(&claims[start..start + len]);
        let run = Run { first: first + start as u64, size, prefetched: false, marker: false };
        let ended = run.finish(file, frames, transfer.moved, take);
        if ended == RunEnd::Short && transfer.error.is_none() {
            outcome = Err(Shrunk);
        }
    }
    outcome
}

/// Claims EMPTY pages, with a slot for each run, until there is none for the next; how many pages were
/// tried, and how many are claimed.
fn claim(
    file: &CachedFile,
    first: PageIndex,
    claims: &mut [Claim],
    slots: &mut Slots<'_>,
) -> (usize, u64) {
    let class = Class::page(file.core().page_shift);
    let mut leaves = Leaves::new(file);
    let (mut claimed, mut runs) = (0, 0);
    let mut in_run = false;
    let tried = claims.len();
    for (at, claim) in claims.iter_mut().enumerate() {
        let page = first + at as u64;
        let continues = std::mem::replace(&mut in_run, false);
        let Ok(held) = leaves.hold(page, true) else {
            *claim = Claim::Around;
            continue;
        };
        let word = held.word(page);
        if word.load().state() != State::Empty {
            continue;
        }
        // Waits for the first only, when nothing is claimed yet (L1, L5 of `flight`).
        if !continues && slots.count() == runs && !slots.add() {
            return (at, claimed);
        }
        *claim = match file.cache().take_page_frame(held, page, tried == 1) {
            Some(frame) if try_claim(held, word, frame) => {
                claimed += 1;
                runs += usize::from(!continues);
                in_run = true;
                Claim::Own(frame)
            }
            Some(frame) => {
                file.cache().frames.free(frame, class);
                Claim::Later
            }
            None => {
                file.shared.flusher.starve(file.cache().ledger.kept());
                Claim::Around
            }
        };
    }
    (tried, claimed)
}

/// Makes a page FILLING, if it is EMPTY; whether it was. Before it is shown, [`writeback::read_back`] is
/// to be told.
pub(crate) fn try_claim(held: &Held<'_>, word: &PageWord, frame: FrameIndex) -> bool {
    held.occupy();
    let claimed = word.try_fill(frame).is_ok();
    if !claimed {
        held.vacated();
    }
    claimed
}

fn frames_of(claims: &[Claim]) -> impl Iterator<Item = FrameIndex> + Clone {
    claims.iter().filter_map(|claim| match claim {
        Claim::Own(frame) => Some(*frame),
        _ => None,
    })
}

/// Start and length of each run of contiguous claimed pages.
fn runs(claims: &[Claim]) -> impl Iterator<Item = (usize, usize)> {
    let own = |at: usize| matches!(claims[at], Claim::Own(_));
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < claims.len() && !own(at) {
            at += 1;
        }
        let start = at;
        while at < claims.len() && own(at) {
            at += 1;
        }
        (at > start).then_some((start, at - start))
    })
}

#[derive(PartialEq, Eq)]
pub(crate) enum RunEnd {
    /// All pages are READY.
    Whole,
    /// Bytes below the size are missing; the pages concerned are EMPTY again.
    Short,
}

/// Contiguous pages that were filled by one transfer.
pub(crate) struct Run {
    pub(crate) first: PageIndex,
    pub(crate) size: u64,
    pub(crate) prefetched: bool,
    /// Mark the first page for the reader who continues the read-ahead.
    pub(crate) marker: bool,
}

impl Run {
    /// Ends the fills of the run's pages after `moved` bytes arrived.
    pub(crate) fn finish(
        &self,
        file: &CachedFile,
        frames: impl Iterator<Item = FrameIndex> + Clone,
        moved: u64,
        take: &mut dyn FnMut(Filled),
    ) -> RunEnd {
        let page_bytes = file.core().page_bytes() as u64;
        let class = Class::page(file.core().page_shift);
        let run_start = file.start_of(self.first);
        let mut leaves = Leaves::new(file);
        let mut end = RunEnd::Whole;
        let mut ready = 0;
        for (page, frame) in (self.first..).zip(frames.clone()) {
            let start = file.start_of(page);
            let valid = page_bytes.min(self.size.saturating_sub(start));
            let arrived = (run_start + moved).saturating_sub(start);
            let held = leaves.hold(page, false).expect("a FILLING page holds its leaf");
            let word = held.word(page);
            if arrived < valid || valid == 0 {
                word.wake(word.abort_fill());
                held.vacated();
                file.cache().frames.free(frame, class);
                end = RunEnd::Short;
                continue;
            }
            debug_assert!(end == RunEnd::Whole, "bytes arrive in order");
            // W5: nothing but zeros beyond the size.
            // SAFETY: the rest of our frame.
            unsafe {
                let bytes = file.cache().frames.bytes(frame);
                copy::zero(bytes.add(valid as usize), (page_bytes - valid) as usize);
            }
            take(Filled { page, frame });
            let shown = Shown {
                referenced: !self.prefetched,
                marker: self.marker && page == self.first,
                dirty: false,
            };
            word.wake(word.finish_fill(frame, shown));
            ready += 1;
            if ready % RUN_NOTED == 0 {
                held.note_run(page, frame);
            }
        }
        file.cache().counters.fills.add(ready as u64);
        file.cache().arrived((self.first..).zip(frames).take(ready).map(|(page, frame)| Arrival {
            frame,
            core: file.core(),
            page,
            prefetched: self.prefetched,
            kept: false,
        }));
        end
    }
}

/// The outcome of an attempt to fill a single page.
pub(crate) enum Alone {
    Filled,
    Shrunk,
    /// Somebody else fills it or has filled it.
    Others,
    NoFrame,
}

/// Fills one page if it is EMPTY, and hands it to `take` before it becomes READY.
pub(crate) fn fill_one(
    file: &CachedFile,
    page: PageIndex,
    size: u64,
    op: Op,
    take: &mut dyn FnMut(Filled),
) -> Result<Alone> {
    let mut claims = [Claim::Later];
    let mut slots = Slots::new(&file.shared.flight);
    claim(file, page, &mut claims, &mut slots);
    let frame = match claims[0] {
        Claim::Own(frame) => frame,
        Claim::Later => return Ok(Alone::Others),
        Claim::Around => return Ok(Alone::NoFrame),
    };
    file.cache().counters.misses.add(1);
    writeback::read_back(file, page, page);
    let bytes = file.cache().frames.bytes(frame);
    // SAFETY: the frame is ours until the page is READY or EMPTY again, after the transfer.
    let segment = unsafe { [Segment::new(bytes, file.core().page_bytes())] };
    let (start, page_bytes) = (file.start_of(page), file.core().page_bytes() as u64);
    let (moved, failure) = read_alone(file, start, (&segment).into());
    slots.give_back();
    let run = Run { first: page, size, prefetched: false, marker: false };
    match (run.finish(file, std::iter::once(frame), moved, take), failure) {
        (RunEnd::Whole, _) => Ok(Alone::Filled),
        (RunEnd::Short, None) => Ok(Alone::Shrunk),
        (RunEnd::Short, Some(error)) => Err(Error::io(op, start, page_bytes, error)),
    }
}

/// Waits while somebody else fills `page`.
pub(crate) fn wait(file: &CachedFile, page: PageIndex) {
    let mut leaves = Leaves::new(file);
    while let Ok(held) = leaves.hold(page, false) {
        let word = held.word(page);
        let seen = word.load();
        if !matches!(seen.state(), State::Filling | State::Hidden) {
            return;
        }
        if let Some(armed) = word.arm(seen) {
            word.sleep(armed);
        }
    }
}
