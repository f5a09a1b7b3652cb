//! How many reads of pages are in flight, and the line for one more.
//!
//! Each read that a task or a thread waits for has a *slot* until it ends; where there is none, a thread
//! waits for it ([`Slots`]), and a task leaves an *offer*. Read-ahead, which nobody waits for, has a
//! bound of its own in the back end, and so have pipelines.
//!
//! ```text
//!   enter:  one of those at hand; else CAS of the word, free > 0: free -= 1
//!   wait:   lock -> CAS, none free: WAITED_FOR -> (the first) fence, take all that are at hand anywhere; if
//!           there were some, free += that, and nobody waits -> add the offer -> unlock
//!   give:   not WAITED_FOR: add it to those at hand -> fence -> not WAITED_FOR still; or if there are enough
//!           of them, CAS of the word, not WAITED_FOR: free += 1
//!           else lock -> take the first offer, clear WAITED_FOR if it was the last -> unlock -> call it
//! ```
//!
//! - **L1** A slot is taken before pages are claimed. So a page is FILLING only while its read is in
//!   flight, and a waiter for a slot has claimed nothing (fill.F1, miss.M3).
//! - **L2** The holder of a slot waits for nothing but the back end: not for a slot, a guard, a
//!   page or a frame, nor for memory of its caller's, which a thread of the program may have to
//!   bring. So each slot comes back.
//! - **L3** A waiter for a slot has none. It may have a guard, for which others wait: by L2 none of
//!   those has a slot.
//! - **L4** WAITED_FOR is set while offers wait, and then no slot is free, nor at hand for longer than L8
//!   takes: one that is given back goes to the first in the line, be it a thread or a task, and latecomers
//!   find none.
//! - **L5** Reads of one batch take a slot each; only for the first one waits. What there is no slot for is
//!   read after those for which there is.
//! - **L6** An offer uses the slot, or hands it back for the next. It must not wait. It starts a read by
//!   itself, instead of waking a task that would: a task that is woken may not be polled for long, or
//!   ever, and others would wait for the slot that it was to take. A thread that waits does take it.
//! - **L7** A slot that is given back while an offer is called on the same thread, as when the read that
//!   it starts is refused, waits until that returns: offers are called one after the other, and a line
//!   of any length needs no more stack than one.
//!
//! - **L8** Slots that are given back are kept [`near`] the threads that take the next ones, so that misses have
//!   no word in common: of 16 processors and more, each of them would wait for the others' writes of it (docs/scaling.md).
//!   The first to wait sets WAITED_FOR, fences, and takes all that are at hand; a thread that adds one
//!   there fences and looks for WAITED_FOR, and then takes one back, which goes to the first in the line.
//!   So either finds the other, and no slot is left where nobody looks while somebody waits for one. If a
//!   latecomer took it meanwhile, that one gives it back to the line.
//!
//! Orderings: all is Relaxed, but for L8's fences. The word counts and no more: each decision is one RMW of it, and
//! so of its latest value; what goes with WAITED_FOR is under the lock that it is changed under.
//!
//! Locks: the offers'; nothing is called under it.

mod near;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::io::batch;
use crate::io::flight::near::Near;
use crate::sync::{Arc, AtomicUsize, Condvar, Mutex, MutexGuard, fence, thread_local};
use crate::units::PAGE_BYTES_MIN;

/// The most reads of one engine. Chosen, not measured.
pub(crate) const READS_MAX: usize = 1024;

/// Of the word: offers wait.
const WAITED_FOR: usize = 1;
/// Of the word: one slot that is free.
const ONE: usize = 2;

pub(crate) struct Flight {
    word: AtomicUsize,
    near: Near,
    offers: Mutex<Offers>,
}

#[derive(Default)]
struct Offers {
    next: u64,
    waiting: VecDeque<(Ticket, Offer)>,
}

/// Uses a slot, or gives it back (L6).
pub(crate) type Offer = Box<dyn FnOnce(Slot) -> Option<Slot> + Send>;

/// An offer's place among those that wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket(u64);

/// One read in flight.
pub(crate) struct Slot {
    /// None once it was passed on.
    flight: Option<Arc<Flight>>,
}

/// The same, of a holder that keeps the engine: what goes with it is one count.
pub(crate) struct KeptSlot<'f>(&'f Arc<Flight>);

impl Flight {
    /// At most `reads_max`, and so few that reads of a page each leave most of the cache to others:
    /// else tasks would go to workers for want of frames.
    pub(crate) fn new(reads_max: usize, cache_bytes: u64) -> Arc<Flight> {
        let spare = cache_bytes / 4 / u64::from(PAGE_BYTES_MIN);
        let free = reads_max.min(spare as usize).max(1);
        Flight::with(free, Near::new(free))
    }

    fn with(free: usize, near: Near) -> Arc<Flight> {
        Arc::new(Flight { word: AtomicUsize::new(free * ONE), near, offers: Mutex::default() })
    }

    fn offers(&self) -> MutexGuard<'_, Offers> {
        self.offers.lock().expect("no panic under the lock")
    }

    /// How many wait for a slot.
    pub(crate) fn waiting(&self) -> usize {
        self.offers().waiting.len()
    }

    /// A slot, if there is one, or none but at other threads' hands.
    pub(crate) fn try_enter(flight: &Arc<Flight>) -> Option<Slot> {
        flight.try_take().then(|| Slot { flight: Some(Arc::clone(flight)) })
    }

    /// The same for a holder that keeps the flight.
    #[inline]
    pub(crate) fn try_enter_kept(flight: &Arc<Flight>) -> Option<KeptSlot<'_>> {
        flight.try_take().then_some(KeptSlot(flight))
    }

    #[inline]
    fn try_take(&self) -> bool {
        let take = |word: usize| word.checked_sub(ONE);
        self.near.try_take() || self.word.fetch_update(Relaxed, Relaxed, take).is_ok()
    }

    /// Gives back a slot for which nobody waits; false if somebody does (L4).
    #[inline]
    fn try_give(&self) -> bool {
        let is_waited_for = || self.word.load(Relaxed) & WAITED_FOR != 0;
        if !is_waited_for() && self.near.try_add() {
            // L8; pairs with the fence in `wait`: there is the rest.
            fence(Acquire);
            return !(is_waited_for() && self.near.try_take());
        }
        let give = |word: usize| (word & WAITED_FOR == 0).then_some(word + ONE);
        self.word.fetch_update(Relaxed, Relaxed, give).is_ok()
    }

    /// Leaves an offer for when there is a slot; `None` if there is one now.
    pub(crate) fn wait(&self, offer: Offer) -> Option<Ticket> {
        let mut offers = self.offers();
        let none_free = |word: usize| (word < ONE).then_some(WAITED_FOR);
        self.word.fetch_update(Relaxed, Relaxed, none_free).ok()?;
        if offers.waiting.is_empty() {
            // L8; pairs with the fence in `try_give`. Both add and take by an RMW of the place: of a slot, either
            // the add comes first, and it is found here, or it reads what is left here, and sees the sign.
            fence(Release);
            let found = self.near.take_all();
            if found > 0 {
                // Nobody else changes a word that is waited for.
                self.word.fetch_add(found * ONE - WAITED_FOR, Relaxed);
                return None;
            }
        }
        let ticket = Ticket(offers.next);
        offers.next += 1;
        offers.waiting.push_back((ticket, offer));
        Some(ticket)
    }

    /// Takes an offer back, unless it was called.
    pub(crate) fn leave(&self, ticket: Ticket) {
        let mut offers = self.offers();
        let at = offers.waiting.binary_search_by_key(&ticket.0, |(waiting, _)| waiting.0);
        let offer = at.ok().and_then(|at| offers.waiting.remove(at));
        self.note_waiting(&offers);
        drop(offers);
        drop(offer);
    }

    fn next_offer(&self) -> Option<Offer> {
        let mut offers = self.offers();
        let first = offers.waiting.pop_front();
        self.note_waiting(&offers);
        first.map(|(_, offer)| offer)
    }

    fn note_waiting(&self, offers: &Offers) {
        if offers.waiting.is_empty() {
            self.word.fetch_and(!WAITED_FOR, Relaxed);
        }
    }

    /// Waits until a slot is handed over, or there is one.
    #[cold]
    fn wait_for_slot(&self) {
        // A thread with an open batch may be the one that is to end a read.
        batch::tell_now();
        let place = Arc::new((Mutex::new(None), Condvar::new()));
        while !self.try_take() {
            let theirs = Arc::clone(&place);
            let offer: Offer = Box::new(move |slot| {
                *theirs.0.lock().expect("no panic under the lock") = Some(slot);
                theirs.1.notify_one();
                None
            });
            if self.wait(offer).is_none() {
                continue;
            }
            let mut handed = place.0.lock().expect("no panic under the lock");
            loop {
                if let Some(mut slot) = handed.take() {
                    // It goes on without its share of the flight, which the caller has.
                    slot.flight = None;
                    return;
                }
                handed = place.1.wait(handed).expect("no panic under the lock");
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take()
            && !flight.try_give()
        {
            hand_on(flight);
        }
    }
}

impl Drop for KeptSlot<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.0.try_give() {
            hand_on(Arc::clone(self.0));
        }
    }
}

thread_local! {
    /// Slots that were given back while this thread calls an offer (L7).
    static LATER: RefCell<Option<Vec<Arc<Flight>>>> = RefCell::default();
}

/// The calling of offers, which ends whatever becomes of them.
struct Handing;

impl Drop for Handing {
    fn drop(&mut self) {
        let left = LATER.try_with(|later| later.borrow_mut().take()).ok().flatten();
        left.into_iter().flatten().for_each(|flight| drop(Slot { flight: Some(flight) }));
    }
}

/// Gives a slot to the first offer, and what that one leaves to the next (L4, L7).
#[cold]
fn hand_on(flight: Arc<Flight>) {
    let mut mine = Some(flight);
    // A thread that is ending has no such list any more: it calls each offer where it stands.
    let _ = LATER.try_with(|later| match &mut *later.borrow_mut() {
        Some(later) => later.extend(mine.take()),
        none => *none = Some(Vec::new()),
    });
    if mine.is_none() {
        return;
    }
    let _handing = Handing;
    let given_back = || LATER.try_with(|later| later.borrow_mut().as_mut()?.pop()).ok().flatten();
    while let Some(flight) = mine.take().or_else(given_back) {
        if flight.try_give() {
            continue;
        }
        mine = match flight.next_offer() {
            Some(offer) => {
                offer(Slot { flight: Some(flight) }).and_then(|mut slot| slot.flight.take())
            }
            // The last one has left, or was called.
            None => Some(flight),
        };
    }
}

/// The slots of a thread that waits for its reads: none at first.
pub(crate) struct Slots<'e> {
    flight: &'e Arc<Flight>,
    count: usize,
}

impl<'e> Slots<'e> {
    pub(crate) fn new(flight: &'e Arc<Flight>) -> Slots<'e> {
        Slots { flight, count: 0 }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// One more. Waits for the first; false if there is no other (L5).
    pub(crate) fn add(&mut self) -> bool {
        if !self.flight.try_take() {
            if self.count > 0 {
                return false;
            }
            self.flight.wait_for_slot();
        }
        self.count += 1;
        true
    }

    /// Gives all back: what they were for has ended.
    pub(crate) fn give_back(&mut self) {
        for _ in 0..std::mem::take(&mut self.count) {
            if !self.flight.try_give() {
                drop(Slot { flight: Some(Arc::clone(self.flight)) });
            }
        }
    }
}

impl Drop for Slots<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(all(test, loom))]
mod loom_tests;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{BackendChoice, Engine};

    fn engine(reads: usize) -> Engine {
        let builder = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Memory);
        builder.reads_in_flight_max(reads).build().unwrap()
    }

    fn wait_until(flight: &Flight, waiting: usize) {
        while flight.offers().waiting.len() != waiting {
            std::thread::yield_now();
        }
    }

    /// Goal: threads and tasks get slots in the order in which they came; a try meanwhile gets
    /// none, and one that leaves the line, or does not use its slot, keeps nobody waiting (L4, L6).
    #[test]
    fn the_line_is_first_in_first_out() {
        let engine = engine(1);
        let flight = &engine.shared().flight;
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = Flight::try_enter(flight).unwrap();
        std::thread::scope(|scope| {
            for who in 0..6 {
                if who % 2 == 0 {
                    let order = Arc::clone(&order);
                    scope.spawn(move || {
                        let mut slots = Slots::new(flight);
                        assert!(slots.add());
                        assert!(!slots.add(), "one is all there is");
                        assert!(Flight::try_enter(flight).is_none(), "it is mine");
                        order.lock().unwrap().push(who);
                    });
                } else {
                    let (order, uses) = (Arc::clone(&order), who != 3);
                    let offer: Offer = Box::new(move |slot| {
                        order.lock().unwrap().push(who);
                        (!uses).then_some(slot)
                    });
                    assert!(flight.wait(offer).is_some());
                }
                wait_until(flight, who + 1);
            }
            let left = flight.wait(Box::new(|_| unreachable!("it has left"))).unwrap();
            flight.leave(left);
            drop(first);
        });
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(flight.word.load(Relaxed), ONE, "the slot is back");
    }

    /// Goal: the last to leave the line takes the sign that somebody waits with it.
    #[test]
    fn an_empty_line_keeps_no_slot() {
        let engine = engine(2);
        let flight = &engine.shared().flight;
        let mut slots = Slots::new(flight);
        assert!(slots.add() && slots.add() && !slots.add());
        assert!(Flight::try_enter(flight).is_none());
        let ticket = flight.wait(Box::new(|_| None)).unwrap();
        flight.leave(ticket);
        flight.leave(ticket);
        drop(slots);
        assert_eq!(flight.word.load(Relaxed), 2 * ONE);
        assert!(flight.wait(Box::new(|_| None)).is_none(), "there is one now");
    }

    /// Goal: however threads and offers come and go, slots are neither lost nor made.
    #[test]
    fn slots_are_neither_lost_nor_made() {
        let engine = engine(3);
        let flight = &engine.shared().flight;
        let held = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for who in 0..4usize {
                let held = &held;
                scope.spawn(move || {
                    for round in 0..2000usize {
                        if (who + round) % 3 == 0 {
                            let ticket = flight.wait(Box::new(Some));
                            if let Some(ticket) = ticket
                                && round % 2 == 0
                            {
                                flight.leave(ticket);
                            }
                            continue;
                        }
                        let mut slots = Slots::new(flight);
                        while slots.count() < 1 + round % 2 && slots.add() {}
                        let count = slots.count();
                        assert!(held.fetch_add(count, Relaxed) + count <= 3);
                        if round % 7 == 0 {
                            std::thread::yield_now();
                        }
                        held.fetch_sub(count, Relaxed);
                    }
                });
            }
        });
        assert_eq!(flight.word.load(Relaxed), 3 * ONE);
    }

    /// Goal: slots that are at hand somewhere are had by all that wait for one, and there are no more of them
    /// than there may be (L8).
    /// Method: threads take one and several, and tasks leave offers, so many that most wait; more slots
    /// than places, of which each keeps some.
    #[test]
    fn slots_at_hand_are_had_by_who_waits() {
        const SLOTS: usize = 6;
        let flight = &Flight::with(SLOTS, Near::of(crate::thread::shards(), 2));
        let (held, called) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let left = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for who in 0..8usize {
                let (held, called, left) = (&held, &called, &left);
                scope.spawn(move || {
                    for round in 0..2000usize {
                        if (who + round) % 5 == 0 {
                            let called = Arc::clone(called);
                            let offer: Offer = Box::new(move |slot| {
                                called.fetch_add(1, Relaxed);
                                Some(slot)
                            });
                            left.fetch_add(usize::from(flight.wait(offer).is_some()), Relaxed);
                            continue;
                        }
                        let mut slots = Slots::new(flight);
                        while slots.count() < 1 + round % 4 && slots.add() {}
                        let count = slots.count();
                        assert!(held.fetch_add(count, Relaxed) + count <= SLOTS);
                        if round % 7 == 0 {
                            std::thread::yield_now();
                        }
                        held.fetch_sub(count, Relaxed);
                    }
                });
            }
        });
        assert_eq!(called.load(Relaxed), left.load(Relaxed), "an offer waits for ever");
        assert_eq!(flight.word.load(Relaxed) / ONE + flight.near.count(), SLOTS);
        let at_hand = flight.near.count();
        assert!(at_hand > 0, "none was kept");
        // All are had by one who waits.
        let mut all = Vec::new();
        while all.len() < SLOTS {
            match Flight::try_enter(flight) {
                Some(slot) => all.push(slot),
                None => assert!(flight.wait(Box::new(|_| unreachable!())).is_none()),
            }
        }
        assert!(Flight::try_enter(flight).is_none());
    }
}
