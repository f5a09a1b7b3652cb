//! A read of a queue that was not a hit: a miss, its buffer, and who steps it.
//!
//! ```text
//!            run                 pending
//!   RUNNING ------> RUNNING --------------> IDLE      by the runner
//!   IDLE -- wake -> RUNNING                           by the waker, who is the runner then
//!   RUNNING -- wake -> AGAIN -- pending --> RUNNING   by a waker; the runner runs again
//! ```
//!
//! - **T1** One thread at a time runs a task: who changed IDLE to RUNNING, or made the task. It passes
//!   the role to a worker with a job, and gives it up only by IDLE.
//! - **T2** A wake-up that meets a runner leaves AGAIN, which the runner finds when it wants to be IDLE:
//!   none is lost.
//! - **T3** A waker runs at the pace of a moment (M7 of `miss`): on the thread that ended a fill, a task
//!   whose pages are there copies and completes, without another thread. What needs more goes to a
//!   worker.
//! - **T4** Who takes the request out of the body completes it: the runner that finished it, or a
//!   cancel. The body's lock is held for a step; nobody waits under it.
//! - **T5** The last handle of a file writes back as it goes: not here, where a fill may be ending, but on
//!   a worker. Any other handle is gone before the completion is told.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};

use crate::cache::miss::{Miss, Pace, Step, Wanted};
use crate::io::segment::Segment;
use crate::queue::Inner;
use crate::queue::request::{Completion, Kind, Request};

const IDLE: u8 = 0;
const RUNNING: u8 = 1;
const AGAIN: u8 = 2;

/// A read under way.
pub(super) struct ReadTask {
    queue: Arc<Inner>,
    number: u64,
    state: AtomicU8,
    body: Mutex<Option<Body>>,
}

struct Body {
    request: Request,
    miss: Miss,
}

impl ReadTask {
    /// A task that the caller is to [`ReadTask::run`].
    pub(super) fn new(queue: &Arc<Inner>, number: u64, request: Request) -> Arc<ReadTask> {
        Arc::new(ReadTask {
            queue: Arc::clone(queue),
            number,
            state: AtomicU8::new(RUNNING),
            body: Mutex::new(Some(Body { request, miss: Miss::new() })),
        })
    }

    /// Steps until the task is pending or done. The caller is the runner (T1).
    pub(super) fn run(self: &Arc<Self>, pace: Pace) {
        let waker = Waker::from(Arc::clone(self));
        loop {
            match self.step(&waker, pace) {
                None => return,
                Some(Step::Work) => {
                    let Some(workers) = self.workers() else { return };
                    let task = Arc::clone(self);
                    return workers.run(Box::new(move || task.run(Pace::Full)));
                }
                Some(Step::Pending) => {
                    // AcqRel: the next runner finds what this one left; and T2.
                    match self.state.compare_exchange(RUNNING, IDLE, AcqRel, Acquire) {
                        Ok(_) => return,
                        Err(_) => self.state.store(RUNNING, Release),
                    }
                }
                Some(Step::Done(_)) => unreachable!("completed by the step"),
            }
        }
    }

    /// One step; `None` if it was the last, or a cancel came before.
    fn step(&self, waker: &Waker, pace: Pace) -> Option<Step> {
        let mut slot = self.body.lock().expect("no panic under the lock");
        let Body { request, miss } = slot.as_mut()?;
        let Kind::Read { buffer, offset } = &mut request.kind else { unreachable!("a read") };
        // SAFETY: the buffer is the request's, which stays in the body, under its lock, for this step;
        // nobody keeps the segment beyond it.
        let dst = unsafe { [Segment::new(buffer.as_mut_ptr(), buffer.len())] };
        let file = &request.file;
        let wanted = Wanted {
            file: &file.cached,
            readahead: &file.readahead,
            dst: (&dst).into(),
            offset: *offset,
            ring: self.queue.ring.as_ref(),
        };
        let result = match miss.step(&wanted, waker, pace) {
            Step::Done(result) => result,
            other => return Some(other),
        };
        let body = slot.take().expect("looked at above");
        drop(slot);
        let Request { file, user_data, kind } = body.request;
        let Kind::Read { buffer, .. } = kind else { unreachable!("a read") };
        let workers = Arc::clone(&file.cached.shared.workers);
        if let Some(last) = Arc::into_inner(file) {
            // T5.
            workers.run(Box::new(move || drop(last)));
        }
        self.queue
            .finish(self.number, Completion { user_data, result, buffer, buffers: Vec::new() });
        None
    }

    fn workers(&self) -> Option<Arc<crate::workers::Workers>> {
        let slot = self.body.lock().expect("no panic under the lock");
        slot.as_ref().map(|body| Arc::clone(&body.request.file.cached.shared.workers))
    }

    /// Takes the request back; `None` if it is done.
    pub(super) fn cancel(&self) -> Option<Request> {
        let body = self.body.lock().expect("no panic under the lock").take()?;
        // What it waits for is given up here, without the lock.
        let Body { request, miss } = body;
        drop(miss);
        Some(request)
    }
}

impl Wake for ReadTask {
    fn wake(self: Arc<Self>) {
        let mut seen = self.state.load(Acquire);
        loop {
            let (next, run) = match seen {
                IDLE => (RUNNING, true),
                RUNNING => (AGAIN, false),
                _ => return,
            };
            // AcqRel: what was done before the wake is seen by the run that follows it.
            match self.state.compare_exchange_weak(seen, next, AcqRel, Acquire) {
                Ok(_) if run => return self.run(Pace::Moment),
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }
}
