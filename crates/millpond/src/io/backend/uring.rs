//! The io_uring back end.
//!
//! *A synchronous caller* reaps what it submits: a single transfer is one `preadv2`, which is one
//! system call as it stands; several go into a ring of the calling thread, submitted and reaped by
//! one `io_uring_enter`. Such a ring is empty whenever its thread is outside [`try_all`], so it
//! needs nobody to look after it.
//!
//! *Background reads* belong to the driver: one ring, and one thread, started when the first read
//! comes, that alone submits to it and reaps from it. (Reads for a queue go to the queue's ring, which
//! the driver looks after while nobody waits for it: `shared_ring`.) Others leave their reads in a queue and
//! write to an eventfd, on which the ring always has a read pending; so the driver sleeps in one
//! place, `io_uring_enter`, and does nothing while there is nothing to do.
//!
//! ```text
//!   start: lock queue, push, unlock; eventfd += 1  ->  driver: eventfd read completes
//!     -> take the queue -> submit -> reap -> done(outcome) on the driver's thread
//! ```
//!
//! The first read since the driver last took the queue rings, at the end of the batch that it is part of;
//! those that come until the driver does are taken with it.
//!
//! - **R1** Memory given to a ring is kept by the request, on the ring's side of the queue, until
//!   its completion was reaped. The driver never ends with reads in flight.
//! - **R2** EINTR, EAGAIN and ECANCELED are submitted again, never reported.
//! - **R3** A ring that the kernel refuses for good (a sandbox that was entered later, a program that closes
//!   descriptors that it does not know) is *broken*: nothing is submitted to it again. What it had not
//!   taken, which are the last entries, is carried out by plain system calls. What is in flight ends by
//!   itself, and its completions are found in memory, so no ring has its completions deferred until its
//!   thread asks for them (`DEFER_TASKRUN`): nobody could ask. A broken ring is not closed, as its
//!   descriptor may be somebody else's by now.
//!
//! Locks: the driver's queue; nothing is called under it.
//!
//! [`try_all`]: crate::io::backend::BackingFile::try_all

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::EventfdFlags;
use smallvec::SmallVec;

use crate::io::backend::descriptors::{Carrier, DescriptorFile, Descriptors};
use crate::io::backend::entry::{entry, outcome};
use crate::io::backend::shared_ring::SharedRing;
use crate::io::backend::spawn;
use crate::io::batch;
use crate::io::flight;
use crate::io::request::{BackgroundRead, Transfer};

const RING_ENTRIES: u32 = 64;
/// Background reads under way that nobody waits for.
const QUEUED_MAX: usize = 64;
/// Of the driver's ring.
const DRIVER_ENTRIES: u32 = 256;
/// Completions for which the driver's ring has room: all that may be under way, and the bell's. (Were
/// there more, the kernel would keep them; it takes longer.)
const DRIVER_COMPLETIONS: u32 = 2048;
const _: () = assert!(QUEUED_MAX + flight::READS_MAX < DRIVER_COMPLETIONS as usize);
/// The user data of the driver's read of its eventfd; reads have their slot number.
const BELL: u64 = u64::MAX;

/// Sets up a ring and reads a byte through it.
///
/// # Errors
///
/// What the system answered: EPERM or ENOSYS where io_uring is forbidden.
pub(crate) fn probe() -> io::Result<()> {
    let mut ring = new_ring(2)?;
    let file = rustix::fs::open(
        "/proc/self/exe",
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    let mut byte = [0u8; 1];
    let read = opcode::Read::new(types::Fd(file.as_raw_fd()), byte.as_mut_ptr(), 1).build();
    // SAFETY: `byte` and `file` live until the completion was reaped below, or the kernel has refused to
    // take the entry.
    unsafe { ring.submission().push(&read) }.map_err(|_| io::Error::other("the ring is full"))?;
    let done = loop {
        // What was submitted is in flight until it is reaped, whatever interrupts the wait.
        match ring.submit_and_wait(1) {
            Err(error) if is_broken(&error) && !ring.submission().is_empty() => return Err(error),
            Err(error) if is_broken(&error) => std::thread::sleep(PAUSE),
            _ => {}
        }
        if let Some(done) = ring.completion().next() {
            break done;
        }
    };
    match done.result() {
        1 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// R3: whether a ring that refused a call with this is broken. Others say that submitting or waiting was
/// interrupted, or that memory was short for a moment.
pub(crate) fn is_broken(error: &io::Error) -> bool {
    use libc::{EAGAIN, EBUSY, EINTR, ENOMEM, ETIME};
    ![EAGAIN, EBUSY, EINTR, ENOMEM, ETIME].contains(&error.raw_os_error().unwrap_or(EAGAIN))
}

/// Between two looks at a broken ring.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);
/// The same where nothing is in flight.
const PAUSE_IDLE: Duration = Duration::from_millis(10);

pub(crate) fn new_ring(entries: u32) -> io::Result<IoUring> {
    build_ring(entries, 2 * entries)
}

fn build_ring(entries: u32, completions: u32) -> io::Result<IoUring> {
    // A forked child must not find the queues in its memory: they are the parent's.
    let mut plain = IoUring::builder();
    plain.dontfork().setup_cqsize(completions);
    // One thread submits and reaps (Linux 6.0), and completion work does not interrupt it (R3).
    match plain.clone().setup_single_issuer().setup_coop_taskrun().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => plain.build(entries),
        other => other,
    }
}

/// A file whose background reads go to a [`Driver`].
pub(crate) type UringFile = DescriptorFile<Arc<Driver>>;

impl Carrier for Arc<Driver> {
    const TRANSFER_BYTES: u64 = 1 << 20;

    fn try_all(&self, descriptors: &Descriptors, batch: &mut [Transfer<'_>]) {
        if batch.len() > 1 && try_in_ring(descriptors, batch).is_some() {
            return;
        }
        descriptors.try_each(batch);
    }

    fn start(file: Arc<UringFile>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        let ring = read.ring.clone();
        let driver = Arc::clone(&file.carrier);
        let job = Job { file, read };
        let job = match ring {
            Some(ring) => match ring.start(job) {
                Ok(()) => return Ok(()),
                Err(job) => job,
            },
            None => job,
        };
        driver.start(job)
    }
}

/// What a thread has for its synchronous transfers.
enum ThreadRing {
    None,
    Ready(Box<IoUring>),
    /// R3.
    Broken,
}

thread_local! {
    static RING: RefCell<ThreadRing> = const { RefCell::new(ThreadRing::None) };
}

/// In a forked child: gives up the ring that this thread had in the parent, whose memory the two
/// share.
pub(crate) fn forget_parent() {
    let _ = RING.try_with(|ring| ring.try_borrow_mut().map(|mut ring| *ring = ThreadRing::None));
}

/// Carries out `batch` in the ring of this thread. `None`: there is no ring to be had, and nothing
/// was done.
fn try_in_ring(descriptors: &Descriptors, batch: &mut [Transfer<'_>]) -> Option<()> {
    RING.try_with(|ring| {
        // A signal handler that reads while its thread is in here goes without the ring.
        let mut slot = ring.try_borrow_mut().ok()?;
        if matches!(*slot, ThreadRing::None) {
            *slot = ThreadRing::Ready(Box::new(new_ring(RING_ENTRIES).ok()?));
        }
        for part in batch.chunks_mut(RING_ENTRIES as usize) {
            let ThreadRing::Ready(ring) = &mut *slot else {
                descriptors.try_each(part);
                continue;
            };
            if run_part(ring, descriptors, part).is_err()
                && let ThreadRing::Ready(ring) = mem::replace(&mut *slot, ThreadRing::Broken)
            {
                mem::forget(ring);
            }
        }
        Some(())
    })
    .ok()?
}

/// The ring can't be used any more.
struct Broken;

/// Carries out all of `part`, also if the ring breaks.
fn run_part(
    ring: &mut IoUring,
    descriptors: &Descriptors,
    part: &mut [Transfer<'_>],
) -> Result<(), Broken> {
    let mut queued: SmallVec<[usize; RING_ENTRIES as usize]> = SmallVec::new();
    for (number, transfer) in part.iter_mut().enumerate() {
        match plain_entry(descriptors, transfer) {
            Ok(entry) => {
                // SAFETY: R1: the transfers and their memory outlive this call, which returns when
                // all completions were reaped. The queue has room: it was empty, and a part has at
                // most as many transfers as the ring has entries.
                unsafe { ring.submission().push(&entry.user_data(number as u64)) }
                    .expect("room for all");
                queued.push(number);
            }
            Err(error) => transfer.set(Err(error)),
        }
    }
    let mut in_flight = queued.len();
    let mut ring_state = Ok(());
    while in_flight > 0 {
        if ring_state.is_err() {
            std::thread::sleep(PAUSE);
        } else if let Err(error) = ring.submit_and_wait(in_flight)
            // After another error, what is queued or in flight stays (R1, R2).
            && is_broken(&error)
        {
            ring_state = Err(Broken);
            let left = ring.submission().len();
            for &number in &queued[queued.len() - left..] {
                part[number].set(descriptors.try_one(&part[number]));
            }
            in_flight -= left;
        }
        for done in ring.completion() {
            part[done.user_data() as usize].set(outcome(done.result()));
            in_flight -= 1;
        }
    }
    ring_state
}

pub(crate) fn plain_entry(
    descriptors: &Descriptors,
    transfer: &Transfer<'_>,
) -> io::Result<squeue::Entry> {
    let (fd, flags) = descriptors.route(transfer)?;
    Ok(entry(types::Fd(fd), flags, transfer, None))
}

/// R2: such a result says nothing of the read.
pub(crate) fn is_transient(result: i32) -> bool {
    matches!(-result, libc::EINTR | libc::EAGAIN | libc::ECANCELED)
}

/// A background read, and what it needs.
pub(crate) struct Job {
    pub(crate) file: Arc<UringFile>,
    pub(crate) read: BackgroundRead,
}

impl Job {
    /// Tells of its end, which may be the last of the file.
    pub(crate) fn finish(self, outcome: io::Result<usize>) {
        (self.read.done)(outcome);
        drop(self.file);
    }
}

/// Where background reads are left for the driver's thread.
pub(crate) struct Driver {
    state: Mutex<DriverState>,
    bell: OwnedFd,
}

#[derive(Default)]
struct DriverState {
    queue: Vec<Job>,
    /// Queued and in flight.
    pending: usize,
    /// Those that it looks after.
    rings: Vec<Arc<SharedRing>>,
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

    pub(crate) fn start(self: &Arc<Self>, job: Job) -> Result<(), BackgroundRead> {
        let mut state = self.state.lock().expect("no panic under the lock");
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

    /// Looks at `ring` whenever the bell rings, until it is over.
    pub(crate) fn look_after(self: &Arc<Self>, ring: &Arc<SharedRing>) -> io::Result<()> {
        let mut state = self.state.lock().expect("no panic under the lock");
        self.ensure_started(&mut state)?;
        state.rings.push(Arc::clone(ring));
        Ok(())
    }

    /// Looks at the rings that it looks after.
    fn look(&self) {
        let rings = self.state.lock().expect("no panic under the lock").rings.clone();
        rings.iter().for_each(|ring| ring.look());
        let over: Vec<Arc<SharedRing>> = rings.into_iter().filter(|ring| ring.is_over()).collect();
        if !over.is_empty() {
            let is_over = |ring: &Arc<SharedRing>| over.iter().any(|over| Arc::ptr_eq(over, ring));
            let mut state = self.state.lock().expect("no panic under the lock");
            state.rings.retain(|ring| !is_over(ring));
            // The rings go without the lock.
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

    /// Lets the thread end once nothing is queued or in flight, and there is no ring to look after.
    pub(crate) fn stop(&self) {
        self.state.lock().expect("no panic under the lock").stopped = true;
        self.ring_bell();
    }

    fn serve(&self) {
        match build_ring(DRIVER_ENTRIES, DRIVER_COMPLETIONS) {
            Ok(ring) => Reaper::new(self, ring).serve(),
            // Rings worked when the engine was built. Serve without, one read at a time.
            Err(_) => self.serve_without_ring(),
        }
    }

    fn take(&self) -> (Vec<Job>, bool) {
        let mut state = self.state.lock().expect("no panic under the lock");
        let ended = state.stopped && state.pending == 0 && state.rings.is_empty();
        state.rung = false;
        (std::mem::take(&mut state.queue), ended)
    }

    fn finish(&self, job: Job, outcome: io::Result<usize>) {
        let batch = batch::open();
        job.finish(outcome);
        drop(batch);
        self.state.lock().expect("no panic under the lock").pending -= 1;
    }

    fn serve_without_ring(&self) {
        loop {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.bell, &mut count);
            self.look();
            let (jobs, ended) = self.take();
            if ended {
                return;
            }
            for job in jobs {
                let read = job.read.transfer();
                let outcome = job.file.descriptors.try_one(&read);
                self.finish(job, outcome);
                // Who waits there must not wait for all of these.
                self.look();
            }
        }
    }
}

pub(crate) struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// The driver's thread: its ring, and the reads that are in flight.
struct Reaper<'d> {
    driver: &'d Driver,
    ring: IoUring,
    jobs: Vec<Option<Job>>,
    /// The places in `jobs` that are empty.
    free: Vec<usize>,
    /// Where the eventfd's count is read to; boxed, as the kernel writes to it.
    rung: Box<[u8; 8]>,
    bell_armed: bool,
    /// What was pushed since the submission queue was last found empty.
    queued: VecDeque<u64>,
    /// Those of them that found no room in the queue of a broken ring.
    untaken: usize,
    /// R3.
    broken: bool,
}

impl<'d> Reaper<'d> {
    fn new(driver: &'d Driver, ring: IoUring) -> Reaper<'d> {
        Reaper {
            driver,
            ring,
            jobs: Vec::new(),
            free: Vec::new(),
            rung: Box::default(),
            bell_armed: false,
            queued: VecDeque::new(),
            untaken: 0,
            broken: false,
        }
    }

    fn serve(mut self) {
        // R1: unwinding would free the memory of reads that are in flight.
        let _abort = AbortOnUnwind;
        self.arm_bell();
        loop {
            if !self.broken {
                self.enter(1);
            }
            if self.broken {
                return self.serve_broken();
            }
            let reaped: Vec<(u64, i32)> =
                self.ring.completion().map(|done| (done.user_data(), done.result())).collect();
            let batch = batch::open();
            for (number, result) in reaped {
                if number == BELL {
                    self.bell_armed = false;
                } else {
                    self.end(number as usize, result);
                }
            }
            drop(batch);
            if !self.bell_armed {
                self.driver.look();
            }
            let (jobs, ended) = self.driver.take();
            match (ended, self.bell_armed) {
                // R1: also the bell's own read has ended.
                (true, false) => return,
                (true, true) => self.driver.ring_bell(),
                (false, false) => self.arm_bell(),
                (false, true) => {}
            }
            for job in jobs {
                let number = self.free.pop().unwrap_or_else(|| {
                    self.jobs.push(None);
                    self.jobs.len() - 1
                });
                self.submit(number, job);
            }
        }
    }

    fn arm_bell(&mut self) {
        let fd = types::Fd(self.driver.bell.as_fd().as_raw_fd());
        let read = opcode::Read::new(fd, self.rung.as_mut_ptr(), 8).build().user_data(BELL);
        self.push(&read);
        self.bell_armed = true;
    }

    fn submit(&mut self, number: usize, job: Job) {
        let transfer = job.read.transfer();
        match plain_entry(&job.file.descriptors, &transfer) {
            Ok(entry) => {
                // R1: the job keeps the segments, their memory and the descriptor.
                self.jobs[number] = Some(job);
                self.push(&entry.user_data(number as u64));
            }
            Err(error) => {
                self.free.push(number);
                self.driver.finish(job, Err(error));
            }
        }
    }

    /// Submits what is queued, and waits for so many completions; or finds that the ring is broken.
    fn enter(&mut self, wanted: usize) {
        match self.ring.submit_and_wait(wanted) {
            Err(error) if is_broken(&error) => self.broken = true,
            // Interrupted, or short of memory for a moment (R2).
            _ => {
                if self.ring.submission().is_empty() {
                    self.queued.clear();
                }
            }
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: R1: what the entry names is kept in `self.jobs` or `self.rung` until its
        // completion, and the ring is dropped before them.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.enter(0);
            if self.broken {
                // It is as if it had been queued: the last that the ring has not taken.
                self.queued.push_back(entry.get_user_data());
                self.untaken += 1;
                return;
            }
        }
        self.queued.push_back(entry.get_user_data());
    }

    /// Goes on with a broken ring (R3): what is in flight is looked for, and what else there is to be read
    /// is read by plain system calls. Looks instead of waiting for the bell, whose own read may be in
    /// flight for ever; so its memory stays.
    fn serve_broken(mut self) {
        let untaken = self.ring.submission().len() + self.untaken;
        let queued = mem::take(&mut self.queued);
        let mut jobs: Vec<Job> = queued
            .into_iter()
            .rev()
            .take(untaken)
            .filter(|&number| number != BELL)
            .map(|number| self.jobs[number as usize].take().expect("each entry has its job"))
            .collect();
        loop {
            let is_busy = !jobs.is_empty() || self.jobs.iter().any(Option::is_some);
            for job in jobs {
                let outcome = job.file.descriptors.try_one(&job.read.transfer());
                self.driver.finish(job, outcome);
                self.driver.look();
            }
            let reaped: Vec<(u64, i32)> =
                self.ring.completion().map(|done| (done.user_data(), done.result())).collect();
            let mut again = Vec::new();
            for (number, result) in reaped {
                if number == BELL {
                    continue;
                }
                let job = self.jobs[number as usize].take().expect("each completion has its job");
                if is_transient(result) {
                    again.push(job);
                } else {
                    self.driver.finish(job, outcome(result));
                }
            }
            self.driver.look();
            let (taken, ended) = self.driver.take();
            if ended {
                mem::forget(self);
                return;
            }
            jobs = taken;
            jobs.append(&mut again);
            if jobs.is_empty() {
                std::thread::sleep(if is_busy { PAUSE } else { PAUSE_IDLE });
            }
        }
    }

    fn end(&mut self, number: usize, result: i32) {
        let job = self.jobs[number].take().expect("each completion has its job");
        if is_transient(result) {
            self.submit(number, job);
        } else {
            self.free.push(number);
            self.driver.finish(job, outcome(result));
        }
    }
}
