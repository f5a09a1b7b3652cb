//! The limit of page reads in flight, and the wait queue for it.
//!
//! A read that a task or a thread waits for has a *slot* (a permit) until it ends. If no slot is
//! free, a thread waits for one ([`Slots`]), and a task queues an *offer*, a continuation that gets
//! the slot. Read-ahead, which has no waiter, has a separate limit in the backend, and so have
//! pipelines.
//!
//! ```text
//!   enter:  a slot of the thread's cache; else CAS of the word, free > 0: free -= 1
//!   wait:   lock -> CAS, none free: WAITED_FOR -> (the first) fence, take all cached slots; if there were
//!           some, free += that, and return without waiting -> add the offer -> unlock
//!   give:   not WAITED_FOR: add it to the cache -> fence -> still not WAITED_FOR; or if the cache is full,
//!           CAS of the word, not WAITED_FOR: free += 1
//!           else lock -> take the first offer, clear WAITED_FOR if it was the last -> unlock -> call it
//! ```
//!
//! - **L1** A slot is taken before pages are claimed. So a page is FILLING only while its read is
//!   in flight, and a thread that waits for a slot has claimed no page (fill.F1, miss.M3).
//! - **L2** The holder of a slot waits only for the backend: not for a slot, a guard, a page or a
//!   frame, nor for memory of its caller, which a thread of the program may have to provide. So
//!   each slot is returned.
//! - **L3** A waiter for a slot has none. It may hold a guard for which other operations wait: by
//!   L2 none of those has a slot.
//! - **L4** WAITED_FOR is set while offers wait. Then no slot is free, nor cached for longer than
//!   L8 takes: a returned slot goes to the first waiter, thread or task, and latecomers find none.
//! - **L5** Reads of one batch take a slot each, and wait only for the first one. Reads without a
//!   slot are made after the others.
//! - **L6** An offer uses the slot, or returns it for the next offer. It must not wait. It starts a
//!   read itself instead of waking a task that would: a woken task may not be polled for long, or
//!   ever, and other waiters would wait for the slot reserved for it. A waiting thread does take
//!   its slot.
//! - **L7** If a slot is returned while an offer is called on the same thread, for example because
//!   the read that it starts is refused, the slot waits until that call returns. So offers are
//!   called one after the other, and a queue of any length needs no more stack than one offer.
//! - **L8** Returned slots are cached [`slot_cache`] the threads that take the next ones, so that misses
//!   share no word. With 16 and more processors, each of them would wait for the writes of the
//!   others (docs/scaling.md). The first waiter sets WAITED_FOR, fences, and takes all cached
//!   slots. A thread that adds a slot to a cache fences and reads WAITED_FOR, and then takes a slot
//!   back, which goes to the first waiter. So one of them sees the other, and no slot stays in a
//!   cache while a thread or task waits. If a latecomer has taken it in between, that thread
//!   returns it to the queue.
//!
//! Orderings: all are Relaxed, except for the fences of L8. The word is only a count: each decision
//! is one RMW of it, and so of its latest value. Data that belongs to WAITED_FOR is under the lock
//! under which it is changed.
//!
//! Locks: that of the offers; nothing is called under it.

mod slot_cache;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::io::batch;
use crate::io::read_limit::slot_cache::SlotCache;
use crate::sync::MutexExt;
use crate::sync::{Arc, AtomicUsize, Condvar, Mutex, fence, thread_local};
use crate::units::PAGE_BYTES_MIN;

/// The maximum number of reads in flight of one engine. Untuned.
pub(crate) const READS_MAX: usize = 1024;

/// A bit of the word: offers wait.
const WAITED_FOR: usize = 1;
/// In the word: one free slot.
const ONE: usize = 2;

pub(crate) struct Flight {
    word: AtomicUsize,
    slot_cache: SlotCache,
    offers: Mutex<Offers>,
}

#[derive(Default)]
struct Offers {
    next: u64,
    waiting: VecDeque<(FlightTicket, Offer)>,
}

/// Uses a slot, or returns it (L6).
pub(crate) type Offer = Box<dyn FnOnce(FlightSlot) -> Option<FlightSlot> + Send>;

/// The position of a waiting offer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FlightTicket(u64);

/// The permit of one read in flight.
pub(crate) struct FlightSlot {
    /// None after it was passed on.
    flight: Option<Arc<Flight>>,
}

/// The same, for a holder that keeps the engine alive: it saves a reference count.
pub(crate) struct KeptSlot<'f>(&'f Arc<Flight>);

impl Flight {
    /// A limit of at most `reads_max`. It is also low enough that one-page reads leave most of the
    /// cache unclaimed; otherwise tasks would fall back to workers because no frame is free.
    pub(crate) fn new(reads_max: usize, cache_bytes: u64) -> Arc<Flight> {
        let spare = cache_bytes / 4 / u64::from(PAGE_BYTES_MIN);
        let free = reads_max.min(spare as usize).max(1);
        Flight::with(free, SlotCache::new(free))
    }

    fn with(free: usize, slot_cache: SlotCache) -> Arc<Flight> {
        Arc::new(Flight {
            word: AtomicUsize::new(free * ONE),
            slot_cache,
            offers: Mutex::default(),
        })
    }

    /// The number of waiters.
    pub(crate) fn waiting(&self) -> usize {
        self.offers.acquire().waiting.len()
    }

    /// A slot, unless none is free or the free ones are cached by other threads.
    pub(crate) fn try_enter(flight: &Arc<Flight>) -> Option<FlightSlot> {
        flight.try_take().then(|| FlightSlot { flight: Some(Arc::clone(flight)) })
    }

    /// The same for a holder that keeps the flight alive.
    #[inline]
    pub(crate) fn try_enter_kept(flight: &Arc<Flight>) -> Option<KeptSlot<'_>> {
        flight.try_take().then_some(KeptSlot(flight))
    }

    #[inline]
    fn try_take(&self) -> bool {
        let take = |word: usize| word.checked_sub(ONE);
        self.slot_cache.try_take() || self.word.fetch_update(Relaxed, Relaxed, take).is_ok()
    }

    /// Returns a slot while there is no waiter. False: there is one (L4).
    #[inline]
    fn try_give(&self) -> bool {
        let is_waited_for = || self.word.load(Relaxed) & WAITED_FOR != 0;
        if !is_waited_for() && self.slot_cache.try_add() {
            // L8; pairs with the fence in `wait`, where the argument is.
            fence(Acquire);
            return !(is_waited_for() && self.slot_cache.try_take());
        }
        let give = |word: usize| (word & WAITED_FOR == 0).then_some(word + ONE);
        self.word.fetch_update(Relaxed, Relaxed, give).is_ok()
    }

    /// Queues an offer. `None`: a slot is free now.
    pub(crate) fn wait(&self, offer: Offer) -> Option<FlightTicket> {
        let mut offers = self.offers.acquire();
        let none_free = |word: usize| (word < ONE).then_some(WAITED_FOR);
        self.word.fetch_update(Relaxed, Relaxed, none_free).ok()?;
        if offers.waiting.is_empty() {
            // L8; pairs with the fence in `try_give`. Both sides access the cache by an RMW. Either
            // the add of a slot comes first, and the slot is found here; or the add reads the value
            // that is stored here, and its thread sees WAITED_FOR.
            fence(Release);
            let found = self.slot_cache.take_all();
            if found > 0 {
                // No other thread changes the word while WAITED_FOR is set.
                self.word.fetch_add(found * ONE - WAITED_FOR, Relaxed);
                return None;
            }
        }
        let ticket = FlightTicket(offers.next);
        offers.next += 1;
        offers.waiting.push_back((ticket, offer));
        Some(ticket)
    }

    /// Removes an offer, unless it was called.
    pub(crate) fn withdraw_offer(&self, ticket: FlightTicket) {
        let mut offers = self.offers.acquire();
        let at = offers.waiting.binary_search_by_key(&ticket.0, |(waiting, _)| waiting.0);
        let offer = at.ok().and_then(|at| offers.waiting.remove(at));
        self.note_waiting(&offers);
        drop(offers);
        drop(offer);
    }

    fn next_offer(&self) -> Option<Offer> {
        let mut offers = self.offers.acquire();
        let first = offers.waiting.pop_front();
        self.note_waiting(&offers);
        first.map(|(_, offer)| offer)
    }

    fn note_waiting(&self, offers: &Offers) {
        if offers.waiting.is_empty() {
            self.word.fetch_and(!WAITED_FOR, Relaxed);
        }
    }

    /// Waits until a slot is handed over, or is free.
    #[cold]
    fn wait_for_slot(&self) {
        // A thread with an open batch may be the one that has to complete a read.
        batch::wake_now();
        let place = Arc::new((Mutex::new(None), Condvar::new()));
        while !self.try_take() {
            let theirs = Arc::clone(&place);
            let offer: Offer = Box::new(move |slot| {
                *theirs.0.acquire() = Some(slot);
                theirs.1.notify_one();
                None
            });
            if self.wait(offer).is_none() {
                continue;
            }
            let mut handed = place.0.acquire();
            loop {
                if let Some(mut slot) = handed.take() {
                    // The slot continues without its reference to the flight, which the caller has.
                    slot.flight = None;
                    return;
                }
                handed = place.1.wait(handed).expect("no panic under the lock");
            }
        }
    }
}

impl Drop for FlightSlot {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take()
            && !flight.try_give()
        {
            pass_on(flight);
        }
    }
}

impl Drop for KeptSlot<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.0.try_give() {
            pass_on(Arc::clone(self.0));
        }
    }
}

thread_local! {
    /// Slots that were returned while this thread calls an offer (L7).
    static LATER: RefCell<Option<Vec<Arc<Flight>>>> = RefCell::default();
}

/// The calling of offers, which also ends by a panic.
struct Handing;

impl Drop for Handing {
    fn drop(&mut self) {
        let left = LATER.try_with(|later| later.borrow_mut().take()).ok().flatten();
        left.into_iter().flatten().for_each(|flight| drop(FlightSlot { flight: Some(flight) }));
    }
}

/// Gives a slot to the first offer, and a slot that it returns to the next one (L4, L7).
#[cold]
fn pass_on(flight: Arc<Flight>) {
    let mut mine = Some(flight);
    // A thread that is ending may have lost this list: it calls each offer immediately.
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
                offer(FlightSlot { flight: Some(flight) }).and_then(|mut slot| slot.flight.take())
            }
            // The last offer was removed or called.
            None => Some(flight),
        };
    }
}

/// The slots of a thread that waits for its reads. It begins without any.
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

    /// Adds a slot. Waits for the first one; false if there is no further one (L5).
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

    /// Returns all slots, after their reads have ended.
    pub(crate) fn give_back(&mut self) {
        for _ in 0..std::mem::take(&mut self.count) {
            if !self.flight.try_give() {
                drop(FlightSlot { flight: Some(Arc::clone(self.flight)) });
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
        while flight.offers.acquire().waiting.len() != waiting {
            std::thread::yield_now();
        }
    }

    /// Goal: threads and tasks get slots in the order of their arrival; an attempt in between gets
    /// none, and a waiter that leaves, or does not use its slot, does not delay the others (L4,
    /// L6).
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
            flight.withdraw_offer(left);
            drop(first);
        });
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(flight.word.load(Relaxed), ONE, "the slot is back");
    }

    /// Goal: when the last waiter leaves, WAITED_FOR is cleared.
    #[test]
    fn an_empty_line_keeps_no_slot() {
        let engine = engine(2);
        let flight = &engine.shared().flight;
        let mut slots = Slots::new(flight);
        assert!(slots.add() && slots.add() && !slots.add());
        assert!(Flight::try_enter(flight).is_none());
        let ticket = flight.wait(Box::new(|_| None)).unwrap();
        flight.withdraw_offer(ticket);
        flight.withdraw_offer(ticket);
        drop(slots);
        assert_eq!(flight.word.load(Relaxed), 2 * ONE);
        assert!(flight.wait(Box::new(|_| None)).is_none(), "there is one now");
    }

    /// Goal: however threads and offers arrive and leave, no slot is lost or added.
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
                                flight.withdraw_offer(ticket);
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

    /// Goal: cached slots are found by every waiter, and there are never more slots than the limit
    /// (L8). Method: threads take one slot or several, and tasks queue offers, so many that most
    /// wait; there are more slots than places, and each place caches some.
    #[test]
    fn cached_slots_reach_waiters() {
        const SLOTS: usize = 6;
        let flight = &Flight::with(SLOTS, SlotCache::of(crate::thread::shards(), 2));
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
        assert_eq!(called.load(Relaxed), left.load(Relaxed), "an offer waits forever");
        assert_eq!(flight.word.load(Relaxed) / ONE + flight.slot_cache.count(), SLOTS);
        let at_hand = flight.slot_cache.count();
        assert!(at_hand > 0, "none was kept");
        // One waiter can take all slots.
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
