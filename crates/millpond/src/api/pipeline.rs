//! Pipelines: many direct requests in flight, driven by one thread.
//!
//! ```text
//!   step -> request -> begin (guard, cached pages hidden) -> ring -> reap -> end -> step
//!                         |  another operation holds the range             ^
//!                         v                                                |
//!                      stalled, until all requests in flight have ended, and then waited for
//! ```
//!
//! - **P1** A request in flight, with its memory, is in a slot that `step` does not see before its
//!   completion. A call of [`Pipeline::run`] neither returns nor unwinds before; so borrowed memory
//!   outlives the request, and no other code can use it during that time.
//! - **P2** A thread with requests in flight waits for no guard and no flush: two pipelines, or a pipeline
//!   and its own requests, or a sync, can't wait for each other.
//! - **P3** In steady state nothing is allocated. A request moves only between its lane and `step`.
//! - **P4** A durable write that the backend has completed has left the epoch of write-back's generations;
//!   its success is known when all other members have left it. The pipeline waits for that only while no
//!   request is in flight. The write holds its range until then. The thread waits for a guard only while it
//!   holds none (P2).
//! - **P5** When `step` gets a request back, the pipeline no longer borrows its file. The C library then closes
//!   files.

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::sync::Weak;

use crate::api::file::{File, check_range};
use crate::backend::BackendKind;
use crate::buffers::Buffer;
use crate::direct_io::{self, Begin, Conclusion, DirectRange, Operation, StartedDirect, Undecided};
use crate::error::{Error, Op, Result};
use crate::inode::{Blocking, CachedFile, Shared};
use crate::io::backend::fixed_ring::{FixedRing, RingCompletion};
use crate::io::retry;
use crate::io::segment_list::{Access, Mut, RawList, SegmentList};
use crate::io::transfer::{Direction, Transfer, TransientRetries, is_end, is_transient};
use crate::memory::no_memory;
use crate::process_local::ProcessLocal;

/// The maximum depth of a pipeline. Chosen, not measured.
pub const PIPELINE_DEPTH_MAX: usize = 4096;

/// A direct read or write, for a [`Pipeline`].
///
/// # Examples
///
/// ```
/// use millpond::direct::{DirectRequest, SegmentList};
/// use millpond::{Engine, OpenOptions};
/// # let dir = tempfile::tempdir_in(".").unwrap();
/// # let path = dir.path().join("data");
/// # std::fs::write(&path, vec![7; 8192]).unwrap();
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let options = OpenOptions::new().read(true).write(true).direct(true);
/// # let Ok(file) = engine.open(&path, &options) else { return Ok(()) };
/// let mut pipeline = engine.pipeline(1)?;
/// let list = SegmentList::from_buffers(engine.alloc_buffers(2, 4096)?);
/// let mut read = DirectRequest::read(&file, list, 4096);
/// read.set_offset(0);
/// assert_eq!((read.offset(), read.len(), read.is_empty()), (0, 8192, false));
/// let (mut next, mut ended) = (Some(read), None);
/// pipeline.run(|lane| {
///     ended = lane.into_ended();
///     next.take()
/// });
/// let (mut request, outcome) = ended.expect("it has ended");
/// assert_eq!(outcome?, 8192);
/// assert!(request.slices().flatten().all(|&byte| byte == 7));
/// request.slices_mut().for_each(|part| part.fill(8));
/// let buffers = request.into_buffers();
/// let mut next = Some(DirectRequest::write(&file, SegmentList::from_buffers(buffers), 0).durable(true));
/// pipeline.run(|_| next.take());
/// assert_eq!(std::fs::read(&path).unwrap(), [8; 8192]);
/// println!("{} bytes registered", pipeline.registration().registered_bytes);
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug)]
pub struct DirectRequest<'a> {
    /// In a box, as the request moves from the lane to the caller and back for each use.
    inner: Box<RequestParts<'a>>,
}

#[derive(Debug)]
struct RequestParts<'a> {
    file: &'a File,
    list: RawList<'a>,
    is_mut: bool,
    direction: Direction,
    offset: u64,
    durable: bool,
}

impl<'a> DirectRequest<'a> {
    /// Reads into all of `list` from byte `offset` of a file that was opened
    /// [`direct`](crate::OpenOptions::direct).
    #[must_use]
    pub fn read(file: &'a File, list: SegmentList<'a, Mut>, offset: u64) -> DirectRequest<'a> {
        let (list, direction) = (list.into_raw(), Direction::Read);
        let inner =
            Box::new(RequestParts { file, list, is_mut: true, direction, offset, durable: false });
        DirectRequest { inner }
    }

    /// Writes all of `list` to byte `offset` of a file that was opened
    /// [`direct`](crate::OpenOptions::direct).
    #[must_use]
    pub fn write<A: Access>(
        file: &'a File,
        list: SegmentList<'a, A>,
        offset: u64,
    ) -> DirectRequest<'a> {
        let (list, direction) = (list.into_raw(), Direction::Write);
        let durable = file.is_dsync();
        let inner =
            Box::new(RequestParts { file, list, is_mut: A::IS_MUT, direction, offset, durable });
        DirectRequest { inner }
    }

    /// [`DirectRequest::read`] into memory that is lent to the request; `of`: the buffer that contains all
    /// of it.
    ///
    /// # Safety
    ///
    /// The memory is valid for writes, and not used elsewhere, until the request is dropped, and the buffer
    /// lives as long; the array is read before this returns.
    #[must_use]
    pub unsafe fn read_lent(
        file: &'a File,
        dst: &[libc::iovec],
        offset: u64,
        of: Option<&Buffer>,
    ) -> DirectRequest<'a> {
        // SAFETY: the caller's promise.
        let list = unsafe { RawList::borrowed(dst, of) };
        let direction = Direction::Read;
        let inner =
            Box::new(RequestParts { file, list, is_mut: true, direction, offset, durable: false });
        DirectRequest { inner }
    }

    /// [`DirectRequest::write`] from memory that is lent, as with [`DirectRequest::read_lent`].
    ///
    /// # Safety
    ///
    /// As for [`DirectRequest::read_lent`], but the memory is only read.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::direct::DirectRequest;
    /// use millpond::{Engine, OpenOptions};
    /// # let dir = tempfile::tempdir_in(".").unwrap();
    /// # let path = dir.path().join("data");
    /// # std::fs::write(&path, vec![7; 4096]).unwrap();
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let options = OpenOptions::new().read(true).write(true).direct(true);
    /// # let Ok(file) = engine.open(&path, &options) else { return Ok(()) };
    /// let mut buffer = engine.alloc_buffers(1, 4096)?.remove(0);
    /// let lent = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: 4096 }];
    /// // SAFETY: the buffer outlives both requests, which run one after the other, and is not used elsewhere.
    /// let (read, write) = unsafe {
    ///     (
    ///         DirectRequest::read_lent(&file, &lent, 0, Some(&buffer)),
    ///         DirectRequest::write_lent(&file, &lent, 4096, Some(&buffer)),
    ///     )
    /// };
    /// let mut requests = [write, read].into_iter().collect::<Vec<_>>();
    /// engine.pipeline(1)?.run(|_| requests.pop());
    /// assert_eq!(std::fs::read(&path).unwrap(), [7; 8192]);
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub unsafe fn write_lent(
        file: &'a File,
        src: &[libc::iovec],
        offset: u64,
        of: Option<&Buffer>,
    ) -> DirectRequest<'a> {
        // SAFETY: the caller's promise.
        let list = unsafe { RawList::borrowed(src, of) };
        let (direction, durable) = (Direction::Write, file.is_dsync());
        let inner =
            Box::new(RequestParts { file, list, is_mut: false, direction, offset, durable });
        DirectRequest { inner }
    }

    /// For a write: whether it completes when the bytes are durable (`RWF_DSYNC`).
    #[must_use]
    pub fn durable(mut self, on: bool) -> DirectRequest<'a> {
        self.inner.durable = on;
        self
    }

    /// Changes the offset, for a reuse of the request.
    #[inline]
    pub fn set_offset(&mut self, offset: u64) {
        self.inner.offset = offset;
    }

    /// The offset in the file.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.inner.offset
    }

    /// The length of its memory, in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> u64 {
        self.inner.list.total()
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its memory, in turn.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.inner.list.slices()
    }

    /// Its memory, in turn, mutable; empty if it was made of read-only memory.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        // SAFETY: `is_mut` is checked.
        let slices = self.inner.is_mut.then(|| unsafe { self.inner.list.slices_mut() });
        slices.into_iter().flatten()
    }

    /// The buffers that its list owns; empty if it borrows.
    #[must_use]
    pub fn into_buffers(self) -> Vec<Buffer> {
        self.inner.list.into_buffers()
    }

    #[inline]
    fn extent(&self) -> DirectRange<'a> {
        DirectRange {
            file: self.inner.file.cached(),
            direction: self.inner.direction,
            offset: self.inner.offset,
            len: self.inner.list.total(),
            durable: self.inner.durable,
        }
    }

    fn operation(&self) -> Operation<'_> {
        Operation { extent: self.extent(), segments: self.inner.list.iter() }
    }

    /// Checks the request without running it.
    #[inline]
    fn check(&self) -> Result<()> {
        let op = self.extent().op();
        check_range(op, self.inner.offset, self.len())?;
        self.inner.file.check_direct(op, self.inner.offset, self.len())?;
        self.extent().check_alignment(self.inner.list.misalignment())
    }
}

/// A slot of a [`Pipeline`], between two requests.
#[derive(Debug)]
pub struct Lane<'l, 'a> {
    number: usize,
    /// The completed request.
    request: &'l mut Option<DirectRequest<'a>>,
    outcome: Option<Result<usize>>,
}

impl<'a> Lane<'_, 'a> {
    /// The lane's number, from 0 on.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::Engine;
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// let mut numbers = Vec::new();
    /// engine.pipeline(3)?.run(|lane| {
    ///     numbers.push(lane.number());
    ///     None
    /// });
    /// assert_eq!(numbers, [0, 1, 2]);
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    #[inline]
    pub fn number(&self) -> usize {
        self.number
    }

    /// The completed request, to be reused or dropped, and its result: the bytes moved, as [`File::read_at`] and
    /// [`File::write_at`] return it. `None` before the lane's first request.
    #[must_use]
    #[inline]
    pub fn into_ended(self) -> Option<(DirectRequest<'a>, Result<usize>)> {
        self.request.take().zip(self.outcome)
    }
}

/// How much of the memory of a [`Pipeline`]'s requests is registered with the kernel. Freed memory is
/// replaced by newer memory in the counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Registration {
    /// Bytes of registered regions.
    pub registered_bytes: u64,
    /// Bytes of regions that the kernel did not register, mostly because of `RLIMIT_MEMLOCK`; their
    /// requests are served unregistered.
    pub refused_bytes: u64,
}

/// Keeps many direct requests in flight from one thread: [`crate::Engine::pipeline`].
///
/// With io_uring, requests go to a private ring with registered files and [`Buffer`]s; with another backend
/// they run one after the other.
///
/// # Examples
///
/// Reads a file in pieces, four at a time, and adds up its bytes:
///
/// ```
/// use millpond::direct::{DirectRequest, SegmentList};
/// use millpond::{Engine, OpenOptions};
/// # let dir = tempfile::tempdir_in(".").unwrap();
/// # let path = dir.path().join("data");
/// # std::fs::write(&path, vec![1; 1 << 20]).unwrap();
/// let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// let file = match engine.open(&path, &OpenOptions::new().read(true).direct(true)) {
///     Ok(file) => file,
///     Err(error) => return Ok(println!("no direct I/O here: {error}")),
/// };
/// let mut buffers = engine.alloc_buffers(4, 64 << 10)?;
/// let mut offsets = (0..file.len()?).step_by(64 << 10);
/// let mut sum = 0u64;
/// engine.pipeline(4)?.run(|lane| {
///     let ended = lane.into_ended().map(|(request, outcome)| {
///         let moved = outcome.expect("the file can be read");
///         sum += request.slices().flatten().take(moved).map(|&byte| u64::from(byte)).sum::<u64>();
///         request
///     });
///     let offset = offsets.next()?; // at the end of the file: no more requests of this lane
///     let mut request = ended.or_else(|| {
///         let list = SegmentList::from_buffers(vec![buffers.pop()?]);
///         Some(DirectRequest::read(&file, list, offset))
///     })?;
///     request.set_offset(offset);
///     Some(request)
/// });
/// assert_eq!(sum, 1 << 20);
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug)]
pub struct Pipeline {
    carrier: ProcessLocal<Carrier>,
    depth: usize,
    ended: VecDeque<RingCompletion>,
    /// The ring accepts requests only from the thread that created it.
    not_send: PhantomData<*const ()>,
}

enum Carrier {
    Ring(Box<FixedRing>),
    Calls,
}

impl std::fmt::Debug for Carrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Carrier::Ring(_) => "ring",
            Carrier::Calls => "calls",
        })
    }
}

impl Pipeline {
    pub(crate) fn new(shared: &Shared, depth: usize) -> Result<Pipeline> {
        if !(1..=PIPELINE_DEPTH_MAX).contains(&depth) {
            let what = format!("pipeline depth {depth}: must be 1 to {PIPELINE_DEPTH_MAX}");
            return Err(Error::InvalidInput { op: Op::Build, what });
        }
        let carrier = match shared.backend.kind {
            BackendKind::Uring(_) => {
                let ring = FixedRing::new(depth as u32);
                Carrier::Ring(Box::new(ring.map_err(|error| Error::io(Op::Build, 0, 0, error))?))
            }
            _ => Carrier::Calls,
        };
        let mut ended = VecDeque::new();
        ended.try_reserve_exact(depth).map_err(|_| Error::io(Op::Build, 0, 0, no_memory()))?;
        Ok(Pipeline { carrier: ProcessLocal::new(carrier), depth, ended, not_send: PhantomData })
    }

    /// Calls `step` for requests until it has no more, and returns when all have completed.
    ///
    /// `step` is called once for each [`Lane`] (fewer than the depth if memory is short), and again whenever the
    /// lane's request has completed. It returns the lane's next request, or `None`: then the lane is not used
    /// again. Requests complete in any order. Each is atomic
    /// with respect to all other operations of its file, and coherent with the cache. If one overlaps with
    /// another thread's operation, or with dirty pages of the cache, it waits until the earlier requests of
    /// the pipeline have completed, and then for that. Requests that overlap with each other take effect in
    /// the order in which they were submitted, except that a read from beyond the end of the file completes
    /// at once. Writes beyond the end overlap: extend the file first ([`File::allocate`],
    /// [`File::truncate`]).
    ///
    /// `step` must not use the files that have requests in flight, except by requests, nor wait for a
    /// thread that does: it could wait for itself. Completions are reaped only between calls of `step`;
    /// until then other threads wait for the ranges of the requests.
    ///
    /// # Panics
    ///
    /// If `step` panics; after all requests in flight have completed.
    pub fn run<'a>(&mut self, mut step: impl FnMut(Lane<'_, 'a>) -> Option<DirectRequest<'a>>) {
        let (slots, depth) = slots(self.depth);
        let mut lanes = Lanes {
            carrier: &mut self.carrier,
            ended: &mut self.ended,
            slots,
            stalled: VecDeque::with_capacity(depth),
            under_way: 0,
            undecided: VecDeque::new(),
            doubted: Vec::new(),
        };
        for number in 0..depth as u32 {
            lanes.next(number, None, &mut step);
        }
        while lanes.under_way > 0 || !lanes.stalled.is_empty() || !lanes.undecided.is_empty() {
            lanes.turn(&mut step);
        }
    }

    /// How much of the memory used so far is registered.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::Engine;
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// let registration = engine.pipeline(1)?.registration();
    /// assert_eq!(registration.registered_bytes, 0, "it has not been used");
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn registration(&self) -> Registration {
        match &*self.carrier {
            Carrier::Ring(ring) => Registration {
                registered_bytes: ring.registered_bytes,
                refused_bytes: ring.refused_bytes,
            },
            Carrier::Calls => Registration::default(),
        }
    }
}

/// A lane's request, and whether it is in flight (P1): it is from its start on.
#[derive(Default)]
struct Slot<'a> {
    request: Option<DirectRequest<'a>>,
    begun: Option<StartedDirect<'a>>,
    /// The same after the back end has ended it (P4).
    undecided: Option<Undecided<'a>>,
    moved: u64,
    retries: TransientRetries,
}

/// Slots for `depth` lanes, or as many as there is memory for.
fn slots<'a>(mut depth: usize) -> (Vec<Slot<'a>>, usize) {
    let mut slots = Vec::new();
    while depth > 1 && slots.try_reserve_exact(depth).is_err() {
        depth /= 2;
    }
    slots.resize_with(depth, Slot::default);
    (slots, depth)
}

struct Lanes<'p, 'a> {
    carrier: &'p mut ProcessLocal<Carrier>,
    /// Completions that are not processed yet.
    ended: &'p mut VecDeque<RingCompletion>,
    slots: Vec<Slot<'a>>,
    /// Lanes whose requests overlap other operations, in order.
    stalled: VecDeque<u32>,
    /// The number of slots in flight.
    under_way: usize,
    /// Lanes whose durable writes have completed without an error: their success depends on the other members of
    /// their epoch (P4).
    undecided: VecDeque<u32>,
    /// Files whose length is to be loaded as soon as no request is in flight (P2). They may have been closed (P5).
    doubted: Vec<Weak<CachedFile>>,
}

impl<'a> Lanes<'_, 'a> {
    /// Calls `step` for the lane's next request, until that is in flight or stalled, or there is none.
    #[inline]
    fn next(
        &mut self,
        number: u32,
        mut outcome: Option<Result<usize>>,
        step: &mut impl FnMut(Lane<'_, 'a>) -> Option<DirectRequest<'a>>,
    ) {
        loop {
            let request = &mut self.slots[number as usize].request;
            *request = step(Lane { number: number as usize, request, outcome });
            if request.is_none() {
                return;
            }
            // Behind the stalled ones, so that the requests in flight come to their end (P2).
            if !self.stalled.is_empty() || !self.doubted.is_empty() {
                self.stalled.push_back(number);
                return;
            }
            match self.start(number, Blocking::Try) {
                Start::UnderWay => return,
                Start::Stalled => {
                    self.stalled.push_back(number);
                    return;
                }
                Start::Ended(ended) => outcome = Some(ended),
            }
        }
    }

    /// Waits for a completion, and continues with its lane.
    fn turn(&mut self, step: &mut impl FnMut(Lane<'_, 'a>) -> Option<DirectRequest<'a>>) {
        if self.under_way == 0 {
            if self.undecided.is_empty() {
                self.wake_stalled(step);
            } else {
                self.settle_undecided(Blocking::Wait, step);
            }
            return;
        }
        self.wait();
        while let Some((number, outcome)) = self.ended.pop_front() {
            if let Some(outcome) = self.end(number, outcome) {
                self.next(number, Some(outcome), step);
            }
        }
        self.settle_undecided(Blocking::Try, step);
    }

    /// Continues with the lanes whose durable writes are decided; waits for the first of them only while no
    /// request is in flight (P4).
    fn settle_undecided(
        &mut self,
        mut blocking: Blocking,
        step: &mut impl FnMut(Lane<'_, 'a>) -> Option<DirectRequest<'a>>,
    ) {
        for _ in 0..self.undecided.len() {
            let number = self.undecided.pop_front().expect("counted");
            match self.try_settle(number, std::mem::replace(&mut blocking, Blocking::Try)) {
                Some(outcome) => self.next(number, Some(outcome), step),
                None => self.undecided.push_back(number),
            }
        }
    }

    /// Completes a lane's durable write if its success is decided.
    fn try_settle(&mut self, number: u32, blocking: Blocking) -> Option<Result<usize>> {
        let slot = &mut self.slots[number as usize];
        let extent = slot.request.as_ref().expect("of its lane").extent();
        let is_ready = |undecided: &mut Undecided<'_>| {
            blocking == Blocking::Wait || undecided.is_decided(extent)
        };
        let ended = slot.undecided.take_if(is_ready)?.end_write(extent);
        Some(self.note(extent.file, ended))
    }

    /// No request is in flight: waits for the operation that blocks the first stalled request, and starts
    /// the others up to the next one that would have to wait (P2).
    #[cold]
    fn wake_stalled(&mut self, step: &mut impl FnMut(Lane<'_, 'a>) -> Option<DirectRequest<'a>>) {
        let mut blocking = Blocking::Wait;
        while let Some(number) = self.stalled.pop_front() {
            match self.start(number, blocking) {
                Start::UnderWay => blocking = Blocking::Try,
                Start::Stalled => return self.stalled.push_front(number),
                Start::Ended(outcome) => self.next(number, Some(outcome), step),
            }
        }
    }

    #[inline]
    fn start(&mut self, number: u32, blocking: Blocking) -> Start {
        let slot = &mut self.slots[number as usize];
        let request = slot.request.as_ref().expect("looked at");
        if let Err(error) = request.check() {
            return Start::Ended(Err(error));
        }
        match direct_io::begin(request.extent(), blocking, &mut slot.begun) {
            Ok(Begin::Begun) => {
                slot.moved = 0;
                slot.retries.reset();
                self.under_way += 1;
                push(self.carrier, self.ended, number, request, 0);
                Start::UnderWay
            }
            Ok(Begin::Conflict) => Start::Stalled,
            Ok(Begin::Nothing) => Start::Ended(Ok(0)),
            Err(error) => Start::Ended(Err(error)),
        }
    }

    #[inline]
    fn wait(&mut self) {
        assert!(!self.carrier.is_inherited(), "requests that the process's parent has under way");
        if let Carrier::Ring(ring) = &mut **self.carrier {
            ring.wait(usize::from(self.ended.is_empty()), self.ended);
        }
    }

    /// Records the result of a request; `None` if it continues.
    #[inline]
    fn end(&mut self, number: u32, outcome: io::Result<usize>) -> Option<Result<usize>> {
        let slot = &mut self.slots[number as usize];
        let request = slot.request.as_ref().expect("under way");
        let total = request.inner.list.total();
        let error = match outcome {
            Ok(moved) => {
                slot.moved += moved as u64;
                if moved > 0 {
                    slot.retries.reset();
                }
                if slot.moved < total && !is_over(request, moved as u64) {
                    push(self.carrier, self.ended, number, request, slot.moved);
                    return None;
                }
                let is_short = slot.moved < total && request.inner.direction == Direction::Write;
                is_short.then(|| io::Error::from(io::ErrorKind::WriteZero))
            }
            // The other requests of the pipeline stay in flight during a pause.
            Err(error) if is_transient(&error) && slot.retries.may_try() => {
                push(self.carrier, self.ended, number, request, slot.moved);
                return None;
            }
            Err(error) => Some(error),
        };
        if error.is_some() && request.inner.direction == Direction::Write {
            // A partial write may have to be truncated, for which the kernel waits for all direct I/O of
            // the file (P2).
            let others = self.under_way - 1 - self.ended.len();
            if let Carrier::Ring(ring) = &mut **self.carrier {
                ring.wait(others, self.ended);
            }
        }
        let begun = slot.begun.take().expect("under way");
        self.under_way -= 1;
        let transfer = Transfer { moved: slot.moved, error, ..request.operation().transfer() };
        let extent = request.extent();
        match begun.end_with(extent, transfer, Blocking::Try) {
            Conclusion::Undecided(undecided) => {
                slot.undecided = Some(undecided);
                self.undecided.push_back(number);
                None
            }
            Conclusion::Ended(ended) => Some(self.note(extent.file, ended)),
        }
    }

    /// Notes that a request has released its range.
    #[inline]
    fn note(&mut self, file: &CachedFile, ended: direct_io::DirectEnd) -> Result<usize> {
        if ended.is_len_in_doubt {
            self.doubted.push(Weak::clone(&file.this));
        }
        if self.under_way == 0 && self.undecided.is_empty() && !self.doubted.is_empty() {
            self.adopt_sizes();
        }
        ended.outcome
    }

    /// No request is in flight, and no range is held.
    #[cold]
    fn adopt_sizes(&mut self) {
        for file in self.doubted.drain(..).filter_map(|file| file.upgrade()) {
            // The next operation that finds a different end tries again.
            let _ = file.adopt_size();
        }
    }
}

/// The result of starting a request.
enum Start {
    UnderWay,
    Stalled,
    Ended(Result<usize>),
}

/// Whether a request that moved this much in its last attempt can't continue.
#[cold]
fn is_over(request: &DirectRequest<'_>, moved: u64) -> bool {
    let operation = request.operation();
    let block_bytes = retry::block_bytes(&*operation.extent.file.backing, &operation.transfer());
    is_end(moved, block_bytes)
}

/// Submits the rest of a request to the backend.
#[inline]
fn push(
    carrier: &mut Carrier,
    ended: &mut VecDeque<RingCompletion>,
    number: u32,
    request: &DirectRequest<'_>,
    moved: u64,
) {
    let mut transfer = request.operation().transfer();
    if moved > 0 {
        transfer.moved = moved;
        transfer = transfer.rest();
    }
    let backing = &request.inner.file.cached().backing;
    if let Carrier::Ring(ring) = carrier
        && !ring.is_broken()
        && let Some(route) = backing.route(&transfer)
    {
        match route {
            // SAFETY: P1: the slot keeps the request, and with it the list's memory and array, and the
            // file, until it was reaped. (A list of one segment has no array that the kernel reads.) A list
            // that names a region has all of its memory in it, and keeps a buffer of it.
            Ok(route) => unsafe {
                ring.push(number, route, backing, &transfer, request.inner.list.region());
            },
            Err(error) => ended.push_back((number, Err(error))),
        }
        return;
    }
    ended.push_back((number, retry::try_one(&**backing, transfer)));
}

impl Drop for Lanes<'_, '_> {
    /// P1, also when `step` unwinds.
    fn drop(&mut self) {
        if self.carrier.is_inherited() {
            // Its requests, with their guards, are the parent's.
            return std::mem::forget(std::mem::take(&mut self.slots));
        }
        loop {
            while let Some((number, outcome)) = self.ended.pop_front() {
                let _ = self.end(number, outcome);
            }
            if self.under_way == 0 {
                break;
            }
            self.wait();
        }
        while let Some(number) = self.undecided.pop_front() {
            let _ = self.try_settle(number, Blocking::Wait);
        }
        if let Carrier::Ring(ring) = &mut **self.carrier {
            ring.release_files();
        }
    }
}
