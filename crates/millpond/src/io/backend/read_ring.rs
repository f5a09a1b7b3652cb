//! A ring of background reads, and the reads that are in it.
//!
//! ```text
//!   start -> kept, queued -> submit -> the kernel -> reap -> ended
//!                 ^                                   |
//!                 +-- it says nothing of the read ----+
//!                 |        (ring.R2)
//!                 +-- the ring is broken -> untaken, for the caller (ring.R3)
//! ```
//!
//! The driver has one, to which it alone submits; so has each queue, to which any thread does
//! (`shared_ring`).
//!
//! - **B1** A read is kept in `jobs` until its completion was reaped, and with it its memory and its file.
//! - **B2** The submission queue is touched under `submission`, the completion queue by one thread at a time:
//!   callers of what says so see to it.
//! - **B3** So few reads are in flight that the kernel never has to keep completions for want of room: of
//!   those it would tell nobody.
//! - **B4** A sleeper submits what is queued in the call in which it sleeps, and so without the lock. It has
//!   taken the numbers off the list before, and puts back those that the kernel has not taken: so whoever
//!   finds the ring broken meanwhile leaves them alone. Of those in the ring, the kernel takes the oldest
//!   first; any submitter may find them taken, or have them taken.
//!
//! Locks: `submission` and `jobs`; neither is taken under the other, and nothing is called under them but
//! the kernel.

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
use crate::io::request;
use crate::io::transfer::{BackgroundRead, TransientRetries};

/// The user data of a completion that stands for nothing.
pub(crate) const POKE: u64 = u64::MAX;
/// That of the driver's read of its eventfd; reads have their place.
pub(crate) const BELL: u64 = u64::MAX - 1;
/// Completions that are seldom exceeded by what is reaped at once; more take an allocation. Chosen,
/// not measured.
const TOGETHER_ENDED: usize = 16;
/// Of so few reads that are started together the first goes out alone, and the others in parts of
/// [`TOGETHER_OF_FEW`] at least: the device has ended all of them before the next are started, and does nothing
/// meanwhile. Of two reads the first would gain no time. Measured in turns with the rule turned off (two processors of
/// a virtual machine, others at work beside; six runs of 24 to 40 rounds): 4 reads at a time were 8 in 100 more a second
/// (11 to -3), 8 were 7 more, 12 were 2 to 8 more; the processor time of each grew by up to
/// 8 in 100. With 16 it gained nothing.
const FEW: RangeInclusive<usize> = 3..=12;
/// More than two: the kernel tells the device of each of so few alone (`IO_PLUG_THRESHOLD`).
const TOGETHER_OF_FEW: usize = 3;

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

    /// `None`: it can't be in a ring.
    fn entry(&self) -> Option<squeue::Entry> {
        let transfer = self.read.transfer();
        let (fd, flags) = self.file.route(&transfer)?.ok()?;
        Some(entry(types::Fd(fd), flags, &transfer, None))
    }

    /// Tries it without a ring.
    pub(crate) fn attempt(&self) -> io::Result<usize> {
        request::try_one(&*self.file, self.read.transfer())
    }

    /// Tells of its end, which may be the last of the file.
    pub(crate) fn finish(self, outcome: io::Result<usize>) {
        self.read.done.end(outcome);
        drop(self.file);
    }
}

/// Reads that a broken ring has not taken.
pub(crate) type Untaken = Vec<RingRead>;

/// How a ring is used.
pub(crate) struct Use {
    /// Entries that are submitted together at least, but for the last ones: more, where more are in flight.
    pub(crate) together: usize,
    /// Places for submission.
    pub(crate) entries: usize,
    /// B3.
    pub(crate) jobs_max: usize,
    /// Whether a thread that has submitted may end before the reads do: the kernel may cancel them then,
    /// or fail them with EFAULT. The memory is ours, and good.
    pub(crate) outlives_submitters: bool,
}

pub(crate) struct ReadRing {
    pub(super) ring: ManuallyDrop<IoUring>,
    usage: Use,
    /// ring.R3.
    broken: AtomicBool,
    /// How many were last said to be started together. A hint.
    announced: AtomicUsize,
    submission: Mutex<Submission>,
    jobs: Mutex<Jobs>,
}

#[derive(Default)]
struct Submission {
    /// The user data of entries that were not submitted, and are not a sleeper's to submit (B4).
    queued: VecDeque<u64>,
    /// Entries that ever were put into the ring.
    pushed: u64,
}

#[derive(Default)]
struct Jobs {
    places: Slab<RingRead>,
    retired: bool,
}

/// What was reaped.
#[derive(Default)]
pub(crate) struct Reaped {
    pub(crate) ended: SmallVec<[(RingRead, io::Result<usize>); TOGETHER_ENDED]>,
    pub(crate) untaken: Untaken,
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

    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().expect("no panic under the lock")
    }

    fn submission(&self) -> MutexGuard<'_, Submission> {
        self.submission.lock().expect("no panic under the lock")
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs().places.is_empty()
    }

    /// Takes no more reads from now on.
    pub(crate) fn retire(&self) {
        self.jobs().retired = true;
    }

    /// Whether it is of no use any more.
    pub(crate) fn is_over(&self) -> bool {
        let jobs = self.jobs();
        jobs.retired && jobs.places.is_empty()
    }

    pub(crate) fn is_broken(&self) -> bool {
        // Acquire: pairs with the release of the thread that found it out. Argued: a flag that
        // carries nothing else; the reads are under their lock, and a sleeper that misses it wakes
        // up by itself, and looks again.
        self.broken.load(Acquire)
    }

    fn takes_more(&self, jobs: &Jobs) -> bool {
        !self.is_broken() && !jobs.retired && jobs.places.len() < self.usage.jobs_max
    }

    /// Queues a read; gives it back if it can't be in a ring, or this one takes no more.
    pub(crate) fn start(&self, job: RingRead) -> Result<Untaken, RingRead> {
        // First, as making an entry counts the read.
        if !self.takes_more(&self.jobs()) {
            return Err(job);
        }
        let Some(entry) = job.entry() else { return Err(job) };
        let mut jobs = self.jobs();
        // If the ring breaks later, the read is among the untaken.
        if !self.takes_more(&jobs) {
            return Err(job);
        }
        // The entry names the job's segments, which stay where they are (`transfer::Segments`).
        let number = jobs.places.insert(job);
        let under_way = jobs.places.len();
        drop(jobs);
        // SAFETY: B1.
        Ok(unsafe { self.push(&entry.user_data(number as u64), under_way) })
    }

    /// Says that a thread goes on to start so many requests, most of which may be reads of this ring.
    pub(crate) fn announce(&self, count: usize) {
        // Relaxed: a hint; the last one holds, whoever's it is.
        self.announced.store(count, Relaxed);
    }

    /// Whether `count` entries that are queued, of so many reads that are queued or in flight, are submitted
    /// before the next one is queued.
    fn is_early(&self, count: usize, under_way: usize) -> bool {
        // Relaxed: as above.
        let are_few = FEW.contains(&self.announced.load(Relaxed));
        // The device has nothing to do: with this it has while the others are made ready.
        let is_first = are_few && count == 1 && under_way == 2;
        let together = self.usage.together;
        let together = if are_few { together.min(TOGETHER_OF_FEW) } else { together };
        is_first || (count >= together && 2 * count >= under_way)
    }

    /// Queues an entry, one of so many reads that are queued or in flight.
    ///
    /// What was queued before is submitted early while the device has less to do than that; else it
    /// costs a system call, and a notification of the device, more than it gains.
    ///
    /// # Safety
    ///
    /// What it names stays until its completion was reaped.
    pub(crate) unsafe fn push(&self, entry: &squeue::Entry, under_way: usize) -> Untaken {
        let mut untaken = Untaken::new();
        let mut submission = self.submission();
        loop {
            let count = submission.queued.len();
            if !self.is_early(count, under_way) && count < self.usage.entries {
                break;
            }
            untaken.append(&mut self.submit_under(submission, 0));
            submission = self.submission();
        }
        submission.queued.push_back(entry.get_user_data());
        // Relaxed: whichever it is, all that is queued and was not submitted is untaken.
        if !self.broken.load(Relaxed) {
            // SAFETY: B2; the caller's promise.
            unsafe { self.ring.submission_shared().push(entry) }
                .expect("there are never that many");
            submission.pushed += 1;
        }
        untaken
    }

    /// Submits all that is queued, and waits for so many completions; may return early.
    pub(crate) fn submit(&self, wanted: usize) -> Untaken {
        self.submit_under(self.submission(), wanted)
    }

    fn submit_under(&self, mut submission: MutexGuard<'_, Submission>, wanted: usize) -> Untaken {
        self.note_taken(&mut submission);
        while (wanted > 0 || !submission.queued.is_empty()) && !self.broken.load(Relaxed) {
            match self.ring.submitter().submit_and_wait(wanted) {
                Ok(_) => {
                    self.note_taken(&mut submission);
                    if submission.queued.is_empty() {
                        break;
                    }
                }
                // Release: pairs with the look of a thread that is about to sleep. Earlier sleepers
                // are not to be reached. Argued: see `is_broken`.
                Err(error) if is_broken(&error) => self.broken.store(true, Release),
                // The wait was interrupted.
                Err(_) if submission.queued.is_empty() => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Short of memory for a moment: nobody may be told that the reads have failed.
                Err(_) => {
                    std::thread::sleep(PAUSE);
                    // A waiter reaps first, which may be what the kernel is short of.
                    if wanted > 0 {
                        break;
                    }
                }
            }
        }
        if submission.queued.is_empty() || !self.broken.load(Relaxed) {
            return Untaken::new();
        }
        let untaken = mem::take(&mut submission.queued);
        drop(submission);
        let mut jobs = self.jobs();
        let numbers = untaken.into_iter().filter(|&number| number < BELL);
        numbers.map(|number| jobs.places.remove(number as usize)).collect()
    }

    /// Entries in the ring that the kernel has not taken. The caller has the lock.
    fn untaken(&self) -> usize {
        // SAFETY: B2.
        unsafe { self.ring.submission_shared() }.len()
    }

    /// Takes off the list what the kernel has taken.
    fn note_taken(&self, submission: &mut Submission) {
        // What is queued at a broken ring is not in it.
        if !submission.queued.is_empty() && !self.broken.load(Relaxed) {
            let taken = submission.queued.len().saturating_sub(self.untaken());
            drop(submission.queued.drain(..taken));
        }
    }

    /// Whether [`ReadRing::sleep`] can be used (Linux 5.11).
    pub(crate) fn can_sleep(&self) -> bool {
        self.ring.params().is_feature_ext_arg()
    }

    /// Submits what is queued, and sleeps until something has completed, or for so long; may return early.
    /// One thread at a time.
    pub(crate) fn sleep(&self, limit: Duration) -> Untaken {
        if self.is_broken() {
            std::thread::sleep(PAUSE);
            return Untaken::new();
        }
        let limit = types::Timespec::new().sec(limit.as_secs()).nsec(limit.subsec_nanos());
        let args = types::SubmitArgs::new().timespec(&limit);
        let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        let mut submission = self.submission();
        let mine = mem::take(&mut submission.queued);
        let end = submission.pushed;
        drop(submission);
        let count = mine.len() as u32;
        // An error says "interrupted" or "timed out": the caller looks again.
        // SAFETY: B1 for what is submitted; the arguments are valid for the call.
        let entered = unsafe { self.ring.submitter().enter(count, 1, flags.bits(), Some(&args)) };
        if entered.is_err_and(|error| is_broken(&error)) {
            // Argued: see `is_broken`.
            self.broken.store(true, Release);
        }
        if mine.is_empty() { Untaken::new() } else { self.put_back(mine, end) }
    }

    /// Has reads end as cancelled whose files' descriptors are others' by now (ring.R4).
    pub(crate) fn look_at_files(&self) -> Untaken {
        let jobs = self.jobs();
        let files = jobs.places.iter().map(|(number, job)| (number, Arc::clone(&job.file)));
        let files: Vec<_> = files.collect();
        drop(jobs);
        let mut untaken = Untaken::new();
        for (number, _) in files.into_iter().filter(|(_, file)| !file.is_intact()) {
            // Of another read by now: then that is read again.
            let cancel = opcode::AsyncCancel::new(number as u64).build().user_data(POKE);
            // SAFETY: it names no memory.
            untaken.append(&mut unsafe { self.push(&cancel, 0) });
        }
        untaken
    }

    /// B4, of `mine`, behind which so many were pushed.
    fn put_back(&self, mut mine: VecDeque<u64>, end: u64) -> Untaken {
        let mut submission = self.submission();
        let taken = submission.pushed - self.untaken() as u64;
        let left = (end.saturating_sub(taken) as usize).min(mine.len());
        if left == 0 {
            if submission.queued.capacity() == 0 {
                // Its memory serves again.
                mine.clear();
                submission.queued = mine;
            }
            return Untaken::new();
        }
        drop(mine.drain(..mine.len() - left));
        mine.append(&mut submission.queued);
        submission.queued = mine;
        self.submit_under(submission, 0)
    }

    /// Takes what has completed off the queue (B2), and has those read again of which it says nothing. Whether
    /// the bell was among it goes to `bell`.
    pub(crate) fn reap(&self, mut bell: impl FnMut()) -> Reaped {
        // SAFETY: B2: the caller sees to it.
        let completions = unsafe { self.ring.completion_shared() };
        let completed: SmallVec<[(u64, i32); TOGETHER_ENDED]> =
            completions.map(|done| (done.user_data(), done.result())).collect();
        let mut reaped = Reaped::default();
        let mut again = Vec::new();
        let mut jobs = self.jobs();
        for (number, result) in completed {
            match number {
                POKE => {}
                BELL => bell(),
                // It stays, so that the ring is not over.
                _ if self.says_nothing(result) => again.push((number as usize, result)),
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
    fn says_nothing(&self, result: i32) -> bool {
        match -result {
            libc::EINTR | libc::EAGAIN | libc::ECANCELED => true,
            libc::EFAULT => self.usage.outlives_submitters,
            _ => false,
        }
    }

    #[cold]
    fn read_again(&self, number: usize, result: i32, reaped: &mut Reaped) {
        let mut jobs = self.jobs();
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
        let job = self.jobs().places.remove(number);
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

    /// The reading end of a pipe, which counts how often its way is asked for.
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

    /// A read into `byte`, which outlives it, and who is told of its end.
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

    /// Goal: a read that the kernel has cancelled, as it does when a thread ends, is read again.
    /// Method: a read of an empty pipe is cancelled; then there is something to read.
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
        // The read's end, and the cancellation's.
        assert!(ring.submit(2).is_empty());
        let reaped = ring.reap(|| unreachable!("there is no bell"));
        assert_eq!((reaped.ended.len(), reaped.untaken.len()), (0, 0), "nobody is told");
        assert!(!ring.is_idle());
        writer.write_all(b"x").unwrap();
        assert!(ring.submit(1).is_empty());
        let reaped = ring.reap(|| unreachable!("there is no bell"));
        for (job, outcome) in reaped.ended {
            job.finish(outcome);
        }
        assert_eq!(told.recv().unwrap().unwrap(), 1);
        assert!(ring.is_idle());
        assert_eq!(byte, b'x');
    }

    /// Goal: a read whose descriptor is somebody else's by now is cancelled, and its way asked for again; others are
    /// left alone (ring.R4).
    /// Method: reads of two pipes, of which one is said to be no file of ours.
    #[test]
    fn a_read_of_somebody_elses_descriptor_is_cancelled() {
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
        assert!(ring.look_at_files().is_empty());
        // The read's end, and the cancellation's.
        assert!(ring.submit(2).is_empty());
        assert_eq!(ring.reap(|| unreachable!("there is no bell")).ended.len(), 0);
        assert_eq!([&mine, &anothers].map(|file| file.asked.load(Relaxed)), [1, 2]);
        to_mine.write_all(b"x").unwrap();
        to_anothers.write_all(b"y").unwrap();
        while !ring.is_idle() {
            assert!(ring.submit(1).is_empty());
            for (job, outcome) in ring.reap(|| unreachable!("there is no bell")).ended {
                job.finish(outcome);
            }
        }
        assert_eq!([told, also_told].map(|told| told.recv().unwrap().unwrap()), [1, 1]);
        assert_eq!(&bytes, b"xy");
    }

    /// Goal: of a few reads the first goes out when the second comes, and of many it waits for others.
    /// Method: reads of a pipe, and a look at what the kernel has not taken.
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
                ring.reap(|| unreachable!("there is no bell"));
            }
        }
    }

    /// Goal: a ring that is full, or retired, gives a read back as it was: it goes another way, and is
    /// counted there.
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
        assert_eq!(ring.reap(|| unreachable!("there is no bell")).ended.len(), 1);
        assert!(ring.is_over());
    }
}
