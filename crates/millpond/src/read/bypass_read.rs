//! Reads of tasks that cache no page (`read::plan`): into frames that no word refers to.
//!
//! The task's next call copies the bytes from there and frees the frames.
//!
//! - **BY1** The end of the read releases guard and slot, and then signals its
//!   [`ReadCompletion`](crate::read::read_completion).

use std::sync::Arc;
use std::task::Waker;

use millpond_rangelock::OwnedGuard;
use millpond_rangelock::callback::TaskWaker;
use smallvec::SmallVec;

use crate::cache::frames::class::Class;
use crate::copy::Source;
use crate::error::{Error, Op, Result};
use crate::inode::{CachedFile, Shared};
use crate::io::backend::shared_ring::{self, SharedRing};
use crate::io::read_limit::Flight;
use crate::io::segment::{Segment, SegmentIter};
use crate::io::transfer::BackgroundRead;
use crate::read::hit::copy_out;
use crate::read::plan::{BYPASS_PAGES_MAX, ReadExtent};
use crate::read::read_completion::ReadCompletion;
use crate::units::{FrameIndex, PageIndex};

/// A read of a task, into frames of its own.
pub(crate) struct BypassRead {
    /// Has the frames. Not the file, which the completion drops before the guard (inode.CF1).
    shared: Arc<Shared>,
    first: PageIndex,
    frames: SmallVec<[FrameIndex; 2]>,
    class: Class,
    /// Size of the file while the guard was held.
    size: u64,
    /// Counts bytes from the first page's start on.
    arrival: ReadCompletion,
}

impl BypassRead {
    /// Starts a read of `extent`, under a guard over it. Its end releases guard and slot, and then wakes `waker`.
    /// Returns the guard if no slot or frame is free, or the read is too long.
    pub(crate) fn start(
        file: &Arc<CachedFile>,
        guard: OwnedGuard,
        extent: ReadExtent,
        waker: &Waker,
        ring: Option<&Arc<SharedRing>>,
    ) -> std::result::Result<Arc<BypassRead>, OwnedGuard> {
        let cache = file.cache();
        let (first, last) = extent.pages(file);
        if last - first >= BYPASS_PAGES_MAX {
            return Err(guard);
        }
        let Some(slot) = Flight::try_enter(&file.shared.flight) else { return Err(guard) };
        let class = Class::page(file.core().page_shift);
        let mut bypass = BypassRead {
            shared: Arc::clone(&file.shared),
            first,
            frames: SmallVec::new(),
            class,
            size: extent.size,
            arrival: ReadCompletion::new(TaskWaker::new(waker)),
        };
        for _ in first.to(last) {
            let Some(frame) = cache.take_frame(class) else { return Err(guard) };
            bypass.frames.push(frame);
        }
        cache.counters.local().missed(bypass.frames.len() as u64);
        let bypass = Arc::new(bypass);
        let page_bytes = file.core().page_bytes();
        let memory = bypass.frames.iter().map(|&frame| cache.frames.bytes(frame));
        // SAFETY: no word refers to these frames; `bypass` owns them, and `done` keeps `bypass`.
        let segments = memory.map(|bytes| unsafe { Segment::new(bytes, page_bytes) }).collect();
        let (reading, owner) = (Arc::clone(&bypass), Arc::clone(file));
        let done = Box::new(move |outcome: std::io::Result<usize>| {
            // inode.CF1.
            drop(owner);
            drop((guard, slot));
            let waker = reading.arrival.end(outcome.unwrap_or(0) as u64);
            drop(reading);
            if let Some(waker) = waker {
                waker.wake();
            }
        });
        let offset = file.start_of(first);
        let read = BackgroundRead { offset, wanted: true, direct: false, segments, done };
        if let Err(read) = shared_ring::start_read(ring, Arc::clone(&file.backing), read) {
            read.done.end(Ok(0));
        }
        Ok(bypass)
    }

    /// Whether the read has ended. If not, `waker` is woken at its end (BY1).
    pub(crate) fn has_ended_or_wakes(&self, waker: &Waker) -> bool {
        self.arrival.has_ended_or_wakes(waker)
    }

    /// Caller: the read of `file` has ended. Copies the bytes from `offset` on to the task's memory. `None`: some are
    /// missing.
    pub(crate) fn take(
        &self,
        file: &CachedFile,
        dst: SegmentIter<'_>,
        offset: u64,
    ) -> Option<Result<usize>> {
        let start = file.start_of(self.first);
        let end = (offset + dst.left()).min(self.size);
        if start + self.arrival.bytes() < end {
            return None;
        }
        let page_bytes = file.core().page_bytes() as u64;
        let mut faulted = false;
        for (page, &frame) in self.first.onwards().zip(&self.frames) {
            let page_start = file.start_of(page);
            let (from, to) = (page_start.max(offset), (page_start + page_bytes).min(end));
            let bytes = file.cache().frames.bytes(frame);
            // SAFETY: within the frame, which is ours, and within the part of `dst` for it, for which the maker of
            // `dst` vouched.
            faulted |= unsafe {
                let part = dst.slice(from - offset, to - from);
                copy_out(part, bytes.add((from - page_start) as usize), Source::Near).is_err()
            };
        }
        let len = end - offset;
        if let Some(pages) = file.mapped_pages.as_deref() {
            pages.note_slow_read(&*file.backing, end);
        }
        file.cache().counters.local().moved_past_cache(len);
        let fault = Error::Fault { op: Op::Read, offset, len };
        Some(if faulted { Err(fault) } else { Ok(len as usize) })
    }
}

impl Drop for BypassRead {
    fn drop(&mut self) {
        let frames = &self.shared.cache.frames;
        self.frames.iter().for_each(|&frame| frames.free(frame, self.class));
    }
}
