//! The threads of the flusher, which write back dirty pages by age and by amount.
//!
//! I/O to a hung device (or a dead server) may block a write-back thread indefinitely. Files on
//! other devices must not wait for it. So one thread is the *leader*: it scans the listed files one
//! by one, and sleeps when none is due. While the leader works on a file and other files are
//! listed, a *watchdog* thread observes it:
//!
//! ```text
//!   by the first DIRTY page             by a thread that starts work on a file, or lists one (FL3)
//!            |                                                  |
//!            v        mark_busy                                 v
//!         leader <---------------> working on a file        watchdog --> ends: the leader is idle
//!          |   ^     return_file           |                    |
//!    sleep |   | woken, due                |      longer than STALL_TIMEOUT
//!          v   |                           |                    |
//!         asleep                           v                    v
//!                     return_file <---- stalled              leader
//!                          |
//!                          v
//!               ends, or is watchdog (FL3)
//! ```
//!
//! - **FL1** A file is listed while a page of it is DIRTY, under write-back or unsynced. Then it is
//!   in the queue once, or in progress at one thread. A file without such pages leaves the list
//!   under the lock of its state, and the next thread that dirties it lists it again. So no two
//!   threads work on one file, and the list is not longer than the number of such files. (Closed
//!   files leave it with some delay.)
//! - **FL2** The leader blocks only when it sleeps and when it is *busy*. It marks itself busy
//!   before it flushes or syncs, gives back space, or drops the last reference to a file, as that
//!   closes descriptors.
//! - **FL3** While the leader is busy and the queue is not empty there is a watchdog, if a thread
//!   can be started. It is started by a thread that becomes busy, a thread that lists a file, or a
//!   thread that returns from a stalled file: the leader may have stalled when there were too many
//!   threads for a watchdog.
//! - **FL4** There are at most [`THREADS_MAX`] threads, of which [`DEVICE_THREADS_MAX`] work on
//!   files of one device, so a dead server with many files blocks no more than these. While
//!   write-backs of a device end, however slowly, one thread at a time works on its files. If none
//!   has ended for [`STALL_TIMEOUT`], one more thread may start. Helpers (FL7) that make progress
//!   are not counted, as they do not work on large files.
//! - **FL5** A file with dirty or unsynced pages and without open handles is an *orphan*: the
//!   flusher keeps a reference to it, and it is listed. A thread removes the orphan before it
//!   checks the file for dirty pages, so that a concurrent close registers it again. A thread that
//!   has taken a file off the list lists it again if it is an orphan by then.
//! - **FL6** Timed waits are used only while dirty data exists, and by the watchdog, which exists
//!   for a short time.
//! - **FL7** Small files issue one write each. Flushing them one after the other would leave the
//!   device at queue depth 1. So from the [`HELPER_AFTER_FILES`]th file on that the leader works on
//!   in a scan, up to [`HELPERS_MAX`] *helpers* scan the list concurrently. They work only on files
//!   with little dirty data (`SMALL_FILE_BYTES`), which leaves room for reads at the device, and
//!   only while all files of the device that are in progress make progress. A helper ends when it
//!   has seen as many files as were listed, or [`IDLE_MAX`] files in a row that needed no work.
//!   Helpers are not monitored: a stalled helper blocks only its own file.
//! - **FL8** A thread of the flusher may come to hold the last reference to a file, and so its
//!   descriptors and memory. The file is in progress, under the lock of the list, from the moment
//!   it is taken off the list until this reference is dropped. The last close waits until the file
//!   is no longer in progress, and an open without memory waits for files that are being dropped.
//!   Neither waits longer than [`STALL_TIMEOUT`]. A close does not wait for a sync, which may take
//!   as long as the device takes.
//!
//! *Not covered.* If [`DEVICE_THREADS_MAX`] files of one device hang, its other files are not
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
use crate::writeback::scan::{DEVICE_THREADS_MAX, HELPER_AFTER_FILES, Scan, WorkerRole, address};
use crate::writeback::state::flusher_state::{Flusher, FlusherState, ThreadId};
use crate::writeback::state::writer_token::STALL_TIMEOUT;

/// The delay of the next scan after a scan without work, while there are writes. Untuned.
const RESCAN_PERIOD: Duration = Duration::from_millis(100);
/// The period of the watchdog's checks: half of [`STALL_TIMEOUT`].
const WATCH_PERIOD: Duration = Duration::from_millis(250);
/// The minimum queue length at which closed files are removed. Untuned.
const QUEUE_MAX_MIN: usize = 64;
/// Threads of one engine: so many files may hang before other files wait for them. Untuned.
const THREADS_MAX: usize = 16;
/// Together with the leader, they are as many as may work on files of one device. Untuned.
const HELPERS_MAX: usize = DEVICE_THREADS_MAX - 1;
/// Untuned.
const IDLE_MAX: usize = 64;

/// The list of files.
impl Flusher<CachedFile> {
    /// Lists a file whose state already says that it is listed.
    pub(crate) fn add(self: &Arc<Self>, file: &CachedFile) {
        let mut state = self.state();
        if state.queue.len() >= state.queue_max {
            // The leader may sleep for long while files are opened and closed.
            state.queue.retain(|listed| listed.strong_count() > 0);
            state.queue_max = QUEUE_MAX_MIN.max(2 * state.queue.len());
        }
        state.queue.push_back(Weak::clone(&file.this));
        if state.leader.is_none() {
            // If no thread can be started, writers write back when the limit is reached.
            state.leader = self.spawn(&mut state, WorkerRole::Leader);
        }
        self.ensure_watchdog(&mut state);
    }

    /// Keeps a file without open handles alive until it is written back.
    pub(crate) fn adopt_orphan(self: &Arc<Self>, file: Arc<CachedFile>) {
        // Before it is listed: the thread that takes it off the list checks whether it is an orphan
        // (FL5).
        let known = self.state().orphans.insert(address(&file), Arc::clone(&file));
        if !std::mem::replace(&mut file.writeback.state().listed, true) {
            self.add(&file);
        }
        self.request_scan();
        drop(known);
    }
}

/// The threads and their roles.
impl Flusher<CachedFile> {
    /// Starts a thread, unless the limit is reached or the system refuses. Returns its number.
    fn spawn(
        self: &Arc<Self>,
        state: &mut FlusherState<CachedFile>,
        role: WorkerRole,
    ) -> Option<ThreadId> {
        if state.stopped || state.threads >= THREADS_MAX {
            return None;
        }
        state.last_thread += 1;
        let (flusher, me) = (Arc::clone(self), state.last_thread);
        spawn("millpond-flush", move || flusher.serve(me, role)).ok()?;
        state.threads += 1;
        Some(me)
    }

    /// Starts a watchdog if the leader is busy and other files are listed (FL3).
    pub(super) fn ensure_watchdog(self: &Arc<Self>, state: &mut FlusherState<CachedFile>) {
        if !state.has_watchdog && !state.queue.is_empty() && state.leader_busy_since().is_some() {
            state.has_watchdog = self.spawn(state, WorkerRole::Watchdog).is_some();
        }
    }

    /// Starts a helper, if there may be one more (FL7). Some threads stay reserved for stalls.
    pub(super) fn start_helper(self: &Arc<Self>) {
        let mut state = self.state();
        let is_room = state.threads + DEVICE_THREADS_MAX < THREADS_MAX;
        if is_room && state.helpers < HELPERS_MAX && state.queue.len() >= HELPER_AFTER_FILES {
            let is_there = self.spawn(&mut state, WorkerRole::Helper).is_some();
            state.helpers += usize::from(is_there);
        }
    }

    fn serve(self: &Arc<Self>, me: ThreadId, mut role: WorkerRole) {
        loop {
            let next_role = match role {
                WorkerRole::Leader => self.lead(me),
                WorkerRole::Watchdog => self.run_watchdog(me),
                WorkerRole::Helper => {
                    self.run_helper(me);
                    None
                }
            };
            match next_role {
                Some(next) => role = next,
                None => return,
            }
        }
    }

    /// Observes the leader, and replaces it when it is stalled. `None`: the thread ends.
    fn run_watchdog(&self, me: ThreadId) -> Option<WorkerRole> {
        let mut state = self.state();
        loop {
            let waited =
                self.watchdog_wake.wait_timeout_while(state, WATCH_PERIOD, |it| !it.stopped);
            state = waited.expect("no panic under the lock").0;
            let since = state.leader_busy_since();
            match since {
                Some(since) if !state.stopped => {
                    if since.elapsed() >= STALL_TIMEOUT {
                        (state.leader, state.has_watchdog) = (Some(me), false);
                        return Some(WorkerRole::Leader);
                    }
                }
                _ => {
                    state.has_watchdog = false;
                    state.threads -= 1;
                    return None;
                }
            }
        }
    }

    /// Scans all files and sleeps, until another thread is the leader or the flusher stops. `None`:
    /// the thread ends.
    fn lead(self: &Arc<Self>, me: ThreadId) -> Option<WorkerRole> {
        while self.scan_once(me) {}
        let mut state = self.state();
        // FL3: the leader may have stalled when no thread could be started as a watchdog.
        if !state.has_watchdog && state.leader_busy_since().is_some() {
            state.has_watchdog = true;
            return Some(WorkerRole::Watchdog);
        }
        state.threads -= 1;
        None
    }

    /// Scans each file once, and then sleeps if there was no work. Returns whether the thread is
    /// still the leader.
    fn scan_once(self: &Arc<Self>, me: ThreadId) -> bool {
        let mut state = self.state();
        if state.stopped {
            return false;
        }
        state.wake_requested = false;
        self.scan_requested.clear();
        let mut left = state.queue.len();
        drop(state);
        let mut scan = Scan::new(WorkerRole::Leader);
        scan.reclaim_requested = self.reclaim_requested.swap(false, Relaxed);
        while let Some((file, orphan)) = self.take_next(me, &scan, &mut left) {
            let outcome = self.process(me, &file, orphan.is_some(), &mut scan);
            scan.note(outcome);
            if !self.return_file(me, file, orphan) {
                self.wake_leader();
                return false;
            }
        }
        self.publish_stalled(me, scan.unwritten, scan.unstable);
        if !scan.has_worked {
            self.sleep(scan.next);
        }
        true
    }

    /// Scans the files as a helper (FL7).
    fn run_helper(self: &Arc<Self>, me: ThreadId) {
        let mut left = self.state().queue.len();
        let mut scan = Scan::new(WorkerRole::Helper);
        let mut idle = 0;
        while idle < IDLE_MAX
            && let Some((file, orphan)) = self.take_next(me, &scan, &mut left)
        {
            let files_worked = scan.files_worked;
            self.process(me, &file, orphan.is_some(), &mut scan);
            idle = if scan.files_worked > files_worked { 0 } else { idle + 1 };
            self.return_file(me, file, orphan);
        }
        let mut state = self.state();
        state.helpers -= 1;
        state.threads -= 1;
        drop(state);
        self.wake_leader();
    }

    /// Makes the leader scan again: files were in progress at another thread, so the leader may not
    /// have seen them in its scan.
    fn wake_leader(&self) {
        let mut state = self.state();
        if !state.wake_requested {
            state.wake_requested = true;
            self.leader_wake.notify_one();
        }
    }

    fn sleep(&self, next: Option<Instant>) {
        let mut state = self.state();
        if state.wake_requested || state.stopped {
            return;
        }
        let wait = match next {
            Some(at) => at.saturating_duration_since(Instant::now()),
            // notify_flag.NF1: the scan follows.
            None if self.dirtied.clear() => {
                // Pages were dirtied during or after the last scan, and a sync may have written
                // them back already. A program that writes and syncs a thousand times a second does
                // not wake the leader each time.
                RESCAN_PERIOD.min(self.limits.age_max / 4)
            }
            None => {
                while !state.wake_requested && !state.stopped {
                    state = self.leader_wake.wait(state).expect("no panic under the lock");
                }
                return;
            }
        };
        drop(self.leader_wake.wait_timeout(state, wait).expect("no panic under the lock"));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::tests::slow::{Kind, Slow};
    use crate::{BackendChoice, Engine, File, OpenOptions, WriteMode};

    /// Goal: many small files are written back by several threads (FL7). Method: their write-backs
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
        while held().count() <= HELPERS_MAX {
            if let Some(slow) = held().next() {
                slow.release_one(Kind::Write);
                while slow.now(Kind::Write) > 0 {
                    std::thread::yield_now();
                }
                ended += 1;
            }
            assert!(ended < files.len(), "one at a time");
            // Enough time for helpers to start, and too short to count as stalled.
            std::thread::sleep(STALL_TIMEOUT / 25);
        }
        assert!(engine.shared().flusher.state().helpers > 0, "the device was taken to be stuck");
        files.iter().for_each(|(slow, _)| slow.hold(Kind::Write, false));
        files.iter().for_each(|(slow, file)| {
            file.sync_all().unwrap();
            assert_eq!(slow.contents(), [1; 4096]);
        });
        while engine.shared().flusher.state().helpers > 0 {
            std::thread::yield_now();
        }
    }

    /// Goal: clean files leave the list, and closed files leave it while the leader sleeps.
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
            // The leader may sleep until the files are due that were dirty at its last scan.
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
