//! A read that does not wait: it hits, or starts reads of the missing pages and is called again.
//!
//! The asynchronous counterpart of `fill`. It is a state machine without a thread and without memory of its reader's;
//! futures and queues drive it, and have a worker read where only a thread can go on. Between two steps neither the
//! back end nor the kernel has a pointer to the reader's memory, and no guard is held. So a read can be dropped at any
//! time.
//!
//! ```text
//!         +----------------------------------------------------------------+
//!         v                                                                | woken
//!   hit? -+-> done                                                         |
//!         +-> a page is EMPTY --> guard: try, else ask for it ------> [GUARD]
//!         |       |  guard held
//!         |       +-> slot? no ------------------------------------> [ROOM]
//!         |       +-> claim, start reads; each keeps the guard and its slot until it ends --> [READS]
//!         |       +-> or, if that is the plan, start one bypass read ----------------------> [READS] done
//!         +-> none is EMPTY, one is FILLING or HIDDEN --> arm ------> [PAGE]
//!         +-> no frame, a read failed, too many rounds, too long --> a worker, `read_slow`, waiting
//! ```
//!
//! - **M1** A hit is a hit of `read`: its bytes are of one moment, whichever read filled the pages.
//! - **M2** Before a task waits for a page, all pages of its read that were EMPTY have been tried: reads of all
//!   missing pages are in flight at once, contiguous pages as one read. The end of the last of them wakes the task,
//!   after it has released guard and slot. Then the task waits for pages that other readers fill.
//! - **M3** A page is FILLING only while a read of it is in flight (fill.F1): its reader has slot, guard and frame
//!   before it claims the page, and starts the reads before it waits.
//! - **M4** The guard over all pages of the read goes with each read that it starts (page.W3), and ends with
//!   the last: nothing can hide the pages before they are READY or EMPTY again.
//! - **M5** Only the error of a worker's read is final (fill.F3): a started read that fails or is short
//!   leaves its pages EMPTY, and its task goes to a worker, which tries page by page.
//! - **M6** The pages that a task has filled can be evicted before it copies them. After [`ROUNDS_MAX`] rounds a
//!   worker reads under a guard, so a tiny cache makes progress.
//! - **M7** A step of scope [`StepScope::CopyOnly`] takes no guard, no frame and no slot: it may run on the thread that ended
//!   a fill, in the middle of that end (wait_queue.WQ4).
//! - **M8** A task that finds no slot leaves an offer (`io::read_limit`). When a slot is free, the offer starts the
//!   task's reads and then wakes the task. It runs on the thread of a read that has ended and has released guard and
//!   slot. So at the limit, too, reads follow each other without another thread, whether or not tasks are polled.
//! - **M9** A bypass read goes into frames that no page word refers to (`read::background`). Its step copies from
//!   them and is done, in any state of the pages. If a byte is missing, a worker reads.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use millpond_rangelock::callback::TaskWaker;
use millpond_rangelock::{Mode, OwnedGuard};

use crate::cache::table::page::PageState;
use crate::cache::table::wait_queue::{WaitEntry, wait_table};
use crate::error::Result;
use crate::inode::leaves::Leaves;
use crate::inode::{CachedFile, Shared};
use crate::io::backend::shared_ring::SharedRing;
use crate::io::read_limit::{Flight, FlightSlot, FlightTicket, Offer};
use crate::io::segment::{Front, SegmentIter};
use crate::latency::LatencyKind;
use crate::read::background::{FrameBypass, ReadsInFlight};
use crate::read::hit::{HIT_PAGES_MAX, HitPath, TRIES_MAX};
use crate::read::mapped_read;
use crate::read::plan::{BypassPolicy, ReadPlan, plan};
use crate::read::run::{Claims, Next};
use crate::read::{self};
use crate::units::PageIndex;
use crate::waits::{TaskWait, WaitFor};

/// The number of times that a read starts reads of missing pages before a worker does it. Chosen, not measured.
const ROUNDS_MAX: u32 = 4;

/// The file, the range and the destination of a read.
pub(crate) struct PendingRead<'a> {
    pub(crate) file: &'a Arc<CachedFile>,
    pub(crate) dst: SegmentIter<'a>,
    pub(crate) offset: u64,
    /// The ring of the queue that waits for it, if there is one.
    pub(crate) ring: Option<&'a Arc<SharedRing>>,
    pub(crate) policy: BypassPolicy,
}

/// How much a step may do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepScope {
    /// All but waiting.
    Full,
    /// Copying, or arming (M7).
    CopyOnly,
}

/// How a step ended.
pub(crate) enum Step {
    Done(Result<usize>),
    /// The pages may have become READY: it may be a hit.
    Hit,
    /// The waker will be woken.
    Pending,
    /// Needs a step at full scope; the waker will not be woken.
    NeedsFullScope,
    /// Needs a thread that may wait ([`Miss::read_waiting`]); the waker will not be woken.
    NeedsThread,
}

type GuardRequest = Pin<Box<dyn Future<Output = OwnedGuard> + Send>>;

/// The event for which a read waits.
enum WaitEvent {
    Nothing,
    Page(WaitEntry),
    /// The reads that it has started: the end of the last wakes the task.
    Reads,
    Guard(GuardRequest),
    Room(Arc<Shared>, FlightTicket),
}

/// A read that was not a hit, from one step to the next.
pub(crate) struct Miss {
    wait: WaitEvent,
    rounds: u32,
    /// Pages may have been filled since the last try.
    may_hit: bool,
    /// The reads that this task has started.
    reads: Option<Arc<ReadsInFlight>>,
    /// The frames of its bypass read.
    bypass: Option<Arc<FrameBypass>>,
    begun: Instant,
    /// Set once the read is pending, until its end.
    wait_record: Option<TaskWait>,
}

/// The result of a look at the pages.
enum MissStep {
    /// It can't be a hit: it is too long, there are no bytes, or a read that the task has started has failed.
    Unfit,
    /// All are READY, or they were when looked at.
    Ready,
    Missing,
    Parked(WaitEntry),
}

/// The outcome of starting reads of the missing pages.
enum StartedReads {
    /// Of all pages that were EMPTY.
    All,
    NoFrame,
    NoSlot,
}

impl PendingRead<'_> {
    /// The lock-free read.
    #[inline]
    pub(crate) fn try_hit(&self) -> Option<usize> {
        let slot = self.file.cache().counters.local();
        if let Some(pages) = self.file.mapped_pages.as_deref() {
            return mapped_read::try_read(self.file, pages, slot, self.dst, self.offset);
        }
        let path = HitPath::new(self.file, slot, TRIES_MAX);
        match self.dst.front(2) {
            Front::One(one) if one.len() as u64 == self.dst.left() => {
                // SAFETY: the segment is valid for writes, as its maker vouched.
                unsafe { path.try_read(one.base(), one.len(), self.offset) }
            }
            _ => path.try_read_vectored(self.dst, self.offset),
        }
    }

    /// Continues the read, which is not empty and was checked: as a hit, or by steps of `miss`.
    pub(crate) fn step(&self, miss: &mut Miss, waker: &Waker, scope: StepScope) -> Step {
        loop {
            if miss.may_hit
                && miss.bypass.is_none()
                && let Some(moved) = self.try_hit()
            {
                return miss.end(self.file, Ok(moved));
            }
            miss.may_hit = true;
            match miss.step(self, waker, scope) {
                Step::Hit => {}
                Step::Done(result) => return miss.end(self.file, result),
                step => return step,
            }
        }
    }

    /// Looks for pages that are EMPTY; if there are none, arms the first that is not READY.
    fn find_empty_page(&self, waker: &Waker) -> MissStep {
        let file = self.file;
        if file.mapped_pages.is_some() {
            // Only the back end has its bytes (mapped_pages.MB1).
            return MissStep::Missing;
        }
        let end = (self.offset + self.dst.left()).min(file.core().size.get());
        // Relaxed: a hint.
        if end <= self.offset || !file.shared.hit_path.load(Relaxed) {
            return MissStep::Unfit;
        }
        let (first, last) = (file.page_of(self.offset), file.page_of(end - 1));
        if last - first >= file.chunk_pages(HIT_PAGES_MAX) as u64 {
            return MissStep::Unfit;
        }
        let mut leaves = Leaves::new(file);
        loop {
            let mut busy = None;
            for page in first.to(last) {
                let Ok(held) = leaves.hold(page, false) else { return MissStep::Missing };
                let seen = held.word(page).load();
                match seen.state() {
                    PageState::Empty => return MissStep::Missing,
                    PageState::Ready if seen.has_marker() => {
                        // The marker came with the bytes, after this read had started its read-ahead.
                        held.word(page).take_marker();
                    }
                    PageState::Ready => {}
                    PageState::Filling | PageState::Hidden => busy = busy.or(Some(page)),
                }
            }
            let Some(page) = busy else { return MissStep::Ready };
            let Ok(held) = leaves.hold(page, false) else { return MissStep::Missing };
            if let Some(parked) = wait_table().register(held.word(page), waker) {
                return MissStep::Parked(parked);
            }
        }
    }
}

impl Miss {
    /// A read that was tried just now, after [`File::read_ahead`](crate::api::file::File::read_ahead).
    pub(crate) fn new() -> Miss {
        Miss {
            wait: WaitEvent::Nothing,
            rounds: 0,
            may_hit: false,
            reads: None,
            bypass: None,
            begun: Instant::now(),
            wait_record: None,
        }
    }

    fn end(&self, file: &CachedFile, result: Result<usize>) -> Step {
        file.cache().counters.local().took(LatencyKind::ReadMiss, self.begun);
        Step::Done(result)
    }

    /// One step of a read that is no hit. The read is the same each time.
    fn step(&mut self, wanted: &PendingRead<'_>, waker: &Waker, scope: StepScope) -> Step {
        let step = self.advance(wanted, waker, scope);
        // Records the event that it waits for.
        let what = match (&step, &self.wait) {
            (Step::Done(_) | Step::Hit | Step::NeedsFullScope, _) => return step,
            (Step::NeedsThread, _) => WaitFor::Worker,
            (Step::Pending, WaitEvent::Nothing | WaitEvent::Reads) => WaitFor::Read,
            (Step::Pending, WaitEvent::Page(_)) => WaitFor::Page,
            (Step::Pending, WaitEvent::Guard(_)) => WaitFor::Range,
            (Step::Pending, WaitEvent::Room(..)) => WaitFor::Slot,
        };
        match &mut self.wait_record {
            Some(record) => record.waits_for(what),
            None => {
                let (file, len) = (wanted.file, wanted.dst.left());
                self.wait_record = Some(file.shared.tasks.begin(what, file.id, wanted.offset, len));
            }
        }
        step
    }

    fn advance(&mut self, wanted: &PendingRead<'_>, waker: &Waker, scope: StepScope) -> Step {
        // Before the state changes: the clone of the waker may panic (`millpond_rangelock::callback`).
        let waits_for_reads = matches!(self.wait, WaitEvent::Reads);
        if waits_for_reads && !self.reads.as_ref().is_some_and(|it| it.has_ended_or_wakes(waker)) {
            return Step::Pending;
        }
        let mut request = None;
        match std::mem::replace(&mut self.wait, WaitEvent::Nothing) {
            WaitEvent::Guard(waiting) => request = Some(waiting),
            other => other.withdraw(),
        }
        let has_failed = self.reads.as_ref().is_some_and(|reads| reads.has_failed());
        if let Some(bypass) = self.bypass.take().filter(|_| !has_failed) {
            return Step::Done(bypass.copy_to(wanted.file, wanted.dst));
        }
        let found = if has_failed { MissStep::Unfit } else { wanted.find_empty_page(waker) };
        if let MissStep::Parked(parked) = found {
            self.wait = WaitEvent::Page(parked);
            return Step::Pending;
        }
        self.rounds += u32::from(scope == StepScope::Full);
        let step = match found {
            _ if scope == StepScope::CopyOnly => Some(Step::NeedsFullScope),
            MissStep::Unfit => Some(Step::NeedsThread),
            _ if self.rounds > ROUNDS_MAX => Some(Step::NeedsThread),
            MissStep::Ready => Some(Step::Hit),
            _ => None,
        };
        if let Some(step) = step {
            if !matches!(step, Step::NeedsThread) {
                self.wait = request.map_or(WaitEvent::Nothing, WaitEvent::Guard);
            }
            return step;
        }
        let Some(guard) = self.guard(request.take(), wanted, waker) else {
            return Step::Pending;
        };
        let plan = plan(wanted.file, wanted.policy, (wanted.offset, wanted.dst.left()), None);
        let (ReadPlan::Bypass(extent) | ReadPlan::Fill(extent)) = plan else {
            drop(guard);
            return Step::NeedsThread;
        };
        // The file may have grown since it was looked at. A fill of more pages would take all frames.
        let pages_max = wanted.file.chunk_pages(HIT_PAGES_MAX) as u64;
        if matches!(plan, ReadPlan::Fill(_)) && extent.page_count(wanted.file) > pages_max {
            drop(guard);
            return Step::NeedsThread;
        }
        let (first, last) = extent.pages(wanted.file);
        let pages = first..last + 1;
        let reads = self.reads.get_or_insert_with(|| Arc::new(ReadsInFlight::new()));
        let ring = SharedRing::of_this_batch(wanted.ring);
        let bypass = match plan {
            ReadPlan::Bypass(_) => FrameBypass::start(wanted.file, guard, extent, reads, ring),
            _ => Err(guard),
        };
        let started = match bypass {
            Ok(bypass) => {
                self.bypass = Some(bypass);
                StartedReads::All
            }
            // Only the back end has its bytes, and its pages are never filled (mapped_pages.MB1).
            Err(guard) if wanted.file.mapped_pages.is_some() => {
                drop(guard);
                StartedReads::NoFrame
            }
            Err(guard) => start_missing(wanted.file, guard, pages.clone(), reads, ring, &mut None),
        };
        match started {
            StartedReads::All => {
                self.wait = WaitEvent::Reads;
                if reads.has_ended_or_wakes(waker) { Step::Hit } else { Step::Pending }
            }
            StartedReads::NoFrame => Step::NeedsThread,
            StartedReads::NoSlot => {
                let offer = offer(wanted, pages, reads, waker);
                let shared = &wanted.file.shared;
                let Some(ticket) = shared.flight.wait(offer) else { return Step::Hit };
                self.wait = WaitEvent::Room(Arc::clone(shared), ticket);
                self.rounds -= 1;
                Step::Pending
            }
        }
    }

    /// A shared guard over the read: from the pending request, or from a new one. `None`: the request is pending.
    fn guard(
        &mut self,
        request: Option<GuardRequest>,
        wanted: &PendingRead<'_>,
        waker: &Waker,
    ) -> Option<OwnedGuard> {
        let ranges = &wanted.file.ranges;
        // The whole range, not only its part below the present size: a pending request has the range of the step that
        // made it, and the file may grow before it is granted (page.W3).
        let range = wanted.file.pages(wanted.offset, wanted.offset + wanted.dst.left());
        if request.is_none()
            && let Some(guard) = ranges.try_lock_owned(range, Mode::Shared)
        {
            return Some(guard);
        }
        let mut waiting =
            request.unwrap_or_else(|| Box::pin(ranges.lock_owned_async(range, Mode::Shared)));
        match waiting.as_mut().poll(&mut Context::from_waker(waker)) {
            Poll::Ready(guard) => Some(guard),
            Poll::Pending => {
                self.wait = WaitEvent::Guard(waiting);
                // A request is no round: the task is in the queue now.
                self.rounds = self.rounds.saturating_sub(1);
                None
            }
        }
    }

    /// Reads it as a thread that may wait does (M5, M6).
    pub(crate) fn read_waiting(self, wanted: &PendingRead<'_>) -> Result<usize> {
        let begun = self.begun;
        // The thread makes its own records of its waits.
        drop(self);
        let PendingRead { file, dst, offset, policy, .. } = *wanted;
        let result = read::read_slow(file, dst, offset, policy);
        file.cache().counters.local().took(LatencyKind::ReadMiss, begun);
        result
    }
}

impl WaitEvent {
    /// Withdraws the registration that would wake the task.
    fn withdraw(self) {
        match self {
            WaitEvent::Page(parked) => wait_table().deregister(&parked),
            WaitEvent::Room(shared, ticket) => shared.flight.withdraw_offer(ticket),
            WaitEvent::Nothing | WaitEvent::Reads | WaitEvent::Guard(_) => {}
        }
    }
}

impl Drop for Miss {
    fn drop(&mut self) {
        std::mem::replace(&mut self.wait, WaitEvent::Nothing).withdraw();
    }
}

/// Starts reads of the pages that are EMPTY, under a guard over all (M2, M3, M4). `spare`: a slot for the first of them,
/// if the caller has one.
fn start_missing(
    file: &Arc<CachedFile>,
    guard: OwnedGuard,
    pages: Range<PageIndex>,
    reads: &Arc<ReadsInFlight>,
    ring: Option<&Arc<SharedRing>>,
    spare: &mut Option<FlightSlot>,
) -> StartedReads {
    let is_one_page = pages.end - pages.start == 1;
    // The reads of several runs share the guard.
    let (mut own, shared) =
        if is_one_page { (Some(guard), None) } else { (None, Some(Arc::new(guard))) };
    // The size is stable under the guard, as far as it concerns these pages (write.W5).
    let mut claims = Claims::new(file, pages, file.core().size.get());
    claims.alone = is_one_page;
    loop {
        let next = claims.next_run(&mut || {
            if spare.is_none() {
                *spare = Flight::try_enter(&file.shared.flight);
            }
            spare.is_some()
        });
        let run = match next {
            Next::Run(run) => run,
            Next::End => return StartedReads::All,
            Next::NoFrame => {
                file.shared.flusher.request_reclaim(file.cache().writeback_counts.unevictable());
                return StartedReads::NoFrame;
            }
            Next::NoSlot => return StartedReads::NoSlot,
        };
        file.cache().counters.local().missed(run.frames.len() as u64);
        let keep = (own.take(), shared.clone(), spare.take());
        // Where it is refused, it has failed.
        run.start(file, keep, Some(Arc::clone(reads)), ring);
    }
}

/// M8.
fn offer(
    wanted: &PendingRead<'_>,
    pages: Range<PageIndex>,
    reads: &Arc<ReadsInFlight>,
    waker: &Waker,
) -> Offer {
    let (file, ring) = (Arc::clone(wanted.file), wanted.ring.cloned());
    let (reads, waker) = (Arc::clone(reads), TaskWaker::new(waker));
    Box::new(move |slot| {
        // Not before: the end of the reads that the task has started itself would wake it.
        reads.set_waker(waker);
        let mut spare = Some(slot);
        let range = file.pages(file.start_of(pages.start), file.start_of(pages.end));
        // If there is no guard, frame or further slot now, or nothing to read, the task's next step decides.
        let waits = file.ranges.try_lock_owned(range, Mode::Shared).is_some_and(|guard| {
            let ring = SharedRing::of_this_batch(ring.as_ref());
            let started = start_missing(&file, guard, pages, &reads, ring, &mut spare);
            matches!(started, StartedReads::All) && !reads.has_ended()
        });
        if !waits && let Some(waker) = reads.take_waker() {
            waker.wake();
        }
        spare
    })
}
