//! Many direct requests under way at once, from one thread.
//!
//! ```text
//!   step -> Request -> begin (guard, cache out of the way) -> ring -> reap -> end -> Done -> step
//!                         |  somebody holds the range                  ^
//!                         v                                            |
//!                      stalled, until all that is under way has ended, and then waited for
//! ```
//!
//! - **P1** A request that is under way, with its memory, is in a slot, which only its completion
//!   empties. A call of [`Pipeline::run`] does not end, nor unwind, before all slots are empty; so
//!   borrowed memory outlives the request, and nobody else can use it meanwhile.
//! - **P2** Nobody waits for a guard, or for a flush, who has requests under way: two pipelines, or a
//!   pipeline and its own requests, or a sync, can't wait for each other.
//! - **P3** In steady state nothing is allocated: requests move between the caller and the slots.

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;

use crate::buffers::Buffer;
use crate::cached::{BackendKind, CachedFile, Shared};
use crate::direct::{self, Begin, Begun, Operation, Patience};
use crate::error::{Error, Op, Result};
use crate::file::{File, check_range};
use crate::io::backend::fixed_ring::{Ended, FixedRing};
use crate::io::request::{self, Direction};
use crate::io::segment_list::{Access, Mut, RawList, SegmentList};

/// The most requests that a pipeline has under way.
pub const PIPELINE_DEPTH_MAX: usize = 4096;

/// A direct read or write, for a [`Pipeline`].
#[derive(Debug)]
pub struct Request<'a> {
    file: &'a File,
    list: RawList<'a>,
    is_mut: bool,
    direction: Direction,
    offset: u64,
    durable: bool,
}

impl<'a> Request<'a> {
    /// Reads into all of `list` from byte `offset` of a file that was opened
    /// [`direct`](crate::OpenOptions::direct).
    #[must_use]
    pub fn read(file: &'a File, list: SegmentList<'a, Mut>, offset: u64) -> Request<'a> {
        let (list, direction) = (list.into_raw(), Direction::Read);
        Request { file, list, is_mut: true, direction, offset, durable: false }
    }

    /// Writes all of `list` to byte `offset` of a file that was opened
    /// [`direct`](crate::OpenOptions::direct).
    #[must_use]
    pub fn write<A: Access>(file: &'a File, list: SegmentList<'a, A>, offset: u64) -> Request<'a> {
        let (list, direction) = (list.into_raw(), Direction::Write);
        let durable = file.is_dsync();
        Request { file, list, is_mut: A::IS_MUT, direction, offset, durable }
    }

    /// Of a write: whether it ends when the bytes are durable (`RWF_DSYNC`).
    #[must_use]
    pub fn durable(mut self, on: bool) -> Request<'a> {
        self.durable = on;
        self
    }

    /// The same with another offset.
    #[must_use]
    pub fn at(mut self, offset: u64) -> Request<'a> {
        self.offset = offset;
        self
    }

    /// Where in the file the request begins.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The number of bytes of its memory.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.list.total()
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its memory, in turn.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.list.slices()
    }

    /// Its memory, in turn, to be changed; nothing if it was made of memory that is only read.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        // SAFETY: looked at.
        let slices = self.is_mut.then(|| unsafe { self.list.slices_mut() });
        slices.into_iter().flatten()
    }

    /// The buffers that its list owns; none if it borrows.
    #[must_use]
    pub fn into_buffers(self) -> Vec<Buffer> {
        self.list.into_buffers()
    }

    fn operation(&self) -> Operation<'_> {
        Operation {
            file: self.file.cached(),
            direction: self.direction,
            offset: self.offset,
            segments: self.list.iter(),
            durable: self.durable,
        }
    }

    /// What can be said before anything is done.
    fn check(&self) -> Result<()> {
        let (op, len) = match self.direction {
            Direction::Read => (Op::Read, self.len()),
            Direction::Write => (Op::Write, self.len()),
        };
        check_range(op, self.offset, len)?;
        self.file.check_direct(op, self.offset, len)?;
        self.operation().check_alignment()
    }
}

/// A [`Request`] that has ended.
#[derive(Debug)]
pub struct Done<'a> {
    /// What was asked for; to be used again, or taken apart.
    pub request: Request<'a>,
    /// The bytes moved, as [`File::read_at`] and [`File::write_at`] say it.
    pub outcome: Result<usize>,
}

/// How much of the memory that a [`Pipeline`] was used with is registered with the kernel. Memory
/// that is gone does not count once there is other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Registration {
    /// Bytes of regions that are registered.
    pub registered_bytes: u64,
    /// Bytes of regions that the kernel would not register, mostly for `RLIMIT_MEMLOCK`; requests
    /// of theirs are served unregistered.
    pub refused_bytes: u64,
}

/// Keeps many direct requests under way from one thread: [`crate::Engine::pipeline`].
///
/// With io_uring, requests go to a ring of its own, files and [`Buffer`]s registered; with another
/// back end they are carried out one after the other.
///
/// # Examples
///
/// Reads a file in pieces, four at a time, and adds up its bytes:
///
/// ```
/// use millpond::{Engine, OpenOptions, Request, SegmentList};
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
/// engine.pipeline(4)?.run(|done| {
///     let list = match done {
///         Some(done) => {
///             let bytes = done.outcome.expect("the file can be read");
///             sum += done.request.slices().flatten().take(bytes).map(|&b| u64::from(b)).sum::<u64>();
///             done.request.into_buffers()
///         }
///         None => vec![buffers.pop()?],
///     };
///     Some(Request::read(&file, SegmentList::from_buffers(list), offsets.next()?))
/// });
/// assert_eq!(sum, 1 << 20);
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug)]
pub struct Pipeline {
    carrier: Carrier,
    depth: usize,
    ended: VecDeque<Ended>,
    /// The ring takes requests from the thread that made it alone.
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
        Ok(Pipeline {
            carrier,
            depth,
            ended: VecDeque::with_capacity(depth),
            not_send: PhantomData,
        })
    }

    /// Asks `step` for requests until it has no more, and returns when all have ended.
    ///
    /// `step` is called with `None` until as many requests are under way as the pipeline is deep, or
    /// it returns `None`; then with each request that has ended, and returns the next one in its
    /// place, or `None`. Requests end in any order. Each is atomic with respect to all other
    /// operations of its file, and coherent with the cache; where one overlaps with what somebody
    /// else has under way, or with what waits in the cache to be written back, it waits until those
    /// before it in the pipeline have ended, and then for that. Requests that overlap with each other
    /// take effect in the order in which they were given, save that a read from beyond the end of the
    /// file ends at once. Those that write beyond the end overlap: make the file as long before
    /// ([`File::allocate`], [`File::truncate`]).
    ///
    /// `step` must not use the files that have requests under way, other than by requests, nor wait
    /// for somebody who does: it could wait for itself. What has ended is only found between calls
    /// of `step`; until then others wait for the ranges of the requests.
    ///
    /// # Panics
    ///
    /// Where `step` does; after all that is under way has ended.
    pub fn run<'a>(&mut self, mut step: impl FnMut(Option<Done<'a>>) -> Option<Request<'a>>) {
        let depth = self.depth;
        let mut lanes = Lanes {
            carrier: &mut self.carrier,
            ended: &mut self.ended,
            slots: Vec::with_capacity(depth),
            free: (0..depth as u32).rev().collect(),
            stalled: VecDeque::new(),
            doubted: Vec::new(),
        };
        lanes.slots.resize_with(depth, || None);
        let mut wanted = depth;
        while wanted > 0 {
            let Some(request) = step(None) else { break };
            wanted -= 1;
            lanes.take(request, &mut step);
        }
        while lanes.is_busy() {
            lanes.turn(&mut step);
        }
    }

    /// How much of the memory used so far is registered.
    #[must_use]
    pub fn registration(&self) -> Registration {
        match &self.carrier {
            Carrier::Ring(ring) => Registration {
                registered_bytes: ring.registered_bytes,
                refused_bytes: ring.refused_bytes,
            },
            Carrier::Calls => Registration::default(),
        }
    }
}

/// A request that is under way (P1).
struct Slot<'a> {
    request: Request<'a>,
    begun: Begun<'a>,
    moved: u64,
}

struct Lanes<'p, 'a> {
    carrier: &'p mut Carrier,
    /// What has ended and was not looked at yet.
    ended: &'p mut VecDeque<Ended>,
    slots: Vec<Option<Slot<'a>>>,
    free: Vec<u32>,
    /// Requests that met somebody else's, in their order.
    stalled: VecDeque<Request<'a>>,
    /// Files whose length is to be looked at as soon as nothing is under way (P2).
    doubted: Vec<&'a CachedFile>,
}

/// What became of a request that was to begin.
enum Start<'a> {
    UnderWay,
    Stalled(Request<'a>),
    Done(Done<'a>),
}

impl<'a> Lanes<'_, 'a> {
    fn under_way(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn is_busy(&self) -> bool {
        self.under_way() > 0 || !self.stalled.is_empty()
    }

    /// Begins a request, and those that follow it at once.
    #[inline]
    fn take(
        &mut self,
        request: Request<'a>,
        step: &mut impl FnMut(Option<Done<'a>>) -> Option<Request<'a>>,
    ) {
        let mut next = Some(request);
        while let Some(request) = next.take() {
            // Behind those that wait, so that what is under way comes to its end (P2).
            if !self.stalled.is_empty() || !self.doubted.is_empty() {
                self.stalled.push_back(request);
                return;
            }
            match self.start(request, Patience::Try) {
                Start::UnderWay => {}
                Start::Stalled(request) => self.stalled.push_back(request),
                Start::Done(done) => next = step(Some(done)),
            }
        }
    }

    /// Waits until something has ended, and begins what `step` says.
    fn turn(&mut self, step: &mut impl FnMut(Option<Done<'a>>) -> Option<Request<'a>>) {
        if self.under_way() == 0
            && let Some(request) = self.stalled.pop_front()
        {
            match self.start(request, Patience::Wait) {
                Start::Done(done) => {
                    if let Some(request) = step(Some(done)) {
                        self.stalled.push_back(request);
                    }
                }
                Start::UnderWay | Start::Stalled(_) => {}
            }
            while let Some(request) = self.stalled.pop_front() {
                match self.start(request, Patience::Try) {
                    Start::UnderWay => {}
                    Start::Stalled(request) => {
                        self.stalled.push_front(request);
                        break;
                    }
                    Start::Done(done) => {
                        if let Some(request) = step(Some(done)) {
                            self.stalled.push_back(request);
                        }
                    }
                }
            }
            return;
        }
        self.wait();
        // Taken off one by one: `step` may unwind, and what has ended is ended by `drop` then.
        while let Some((number, outcome)) = self.ended.pop_front() {
            if let Some(done) = self.end(number, outcome)
                && let Some(request) = step(Some(done))
            {
                self.take(request, step);
            }
        }
    }

    #[inline]
    fn start(&mut self, request: Request<'a>, patience: Patience) -> Start<'a> {
        if let Err(error) = request.check() {
            return Start::Done(Done { request, outcome: Err(error) });
        }
        let file = request.file;
        match direct::begin(file.cached(), &request.operation(), patience) {
            Ok(Begin::Begun(begun)) => {
                let number = self.free.pop().expect("no more requests than lanes");
                let slot = self.slots[number as usize].insert(Slot { request, begun, moved: 0 });
                push(self.carrier, self.ended, number, slot);
                Start::UnderWay
            }
            Ok(Begin::Conflict) => Start::Stalled(request),
            Ok(Begin::Nothing) => Start::Done(Done { request, outcome: Ok(0) }),
            Err(error) => Start::Done(Done { request, outcome: Err(error) }),
        }
    }

    fn wait(&mut self) {
        if let Carrier::Ring(ring) = self.carrier {
            ring.wait(usize::from(self.ended.is_empty()), self.ended);
        }
    }

    /// Notes what became of a request; `None` if it goes on.
    #[inline]
    fn end(&mut self, number: u32, outcome: io::Result<usize>) -> Option<Done<'a>> {
        let slot = self.slots[number as usize].as_mut().expect("under way");
        let total = slot.request.list.total();
        let error = match outcome {
            Ok(moved) => {
                slot.moved += moved as u64;
                if slot.moved < total && !is_over(slot, moved as u64) {
                    push(self.carrier, self.ended, number, slot);
                    return None;
                }
                None
            }
            Err(error) if request::is_transient(&error) => {
                push(self.carrier, self.ended, number, slot);
                return None;
            }
            Err(error) => Some(error),
        };
        let Slot { request, begun, moved } = self.slots[number as usize].take().expect("under way");
        self.free.push(number);
        let short = moved < total && request.direction == Direction::Write;
        let error = error.or_else(|| short.then(|| io::ErrorKind::WriteZero.into()));
        let (outcome, is_len_in_doubt) = begun.end_apart(&request.operation(), moved, error);
        if is_len_in_doubt {
            self.doubted.push(request.file.cached());
        }
        if self.under_way() == 0 {
            self.adopt_sizes();
        }
        Some(Done { request, outcome })
    }

    /// Nothing is under way.
    fn adopt_sizes(&mut self) {
        for file in self.doubted.drain(..) {
            // The next operation that finds the end elsewhere tries again.
            let _ = file.adopt_size();
        }
    }
}

/// Whether a request that moved so much in its last attempt can't go on.
#[cold]
fn is_over(slot: &Slot<'_>, moved: u64) -> bool {
    let operation = slot.request.operation();
    let transfer = operation.transfer();
    let block_bytes = request::block_bytes(&*slot.request.file.cached().backing, &transfer);
    request::is_end(moved, block_bytes)
}

/// Gives what is left of a request to the back end.
#[inline]
fn push(carrier: &mut Carrier, ended: &mut VecDeque<Ended>, number: u32, slot: &Slot<'_>) {
    let operation = slot.request.operation();
    let mut transfer = operation.transfer();
    if slot.moved > 0 {
        transfer.moved = slot.moved;
        transfer = transfer.rest();
    }
    let backing = &*operation.file.backing;
    if let Carrier::Ring(ring) = carrier
        && let Some(descriptors) = backing.descriptors()
    {
        match descriptors.route(&transfer) {
            // SAFETY: P1: the slot keeps the request, and with it the list's memory and array, and
            // the file, until it was reaped. (A list of one segment has no array that the kernel
            // reads.) A list says which region all of its memory is in, and keeps a buffer of it.
            Ok((fd, flags)) => unsafe {
                ring.push(number, fd, flags, &transfer, slot.request.list.region());
            },
            Err(error) => ended.push_back((number, Err(error))),
        }
        return;
    }
    let mut batch = [transfer];
    backing.try_all(&mut batch);
    let [transfer] = batch;
    let outcome = match transfer.error {
        Some(error) => Err(error),
        None => Ok(transfer.moved as usize),
    };
    ended.push_back((number, outcome));
}

impl Drop for Lanes<'_, '_> {
    /// P1, also when `step` unwinds.
    fn drop(&mut self) {
        loop {
            while let Some((number, outcome)) = self.ended.pop_front() {
                let _ = self.end(number, outcome);
            }
            if self.under_way() == 0 {
                break;
            }
            self.wait();
        }
        if let Carrier::Ring(ring) = self.carrier {
            ring.release_files();
        }
    }
}
