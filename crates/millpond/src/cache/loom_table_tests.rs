//! Loom models of leaves that are recycled while lock-free readers use them, on the real types.
//!
//! The version of a page has one bit and the generation of a slot two. So two departures from READY
//! wrap the version, and four lives of a leaf wrap the generation. Versions raise another epoch
//! here than that of the file, which would also detect recycled leaves.

use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::Relaxed;
use loom::thread;

use crate::cache::table::epoch::Epoch;
use crate::cache::table::link::Link;
use crate::cache::table::page::PageWord;
use crate::cache::table::step::{self, Followed, LinkSlot};
use crate::units::FrameIndex;

use super::loom_tests::SHOWN;

const LEAF: FrameIndex = FrameIndex(7);
const FRAME: FrameIndex = FrameIndex(1);
/// The content of the frame while it is used for another file.
const ANOTHERS: usize = 99;

/// A rule that a mutation test leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    None,
    /// The reader also compares the link (epoch.V4).
    Link,
    /// The epoch rises before generations repeat (epoch.V4).
    Turn,
}

/// A leaf of one page, the slot that names it, and a frame.
struct Table {
    without: Rule,
    epoch: Epoch,
    /// The epoch that versions raise.
    another_epoch: Epoch,
    slot: LinkSlot,
    word: PageWord,
    frame: AtomicUsize,
}

impl Table {
    /// A table whose page is READY and has content 0.
    fn new(without: Rule) -> Arc<Table> {
        let table = Table {
            without,
            epoch: Epoch::new(),
            another_epoch: Epoch::new(),
            slot: LinkSlot::new(0),
            word: PageWord::new(),
            frame: AtomicUsize::new(0),
        };
        table.link();
        table.fill(0);
        Arc::new(table)
    }

    fn link(&self) {
        let none = Link(self.slot.follow());
        self.slot.try_link(none.0, none.naming(LEAF).0).unwrap();
    }

    fn fill(&self, content: usize) {
        self.word.try_fill(FRAME).unwrap();
        step::begin_reuse();
        self.frame.store(content, Relaxed);
        let _ = self.word.finish_fill(FRAME, SHOWN);
    }

    fn evict(&self) {
        assert!(self.word.try_evict(self.word.load(), &self.another_epoch));
    }

    /// As `Held` does, when the leaf is released.
    fn unlink(&self) {
        let is_without = self.without == Rule::Turn;
        self.slot.unlink(true, if is_without { &self.another_epoch } else { &self.epoch });
    }

    /// The leaf is used for another file and returns.
    fn recycle(&self) {
        self.evict();
        self.unlink();
        self.fill(ANOTHERS);
        self.evict();
        self.link();
    }

    /// One attempt of the hit path. Returns two copies.
    fn try_read(&self) -> Option<[usize; 2]> {
        let begun = self.epoch.begin();
        let leaf = Followed::new(&self.slot);
        if leaf.link().is_none() {
            return None;
        }
        let seen = self.word.load();
        if !seen.is_hit() {
            return None;
        }
        let copied = [0, 1].map(|_| self.frame.load(Relaxed));
        let leaf = (self.without != Rule::Link).then_some(leaf);
        step::is_consistent([(&self.word, seen)], leaf, &self.epoch, begun).then_some(copied)
    }
}

/// Goal: a reader uses no content of the leaf's life for another file, nor a mixture of two lives.
/// Method: the leaf is used for another file and returns, and the page has the same frame and
/// version as before.
fn read_races_a_recycled_leaf(without: Rule) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let table = Table::new(without);
        let recycler = thread::spawn({
            let table = Arc::clone(&table);
            move || {
                table.recycle();
                table.fill(1);
            }
        });
        if let Some(copied) = table.try_read() {
            assert!(copied == [0, 0] || copied == [1, 1], "of another life: {copied:?}");
        }
        recycler.join().unwrap();
        assert_eq!(table.try_read(), Some([1, 1]));
    });
}

#[test]
fn loom_read_races_a_recycled_leaf() {
    read_races_a_recycled_leaf(Rule::None);
}

#[test]
#[should_panic(expected = "of another life")]
fn loom_without_the_second_look_at_the_link_a_recycled_leaf_is_read() {
    read_races_a_recycled_leaf(Rule::Link);
}

/// Goal: the same after so many lives of the leaf that the generation of the slot repeats. Method:
/// the second half of the lives is made by another thread, which has found the link.
fn read_races_all_generations(without: Rule) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let table = Table::new(without);
        let recycle_twice = |table: &Table| {
            for _ in 0..2 {
                table.evict();
                table.unlink();
                table.link();
                table.fill(1);
            }
        };
        let recycler = thread::spawn({
            let table = Arc::clone(&table);
            move || {
                recycle_twice(&table);
                recycle_twice(&table);
            }
        });
        if let Some(copied) = table.try_read() {
            assert!(copied == [0, 0] || copied == [1, 1], "of another life: {copied:?}");
        }
        recycler.join().unwrap();
    });
}

#[test]
fn loom_read_races_a_leaf_that_is_recycled_over_and_over() {
    read_races_all_generations(Rule::None);
}

#[test]
#[should_panic(expected = "of another life")]
fn loom_without_raising_the_epoch_generations_repeat() {
    read_races_all_generations(Rule::Turn);
}

/// Goal: a thread that finds a generation of the next cycle sees that the epoch rose, even if
/// another thread linked the leaf than the one that unlinked it. Method: one thread unlinks the
/// leaf at the end of a cycle; a second one links it again, or not; the reader looks for the third
/// of the four generations.
fn a_cycle_raises_the_epoch(is_linked_again: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let table = Table::new(Rule::None);
        let third = Link(2);
        let link = if is_linked_again { third.naming(LEAF) } else { third };
        let reader = thread::spawn({
            let table = Arc::clone(&table);
            move || {
                if Followed::of(&table.slot, link).is_unchanged() {
                    assert!(!table.epoch.is_unchanged(0), "a turn of which the epoch says nothing");
                }
            }
        });
        let linker = is_linked_again.then(|| {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                let _ = table.slot.try_link(third.0, third.naming(LEAF).0);
            })
        });
        table.unlink();
        table.link();
        table.unlink();
        reader.join().unwrap();
        linker.into_iter().for_each(|linker| linker.join().unwrap());
    });
}

#[test]
fn loom_a_cycle_of_generations_raises_the_epoch() {
    a_cycle_raises_the_epoch(false);
}

#[test]
fn loom_linking_a_leaf_passes_on_the_cycle() {
    a_cycle_raises_the_epoch(true);
}
