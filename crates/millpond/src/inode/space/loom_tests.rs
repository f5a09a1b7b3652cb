//! Loom models of losses (space.SP3): a page whose blocks are freed under no guard is written back, by the flush
//! or by its writer.
//!
//! The account is the real one; the set of dirty pages is a flag under a lock, and the disk is a bit: whether the
//! page's blocks are there.

use loom::thread;

use crate::inode::space::account::Space;
use crate::sync::{Arc, Mutex};

const PAGE: u64 = 4096;

/// The step that a twin leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Without {
    Nothing,
    /// The writer does not look at the losses again.
    SecondLook,
    /// The loss is not counted: the flush forgets the blocks only.
    Count,
    /// The flush does not look at the set afterwards.
    Flush,
}

#[derive(Default)]
struct Disk {
    has_blocks: bool,
    is_written: bool,
}

#[derive(Default)]
struct Model {
    space: Space,
    disk: Mutex<Disk>,
    is_dirty: Mutex<bool>,
}

impl Model {
    fn write_back(&self) {
        let mut is_dirty = self.is_dirty.lock().unwrap();
        if std::mem::take(&mut *is_dirty) {
            self.disk.lock().unwrap().is_written = true;
        }
    }

    /// A write of the page into the cache, as `write::back` makes it.
    fn write(&self, without: Without) {
        let losses = self.space.losses();
        if !self.space.has_all_before(PAGE) {
            self.disk.lock().unwrap().has_blocks = true;
            self.space.known().add(0, PAGE);
        }
        *self.is_dirty.lock().unwrap() = true;
        if without != Without::SecondLook && self.space.losses() != losses {
            self.write_back();
        }
    }

    /// A write-back elsewhere fails, and the file system frees the page's blocks, as `flush` handles it.
    fn fail(&self, without: Without) {
        self.disk.lock().unwrap().has_blocks = false;
        match without {
            Without::Count => self.space.forget(0, PAGE),
            _ => self.space.lose(0, PAGE),
        }
        if without != Without::Flush {
            self.write_back();
        }
    }
}

fn race(without: Without) {
    loom::model(move || {
        let model = Arc::new(Model::default());
        // Reserved by an earlier write, in some of the runs of the writer.
        model.disk.lock().unwrap().has_blocks = true;
        model.space.known().add(0, PAGE);
        let writer = thread::spawn({
            let model = Arc::clone(&model);
            move || model.write(without)
        });
        model.fail(without);
        writer.join().unwrap();
        let disk = model.disk.lock().unwrap();
        assert!(disk.has_blocks || disk.is_written, "a dirty page has no blocks");
    });
}

/// Goal: whenever the blocks are freed, the page has new ones, or is written back at once.
#[test]
fn a_page_that_loses_its_blocks_is_written_back() {
    race(Without::Nothing);
}

#[test]
#[should_panic(expected = "a dirty page has no blocks")]
fn the_writer_has_to_look_again() {
    race(Without::SecondLook);
}

#[test]
#[should_panic(expected = "a dirty page has no blocks")]
fn the_loss_has_to_be_counted() {
    race(Without::Count);
}

#[test]
#[should_panic(expected = "a dirty page has no blocks")]
fn the_flush_has_to_look_at_the_set() {
    race(Without::Flush);
}
