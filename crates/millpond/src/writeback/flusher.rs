//! Who writes back when nobody asks for it: the flusher's thread, by age and by amount; and writers
//! that find the cache full of what waits.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::cached::CachedFile;
use crate::error::{Op, Result};
use crate::io::backend::spawn;
use crate::writeback::flush::{Patience, flush, flush_some};
use crate::writeback::sync::{Guards, sync_in_background};
use crate::writeback::{LAST_PAGE, stream_pages};

/// How long a writer over the dirty limit waits without any progress before its write goes through.
const THROTTLED_MAX: Duration = Duration::from_secs(5);
/// Writers over the dirty limit that write back at once; the flusher does beside them.
const TURNS_MAX: u32 = 1;
/// How soon the flusher looks again after it found nothing to do, while there are writes.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Whether a write of `bytes` may leave them in the cache; else it goes through.
///
/// # Errors
///
/// Of the file's own write-back, where it keeps the cache full.
pub(crate) fn throttle(file: &CachedFile, bytes: u64) -> Result<bool> {
    let shared = &*file.shared;
    let (ledger, flusher) = (&shared.cache.ledger, &shared.flusher);
    if ledger.unwritten() + bytes <= flusher.limits.dirty_bytes_max {
        return Ok(true);
    }
    if bytes > flusher.limits.dirty_bytes_max {
        return Ok(false);
    }
    let mut deadline = Instant::now() + THROTTLED_MAX;
    loop {
        let mut progress;
        if let Some(_turn) = Turn::take(flusher) {
            let flushed = flush_some(file);
            if let Some(failure) = flushed.failure
                && ledger.unwritten() + bytes > flusher.limits.dirty_bytes_max
            {
                return Err(failure.error(Op::Write));
            }
            progress = flushed.pages > 0;
            if !progress {
                // Others have filled the cache.
                progress = flusher.files().iter().any(|other| {
                    let flushed = flush_some(other);
                    flushed.pages > 0 && flushed.failure.is_none()
                });
            }
        } else {
            let before = ledger.unwritten();
            flusher.await_progress();
            progress = ledger.unwritten() < before;
        }
        if ledger.unwritten() + bytes <= flusher.limits.dirty_bytes_max {
            return Ok(true);
        }
        if progress {
            deadline = Instant::now() + THROTTLED_MAX;
        } else if Instant::now() >= deadline {
            return Ok(false);
        } else {
            flusher.await_progress();
        }
    }
}

/// A writer's turn to write back. The others wait meanwhile: were all of them at it, what they have in
/// flight together would keep reads waiting at the device for as long as it takes to write it.
struct Turn<'a>(&'a Flusher);

impl Turn<'_> {
    fn take(flusher: &Flusher) -> Option<Turn<'_>> {
        // Relaxed: a count; what is written back is passed on under the files' locks.
        let taken = flusher
            .turns
            .fetch_update(Relaxed, Relaxed, |turns| (turns < TURNS_MAX).then_some(turns + 1));
        // Lazily: a Turn that is dropped gives one back.
        taken.is_ok().then(|| Turn(flusher))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.turns.fetch_sub(1, Relaxed);
    }
}

/// Makes room in a cache of which write-back keeps too much; whether there may be some now.
pub(crate) fn relieve(file: &CachedFile) -> bool {
    let shared = &*file.shared;
    let kept = shared.cache.ledger.kept();
    if kept == 0 {
        return false;
    }
    let mut files = shared.flusher.files();
    files.retain(|other| !std::ptr::eq(&**other, file));
    for file in std::iter::once(file).chain(files.iter().map(|file| &**file)) {
        let flushed = flush(file, 0, LAST_PAGE, Patience::Skip, false);
        // Not waited for: whoever syncs may wait for guards, and the caller has one.
        if flushed.failure.is_none() && shared.cache.ledger.unstable() > 0 {
            sync_in_background(file, Guards::Try);
        }
    }
    shared.cache.ledger.kept() < kept
}

/// How much may be owed, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) dirty_bytes_max: u64,
    pub(crate) unstable_bytes_max: u64,
    pub(crate) age_max: Duration,
}

/// The thread that writes back by age and by amount; started by the first page that is DIRTY.
pub(crate) struct Flusher {
    pub(crate) limits: Limits,
    state: Mutex<FlusherState>,
    work: Condvar,
    pub(crate) progress: Condvar,
    /// Whether the thread looks at the files again soon, without being told.
    awake: AtomicBool,
    /// Somebody found no frame, while write-back kept some.
    starved: AtomicBool,
    /// Writers over the dirty limit that are writing back.
    turns: AtomicU32,
}

#[derive(Default)]
struct FlusherState {
    files: Vec<Weak<CachedFile>>,
    /// Files that nobody has open any more, and whose write-back failed.
    strays: Vec<Arc<CachedFile>>,
    started: bool,
    stopped: bool,
    told: bool,
}

impl Flusher {
    pub(crate) fn new(limits: Limits) -> Arc<Flusher> {
        Arc::new(Flusher {
            limits,
            state: Mutex::default(),
            work: Condvar::new(),
            progress: Condvar::new(),
            awake: AtomicBool::new(false),
            starved: AtomicBool::new(false),
            turns: AtomicU32::new(0),
        })
    }

    fn state(&self) -> MutexGuard<'_, FlusherState> {
        self.state.lock().expect("no panic under the lock")
    }

    pub(super) fn add(self: &Arc<Self>, file: &CachedFile) {
        let mut state = self.state();
        state.files.retain(|known| known.strong_count() > 0);
        state.files.push(Weak::clone(&file.this));
        if !state.started {
            let flusher = Arc::clone(self);
            // Where there is no thread to be had, writers do the work when the limit is reached.
            state.started = spawn("millpond-flush", move || flusher.serve()).is_ok();
        }
    }

    /// Keeps a file whose last handle is gone until it is written back.
    pub(crate) fn adopt(&self, file: Arc<CachedFile>) {
        self.state().strays.push(file);
        self.tell();
    }

    fn files(&self) -> Vec<Arc<CachedFile>> {
        self.state().files.iter().filter_map(Weak::upgrade).collect()
    }

    pub(super) fn notice(&self, dirty_bytes: u64) {
        let much = dirty_bytes > self.limits.dirty_bytes_max / 2;
        // SeqCst: with the flusher's store and look, one of the two sees the other's.
        if !self.awake.swap(true, SeqCst) || much {
            self.tell();
        }
    }

    /// Asks for frames that write-back keeps, for one who does not wait for them.
    pub(crate) fn starve(&self, kept_bytes: u64) {
        if kept_bytes > 0 && !self.starved.swap(true, Relaxed) {
            self.tell();
        }
    }

    pub(super) fn tell(&self) {
        let mut state = self.state();
        if !state.told {
            state.told = true;
            self.work.notify_one();
        }
    }

    fn await_progress(&self) {
        let state = self.state();
        let pause = Duration::from_millis(2);
        drop(self.progress.wait_timeout(state, pause).expect("no panic under the lock"));
    }

    /// Lets the thread end.
    pub(crate) fn stop(&self) {
        self.state().stopped = true;
        self.work.notify_all();
    }

    fn serve(&self) {
        loop {
            let mut state = self.state();
            if state.stopped {
                return;
            }
            state.told = false;
            let strays = std::mem::take(&mut state.strays);
            let mut files = state.files.clone();
            drop(state);
            let (kept, clean): (Vec<_>, Vec<_>) = strays.into_iter().partition(|file| file.owes());
            clean.iter().for_each(|file| file.rest());
            drop(clean);
            files.retain(|file| {
                !kept.iter().any(|other| std::ptr::eq(file.as_ptr(), Arc::as_ptr(other)))
            });
            let mut next: Option<Instant> = None;
            let mut worked = false;
            let starved = self.starved.swap(false, Relaxed);
            let mut note = |attended| match attended {
                Attended::Worked => worked = true,
                Attended::Due(at) => next = Some(next.map_or(at, |next| next.min(at))),
                Attended::Idle => {}
            };
            // Held one at a time: a file that is closed meanwhile must not stay open here.
            for file in files.iter().filter_map(Weak::upgrade) {
                note(self.attend(&file, starved));
            }
            kept.iter().for_each(|file| note(self.attend(file, starved)));
            // Those that are clean now come to rest in the next round.
            worked |= kept.iter().any(|file| !file.owes());
            self.state().strays.extend(kept);
            if !worked {
                self.sleep(next);
            }
        }
    }

    fn sleep(&self, next: Option<Instant>) {
        let mut state = self.state();
        if state.told || state.stopped {
            return;
        }
        let wait = match next {
            Some(at) => at.saturating_duration_since(Instant::now()),
            None if self.awake.swap(false, SeqCst) => {
                // Something was dirtied since the last look, maybe after it, and maybe written back
                // by a sync already: who does that a thousand times a second does not wake us.
                LOOK_AGAIN.min(self.limits.age_max / 4)
            }
            None => {
                while !state.told && !state.stopped {
                    state = self.work.wait(state).expect("no panic under the lock");
                }
                return;
            }
        };
        drop(self.work.wait_timeout(state, wait).expect("no panic under the lock"));
    }

    /// Writes back what is due of a file.
    fn attend(&self, file: &Arc<CachedFile>, starved: bool) -> Attended {
        let now = Instant::now();
        let ledger = &file.cache().ledger;
        let much = ledger.dirty() > self.limits.dirty_bytes_max / 2;
        let state = file.writeback.state();
        let retry = state.retry.map(|(at, _)| at).filter(|&at| at > now);
        // Early enough that nothing stays for longer than it should.
        let due = state.dirty.since().map(|since| since + self.limits.age_max / 2);
        let stray = Arc::strong_count(file) == 1;
        drop(state);
        let owes = file.writeback.generations.owes_pages();
        if let (Some(at), Some(_)) = (retry, due) {
            // Not later than what others dirty meanwhile is due.
            return Attended::Due(at.min(now + self.limits.age_max / 2));
        }
        let flushed = due.is_some_and(|at| at <= now || stray || starved);
        let (least, batch) = stream_pages(file);
        let behind = file.writeback.state().stream.take(least, batch);
        if flushed {
            flush(file, 0, LAST_PAGE, Patience::Skip, false);
        } else if let Some((first, last)) = behind {
            flush(file, first, last, Patience::Skip, false);
        }
        if (owes || flushed)
            && (starved || ledger.unstable() > self.limits.unstable_bytes_max)
            && ledger.unstable() > 0
        {
            sync_in_background(file, Guards::Wait);
        }
        match due {
            Some(_) if flushed || behind.is_some() => Attended::Worked,
            Some(_) if much => match flush_some(file).pages {
                0 => Attended::Due(now + Duration::from_millis(2)),
                _ => Attended::Worked,
            },
            Some(at) => Attended::Due(at),
            None => Attended::Idle,
        }
    }
}

enum Attended {
    Worked,
    Due(Instant),
    Idle,
}
