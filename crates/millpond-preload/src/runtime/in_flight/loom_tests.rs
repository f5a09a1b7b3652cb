//! Loom models of a claim, compiled by `tests/loom.rs`: the kernel and the engine never have a file
//! at once. The `loom_in_flight_without_*` twins leave one rule out and must fail.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::runtime::sync::AtomicUsize;

use super::*;

const UNSERVED: usize = 3;
const CLAIMED: usize = 4;
const SERVED: usize = 5;
const FD: RawFd = 7;

struct Model {
    /// Of the numbers of one file, from `FD` on.
    slots: Vec<AtomicUsize>,
    /// The kernel's offset and bytes: loom reports an access while they are taken over. Calls in the
    /// kernel have its own lock.
    kernels: UnsafeCell<u32>,
    calls: [InFlight; 2],
}

#[derive(Clone, Copy, PartialEq)]
enum Rule {
    All,
    NoFence,
    NotNamed,
    NamedLate,
}

impl Model {
    fn new(numbers: usize) -> Arc<Model> {
        Arc::new(Model {
            slots: (0..numbers).map(|_| AtomicUsize::new(UNSERVED)).collect(),
            kernels: UnsafeCell::new(0),
            calls: [InFlight::new(), InFlight::new()],
        })
    }

    /// As `hooks/io` does; gives up where that would wait for the claimant.
    fn call(&self, thread: usize, rule: Rule) {
        let calls = &self.calls[thread];
        let place = thread % self.slots.len();
        let begin = || calls.begin(FD + place as RawFd, rule != Rule::NoFence);
        let named = (rule != Rule::NotNamed && rule != Rule::NamedLate).then(begin);
        // As in `table::get`.
        let slot = self.slots[place].load(Acquire);
        let named = if rule == Rule::NamedLate { Some(begin()) } else { named };
        if slot == UNSERVED {
            // SAFETY: loom checks it.
            self.kernels
                .with(|kernels| assert_eq!(unsafe { *kernels }, 0, "after it was taken over"));
        }
        if let Some(before) = named {
            calls.end(before);
        }
    }

    /// As `multi_open` does, with one look at the words.
    fn claim(&self, looks: bool) -> bool {
        for slot in &self.slots {
            slot.compare_exchange(UNSERVED, CLAIMED, Acquire, Relaxed).unwrap();
        }
        after_claim(|| {});
        let fds: Vec<RawFd> = (FD..FD + self.slots.len() as RawFd).collect();
        if looks && self.calls.iter().any(|calls| calls.names(&fds)) {
            self.slots.iter().for_each(|slot| slot.store(UNSERVED, Release));
            return false;
        }
        // SAFETY: loom checks it.
        self.kernels.with_mut(|kernels| unsafe { *kernels = 1 });
        // As in `table::set`.
        self.slots.iter().for_each(|slot| slot.store(SERVED, Release));
        true
    }
}

fn explore(callers: usize, rule: Rule, looks: bool) {
    explore_numbers(1, callers, rule, looks);
}

fn explore_numbers(numbers: usize, callers: usize, rule: Rule, looks: bool) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let model = Model::new(numbers);
        let threads: Vec<_> = (0..callers)
            .map(|caller| {
                let model = Arc::clone(&model);
                thread::spawn(move || model.call(caller, rule))
            })
            .collect();
        model.claim(looks);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        if rule == Rule::All && model.slots[0].load(Relaxed) == UNSERVED {
            assert!(model.claim(true), "no thread is in a call");
        }
    });
}

/// Goal: a call of the kernel's ends before the file is taken over, or does not begin.
#[test]
fn loom_in_flight_ends_before_the_file_is_taken_over() {
    explore(2, Rule::All, true);
}

/// Goal: so it is where a file has several numbers, each with calls of its own.
#[test]
fn loom_in_flight_ends_by_all_numbers() {
    explore_numbers(2, 2, Rule::All, true);
}

#[test]
#[should_panic]
fn loom_in_flight_without_a_name_by_one_number_meets_the_kernel() {
    explore_numbers(2, 2, Rule::NotNamed, true);
}

/// Goal: so it is of a handler's call within another one, which stays named.
#[test]
fn loom_in_flight_nests() {
    loom::model(|| {
        let model = Model::new(1);
        let caller = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let before = model.calls[0].begin(FD, true);
                let is_kernels = model.slots[0].load(Acquire) == UNSERVED;
                let inner = model.calls[0].begin(FD + 1, true);
                model.calls[0].end(inner);
                if is_kernels {
                    // SAFETY: loom checks it.
                    model.kernels.with(|kernels| assert_eq!(unsafe { *kernels }, 0));
                }
                model.calls[0].end(before);
            })
        };
        model.claim(true);
        caller.join().unwrap();
    });
}

/// Goal: an interrupted call stays named, and a number without room counts as any number.
#[test]
fn loom_in_flight_names_all_that_are_nested() {
    loom::model(|| {
        let calls = InFlight::new();
        let before = [0, 7, (1 << 20) - 1].map(|fd| calls.begin(fd, false));
        assert!([0, 7, (1 << 20) - 1].iter().all(|fd| calls.names(&[*fd])));
        assert!(!calls.names(&[1, 2]) && calls.names(&[1, 7]));
        let fourth = calls.begin(8, false);
        assert!(calls.names(&[0]) && calls.names(&[99]));
        let fifth = calls.begin(9, false);
        assert!(calls.names(&[99]));
        calls.end(fifth);
        calls.end(fourth);
        assert!(calls.names(&[0]) && !calls.names(&[99]));
        calls.end(before[0]);
        assert!(!calls.names(&[0]) && !calls.names(&[1, 2]));
    });
}

#[test]
#[should_panic]
fn loom_in_flight_without_the_callers_fence_meets_the_kernel() {
    explore(1, Rule::NoFence, true);
}

#[test]
#[should_panic]
fn loom_in_flight_without_a_name_meets_the_kernel() {
    explore(1, Rule::NotNamed, true);
}

#[test]
#[should_panic]
fn loom_in_flight_without_naming_first_meets_the_kernel() {
    explore(1, Rule::NamedLate, true);
}

#[test]
#[should_panic]
fn loom_in_flight_without_looking_meets_the_kernel() {
    explore(1, Rule::All, false);
}
