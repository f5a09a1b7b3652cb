//! One step of a flusher thread: take a file off the list, write back the due pages, and list it
//! again unless it is clean.
//!
//! The rules are in [`flusher`](crate::writeback::flusher), which has the threads.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::cache::accounting::writeback_counts::FileWritebackCounts;
use crate::inode::{Blocking, CachedFile};
use crate::units::PageIndex;
use crate::writeback::dirty_pages::stream_pages;
use crate::writeback::state::flusher_state::{Flusher, InProgress, ThreadId};
use crate::writeback::state::writer_token::STALL_TIMEOUT;
use crate::writeback::sync::sync_in_background;
use crate::writeback::{BusyPages, flush, flush_some};

/// The maximum number of threads on files of one device, as a device may hang as a whole. Untuned.
pub(super) const DEVICE_THREADS_MAX: usize = 4;

/// The number of files that the leader works on in a scan before helpers start. Untuned.
pub(super) const HELPER_AFTER_FILES: usize = 4;
/// The maximum dirty data of a file that helpers write: a few transfers. Untuned.
const SMALL_FILE_BYTES: u64 = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerRole {
    Leader,
    Watchdog,
    Helper,
}

/// Whether another thread may work on files of a device.
#[derive(Debug, PartialEq, Eq)]
enum DeviceRoom {
    Free,
    /// Another thread makes progress there, or its progress is not known yet: ask again.
    Later,
    /// Not until another thread returns and wakes the leader.
    None,
}

/// The result of one scan of the listed files.
pub(super) struct Scan {
    role: WorkerRole,
    pub(super) reclaim_requested: bool,
    /// The number of files that the thread worked on.
    pub(super) files_worked: usize,
    pub(super) has_worked: bool,
    pub(super) next: Option<Instant>,
    /// Dirty bytes of stalled files.
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

    fn add_stalled(&mut self, counts: &FileWritebackCounts) {
        self.unwritten += counts.unwritten();
        self.unstable += counts.unstable();
    }
}

pub(super) enum FileOutcome {
    Worked,
    Due(Instant),
    Idle,
}

/// The steps for each file.
impl Flusher<CachedFile> {
    /// Takes the next of `left` files off the list. If the file is an orphan, also returns the
    /// reference that keeps it alive.
    pub(super) fn take_next(
        &self,
        me: ThreadId,
        scan: &Scan,
        left: &mut usize,
    ) -> Option<(Arc<CachedFile>, Option<Arc<CachedFile>>)> {
        let mut state = self.state();
        while *left > 0 && !state.stopped {
            *left -= 1;
            // Another leader may have taken some of the files.
            let next = state.queue.pop_front()?;
            let Some(file) = next.upgrade() else { continue };
            // The orphan is removed before the file is checked for dirty pages: a later close
            // registers it again.
            let orphan = state.orphans.remove(&address(&file));
            state.in_progress.push(InProgress {
                thread: me,
                is_helper: scan.role == WorkerRole::Helper,
                device: file.id.device,
                counts: Arc::clone(&file.writeback.counts),
                busy_since: None,
                ended: file.writeback.counts.ended(),
                ended_at: Instant::now(),
                is_syncing: false,
                is_dropping: false,
            });
            return Some((file, orphan));
        }
        None
    }

    /// The thread may block on the device of its file from now on (flusher.FL2).
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
            // Wakes a waiting close, which must not wait for a sync.
            self.released.notify_all();
        }
    }

    /// Lists the file again unless it is clean, and drops the reference. Returns whether the thread
    /// is still the leader.
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
                // Trims reserved space.
                self.mark_busy(me);
                file.rest();
            }
        }
        let mut is_listed = !try_unlist(&file);
        if !is_listed && self.state().orphans.contains_key(&address(&file)) {
            // flusher.FL5: closed while it was in progress. The thread that made it an orphan may
            // have listed it.
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

    /// Drops the reference of the thread to its file.
    fn drop_file(self: &Arc<Self>, me: ThreadId, file: Arc<CachedFile>) {
        // Set before the drop: an open of the same or another file may have to wait for the memory.
        if let Some(entry) = self.state().in_progress_of(me) {
            entry.is_dropping = true;
        }
        if let Some(last) = Arc::into_inner(file) {
            self.mark_busy(me);
            drop(last);
        }
    }

    /// Writes back the due pages of a file.
    pub(super) fn process(
        self: &Arc<Self>,
        me: ThreadId,
        file: &Arc<CachedFile>,
        orphan: bool,
        scan: &mut Scan,
    ) -> FileOutcome {
        let now = Instant::now();
        let writeback_counts = &file.cache().writeback_counts;
        // The approximate count triggers write-back a sixteenth too early at most. An exact count
        // for each file would drain the batches of all threads.
        let is_over_limit = self.is_over_background_limit(writeback_counts.dirty_upper_bound());
        let state = file.writeback.state();
        let retry = state.retry.map(|(at, _)| at).filter(|&at| at > now);
        // Half of the maximum age, so that no page stays dirty for longer than the maximum.
        let due = state.dirty.since().map(|since| since + self.limits.age_max / 2);
        drop(state);
        let has_unsynced = file.writeback.generations.has_pages();
        if let (Some(at), Some(_)) = (retry, due) {
            scan.add_stalled(&file.writeback.counts);
            // Not later than pages that are dirtied from now on are due.
            return FileOutcome::Due(at.min(now + self.limits.age_max / 2));
        }
        let flushed = due.is_some_and(|at| at <= now || orphan || scan.reclaim_requested);
        let (least, batch) = stream_pages(file);
        let is_stream_due = file.writeback.state().stream.is_due(least, batch);
        let some = due.is_some() && is_over_limit;
        let asked = |flushed| {
            (has_unsynced || flushed)
                && self.is_sync_due(writeback_counts.unstable(), scan.reclaim_requested)
        };
        if !(flushed || is_stream_due || some || asked(false)) {
            return due.map_or(FileOutcome::Idle, FileOutcome::Due);
        }
        let is_small = file.writeback.counts.unwritten() <= SMALL_FILE_BYTES;
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
        let stream = file.writeback.state().stream.take(least, batch);
        if flushed {
            flush(file, PageIndex::FIRST, PageIndex::LAST, BusyPages::Skip, false);
        } else if let Some((first, last)) = stream {
            flush(file, first, last, BusyPages::Skip, false);
        }
        if asked(flushed) {
            self.set_syncing(me, true);
            sync_in_background(file, Blocking::Wait);
            self.set_syncing(me, false);
        }
        match due {
            Some(_) if flushed || stream.is_some() => FileOutcome::Worked,
            Some(_) if is_over_limit => match flush_some(file).pages {
                0 => FileOutcome::Due(now + Duration::from_millis(2)),
                _ => FileOutcome::Worked,
            },
            Some(at) => FileOutcome::Due(at),
            None => FileOutcome::Idle,
        }
    }

    /// Whether files are to be synced so that their pages become evictable.
    fn is_sync_due(&self, unstable_bytes: u64, reclaim_requested: bool) -> bool {
        let stalled = self.stalled_unstable.load(Relaxed);
        let most = self.limits.unstable_bytes_max();
        let most = most.saturating_sub(stalled).max(most / 4);
        unstable_bytes > 0 && (reclaim_requested || unstable_bytes.saturating_sub(stalled) > most)
    }

    /// Whether the thread may work on a file of `device`, given the other threads there
    /// (flusher.FL4).
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

    /// Publishes the dirty and unsynced bytes of stalled files: those found in this scan, and those
    /// in progress at other threads.
    pub(super) fn publish_stalled(&self, me: ThreadId, mut unwritten: u64, mut unstable: u64) {
        for entry in self.state().in_progress.iter_mut() {
            if entry.thread != me && !entry.is_progressing() {
                unwritten += entry.counts.unwritten();
                unstable += entry.counts.unstable();
            }
        }
        self.stalled_unwritten.store(unwritten, Relaxed);
        self.stalled_unstable.store(unstable, Relaxed);
    }
}

/// Takes a clean file off the list. Returns whether it was clean (flusher.FL1).
fn try_unlist(file: &CachedFile) -> bool {
    let mut state = file.writeback.state();
    // Pages that a flush has written are in a generation before the flush ends.
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
    use crate::writeback::state::Limits;
    use crate::{BackendChoice, Engine, Error, OpenOptions, WriteMode};

    fn entry_of(thread: ThreadId, device: u64, counts: Arc<FileWritebackCounts>) -> InProgress {
        let (is_helper, is_syncing, is_dropping) = (false, false, false);
        let (busy_since, ended, ended_at) = (None, 0, Instant::now());
        InProgress {
            thread,
            is_helper,
            counts,
            device,
            busy_since,
            ended,
            ended_at,
            is_syncing,
            is_dropping,
        }
    }

    /// Goal: a device that makes progress has one thread at a time; a stalled device has several.
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
        assert_eq!(room(9, 7), DeviceRoom::Free, "helpers do not count");
        assert!(!may_help(), "except for helpers");
        flusher.state().in_progress.pop();
        assert!(may_help());
    }

    /// Goal: an open without memory waits for the memory of a file that a flusher thread drops.
    /// Incident: the cache had room for one file, which had been closed. Opening it again failed
    /// sometimes.
    #[test]
    fn an_open_waits_for_memory_of_dropped_files() {
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
        assert!(matches!(open(), Err(Error::NoBuffers { .. })), "no memory will be freed");
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

    /// Goal: a file is closed after its last handle has been dropped, even if a flusher thread had
    /// it in progress. Incident: executing a program that had just been written failed sometimes
    /// (ETXTBSY).
    #[test]
    fn a_close_waits_until_the_file_is_released() {
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(4 << 20);
        let engine = engine.build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions::new().create(true).write(true).write_mode(WriteMode::Back);
        let file = engine.open(dir.path().join("file"), &options).unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        let flusher = &engine.shared().flusher;
        let entry = entry_of(9, 7, Arc::clone(&file.cached().writeback.counts));
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
