//! Write-back: how what is DIRTY reaches the back end, and what a sync promises.
//!
//! ```text
//!   write --> DIRTY --- claim ---> WRITEBACK --- acknowledged ---> UNSTABLE --- sync ---> clean
//!               ^                      |                              |
//!               +------- failed -------+------- the sync failed ------+
//! ```
//!
//! A thread that writes back (the flusher, a sync, a writer over the dirty limit) takes pages out
//! of the file's set ([`dirty`]), claims each by its word, and in_progress contiguous ones to the back
//! end as one vectored transfer, several at once ([`flush`](mod@crate::flush)). It takes no range
//! guard. What the back end took is in one of three [`generations`] until a
//! [`sync`](mod@crate::flush::sync) has covered it.
//!
//! - **WB1** A page that is EMPTY, as far as it lies below the size, is in the back end: a page
//!   leaves the cache only when it is clean (page.W4), and a write that leaves a gap behind the old end
//!   has the back end extend the file first.
//! - **WB2**, **dirty.DS3**: [`dirty`]. **generations.G1** to **generations.G8**: [`generations`].
//! - **WB4** Nobody waits for a page while it has claimed pages that are not submitted.
//! - **WB5** The size is read after the pages are claimed. A thread that cuts the file hides the
//!   pages first, and waits for write-backs then, so the back end's file is never longer than the
//!   size.
//!
//! *Tail.* Direct I/O ends with the last whole block below the size; what is left follows as one
//! exact-length transfer, which the back end takes through the kernel's cache.
//!
//! *Errors.* A transfer that failed is tried page by page; pages that fail are DIRTY again, and
//! the first error is latched until a sync succeeds. After a failed sync of the back end, all that
//! was written since the last good one is DIRTY again where it is cached; where it is not, syncs
//! say so for as long as the file is open ([`Error::Lost`](crate::Error::Lost)).
//!
//! Locks: `syncing` -> range guards (shared) -> `state` -> `generations`; the holder of a range
//! guard does not wait for `syncing`; under `generations` only page words and the table are
//! touched. The flusher's own lock is a leaf.

pub(crate) mod dirty;
pub(crate) mod failure;
pub(crate) mod generations;
pub(crate) mod log;

pub(crate) mod stream;
pub(crate) mod unreported_errors;

pub(crate) mod flusher_state;
pub(crate) mod notify_flag;
pub(crate) mod writer_token;

#[cfg(all(test, loom))]
mod loom_tests;

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::cache::Cache;
use crate::cache::heap::HeapCharge;
use crate::cache::ledger::Share;
use crate::file_id::FileId;
use crate::io::backend::BackingFile;
use crate::units::PageIndex;
use crate::writeback::dirty::{Dirty, FlushNumber};
use crate::writeback::generations::Generations;
use crate::writeback::log::LogPattern;
use crate::writeback::stream::Stream;

pub(crate) use crate::writeback::failure::Failure;
pub(crate) use crate::writeback::flusher_state::{Flusher, Limits};
pub(crate) use crate::writeback::generations::{Copy, DurableOp, EndedOp, Epoch};

/// Between two attempts to write back what fails: each pause is twice the last, up to the longest.
/// Chosen, not measured.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);

/// What a file owes to its back end. In lines of its own: writes change it, and hits read what is beside it.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct Writeback {
    pub(crate) state: Mutex<State>,
    pub(crate) flush_ended: Condvar,
    pub(crate) generations: Generations,
    pub(crate) syncing: Mutex<()>,
    /// A sync has pages written just now. A hint, for writers that would write others.
    pub(crate) is_written_for_sync: AtomicBool,
    pub(crate) share: Arc<Share>,
    /// What the sets of the state take, and those of the generations.
    pub(crate) dirty_heap: HeapCharge,
    pub(crate) unsynced_heap: HeapCharge,
    pub(crate) log: LogPattern,
    /// Whether a page may be DIRTY or under write-back. Set under the guard of a writer.
    pub(crate) begun: AtomicBool,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) dirty: Dirty,
    pub(crate) stream: Stream,
    pub(crate) failure: Option<Failure>,
    pub(crate) retry: Option<(Instant, Duration)>,
    pub(crate) listed: bool,
}

impl Writeback {
    /// The inode is opened anew: takes over an error that nobody was told of.
    pub(crate) fn inherit(&self, id: FileId, fd: BorrowedFd<'_>) {
        if let Some(failure) = unreported_errors::take(id, fd) {
            self.generations.inherit(failure);
        }
    }

    /// Forgets errors that are told until the file is closed, as it is; but for one that nobody was told
    /// of, which is for the next to open it. (The flusher, or a writer over the dirty limit, may
    /// keep it from being dropped for a moment, in which it is opened again.)
    pub(crate) fn forget_failures(&self, id: FileId, backing: &dyn BackingFile) {
        self.state().failure = None;
        if let Some(failure) = self.generations.forget_failures() {
            unreported_errors::record(id, backing, failure);
        }
    }

    /// Forgets the pages from `first` to `last`, whose bytes are gone from the file.
    pub(crate) fn forget(&self, first: PageIndex, last: PageIndex) {
        if first <= last {
            self.state().dirty.forget(first, last);
            self.generations.forget(first, last);
        }
    }

    /// Counts what the sets take. Without their locks.
    pub(crate) fn count_heap(&self, cache: &Cache) {
        let dirty = self.state().dirty.heap_bytes();
        self.dirty_heap.set(cache, dirty);
        let unsynced = self.generations.lock().heap_bytes();
        self.unsynced_heap.set(cache, unsynced);
    }

    /// Counts what a sync owes from now on, for which room was kept with the pages of flush `number` (dirty.DS6).
    pub(crate) fn count_unsynced(&self, cache: &Cache, number: FlushNumber, unsynced: u64) {
        let mut state = self.state();
        state.dirty.release_heap(number, unsynced.saturating_sub(self.unsynced_heap.counted()));
        let dirty = state.dirty.heap_bytes();
        drop(state);
        self.dirty_heap.set(cache, dirty);
        self.unsynced_heap.set(cache, unsynced);
    }

    /// Notes that the back end took the pages from `first` to `last` of a transfer begun in `epoch` (generations.G1).
    pub(crate) fn record_written(
        &self,
        cache: &Cache,
        first: PageIndex,
        last: PageIndex,
        copy: Copy,
        epoch: Epoch,
    ) {
        let mut generations = self.generations.lock();
        generations.record_written(first.to(last), copy, epoch);
        let heap_bytes = generations.heap_bytes();
        drop(generations);
        self.unsynced_heap.set(cache, heap_bytes);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// The file is no more.
    pub(crate) fn uncharge(&self, cache: &Cache) {
        self.dirty_heap.set(cache, 0);
        self.unsynced_heap.set(cache, 0);
    }

    /// Whether a page may be DIRTY or under write-back. Under an exclusive guard, what is said of
    /// its range stays true for as long as no sync fails.
    pub(crate) fn has_begun(&self) -> bool {
        // Relaxed: see `redirty_page`.
        self.begun.load(Relaxed)
    }
}

impl State {
    /// Has the flusher wait before it tries again.
    pub(crate) fn back_off(&mut self) {
        let pause = self.retry.map_or(RETRY_MIN, |(_, pause)| (pause * 2).min(RETRY_MAX));
        self.retry = Some((Instant::now() + pause, pause));
    }
}
