//! What a file owes to its back end, for callers that do not care how it gets there: pages become
//! DIRTY, are written back, and are waited for; and what is left when the last handle goes.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::page::Word;
use crate::error::{Error, Op, Result};
use crate::flush::{BATCH_BYTES, BusyPages, flush};
use crate::inode::CachedFile;
use crate::units::PageIndex;

/// Notes pages whose words the caller has made DIRTY, under its guard (writeback.WB2).
pub(crate) fn record_dirty(file: &CachedFile, first: PageIndex, last: PageIndex) {
    let writeback = &file.writeback;
    writeback.begun.store(true, Relaxed);
    let mut state = writeback.state();
    state.dirty.insert(first.to(last));
    let (least, batch) = stream_pages(file);
    let due = state.stream.advance(first, last, least, batch);
    let heap_bytes = state.dirty.heap_bytes();
    let was_listed = std::mem::replace(&mut state.listed, true);
    drop(state);
    writeback.dirty_heap.set(file.cache(), heap_bytes);
    if due {
        file.shared.flusher.request_scan();
    }
    list_file(file, was_listed);
}

/// Pages of the file are DIRTY, and in its set.
pub(crate) fn notify_flusher(file: &CachedFile) {
    let was_listed = std::mem::replace(&mut file.writeback.state().listed, true);
    list_file(file, was_listed);
}

fn list_file(file: &CachedFile, was_listed: bool) {
    let flusher = &file.shared.flusher;
    if !was_listed {
        flusher.add(file);
    }
    // Too high by what is in reserve.
    flusher.note_dirty(file.cache().ledger.dirty_at_most());
}

/// How long a stream must be to be written back the first time, and then.
pub(crate) fn stream_pages(file: &CachedFile) -> (u64, u64) {
    let shift = file.core().page_shift;
    let least = file.shared.flusher.limits.dirty_bytes_max() / 8;
    (least >> shift, BATCH_BYTES >> shift)
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
    match flush(file, first, last, BusyPages::Wait, false).failure {
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

/// What syncs of the file would complain of, as it is closed.
pub(crate) fn close(file: &CachedFile) -> Result<()> {
    let written = write_back(file, PageIndex::FIRST, PageIndex::LAST, Op::Close);
    let generations = &file.writeback.generations;
    let outcome = match (generations.lost(), written, file.writeback.state().failure) {
        (Some(lost), ..) => Err(Error::Lost { source: lost.source() }),
        (None, Err(error), _) => Err(error),
        (None, Ok(()), Some(failure)) => Err(failure.error(Op::Close)),
        (None, Ok(()), None) => Ok(()),
    };
    if outcome.is_err() {
        generations.mark_reported();
    }
    outcome
}

/// Pages that are looked at one by one; of more, it is asked whether anything at all is owed.
/// Chosen, not measured.
const SCANNED_PAGES_MAX: u64 = 4096;

/// Whether the back end may lack bytes of the pages from `first` to `last`, or have lost them. Nobody
/// dirties them under the caller's guard; a page that was DIRTY before keeps its place in the table until
/// it is written.
pub(crate) fn needs_writeback(file: &CachedFile, first: PageIndex, last: PageIndex) -> bool {
    if file.writeback.generations.has_suspects(first, last) {
        return true;
    }
    if !file.writeback.has_begun() {
        return false;
    }
    if last - first >= SCANNED_PAGES_MAX {
        return file.has_dirty_pages();
    }
    let is_dirty = |word: Word| word.is_dirty() || word.is_under_writeback();
    file.core().any_word(&file.cache().frames, first, last, is_dirty)
}

impl CachedFile {
    /// Whether a page is DIRTY or may be under write-back.
    pub(crate) fn has_dirty_pages(&self) -> bool {
        !self.writeback.state().dirty.is_clean()
    }

    /// The last handle is gone: writes back what is DIRTY, and leaves it to the flusher if that
    /// fails. Else the file is closed when this returns, unless it is used elsewhere, or hangs: who closes it may go
    /// on to execute it, or to unmount its file system.
    pub(crate) fn release(self: Arc<Self>) {
        // A sync that fails beside this may have pages DIRTY in a moment, or had that just now, and is not
        // seen to have begun. If its failure is not found here, it finds that the last handle is gone; else
        // either of us finds the other under the lock of what is owed (`after_redirty`).
        // In this order: a failure that is gone again was noted by a sync that had pages DIRTY before.
        let a_sync_failed = self.writeback.generations.has_failed();
        let has_begun = self.writeback.has_begun();
        if !has_begun && !a_sync_failed {
            // A write that was to wait may have gone around the cache after all.
            if self.is_kept() || self.space.is_reserved() {
                self.rest();
            }
            return;
        }
        let fails = || write_back(&self, PageIndex::FIRST, PageIndex::LAST, Op::Close).is_err();
        // A flush that began later is under way still, if only with nothing: the second waits for that.
        let has_failed = has_begun && (fails() || self.has_dirty_pages() && fails());
        if has_failed || self.has_dirty_pages() {
            let shared = Arc::clone(&self.shared);
            shared.flusher.adopt_orphan(self);
        } else {
            self.rest();
            let (shared, share) = (Arc::clone(&self.shared), Arc::clone(&self.writeback.share));
            drop(self);
            // A thread that looked at it meanwhile has it in hand, and maybe the last reference.
            shared.flusher.await_released(&share);
        }
    }
}
