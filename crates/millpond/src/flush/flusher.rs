//! The flusher: its threads write back when nobody asks for it, by age and by amount.
//!
//! A file that hangs (a dead server, a stuck device) keeps the thread that writes it back, maybe for
//! ever, and no other file is to wait for it. So one thread is *on duty*: it looks at the listed files one
//! by one, and sleeps when nothing is due. While it is at work on one and others are listed, a second one
//! *watches* it:
//!
//! ```text
//!   by the first DIRTY page             by who goes to work on a file, or lists one meanwhile (FL3)
//!            |                                                  |
//!            v        mark_busy                                v
//!         on duty <---------------> at work on a file         watch ----> ends: nobody is at work
//!          |   ^      put_back              |                   |
//!    sleep |   | told, due                  |      longer than STALL_TIMEOUT
//!          v   |                            |                   |
//!         asleep                            v                   v
//!                        put_back <---- stuck with it        on duty
//!                           |
//!                           v
//!                ends, or watches (FL3)
//! ```
//!
//! - **FL1** A file of which a page is DIRTY, or was and is under write-back or unsynced, is listed: it is in
//!   the queue once, or in a thread's in_progress. It leaves the list under the lock of its state, if that says
//!   that it owes nothing, and is listed by the next thread that dirties it. So no two threads work
//!   on one file, and the list is as long as there are files that owe something. (Closed ones leave
//!   it sooner or later.)
//! - **FL2** The thread on duty waits for nothing but in its sleep, and when it is *at work*: it says so
//!   before it flushes or syncs, gives back space, or drops the last reference to a file, as that closes
//!   descriptors.
//! - **FL3** While the thread on duty is at work and the queue is not empty there is a watch, if a thread is
//!   to be had. A thread that goes to work sees to it, and one that lists a file; and one that
//!   comes back from one, as the thread on duty may have got stuck when there were too many for a
//!   watch.
//! - **FL4** At most [`THREADS_MAX`] threads, of which [`DEVICE_THREADS_MAX`] at files of one device: a
//!   server that died with many files has no more. Where write-backs of a device come to an end, however
//!   slowly, one thread at a time is at its files; where none has for [`STALL_TIMEOUT`], one more is.
//!   Helpers (FL7) that move are not counted, else they would keep others from what is not for them.
//! - **FL5** A file that nobody has open and that owes something is a *orphan*: kept from being dropped, and
//!   listed. A thread takes it out of the orphans before it asks what it owes, so that a close
//!   meanwhile makes it one again; and a thread that has taken a file off the list lists it if it
//!   is one by then.
//! - **FL6** Nobody waits with a time limit but while something is owed, or for a moment as the watch.
//! - **FL7** A device takes many writes at once, and a small file is one: of many, one after the other, it would
//!   have one at a time. So from the [`HELPER_AFTER_FILES`]th file on that the thread on duty is at work on in a
//!   scan, up to [`HELPERS_MAX`] *helpers* go through the list beside it. They are at files only that owe little
//!   (`SMALL_FILE_BYTES`), so that there is still room for reads at the device, and only where all of the
//!   device's files in entry move. A helper ends when it has seen as many files as were listed, or [`IDLE_MAX`] in
//!   a row with which there was nothing to be done. It has no duty, and nobody waits for it: one that is stuck
//!   has a file in entry, and no more.
//! - **FL8** A thread that has a file in entry may come to have its last reference, and so its descriptors and memory. It is
//!   in entry from the look at the list until that is dropped, all under the lock of the list: so the last handle, when it
//!   has let go of the file, waits until that is out of entry, and an open that finds no memory until files that
//!   are being let go are gone. Neither waits for longer than [`STALL_TIMEOUT`], nor a handle for a sync, which may
//!   take as long as the device does.
//!
//! *Out of reach.* Where [`DEVICE_THREADS_MAX`] files of one device hang, its other files are not written
//! back by age, and nor is any file where as many hang on each of several devices as there are threads.
//! Their syncs, last closes and writers over the limit write them back all the same.
//!
//! *Amounts* are of what is not stuck, failing or hung, against what that leaves of the limit: else a full
//! disk would have all other files written back at once, all the time.
//!
//! Locks: `state` is a leaf, and no file is dropped under it.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::flush::scan::{DEVICE_THREADS_MAX, HELPER_AFTER_FILES, Scan, WorkerRole, address};
use crate::inode::CachedFile;
use crate::thread::spawn;
use crate::writeback::flusher_state::{Flusher, FlusherState, ThreadId};
use crate::writeback::writer_token::STALL_TIMEOUT;

/// How soon the flusher looks again after it found nothing to do, while there are writes. Chosen,
/// not measured.
const RESCAN_PERIOD: Duration = Duration::from_millis(100);
/// How often a watch looks: twice in [`STALL_TIMEOUT`].
const WATCH_PERIOD: Duration = Duration::from_millis(250);
/// With fewer files, it is not looked for those that are closed. Chosen, not measured.
const QUEUE_MAX_MIN: usize = 64;
/// Threads of one engine: so many files may hang before others wait for them. Chosen, not measured.
const THREADS_MAX: usize = 16;
/// With the thread on duty they are as many as may be at files of one device. Chosen, not measured.
const HELPERS_MAX: usize = DEVICE_THREADS_MAX - 1;
/// Chosen, not measured.
const IDLE_MAX: usize = 64;

/// The list.
impl Flusher<CachedFile> {
    /// Lists a file; its state says already that it is.
    pub(crate) fn add(self: &Arc<Self>, file: &CachedFile) {
        let mut state = self.state();
        if state.queue.len() >= state.queue_max {
            // The thread on duty may sleep for long, while files are opened and closed.
            state.queue.retain(|listed| listed.strong_count() > 0);
            state.queue_max = QUEUE_MAX_MIN.max(2 * state.queue.len());
        }
        state.queue.push_back(Weak::clone(&file.this));
        if state.leader.is_none() {
            // Where there is no thread to be had, writers do the work when the limit is reached.
            state.leader = self.spawn(&mut state, WorkerRole::Leader);
        }
        self.ensure_watchdog(&mut state);
    }

    /// Keeps a file whose last handle is gone until it is written back.
    pub(crate) fn adopt_orphan(self: &Arc<Self>, file: Arc<CachedFile>) {
        // Before it is listed: the thread that takes it off the list looks whether it is a orphan
        // (FL5).
        let known = self.state().orphans.insert(address(&file), Arc::clone(&file));
        if !std::mem::replace(&mut file.writeback.state().listed, true) {
            self.add(&file);
        }
        self.request_scan();
        drop(known);
    }
}

/// Threads, and what each does.
impl Flusher<CachedFile> {
    /// Starts a thread, if there may be one more and the system gives it; its number.
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

    /// Sees to it that somebody watches the one on duty, if there is anything to be done beside what it
    /// does (FL3).
    pub(super) fn ensure_watchdog(self: &Arc<Self>, state: &mut FlusherState<CachedFile>) {
        if !state.has_watchdog && !state.queue.is_empty() && state.leader_busy_since().is_some() {
            state.has_watchdog = self.spawn(state, WorkerRole::Watchdog).is_some();
        }
    }

    /// Starts a helper, if there may be one more (FL7). It leaves threads to those that get stuck.
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
            let goes_on = match role {
                WorkerRole::Leader => self.lead(me),
                WorkerRole::Watchdog => self.run_watchdog(me),
                WorkerRole::Helper => {
                    self.run_helper(me);
                    None
                }
            };
            match goes_on {
                Some(next) => role = next,
                None => return,
            }
        }
    }

    /// Watches the thread on duty, and takes over from it when it is stuck. `None`: the thread ends.
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

    /// Looks at all files, and sleeps, until somebody else is on duty, or there is nothing left to be on
    /// duty for. `None`: the thread ends.
    fn lead(self: &Arc<Self>, me: ThreadId) -> Option<WorkerRole> {
        while self.scan_once(me) {}
        let mut state = self.state();
        // FL3: the one on duty may have got stuck when there was no thread for a watch.
        if !state.has_watchdog && state.leader_busy_since().is_some() {
            state.has_watchdog = true;
            return Some(WorkerRole::Watchdog);
        }
        state.threads -= 1;
        None
    }

    /// Looks at each file once, and sleeps if there is nothing to do then; whether the thread is still
    /// on duty.
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

    /// Looks at the files as a helper (FL7).
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

    /// Files were in the in_progress of a thread that is not on duty: the one that is has not seen them in its
    /// scan.
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
            // notify_flag.NF1: the look comes with the next scan.
            None if self.dirtied.clear() => {
                // Something was dirtied since the last look, maybe after it, and maybe written back
                // by a sync already: a program that does that a thousand times a second does not
                // wake us.
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

    /// Goal: many small files are written back by several threads (FL7).
    /// Method: their write-backs are held up, and go on one at a time as long as there is one.
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
                slow.let_one_go_on(Kind::Write);
                while slow.now(Kind::Write) > 0 {
                    std::thread::yield_now();
                }
                ended += 1;
            }
            assert!(ended < files.len(), "one at a time");
            // For others to come, and shorter than what counts as stuck.
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

    /// Goal: files leave the list when they owe nothing, and closed ones do while the thread sleeps.
    /// Incident: they stayed until they were closed, and each that came looked through all of them.
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
            // It may sleep until those are due that were dirty when it looked.
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
