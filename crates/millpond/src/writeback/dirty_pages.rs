//! Dirty-page bookkeeping of a file: record dirty pages, write back, wait, and the last close.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use millpond_rangelock::{ByteRange, Mode};

use crate::cache::table::page::Word;
use crate::error::{Error, Op, Result};
use crate::inode::CachedFile;
use crate::units::PageIndex;
use crate::waits::WaitFor;
use crate::writeback::state::writer_token::STALL_TIMEOUT;
use crate::writeback::{BATCH_BYTES, BusyPages, flush};

/// Records pages whose words the caller has made DIRTY, under its guard (state.WB2).
pub(crate) fn record_dirty(file: &CachedFile, first: PageIndex, last: PageIndex) {
    let writeback = &file.writeback;
    writeback.begun.store(true, Relaxed);
    let mut state = writeback.state();
    state.dirty.insert(first.to(last));
    let (least, batch) = stream_pages(file);
    let due = state.stream.advance(first, last, least, batch);
    let heap_bytes = state.dirty.heap_bytes();
    let was_listed = state.mark_listed(&file.shared.flusher);
    drop(state);
    writeback.dirty_heap.set(file.cache(), heap_bytes);
    if due {
        file.shared.flusher.request_scan();
    }
    list_file(file, was_listed);
}

/// Lists the file at the flusher. Some of its pages are DIRTY and in its set.
pub(crate) fn notify_flusher(file: &CachedFile) {
    let was_listed = file.writeback.state().mark_listed(&file.shared.flusher);
    list_file(file, was_listed);
}

fn list_file(file: &CachedFile, was_listed: bool) {
    let flusher = &file.shared.flusher;
    if !was_listed {
        flusher.add(file);
    }
    // The approximate count is too high by at most the batches of all threads.
    flusher.note_dirty(file.cache().writeback_counts.dirty_upper_bound());
}

/// The minimum number of pages for the first early write-back of a stream, and for the following
/// ones.
pub(crate) fn stream_pages(file: &CachedFile) -> (u64, u64) {
    let shift = file.core().page_shift;
    let least = file.shared.flusher.limits.dirty_bytes_max() / 8;
    (least >> shift, BATCH_BYTES >> shift)
}

/// Writes back the pages from `first` to `last` that are DIRTY now, and waits until the backend has
/// acknowledged them. The caller may hold any guard, and has not HIDDEN a page of the range.
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
            if let Some(armed) = word.set_waiters(seen) {
                word.sleep(armed);
            }
        }
    });
}

/// Writes back all dirty pages and returns the errors that a sync would return at the close of the
/// file.
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

/// Ranges of up to this many pages are scanned. For longer ones the whole file is checked. Untuned.
const SCANNED_PAGES_MAX: u64 = 4096;

/// Whether the backend may lack bytes of the pages from `first` to `last`, or have lost them. The
/// caller's guard keeps them from becoming dirty. A page that was DIRTY before stays in the table
/// until it is written.
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

    /// Called after the last handle was closed: writes back dirty pages, and gives the file to the
    /// flusher if that fails. Otherwise the file is closed when this returns (inode.CF1), unless it
    /// is in use elsewhere or stalled. So the caller may go on to execute the file, or to unmount its file
    /// system.
    pub(crate) fn release(self: Arc<Self>) {
        // A concurrent sync may fail and make pages DIRTY soon, or may just have done so without
        // `begun` being visible here. If its failure is not visible here, the sync finds that the
        // last handle is gone; otherwise one of the two threads finds the other under the lock of
        // the write-back state (`after_redirty`). The order of the two reads matters: a failure
        // that is no longer visible was recorded by a sync that had made pages DIRTY before.
        let a_sync_failed = self.writeback.generations.has_failed();
        let has_begun = self.writeback.has_begun();
        if !has_begun && !a_sync_failed {
            // A write that was meant for write-back may have bypassed the cache.
            if self.is_kept() || self.space.is_reserved() {
                self.release_reservations();
            } else if Arc::strong_count(&self) > 1 {
                self.await_reads();
            }
            return;
        }
        let fails = || write_back(&self, PageIndex::FIRST, PageIndex::LAST, Op::Close).is_err();
        // A later flush may still be active, possibly with no pages. The second call waits for it.
        let has_failed = has_begun && (fails() || self.has_dirty_pages() && fails());
        if has_failed || self.has_dirty_pages() {
            let shared = Arc::clone(&self.shared);
            shared.flusher.adopt_orphan(self);
        } else {
            // It waits for background reads, too (inode.CF1).
            self.release_reservations();
            let (shared, counts) = (Arc::clone(&self.shared), Arc::clone(&self.writeback.counts));
            drop(self);
            // A thread that scanned the list may have the file in progress, and hold the last
            // reference.
            shared.flusher.await_released(&counts);
        }
    }

    /// Waits until the background reads of the file have dropped their references to it
    /// (inode.CF1), but not for a stalled device.
    fn await_reads(&self) {
        let _waits = self.waits(WaitFor::Range, 0, u64::MAX);
        drop(self.ranges.lock_timeout(ByteRange::ALL, Mode::Exclusive, STALL_TIMEOUT));
    }
}
