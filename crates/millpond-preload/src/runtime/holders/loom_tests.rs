//! Loom models of what is held over forks, compiled by `tests/loom.rs`: a description that is found alone is
//! nobody else's, and no call of another's goes on there. The `loom_holders_without_*` twins leave one rule out
//! and must fail.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::runtime::sync::AtomicBool;

use super::*;

/// Processes are threads here, which fork by starting to use the slot of the child's.
struct Model {
    holders: Holders,
    /// The kernel's locks on slots.
    alive: [AtomicBool; SLOTS],
    /// The description: loom reports who uses it beside who found it alone.
    kernels: UnsafeCell<u32>,
}

#[derive(Clone, Copy, PartialEq)]
enum Rule {
    All,
    /// The number goes before the last call has ended.
    RemovedEarly,
    /// What is given is noted by who has gone.
    GivenLate,
}

impl Model {
    /// With a parent in slot 0, which holds `number`, and a child of its in slot 1.
    fn new() -> (Arc<Self>, u32) {
        let model = Model {
            holders: Holders::new(),
            alive: std::array::from_fn(|_| AtomicBool::new(false)),
            kernels: UnsafeCell::new(0),
        };
        let parent = model.holders.claim(|_| false).unwrap();
        model.begin(parent);
        let number = model.holders.add(parent).unwrap();
        let child = model.holders.before_fork(parent, |_| false).unwrap();
        model.begin(child);
        (Arc::new(model), number)
    }

    fn begin(&self, slot: usize) {
        self.alive[slot].store(true, Release);
        self.holders.begin(slot);
    }

    /// The kernel's own order: what the process did comes before, for who finds it gone.
    fn end(&self, slot: usize) {
        self.alive[slot].store(false, Release);
    }

    fn is_gone(&self, slot: usize) -> bool {
        !self.alive[slot].load(Acquire)
    }

    /// A call on the description. It takes time: loom changes threads at loads and stores only.
    fn call(&self) {
        self.alive[0].load(Relaxed);
        // SAFETY: loom checks it.
        self.kernels.with(|kernels| assert_eq!(unsafe { *kernels }, 0, "taken over"));
    }

    fn close(&self, slot: usize, number: u32, rule: Rule) {
        if rule == Rule::RemovedEarly {
            self.holders.remove(slot, number);
        }
        self.call();
        if rule != Rule::RemovedEarly {
            self.holders.remove(slot, number);
        }
    }

    /// Looks once, and has it for itself if it is alone. Whether it was.
    fn look(&self, slot: usize, number: u32) -> bool {
        let found = self.holders.look(slot, number, |slot| self.is_gone(slot));
        if found == Found::Alone {
            // SAFETY: loom checks it.
            self.kernels.with_mut(|kernels| unsafe { *kernels = 1 });
        }
        found == Found::Alone
    }
}

fn explore(act: impl Fn(&Model, u32) + Copy + Send + Sync + 'static, is_alone: Option<bool>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let (model, number) = Model::new();
        let child = {
            let model = Arc::clone(&model);
            thread::spawn(move || act(&model, number))
        };
        let is_early = model.look(0, number);
        child.join().unwrap();
        if let Some(is_alone) = is_alone {
            assert_eq!(is_early || model.look(0, number), is_alone);
        }
    });
}

/// Goal: when a child has closed it, or died, and not before, its parent finds it alone.
#[test]
fn loom_holders_close_and_die() {
    explore(|model, number| model.close(1, number, Rule::All), Some(true));
    explore(
        |model, _| {
            model.call();
            model.end(1);
        },
        Some(true),
    );
}

#[test]
#[should_panic]
fn loom_holders_without_the_last_call() {
    explore(|model, number| model.close(1, number, Rule::RemovedEarly), None);
}

/// A child forks one of its own and closes the description, or dies; the new one goes on with it.
fn pass_on(model: &Model, number: u32, dies: bool) {
    let grandchild = model.holders.before_fork(1, |slot| model.is_gone(slot)).unwrap();
    if dies {
        model.end(1);
    } else {
        model.close(1, number, Rule::All);
    }
    model.begin(grandchild);
    model.call();
}

/// Goal: a grandchild has it, whatever its own parent does meanwhile.
#[test]
fn loom_holders_pass_it_on() {
    for dies in [false, true] {
        explore(move |model, number| pass_on(model, number, dies), Some(false));
    }
}

#[test]
#[should_panic]
fn loom_holders_without_a_count_of_forks() {
    // The look comes to the slots in their order: the new one has the lowest.
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let (model, number) = Model::new();
        // 0 is the grandchild's to be: its owner forks from 1 to 2, and goes.
        let third = model.holders.before_fork(1, |_| false).unwrap();
        model.begin(third);
        model.holders.remove(0, number);
        model.end(0);
        let child = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let forks = model.holders.forks.load(Relaxed);
                let next = model.holders.before_fork(1, |slot| model.is_gone(slot)).unwrap();
                assert_eq!(next, 0);
                model.holders.forks.store(forks, Relaxed);
                model.holders.remove(1, number);
                model.begin(next);
                model.call();
            })
        };
        model.look(third, number);
        child.join().unwrap();
    });
}

/// Goal: a slot that is claimed anew has its new owner's numbers.
#[test]
fn loom_holders_take_slots_again() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let (model, number) = Model::new();
        let third = model.holders.before_fork(1, |_| false).unwrap();
        model.begin(third);
        // With its number in the slot still.
        model.end(0);
        let child = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let next = model.holders.before_fork(1, |slot| model.is_gone(slot)).unwrap();
                assert_eq!(next, 0);
                model.close(1, number, Rule::All);
                model.begin(next);
                model.call();
            })
        };
        model.look(third, number);
        child.join().unwrap();
        assert!(!model.look(third, number));
    });
}

/// A child that becomes another program, which has it, too.
fn exec(model: &Model, number: u32, rule: Rule) {
    if rule != Rule::GivenLate {
        model.holders.give(number);
    }
    model.end(1);
    if rule == Rule::GivenLate {
        model.holders.give(number);
    }
    model.call();
}

/// Goal: what another program has got is not found alone.
#[test]
fn loom_holders_give() {
    explore(|model, number| exec(model, number, Rule::All), Some(false));
    explore(
        |model, number| {
            model.holders.give_all(1);
            model.holders.remove(1, number);
            model.call();
        },
        Some(false),
    );
}

#[test]
#[should_panic]
fn loom_holders_without_giving_first() {
    explore(|model, number| exec(model, number, Rule::GivenLate), None);
}
