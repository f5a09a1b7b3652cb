//! A ring that any thread submits to, and that a waiter for its completions reaps: that of a queue.
//!
//! `io::reaping` says which waiter has the role of its reaper. The ring's completions ring the
//! driver's bell by way of an eventfd that the kernel writes to while the ring's flag lets it: so
//! the driver reaps while nobody else does, and until then it sleeps.
//!
//! The kernel completes a read in the context of the thread that submitted it, wherever that is. So only
//! threads submit here that use queues: others' reads go to the driver ([`SharedRing::of_this_batch`]).
//! The kernel may cancel what a thread leaves in flight when it ends, or fail it with EFAULT; it is
//! submitted again. (A ring with deferred completions would wait for one thread alone; nor has the
//! kernel the fence there that reaping.H2 needs.)
//!
//! - **S1** The ring is in the driver's list while there are reads in it: a ring that is retired takes
//!   none.
//! - **S2** The holder of the role reaps (read_ring.B2).
//! - **S3** A read is submitted at the end of the batch in which it was started, or before: a few at a time, so
//!   that the device works while more are made ready, and of a few the first alone. The thread that starts the
//!   first one takes the role, if it is vacant, until then: it reaps what ends meanwhile, and the driver is not
//!   rung for. One that is going to wait at once ([`Held`]) keeps both for that: it submits and sleeps in one
//!   call. Meanwhile others submit what they find queued, be it theirs or not.
//! - **S4** Once a thread finds the ring broken (ring.R3), what the kernel has not taken goes to the
//!   driver, and whatever comes later, too. Nobody goes to sleep in it any more, but a thread that
//!   sleeps may do so for [`SLEEP_MAX`], as it can't be poked.

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
use crate::io::backend::driver::{AbortOnUnwind, Driver, Ward};
use crate::io::backend::read_ring::{POKE, ReadRing, RingRead, Untaken, Use};
use crate::io::backend::ring::LOOK_AFTER;
use crate::io::batch;
use crate::io::flight;
use crate::io::reaping::{Reaping, Ring};
use crate::io::signal::Signal;
use crate::io::transfer::BackgroundRead;

/// Entries that are queued at most: what a queue starts in one batch. Chosen, not measured.
const QUEUED_MAX: usize = 32;
/// Places for submission: also for those that a sleeper is about to submit (read_ring.B4).
const ENTRIES: u32 = 2 * QUEUED_MAX as u32;
/// Reads of one engine, and more of others.
const COMPLETIONS: u32 = (flight::READS_MAX as u32 * 2).next_power_of_two();
/// read_ring.B3; the rest is for pokes, of which there are few.
const JOBS_MAX: usize = COMPLETIONS as usize - 256;
/// Reads that are submitted together at least, but for the last ones. As for a pipeline
/// ([`SUBMITTED_TOGETHER`](crate::io::backend::fixed_ring)).
const TOGETHER: usize = 4;
/// The longest sleep in the ring (S4). Chosen, not measured.
const SLEEP_MAX: Duration = Duration::from_secs(30);

/// See the module header.
pub(crate) struct SharedRing {
    reaping: Reaping<Led>,
}

/// The ring as its reapers see it.
struct Led {
    reads: ReadRing,
    driver: Arc<Driver>,
    /// Somebody is going to submit (S3).
    due: AtomicBool,
}

thread_local! {
    /// The ring that this thread is going to wait in, and whether it has its role.
    static HELD: Cell<(*const SharedRing, bool)> = const { Cell::new((std::ptr::null(), false)) };
}

/// What a thread that goes on to wait has not submitted yet, and the role if it has it (S3). Dropped without
/// a wait, it is submitted.
pub(crate) struct Held<'r> {
    ring: &'r SharedRing,
    leads: bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.ring.submit_and_give_up(self.leads);
    }
}

/// Starts a read of `file` in `ring`, if it takes it, or else as its back end does.
pub(crate) fn start_read(
    ring: Option<&Arc<SharedRing>>,
    file: Arc<dyn BackingFile>,
    read: BackgroundRead,
) -> Result<(), BackgroundRead> {
    let Some(ring) = ring else { return file.start(read) };
    ring.start(RingRead::new(file, read)).or_else(|RingRead { file, read, .. }| file.start(read))
}

impl SharedRing {
    /// A ring that `driver` looks after.
    pub(crate) fn new(driver: &Arc<Driver>) -> io::Result<Arc<SharedRing>> {
        let mut builder = IoUring::builder();
        // A forked child must not find the queues in its memory: they are the parent's.
        let ring = builder.dontfork().setup_cqsize(COMPLETIONS).build(ENTRIES)?;
        // Linux 5.11; without, nobody could sleep for a time.
        if !ring.params().is_feature_ext_arg() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        ring.submitter().register_eventfd(driver.bell().as_raw_fd())?;
        let (together, entries, jobs_max) = (TOGETHER, QUEUED_MAX, JOBS_MAX);
        let usage = Use { together, entries, jobs_max, outlives_submitters: true };
        let shared = Arc::new(SharedRing {
            reaping: Reaping::new(Led {
                reads: ReadRing::new(ring, usage),
                driver: Arc::clone(driver),
                due: AtomicBool::new(false),
            }),
        });
        driver.look_after(Arc::<SharedRing>::clone(&shared))?;
        Ok(shared)
    }

    fn led(&self) -> &Led {
        &self.reaping.ring
    }

    /// The ring, for reads of this thread, if it has a batch open: then it is one that submits to a
    /// queue, or reaps, and not one of the program's or a worker on other business, which could wait
    /// for long in the kernel, and be interrupted there.
    pub(crate) fn of_this_batch(ring: Option<&Arc<Self>>) -> Option<&Arc<Self>> {
        ring.filter(|_| batch::is_open())
    }

    fn start(self: &Arc<Self>, job: RingRead) -> Result<(), RingRead> {
        let untaken = self.led().reads.start(job)?;
        self.led().hand_over(untaken);
        // AcqRel: the next submitter has pushed, or sees what was pushed before this. Argued: an
        // RMW of one word comes before or after the other; a thread that finds it set leaves its
        // push, which is under a lock that the submitter takes later, to the one that clears it.
        if !self.led().due.swap(true, AcqRel) {
            let leads = self.reaping.try_take();
            let ring = Arc::clone(self);
            batch::at_end(Box::new(move || ring.end_submission(leads)));
        }
        Ok(())
    }

    fn end_submission(&self, leads: bool) {
        // Argued: see `start`.
        self.led().due.swap(false, AcqRel);
        let (held, led) = HELD.get();
        // Where the batch goes on, this thread waits for something else.
        if std::ptr::eq(held, self) && !batch::is_open() {
            return HELD.set((held, led || leads));
        }
        self.submit_and_give_up(leads);
    }

    /// Says that this thread goes on to start so many requests. A hint.
    pub(crate) fn announce(&self, count: usize) {
        self.led().reads.announce(count);
    }

    /// Calls `end`, which ends a batch, for a thread that then waits for completions.
    pub(crate) fn hold(&self, end: impl FnOnce()) -> Held<'_> {
        // Else what is HELD would stay so, and the role be nobody's.
        let abort = AbortOnUnwind;
        HELD.set((self, false));
        end();
        let (_, leads) = HELD.replace((std::ptr::null(), false));
        std::mem::forget(abort);
        Held { ring: self, leads }
    }

    fn submit_and_give_up(&self, leads: bool) {
        self.led().submit();
        if leads {
            self.reaping.give_up();
        }
        if self.is_over() {
            // The driver looked while this thread had the role.
            self.led().ring_driver();
        }
    }

    /// Sleeps until `signal` is granted so many completions, or `deadline`; reaps meanwhile. Whether it was.
    pub(crate) fn wait(
        &self,
        signal: &crate::sync::Arc<Signal>,
        wanted: usize,
        deadline: Option<Instant>,
        held: Option<Held<'_>>,
    ) -> bool {
        let leads = held.is_some_and(|held| ManuallyDrop::new(held).leads);
        self.reaping.wait(signal, wanted, deadline, leads)
    }

    /// Brings the leader out of its sleep.
    pub(crate) fn poke(&self) {
        self.led().poke();
    }

    /// No more is started, and nobody waits any more.
    pub(crate) fn retire(&self) {
        self.led().reads.retire();
        self.led().ring_driver();
    }
}

impl Ward for SharedRing {
    fn look(&self) {
        self.reaping.look();
    }

    fn is_over(&self) -> bool {
        self.led().reads.is_over()
    }
}

impl Led {
    /// Gives the driver what a broken ring has not taken (S4).
    fn hand_over(&self, untaken: Untaken) {
        for job in untaken {
            let file = Arc::clone(&job.file);
            if let Err(read) = self.driver.start(job) {
                // There is no thread for it.
                let job = RingRead::new(file, read);
                let outcome = job.attempt();
                job.finish(outcome);
            }
        }
    }
}

impl Ring for Led {
    fn submit(&self) {
        self.hand_over(self.reads.submit(0));
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
        self.driver.ring_bell();
    }

    fn has_completions(&self) -> bool {
        // SAFETY: S2.
        unsafe { !self.reads.ring.completion_shared().is_empty() }
    }

    fn reap(&self) {
        if !self.has_completions() {
            return;
        }
        // Unwinding would leave reads untold of, and the role taken.
        let _abort = AbortOnUnwind;
        let reaped = self.reads.reap(|| unreachable!("the bell is the driver's"));
        for (job, _) in &reaped.ended {
            job.read.segments.first().inspect(|segment| ask_for(segment.base()));
        }
        self.hand_over(reaped.untaken);
        self.submit();
        let batch = batch::open();
        reaped.ended.into_iter().for_each(|(job, outcome)| job.finish(outcome));
        drop(batch);
    }

    fn sleep(&self, deadline: Option<Instant>) {
        let begun = Instant::now();
        let left = deadline.map_or(SLEEP_MAX, |at| at.saturating_duration_since(begun));
        let most = if self.reads.is_idle() { SLEEP_MAX } else { LOOK_AFTER };
        self.hand_over(self.reads.sleep(left.min(most)));
        if !self.has_completions() && begun.elapsed() >= LOOK_AFTER {
            self.hand_over(self.reads.look_at_files());
        }
    }

    fn poke(&self) {
        // SAFETY: it names nothing.
        let untaken = unsafe { self.reads.push(&opcode::Nop::new().build().user_data(POKE), 0) };
        self.hand_over(untaken);
        self.submit();
    }
}
