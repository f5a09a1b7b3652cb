//! Throttling of writers: too many pages are dirty, or write-back keeps the frames that writers
//! need.
//!
//! This is the counterpart of Linux's `balance_dirty_pages`.
//!
//! - **TH1** The dirty limit of a file is [`ALPHA`] times the room that all files together leave
//!   below the total limit (dynamic thresholds: Choudhury and Hahne, 1998). So one file alone may
//!   fill four fifths of the limit, and n files at their limits 4/(4n + 1) each. Only these files
//!   can enlarge the room that is left. A file whose device accepts nothing keeps its dirty pages,
//!   and other files always have room.
//! - **TH2** A writer whose file is over its limit writes back pages of that file, or waits while
//!   another thread does, or returns their error. If the file has no dirty pages, there is nothing
//!   to wait for, and its writes go through.
//! - **TH3** Writers write back one at a time. If all of them did, their transfers would delay
//!   reads at the device until all are written. The token of a write-back expires after
//!   [`STALL_TIMEOUT`](crate::writeback::state::writer_token::STALL_TIMEOUT); afterwards it only excludes
//!   other writers of the same file.
//! - **TH4** The same thresholds hold for unevictable pages, of the maximum that write-back may
//!   keep: a file whose writes are accepted, but whose syncs hang, leaves frames to other files.
//! - **TH5** A writer flushes and syncs only its own file.
//! - **TH6** While a sync of the file writes its pages, writers of the file wait for those and
//!   write no others: the device would also accept the pages that were dirtied since, which would
//!   delay the sync.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::error::{Op, Result};
use crate::event::event;
use crate::inode::{Blocking, CachedFile};
use crate::units::PageIndex;
use crate::waits::WaitFor;
use crate::writeback::file_sync::sync_in_background;
use crate::writeback::{BusyPages, flush, flush_some};

/// How long a throttled writer waits without progress before its write goes through. Untuned.
const THROTTLED_MAX: Duration = Duration::from_secs(5);
/// The dirty limit of a file as a multiple of the free room (TH1): one file alone has four fifths.
const ALPHA: u64 = 4;
/// The part of memory that write-back may keep unevictable. An eighth is left for reads. Untuned.
const UNEVICTABLE_EIGHTHS_MAX: u64 = 7;
/// How long a write without a frame waits for the flusher, before it bypasses the cache. Untuned.
pub(crate) const WRITE_RECLAIM_WAIT_MAX: Duration = Duration::from_millis(20);
/// The same for a view, which cannot bypass the cache.
pub(crate) const VIEW_RECLAIM_WAIT_MAX: Duration = THROTTLED_MAX;

/// Whether a file that has `own` bytes may add `bytes`, if all files have `taken` of `max` bytes
/// (TH1).
fn is_under_threshold(own: u64, taken: u64, bytes: u64, max: u64) -> bool {
    let free = max.saturating_sub(taken);
    bytes <= free && own + bytes <= free.saturating_mul(ALPHA)
}

/// Whether there is room below the dirty limit.
fn has_room(file: &CachedFile, bytes: u64) -> bool {
    let (own, writeback_counts) =
        (file.writeback.counts.unwritten(), &file.cache().writeback_counts);
    let max = file.shared.flusher.limits.dirty_bytes_max();
    // writeback_counts.WC1.
    is_under_threshold(own, writeback_counts.unwritten_upper_bound(), bytes, max)
        || is_under_threshold(own, writeback_counts.unwritten(), bytes, max)
}

/// Whether there are evictable frames (TH4).
fn has_frames(file: &CachedFile, bytes: u64) -> bool {
    let max = file.cache().frames.limit_bytes() / 8 * UNEVICTABLE_EIGHTHS_MAX;
    let (own, writeback_counts) =
        (file.writeback.counts.unevictable(), &file.cache().writeback_counts);
    // writeback_counts.WC1.
    let has_some = is_under_threshold(own, writeback_counts.unevictable_upper_bound(), bytes, max)
        || is_under_threshold(own, writeback_counts.unevictable(), bytes, max);
    if !has_some {
        // Dirtied pages notify the flusher; bytes that are written through do not.
        file.shared.flusher.request_scan();
    }
    has_some
}

/// Whether a write of `bytes` may leave them in the cache. Otherwise it is written through.
///
/// # Errors
///
/// Errors of the file's own write-back, if it keeps the cache full.
pub(crate) fn throttle(file: &CachedFile, bytes: u64) -> Result<bool> {
    let flusher = &file.shared.flusher;
    if has_room(file, bytes) {
        return Ok(has_frames(file, bytes));
    }
    if bytes > flusher.limits.dirty_bytes_max() {
        return Ok(false);
    }
    let _waits = file.waits(WaitFor::Room, 0, bytes);
    let mut deadline = Instant::now() + THROTTLED_MAX;
    loop {
        let before = file.writeback.counts.unwritten();
        if before == 0 {
            return Ok(false);
        }
        let mut progress = false;
        if file.writeback.is_written_for_sync.load(Relaxed) {
            // TH6.
            flusher.await_progress();
        } else if let Some(_token) = flusher.writer_tokens.try_take(std::ptr::from_ref(file).addr())
        {
            let flushed = flush_some(file);
            if let Some(failure) = flushed.failure
                && !has_room(file, bytes)
            {
                return Err(failure.error(Op::Write));
            }
            progress = flushed.pages > 0;
        } else {
            flusher.await_progress();
        }
        if has_room(file, bytes) {
            return Ok(has_frames(file, bytes));
        }
        progress |= file.writeback.counts.unwritten() < before;
        if progress {
            deadline = Instant::now() + THROTTLED_MAX;
        } else if Instant::now() >= deadline {
            return Ok(false);
        } else {
            flusher.await_progress();
        }
    }
}

/// Makes room in a cache of which write-back keeps too much. Returns whether there may be room now.
/// Pages of other files are requested from the flusher, with a wait of at most `patience` (TH5).
pub(crate) fn reclaim(file: &CachedFile, patience: Duration) -> bool {
    let shared = &*file.shared;
    let (writeback_counts, flusher) = (&shared.cache.writeback_counts, &shared.flusher);
    let unevictable = writeback_counts.unevictable();
    if unevictable == 0 {
        return false;
    }
    if file.writeback.counts.unevictable() > 0 {
        let flushed = flush(file, PageIndex::FIRST, PageIndex::LAST, BusyPages::Skip, false);
        // Without waiting: the syncing thread may wait for guards, and the caller has one.
        if flushed.failure.is_none() && writeback_counts.unstable() > 0 {
            sync_in_background(file, Blocking::Try);
        }
    }
    event!(debug, unevictable, "write-back keeps frames that a write or a view needs");
    let _waits = file.waits(WaitFor::Room, 0, u64::MAX);
    let deadline = Instant::now() + patience;
    flusher.request_reclaim(writeback_counts.unevictable());
    while writeback_counts.unevictable() >= unevictable {
        if Instant::now() >= deadline {
            return false;
        }
        flusher.await_progress();
    }
    true
}
