//! Loom models of a description's end, compiled by `tests/loom.rs`: reads that pin it while it is closed. The
//! `loom_references_without_*` twins leave one rule out and must fail.

use std::ops::Deref;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::runtime::reading::{Readers, Sections};
use crate::runtime::sync::AtomicUsize;

/// A description, and the slot that points to it.
struct Model {
    slot: AtomicUsize,
    references: References,
    /// The file. Loom reports an access to an object while it is taken away.
    file: UnsafeCell<Option<u32>>,
    sections: [Sections; 2],
    ends: AtomicU32,
}

struct Of(Arc<Model>, usize);

impl Deref for Of {
    type Target = Sections;
    fn deref(&self) -> &Sections {
        &self.0.sections[self.1]
    }
}

impl Model {
    fn new() -> Arc<Model> {
        let model = Model {
            slot: AtomicUsize::new(1),
            references: References::none(),
            file: UnsafeCell::new(Some(7)),
            sections: [Sections::new(), Sections::new()],
            ends: AtomicU32::new(0),
        };
        model.references.begin();
        Arc::new(model)
    }

    /// As `Pin::of`.
    fn pin(&self, reader: usize) -> bool {
        self.sections[reader].enter(true);
        let is_found = self.slot.load(Acquire) == 1;
        if is_found {
            self.references.pin();
        }
        self.sections[reader].exit();
        is_found
    }

    fn look(&self) {
        // SAFETY: loom checks it.
        self.file.with(|file| assert_eq!(unsafe { *file }, Some(7), "a read of a closed file"));
    }

    /// As `pin::unpin`.
    fn unpin(&self) {
        if self.references.unpin() {
            self.end();
        }
    }

    fn end(&self) {
        // SAFETY: loom checks it.
        self.file.with_mut(|file| unsafe { *file = None });
        self.ends.fetch_add(1, Relaxed);
    }

    fn read(&self, reader: usize) {
        if self.pin(reader) {
            self.look();
            self.unpin();
        }
    }

    /// Of a thread that leaves the end to another where it can.
    fn read_and_leave(&self, reader: usize) {
        if self.pin(reader) {
            self.look();
            if !self.references.try_unpin() {
                self.unpin();
            }
        }
    }
}

/// As the registry does: the slot is cleared; when the sections have ended, now or later, the table's
/// reference goes.
fn close(model: &Arc<Model>) -> Option<Readers<Of>> {
    model.slot.store(0, Release);
    let visit = |note: &mut dyn FnMut(Of)| (0..2).for_each(|n| note(Of(Arc::clone(model), n)));
    end_or_put_off(model, Readers::take(|| {}, visit))
}

fn end_or_put_off(model: &Model, mut readers: Readers<Of>) -> Option<Readers<Of>> {
    if !readers.is_over() {
        return Some(readers);
    }
    model.unpin();
    None
}

fn explore(reads: [fn(&Model); 2], close: fn(&Arc<Model>) -> Option<Readers<Of>>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let model = Model::new();
        let threads = reads.map(|read| {
            let model = Arc::clone(&model);
            thread::spawn(move || read(&model))
        });
        let put_off = close(&model).and_then(|readers| end_or_put_off(&model, readers));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        if let Some(readers) = put_off {
            assert!(end_or_put_off(&model, readers).is_none(), "no thread reads any more");
        }
        assert_eq!(model.ends.load(Relaxed), 1, "it ends once");
    });
}

/// Goal: a read that found the description has the file to its end; with the last holder it ends,
/// once.
#[test]
fn loom_references_keep_the_file() {
    explore([|model| model.read(0), |model| model.read(1)], close);
}

/// Goal: so it does where a thread gives its reference up only if it is not the last.
#[test]
fn loom_references_that_are_left_to_others_keep_the_file() {
    explore([|model| model.read_and_leave(0), |model| model.read(1)], close);
}

#[test]
#[should_panic]
fn loom_references_without_a_section_around_the_pin_come_too_late() {
    let late = |model: &Model| {
        model.sections[0].enter(true);
        let is_found = model.slot.load(Acquire) == 1;
        model.sections[0].exit();
        if is_found {
            model.references.pin();
            model.look();
            model.unpin();
        }
    };
    explore([late, |_| {}], close);
}

#[test]
#[should_panic]
fn loom_references_without_waiting_for_sections_end_too_early() {
    explore([|model| model.read(0), |_| {}], |model| {
        model.slot.store(0, Release);
        model.unpin();
        None
    });
}
