//! The flusher's list of files, and what its threads know of each other. What they do with the files, and
//! the rules: [`flush::flusher`](crate::flush::flusher).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::cache::ledger::Share;
use crate::writeback::bell::Bell;
use crate::writeback::turns::{STUCK_AFTER, WritersTurns};

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
    pub(crate) turns: WritersTurns,
    pub(crate) state: Mutex<FlusherState<F>>,
    /// The thread on duty sleeps here.
    pub(crate) work: Condvar,
    /// The watch waits here.
    pub(crate) watching: Condvar,
    pub(crate) progress: Condvar,
    /// A file is out of somebody's hand.
    pub(crate) put_back: Condvar,
    /// Rung: the thread on duty looks at the files again soon, without being told.
    pub(crate) awake: Bell,
    /// Rung: somebody tells the thread on duty, which has not begun a round since.
    pub(crate) told: Bell,
    /// Somebody found no frame, while write-back kept some.
    pub(crate) starved: AtomicBool,
    /// What stuck files had not written, and not synced, in the last round. Relaxed: hints.
    pub(crate) stuck_unwritten: AtomicU64,
    pub(crate) stuck_unstable: AtomicU64,
    /// Threads in [`Flusher::await_progress`]. Relaxed: told, and no more.
    waiting: AtomicU64,
}

pub(crate) struct FlusherState<F> {
    /// The files that are listed, but for those in `hands` (FL1). Weak: a file that is closed meanwhile
    /// must not stay open here.
    pub(crate) queue: VecDeque<Weak<F>>,
    /// With how many it is looked for those that are closed.
    pub(crate) queue_max: usize,
    /// Files that nobody has open any more, and whose write-back failed, by their addresses. They are
    /// listed, too.
    pub(crate) strays: HashMap<usize, Arc<F>>,
    pub(crate) hands: Vec<Hand>,
    /// Threads that wait for one of these to be empty.
    pub(crate) hands_awaited: usize,
    pub(crate) on_duty: Option<ThreadId>,
    pub(crate) has_watch: bool,
    pub(crate) threads: usize,
    /// Of these, helpers.
    pub(crate) helpers: usize,
    pub(crate) last_thread: ThreadId,
    pub(crate) stopped: bool,
    pub(crate) told: bool,
}

pub(crate) type ThreadId = u64;

/// A file that a thread has in hand.
pub(crate) struct Hand {
    pub(crate) thread: ThreadId,
    /// The thread is a helper.
    pub(crate) helps: bool,
    pub(crate) share: Arc<Share>,
    pub(crate) device: u64,
    /// Since when the thread may have to wait for the file's device (FL2).
    pub(crate) at_work: Option<Instant>,
    /// How many write-backs of the file had ended when somebody last looked, and since when.
    pub(crate) ended: u64,
    pub(crate) ended_at: Instant,
    /// The thread syncs it.
    pub(crate) syncs: bool,
    /// The thread is done with it, and may be dropping it.
    pub(crate) lets_go: bool,
}

impl Hand {
    /// Whether write-backs of the file end, as far as somebody has looked.
    pub(crate) fn is_moving(&mut self) -> bool {
        let ended = self.share.ended();
        if ended != self.ended {
            (self.ended, self.ended_at) = (ended, Instant::now());
        }
        self.ended_at.elapsed() < STUCK_AFTER
    }
}

impl<F> Default for FlusherState<F> {
    fn default() -> Self {
        FlusherState {
            queue: VecDeque::new(),
            queue_max: 0,
            strays: HashMap::new(),
            hands: Vec::new(),
            hands_awaited: 0,
            on_duty: None,
            has_watch: false,
            threads: 0,
            helpers: 0,
            last_thread: 0,
            stopped: false,
            told: false,
        }
    }
}

impl<F> FlusherState<F> {
    pub(crate) fn hand(&mut self, thread: ThreadId) -> Option<&mut Hand> {
        self.hands.iter_mut().find(|hand| hand.thread == thread)
    }

    /// Since when the thread on duty has been at work on one file.
    pub(crate) fn duty_at_work(&mut self) -> Option<Instant> {
        let on_duty = self.on_duty?;
        self.hand(on_duty)?.at_work
    }
}

impl<F> Flusher<F> {
    pub(crate) fn new(limits: Limits) -> Arc<Flusher<F>> {
        Arc::new(Flusher {
            limits,
            turns: WritersTurns::default(),
            state: Mutex::default(),
            work: Condvar::new(),
            watching: Condvar::new(),
            progress: Condvar::new(),
            put_back: Condvar::new(),
            awake: Bell::new(),
            told: Bell::new(),
            starved: AtomicBool::new(false),
            stuck_unwritten: AtomicU64::new(0),
            stuck_unstable: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, FlusherState<F>> {
        self.state.lock().expect("no panic under the lock")
    }

    /// Whether what is dirty is so much that it is to be written back whatever its age.
    pub(crate) fn is_much(&self, dirty_bytes: u64) -> bool {
        let stuck = self.stuck_unwritten.load(Relaxed);
        dirty_bytes.saturating_sub(stuck) > self.limits.dirty_bytes_max().saturating_sub(stuck) / 2
    }

    pub(crate) fn notice(&self, dirty_bytes: u64) {
        let much = self.is_much(dirty_bytes);
        // bell.BL1: one that was rung before is cleared before the flusher looks again.
        if self.awake.ring() || much {
            self.tell();
        }
    }

    /// Asks for frames that write-back keeps, for a caller that does not wait for them.
    pub(crate) fn starve(&self, kept_bytes: u64) {
        if kept_bytes > 0 && !self.starved.swap(true, Relaxed) {
            self.tell();
        }
    }

    /// Has the thread on duty begin a round, if it has not since somebody told it (bell.BL1).
    pub(crate) fn tell(&self) {
        if !self.told.ring() {
            return;
        }
        let mut state = self.state();
        if !state.told {
            state.told = true;
            self.work.notify_one();
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
    pub(crate) fn await_let_go(&self) {
        self.await_hands(|hand| hand.lets_go);
    }

    /// Waits for the thread of the flusher that has the file of `share` in hand, if one has, and does not sync it:
    /// that may take long.
    pub(crate) fn await_out_of_hand(&self, share: &Arc<Share>) {
        self.await_hands(|hand| !hand.syncs && Arc::ptr_eq(&hand.share, share));
    }

    /// Waits as long as there are such hands, but not for a file that hangs.
    fn await_hands(&self, such: impl Fn(&Hand) -> bool) {
        let mut state = self.state();
        if !state.hands.iter().any(&such) {
            return;
        }
        state.hands_awaited += 1;
        let there_are = |state: &mut FlusherState<F>| state.hands.iter().any(&such);
        let waited = self.put_back.wait_timeout_while(state, STUCK_AFTER, there_are);
        waited.expect("no panic under the lock").0.hands_awaited -= 1;
    }

    /// A flush has ended. Who begins to wait just now may miss it, and does not sleep for long.
    pub(crate) fn progressed(&self) {
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
        self.work.notify_all();
        self.watching.notify_all();
    }
}
