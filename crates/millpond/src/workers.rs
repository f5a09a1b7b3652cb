//! A few threads for operations that may block and have no asynchronous form.
//!
//! Asynchronous writes, syncs and changes of extents run here, and so do reads that are too long or failed too often
//! to be retried (`read::miss`). At most [`THREADS_MAX`] of them run at a time, out of any number of pending ones.
//!
//! Jobs that hang keep their threads. With [`THREADS_MAX`] syncs of a file whose device does not answer, all other
//! jobs of the engine wait for the device. Any limit of threads has this effect, as a job can't be taken back from a
//! thread that is in the kernel; more threads would cost memory and contention in each process where no job hangs.
//! Two kinds of I/O are not affected. Reads that miss need no thread (`read::miss`), and the flusher writes back with
//! threads of its own, counted by device. A program with devices that may hang, beside other devices, should give
//! each an engine of its own.
//!
//! The first thread is started before any operation begins that may need one ([`Pool::start`]), so that each
//! operation comes to its end. If the system gives no thread, the engine refuses a queue, or an asynchronous
//! operation before any of its effects. So no job is ever carried out by a thread that must not wait.
//!
//! A job may wait for a guard. No guard is held by a caller that waits for a job to be started: guards are held by
//! callers at work, by I/O under way, and by running jobs. So the running jobs come to their end, and then the
//! pending ones are started.

use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use millpond_rangelock::callback::TaskWaker;

use crate::io::pool::Pool;
use crate::process_local::ProcessLocal;
use crate::sync::MutexExt;

/// Threads of one engine. Chosen, not measured.
pub(crate) const THREADS_MAX: usize = 4;

/// The workers of an engine.
pub(crate) fn workers() -> Arc<Pool> {
    Pool::new("millpond-work", THREADS_MAX)
}

/// The outcome of a job, for polling.
pub(crate) struct JobOutcome<T>(ProcessLocal<Arc<Mutex<Told<T>>>>);

enum Told<T> {
    Waits(Option<TaskWaker>),
    Done(T),
    /// The job has panicked.
    Lost,
    Taken,
}

/// The side that completes an [`JobOutcome`].
pub(crate) struct JobCompleter<T>(Arc<Mutex<Told<T>>>);

impl<T> JobCompleter<T> {
    pub(crate) fn complete_job(self, done: T) {
        self.set(Told::Done(done));
    }

    /// Whether the outcome was not dropped.
    fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    fn set(&self, after: Told<T>) {
        let mut told = self.0.acquire();
        if !matches!(*told, Told::Waits(_)) {
            return;
        }
        let before = std::mem::replace(&mut *told, after);
        drop(told);
        if let Told::Waits(Some(waker)) = before {
            waker.wake();
        }
    }
}

impl<T> Drop for JobCompleter<T> {
    /// Without an outcome: the job has unwound. Its task is woken, and panics as well.
    fn drop(&mut self) {
        self.set(Told::Lost);
    }
}

impl<T: Send + 'static> JobOutcome<T> {
    /// An outcome, and the side that completes it.
    pub(crate) fn new() -> (JobOutcome<T>, JobCompleter<T>) {
        let told = Arc::new(Mutex::new(Told::Waits(None)));
        (JobOutcome(ProcessLocal::new(Arc::clone(&told))), JobCompleter(told))
    }

    /// Has the workers carry out `body`. It runs even if the outcome is dropped.
    pub(crate) fn of(workers: &Arc<Pool>, body: impl FnOnce() -> T + Send + 'static) -> Self {
        let (outcome, teller) = JobOutcome::new();
        workers.run(Box::new(move || teller.complete_job(body())));
        outcome
    }

    /// The same for a body without an effect but its outcome: it does not run if the outcome was dropped before.
    pub(crate) fn of_read(workers: &Arc<Pool>, body: impl FnOnce() -> T + Send + 'static) -> Self {
        let (outcome, teller) = JobOutcome::new();
        workers.run(Box::new(move || {
            if teller.is_awaited() {
                teller.complete_job(body());
            }
        }));
        outcome
    }

    pub(crate) fn poll(&self, waker: &Waker) -> Poll<T> {
        let fresh = TaskWaker::new(waker);
        let mut told = self.0.acquire();
        match std::mem::replace(&mut *told, Told::Taken) {
            Told::Done(done) => Poll::Ready(done),
            Told::Waits(old) => {
                *told = Told::Waits(Some(fresh));
                drop(told);
                drop(old);
                Poll::Pending
            }
            Told::Lost => panic!("the operation has panicked, on a thread of the engine"),
            Told::Taken => panic!("polled after it was ready"),
        }
    }
}
