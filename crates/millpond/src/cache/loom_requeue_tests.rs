//! Loom models of pages that leave the evictor's queues while write-back keeps them (evict.E2), and
//! return: none is lost to the evictor. The models run the production code.

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::cache::frames::FrameMeta;
use crate::cache::policy::fifo::{BATCHED, QUEUE, UNQUEUED};
use crate::cache::policy::queue_node::{self, QueueNode};
use crate::cache::table::epoch::Epoch;
use crate::cache::table::page::{PageWord, PublishFlags, Word, WritebackEnd};
use crate::units::{FrameIndex, PageIndex};

/// In the tags of a queue node: it is queued in main.
const MAIN: u32 = 3;
const _: () = assert!(MAIN & QUEUE == MAIN);

/// A rule that a mutation test leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    None,
    /// The page leaves its queue only if the word is still the one that was seen (evict.E2).
    CompareWord,
    /// The thread that makes the page evictable queues it again (page.W4).
    Requeue,
    /// That thread acquires the lock before it looks at the tag (evict.E2).
    Lock,
    /// The word is read again after the queue node (queue_node.QN2).
    SecondRead,
    /// The fresh frame has the page's queue node before it is in the word (queue_node.QN1).
    InheritFirst,
}

/// A page that has frame 1, UNSTABLE and queued; frame 2 is free.
struct Pond {
    without: Rule,
    word: PageWord,
    epoch: Epoch,
    nodes: [QueueNode; 3],
    metas: [FrameMeta; 3],
    /// The queues' lock.
    queues: Mutex<()>,
}

impl Pond {
    fn new(without: Rule) -> Arc<Pond> {
        let pond = Pond {
            without,
            word: PageWord::new(),
            epoch: Epoch::new(),
            nodes: [(); 3].map(|()| QueueNode::own()),
            metas: [(); 3].map(|()| FrameMeta::fresh()),
            queues: Mutex::new(()),
        };
        pond.word.try_fill(FrameIndex(1)).unwrap();
        let dirty = PublishFlags { dirty: true, ..PublishFlags::default() };
        let _ = pond.word.finish_fill(FrameIndex(1), dirty);
        let _ = pond.word.try_writeback(pond.word.load()).unwrap();
        let _ = pond.word.end_writeback(WritebackEnd::Unstable);
        pond.metas[1].set_tags(MAIN);
        Arc::new(pond)
    }

    fn queue_node_of(&self, frame: FrameIndex) -> FrameIndex {
        self.nodes[frame.0 as usize].of(frame)
    }

    /// As `QueuedPage::of`, for node 1.
    fn seen(&self) -> Option<Word> {
        Some(self.word.load()).filter(|seen| seen.is_ready())
    }

    /// The evictor finds the page unevictable.
    fn scan(&self) {
        let _queues = self.queues.lock().unwrap();
        let meta = &self.metas[1];
        if meta.tags() == MAIN
            && let Some(seen) = self.seen()
            && seen.is_unevictable()
            && (self.word.try_unqueue(seen) || self.without == Rule::CompareWord)
        {
            meta.set_tags(MAIN | UNQUEUED);
        }
    }

    /// As `Cache::find_to_requeue`.
    fn find_node(&self) -> Option<FrameIndex> {
        let queue_node_of = |frame| self.queue_node_of(frame);
        if self.without == Rule::SecondRead {
            let seen = self.word.load();
            return seen.is_ready().then(|| queue_node_of(seen.frame()));
        }
        queue_node::of_page(&self.word, queue_node_of)
    }

    /// As a sync that covers the page, and `Cache::requeue_evictable`.
    fn clear_unstable(&self) {
        let change = self.word.clear_unstable();
        if !change.must_requeue() || self.without == Rule::Requeue {
            return;
        }
        let Some(node) = self.find_node() else { return };
        let meta = &self.metas[node.0 as usize];
        let early = meta.tags();
        let _queues = self.queues.lock().unwrap();
        let tags = if self.without == Rule::Lock { early } else { meta.tags() };
        if tags & UNQUEUED != 0 {
            meta.set_tags(meta.tags() & !UNQUEUED);
        }
    }

    /// A write that goes through, of a READY page.
    fn overwrite(&self) {
        self.replace_frame(|new| {
            let change = self.word.try_replace(new, PublishFlags::default(), &self.epoch).unwrap();
            assert_eq!(change.was.frame(), FrameIndex(1));
        });
    }

    /// The same of a page that was hidden before.
    fn publish(&self) {
        self.replace_frame(|new| {
            let _ = self.word.publish(new, PublishFlags::default());
        });
    }

    /// Puts frame 2 into the word by `put`. The old frame is used for another page next, with the
    /// queue node that comes with it.
    fn replace_frame(&self, put: impl FnOnce(FrameIndex)) {
        let (old, new) = (FrameIndex(1), FrameIndex(2));
        let inherit = || self.nodes[2].inherit(new, self.queue_node_of(old));
        let early = (self.without != Rule::InheritFirst).then(inherit);
        put(new);
        let spare = early.unwrap_or_else(inherit);
        self.nodes[1].set(old, spare);
        self.metas[2].describe(PageIndex(7), BATCHED);
    }

    /// After all other threads are done.
    fn check(&self) {
        let _queues = self.queues.lock().unwrap();
        assert!(!self.word.load().is_unevictable());
        let node = self.seen().map(|seen| self.queue_node_of(seen.frame()));
        assert_eq!(node, Some(FrameIndex(1)));
        assert_eq!(self.metas[1].tags(), MAIN, "an evictable page is in no queue");
    }
}

/// Goal: a page that becomes evictable while it leaves its queue is queued again. Method: it is
/// overwritten, too, if `overwritten`; it has left its queue before, if `unqueued`.
fn a_page_is_requeued(without: Rule, overwritten: bool, unqueued: bool) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let pond = Pond::new(without);
        if unqueued {
            pond.scan();
        }
        let spawn = |body: fn(&Pond)| {
            let pond = Arc::clone(&pond);
            thread::spawn(move || body(&pond))
        };
        let threads =
            [overwritten.then(|| spawn(Pond::overwrite)), (!unqueued).then(|| spawn(Pond::scan))];
        pond.clear_unstable();
        threads.into_iter().flatten().for_each(|thread| thread.join().unwrap());
        pond.check();
    });
}

#[test]
fn loom_a_page_is_requeued_while_it_leaves_its_queue() {
    a_page_is_requeued(Rule::None, false, false);
}

#[test]
#[should_panic(expected = "in no queue")]
fn loom_without_comparing_the_word_a_page_is_in_no_queue() {
    a_page_is_requeued(Rule::CompareWord, false, false);
}

#[test]
#[should_panic(expected = "in no queue")]
fn loom_without_requeueing_a_page_is_in_no_queue() {
    a_page_is_requeued(Rule::Requeue, false, false);
}

#[test]
#[should_panic(expected = "in no queue")]
fn loom_without_the_lock_the_tag_is_not_found() {
    a_page_is_requeued(Rule::Lock, false, false);
}

#[test]
fn loom_an_overwritten_page_is_requeued() {
    a_page_is_requeued(Rule::None, true, true);
}

#[test]
fn loom_an_overwritten_page_is_requeued_while_it_leaves_its_queue() {
    a_page_is_requeued(Rule::None, true, false);
}

/// Goal: the same of a page that was hidden for the write. Its frame is replaced without a fence.
#[test]
fn loom_a_hidden_page_is_requeued() {
    loom::model(|| {
        let pond = Pond::new(Rule::None);
        pond.scan();
        let _ = pond.word.hide(&pond.epoch);
        let writer = Arc::clone(&pond);
        let writer = thread::spawn(move || writer.publish());
        pond.clear_unstable();
        writer.join().unwrap();
        pond.check();
    });
}

#[test]
#[should_panic(expected = "in no queue")]
fn loom_without_a_second_read_another_node_is_requeued() {
    a_page_is_requeued(Rule::SecondRead, true, true);
}

#[test]
#[should_panic(expected = "in no queue")]
fn loom_without_inheriting_first_another_node_is_requeued() {
    a_page_is_requeued(Rule::InheritFirst, true, true);
}
