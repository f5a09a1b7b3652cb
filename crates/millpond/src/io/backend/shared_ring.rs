//! A ring that any thread submits to, and that who waits for its completions reaps: that of a queue.
//!
//! Who has the role of its reaper, `io::reaping` says. The ring's completions ring the driver's bell by
//! way of an eventfd that the kernel writes to while the ring's flag lets it: so the driver reaps while
//! nobody else does, and until then it sleeps.
//!
//! The kernel completes a read in the context of the thread that submitted it, wherever that is. So only
//! threads submit here that use queues: others' reads go to the driver ([`SharedRing::of_this_batch`]).
//! What a thread leaves in flight when it ends the kernel may cancel, or fail with EFAULT; it is
//! submitted again. (A ring with deferred completions would wait for one thread alone; nor has the kernel
//! the fence there that H2 of `reaping` needs.)
//!
//! - **S1** As R1 of `uring`: a job is kept in `jobs` until its completion was reaped, and the ring is in
//!   the driver's list while there are jobs: a ring that is retired takes none.
//! - **S2** The submission queue is touched under `submission`, the completion queue by who has the role.
//! - **S3** A job is submitted at the end of the batch in which it was started, or before: a few at a
//!   time, so that the device works while more are made ready. Who starts the first one takes the role,
//!   if it is vacant, until then: it reaps what ends meanwhile, and the driver is not rung for.
//! - **S4** So few jobs are in flight that the kernel never has to keep completions for want of room:
//!   of those it would tell nobody.
//! - **S5** Once a thread finds the ring broken (R3 of `uring`), what the kernel has not taken goes to the
//!   driver, and whatever comes later, too. Nobody sleeps in it any more, but who did may do so for
//!   [`SLEEP_MAX`], as he can't be poked.
//!
//! Locks: `submission` and `jobs`; neither is taken under the other, and nothing is called under them
//! but the kernel.

use std::collections::VecDeque;
use std::io;
use std::mem::{self, ManuallyDrop};
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use io_uring::{EnterFlags, IoUring, opcode, squeue, types};
use smallvec::SmallVec;

use crate::copy;
use crate::io::backend::entry::outcome;
use crate::io::backend::uring::{
    AbortOnUnwind, Driver, Job, PAUSE, is_broken, is_transient, plain_entry,
};
use crate::io::batch;
use crate::io::flight;
use crate::io::reaping::{Reaping, Ring};
use crate::io::signal::Signal;

const ENTRIES: u32 = 2 * TOGETHER;
/// Jobs of one engine, and more of others.
const COMPLETIONS: u32 = (flight::READS_MAX as u32 * 2).next_power_of_two();
/// S4; the rest is for pokes, of which there are few.
const JOBS_MAX: usize = COMPLETIONS as usize - 256;
/// The user data of a completion that stands for nothing.
const POKE: u64 = u64::MAX;
/// Jobs that are submitted together at least, but for the last ones.
const TOGETHER: u32 = 4;
/// Completions that are seldom exceeded by what is reaped at once.
const TOGETHER_ENDED: usize = 16;
/// The longest sleep in the ring (S5).
const SLEEP_MAX: Duration = Duration::from_secs(30);
/// See the module header.
pub(crate) struct SharedRing {
    reaping: Reaping<Kernel>,
}

struct Kernel {
    ring: ManuallyDrop<IoUring>,
    driver: Arc<Driver>,
    /// S5.
    broken: AtomicBool,
    submission: Mutex<Queued>,
    /// Somebody is going to submit (S3).
    due: AtomicBool,
    jobs: Mutex<Jobs>,
}

/// Entries that were not submitted.
#[derive(Default)]
struct Queued(VecDeque<u64>);

#[derive(Default)]
struct Jobs {
    places: Vec<Option<Job>>,
    free: Vec<usize>,
    retired: bool,
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
        let shared = Arc::new(SharedRing {
            reaping: Reaping::new(Kernel {
                ring: ManuallyDrop::new(ring),
                driver: Arc::clone(driver),
                broken: AtomicBool::new(false),
                submission: Mutex::default(),
                due: AtomicBool::new(false),
                jobs: Mutex::default(),
            }),
        });
        driver.look_after(&shared)?;
        Ok(shared)
    }

    fn kernel(&self) -> &Kernel {
        &self.reaping.ring
    }

    /// The ring, for reads of this thread, if it has a batch open: then it is one that submits to a
    /// queue, or reaps, and not one of the program's or a worker on other business, which could wait
    /// for long in the kernel, and be interrupted there.
    pub(crate) fn of_this_batch(ring: Option<&Arc<Self>>) -> Option<&Arc<Self>> {
        ring.filter(|_| batch::is_open())
    }

    /// Starts a read; gives it back if the ring takes no more (S1, S4).
    pub(crate) fn start(self: &Arc<Self>, job: Job) -> Result<(), Job> {
        let number = self.kernel().keep(job)?;
        if let Some((job, error)) = self.kernel().push_job(number) {
            job.finish(Err(error));
            return Ok(());
        }
        // AcqRel: who submits next has pushed, or sees what was pushed before this. Argued: an RMW of
        // one word comes before or after the other; who finds it set leaves its push, which is under a
        // lock that the submitter takes later, to the one that clears it.
        if !self.kernel().due.swap(true, AcqRel) {
            let leads = self.reaping.try_take();
            let ring = Arc::clone(self);
            batch::at_end(Box::new(move || ring.end_submission(leads)));
        }
        Ok(())
    }

    fn end_submission(&self, leads: bool) {
        // Argued: see `start`.
        self.kernel().due.swap(false, AcqRel);
        self.kernel().submit();
        if leads {
            self.reaping.give_up();
        }
        if self.is_over() {
            // The driver looked while this thread had the role.
            self.kernel().ring_driver();
        }
    }

    /// Sleeps until `signal` is granted so many completions, or `deadline`; reaps meanwhile. Whether it was.
    pub(crate) fn wait(
        &self,
        signal: &crate::sync::Arc<Signal>,
        wanted: usize,
        deadline: Option<Instant>,
    ) -> bool {
        self.reaping.wait(signal, wanted, deadline)
    }

    /// Brings the leader out of its sleep.
    pub(crate) fn poke(&self) {
        self.kernel().poke();
    }

    /// For the driver: reaps what has completed, if nobody else does.
    pub(crate) fn look(&self) {
        self.reaping.look();
    }

    /// No more is started, and nobody waits any more.
    pub(crate) fn retire(&self) {
        self.kernel().jobs().retired = true;
        self.kernel().ring_driver();
    }

    /// Whether it is of no use any more.
    pub(crate) fn is_over(&self) -> bool {
        let jobs = self.kernel().jobs();
        jobs.retired && jobs.are_none()
    }
}

impl Drop for SharedRing {
    fn drop(&mut self) {
        assert!(self.kernel().jobs().are_none(), "S1: reads are in flight");
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if !*self.broken.get_mut() {
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.ring) };
        }
    }
}

impl Jobs {
    fn are_none(&self) -> bool {
        self.free.len() == self.places.len()
    }
}

impl Kernel {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().expect("no panic under the lock")
    }

    fn submission(&self) -> MutexGuard<'_, Queued> {
        self.submission.lock().expect("no panic under the lock")
    }

    fn keep(&self, job: Job) -> Result<usize, Job> {
        let mut jobs = self.jobs();
        // Acquire: pairs with the release of who found it out. (Who is later than that is handed over.)
        // Argued: a flag that carries nothing else; the jobs are under their lock.
        if self.broken.load(Acquire)
            || jobs.retired
            || jobs.places.len() - jobs.free.len() >= JOBS_MAX
        {
            return Err(job);
        }
        let number = jobs.free.pop().unwrap_or_else(|| {
            jobs.places.push(None);
            jobs.places.len() - 1
        });
        jobs.places[number] = Some(job);
        Ok(number)
    }

    /// Queues the read of a kept job; gives it back with what is wrong with it.
    fn push_job(&self, number: usize) -> Option<(Job, io::Error)> {
        let mut jobs = self.jobs();
        let place = &mut jobs.places[number];
        let job = place.as_ref().expect("kept until its completion was reaped");
        let transfer = job.read.transfer();
        match plain_entry(&job.file.descriptors, &transfer) {
            Ok(entry) => {
                drop(jobs);
                self.push(&entry.user_data(number as u64));
                None
            }
            Err(error) => {
                let job = place.take().expect("looked at above");
                jobs.free.push(number);
                Some((job, error))
            }
        }
    }

    fn push(&self, entry: &squeue::Entry) {
        let mut queued = self.submission();
        queued.0.push_back(entry.get_user_data());
        // Relaxed: whichever it is, all that is in `queued` and was not submitted is handed over.
        if !self.broken.load(Relaxed) {
            // SAFETY: S2. The entry's memory and descriptor are those of a job (S1), or it has none.
            unsafe { self.ring.submission_shared().push(entry) }
                .expect("there are never that many");
        }
        if queued.0.len() >= TOGETHER as usize {
            self.submit_under(queued);
        }
    }

    fn submit(&self) {
        self.submit_under(self.submission());
    }

    /// Submits all that is queued.
    fn submit_under(&self, mut queued: MutexGuard<'_, Queued>) {
        while !queued.0.is_empty() && !self.broken.load(Relaxed) {
            match self.ring.submit() {
                Ok(submitted) => drop(queued.0.drain(..submitted)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Release: pairs with the look of who is about to sleep. Those who slept before are not
                // to be reached (S5). Argued: see `keep`.
                Err(error) if is_broken(&error) => self.broken.store(true, Release),
                // Short of memory for a moment: nobody may be told that the reads have failed.
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
        if !queued.0.is_empty() {
            let untaken = mem::take(&mut queued.0);
            drop(queued);
            self.hand_over(untaken);
        }
    }

    /// Gives the driver what a broken ring has not taken (S5).
    #[cold]
    fn hand_over(&self, untaken: VecDeque<u64>) {
        for number in untaken.into_iter().filter(|&number| number != POKE) {
            let number = number as usize;
            let mut jobs = self.jobs();
            let job = jobs.places[number].take().expect("kept until its completion was reaped");
            jobs.free.push(number);
            drop(jobs);
            let file = Arc::clone(&job.file);
            if let Err(read) = self.driver.start(job) {
                // There is no thread for it.
                let outcome = file.descriptors.try_one(&read.transfer());
                Job { file, read }.finish(outcome);
            }
        }
    }

    /// Takes what has completed off the queue.
    fn take_completed(&self) -> SmallVec<[(usize, i32); TOGETHER_ENDED]> {
        // SAFETY: S2: the caller has the role.
        let completions = unsafe { self.ring.completion_shared() };
        completions
            .filter(|done| done.user_data() != POKE)
            .map(|done| (done.user_data() as usize, done.result()))
            .collect()
    }

    /// Enters the kernel until there is a completion, but not to submit.
    fn enter(&self, args: Option<&types::SubmitArgs<'_, '_>>) {
        let flags =
            EnterFlags::GETEVENTS | args.map_or(EnterFlags::empty(), |_| EnterFlags::EXT_ARG);
        // An error says "interrupted" or "timed out": the caller looks again.
        // SAFETY: nothing is submitted; the arguments are valid for the call.
        let entered = unsafe { self.ring.submitter().enter(0, 1, flags.bits(), args) };
        if entered.is_err_and(|error| is_broken(&error)) {
            // Argued: see `keep`.
            self.broken.store(true, Release);
        }
    }
}

impl Ring for Kernel {
    fn is_idle(&self) -> bool {
        self.jobs().are_none()
    }

    fn set_notify(&self, on: bool) {
        // SAFETY: S2.
        let completions = unsafe { self.ring.completion_shared() };
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
        unsafe { !self.ring.completion_shared().is_empty() }
    }

    fn reap(&self) {
        let completed = self.take_completed();
        if completed.is_empty() {
            return;
        }
        // Unwinding would leave reads untold of, and the role taken.
        let _abort = AbortOnUnwind;
        let mut ended: SmallVec<[_; TOGETHER_ENDED]> = SmallVec::new();
        let mut again = Vec::new();
        let mut jobs = self.jobs();
        for (number, result) in completed {
            // EFAULT: its thread was ending. The memory is ours, and good.
            if is_transient(result) || result == -libc::EFAULT {
                again.push(number);
            } else {
                let job = jobs.places[number].take().expect("each completion has its job");
                job.read.segments.first().inspect(|segment| copy::ask_for(segment.base()));
                ended.push((job, outcome(result)));
                jobs.free.push(number);
            }
        }
        drop(jobs);
        for number in again {
            if let Some((job, error)) = self.push_job(number) {
                ended.push((job, Err(error)));
            }
        }
        self.submit();
        let batch = batch::open();
        ended.into_iter().for_each(|(job, outcome)| job.finish(outcome));
        drop(batch);
    }

    fn sleep(&self, deadline: Option<Instant>) {
        // Acquire: pairs with the release of who found it out. Argued: a sleeper that misses it wakes
        // up by itself, and looks again.
        if self.broken.load(Acquire) {
            return std::thread::sleep(PAUSE);
        }
        let left = deadline.map_or(SLEEP_MAX, |at| at.saturating_duration_since(Instant::now()));
        let left = left.min(SLEEP_MAX);
        let left = types::Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
        self.enter(Some(&types::SubmitArgs::new().timespec(&left)));
    }

    fn poke(&self) {
        self.push(&opcode::Nop::new().build().user_data(POKE));
        self.submit();
    }
}
