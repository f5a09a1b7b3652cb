//! Bytes that the backend has accepted and not yet made durable: three generations, an epoch, and
//! the durable operations in flight.
//!
//! ```text
//!   the backend accepts it --> WRITTEN -- a sync begins --> SYNCING -- the sync succeeds --> durable
//!                                |                            |
//!                                +------- a failure ----------+---> SUSPECT -- written again --> DIRTY
//!                                                                      +------ no copy left ---> lost
//! ```
//!
//! The kernel reports a write-back error once for each open description, by the call that asks
//! first; a device reports an error to the call that flushes it. So an error never belongs to one
//! write alone: it may concern any bytes that the backend accepted before the error was reported. A
//! *durable operation* is an operation that may return such an error: a sync of the backend, or a
//! transfer that returns when its bytes are durable. (On network file systems a write that is not
//! durable may also return an error about other bytes, for example when another client has used up
//! the space: [`Generations::fail_nondurable`].)
//!
//! - **G1** Before the backend is given bytes, the caller reads the *epoch*. The bytes are recorded
//!   under the lock before the caller's range guard is released, and before a page becomes
//!   UNSTABLE. If the epoch has changed by then, the bytes are suspect.
//! - **G2** A durable operation that returns an error raises the epoch. All pages that are written
//!   or syncing become suspect.
//! - **G3** A durable operation is in flight from before it begins until its outcome has been
//!   recorded (G2). An operation that returned no error has succeeded when all operations that were
//!   in flight at its end have ended, and the epoch is still the epoch of its beginning. Consider
//!   an operation that received an error about our bytes. If it ended before ours began, the error
//!   was not about our bytes. If it was in flight at our end, we wait for it. If it began later,
//!   our bytes were already durable. An operation waits only after it has ended itself, so no two
//!   wait for each other.
//! - **G4** Under the lock and before it calls the backend, a sync moves all written pages to the
//!   syncing generation. So it covers exactly the bytes that were accepted before it began. A page
//!   that is written again during the sync is in the written generation too, and the sync does not
//!   make it clean.
//! - **G5** For each page in a generation the cache holds the bytes that the backend accepted, or
//!   newer bytes; otherwise the generation records that it has bytes *without a copy*. A reader
//!   that reads all or part of a page back from the backend records this before the page is published,
//!   as the backend may have lost the page in between.
//! - **G6** Suspect pages are written again before a sync calls the backend, and before bytes are
//!   read past the cache or partly overwritten. A sync that finds suspect pages at its begin has
//!   failed, as another operation has received an error since. If a suspect page has no copy in the
//!   cache, its bytes are lost, and every sync returns an error until the last handle is closed.
//! - **G7** An unreported error outlives the last handle of the file
//!   ([`unreported_errors`](super::unreported_errors)).
//! - **G8** After a durable operation has failed, the kernel's copy of the file is dropped before
//!   the epoch rises. So bytes that are written again do not meet a page of the kernel whose
//!   write-back has failed: some file systems cannot store such a page any more, and report
//!   success. Later syncs fail while such a page is left (`descriptors::kernel_copy`).
//!
//! - **G9** A page becomes UNSTABLE after it was recorded, without the lock. A sync that covers the page in between finds it
//!   under write-back, and records it again: the next sync makes it clean.
//!
//! A simpler rule would let only one durable operation be in flight during a sync. But then durable
//! writes would wait for syncs, which take milliseconds on some devices.
//!
//! Locks: the lock in this module is a leaf. Page words are changed under it.

use crate::cache::table::page::{Change, PageWord};
use crate::cache::table::page_set::PageSet;
use crate::sync::MutexExt;
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard};
use crate::units::PageIndex;
use crate::writeback::state::failure::WritebackFailure;

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The maximum number of bitmaps (of some hundred bytes each) that record pages without pinning
/// them. Beyond it, such pages count as bytes without a copy. Unevictable pages are always
/// recorded, as nothing else would make them evictable again. (All bitmaps are charged to the
/// memory limit.)
const LEAVES_MAX: usize = 1024;

/// The number of durable operations that have failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FailureEpoch(u64);

/// A durable operation in flight (G3).
#[must_use]
#[derive(Debug)]
pub(crate) struct DurableOp {
    number: u64,
    epoch: FailureEpoch,
}

impl DurableOp {
    pub(crate) fn epoch(&self) -> FailureEpoch {
        self.epoch
    }
}

/// A durable operation that has ended without an error, before its outcome is known (G3).
#[must_use]
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndedOp {
    /// The last operation that was in flight at its end.
    last: u64,
    epoch: FailureEpoch,
}

/// Whether the cache has the bytes that the backend accepted (G5).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copy {
    /// Yes, and the page stays unevictable until a sync has covered it.
    Kept,
    Cached,
    None,
}

/// Pages that the backend accepted during one period.
#[derive(Default)]
struct Generation {
    pages: PageSet,
    /// There are also bytes without a copy.
    uncached: bool,
}

impl Generation {
    fn is_empty(&self) -> bool {
        self.pages.is_empty() && !self.uncached
    }

    fn absorb(&mut self, other: &mut Generation) {
        let other = std::mem::take(other);
        if self.pages.is_empty() {
            self.pages = other.pages;
        } else {
            other.pages.for_each(&mut |page| self.pages.insert(page));
        }
        self.uncached |= other.uncached;
    }

    fn forget(&mut self, first: PageIndex, last: PageIndex) -> bool {
        !self.pages.take(first, last, usize::MAX).is_empty()
    }
}

/// The generations of one file; see the module.
#[derive(Default)]
pub(crate) struct Generations {
    state: Mutex<GenerationsState>,
    /// A durable operation has ended.
    op_ended: Condvar,
    /// A copy of the epoch in the state.
    epoch: AtomicU64,
    /// Whether a generation may have pages or bytes. It is changed under the lock, and Relaxed. A
    /// thread under a guard that has found a recorded page EMPTY sees the flag set, through that
    /// guard or the page's word: the flag was set before the writer's guard was released, and
    /// before UNSTABLE (G1).
    has_unsynced: AtomicBool,
    /// Whether a page may be suspect. It is changed under the lock; a thread that reads `true`
    /// looks under the lock.
    has_suspect: AtomicBool,
}

#[derive(Default)]
struct GenerationsState {
    written: Generation,
    syncing: Generation,
    suspect: Generation,
    epoch: u64,
    /// The error that made pages suspect. It is returned for those that have no copy.
    failure: Option<WritebackFailure>,
    /// An error that no caller has received (G7).
    unreported: Option<WritebackFailure>,
    /// An error from before the file was opened.
    inherited: Option<WritebackFailure>,
    in_flight: Vec<u64>,
    next: u64,
    /// The number of waiting threads. It is mostly 0, which saves the system call of a wake-up.
    waiting: u32,
}

impl GenerationsState {
    /// Records a failure (G2).
    fn fail(&mut self, failure: WritebackFailure) {
        self.epoch += 1;
        self.failure = Some(failure);
        self.unreported = Some(failure);
        let GenerationsState { written, syncing, suspect, .. } = self;
        suspect.absorb(written);
        suspect.absorb(syncing);
    }

    fn remove_in_flight(&mut self, number: u64) {
        let at = self.in_flight.iter().position(|&other| other == number);
        self.in_flight.swap_remove(at.expect("a durable_op is left once"));
    }

    /// The outcome of an ended operation, if it is known.
    fn verdict(&self, ended: EndedOp) -> Option<Result<(), WritebackFailure>> {
        if self.epoch != ended.epoch.0 {
            return Some(Err(self.failure.unwrap_or(WritebackFailure::UNKNOWN)));
        }
        let all_have_left = self.in_flight.iter().all(|&number| number > ended.last);
        all_have_left.then_some(Ok(()))
    }
}

/// The generations, with their lock held.
pub(crate) struct LockedGenerations<'a> {
    state: MutexGuard<'a, GenerationsState>,
    shared: &'a Generations,
}

impl LockedGenerations<'_> {
    /// The error that makes bytes given to the backend in `epoch` suspect, if they are.
    pub(crate) fn suspicion(&self, epoch: FailureEpoch) -> Option<WritebackFailure> {
        let is_suspect = self.state.epoch != epoch.0;
        is_suspect.then(|| self.state.failure.unwrap_or(WritebackFailure::UNKNOWN))
    }

    /// Records the pages of a transfer that began in `epoch` (G1). Returns whether they are
    /// suspect.
    pub(crate) fn record_written(
        &mut self,
        pages: impl IntoIterator<Item = PageIndex>,
        copy: Copy,
        epoch: FailureEpoch,
    ) -> bool {
        self.shared.has_unsynced.store(true, Relaxed);
        let is_suspect = self.suspicion(epoch).is_some();
        let state = &mut *self.state;
        let generation = if is_suspect { &mut state.suspect } else { &mut state.written };
        let is_full = copy == Copy::Cached && generation.pages.leaves() >= LEAVES_MAX;
        if copy == Copy::None || is_full {
            generation.uncached = true;
        } else {
            pages.into_iter().for_each(|page| generation.pages.insert(page));
        }
        if is_suspect {
            self.shared.has_suspect.store(true, Relaxed);
        }
        is_suspect
    }

    /// Clears UNSTABLE on a page that a sync has covered, if it was not written since (G9).
    pub(crate) fn clear_unstable(&mut self, page: PageIndex, word: &PageWord) -> Option<Change> {
        if !self.is_synced(page) {
            return None;
        }
        let seen = word.load();
        if seen.is_under_writeback() {
            self.shared.has_unsynced.store(true, Relaxed);
            self.state.written.pages.insert(page);
            return None;
        }
        seen.is_unstable().then(|| word.clear_unstable())
    }

    /// Whether a sync has covered the page, and it was not written since.
    pub(crate) fn is_synced(&self, page: PageIndex) -> bool {
        let GenerationsState { written, syncing, suspect, .. } = &*self.state;
        ![written, syncing, suspect].iter().any(|it| it.pages.contains(page))
    }

    /// Removes a page from the suspect ones. Returns false if it is not suspect any more.
    pub(crate) fn take_suspect(&mut self, page: PageIndex) -> bool {
        self.state.suspect.forget(page, page)
    }

    /// An upper bound of the heap bytes of the sets.
    pub(crate) fn heap_bytes(&self) -> u64 {
        let GenerationsState { written, syncing, suspect, .. } = &*self.state;
        [written, syncing, suspect].iter().map(|it| it.pages.heap_bytes()).sum()
    }

    /// Records that a suspect page has no copy (G6).
    pub(crate) fn mark_lost(&mut self) {
        self.state.suspect.uncached = true;
    }
}

impl Generations {
    pub(crate) fn lock(&self) -> LockedGenerations<'_> {
        LockedGenerations { state: self.state.acquire(), shared: self }
    }

    /// The epoch, which the caller reads before it gives bytes to the backend (G1).
    pub(crate) fn epoch(&self) -> FailureEpoch {
        // Acquire: pairs with the Release in `fail`. A thread that reads an older epoch here finds
        // the newer one under the lock, and then treats its bytes as suspect without need. Argued:
        // a thread that reads the newer epoch gives its bytes to the backend afterwards, and not
        // before, when the failure may have lost them. Loom has no load that observes a store which
        // follows from the same thread's next store.
        FailureEpoch(self.epoch.load(Acquire))
    }

    /// Begins a durable operation.
    pub(crate) fn begin_durable(&self) -> DurableOp {
        Self::begin_locked(&mut self.state.acquire())
    }

    fn begin_locked(state: &mut GenerationsState) -> DurableOp {
        state.next += 1;
        let number = state.next;
        state.in_flight.push(number);
        DurableOp { number, epoch: FailureEpoch(state.epoch) }
    }

    /// Begins a sync, which moves all written pages to the syncing generation (G4). There is one
    /// sync at a time. `Err`: there are suspect pages that were not written again (G6).
    pub(crate) fn begin_sync(&self) -> Result<DurableOp, WritebackFailure> {
        let mut state = self.state.acquire();
        debug_assert!(state.syncing.is_empty(), "one sync at a time");
        if !state.suspect.pages.is_empty() {
            return Err(state.failure.unwrap_or(WritebackFailure::UNKNOWN));
        }
        state.syncing = std::mem::take(&mut state.written);
        Ok(Self::begin_locked(&mut state))
    }

    /// Ends a durable operation that returned no error.
    pub(crate) fn end_durable(&self, durable_op: DurableOp) -> EndedOp {
        let mut state = self.state.acquire();
        state.remove_in_flight(durable_op.number);
        let last = state.next;
        self.wake_waiters(state);
        EndedOp { last, epoch: durable_op.epoch }
    }

    /// Ends a durable operation that returned an error (G2), or may have done so.
    pub(crate) fn fail(&self, durable_op: DurableOp, failure: WritebackFailure) {
        let mut state = self.state.acquire();
        state.remove_in_flight(durable_op.number);
        state.fail(failure);
        self.has_unsynced.store(true, Relaxed);
        self.has_suspect.store(true, Relaxed);
        // Argued: see `epoch`.
        self.epoch.store(state.epoch, Release);
        self.wake_waiters(state);
    }

    /// Wakes waiting threads after an operation has ended. They check their condition, and are
    /// counted, under the same lock.
    fn wake_waiters(&self, state: MutexGuard<'_, GenerationsState>) {
        let is_awaited = state.waiting > 0;
        drop(state);
        if is_awaited {
            self.op_ended.notify_all();
        }
    }

    /// Records the error of a write that is not durable, if the error may be about other bytes, as
    /// on some file systems.
    pub(crate) fn fail_nondurable(&self, failure: WritebackFailure) {
        self.fail(self.begin_durable(), failure);
    }

    /// Whether the operation has succeeded, if that is known.
    pub(crate) fn verdict(&self, ended: EndedOp) -> Option<Result<(), WritebackFailure>> {
        self.state.acquire().verdict(ended)
    }

    /// Whether the operation has succeeded. Waits for the operations that were in flight with it;
    /// the caller has none in flight.
    pub(crate) fn wait(&self, ended: EndedOp) -> Result<(), WritebackFailure> {
        let mut state = self.state.acquire();
        loop {
            match state.verdict(ended) {
                Some(verdict) => return verdict,
                None => {
                    state.waiting += 1;
                    state = self.op_ended.wait(state).expect("no panic under the lock");
                    state.waiting -= 1;
                }
            }
        }
    }

    /// The outcome of a sync was not waited for, so its pages count as written again.
    pub(crate) fn abandon_sync(&self) {
        let GenerationsState { written, syncing, .. } = &mut *self.state.acquire();
        written.absorb(syncing);
    }

    /// Ends a successful sync. Returns the recorded pages that it covered, and the error if bytes
    /// are lost.
    pub(crate) fn end_sync(&self) -> (PageSet, Result<(), WritebackFailure>) {
        let mut state = self.state.acquire();
        let covered = std::mem::take(&mut state.syncing).pages;
        let outcome = self.clear_if_synced(&mut state);
        (covered, outcome)
    }

    fn clear_if_synced(&self, state: &mut GenerationsState) -> Result<(), WritebackFailure> {
        if state.suspect.uncached {
            return Err(state.failure.unwrap_or(WritebackFailure::UNKNOWN));
        }
        if state.suspect.is_empty() {
            // All suspect pages have been written again.
            (state.failure, state.unreported) = (None, None);
            // Release: pairs with the Acquire in `may_suspect`.
            self.has_suspect.store(false, Release);
            if state.written.is_empty() && state.syncing.is_empty() {
                self.has_unsynced.store(false, Relaxed);
            }
        }
        Ok(())
    }

    /// Whether no bytes of the pages from `first` to `last` can be in a generation. If so, bytes
    /// that were written durably there need no sync.
    pub(crate) fn are_synced(&self, first: PageIndex, last: PageIndex) -> bool {
        let GenerationsState { written, syncing, suspect, .. } = &*self.state.acquire();
        let may_have = |it: &Generation| it.uncached || it.pages.intersects(first, last);
        ![written, syncing, suspect].into_iter().any(may_have)
    }

    /// Records that the pages from `first` to `last` are read from the backend (G5). The caller has
    /// found them EMPTY and has not shown them yet.
    #[inline]
    pub(crate) fn read_back(&self, first: PageIndex, last: PageIndex) {
        if self.has_unsynced.load(Relaxed) {
            let GenerationsState { written, syncing, suspect, .. } = &mut *self.state.acquire();
            for generation in [written, syncing, suspect] {
                generation.uncached |= generation.forget(first, last);
            }
        }
    }

    /// Forgets the pages from `first` to `last`. Their bytes are no longer part of the file, or the
    /// backend has newer, durable bytes of all of them. Caller: no page among them that stays in
    /// the cache is UNSTABLE.
    pub(crate) fn forget(&self, first: PageIndex, last: PageIndex) {
        if self.has_unsynced.load(Relaxed) {
            let GenerationsState { written, syncing, suspect, .. } = &mut *self.state.acquire();
            for generation in [written, syncing, suspect] {
                generation.forget(first, last);
            }
        }
    }

    /// The backend was given new bytes for all of these pages: earlier bytes that it may have lost
    /// are no longer relevant.
    pub(crate) fn overwritten(&self, first: PageIndex, last: PageIndex) {
        if self.may_suspect() {
            self.state.acquire().suspect.forget(first, last);
        }
    }

    /// Whether an error remains to be reported.
    pub(crate) fn has_failed(&self) -> bool {
        let state = self.state.acquire();
        state.failure.is_some() || state.unreported.is_some() || state.inherited.is_some()
    }

    /// Whether there are pages that the backend has accepted and no sync has covered.
    pub(crate) fn has_pages(&self) -> bool {
        let GenerationsState { written, syncing, suspect, .. } = &*self.state.acquire();
        [written, syncing, suspect].iter().any(|it| !it.pages.is_empty())
    }

    /// Whether a page from `first` to `last` is suspect. Under a guard: if none is, then a page
    /// that was accepted before the guard was acquired becomes suspect only if an operation fails
    /// from now on.
    #[inline]
    pub(crate) fn has_suspects(&self, first: PageIndex, last: PageIndex) -> bool {
        // A page is removed from the suspect ones when its word says DIRTY. So a thread that does
        // not find it here finds it DIRTY.
        self.may_suspect() && self.state.acquire().suspect.pages.intersects(first, last)
    }

    #[inline]
    fn may_suspect(&self) -> bool {
        // Acquire: pairs with the Release in `clear_if_synced`: a thread that finds no page suspect
        // any more finds the bytes that were written again.
        self.has_suspect.load(Acquire)
    }

    /// The suspect pages from `first` to `last`, and the error that made them suspect.
    pub(crate) fn suspects(
        &self,
        first: PageIndex,
        last: PageIndex,
    ) -> Option<(Vec<PageIndex>, WritebackFailure)> {
        if !self.may_suspect() {
            return None;
        }
        let state = self.state.acquire();
        let mut pages = Vec::new();
        state.suspect.pages.for_each(&mut |page| {
            if (first..=last).contains(&page) {
                pages.push(page);
            }
        });
        (!pages.is_empty()).then(|| (pages, state.failure.unwrap_or(WritebackFailure::UNKNOWN)))
    }

    /// The error of lost bytes, if any are lost.
    pub(crate) fn lost(&self) -> Option<WritebackFailure> {
        let state = self.state.acquire();
        state.suspect.uncached.then(|| state.failure.unwrap_or(WritebackFailure::UNKNOWN))
    }

    /// Takes over an error that was not reported while the file was open before (G7).
    pub(crate) fn inherit(&self, failure: WritebackFailure) {
        self.state.acquire().inherited = Some(failure);
    }

    /// Takes the inherited error, which the caller returns.
    pub(crate) fn take_inherited(&self) -> Option<WritebackFailure> {
        self.state.acquire().inherited.take()
    }

    /// The caller returns the last error to the user.
    pub(crate) fn mark_reported(&self) {
        self.state.acquire().unreported = None;
    }

    /// Forgets errors, which are reported only until the file is closed. Returns the unreported
    /// one.
    pub(crate) fn forget_failures(&self) -> Option<WritebackFailure> {
        let mut state = self.state.acquire();
        state.failure = None;
        state.suspect.uncached = false;
        state.unreported.take().or(state.inherited.take())
    }
}
