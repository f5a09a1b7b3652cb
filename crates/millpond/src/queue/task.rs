//! A task: a read of a queue or of [`File::start_read_raw`] that was not a hit. It holds the miss, the
//! destination, and the state of its runner.
//!
//! ```text
//!            run                 pending
//!   RUNNING ------> RUNNING --------------> IDLE      by the runner
//!   IDLE -- wake -> RUNNING                           by the waker, which becomes the runner
//!   RUNNING -- wake -> AGAIN -- pending --> RUNNING   by a waker; the runner runs again
//! ```
//!
//! - **TK1** One thread at a time runs a task: the thread that changed IDLE to RUNNING, or created the
//!   task. It passes the role to a worker with a job, and gives it up only by IDLE.
//! - **TK2** A wake-up during a run leaves AGAIN, also if another one has left it, and the runner takes it
//!   when it tries to become IDLE: none is lost, and the next run sees the writes before each.
//! - **TK3** A waker runs one non-blocking step (miss.M7): on the thread that completed a fill, a task
//!   whose pages are there copies and completes, without another thread. A longer step goes to a worker.
//! - **TK4** The thread that takes the request out of the body completes it: the runner that finished it,
//!   a worker that reads it, or a cancel. The body's lock is held for a step; no thread waits under it.
//! - **TK5** The file's handle is dropped before the completion is reported. Dropping the last handle
//!   writes back: not here, where a fill may be completing, but on a worker, which then reports the
//!   completion.
//!
//! [`File::start_read_raw`]: crate::File::start_read_raw

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};

use crate::api::file::{File, release_handle};
use crate::error::Result;
use crate::queue::inner::{Cancel, Inner};
use crate::queue::request::{Completion, Request};
use crate::read::miss::{Miss, PendingRead, Step, StepScope};
use crate::read::plan::BypassPolicy;
use crate::sync::AtomicU32;
use crate::sync::MutexExt;

const IDLE: u32 = 0;
const RUNNING: u32 = 1;
const AGAIN: u32 = 2;

/// The runner state of a task, and whether it was woken during a run (TK1, TK2).
pub(super) struct Running(AtomicU32);

impl Running {
    /// Running, by the caller.
    pub(super) fn new() -> Running {
        Running(AtomicU32::new(RUNNING))
    }

    /// Called by the runner of a pending task; false: the task was woken, and the runner continues.
    #[must_use]
    pub(super) fn try_rest(&self) -> bool {
        // Release: the next runner sees this one's writes.
        let rests = self.0.compare_exchange(RUNNING, IDLE, Release, Relaxed).is_ok();
        if !rests {
            // An RMW, and Acquire: it sees the writes before the last AGAIN, and before the earlier ones.
            self.0.swap(RUNNING, Acquire);
        }
        rests
    }

    /// True: the caller is the runner now.
    #[must_use]
    pub(super) fn wake(&self) -> bool {
        let mut seen = self.0.load(Relaxed);
        loop {
            let next = if seen == IDLE { RUNNING } else { AGAIN };
            // AcqRel: the next run sees the writes before the wake, also if AGAIN is there already; and the
            // new runner sees the writes of the last one.
            match self.0.compare_exchange_weak(seen, next, AcqRel, Relaxed) {
                Ok(_) => return seen == IDLE,
                Err(now) => seen = now,
            }
        }
    }
}

/// The read of a task, and the receiver of its result.
pub(crate) trait Reading: Send + Sized + 'static {
    fn file(&self) -> &Arc<File>;

    /// Calls `use_read` with the same read each time. It keeps its memory for that time.
    fn with_read<T>(&mut self, use_read: impl FnOnce(&PendingRead<'_>) -> T) -> T;

    /// Reports the result, after the file's handle was dropped by [`release_handle`] (TK5).
    fn end(self, result: Result<usize>);
}

/// A read in flight.
pub(crate) struct Task<R> {
    running: Running,
    body: Mutex<Option<Body<R>>>,
}

struct Body<R> {
    reading: R,
    miss: Miss,
}

/// A read of a queue.
pub(super) type ReadTask = Task<OfQueue>;

pub(super) struct OfQueue {
    queue: Arc<Inner>,
    number: usize,
    request: Request,
}

impl ReadTask {
    /// Creates a task; the caller must [`Task::run`] it.
    pub(super) fn new(queue: &Arc<Inner>, number: usize, request: Request) -> Arc<ReadTask> {
        Task::of(OfQueue { queue: Arc::clone(queue), number, request })
    }
}

impl Cancel for ReadTask {
    fn cancel(&self) -> Option<Request> {
        self.take().map(|reading| reading.request)
    }
}

impl Reading for OfQueue {
    fn file(&self) -> &Arc<File> {
        &self.request.file
    }

    fn with_read<T>(&mut self, use_read: impl FnOnce(&PendingRead<'_>) -> T) -> T {
        let Request { file, kind, .. } = &mut self.request;
        let (file, ring, policy) = (&file.cached, self.queue.ring.as_ref(), BypassPolicy::Filtered);
        kind.with_read(|dst, offset| use_read(&PendingRead { file, dst, offset, ring, policy }))
    }

    fn end(self, result: Result<usize>) {
        let Request { file, user_data, kind } = self.request;
        let (buffer, buffers) = kind.into_memory();
        let (queue, number) = (self.queue, self.number);
        release_handle(file, move || {
            queue.finish(number, Completion { user_data, result, buffer, buffers });
        });
    }
}

impl<R: Reading> Task<R> {
    /// Creates a task; the caller must [`Task::run`] it.
    pub(crate) fn of(reading: R) -> Arc<Task<R>> {
        Arc::new(Task {
            running: Running::new(),
            body: Mutex::new(Some(Body { reading, miss: Miss::new() })),
        })
    }

    /// Steps until the task is pending or done. The caller is the runner (TK1).
    pub(crate) fn run(self: &Arc<Self>, scope: StepScope) {
        let waker = Waker::from(Arc::clone(self));
        loop {
            match self.step(&waker, scope) {
                None => return,
                Some(Step::NeedsFullScope) => {
                    return self.by_worker(|task| task.run(StepScope::Full));
                }
                Some(Step::NeedsThread) => return self.by_worker(|task| task.read_waiting()),
                Some(Step::Pending) => {
                    if self.running.try_rest() {
                        return;
                    }
                }
                Some(Step::Done(_) | Step::Hit) => unreachable!("completed by the step"),
            }
        }
    }

    /// Runs one step; `None` if it was the last, or a cancel came first.
    fn step(&self, waker: &Waker, scope: StepScope) -> Option<Step> {
        let mut slot = self.body.acquire();
        let Body { reading, miss } = slot.as_mut()?;
        let result = match reading.with_read(|read| read.step(miss, waker, scope)) {
            Step::Done(result) => result,
            other => return Some(other),
        };
        let body = slot.take().expect("looked at above");
        drop(slot);
        drop(body.miss);
        body.reading.end(result);
        None
    }

    /// Makes a worker the runner.
    fn by_worker(self: &Arc<Self>, run: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let slot = self.body.acquire();
        let Some(body) = slot.as_ref() else { return };
        let workers = Arc::clone(&body.reading.file().cached.shared.workers);
        drop(slot);
        let task = Arc::clone(self);
        workers.run(Box::new(move || run(&task)));
    }

    /// Reads into the memory of the read, on a thread that may wait; unless a cancel came first.
    fn read_waiting(&self) {
        let Some(Body { mut reading, miss }) = self.body.acquire().take() else { return };
        let result = reading.with_read(|read| miss.read_waiting(read));
        reading.end(result);
    }

    /// Takes the read back; `None` if it is done.
    fn take(&self) -> Option<R> {
        let body = self.body.acquire().take()?;
        // Its waits are deregistered here, without the lock.
        let Body { reading, miss } = body;
        drop(miss);
        Some(reading)
    }
}

impl<R: Reading> Wake for Task<R> {
    fn wake(self: Arc<Self>) {
        if self.running.wake() {
            self.run(StepScope::CopyOnly);
        }
    }
}
