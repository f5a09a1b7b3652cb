//! Loom models of the queue for slots: threads and offers arrive, slots are returned, offers leave.
//!
//! A thread that gets no slot sleeps forever, which loom reports as a deadlock. Loom cannot unwind
//! from that. So the `loom_flight_without_*` mutation tests, which leave one rule out and must
//! fail, use offers.
//!
//! read_limit.L1, and the prohibitions of read_limit.L2 and read_limit.L6, are for the callers to keep:
//! `src/tests/in_flight.rs`.

use std::cell::Cell;

use loom::model;
use loom::sync::Mutex;
use loom::thread;

use super::slot_cache::PLACE;
use super::*;

fn flight(slots: usize) -> Arc<Flight> {
    Flight::new(slots, 1 << 20)
}

fn bounded_model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

fn spawn<T: 'static>(
    flight: &Arc<Flight>,
    body: impl FnOnce(&Arc<Flight>) -> T + 'static,
) -> thread::JoinHandle<T> {
    let flight = Arc::clone(flight);
    thread::spawn(move || body(&flight))
}

/// The fate of offers: those that were called, in that order, and the slots of those that have not
/// ended.
#[derive(Default)]
struct Called {
    order: Vec<u32>,
    /// An offer was called within the call of another one, on the same thread.
    nested: bool,
    slots: Vec<FlightSlot>,
}

type Calls = Arc<Mutex<Called>>;

fn calls() -> Calls {
    Arc::new(Mutex::default())
}

fn called(calls: &Calls) -> Vec<u32> {
    calls.lock().unwrap().order.clone()
}

/// Ends the reads of all called offers.
fn end_all(calls: &Calls) {
    let slots = std::mem::take(&mut calls.lock().unwrap().slots);
    drop(slots);
}

/// Starts a read, which continues.
fn starts(calls: &Calls, who: u32) -> Offer {
    let calls = Arc::clone(calls);
    Box::new(move |slot| {
        let mut called = calls.lock().unwrap();
        called.order.push(who);
        called.slots.push(slot);
        None
    })
}

/// Starts a read that is refused: its slot is returned before the call returns.
fn is_refused(calls: &Calls, who: u32) -> Offer {
    loom::thread_local! {
        static DEPTH: Cell<u32> = Cell::new(0);
    }
    let calls = Arc::clone(calls);
    Box::new(move |slot| {
        let depth = DEPTH.with(|depth| depth.replace(depth.get() + 1));
        let mut called = calls.lock().unwrap();
        called.order.push(who);
        called.nested |= depth > 0;
        drop(called);
        drop(slot);
        DEPTH.with(|now| now.set(depth));
        None
    })
}

/// Does not need the slot.
fn hands_back(calls: &Calls, who: u32) -> Offer {
    let calls = Arc::clone(calls);
    Box::new(move |slot| {
        calls.lock().unwrap().order.push(who);
        Some(slot)
    })
}

fn assert_all_free(flight: &Flight, slots: usize) {
    let free = flight.word.load(Relaxed) / ONE + flight.slot_cache.count();
    assert_eq!(free, slots, "slots are lost or made");
    assert_eq!(flight.word.load(Relaxed) & WAITED_FOR, 0);
    assert!(flight.offers.acquire().waiting.is_empty());
}

/// A step of the protocol as a mutation test does it.
impl Flight {
    /// As `try_take`, in two steps.
    fn take_in_two_steps(&self) -> bool {
        let word = self.word.load(Relaxed);
        let taken = word >= ONE;
        if taken {
            self.word.store(word - ONE, Relaxed);
        }
        taken
    }

    fn push(&self, offers: &mut Offers, offer: Offer) {
        offers.waiting.push_back((FlightTicket(offers.next), offer));
        offers.next += 1;
    }

    /// As `wait`, with the word changed before the lock is taken.
    fn wait_unlocked(&self, offer: Offer) {
        let none_free = |word: usize| (word < ONE).then_some(WAITED_FOR);
        if self.word.fetch_update(Relaxed, Relaxed, none_free).is_ok() {
            self.push(&mut self.offers.acquire(), offer);
        }
    }

    /// As `wait`, without setting WAITED_FOR.
    fn wait_unnoted(&self, offer: Offer) {
        let mut offers = self.offers.acquire();
        if self.word.load(Relaxed) < ONE {
            self.push(&mut offers, offer);
        }
    }

    /// As `next_offer`, but WAITED_FOR is cleared after the lock was released.
    fn next_offer_noted_late(&self) -> Option<Offer> {
        let mut offers = self.offers.acquire();
        let first = offers.waiting.pop_front();
        let was_last = offers.waiting.is_empty();
        drop(offers);
        if was_last {
            self.word.fetch_and(!WAITED_FOR, Relaxed);
        }
        first.map(|(_, offer)| offer)
    }
}

/// Passes a slot on without its drop.
fn taken_from(mut slot: FlightSlot) -> Arc<Flight> {
    slot.flight.take().expect("not passed on yet")
}

fn two_threads_and_one_slot(try_take: fn(&Flight) -> bool) {
    model(move || {
        let flight = flight(1);
        let other = spawn(&flight, move |flight| try_take(flight));
        let mine = try_take(&flight);
        let theirs = other.join().unwrap();
        assert!(!(mine && theirs), "one too many");
        assert!(mine || theirs, "it was free");
        drop(FlightSlot { flight: Some(Arc::clone(&flight)) });
        assert_all_free(&flight, 1);
    });
}

/// Goal: no slot is taken twice.
#[test]
fn loom_flight_a_slot_is_taken_once() {
    two_threads_and_one_slot(Flight::try_take);
}

#[test]
#[should_panic(expected = "one too many")]
fn loom_flight_without_one_exchange_a_slot_is_taken_twice() {
    two_threads_and_one_slot(Flight::take_in_two_steps);
}

/// Goal: threads that wait for a slot each get it, one after the other, and it is free at the end
/// (read_limit.L4).
#[test]
fn loom_flight_threads_wait_in_line() {
    bounded_model(|| {
        let (flight, held) = (flight(1), Arc::new(AtomicUsize::new(0)));
        let body = {
            let held = Arc::clone(&held);
            move |flight: &Arc<Flight>| {
                let mut slots = Slots::new(flight);
                assert!(slots.add());
                assert_eq!(held.fetch_add(1, Relaxed), 0, "one too many");
                held.fetch_sub(1, Relaxed);
            }
        };
        let others = [spawn(&flight, body.clone()), spawn(&flight, body.clone())];
        body(&flight);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_all_free(&flight, 1);
    });
}

/// One slot is returned while an offer is queued.
fn an_offer_meets_a_slot(wait: fn(&Flight, Offer), give: fn(FlightSlot)) {
    model(move || {
        let (flight, calls) = (flight(1), calls());
        let slot = Flight::try_enter(&flight).unwrap();
        let waiter = spawn(&flight, {
            let offer = starts(&calls, 1);
            move |flight| wait(flight, offer)
        });
        give(slot);
        waiter.join().unwrap();
        let waits = !flight.offers.acquire().waiting.is_empty();
        assert!(!waits, "waits forever");
        end_all(&calls);
        assert_all_free(&flight, 1);
    });
}

fn wait(flight: &Flight, offer: Offer) {
    let _ = flight.wait(offer);
}

/// Goal: an offer that meets a slot that is being returned is called, or finds it free (read_limit.L4).
#[test]
fn loom_flight_an_offer_meets_a_slot() {
    an_offer_meets_a_slot(wait, drop);
}

#[test]
#[should_panic(expected = "waits forever")]
fn loom_flight_without_the_lock_an_offer_waits() {
    an_offer_meets_a_slot(Flight::wait_unlocked, drop);
}

#[test]
#[should_panic(expected = "waits forever")]
fn loom_flight_without_the_sign_an_offer_waits_on() {
    an_offer_meets_a_slot(Flight::wait_unnoted, drop);
}

#[test]
#[should_panic(expected = "waits forever")]
fn loom_flight_without_a_check_an_offer_waits() {
    an_offer_meets_a_slot(wait, |slot| {
        taken_from(slot).word.fetch_add(ONE, Relaxed);
    });
}

/// The last offer is removed from the queue while another one arrives; of two slots, one stays
/// taken.
fn the_last_offer_meets_the_next(next_offer: fn(&Flight) -> Option<Offer>) {
    model(move || {
        let (flight, calls) = (flight(2), calls());
        let slots = [(); 2].map(|()| Flight::try_enter(&flight).unwrap());
        assert!(flight.wait(starts(&calls, 1)).is_some());
        let waiter = spawn(&flight, {
            let offer = starts(&calls, 2);
            move |flight| flight.wait(offer).is_some()
        });
        let [mine, others] = slots;
        let offer = next_offer(&flight).expect("it waits");
        assert!(offer(mine).is_none());
        assert!(waiter.join().unwrap(), "none is free");
        drop(others);
        assert_eq!(called(&calls), [1, 2], "waits forever");
        end_all(&calls);
        assert_all_free(&flight, 2);
    });
}

/// Goal: WAITED_FOR stays set for an offer that arrives while the last one is removed (read_limit.L4).
#[test]
fn loom_flight_the_last_offer_meets_the_next() {
    the_last_offer_meets_the_next(Flight::next_offer);
}

#[test]
#[should_panic(expected = "waits forever")]
fn loom_flight_without_the_locked_flag_an_offer_waits() {
    the_last_offer_meets_the_next(Flight::next_offer_noted_late);
}

/// An offer waits; a latecomer finds no slot when one is returned.
fn a_latecomer_tries(give: fn(FlightSlot)) {
    model(move || {
        let (flight, calls) = (flight(1), calls());
        let slot = Flight::try_enter(&flight).unwrap();
        assert!(flight.wait(starts(&calls, 1)).is_some());
        let latecomer = spawn(&flight, |flight| Flight::try_enter(flight).is_some());
        give(slot);
        assert!(!latecomer.join().unwrap(), "overtaken");
        assert_eq!(called(&calls), [1]);
        end_all(&calls);
        assert_all_free(&flight, 1);
    });
}

/// Goal: a slot goes to the first waiter, and to no latecomer (read_limit.L4).
#[test]
fn loom_flight_no_waiter_is_overtaken() {
    a_latecomer_tries(drop);
}

#[test]
#[should_panic(expected = "overtaken")]
fn loom_flight_without_handing_it_over_a_slot_goes_to_a_latecomer() {
    a_latecomer_tries(|slot| {
        let flight = taken_from(slot);
        flight.word.fetch_add(ONE, Relaxed);
        if flight.try_take()
            && let Some(offer) = flight.next_offer()
        {
            offer(FlightSlot { flight: Some(flight) });
        }
    });
}

/// The only offer leaves while a slot is returned.
fn a_waiter_leaves(give: fn(FlightSlot)) {
    model(move || {
        let (flight, calls) = (flight(1), calls());
        let slot = Flight::try_enter(&flight).unwrap();
        let ticket = flight.wait(starts(&calls, 1)).unwrap();
        let leaver = spawn(&flight, move |flight| flight.withdraw_offer(ticket));
        give(slot);
        leaver.join().unwrap();
        end_all(&calls);
        assert_eq!(Arc::strong_count(&calls), 1, "an offer is left");
        assert_all_free(&flight, 1);
    });
}

/// Goal: an offer that leaves while it could be called is called or not, and its slot is not lost.
#[test]
fn loom_flight_a_waiter_leaves() {
    a_waiter_leaves(drop);
}

#[test]
#[should_panic(expected = "slots are lost or made")]
fn loom_flight_without_a_second_check_a_slot_is_lost() {
    a_waiter_leaves(|slot| {
        let flight = taken_from(slot);
        if !flight.try_give()
            && let Some(offer) = flight.next_offer()
        {
            offer(FlightSlot { flight: Some(flight) });
        }
    });
}

/// The first offer does not use its slot; a thread and an offer wait behind it.
fn a_slot_is_not_used(first: fn(&Calls, u32) -> Offer) {
    model(move || {
        let (flight, calls) = (flight(1), calls());
        let slot = Flight::try_enter(&flight).unwrap();
        assert!(flight.wait(first(&calls, 1)).is_some());
        let waiter = spawn(&flight, {
            let offer = starts(&calls, 2);
            move |flight| flight.wait(offer).is_none()
        });
        drop(slot);
        let found_one = waiter.join().unwrap();
        assert!(found_one || called(&calls) == [1, 2], "waits forever");
        end_all(&calls);
        assert_all_free(&flight, 1);
    });
}

/// Goal: a slot that an offer returns goes to the next one (read_limit.L6).
#[test]
fn loom_flight_a_slot_is_handed_back() {
    a_slot_is_not_used(hands_back);
}

/// The offer wakes a task, which is never polled.
#[test]
#[should_panic(expected = "waits forever")]
fn loom_flight_without_returning_it_the_next_waits() {
    a_slot_is_not_used(starts);
}

/// Two threads return two slots, to offers whose reads are refused.
fn reads_are_refused(give: fn(FlightSlot)) {
    model(move || {
        let (flight, calls) = (flight(2), calls());
        let [mine, others] = [(); 2].map(|()| Flight::try_enter(&flight).unwrap());
        for who in 1..=3 {
            assert!(flight.wait(is_refused(&calls, who)).is_some());
        }
        let other = spawn(&flight, move |_| give(others));
        give(mine);
        other.join().unwrap();
        assert!(!calls.lock().unwrap().nested, "called within a call");
        let mut called = called(&calls);
        called.sort_unstable();
        assert_eq!(called, [1, 2, 3], "waits forever");
        assert_all_free(&flight, 2);
    });
}

/// Goal: offers whose reads are refused are called one after the other, each once, and no slot is
/// lost (read_limit.L7).
#[test]
fn loom_flight_reads_are_refused() {
    reads_are_refused(drop);
}

#[test]
#[should_panic(expected = "called within a call")]
fn loom_flight_without_waiting_for_its_end_a_call_is_within_another() {
    reads_are_refused(|slot| {
        let flight = taken_from(slot);
        if !flight.try_give()
            && let Some(offer) = flight.next_offer()
        {
            offer(FlightSlot { flight: Some(flight) });
        }
    });
}

/// Goal: threads whose batches need all slots finish: a batch waits only for its first slot
/// (read_limit.L5).
#[test]
fn loom_flight_two_batches_want_all() {
    model(|| {
        let flight = flight(2);
        let body = |flight: &Arc<Flight>| {
            let mut slots = Slots::new(flight);
            assert!(slots.add());
            slots.add();
        };
        let other = spawn(&flight, body);
        body(&flight);
        other.join().unwrap();
        assert_all_free(&flight, 2);
    });
}

#[test]
#[should_panic(expected = "for one another")]
fn loom_flight_without_going_on_with_one_two_batches_wait_for_one_another() {
    model(|| {
        let (flight, calls) = (flight(2), calls());
        // True: the thread has a slot, and waits for the other.
        let body = {
            let calls = Arc::clone(&calls);
            move |flight: &Arc<Flight>| {
                let Some(first) = Flight::try_enter(flight) else { return false };
                let mut second = Flight::try_enter(flight);
                if second.is_none() && flight.wait(starts(&calls, 0)).is_some() {
                    calls.lock().unwrap().slots.push(first);
                    return true;
                }
                second = second.or_else(|| Flight::try_enter(flight));
                drop((first, second));
                false
            }
        };
        let other = spawn(&flight, body.clone());
        let waits = body(&flight);
        let waits = waits && other.join().unwrap();
        assert!(!waits || !called(&calls).is_empty(), "for one another");
    });
}

/// Goal: a waiter for a slot may hold a guard for which other threads wait after they have returned
/// their slots (read_limit.L2, read_limit.L3).
#[test]
fn loom_flight_a_waiter_holds_a_guard() {
    model(|| {
        let (flight, guard) = (flight(1), Arc::new(Mutex::new(())));
        let other = spawn(&flight, {
            let guard = Arc::clone(&guard);
            move |flight| {
                let mut slots = Slots::new(flight);
                assert!(slots.add());
                slots.give_back();
                drop(guard.lock().unwrap());
            }
        });
        let held = guard.lock().unwrap();
        let mut slots = Slots::new(&flight);
        assert!(slots.add());
        drop((slots, held));
        other.join().unwrap();
        assert_all_free(&flight, 1);
    });
}

#[test]
#[should_panic(expected = "for one another")]
fn loom_flight_without_returning_it_a_holder_waits_for_a_guard() {
    model(|| {
        let (flight, calls) = (flight(1), calls());
        let is_held = Arc::new(Mutex::new(false));
        // True: the thread has a slot, and waits for the guard.
        let other = spawn(&flight, {
            let (is_held, calls) = (Arc::clone(&is_held), Arc::clone(&calls));
            move |flight| {
                let Some(slot) = Flight::try_enter(flight) else { return false };
                let waits = *is_held.lock().unwrap();
                if waits {
                    calls.lock().unwrap().slots.push(slot);
                }
                waits
            }
        });
        *is_held.lock().unwrap() = true;
        let waits = flight.wait(starts(&calls, 1)).is_some();
        let waits = other.join().unwrap() && waits;
        assert!(!waits || !called(&calls).is_empty(), "for one another");
    });
}

/// A flight in which each of two places may cache a slot.
fn flight_with_caches(slots: usize) -> Arc<Flight> {
    Flight::with(slots, SlotCache::of(2, 1))
}

fn at_place(place: usize) {
    PLACE.with(|mine| mine.set(place));
}

/// The only slot is returned to one place while a thread of another place queues an offer.
fn an_offer_meets_a_cached_slot(wait: fn(&Flight, Offer), give: fn(FlightSlot)) {
    model(move || {
        let (flight, calls) = (flight_with_caches(1), calls());
        let slot = Flight::try_enter(&flight).unwrap();
        let waiter = spawn(&flight, {
            let offer = starts(&calls, 1);
            move |flight| {
                at_place(1);
                wait(flight, offer);
            }
        });
        give(slot);
        waiter.join().unwrap();
        let waits = !flight.offers.acquire().waiting.is_empty();
        assert!(!waits, "waits forever");
        end_all(&calls);
        assert_all_free(&flight, 1);
    });
}

/// Goal: an offer that meets a slot on its way to a cache is called, or finds it free (read_limit.L8).
#[test]
fn loom_flight_an_offer_meets_a_cached_slot() {
    an_offer_meets_a_cached_slot(wait, drop);
}

#[test]
#[should_panic(expected = "waits forever")]
fn loom_flight_without_draining_the_caches_an_offer_waits() {
    an_offer_meets_a_cached_slot(
        |flight, offer| {
            let mut offers = flight.offers.acquire();
            let none_free = |word: usize| (word < ONE).then_some(WAITED_FOR);
            if flight.word.fetch_update(Relaxed, Relaxed, none_free).is_ok() {
                flight.push(&mut offers, offer);
            }
        },
        drop,
    );
}

#[test]
#[should_panic(expected = "waits forever")]
fn loom_flight_without_a_check_after_it_a_cached_slot_is_left() {
    an_offer_meets_a_cached_slot(wait, |slot| {
        assert!(taken_from(slot).slot_cache.try_add());
    });
}

/// Goal: the same if a latecomer takes the slot from the cache: it returns it to the queue.
#[test]
fn loom_flight_a_latecomer_takes_a_cached_slot() {
    bounded_model(|| {
        let (flight, calls) = (flight_with_caches(1), calls());
        let slot = Flight::try_enter(&flight).unwrap();
        let waiter = spawn(&flight, {
            let offer = starts(&calls, 1);
            move |flight| {
                at_place(1);
                let _ = flight.wait(offer);
            }
        });
        let latecomer = spawn(&flight, |flight| drop(Flight::try_enter(flight)));
        drop(slot);
        waiter.join().unwrap();
        latecomer.join().unwrap();
        assert!(flight.offers.acquire().waiting.is_empty(), "waits forever");
        end_all(&calls);
        assert_all_free(&flight, 1);
    });
}
