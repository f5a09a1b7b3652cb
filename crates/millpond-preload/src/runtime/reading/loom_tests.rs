//! Loom models of reading sections, compiled by `tests/loom.rs`: an object that a section found in a slot is not
//! freed while the section uses it. The `loom_reading_without_*` twins leave one rule out and
//! must fail.

use std::sync::atomic::Ordering::{Acquire, Release};

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::runtime::sync::AtomicUsize;

use super::*;

/// A slot of the table, the object that it points to, and the threads that use it.
struct Model {
    slot: AtomicUsize,
    /// Loom reports an access that is concurrent with the free.
    contents: UnsafeCell<u32>,
    sections: [Sections; 2],
}

/// The sections of one thread.
struct Of(Arc<Model>, usize);

impl Deref for Of {
    type Target = Sections;
    fn deref(&self) -> &Sections {
        &self.0.sections[self.1]
    }
}

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model {
            slot: AtomicUsize::new(1),
            contents: UnsafeCell::new(1),
            sections: [Sections::new(), Sections::new()],
        })
    }

    fn hit(&self, reader: usize, is_fenced: bool) {
        self.sections[reader].enter(is_fenced);
        // As in `table::get`.
        if self.slot.load(Acquire) == 1 {
            self.look();
        }
        self.sections[reader].exit();
    }

    fn look(&self) {
        // SAFETY: loom checks it.
        self.contents.with(|contents| assert_eq!(unsafe { *contents }, 1, "freed"));
    }

    fn clear(&self) {
        // As in `table::set`.
        self.slot.store(0, Release);
    }

    fn free(&self) {
        // SAFETY: loom checks it.
        self.contents.with_mut(|contents| unsafe { *contents = 2 });
    }
}

fn readers(model: &Arc<Model>) -> Readers<Of> {
    Readers::take(|| {}, |note| (0..2).for_each(|reader| note(Of(Arc::clone(model), reader))))
}

/// Clears the slot, and frees if there are no readers; else returns the threads to check again.
fn clear_and_free(model: &Arc<Model>) -> Option<Readers<Of>> {
    model.clear();
    free_or_put_off(model, readers(model))
}

fn free_or_put_off(model: &Model, mut readers: Readers<Of>) -> Option<Readers<Of>> {
    if !readers.is_over() {
        return Some(readers);
    }
    model.free();
    None
}

type Free = fn(&Arc<Model>) -> Option<Readers<Of>>;

/// Two threads run `reads`, and one clears the slot, and frees, then or when the two are done.
fn explore(reads: [fn(&Model); 2], free: Free) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let model = Model::new();
        let threads = reads.map(|read| {
            let model = Arc::clone(&model);
            thread::spawn(move || read(&model))
        });
        let put_off = free(&model);
        // Again: some readers may have left the section since, and entered another.
        let put_off = put_off.and_then(|readers| free_or_put_off(&model, readers));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        if let Some(readers) = put_off {
            assert!(free_or_put_off(&model, readers).is_none(), "no thread reads any more");
        }
    });
}

/// Goal: an object that a section found stays until the section ends; a later section does not find it.
#[test]
fn loom_reading_keeps_what_was_found() {
    explore([|model| model.hit(0, true), |model| model.hit(1, true)], clear_and_free);
}

/// Goal: the same for a thread that hits again and again; the freeing thread waits at most for one hit.
#[test]
fn loom_reading_again_keeps_what_was_found() {
    let twice = |model: &Model| (0..2).for_each(|_| model.hit(0, true));
    explore([twice, |_| {}], clear_and_free);
    loom::model(|| {
        let model = Model::new();
        model.sections[0].enter(true);
        let mut readers = readers(&model);
        assert!(!readers.is_over());
        model.sections[0].exit();
        model.sections[0].enter(true);
        assert!(readers.is_over(), "of another section");
    });
}

/// Goal: a handler's section in a section does not end the outer one.
#[test]
fn loom_reading_nests() {
    let nested = |model: &Model| {
        model.sections[0].enter(true);
        let is_found = model.slot.load(Acquire) == 1;
        model.hit(0, true);
        if is_found {
            model.look();
        }
        assert!(model.sections[0].is_inside());
        model.sections[0].exit();
        assert!(!model.sections[0].is_inside());
    };
    explore([nested, |_| {}], clear_and_free);
}

#[test]
#[should_panic]
fn loom_reading_without_the_readers_fence_frees_what_is_looked_at() {
    explore([|model| model.hit(0, false), |_| {}], clear_and_free);
}

#[test]
#[should_panic]
fn loom_reading_without_waiting_frees_what_is_looked_at() {
    explore([|model| model.hit(0, true), |_| {}], |model| {
        model.clear();
        drop(readers(model));
        model.free();
        None
    });
}

#[test]
#[should_panic]
fn loom_reading_without_clearing_first_frees_what_is_found_later() {
    explore([|model| model.hit(0, true), |_| {}], |model| {
        let readers = readers(model);
        model.clear();
        free_or_put_off(model, readers)
    });
}
