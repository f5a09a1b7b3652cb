//! Completion queues: many operations submitted at once, and one wake-up for a batch of their ends.
//!
//! ```text
//!   submit -> admit -> a read that hits: complete, at once
//!                   -> one past the cache, or around it: into its memory, which it has or is lent (`unattended`)
//!                   -> a read that misses: `task`, stepped by who ends the fills it waits for
//!                   -> a write, a sync: a worker's job
//!   end of an operation -> `waiting`: complete, dispatch by the `rules` -> wake whom they grant
//! ```
//!
//! - **QU1** What was admitted completes exactly once: by its end, or by a cancel that took its request.
//! - **QU2** A completion is given to one waiter, by the rules (rules.Q1 to rules.Q8).
//! - **QU3** A queue that is dropped leaves its operations to their end; nobody learns of it.
//! - **QU4** What completes in a batch of one thread (`io::batch`) is told of together, at its end: the thread
//!   keeps it until then, and nobody else's lock or line is touched for each.
//!
//! Locks: the table of what is pending, a task's body, the rules. None is taken under another, but a
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
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;

use crate::error::{Error, Op, Result};
use crate::face::file::release_last_handle;
use crate::face::unattended::{self, Around};
use crate::io::backend::driver::{AbortOnUnwind, Driver};
use crate::io::backend::shared_ring::{Held, SharedRing};
use crate::io::batch;
use crate::io::pool::Pool;
use crate::io::segment_list::SegmentList;
use crate::process_local::ProcessLocal;
use crate::queue::inner::{Inner, Pending, take_request};
use crate::queue::request::Kind;
use crate::queue::rules::Ticket;
use crate::queue::task::ReadTask;
use crate::queue::waiting::{Deadlines, Waiting};
use crate::read::miss::{Pace, Wanted};

pub use crate::queue::request::{Completion, Request};

/// The largest capacity of a queue. Chosen, not measured.
const CAPACITY_MAX: usize = 1 << 20;
/// Requests of one submission that are started, and if they hit completed, together. Chosen, not
/// measured.
const BATCH_MAX: usize = 32;

/// A completion queue: operations are submitted, many at once, and waited for in batches.
///
/// Any number of threads may submit and wait. A waiter says how many completions it wants at least,
/// and is woken once, when they are there (after Kenneth Chen's and Zach Brown's work on Linux AIO): it
/// gets all of them, or, when its time is up, what is there. Among several waiters, the one that
/// wants least is served first, but nobody is passed by for ever: after as many completions went to
/// others as the queue can hold, a waiter's turn has come, and what is ready is kept for it.
///
/// Reads of cached bytes complete while they are submitted. A read that misses takes no thread: the
/// thread that brings its last page finishes it, and on io_uring a waiter for the queue reaps it.
/// So are direct reads into [`Buffer`](crate::Buffer)s. Where nearly nothing is read again ([`Admission`](crate::Admission)), the
/// device reads into the request's own memory, if that is aligned as it wants it ([`Buffer`](crate::Buffer)s are), and
/// nothing is copied. Writes, syncs, and reads of more than 64 pages or an eighth of the cache, are carried
/// out by a few threads of the engine.
///
/// Dropping a queue does not stop its operations. Wakers of [`Queue::wait_async`] are called as those of an
/// [`AsyncFile`](crate::AsyncFile) are.
///
/// A child of fork can submit nothing to its parent's queues.
///
/// # Examples
///
/// ```
/// # use std::sync::Arc;
/// # use millpond::{Engine, OpenOptions, Request};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let path = tempfile::NamedTempFile::new().unwrap();
/// let options = OpenOptions::new().read(true).write(true);
/// let file = Arc::new(engine.open(&path, &options)?);
/// let queue = engine.queue(64)?;
/// let mut writes: Vec<Request> =
///     (0..8).map(|n| Request::write(&file, vec![n as u8; 512], n * 512).user_data(n)).collect();
/// assert_eq!(queue.submit(&mut writes), 8);
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
/// # use millpond::{Engine, OpenOptions, Request};
/// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
/// # let path = tempfile::NamedTempFile::new().unwrap();
/// # let file = Arc::new(engine.open(&path, &OpenOptions::new().read(true).write(true))?);
/// let queue = engine.queue(64)?;
/// assert_eq!((queue.capacity(), queue.counts()), (64, (0, 0)));
/// queue.submit(&mut vec![
///     Request::write_buffers(&file, engine.alloc_buffers(1, 4096)?, 0).user_data(1),
///     Request::write(&file, vec![7; 100], 8192).user_data(2),
/// ]);
/// // Both, if they come within 10 ms; then one is enough.
/// let mut done = queue.wait_at_least(2, 64, Duration::from_millis(10), None)?;
/// while done.len() < 2 {
///     done.extend(queue.wait(1, 64, None)?);
/// }
/// queue.submit(&mut vec![Request::sync_data(&file).user_data(3), Request::sync_all(&file).user_data(4)]);
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
    /// With a ring, if `driver` can give it one.
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
        let told = Arc::clone(&eventfd);
        let tell = move |events: usize| {
            if let Some(fd) = told.get() {
                // Fails only if the counter is full, when it is readable already.
                let _ = rustix::io::write(fd, &(events as u64).to_ne_bytes());
            }
        };
        // Without, the driver reads.
        let ring = driver.and_then(|driver| SharedRing::new(driver).ok());
        Ok(Queue {
            inner: ProcessLocal::new(Arc::new(Inner {
                waiting: Waiting::new(capacity, Box::new(tell), ring.clone()),
                ring,
                capacity,
                eventfd,
                pending: Mutex::default(),
            })),
        })
    }

    /// How many operations may be under way, or complete and not waited for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.inner.capacity
    }

    /// Starts the first of `requests`, as many as the queue has room for, and takes them out; returns
    /// how many. 0 where it is full: then wait for completions first. Does not block, save for locks
    /// that are held for moments, and copies what is cached.
    ///
    /// What is wrong with a request, its completion says.
    pub fn submit(&self, requests: &mut Vec<Request>) -> usize {
        self.submit_and_hold(requests, None).0
    }

    /// The same; what is left for `ring` is held for the caller, who waits next.
    fn submit_and_hold<'r>(
        &self,
        requests: &mut Vec<Request>,
        ring: Option<&'r SharedRing>,
    ) -> (usize, Option<Held<'r>>) {
        let inner = &self.inner;
        // Another thread of the parent may have held the lock.
        if inner.is_inherited() {
            return (0, None);
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
        (admitted, held)
    }

    /// [`Queue::submit`], and then [`Queue::wait`]: with io_uring both are one system call where something
    /// has to be waited for. Returns how many requests were taken out, too.
    ///
    /// A single request of a queue that has nothing else to do is carried out by the calling thread,
    /// unless there is a `timeout`: nobody can cancel it then, and completions of what others submit
    /// meanwhile are returned with it, not before.
    ///
    /// # Errors
    ///
    /// As for [`Queue::wait`]; then nothing was submitted.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use millpond::{Engine, OpenOptions, Request};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let path = tempfile::NamedTempFile::new().unwrap();
    /// std::fs::write(&path, "a pond").unwrap();
    /// let file = Arc::new(engine.open(&path, &OpenOptions::new().read(true))?);
    /// let queue = engine.queue(8)?;
    /// let mut requests: Vec<Request> =
    ///     (0..3).map(|n| Request::read(&file, vec![0; 2], 2 * n)).collect();
    /// let (submitted, done) = queue.submit_and_wait(&mut requests, 3, 8, None)?;
    /// assert_eq!((submitted, done.len()), (3, 3));
    /// # Ok::<(), millpond::Error>(())
    /// ```
    pub fn submit_and_wait(
        &self,
        requests: &mut Vec<Request>,
        min: usize,
        max: usize,
        timeout: Option<Duration>,
    ) -> Result<(usize, Vec<Completion>)> {
        self.check(min, max)?;
        let at_all = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let waiting = &self.inner.waiting;
        let is_alone = requests.len() == 1 && min == 1 && timeout.is_none();
        let (submitted, held) = if is_alone && waiting.admit_alone() {
            // Else the place of the request would be taken for good.
            let abort = AbortOnUnwind;
            waiting.complete(requests.remove(0).carry_out());
            std::mem::forget(abort);
            (1, None)
        } else {
            self.submit_and_hold(requests, self.inner.ring.as_deref().filter(|_| min > 0))
        };
        let deadlines = Deadlines { for_min: None, at_all };
        Ok((submitted, waiting.wait(min, max, deadlines, held)))
    }

    /// Waits until `min` operations have completed, and returns `min` to `max` completions; after
    /// `timeout` what is there, maybe nothing. `min` 0 takes what is there and never blocks. While
    /// others wait, too, exactly `min` are returned, and a taker leaves what is kept for one whose turn
    /// has come.
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

    /// [`Queue::wait`], but for `min` completions for no longer than `min_wait`: after that, one is
    /// enough (as with io_uring's `min_wait`).
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

    /// [`Queue::wait`] without a thread and without a timeout, in any runtime. Dropped, it takes
    /// nothing: completions that it was granted go back to the front of the queue.
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

    /// Cancels one operation that was submitted with `user_data` and has not completed; false if there
    /// is none, or it can't be stopped any more. It completes with ECANCELED, and has done nothing.
    /// Reads that miss can be stopped at any time, unless the device reads into their own memory; writes and syncs
    /// until a thread begins with them.
    pub fn cancel(&self, user_data: u64) -> bool {
        let inner = &self.inner;
        if inner.is_inherited() {
            return false;
        }
        let pending = inner.pending();
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

    /// An eventfd for loops of `poll` and the like: it is readable when there are completions that no
    /// waiter was given. Its count is of those that came since it was last read; somebody else may take
    /// them before you do. Non-blocking; to be read, not written. Completions are taken with
    /// [`Queue::wait`] and a minimum of 0.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]: there is no descriptor to be had.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use millpond::{Engine, OpenOptions, Request};
    /// # let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let path = tempfile::NamedTempFile::new().unwrap();
    /// # let file = Arc::new(engine.open(&path, &OpenOptions::new().read(true).write(true))?);
    /// let queue = engine.queue(8)?;
    /// let readable = queue.eventfd()?; // for poll, epoll and the like
    /// queue.submit(&mut vec![Request::sync_data(&file)]);
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
            // Another thread may have been faster: its descriptor does.
            let _ = inner.eventfd.set(fd);
            inner.waiting.tell_unassigned();
        }
        Ok(inner.eventfd.get().expect("set above").as_fd())
    }

    /// How many operations have completed and were given to nobody, and how many are under way.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        if self.inner.is_inherited() {
            return (0, 0);
        }
        self.inner.waiting.counts()
    }
}

impl Inner {
    /// Starts an operation that was admitted; its completion, if that is all.
    fn start(self: &Arc<Self>, mut request: Request) -> Option<Completion> {
        request.kind.make_list(&request.file);
        if let Err(error) = request.check() {
            return self.complete_at_once(request, Err(error));
        }
        // Of an engine that may have no queue.
        if let Err(error) = request.file.cached.shared.workers.start() {
            return Some(request.refused(error));
        }
        let user_data = request.user_data;
        // Not that of a direct handle.
        let may_hit = request.file.hits;
        if request.kind.is_read() && may_hit {
            if let Some(moved) = try_hit(&mut request) {
                return self.complete_at_once(request, Ok(moved));
            }
            let request = self.start_around(request)?;
            let mut pending = self.pending();
            let place = pending.vacant_entry();
            let task = ReadTask::new(self, place.key(), request);
            place.insert(Pending::Read(user_data, Arc::<ReadTask>::clone(&task)));
            drop(pending);
            task.run(Pace::Full);
            return None;
        }
        let request = self.start_direct(request)?;
        let workers = Arc::clone(&request.file.cached.shared.workers);
        let job = Arc::new(Mutex::new(Some(request)));
        let number = self.pending().insert(Pending::Job(user_data, Arc::clone(&job)));
        let queue = Arc::clone(self);
        workers.run(Box::new(move || {
            if let Some(request) = take_request(&job) {
                queue.finish(number, request.carry_out());
            }
        }));
        None
    }

    /// Completes a request of the open batch: it is returned, but where it has the last handle of its file a worker
    /// completes it (task.TK5).
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

    /// Starts a read that goes around the cache, into memory that is the request's until it ends; nobody can stop
    /// it. Gives back what is to be read in another way.
    fn start_around(self: &Arc<Self>, request: Request) -> Option<Request> {
        let Request { file, user_data, kind } = request;
        let (offset, len, memory) = kind.range_of_read();
        match Around::begin(file, (offset, len), memory) {
            Err(file) => Some(Request { file, user_data, kind }),
            Ok(around) => {
                let (list, buffer) = kind.into_list();
                let queue = Arc::clone(self);
                let tell = move |result, buffers| {
                    queue.complete(Completion { user_data, result, buffer, buffers });
                };
                around.submit(list, offset, self.ring.as_ref(), tell);
                None
            }
        }
    }

    /// Starts a direct read into buffers or lent memory, which nobody can stop; gives back what is none.
    fn start_direct(self: &Arc<Self>, request: Request) -> Option<Request> {
        let (file, user_data, list, offset) = match request {
            Request { file, user_data, kind: Kind::ReadBuffers { buffers, offset } }
                if file.is_for_direct() =>
            {
                (file, user_data, SegmentList::from_buffers(buffers).into_raw(), offset)
            }
            Request { file, user_data, kind: Kind::ReadLent { list, offset } }
                if file.is_for_direct() =>
            {
                (file, user_data, list, offset)
            }
            request => return Some(request),
        };
        let queue = Arc::clone(self);
        let tell = move |result, buffers| {
            let buffer = Vec::new();
            queue.complete(Completion { user_data, result, buffer, buffers });
        };
        unattended::start_read(file, list, offset, self.ring.as_ref(), tell);
        None
    }
}

fn try_hit(request: &mut Request) -> Option<usize> {
    let Request { file, kind, .. } = request;
    let (file, readahead) = (&file.cached, &file.readahead);
    kind.with_read(|dst, offset| match dst.left() {
        0 => Some(0),
        _ => Wanted { file, readahead, dst, offset, ring: None, fills: false }.try_hit(),
    })
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
