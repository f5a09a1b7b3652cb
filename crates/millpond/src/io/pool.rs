//! A pool of a few threads that run jobs. They are started when there is work, and sleep when there
//! is none.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex};

use millpond_rangelock::callback::catch;

use crate::io::batch;
use crate::sync::MutexExt;
use crate::thread::spawn;

pub(crate) type Job = Box<dyn FnOnce() + Send>;

pub(crate) struct Pool {
    /// The name of its threads.
    name: &'static str,
    threads_max: usize,
    state: Mutex<PoolState>,
    work: Condvar,
    /// A thread exists. Relaxed: it is never reset, and the shared state of the threads is under
    /// the lock.
    started: AtomicBool,
    /// Whether the system gives no threads.
    #[cfg(test)]
    pub(crate) refused: AtomicBool,
}

#[derive(Default)]
struct PoolState {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// Threads that were started and have not reached the queue yet.
    coming: usize,
    stopped: bool,
}

impl Pool {
    pub(crate) fn new(name: &'static str, threads_max: usize) -> Arc<Pool> {
        Arc::new(Pool {
            name,
            threads_max,
            state: Mutex::default(),
            work: Condvar::new(),
            started: AtomicBool::new(false),
            #[cfg(test)]
            refused: AtomicBool::new(false),
        })
    }

    /// Starts a thread, which exists as long as the engine.
    ///
    /// # Errors
    ///
    /// The system refuses a thread.
    #[inline]
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        if self.started.load(Relaxed) { Ok(()) } else { self.start_first() }
    }

    #[cold]
    fn start_first(self: &Arc<Self>) -> io::Result<()> {
        let mut state = self.state.acquire();
        if state.threads == 0 { self.spawn_one(&mut state) } else { Ok(()) }
    }

    fn spawn_one(self: &Arc<Self>, state: &mut PoolState) -> io::Result<()> {
        #[cfg(test)]
        if self.refused.load(Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let pool = Arc::clone(self);
        spawn(self.name, move || pool.serve())?;
        state.threads += 1;
        state.coming += 1;
        self.started.store(true, Relaxed);
        Ok(())
    }

    /// Runs `job` on a thread of the pool. There is one if [`Pool::start`] has succeeded; otherwise
    /// the calling thread may run it.
    pub(crate) fn run(self: &Arc<Self>, job: Job) {
        let mut state = self.state.acquire();
        let free = state.idle + state.coming;
        if free <= state.queue.len() && state.threads < self.threads_max {
            let spawned = self.spawn_one(&mut state);
            if spawned.is_err() && state.threads == 0 {
                drop(state);
                // The job may wait.
                batch::wake_now();
                return job();
            }
        }
        state.queue.push_back(job);
        drop(state);
        self.work.notify_one();
    }

    fn serve(&self) {
        let mut state = self.state.acquire();
        state.coming -= 1;
        loop {
            if let Some(job) = state.queue.pop_front() {
                drop(state);
                // A job that panics must not end the thread, which is counted.
                catch(job);
                state = self.state.acquire();
            } else if state.stopped {
                return;
            } else {
                state.idle += 1;
                state = self.work.wait(state).expect("no panic under the lock");
                state.idle -= 1;
            }
        }
    }

    /// The number of jobs that no thread has taken yet.
    pub(crate) fn queued(&self) -> usize {
        self.state.acquire().queue.len()
    }

    /// Makes the threads end when the queue is empty.
    pub(crate) fn stop(&self) {
        self.state.acquire().stopped = true;
        self.work.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    const THREADS_MAX: usize = 4;

    /// Goal: a thread that has been started counts as free before it reaches the queue.
    #[test]
    fn the_first_job_takes_one_thread() {
        for _ in 0..100 {
            let pool = Pool::new("pool", THREADS_MAX);
            let (tell, told) = mpsc::channel();
            pool.start().unwrap();
            pool.run(Box::new(move || tell.send(()).unwrap()));
            told.recv().unwrap();
            assert_eq!(pool.state.acquire().threads, 1);
            pool.stop();
        }
    }

    /// Goal: all jobs run, on no more threads than allowed, also those queued before a stop.
    #[test]
    fn a_few_threads_do_all_jobs() {
        let pool = Pool::new("pool", THREADS_MAX);
        let (now, most, done) = <(Arc<AtomicUsize>, Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let (tell, told) = mpsc::channel::<()>();
        for _ in 0..100 {
            let (now, most, done, tell) =
                (Arc::clone(&now), Arc::clone(&most), Arc::clone(&done), tell.clone());
            pool.run(Box::new(move || {
                most.fetch_max(now.fetch_add(1, Relaxed) + 1, Relaxed);
                std::thread::yield_now();
                now.fetch_sub(1, Relaxed);
                done.fetch_add(1, Relaxed);
                drop(tell);
            }));
        }
        pool.stop();
        drop(tell);
        assert!(told.recv().is_err(), "all jobs are gone");
        assert_eq!(done.load(Relaxed), 100);
        assert!(most.load(Relaxed) <= THREADS_MAX);
    }
}
