//! A few threads for what has to wait: operations that nobody has made to wait without one.
//!
//! Asynchronous writes, syncs and changes of extents run here, and reads that are too long or too
//! unlucky to be retried (`read::miss`). At most [`THREADS_MAX`] of them at a time, however many are
//! pending.
//!
//! Jobs that hang keep their threads: with [`THREADS_MAX`] syncs of a file whose device does not answer, all
//! other jobs of the engine wait for it. That is so for as many threads as there may be, as a job can't be
//! taken back from a thread that is in the kernel; more of them would be more processes' worth of memory and of
//! contention where nothing hangs. Reads that miss need none (`read::miss`), nor does what the flusher
//! writes back, whose threads are its own, counted by device. Who serves devices that may hang beside others gives each
//! an engine.
//!
//! The first is started before anything begins that may need one ([`Pool::start`]), so that what
//! has begun comes to its end: a system that gives no thread refuses a queue, or an asynchronous
//! operation before it has done anything, and never has a job carried out by a thread that must not
//! wait.
//!
//! A job may wait for a guard. Nobody holds a guard while waiting for a job to be started: guards are
//! held by callers at work, by I/O under way, and by jobs that run; so the jobs that run come to their
//! end, and the others get their turn.

use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use millpond_rangelock::callback::TaskWaker;

use crate::io::pool::Pool;
use crate::process_local::ProcessLocal;

/// Threads of one engine. Chosen, not measured.
pub(crate) const THREADS_MAX: usize = 4;

/// The workers of an engine.
pub(crate) fn workers() -> Arc<Pool> {
    Pool::new("millpond-work", THREADS_MAX)
}

/// The outcome of a job, to be polled for.
pub(crate) struct Outcome<T>(ProcessLocal<Arc<Mutex<Told<T>>>>);

enum Told<T> {
    Waits(Option<TaskWaker>),
    Done(T),
    /// The job has panicked.
    Lost,
    Taken,
}

/// The side that tells of an [`Outcome`].
pub(crate) struct Teller<T>(Arc<Mutex<Told<T>>>);

impl<T> Teller<T> {
    pub(crate) fn tell(self, done: T) {
        self.set(Told::Done(done));
    }

    fn set(&self, after: Told<T>) {
        let mut told = self.0.lock().expect("no panic under the lock");
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

impl<T> Drop for Teller<T> {
    /// Without an outcome: the job has unwound. Its task is woken, and panics as well.
    fn drop(&mut self) {
        self.set(Told::Lost);
    }
}

impl<T: Send + 'static> Outcome<T> {
    /// An outcome, and the side that tells of it.
    pub(crate) fn new() -> (Outcome<T>, Teller<T>) {
        let told = Arc::new(Mutex::new(Told::Waits(None)));
        (Outcome(ProcessLocal::new(Arc::clone(&told))), Teller(told))
    }

    /// Has the workers carry out `body`. It runs even if the outcome is dropped.
    pub(crate) fn of(workers: &Arc<Pool>, body: impl FnOnce() -> T + Send + 'static) -> Self {
        let (outcome, teller) = Outcome::new();
        workers.run(Box::new(move || teller.tell(body())));
        outcome
    }

    pub(crate) fn poll(&self, waker: &Waker) -> Poll<T> {
        let fresh = TaskWaker::new(waker);
        let mut told = self.0.lock().expect("no panic under the lock");
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
