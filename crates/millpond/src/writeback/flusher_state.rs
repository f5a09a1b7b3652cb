//! The flusher's list of files, and what its threads know of each other. What they do with the files, and
//! the rules: [`flush::flusher`](crate::flush::flusher).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::cache::ledger::Share;
use crate::writeback::notify_flag::NotifyFlag;
use crate::writeback::writer_token::{STALL_TIMEOUT, WriterTokens};

/// How much may be owed, and for how long.
#[derive(Debug)]
pub(crate) struct Limits {
    dirty_bytes_asked: u64,
    /// The cache's limit, from which those follow that nobody asked for. Relaxed: nothing else
    /// depends on it.
    cache_bytes: AtomicU64,
    pub(crate) age_max: Duration,
}

impl Limits {
    /// For a cache of `cache_bytes`; `dirty_bytes_max`, if somebody asked for less than three quarters of it.
    pub(crate) fn new(dirty_bytes_max: Option<u64>, age_max: Duration, cache_bytes: u64) -> Limits {
        let dirty_bytes_asked = dirty_bytes_max.unwrap_or(u64::MAX);
        Limits { dirty_bytes_asked, cache_bytes: AtomicU64::new(cache_bytes), age_max }
    }

    pub(crate) fn set_cache_bytes(&self, cache_bytes: u64) {
        self.cache_bytes.store(cache_bytes, Relaxed);
    }

    pub(crate) fn dirty_bytes_max(&self) -> u64 {
        self.dirty_bytes_asked.min(self.cache_bytes.load(Relaxed) / 4 * 3)
    }

    pub(crate) fn unstable_bytes_max(&self) -> u64 {
        self.cache_bytes.load(Relaxed) / 8
    }
}

/// The threads that write back by age and by amount; the first is started by the first page that is
/// DIRTY.
pub(crate) struct Flusher<F> {
    pub(crate) limits: Limits,
    pub(crate) writer_tokens: WriterTokens,
    pub(crate) state: Mutex<FlusherState<F>>,
    /// The thread on duty sleeps here.
    pub(crate) leader_wake: Condvar,
    /// The watch waits here.
    pub(crate) watchdog_wake: Condvar,
    pub(crate) progress: Condvar,
    /// A file is out of somebody's entry.
    pub(crate) released: Condvar,
    /// Rung: the thread on duty looks at the files again soon, without being told.
    pub(crate) dirtied: NotifyFlag,
    /// Rung: somebody tells the thread on duty, which has not begun a round since.
    pub(crate) scan_requested: NotifyFlag,
    /// Somebody found no frame, while write-back kept some.
    pub(crate) reclaim_requested: AtomicBool,
    /// What stuck files had not written, and not synced, in the last round. Relaxed: hints.
    pub(crate) stalled_unwritten: AtomicU64,
    pub(crate) stalled_unstable: AtomicU64,
    /// Threads in [`Flusher::await_progress`]. Relaxed: told, and no more.
    waiting: AtomicU64,
}

pub(crate) struct FlusherState<F> {
    /// The files that are listed, but for those in `in_progress` (FL1). Weak: a file that is closed meanwhile
    /// must not stay open here.
    pub(crate) queue: VecDeque<Weak<F>>,
    /// With how many it is looked for those that are closed.
    pub(crate) queue_max: usize,
    /// Files that nobody has open any more, and whose write-back failed, by their addresses. They are
    /// listed, too.
    pub(crate) orphans: HashMap<usize, Arc<F>>,
    pub(crate) in_progress: Vec<InProgress>,
    /// Threads that wait for one of these to be empty.
    pub(crate) release_waiters: usize,
    pub(crate) leader: Option<ThreadId>,
    pub(crate) has_watchdog: bool,
    pub(crate) threads: usize,
    /// Of these, helpers.
    pub(crate) helpers: usize,
    pub(crate) last_thread: ThreadId,
    pub(crate) stopped: bool,
    pub(crate) wake_requested: bool,
}

pub(crate) type ThreadId = u64;

/// A file that a thread has in entry.
pub(crate) struct InProgress {
    pub(crate) thread: ThreadId,
    /// The thread is a helper.
    pub(crate) is_helper: bool,
    pub(crate) share: Arc<Share>,
    pub(crate) device: u64,
    /// Since when the thread may have to wait for the file's device (FL2).
    pub(crate) busy_since: Option<Instant>,
    /// How many write-backs of the file had ended when somebody last looked, and since when.
    pub(crate) ended: u64,
    pub(crate) ended_at: Instant,
    /// The thread is_syncing it.
    pub(crate) is_syncing: bool,
    /// The thread is done with it, and may be dropping it.
    pub(crate) is_dropping: bool,
}

impl InProgress {
    /// Whether write-backs of the file end, as far as somebody has looked.
    pub(crate) fn is_progressing(&mut self) -> bool {
        let ended = self.share.ended();
        if ended != self.ended {
            (self.ended, self.ended_at) = (ended, Instant::now());
        }
        self.ended_at.elapsed() < STALL_TIMEOUT
    }
}

impl<F> Default for FlusherState<F> {
    fn default() -> Self {
        FlusherState {
            queue: VecDeque::new(),
            queue_max: 0,
            orphans: HashMap::new(),
            in_progress: Vec::new(),
            release_waiters: 0,
            leader: None,
            has_watchdog: false,
            threads: 0,
            helpers: 0,
            last_thread: 0,
            stopped: false,
            wake_requested: false,
        }
    }
}

impl<F> FlusherState<F> {
    pub(crate) fn in_progress_of(&mut self, thread: ThreadId) -> Option<&mut InProgress> {
        self.in_progress.iter_mut().find(|entry| entry.thread == thread)
    }

    /// Since when the thread on duty has been at work on one file.
    pub(crate) fn leader_busy_since(&mut self) -> Option<Instant> {
        let leader = self.leader?;
        self.in_progress_of(leader)?.busy_since
    }
}

impl<F> Flusher<F> {
    pub(crate) fn new(limits: Limits) -> Arc<Flusher<F>> {
        Arc::new(Flusher {
            limits,
            writer_tokens: WriterTokens::default(),
            state: Mutex::default(),
            leader_wake: Condvar::new(),
            watchdog_wake: Condvar::new(),
            progress: Condvar::new(),
            released: Condvar::new(),
            dirtied: NotifyFlag::new(),
            scan_requested: NotifyFlag::new(),
            reclaim_requested: AtomicBool::new(false),
            stalled_unwritten: AtomicU64::new(0),
            stalled_unstable: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, FlusherState<F>> {
        self.state.lock().expect("no panic under the lock")
    }

    /// Whether what is dirty is so much that it is to be written back whatever its age.
    pub(crate) fn is_over_background_limit(&self, dirty_bytes: u64) -> bool {
        let stalled = self.stalled_unwritten.load(Relaxed);
        dirty_bytes.saturating_sub(stalled)
            > self.limits.dirty_bytes_max().saturating_sub(stalled) / 2
    }

    pub(crate) fn note_dirty(&self, dirty_bytes: u64) {
        let much = self.is_over_background_limit(dirty_bytes);
        // notify_flag.NF1: one that was rung before is cleared before the flusher looks again.
        if self.dirtied.set() || much {
            self.request_scan();
        }
    }

    /// Asks for frames that write-back keeps, for a caller that does not wait for them.
    pub(crate) fn request_reclaim(&self, kept_bytes: u64) {
        if kept_bytes > 0 && !self.reclaim_requested.swap(true, Relaxed) {
            self.request_scan();
        }
    }

    /// Has the thread on duty begin a round, if it has not since somebody told it (notify_flag.NF1).
    pub(crate) fn request_scan(&self) {
        if !self.scan_requested.set() {
            return;
        }
        let mut state = self.state();
        if !state.wake_requested {
            state.wake_requested = true;
            self.leader_wake.notify_one();
        }
    }

    pub(crate) fn await_progress(&self) {
        let state = self.state();
        let pause = Duration::from_millis(2);
        self.waiting.fetch_add(1, Relaxed);
        drop(self.progress.wait_timeout(state, pause).expect("no panic under the lock"));
        self.waiting.fetch_sub(1, Relaxed);
    }

    /// Waits for files that threads of the flusher may be dropping, as their memory is needed.
    pub(crate) fn await_dropped(&self) {
        self.await_entries(|entry| entry.is_dropping);
    }

    /// Waits for the thread of the flusher that has the file of `share` in entry, if one has, and does not sync it:
    /// that may take long.
    pub(crate) fn await_released(&self, share: &Arc<Share>) {
        self.await_entries(|entry| !entry.is_syncing && Arc::ptr_eq(&entry.share, share));
    }

    /// Waits as long as there are such in_progress, but not for a file that hangs.
    fn await_entries(&self, such: impl Fn(&InProgress) -> bool) {
        let mut state = self.state();
        if !state.in_progress.iter().any(&such) {
            return;
        }
        state.release_waiters += 1;
        let there_are = |state: &mut FlusherState<F>| state.in_progress.iter().any(&such);
        let waited = self.released.wait_timeout_while(state, STALL_TIMEOUT, there_are);
        waited.expect("no panic under the lock").0.release_waiters -= 1;
    }

    /// A flush has ended. Who begins to wait just now may miss it, and does not sleep for long.
    pub(crate) fn notify_progress(&self) {
        if self.waiting() > 0 {
            self.progress.notify_all();
        }
    }

    /// How many threads wait for write-back.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.load(Relaxed)
    }

    /// Lets the threads end.
    pub(crate) fn stop(&self) {
        self.state().stopped = true;
        self.leader_wake.notify_all();
        self.watchdog_wake.notify_all();
    }
}
