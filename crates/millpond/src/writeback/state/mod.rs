//! The write-back records of one file: its dirty and unsynced pages, and the rules of a sync.
//!
//! ```text
//!   write --> DIRTY --- claim ---> WRITEBACK --- acknowledged ---> UNSTABLE --- sync ---> clean
//!               ^                      |                              |
//!               +------- failed -------+------- the sync failed ------+
//! ```
//!
//! UNSTABLE has the meaning of NFS: the backend has accepted the bytes, and no sync has made them
//! durable yet.
//!
//! The flusher, a sync, and a writer over the dirty limit write pages back. Each takes pages out of
//! the file's dirty set ([`dirty`]), claims each page by its word, and passes contiguous pages to
//! the backend as one vectored transfer, several transfers at a time ([`writeback`](mod@crate::writeback)).
//! It takes no range guard. Bytes that the backend has accepted are in one of three [`generations`]
//! until a [`file_sync`](mod@crate::writeback::file_sync) has covered them.
//!
//! - **WB1** The bytes below the file size of an EMPTY page are in the backend. A page leaves the
//!   cache only when it is clean (page.W4), and before a write that leaves a gap behind the old end
//!   of the file, the backend's file is extended.
//! - **WB2**, **dirty.DS3**: [`dirty`]. **generations.G1** to **generations.G8**: [`generations`].
//! - **WB4** A thread that has claimed pages and not yet submitted them does not wait for any page.
//! - **WB5** The size is read after the pages are claimed. A truncation first hides the pages, and
//!   then waits for write-backs. So the backend's file is never longer than the size. Several
//!   direct transfers beyond its end are preceded by a change of its length (`space::reach`).
//!
//! *Tail.* Direct I/O ends with the last whole block below the size. The remaining bytes follow in
//! one transfer of the exact length, which the backend makes through the kernel's page cache.
//!
//! *Errors.* A failed transfer is repeated page by page. Pages that fail become DIRTY again, and
//! the first error is latched until a sync succeeds. After a failed sync of the backend, all bytes
//! written since the last successful sync become DIRTY again if they are cached. If some of them
//! are not cached, every sync fails with [`Error::Lost`](crate::Error::Lost) while the file is
//! open.
//!
//! Locks: `syncing` -> range guards (shared) -> `state` -> `generations`. The holder of a range
//! guard does not wait for `syncing`. Under `generations` only page words and the table are
//! accessed. The flusher's lock is a leaf.

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
use crate::cache::accounting::heap::HeapCharge;
use crate::cache::accounting::writeback_counts::FileWritebackCounts;
use crate::file_id::FileId;
use crate::io::backend::BackingFile;
use crate::sync::MutexExt;
use crate::units::PageIndex;
use crate::writeback::state::dirty::{Dirty, FlushNumber};
use crate::writeback::state::generations::Generations;
use crate::writeback::state::log::LogPattern;
use crate::writeback::state::stream::Stream;

pub(crate) use crate::writeback::state::failure::WritebackFailure;
pub(crate) use crate::writeback::state::flusher_state::{Flusher, Limits};
pub(crate) use crate::writeback::state::generations::{Copy, EndedOp, FailureEpoch};

/// The pause between two attempts to write back pages that fail. It doubles up to the maximum.
/// Untuned.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);

/// The write-back state of one file. It is aligned to a cache line, as writes change it, and hits
/// read the fields next to it.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct Writeback {
    pub(crate) state: Mutex<WritebackState>,
    pub(crate) flush_ended: Condvar,
    pub(crate) generations: Generations,
    pub(crate) syncing: Mutex<()>,
    /// A sync is writing pages at this moment. A hint for writers over the dirty limit
    /// (throttle.TH6).
    pub(crate) is_written_for_sync: AtomicBool,
    pub(crate) counts: Arc<FileWritebackCounts>,
    /// Heap bytes of the dirty set, and of the generations.
    pub(crate) dirty_heap: HeapCharge,
    pub(crate) unsynced_heap: HeapCharge,
    pub(crate) log: LogPattern,
    /// Whether a page may be DIRTY or under write-back. Set under the guard of a writer.
    pub(crate) begun: AtomicBool,
}

#[derive(Default)]
pub(crate) struct WritebackState {
    pub(crate) dirty: Dirty,
    pub(crate) stream: Stream,
    pub(crate) failure: Option<WritebackFailure>,
    pub(crate) retry: Option<(Instant, Duration)>,
    pub(crate) listed: bool,
    /// The requests to reclaim frames that were served (flusher.FL9).
    pub(crate) reclaims: u64,
}

impl Writeback {
    /// Called when the file is opened: takes over an error that was not reported before its last
    /// close.
    pub(crate) fn inherit(&self, id: FileId, fd: BorrowedFd<'_>) {
        if let Some(failure) = unreported_errors::take(id, fd) {
            self.generations.inherit(failure);
        }
    }

    /// Forgets errors, which are reported only until the file is closed. An unreported error is
    /// kept for the next open of the file. (The flusher, or a writer over the dirty limit, may keep
    /// the inode alive for a moment, in which the file can be opened again.)
    pub(crate) fn forget_failures(&self, id: FileId, backing: &dyn BackingFile) {
        self.state().failure = None;
        if let Some(failure) = self.generations.forget_failures() {
            unreported_errors::record(id, backing, failure);
        }
    }

    /// Forgets the pages from `first` to `last`, whose bytes are no longer part of the file.
    pub(crate) fn forget(&self, first: PageIndex, last: PageIndex) {
        if first <= last {
            self.state().dirty.forget(first, last);
            self.generations.forget(first, last);
        }
    }

    /// Updates the heap charge of the dirty set and of the generations. The caller holds neither
    /// lock.
    pub(crate) fn count_heap(&self, cache: &Cache) {
        let dirty = self.state().dirty.heap_bytes();
        self.dirty_heap.set(cache, dirty);
        let unsynced = self.generations.lock().heap_bytes();
        self.unsynced_heap.set(cache, unsynced);
    }

    /// Charges the heap of the unsynced pages. The room for it was reserved with the pages of flush
    /// `number` (dirty.DS6).
    pub(crate) fn count_unsynced(&self, cache: &Cache, number: FlushNumber, unsynced: u64) {
        let mut state = self.state();
        state.dirty.release_heap(number, unsynced.saturating_sub(self.unsynced_heap.counted()));
        let dirty = state.dirty.heap_bytes();
        drop(state);
        self.dirty_heap.set(cache, dirty);
        self.unsynced_heap.set(cache, unsynced);
    }

    /// Records that the backend accepted the pages from `first` to `last` of a transfer that began
    /// in `epoch` (generations.G1).
    pub(crate) fn record_written(
        &self,
        cache: &Cache,
        first: PageIndex,
        last: PageIndex,
        copy: Copy,
        epoch: FailureEpoch,
    ) {
        let mut generations = self.generations.lock();
        generations.record_written(first.to(last), copy, epoch);
        let heap_bytes = generations.heap_bytes();
        drop(generations);
        self.unsynced_heap.set(cache, heap_bytes);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, WritebackState> {
        self.state.acquire()
    }

    /// Called when the inode is dropped.
    pub(crate) fn uncharge(&self, cache: &Cache) {
        self.dirty_heap.set(cache, 0);
        self.unsynced_heap.set(cache, 0);
    }

    /// Whether a page may be DIRTY or under write-back. Under an exclusive guard, the answer for
    /// the guarded range stays valid until a sync fails.
    pub(crate) fn has_begun(&self) -> bool {
        // Relaxed: see `redirty_page`.
        self.begun.load(Relaxed)
    }
}

impl WritebackState {
    /// Marks the file as listed. Returns whether it was. Requests to reclaim frames from before do
    /// not concern its pages.
    pub(crate) fn mark_listed<F>(&mut self, flusher: &Flusher<F>) -> bool {
        if !self.listed {
            self.reclaims = flusher.reclaims.load(Relaxed);
        }
        std::mem::replace(&mut self.listed, true)
    }

    /// Delays the flusher's next attempt.
    pub(crate) fn back_off(&mut self) {
        let pause = self.retry.map_or(RETRY_MIN, |(_, pause)| (pause * 2).min(RETRY_MAX));
        self.retry = Some((Instant::now() + pause, pause));
    }
}
