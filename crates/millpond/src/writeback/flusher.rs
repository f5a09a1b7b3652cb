//! The workers of the flusher, which write back dirty pages by age and by amount.
//!
//! I/O to a hung device (or a dead server) may block a worker indefinitely. Files on other devices
//! must not wait for it. So there are several workers, which are equal: each scans the listed files
//! one by one, writes back those that are due, and ends when a scan has found none. One worker does
//! not end then, but sleeps until the next file is due.
//!
//! ```text
//!   by a thread that dirties a page, lists a file, or becomes busy (FL3)
//!                          |
//!                          v         try_begin
//!                      scanning <-----------------> busy: flush, sync, drop of a file
//!                       ^    |      return_file
//!    woken, or a file   |    |
//!    is due             |    | nothing is due
//!                       |    v
//!                    sleeping, or ends: another worker sleeps
//! ```
//!
//! - **FL1** A file is listed while a page of it is DIRTY, under write-back or unsynced. Then it is
//!   in the queue once, or in progress at one worker. A file without such pages leaves the list
//!   under the lock of its state, and the next thread that dirties it lists it again. So no two
//!   workers work on one file, and the list is not longer than the number of such files. (Closed
//!   files leave it with some delay.)
//! - **FL2** A worker blocks only when it sleeps and when it is *busy*. It marks itself busy
//!   before it flushes or syncs, gives back space, or drops the last reference to a file, as that
//!   closes descriptors.
//! - **FL3** While the queue is not empty, at least one worker is not busy, if a thread can be
//!   started. It is started by a thread that lists a file or requests a scan, and by a worker that
//!   becomes busy. A request that could not start it leaves the next request to try again. The
//!   sleeping worker scans again every [`WATCH_PERIOD`] while another worker is busy: that one
//!   may have stalled within its scan.
//! - **FL4** There are at most [`THREADS_MAX`] workers, of which [`DEVICE_FILES_MAX`] work on
//!   files of one device, so a dead server with many files blocks no more than these. If write-backs
//!   of a device have stopped for [`STALL_TIMEOUT`] in all workers on it, one more may begin.
//! - **FL5** A file with dirty or unsynced pages and without open handles is an *orphan*: the
//!   flusher keeps a reference to it, and it is listed. A worker removes the orphan before it
//!   checks the file for dirty pages, so that a concurrent close registers it again. A worker that
//!   has taken a file off the list lists it again if it is an orphan by then.
//! - **FL6** Timed waits are used only while dirty data exists or a worker is busy.
//! - **FL7** Small files issue one write each. Flushing them one after the other would leave the
//!   device at queue depth 1. So workers write back files with little dirty data (`SMALL_FILE_BYTES`)
//!   concurrently, while all files of the device that are in progress make progress. A worker that
//!   finds a second file due in its scan wakes the sleeping worker for that. Of larger
//!   files one at a time is in progress at a device, which leaves room for reads.
//! - **FL8** A worker may come to hold the last reference to a file, and so its
//!   descriptors and memory. The file is in progress, under the lock of the list, from the moment
//!   it is taken off the list until this reference is dropped. The last close waits until the file
//!   is no longer in progress, and an open without memory waits for files that are being dropped.
//!   Neither waits longer than [`STALL_TIMEOUT`]. A close does not wait for a sync, which may take
//!   as long as the device takes.
//! - **FL9** A request to reclaim frames raises a number, and each file has the number of the last
//!   request that it was written back for. So a worker that stalls does not use up the request of
//!   the other files.
//! - **FL10** A worker that panics ends, and its file is listed again.
//!
//! *Not covered.* If [`DEVICE_FILES_MAX`] files of one device hang, its other files are not
//! written back by age. If as many files hang on each of several devices as there are threads, no
//! file is. Syncs, last closes and writers over the limit still write them back.
//!
//! *Amounts* leave out stalled and failing files, and so does the part of the limit that they are
//! compared with. Otherwise a full disk would cause all other files to be written back at once, all
//! the time.
//!
//! Locks: `state` is a leaf, and no file is dropped under it.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::inode::CachedFile;
use crate::thread::spawn;
#[cfg(doc)]
use crate::writeback::scan::DEVICE_FILES_MAX;
use crate::writeback::scan::{Scan, address};
use crate::writeback::state::flusher_state::{Flusher, FlusherState, ThreadId};
#[cfg(any(doc, all(test, not(loom))))]
use crate::writeback::state::writer_token::STALL_TIMEOUT;

/// The delay of the next scan after a scan without work, while there are writes. Untuned.
const RESCAN_PERIOD: Duration = Duration::from_millis(100);
/// The period of the sleeping worker's scans while another worker is busy: half of
/// [`STALL_TIMEOUT`].
const WATCH_PERIOD: Duration = Duration::from_millis(250);
/// The minimum queue length at which closed files are removed. Untuned.
const QUEUE_MAX_MIN: usize = 64;
/// Workers of one engine: so many files may hang before other files wait for them. Untuned.
const THREADS_MAX: usize = 16;

/// The list of files, and requests to scan it.
impl Flusher<CachedFile> {
    /// Lists a file whose state already says that it is listed.
    pub(crate) fn add(self: &Arc<Self>, file: &CachedFile) {
        let mut state = self.state();
        if state.queue.len() >= state.queue_max {
            // The worker may sleep for long while files are opened and closed.
            state.queue.retain(|listed| listed.strong_count() > 0);
            state.queue_max = QUEUE_MAX_MIN.max(2 * state.queue.len());
        }
        state.queue.push_back(Weak::clone(&file.this));
        // If no thread can be started, writers write back when the limit is reached.
        self.ensure_worker(&mut state);
    }

    /// Keeps a file without open handles alive until it is written back.
    pub(crate) fn adopt_orphan(self: &Arc<Self>, file: Arc<CachedFile>) {
        // Before it is listed: the worker that takes it off the list checks whether it is an orphan
        // (FL5).
        let known = self.state().orphans.insert(address(&file), Arc::clone(&file));
        if !file.writeback.state().mark_listed(self) {
            self.add(&file);
        }
        self.request_scan();
        drop(known);
    }

    pub(crate) fn note_dirty(self: &Arc<Self>, dirty_bytes: u64) {
        let is_over_limit = self.is_over_background_limit(dirty_bytes);
        // notify_flag.NF1: a worker clears a set flag before its next scan.
        if self.dirtied.set() || is_over_limit {
            self.request_scan();
        }
    }

    /// Requests frames that write-back keeps unevictable. The caller does not wait for them.
    pub(crate) fn request_reclaim(self: &Arc<Self>, kept_bytes: u64) {
        if kept_bytes > 0 && !self.reclaim_requested.swap(true, Relaxed) {
            self.reclaims.fetch_add(1, Relaxed);
            self.request_scan();
        }
    }

    /// Makes a worker scan the list, unless a scan is pending already (notify_flag.NF1).
    pub(crate) fn request_scan(self: &Arc<Self>) {
        if !self.scan_requested.set() {
            return;
        }
        let mut state = self.state();
        self.wake_worker(&mut state);
        self.ensure_worker(&mut state);
        if state.threads == 0 {
            // FL3: no scan will clear the flag.
            self.scan_requested.clear();
        }
    }
}

/// The workers.
impl Flusher<CachedFile> {
    /// Starts a worker if files are listed and all workers are busy (FL3).
    pub(super) fn ensure_worker(self: &Arc<Self>, state: &mut FlusherState<CachedFile>) {
        if state.queue.is_empty() || state.stopped || state.threads >= THREADS_MAX {
            return;
        }
        if state.threads > state.busy() {
            return;
        }
        state.last_thread += 1;
        let (flusher, me) = (Arc::clone(self), state.last_thread);
        // The worker waits for the lock before it does anything.
        if spawn("millpond-flush", move || Worker::new(flusher, me).serve()).is_ok() {
            state.threads += 1;
        }
    }

    /// Makes the sleeping worker scan again.
    pub(super) fn wake_worker(&self, state: &mut FlusherState<CachedFile>) {
        if !state.wake_requested {
            state.wake_requested = true;
            self.wake.notify_one();
        }
    }

    /// Scans each file once, and works on those that are due. `None`: the flusher stops.
    fn scan_once(self: &Arc<Self>, me: ThreadId) -> Option<Scan> {
        let mut state = self.state();
        if state.stopped {
            return None;
        }
        state.wake_requested = false;
        self.scan_requested.clear();
        self.reclaim_requested.store(false, Relaxed);
        let taken_before = state.taken;
        let mut left = state.queue.len();
        drop(state);
        let mut scan = Scan::default();
        while let Some((file, orphan)) = self.take_next(me, &mut scan, &mut left) {
            let outcome = self.process(me, &file, orphan.is_some(), &mut scan);
            scan.note(outcome);
            self.return_file(me, file, orphan);
        }
        // A scan that shared the files with another one has seen a part of the stalled ones.
        if self.state().taken - taken_before == scan.taken {
            self.publish_stalled(me, scan.unwritten, scan.unstable);
        }
        Some(scan)
    }
}

/// A thread of the flusher. Dropping it ends the thread's part in the state (FL10).
pub(super) struct Worker {
    flusher: Arc<Flusher<CachedFile>>,
    me: ThreadId,
    /// The worker is one of [`FlusherState::threads`].
    is_counted: bool,
}

impl Worker {
    /// A worker that is one of [`FlusherState::threads`].
    pub(super) fn new(flusher: Arc<Flusher<CachedFile>>, me: ThreadId) -> Worker {
        Worker { flusher, me, is_counted: true }
    }

    fn serve(mut self) {
        while let Some(scan) = self.flusher.scan_once(self.me) {
            if !scan.has_worked && !self.sleep(scan.next) {
                return;
            }
        }
    }

    /// Sleeps until a file may be due. Returns false if the worker ends, as another one sleeps or
    /// the flusher stops.
    fn sleep(&mut self, next: Option<Instant>) -> bool {
        let flusher = &*self.flusher;
        let mut state = flusher.state();
        if state.stopped {
            return false;
        }
        if state.has_sleeper {
            // Files were in progress here when the other worker scanned the list.
            flusher.wake_worker(&mut state);
            // At once: from here on this worker does not count as one that is not busy (FL3).
            state.threads -= 1;
            self.is_counted = false;
            return false;
        }
        if state.wake_requested {
            return true;
        }
        let mut wait = match next {
            Some(at) => Some(at.saturating_duration_since(Instant::now())),
            // notify_flag.NF1: the scan follows. Pages were dirtied during or after the last scan,
            // and a sync may have written them back already. A program that writes and syncs a
            // thousand times a second does not wake the worker each time.
            None if flusher.dirtied.clear() => Some(RESCAN_PERIOD.min(flusher.limits.age_max / 4)),
            None => None,
        };
        if state.busy() > 0 {
            // FL3.
            wait = Some(wait.map_or(WATCH_PERIOD, |wait| wait.min(WATCH_PERIOD)));
        }
        state.has_sleeper = true;
        let is_over = |state: &FlusherState<CachedFile>| state.wake_requested || state.stopped;
        match wait {
            Some(wait) => {
                let slept = flusher.wake.wait_timeout_while(state, wait, |state| !is_over(state));
                state = slept.expect("no panic under the lock").0;
            }
            None => {
                while !is_over(&state) {
                    state = flusher.wake.wait(state).expect("no panic under the lock");
                }
            }
        }
        state.has_sleeper = false;
        !state.stopped
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let mut state = self.flusher.state();
        state.threads -= usize::from(self.is_counted);
        if std::thread::panicking() {
            let state = &mut *state;
            let (queue, me) = (&mut state.queue, self.me);
            state.in_progress.retain(|entry| {
                if entry.thread == me {
                    queue.push_back(Weak::clone(&entry.file));
                }
                entry.thread != me
            });
            self.flusher.released.notify_all();
            // FL3: a request that this worker had not seen is made again by the next one.
            self.flusher.scan_requested.clear();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::tests::slow::{Kind, Slow};
    use crate::writeback::scan::DEVICE_FILES_MAX;
    use crate::{BackendChoice, Engine, File, OpenOptions, WriteMode};

    /// Goal: many small files are written back by several workers (FL7). Method: their write-backs
    /// are blocked. While only one is active at a time, they are released one by one.
    #[test]
    fn small_files_are_written_back_by_several_threads() {
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(8 << 20);
        let engine = engine.dirty_age_max(Duration::from_millis(20)).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
        let files: Vec<_> = (0..100)
            .map(|_| {
                let slow = Slow::new(vec![0; 4096], Duration::ZERO);
                slow.reserve();
                slow.hold(Kind::Write, true);
                let file = CachedFile::on(engine.shared(), slow.clone(), &options).unwrap();
                (slow, File::new(file, None, &options))
            })
            .collect();
        files.iter().for_each(|(_, file)| file.write_all_at(&[1; 4096], 0).unwrap());
        let held = || files.iter().map(|(slow, _)| slow).filter(|slow| slow.now(Kind::Write) > 0);
        let mut ended = 0;
        while held().count() < DEVICE_FILES_MAX {
            if let Some(slow) = held().next() {
                slow.release_one(Kind::Write);
                while slow.now(Kind::Write) > 0 {
                    std::thread::yield_now();
                }
                ended += 1;
            }
            assert!(ended < files.len(), "one at a time");
            // Enough time for workers to start, and too short to count as stalled.
            std::thread::sleep(STALL_TIMEOUT / 25);
        }
        files.iter().for_each(|(slow, _)| slow.hold(Kind::Write, false));
        files.iter().for_each(|(slow, file)| {
            file.sync_all().unwrap();
            assert_eq!(slow.contents(), [1; 4096]);
        });
        while engine.shared().flusher.state().threads > 1 {
            std::thread::yield_now();
        }
    }

    /// Goal: pages that a failed flush of another thread puts back are written back by age, also if a
    /// worker scanned the file during that flush.
    /// Incident: the worker slept then until another page was dirtied, and the file of a last close
    /// that had failed stayed in memory.
    #[test]
    fn pages_of_a_failed_flush_are_written_back_later() {
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(4 << 20);
        let engine = engine.dirty_age_max(Duration::from_millis(100)).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
        let slow = Slow::new(vec![0; 4096], Duration::ZERO);
        slow.reserve();
        slow.hold(Kind::Write, true);
        let file = CachedFile::on(engine.shared(), slow.clone(), &options).unwrap();
        let file = File::new(file, None, &options);
        file.write_all_at(&[1; 4096], 0).unwrap();
        std::thread::scope(|threads| {
            let flush = threads.spawn(|| file.write_back());
            slow.wait_for(Kind::Write, 1);
            // Until a worker has scanned the file and sleeps without a time limit.
            engine.shared().flusher.request_scan();
            std::thread::sleep(Duration::from_millis(400));
            slow.fail(Kind::Write, libc::EIO);
            slow.hold(Kind::Write, false);
            // It fails if it is the only flush; a worker's may have begun before.
            let _ = flush.join().unwrap();
        });
        slow.fail(Kind::Write, 0);
        let started = Instant::now();
        while slow.contents() != [1; 4096] {
            assert!(started.elapsed() < Duration::from_secs(60), "it is not written back");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Goal: clean files leave the list, and closed files leave it while the worker sleeps.
    /// Incident: they stayed until they were closed, and each newly listed file caused a pass over
    /// all of them.
    #[test]
    fn files_leave_the_list() {
        let dir = tempfile::tempdir().unwrap();
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(4 << 20);
        let engine = engine.build().unwrap();
        let options = OpenOptions::new().read(true).write(true).create(true);
        let options = options.write_mode(WriteMode::Back);
        let open = |number: usize| engine.open(dir.path().join(number.to_string()), &options);
        let listed = || {
            let state = engine.shared().flusher.state();
            state.queue.len() + state.in_progress.len()
        };
        let files: Vec<_> = (0..100).map(|number| open(number).unwrap()).collect();
        files.iter().for_each(|file| file.write_all_at(&[1; 100], 0).unwrap());
        assert_eq!(listed(), 100);
        files.iter().for_each(|file| file.sync_all().unwrap());
        let started = Instant::now();
        while listed() > 0 {
            assert!(started.elapsed() < Duration::from_secs(30), "{} files are listed", listed());
            // The worker may sleep until the files are due that were dirty at its last scan.
            engine.shared().flusher.request_scan();
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut others = 0;
        files[0].write_all_at(&[2; 100], 0).unwrap();
        for _ in 0..1000 {
            open(100).unwrap().write_all_at(&[1; 100], 0).unwrap();
            others = others.max(listed());
        }
        assert!(others <= 2 * files.len() + 1, "{others} files are listed");
    }
}
