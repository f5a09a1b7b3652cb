//! Loom models of what goes in batches between a thread and the lists that all share: free frames
//! ([`magazine`](super::magazine)) and newcomers ([`newcomers`](super::newcomers)), with the types that the
//! engine has.

use std::sync::atomic::Ordering::Relaxed;

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::cache::frames::FrameMeta;
use crate::cache::frames::magazine::Magazine;
use crate::cache::policy::fifo::BATCHED;
use crate::cache::policy::insert_batch::InsertBatch;
use crate::units::{FrameIndex, PageIndex};

/// A rule that a twin leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    None,
    /// What magazines hold is given to the free list before anybody is refused memory (magazine.MG3).
    Empty,
    /// A magazine that is full gives a batch to the free list.
    Rest,
    /// The node's tag is what says that it is a newcomer's (insert_batch.IB1).
    Tag,
    /// Who takes the page out clears the tag (insert_batch.IB1).
    Clear,
    /// All lists are emptied before somebody is told that nothing can go (insert_batch.IB3).
    AdmitAll,
}

const BATCH: usize = 1;

/// Two threads' magazines, and the free list behind them.
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

    /// As `Frames::free_near`.
    fn free(&self, place: usize, frame: FrameIndex) {
        let mut near = self.magazines[place].lock().unwrap();
        near.put(frame, BATCH, |rest| {
            if self.without != Rule::Rest {
                self.list.lock().unwrap().extend(rest);
            }
        });
    }

    /// As `Frames::take_near`.
    fn try_take(&self, place: usize) -> Option<FrameIndex> {
        let mut near = self.magazines[place].lock().unwrap();
        let mut frame = [FrameIndex::NONE];
        if near.take(&mut frame) == 1 {
            return Some(frame[0]);
        }
        let mut list = self.list.lock().unwrap();
        let taken = list.pop();
        near.load(BATCH, std::iter::from_fn(|| list.pop()));
        taken
    }

    /// As `Cache::take_frame` where nothing can be evicted.
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

/// Goal: frames are neither lost nor had twice, and nobody is refused one that lies in another thread's
/// magazine.
/// Method: one thread has three frames and frees them; the other takes one meanwhile, and all that are left
/// when both are done.
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

const SEAT: FrameIndex = FrameIndex(1);

/// One page's node, two threads' lists of newcomers, and the queue.
struct Hall {
    without: Rule,
    node: FrameMeta,
    lists: [Mutex<InsertBatch>; 2],
    /// Seats, and whether the owner was found with the tag.
    queue: Mutex<Vec<(FrameIndex, bool)>>,
}

impl Hall {
    fn new(without: Rule) -> Arc<Hall> {
        let lists = [(); 2].map(|()| Mutex::new(InsertBatch::new()));
        Arc::new(Hall { without, node: FrameMeta::fresh(), lists, queue: Mutex::default() })
    }

    /// As `Cache::arrived`, by the thread that brings the page: the owner before the tag.
    fn arrive(&self, place: usize, page: u64) {
        self.node.owner.store(owner_of(page), Relaxed);
        self.node.describe(PageIndex(page), BATCHED);
        self.lists[place].lock().unwrap().push(SEAT);
    }

    /// As `Queues::admit`.
    fn insert_batch(&self, newcomers: &[FrameIndex]) {
        let mut queue = self.queue.lock().unwrap();
        for &node in newcomers {
            let tags = self.node.published_tags();
            if tags & BATCHED != 0 || self.without == Rule::Tag {
                let is_its_owners = self.node.owner.load(Relaxed) == owner_of(self.node.page().0);
                self.node.set_tags(tags & !BATCHED);
                queue.push((node, is_its_owners));
            }
        }
    }

    /// As `Queues::remove`, when the page is taken out of its word: the node is free, or another page's next.
    fn remove(&self) {
        let mut queue = self.queue.lock().unwrap();
        match self.node.tags() {
            tags if tags & BATCHED != 0 && self.without != Rule::Clear => {
                self.node.set_tags(tags & !BATCHED);
            }
            _ => queue.retain(|(node, _)| *node != SEAT),
        }
    }

    /// As `Cache::evict`: of what is queued, and then of what all lists have; whether a page went.
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

/// Beside a thread that empties the lists, `body` is done; then the lists are emptied again. What is queued.
fn emptied_beside(without: Rule, body: fn(&Hall), check: fn(Vec<(FrameIndex, bool)>)) {
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

/// Goal: a page is in the queue once, with its owner, whichever list its node is in by then.
/// Method: a page arrives and leaves, and another one arrives with its node, in another thread's list.
fn a_seat_is_in_two_lists(without: Rule) {
    let body = |hall: &Hall| {
        hall.arrive(0, 1);
        hall.remove();
        hall.arrive(1, 2);
    };
    emptied_beside(without, body, |queued| {
        assert_eq!(queued, [(SEAT, true)], "a node is not queued once with its owner");
    });
}

#[test]
fn loom_a_seat_is_in_two_lists() {
    a_seat_is_in_two_lists(Rule::None);
}

#[test]
#[should_panic(expected = "a node is not queued once")]
fn loom_without_a_look_at_the_tag_a_seat_is_queued_twice() {
    a_seat_is_in_two_lists(Rule::Tag);
}

/// Goal: a page that has left is in no queue, though its node is in a list.
fn a_newcomer_leaves(without: Rule) {
    let body = |hall: &Hall| {
        hall.arrive(0, 1);
        hall.remove();
    };
    emptied_beside(without, body, |queued| {
        assert!(queued.is_empty(), "a node of nobody's is queued")
    });
}

#[test]
fn loom_a_newcomer_leaves() {
    a_newcomer_leaves(Rule::None);
}

#[test]
#[should_panic(expected = "a node of nobody's")]
fn loom_without_clearing_the_tag_a_seat_of_nobodys_is_queued() {
    a_newcomer_leaves(Rule::Clear);
}

/// Goal: nobody is told that nothing can go while a page waits in another thread's list.
/// Method: a page arrives by one thread; another one evicts, at the same time and after.
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
