//! Loom models of queue nodes: pages that are overwritten while they are evicted, and frames that
//! move from one page to the other.

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::cache::policy::queue_node::QueueNode;
use crate::cache::table::epoch::Epoch;
use crate::cache::table::page::{PageWord, PublishFlags};
use crate::units::FrameIndex;

const FRAMES: u32 = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    None,
    /// The old frame gets the spare queue node before it is free (queue_node.QN1).
    SpareFirst,
    /// A frame that replaces none gets its queue node back (queue_node.QN1).
    GiveBack,
}

struct Pond {
    without: Rule,
    words: [PageWord; 2],
    epoch: Epoch,
    /// Those of frames 1 to 3.
    nodes: Vec<QueueNode>,
    /// Queue nodes and their pages.
    queue: Mutex<Vec<(FrameIndex, usize)>>,
    free: Mutex<Vec<FrameIndex>>,
}

impl Pond {
    /// Page 0 has frame 1, and the others are free.
    fn new(without: Rule) -> Arc<Pond> {
        let pond = Pond {
            without,
            words: [PageWord::new(), PageWord::new()],
            epoch: Epoch::new(),
            nodes: (0..=FRAMES).map(|_| QueueNode::own()).collect(),
            queue: Mutex::new(Vec::new()),
            free: Mutex::new((1..=FRAMES).rev().map(FrameIndex).collect()),
        };
        pond.fill(0);
        Arc::new(pond)
    }

    fn queue_node_of(&self, frame: FrameIndex) -> FrameIndex {
        self.nodes[frame.0 as usize].of(frame)
    }

    fn take(&self) -> Option<FrameIndex> {
        self.free.lock().unwrap().pop()
    }

    fn fill(&self, page: usize) {
        let Some(frame) = self.take() else { return };
        self.words[page].try_fill(frame).unwrap();
        let _ = self.words[page].finish_fill(frame, PublishFlags::default());
        let mut queue = self.queue.lock().unwrap();
        let node = self.queue_node_of(frame);
        assert!(queue.iter().all(|&(other, _)| other != node), "two pages have a node");
        queue.push((node, page));
    }

    fn overwrite(&self) {
        let Some(frame) = self.take() else { return };
        let free = |frame| self.free.lock().unwrap().push(frame);
        let seen = self.words[0].load();
        if !seen.is_ready() {
            return free(frame);
        }
        let old = seen.frame();
        let spare = self.nodes[frame.0 as usize].inherit(frame, self.queue_node_of(old));
        let done = self.words[0].try_replace(frame, PublishFlags::default(), &self.epoch);
        let unused = if done.is_ok() { old } else { frame };
        if self.without == Rule::SpareFirst {
            free(unused);
        }
        if done.is_ok() || self.without != Rule::GiveBack {
            self.nodes[unused.0 as usize].set(unused, spare);
        }
        if self.without != Rule::SpareFirst {
            free(unused);
        }
    }

    fn evict(&self) {
        let mut queue = self.queue.lock().unwrap();
        let Some(&(_, page)) = queue.first() else { return };
        let seen = self.words[page].load();
        if seen.is_ready() && self.words[page].try_evict(seen, &self.epoch) {
            queue.remove(0);
            self.free.lock().unwrap().push(seen.frame());
        }
    }

    /// Each cached page has the queue node that is queued for it.
    fn check(&self) {
        let queue = self.queue.lock().unwrap();
        for (page, word) in self.words.iter().enumerate() {
            let queued: Vec<_> = queue.iter().filter(|(_, other)| *other == page).collect();
            let seen = word.load();
            if seen.is_ready() {
                assert_eq!(queued.len(), 1, "a cached page is queued once");
                assert_eq!(
                    self.queue_node_of(seen.frame()),
                    queued[0].0,
                    "a page has lost its node"
                );
            } else {
                assert!(queued.is_empty());
            }
        }
    }
}

/// Goal: the queued node of a page is that of its frame, however the page is overwritten while it
/// is evicted, and its frames are used for another page.
fn overwrites_race_the_evictor(without: Rule) {
    loom::model(move || {
        let pond = Pond::new(without);
        let evictor = thread::spawn({
            let pond = Arc::clone(&pond);
            move || {
                pond.evict();
                pond.fill(1);
            }
        });
        // Once: in the model, versions have one bit.
        pond.overwrite();
        evictor.join().unwrap();
        if !pond.words[0].load().is_ready() {
            // With the frame that was freed last.
            pond.fill(0);
        }
        pond.check();
    });
}

#[test]
fn loom_overwrites_race_the_evictor() {
    overwrites_race_the_evictor(Rule::None);
}

#[test]
#[should_panic(expected = "node")]
fn loom_without_the_spare_node_first_a_frame_is_used_with_the_wrong_node() {
    overwrites_race_the_evictor(Rule::SpareFirst);
}

#[test]
#[should_panic(expected = "node")]
fn loom_without_giving_the_node_back_two_pages_have_it() {
    overwrites_race_the_evictor(Rule::GiveBack);
}
