//! Read-ahead: guessing what a handle reads next, and filling it without making anybody wait.
//!
//! Each handle watches its own slow reads. A read that continues where the last one ended starts
//! a window behind it; the window's first page carries a marker, which sends the reader who gets
//! there to the slow path once, and that starts the next window, twice as long. So a sequential
//! reader is always one window behind the device, and the hit path itself starts nothing.
//!
//! A window takes what it can have at once: the range if nobody else has it, frames, places in the
//! back end's queue. Each run of pages is one background read, which owns its guard (W3) and its
//! file until it ends.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::sync::{Arc, Mutex};

use millpond_rangelock::Mode;
use smallvec::SmallVec;

use crate::advice::Advice;
use crate::cache::frame::{Class, FrameIndex};
use crate::cache::page::State;
use crate::cache::table::PageIndex;
use crate::inode::CachedFile;
use crate::io::backend::shared_ring::{self, SharedRing};
use crate::io::request::BackgroundRead;
use crate::io::segment::Segment;
use crate::read::fill::{Leaves, Run, try_claim};
use crate::writeback;

/// The largest window, in bytes, unless the builder says otherwise.
pub(crate) const WINDOW_BYTES_MAX: u64 = 1 << 20;
/// The first window, in bytes.
const WINDOW_BYTES_FIRST: u64 = 128 << 10;
/// Of the cache, a window takes at most this part: half of the eviction policy's young queue.
const CACHE_PART: u64 = 128;
/// Pages of one background read.
const RUN_PAGES_MAX: usize = 256;
/// Pages of a slow read that are looked at.
const LOOK_PAGES_MAX: u64 = 64;

/// What a handle remembers of its slow reads.
pub(crate) struct Readahead {
    state: Mutex<Window>,
    /// An [`Advice`] about the whole handle.
    pattern: AtomicU8,
}

const NORMAL: u8 = 0;
const SEQUENTIAL: u8 = 1;
const RANDOM: u8 = 2;

#[derive(Default)]
struct Window {
    /// The page after the last slow read.
    next: PageIndex,
    /// Pages of the newest window; 0 where no sequence is under way.
    pages: u64,
    /// The page after the newest window.
    end: PageIndex,
}

impl Readahead {
    pub(crate) fn new() -> Readahead {
        Readahead { state: Mutex::default(), pattern: AtomicU8::new(NORMAL) }
    }

    pub(crate) fn advise(&self, advice: Advice) {
        let pattern = match advice {
            Advice::Sequential => SEQUENTIAL,
            Advice::Random => RANDOM,
            _ => NORMAL,
        };
        self.pattern.store(pattern, Relaxed);
    }

    /// Before a slow read of the pages from `first` to `last`: continues or starts read-ahead.
    pub(crate) fn before_read(&self, file: &Arc<CachedFile>, first: PageIndex, last: PageIndex) {
        let pattern = self.pattern.load(Relaxed);
        let (marked, missing) = look(file, first, last.min(first + LOOK_PAGES_MAX));
        // Another thread reads through the same handle at this moment: let it guess.
        let Ok(mut window) = self.state.try_lock() else { return };
        let continues = first == window.next || first + 1 == window.next;
        window.next = last + 1;
        let page_shift = file.core().page_shift;
        let limit = file.cache().frames.limit_bytes() / CACHE_PART;
        let factor = if pattern == SEQUENTIAL { 2 } else { 1 };
        let most = (file.shared.readahead_bytes_max.min(limit) >> page_shift) * factor;
        if pattern == RANDOM || most == 0 || !(marked || missing) {
            return;
        }
        let in_window = last < window.end && window.end - last <= 2 * most;
        if !(continues || marked && in_window || pattern == SEQUENTIAL) {
            window.pages = 0;
            return;
        }
        let start = if in_window { window.end } else { last + 1 };
        if start - last > 2 * most {
            return;
        }
        let grown = match window.pages {
            0 => (WINDOW_BYTES_FIRST >> page_shift).max(1),
            pages => pages * 2,
        };
        window.pages = grown.min(most);
        window.end = start + window.pages;
        let (pages, end) = (window.pages, window.end);
        drop(window);
        debug_assert!(end > start);
        fill_ahead(file, start, pages, true);
    }
}

/// Takes the markers off the pages of a slow read; whether there was one, and whether a page is
/// missing.
fn look(file: &CachedFile, first: PageIndex, last: PageIndex) -> (bool, bool) {
    let mut leaves = Leaves::new(file);
    let (mut marked, mut missing) = (false, false);
    for page in first..=last {
        match leaves.hold(page, false).map(|held| held.word(page)) {
            Ok(word) => {
                let seen = word.load();
                missing |= !seen.is_ready();
                marked |= seen.has_marker() && word.take_marker();
            }
            Err(_) => missing = true,
        }
    }
    (marked, missing)
}

/// Starts to fill up to `pages` pages from `first` on that are EMPTY, as far as that needs no
/// waiting. `marker` marks the first of them.
pub(crate) fn fill_ahead(file: &Arc<CachedFile>, first: PageIndex, pages: u64, mut marker: bool) {
    let size = file.core().size.load(Acquire);
    if size == 0 {
        return;
    }
    let end = first.saturating_add(pages).min(file.page_of(size - 1) + 1);
    let mut page = first;
    while page < end {
        let run_end = end.min(page + RUN_PAGES_MAX as u64);
        match start_run(file, page, run_end, marker) {
            Some((next, started)) => {
                marker &= !started;
                page = next;
            }
            None => return,
        }
    }
}

/// Starts a background read of the first run of EMPTY pages in `page..end`. Returns where to go
/// on, and whether a read was started; `None` if nothing more can be had now.
fn start_run(
    file: &Arc<CachedFile>,
    page: PageIndex,
    end: PageIndex,
    marker: bool,
) -> Option<(PageIndex, bool)> {
    let range = file.pages(file.start_of(page), file.start_of(end));
    let guard = file.ranges.try_lock_owned(range, Mode::Shared)?;
    // Stable under the guard, as far as it concerns these pages (W5).
    let size = file.core().size.load(Acquire);
    let class = Class::page(file.core().page_shift);
    let mut leaves = Leaves::new(file);
    let mut frames = Frames::new();
    let mut first = page;
    let mut short_of_frames = false;
    for page in page..end {
        if file.start_of(page) >= size {
            break;
        }
        let Ok(held) = leaves.hold(page, true) else {
            short_of_frames = true;
            break;
        };
        let word = held.word(page);
        let claimed = word.load().state() == State::Empty
            && match file.cache().take_page_frame(held, page, false) {
                None => {
                    short_of_frames = true;
                    false
                }
                Some(frame) if try_claim(held, word, frame) => {
                    if frames.is_empty() {
                        first = page;
                    }
                    frames.push(frame);
                    true
                }
                Some(frame) => {
                    file.cache().frames.free(frame, class);
                    false
                }
            };
        if short_of_frames || (!claimed && !frames.is_empty()) {
            break;
        }
    }
    drop(leaves);
    if frames.is_empty() {
        return (!short_of_frames).then_some((end, false));
    }
    let next = first + frames.len() as u64;
    let run = Run { first, size, prefetched: true, marker };
    let started = start_read(file, guard, run, frames, None, None);
    (started && !short_of_frames).then_some((next, true))
}

/// The frames of contiguous pages.
pub(crate) type Frames = SmallVec<[FrameIndex; 4]>;

/// Hands a run of FILLING pages to the back end; takes the claims back if it has no room. `keep`,
/// which has a guard over the pages (W3), is dropped when the read has ended. Somebody waits for the
/// pages if there is a `failed`: it is set, before anyone is woken, if a byte of them is missing.
pub(crate) fn start_read<K: Send + 'static>(
    file: &Arc<CachedFile>,
    keep: K,
    run: Run,
    frames: Frames,
    failed: Option<Arc<AtomicBool>>,
    ring: Option<Arc<SharedRing>>,
) -> bool {
    writeback::read_back(file, run.first, run.first + frames.len() as u64 - 1);
    let page_bytes = file.core().page_bytes();
    let segments = frames
        .iter()
        .map(|&frame| {
            // SAFETY: the frames are the FILLING pages' until `done` runs, which keeps the file
            // and so the memory.
            unsafe { Segment::new(file.cache().frames.bytes(frame), page_bytes) }
        })
        .collect();
    let offset = file.start_of(run.first);
    let owner = Arc::clone(file);
    let wanted = failed.is_some();
    let done = Box::new(move |outcome: std::io::Result<usize>| {
        // A failed or short read leaves its pages EMPTY: who wants them reads them.
        let moved = outcome.unwrap_or(0) as u64;
        let valid = ((frames.len() * page_bytes) as u64).min(run.size.saturating_sub(offset));
        if let Some(failed) = failed.filter(|_| moved < valid) {
            // Release: pairs with the look of who is woken by the end of a fill.
            failed.store(true, Release);
        }
        let _ = run.finish(&owner, frames.iter().copied(), moved, &mut |_| {});
        drop(keep);
        drop(owner);
    });
    let read = BackgroundRead { offset, wanted, direct: false, segments, done };
    match shared_ring::start_read(ring.as_ref(), &file.backing, read) {
        Ok(()) => true,
        Err(read) => {
            (read.done)(Ok(0));
            false
        }
    }
}
