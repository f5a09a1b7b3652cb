//! State of the flusher: the list of dirty inodes, its threads, and the files in progress.
//!
//! The work of the threads and the rules are in [`writeback::flusher`](crate::writeback::flusher).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::cache::accounting::writeback_counts::FileWritebackCounts;
use crate::sync::MutexExt;
use crate::writeback::state::notify_flag::NotifyFlag;
use crate::writeback::state::writer_token::{STALL_TIMEOUT, WriterTokens};

/// Limits of the amount and the age of dirty data.
#[derive(Debug)]
pub(crate) struct Limits {
    dirty_bytes_asked: u64,
    /// The size of the cache, from which the default limits follow. Relaxed: no other data depends
    /// on it.
    cache_bytes: AtomicU64,
    pub(crate) age_max: Duration,
}

impl Limits {
    /// Limits for a cache of `cache_bytes`. `dirty_bytes_max` is the user's limit; the default is
    /// three quarters of the cache, which is also the maximum.
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

/// The workers, which write back by age and by amount. The first dirty page starts the first worker.
pub(crate) struct Flusher<F> {
    pub(crate) limits: Limits,
    pub(crate) writer_tokens: WriterTokens,
    pub(crate) state: Mutex<FlusherState<F>>,
    /// The sleeping worker waits here.
    pub(crate) wake: Condvar,
    pub(crate) progress: Condvar,
    /// A file is no longer in progress.
    pub(crate) released: Condvar,
    /// Set when pages were dirtied since the last scan: a worker scans again soon. The sleeping
    /// worker is not woken for this.
    pub(crate) dirtied: NotifyFlag,
    /// Set when a scan was requested and has not begun yet.
    pub(crate) scan_requested: NotifyFlag,
    /// The number of times that a thread found no free frame while write-back kept some
    /// unevictable. Each file is written back once for each of them (flusher.FL9).
    pub(crate) reclaims: AtomicU64,
    /// No scan has begun since the last of them. Relaxed: it only saves requests.
    pub(crate) reclaim_requested: AtomicBool,
    /// Unwritten and unsynced bytes of stalled files, as of the last scan. Relaxed: hints.
    pub(crate) stalled_unwritten: AtomicU64,
    pub(crate) stalled_unstable: AtomicU64,
    /// Threads in [`Flusher::await_progress`]. Relaxed: it only saves wake-ups.
    waiting: AtomicU64,
}

pub(crate) struct FlusherState<F> {
    /// The listed files, except for those in `in_progress` (flusher.FL1). The references are weak,
    /// so that the list does not keep closed files open.
    pub(crate) queue: VecDeque<Weak<F>>,
    /// The queue length at which closed files are removed.
    pub(crate) queue_max: usize,
    /// Files without open handles whose write-back failed, by their addresses. They are listed as
    /// well.
    pub(crate) orphans: HashMap<usize, Arc<F>>,
    pub(crate) in_progress: Vec<InProgress<F>>,
    /// Threads that wait in [`Flusher::await_entries`].
    pub(crate) release_waiters: usize,
    pub(crate) threads: usize,
    pub(crate) last_thread: ThreadId,
    /// One of the threads sleeps until a file is due (flusher.FL3).
    pub(crate) has_sleeper: bool,
    /// The number of times that a file was taken off the list.
    pub(crate) taken: u64,
    pub(crate) stopped: bool,
    pub(crate) wake_requested: bool,
}

pub(crate) type ThreadId = u64;

/// A file that a worker works on. (Linux marks such an inode with `I_SYNC`.)
pub(crate) struct InProgress<F> {
    pub(crate) thread: ThreadId,
    pub(crate) file: Weak<F>,
    /// The file has little dirty data (flusher.FL7).
    pub(crate) is_small: bool,
    pub(crate) counts: Arc<FileWritebackCounts>,
    pub(crate) device: u64,
    /// The worker may block on the file's device (flusher.FL2).
    pub(crate) is_busy: bool,
    /// The number of ended write-backs of the file at the last check, and the time of the last
    /// change.
    pub(crate) ended: u64,
    pub(crate) ended_at: Instant,
    /// The thread syncs the file.
    pub(crate) is_syncing: bool,
    /// The thread is done with the file, and may be dropping the last reference.
    pub(crate) is_dropping: bool,
}

impl<F> InProgress<F> {
    /// Whether write-backs of the file end. Updates the last observation.
    pub(crate) fn is_progressing(&mut self) -> bool {
        let ended = self.counts.ended();
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
            threads: 0,
            last_thread: 0,
            has_sleeper: false,
            taken: 0,
            stopped: false,
            wake_requested: false,
        }
    }
}

impl<F> FlusherState<F> {
    pub(crate) fn in_progress_of(&mut self, thread: ThreadId) -> Option<&mut InProgress<F>> {
        self.in_progress.iter_mut().find(|entry| entry.thread == thread)
    }

    /// The number of workers that may block on a device.
    pub(crate) fn busy(&self) -> usize {
        self.in_progress.iter().filter(|entry| entry.is_busy).count()
    }
}

impl<F> Flusher<F> {
    pub(crate) fn new(limits: Limits) -> Arc<Flusher<F>> {
        Arc::new(Flusher {
            limits,
            writer_tokens: WriterTokens::default(),
            state: Mutex::default(),
            wake: Condvar::new(),
            progress: Condvar::new(),
            released: Condvar::new(),
            dirtied: NotifyFlag::new(),
            scan_requested: NotifyFlag::new(),
            reclaims: AtomicU64::new(0),
            reclaim_requested: AtomicBool::new(false),
            stalled_unwritten: AtomicU64::new(0),
            stalled_unstable: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, FlusherState<F>> {
        self.state.acquire()
    }

    /// Whether the amount of dirty data alone requires write-back, at any age.
    pub(crate) fn is_over_background_limit(&self, dirty_bytes: u64) -> bool {
        let stalled = self.stalled_unwritten.load(Relaxed);
        dirty_bytes.saturating_sub(stalled)
            > self.limits.dirty_bytes_max().saturating_sub(stalled) / 2
    }

    pub(crate) fn await_progress(&self) {
        let state = self.state();
        let pause = Duration::from_millis(2);
        self.waiting.fetch_add(1, Relaxed);
        drop(self.progress.wait_timeout(state, pause).expect("no panic under the lock"));
        self.waiting.fetch_sub(1, Relaxed);
    }

    /// Waits for files that workers may be dropping, as the caller needs their
    /// memory.
    pub(crate) fn await_dropped(&self) {
        self.await_entries(|entry| entry.is_dropping);
    }

    /// Waits while a worker works on the file of `counts`, unless the worker syncs
    /// it: a sync may take long.
    pub(crate) fn await_released(&self, counts: &Arc<FileWritebackCounts>) {
        self.await_entries(|entry| !entry.is_syncing && Arc::ptr_eq(&entry.counts, counts));
    }

    /// Waits while there are such entries, but not for a stalled file.
    fn await_entries(&self, such: impl Fn(&InProgress<F>) -> bool) {
        let mut state = self.state();
        if !state.in_progress.iter().any(&such) {
            return;
        }
        state.release_waiters += 1;
        let there_are = |state: &mut FlusherState<F>| state.in_progress.iter().any(&such);
        let waited = self.released.wait_timeout_while(state, STALL_TIMEOUT, there_are);
        waited.expect("no panic under the lock").0.release_waiters -= 1;
    }

    /// A flush has ended. A thread that is about to wait may miss the notification; its wait is
    /// short.
    pub(crate) fn notify_progress(&self) {
        if self.waiting() > 0 {
            self.progress.notify_all();
        }
    }

    /// The number of threads that wait for write-back.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.load(Relaxed)
    }

    /// Makes the threads end.
    pub(crate) fn stop(&self) {
        self.state().stopped = true;
        self.wake.notify_all();
    }
}
