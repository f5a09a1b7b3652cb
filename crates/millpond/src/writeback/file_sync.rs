//! Syncs: bytes written before a sync begins are durable after it has succeeded.
//!
//! ```text
//!   suspects become DIRTY -> write back the DIRTY pages (dirty.DS3) -> the backend's sync -> clear_unstable
//! ```
//!
//! The backend is always asked to sync: the engine does not know which bytes the backend was given
//! by other programs, by the kernel's own copy calls, or before the file was opened. The exception
//! is a *durable write* to a file in mode `back`, which promises only its own bytes: they are
//! durable if one durable transfer wrote all of them, and the backend accepted no other bytes of
//! these pages.
//!
//! The work of a sync is bounded by the pages that are DIRTY when it begins, and does not grow by
//! concurrent writes.
//!
//! Locks: `syncing` -> range guards (shared) -> the locks of the write-back state and the
//! generations. The holder of a range guard does not wait for `syncing`.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Instant;

use millpond_rangelock::Mode;

use crate::cache::table::page_set::PageSet;
use crate::error::{Error, Op, Result};
use crate::event::event;
use crate::inode::leaves::Leaves;
use crate::inode::{Blocking, CachedFile};
use crate::latency::LatencyKind;
use crate::sync::MutexExt;
use crate::units::PageIndex;
use crate::waits::WaitFor;
use crate::writeback::dirty_pages::notify_flusher;
use crate::writeback::state::WritebackFailure;
use crate::writeback::{BusyPages, flush};

/// The number of pages whose bit [`clear_unstable`] clears before it releases the lock. Untuned.
const CLEARED_TOGETHER: usize = 256;

/// Makes durable the bytes written to the pages from `first` to `last` before the call, and the
/// bytes of the file that the backend has from other sources.
pub(crate) fn sync(
    file: &CachedFile,
    first: PageIndex,
    last: PageIndex,
    data_only: bool,
) -> Result<()> {
    let begun = Instant::now();
    let one = file.writeback.syncing.acquire();
    let outcome = sync_locked(file, Some((first, last)), data_only, Blocking::Wait, &one);
    drop(one);
    if outcome.is_ok() {
        file.writeback.log.synced();
    }
    file.writeback.count_heap(file.cache());
    file.cache().counters.local().took(LatencyKind::Sync, begun);
    report(file, outcome)
}

/// Makes durable the bytes written to the pages from `first` to `last` before the call.
pub(crate) fn sync_written(file: &CachedFile, first: PageIndex, last: PageIndex) -> Result<()> {
    let flushed = flush(file, first, last, BusyPages::WaitAndLock, true);
    if let Some(failure) = flushed.failure {
        return report(file, Err(failure.error(Op::Sync)));
    }
    let is_durable = flushed.durable || flushed.pages == 0;
    if is_durable && file.writeback.generations.are_synced(first, last) {
        return Ok(());
    }
    sync(file, first, last, true)
}

/// Returns the outcome to the user, or an unreported error from before the file was opened.
fn report(file: &CachedFile, outcome: Result<()>) -> Result<()> {
    let generations = &file.writeback.generations;
    if outcome.is_err() {
        generations.mark_reported();
    }
    match generations.take_inherited() {
        Some(failure) if outcome.is_ok() => Err(Error::Lost { source: failure.source() }),
        _ => outcome,
    }
}

/// Makes the backend's bytes durable, to make room in the cache. Its errors stay unreported.
pub(crate) fn sync_in_background(file: &CachedFile, blocking: Blocking) {
    let syncing = &file.writeback.syncing;
    let one = match blocking {
        Blocking::Wait => Some(syncing.acquire()),
        Blocking::Try => syncing.try_lock().ok(),
    };
    if let Some(one) = one {
        let _ = sync_locked(file, None, true, blocking, &one);
        drop(one);
        file.writeback.count_heap(file.cache());
    }
}

/// [`file_sync`] for the holder of `syncing`. Without pages: only of the bytes that the backend has.
fn sync_locked(
    file: &CachedFile,
    pages: Option<(PageIndex, PageIndex)>,
    data_only: bool,
    blocking: Blocking,
    _one: &MutexGuard<'_, ()>,
) -> Result<()> {
    let writeback = &file.writeback;
    let generations = &writeback.generations;
    redirty(file, blocking);
    if let Some((first, last)) = pages {
        // Relaxed: a hint.
        writeback.is_written_for_sync.store(true, Relaxed);
        let flushed = flush(file, first, last, BusyPages::WaitAndLock, false);
        writeback.is_written_for_sync.store(false, Relaxed);
        if let Some(failure) = flushed.failure {
            return Err(failure.error(Op::Sync));
        }
    }
    let durable_op = generations.begin_sync().map_err(|failure| failure.error(Op::Sync))?;
    let synced = {
        let _waits = file.waits(WaitFor::Sync, 0, u64::MAX);
        file.backing.sync(data_only)
    };
    let failure = match synced {
        Ok(()) => {
            let ended = generations.end_durable(durable_op);
            let verdict = match blocking {
                Blocking::Wait => {
                    let _waits = file.waits(WaitFor::Syncs, 0, u64::MAX);
                    Some(generations.wait(ended))
                }
                Blocking::Try => generations.verdict(ended),
            };
            match verdict {
                Some(Ok(())) => return succeed(file),
                Some(Err(failure)) => failure,
                None => {
                    generations.abandon_sync();
                    return Err(Error::WouldBlock { op: Op::Sync, offset: 0, len: 0 });
                }
            }
        }
        Err(error) => {
            event!(error, inode = file.id.inode, %error, "a sync failed");
            let failure = WritebackFailure::new(0, 0, &error);
            // Before the epoch rises: bytes that the kernel accepted before it dropped its copy are
            // suspect, and later ones meet fresh pages (generations.G8).
            file.backing.drop_kernel_copy();
            generations.fail(durable_op, failure);
            failure
        }
    };
    let mut state = writeback.state();
    state.failure = Some(failure);
    state.back_off();
    drop(state);
    redirty(file, blocking);
    Err(failure.error(Op::Sync))
}

fn succeed(file: &CachedFile) -> Result<()> {
    let (covered, outcome) = file.writeback.generations.end_sync();
    clear_unstable(file, &covered);
    match outcome {
        Ok(()) => {
            let mut state = file.writeback.state();
            (state.failure, state.retry) = (None, None);
            Ok(())
        }
        Err(lost) => Err(Error::Lost { source: lost.source() }),
    }
}

/// Clears UNSTABLE on covered pages that were not written again. Releases the lock after each chunk
/// of pages, as readers need it too.
fn clear_unstable(file: &CachedFile, covered: &PageSet) {
    if !file.writeback.has_begun() {
        return;
    }
    let mut pages = Vec::new();
    covered.for_each(&mut |page| pages.push(page));
    clear_unstable_pages(file, &pages);
}

/// Removes the pages from `first` to `last` from every generation: a durable write has stored all of
/// their bytes, so no sync will cover them. Caller: an exclusive guard over them.
pub(crate) fn forget_durable(file: &CachedFile, first: PageIndex, last: PageIndex) {
    file.writeback.generations.forget(first, last);
    if !file.writeback.has_begun() {
        return;
    }
    let mut pages = Vec::new();
    file.core().for_each_page(file.cache(), first, last, &mut |_, page, word| {
        if word.load().is_unstable() {
            pages.push(page);
        }
    });
    clear_unstable_pages(file, &pages);
}

fn clear_unstable_pages(file: &CachedFile, pages: &[PageIndex]) {
    let mut to_requeue = Vec::new();
    for some in pages.chunks(CLEARED_TOGETHER) {
        let mut leaves = Leaves::new(file);
        to_requeue.clear();
        let mut generations = file.writeback.generations.lock();
        for &page in some {
            let Ok(held) = leaves.hold(page, false) else { continue };
            let word = held.word(page);
            if let Some(change) = generations.clear_unstable(page, word) {
                file.note(change);
                to_requeue.extend(file.cache().find_to_requeue(word, change));
            }
        }
        drop(generations);
        file.cache().requeue_evictable(&to_requeue);
    }
}

/// Makes all suspect pages DIRTY again (generations.G6). If the caller must not wait for a guard
/// and it is not free, the page is left to the next sync.
fn redirty(file: &CachedFile, blocking: Blocking) {
    let Some((pages, _)) = file.writeback.generations.suspects(PageIndex::FIRST, PageIndex::LAST)
    else {
        return;
    };
    for page in pages {
        // An operation that has found the page clean under its guard, and let the backend change
        // it, must not be overtaken by the write-back that follows.
        let range = file.pages(file.start_of(page), file.start_of(page + 1));
        let (guard, waited) = match blocking {
            Blocking::Wait => (None, Some(file.ranges.lock(range, Mode::Shared))),
            Blocking::Try => (file.ranges.try_lock_owned(range, Mode::Shared), None),
        };
        if guard.is_some() || waited.is_some() {
            redirty_page(file, page);
        }
    }
    after_redirty(file);
}

/// Makes the suspect pages from `first` to `last` DIRTY before their bytes are read past the cache,
/// or partly overwritten (generations.G6). Caller: a guard over them.
pub(crate) fn redirty_suspects(file: &CachedFile, first: PageIndex, last: PageIndex) {
    if let Some((pages, _)) = file.writeback.generations.suspects(first, last) {
        pages.into_iter().for_each(|page| redirty_page(file, page));
        after_redirty(file);
    }
}

/// Makes one suspect page DIRTY. The caller has a guard over the page.
fn redirty_page(file: &CachedFile, page: PageIndex) {
    let writeback = &file.writeback;
    // Relaxed: a reader that relies on it has a guard that conflicts with the caller's. `release`
    // has no guard, and relies on two locks instead (see there).
    writeback.begun.store(true, Relaxed);
    // Under one lock: a read of the page from the backend is recorded (generations.G5), and a
    // thread that does not find the page among the suspect ones finds it DIRTY, and in the set
    // before a sync or a bypass read looks there.
    let mut state = writeback.state();
    let mut generations = writeback.generations.lock();
    if !generations.take_suspect(page) {
        // It was truncated or read back since.
        return;
    }
    let held = file.core().hold(file.cache(), page, false);
    let change = held.ok().map(|held| held.word(page).redirty());
    let Some(change) = change.filter(|change| change.now.is_dirty()) else {
        generations.mark_lost();
        return;
    };
    file.note(change);
    if !change.was.is_dirty() {
        file.commit(std::iter::once((page, change.now.frame())), None);
    }
    state.dirty.insert(std::iter::once(page));
}

fn after_redirty(file: &CachedFile) {
    if !file.writeback.state().dirty.is_clean() {
        notify_flusher(file);
        // Acquire: the last handle is dropped before `release` checks for dirty pages. Argued: that
        // check and the one above are under one lock.
        if file.handles.load(Acquire) == 0
            && let Some(file) = file.this.upgrade()
        {
            file.shared.clone().flusher.adopt_orphan(file);
        }
    }
}
