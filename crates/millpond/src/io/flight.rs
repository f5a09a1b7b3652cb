//! How many reads that tasks wait for are in flight, and who wants one more.
//!
//! A [`Slot`] is taken before pages are claimed, and the read has it until it ends; so a page is FILLING
//! only while its read is in flight. Where there is no slot an [`Offer`] is left, under the same lock, so
//! that the next slot that is free is not missed. Whoever gives a slot back calls the first offer with
//! it, and the next with what that one left.
//!
//! An offer starts a read by itself, instead of waking a task that would: a task that is woken may not
//! be polled for long, or ever, and others would wait for the slot that it was to take.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::cached::Shared;
use crate::options::PAGE_BYTES_MIN;

/// The most reads of one engine.
pub(crate) const READS_MAX: usize = 1024;

pub(crate) struct Flight {
    state: Mutex<State>,
}

struct State {
    free: usize,
    next: u64,
    waiting: VecDeque<(Ticket, Offer)>,
}

/// Uses a slot, or gives it back. It must not wait.
pub(crate) type Offer = Box<dyn FnOnce(Slot) -> Option<Slot> + Send>;

/// An offer's place among those that wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket(u64);

/// One read in flight.
pub(crate) struct Slot {
    /// None once it was passed on.
    shared: Option<Arc<Shared>>,
}

impl Flight {
    /// At most `reads_max`, and so few that reads of a page each leave most of the cache to others:
    /// else tasks would go to workers for want of frames.
    pub(crate) fn new(reads_max: usize, cache_bytes: u64) -> Flight {
        let spare = cache_bytes / 4 / u64::from(PAGE_BYTES_MIN);
        let free = reads_max.min(spare as usize).max(1);
        Flight { state: Mutex::new(State { free, next: 0, waiting: VecDeque::new() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// A slot, if there is one.
    pub(crate) fn try_enter(shared: &Arc<Shared>) -> Option<Slot> {
        let mut state = shared.flight.state();
        state.free = state.free.checked_sub(1)?;
        drop(state);
        Some(Slot { shared: Some(Arc::clone(shared)) })
    }

    /// Leaves an offer for when there is a slot; `None` if there is one now.
    pub(crate) fn wait(&self, offer: Offer) -> Option<Ticket> {
        let mut state = self.state();
        if state.free > 0 {
            return None;
        }
        let ticket = Ticket(state.next);
        state.next += 1;
        state.waiting.push_back((ticket, offer));
        Some(ticket)
    }

    /// Takes an offer back, unless it was called.
    pub(crate) fn leave(&self, ticket: Ticket) {
        let mut state = self.state();
        let at = state.waiting.binary_search_by_key(&ticket.0, |(waiting, _)| waiting.0);
        let offer = at.ok().and_then(|at| state.waiting.remove(at));
        drop(state);
        drop(offer);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Some(mut shared) = self.shared.take() else { return };
        loop {
            let mut state = shared.flight.state();
            let Some((_, offer)) = state.waiting.pop_front() else {
                state.free += 1;
                return;
            };
            drop(state);
            let left = offer(Slot { shared: Some(shared) });
            match left.and_then(|mut slot| slot.shared.take()) {
                Some(unused) => shared = unused,
                None => return,
            }
        }
    }
}
