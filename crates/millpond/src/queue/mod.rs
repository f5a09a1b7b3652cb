//! Completion queues: many operations submitted at once, and one wake-up for a batch of their ends.
//!
//! ```text
//!   submit -> admit -> a read that hits: completes at once
//!                   -> a direct read, or one that bypasses the cache: into its own or lent memory (`background_read`)
//!                   -> a read that misses: `task`, stepped by the threads that complete its fills
//!                   -> a write, a sync: a job for a worker
//!   end of an operation -> `waiting`: complete, dispatch by the `rules` -> wake the granted waiters
//! ```
//!
//! - **QU1** An admitted request completes exactly once: by its end, or by a cancel that took the request.
//! - **QU2** A completion is returned to one waiter, by the rules (rules.Q1 to rules.Q8).
//! - **QU3** The operations of a dropped queue run to their end; their completions are discarded.
//! - **QU4** Completions in a batch of one thread (`io::batch`) are published together, at the end of the
//!   batch. Until then the thread keeps them, and no shared lock or cache line is touched for each.
//!
//! Locks: the table of pending operations, a task's body, the rules. None is taken under another, but a
//! task may complete, and so take the other two, while a fill ends.

pub(crate) mod rules;

pub(crate) mod waiting;

mod inner;

mod request;

pub(crate) mod task;

#[cfg(all(test, loom))]
mod loom_tests;

#[cfg(all(test, not(loom)))]
mod rules_tests;

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;

use crate::api::background_read::{self, BackgroundBypass};
use crate::api::file::release_last_handle;
use crate::error::{Error, Op, Result};
use crate::io::backend::driver::{AbortOnUnwind, Driver};
use crate::io::backend::shared_ring::{HeldRing, SharedRing};
use crate::io::batch;
use crate::io::pool::Pool;
use crate::io::segment::SegmentIter;
use crate::process_local::ProcessLocal;
use crate::queue::inner::{Inner, Pending, take_request};
use crate::queue::request::Kind;
use crate::queue::rules::Ticket;
use crate::queue::task::ReadTask;
use crate::queue::waiting::{Deadlines, QueueWaiters};
use crate::read::miss::{PendingRead, StepScope};
use crate::read::plan::BypassPolicy;
use crate::sync::MutexExt;

pub use crate::queue::request::{Completion, Request};

/// The largest capacity of a queue. Chosen, not measured.
const CAPACITY_MAX: usize = 1 << 20;
/// The number of requests of one submission that are started together, and, for hits, completed together.
/// Chosen, not measured.
const BATCH_MAX: usize = 32;

/// A completion queue: submits many operations at once, and waits for completions in batches.
///
/// Any number of threads may submit and wait. A waiter states the minimum number of completions that it
/// wants, and is woken once, when they are there (after Kenneth Chen's and Zach Brown's work on Linux AIO).
/// It gets all of them, or, after its timeout, the completions that are there. Among several waiters, the
/// smallest minimum is served first, but no waiter starves: after as many completions went to other waiters
/// as the queue can hold, a waiter becomes senior, and ready completions are reserved for it.
///
/// Reads of cached bytes complete during their submission. A read that misses needs no thread: the thread
/// that completes its last fill finishes it, and on io_uring a waiter for the queue reaps it. The same
/// holds for direct reads into [`Buffer`](crate::Buffer)s. When few pages are read again
/// ([`Admission`](crate::Admission)), the device reads into the request's own memory, if its alignment
/// permits that ([`Buffer`](crate::Buffer)s are aligned), and nothing is copied. A few threads of the
/// engine run writes, syncs, and reads of more than 64 pages or an eighth of the cache.
///
/// Dropping a queue does not stop its operations. Wakers of [`Queue::wait_async`] are called as those of an
/// [`AsyncFile`](crate::AsyncFile) are.
///
/// A child of fork can't submit to its parent's queues.
///
/// # Examples
///
/// ```
/// # use std::sync::Arc;
/// # use millpond::queue::Request;
/// # use millpond::{Engine, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let path = tempfile::NamedTempFile::new().unwrap();
/// let options = OpenOptions::new().read(true).write(true);
/// let file = Arc::new(engine.open(&path, &options)?);
/// let queue = engine.queue(64)?;
/// queue.submit_all((0..8).map(|n| Request::write(&file, vec![n as u8; 512], n * 512).user_data(n)))?;
/// let done = queue.wait(8, 8, None)?; // one wake-up
/// assert!(done.iter().all(|one| one.result().is_ok_and(|moved| moved == 512)));
/// # Ok::<(), millpond::Error>(())
/// ```
///
/// Writes and syncs, a time limit, a cancellation, and a wait without a thread:
///
/// ```
/// # use std::sync::Arc;
/// # use std::time::Duration;
/// # use millpond::queue::Request;
/// # use millpond::{Engine, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let path = tempfile::NamedTempFile::new().unwrap();
/// # let file = Arc::new(engine.open(&path, &OpenOptions::new().read(true).write(true))?);
/// let queue = engine.queue(64)?;
/// assert_eq!((queue.capacity(), queue.counts()), (64, (0, 0)));
/// queue.submit_all([
///     Request::write_buffers(&file, engine.alloc_buffers(1, 4096)?, 0).user_data(1),
///     Request::write(&file, vec![7; 100], 8192).user_data(2),
/// ])?;
/// // Both, if they complete within 10 ms; after that one is enough.
/// let mut done = queue.wait_at_least(2, 64, Duration::from_millis(10), None)?;
/// while done.len() < 2 {
///     done.extend(queue.wait(1, 64, None)?);
/// }
/// queue.submit_all([Request::sync_data(&file).user_data(3), Request::sync_all(&file).user_data(4)])?;
/// if queue.cancel(4) {
///     println!("it completes with ECANCELED");
/// }
/// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     let mut future = pin!(future);
/// #     loop {
/// #         if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
/// #             return out;
/// #         }
/// #     }
/// # }
/// # block_on(async {
/// let done = queue.wait_async(2, 64)?.await;
/// assert_eq!(done.len(), 2);
/// # Ok::<(), millpond::Error>(())
/// # })?;
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug)]
pub struct Queue {
    inner: ProcessLocal<Arc<Inner>>,
}

impl Queue {
    /// With a ring, if `driver` can provide one.
    pub(crate) fn new(
        capacity: usize,
        workers: &Arc<Pool>,
        driver: Option<&Arc<Driver>>,
    ) -> Result<Queue> {
        if !(1..=CAPACITY_MAX).contains(&capacity) {
            let what = format!("capacity {capacity}: must be 1 to {CAPACITY_MAX}");
            return Err(Error::InvalidInput { op: Op::Wait, what });
        }
        workers.start().map_err(|error| Error::io(Op::Wait, 0, 0, error))?;
        let eventfd = Arc::new(OnceLock::<OwnedFd>::new());
        let notified = Arc::clone(&eventfd);
        let on_unassigned = move |events: usize| {
            if let Some(fd) = notified.get() {
                // Fails only if the counter is full, and then it is readable already.
                let _ = rustix::io::write(fd, &(events as u64).to_ne_bytes());
            }
        };
        // Without a ring, the driver reads.
        let ring = driver.and_then(|driver| SharedRing::new(driver).ok());
        Ok(Queue {
            inner: ProcessLocal::new(Arc::new(Inner {
                waiting: QueueWaiters::new(capacity, Box::new(on_unassigned), ring.clone()),
                ring,
                capacity,
                eventfd,
                pending: Mutex::default(),
            })),
        })
    }

    /// The maximum number of operations in flight, or completed and not returned.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.inner.capacity
    }

    /// Starts a request. Does not block, except for short-held locks and the copy of cached bytes. An error in the
    /// request is reported by its completion.
    ///
    /// # Errors
    ///
    /// [`Rejected`], with the request: the queue is full, or it is the parent's.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use millpond::queue::Request;
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let path = tempfile::NamedTempFile::new().unwrap();
    /// # let file = Arc::new(engine.open(&path, &OpenOptions::new().write(true))?);
    /// let queue = engine.queue(1)?;
    /// queue.submit(Request::sync_data(&file))?;
    /// if let Err(rejected) = queue.submit(Request::sync_all(&file).user_data(7)) {
    ///     queue.wait(1, 1, None)?; // makes room
    ///     queue.submit_all(rejected.into_requests())?;
    /// }
    /// assert_eq!(queue.wait(1, 1, None)?[0].user_data(), 7);
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn submit(&self, request: Request) -> std::result::Result<(), Rejected> {
        self.submit_all([request])
    }

    /// Starts requests as one batch, as many as the queue has room for. Otherwise like [`Queue::submit`]. A `Vec` is
    /// used as it is: neither it nor its requests are copied.
    ///
    /// # Errors
    ///
    /// [`Rejected`], with the requests that were not started, which are the last ones.
    pub fn submit_all(
        &self,
        requests: impl IntoIterator<Item = Request>,
    ) -> std::result::Result<(), Rejected> {
        let mut requests: Vec<Request> = requests.into_iter().collect();
        self.submit_and_hold(&mut requests, None);
        if requests.is_empty() { Ok(()) } else { Err(Rejected { requests }) }
    }

    /// Starts the first of `requests`, as many as there is room for, and removes them from the vector. Submissions to
    /// `ring` are held back for the caller, which waits next.
    fn submit_and_hold<'r>(
        &self,
        requests: &mut Vec<Request>,
        ring: Option<&'r SharedRing>,
    ) -> Option<HeldRing<'r>> {
        let inner = &self.inner;
        // Another thread of the parent may have held the lock.
        if inner.is_inherited() {
            return None;
        }
        let admitted = inner.waiting.admit(requests.len());
        let mut left = requests.drain(..admitted);
        if let Some(ring) = &inner.ring {
            ring.announce(admitted);
        }
        let mut hits = VecDeque::new();
        let mut held = None;
        while left.len() > 0 {
            let batch = batch::open();
            left.as_slice().iter().take(BATCH_MAX).for_each(Request::ask_for);
            for request in left.by_ref().take(BATCH_MAX) {
                hits.extend(inner.start(request));
            }
            match ring {
                Some(ring) if left.len() == 0 => held = Some(ring.hold(|| drop(batch))),
                _ => drop(batch),
            }
            if !hits.is_empty() {
                inner.waiting.complete_all(&mut hits);
            }
        }
        held
    }

    /// [`Queue::submit_all`], and then [`Queue::wait`]. With io_uring both are one system call if the call has
    /// to wait. Returns the completions, and the requests that the queue had no room for. They are in the vector
    /// that held the requests, so a loop can fill it again without an allocation.
    ///
    /// If a single request is submitted to an empty queue, the calling thread runs it, unless there is a
    /// `timeout`. Then it can't be cancelled, and completions of concurrent submissions are returned with
    /// it, not before.
    ///
    /// # Errors
    ///
    /// As for [`Queue::wait`]; then no request was submitted, and all are dropped.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use millpond::queue::Request;
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let path = tempfile::NamedTempFile::new().unwrap();
    /// std::fs::write(&path, "a pond").unwrap();
    /// let file = Arc::new(engine.open(&path, &OpenOptions::new().read(true))?);
    /// let queue = engine.queue(8)?;
    /// let requests = (0..3).map(|n| Request::read(&file, vec![0; 2], 2 * n));
    /// let (done, rest) = queue.submit_and_wait(requests, 3, 8, None)?;
    /// assert_eq!((done.len(), rest.len()), (3, 0));
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn submit_and_wait(
        &self,
        requests: impl IntoIterator<Item = Request>,
        min: usize,
        max: usize,
        timeout: Option<Duration>,
    ) -> Result<(Vec<Completion>, Vec<Request>)> {
        self.check(min, max)?;
        let mut requests: Vec<Request> = requests.into_iter().collect();
        let at_all = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let waiting = &self.inner.waiting;
        let is_alone = requests.len() == 1 && min == 1 && timeout.is_none();
        let held = if is_alone && waiting.admit_alone() {
            // Otherwise the place of the request would be lost.
            let abort = AbortOnUnwind;
            waiting.complete(requests.remove(0).carry_out());
            std::mem::forget(abort);
            None
        } else {
            self.submit_and_hold(&mut requests, self.inner.ring.as_deref().filter(|_| min > 0))
        };
        let deadlines = Deadlines { for_min: None, at_all };
        Ok((waiting.wait(min, max, deadlines, held), requests))
    }

    /// Waits until `min` operations have completed, and returns `min` to `max` completions; after `timeout`
    /// those that are there, maybe none. With `min` 0 it never blocks. With concurrent waiters, exactly
    /// `min` are returned, and a call that does not wait leaves completions that are reserved for a senior
    /// waiter.
    ///
    /// Blocks without spinning, and is woken once.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`]: `min` is more than the capacity or than `max`, or `max` is 0.
    /// [`Error::Forked`]: the queue is the parent's.
    pub fn wait(
        &self,
        min: usize,
        max: usize,
        timeout: Option<Duration>,
    ) -> Result<Vec<Completion>> {
        self.check(min, max)?;
        let at_all = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Ok(self.inner.waiting.wait(min, max, Deadlines { for_min: None, at_all }, None))
    }

    /// [`Queue::wait`] that waits for `min` completions for at most `min_wait`, and then for one (as with
    /// io_uring's `min_wait`).
    ///
    /// # Errors
    ///
    /// As for [`Queue::wait`].
    pub fn wait_at_least(
        &self,
        min: usize,
        max: usize,
        min_wait: Duration,
        timeout: Option<Duration>,
    ) -> Result<Vec<Completion>> {
        self.check(min, max)?;
        let now = Instant::now();
        let deadlines = Deadlines {
            for_min: now.checked_add(min_wait),
            at_all: timeout.and_then(|timeout| now.checked_add(timeout)),
        };
        Ok(self.inner.waiting.wait(min, max, deadlines, None))
    }

    /// [`Queue::wait`] without a thread and without a timeout, in any runtime. If the future is dropped,
    /// completions that it was granted go back to the front of the queue.
    ///
    /// # Errors
    ///
    /// As for [`Queue::wait`].
    pub fn wait_async(&self, min: usize, max: usize) -> Result<WaitFuture<'_>> {
        self.check(min, max)?;
        Ok(WaitFuture { queue: self, min, max, ticket: None })
    }

    fn check(&self, min: usize, max: usize) -> Result<()> {
        self.check_process()?;
        if self.inner.waiting.permits(min, max) {
            return Ok(());
        }
        let capacity = self.inner.capacity;
        let what = format!(
            "wait for {min} to {max} completions: the first at most the capacity, {capacity}, the \
             second at least the first and at least 1"
        );
        Err(Error::InvalidInput { op: Op::Wait, what })
    }

    fn check_process(&self) -> Result<()> {
        if self.inner.is_inherited() { Err(Error::Forked { op: Op::Wait }) } else { Ok(()) }
    }

    /// Cancels one operation that was submitted with `user_data` and has not completed; false if there is
    /// none, or it can't be cancelled any more. It completes with ECANCELED, and has no effect. Reads that
    /// miss can be cancelled at any time, unless the device or a thread reads into their own memory; writes
    /// and syncs until a thread starts them.
    pub fn cancel(&self, user_data: u64) -> bool {
        let inner = &self.inner;
        if inner.is_inherited() {
            return false;
        }
        let pending = inner.pending.acquire();
        let found: Vec<(usize, Pending)> = (pending.iter())
            .filter(|(_, pending)| pending.user_data() == user_data)
            .map(|(number, pending)| (number, pending.clone()))
            .collect();
        drop(pending);
        for (number, operation) in found {
            if let Some(request) = operation.cancel() {
                inner.finish(number, request.cancelled());
                return true;
            }
        }
        false
    }

    /// An eventfd for event loops (`poll`): it is readable when there are completions that no waiter has
    /// taken. Its count is the number of completions since its last read; another thread may take them
    /// first. Non-blocking; read it only, do not write to it. Take completions with [`Queue::wait`] and a
    /// minimum of 0.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]: no descriptor is available.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use millpond::queue::Request;
    /// # use millpond::{Engine, OpenOptions};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let path = tempfile::NamedTempFile::new().unwrap();
    /// # let file = Arc::new(engine.open(&path, &OpenOptions::new().read(true).write(true))?);
    /// let queue = engine.queue(8)?;
    /// let readable = queue.eventfd()?; // for poll, epoll and the like
    /// queue.submit(Request::sync_data(&file))?;
    /// let mut polled = [rustix::event::PollFd::new(&readable, rustix::event::PollFlags::IN)];
    /// rustix::event::poll(&mut polled, None).expect("it is polled");
    /// assert_eq!(queue.wait(0, 8, None)?.len(), 1);
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn eventfd(&self) -> Result<BorrowedFd<'_>> {
        self.check_process()?;
        let inner = &self.inner;
        if inner.eventfd.get().is_none() {
            let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|error| Error::io(Op::Wait, 0, 0, error))?;
            // Another thread may have been first: its descriptor is used.
            let _ = inner.eventfd.set(fd);
            inner.waiting.notify_unassigned();
        }
        Ok(inner.eventfd.get().expect("set above").as_fd())
    }

    /// The number of completed operations that no waiter has taken, and of operations in flight.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        if self.inner.is_inherited() {
            return (0, 0);
        }
        self.inner.waiting.counts()
    }
}

impl Inner {
    /// Starts an admitted operation; returns its completion if it is done.
    fn start(self: &Arc<Self>, mut request: Request) -> Option<Completion> {
        if let Err(error) = request.check() {
            return self.complete_at_once(request, Err(error));
        }
        // The file's engine may have no queue, and so no started workers.
        if let Err(error) = request.file.cached.shared.workers.start() {
            return Some(request.refused(error));
        }
        let user_data = request.user_data;
        // Not with a direct handle.
        let may_hit = request.file.is_for_cached_reads();
        if request.kind.is_read() && may_hit {
            if let Some(moved) = try_hit(&mut request) {
                return self.complete_at_once(request, Ok(moved));
            }
            let request = self.start_around(request)?;
            let mut pending = self.pending.acquire();
            let place = pending.vacant_entry();
            let task = ReadTask::new(self, place.key(), request);
            place.insert(Pending::Read(user_data, Arc::<ReadTask>::clone(&task)));
            drop(pending);
            task.run(StepScope::Full);
            return None;
        }
        let request = self.start_direct(request)?;
        let workers = Arc::clone(&request.file.cached.shared.workers);
        let job = Arc::new(Mutex::new(Some(request)));
        let number = self.pending.acquire().insert(Pending::Job(user_data, Arc::clone(&job)));
        let queue = Arc::clone(self);
        workers.run(Box::new(move || {
            if let Some(request) = take_request(&job) {
                queue.finish(number, request.carry_out());
            }
        }));
        None
    }

    /// Completes a request of the open batch: returns the completion, unless the request has the last
    /// handle of its file; then a worker completes it (task.TK5).
    #[inline]
    fn complete_at_once(
        self: &Arc<Self>,
        request: Request,
        result: Result<usize>,
    ) -> Option<Completion> {
        let (file, completion) = request.into_completion(result);
        let Some(last) = Arc::into_inner(file) else { return Some(completion) };
        let queue = Arc::clone(self);
        release_last_handle(last, move || queue.complete(completion));
        None
    }

    /// Starts a read that bypasses the cache, into memory that belongs to the request until it completes;
    /// it can't be cancelled. Returns a request that has to be read in another way.
    fn start_around(self: &Arc<Self>, request: Request) -> Option<Request> {
        let Request { file, user_data, mut kind } = request;
        let begin =
            |dst: SegmentIter<'_>, offset| (BackgroundBypass::begin(file, dst, offset), offset);
        match kind.with_read(begin) {
            (Err(file), _) => Some(Request { file, user_data, kind }),
            (Ok(around), offset) => {
                let (list, buffer) = kind.into_list();
                let queue = Arc::clone(self);
                let on_end = move |result, buffers| {
                    queue.complete(Completion { user_data, result, buffer, buffers });
                };
                around.submit(list, offset, self.ring.as_ref(), on_end);
                None
            }
        }
    }

    /// Starts a direct read into buffers or lent memory, which can't be cancelled; returns any other
    /// request.
    fn start_direct(self: &Arc<Self>, request: Request) -> Option<Request> {
        let (file, user_data, list, offset) = match request {
            Request { file, user_data, kind: Kind::ReadList { list, offset } }
                if file.is_for_direct() =>
            {
                (file, user_data, list, offset)
            }
            request => return Some(request),
        };
        let queue = Arc::clone(self);
        let on_end = move |result, buffers| {
            let buffer = Vec::new();
            queue.complete(Completion { user_data, result, buffer, buffers });
        };
        background_read::start_read(file, list, offset, self.ring.as_ref(), on_end);
        None
    }
}

/// Tries a read without a lock; if it is no hit, starts read-ahead for it.
fn try_hit(request: &mut Request) -> Option<usize> {
    let Request { file, kind, .. } = request;
    let (handle, file, policy) = (&**file, &file.cached, BypassPolicy::Filtered);
    kind.with_read(|dst, offset| {
        let len = dst.left();
        if len == 0 {
            return Some(0);
        }
        let hit = PendingRead { file, dst, offset, ring: None, policy }.try_hit();
        if hit.is_none() {
            handle.read_ahead(offset, len);
        }
        hit
    })
}

/// Requests that a queue has not started: it is full, or belongs to the parent of this process.
///
/// # Examples
///
/// ```
/// # use std::sync::Arc;
/// # use millpond::queue::Request;
/// # use millpond::{Engine, Error, OpenOptions};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let path = tempfile::NamedTempFile::new().unwrap();
/// # let file = Arc::new(engine.open(&path, &OpenOptions::new().write(true))?);
/// let queue = engine.queue(2)?;
/// let rejected = queue.submit_all((0..5).map(|n| Request::sync_data(&file).user_data(n))).unwrap_err();
/// assert_eq!(rejected.requests().len(), 3);
/// println!("{rejected}");
/// queue.wait(2, 2, None)?;
/// assert!(queue.submit_all(rejected.into_requests().into_iter().take(2)).is_ok());
/// # Ok::<(), millpond::Error>(())
/// ```
pub struct Rejected {
    requests: Vec<Request>,
}

impl Rejected {
    /// The requests, in their order.
    #[must_use]
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The requests, to be submitted again when completions have been taken.
    #[must_use]
    pub fn into_requests(self) -> Vec<Request> {
        self.requests
    }
}

impl std::fmt::Debug for Rejected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rejected").field("requests", &self.requests.len()).finish()
    }
}

impl std::fmt::Display for Rejected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} requests were not started: the queue has no room for them",
            self.requests.len()
        )
    }
}

impl std::error::Error for Rejected {}

/// EAGAIN. Drops the requests.
impl From<Rejected> for Error {
    fn from(rejected: Rejected) -> Error {
        drop(rejected);
        Error::io(Op::Wait, 0, 0, io::Error::from_raw_os_error(libc::EAGAIN))
    }
}

/// The future of [`Queue::wait_async`].
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct WaitFuture<'q> {
    queue: &'q Queue,
    min: usize,
    max: usize,
    ticket: Option<Ticket>,
}

impl Future for WaitFuture<'_> {
    type Output = Vec<Completion>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let (min, max) = (this.min, this.max);
        this.queue.inner.waiting.poll_wait(&mut this.ticket, min, max, cx.waker())
    }
}

impl Drop for WaitFuture<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take()
            && !self.queue.inner.is_inherited()
        {
            self.queue.inner.waiting.abandon(ticket);
        }
    }
}
