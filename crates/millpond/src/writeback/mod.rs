//! Flushes, which write dirty pages to the backend.
//!
//! A flush takes pages out of the dirty set and claims them. It writes contiguous pages as one
//! transfer, and several transfers at a time. The rules are in the modules of this folder and in
//! [`state`], whose records the inode holds.

pub(crate) mod state;

pub(crate) mod dirty_pages;

pub(crate) mod durability;

pub(crate) mod file_sync;

pub(crate) mod flusher;

mod scan;

pub(crate) mod throttle;

pub(crate) mod at_risk;

pub(crate) mod write_through;

use std::io;
use std::ops::Range;

use millpond_rangelock::Mode;

use crate::cache::table::page::{PageState, Word, WritebackEnd};
use crate::event::event;
use crate::inode::leaves::Leaves;
use crate::inode::space;
use crate::inode::{Blocking, CachedFile};
use crate::io::batch;
use crate::io::segment::Segment;
use crate::io::transfer::{Direction, Transfer};
use crate::units::{FrameIndex, PageIndex, kernel_page_bytes};
use crate::writeback::state::WritebackFailure;
use crate::writeback::state::dirty::FlushNumber;
use crate::writeback::state::generations::{Copy, FailureEpoch};

pub(crate) use crate::writeback::at_risk::{has_pages_at_risk, write_back_at_risk};
pub(crate) use crate::writeback::dirty_pages::{
    await_ends, close, needs_writeback, record_dirty, write_back,
};
pub(crate) use crate::writeback::durability::{
    Durability, DurableTransfer, conclude, report_foreign_error,
};
pub(crate) use crate::writeback::file_sync::{
    forget_durable, redirty_suspects, sync, sync_written,
};
pub(crate) use crate::writeback::throttle::{
    VIEW_RECLAIM_WAIT_MAX, WRITE_RECLAIM_WAIT_MAX, reclaim, throttle,
};

/// The bytes that one flush has in flight at once. Untuned.
pub(crate) const BATCH_BYTES: u64 = 16 << 20;
/// Extents that are written together at most: a writer over the dirty limit gets its room only when
/// all of them have been written. Untuned.
const BATCH_RUNS: usize = 256;
/// Pages that fail in a row before the rest of their transfer counts as failed. Untuned.
const FAILURES_MAX: usize = 8;
/// How often a flush may find a page HIDDEN before it locks out writers, if it may take guards.
/// Untuned.
const HIDDEN_MAX: u32 = 8;

/// How a flush treats pages that another thread hides or writes back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BusyPages {
    Skip,
    Wait,
    /// Waits. The caller has no guard: writers that hide a page again and again are locked out.
    WaitAndLock,
}

enum PageClaim {
    Own(FrameIndex),
    /// HIDDEN, or under write-back. A flush that began later may be writing bytes that were DIRTY
    /// when the caller took the page out of the set (dirty.DS3).
    Busy(Word),
    Clean,
}

/// The result of a flush.
#[derive(Default)]
pub(crate) struct Flushed {
    pub(crate) pages: usize,
    pub(crate) failure: Option<WritebackFailure>,
    /// All pages were written by one durable transfer, or there were none.
    pub(crate) durable: bool,
    /// The end of the last extent of which a transfer failed.
    failed_end: u64,
}

impl Flushed {
    fn add(&mut self, other: Flushed) {
        self.durable = match (self.pages, other.pages) {
            (_, 0) => self.durable,
            (0, _) => other.durable,
            _ => false,
        };
        self.pages += other.pages;
        self.failed_end = self.failed_end.max(other.failed_end);
        self.failure = self.failure.or(other.failure);
    }
}

/// Writes back the pages from `first` to `last` that are DIRTY when it begins (dirty.DS3).
/// `durable`: uses a durable transfer if one transfer is enough.
pub(crate) fn flush(
    file: &CachedFile,
    first: PageIndex,
    last: PageIndex,
    busy_pages: BusyPages,
    durable: bool,
) -> Flushed {
    let flushed = flush_range(file, first, last, busy_pages, durable);
    after_failure(file, &flushed, last == PageIndex::LAST);
    flushed
}

/// A failed write-back may have freed the blocks of other dirty pages (space.SP3). They are written
/// back at once, while blocks are free. `is_rest`: this flush has written the pages beyond the end
/// already.
fn after_failure(file: &CachedFile, flushed: &Flushed, is_rest: bool) {
    if flushed.failed_end == 0 {
        return;
    }
    if let Some(end) = space::write_back_failed(file, flushed.failed_end)
        && !is_rest
    {
        // Failures are recorded in the state. Skip: the caller may have hidden pages in this range.
        flush_range(file, file.page_of(end), PageIndex::LAST, BusyPages::Skip, false);
    }
}

fn flush_range(
    file: &CachedFile,
    first: PageIndex,
    last: PageIndex,
    busy_pages: BusyPages,
    durable: bool,
) -> Flushed {
    let writeback = &file.writeback;
    if !writeback.has_begun() {
        return Flushed::default();
    }
    let mut state = writeback.state();
    if busy_pages == BusyPages::Skip {
        let (number, pages) = state.dirty.begin(first..=last);
        drop(state);
        return Flush { file, number, busy_pages, durable }.run(&pages).0;
    }
    let Some((number, pages)) = state.dirty.begin_waiting(first..=last) else {
        return Flushed::default();
    };
    drop(state);
    let (mut all, mut hidden) = Flush { file, number, busy_pages, durable }.run(&pages);
    let mut state = writeback.state();
    while state.dirty.is_earlier_active(number) {
        state = writeback.flush_ended.wait(state).expect("no panic under the lock");
    }
    let put_back = state.dirty.take_put_back(number);
    drop(state);
    if let Some((number, pages)) = put_back {
        let durable = durable && all.pages == 0;
        let (flushed, more) = Flush { file, number, busy_pages, durable }.run(&pages);
        all.add(flushed);
        hidden.extend(more);
    }
    for page in hidden {
        // Guards are granted in order, and the page cannot be hidden under this one. It is taken
        // only after the flush has ended, as the holder of a conflicting guard may wait for the
        // flush.
        let range = file.pages(file.start_of(page), file.start_of(page + 1));
        let _guard = file.ranges.lock(range, Mode::Shared);
        all.add(flush_range(file, page, page, BusyPages::Wait, false));
    }
    all
}

/// Writes back a limited number of dirty pages, for a writer or the flusher.
pub(crate) fn flush_some(file: &CachedFile) -> Flushed {
    let at_most = (BATCH_BYTES >> file.core().page_shift) as usize;
    let (number, pages) = file.writeback.state().dirty.begin_some(at_most);
    let flushed = Flush { file, number, busy_pages: BusyPages::Skip, durable: false }.run(&pages).0;
    after_failure(file, &flushed, false);
    flushed
}

/// A flush that has taken its pages.
struct Flush<'a> {
    file: &'a CachedFile,
    number: FlushNumber,
    busy_pages: BusyPages,
    durable: bool,
}

impl Flush<'_> {
    /// Writes the pages and ends the flush. Also returns the pages that were put back because they
    /// were hidden again and again.
    fn run(self, pages: &[PageIndex]) -> (Flushed, Vec<PageIndex>) {
        let (flushed, hidden) = self.write(pages);
        let file = self.file;
        let mut state = file.writeback.state();
        // Waiters check their condition under the same lock before they sleep.
        let is_awaited = state.dirty.end(self.number);
        match flushed.failure {
            Some(failure) => {
                state.failure = Some(failure);
                state.back_off();
            }
            // After a failed sync, only a successful sync ends the retry delay.
            None if flushed.pages > 0 && state.failure.is_none() => state.retry = None,
            None => {}
        }
        let heap_bytes = state.dirty.heap_bytes();
        let has_dirty_pages = state.dirty.since().is_some();
        drop(state);
        file.writeback.dirty_heap.set(file.cache(), heap_bytes);
        if is_awaited {
            file.writeback.flush_ended.notify_all();
        }
        let flusher = &file.shared.flusher;
        flusher.notify_progress();
        if has_dirty_pages {
            // A worker that scanned the file while this flush had its pages found none that are due.
            flusher.note_dirty(file.cache().writeback_counts.dirty_upper_bound());
        }
        (flushed, hidden)
    }

    fn write(&self, pages: &[PageIndex]) -> (Flushed, Vec<PageIndex>) {
        let file = self.file;
        let mut flushed = Flushed::default();
        let batch_pages = (BATCH_BYTES >> file.core().page_shift) as usize;
        let mut claimed: Vec<(PageIndex, FrameIndex)> =
            Vec::with_capacity(pages.len().min(batch_pages));
        let (mut busy, mut hidden) = (Vec::new(), Vec::new());
        let mut leaves = Leaves::new(file);
        let (mut batches, mut runs) = (0, 0);
        let mut write = |claimed: &mut Vec<_>, last: bool| {
            if !claimed.is_empty() {
                batches += 1;
                flushed.add(self.write_claimed(claimed, self.durable && last && batches == 1));
                claimed.clear();
            }
        };
        for &page in pages {
            let mut times_hidden = 0;
            loop {
                match claim(file, &mut leaves, page) {
                    PageClaim::Own(frame) => {
                        let follows = claimed.last().is_some_and(|last| last.0 + 1 == page);
                        runs += usize::from(!follows);
                        claimed.push((page, frame));
                    }
                    PageClaim::Clean => {}
                    PageClaim::Busy(seen) if self.busy_pages == BusyPages::Skip => {
                        if seen.is_dirty() || !seen.is_ready() {
                            busy.push(page);
                        }
                    }
                    PageClaim::Busy(seen) => {
                        // state.WB4.
                        write(&mut claimed, false);
                        runs = 0;
                        times_hidden += u32::from(!seen.is_ready());
                        if times_hidden > HIDDEN_MAX && self.busy_pages == BusyPages::WaitAndLock {
                            hidden.push(page);
                            break;
                        }
                        let held = leaves.hold(page, false);
                        if let Ok(word) = held.map(|held| held.word(page))
                            && let Some(armed) = word.set_waiters(seen)
                        {
                            word.sleep(armed);
                        }
                        continue;
                    }
                }
                break;
            }
            if claimed.len() == batch_pages || runs == BATCH_RUNS {
                write(&mut claimed, false);
                runs = 0;
            }
        }
        write(&mut claimed, true);
        busy.extend_from_slice(&hidden);
        if !busy.is_empty() {
            file.writeback.state().dirty.put_back(self.number, &busy);
        }
        (flushed, hidden)
    }

    /// Writes claimed pages, in ascending order, to the backend, and ends their write-back.
    fn write_claimed(&self, claimed: &[(PageIndex, FrameIndex)], durable: bool) -> Flushed {
        let file = self.file;
        // state.WB5.
        let size = file.core().size.get();
        let mut runs = runs(file, claimed, size);
        // Of untorn blocks, each would be made durable by itself.
        let at_most = file.untorn.map_or(u64::MAX, u64::from);
        let is_one = |run: &WriteRun| run.body_end == run.end && run.end - run.start <= at_most;
        let durable = durable && matches!(&*runs, [run] if is_one(run));
        let generations = &file.writeback.generations;
        let durable_transfer = durable.then(|| DurableTransfer::begin(file, runs[0].end));
        let epoch =
            durable_transfer.as_ref().map_or_else(|| generations.epoch(), DurableTransfer::epoch);
        match file.backing.verify() {
            Ok(()) => transfer(file, claimed, &mut runs, durable),
            Err(error) => runs[0].error = Some(error),
        }
        let mut failure = None;
        let mut done = WritebackEnd::Unstable;
        if let Some(durable_transfer) = durable_transfer {
            match self.conclude(durable_transfer, claimed, &runs[0]) {
                Durability::Lost(met) => {
                    // None of its bytes count as written.
                    runs[0].written = runs[0].start;
                    failure = Some(met);
                }
                _ => done = WritebackEnd::Stable,
            }
        }
        let mut ends = Vec::with_capacity(claimed.len());
        let mut failed_end = 0;
        for run in &mut runs {
            if run.written < run.end {
                failed_end = failed_end.max(run.end);
            }
            let pages = &claimed[run.claimed.clone()];
            for &(page, _) in pages {
                let is_written = run.written >= run.end.min(file.start_of(page + 1));
                ends.push(if is_written { done } else { WritebackEnd::Failed });
            }
            if run.written < run.end && failure.is_none() {
                let met = run.failure();
                report_foreign_error(file, met);
                let is_done = pages.len() > 1
                    && retry_pages(file, pages, &mut ends[run.claimed.clone()], size);
                failure = (!is_done).then_some(met);
            }
        }
        let suspicion = self.end_writebacks(claimed, &mut ends, epoch);
        Flushed {
            pages: claimed.len(),
            durable: durable && ends.iter().all(|&end| end == WritebackEnd::Stable),
            failure: failure.or(suspicion),
            failed_end,
        }
    }

    /// Concludes a durable transfer of all claimed pages.
    fn conclude(
        &self,
        transfer: DurableTransfer,
        claimed: &[(PageIndex, FrameIndex)],
        run: &WriteRun,
    ) -> Durability {
        let error = (run.written < run.end).then(|| run.failure());
        conclude(self.file, transfer, run.written, error, Blocking::Wait, || {
            let mut again = [WriteRun::new(0..claimed.len(), run.start, run.body_end, run.end)];
            self::transfer(self.file, claimed, &mut again, false);
            again[0].written > run.start
        })
    }

    /// Records the outcome for the pages. If written bytes may be lost nevertheless, their pages
    /// become DIRTY again, and the error is returned.
    fn end_writebacks(
        &self,
        claimed: &[(PageIndex, FrameIndex)],
        ends: &mut [WritebackEnd],
        epoch: FailureEpoch,
    ) -> Option<WritebackFailure> {
        let file = self.file;
        let mut generations = file.writeback.generations.lock();
        let suspicion = generations.suspicion(epoch);
        for (&(page, frame), end) in claimed.iter().zip(&mut *ends) {
            match *end {
                WritebackEnd::Failed => continue,
                // generations.G1: the bytes may be lost, and the page is their copy.
                WritebackEnd::Unstable if suspicion.is_some() => {
                    *end = WritebackEnd::Failed;
                    continue;
                }
                WritebackEnd::Unstable => {
                    generations.record_written([page], Copy::Kept, epoch);
                }
                // The transfer has succeeded (generations.G3), whichever operation has failed
                // since.
                WritebackEnd::Stable => {}
            }
            // Before a sync that fails from now on commits the frame again.
            file.forget_frame(frame);
        }
        let heap_bytes = generations.heap_bytes();
        drop(generations);
        file.writeback.count_unsynced(file.cache(), self.number, heap_bytes);
        let mut leaves = Leaves::new(file);
        let (mut failed, mut to_requeue) = (Vec::new(), Vec::new());
        // Waiters are woken at the end of the batch, so that they do not wait for this flush in
        // between.
        let batch = batch::open();
        for (&(page, frame), &mut end) in claimed.iter().zip(ends) {
            let held = leaves.hold(page, false).expect("a page under write-back holds its leaf");
            let word = held.word(page);
            let change = word.end_writeback(end);
            file.note(change);
            to_requeue.extend(file.cache().find_to_requeue(word, change));
            word.wake(change.sleepers());
            file.unpin(frame);
            if end == WritebackEnd::Failed {
                failed.push(page);
            }
        }
        // Before waiters are woken: they may look for evictable pages.
        file.cache().requeue_evictable(&to_requeue);
        drop(batch);
        if !failed.is_empty() {
            // A waiter for this flush finds the pages in the set, and reports the error or writes
            // them.
            file.writeback.state().dirty.put_back(self.number, &failed);
        }
        suspicion
    }
}

fn claim(file: &CachedFile, leaves: &mut Leaves<'_>, page: PageIndex) -> PageClaim {
    let frames = &file.cache().frames;
    let Ok(held) = leaves.hold(page, false) else { return PageClaim::Clean };
    let word = held.word(page);
    loop {
        let seen = word.load();
        match seen.state() {
            PageState::Hidden => return PageClaim::Busy(seen),
            PageState::Ready if seen.is_under_writeback() => return PageClaim::Busy(seen),
            PageState::Ready if seen.is_dirty() => {}
            _ => return PageClaim::Clean,
        }
        frames.meta(seen.frame()).pins.pin();
        if let Some(change) = word.try_writeback(seen) {
            file.note(change);
            return PageClaim::Own(seen.frame());
        }
        file.unpin(seen.frame());
    }
}

/// An extent of contiguous claimed pages under write-back, and the ends of its two transfers: the
/// body and the tail.
struct WriteRun {
    claimed: Range<usize>,
    start: u64,
    body_end: u64,
    end: u64,
    /// The end of the bytes that the backend has accepted.
    written: u64,
    error: Option<io::Error>,
}

impl WriteRun {
    fn new(claimed: Range<usize>, start: u64, body_end: u64, end: u64) -> WriteRun {
        WriteRun { claimed, start, body_end, end, written: start, error: None }
    }

    /// The error because of which not all bytes were written.
    fn failure(&self) -> WritebackFailure {
        let unknown = io::Error::from(io::ErrorKind::WriteZero);
        let error = self.error.as_ref().unwrap_or(&unknown);
        let (offset, len) = (self.written, self.end - self.written);
        event!(warn, offset, len, %error, "write-back failed");
        WritebackFailure::new(offset, len, error)
    }
}

fn runs(file: &CachedFile, claimed: &[(PageIndex, FrameIndex)], size: u64) -> Vec<WriteRun> {
    let run_pages = (file.backing.transfer_bytes() >> file.core().page_shift).max(1) as usize;
    let block_bytes = match file.backing.alignment(false).offset_bytes {
        1 => 1,
        // Direct I/O and buffered I/O must not counts a page of the kernel, and a tail lies within
        // one page of the file. An open with direct backing has chosen file pages that are at least
        // as large.
        bytes => u64::from(bytes).max(kernel_page_bytes()).min(file.core().page_bytes() as u64),
    };
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
        runs.push(WriteRun::new(from..to, start, body_end, end));
        from = to;
    }
    runs
}

/// Performs the transfers of all extents: the bodies concurrently, then the tail.
fn transfer(
    file: &CachedFile,
    claimed: &[(PageIndex, FrameIndex)],
    runs: &mut [WriteRun],
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
    if batch.len() > 1 {
        let bodies = runs.iter().filter(|run| run.body_end > run.start);
        space::reach(file, bodies.map(|run| run.body_end).max().expect("several"));
    }
    file.carry_out(&mut batch);
    let mut done = batch.into_iter();
    for run in runs.iter_mut().filter(|run| run.body_end > run.start) {
        let transfer = done.next().expect("one for each body");
        run.written = run.start + transfer.moved;
        run.error = transfer.error;
    }
    for (run, segments) in runs.iter_mut().zip(&memory) {
        if run.written == run.body_end && run.end > run.body_end {
            let tail = &segments[segments.len() - 1..];
            let transfer = Transfer::new(Direction::Write, run.body_end, tail);
            let transfer = file.carry_out_one(transfer);
            run.written += transfer.moved;
            run.error = transfer.error;
        }
    }
}

/// The memory of an extent. Adjacent frames of the body form one segment. The last segment is the
/// tail, if there is one.
fn segments<'a>(
    file: &'a CachedFile,
    claimed: &[(PageIndex, FrameIndex)],
    run: &WriteRun,
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
    // SAFETY: the memory lies within frames that are pinned until their write-back ends, and whose
    // bytes do not change (page.W2).
    parts.into_iter().chain(tail).map(|(at, len)| unsafe { Segment::new(at, len) }).collect()
}

/// Repeats the unwritten part of a failed transfer page by page. Returns whether all pages were
/// written.
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
