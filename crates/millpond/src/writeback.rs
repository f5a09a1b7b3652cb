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
//!   it began is written, or is DIRTY again and the error is noted. Where one of them left pages
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

use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::cache::fill::Leaves;
use crate::cache::frame::{Class, FrameIndex};
use crate::cache::page::{State as PageState, Word, WritebackEnd};
use crate::cache::pageset::PageSet;
use crate::cache::table::PageIndex;
use millpond_rangelock::Mode;

use crate::cached::CachedFile;
use crate::error::{Error, Op, Result};
use crate::io::backend::spawn;
use crate::io::request::{self, Direction, Transfer};
use crate::io::segment::Segment;
use crate::space;
use crate::sync::fence;

/// The last page that a file can have, and so "to the end".
pub(crate) const LAST_PAGE: PageIndex = i64::MAX as u64 >> 12;

/// The length of one transfer.
const RUN_BYTES: u64 = 1 << 20;
/// What is in flight at once, of one flush.
const BATCH_BYTES: u64 = 16 << 20;
/// Pages that fail in a row before the rest of their transfer counts as failed, too.
const FAILURES_MAX: usize = 8;
/// The memory that may go into remembering what was written through, in bitmaps of 100 bytes.
const THROUGH_LEAVES_MAX: usize = 1024;
/// How long a writer over the dirty limit waits without any progress before its write goes through.
const THROTTLED_MAX: Duration = Duration::from_secs(5);
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
    /// The back end was given something else to make durable.
    metadata: bool,
    flushes: Vec<u64>,
    next_flush: u64,
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

/// What to do about pages that are in somebody else's hands.
#[derive(Clone, Copy, PartialEq)]
enum Patience {
    Skip,
    Wait,
}

/// Whether range guards may be waited for.
#[derive(Clone, Copy, PartialEq)]
enum Guards {
    Wait,
    Try,
}

enum Claim {
    Own(FrameIndex),
    /// HIDDEN, or an older content is under write-back.
    Busy(Word),
    Clean,
}

/// What a flush achieved.
#[derive(Default)]
struct Flushed {
    pages: usize,
    failure: Option<Failure>,
    /// All went in one durable transfer.
    durable: bool,
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

/// Notes pages whose words the caller has made DIRTY, under its guard (B2).
pub(crate) fn dirtied(file: &CachedFile, first: PageIndex, last: PageIndex) {
    let writeback = &file.writeback;
    writeback.begun.store(true, Relaxed);
    let mut state = writeback.state();
    state.insert_dirty(first..=last);
    let (least, batch) = stream_pages(file);
    let due = state.stream.advance(first, last, least, batch);
    drop(state);
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
            (first..=last).for_each(|page| state.doubtful.insert(page));
        } else {
            state.lost = Some(failure);
        }
    } else if !cached || state.unsynced.leaves() >= THROUGH_LEAVES_MAX {
        state.uncached = true;
    } else {
        (first..=last).for_each(|page| state.unsynced.insert(page));
    }
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
    sync_locked(file, first, last, data_only, Guards::Wait, &one)
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
        return succeed(&mut state);
    }
    state.covering = std::mem::take(&mut state.unsynced);
    let uncached = std::mem::take(&mut state.uncached);
    let metadata = std::mem::take(&mut state.metadata);
    drop(state);
    let outcome = file.backing.sync(data_only);
    let mut state = writeback.state();
    match outcome {
        Ok(()) if writeback.failed_syncs() == failed_syncs => {
            settle(file, &state);
            state.covering = PageSet::default();
            succeed(&mut state)
        }
        outcome => {
            state.metadata |= metadata;
            // Or a durable write has failed, and noted why.
            let failure = match outcome {
                Err(error) => Failure::new(0, 0, &error),
                Ok(()) => state.failure.unwrap_or(Failure::UNKNOWN),
            };
            writeback.count_failed_sync();
            let covered = std::mem::take(&mut state.covering);
            covered.for_each(&mut |page| state.unsynced.insert(page));
            state.uncached |= uncached;
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
fn succeed(state: &mut State) -> Result<()> {
    match state.lost {
        Some(lost) => Err(Error::Lost { source: lost.source() }),
        None => {
            state.failure = None;
            state.retry = None;
            Ok(())
        }
    }
}

/// Clears UNSTABLE where the sync was the last word (B6).
fn settle(file: &CachedFile, state: &State) {
    if !file.writeback.has_begun() {
        return;
    }
    let mut leaves = Leaves::new(file);
    state.covering.for_each(&mut |page| {
        if !state.unsynced.contains(page)
            && let Ok(held) = leaves.hold(page, false)
        {
            let word = held.word(page);
            if word.load().is_unstable() {
                file.cache().ledger.note(word.settle(), file.core().page_bytes());
            }
        }
    });
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
        if writeback.state().doubtful.take(page, page, 1).is_empty() {
            // Cut off meanwhile.
            continue;
        }
        let held = file.core().hold(file.cache(), page, false);
        let change = held.ok().map(|held| held.word(page).redirty());
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

/// Writes back the pages from `first` to `last` that are DIRTY when it begins. `durable`: in one
/// durable transfer, if one is enough.
fn flush(
    file: &CachedFile,
    first: PageIndex,
    last: PageIndex,
    patience: Patience,
    durable: bool,
) -> Flushed {
    let writeback = &file.writeback;
    let mut all = Flushed::default();
    if !writeback.has_begun() {
        return all;
    }
    loop {
        let mut state = writeback.state();
        if state.flushes.is_empty() && !state.dirty.intersects(first, last) {
            return all;
        }
        let number = state.begin_flush();
        let skips = state.skips;
        let pages = state.dirty.take(first, last, usize::MAX);
        // What is left keeps its age.
        if state.dirty.is_empty() {
            state.dirty_since = None;
        }
        drop(state);
        let flushed = flush_pages(file, &pages, patience, durable && all.pages == 0);
        let skips_now = end_flush(file, number, &flushed, patience);
        all.durable = flushed.durable && (all.pages == 0 || all.durable && flushed.pages == 0);
        all.pages += flushed.pages;
        all.failure = all.failure.or(flushed.failure);
        // B3: what another flush had in hand, and left, is ours to write.
        if patience == Patience::Skip || skips == skips_now || all.failure.is_some() {
            return all;
        }
    }
}

/// Writes back some of what is DIRTY, for a writer or the flusher.
fn flush_some(file: &CachedFile) -> Flushed {
    let mut state = file.writeback.state();
    let at_most = (BATCH_BYTES >> file.core().page_shift) as usize;
    let number = state.begin_flush();
    let pages = state.dirty.take(0, LAST_PAGE, at_most);
    if state.dirty.is_empty() {
        state.dirty_since = None;
    }
    drop(state);
    let flushed = flush_pages(file, &pages, Patience::Skip, false);
    end_flush(file, number, &flushed, Patience::Skip);
    flushed
}

fn end_flush(file: &CachedFile, number: u64, flushed: &Flushed, patience: Patience) -> u64 {
    let writeback = &file.writeback;
    let mut state = writeback.state();
    state.flushes.retain(|&other| other != number);
    match flushed.failure {
        Some(failure) => {
            state.failure = Some(failure);
            state.back_off();
        }
        // After a failed sync, only a sync tells that it was worth it.
        None if flushed.pages > 0 && state.failure.is_none() => state.retry = None,
        None => {}
    }
    writeback.flush_ended.notify_all();
    if patience == Patience::Wait {
        // B3.
        while state.flushes.iter().any(|&other| other < number) {
            state = writeback.flush_ended.wait(state).expect("no panic under the lock");
        }
    }
    let skips = state.skips;
    drop(state);
    file.shared.flusher.progress.notify_all();
    skips
}

fn flush_pages(
    file: &CachedFile,
    pages: &[PageIndex],
    patience: Patience,
    durable: bool,
) -> Flushed {
    let mut flushed = Flushed::default();
    let batch_pages = (BATCH_BYTES >> file.core().page_shift) as usize;
    let mut claimed: Vec<(PageIndex, FrameIndex)> =
        Vec::with_capacity(pages.len().min(batch_pages));
    let mut busy = Vec::new();
    let mut leaves = Leaves::new(file);
    let mut batches = 0;
    let mut write = |claimed: &mut Vec<_>, last: bool| {
        if claimed.is_empty() {
            return;
        }
        batches += 1;
        let outcome = write_claimed(file, claimed, durable && last && batches == 1);
        flushed.pages += claimed.len();
        flushed.durable = outcome.durable && batches == 1;
        flushed.failure = flushed.failure.or(outcome.failure);
        claimed.clear();
    };
    for &page in pages {
        loop {
            match claim(file, &mut leaves, page) {
                Claim::Own(frame) => claimed.push((page, frame)),
                Claim::Clean => {}
                Claim::Busy(_) if patience == Patience::Skip => busy.push(page),
                Claim::Busy(seen) => {
                    // B4.
                    write(&mut claimed, false);
                    let held = leaves.hold(page, false);
                    if let Ok(word) = held.map(|held| held.word(page))
                        && let Some(armed) = word.arm(seen)
                    {
                        word.sleep(armed);
                    }
                    continue;
                }
            }
            break;
        }
        if claimed.len() == batch_pages {
            write(&mut claimed, false);
        }
    }
    write(&mut claimed, true);
    if !busy.is_empty() {
        let mut state = file.writeback.state();
        state.skips += 1;
        state.insert_dirty(busy.into_iter());
    }
    flushed
}

fn claim(file: &CachedFile, leaves: &mut Leaves<'_>, page: PageIndex) -> Claim {
    let frames = &file.cache().frames;
    let Ok(held) = leaves.hold(page, false) else { return Claim::Clean };
    let word = held.word(page);
    loop {
        let seen = word.load();
        match seen.state() {
            PageState::Hidden => return Claim::Busy(seen),
            PageState::Ready if seen.is_dirty() && seen.is_under_writeback() => {
                return Claim::Busy(seen);
            }
            PageState::Ready if seen.is_dirty() => {}
            _ => return Claim::Clean,
        }
        frames.meta(seen.frame()).pins.pin();
        // Pairs with the fence of `Frames::release`: either the word has changed here, or the pin
        // is seen there.
        fence(SeqCst);
        if let Some(change) = word.try_writeback(seen) {
            file.cache().ledger.note(change, file.core().page_bytes());
            return Claim::Own(seen.frame());
        }
        unpin(file, seen.frame());
    }
}

pub(crate) fn unpin(file: &CachedFile, frame: FrameIndex) {
    let frames = &file.cache().frames;
    if frames.meta(frame).pins.unpin() {
        frames.free(frame, Class::page(file.core().page_shift));
    }
}

/// A run of contiguous pages under write-back: which of the claimed ones, and up to where each of
/// its two transfers goes.
struct Run {
    claimed: std::ops::Range<usize>,
    start: u64,
    body_end: u64,
    end: u64,
    /// Up to where the back end acknowledged.
    written: u64,
    error: Option<io::Error>,
}

/// Writes claimed pages, in ascending order, to the back end, and ends their write-back.
fn write_claimed(file: &CachedFile, claimed: &[(PageIndex, FrameIndex)], durable: bool) -> Flushed {
    // B5.
    let size = file.core().size.load(Acquire);
    let mut runs = runs(file, claimed, size);
    let durable = durable && matches!(&*runs, [run] if run.body_end == run.end);
    let failed_syncs = file.writeback.failed_syncs();
    match file.backing.verify() {
        Ok(()) => transfer(file, claimed, &mut runs, durable),
        Err(error) => runs[0].error = Some(error),
    }
    let done = if durable { WritebackEnd::Stable } else { WritebackEnd::Unstable };
    let mut failure = None;
    let mut ends = Vec::with_capacity(claimed.len());
    for run in &mut runs {
        let pages = &claimed[run.claimed.clone()];
        for &(page, _) in pages {
            let is_written = run.written >= run.end.min(file.start_of(page + 1));
            ends.push(if is_written { done } else { WritebackEnd::Failed });
        }
        if run.written < run.end {
            let error = run.error.take().unwrap_or_else(|| io::ErrorKind::WriteZero.into());
            let met = Failure::new(run.written, run.end - run.written, &error);
            if durable {
                durable_failed(file, met.offset, met.len, met.errno);
            }
            if pages.len() == 1 || !retry_pages(file, pages, &mut ends[run.claimed.clone()], size) {
                failure = failure.or(Some(met));
            }
        }
    }
    end_writebacks(file, claimed, &mut ends, failed_syncs);
    Flushed {
        pages: claimed.len(),
        durable: durable && !ends.contains(&WritebackEnd::Unstable) && failure.is_none(),
        failure,
    }
}

fn runs(file: &CachedFile, claimed: &[(PageIndex, FrameIndex)], size: u64) -> Vec<Run> {
    let run_pages = (RUN_BYTES >> file.core().page_shift).max(1) as usize;
    let block_bytes = u64::from(file.backing.read_alignment().offset_bytes);
    let mut runs = Vec::new();
    let mut from = 0;
    while from < claimed.len() {
        let mut to = from + 1;
        while to < claimed.len() && to - from < run_pages && claimed[to].0 == claimed[to - 1].0 + 1
        {
            to += 1;
        }
        let start = file.start_of(claimed[from].0);
        let end = file.start_of(claimed[to - 1].0 + 1).min(size).max(start);
        let body_end = end - end % block_bytes;
        runs.push(Run { claimed: from..to, start, body_end, end, written: start, error: None });
        from = to;
    }
    runs
}

/// Carries out the transfers of all runs: the bodies at once, the tail after.
fn transfer(
    file: &CachedFile,
    claimed: &[(PageIndex, FrameIndex)],
    runs: &mut [Run],
    durable: bool,
) {
    let memory: Vec<Vec<Segment<'_>>> =
        runs.iter().map(|run| segments(file, &claimed[run.claimed.clone()], run)).collect();
    let mut batch: Vec<Transfer<'_>> = Vec::with_capacity(runs.len());
    for (run, segments) in runs.iter().zip(&memory) {
        if run.body_end > run.start {
            let body = &segments[..segments.len() - usize::from(run.end > run.body_end)];
            let mut transfer = Transfer::new(Direction::Write, run.start, body);
            transfer.durable = durable;
            batch.push(transfer);
        }
    }
    request::run(&*file.backing, &mut batch);
    let mut done = batch.into_iter();
    for run in runs.iter_mut().filter(|run| run.body_end > run.start) {
        let transfer = done.next().expect("one for each body");
        run.written = run.start + transfer.moved;
        run.error = transfer.error;
    }
    for (run, segments) in runs.iter_mut().zip(&memory) {
        if run.written == run.body_end && run.end > run.body_end {
            let tail = &segments[segments.len() - 1..];
            let mut batch = [Transfer::new(Direction::Write, run.body_end, tail)];
            request::run(&*file.backing, &mut batch);
            let [transfer] = batch;
            run.written += transfer.moved;
            run.error = transfer.error;
        }
    }
}

/// The memory of a run's body, frames that lie in a row as one segment, and of its tail, if it has
/// one, as the last segment.
fn segments<'a>(
    file: &'a CachedFile,
    claimed: &[(PageIndex, FrameIndex)],
    run: &Run,
) -> Vec<Segment<'a>> {
    let frames = &file.cache().frames;
    let mut parts: Vec<(*mut u8, usize)> = Vec::new();
    let mut tail = None;
    for &(page, frame) in claimed {
        let start = file.start_of(page);
        let end = file.start_of(page + 1);
        let bytes = frames.bytes(frame);
        let len = end.min(run.body_end).saturating_sub(start) as usize;
        if len > 0 {
            match parts.last_mut() {
                Some((at, before)) if at.wrapping_add(*before) == bytes => *before += len,
                _ => parts.push((bytes, len)),
            }
        }
        if run.end > run.body_end && (start..end).contains(&run.body_end) {
            let at = bytes.wrapping_add((run.body_end - start) as usize);
            tail = Some((at, (run.end - run.body_end) as usize));
        }
    }
    // SAFETY: within frames that are pinned until their write-back ends, and do not change (W2).
    parts.into_iter().chain(tail).map(|(at, len)| unsafe { Segment::new(at, len) }).collect()
}

/// After a transfer failed, what is left of it is tried page by page; whether all succeeded.
fn retry_pages(
    file: &CachedFile,
    pages: &[(PageIndex, FrameIndex)],
    ends: &mut [WritebackEnd],
    size: u64,
) -> bool {
    let mut failures = 0;
    for (page, end) in pages.chunks(1).zip(ends.iter_mut()) {
        if *end != WritebackEnd::Failed || failures >= FAILURES_MAX {
            continue;
        }
        let mut run = runs(file, page, size);
        if file.backing.verify().is_ok() {
            transfer(file, page, &mut run, false);
        }
        if run[0].written == run[0].end {
            *end = WritebackEnd::Unstable;
            failures = 0;
        } else {
            failures += 1;
        }
    }
    !ends.contains(&WritebackEnd::Failed)
}

fn end_writebacks(
    file: &CachedFile,
    claimed: &[(PageIndex, FrameIndex)],
    ends: &mut [WritebackEnd],
    failed_syncs: u64,
) {
    let mut state = file.writeback.state();
    // B7.
    let is_in_doubt = file.writeback.failed_syncs() != failed_syncs;
    for (&(page, frame), end) in claimed.iter().zip(&mut *ends) {
        if *end == WritebackEnd::Unstable && is_in_doubt {
            *end = WritebackEnd::Failed;
        } else if *end == WritebackEnd::Unstable {
            state.unsynced.insert(page);
        }
        if *end != WritebackEnd::Failed {
            // Before a sync that fails from here on commits the frame again.
            file.forget_frame(frame);
        }
    }
    drop(state);
    let mut leaves = Leaves::new(file);
    let mut failed = Vec::new();
    for (&(page, frame), &mut end) in claimed.iter().zip(ends) {
        let held = leaves.hold(page, false).expect("a page under write-back holds its leaf");
        let word = held.word(page);
        let change = word.end_writeback(end);
        file.cache().ledger.note(change, file.core().page_bytes());
        word.wake(change.sleepers());
        unpin(file, frame);
        if end == WritebackEnd::Failed {
            failed.push(page);
        }
    }
    if !failed.is_empty() {
        let mut state = file.writeback.state();
        // Who waits for this flush finds them, and tells of it or writes them.
        state.skips += 1;
        state.insert_dirty(failed.into_iter());
    }
}

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
        let flushed = flush_some(file);
        if let Some(failure) = flushed.failure
            && ledger.unwritten() + bytes > flusher.limits.dirty_bytes_max
        {
            return Err(failure.error(Op::Write));
        }
        let mut progress = flushed.pages > 0;
        if !progress {
            // Others have filled the cache.
            progress = flusher.files().iter().any(|other| {
                let flushed = flush_some(other);
                flushed.pages > 0 && flushed.failure.is_none()
            });
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
        if flushed.failure.is_none()
            && shared.cache.ledger.unstable() > 0
            && let Ok(one) = file.writeback.syncing.try_lock()
        {
            let _ = sync_locked(file, 0, 0, true, Guards::Try, &one);
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
        })
    }

    fn state(&self) -> MutexGuard<'_, FlusherState> {
        self.state.lock().expect("no panic under the lock")
    }

    fn add(self: &Arc<Self>, file: &CachedFile) {
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

    fn notice(&self, dirty_bytes: u64) {
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

    fn tell(&self) {
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
                // Something was dirtied since the last look, maybe after it.
                Duration::from_millis(1)
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
        let due = state.dirty_since.map(|since| since + self.limits.age_max / 2);
        let stray = Arc::strong_count(file) == 1;
        let owes = !state.unsynced.is_empty();
        drop(state);
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
            let _ = sync(file, 0, 0, true);
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
