//! Loom models of the slots of a context, compiled by `tests/loom.rs`: requests come, go, and meet
//! the context's end. The `loom_slots_without_*` twins leave one rule out and must fail.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;

/// A context: what its slots hold, and their owners.
struct Model {
    slots: Slots,
    next: Vec<AtomicU32>,
    /// Loom reports concurrent accesses, and accesses before the value is visible.
    contents: Vec<UnsafeCell<u32>>,
}

impl Links for Model {
    fn next(&self, slot: u32) -> &AtomicU32 {
        &self.next[slot as usize]
    }
}

impl Model {
    fn new(capacity: u32) -> Arc<Model> {
        Arc::new(Model {
            slots: Slots::new(capacity),
            next: (0..capacity).map(|_| AtomicU32::new(0)).collect(),
            contents: (0..capacity).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    /// All slots were used and freed: the last one is the first in the list.
    fn used(capacity: u32) -> Arc<Model> {
        let model = Model::new(capacity);
        let slots: Vec<u32> = (0..capacity).map(|_| model.begin().unwrap()).collect();
        slots.into_iter().for_each(|slot| model.end(slot));
        model
    }

    fn begin(&self) -> Result<u32, Refused> {
        self.slots.begin(self)
    }

    fn end(&self, slot: u32) {
        self.slots.end(1);
        self.slots.free(slot, self);
        self.slots.discount(1, 0);
    }

    /// The whole life of a request: its block is noted, and read when its completion is taken.
    fn request(&self, begin: fn(&Model) -> Option<u32>, end: fn(&Model, u32)) {
        if let Some(slot) = begin(self) {
            assert!(slot < self.slots.capacity(), "a slot too many");
            let contents = &self.contents[slot as usize];
            // SAFETY: loom checks it.
            contents.with_mut(|contents| unsafe { *contents += 1 });
            thread::yield_now();
            // SAFETY: as above.
            contents.with_mut(|contents| unsafe { *contents -= 1 });
            end(self, slot);
        }
    }
}

fn explore(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

fn spawn<R: 'static>(
    model: &Arc<Model>,
    body: impl FnOnce(&Model) -> R + 'static,
) -> thread::JoinHandle<R> {
    let model = Arc::clone(model);
    thread::spawn(move || body(&model))
}

fn begin(model: &Model) -> Option<u32> {
    model.begin().ok()
}

/// Runs three requests in a context for `capacity`.
fn requests(capacity: u32, begin: fn(&Model) -> Option<u32>, end: fn(&Model, u32)) {
    explore(move || {
        let model = Model::new(capacity);
        let other = spawn(&model, move |model| {
            model.request(begin, end);
            model.request(begin, end);
        });
        model.request(begin, end);
        other.join().unwrap();
        assert_eq!(model.slots.counts.load(Relaxed), 0);
        assert_eq!(model.slots.in_flight.load(Relaxed), 0);
    });
}

/// Goal: there are never more slots than the context's capacity, and accesses to a slot come after
/// those of its earlier owner (S1).
#[test]
fn loom_slots_requests_come_and_go() {
    requests(1, begin, Model::end);
    requests(2, begin, Model::end);
}

#[test]
#[should_panic(expected = "a slot too many")]
fn loom_slots_without_acquire_of_the_count_what_was_freed_is_missed() {
    fn admit(slots: &Slots) -> bool {
        let admit = |counts| (counts < u64::from(slots.capacity)).then_some(counts + SERVED_ONE);
        slots.counts.fetch_update(Relaxed, Relaxed, admit).is_ok()
    }
    let begin = |model: &Model| {
        let slots = &model.slots;
        (admit(slots) && slots.enter())
            .then(|| slots.pop(model).unwrap_or_else(|| slots.take_fresh()))
    };
    requests(1, begin, Model::end);
}

#[test]
#[should_panic(expected = "a slot too many")]
fn loom_slots_without_release_of_the_count_what_was_freed_is_missed() {
    requests(1, begin, |model, slot| {
        model.slots.end(1);
        model.slots.free(slot, model);
        model.slots.counts.fetch_sub(SERVED_ONE, Relaxed);
    });
}

#[test]
#[should_panic(expected = "a slot too many")]
fn loom_slots_without_counting_it_until_it_is_freed_there_is_one_too_many() {
    requests(1, begin, |model, slot| {
        model.slots.end(1);
        model.slots.discount(1, 0);
        model.slots.free(slot, model);
    });
}

#[test]
#[should_panic(expected = "a slot too many")]
fn loom_slots_without_counting_it_before_it_has_one_there_is_one_too_many() {
    let begin = |model: &Model| {
        let slots = &model.slots;
        let slot = slots.pop(model).unwrap_or_else(|| slots.take_fresh());
        assert!(slot < slots.capacity, "a slot too many");
        if slots.admit() && slots.enter() {
            return Some(slot);
        }
        slots.free(slot, model);
        None
    };
    requests(1, begin, Model::end);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_slots_without_release_of_the_list_a_slot_is_used_too_early() {
    requests(2, begin, |model, slot| {
        let slots = &model.slots;
        slots.end(1);
        let _ = slots.list.fetch_update(Relaxed, Relaxed, |seen| {
            model.next(slot).store(seen as u32, Relaxed);
            Some(((seen >> 32) + 1) << 32 | u64::from(slot + 1))
        });
        slots.discount(1, 0);
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_slots_without_acquire_of_the_list_a_slot_is_used_too_early() {
    let begin = |model: &Model| {
        let slots = &model.slots;
        let pop = || {
            let popped = slots.list.fetch_update(Relaxed, Relaxed, |seen| {
                let next = model.next((seen as u32).checked_sub(1)?).load(Relaxed);
                Some(((seen >> 32) + 1) << 32 | u64::from(next))
            });
            popped.ok().map(|seen| seen as u32 - 1)
        };
        (slots.admit() && slots.enter()).then(|| pop().unwrap_or_else(|| slots.take_fresh()))
    };
    requests(2, begin, Model::end);
}

/// A thread takes a slot while another takes two and frees the first.
fn the_first_goes_and_comes_back(pop: fn(&Model) -> Option<u32>, free: fn(&Model, u32)) {
    explore(move || {
        let model = Model::used(3);
        let other = spawn(&model, move |model| {
            let (first, second) = (pop(model).unwrap(), pop(model).unwrap());
            free(model, first);
            second
        });
        let mine = pop(&model).unwrap();
        let theirs = other.join().unwrap();
        let last = pop(&model);
        assert!(
            mine != theirs && last.is_some_and(|last| ![mine, theirs].contains(&last)),
            "two have it"
        );
        assert_eq!(pop(&model), None, "two have it");
    });
}

/// Goal: no two requests have the same slot, even if slots are popped and freed concurrently (S2).
#[test]
fn loom_slots_the_first_goes_and_comes_back() {
    the_first_goes_and_comes_back(
        |model| model.slots.pop(model),
        |model, slot| model.slots.free(slot, model),
    );
}

#[test]
#[should_panic(expected = "two have it")]
fn loom_slots_without_the_number_two_have_a_slot() {
    the_first_goes_and_comes_back(
        |model| {
            let popped = model.slots.list.fetch_update(Acquire, Acquire, |seen| {
                let first = (seen as u32).checked_sub(1)?;
                Some(seen >> 32 << 32 | u64::from(model.next(first).load(Relaxed)))
            });
            popped.ok().map(|seen| seen as u32 - 1)
        },
        |model, slot| {
            let _ = model.slots.list.fetch_update(Release, Relaxed, |seen| {
                model.next(slot).store(seen as u32, Relaxed);
                Some(seen >> 32 << 32 | u64::from(slot + 1))
            });
        },
    );
}

/// A request for a served file begins while others are passed on, in a context for two.
fn a_request_meets_others(admit_others: fn(&Slots, u64) -> u64) {
    explore(move || {
        let model = Model::new(2);
        let other = spawn(&model, move |model| admit_others(&model.slots, 2));
        let has_begun = model.begin().is_ok();
        let others = other.join().unwrap();
        assert!(!has_begun || others < 2, "no room for a stand-in");
        model.slots.discount(has_begun.into(), others);
        assert_eq!(model.slots.counts.load(Relaxed), 0);
    });
}

/// Goal: with a request for a served file there are no more requests than the context's capacity (aio.A2).
#[test]
fn loom_slots_a_request_meets_others() {
    a_request_meets_others(Slots::admit_others);
}

#[test]
#[should_panic(expected = "no room for a stand-in")]
fn loom_slots_without_one_exchange_there_is_no_room_for_a_stand_in() {
    a_request_meets_others(|slots, wanted| {
        let counts = slots.counts.load(Relaxed);
        let left = u64::from(slots.capacity) - served(counts) - others(counts);
        let room = if served(counts) == 0 { wanted } else { wanted.min(left) };
        slots.counts.fetch_add(room * OTHERS_ONE, Relaxed);
        room
    });
}

/// A request begins while its context is closed.
fn a_request_meets_the_close(begin: fn(&Model) -> Option<u32>, end: fn(&Slots), close: fn(&Slots)) {
    explore(move || {
        let model = Model::new(1);
        let done = Arc::new(UnsafeCell::new(false));
        let other = spawn(&model, {
            let done = Arc::clone(&done);
            move |model| {
                let slot = begin(model);
                if slot.is_some() {
                    // SAFETY: loom checks it.
                    done.with_mut(|done| unsafe { *done = true });
                    end(&model.slots);
                }
                slot.is_some()
            }
        });
        close(&model.slots);
        // SAFETY: as above.
        let was_done = done.with(|done| unsafe { *done });
        let has_begun = other.join().unwrap();
        assert_eq!(was_done, has_begun, "begun, and not waited for");
    });
}

/// Goal: the close of the context waits for a request and sees its stores, or the request is
/// refused (S3).
#[test]
fn loom_slots_a_request_meets_the_close() {
    a_request_meets_the_close(begin, |slots| slots.end(1), Slots::close);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_slots_without_release_of_the_end_who_closes_does_not_see_what_was_done() {
    let end = |slots: &Slots| {
        slots.in_flight.fetch_sub(1, Relaxed);
        sync::wake(&slots.in_flight);
    };
    a_request_meets_the_close(begin, end, Slots::close);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_slots_without_acquire_of_the_end_who_closes_does_not_see_what_was_done() {
    a_request_meets_the_close(
        begin,
        |slots| slots.end(1),
        |slots| {
            slots.in_flight.fetch_or(CLOSED, Relaxed);
            while slots.in_flight.load(Relaxed) != CLOSED {
                thread::yield_now();
            }
        },
    );
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_slots_without_a_look_at_closed_a_request_is_not_waited_for() {
    let begin = |model: &Model| {
        let slots = &model.slots;
        // First CLOSED, and then the count.
        if slots.in_flight.load(Relaxed) & CLOSED != 0 {
            return None;
        }
        let slot = slots.admit().then(|| slots.take_fresh());
        slots.in_flight.fetch_add(1, Relaxed);
        slot
    };
    a_request_meets_the_close(begin, |slots| slots.end(1), Slots::close);
}
