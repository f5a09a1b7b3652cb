//! The driver: one thread that performs background reads in a ring of its own.
//!
//! It is started by the first read, and only this thread submits to its ring and reaps it. Other
//! threads put their reads into a queue and write to an eventfd, on which the ring always has a
//! read pending. So the driver sleeps in one place, `io_uring_enter`, and does nothing while there
//! is no work.
//!
//! ```text
//!   start: lock queue, push, unlock; eventfd += 1  ->  driver: eventfd read completes
//!     -> take the queue -> submit -> reap -> done(outcome) on the driver's thread
//! ```
//!
//! The first read since the driver last took the queue writes to the eventfd, at the end of its
//! batch. Reads that arrive before the driver takes the queue are taken with it. Other rings write
//! to the eventfd too; the driver reaps them while no thread waits for them (`shared_ring`).
//!
//! The driver does not end with reads in flight (ring.R1). With a broken ring (ring.R3) it
//! continues: it performs queued reads by plain system calls, and polls instead of waiting for the
//! eventfd, as the pending read of that may never end; so the memory of that read is leaked.
//!
//! Locks: the driver's queue; nothing is called under it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use io_uring::{opcode, types};
use rustix::event::EventfdFlags;

use crate::io::backend::read_ring::{ReadRing, RefusedReads, RingRead, Use, WAKE};
use crate::io::backend::ring::{CHECK_AFTER, PAUSE, new_ring};
use crate::io::batch;
use crate::io::read_limit;
use crate::sync::MutexExt;
use crate::thread::spawn;

/// The maximum of background reads in progress without a waiter. Untuned.
const QUEUED_MAX: usize = 64;
/// Submission entries: a longer batch is submitted in parts. Untuned.
const ENTRIES: u32 = 256;
/// Completion entries of the ring: for all reads that may be in progress, and that of the eventfd
/// (read_ring.B3).
const COMPLETIONS: u32 = 2048;
const _: () = assert!(QUEUED_MAX + read_limit::READS_MAX < COMPLETIONS as usize);
/// The pause between two polls of a broken ring with nothing in flight.
const PAUSE_IDLE: Duration = Duration::from_millis(10);

/// The queue of background reads for the driver's thread.
pub(crate) struct Driver {
    state: Mutex<DriverState>,
    wake_fd: OwnedFd,
}

/// A ring that the driver polls.
pub(crate) trait PolledRing: Send + Sync {
    /// Processes completions, if no other thread does.
    fn poll(&self);

    /// Whether it needs no more polls.
    fn is_over(&self) -> bool;
}

#[derive(Default)]
struct DriverState {
    queue: Vec<RingRead>,
    /// Queued and in flight.
    pending: usize,
    rings: Vec<Arc<dyn PolledRing>>,
    /// The eventfd was written to since the queue was last taken.
    rung: bool,
    started: bool,
    stopped: bool,
}

impl Driver {
    pub(crate) fn new() -> io::Result<Driver> {
        // Blocking: the ring's read of it waits for a write.
        let wake_fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Driver { state: Mutex::default(), wake_fd })
    }

    pub(crate) fn start(self: &Arc<Self>, job: RingRead) -> Result<(), RingRead> {
        let mut state = self.state.acquire();
        if state.pending >= QUEUED_MAX && !job.read.wanted {
            return Err(job);
        }
        if self.ensure_started(&mut state).is_err() {
            return Err(job);
        }
        state.pending += 1;
        state.queue.push(job);
        let rung = std::mem::replace(&mut state.rung, true);
        drop(state);
        if !rung {
            // At the end of the batch, together with the other reads of this thread.
            let driver = Arc::clone(self);
            batch::defer(Box::new(move || driver.wake()));
        }
        Ok(())
    }

    fn ensure_started(self: &Arc<Self>, state: &mut DriverState) -> io::Result<()> {
        if !state.started {
            let driver = Arc::clone(self);
            spawn("millpond-driver", move || driver.serve())?;
            state.started = true;
        }
        Ok(())
    }

    /// Polls `ring` after each write to the eventfd, until it is over.
    pub(crate) fn poll_ring(self: &Arc<Self>, ring: Arc<dyn PolledRing>) -> io::Result<()> {
        let mut state = self.state.acquire();
        self.ensure_started(&mut state)?;
        state.rings.push(ring);
        Ok(())
    }

    fn poll(&self) {
        let rings = self.state.acquire().rings.clone();
        rings.iter().for_each(|ring| ring.poll());
        let over: Vec<Arc<dyn PolledRing>> =
            rings.into_iter().filter(|ring| ring.is_over()).collect();
        if !over.is_empty() {
            let is_over =
                |ring: &Arc<dyn PolledRing>| over.iter().any(|over| Arc::ptr_eq(over, ring));
            let mut state = self.state.acquire();
            state.rings.retain(|ring| !is_over(ring));
            // They are polled without the lock.
            drop(state);
        }
    }

    /// The eventfd, for the kernel to write to.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake_fd.as_fd()
    }

    pub(crate) fn wake(&self) {
        // Fails only if the counter overflows, when a read of it is due already.
        let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
    }

    /// Makes the thread end once nothing is queued or in flight, and there is no ring.
    pub(crate) fn stop(&self) {
        self.state.acquire().stopped = true;
        self.wake();
    }

    /// The queued reads, and whether the thread is to end.
    fn take(&self) -> (Vec<RingRead>, bool) {
        let mut state = self.state.acquire();
        let ended = state.stopped && state.pending == 0 && state.rings.is_empty();
        state.rung = false;
        (std::mem::take(&mut state.queue), ended)
    }

    fn finish(&self, job: RingRead, outcome: io::Result<usize>) {
        let batch = batch::open();
        job.finish(outcome);
        drop(batch);
        self.state.acquire().pending -= 1;
    }

    fn serve(&self) {
        let entries = ENTRIES as usize;
        let (together, jobs_max) = (entries, usize::MAX);
        let usage = Use { together, entries, jobs_max, outlives_submitters: false };
        loop {
            // Rings worked when the engine was built: memory or descriptors are short, maybe
            // temporarily.
            match new_ring(ENTRIES, COMPLETIONS) {
                Ok(ring) => return self.serve_ring(&ReadRing::new(ring, usage)),
                Err(_) if self.serve_without_ring() => return,
                Err(_) => {}
            }
        }
    }

    fn serve_ring(&self, ring: &ReadRing) {
        // ring.R1: unwinding would free the memory of reads that are in flight.
        let _abort = AbortOnUnwind;
        // The buffer for the eventfd's count: the kernel writes to it while the read is pending.
        let mut rung = Box::new([0; 8]);
        let mut is_armed = false;
        let mut was_idle = true;
        loop {
            if !is_armed && !ring.is_broken() {
                self.arm(ring, &mut rung);
                is_armed = true;
            }
            if ring.is_broken() && was_idle {
                std::thread::sleep(if ring.is_idle() { PAUSE_IDLE } else { PAUSE });
            }
            self.read(self.submit_and_wait(ring));
            let reaped = ring.reap(|| is_armed = false);
            let batch = batch::open();
            reaped.ended.into_iter().for_each(|(job, outcome)| self.finish(job, outcome));
            drop(batch);
            self.read(reaped.untaken);
            if !is_armed || ring.is_broken() {
                self.poll();
            }
            let (jobs, ended) = self.take();
            match (ended, is_armed) {
                (true, true) if ring.is_broken() => {
                    // The pending read of the eventfd may end at any time.
                    std::mem::forget(rung);
                    return;
                }
                // ring.R1: the read of the eventfd has ended too.
                (true, false) => return,
                (true, true) => self.wake(),
                (false, _) => {}
            }
            was_idle = jobs.is_empty();
            for job in jobs {
                self.read(ring.start(job).unwrap_or_else(|job| vec![job]));
            }
        }
    }

    /// Submits queued reads, and waits for a completion; while reads are in flight, at most until
    /// their files should be checked (ring.R4).
    fn submit_and_wait(&self, ring: &ReadRing) -> RefusedReads {
        if ring.is_idle() || ring.is_broken() {
            return ring.submit(1);
        }
        let begun = Instant::now();
        let mut untaken = ring.sleep(CHECK_AFTER);
        if begun.elapsed() >= CHECK_AFTER {
            untaken.append(&mut ring.check_files());
        }
        untaken
    }

    fn arm(&self, ring: &ReadRing, rung: &mut [u8; 8]) {
        let fd = types::Fd(self.wake_fd.as_raw_fd());
        let read = opcode::Read::new(fd, rung.as_mut_ptr(), 8).build().user_data(WAKE);
        // SAFETY: the eventfd belongs to the driver, which the thread keeps; `rung` stays until the
        // read has ended, or is leaked.
        self.read(unsafe { ring.push(&read, 0) });
    }

    /// Reads without a ring.
    fn read(&self, jobs: RefusedReads) {
        for job in jobs {
            let outcome = job.attempt();
            self.finish(job, outcome);
            // Waiters in other rings must not wait for all of these.
            self.poll();
        }
    }

    /// Waits for the eventfd once, and performs the queued reads one at a time. Returns whether the
    /// thread is to end.
    fn serve_without_ring(&self) -> bool {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake_fd, &mut count);
        self.poll();
        let (jobs, ended) = self.take();
        if !ended {
            self.read(jobs);
        }
        ended
    }
}

/// Aborts on unwinding, for a thread whose memory the kernel accesses, which unwinding would free,
/// or on which other threads depend.
pub(crate) struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}
