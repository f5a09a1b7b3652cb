//! The striped range lock: one compare-exchange to lock a range, one to unlock it.
//!
//! A request first tries the *front*, a table of stripes (`front`). A range of up to 10 regions is claimed piece by piece,
//! each by one compare-exchange on a word that disjoint requests elsewhere in the file do not touch. A request that does
//! not succeed at once (conflict, larger range, full stripe) goes to the *queue*, under the lock's only mutex.
//!
//! ```text
//! request -> claim every piece -> HoldLocation::Front -> release every piece
//!         \-> (a claim fails) release the pieces -> gate -> queue -> HoldLocation::Queue -> remove -> ungate
//!         \-> (whole file, shared) increment the counter -> HoldLocation::Whole -> decrement it
//! ```
//!
//! - R1. A queue entry, held or waiting, keeps the gate of every stripe that it covers. So no range enters the front over a
//!   queue entry (queue.Q3), and the front entries that it overlaps do not change (stripe.P1). They are counted as blockers
//!   piece by piece, and each released piece is removed from these counts under the mutex.
//! - R2. A request that meets a conflict holds no piece while it waits: it releases its pieces before it queues, as if it
//!   had held and released that range. So a queued request waits only for guards and earlier requests, and queue.Q4
//!   excludes cycles.
//! - R3. Narrow and wide requests are one case: the mutex decides the order of two overlapping requests if both queue, and
//!   the gate if one does not. There is no second order (a count, a mark) that could disagree with it.
//! - R4. Whole-file shared holders are counted in one word while it is OPEN. Together they are one queue entry, the *bias*,
//!   which gates every stripe. A conflicting request closes the word; the thread that decrements a closed count to 0
//!   removes the bias. The word opens and closes only under the mutex.
//!
//! Why one mutex. An earlier design had a lock, a queue and a tree in each stripe, and a count of wide requests. But a
//! waiter is about to sleep or has just woken, so the mutex is not the bottleneck. With one mutex, order, counts, grants,
//! cancellation, upgrades and growing are decided in one critical section. Requests that do not wait stay in the stripes,
//! which need no lock, only stripe.P2. Two threads that compete for one range mostly alternate in the front.
//!
//! Why a growing table per lock. An idle lock has to be small, as there is one for each open file. A table shared by all
//! locks would be as small, but wide requests visit all stripes of a table, and gates would close the stripes of unrelated
//! files. A lock starts with one stripe inside itself (512 bytes in total). Growing is the only change of shape, it only
//! enlarges, and it happens under the mutex with every stripe closed.
//!
//! Locks: the mutex. No other lock is acquired under it, and no thread sleeps under it.
//!
//! Trade-offs. A long-held wide range sends all requests under it through the mutex and the queue's tree: correct, fair,
//! and about as fast as an interval tree under a mutex. A range wider than 10 regions sets and clears a gate for each of
//! its regions, or for every stripe. In the engine, whose regions have 64 KiB, requests of 4 KiB use the mutex during a
//! missing read of more than 640 KiB that overlaps their stripes, and so do more than 7 requests in one region. Hits lock
//! no range. Misses, through-writes and overwrites take several times as long as a lock and an unlock under a mutex
//! (`interval-tree` in docs/benchmarks.md), and more than 7 threads within 64 KiB of a file share its table leaf anyway.

mod held;
#[cfg(all(test, loom))]
mod loom_tests;
mod slow_path;

use std::sync::Weak;
use std::time::Duration;

use crate::budget::Budget;
use crate::front::stripe::{Claim, Claimed, Release, SLOTS, Stripe};
use crate::front::table::{
    Allocated, PIECES_MAX, REGION_SHIFT, REGION_SHIFT_MAX, Table, TableView,
};
use crate::queue::{Queue, Ticket};
use crate::range::{ByteRange, Mode};
use crate::raw::{RawRangeLock, Request};
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Mutex, lock};
use crate::wait::Notify;
pub use held::Held;
use held::HoldLocation;

/// Failed compare-exchanges of a claim before the request queues.
const RACES_MAX: u32 = if cfg!(loom) { 1 } else { 16 };

/// Bits of a slot number; the slot numbers of all pieces of a range fit in a word.
const SLOT_BITS: u32 = 3;
const SLOT_BITS_MASK: u32 = (1 << SLOT_BITS) - 1;
const _: () = assert!(SLOTS <= 1 << SLOT_BITS && PIECES_MAX as u32 * SLOT_BITS <= u32::BITS);

/// Compare-exchanges lost to ranges in other regions before the table grows.
const LOST_MAX: u32 = 8;

/// log2 of the largest table that lost races lead to.
const LOG2_MAX_CONTENDED: u32 = 8;

/// The default implementation of [`RangeLock`](crate::RangeLock): striped, with a fair queue.
///
/// ```
/// use millpond_rangelock::{RangeLock, Striped};
/// let lock: RangeLock<Striped> = RangeLock::new();
/// ```
#[derive(Debug)]
pub struct Striped {
    table: Table,
    /// Compare-exchanges lost since the table last grew.
    lost: AtomicU32,
    /// Number of requests in the queue that wait: a hint whether to spin.
    waiting: AtomicU32,
    /// The budget for larger tables; it may have been dropped.
    budget: Option<Weak<dyn Budget>>,
    state: Mutex<State>,
}

/// Under the mutex.
#[derive(Debug, Default)]
struct State {
    queue: Queue,
    /// The queue entry of all holders counted in `whole` (R4).
    bias: Option<Ticket>,
    /// Whole-file shared requests since the bias was last removed.
    whole_requests: u32,
    allocated: Allocated,
}

// SAFETY: `allocated` owns boxes of stripes, which are `Send` and `Sync`.
unsafe impl Send for State {}

/// Why a request takes the slow path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SlowReason {
    /// A conflicting range is certainly held: `try_request` fails without the mutex.
    Held,
    Conflict,
    Full,
    Whole,
}

impl Default for Striped {
    fn default() -> Striped {
        Striped::new(REGION_SHIFT)
    }
}

impl Striped {
    pub(crate) fn with_budget(mut self, budget: Weak<dyn Budget>) -> Striped {
        self.budget = Some(budget);
        lock(&self.state).queue.free_memory_when_empty();
        self
    }

    pub(crate) fn with_region_bytes(bytes: u64) -> Striped {
        let log2 = bytes.max(1).checked_next_power_of_two().map_or(u32::MAX, u64::trailing_zeros);
        Striped::new(log2.clamp(REGION_SHIFT.min(12), REGION_SHIFT_MAX))
    }

    fn new(region_shift: u32) -> Striped {
        Striped {
            table: Table::new(region_shift),
            lost: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            budget: None,
            state: Mutex::new(State::default()),
        }
    }
}

impl Drop for Striped {
    fn drop(&mut self) {
        let allocated = std::mem::take(&mut lock(&self.state).allocated);
        let mut allocated = allocated;
        let bytes = self.table.free_all(&mut allocated);
        if bytes > 0
            && let Some(budget) = self.budget.as_ref().and_then(Weak::upgrade)
        {
            budget.give_back(bytes);
        }
    }
}

#[inline(always)]
fn is_whole_shared(range: ByteRange, mode: Mode) -> bool {
    range == ByteRange::ALL && mode == Mode::Shared
}

impl Striped {
    /// Claims a range in the front, without the mutex.
    #[inline(always)]
    fn claim_front(&self, range: ByteRange, mode: Mode) -> Result<Held, SlowReason> {
        if is_whole_shared(range, mode) && self.table.whole.try_increment() {
            return Ok(Held::whole());
        }
        let view = self.table.view();
        let mut lost = 0;
        if let Some(stripe) = view.single(range) {
            match stripe.claim_first(range, mode) {
                Ok(claimed) => {
                    return Ok(Held::single(stripe, view.log2(), claimed));
                }
                Err(raced) => lost = raced,
            }
        }
        self.claim_front_slow(range, mode, lost)
    }

    /// Claims a range that the front has refused, if no holder and no waiter conflicts.
    #[inline(never)]
    fn try_enqueue(&self, range: ByteRange, mode: Mode, why: SlowReason) -> Option<Held> {
        if matches!(why, SlowReason::Held) {
            return None;
        }
        match self.enqueue(range, mode, why, &mut None)? {
            Request::Granted(held) => Some(held),
            Request::Queued(_) => unreachable!("queued without a waiter"),
        }
    }

    /// The same, after `lost` failed compare-exchanges.
    #[inline(never)]
    fn claim_front_slow(
        &self,
        range: ByteRange,
        mode: Mode,
        mut lost: u32,
    ) -> Result<Held, SlowReason> {
        let view = self.table.view();
        if is_whole_shared(range, mode) {
            return self.claim_whole(view, lost);
        }
        let Some(stripe) = view.single(range) else {
            return self.claim_pieces(view, range, mode);
        };
        let claim = stripe.claim(range, mode, RACES_MAX, &mut lost);
        if lost > 0 {
            self.record_lost_races(stripe, range, lost);
        }
        Striped::claimed(claim).map(|claimed| Held::single(stripe, view.log2(), claimed))
    }

    fn claimed(claim: Claim) -> Result<Claimed, SlowReason> {
        match claim {
            Claim::Slot(claimed) => Ok(claimed),
            Claim::Full => Err(SlowReason::Full),
            Claim::Held => Err(SlowReason::Held),
            Claim::Conflict | Claim::Gated | Claim::Raced => Err(SlowReason::Conflict),
        }
    }

    fn claim_whole(&self, view: TableView<'_>, lost: u32) -> Result<Held, SlowReason> {
        if self.table.whole.try_increment() {
            return Ok(Held::whole());
        }
        if view.log2() > 0 || lost > 0 {
            return Err(SlowReason::Whole);
        }
        // The single stripe suffices for few holders; under contention the counter is used.
        let stripe = view.stripe(0);
        let claim = stripe.claim(ByteRange::ALL, Mode::Shared, 0, &mut 0);
        let held = Striped::claimed(claim).map(|claimed| Held::single(stripe, 0, claimed));
        held.map_err(|_| SlowReason::Whole)
    }

    /// Claims all pieces, or none (R2).
    #[inline(never)]
    fn claim_pieces(
        &self,
        view: TableView<'_>,
        range: ByteRange,
        mode: Mode,
    ) -> Result<Held, SlowReason> {
        if view.pieces(range) > PIECES_MAX as u64 {
            return Err(SlowReason::Conflict);
        }
        let (mut slots, mut count, mut lost) = (0, 0, 0);
        let mut rest = Some(range);
        while let Some(now) = rest {
            let (piece, next) = view.split(now);
            let stripe = view.stripe(piece.start());
            let claim = stripe.claim(piece, mode, RACES_MAX, &mut lost);
            match Striped::claimed(claim) {
                Ok(claimed) => slots |= claimed.slot << (SLOT_BITS * count),
                Err(why) => {
                    if piece.start() > range.start() {
                        let claimed = ByteRange::raw(range.start(), piece.start());
                        self.release_front(claimed, mode, view.log2() as u8, slots);
                    }
                    return Err(why);
                }
            }
            count += 1;
            rest = next;
        }
        Ok(HoldLocation::Front { log2: view.log2() as u8, slots }.into())
    }

    /// Counts races lost to ranges in other regions, which a larger table would separate.
    #[cold]
    fn record_lost_races(&self, stripe: &Stripe, range: ByteRange, lost: u32) {
        let view = self.table.view();
        if view.log2() >= LOG2_MAX_CONTENDED
            || !stripe.any_held(|other| !view.same_region(range, other))
        {
            return;
        }
        let before = self.lost.fetch_add(lost, Ordering::Relaxed);
        if before < LOST_MAX && before + lost >= LOST_MAX {
            self.grow_within_budget(LOG2_MAX_CONTENDED);
            // If the table could not grow now, retry after as many more.
            self.lost.store(0, Ordering::Relaxed);
        }
    }

    /// Releases a single piece whose first compare-exchange failed.
    #[inline(never)]
    fn release_raced(&self, range: ByteRange, mode: Mode, held: Held, control: u64) {
        if let (Some((stripe, _)), HoldLocation::Front { log2, slots }) =
            (held.as_single(), held.location())
        {
            // SAFETY: as in `release`.
            match unsafe { stripe.as_ref() }.release_from(control, slots, range) {
                Release::Done => {}
                Release::Gated => self.release_gated(range, mode, log2, slots),
            }
        }
    }

    #[inline(never)]
    fn release_slow(&self, range: ByteRange, mode: Mode, held: Held) {
        match held.location() {
            HoldLocation::Front { log2, slots } => self.release_front(range, mode, log2, slots),
            HoldLocation::Queue(ticket) => self.release_queued(ticket),
            // The count is already decremented, to 0.
            HoldLocation::Whole => self.remove_drained_bias(),
        }
    }

    fn release_front(&self, range: ByteRange, mode: Mode, log2: u8, mut slots: u32) {
        let mut rest = Some(range);
        while let Some(now) = rest {
            let view = self.table.view();
            if view.log2() != u32::from(log2) {
                return self.release_gated(now, mode, log2, slots);
            }
            let (piece, next) = view.split(now);
            let stripe = view.stripe(piece.start());
            match stripe.release(slots & SLOT_BITS_MASK, piece) {
                Release::Done => {}
                Release::Gated => self.release_gated(piece, mode, log2, slots),
            }
            slots >>= SLOT_BITS;
            rest = next;
        }
    }
}

impl RawRangeLock for Striped {
    type Held = Held;
    type Queued = Ticket;

    const NAME: &'static str = "striped";

    #[inline]
    fn request(
        &self,
        range: ByteRange,
        mode: Mode,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Held, Ticket> {
        match self.claim_front(range, mode) {
            Ok(held) => Request::Granted(held),
            Err(why) => {
                let mut notify = Some(notify());
                self.enqueue(range, mode, why, &mut notify).expect("a waiter was passed")
            }
        }
    }

    #[inline(always)]
    fn try_request(&self, range: ByteRange, mode: Mode) -> Option<Held> {
        match self.claim_front(range, mode) {
            Ok(held) => Some(held),
            Err(why) => self.try_enqueue(range, mode, why),
        }
    }

    #[inline]
    fn claim(&self, range: ByteRange, mode: Mode) -> Option<Held> {
        self.claim_front(range, mode).ok()
    }

    fn is_crowded(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    fn patience(queued: &Ticket) -> Option<Duration> {
        queued.patience()
    }

    fn set_offer_grace(&self, grace: Duration) {
        lock(&self.state).queue.set_grace(grace);
    }

    fn expire(&self) {
        let mut state = lock(&self.state);
        state.queue.expire();
        self.unlock(state);
    }

    fn poll(
        &self,
        range: ByteRange,
        mode: Mode,
        queued: Ticket,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Held, Ticket> {
        let mut notify = Some(notify());
        let mut state = lock(&self.state);
        let in_front = if state.queue.is_lapsed(&queued) {
            self.recount_front_blockers(&mut state, range, mode)
        } else {
            0
        };
        let request = state.queue.poll(queued, in_front, &mut notify);
        self.unlock(state);
        match request {
            Request::Granted(ticket) => Request::Granted(HoldLocation::Queue(ticket).into()),
            Request::Queued(ticket) => Request::Queued(ticket),
        }
    }

    fn cancel(&self, _range: ByteRange, _mode: Mode, queued: Ticket) -> Option<Held> {
        let mut state = lock(&self.state);
        if state.queue.is_granted(&queued) {
            return Some(HoldLocation::Queue(queued).into());
        }
        let notify = self.remove(&mut state, queued);
        self.unlock(state);
        drop(notify);
        None
    }

    #[inline(always)]
    fn release(&self, range: ByteRange, mode: Mode, held: Held) {
        let Some((stripe, claimed)) = held.as_single() else {
            // Counted holders, mostly.
            if !held.is_whole() || self.table.whole.decrement() {
                self.release_slow(range, mode, held);
            }
            return;
        };
        // SAFETY: the stripe belongs to this lock, in the current or in a replaced table. Tables live
        // until the lock is dropped (table.B2), and do not move while a guard borrows the lock or keeps
        // its `Arc`. A stripe of a replaced table is gated, so the release fails.
        if let Err(control) = unsafe { stripe.as_ref() }.release_fast(claimed) {
            self.release_raced(range, mode, held, control);
        }
    }

    fn try_upgrade(&self, range: ByteRange, held: &mut Held) -> bool {
        let mut state = lock(&self.state);
        let upgraded = self.upgrade(&mut state, range, held);
        self.unlock(state);
        upgraded
    }

    fn downgrade(&self, range: ByteRange, held: &mut Held) {
        let mut state = lock(&self.state);
        match held.location() {
            HoldLocation::Front { log2, slots } => {
                self.downgrade_front(&mut state, range, log2, slots);
            }
            HoldLocation::Queue(ticket) => state.queue.downgrade(&ticket),
            HoldLocation::Whole => unreachable!("counted holders are shared"),
        }
        self.unlock(state);
    }
}
