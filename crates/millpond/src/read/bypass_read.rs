//! Reads that cache no page, as none is worth a frame (`cache::policy::admission`).
//!
//! Under a guard over the pages, the only bytes of an EMPTY page are the back end's, and none of the pages is DIRTY
//! (page.W3). So a read whose pages are all EMPTY is one transfer. Its destination depends on the reader:
//!
//! - A thread that waits: the reader's memory. It takes no slot, as for any memory of a caller (read_limit.L2).
//! - A request that owns its memory, or is lent it until the read has ended ([`Lent`]): that memory, whether or not a
//!   thread waits.
//! - A task, which has no such memory: frames that no word refers to (*bypass*). The task's next call copies the bytes
//!   from there and frees the frames.
//!
//! - **BY1** The end of a read bypass releases guard and slot, and then signals its [`ReadCompletion`](crate::read::read_completion).

use std::ptr;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use millpond_rangelock::callback::TaskWaker;
use millpond_rangelock::{Guard, Mode, OwnedGuard};
use smallvec::SmallVec;

use crate::cache::frames::class::Class;
use crate::cache::policy::admission::AdmissionFilter;
use crate::copy::Source;
use crate::error::{Error, Op, Result};
use crate::inode::{CachedFile, Shared};
use crate::io::backend::shared_ring::{self, SharedRing};
use crate::io::read_limit::Flight;
use crate::io::segment::{Misalignment, Segment, SegmentIter};
use crate::io::transfer::{BackgroundRead, Direction, Transfer};
use crate::latency::LatencyKind;
use crate::read::fill::{FillProgress, FillStop};
use crate::read::hit::{copy_out, wipe};
use crate::read::read_completion::ReadCompletion;
use crate::units::{FrameIndex, PageIndex};

/// The most pages of a read that goes around the cache. Chosen, not measured.
const PAGES_MAX: u64 = 16;

/// Whether a read of bytes `offset..end` of a file of `size` bytes goes around the cache. It must consist of whole
/// pages, since the rest of a partly read page is mostly read next. Caller: has a guard over them.
fn goes_around(
    file: &CachedFile,
    asks: impl AdmissionQuery,
    offset: u64,
    end: u64,
    size: u64,
) -> bool {
    let (cache, core) = (file.cache(), file.core());
    let number = cache.frames.file_number(ptr::from_ref(core).cast());
    let is_bound = |at: u64| at.is_multiple_of(core.page_bytes() as u64);
    let (first, last) = (file.page_of(offset), file.page_of(end - 1));
    is_bound(offset)
        && (end == size || is_bound(end))
        && last.0 - first.0 < PAGES_MAX
        && first.to(last).all(|page| core.is_absent(&cache.frames, page))
        && asks(&cache.admission, number, first, last)
}

/// The call to the admission filter about the pages of a read. It comes last, as the filter remembers the pages.
pub(super) trait AdmissionQuery:
    FnOnce(&AdmissionFilter, usize, PageIndex, PageIndex) -> bool
{
}

impl<T: FnOnce(&AdmissionFilter, usize, PageIndex, PageIndex) -> bool> AdmissionQuery for T {}

/// Reads bytes `offset..end`, which lie below `size`, into the reader's memory. `None`: the pages are to be filled.
pub(crate) fn read(
    file: &CachedFile,
    dst: SegmentIter<'_>,
    offset: u64,
    end: u64,
    size: u64,
) -> Option<FillProgress> {
    let dst = dst.limited(end - offset);
    let is_aligned = || {
        let alignment = file.backing.alignment(false);
        alignment.first_misaligned(offset, dst.misalignment()).is_none()
    };
    let gate = &file.cache().admission;
    if !gate.is_bypassing()
        || !is_aligned()
        || !goes_around(file, AdmissionFilter::bypasses, offset, end, size)
    {
        return None;
    }
    let len = dst.left();
    let pages = file.page_of(end - 1).0 - file.page_of(offset).0 + 1;
    file.cache().counters.local().missed(pages);
    let mut batch = [Transfer::new(Direction::Read, offset, dst)];
    file.carry_out(&mut batch);
    let [Transfer { moved, error, .. }] = batch;
    let (moved, stopped) = match error {
        _ if moved == len => (len, None),
        None => (moved, Some(FillStop::Shrunk)),
        Some(error) if error.raw_os_error() == Some(libc::EFAULT) => {
            (0, Some(FillStop::Failed(Error::Fault { op: Op::Read, offset, len })))
        }
        Some(error) => (moved, Some(FillStop::Failed(Error::io(Op::Read, offset, len, error)))),
    };
    Some(FillProgress { moved, touched: len, stopped })
}

/// A read into memory that the request owns, or that is lent to it until the read ends. It runs under its guard, so
/// its bytes are of one moment. Where no thread waits for it, its owner has a slot, too (read_limit.L1).
pub(crate) struct Lent<'f> {
    file: &'f CachedFile,
    guard: Guard<'f>,
    begun: Instant,
}

impl<'f> Lent<'f> {
    /// A read of `len` bytes at `offset`, which must all lie below the size. Does not wait. `None`: read it in
    /// another way.
    pub(crate) fn begin(
        file: &'f CachedFile,
        range: (u64, u64),
        memory: Misalignment,
    ) -> Option<Lent<'f>> {
        let begun = Instant::now();
        let guard = if file.mapped_pages.is_some() {
            // mapped_pages.MB1: no page has a frame, and the back end knows the end of the file.
            file.ranges.try_lock(file.pages(range.0, range.0 + range.1), Mode::Shared)?
        } else if file.backing.is_direct() {
            // admission.AD8.
            begin_if(file, range, memory, AdmissionFilter::bypasses_first_miss)?
        } else if file.cache().admission.is_bypassing() {
            begin_if(file, range, memory, AdmissionFilter::bypasses)?
        } else {
            return None;
        };
        Some(Lent { file, guard, begun })
    }

    /// Reads into all of `dst`, which has the same length and alignment, and waits. `None`: read it in another way;
    /// `dst` may then hold zeros.
    pub(crate) fn carry_out(self, dst: SegmentIter<'_>, offset: u64) -> Option<usize> {
        let mut batch = [Transfer::new(Direction::Read, offset, dst)];
        self.file.carry_out(&mut batch);
        let [Transfer { moved, .. }] = batch;
        if moved < dst.left() {
            wipe(dst, 0, dst.left());
            return None;
        }
        self.end(moved, offset + moved);
        Some(moved as usize)
    }

    /// Ends a read of which all `len` bytes, up to `end`, have arrived. A read that is dropped instead has not read
    /// them.
    pub(crate) fn end(self, len: u64, end: u64) {
        drop(self.guard);
        if let Some(pages) = self.file.mapped_pages.as_deref() {
            pages.note_slow_read(&*self.file.backing, end);
        }
        let slot = self.file.cache().counters.local();
        slot.moved_past_cache(len);
        slot.took(LatencyKind::ReadMiss, self.begun);
    }
}

/// The guard of a read that goes around: as for [`Lent::begin`].
pub(super) fn begin_if(
    file: &CachedFile,
    (offset, len): (u64, u64),
    memory: Misalignment,
    asks: impl AdmissionQuery,
) -> Option<Guard<'_>> {
    let end = offset + len;
    let is_aligned = || file.backing.alignment(false).first_misaligned(offset, memory).is_none();
    if len == 0 || end > file.core().size.get() || !is_aligned() {
        return None;
    }
    let guard = file.ranges.try_lock(file.pages(offset, end), Mode::Shared)?;
    // Stable under the guard, as far as it concerns these pages (write.W5).
    let size = file.core().size.get();
    if end > size || !goes_around(file, asks, offset, end, size) {
        return None;
    }
    let pages = file.page_of(end - 1).0 - file.page_of(offset).0 + 1;
    file.cache().counters.local().missed(pages);
    Some(guard)
}

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
    /// Starts a read of `len` bytes at `offset`, under a guard over all of them. Its end releases guard and slot, and
    /// then wakes `waker`. Returns the guard if the pages are to be filled.
    pub(crate) fn start(
        file: &Arc<CachedFile>,
        guard: OwnedGuard,
        (offset, len): (u64, u64),
        waker: &Waker,
        ring: Option<&Arc<SharedRing>>,
    ) -> std::result::Result<Arc<BypassRead>, OwnedGuard> {
        // Stable under the guard, as far as it concerns these pages (write.W5).
        let size = file.core().size.get();
        let end = (offset + len).min(size);
        let goes_around = || goes_around(file, AdmissionFilter::bypasses, offset, end, size);
        if !file.cache().admission.is_bypassing() || end <= offset || !goes_around() {
            return Err(guard);
        }
        BypassRead::read(file, guard, (offset, end, size), waker, ring)
    }

    /// As [`BypassRead::start`], of a file with mapped backing, whose end the back end knows (mapped_pages.MB3). Returns
    /// the guard if a worker is to read.
    pub(crate) fn start_mapped(
        file: &Arc<CachedFile>,
        guard: OwnedGuard,
        (offset, len): (u64, u64),
        waker: &Waker,
        ring: Option<&Arc<SharedRing>>,
    ) -> std::result::Result<Arc<BypassRead>, OwnedGuard> {
        let end = offset + len;
        if file.page_of(end - 1) - file.page_of(offset) >= PAGES_MAX {
            return Err(guard);
        }
        BypassRead::read(file, guard, (offset, end, u64::MAX), waker, ring)
    }

    fn read(
        file: &Arc<CachedFile>,
        guard: OwnedGuard,
        (offset, end, size): (u64, u64, u64),
        waker: &Waker,
        ring: Option<&Arc<SharedRing>>,
    ) -> std::result::Result<Arc<BypassRead>, OwnedGuard> {
        let cache = file.cache();
        let (first, last) = (file.page_of(offset), file.page_of(end - 1));
        let Some(slot) = Flight::try_enter(&file.shared.flight) else { return Err(guard) };
        let class = Class::page(file.core().page_shift);
        let mut bypass = BypassRead {
            shared: Arc::clone(&file.shared),
            first,
            frames: SmallVec::new(),
            class,
            size,
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
