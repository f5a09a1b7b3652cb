//! The slow path of the striped lock: all operations under its mutex.
//!
//! Every function that takes `&mut State` is called with the mutex held. The stripes that it reads are gated, by a queue
//! entry that covers them (striped.R1) or by the function itself.

use std::sync::Weak;

use super::held::{Held, HoldLocation};
use super::{SLOT_BITS, SLOT_BITS_MASK, SlowReason, State, Striped, is_whole_shared};
use crate::front::stripe::Stripe;
use crate::front::table::{PIECES_MAX, Table, TableView};
use crate::queue::{Ticket, unlock_and_wake};
use crate::range::{ByteRange, Mode};
use crate::raw::Request;
use crate::sync::atomic::Ordering;
use crate::sync::{MutexGuard, lock};
use crate::wait::Notify;

impl Striped {
    /// Replaces the table by a larger one, if possible (table.B3).
    pub(super) fn grow(&self, state: &mut State, log2_max: u32) -> bool {
        let old = self.table.view();
        // Leaving the single stripe splits ranges into pieces, but the waiting requests have counted
        // whole ranges. So this step needs an empty queue.
        if old.log2() == 0 && !state.queue.is_empty() {
            return false;
        }
        let Some((stripes, log2)) = self.table.allocate_next(log2_max) else {
            return false;
        };
        let new = old.with(&stripes, log2);
        // Gate for the present queue entries; the ones adopted below are gated there.
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
        true
    }

    /// Replaces the table by the next larger one, if possible within the budget (table.B4). The budget is called without
    /// the mutex, as it may take long.
    pub(super) fn grow_within_budget(&self, log2_max: u32) -> bool {
        let Some(log2) = self.table.next_log2(log2_max) else { return false };
        let bytes = Table::bytes(log2);
        let budget = self.budget.as_ref().map(Weak::upgrade);
        let refused = match &budget {
            None => false,
            Some(budget) => !budget.as_ref().is_some_and(|budget| budget.try_take(bytes)),
        };
        if refused {
            return false;
        }
        let mut state = lock(&self.state);
        // Exactly this size: another thread may have grown the table in between.
        let grown = self.grow(&mut state, log2);
        self.unlock(state);
        if !grown && let Some(budget) = budget.flatten() {
            budget.give_back(bytes);
        }
        grown
    }

    /// Increments the gate count of every stripe that `range` covers (striped.R1).
    pub(super) fn gate(view: TableView<'_>, range: ByteRange) {
        if view.pieces(range) >= view.stripes().len() as u64 {
            view.stripes().iter().for_each(Stripe::gate);
        } else {
            view.for_each_piece(range, |_, stripe| stripe.gate());
        }
    }

    fn ungate(view: TableView<'_>, range: ByteRange) {
        if view.pieces(range) >= view.stripes().len() as u64 {
            view.stripes().iter().for_each(Stripe::ungate);
        } else {
            view.for_each_piece(range, |_, stripe| stripe.ungate());
        }
    }

    /// Number of pieces in the front that overlap `range` and satisfy `wanted`. Gated.
    pub(super) fn count_front(
        view: TableView<'_>,
        range: ByteRange,
        wanted: impl Fn(Mode) -> bool,
    ) -> u32 {
        let mut count = 0;
        if view.pieces(range) >= view.stripes().len() as u64 {
            for stripe in view.stripes() {
                stripe.for_each_held(|_, held, mode| {
                    count += u32::from(held.overlaps(range) && wanted(mode));
                });
            }
        } else {
            // Two regions may share a stripe, so only the overlaps with this piece count here.
            view.for_each_piece(range, |piece, stripe| {
                stripe.for_each_held(|_, held, mode| {
                    count += u32::from(held.overlaps(piece) && wanted(mode));
                });
            });
        }
        count
    }

    /// Requests a range under the mutex. `None` if it would have to wait and `notify` is `None`.
    #[cold]
    pub(super) fn enqueue(
        &self,
        range: ByteRange,
        mode: Mode,
        why: SlowReason,
        notify: &mut Option<Notify>,
    ) -> Option<Request<Held, Ticket>> {
        if why == SlowReason::Full && self.should_grow(range) && self.grow_within_budget(u32::MAX) {
            // Outside of the mutex, as a claim may take it. At most once for each table size.
            return match self.claim_front(range, mode) {
                Ok(held) => Some(Request::Granted(held)),
                Err(why) => self.enqueue(range, mode, why, notify),
            };
        }
        let mut state = lock(&self.state);
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
                let location = if is_whole_shared(range, mode) {
                    self.open_whole(&mut state, ticket)
                } else {
                    HoldLocation::Queue(ticket)
                };
                Some(Request::Granted(location.into()))
            }
        };
        self.unlock(state);
        request
    }

    /// Counts the front blockers of a lapsed request (queue.L2), whose gates are still set.
    #[cold]
    pub(super) fn recount_front_blockers(
        &self,
        state: &mut State,
        range: ByteRange,
        mode: Mode,
    ) -> u32 {
        self.close_whole(state, range, mode);
        Striped::count_front(self.table.view(), range, |held| held.conflicts_with(mode))
    }

    /// Whether the stripes of `range` hold ranges that a larger table would separate from it.
    fn should_grow(&self, range: ByteRange) -> bool {
        let view = self.table.view();
        let mut useful = false;
        view.for_each_piece(range, |piece, stripe| {
            useful |= stripe.any_held(|other| !view.same_region(piece, other));
        });
        useful
    }

    /// Removes an unused bias before an upgrade, which would fail because of it.
    fn remove_unused_bias(&self, state: &mut State) {
        let whole = &self.table.whole;
        if state.bias.is_some() && (whole.is_drained() || whole.close_if_unused()) {
            self.remove_bias(state);
        }
    }

    /// Call before a request counts its blockers in the queue. Closes the counter if its holders block the request or if it
    /// has none, and removes the bias if the counter is drained (striped.R4).
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
            let _none = self.remove(state, bias);
        }
    }

    /// Call after a whole-file shared request was granted in the queue. The second one in a row opens the counter, and its
    /// entry becomes the bias.
    fn open_whole(&self, state: &mut State, ticket: Ticket) -> HoldLocation {
        state.whole_requests += 1;
        if state.bias.is_some() || state.whole_requests < 2 {
            return HoldLocation::Queue(ticket);
        }
        state.bias = Some(ticket);
        self.table.whole.open();
        HoldLocation::Whole
    }

    /// Removes a queue entry and opens its gates. Returns its unused notification, to be dropped outside of the mutex
    /// (queue.Q6); a held entry has none.
    pub(super) fn remove(&self, state: &mut State, ticket: Ticket) -> Option<Notify> {
        let range = state.queue.range_of(&ticket);
        let notify = state.queue.remove(ticket);
        Striped::ungate(self.table.view(), range);
        notify
    }

    /// Releases pieces under the mutex, and unblocks the requests that counted them (striped.R1).
    #[cold]
    pub(super) fn release_gated(&self, range: ByteRange, mode: Mode, log2: u8, slots: u32) {
        let mut state = lock(&self.state);
        self.for_each_held_piece(&mut state, range, mode, log2, slots, |state, piece, found| {
            match found {
                PieceLocation::Slot(stripe, slot) => {
                    stripe.free_slot(slot);
                    state.queue.front_released(piece, mode);
                }
                PieceLocation::Adopted(ticket) => drop(self.remove(state, ticket)),
            }
        });
        self.unlock(state);
    }

    /// Calls `f` for each piece of a range that was claimed in the front, with its present location after growing. The
    /// stripes are gated during the calls.
    fn for_each_held_piece(
        &self,
        state: &mut State,
        range: ByteRange,
        mode: Mode,
        log2: u8,
        mut slots: u32,
        mut f: impl FnMut(&mut State, ByteRange, PieceLocation<'_>),
    ) {
        let view = self.table.view();
        let stayed = view.log2() == u32::from(log2);
        if !stayed && view.pieces(range) > PIECES_MAX as u64 {
            let ticket = state.queue.find_adopted(range, mode).expect("adopted whole (table.B3)");
            return f(state, range, PieceLocation::Adopted(ticket));
        }
        Striped::gate(view, range);
        view.for_each_piece(range, |piece, stripe| {
            let slot =
                if stayed { Some(slots & SLOT_BITS_MASK) } else { stripe.find_moved(piece, mode) };
            slots >>= SLOT_BITS;
            let found = match slot {
                Some(slot) => PieceLocation::Slot(stripe, slot),
                None => {
                    let ticket = state.queue.find_adopted(piece, mode);
                    PieceLocation::Adopted(ticket.expect("moved or adopted (table.B3)"))
                }
            };
            f(state, piece, found);
        });
        Striped::ungate(view, range);
    }

    #[cold]
    pub(super) fn release_queued(&self, ticket: Ticket) {
        let mut state = lock(&self.state);
        let _none = self.remove(&mut state, ticket);
        self.unlock(state);
    }

    #[cold]
    pub(super) fn remove_drained_bias(&self) {
        let mut state = lock(&self.state);
        if self.table.whole.is_drained() {
            self.remove_bias(&mut state);
        }
        self.unlock(state);
    }

    pub(super) fn unlock(&self, state: MutexGuard<'_, State>) {
        self.waiting.store(state.queue.waiting() as u32, Ordering::Relaxed);
        unlock_and_wake(&self.state, state, |state| &mut state.queue);
    }

    pub(super) fn upgrade(&self, state: &mut State, range: ByteRange, held: &mut Held) -> bool {
        self.remove_unused_bias(state);
        if matches!(held.location(), HoldLocation::Whole) {
            if !self.table.whole.close_if_alone() {
                return false;
            }
            // The only holder takes over the bias as its own entry.
            let bias = state.bias.take().expect("counted (striped.R4)");
            *held = HoldLocation::Queue(bias).into();
        }
        match held.location() {
            HoldLocation::Front { log2, slots } => self.upgrade_front(state, range, log2, slots),
            HoldLocation::Queue(ticket) => {
                Striped::count_front(self.table.view(), range, |_| true) == 0
                    && state.queue.try_upgrade(&ticket)
            }
            HoldLocation::Whole => unreachable!("became a queue entry"),
        }
    }

    fn upgrade_front(&self, state: &mut State, range: ByteRange, log2: u8, slots: u32) -> bool {
        let view = self.table.view();
        Striped::gate(view, range);
        let adopted_whole =
            view.log2() != u32::from(log2) && view.pieces(range) > PIECES_MAX as u64;
        let ours = if adopted_whole { 1 } else { view.pieces(range) };
        // Alone, if the held pieces are as many as the caller's, in the front or adopted (table.B3).
        let held = Striped::count_front(view, range, |_| true) + state.queue.count_held(range);
        let alone = u64::from(held) == ours;
        if alone {
            self.for_each_held_piece(
                state,
                range,
                Mode::Shared,
                log2,
                slots,
                |state, piece, found| match found {
                    PieceLocation::Slot(stripe, slot) => {
                        stripe.set_mode(slot, Mode::Exclusive);
                        state.queue.front_upgraded(piece);
                    }
                    PieceLocation::Adopted(ticket) => {
                        let upgraded = state.queue.try_upgrade(&ticket);
                        debug_assert!(upgraded, "alone");
                    }
                },
            );
        }
        Striped::ungate(view, range);
        alone
    }

    pub(super) fn downgrade_front(
        &self,
        state: &mut State,
        range: ByteRange,
        log2: u8,
        slots: u32,
    ) {
        let mode = Mode::Exclusive;
        self.for_each_held_piece(
            state,
            range,
            mode,
            log2,
            slots,
            |state, piece, found| match found {
                PieceLocation::Slot(stripe, slot) => {
                    stripe.set_mode(slot, Mode::Shared);
                    state.queue.front_downgraded(piece);
                }
                PieceLocation::Adopted(ticket) => state.queue.downgrade(&ticket),
            },
        );
    }
}

/// Present location of a held piece.
enum PieceLocation<'a> {
    Slot(&'a Stripe, u32),
    Adopted(Ticket),
}
