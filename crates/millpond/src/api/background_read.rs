//! Background reads into the caller's memory: direct reads (of handles with O_DIRECT), and reads of
//! pages that admission refused, which bypass the cache (`read::plan`). They own that memory, or
//! borrow it, and call a completion function at their end.
//!
//! ```text
//!   direct: start -> begin (does not wait) -> backend: a ring, or background threads -> end -> notify
//!                 -> conflict, or no slot --> a worker, which may wait
//!   bypass:          begin (does not wait) -> submit -> backend, as above -> complete: end -> notify
//!                                                                    -> else a worker reads it, and notifies
//! ```
//!
//! - **O1** Buffers, file and guard belong to the read until it completes: memory that the kernel may write
//!   to is not freed, even if the result is not wanted any more. The lender of borrowed memory guarantees that it outlives the read.
//! - **O2** Guard and slot borrow from the file. The handle, which keeps the file, is stored next to them
//!   and dropped after them.
//! - **O3** The completion function may run on the thread that reaped the read. Work that has to wait there
//!   (loading the file's new length, the last handle's write-back) is passed to a worker, which reports the
//!   completion afterwards. Not before its guard is released, for which all workers may wait: the rest of a
//!   short read goes to the backend again.
//!
//! Workers run writes. On a ring that any thread submits to, a direct write may complete only in the thread
//! that submitted it, and if that truncates the file in the meantime, the kernel blocks it there until the
//! write is done.

use std::io;
use std::sync::Arc;

use crate::api::file::{File, check_range, release_handle};
use crate::buffers::Buffer;
use crate::direct_io::{self, DirectEnd, DirectRange, Held};
use crate::error::{Op, Result};
use crate::inode::{Blocking, CachedFile};
use crate::io::backend::shared_ring::{self, SharedRing};
use crate::io::read_limit::{Flight, KeptSlot};
use crate::io::retry;
use crate::io::segment::{Front, Segment, SegmentIter};
use crate::io::segment_list::RawList;
use crate::io::transfer::{
    self, BackgroundRead, Direction, Ending, SEGMENTS_MAX, Segments, Transfer, TransientRetries,
    is_transient,
};
use crate::read::hit::wipe;
use crate::read::plan::{BypassPolicy, LentRead};

/// The completion function of a read, which gets the buffers back.
pub(crate) trait OnReadEnd: FnOnce(Result<usize>, Vec<Buffer>) + Send + 'static {}

impl<T: FnOnce(Result<usize>, Vec<Buffer>) + Send + 'static> OnReadEnd for T {}

/// How a read bypasses the cache.
enum BypassKind {
    Direct(Held<'static>),
    BackgroundBypass(LentRead<'static>),
}

/// A read in flight (O1). Its fields are dropped in order (O2).
struct Read<T> {
    /// Set once the read has begun, as the slot is (O2: before that, nothing borrows from the file).
    kind: Option<BypassKind>,
    slot: Option<KeptSlot<'static>>,
    list: RawList<'static>,
    offset: u64,
    /// The bytes moved so far.
    moved: u64,
    retries: TransientRetries,
    handle: Arc<File>,
    on_end: T,
}

/// Starts a read into all of `list`, whose memory it owns or borrows until `on_end` is called, or lets a
/// worker run it. Does not wait.
pub(crate) fn start_read(
    handle: Arc<File>,
    list: RawList<'static>,
    offset: u64,
    ring: Option<&Arc<SharedRing>>,
    on_end: impl OnReadEnd,
) {
    let mut read = Box::new(Read::new(None, None, list, offset, handle, on_end));
    match read.begin() {
        Ok(true) => read.submit(ring),
        Ok(false) => {
            let Read { list, offset, handle, on_end, .. } = *read;
            read_by_worker(handle, list, offset, on_end);
        }
        Err(error) => {
            let Read { list, handle, on_end, .. } = *read;
            end(handle, list.into_buffers(), on_end, Err(error));
        }
    }
}

#[cold]
fn read_by_worker(handle: Arc<File>, list: RawList<'static>, offset: u64, on_end: impl OnReadEnd) {
    let workers = Arc::clone(&handle.cached.shared.workers);
    workers.run(Box::new(move || {
        let outcome = handle.read_segments(list.iter(), offset, BypassPolicy::Filtered);
        end(handle, list.into_buffers(), on_end, outcome);
    }));
}

/// A bypass read that has begun, and is to be submitted. Its fields are dropped in order (O2).
#[must_use]
pub(crate) struct BackgroundBypass {
    lent: LentRead<'static>,
    slot: KeptSlot<'static>,
    handle: Arc<File>,
}

impl BackgroundBypass {
    /// A read into all of `dst`, at `offset`, which was checked. Does not wait. Returns the handle if the read
    /// has to be served in another way.
    pub(crate) fn begin(
        handle: Arc<File>,
        dst: SegmentIter<'_>,
        offset: u64,
    ) -> std::result::Result<BackgroundBypass, Arc<File>> {
        // SAFETY: O2: the handle keeps the file, and is dropped after what borrows from it.
        let file: &'static CachedFile = unsafe { &*Arc::as_ptr(&handle.cached) };
        let is_bypassed = file.mapped_pages.is_some() || file.backing.is_direct();
        if !file.cache().admission.is_bypassing() && !is_bypassed {
            return Err(handle);
        }
        // Before `LentRead::begin`, which counts a miss of the pages.
        let Some(slot) = Flight::try_enter_kept(&file.shared.flight) else { return Err(handle) };
        let Some(lent) = LentRead::begin(file, dst, offset) else {
            drop(slot);
            return Err(handle);
        };
        Ok(BackgroundBypass { lent, slot, handle })
    }

    /// Reads into all of `list`, which has as many bytes and the required alignment; as for [`start_read`].
    pub(crate) fn submit(
        self,
        list: RawList<'static>,
        offset: u64,
        ring: Option<&Arc<SharedRing>>,
        on_end: impl OnReadEnd,
    ) {
        let BackgroundBypass { lent, slot, handle } = self;
        let kind = Some(BypassKind::BackgroundBypass(lent));
        Box::new(Read::new(kind, Some(slot), list, offset, handle, on_end)).submit(ring);
    }
}

fn extent<'f>(file: &'f CachedFile, list: &RawList<'_>, offset: u64) -> DirectRange<'f> {
    DirectRange { file, direction: Direction::Read, offset, len: list.total(), durable: false }
}

impl<T: OnReadEnd> Read<T> {
    #[inline(always)]
    fn new(
        kind: Option<BypassKind>,
        slot: Option<KeptSlot<'static>>,
        list: RawList<'static>,
        offset: u64,
        handle: Arc<File>,
        on_end: T,
    ) -> Read<T> {
        let retries = TransientRetries::default();
        Read { kind, slot, list, offset, moved: 0, retries, handle, on_end }
    }

    /// Checks a direct read, and begins it; false: not without waiting. Its state is constructed in the box: a move
    /// costs more than the construction.
    #[inline(always)]
    fn begin(&mut self) -> Result<bool> {
        let (offset, len) = (self.offset, self.list.total());
        check_range(Op::Read, offset, len)?;
        self.handle.check_direct(Op::Read, offset, len)?;
        // SAFETY: O2: borrowers of the file are dropped before the handle, which keeps the file.
        let file: &'static CachedFile = unsafe { &*Arc::as_ptr(&self.handle.cached) };
        let extent = extent(file, &self.list, offset);
        match extent.check_alignment(self.list.misalignment()) {
            Err(_) if self.handle.bounces() => return Ok(false),
            aligned => aligned?,
        }
        let Some(slot) = Flight::try_enter_kept(&file.shared.flight) else { return Ok(false) };
        // If there is nothing to read, a worker finds that again. It takes a slot of its own.
        direct_io::begin_read(extent, Blocking::Try, &mut self.kind, BypassKind::Direct)?;
        self.slot = self.kind.is_some().then_some(slot);
        Ok(self.kind.is_some())
    }

    /// Lets a worker read all of it again. It may pause between attempts; the thread that reaps completions
    /// may not.
    #[cold]
    #[expect(clippy::boxed_local, reason = "taken apart where it is, not moved as a whole")]
    fn repeat_by_worker(self: Box<Self>) {
        let Read { kind, slot, list, offset, handle, on_end, .. } = *self;
        // Guard and slot are dropped first: the worker takes new ones.
        drop((kind, slot));
        // The second read may return fewer bytes.
        wipe(list.iter(), 0, list.total());
        read_by_worker(handle, list, offset, on_end);
    }

    fn transfer(&self) -> Transfer<'_> {
        let mut all = Transfer::new(Direction::Read, self.offset, self.list.iter());
        all.direct = self.is_direct();
        all.moved = self.moved;
        all
    }

    fn is_direct(&self) -> bool {
        matches!(self.kind, Some(BypassKind::Direct(_)))
    }

    /// Submits the rest of it.
    #[inline]
    fn submit(self: Box<Self>, ring: Option<&Arc<SharedRing>>) {
        let rest = match self.moved {
            0 => self.transfer(),
            _ => self.transfer().rest(),
        };
        let backing = Arc::clone(&self.handle.cached.backing);
        let direct = self.is_direct();
        let offset = rest.offset;
        // SAFETY: O2: used while the read exists, which has the handle.
        let file: &'static CachedFile = unsafe { &*Arc::as_ptr(&self.handle.cached) };
        // SAFETY: the memory belongs to the list's buffers, which the read keeps, or is lent to it (O1).
        let kept = |piece: Segment<'_>| unsafe { Segment::new(piece.base(), piece.len()) };
        let segments = match rest.segments.front(SEGMENTS_MAX) {
            // Nearly all reads: built in place.
            Front::One(piece) if piece.len() as u64 == rest.segments.left() => {
                Segments::from_buf([kept(piece)])
            }
            _ => rest.segments.map(kept).collect(),
        };
        let read = BackgroundRead { offset, wanted: true, direct, segments, done: self };
        if let Err(read) = shared_ring::start_read(SharedRing::of_this_batch(ring), backing, read) {
            // No thread is available for it.
            let outcome = retry::try_one(&*file.backing, read.transfer());
            read.done.end(outcome);
        }
    }

    fn finish(self: Box<Self>, error: Option<io::Error>) {
        if self.moved < self.list.total() && !self.is_direct() {
            return self.repeat_by_worker();
        }
        let Read { kind, slot, list, offset, moved, handle, on_end, .. } = *self;
        let held = match kind.expect("begun") {
            BypassKind::Direct(held) => held,
            BypassKind::BackgroundBypass(lent) => {
                lent.end(moved, offset + moved);
                drop(slot);
                return end(handle, list.into_buffers(), on_end, Ok(moved as usize));
            }
        };
        let ended = held.end_read(extent(&handle.cached, &list, offset), moved, error);
        let DirectEnd { outcome, is_len_in_doubt, .. } = ended;
        drop(slot);
        if !is_len_in_doubt {
            return end(handle, list.into_buffers(), on_end, outcome);
        }
        // O3.
        let workers = Arc::clone(&handle.cached.shared.workers);
        workers.run(Box::new(move || {
            let outcome = handle.cached().adopt_size().and(outcome);
            end(handle, list.into_buffers(), on_end, outcome);
        }));
    }
}

impl<T: OnReadEnd> Ending for Read<T> {
    /// Handles the result of the backend's attempt. The rest goes the backend's own way, whichever thread
    /// reaped this.
    fn end(mut self: Box<Self>, outcome: io::Result<usize>) {
        match outcome {
            Ok(moved) => {
                self.moved += moved as u64;
                if moved > 0 {
                    self.retries.reset();
                }
                if self.moved == self.list.total() {
                    return self.finish(None);
                }
                let block_bytes =
                    retry::block_bytes(&*self.handle.cached.backing, &self.transfer());
                if transfer::is_end(moved as u64, block_bytes) {
                    self.finish(None)
                } else {
                    self.submit(None)
                }
            }
            Err(error) if is_transient(&error) && self.retries.may_try_at_once() => {
                self.submit(None)
            }
            Err(error) if is_transient(&error) => self.repeat_by_worker(),
            Err(error) => self.finish(Some(error)),
        }
    }
}

/// Drops the handle, and then calls `on_end`.
#[inline(always)]
fn end(handle: Arc<File>, buffers: Vec<Buffer>, on_end: impl OnReadEnd, outcome: Result<usize>) {
    // O3.
    release_handle(handle, move || on_end(outcome, buffers));
}
