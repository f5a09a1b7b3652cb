//! Changes of a file's extent: truncation, and the adoption of changes made by others.
//!
//! ```text
//!   exclusive guard from min(old, new) on -> hide -> back end -> size -> EMPTY
//!   on failure: show again
//! ```
//!
//! No fill can begin under the guard (W3), so none can put a page in place between the start of
//! its invalidation and the end of its removal (S3's rule).

use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};

use millpond_rangelock::Mode;

use crate::cache::copy;
use crate::cache::frame::{Class, FrameIndex};
use crate::cache::page::{Shown, State};
use crate::cache::table::PageIndex;
use crate::cached::CachedFile;
use crate::error::{Error, Op, Result};
use crate::range_lock::Guard;
use crate::sync::fence;
use crate::write::{drop_pages, hide_pages};
use crate::writeback::{self, LAST_PAGE};

const SHOWN: Shown = Shown { referenced: true, marker: false, dirty: false };

impl CachedFile {
    /// Sets the file's size.
    pub(crate) fn truncate(&self, len: u64) -> Result<()> {
        let (guard, size) = self.lock_from_end(len);
        if len >= size {
            self.backing.set_len(len).map_err(|error| Error::io(Op::Truncate, len, 0, error))?;
            self.core().size.store(len, Release);
            self.kept.resized(self);
            // Before this returns, as after a write: see `write::Write::replace`.
            fence(SeqCst);
            return Ok(());
        }
        let first = self.page_of(len);
        let tail = (len > self.start_of(first)).then_some(first);
        if let Some(page) = tail {
            // It may be dropped below, for want of a frame.
            writeback::write_back(self, page, page, Op::Truncate)?;
        }
        hide_pages(self, first, LAST_PAGE);
        writeback::await_ends(self, first, LAST_PAGE);
        let fresh = tail.and_then(|page| self.cut_tail(page, len));
        self.kept.begin_cut(self, len);
        if let Err(error) = self.backing.set_len(len) {
            self.kept.end_cut(self);
            self.show_hidden(first);
            if let Some(frame) = fresh {
                self.cache().frames.free(frame, Class::page(self.core().page_shift));
            }
            return Err(Error::io(Op::Truncate, len, 0, error));
        }
        self.core().size.store(len, Release);
        self.kept.resized(self);
        if let (Some(page), Some(frame)) = (tail, fresh) {
            self.show_tail(page, frame);
        }
        drop_pages(self, first, LAST_PAGE);
        self.kept.end_cut(self);
        drop(guard);
        Ok(())
    }

    /// An exclusive guard from the smaller of the size and `len` on, and the size.
    fn lock_from_end(&self, len: u64) -> (Guard<'_>, u64) {
        loop {
            let start = self.core().size.load(Acquire).min(len);
            let guard = self.lock(start, u64::MAX, Mode::Exclusive);
            let size = self.core().size.load(Acquire);
            if guard.range().start() <= size.min(len) {
                return (guard, size);
            }
        }
    }

    /// The contents of the hidden page that holds the new end of the file, zero beyond it, in a
    /// fresh frame; `None` if the page was not cached or there is no frame.
    fn cut_tail(&self, page: PageIndex, len: u64) -> Option<FrameIndex> {
        let held = self.core().hold(self.cache(), page, false).ok()?;
        let seen = held.word(page).load();
        if seen.state() != State::Hidden || seen.frame() == FrameIndex::NONE {
            return None;
        }
        let fresh = self.cache().take_frame(Class::page(self.core().page_shift))?;
        let (kept, page_bytes) = ((len - self.start_of(page)) as usize, self.core().page_bytes());
        let frames = &self.cache().frames;
        // SAFETY: within the two frames; the old one is in a HIDDEN word, so nobody frees it, and
        // ours is in nobody else's hands.
        unsafe {
            let _ = copy::copy(frames.bytes(fresh), frames.bytes(seen.frame()), kept);
            copy::zero(frames.bytes(fresh).add(kept), page_bytes - kept);
        }
        Some(fresh)
    }

    fn show_tail(&self, page: PageIndex, fresh: FrameIndex) {
        let held = self.core().hold(self.cache(), page, false).expect("hidden pages hold a leaf");
        let word = held.word(page);
        let old = word.load().frame();
        let change = word.show(fresh, SHOWN);
        word.wake(change.sleepers());
        self.cache().replaced(old, fresh, Class::page(self.core().page_shift));
    }

    /// Shows the hidden pages from `first` on as they were.
    fn show_hidden(&self, first: PageIndex) {
        self.core().for_each_page(self.cache(), first, LAST_PAGE, &mut |held, _, word| {
            let seen = word.load();
            if seen.state() == State::Hidden && seen.frame() != FrameIndex::NONE {
                word.wake(word.show(seen.frame(), SHOWN).sleepers());
            } else if seen.state() == State::Hidden {
                word.wake(word.drop_hidden().sleepers());
                held.vacated();
            }
        });
    }

    /// Drops the cached bytes of a range that something else than this engine has changed, and
    /// adopts the size that the file has now.
    pub(crate) fn invalidate(&self, offset: u64, end: u64) -> Result<()> {
        if end > offset {
            let guard = self.lock(offset, end, Mode::Exclusive);
            let (first, last) = (self.page_of(offset), self.page_of(end - 1));
            writeback::write_back(self, first, last, Op::Stat)?;
            hide_pages(self, first, last);
            writeback::await_ends(self, first, last);
            drop_pages(self, first, last);
            drop(guard);
        }
        self.adopt_size().map(drop)
    }

    /// Adopts the size that the file has below us, if somebody else changed it; returns it.
    pub(crate) fn adopt_size(&self) -> Result<u64> {
        let failed = |error| Error::io(Op::Stat, 0, 0, error);
        if self.backing.len().map_err(failed)? == self.core().size.load(Acquire) {
            return Ok(self.core().size.load(Acquire));
        }
        let guard = self.lock(0, u64::MAX, Mode::Exclusive);
        // The back end's length counts only when it has everything.
        writeback::write_back(self, 0, LAST_PAGE, Op::Stat)?;
        let (old, new) = (self.core().size.load(Acquire), self.backing.len().map_err(failed)?);
        if old != new {
            // The page of the smaller end, too: its bytes change there.
            let first = self.page_of(old.min(new));
            hide_pages(self, first, LAST_PAGE);
            writeback::await_ends(self, first, LAST_PAGE);
            self.core().size.store(new, Release);
            self.kept.resized(self);
            drop_pages(self, first, LAST_PAGE);
        }
        drop(guard);
        Ok(new)
    }
}
