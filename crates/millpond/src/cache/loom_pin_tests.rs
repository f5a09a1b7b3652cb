//! Loom models of the reference counts of the cache (pins of frames, holds of leaves, links of the
//! table): no thread accesses an object that another thread reuses. The models run the production
//! code. The contents of objects are cells of Loom, which reports each access that races with reuse.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::Relaxed;
use loom::thread;

use crate::cache::frames::pin::{Pins, Retiring};
use crate::cache::table::epoch::Epoch;
use crate::cache::table::link::Link;
use crate::cache::table::page::{PageWord, PublishFlags};
use crate::cache::table::step::{self, Followed, LinkSlot};
use crate::units::FrameIndex;

fn model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

fn beside<T>(shared: &Arc<T>, body: impl FnOnce(&T) + 'static) -> thread::JoinHandle<()>
where
    T: 'static,
{
    let shared = Arc::clone(shared);
    thread::spawn(move || body(&shared))
}

/// A cached page, and its frame.
struct Page {
    word: PageWord,
    epoch: Epoch,
    pins: Pins,
    frame: UnsafeCell<u32>,
    freed: AtomicUsize,
}

// SAFETY: loom checks accesses to the cell.
unsafe impl Sync for Page {}

impl Page {
    fn new() -> Arc<Page> {
        let page = Page {
            word: PageWord::new(),
            epoch: Epoch::new(),
            pins: Pins::default(),
            frame: UnsafeCell::new(0),
            freed: AtomicUsize::new(0),
        };
        page.word.try_fill(FrameIndex(1)).unwrap();
        let _ = page.word.finish_fill(FrameIndex(1), PublishFlags::default());
        Arc::new(page)
    }

    fn look(&self) {
        // SAFETY: loom reports a race.
        assert_eq!(self.frame.with(|frame| unsafe { *frame }), 0, "the view changed");
    }

    fn free(&self) {
        self.freed.fetch_add(1, Relaxed);
        // SAFETY: as above.
        self.frame.with_mut(|frame| unsafe { *frame = 99 });
    }

    /// As `View` does, or a flush.
    fn view(&self) {
        let look = step::HeldPage::begin(&self.word, &self.epoch);
        if !look.seen.is_ready() {
            return;
        }
        self.pins.pin();
        if look.copy_if_unchanged(|| ()).is_some() {
            self.look();
        }
        if self.pins.unpin() {
            self.free();
        }
    }

    /// The thread copies the bytes that it replaces.
    fn evict(&self) {
        self.look();
        assert!(self.word.try_evict(self.word.load(), &self.epoch));
        if Retiring::begin().try_retire(&self.pins) {
            self.free();
        }
    }
}

/// Goal: the frame of a view is not freed during the view, and is freed exactly once. Method: a
/// viewer pins, and checks the word again; the evictor takes the page, and retires the frame.
#[test]
fn loom_a_pinned_frame_is_freed_once_and_not_early() {
    loom::model(|| {
        let page = Page::new();
        let viewer = beside(&page, Page::view);
        page.evict();
        viewer.join().unwrap();
        assert_eq!(page.freed.load(Relaxed), 1);
    });
}

/// Goal: the same for two views, of which the last frees the frame.
#[test]
fn loom_the_last_of_two_views_frees_the_frame() {
    model(|| {
        let page = Page::new();
        let viewers = [beside(&page, Page::view), beside(&page, Page::view)];
        page.evict();
        viewers.into_iter().for_each(|viewer| viewer.join().unwrap());
        assert_eq!(page.freed.load(Relaxed), 1);
    });
}

/// The link to a node.
const LINKED: u64 = Link::root(FrameIndex(1), 0).0;

/// A node of a page table that moves from one slot to another.
struct Node {
    slots: [LinkSlot; 2],
    epoch: Epoch,
    holds: Pins,
    life: UnsafeCell<u32>,
}

// SAFETY: loom checks accesses to the cell.
unsafe impl Sync for Node {}

impl Node {
    /// A node that the first slot links and the caller holds.
    fn new() -> Arc<Node> {
        let slots = [LinkSlot::new(LINKED), LinkSlot::new(0)];
        let (holds, life) = (Pins::default(), UnsafeCell::new(0));
        let node = Node { slots, epoch: Epoch::new(), holds, life };
        node.holds.revive();
        Arc::new(node)
    }

    fn try_hold(&self, slot: usize) -> bool {
        let slot = &self.slots[slot];
        slot.follow() == LINKED && step::try_hold_linked(&self.holds, slot, |now| now == LINKED)
    }

    /// Holds the node of the first slot as a leaf that a lookup has found.
    fn try_hold_followed(&self) -> bool {
        let begun = self.epoch.begin();
        let leaf = Followed::new(&self.slots[0]);
        !leaf.link().is_none() && step::try_hold_followed(&self.holds, leaf, &self.epoch, begun)
    }

    fn look(&self, life: u32) {
        // SAFETY: loom reports a race.
        assert_eq!(self.life.with(|life| unsafe { *life }), life, "a node of another life");
    }

    /// table.T3: as `Held` does when it is dropped; then the node is used for the other slot.
    fn release(&self) {
        if self.holds.unhold_or_kill() {
            self.slots[0].unlink(true, &self.epoch);
            // SAFETY: as above.
            self.life.with_mut(|life| unsafe { *life = 1 });
            self.holds.revive();
            self.slots[1].try_link(0, LINKED).unwrap();
        }
    }
}

type TryHold = fn(&Node) -> bool;

/// Goal: a node is not recycled while it is held, and a hold is never for an earlier life of the
/// node. Method: a thread that drops the last hold of a node, and a thread that finds it where it
/// was linked.
fn a_held_node_stays_linked(try_hold: TryHold) {
    loom::model(move || {
        let node = Node::new();
        let holder = beside(&node, move |node| {
            if try_hold(node) {
                node.look(0);
                thread::yield_now();
                assert_eq!(node.slots[0].follow(), LINKED, "a held node was recycled");
                node.release();
            }
        });
        node.look(0);
        node.release();
        holder.join().unwrap();
        assert!(Link(node.slots[0].follow()).is_none(), "an empty node was left behind");
        assert_eq!(node.slots[1].follow(), LINKED);
    });
}

#[test]
fn loom_a_held_node_stays_linked() {
    a_held_node_stays_linked(|node| node.try_hold(0));
}

#[test]
fn loom_a_leaf_that_is_held_from_below_stays_linked() {
    a_held_node_stays_linked(Node::try_hold_followed);
}

#[test]
#[should_panic(expected = "a node of another life")]
fn loom_without_the_second_look_a_leaf_of_another_life_is_held() {
    a_held_node_stays_linked(|node| {
        let leaf = Followed::new(&node.slots[0]);
        !leaf.link().is_none() && node.holds.try_hold()
    });
}

/// Goal: a thread that finds a node where it is linked next finds its new state. Method: in
/// addition to the two threads, one that holds the node in its next life.
#[test]
fn loom_a_recycled_node_is_found_as_it_is_now() {
    model(|| {
        let node = Node::new();
        let old = beside(&node, |node| {
            if node.try_hold(0) {
                node.look(0);
                node.release();
            }
        });
        let new = beside(&node, |node| {
            if node.try_hold(1) {
                node.look(1);
                let last = node.holds.unhold();
                assert!(!last, "its slot counts as a hold");
            }
        });
        node.release();
        old.join().unwrap();
        new.join().unwrap();
    });
}

/// Goal: a thread that follows a link finds nothing of the node's earlier life, for another file.
/// Method: a node whose only page is evicted is linked again, concurrent with a lock-free lookup.
#[test]
fn loom_a_linked_node_is_found_empty() {
    loom::model(|| {
        let page = Page::new();
        let slot = Arc::new(LinkSlot::new(0));
        let linker = thread::spawn({
            let (page, slot) = (Arc::clone(&page), Arc::clone(&slot));
            move || {
                page.evict();
                slot.try_link(0, 1).unwrap();
            }
        });
        if slot.follow() == 1 {
            assert!(!page.word.load().is_ready(), "another file's page");
        }
        linker.join().unwrap();
    });
}
