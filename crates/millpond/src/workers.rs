//! A few threads for what has to wait: operations that nobody has made to wait without one.
//!
//! Asynchronous writes, syncs and changes of extents run here, and reads that are too long or too
//! unlucky to be retried (`cache::miss`). At most [`THREADS_MAX`] of them at a time, however many are
//! pending; the threads are started when there is work, and sleep when there is none.
//!
//! Jobs that hang keep their threads: with [`THREADS_MAX`] syncs of a file whose device does not answer, all
//! other jobs of the engine wait for it.
//!
//! The first is started before anything begins that may need one ([`Workers::start`]), so that what
//! has begun comes to its end: a system that gives no thread refuses a queue, or an asynchronous
//! operation before it has done anything, and never has a job carried out by who must not wait.
//!
//! A job may wait for a guard. Nobody holds a guard while waiting for a job to be started: guards are
//! held by callers at work, by I/O under way, and by jobs that run; so the jobs that run come to their
//! end, and the others get their turn.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use crate::io::backend::spawn;
use crate::io::batch;

/// Threads of one engine.
pub(crate) const THREADS_MAX: usize = 4;

pub(crate) type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(crate) struct Workers {
    state: Mutex<State>,
    work: Condvar,
    /// There is a thread. Relaxed: it is never unset, and what the threads share is under the lock.
    started: AtomicBool,
    /// Whether the system gives no threads.
    #[cfg(test)]
    pub(crate) refused: AtomicBool,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
    stopped: bool,
}

impl Workers {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// Sees to it that there is a thread, for as long as the engine lives.
    ///
    /// # Errors
    ///
    /// The system gives none.
    #[inline]
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        if self.started.load(Relaxed) { Ok(()) } else { self.start_first() }
    }

    #[cold]
    fn start_first(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.state();
        if state.threads == 0 { self.spawn_one(&mut state) } else { Ok(()) }
    }

    fn spawn_one(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        #[cfg(test)]
        if self.refused.load(Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let workers = Arc::clone(self);
        spawn("millpond-work", move || workers.serve())?;
        state.threads += 1;
        self.started.store(true, Relaxed);
        Ok(())
    }

    /// Has a thread carry out `job`. There is one if [`Workers::start`] has succeeded; else the calling
    /// one may have to.
    pub(crate) fn run(self: &Arc<Self>, job: Job) {
        let mut state = self.state();
        if state.idle <= state.queue.len() && state.threads < THREADS_MAX {
            let spawned = self.spawn_one(&mut state);
            if spawned.is_err() && state.threads == 0 {
                drop(state);
                // The job may wait.
                batch::tell_now();
                return job();
            }
        }
        state.queue.push_back(job);
        drop(state);
        self.work.notify_one();
    }

    fn serve(&self) {
        let mut state = self.state();
        loop {
            if let Some(job) = state.queue.pop_front() {
                drop(state);
                job();
                state = self.state();
            } else if state.stopped {
                return;
            } else {
                state.idle += 1;
                state = self.work.wait(state).expect("no panic under the lock");
                state.idle -= 1;
            }
        }
    }

    /// Lets the threads end when the queue is empty.
    pub(crate) fn stop(&self) {
        self.state().stopped = true;
        self.work.notify_all();
    }
}

/// The outcome of a job, for who polls for it.
pub(crate) struct Outcome<T>(Arc<Mutex<Told<T>>>);

enum Told<T> {
    Waits(Option<Waker>),
    Done(T),
    Taken,
}

/// Who tells of an [`Outcome`].
pub(crate) struct Teller<T>(Arc<Mutex<Told<T>>>);

impl<T> Teller<T> {
    pub(crate) fn tell(self, done: T) {
        let mut told = self.0.lock().expect("no panic under the lock");
        let before = std::mem::replace(&mut *told, Told::Done(done));
        drop(told);
        if let Told::Waits(Some(waker)) = before {
            waker.wake();
        }
    }
}

impl<T: Send + 'static> Outcome<T> {
    /// An outcome, and who tells of it.
    pub(crate) fn new() -> (Outcome<T>, Teller<T>) {
        let told = Arc::new(Mutex::new(Told::Waits(None)));
        (Outcome(Arc::clone(&told)), Teller(told))
    }

    /// Has the workers carry out `body`. It runs even if the outcome is dropped.
    pub(crate) fn of(workers: &Arc<Workers>, body: impl FnOnce() -> T + Send + 'static) -> Self {
        let (outcome, teller) = Outcome::new();
        workers.run(Box::new(move || teller.tell(body())));
        outcome
    }

    pub(crate) fn poll(&self, waker: &Waker) -> Poll<T> {
        let fresh = waker.clone();
        let mut told = self.0.lock().expect("no panic under the lock");
        match std::mem::replace(&mut *told, Told::Taken) {
            Told::Done(done) => Poll::Ready(done),
            Told::Waits(old) => {
                *told = Told::Waits(Some(fresh));
                drop(told);
                drop(old);
                Poll::Pending
            }
            Told::Taken => panic!("polled after it was ready"),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    /// Goal: all jobs are done, by no more threads than there may be, also those queued before a stop.
    #[test]
    fn a_few_threads_do_all_jobs() {
        let workers = Arc::new(Workers::default());
        let (now, most, done) = <(Arc<AtomicUsize>, Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let (tell, told) = mpsc::channel::<()>();
        for _ in 0..100 {
            let (now, most, done, tell) =
                (Arc::clone(&now), Arc::clone(&most), Arc::clone(&done), tell.clone());
            workers.run(Box::new(move || {
                most.fetch_max(now.fetch_add(1, Relaxed) + 1, Relaxed);
                std::thread::yield_now();
                now.fetch_sub(1, Relaxed);
                done.fetch_add(1, Relaxed);
                drop(tell);
            }));
        }
        workers.stop();
        drop(tell);
        assert!(told.recv().is_err(), "all jobs are gone");
        assert_eq!(done.load(Relaxed), 100);
        assert!(most.load(Relaxed) <= THREADS_MAX);
    }
}
