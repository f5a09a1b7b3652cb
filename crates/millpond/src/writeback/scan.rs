//! One step of a flusher's worker: take a file off the list, write back the due pages, and list it
//! again unless it is clean.
//!
//! The rules are in [`flusher`](crate::writeback::flusher), which has the workers.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::cache::accounting::writeback_counts::FileWritebackCounts;
use crate::inode::{Blocking, CachedFile};
use crate::units::PageIndex;
use crate::writeback::dirty_pages::stream_pages;
use crate::writeback::file_sync::sync_in_background;
use crate::writeback::state::flusher_state::{Flusher, FlusherState, InProgress, ThreadId};
use crate::writeback::state::writer_token::STALL_TIMEOUT;
use crate::writeback::{BusyPages, flush, flush_some};

/// The maximum number of files of one device in progress, as a device may hang as a whole. Untuned.
pub(super) const DEVICE_FILES_MAX: usize = 4;
/// The maximum dirty data of a small file (flusher.FL7): a few transfers. Untuned.
const SMALL_FILE_BYTES: u64 = 64 << 10;

/// The result of one scan of the listed files.
#[derive(Default)]
pub(super) struct Scan {
    /// The number of files that the scan took off the list, and of those that it worked on.
    pub(super) taken: u64,
    files_worked: usize,
    /// Pages were written back, so others may be due.
    pub(super) has_worked: bool,
    pub(super) next: Option<Instant>,
    /// Dirty bytes of stalled files.
    pub(super) unwritten: u64,
    pub(super) unstable: u64,
}

impl Scan {
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
        scan: &mut Scan,
        left: &mut usize,
    ) -> Option<(Arc<CachedFile>, Option<Arc<CachedFile>>)> {
        let mut state = self.state();
        while *left > 0 && !state.stopped {
            *left -= 1;
            // Another worker may have taken some of the files.
            let next = state.queue.pop_front()?;
            let Some(file) = next.upgrade() else { continue };
            // The orphan is removed before the file is checked for dirty pages: a later close
            // registers it again.
            let orphan = state.orphans.remove(&address(&file));
            state.taken += 1;
            scan.taken += 1;
            state.in_progress.push(InProgress {
                thread: me,
                file: next,
                is_small: true,
                device: file.id.device,
                counts: Arc::clone(&file.writeback.counts),
                is_busy: false,
                ended: file.writeback.counts.ended(),
                ended_at: Instant::now(),
                is_syncing: false,
                is_dropping: false,
            });
            return Some((file, orphan));
        }
        None
    }

    /// The worker may block on the device of its file from now on (flusher.FL2).
    fn mark_busy(self: &Arc<Self>, me: ThreadId, state: &mut FlusherState<CachedFile>) {
        if let Some(entry) = state.in_progress_of(me)
            && !entry.is_busy
        {
            (entry.is_busy, entry.ended_at) = (true, Instant::now());
        }
        self.ensure_worker(state);
    }

    /// Begins work on a file of `device`, if the other files in progress there leave room for it
    /// (flusher.FL4, flusher.FL7).
    fn try_begin(
        self: &Arc<Self>,
        me: ThreadId,
        device: u64,
        is_small: bool,
        scan: &mut Scan,
    ) -> Result<(), FileOutcome> {
        let mut state = self.state();
        match device_room(&mut state, me, device, is_small) {
            DeviceRoom::Free => {}
            // Write-backs may stall until then.
            DeviceRoom::Later => return Err(FileOutcome::Due(Instant::now() + STALL_TIMEOUT / 2)),
            // A worker that returns a file scans the list again.
            DeviceRoom::None => return Err(FileOutcome::Idle),
        }
        if let Some(entry) = state.in_progress_of(me) {
            entry.is_small = is_small;
        }
        scan.files_worked += 1;
        self.mark_busy(me, &mut state);
        if scan.files_worked > 1 {
            // flusher.FL7.
            self.wake_worker(&mut state);
        }
        Ok(())
    }

    fn set_syncing(&self, me: ThreadId, is_syncing: bool) {
        let mut state = self.state();
        state.in_progress_of(me).expect("a file in entry").is_syncing = is_syncing;
        if state.release_waiters > 0 {
            // Wakes a waiting close, which must not wait for a sync.
            self.released.notify_all();
        }
    }

    /// Lists the file again unless it is clean, and drops the reference.
    pub(super) fn return_file(
        self: &Arc<Self>,
        me: ThreadId,
        file: Arc<CachedFile>,
        orphan: Option<Arc<CachedFile>>,
    ) {
        if let Some(orphan) = orphan {
            if file.has_dirty_pages() {
                self.state().orphans.insert(address(&orphan), orphan);
            } else {
                // Trims reserved space.
                self.mark_busy(me, &mut self.state());
                file.release_reservations();
            }
        }
        let mut is_listed = !try_unlist(&file);
        if !is_listed && self.state().orphans.contains_key(&address(&file)) {
            // flusher.FL5: closed while it was in progress. The thread that made it an orphan may
            // have listed it.
            is_listed = !file.writeback.state().mark_listed(self);
        }
        let listed = is_listed.then(|| Weak::clone(&file.this));
        self.drop_file(me, file);
        let mut state = self.state();
        state.in_progress.retain(|entry| entry.thread != me);
        state.queue.extend(listed);
        if state.release_waiters > 0 {
            self.released.notify_all();
        }
    }

    /// Drops the reference of the thread to its file.
    fn drop_file(self: &Arc<Self>, me: ThreadId, file: Arc<CachedFile>) {
        // Set before the drop: an open of the same or another file may have to wait for the memory.
        if let Some(entry) = self.state().in_progress_of(me) {
            entry.is_dropping = true;
        }
        if let Some(last) = Arc::into_inner(file) {
            self.mark_busy(me, &mut self.state());
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
        let reclaims = self.reclaims.load(Relaxed);
        let state = file.writeback.state();
        // flusher.FL9.
        let is_reclaimed = state.reclaims != reclaims;
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
        let flushed = due.is_some_and(|at| at <= now || orphan || is_reclaimed);
        let (least, batch) = stream_pages(file);
        let is_stream_due = file.writeback.state().stream.is_due(least, batch);
        let some = due.is_some() && is_over_limit;
        let asked = |flushed| {
            (has_unsynced || flushed) && self.is_sync_due(writeback_counts.unstable(), is_reclaimed)
        };
        if !(flushed || is_stream_due || some || asked(false)) {
            file.writeback.state().reclaims = reclaims;
            return due.map_or(FileOutcome::Idle, FileOutcome::Due);
        }
        let is_small = file.writeback.counts.unwritten() <= SMALL_FILE_BYTES;
        if let Err(outcome) = self.try_begin(me, file.id.device, is_small, scan) {
            return outcome;
        }
        file.writeback.state().reclaims = reclaims;
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

/// Whether one more worker may work on a file of a device.
#[derive(Debug, PartialEq, Eq)]
enum DeviceRoom {
    Free,
    /// Another worker makes progress there, or its progress is not known yet: ask again.
    Later,
    /// Not until another worker returns its file.
    None,
}

/// The room for `me` at `device`, given the other files in progress there (flusher.FL4, flusher.FL7).
fn device_room(
    state: &mut FlusherState<CachedFile>,
    me: ThreadId,
    device: u64,
    is_small: bool,
) -> DeviceRoom {
    let (mut all, mut progressing, mut has_large) = (0, 0, false);
    for entry in state.in_progress.iter_mut() {
        if entry.thread != me && entry.device == device && entry.is_busy {
            all += 1;
            progressing += usize::from(entry.is_progressing());
            has_large |= !entry.is_small;
        }
    }
    match (all, progressing) {
        (DEVICE_FILES_MAX.., _) => DeviceRoom::None,
        // None, or all of them stall.
        (_, 0) => DeviceRoom::Free,
        (all, progressing) if all == progressing && (is_small || !has_large) => DeviceRoom::Free,
        _ => DeviceRoom::Later,
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
    use crate::writeback::flusher::Worker;
    use crate::{BackendChoice, Engine, Error, OpenOptions, WriteMode};

    fn entry_of(
        thread: ThreadId,
        device: u64,
        counts: Arc<FileWritebackCounts>,
    ) -> InProgress<CachedFile> {
        InProgress {
            thread,
            file: Weak::new(),
            is_small: false,
            counts,
            device,
            is_busy: true,
            ended: 0,
            ended_at: Instant::now(),
            is_syncing: false,
            is_dropping: false,
        }
    }

    /// Goal: a device that makes progress has one large file in progress at a time, and several small
    /// ones; a stalled device has several files.
    #[test]
    fn files_in_progress_of_one_device() {
        let mut state = FlusherState::default();
        let long_ago = Instant::now() - 2 * STALL_TIMEOUT;
        fn add(state: &mut FlusherState<CachedFile>, thread: u64, ended_at: Instant) {
            let entry = InProgress { ended_at, ..entry_of(thread, 7, Arc::default()) };
            state.in_progress.push(entry);
        }
        let room = |state: &mut _, thread, device| device_room(state, thread, device, false);
        let small = |state: &mut _| device_room(state, 9, 7, true);
        assert_eq!(small(&mut state), DeviceRoom::Free);
        add(&mut state, 1, long_ago);
        assert_eq!(room(&mut state, 1, 7), DeviceRoom::Free, "its own");
        assert_eq!(room(&mut state, 2, 7), DeviceRoom::Free, "the other is stuck");
        state.in_progress[0].is_busy = false;
        state.in_progress[0].ended_at = Instant::now();
        assert_eq!(room(&mut state, 2, 7), DeviceRoom::Free, "the other has not begun");
        state.in_progress[0].is_busy = true;
        assert_eq!(room(&mut state, 2, 7), DeviceRoom::Later, "the other makes progress");
        assert_eq!(small(&mut state), DeviceRoom::Free, "beside a large one");
        add(&mut state, 2, long_ago);
        assert_eq!(room(&mut state, 3, 7), DeviceRoom::Later, "one makes progress");
        assert_eq!(small(&mut state), DeviceRoom::Later, "one is stuck");
        assert_eq!(room(&mut state, 3, 8), DeviceRoom::Free, "another device");
        state.in_progress.iter_mut().for_each(|entry| entry.is_small = true);
        assert_eq!(room(&mut state, 3, 7), DeviceRoom::Later, "one is stuck");
        state.in_progress[1].ended_at = Instant::now();
        assert_eq!(room(&mut state, 3, 7), DeviceRoom::Free, "write-backs have ended since");
        (3..=DEVICE_FILES_MAX as u64).for_each(|thread| add(&mut state, thread, Instant::now()));
        assert_eq!(room(&mut state, 9, 7), DeviceRoom::None);
        assert_eq!(small(&mut state), DeviceRoom::None);
        assert_eq!(room(&mut state, 9, 8), DeviceRoom::Free);
    }

    /// Goal: a worker that panics leaves its file listed, and the flusher goes on (flusher.FL10).
    #[test]
    fn a_worker_that_panics_returns_its_file() {
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(4 << 20);
        let engine = engine.build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions::new().create(true).write(true).write_mode(WriteMode::Back);
        let file = engine.open(dir.path().join("file"), &options).unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        let flusher = &engine.shared().flusher;
        let panicked = std::thread::scope(|threads| {
            let worker = threads.spawn(|| {
                flusher.state().threads += 1;
                let _worker = Worker::new(Arc::clone(flusher), 99);
                // Another worker may have taken the file off the list for a moment.
                let mut left = usize::MAX;
                while flusher.take_next(99, &mut Scan::default(), &mut left).is_none() {
                    std::thread::yield_now();
                }
                std::panic::resume_unwind(Box::new(()));
            });
            worker.join().is_err()
        });
        assert!(panicked);
        assert!(flusher.state().in_progress.iter().all(|entry| entry.thread != 99));
        assert!(flusher.state().threads <= 1 + DEVICE_FILES_MAX);
        file.sync_all().unwrap();
        let started = Instant::now();
        while file.cached().writeback.state().listed {
            assert!(started.elapsed() < Duration::from_secs(60), "it is not taken off the list");
            flusher.request_scan();
            std::thread::sleep(Duration::from_millis(1));
        }
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
