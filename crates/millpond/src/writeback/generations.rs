//! What the back end took and has not made durable: three generations, one epoch, one gate.
//!
//! ```text
//!   the back end took it --> WRITTEN -- a sync begins --> SYNCING -- it has succeeded --> durable
//!                              |                           |
//!                              +------- a failure ---------+---> SUSPECT -- written again --> DIRTY
//!                                                                   +------ no copy left ---> lost
//! ```
//!
//! The kernel tells of an error of write-back once for each open description, through whichever
//! call asks first, and a device tells the call that flushes it. So an error is never that of one
//! write alone: it may be about anything that the back end took before it was told. A *durable
//! operation* is one to which an error may be told: a sync of the back end, and a transfer that
//! returns when its bytes are durable. (On file systems of other machines a write that is not
//! durable may be told as well, of space that others did not find: [`Generations::told`].)
//!
//! - **G1** A caller that has the back end take bytes asks for the *epoch* before, and notes under
//!   the lock what was taken, before its range guard is released and before a page says that it is
//!   UNSTABLE. If the epoch is another by then, what was taken is suspect.
//! - **G2** A durable operation that is told of an error raises the epoch: all that is written or
//!   syncing becomes suspect.
//! - **G3** A durable operation has a pass of the gate, from before it begins until its outcome is
//!   accounted for (G2). One that has ended well has succeeded when all that were in the gate at
//!   its end have left, and the epoch is still that of its beginning: an operation that was told of
//!   an error of ours has left before we began, and then it is not about our bytes; or was in the
//!   gate at our end; or entered later, when our bytes were durable. A waiter has left the gate
//!   before, so no two wait for each other.
//! - **G4** A sync has all that is written be syncing, under the lock, before it asks the back end, so it
//!   covers what was taken before it began, and nothing else. What is written again meanwhile is written
//!   as well, and is not settled by it.
//! - **G5** Of each page in a generation the cache has what the back end took, or newer bytes; or the
//!   generation says that it has bytes *without a copy*. A reader that reads a page back, whole or
//!   in part, says so before it is shown, as the back end may have lost the page meanwhile.
//! - **G6** What is suspect is written again before a sync asks the back end (one that finds suspects when
//!   it enters the gate has failed, as somebody has been told of an error since it began), and before
//!   bytes are read past the cache or overwritten in part. Where there is no copy, it is lost, and every sync says so until the
//!   last handle is gone.
//! - **G7** An error that nobody was told of outlives the file's last handle
//!   ([`untold`](super::unreported_errors)).
//! - **G8** The kernel drops its copy of the file after a durable operation has failed, before the epoch rises.
//!   So bytes that are written again meet no page whose write-back has failed: some file systems can't store
//!   such a page any more, and report success.
//!
//! Why syncs do not have the gate for themselves, which would do, too: durable writes would wait for
//! a sync of a device that takes milliseconds. As it is, they run beside it.
//!
//! Locks: the one in here is a leaf, but for page words, which are changed under it.

use crate::cache::pageset::PageSet;
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard};
use crate::units::PageIndex;
use crate::writeback::failure::Failure;

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The memory that may go into remembering pages that are not kept, in bitmaps of some hundred bytes; of
/// more, those count as bytes without a copy. Kept ones are never forgotten, as nobody else would let them
/// go again. (All are counted against the memory limit.)
const LEAVES_MAX: usize = 1024;

/// How many durable operations have failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Epoch(u64);

/// Of a durable operation, from before it begins (G3).
#[must_use]
#[derive(Debug)]
pub(crate) struct DurableOp {
    number: u64,
    epoch: Epoch,
}

impl DurableOp {
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }
}

/// Of a durable operation that has ended well, until it is known whether it has succeeded (G3).
#[must_use]
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndedOp {
    /// The last that was in the gate.
    last: u64,
    epoch: Epoch,
}

/// Whether the cache has what the back end took (G5).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copy {
    /// And keeps it until a sync has covered it.
    Kept,
    Cached,
    None,
}

/// What the back end took between two moments.
#[derive(Default)]
struct Generation {
    pages: PageSet,
    /// And bytes without a copy.
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

/// See the module.
#[derive(Default)]
pub(crate) struct Generations {
    state: Mutex<State>,
    /// Somebody has left the gate.
    op_ended: Condvar,
    /// As in the state.
    epoch: AtomicU64,
    /// Whether a generation may have something. Changed under the lock, and Relaxed: a thread that has
    /// found a noted page EMPTY, under a guard, sees it set, by that guard or by the page's word, as that
    /// was done before the guard of its writer was released, and before UNSTABLE (G1).
    has_unsynced: AtomicBool,
    /// Whether a page may be suspect; who finds it set looks under the lock. Changed under it.
    has_suspect: AtomicBool,
}

#[derive(Default)]
struct State {
    written: Generation,
    syncing: Generation,
    suspect: Generation,
    epoch: u64,
    /// Why there are suspects, and what is lost if they have no copy.
    failure: Option<Failure>,
    /// An error that nobody has been told of (G7).
    unreported: Option<Failure>,
    /// One of when the file was open before.
    inherited: Option<Failure>,
    in_flight: Vec<u64>,
    next: u64,
    /// How many wait for others to leave the gate: mostly none do, and to wake nobody is a system call, too.
    waiting: u32,
}

impl State {
    /// G2.
    fn fail(&mut self, failure: Failure) {
        self.epoch += 1;
        self.failure = Some(failure);
        self.unreported = Some(failure);
        let State { written, syncing, suspect, .. } = self;
        suspect.absorb(written);
        suspect.absorb(syncing);
    }

    fn remove_in_flight(&mut self, number: u64) {
        let at = self.in_flight.iter().position(|&other| other == number);
        self.in_flight.swap_remove(at.expect("a pass is left once"));
    }

    /// Whether `ended` has won, as far as that is known.
    fn verdict(&self, ended: EndedOp) -> Option<Result<(), Failure>> {
        if self.epoch != ended.epoch.0 {
            return Some(Err(self.failure.unwrap_or(Failure::UNKNOWN)));
        }
        let all_have_left = self.in_flight.iter().all(|&number| number > ended.last);
        all_have_left.then_some(Ok(()))
    }
}

/// The generations, under their lock.
pub(crate) struct Locked<'a> {
    state: MutexGuard<'a, State>,
    shared: &'a Generations,
}

impl Locked<'_> {
    /// Why what was begun in `epoch` is suspect, if it is.
    pub(crate) fn suspicion(&self, epoch: Epoch) -> Option<Failure> {
        let is_suspect = self.state.epoch != epoch.0;
        is_suspect.then(|| self.state.failure.unwrap_or(Failure::UNKNOWN))
    }

    /// G1: of a transfer begun in `epoch`; whether it is suspect already.
    pub(crate) fn record_written(
        &mut self,
        pages: impl IntoIterator<Item = PageIndex>,
        copy: Copy,
        epoch: Epoch,
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

    /// Whether a sync has covered the page, and nobody has written it since.
    pub(crate) fn is_synced(&self, page: PageIndex) -> bool {
        let State { written, syncing, suspect, .. } = &*self.state;
        ![written, syncing, suspect].iter().any(|it| it.pages.contains(page))
    }

    /// Takes a page from the suspects; false if it is none any more.
    pub(crate) fn take_suspect(&mut self, page: PageIndex) -> bool {
        self.state.suspect.forget(page, page)
    }

    /// What the sets take of the heap, at most.
    pub(crate) fn heap_bytes(&self) -> u64 {
        let State { written, syncing, suspect, .. } = &*self.state;
        [written, syncing, suspect].iter().map(|it| it.pages.heap_bytes()).sum()
    }

    /// G6: there is no copy of a suspect page.
    pub(crate) fn mark_lost(&mut self) {
        self.state.suspect.uncached = true;
    }
}

impl Generations {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked { state: self.state(), shared: self }
    }

    /// To be asked before the back end is given bytes (G1).
    pub(crate) fn epoch(&self) -> Epoch {
        // Acquire: pairs with the Release in `fail`. A thread that sees an older number here finds
        // a newer one under the lock in the end, and takes its bytes for suspect without need. Argued:
        // one that sees the newer number gives its bytes to the back end after that, and not before,
        // when the failure may have taken them; loom has no load that sees a store which follows from
        // its thread's own next one.
        Epoch(self.epoch.load(Acquire))
    }

    /// A durable operation enters the gate.
    pub(crate) fn begin_durable(&self) -> DurableOp {
        Self::begin_locked(&mut self.state())
    }

    fn begin_locked(state: &mut State) -> DurableOp {
        state.next += 1;
        let number = state.next;
        state.in_flight.push(number);
        DurableOp { number, epoch: Epoch(state.epoch) }
    }

    /// A sync enters, and everything written is to be covered by it (G4). One at a time. `Err`: there are
    /// suspects, which nobody has written again (G6).
    pub(crate) fn begin_sync(&self) -> Result<DurableOp, Failure> {
        let mut state = self.state();
        debug_assert!(state.syncing.is_empty(), "one sync at a time");
        if !state.suspect.pages.is_empty() {
            return Err(state.failure.unwrap_or(Failure::UNKNOWN));
        }
        state.syncing = std::mem::take(&mut state.written);
        Ok(Self::begin_locked(&mut state))
    }

    /// It was told of no error.
    pub(crate) fn end_durable(&self, pass: DurableOp) -> EndedOp {
        let mut state = self.state();
        state.remove_in_flight(pass.number);
        let last = state.next;
        self.wake_waiters(state);
        EndedOp { last, epoch: pass.epoch }
    }

    /// It was told of an error (G2), or may have been.
    pub(crate) fn fail(&self, pass: DurableOp, failure: Failure) {
        let mut state = self.state();
        state.remove_in_flight(pass.number);
        state.fail(failure);
        self.has_unsynced.store(true, Relaxed);
        self.has_suspect.store(true, Relaxed);
        // Argued: see `epoch`.
        self.epoch.store(state.epoch, Release);
        self.wake_waiters(state);
    }

    /// Wakes those that wait, as somebody has left the gate. They look, and are counted, under the same lock.
    fn wake_waiters(&self, state: MutexGuard<'_, State>) {
        let is_awaited = state.waiting > 0;
        drop(state);
        if is_awaited {
            self.op_ended.notify_all();
        }
    }

    /// A write that is not durable was told of an error that may be about other bytes, as some file systems
    /// have it.
    pub(crate) fn fail_nondurable(&self, failure: Failure) {
        self.fail(self.begin_durable(), failure);
    }

    /// Whether it has succeeded, if that is known.
    pub(crate) fn verdict(&self, ended: EndedOp) -> Option<Result<(), Failure>> {
        self.state().verdict(ended)
    }

    /// Whether it has succeeded. Waits for those that were in the gate with it; the caller has no
    /// pass.
    pub(crate) fn wait(&self, ended: EndedOp) -> Result<(), Failure> {
        let mut state = self.state();
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

    /// A sync was not waited for: nothing is known to be covered.
    pub(crate) fn abandon_sync(&self) {
        let State { written, syncing, .. } = &mut *self.state();
        written.absorb(syncing);
    }

    /// A sync has succeeded: the pages that it covered, of those that are known; or what is lost.
    pub(crate) fn end_sync(&self) -> (PageSet, Result<(), Failure>) {
        let mut state = self.state();
        let covered = std::mem::take(&mut state.syncing).pages;
        let outcome = self.clear_if_synced(&mut state);
        (covered, outcome)
    }

    fn clear_if_synced(&self, state: &mut State) -> Result<(), Failure> {
        if state.suspect.uncached {
            return Err(state.failure.unwrap_or(Failure::UNKNOWN));
        }
        if state.suspect.is_empty() {
            // Mended: everything was written again.
            (state.failure, state.unreported) = (None, None);
            // Release: pairs with the Acquire in `may_suspect`.
            self.has_suspect.store(false, Release);
            if state.written.is_empty() && state.syncing.is_empty() {
                self.has_unsynced.store(false, Relaxed);
            }
        }
        Ok(())
    }

    /// Whether no bytes of the pages from `first` to `last` can be in a generation: what was written
    /// durably there is so.
    pub(crate) fn are_synced(&self, first: PageIndex, last: PageIndex) -> bool {
        let State { written, syncing, suspect, .. } = &*self.state();
        let may_have = |it: &Generation| it.uncached || it.pages.intersects(first, last);
        ![written, syncing, suspect].into_iter().any(may_have)
    }

    /// Notes that the pages from `first` to `last`, which the caller has found EMPTY and not shown
    /// yet, are read from the back end (G5).
    #[inline]
    pub(crate) fn read_back(&self, first: PageIndex, last: PageIndex) {
        if self.has_unsynced.load(Relaxed) {
            let State { written, syncing, suspect, .. } = &mut *self.state();
            for generation in [written, syncing, suspect] {
                generation.uncached |= generation.forget(first, last);
            }
        }
    }

    /// The bytes of the pages from `first` to `last` are gone from the file, or the back end has newer bytes of all
    /// of them, which are durable. Caller: no page is UNSTABLE that stays in the cache.
    pub(crate) fn forget(&self, first: PageIndex, last: PageIndex) {
        if self.has_unsynced.load(Relaxed) {
            let State { written, syncing, suspect, .. } = &mut *self.state();
            for generation in [written, syncing, suspect] {
                generation.forget(first, last);
            }
        }
    }

    /// The back end was given new bytes of all of these pages: what it may have lost of them matters no
    /// more.
    pub(crate) fn overwritten(&self, first: PageIndex, last: PageIndex) {
        if self.may_suspect() {
            self.state().suspect.forget(first, last);
        }
    }

    /// Whether somebody is still to be told of an error.
    pub(crate) fn has_failed(&self) -> bool {
        let state = self.state();
        state.failure.is_some() || state.unreported.is_some() || state.inherited.is_some()
    }

    /// Whether there are pages that the back end has taken, and no sync has covered.
    pub(crate) fn has_pages(&self) -> bool {
        let State { written, syncing, suspect, .. } = &*self.state();
        [written, syncing, suspect].iter().any(|it| !it.pages.is_empty())
    }

    /// Whether a page from `first` to `last` is suspect. Under a guard: if not, then none becomes so
    /// that was taken before the guard, unless an operation fails from now on.
    #[inline]
    pub(crate) fn has_suspects(&self, first: PageIndex, last: PageIndex) -> bool {
        // A page is taken from the suspects when its word says DIRTY, so who does not see it here sees
        // it there.
        self.may_suspect() && self.state().suspect.pages.intersects(first, last)
    }

    #[inline]
    fn may_suspect(&self) -> bool {
        // Acquire: pairs with the Release in `clear`: who finds that nothing is suspect any more finds
        // what was written again.
        self.has_suspect.load(Acquire)
    }

    /// The suspect pages from `first` to `last`, and why they are.
    pub(crate) fn suspects(
        &self,
        first: PageIndex,
        last: PageIndex,
    ) -> Option<(Vec<PageIndex>, Failure)> {
        if !self.may_suspect() {
            return None;
        }
        let state = self.state();
        let mut pages = Vec::new();
        state.suspect.pages.for_each(&mut |page| {
            if (first..=last).contains(&page) {
                pages.push(page);
            }
        });
        (!pages.is_empty()).then(|| (pages, state.failure.unwrap_or(Failure::UNKNOWN)))
    }

    /// What is lost, if anything is.
    pub(crate) fn lost(&self) -> Option<Failure> {
        let state = self.state();
        state.suspect.uncached.then(|| state.failure.unwrap_or(Failure::UNKNOWN))
    }

    /// An error that nobody was told of when the file was open before (G7).
    pub(crate) fn inherit(&self, failure: Failure) {
        self.state().inherited = Some(failure);
    }

    /// The one that was inherited, for a caller that is told of it.
    pub(crate) fn take_inherited(&self) -> Option<Failure> {
        self.state().inherited.take()
    }

    /// A caller is told of the last error.
    pub(crate) fn mark_reported(&self) {
        self.state().unreported = None;
    }

    /// Forgets errors that are told until the file is closed, as it is; the one that nobody was told
    /// of.
    pub(crate) fn forget_failures(&self) -> Option<Failure> {
        let mut state = self.state();
        state.failure = None;
        state.suspect.uncached = false;
        state.unreported.take().or(state.inherited.take())
    }
}
