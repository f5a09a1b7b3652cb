//! Views: borrowed bytes of the cache.
//!
//! A view pins its frame. The bytes of a READY frame never change (page.W2), and a pinned frame is not
//! reused. So a view is a snapshot of its page until it is dropped: writes,
//! truncations and evictions do not affect it. Pinned frames are not evictable, so views may pin at most half of them.
//!
//! A [`Detached`] view keeps the file itself, and unpins when it is dropped: a worker took it for a caller
//! that waits for it, or no longer does; or it belongs to a [`Blob`](crate::blob::Blob).

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use millpond_rangelock::Mode;

use crate::cache::table::step;
use crate::error::{Error, Op, Result};
use crate::inode::CachedFile;
use crate::inode::leaves::Leaves;
use crate::inode::mapped_pages::MappedPages;
use crate::io::segment::{Segment, SegmentIter};
use crate::process_local::ProcessLocal;
use crate::read::fill::{self, Alone};
use crate::read::mapped_read;
use crate::read::plan::{BypassPolicy, ReadProgress, ReadStop};
use crate::read::read_guarded;
use crate::units::{FrameIndex, PageIndex};
use crate::writeback;

/// Attempts to take a view while other threads change the page. Chosen, not measured.
const TRIES_MAX: usize = 64;

/// The bytes of one page at the time when the view was taken; see [`crate::File::view`].
pub struct View<'f> {
    file: &'f CachedFile,
    frame: FrameIndex,
    from: usize,
    len: usize,
}

impl Deref for View<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the frame is pinned until `self` is dropped; the part lies within the frame.
        unsafe { pinned(self.file, self.frame, self.from, self.len) }
    }
}

/// The bytes of a part of a pinned frame.
///
/// # Safety
///
/// The frame was READY when it was pinned, and stays pinned for `'v`; the part lies within it.
unsafe fn pinned<'v>(file: &CachedFile, frame: FrameIndex, from: usize, len: usize) -> &'v [u8] {
    if len == 0 {
        return &[];
    }
    assert!(!file.core().is_the_parents(), "a view that the process's parent took");
    let bytes = file.cache().frames.bytes(frame);
    // SAFETY: a frame that was READY is not written to (page.W2) until its last pin is gone; the rest is
    // the caller's promise.
    unsafe { std::slice::from_raw_parts(bytes.add(from), len) }
}

impl std::fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for View<'_> {
    fn drop(&mut self) {
        if self.frame != FrameIndex::NONE && !self.file.core().is_the_parents() {
            self.file.unpin(self.frame);
            let page_bytes = self.file.core().page_bytes() as u64;
            self.file.shared.pinned_bytes.fetch_sub(page_bytes, Relaxed);
        }
    }
}

impl View<'_> {
    /// For another thread. `cached` is the file of the view.
    pub(crate) fn detach(mut self, cached: Arc<CachedFile>) -> Detached {
        debug_assert!(std::ptr::eq(self.file, &*cached), "another file's view");
        let frame = std::mem::replace(&mut self.frame, FrameIndex::NONE);
        let cached = ProcessLocal::new(cached);
        Detached { cached, frame, from: self.from, len: self.len }
    }
}

/// A view that keeps its file.
pub(crate) struct Detached {
    cached: ProcessLocal<Arc<CachedFile>>,
    frame: FrameIndex,
    from: usize,
    len: usize,
}

impl Detached {
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: as in `View::deref`.
        unsafe { pinned(&self.cached, self.frame, self.from, self.len) }
    }

    /// The view, for a caller that keeps `file`, which must be the view's file.
    pub(crate) fn attach(mut self, file: &CachedFile) -> View<'_> {
        debug_assert!(std::ptr::eq(file, &**self.cached), "another file's view");
        let frame = std::mem::replace(&mut self.frame, FrameIndex::NONE);
        View { file, frame, from: self.from, len: self.len }
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        drop(View { file: &self.cached, frame: self.frame, from: 0, len: 0 });
    }
}

impl CachedFile {
    /// A view of the bytes from `offset` on, at most `len` and to the end of the page or file.
    pub(crate) fn view(&self, offset: u64, len: usize) -> Result<View<'_>> {
        self.view_of(offset, len, |file| match file.mapped_pages.as_deref() {
            Some(pages) => file.pin_copy(pages, offset),
            None => file.pin(offset),
        })
    }

    /// [`CachedFile::view`] of cached bytes; [`Error::WouldBlock`]: the page is not cached, or is being
    /// changed.
    pub(crate) fn try_view(&self, offset: u64, len: usize) -> Result<View<'_>> {
        self.view_of(offset, len, |file| match file.try_pin_at(offset) {
            Some(pinned) if file.mapped_pages.is_none() => Ok(pinned),
            _ => Err(Error::WouldBlock { op: Op::View, offset, len: len as u64 }),
        })
    }

    fn view_of(
        &self,
        offset: u64,
        len: usize,
        pin: impl FnOnce(&CachedFile) -> Result<Option<(FrameIndex, u64)>>,
    ) -> Result<View<'_>> {
        let nothing = View { file: self, frame: FrameIndex::NONE, from: 0, len: 0 };
        if len == 0 {
            return Ok(nothing);
        }
        let budget = self.cache().frames.limit_bytes() / 2;
        let page_bytes = self.core().page_bytes() as u64;
        let pinned = self.shared.pinned_bytes.fetch_add(page_bytes, Relaxed) + page_bytes;
        // From here on the drop of the view or this returns the budget.
        let unbudget = || self.shared.pinned_bytes.fetch_sub(page_bytes, Relaxed);
        if pinned > budget {
            unbudget();
            return Err(Error::NoBuffers { op: Op::View });
        }
        let pinned = match pin(self) {
            Ok(Some(pinned)) => pinned,
            other => {
                unbudget();
                return other.map(|_| nothing);
            }
        };
        let (frame, size) = pinned;
        let from = offset as usize & (page_bytes as usize - 1);
        let len = (len as u64).min(page_bytes - from as u64).min(size - offset) as usize;
        self.cache().counters.local().hit_several(0, len as u64);
        Ok(View { file: self, frame, from, len })
    }

    /// Pins the frame of the page at `offset`; also returns the size. `None`: the file ends before
    /// `offset`.
    fn pin(&self, offset: u64) -> Result<Option<(FrameIndex, u64)>> {
        for _ in 0..TRIES_MAX {
            if let Some(pinned) = self.try_pin_at(offset) {
                return Ok(pinned);
            }
            if let Some(pinned) = self.fill_pinned(offset)? {
                return Ok(Some(pinned));
            }
        }
        Err(Error::NoBuffers { op: Op::View })
    }

    /// [`CachedFile::pin`] of a file with mapped backing: a frame of the view's own gets a copy of the page.
    fn pin_copy(&self, pages: &MappedPages, offset: u64) -> Result<Option<(FrameIndex, u64)>> {
        let (frames, class) = (&self.cache().frames, self.core().page_class());
        let frame = self.cache().take_frame(class).ok_or(Error::NoBuffers { op: Op::View })?;
        let start = self.start_of(self.page_of(offset));
        // SAFETY: the frame is in no page word, so this thread alone has it.
        let segment = unsafe { [Segment::new(frames.bytes(frame), self.core().page_bytes())] };
        let dst: SegmentIter<'_> = (&segment).into();
        let slot = self.cache().counters.local();
        let read = match mapped_read::try_read(self, pages, slot, dst, start) {
            Some(moved) => Ok(moved),
            None => match read_guarded(self, dst, start, BypassPolicy::Fills) {
                ReadProgress { stopped: Some(ReadStop::Failed(error)), .. } => Err(error),
                ReadProgress { moved, .. } => Ok(moved as usize),
            },
        };
        match read {
            Ok(moved) if start + moved as u64 > offset => {
                // The last view of the frame frees it, as it is in no page word.
                frames.meta(frame).pins.pin();
                frames.release(frame, class);
                Ok(Some((frame, start + moved as u64)))
            }
            other => {
                frames.free(frame, class);
                other.map(|_| None)
            }
        }
    }

    /// [`CachedFile::pin`] of a page that is READY; `None`: it is not.
    fn try_pin_at(&self, offset: u64) -> Option<Option<(FrameIndex, u64)>> {
        loop {
            if offset >= self.core().size.get() {
                return Some(None);
            }
            let pinned = self.try_pin(self.page_of(offset))?;
            if offset < pinned.1 {
                return Some(Some(pinned));
            }
            // The file has shrunk below the offset since.
            self.unpin(pinned.0);
        }
    }

    /// Pins the frame of a READY page: raise the pin, fence, re-validate the word.
    fn try_pin(&self, page: PageIndex) -> Option<(FrameIndex, u64)> {
        let frames = &self.cache().frames;
        let held = self.core().hold(self.cache(), page, false).ok()?;
        let word = held.word(page);
        let look = step::HeldPage::begin(word, &self.core().epoch);
        let seen = look.seen;
        if !seen.is_ready() {
            return None;
        }
        frames.meta(seen.frame()).pins.pin();
        // The size belongs to the same moment as the word.
        let Some(size) = look.copy_if_unchanged(|| self.core().size.get()) else {
            self.unpin(seen.frame());
            return None;
        };
        word.mark_referenced(seen);
        Some((seen.frame(), size))
    }

    /// Fills the page at `offset` and pins its frame before it can be evicted. `None`: try again.
    fn fill_pinned(&self, offset: u64) -> Result<Option<(FrameIndex, u64)>> {
        let page = self.page_of(offset);
        let guard = self.lock(offset, offset + 1, Mode::Shared);
        // The file may have shrunk below the offset since the last check.
        let size = self.core().size.get();
        if offset >= size {
            return Ok(None);
        }
        let mut pinned = None;
        let outcome = match Leaves::new(self).hold(page, true) {
            Ok(held) => fill::fill_one(self, held, page, size, Op::View, |filled| {
                self.cache().frames.meta(filled.frame).pins.pin();
                pinned = Some((filled.frame, size));
            })?,
            Err(_) => Alone::NoFrame,
        };
        if matches!(outcome, Alone::Others) {
            fill::wait(self, page);
            // Under the guard, no writer can replace the page repeatedly before it is pinned.
            return Ok(self.try_pin(page));
        }
        drop(guard);
        match outcome {
            Alone::Filled => return Ok(pinned),
            Alone::Shrunk => drop(self.adopt_size()?),
            Alone::NoFrame if writeback::reclaim(self, writeback::VIEW_RECLAIM_WAIT_MAX) => {}
            Alone::NoFrame | Alone::Others => return Err(Error::NoBuffers { op: Op::View }),
        }
        Ok(None)
    }
}
