//! The ring of a queue: any thread submits to it, and a waiter for its completions reaps it.
//!
//! `io::reaper` decides which waiter has the role of the reaper. The ring's completions notify the
//! driver by an eventfd, to which the kernel writes while the ring's flag permits it: so the driver
//! reaps while the role is vacant, and sleeps otherwise.
//!
//! The kernel completes a read in the context of the thread that submitted it, even while that runs
//! other code. So only threads submit here that use queues; reads of other threads go to the driver
//! ([`SharedRing::of_this_batch`]). The kernel may cancel the reads that a thread leaves in flight
//! when it ends, or fail them with EFAULT; they are submitted again. (A ring with deferred
//! completions would depend on one thread alone; and the kernel has not the fence there that
//! reaper.H2 needs.)
//!
//! - **S1** The ring is in the driver's list while there are reads in it: a retired ring accepts
//!   none.
//! - **S2** The holder of the role reaps (read_ring.B2).
//! - **S3** A read is submitted at the end of the batch in which it was started, or before: a few
//!   at a time, so that the device works while more are prepared, and of a few the first alone. The
//!   thread that starts the first read takes the role, if it is vacant, until then: it reaps
//!   completions that arrive in between, and the driver is not notified. A thread that is going to
//!   wait immediately ([`HeldRing`]) keeps both for that: it submits and sleeps in one call. In
//!   between, other threads submit all entries that they find queued.
//! - **S4** Once a thread finds the ring broken (ring.R3), entries that the kernel has not taken go
//!   to the driver, and so do all later ones. No thread begins to sleep in it any more. A thread
//!   that sleeps already may do so for [`SLEEP_MAX`], as it cannot be poked.

use std::cell::Cell;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::AcqRel;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode};

use crate::copy::ask_for;
use crate::io::backend::BackingFile;
use crate::io::backend::driver::{AbortOnUnwind, Driver, PolledRing};
use crate::io::backend::read_ring::{POKE, ReadRing, RefusedReads, RingRead, Use};
use crate::io::backend::ring::CHECK_AFTER;
use crate::io::batch;
use crate::io::read_limit;
use crate::io::reaper::{Reaper, Ring};
use crate::io::signal::Signal;
use crate::io::transfer::BackgroundRead;

/// The maximum number of queued entries: the reads that a queue starts in one batch. Untuned.
const QUEUED_MAX: usize = 32;
/// Submission entries: also for those that a sleeper is about to submit (read_ring.B4).
const ENTRIES: u32 = 2 * QUEUED_MAX as u32;
/// Reads of one engine, and room for others.
const COMPLETIONS: u32 = (read_limit::READS_MAX as u32 * 2).next_power_of_two();
/// read_ring.B3; the rest is for pokes, which are few.
const JOBS_MAX: usize = COMPLETIONS as usize - 256;
/// Reads that are submitted together at least, except for the last ones. As for a pipeline
/// ([`SUBMITTED_TOGETHER`](crate::io::backend::fixed_ring)).
const TOGETHER: usize = 4;
/// The longest sleep in the ring (S4). Untuned.
const SLEEP_MAX: Duration = Duration::from_secs(30);

/// A queue's ring and its reaper; see the module.
pub(crate) struct SharedRing {
    reaper: Reaper<Led>,
}

/// The ring as seen by its reapers.
struct Led {
    reads: ReadRing,
    driver: Arc<Driver>,
    /// A thread is going to submit (S3).
    due: AtomicBool,
}

thread_local! {
    /// The ring in which this thread is going to wait, and whether it has the role.
    static HELD: Cell<(*const SharedRing, bool)> = const { Cell::new((std::ptr::null(), false)) };
}

/// The entries that a thread which is going to wait has not submitted yet, and the role if it has
/// it (S3). Dropped without a wait, they are submitted.
pub(crate) struct HeldRing<'r> {
    ring: &'r SharedRing,
    leads: bool,
}

impl Drop for HeldRing<'_> {
    fn drop(&mut self) {
        self.ring.submit_and_give_up(self.leads);
    }
}

/// Starts a read of `file` in `ring`, if that accepts it, or otherwise by its backend.
#[inline]
pub(crate) fn start_read(
    ring: Option<&Arc<SharedRing>>,
    file: Arc<dyn BackingFile>,
    read: BackgroundRead,
) -> Result<(), BackgroundRead> {
    let Some(ring) = ring else { return file.start(read) };
    ring.start(RingRead::new(file, read)).or_else(|RingRead { file, read, .. }| file.start(read))
}

impl SharedRing {
    /// A ring that `driver` polls.
    pub(crate) fn new(driver: &Arc<Driver>) -> io::Result<Arc<SharedRing>> {
        let mut builder = IoUring::builder();
        // A forked child must not find the queues in its memory: they belong to the parent.
        let ring = builder.dontfork().setup_cqsize(COMPLETIONS).build(ENTRIES)?;
        ring.submitter().register_eventfd(driver.wake_fd().as_raw_fd())?;
        let (together, entries, jobs_max) = (TOGETHER, QUEUED_MAX, JOBS_MAX);
        let usage = Use { together, entries, jobs_max, outlives_submitters: true };
        let shared = Arc::new(SharedRing {
            reaper: Reaper::new(Led {
                reads: ReadRing::new(ring, usage),
                driver: Arc::clone(driver),
                due: AtomicBool::new(false),
            }),
        });
        driver.poll_ring(Arc::<SharedRing>::clone(&shared))?;
        Ok(shared)
    }

    fn led(&self) -> &Led {
        &self.reaper.ring
    }

    /// The ring, for reads of this thread, if it has a batch open: then it is a thread that submits
    /// to a queue, or reaps. Other threads, of the program or workers, could wait for long in the
    /// kernel, and be interrupted there.
    pub(crate) fn of_this_batch(ring: Option<&Arc<Self>>) -> Option<&Arc<Self>> {
        ring.filter(|_| batch::is_open())
    }

    fn start(self: &Arc<Self>, job: RingRead) -> Result<(), RingRead> {
        let untaken = self.led().reads.start(job)?;
        self.led().pass_to_driver(untaken);
        // AcqRel: the next submitter sees the entries that were pushed before this. Argued: an RMW
        // of one word comes before or after the other; a thread that finds it set leaves its entry,
        // which is under a lock that the submitter acquires later, to the thread that clears it.
        if !self.led().due.swap(true, AcqRel) {
            let leads = self.reaper.try_take();
            let ring = Arc::clone(self);
            batch::defer(Box::new(move || ring.end_submission(leads)));
        }
        Ok(())
    }

    fn end_submission(&self, leads: bool) {
        // Argued: see `start`.
        self.led().due.swap(false, AcqRel);
        let (held, led) = HELD.get();
        // If the batch continues, this thread waits for something else.
        if std::ptr::eq(held, self) && !batch::is_open() {
            return HELD.set((held, led || leads));
        }
        self.submit_and_give_up(leads);
    }

    /// Announces that this thread is going to start `count` requests. A hint.
    pub(crate) fn announce(&self, count: usize) {
        self.led().reads.announce(count);
    }

    /// Calls `end`, which ends a batch, for a thread that then waits for completions.
    pub(crate) fn hold(&self, end: impl FnOnce()) -> HeldRing<'_> {
        // Otherwise HELD would stay set, and the role be lost.
        let abort = AbortOnUnwind;
        HELD.set((self, false));
        end();
        let (_, leads) = HELD.replace((std::ptr::null(), false));
        std::mem::forget(abort);
        HeldRing { ring: self, leads }
    }

    fn submit_and_give_up(&self, leads: bool) {
        self.led().submit();
        if leads {
            self.reaper.release_role();
        }
        if self.is_over() {
            // The driver polled while this thread had the role.
            self.led().ring_driver();
        }
    }

    /// Sleeps until `signal` is granted that many completions, or until `deadline`; reaps in
    /// between. Returns whether it was granted.
    pub(crate) fn wait(
        &self,
        signal: &crate::sync::Arc<Signal>,
        wanted: usize,
        deadline: Option<Instant>,
        held: Option<HeldRing<'_>>,
    ) -> bool {
        let leads = held.is_some_and(|held| ManuallyDrop::new(held).leads);
        self.reaper.wait(signal, wanted, deadline, leads)
    }

    /// Ends the sleep of the leader.
    pub(crate) fn poke(&self) {
        self.led().poke();
    }

    /// Accepts no more reads. No thread waits any more.
    pub(crate) fn retire(&self) {
        self.led().reads.retire();
        self.led().ring_driver();
    }
}

impl PolledRing for SharedRing {
    fn poll(&self) {
        self.reaper.poll();
    }

    fn is_over(&self) -> bool {
        self.led().reads.is_over()
    }
}

impl Led {
    /// Passes entries that a broken ring has not taken to the driver (S4).
    fn pass_to_driver(&self, untaken: RefusedReads) {
        for job in untaken {
            if let Err(job) = self.driver.start(job) {
                // There is no thread for it.
                let outcome = job.attempt();
                job.finish(outcome);
            }
        }
    }
}

impl Ring for Led {
    fn submit(&self) {
        self.pass_to_driver(self.reads.submit(0));
    }

    fn is_idle(&self) -> bool {
        self.reads.is_idle()
    }

    fn set_notify(&self, on: bool) {
        // SAFETY: S2.
        let completions = unsafe { self.reads.ring.completion_shared() };
        if on {
            completions.enable_eventfd();
        } else {
            completions.disable_eventfd();
        }
    }

    fn ring_driver(&self) {
        self.driver.wake();
    }

    fn has_completions(&self) -> bool {
        // SAFETY: S2.
        unsafe { !self.reads.ring.completion_shared().is_empty() }
    }

    fn reap(&self) {
        if !self.has_completions() {
            return;
        }
        // Unwinding would leave reads without a completion, and the role taken.
        let _abort = AbortOnUnwind;
        let reaped = self.reads.reap(|| unreachable!("the bell is the driver's"));
        for (job, _) in &reaped.ended {
            job.read.segments.first().inspect(|segment| ask_for(segment.base()));
        }
        self.pass_to_driver(reaped.untaken);
        self.submit();
        let batch = batch::open();
        reaped.ended.into_iter().for_each(|(job, outcome)| job.finish(outcome));
        drop(batch);
    }

    fn sleep(&self, deadline: Option<Instant>) {
        let begun = Instant::now();
        let left = deadline.map_or(SLEEP_MAX, |at| at.saturating_duration_since(begun));
        let most = if self.reads.is_idle() { SLEEP_MAX } else { CHECK_AFTER };
        self.pass_to_driver(self.reads.sleep(left.min(most)));
        if !self.has_completions() && begun.elapsed() >= CHECK_AFTER {
            self.pass_to_driver(self.reads.check_files());
        }
    }

    fn poke(&self) {
        // SAFETY: it names nothing.
        let untaken = unsafe { self.reads.push(&opcode::Nop::new().build().user_data(POKE), 0) };
        self.pass_to_driver(untaken);
        self.submit();
    }
}
