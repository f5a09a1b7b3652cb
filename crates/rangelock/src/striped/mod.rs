//! Our own lock: one compare-exchange to take a range, one to give it back.
//!
//! A request first tries the *front*, a table of stripes (`table`, `stripe`): a range of up to
//! 10 regions is claimed piece by piece, each by one compare-exchange, none of
//! them touching a word that disjoint requests elsewhere in the file touch. What does not succeed there at once
//! (conflicts, larger ranges, a full stripe) goes to the *queue*, under the lock's one mutex.
//!
//! ```text
//! request -> claim every piece -> Held::Front -> release every piece
//!         \-> (any fails) give the pieces back -> gate -> queue -> Held::Queue -> remove -> ungate
//!         \-> (whole file, shared) raise the counter -> Held::Whole -> lower it
//! ```
//!
//! - R1. A queue entry, held or waiting, keeps the gate of every stripe that it covers. So nothing
//!   enters the front over a queue entry (Q3), and front entries under one stand still
//!   (P1): they are counted as blockers piece by piece, and each piece that is released takes itself
//!   out of those counts, under the mutex.
//! - R2. A request that meets a conflict holds no piece while it waits: it gives back what it has
//!   before it queues, as though it had held that and let go. So who waits in the queue waits for
//!   guards and earlier requests alone, and Q4 excludes cycles.
//! - R3. Narrow and wide are one case: what decides the order of two overlapping requests
//!   is the mutex if both queue, and the gate if one does not. There is no
//!   second order (a count, a mark) that could disagree with it.
//! - R4. Whole-file shared holders are counted in one word while it is OPEN. All of them together are one
//!   queue entry, the *bias*, which gates every stripe. A conflicting request closes the word;
//!   whoever lowers a closed count to 0 removes the bias. The word opens and closes only
//!   under the mutex.
//!
//! Locks: the mutex; nothing is acquired under it, and nobody sleeps under it.
//!
//! Trade-offs. A long-held wide range sends all requests under it through the mutex and the
//! queue's tree: correct, fair, and about as fast as `peers::IntervalTree`. Taking a range wider than
//! 10 regions sets and clears a gate for each of its regions, or for every stripe.

#[cfg(all(test, loom))]
mod loom_tests;
mod stripe;
mod table;
mod whole;

use crate::queue::{Queue, Ticket, unlock_and_tell};
use crate::raw::{RawRangeLock, Request};
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::wait::Notify;
use crate::{ByteRange, Mode};
use stripe::{Claim, Release, SLOTS, Stripe};
use table::{Allocated, PIECES_MAX, Table, View};

/// Compare-exchanges that a claim may lose before it queues.
const RACES_MAX: u32 = if cfg!(loom) { 1 } else { 16 };

/// Bits for the number of a slot; those of all pieces of a range fit in a word.
const SLOT_BITS: u32 = 3;
const SLOT_BITS_MASK: u32 = (1 << SLOT_BITS) - 1;
const _: () = assert!(SLOTS <= 1 << SLOT_BITS && PIECES_MAX as u32 * SLOT_BITS <= u32::BITS);

/// Lost compare-exchanges, to neighbours in other regions, that make the table grow.
const LOST_MAX: u32 = 8;

/// log2 of the largest table that is made on account of those.
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
    /// Lost races since the table last grew.
    lost: AtomicU32,
    /// How many wait in the queue: a hint for those who would spin.
    waiting: AtomicU32,
    state: Mutex<State>,
}

/// Under the mutex.
#[derive(Debug, Default)]
struct State {
    queue: Queue,
    /// The queue entry that stands for all holders counted in `whole` (R4).
    bias: Option<Ticket>,
    /// Whole-file shared requests since the bias was last removed.
    whole_requests: u32,
    allocated: Allocated,
}

// SAFETY: `allocated` names boxes of stripes, which are `Send` and `Sync`, that nothing else owns.
unsafe impl Send for State {}

/// Where a guard's range is held.
#[derive(Debug)]
pub struct Held(Place);

#[derive(Debug)]
enum Place {
    /// In a table of 2^`log2` stripes; `slots` has `SLOT_BITS` for each piece.
    Front {
        log2: u8,
        slots: u32,
    },
    Queue(Ticket),
    Whole,
}

/// Why a request has to see the mutex.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    Conflict,
    Full,
    Whole,
}

impl Default for Striped {
    fn default() -> Striped {
        Striped {
            table: Table::new(),
            lost: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            state: Mutex::new(State::default()),
        }
    }
}

impl Drop for Striped {
    fn drop(&mut self) {
        let allocated = std::mem::take(&mut lock(&self.state).allocated);
        let mut allocated = allocated;
        self.table.free_all(&mut allocated);
    }
}

fn is_whole_shared(range: ByteRange, mode: Mode) -> bool {
    range == ByteRange::ALL && mode == Mode::Shared
}

impl Striped {
    /// The way without the mutex.
    #[inline(always)]
    fn claim_front(&self, range: ByteRange, mode: Mode) -> Result<Held, Why> {
        let view = self.table.view();
        let mut lost = 0;
        if let Some(stripe) = view.single(range) {
            match stripe.claim_first(range, mode) {
                Ok(()) => {
                    return Ok(Held(Place::Front { log2: view.log2() as u8, slots: 0 }));
                }
                Err(raced) => lost = raced,
            }
        }
        self.claim_again(range, mode, lost)
    }

    /// The same, after losing so many races.
    #[inline(never)]
    fn claim_again(&self, range: ByteRange, mode: Mode, mut lost: u32) -> Result<Held, Why> {
        let view = self.table.view();
        if is_whole_shared(range, mode) {
            return self.claim_whole(view, lost);
        }
        let Some(stripe) = view.single(range) else {
            return self.claim_pieces(view, range, mode);
        };
        let claim = stripe.claim(range, mode, RACES_MAX, &mut lost);
        if lost > 0 {
            self.count_lost(stripe, range, lost);
        }
        Striped::held(claim, |slot| Place::Front { log2: view.log2() as u8, slots: slot })
    }

    #[inline]
    fn held(claim: Claim, place: impl FnOnce(u32) -> Place) -> Result<Held, Why> {
        match claim {
            Claim::Slot(slot) => Ok(Held(place(slot))),
            Claim::Full => Err(Why::Full),
            Claim::Conflict | Claim::Gated | Claim::Raced => Err(Why::Conflict),
        }
    }

    fn claim_whole(&self, view: View<'_>, lost: u32) -> Result<Held, Why> {
        if self.table.whole.try_raise() {
            return Ok(Held(Place::Whole));
        }
        if view.log2() > 0 || lost > 0 {
            return Err(Why::Whole);
        }
        // The only stripe will do for few; contention calls for the counter.
        let claim = view.stripe(0).claim(ByteRange::ALL, Mode::Shared, 0, &mut 0);
        Striped::held(claim, |slot| Place::Front { log2: 0, slots: slot }).map_err(|_| Why::Whole)
    }

    /// Claims piece by piece; all, or none (R2).
    #[inline(never)]
    fn claim_pieces(&self, view: View<'_>, range: ByteRange, mode: Mode) -> Result<Held, Why> {
        if view.pieces(range) > PIECES_MAX as u64 {
            return Err(Why::Conflict);
        }
        let (mut slots, mut count, mut lost) = (0, 0, 0);
        let mut rest = Some(range);
        while let Some(now) = rest {
            let (piece, next) = view.split(now);
            let stripe = view.stripe(piece.start());
            let claim = stripe.claim(piece, mode, RACES_MAX, &mut lost);
            match Striped::held(claim, |slot| Place::Front { log2: 0, slots: slot }) {
                Ok(Held(Place::Front { slots: slot, .. })) => slots |= slot << (SLOT_BITS * count),
                Ok(_) => unreachable!(),
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
        Ok(Held(Place::Front { log2: view.log2() as u8, slots }))
    }

    /// Remembers races lost to neighbours in other regions, whom a larger table would keep apart.
    #[cold]
    fn count_lost(&self, stripe: &Stripe, range: ByteRange, lost: u32) {
        if !stripe.any_held(|other| !View::same_region(range, other)) {
            return;
        }
        let before = self.lost.fetch_add(lost, Ordering::Relaxed);
        if before < LOST_MAX && before + lost >= LOST_MAX {
            let mut state = lock(&self.state);
            self.grow(&mut state, LOG2_MAX_CONTENDED);
            self.unlock(state);
        }
    }

    /// Replaces the table by a larger one, if there is one and nothing stands against it (B3).
    fn grow(&self, state: &mut State, log2_max: u32) -> bool {
        let old = self.table.view();
        // Leaving the single stripe cuts ranges in pieces, and those who wait have counted
        // the whole: so that step waits for an empty queue.
        if old.log2() == 0 && !state.queue.is_empty() {
            return false;
        }
        let Some((stripes, log2)) = self.table.allocate_next(log2_max) else {
            return false;
        };
        let new = View::of(&stripes, log2);
        // The entries that are queued now; the adopted below gate for themselves.
        state.queue.for_each_range(|range| Striped::gate(new, range));
        for stripe in old.stripes() {
            stripe.close();
            stripe.for_each_held(|_, range, mode| {
                if new.pieces(range) > PIECES_MAX as u64 {
                    state.queue.adopt(range, mode);
                    Striped::gate(new, range);
                    return;
                }
                new.for_each_piece(range, |piece, stripe| {
                    if !stripe.fill_moved(piece, mode) {
                        state.queue.adopt(piece, mode);
                        Striped::gate(new, piece);
                    }
                });
            });
        }
        self.table.publish(stripes, &mut state.allocated);
        self.lost.store(0, Ordering::Relaxed);
        true
    }

    /// Sets the gate of every stripe that `range` covers, one more time (R1).
    fn gate(view: View<'_>, range: ByteRange) {
        if view.pieces(range) >= view.stripes().len() as u64 {
            view.stripes().iter().for_each(Stripe::gate);
        } else {
            view.for_each_piece(range, |_, stripe| stripe.gate());
        }
    }

    fn ungate(view: View<'_>, range: ByteRange) {
        if view.pieces(range) >= view.stripes().len() as u64 {
            view.stripes().iter().for_each(Stripe::ungate);
        } else {
            view.for_each_piece(range, |_, stripe| stripe.ungate());
        }
    }

    /// How many pieces in the front overlap `range` and satisfy `wanted`. Gated.
    fn count_front(view: View<'_>, range: ByteRange, wanted: impl Fn(Mode) -> bool) -> u32 {
        let mut count = 0;
        if view.pieces(range) >= view.stripes().len() as u64 {
            for stripe in view.stripes() {
                stripe.for_each_held(|_, held, mode| {
                    count += u32::from(held.overlaps(range) && wanted(mode));
                });
            }
        } else {
            // Two regions may share a stripe: only what overlaps this very piece counts here.
            view.for_each_piece(range, |piece, stripe| {
                stripe.for_each_held(|_, held, mode| {
                    count += u32::from(held.overlaps(piece) && wanted(mode));
                });
            });
        }
        count
    }

    /// The way through the mutex. `None` if it would have to wait and there is nobody to tell.
    #[cold]
    fn enqueue<N: FnOnce() -> Notify>(
        &self,
        range: ByteRange,
        mode: Mode,
        why: Why,
        notify: Option<N>,
    ) -> Option<Request<Held, Ticket>> {
        let mut state = lock(&self.state);
        if why == Why::Full && self.should_grow(range) && self.grow(&mut state, u32::MAX) {
            // The claim must not meet the mutex. At most once for each size of table.
            self.unlock(state);
            return match self.claim_front(range, mode) {
                Ok(held) => Some(Request::Granted(held)),
                Err(why) => self.enqueue(range, mode, why, notify),
            };
        }
        self.close_whole(&mut state, range, mode);
        let view = self.table.view();
        Striped::gate(view, range);
        let in_front = Striped::count_front(view, range, |held| held.conflicts_with(mode));
        let request = match state.queue.insert(range, mode, in_front, notify) {
            None => {
                Striped::ungate(view, range);
                None
            }
            Some(Request::Queued(ticket)) => Some(Request::Queued(ticket)),
            Some(Request::Granted(ticket)) => {
                let place = if is_whole_shared(range, mode) {
                    self.open_whole(&mut state, ticket)
                } else {
                    Place::Queue(ticket)
                };
                Some(Request::Granted(Held(place)))
            }
        };
        self.unlock(state);
        request
    }

    /// Whether the stripes of `range` are full of ranges that a larger table would keep apart.
    fn should_grow(&self, range: ByteRange) -> bool {
        let view = self.table.view();
        let mut useful = false;
        view.for_each_piece(range, |piece, stripe| {
            useful |= stripe.any_held(|other| !View::same_region(piece, other));
        });
        useful
    }

    /// Before a request that is counted in the queue: closes the counter if its holders block
    /// the request, or if it has none; and removes the bias if nobody is counted (R4).
    fn close_whole(&self, state: &mut State, range: ByteRange, mode: Mode) {
        if state.bias.is_none() {
            return;
        }
        let whole = &self.table.whole;
        let unused = match mode {
            Mode::Exclusive => whole.close(),
            Mode::Shared if is_whole_shared(range, mode) => whole.is_drained(),
            Mode::Shared => whole.is_drained() || whole.close_if_unused(),
        };
        if unused {
            self.remove_bias(state);
        }
    }

    fn remove_bias(&self, state: &mut State) {
        if let Some(bias) = state.bias.take() {
            state.whole_requests = 0;
            self.remove(state, bias);
        }
    }

    /// A whole-file shared request has been granted in the queue: the second in a row opens the
    /// counter, with its own entry for a bias.
    fn open_whole(&self, state: &mut State, ticket: Ticket) -> Place {
        state.whole_requests += 1;
        if state.bias.is_some() || state.whole_requests < 2 {
            return Place::Queue(ticket);
        }
        state.bias = Some(ticket);
        self.table.whole.open();
        Place::Whole
    }

    /// Removes a queue entry, and opens its gates.
    fn remove(&self, state: &mut State, ticket: Ticket) {
        let range = state.queue.range_of(&ticket);
        state.queue.remove(ticket);
        Striped::ungate(self.table.view(), range);
    }

    /// Releases a range that is a single piece, if nothing is in the way. False if that does not do it,
    /// and then `release_front` has to follow.
    #[inline(always)]
    fn release_first(&self, range: ByteRange, held: &Held) -> bool {
        let Place::Front { log2, slots } = held.0 else {
            return false;
        };
        let view = self.table.view();
        match view.single(range) {
            Some(stripe) if view.log2() == u32::from(log2) => stripe.release_first(slots),
            _ => false,
        }
    }

    #[inline(never)]
    fn release_again(&self, range: ByteRange, mode: Mode, held: Held) {
        match held.0 {
            Place::Front { log2, slots } => self.release_front(range, mode, log2, slots),
            Place::Queue(ticket) => self.release_queued(ticket),
            Place::Whole => {
                if self.table.whole.lower() {
                    self.drained();
                }
            }
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

    /// Releases pieces under the mutex, and unblocks who counted them (R1).
    #[cold]
    fn release_gated(&self, range: ByteRange, mode: Mode, log2: u8, slots: u32) {
        let mut state = lock(&self.state);
        self.with_pieces(&mut state, range, mode, log2, slots, |state, piece, found| match found {
            Found::Slot(stripe, slot) => {
                stripe.clear(slot);
                state.queue.front_released(piece, mode);
            }
            Found::Adopted(ticket) => self.remove(state, ticket),
        });
        self.unlock(state);
    }

    /// Calls `f` for each piece of a range that is held in the front, gated, wherever growing has
    /// left it.
    fn with_pieces(
        &self,
        state: &mut State,
        range: ByteRange,
        mode: Mode,
        log2: u8,
        mut slots: u32,
        mut f: impl FnMut(&mut State, ByteRange, Found<'_>),
    ) {
        let view = self.table.view();
        let stayed = view.log2() == u32::from(log2);
        if !stayed && view.pieces(range) > PIECES_MAX as u64 {
            let ticket = state.queue.find_adopted(range, mode).expect("adopted whole (B3)");
            return f(state, range, Found::Adopted(ticket));
        }
        Striped::gate(view, range);
        view.for_each_piece(range, |piece, stripe| {
            let slot =
                if stayed { Some(slots & SLOT_BITS_MASK) } else { stripe.find_moved(piece, mode) };
            slots >>= SLOT_BITS;
            let found = match slot {
                Some(slot) => Found::Slot(stripe, slot),
                None => {
                    let ticket = state.queue.find_adopted(piece, mode);
                    Found::Adopted(ticket.expect("moved or adopted (B3)"))
                }
            };
            f(state, piece, found);
        });
        Striped::ungate(view, range);
    }

    #[cold]
    fn release_queued(&self, ticket: Ticket) {
        let mut state = lock(&self.state);
        self.remove(&mut state, ticket);
        self.unlock(state);
    }

    #[cold]
    fn drained(&self) {
        let mut state = lock(&self.state);
        if self.table.whole.is_drained() {
            self.remove_bias(&mut state);
        }
        self.unlock(state);
    }

    fn unlock(&self, state: MutexGuard<'_, State>) {
        self.waiting.store(state.queue.waiting() as u32, Ordering::Relaxed);
        unlock_and_tell(&self.state, state, |state| &mut state.queue);
    }

    fn upgrade_front(&self, state: &mut State, range: ByteRange, log2: u8, slots: u32) -> bool {
        let view = self.table.view();
        Striped::gate(view, range);
        // Held in the queue are others, or pieces of ours that were adopted: rare, and then
        // we refuse.
        let alone = !state.queue.is_held(range)
            && u64::from(Striped::count_front(view, range, |_| true)) == view.pieces(range);
        if alone {
            self.with_pieces(state, range, Mode::Shared, log2, slots, |state, piece, found| {
                if let Found::Slot(stripe, slot) = found {
                    stripe.set_mode(slot, Mode::Exclusive);
                    state.queue.front_upgraded(piece);
                }
            });
        }
        Striped::ungate(view, range);
        alone
    }
}

/// A piece of a range, found again under the mutex.
enum Found<'a> {
    Slot(&'a Stripe, u32),
    Adopted(Ticket),
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
            Err(why) => self.enqueue(range, mode, why, Some(notify)).expect("somebody to tell"),
        }
    }

    #[inline]
    fn try_request(&self, range: ByteRange, mode: Mode) -> Option<Held> {
        match self.claim_front(range, mode) {
            Ok(held) => Some(held),
            Err(why) => match self.enqueue(range, mode, why, None::<fn() -> Notify>)? {
                Request::Granted(held) => Some(held),
                Request::Queued(_) => unreachable!("queued with nobody to tell"),
            },
        }
    }

    #[inline]
    fn claim(&self, range: ByteRange, mode: Mode) -> Option<Held> {
        self.claim_front(range, mode).ok()
    }

    fn is_crowded(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    fn poll(
        &self,
        _range: ByteRange,
        _mode: Mode,
        queued: Ticket,
        notify: impl FnOnce() -> Notify,
    ) -> Request<Held, Ticket> {
        match lock(&self.state).queue.poll(queued, notify) {
            Request::Granted(ticket) => Request::Granted(Held(Place::Queue(ticket))),
            Request::Queued(ticket) => Request::Queued(ticket),
        }
    }

    fn cancel(&self, _range: ByteRange, _mode: Mode, queued: Ticket) -> Option<Held> {
        let mut state = lock(&self.state);
        if !state.queue.is_waiting(&queued) {
            return Some(Held(Place::Queue(queued)));
        }
        self.remove(&mut state, queued);
        self.unlock(state);
        None
    }

    #[inline(always)]
    fn release(&self, range: ByteRange, mode: Mode, held: Held) {
        if !self.release_first(range, &held) {
            self.release_again(range, mode, held);
        }
    }

    fn try_upgrade(&self, range: ByteRange, held: &mut Held) -> bool {
        let mut state = lock(&self.state);
        if matches!(held.0, Place::Whole) {
            if !self.table.whole.close_if_alone() {
                return false;
            }
            // Its only holder takes the bias for its own entry.
            let bias = state.bias.take().expect("counted (R4)");
            held.0 = Place::Queue(bias);
        }
        match &held.0 {
            Place::Front { log2, slots } => self.upgrade_front(&mut state, range, *log2, *slots),
            Place::Queue(ticket) => {
                Striped::count_front(self.table.view(), range, |_| true) == 0
                    && state.queue.try_upgrade(ticket)
            }
            Place::Whole => unreachable!("became a queue entry"),
        }
    }

    fn downgrade(&self, range: ByteRange, held: &mut Held) {
        let mut state = lock(&self.state);
        match &held.0 {
            Place::Front { log2, slots } => {
                let (log2, slots) = (*log2, *slots);
                self.with_pieces(
                    &mut state,
                    range,
                    Mode::Exclusive,
                    log2,
                    slots,
                    |state, piece, found| match found {
                        Found::Slot(stripe, slot) => {
                            stripe.set_mode(slot, Mode::Shared);
                            state.queue.front_downgraded(piece);
                        }
                        Found::Adopted(ticket) => state.queue.downgrade(&ticket),
                    },
                );
            }
            Place::Queue(ticket) => state.queue.downgrade(ticket),
            Place::Whole => unreachable!("counted holders are shared"),
        }
        self.unlock(state);
    }
}
