//! The lock-free hit in another process's cache (see `shared`).
//!
//! The attempts are those of [`hit`](crate::read::hit), on this process's mapping. Nothing is stored in it: a page that
//! was read is pushed onto the thread's ring.

use std::cell::Cell;

use crate::cache::frames::frame_range::FrameRange;
use crate::cache::shared::attempts::{AttemptCount, AttemptOrder};
use crate::cache::shared::touched::TouchRing;
use crate::cache::table::FileCore;
use crate::cache::table::page::{PageWord, Word};
use crate::io::segment::{Segment, SegmentIter};
use crate::read::hit::{Attempt, HitView, TRIES_MAX, attempt_page, attempt_pages, try_again};
use crate::units::FrameIndex;

/// The counters of a client's thread.
#[derive(Debug, Default)]
pub(crate) struct ReaderCounts {
    pub(crate) hits: Cell<u64>,
    pub(crate) bytes: Cell<u64>,
    pub(crate) retries: Cell<u64>,
    /// Pushes onto the ring.
    pub(crate) pushes: Cell<u64>,
    /// The frame of the last one: small reads of one page are one push.
    last_frame: Cell<u32>,
}

/// A file in a server's cache, as a thread of a client reads it.
#[derive(Clone, Copy)]
pub(crate) struct SharedHitPath<'c> {
    pub(crate) core: &'c FileCore,
    pub(crate) generation: u64,
    pub(crate) range: &'c FrameRange,
    pub(crate) order: AttemptOrder,
    pub(crate) attempts: &'c AttemptCount,
    pub(crate) ring: &'c TouchRing,
    pub(crate) counts: &'c ReaderCounts,
}

impl<'c> HitView<'c> for SharedHitPath<'c> {
    #[inline(always)]
    fn core(self) -> &'c FileCore {
        self.core
    }

    #[inline(always)]
    fn range(self) -> &'c FrameRange {
        self.range
    }

    #[inline(always)]
    fn tries(self) -> u32 {
        TRIES_MAX
    }

    #[inline(always)]
    fn is_current(self) -> bool {
        self.core.generation() == self.generation
    }

    #[inline(always)]
    fn touch(self, _: &PageWord, seen: Word) {
        if seen.is_referenced() {
            // When the bit is clear again, the page is to be pushed again.
            self.counts.last_frame.set(0);
        } else {
            self.push(seen.frame());
        }
    }

    #[inline(always)]
    fn count_page(self, bytes: u64) {
        self.count_pages(1, bytes);
    }

    #[inline(always)]
    fn count_pages(self, _: u64, bytes: u64) {
        self.counts.hits.set(self.counts.hits.get() + 1);
        self.counts.bytes.set(self.counts.bytes.get() + bytes);
    }

    #[inline(always)]
    fn retried(self) {
        self.counts.retries.set(self.counts.retries.get() + 1);
    }
}

impl SharedHitPath<'_> {
    /// Reads without a lock, if all pages are cached. `None`: they are not, or the file is closed.
    ///
    /// # Safety
    ///
    /// The memory of `len` bytes at `at` is valid for writes; it may be uninitialized.
    #[inline]
    pub(crate) unsafe fn try_read(self, at: *mut u8, len: usize, offset: u64) -> Option<usize> {
        let _attempting = self.attempts.begin(self.order);
        let page_bytes = self.core.page_bytes();
        if (offset as usize & (page_bytes - 1)) + len > page_bytes {
            // SAFETY: the caller's promise.
            return self.try_pages(unsafe { Segment::new(at, len) }, offset);
        }
        // SAFETY: the caller's promise.
        match unsafe { attempt_page(self, at, len, offset) } {
            Attempt::Read(read) => Some(read),
            Attempt::Retry(copied) => {
                // SAFETY: the caller's promise.
                self.try_page_again(unsafe { Segment::new(at, len) }, offset, copied)
            }
            Attempt::Miss | Attempt::Fault => None,
        }
    }

    #[inline(never)]
    fn try_pages(self, segment: Segment<'_>, offset: u64) -> Option<usize> {
        let segment = [segment];
        let dst: SegmentIter<'_> = (&segment).into();
        match attempt_pages(self, dst, offset) {
            Attempt::Read(read) => Some(read),
            Attempt::Retry(copied) => try_again(self, dst, offset, copied),
            Attempt::Miss | Attempt::Fault => None,
        }
    }

    #[cold]
    #[inline(never)]
    fn try_page_again(self, segment: Segment<'_>, offset: u64, copied: usize) -> Option<usize> {
        let segment = [segment];
        try_again(self, (&segment).into(), offset, copied)
    }

    #[inline]
    fn push(self, frame: FrameIndex) {
        let counts = self.counts;
        if counts.last_frame.get() == frame.0 {
            return;
        }
        counts.last_frame.set(frame.0);
        let push = counts.pushes.get() + 1;
        counts.pushes.set(push);
        self.ring.push(push, frame);
    }
}
