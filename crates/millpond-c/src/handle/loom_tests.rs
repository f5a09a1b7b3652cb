//! Loom tests of the protocol of `protect`. Both fences are full here. That a compiler fence and
//! membarrier(2) together act as two full fences is the kernel's promise.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::handle::protect::{Fences, Hazard, Refusal, Slot};
use crate::sync::yield_now;

/// Its owner writes to it when it has taken the object, so that loom finds a concurrent reader.
struct Object(UnsafeCell<u32>);

fn published() -> Arc<Slot<Object>> {
    let slot = Slot::default();
    slot.publish(7, Object(UnsafeCell::new(1)));
    Arc::new(slot)
}

/// Uses the object if its id is published; returns whether it was.
fn use_it(slot: &Slot<Object>, hazard: &Hazard, id: u64) -> bool {
    match slot.enter(hazard, Fences::Full, id) {
        Ok(held) => {
            // SAFETY: the test is that no thread writes concurrently.
            held.0.with(|at| assert_eq!(unsafe { *at }, 1));
            true
        }
        Err(Refusal::Unknown) => false,
        Err(Refusal::Nested) => panic!("nobody interrupts"),
    }
}

fn take(slot: &Slot<Object>, hazards: &[Arc<Hazard>]) -> bool {
    if !slot.withdraw(7) {
        return false;
    }
    Fences::Full.heavy();
    while hazards.iter().any(|hazard| hazard.is(7)) {
        yield_now(0);
    }
    // SAFETY: withdrawn above, and no hazard is left.
    let object = unsafe { slot.take() };
    let object = object.expect("withdrawn by us");
    // SAFETY: the test is that the access is exclusive.
    object.0.with_mut(|at| unsafe { *at = 2 });
    true
}

/// Goal: a withdrawn object has no users (P1, P2), even if a thread is about to use it, once or twice.
#[test]
fn loom_taken_while_used() {
    loom::model(|| {
        let slot = published();
        let hazard = Arc::new(Hazard::default());
        let user = thread::spawn({
            let (slot, hazard) = (Arc::clone(&slot), Arc::clone(&hazard));
            move || {
                let first = use_it(&slot, &hazard, 7);
                let second = use_it(&slot, &hazard, 7);
                assert!(first || !second, "back again");
            }
        });
        assert!(take(&slot, &[hazard]));
        user.join().unwrap();
    });
}

/// Goal: a thread that finds an id finds the published object, to use it, and to take it.
#[test]
fn loom_published_while_looked_for() {
    loom::model(|| {
        let (slot, hazard) = (Arc::new(Slot::default()), Hazard::default());
        let publisher = thread::spawn({
            let slot = Arc::clone(&slot);
            move || {
                let object = Object(UnsafeCell::new(0));
                // SAFETY: ours.
                object.0.with_mut(|at| unsafe { *at = 1 });
                slot.publish(7, object);
            }
        });
        use_it(&slot, &hazard, 7);
        publisher.join().unwrap();
    });
}

/// Goal: the same for a thread that takes the object at once.
#[test]
fn loom_published_while_taken() {
    loom::model(|| {
        let slot = Arc::new(Slot::default());
        let publisher = thread::spawn({
            let slot = Arc::clone(&slot);
            move || {
                let object = Object(UnsafeCell::new(0));
                // SAFETY: ours.
                object.0.with_mut(|at| unsafe { *at = 1 });
                slot.publish(7, object);
            }
        });
        take(&slot, &[]);
        publisher.join().unwrap();
    });
}

/// Goal: of two threads that take the object, one gets it.
#[test]
fn loom_taken_twice() {
    loom::model(|| {
        let slot = published();
        let other = thread::spawn({
            let slot = Arc::clone(&slot);
            move || take(&slot, &[])
        });
        assert!(take(&slot, &[]) != other.join().unwrap());
    });
}

/// Goal: a thread that uses another object has finished with the first one (P2): the hazard's new id shows
/// it.
#[test]
fn loom_used_before_another() {
    loom::model(|| {
        let (slot, other) = (published(), Arc::new(Slot::default()));
        other.publish(8, Object(UnsafeCell::new(1)));
        let hazard = Arc::new(Hazard::default());
        let user = thread::spawn({
            let (slot, hazard) = (Arc::clone(&slot), Arc::clone(&hazard));
            move || {
                use_it(&slot, &hazard, 7);
                assert!(use_it(&other, &hazard, 8));
            }
        });
        assert!(take(&slot, &[hazard]));
        user.join().unwrap();
    });
}
