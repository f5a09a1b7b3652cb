//! Write-back: how what is DIRTY reaches the back end, and what a sync promises.
//!
//! ```text
//!   write --> DIRTY --- claim ---> WRITEBACK --- acknowledged ---> UNSTABLE --- sync ---> clean
//!               ^                      |                              |
//!               +------- failed -------+------- the sync failed ------+
//! ```
//!
//! A file knows its DIRTY pages by a set beside the page words; the word decides, the set finds.
//! Whoever writes back, the flusher, a sync, a writer over the dirty limit, takes pages out of the
//! set, claims each by its word, and hands contiguous ones to the back end as one vectored
//! transfer, several at once. It takes no range guard.
//!
//! - **B1** A page that is EMPTY, as far as it lies below the size, is in the back end: a page
//!   leaves the cache only when it is clean (W4), and a write that leaves a gap behind the old end
//!   has the back end extend the file first.
//! - **B2** A page enters the set when its word is DIRTY already, before the guard of its writer is
//!   released; who takes it out of the set claims it, finds it clean, or puts it back. So a page
//!   that is DIRTY and whose writer has returned is in the set, or in the hands of a *flush*.
//! - **B3** Each flush has a number, given together with taking its pages. A sync that has written
//!   what it took itself waits for all flushes with smaller numbers: then all that was DIRTY when
//!   it began is written, or is DIRTY again and the error is noted. A page of its own that it finds
//!   under write-back, it waits for: a later flush may have got at it, with a newer content, while
//!   it was HIDDEN. Where one of them left pages
//!   to others meanwhile, it takes what there is once more.
//! - **B4** Nobody waits for a page while it has claimed pages that are not submitted.
//! - **B5** The size is read after the pages are claimed. Who cuts the file hides the pages first,
//!   and waits for write-backs then, so the back end's file is never longer than the size.
//! - **B6** A page is in the set of *unsynced* pages before its word says UNSTABLE. A sync takes the
//!   whole set before it asks the back end, and settles in the end those that did not come back.
//! - **B7** A sync that fails may lose whatever the back end took before it failed, and so may a
//!   durable write, which is a sync: the kernel tells of an error once, through whichever call asks
//!   first. Failures are counted; who finds, when a transfer or a sync has ended, that one was
//!   counted since it began, takes it for failed, too.
//!   A sync that has succeeded waits for the durable writes that are under way then, as one of them may
//!   have been told of what the sync was to cover. (Not for direct ones: who has them under way may be
//!   the one who syncs. Nor does a durable write of mode through that has succeeded look whether another
//!   failure was counted.)
//! - **B8** What is cached of a page that no sync has covered is what the back end took, or newer: who
//!   reads such a page back, whole or in part, takes it out of the set before it is shown, as the back
//!   end may have lost it before. It counts as not cached then.
//!
//! *Streams.* Pages that writes dirty in order, one write beginning where the one before ended, are
//! written back before there are many: the device has something to do from the start, and the sync
//! in the end little. A stream shorter than an eighth of the dirty limit waits, as it may be
//! overwritten.
//!
//! *Tail.* Direct I/O ends with the last whole block below the size; what is left follows as one
//! exact-length transfer, which the back end takes through the kernel's cache.
//!
//! *Errors.* A transfer that failed is tried page by page; pages that fail are DIRTY again, and
//! the first error is latched until a sync succeeds. After a failed sync of the back end, all that
//! was written since the last good one is DIRTY again where it is cached; where it is not, syncs
//! say so for as long as the file is open ([`Error::Lost`]).
//!
//! Locks: `syncing` -> range guards (shared, after a failure) -> `state`; who has a range guard does
//! not wait for `syncing`; under `state` only page words and the table. The flusher's own lock
//! is a leaf.

mod flush;
mod flusher;

use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::cache::fill::Leaves;
use crate::cache::pageset::PageSet;
use crate::cache::table::PageIndex;
use millpond_rangelock::Mode;

use crate::cached::CachedFile;
use crate::error::{Error, Op, Result};
use crate::space;

use crate::writeback::flush::{BATCH_BYTES, Patience, flush};

pub(crate) use crate::writeback::flush::unpin;
pub(crate) use crate::writeback::flusher::{Flusher, Limits, relieve, throttle};

/// The last page that a file can have, and so "to the end".
pub(crate) const LAST_PAGE: PageIndex = i64::MAX as u64 >> 12;

/// The memory that may go into remembering what was written through, in bitmaps of 100 bytes.
const THROUGH_LEAVES_MAX: usize = 1024;
/// Pages of which [`settle`] clears a bit under one hold of the lock.
const SETTLED_TOGETHER: usize = 256;
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);

/// What a file owes to its back end.
#[derive(Default)]
pub(crate) struct Writeback {
    state: Mutex<State>,
    flush_ended: Condvar,
    syncing: Mutex<()>,
    /// Whether a page may be DIRTY or under write-back. Set under the guard of a writer.
    begun: AtomicBool,
    /// How many syncs have failed (B7). Changes under the lock of the state.
    failed_syncs: AtomicU64,
    /// Whether a page may be unsynced, covered by the sync that is under way, or in doubt. Changes
    /// under the lock of the state. Who has found such a page EMPTY, under a guard, sees it set: that was
    /// done before the guard of its writer was released, or the write-back of the page ended.
    owes_sync: AtomicBool,
}

#[derive(Default)]
struct State {
    dirty: PageSet,
    /// Since when there has been something in `dirty`.
    dirty_since: Option<Instant>,
    stream: Stream,
    /// What the back end acknowledged since the last sync began, and is or was cached.
    unsynced: PageSet,
    /// Of that, what the sync that is under way is to cover.
    covering: PageSet,
    /// What a failed sync should have made DIRTY again, and could not.
    doubtful: PageSet,
    /// The back end was given bytes of which there is no cached copy.
    uncached: bool,
    /// Of that, what the sync that is under way is to cover.
    covering_uncached: bool,
    /// The back end was given something else to make durable.
    metadata: bool,
    flushes: Vec<u64>,
    next_flush: u64,
    /// Durable writes under way (B7).
    durable_writes: Vec<u64>,
    next_durable: u64,
    /// How often a flush has put back pages that were in somebody else's hands.
    skips: u64,
    failure: Option<Failure>,
    /// What was lost, until the file is closed.
    lost: Option<Failure>,
    retry: Option<(Instant, Duration)>,
    listed: bool,
}

/// Pages that writes have dirtied in order.
#[derive(Default)]
struct Stream {
    /// From here on, up to `end`, the pages were not handed to the flusher yet.
    behind: PageIndex,
    end: PageIndex,
    /// The stream was long enough once.
    runs: bool,
}

impl Stream {
    /// Notes a write; whether there is enough now to be written back.
    fn advance(&mut self, first: PageIndex, last: PageIndex, least: u64, batch: u64) -> bool {
        if first != self.end && first + 1 != self.end {
            *self = Stream { behind: first, end: first, runs: false };
        }
        // The page in which the write before ended may have been written back meanwhile.
        self.behind = self.behind.min(first);
        self.end = last + 1;
        self.is_due(least, batch)
    }

    fn is_due(&self, least: u64, batch: u64) -> bool {
        self.end - self.behind >= if self.runs { batch } else { least.max(batch) }
    }

    /// The first and the last page of what is to be written back, if it is enough.
    fn take(&mut self, least: u64, batch: u64) -> Option<(PageIndex, PageIndex)> {
        self.is_due(least, batch).then(|| {
            self.runs = true;
            let first = std::mem::replace(&mut self.behind, self.end);
            (first, self.end - 1)
        })
    }
}

/// An error that outlives the call that met it.
#[derive(Clone, Copy, Debug)]
struct Failure {
    offset: u64,
    len: u64,
    errno: i32,
}

impl Failure {
    const UNKNOWN: Failure = Failure { offset: 0, len: 0, errno: libc::EIO };

    fn new(offset: u64, len: u64, error: &io::Error) -> Failure {
        Failure { offset, len, errno: error.raw_os_error().unwrap_or(libc::EIO) }
    }

    fn source(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }

    fn error(&self, op: Op) -> Error {
        Error::io(op, self.offset, self.len, self.source())
    }
}

/// Whether range guards may be waited for.
#[derive(Clone, Copy, PartialEq)]
enum Guards {
    Wait,
    Try,
}

impl Writeback {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// How many syncs have failed, to be asked before a transfer begins (B7).
    pub(crate) fn failed_syncs(&self) -> u64 {
        // Acquire: pairs with the Release of `count_failed_sync`. Who sees an older number here
        // finds a newer one under the lock of the state, in the end.
        self.failed_syncs.load(Acquire)
    }

    fn insert_unsynced(&self, state: &mut State, page: PageIndex) {
        self.owes_sync.store(true, Release);
        state.unsynced.insert(page);
    }

    fn insert_doubtful(&self, state: &mut State, page: PageIndex) {
        self.owes_sync.store(true, Release);
        state.doubtful.insert(page);
    }

    /// The caller holds the lock of the state.
    fn count_failed_sync(&self) {
        self.failed_syncs.fetch_add(1, Release);
    }

    /// Whether a page may be DIRTY or under write-back. Under an exclusive guard, what is said of
    /// its range stays true for as long as no sync fails.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Acquire)
    }
}

impl State {
    fn heap_bytes(&self) -> u64 {
        let sets = [&self.dirty, &self.unsynced, &self.covering, &self.doubtful];
        sets.map(PageSet::heap_bytes).iter().sum()
    }

    fn insert_dirty(&mut self, pages: impl Iterator<Item = PageIndex>) {
        for page in pages {
            self.dirty.insert(page);
        }
        if self.dirty_since.is_none() && !self.dirty.is_empty() {
            self.dirty_since = Some(Instant::now());
        }
    }

    /// After a failed sync: what the back end took is in doubt where it is cached, or lost.
    fn doubt_unsynced(&mut self, failure: Failure) {
        self.failure = Some(failure);
        let pages = std::mem::take(&mut self.unsynced);
        pages.for_each(&mut |page| self.doubtful.insert(page));
        if std::mem::take(&mut self.uncached) {
            self.lost = Some(failure);
        }
    }

    /// What a sync was to cover, it has not covered.
    fn uncover(&mut self, metadata: bool) {
        let pages = std::mem::take(&mut self.covering);
        pages.for_each(&mut |page| self.unsynced.insert(page));
        self.uncached |= std::mem::take(&mut self.covering_uncached);
        self.metadata |= metadata;
    }

    /// Has the flusher wait before it tries again.
    fn back_off(&mut self) {
        let pause = self.retry.map_or(RETRY_MIN, |(_, pause)| (pause * 2).min(RETRY_MAX));
        self.retry = Some((Instant::now() + pause, pause));
    }

    fn begin_flush(&mut self) -> u64 {
        self.next_flush += 1;
        self.flushes.push(self.next_flush);
        self.next_flush
    }
}

/// Counts what the sets take. Without the lock of the state.
fn count_heap(file: &CachedFile) {
    let bytes = file.writeback.state().heap_bytes();
    file.writeback_heap.set(file.cache(), bytes);
}

/// Notes pages whose words the caller has made DIRTY, under its guard (B2).
pub(crate) fn dirtied(file: &CachedFile, first: PageIndex, last: PageIndex) {
    let writeback = &file.writeback;
    writeback.begun.store(true, Relaxed);
    let mut state = writeback.state();
    state.insert_dirty(first..=last);
    let (least, batch) = stream_pages(file);
    let due = state.stream.advance(first, last, least, batch);
    let heap_bytes = state.heap_bytes();
    drop(state);
    file.writeback_heap.set(file.cache(), heap_bytes);
    if due {
        file.shared.flusher.tell();
    }
    tell_flusher(file);
}

/// Pages of the file are DIRTY, and in its set.
fn tell_flusher(file: &CachedFile) {
    let flusher = &file.shared.flusher;
    if !std::mem::replace(&mut file.writeback.state().listed, true) {
        flusher.add(file);
    }
    flusher.notice(file.cache().ledger.dirty());
}

/// How long a stream must be to be written back the first time, and then.
fn stream_pages(file: &CachedFile) -> (u64, u64) {
    let shift = file.core().page_shift;
    let least = file.shared.flusher.limits.dirty_bytes_max / 8;
    (least >> shift, BATCH_BYTES >> shift)
}

/// Notes that the back end took the pages from `first` to `last` of a write that was through.
/// `failed_syncs`: of before the transfer.
pub(crate) fn passed(
    file: &CachedFile,
    first: PageIndex,
    last: PageIndex,
    cached: bool,
    failed_syncs: u64,
) {
    let mut state = file.writeback.state();
    if file.writeback.failed_syncs() != failed_syncs {
        let failure = state.failure.unwrap_or(Failure::UNKNOWN);
        if cached {
            (first..=last).for_each(|page| file.writeback.insert_doubtful(&mut state, page));
        } else {
            state.lost = Some(failure);
        }
    } else if !cached || state.unsynced.leaves() >= THROUGH_LEAVES_MAX {
        state.uncached = true;
    } else {
        (first..=last).for_each(|page| file.writeback.insert_unsynced(&mut state, page));
    }
    let heap_bytes = state.heap_bytes();
    drop(state);
    file.writeback_heap.set(file.cache(), heap_bytes);
}

/// Notes that the pages from `first` to `last`, which the caller has found EMPTY and not shown yet, are
/// read from the back end (B8).
#[inline]
pub(crate) fn read_back(file: &CachedFile, first: PageIndex, last: PageIndex) {
    // Acquire: see the field.
    if file.writeback.owes_sync.load(Acquire) {
        let mut state = file.writeback.state();
        let has_one = |set: &mut PageSet| !set.take(first, last, usize::MAX).is_empty();
        state.uncached |= has_one(&mut state.unsynced);
        state.covering_uncached |= has_one(&mut state.covering);
        if has_one(&mut state.doubtful) {
            state.lost = Some(state.failure.unwrap_or(Failure::UNKNOWN));
        }
    }
}

/// Notes that a durable write begins; its number, to be given to [`end_durable`].
pub(crate) fn begin_durable(file: &CachedFile) -> u64 {
    let mut state = file.writeback.state();
    state.next_durable += 1;
    let number = state.next_durable;
    state.durable_writes.push(number);
    number
}

/// After [`durable_failed`], where it has failed.
pub(crate) fn end_durable(file: &CachedFile, number: u64) {
    let mut state = file.writeback.state();
    state.durable_writes.retain(|&other| other != number);
    drop(state);
    file.writeback.flush_ended.notify_all();
}

/// Notes that the back end has something else to make durable than bytes.
pub(crate) fn passed_metadata(file: &CachedFile) {
    file.writeback.state().metadata = true;
}

/// Forgets the pages from `first` to `last`, whose bytes are gone from the file.
pub(crate) fn forget(file: &CachedFile, first: PageIndex, last: PageIndex) {
    if first <= last {
        let mut state = file.writeback.state();
        state.dirty.take(first, last, usize::MAX);
        state.unsynced.take(first, last, usize::MAX);
        state.covering.take(first, last, usize::MAX);
        state.doubtful.take(first, last, usize::MAX);
    }
}

/// Forgets errors that are told until the file is closed, as it is. (The flusher, or a writer over
/// the dirty limit, may keep it from being dropped for a moment, in which it is opened again.)
pub(crate) fn forget_failures(file: &CachedFile) {
    let mut state = file.writeback.state();
    (state.failure, state.lost) = (None, None);
}

/// Writes back what is DIRTY now of the pages from `first` to `last`, and waits until the back end
/// has acknowledged it. May be called under any guard, with no page of the range HIDDEN by the
/// caller.
pub(crate) fn write_back(
    file: &CachedFile,
    first: PageIndex,
    last: PageIndex,
    op: Op,
) -> Result<()> {
    match flush(file, first, last, Patience::Wait, false).failure {
        Some(failure) => Err(failure.error(op)),
        None => Ok(()),
    }
}

/// Waits until none of the pages from `first` to `last`, which the caller has HIDDEN, is under
/// write-back.
pub(crate) fn await_ends(file: &CachedFile, first: PageIndex, last: PageIndex) {
    if !file.writeback.has_begun() {
        return;
    }
    file.core().for_each_page(file.cache(), first, last, &mut |_, _, word| {
        loop {
            let seen = word.load();
            if !seen.is_under_writeback() {
                break;
            }
            if let Some(armed) = word.arm(seen) {
                word.sleep(armed);
            }
        }
    });
}

/// Makes durable what was written to the pages from `first` to `last` before the call.
pub(crate) fn sync(
    file: &CachedFile,
    first: PageIndex,
    last: PageIndex,
    data_only: bool,
) -> Result<()> {
    let one = file.writeback.syncing.lock().expect("no panic under the lock");
    let synced = sync_locked(file, first, last, data_only, Guards::Wait, &one);
    drop(one);
    count_heap(file);
    synced
}

/// [`sync`], by the one who may.
fn sync_locked(
    file: &CachedFile,
    first: PageIndex,
    last: PageIndex,
    data_only: bool,
    guards: Guards,
    _one: &MutexGuard<'_, ()>,
) -> Result<()> {
    let writeback = &file.writeback;
    let failed_syncs = writeback.failed_syncs();
    if !writeback.state().doubtful.is_empty() {
        let failure = writeback.state().failure.unwrap_or(Failure::UNKNOWN);
        redirty(file, guards, failure);
        if !writeback.state().doubtful.is_empty() {
            return Err(failure.error(Op::Sync));
        }
    }
    let alone = {
        let state = writeback.state();
        data_only && state.unsynced.is_empty() && !state.uncached && !state.metadata
    };
    let flushed = flush(file, first, last, Patience::Wait, alone);
    if let Some(failure) = flushed.failure {
        return Err(failure.error(Op::Sync));
    }
    // B6. The errors of other flushes are noted by now (B3).
    let mut state = writeback.state();
    let nothing_else = state.unsynced.is_empty() && !state.uncached && !state.metadata;
    if flushed.durable && nothing_else && writeback.failed_syncs() == failed_syncs {
        return succeed(file, &mut state);
    }
    state.covering = std::mem::take(&mut state.unsynced);
    state.covering_uncached = std::mem::take(&mut state.uncached);
    let metadata = std::mem::take(&mut state.metadata);
    drop(state);
    let outcome = file.backing.sync(data_only);
    let mut state = writeback.state();
    // B7. Once a failure is counted there is nothing to wait for.
    let begun = state.next_durable;
    let is_good = || outcome.is_ok() && writeback.failed_syncs() == failed_syncs;
    while is_good() && state.durable_writes.iter().any(|&number| number <= begun) {
        if guards == Guards::Try {
            // Nothing is wrong, but nothing is known to be covered.
            state.uncover(metadata);
            return Err(Error::WouldBlock { op: Op::Sync, offset: 0, len: 0 });
        }
        state = writeback.flush_ended.wait(state).expect("no panic under the lock");
    }
    match outcome {
        Ok(()) if writeback.failed_syncs() == failed_syncs => {
            let covered = std::mem::take(&mut state.covering);
            state.covering_uncached = false;
            let done = succeed(file, &mut state);
            drop(state);
            settle(file, &covered);
            done
        }
        outcome => {
            state.uncover(metadata);
            // Or a durable write has failed, and noted why.
            let failure = match outcome {
                Err(error) => Failure::new(0, 0, &error),
                Ok(()) => state.failure.unwrap_or(Failure::UNKNOWN),
            };
            writeback.count_failed_sync();
            state.doubt_unsynced(failure);
            state.back_off();
            drop(state);
            redirty(file, guards, failure);
            Err(failure.error(Op::Sync))
        }
    }
}

/// Notes that a durable write to the back end failed (B7).
pub(crate) fn durable_failed(file: &CachedFile, offset: u64, len: u64, errno: i32) {
    let mut state = file.writeback.state();
    file.writeback.count_failed_sync();
    state.doubt_unsynced(Failure { offset, len, errno });
}

/// After everything is durable, but for what was lost.
fn succeed(file: &CachedFile, state: &mut State) -> Result<()> {
    if state.unsynced.is_empty() && state.doubtful.is_empty() {
        file.writeback.owes_sync.store(false, Release);
    }
    match state.lost {
        Some(lost) => Err(Error::Lost { source: lost.source() }),
        None => {
            state.failure = None;
            state.retry = None;
            Ok(())
        }
    }
}

/// Clears UNSTABLE where the sync that covered the pages was the last word (B6). Takes the lock for some
/// at a time: readers want it, too.
fn settle(file: &CachedFile, covered: &PageSet) {
    if !file.writeback.has_begun() {
        return;
    }
    let mut pages = Vec::new();
    covered.for_each(&mut |page| pages.push(page));
    for some in pages.chunks(SETTLED_TOGETHER) {
        let mut leaves = Leaves::new(file);
        let state = file.writeback.state();
        for &page in some {
            // In doubt: a durable write has failed since.
            let is_settled = !(state.unsynced.contains(page) || state.doubtful.contains(page));
            if is_settled && let Ok(held) = leaves.hold(page, false) {
                let word = held.word(page);
                if word.load().is_unstable() {
                    file.cache().ledger.note(word.settle(), file.core().page_bytes());
                }
            }
        }
    }
}

/// Makes the doubtful pages DIRTY again, of which the back end may have lost what it acknowledged.
/// Where they are not cached any more, notes that they are lost; where `guards` must not be waited
/// for, and one is taken, leaves the page for the next sync.
fn redirty(file: &CachedFile, guards: Guards, failure: Failure) {
    let writeback = &file.writeback;
    writeback.begun.store(true, SeqCst);
    let mut pages = Vec::new();
    writeback.state().doubtful.for_each(&mut |page| pages.push(page));
    for page in pages {
        // Who has found the page clean, under its guard, and had the back end change it, must not be
        // overtaken by what is written back now.
        let range = file.pages(file.start_of(page), file.start_of(page + 1));
        let (guard, waited) = match guards {
            Guards::Wait => (None, Some(file.ranges.lock(range, Mode::Shared))),
            Guards::Try => (file.ranges.try_lock_owned(range, Mode::Shared), None),
        };
        if guard.is_none() && waited.is_none() {
            continue;
        }
        let mut state = writeback.state();
        if state.doubtful.take(page, page, 1).is_empty() {
            // Cut off meanwhile, or read back.
            continue;
        }
        // Under the lock, so that nobody has read the page back and not said so (B8).
        let held = file.core().hold(file.cache(), page, false);
        let change = held.ok().map(|held| held.word(page).redirty());
        drop(state);
        match change {
            Some(change) if change.now.is_dirty() => {
                file.cache().ledger.note(change, file.core().page_bytes());
                if !change.was.is_dirty() {
                    file.commit(std::iter::once((page, change.now.frame())), None);
                }
                writeback.state().insert_dirty(std::iter::once(page));
            }
            _ => writeback.state().lost = Some(failure),
        }
    }
    if !writeback.state().dirty.is_empty() {
        tell_flusher(file);
        // Acquire: the last handle goes before it is seen whether the file owes anything (`leave`).
        if file.handles.load(Acquire) == 0
            && let Some(file) = file.this.upgrade()
        {
            file.shared.clone().flusher.adopt(file);
        }
    }
}

/// What syncs of the file would complain of, as it is closed.
pub(crate) fn close(file: &CachedFile) -> Result<()> {
    let written = write_back(file, 0, LAST_PAGE, Op::Close);
    let state = file.writeback.state();
    if let Some(lost) = state.lost {
        return Err(Error::Lost { source: lost.source() });
    }
    written?;
    state.failure.map_or(Ok(()), |failure| Err(failure.error(Op::Close)))
}

impl CachedFile {
    /// Whether a page is DIRTY or may be under write-back.
    pub(crate) fn owes(&self) -> bool {
        let state = self.writeback.state();
        !state.dirty.is_empty() || !state.flushes.is_empty()
    }

    /// The last handle is gone: writes back what is DIRTY, and leaves it to the flusher if that
    /// fails.
    pub(crate) fn leave(self: Arc<Self>) {
        if !self.writeback.has_begun() {
            // A write that was to wait may have gone around the cache after all.
            if self.is_kept() || space::is_reserved(&self) {
                self.rest();
            }
            return;
        }
        if write_back(&self, 0, LAST_PAGE, Op::Close).is_err() || self.owes() {
            let shared = Arc::clone(&self.shared);
            shared.flusher.adopt(self);
        } else {
            self.rest();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Goal: writes in order are a stream, also if they end within pages.
    #[test]
    fn streams_of_any_length_of_writes() {
        for len in [100u64, 4096, 5000, 10_000] {
            let mut stream = Stream::default();
            let (mut taken, mut next) = (0, 0);
            for number in 0..1 << 20 {
                let (first, last) = ((number * len) >> 12, ((number + 1) * len - 1) >> 12);
                if last < next && first == last {
                    // A page that is dirty already is not told of again.
                    continue;
                }
                next = last + 1;
                if stream.advance(first, last, 64, 16)
                    && let Some((first, last)) = stream.take(64, 16)
                {
                    assert!(first <= taken && last >= taken, "{first}..={last} after {taken}");
                    taken = last + 1;
                }
                if taken > 1000 {
                    break;
                }
            }
            assert!(taken > 1000, "writes of {len} are no stream");
        }
        let mut stream = Stream::default();
        let mut random = 1u64;
        assert!((0..1000).all(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            !stream.advance(random >> 33, random >> 33, 64, 16)
        }));
    }
}
