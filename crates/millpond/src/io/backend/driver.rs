//! The driver: one thread that carries out background reads in a ring of its own.
//!
//! It is started when the first read comes, and it alone submits to its ring and reaps it. Others leave
//! their reads in a queue and write to an eventfd, on which the ring always has a read pending; so the
//! driver sleeps in one place, `io_uring_enter`, and does nothing while there is nothing to do.
//!
//! ```text
//!   start: lock queue, push, unlock; eventfd += 1  ->  driver: eventfd read completes
//!     -> take the queue -> submit -> reap -> done(outcome) on the driver's thread
//! ```
//!
//! The first read since the driver last took the queue rings, at the end of the batch that it is part of;
//! those that come until the driver does are taken with it. The bell is rung for other rings, too, which
//! the driver looks after while nobody waits for them (`shared_ring`).
//!
//! The driver does not end with reads in flight (ring.R1). With a broken ring (ring.R3) it goes on: what it
//! finds in its queue it reads by plain system calls, and it looks at the time instead of waiting for the
//! bell, whose own read may be in flight for ever; so that one's memory stays.
//!
//! Locks: the driver's queue; nothing is called under it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use io_uring::{opcode, types};
use rustix::event::EventfdFlags;

use crate::io::backend::read_ring::{BELL, ReadRing, RingRead, Untaken, Use};
use crate::io::backend::ring::{LOOK_AFTER, PAUSE, new_ring};
use crate::io::batch;
use crate::io::flight;
use crate::io::transfer::BackgroundRead;
use crate::thread::spawn;

/// Background reads under way that nobody waits for. Chosen, not measured.
const QUEUED_MAX: usize = 64;
/// Places for submission: a batch that is longer is submitted in parts. Chosen, not measured.
const ENTRIES: u32 = 256;
/// Completions for which the ring has room: all that may be under way, and the bell's (read_ring.B3).
const COMPLETIONS: u32 = 2048;
const _: () = assert!(QUEUED_MAX + flight::READS_MAX < COMPLETIONS as usize);
/// Between two looks at a broken ring with nothing in flight.
const PAUSE_IDLE: Duration = Duration::from_millis(10);

/// Where background reads are left for the driver's thread.
pub(crate) struct Driver {
    state: Mutex<DriverState>,
    bell: OwnedFd,
}

/// What the driver looks after.
pub(crate) trait Ward: Send + Sync {
    /// Ends what has completed, if nobody else does.
    fn look(&self);

    /// Whether there will be nothing more to look at.
    fn is_over(&self) -> bool;
}

#[derive(Default)]
struct DriverState {
    queue: Vec<RingRead>,
    /// Queued and in flight.
    pending: usize,
    wards: Vec<Arc<dyn Ward>>,
    /// The bell was rung since the queue was last taken.
    rung: bool,
    started: bool,
    stopped: bool,
}

impl Driver {
    pub(crate) fn new() -> io::Result<Driver> {
        // Blocking: the ring's read of it waits for the bell.
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Driver { state: Mutex::default(), bell })
    }

    fn state(&self) -> MutexGuard<'_, DriverState> {
        self.state.lock().expect("no panic under the lock")
    }

    pub(crate) fn start(self: &Arc<Self>, job: RingRead) -> Result<(), BackgroundRead> {
        let mut state = self.state();
        if state.pending >= QUEUED_MAX && !job.read.wanted {
            return Err(job.read);
        }
        if self.ensure_started(&mut state).is_err() {
            return Err(job.read);
        }
        state.pending += 1;
        state.queue.push(job);
        let rung = std::mem::replace(&mut state.rung, true);
        drop(state);
        if !rung {
            // With all that this thread starts now, if it starts several.
            let driver = Arc::clone(self);
            batch::at_end(Box::new(move || driver.ring_bell()));
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

    /// Looks at `ward` whenever the bell rings, until it is over.
    pub(crate) fn look_after(self: &Arc<Self>, ward: Arc<dyn Ward>) -> io::Result<()> {
        let mut state = self.state();
        self.ensure_started(&mut state)?;
        state.wards.push(ward);
        Ok(())
    }

    fn look(&self) {
        let wards = self.state().wards.clone();
        wards.iter().for_each(|ward| ward.look());
        let over: Vec<Arc<dyn Ward>> = wards.into_iter().filter(|ward| ward.is_over()).collect();
        if !over.is_empty() {
            let is_over = |ward: &Arc<dyn Ward>| over.iter().any(|over| Arc::ptr_eq(over, ward));
            let mut state = self.state();
            state.wards.retain(|ward| !is_over(ward));
            // They go without the lock.
            drop(state);
        }
    }

    /// What an eventfd of the kernel's rings.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(crate) fn ring_bell(&self) {
        // Fails only if the counter overflows, when the bell is ringing already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Lets the thread end once nothing is queued or in flight, and there is no ward.
    pub(crate) fn stop(&self) {
        self.state().stopped = true;
        self.ring_bell();
    }

    /// What was queued, and whether the thread is to end.
    fn take(&self) -> (Vec<RingRead>, bool) {
        let mut state = self.state();
        let ended = state.stopped && state.pending == 0 && state.wards.is_empty();
        state.rung = false;
        (std::mem::take(&mut state.queue), ended)
    }

    fn finish(&self, job: RingRead, outcome: io::Result<usize>) {
        let batch = batch::open();
        job.finish(outcome);
        drop(batch);
        self.state().pending -= 1;
    }

    fn serve(&self) {
        let entries = ENTRIES as usize;
        let (together, jobs_max) = (entries, usize::MAX);
        let usage = Use { together, entries, jobs_max, outlives_submitters: false };
        loop {
            // Rings worked when the engine was built: memory or descriptors are short, maybe for a moment.
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
        // Where the eventfd's count is read to: the kernel writes to it while the bell is armed.
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
                self.look();
            }
            let (jobs, ended) = self.take();
            match (ended, is_armed) {
                (true, true) if ring.is_broken() => {
                    // The bell's own read may end at any time.
                    std::mem::forget(rung);
                    return;
                }
                // ring.R1: also the bell's own read has ended.
                (true, false) => return,
                (true, true) => self.ring_bell(),
                (false, _) => {}
            }
            was_idle = jobs.is_empty();
            for job in jobs {
                self.read(ring.start(job).unwrap_or_else(|job| vec![job]));
            }
        }
    }

    /// Submits what is queued, and waits for a completion; while reads are in flight, for so long that their files
    /// should be looked at (ring.R4).
    fn submit_and_wait(&self, ring: &ReadRing) -> Untaken {
        if ring.is_idle() || ring.is_broken() || !ring.can_sleep() {
            return ring.submit(1);
        }
        let begun = Instant::now();
        let mut untaken = ring.sleep(LOOK_AFTER);
        if begun.elapsed() >= LOOK_AFTER {
            untaken.append(&mut ring.look_at_files());
        }
        untaken
    }

    fn arm(&self, ring: &ReadRing, rung: &mut [u8; 8]) {
        let fd = types::Fd(self.bell.as_raw_fd());
        let read = opcode::Read::new(fd, rung.as_mut_ptr(), 8).build().user_data(BELL);
        // SAFETY: the bell is the driver's, which the thread keeps; `rung` stays until the read has ended,
        // or for ever.
        self.read(unsafe { ring.push(&read, 0) });
    }

    /// Reads without a ring.
    fn read(&self, jobs: Untaken) {
        for job in jobs {
            let outcome = job.attempt();
            self.finish(job, outcome);
            // A waiter there must not wait for all of these.
            self.look();
        }
    }

    /// Waits for the bell once, and carries out the queued reads one at a time; whether the thread is to end.
    fn serve_without_ring(&self) -> bool {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.bell, &mut count);
        self.look();
        let (jobs, ended) = self.take();
        if !ended {
            self.read(jobs);
        }
        ended
    }
}

/// Of a thread that has memory in the kernel's hands, which unwinding would free, or what others wait for.
pub(crate) struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}
