//! Loom models of batches between a thread and shared lists: free frames
//! ([`magazine`](super::frames::magazine)) and insert batches
//! ([`insert_batch`](super::policy::insert_batch)), with the production types.

use std::sync::atomic::Ordering::Relaxed;

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::cache::frames::FrameMeta;
use crate::cache::frames::magazine::Magazine;
use crate::cache::policy::fifo::BATCHED;
use crate::cache::policy::insert_batch::InsertBatch;
use crate::units::{FrameIndex, PageIndex};

/// A rule that a mutation test leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    None,
    /// Magazines are emptied to the free list before an allocation fails (magazine.MG3).
    Empty,
    /// A full magazine passes a batch to the free list.
    Rest,
    /// The tag of the queue node shows that it is batched (insert_batch.IB1).
    Tag,
    /// The thread that removes the page clears the tag (insert_batch.IB1).
    Clear,
    /// All lists are drained before an eviction fails (insert_batch.IB3).
    AdmitAll,
}

const BATCH: usize = 1;

/// The magazines of two threads, and the free list behind them.
struct Depot {
    without: Rule,
    magazines: [Mutex<Magazine>; 2],
    list: Mutex<Vec<FrameIndex>>,
}

impl Depot {
    fn new(without: Rule) -> Arc<Depot> {
        let magazines = Default::default();
        Arc::new(Depot { without, magazines, list: Mutex::default() })
    }

    /// As `Frames::free_to_magazine`.
    fn free(&self, place: usize, frame: FrameIndex) {
        let mut magazine = self.magazines[place].lock().unwrap();
        magazine.put(frame, BATCH, |rest| {
            if self.without != Rule::Rest {
                self.list.lock().unwrap().extend(rest);
            }
        });
    }

    /// As `Frames::take_from_magazine`.
    fn try_take(&self, place: usize) -> Option<FrameIndex> {
        let mut magazine = self.magazines[place].lock().unwrap();
        let mut frame = [FrameIndex::NONE];
        if magazine.take(&mut frame) == 1 {
            return Some(frame[0]);
        }
        let mut list = self.list.lock().unwrap();
        let taken = list.pop();
        magazine.load(BATCH, std::iter::from_fn(|| list.pop()));
        taken
    }

    /// As `Cache::take_frame` if nothing is evictable.
    fn take(&self, place: usize) -> Option<FrameIndex> {
        loop {
            let taken = self.try_take(place);
            if taken.is_some() || self.without == Rule::Empty || !self.empty_all() {
                return taken;
            }
        }
    }

    /// As `Frames::empty_magazines`.
    fn empty_all(&self) -> bool {
        self.magazines.iter().fold(false, |any, magazine| {
            let mut magazine = magazine.lock().unwrap();
            let frames = magazine.empty();
            self.list.lock().unwrap().extend(frames);
            any | !frames.is_empty()
        })
    }
}

/// Goal: frames are neither lost nor allocated twice, and no allocation fails while a free frame is
/// in another thread's magazine. Method: one thread has three frames and frees them. Concurrently,
/// the other allocates one, and all that are left when both are done.
fn a_taker_meets_a_magazine(without: Rule) {
    loom::model(move || {
        let depot = Depot::new(without);
        depot.free(0, FrameIndex(1));
        let taker = thread::spawn({
            let depot = Arc::clone(&depot);
            move || depot.take(1)
        });
        depot.free(0, FrameIndex(2));
        depot.free(0, FrameIndex(3));
        let mut had = vec![taker.join().unwrap().expect("refused")];
        depot.empty_all();
        had.extend(std::iter::from_fn(|| depot.try_take(1)));
        had.sort_by_key(|frame| frame.0);
        assert_eq!(had, [1, 2, 3].map(FrameIndex), "frames are lost or had twice");
    });
}

#[test]
fn loom_a_taker_meets_a_magazine() {
    a_taker_meets_a_magazine(Rule::None);
}

#[test]
#[should_panic(expected = "refused")]
fn loom_without_emptying_magazines_a_frame_is_refused() {
    a_taker_meets_a_magazine(Rule::Empty);
}

#[test]
#[should_panic(expected = "frames are lost")]
fn loom_without_giving_the_rest_to_the_list_frames_are_lost() {
    a_taker_meets_a_magazine(Rule::Rest);
}

const NODE: FrameIndex = FrameIndex(1);

/// The queue node of a page, the insert batches of two threads, and the queue.
struct Hall {
    without: Rule,
    node: FrameMeta,
    lists: [Mutex<InsertBatch>; 2],
    /// Queue nodes, and whether the owner was visible with the tag.
    queue: Mutex<Vec<(FrameIndex, bool)>>,
}

impl Hall {
    fn new(without: Rule) -> Arc<Hall> {
        let lists = [(); 2].map(|()| Mutex::new(InsertBatch::new()));
        Arc::new(Hall { without, node: FrameMeta::fresh(), lists, queue: Mutex::default() })
    }

    /// As `Cache::insert_pages`, by the thread that fills the page: the owner is stored before the
    /// tag.
    fn arrive(&self, place: usize, page: u64) {
        self.node.owner.store(owner_of(page), Relaxed);
        self.node.describe(PageIndex(page), BATCHED);
        self.lists[place].lock().unwrap().push(NODE);
    }

    /// As `Queues::insert_batch`.
    fn insert_batch(&self, nodes: &[FrameIndex]) {
        let mut queue = self.queue.lock().unwrap();
        for &node in nodes {
            let tags = self.node.published_tags();
            if tags & BATCHED != 0 || self.without == Rule::Tag {
                let is_its_owners = self.node.owner.load(Relaxed) == owner_of(self.node.page().0);
                self.node.set_tags(tags & !BATCHED);
                queue.push((node, is_its_owners));
            }
        }
    }

    /// As `Queues::remove`, when the page leaves its word: the node is free, or used for another
    /// page next.
    fn remove(&self) {
        let mut queue = self.queue.lock().unwrap();
        match self.node.tags() {
            tags if tags & BATCHED != 0 && self.without != Rule::Clear => {
                self.node.set_tags(tags & !BATCHED);
            }
            _ => queue.retain(|(node, _)| *node != NODE),
        }
    }

    /// As `Cache::evict`: evicts from the queue, and then from all lists. Returns whether a page
    /// was evicted.
    fn evict(&self, place: usize) -> bool {
        let evict_queued = || {
            self.insert_batch(self.lists[place].lock().unwrap().drain());
            self.queue.lock().unwrap().pop().is_some()
        };
        if evict_queued() {
            return true;
        }
        if self.without == Rule::AdmitAll {
            return false;
        }
        self.lists.iter().for_each(|list| self.insert_batch(list.lock().unwrap().drain()));
        evict_queued()
    }
}

fn owner_of(page: u64) -> *mut () {
    std::ptr::without_provenance_mut(16 * page as usize)
}

/// Runs `body` concurrently with a thread that drains the lists. Then the lists are drained again,
/// and the queue is checked.
fn drained_concurrently(without: Rule, body: fn(&Hall), check: fn(Vec<(FrameIndex, bool)>)) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let hall = Hall::new(without);
        let empty = |hall: &Hall| {
            hall.lists.iter().for_each(|list| hall.insert_batch(list.lock().unwrap().drain()));
        };
        let emptier = thread::spawn({
            let hall = Arc::clone(&hall);
            move || empty(&hall)
        });
        body(&hall);
        emptier.join().unwrap();
        empty(&hall);
        let queued = std::mem::take(&mut *hall.queue.lock().unwrap());
        check(queued);
    });
}

/// Goal: a page is queued once, with its owner, whichever list has its queue node by then. Method:
/// a page is inserted and removed, and another page is inserted with the same node, in the list of
/// another thread.
fn a_node_is_in_two_lists(without: Rule) {
    let body = |hall: &Hall| {
        hall.arrive(0, 1);
        hall.remove();
        hall.arrive(1, 2);
    };
    drained_concurrently(without, body, |queued| {
        assert_eq!(queued, [(NODE, true)], "a node is not queued once with its owner");
    });
}

#[test]
fn loom_a_node_is_in_two_lists() {
    a_node_is_in_two_lists(Rule::None);
}

#[test]
#[should_panic(expected = "a node is not queued once")]
fn loom_without_a_look_at_the_tag_a_seat_is_queued_twice() {
    a_node_is_in_two_lists(Rule::Tag);
}

/// Goal: a removed page is not queued, although its queue node is in a list.
fn a_newcomer_leaves(without: Rule) {
    let body = |hall: &Hall| {
        hall.arrive(0, 1);
        hall.remove();
    };
    drained_concurrently(without, body, |queued| {
        assert!(queued.is_empty(), "a free node is queued")
    });
}

#[test]
fn loom_a_newcomer_leaves() {
    a_newcomer_leaves(Rule::None);
}

#[test]
#[should_panic(expected = "a free node")]
fn loom_without_clearing_the_tag_a_free_node_is_queued() {
    a_newcomer_leaves(Rule::Clear);
}

/// Goal: no eviction fails while a page waits in another thread's list. Method: one thread inserts
/// a page; another thread evicts, at the same time and afterwards.
fn an_evictor_meets_a_newcomer(without: Rule) {
    loom::model(move || {
        let hall = Hall::new(without);
        let evictor = thread::spawn({
            let hall = Arc::clone(&hall);
            move || hall.evict(1)
        });
        hall.arrive(0, 1);
        let gone = evictor.join().unwrap() || hall.evict(1);
        assert!(gone, "nothing could go");
        assert!(hall.queue.lock().unwrap().is_empty());
    });
}

#[test]
fn loom_an_evictor_meets_a_newcomer() {
    an_evictor_meets_a_newcomer(Rule::None);
}

#[test]
#[should_panic(expected = "nothing could go")]
fn loom_without_emptying_all_lists_nothing_can_go() {
    an_evictor_meets_a_newcomer(Rule::AdmitAll);
}
