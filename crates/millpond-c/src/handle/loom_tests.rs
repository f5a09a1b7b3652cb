//! The protocol of `protect`, in all interleavings. Both fences are full here: that a compiler's fence and
//! membarrier(2) do together what two full ones do is the kernel's promise.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::handle::protect::{Fences, Hazard, Refusal, Slot};
use crate::sync::yield_now;

/// Written by its owner when it goes, so that loom finds who looks at it then.
struct Object(UnsafeCell<u32>);

fn published() -> Arc<Slot<Object>> {
    let slot = Slot::default();
    slot.publish(7, Object(UnsafeCell::new(1)));
    Arc::new(slot)
}

/// A use, as far as it is permitted; whether it was.
fn use_it(slot: &Slot<Object>, hazard: &Hazard, id: u64) -> bool {
    match slot.enter(hazard, Fences::Full, id) {
        Ok(held) => {
            // SAFETY: that nobody writes meanwhile is what is tested.
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
    // SAFETY: withdrawn above, and waited for.
    let object = unsafe { slot.take() };
    let object = object.expect("withdrawn by us");
    // SAFETY: that it is ours alone is what is tested.
    object.0.with_mut(|at| unsafe { *at = 2 });
    true
}

/// Goal: an object that is taken out is nobody's (P1, P2), whoever is about to use it, once or twice.
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

/// Goal: who finds an id finds the object as it was published, to use it, and to take it.
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

/// Goal: the same, by who takes it at once.
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

/// Goal: of two that take it one gets it.
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

/// Goal: who used an object before it uses another one is done with it (P2): the id that is found instead
/// of the first says so.
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
