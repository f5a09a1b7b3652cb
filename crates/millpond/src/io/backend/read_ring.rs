//! A ring of background reads, and the reads that are in it.
//!
//! ```text
//!   start -> kept, queued -> submit -> the kernel -> reap -> ended
//!                 ^                                   |
//!                 +-- the error is unrelated to it ---+
//!                 |        (ring.R2)
//!                 +-- the ring is broken -> untaken, for the caller (ring.R3)
//! ```
//!
//! The driver has one, to which only its thread submits. So has each queue, to which any thread
//! submits (`shared_ring`).
//!
//! - **B1** A read, with its memory and its file, is kept in `jobs` until its completion was
//!   reaped.
//! - **B2** The submission queue is accessed under `submission`, the completion queue by one thread
//!   at a time; callers of methods that say so guarantee that.
//! - **B3** Reads in flight are so few that the kernel never has to buffer completions for lack of
//!   room: of those it would not notify.
//! - **B4** A sleeper submits queued entries in the call in which it sleeps, and so without the
//!   lock. It has removed their numbers from the list before, and puts back those that the kernel
//!   has not taken. So a thread that finds the ring broken in between does not treat them as
//!   untaken. The kernel takes the oldest entries of the ring first; any submitter may find them
//!   taken, or submit them.
//! - **B5** An entry may be queued after the ring was found broken, and no other thread may submit
//!   from then on. So each submission and each sleep returns such entries.
//!
//! Locks: `submission` and `jobs`; neither is acquired under the other, and only the kernel is
//! called under them.

use std::collections::VecDeque;
use std::io;
use std::mem::{self, ManuallyDrop};
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use io_uring::{EnterFlags, IoUring, opcode, squeue, types};
use slab::Slab;
use smallvec::SmallVec;

use crate::io::backend::BackingFile;
use crate::io::backend::entry::entry;
use crate::io::backend::ring::{PAUSE, is_broken, outcome};
use crate::io::retry;
use crate::io::transfer::{BackgroundRead, TransientRetries};
use crate::sync::MutexExt;

/// The user data of a completion without meaning.
pub(crate) const POKE: u64 = u64::MAX;
/// The user data of the driver's read of its eventfd. That of other reads is their index.
pub(crate) const WAKE: u64 = u64::MAX - 1;
/// The number of completions that are usually reaped at once; more need an allocation. Untuned.
const REAPED_INLINE: usize = 16;
/// If that few reads are started together, the first is submitted alone, and the others in parts of
/// at least [`FEW_BATCH_MIN`]. Otherwise the device, which has completed all earlier reads before
/// the next are started, would be idle in between. With two reads the first would gain no time. The
/// measurement is in `docs/benchmarks.md`.
const FEW: RangeInclusive<usize> = 3..=12;
/// More than two: with so few, the kernel submits each to the device separately
/// (`IO_PLUG_THRESHOLD`).
const FEW_BATCH_MIN: usize = 3;

/// A background read, and its file.
pub(crate) struct RingRead {
    pub(crate) file: Arc<dyn BackingFile>,
    pub(crate) read: BackgroundRead,
    retries: TransientRetries,
}

impl RingRead {
    pub(crate) fn new(file: Arc<dyn BackingFile>, read: BackgroundRead) -> RingRead {
        RingRead { file, read, retries: TransientRetries::default() }
    }

    /// `None`: it cannot use a ring.
    fn entry(&self) -> Option<squeue::Entry> {
        let transfer = self.read.transfer();
        let (fd, flags) = self.file.route(&transfer)?.ok()?;
        Some(entry(types::Fd(fd), flags, &transfer, None))
    }

    /// Tries it without a ring.
    pub(crate) fn attempt(&self) -> io::Result<usize> {
        retry::try_one(&*self.file, self.read.transfer())
    }

    /// Drops its file (inode.CF1), and runs its completion, which may drop the last reference to the file.
    pub(crate) fn finish(self, outcome: io::Result<usize>) {
        drop(self.file);
        self.read.done.end(outcome);
    }
}

/// Reads that a broken ring has not taken.
pub(crate) type RefusedReads = Vec<RingRead>;

/// The use of a ring.
pub(crate) struct Use {
    /// Entries that are submitted together at least, except for the last ones, while more are in
    /// flight.
    pub(crate) together: usize,
    /// Submission entries.
    pub(crate) entries: usize,
    /// B3.
    pub(crate) jobs_max: usize,
    /// Whether a submitting thread may end before its reads do: the kernel may cancel them then, or
    /// fail them with EFAULT although our memory is valid.
    pub(crate) outlives_submitters: bool,
}

pub(crate) struct ReadRing {
    pub(super) ring: ManuallyDrop<IoUring>,
    usage: Use,
    /// ring.R3.
    broken: AtomicBool,
    /// How many reads were last announced to be started together. A hint.
    announced: AtomicUsize,
    submission: Mutex<Submission>,
    jobs: Mutex<Jobs>,
}

#[derive(Default)]
struct Submission {
    /// The user data of entries that were not submitted, and that no sleeper is going to submit
    /// (B4).
    queued: VecDeque<u64>,
    /// The number of entries that were ever pushed.
    pushed: u64,
}

#[derive(Default)]
struct Jobs {
    places: Slab<RingRead>,
    retired: bool,
}

/// The result of a reap.
#[derive(Default)]
pub(crate) struct Reaped {
    pub(crate) ended: SmallVec<[(RingRead, io::Result<usize>); REAPED_INLINE]>,
    pub(crate) untaken: RefusedReads,
}

impl Drop for ReadRing {
    fn drop(&mut self) {
        assert!(self.is_idle(), "B1: reads are in flight");
        if !*self.broken.get_mut() {
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.ring) };
        }
    }
}

impl ReadRing {
    pub(crate) fn new(ring: IoUring, usage: Use) -> ReadRing {
        ReadRing {
            ring: ManuallyDrop::new(ring),
            usage,
            broken: AtomicBool::new(false),
            announced: AtomicUsize::new(0),
            submission: Mutex::default(),
            jobs: Mutex::default(),
        }
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.acquire().places.is_empty()
    }

    /// Accepts no more reads from now on.
    pub(crate) fn retire(&self) {
        self.jobs.acquire().retired = true;
    }

    /// Whether it is not needed any more.
    pub(crate) fn is_over(&self) -> bool {
        let jobs = self.jobs.acquire();
        jobs.retired && jobs.places.is_empty()
    }

    pub(crate) fn is_broken(&self) -> bool {
        // Acquire: pairs with the release of the thread that found it broken. Argued: the flag
        // carries no other data; the reads are under their lock, and a sleeper that misses it wakes
        // up by its timeout, and checks again.
        self.broken.load(Acquire)
    }

    fn accepts_more(&self, jobs: &Jobs) -> bool {
        !self.is_broken() && !jobs.retired && jobs.places.len() < self.usage.jobs_max
    }

    /// Queues a read. Gives it back if it cannot use a ring, or if the ring accepts no more.
    pub(crate) fn start(&self, job: RingRead) -> Result<RefusedReads, RingRead> {
        // First, as creating an entry counts the read.
        if !self.accepts_more(&self.jobs.acquire()) {
            return Err(job);
        }
        let Some(entry) = job.entry() else { return Err(job) };
        let mut jobs = self.jobs.acquire();
        // If the ring breaks later, the read is among the untaken ones.
        if !self.accepts_more(&jobs) {
            return Err(job);
        }
        // The entry names the segments of the job, whose place does not change
        // (`transfer::Segments`).
        let number = jobs.places.insert(job);
        let under_way = jobs.places.len();
        drop(jobs);
        // SAFETY: B1.
        Ok(unsafe { self.push(&entry.user_data(number as u64), under_way) })
    }

    /// Announces that a thread is going to start `count` requests, most of which may be reads of
    /// this ring.
    pub(crate) fn announce(&self, count: usize) {
        // Relaxed: a hint; the last value is used, whichever thread stored it.
        self.announced.store(count, Relaxed);
    }

    /// Whether `count` queued entries are submitted before the next one is queued, if `under_way`
    /// reads are queued or in flight.
    fn is_early(&self, count: usize, under_way: usize) -> bool {
        // Relaxed: as above.
        let are_few = FEW.contains(&self.announced.load(Relaxed));
        // The device is idle: with this it works while the others are prepared.
        let is_first = are_few && count == 1 && under_way == 2;
        let together = self.usage.together;
        let together = if are_few { together.min(FEW_BATCH_MIN) } else { together };
        is_first || (count >= together && 2 * count >= under_way)
    }

    /// Queues an entry. `under_way` reads are queued or in flight.
    ///
    /// Earlier entries are submitted early while the device has fewer reads than that. Otherwise it
    /// costs a system call, and a notification of the device, more than it gains.
    ///
    /// # Safety
    ///
    /// The memory that it names stays until its completion was reaped.
    pub(crate) unsafe fn push(&self, entry: &squeue::Entry, under_way: usize) -> RefusedReads {
        let mut untaken = RefusedReads::new();
        let mut submission = self.submission.acquire();
        loop {
            let count = submission.queued.len();
            if !self.is_early(count, under_way) && count < self.usage.entries {
                break;
            }
            untaken.append(&mut self.submit_under(submission, 0));
            submission = self.submission.acquire();
        }
        submission.queued.push_back(entry.get_user_data());
        // Relaxed: in both cases, all queued entries that were not submitted are untaken.
        if !self.broken.load(Relaxed) {
            // SAFETY: B2; guaranteed by the caller.
            unsafe { self.ring.submission_shared().push(entry) }
                .expect("there are never that many");
            submission.pushed += 1;
        }
        untaken
    }

    /// Submits all queued entries, and waits for `wanted` completions. May return early.
    pub(crate) fn submit(&self, wanted: usize) -> RefusedReads {
        self.submit_under(self.submission.acquire(), wanted)
    }

    fn submit_under(
        &self,
        mut submission: MutexGuard<'_, Submission>,
        wanted: usize,
    ) -> RefusedReads {
        self.note_taken(&mut submission);
        while (wanted > 0 || !submission.queued.is_empty()) && !self.broken.load(Relaxed) {
            match self.ring.submitter().submit_and_wait(wanted) {
                Ok(_) => {
                    self.note_taken(&mut submission);
                    if submission.queued.is_empty() {
                        break;
                    }
                }
                // Release: pairs with the check of a thread that is about to sleep. Earlier
                // sleepers cannot be reached. Argued: see `is_broken`.
                Err(error) if is_broken(&error) => self.broken.store(true, Release),
                // The wait was interrupted.
                Err(_) if submission.queued.is_empty() => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Temporarily short of memory: the reads must not fail because of that.
                Err(_) => {
                    std::thread::sleep(PAUSE);
                    // A waiter reaps first, which may free the memory that the kernel lacks.
                    if wanted > 0 {
                        break;
                    }
                }
            }
        }
        if submission.queued.is_empty() || !self.broken.load(Relaxed) {
            return RefusedReads::new();
        }
        let untaken = mem::take(&mut submission.queued);
        drop(submission);
        let mut jobs = self.jobs.acquire();
        let numbers = untaken.into_iter().filter(|&number| number < WAKE);
        numbers.map(|number| jobs.places.remove(number as usize)).collect()
    }

    /// Entries in the ring that the kernel has not taken. The caller holds the lock.
    fn untaken(&self) -> usize {
        // SAFETY: B2.
        unsafe { self.ring.submission_shared() }.len()
    }

    /// Removes entries from the list that the kernel has taken.
    fn note_taken(&self, submission: &mut Submission) {
        // Queued entries of a broken ring are not in it.
        if !submission.queued.is_empty() && !self.broken.load(Relaxed) {
            let taken = submission.queued.len().saturating_sub(self.untaken());
            drop(submission.queued.drain(..taken));
        }
    }

    /// Submits queued entries, and sleeps until there is a completion, or for `limit`. May return
    /// early. One thread at a time.
    pub(crate) fn sleep(&self, limit: Duration) -> RefusedReads {
        let mut submission = self.submission.acquire();
        if self.is_broken() {
            // B5.
            let untaken = self.submit_under(submission, 0);
            if untaken.is_empty() {
                std::thread::sleep(PAUSE);
            }
            return untaken;
        }
        let limit = types::Timespec::new().sec(limit.as_secs()).nsec(limit.subsec_nanos());
        let args = types::SubmitArgs::new().timespec(&limit);
        let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        let mine = mem::take(&mut submission.queued);
        let end = submission.pushed;
        drop(submission);
        let count = mine.len() as u32;
        // The errors are "interrupted" and "timed out": the caller checks again.
        // SAFETY: B1 for the submitted entries; the arguments are valid for the call.
        let entered = unsafe { self.ring.submitter().enter(count, 1, flags.bits(), Some(&args)) };
        if entered.is_err_and(|error| is_broken(&error)) {
            // Argued: see `is_broken`.
            self.broken.store(true, Release);
        }
        if mine.is_empty() { RefusedReads::new() } else { self.put_back(mine, end) }
    }

    /// Cancels reads whose descriptors refer to other files by now (ring.R4).
    pub(crate) fn check_files(&self) -> RefusedReads {
        let jobs = self.jobs.acquire();
        let files = jobs.places.iter().map(|(number, job)| (number, Arc::clone(&job.file)));
        let files: Vec<_> = files.collect();
        drop(jobs);
        let mut untaken = RefusedReads::new();
        for (number, _) in files.into_iter().filter(|(_, file)| !file.is_intact()) {
            // If the number belongs to another read by now, that one is read again.
            let cancel = opcode::AsyncCancel::new(number as u64).build().user_data(POKE);
            // SAFETY: it names no memory.
            untaken.append(&mut unsafe { self.push(&cancel, 0) });
        }
        untaken
    }

    /// B4, for `mine`, after which entries up to `end` were pushed.
    fn put_back(&self, mut mine: VecDeque<u64>, end: u64) -> RefusedReads {
        let mut submission = self.submission.acquire();
        let taken = submission.pushed - self.untaken() as u64;
        let left = (end.saturating_sub(taken) as usize).min(mine.len());
        if left == 0 {
            if submission.queued.capacity() == 0 {
                // Its memory is reused.
                mine.clear();
                submission.queued = mine;
            }
            return RefusedReads::new();
        }
        drop(mine.drain(..mine.len() - left));
        mine.append(&mut submission.queued);
        submission.queued = mine;
        self.submit_under(submission, 0)
    }

    /// Takes completions off the queue (B2), and submits reads again whose error is unrelated to
    /// them. Calls `on_wake` if the eventfd's read was among them.
    pub(crate) fn reap(&self, mut on_wake: impl FnMut()) -> Reaped {
        // SAFETY: B2: guaranteed by the caller.
        let completions = unsafe { self.ring.completion_shared() };
        let completed: SmallVec<[(u64, i32); REAPED_INLINE]> =
            completions.map(|done| (done.user_data(), done.result())).collect();
        let mut reaped = Reaped::default();
        let mut again = Vec::new();
        let mut jobs = self.jobs.acquire();
        for (number, result) in completed {
            match number {
                POKE => {}
                WAKE => on_wake(),
                // It stays, so that the ring is not over.
                _ if self.is_unrelated(result) => again.push((number as usize, result)),
                _ => reaped.ended.push((jobs.places.remove(number as usize), outcome(result))),
            }
        }
        drop(jobs);
        for (number, result) in again {
            self.read_again(number, result, &mut reaped);
        }
        reaped
    }

    /// ring.R2.
    fn is_unrelated(&self, result: i32) -> bool {
        match -result {
            libc::EINTR | libc::EAGAIN | libc::ECANCELED => true,
            libc::EFAULT => self.usage.outlives_submitters,
            _ => false,
        }
    }

    #[cold]
    fn read_again(&self, number: usize, result: i32, reaped: &mut Reaped) {
        let mut jobs = self.jobs.acquire();
        let job = &mut jobs.places[number];
        let may_try = job.retries.may_try_at_once();
        // EFAULT concerns the thread that submitted it, and another one has the memory.
        if !may_try && -result != libc::EFAULT {
            let job = jobs.places.remove(number);
            drop(jobs);
            reaped.ended.push((job, outcome(result)));
            return;
        }
        let entry = job.entry().filter(|_| may_try);
        drop(jobs);
        if let Some(entry) = entry {
            // SAFETY: B1.
            reaped.untaken.append(&mut unsafe { self.push(&entry.user_data(number as u64), 0) });
            return;
        }
        let job = self.jobs.acquire().places.remove(number);
        let outcome = job.attempt();
        reaped.ended.push((job, outcome));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::{PipeReader, Write};
    use std::os::fd::{AsRawFd, OwnedFd, RawFd};
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use super::*;
    use crate::io::backend::{OpenedFor, Seek, ring};
    use crate::io::segment::Segment;
    use crate::io::transfer::Transfer;

    /// The reading end of a pipe, which counts how often its descriptor is requested.
    struct Piped {
        reader: PipeReader,
        asked: AtomicUsize,
        is_anothers: AtomicBool,
    }

    impl BackingFile for Piped {
        fn route(&self, _: &Transfer<'_>) -> Option<io::Result<(RawFd, i32)>> {
            self.asked.fetch_add(1, Relaxed);
            Some(Ok((self.reader.as_raw_fd(), 0)))
        }

        fn is_intact(&self) -> bool {
            !self.is_anothers.load(Relaxed)
        }

        fn try_all(&self, _: &mut [Transfer<'_>]) {
            unreachable!("it can be in a ring");
        }

        fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
            Err(read)
        }

        fn attach(&self, fd: OwnedFd, _: OpenedFor) -> io::Result<Option<OwnedFd>> {
            Ok(Some(fd))
        }

        fn len(&self) -> io::Result<u64> {
            unreachable!("a pipe")
        }

        fn set_len(&self, _: u64) -> io::Result<()> {
            unreachable!("a pipe")
        }

        fn zero(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
            unreachable!("a pipe")
        }

        fn allocate(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
            unreachable!("a pipe")
        }

        fn seek(&self, _: u64, _: Seek) -> io::Result<Option<u64>> {
            unreachable!("a pipe")
        }

        fn sync(&self, _: bool) -> io::Result<()> {
            unreachable!("a pipe")
        }
    }

    type Told = mpsc::Receiver<io::Result<usize>>;

    /// A read into `byte`, which outlives it, and the receiver of its completion.
    fn read_of(file: &Arc<Piped>, byte: &mut u8) -> (RingRead, Told) {
        // SAFETY: the caller's.
        let segments = [unsafe { Segment::new(byte, 1) }].into_iter().collect();
        let (tell, told) = mpsc::channel();
        let done = Box::new(move |outcome| tell.send(outcome).unwrap());
        let read = BackgroundRead { offset: 0, wanted: true, direct: false, segments, done };
        (RingRead::new(Arc::clone(file) as Arc<dyn BackingFile>, read), told)
    }

    fn ring_for(jobs_max: usize) -> Option<ReadRing> {
        match ring::new_ring(8, 16) {
            Ok(ring) => {
                let usage = Use { together: 8, entries: 8, jobs_max, outlives_submitters: true };
                Some(ReadRing::new(ring, usage))
            }
            Err(error) => {
                crate::skip::skip(format_args!("no io_uring: {error}"));
                None
            }
        }
    }

    fn piped() -> (Arc<Piped>, std::io::PipeWriter) {
        let (reader, writer) = std::io::pipe().unwrap();
        (
            Arc::new(Piped {
                reader,
                asked: AtomicUsize::new(0),
                is_anothers: AtomicBool::new(false),
            }),
            writer,
        )
    }

    /// Goal: a read that the kernel has cancelled, as it does when a thread ends, is submitted
    /// again. Method: a read of an empty pipe is cancelled; then the pipe is written to.
    #[test]
    fn a_cancelled_read_is_read_again() {
        let Some(ring) = ring_for(2) else { return };
        let (file, mut writer) = piped();
        let mut byte = 0;
        let (job, told) = read_of(&file, &mut byte);
        assert!(ring.start(job).is_ok_and(|untaken| untaken.is_empty()));
        assert!(ring.submit(0).is_empty());
        let cancel = opcode::AsyncCancel::new(0).build().user_data(POKE);
        // SAFETY: it names no memory.
        assert!(unsafe { ring.push(&cancel, 0) }.is_empty());
        // The completions of the read and of the cancellation.
        assert!(ring.submit(2).is_empty());
        let reaped = ring.reap(|| unreachable!("there is no on_wake"));
        assert_eq!((reaped.ended.len(), reaped.untaken.len()), (0, 0), "no completion runs");
        assert!(!ring.is_idle());
        writer.write_all(b"x").unwrap();
        assert!(ring.submit(1).is_empty());
        let reaped = ring.reap(|| unreachable!("there is no on_wake"));
        for (job, outcome) in reaped.ended {
            job.finish(outcome);
        }
        assert_eq!(told.recv().unwrap().unwrap(), 1);
        assert!(ring.is_idle());
        assert_eq!(byte, b'x');
    }

    /// Goal: a read whose descriptor refers to another file by now is cancelled, and its descriptor
    /// requested again; other reads are not affected (ring.R4). Method: reads of two pipes, of
    /// which one is reported as another file.
    #[test]
    fn a_read_of_a_replaced_descriptor_is_cancelled() {
        let Some(ring) = ring_for(2) else { return };
        let (mine, mut to_mine) = piped();
        let (anothers, mut to_anothers) = piped();
        let mut bytes = [0; 2];
        let [first, second] = &mut bytes;
        let (job, told) = read_of(&mine, first);
        assert!(ring.start(job).is_ok());
        let (job, also_told) = read_of(&anothers, second);
        assert!(ring.start(job).is_ok());
        assert!(ring.submit(0).is_empty());
        anothers.is_anothers.store(true, Relaxed);
        assert!(ring.check_files().is_empty());
        // The completions of the read and of the cancellation.
        assert!(ring.submit(2).is_empty());
        assert_eq!(ring.reap(|| unreachable!("there is no on_wake")).ended.len(), 0);
        assert_eq!([&mine, &anothers].map(|file| file.asked.load(Relaxed)), [1, 2]);
        to_mine.write_all(b"x").unwrap();
        to_anothers.write_all(b"y").unwrap();
        while !ring.is_idle() {
            assert!(ring.submit(1).is_empty());
            for (job, outcome) in ring.reap(|| unreachable!("there is no on_wake")).ended {
                job.finish(outcome);
            }
        }
        assert_eq!([told, also_told].map(|told| told.recv().unwrap().unwrap()), [1, 1]);
        assert_eq!(&bytes, b"xy");
    }

    /// Goal: the first of a few reads is submitted when the second arrives; the first of many waits
    /// for others. Method: reads of a pipe, and a check for entries that the kernel has not taken.
    #[test]
    fn of_a_few_the_first_goes_out_alone() {
        for (announced, left) in [(2, [1, 2, 3]), (4, [1, 1, 2]), (12, [1, 1, 2]), (13, [1, 2, 3])]
        {
            let Some(ring) = ring_for(4) else { return };
            let (file, mut writer) = piped();
            let mut bytes = [0; 3];
            ring.announce(announced);
            for (byte, left) in bytes.iter_mut().zip(left) {
                assert!(ring.start(read_of(&file, byte).0).is_ok());
                assert_eq!(ring.untaken(), left, "of {announced}");
            }
            assert!(ring.submit(0).is_empty());
            writer.write_all(b"xyz").unwrap();
            while !ring.is_idle() {
                assert!(ring.submit(1).is_empty());
                ring.reap(|| unreachable!("there is no on_wake"));
            }
        }
    }

    /// Goal: B5 (a queue's waiter slept forever beside such an entry). Method: the ring breaks
    /// between the check of `start` and its push.
    #[test]
    fn a_sleeper_in_a_broken_ring_returns_what_was_queued_since() {
        let Some(ring) = ring_for(2) else { return };
        let (file, _writer) = piped();
        let mut byte = 0;
        let (job, _told) = read_of(&file, &mut byte);
        let entry = job.entry().unwrap();
        let number = ring.jobs.acquire().places.insert(job);
        ring.broken.store(true, Release);
        // SAFETY: B1.
        assert!(unsafe { ring.push(&entry.user_data(number as u64), 1) }.is_empty());
        assert_eq!(ring.sleep(Duration::from_secs(1)).len(), 1);
        assert!(ring.is_idle());
        assert_eq!(ring.sleep(Duration::from_secs(1)).len(), 0);
    }

    /// Goal: a full or retired ring gives a read back unchanged: it is performed in another way,
    /// and counted there.
    #[test]
    fn a_full_ring_counts_nothing() {
        let Some(ring) = ring_for(1) else { return };
        let (file, mut writer) = piped();
        let mut bytes = [0; 3];
        let [first, second, third] = &mut bytes;
        assert!(ring.start(read_of(&file, first).0).is_ok());
        assert!(ring.start(read_of(&file, second).0).is_err());
        ring.retire();
        assert!(ring.start(read_of(&file, third).0).is_err());
        assert_eq!(file.asked.load(Relaxed), 1);
        writer.write_all(b"x").unwrap();
        assert!(ring.submit(1).is_empty());
        assert_eq!(ring.reap(|| unreachable!("there is no on_wake")).ended.len(), 1);
        assert!(ring.is_over());
    }
}
