//! Reads of tasks that cache no page (`read::plan`): into frames that no word refers to.
//!
//! The task's next call copies the bytes from there and frees the frames.

use std::sync::Arc;

use millpond_rangelock::OwnedGuard;
use smallvec::SmallVec;

use crate::cache::frames::class::Class;
use crate::copy::Source;
use crate::error::{Error, Op, Result};
use crate::inode::{CachedFile, Shared};
use crate::io::backend::shared_ring::SharedRing;
use crate::io::read_limit::Flight;
use crate::io::segment::{Segment, SegmentIter};
use crate::read::hit::copy_out;
use crate::read::plan::{BYPASS_PAGES_MAX, ReadExtent};
use crate::read::read_completion::{self, ReadCompletion};
use crate::units::FrameIndex;

/// The frames of such a read.
pub(crate) struct BypassRead {
    /// Has the frames. Not the file, which the completion drops before the guard (inode.CF1).
    shared: Arc<Shared>,
    frames: SmallVec<[FrameIndex; 2]>,
    class: Class,
    extent: ReadExtent,
}

impl BypassRead {
    /// Starts a read of `extent`, under a guard over it. Returns the guard if no slot or frame is free, or the read is
    /// too long.
    pub(crate) fn start(
        file: &Arc<CachedFile>,
        guard: OwnedGuard,
        extent: ReadExtent,
        completion: &Arc<ReadCompletion>,
        ring: Option<&Arc<SharedRing>>,
    ) -> std::result::Result<Arc<BypassRead>, OwnedGuard> {
        let cache = file.cache();
        let (first, last) = extent.pages(file);
        if last - first >= BYPASS_PAGES_MAX {
            return Err(guard);
        }
        let Some(slot) = Flight::try_enter(&file.shared.flight) else { return Err(guard) };
        let class = Class::page(file.core().page_shift);
        let shared = Arc::clone(&file.shared);
        let mut bypass = BypassRead { shared, frames: SmallVec::new(), class, extent };
        for _ in first.to(last) {
            let Some(frame) = cache.take_frame(class) else { return Err(guard) };
            bypass.frames.push(frame);
        }
        cache.counters.local().missed(bypass.frames.len() as u64);
        let bypass = Arc::new(bypass);
        let page_bytes = file.core().page_bytes();
        let memory = bypass.frames.iter().map(|&frame| cache.frames.bytes(frame));
        // SAFETY: no word refers to these frames; `bypass` owns them, and `publish` keeps it until the read has ended.
        let segments = memory.map(|bytes| unsafe { Segment::new(bytes, page_bytes) }).collect();
        let start = file.start_of(first);
        let (range, keep) = ((start, extent.end - start), (guard, slot));
        let (completion, reading) = (Arc::clone(completion), Arc::clone(&bypass));
        let publish = move |_: &CachedFile, _| drop(reading);
        read_completion::start_read(file, ring, range, segments, keep, Some(completion), publish);
        Ok(bypass)
    }

    /// Caller: the read of `file` has ended, with all bytes. Copies them to the task's memory.
    pub(crate) fn take(&self, file: &CachedFile, dst: SegmentIter<'_>) -> Result<usize> {
        let ReadExtent { offset, end, .. } = self.extent;
        let page_bytes = file.core().page_bytes() as u64;
        let mut faulted = false;
        for (page, &frame) in file.page_of(offset).onwards().zip(&self.frames) {
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
        let len = self.extent.len();
        if let Some(pages) = file.mapped_pages.as_deref() {
            pages.note_slow_read(&*file.backing, end);
        }
        file.cache().counters.local().moved_past_cache(len);
        if faulted {
            return Err(Error::Fault { op: Op::Read, offset, len });
        }
        Ok(len as usize)
    }
}

impl Drop for BypassRead {
    fn drop(&mut self) {
        let frames = &self.shared.cache.frames;
        self.frames.iter().for_each(|&frame| frames.free(frame, self.class));
    }
}
