//! What a thread of the flusher does with the files, one after the other: takes one in entry, writes back what
//! is due, and puts it back on the list unless it owes nothing. The rules are those of
//! [`flusher`](crate::flush::flusher), which has the threads.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::cache::ledger::Share;
use crate::flush::dirty_pages::stream_pages;
use crate::flush::sync::sync_in_background;
use crate::flush::{BusyPages, flush, flush_some};
use crate::inode::{Blocking, CachedFile};
use crate::units::PageIndex;
use crate::writeback::flusher_state::{Flusher, InProgress, ThreadId};
use crate::writeback::writer_token::STALL_TIMEOUT;

/// Threads at files of one device, which may hang as a whole. Chosen, not measured.
pub(super) const DEVICE_THREADS_MAX: usize = 4;

/// Files that the thread on duty is at work on in a scan before others help. Chosen, not measured.
pub(super) const HELPER_AFTER_FILES: usize = 4;
/// What a file owes at most that helpers write: a few transfers. Chosen, not measured.
const SMALL_FILE_BYTES: u64 = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerRole {
    Leader,
    Watchdog,
    Helper,
}

/// What a device has left for one more thread.
#[derive(Debug, PartialEq, Eq)]
enum DeviceRoom {
    Free,
    /// It serves another, or there was no time to see: to be asked again.
    Later,
    /// Until one of the others comes back, and tells.
    None,
}

/// What came up while the files were looked at.
pub(super) struct Scan {
    role: WorkerRole,
    pub(super) reclaim_requested: bool,
    /// Files that the thread was at work on.
    pub(super) files_worked: usize,
    pub(super) has_worked: bool,
    pub(super) next: Option<Instant>,
    /// Of stuck files.
    pub(super) unwritten: u64,
    pub(super) unstable: u64,
}

impl Scan {
    pub(super) fn new(role: WorkerRole) -> Scan {
        let (reclaim_requested, has_worked) = (false, false);
        Scan {
            role,
            reclaim_requested,
            files_worked: 0,
            has_worked,
            next: None,
            unwritten: 0,
            unstable: 0,
        }
    }

    pub(super) fn note(&mut self, outcome: FileOutcome) {
        match outcome {
            FileOutcome::Worked => self.has_worked = true,
            FileOutcome::Due(at) => self.next = Some(self.next.map_or(at, |next| next.min(at))),
            FileOutcome::Idle => {}
        }
    }

    fn add_stalled(&mut self, share: &Share) {
        self.unwritten += share.unwritten();
        self.unstable += share.unstable();
    }
}

pub(super) enum FileOutcome {
    Worked,
    Due(Instant),
    Idle,
}

/// One file after the other.
impl Flusher<CachedFile> {
    /// Takes the next file in entry, of `left` that are to be looked at, and what keeps it from being
    /// dropped if nobody has it open.
    pub(super) fn take_next(
        &self,
        me: ThreadId,
        scan: &Scan,
        left: &mut usize,
    ) -> Option<(Arc<CachedFile>, Option<Arc<CachedFile>>)> {
        let mut state = self.state();
        while *left > 0 && !state.stopped {
            *left -= 1;
            // Another thread that was on duty may have taken some of them.
            let next = state.queue.pop_front()?;
            let Some(file) = next.upgrade() else { continue };
            // Out of the orphans before it is asked what it owes: a close from here on puts it there
            // again.
            let orphan = state.orphans.remove(&address(&file));
            state.in_progress.push(InProgress {
                thread: me,
                is_helper: scan.role == WorkerRole::Helper,
                device: file.id.device,
                share: Arc::clone(&file.writeback.share),
                busy_since: None,
                ended: file.writeback.share.ended(),
                ended_at: Instant::now(),
                is_syncing: false,
                is_dropping: false,
            });
            return Some((file, orphan));
        }
        None
    }

    /// From here on, the thread may have to wait for the device of the file that it has in entry (flusher.FL2).
    fn mark_busy(self: &Arc<Self>, me: ThreadId) {
        let mut state = self.state();
        if let Some(entry) = state.in_progress_of(me)
            && entry.busy_since.is_none()
        {
            let now = Instant::now();
            (entry.busy_since, entry.ended_at) = (Some(now), now);
        }
        self.ensure_watchdog(&mut state);
    }

    fn set_syncing(&self, me: ThreadId, is_syncing: bool) {
        let mut state = self.state();
        state.in_progress_of(me).expect("a file in entry").is_syncing = is_syncing;
        if state.release_waiters > 0 {
            // Who closes it does not wait any longer.
            self.released.notify_all();
        }
    }

    /// Lists the file again unless it owes nothing, and lets go of it; whether the thread is still on
    /// duty.
    pub(super) fn return_file(
        self: &Arc<Self>,
        me: ThreadId,
        file: Arc<CachedFile>,
        orphan: Option<Arc<CachedFile>>,
    ) -> bool {
        if let Some(orphan) = orphan {
            if file.has_dirty_pages() {
                self.state().orphans.insert(address(&orphan), orphan);
            } else {
                // Cuts off space that was reserved.
                self.mark_busy(me);
                file.rest();
            }
        }
        let mut is_listed = !try_unlist(&file);
        if !is_listed && self.state().orphans.contains_key(&address(&file)) {
            // flusher.FL5: closed while it was in entry. The thread that put it there may have listed it.
            is_listed = !std::mem::replace(&mut file.writeback.state().listed, true);
        }
        let listed = is_listed.then(|| Weak::clone(&file.this));
        self.drop_file(me, file);
        let mut state = self.state();
        state.in_progress.retain(|entry| entry.thread != me);
        state.queue.extend(listed);
        if state.release_waiters > 0 {
            self.released.notify_all();
        }
        state.leader == Some(me)
    }

    /// Drops a file that the thread has in entry.
    fn drop_file(self: &Arc<Self>, me: ThreadId, file: Arc<CachedFile>) {
        // Before: who opens it anew once it is gone, or another, may have to wait for its memory.
        if let Some(entry) = self.state().in_progress_of(me) {
            entry.is_dropping = true;
        }
        if let Some(last) = Arc::into_inner(file) {
            self.mark_busy(me);
            drop(last);
        }
    }

    /// Writes back what is due of a file.
    pub(super) fn process(
        self: &Arc<Self>,
        me: ThreadId,
        file: &Arc<CachedFile>,
        orphan: bool,
        scan: &mut Scan,
    ) -> FileOutcome {
        let now = Instant::now();
        let ledger = &file.cache().ledger;
        // A sixteenth too early at most: an exact look would take back the reserves of all, for each file.
        let much = self.is_over_background_limit(ledger.dirty_at_most());
        let state = file.writeback.state();
        let retry = state.retry.map(|(at, _)| at).filter(|&at| at > now);
        // Early enough that nothing stays for longer than it should.
        let due = state.dirty.since().map(|since| since + self.limits.age_max / 2);
        drop(state);
        let owes = file.writeback.generations.has_pages();
        if let (Some(at), Some(_)) = (retry, due) {
            scan.add_stalled(&file.writeback.share);
            // Not later than what others dirty meanwhile is due.
            return FileOutcome::Due(at.min(now + self.limits.age_max / 2));
        }
        let flushed = due.is_some_and(|at| at <= now || orphan || scan.reclaim_requested);
        let (least, batch) = stream_pages(file);
        let is_behind = file.writeback.state().stream.is_due(least, batch);
        let some = due.is_some() && much;
        let asked = |flushed| {
            (owes || flushed) && self.is_sync_due(ledger.unstable(), scan.reclaim_requested)
        };
        if !(flushed || is_behind || some || asked(false)) {
            return due.map_or(FileOutcome::Idle, FileOutcome::Due);
        }
        let is_small = file.writeback.share.unwritten() <= SMALL_FILE_BYTES;
        if scan.role == WorkerRole::Helper && !is_small {
            return FileOutcome::Idle;
        }
        match self.device_room(me, file.id.device, scan.role) {
            DeviceRoom::Free => {}
            DeviceRoom::Later => return FileOutcome::Due(now + STALL_TIMEOUT / 2),
            DeviceRoom::None => return FileOutcome::Idle,
        }
        scan.files_worked += 1;
        if scan.role == WorkerRole::Leader && scan.files_worked >= HELPER_AFTER_FILES {
            self.start_helper();
        }
        self.mark_busy(me);
        let behind = file.writeback.state().stream.take(least, batch);
        if flushed {
            flush(file, PageIndex::FIRST, PageIndex::LAST, BusyPages::Skip, false);
        } else if let Some((first, last)) = behind {
            flush(file, first, last, BusyPages::Skip, false);
        }
        if asked(flushed) {
            self.set_syncing(me, true);
            sync_in_background(file, Blocking::Wait);
            self.set_syncing(me, false);
        }
        match due {
            Some(_) if flushed || behind.is_some() => FileOutcome::Worked,
            Some(_) if much => match flush_some(file).pages {
                0 => FileOutcome::Due(now + Duration::from_millis(2)),
                _ => FileOutcome::Worked,
            },
            Some(at) => FileOutcome::Due(at),
            None => FileOutcome::Idle,
        }
    }

    /// Whether files are to be synced so that their pages can go.
    fn is_sync_due(&self, unstable_bytes: u64, reclaim_requested: bool) -> bool {
        let stalled = self.stalled_unstable.load(Relaxed);
        let most = self.limits.unstable_bytes_max();
        let most = most.saturating_sub(stalled).max(most / 4);
        unstable_bytes > 0 && (reclaim_requested || unstable_bytes.saturating_sub(stalled) > most)
    }

    /// Whether the thread may go to work on a file of `device`, where others may be already (flusher.FL4).
    fn device_room(&self, me: ThreadId, device: u64, role: WorkerRole) -> DeviceRoom {
        let (mut others, mut moving, mut all, mut all_move) = (0, false, 0, true);
        for entry in self.state().in_progress.iter_mut() {
            if entry.thread != me && entry.device == device {
                let moves = entry.is_progressing();
                all += 1;
                all_move &= moves;
                if !(entry.is_helper && moves) {
                    others += 1;
                    moving |= moves;
                }
            }
        }
        if role == WorkerRole::Helper {
            // flusher.FL7
            return if all_move && all < DEVICE_THREADS_MAX {
                DeviceRoom::Free
            } else {
                DeviceRoom::Later
            };
        }
        match others {
            0 => DeviceRoom::Free,
            DEVICE_THREADS_MAX.. => DeviceRoom::None,
            _ if moving => DeviceRoom::Later,
            _ => DeviceRoom::Free,
        }
    }

    /// Notes what stuck files owe: those that were found to be, and what others have in entry.
    pub(super) fn publish_stalled(&self, me: ThreadId, mut unwritten: u64, mut unstable: u64) {
        for entry in self.state().in_progress.iter_mut() {
            if entry.thread != me && !entry.is_progressing() {
                unwritten += entry.share.unwritten();
                unstable += entry.share.unstable();
            }
        }
        self.stalled_unwritten.store(unwritten, Relaxed);
        self.stalled_unstable.store(unstable, Relaxed);
    }
}

/// Takes a file off the list if it owes nothing; whether it did (flusher.FL1).
fn try_unlist(file: &CachedFile) -> bool {
    let mut state = file.writeback.state();
    // What a flush has had written is in a generation before the flush ends.
    let is_settled = state.dirty.is_clean() && !file.writeback.generations.has_pages();
    if is_settled {
        state.listed = false;
    }
    is_settled
}

pub(super) fn address(file: &Arc<CachedFile>) -> usize {
    Arc::as_ptr(file).addr()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::writeback::Limits;
    use crate::{BackendChoice, Engine, Error, OpenOptions, WriteMode};

    fn entry_of(thread: ThreadId, device: u64, share: Arc<Share>) -> InProgress {
        let (is_helper, is_syncing, is_dropping) = (false, false, false);
        let (busy_since, ended, ended_at) = (None, 0, Instant::now());
        InProgress {
            thread,
            is_helper,
            share,
            device,
            busy_since,
            ended,
            ended_at,
            is_syncing,
            is_dropping,
        }
    }

    /// Goal: a device where write-backs end has one thread at a time; where none does, a few.
    #[test]
    fn threads_of_one_device() {
        let limits = Limits::new(None, Duration::from_secs(30), 4 << 20);
        let flusher = Flusher::new(limits);
        let long_ago = Instant::now() - 2 * STALL_TIMEOUT;
        let add = |thread, device| {
            let entry =
                InProgress { ended_at: long_ago, ..entry_of(thread, device, Arc::default()) };
            flusher.state().in_progress.push(entry);
        };
        let room = |thread, device| flusher.device_room(thread, device, WorkerRole::Leader);
        let may_help = || flusher.device_room(9, 7, WorkerRole::Helper) == DeviceRoom::Free;
        assert!(may_help());
        add(1, 7);
        assert_eq!(room(1, 7), DeviceRoom::Free, "its own");
        assert_eq!(room(2, 7), DeviceRoom::Free, "the other is stuck");
        assert!(!may_help(), "at a device that is stuck");
        flusher.state().in_progress[0].ended = 5;
        assert!(may_help(), "write-backs have ended since");
        add(2, 7);
        assert_eq!(room(3, 7), DeviceRoom::Later, "write-backs have ended since");
        assert!(!may_help(), "one is stuck");
        assert_eq!(room(3, 8), DeviceRoom::Free, "another device");
        flusher.state().in_progress.iter_mut().for_each(|entry| entry.is_helper = true);
        assert_eq!(room(3, 7), DeviceRoom::Free, "the one that moves is_helper");
        flusher.state().in_progress[0].ended_at = long_ago;
        assert_eq!(room(3, 7), DeviceRoom::Free);
        (3..=DEVICE_THREADS_MAX as u64).for_each(|thread| add(thread, 7));
        assert_eq!(room(9, 7), DeviceRoom::None);
        assert_eq!(room(9, 8), DeviceRoom::Free);
        let all_move =
            |entry: &mut InProgress| (entry.is_helper, entry.ended_at) = (true, Instant::now());
        flusher.state().in_progress.iter_mut().for_each(all_move);
        assert_eq!(room(9, 7), DeviceRoom::Free, "helpers are in nobody's way");
        assert!(!may_help(), "but in each other's");
        flusher.state().in_progress.pop();
        assert!(may_help());
    }

    /// Goal: an open for which there is no memory waits for that of a file that a thread of the flusher drops.
    /// Incident: where the cache had room for one file, and that had been closed, opening it anew failed now
    /// and then.
    #[test]
    fn an_open_waits_for_the_memory_of_what_is_let_go() {
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(4 << 20);
        let engine = engine.build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions::new().create(true).write(true);
        let open = || engine.open(dir.path().join("file"), &options);
        let (cache, flusher) = (&engine.shared().cache, &engine.shared().flusher);
        let mut taken = 0;
        for bytes in [1 << 16, 1 << 10, 1] {
            while cache.try_charge(bytes) {
                taken += bytes;
            }
        }
        assert!(matches!(open(), Err(Error::NoBuffers { .. })), "nobody lets go of anything");
        let entry = InProgress { is_dropping: true, ..entry_of(9, 7, Arc::default()) };
        flusher.state().in_progress.push(entry);
        std::thread::scope(|threads| {
            let opener = threads.spawn(open);
            while flusher.state().release_waiters == 0 {
                assert!(!opener.is_finished(), "it does not wait");
                std::thread::yield_now();
            }
            cache.frames.uncharge(taken);
            flusher.state().in_progress.retain(|entry| entry.thread != 9);
            flusher.released.notify_all();
            opener.join().unwrap().expect("there is memory");
        });
    }

    /// Goal: a file is closed when its last handle has been dropped, although a thread of the flusher had it in entry.
    /// Incident: a program that was just written could not be executed, now and then (ETXTBSY).
    #[test]
    fn a_close_waits_until_the_file_is_out_of_hand() {
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(4 << 20);
        let engine = engine.build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions::new().create(true).write(true).write_mode(WriteMode::Back);
        let file = engine.open(dir.path().join("file"), &options).unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        let flusher = &engine.shared().flusher;
        let entry = entry_of(9, 7, Arc::clone(&file.cached().writeback.share));
        flusher.state().in_progress.push(entry);
        std::thread::scope(|threads| {
            let closer = threads.spawn(|| drop(file));
            while flusher.state().release_waiters == 0 {
                assert!(!closer.is_finished(), "it does not wait");
                std::thread::yield_now();
            }
            flusher.state().in_progress.retain(|entry| entry.thread != 9);
            flusher.released.notify_all();
        });
    }
}
