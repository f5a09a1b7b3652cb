//! Read-ahead: fills the pages that a handle is likely to read next, without delaying a caller.
//!
//! Each handle tracks the offsets of its reads that missed. A read that continues where the last one ended starts a
//! window at its own end. The window's first page carries a marker. The reader that reaches the marker takes the slow
//! path once, and starts the next window, twice as long. So the device is always one window ahead of a sequential
//! reader, and the hit path itself starts nothing.
//!
//! A window takes only resources that are free at once: the range, if no other holder has it, frames, and places in
//! the back end's queue. Each run of pages is one background read, which owns its guard (page.W3) and its file until
//! it ends.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use millpond_rangelock::Mode;

use crate::advice::Advice;
use crate::cache::table::page::Word;
use crate::inode::CachedFile;
use crate::read::run::{Claims, Next};
use crate::units::PageIndex;

/// The first window, in bytes: the default maximum of Linux's read-ahead.
const WINDOW_BYTES_FIRST: u64 = 128 << 10;
/// The largest part of the cache that a window takes: half of the eviction policy's young queue.
const CACHE_PART: u64 = 128;
/// Pages of one background read: of small pages, 1 MiB. Chosen, not measured.
const RUN_PAGES_MAX: usize = 256;
/// Pages of a slow read that are looked at: as many as a hit may have.
const LOOK_PAGES_MAX: u64 = 64;

/// A handle's record of its slow reads.
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
        if file.mapped_pages.is_some() {
            // The kernel reads ahead.
            return;
        }
        let pattern = self.pattern.load(Relaxed);
        let (marked, missing) = take_markers(file, first, last.min(first + LOOK_PAGES_MAX));
        // Another thread reads through the same handle at this moment: that thread starts the window.
        let Ok(mut window) = self.state.try_lock() else { return };
        let continues = first == window.next || first + 1 == window.next;
        window.next = last + 1;
        if pattern == RANDOM || !(marked || missing) {
            return;
        }
        let continues = continues || pattern == SEQUENTIAL;
        if !(continues || marked) {
            window.pages = 0;
            return;
        }
        let page_shift = file.core().page_shift;
        let limit = file.cache().frames.limit_bytes() / CACHE_PART;
        let factor = if pattern == SEQUENTIAL { 2 } else { 1 };
        let most = (file.shared.readahead_bytes_max.min(limit) >> page_shift) * factor;
        if most == 0 {
            return;
        }
        let in_window = last < window.end && window.end - last <= 2 * most;
        if !(continues || in_window) {
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

/// Takes the markers off the pages of a slow read. Returns whether there was one, and whether a page is missing.
fn take_markers(file: &CachedFile, first: PageIndex, last: PageIndex) -> (bool, bool) {
    let (frames, core) = (&file.cache().frames, file.core());
    let (mut marked, mut missing) = (false, false);
    for page in first.to(last) {
        let seen = core.lookup_leaf(frames, page).map(|(_, _, seen)| seen);
        missing |= !seen.is_some_and(Word::is_ready);
        if seen.is_some_and(Word::has_marker)
            && let Ok(held) = core.hold(file.cache(), page, false)
        {
            marked |= held.word(page).take_marker();
        }
    }
    (marked, missing)
}

/// Starts to fill up to `pages` pages from `first` on that are EMPTY, as far as that needs no waiting. Sets the
/// marker on the first of them if `marker`.
pub(crate) fn fill_ahead(file: &Arc<CachedFile>, first: PageIndex, pages: u64, mut marker: bool) {
    let size = file.core().size.get();
    // mapped_pages.MB1.
    if size == 0 || file.mapped_pages.is_some() {
        return;
    }
    let end = (first + pages).min(file.page_of(size - 1) + 1);
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

/// Starts a background read of the first run of EMPTY pages in `page..end`. Returns where to go on, and whether a
/// read was started; `None` if a resource has run out.
fn start_run(
    file: &Arc<CachedFile>,
    page: PageIndex,
    end: PageIndex,
    marker: bool,
) -> Option<(PageIndex, bool)> {
    let range = file.pages(file.start_of(page), file.start_of(end));
    let guard = file.ranges.try_lock_owned(range, Mode::Shared)?;
    // Stable under the guard, as far as it concerns these pages (write.W5).
    let size = file.core().size.get();
    let mut claims = Claims::new(file, page..end, size);
    let mut run = match claims.next_run(&mut || true) {
        Next::Run(run) => run,
        Next::End => return Some((end, false)),
        Next::NoFrame | Next::NoSlot => return None,
    };
    let next = claims.next();
    drop(claims);
    (run.prefetched, run.marker) = (true, marker);
    run.start(file, guard, None, None).then_some((next, true))
}
