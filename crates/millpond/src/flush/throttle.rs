//! Writers that have to wait: there is too much in the cache to be written back, or it keeps the
//! frames that they need.
//!
//! - **TH1** A file may owe as much as [`ALPHA`] times what all files together leave free of the limit
//!   (dynamic thresholds: Choudhury and Hahne, 1998). So one alone has four fifths of it, and n that owe
//!   all they may have 4/(4n + 1) each; what is left grows by nobody's effort but theirs. A file whose
//!   device takes nothing holds what it had, and there is always room beside it.
//! - **TH2** A writer that finds its file over its share waits for that file's pages, by writing them back,
//!   or while somebody else does; or gets their error. A file that owes nothing has nobody to wait for:
//!   its writes go through.
//! - **TH3** Writers take turns at writing back; were all of them at it, what they have in flight together
//!   would keep reads waiting at the device for as long as it takes to write it. A turn that lasts for
//!   longer than [`STALL_TIMEOUT`](crate::writeback::writer_token::STALL_TIMEOUT) counts for its own file only, of whose writers one at a time has one.
//! - **TH4** The same shares hold for what can't be evicted, of all that write-back may ever keep: a file
//!   whose writes are taken, but whose syncs hang, leaves frames to the others.
//! - **TH5** Nobody flushes or syncs another file than its own.
//! - **TH6** While a sync of the file writes its pages, its writers wait for those, and write nothing beside:
//!   the device would take what they have dirtied since as well, and the sync so much longer.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::error::{Op, Result};
use crate::event::event;
use crate::flush::sync::sync_in_background;
use crate::flush::{BusyPages, flush, flush_some};
use crate::inode::{Blocking, CachedFile};
use crate::units::PageIndex;
use crate::waits::WaitFor;

/// How long a writer over the limit waits without any progress before its write goes through.
/// Chosen, not measured.
const THROTTLED_MAX: Duration = Duration::from_secs(5);
/// What a file may owe, in parts of what is free (TH1). Chosen: one file alone has four fifths of
/// it.
const ALPHA: u64 = 4;
/// What write-back may keep, of all memory: an eighth is left for what is read. Chosen, not
/// measured.
const UNEVICTABLE_EIGHTHS_MAX: u64 = 7;
/// How long a write that finds no frame waits for the flusher: there is the way around the cache.
/// Chosen, not measured.
pub(crate) const WRITE_RECLAIM_WAIT_MAX: Duration = Duration::from_millis(20);
/// For a view, there is not.
pub(crate) const VIEW_RECLAIM_WAIT_MAX: Duration = THROTTLED_MAX;

/// Whether a file that has `own` may take `bytes` more of `max`, of which all have `taken` (TH1).
fn is_under_threshold(own: u64, taken: u64, bytes: u64, max: u64) -> bool {
    let free = max.saturating_sub(taken);
    bytes <= free && own + bytes <= free.saturating_mul(ALPHA)
}

/// Whether there is room below the dirty limit.
fn has_room(file: &CachedFile, bytes: u64) -> bool {
    let (own, ledger) = (file.writeback.share.unwritten(), &file.cache().ledger);
    let max = file.shared.flusher.limits.dirty_bytes_max();
    // ledger.LG1.
    is_under_threshold(own, ledger.unwritten_at_most(), bytes, max)
        || is_under_threshold(own, ledger.unwritten(), bytes, max)
}

/// Whether there are frames (TH4).
fn has_frames(file: &CachedFile, bytes: u64) -> bool {
    let max = file.cache().frames.limit_bytes() / 8 * UNEVICTABLE_EIGHTHS_MAX;
    let (own, ledger) = (file.writeback.share.kept(), &file.cache().ledger);
    // ledger.LG1.
    let has_some = is_under_threshold(own, ledger.kept_at_most(), bytes, max)
        || is_under_threshold(own, ledger.kept(), bytes, max);
    if !has_some {
        // What is dirtied tells the flusher, and what goes through does not.
        file.shared.flusher.request_scan();
    }
    has_some
}

/// Whether a write of `bytes` may leave them in the cache; else it goes through.
///
/// # Errors
///
/// Of the file's own write-back, where it keeps the cache full.
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
        let before = file.writeback.share.unwritten();
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
        progress |= file.writeback.share.unwritten() < before;
        if progress {
            deadline = Instant::now() + THROTTLED_MAX;
        } else if Instant::now() >= deadline {
            return Ok(false);
        } else {
            flusher.await_progress();
        }
    }
}

/// Makes room in a cache of which write-back keeps too much; whether there may be some now. What other
/// files keep, the flusher is asked for, and waited for no longer than `patience` (TH5).
pub(crate) fn reclaim(file: &CachedFile, patience: Duration) -> bool {
    let shared = &*file.shared;
    let (ledger, flusher) = (&shared.cache.ledger, &shared.flusher);
    let kept = ledger.kept();
    if kept == 0 {
        return false;
    }
    if file.writeback.share.kept() > 0 {
        let flushed = flush(file, PageIndex::FIRST, PageIndex::LAST, BusyPages::Skip, false);
        // Not waited for: the syncing thread may wait for guards, and the caller has one.
        if flushed.failure.is_none() && ledger.unstable() > 0 {
            sync_in_background(file, Blocking::Try);
        }
    }
    event!(debug, kept, "write-back keeps what a write or a view needs");
    let _waits = file.waits(WaitFor::Room, 0, u64::MAX);
    let deadline = Instant::now() + patience;
    flusher.request_reclaim(ledger.kept());
    while ledger.kept() >= kept {
        if Instant::now() >= deadline {
            return false;
        }
        flusher.await_progress();
    }
    true
}
