//! Loom models of the [unevictable list](super::policy::unevictable): no dirty page is lost to the
//! evictor, and no clean one stays on the list. The evictor parks a dirty page there while write-back
//! cleans the page and a writer dirties it again. The models run the production code.

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::cache::frames::FrameMeta;
use crate::cache::policy::fifo::{BATCHED, QUEUE, UNEVICTABLE};
use crate::cache::policy::queue_node::QueueNode;
use crate::cache::policy::unevictable::{self, RescanFlag};
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
    /// The evictor reads the word again (unevictable.UN2).
    SecondRead,
    /// The thread that makes the page evictable reads its queue node (unevictable.UN2).
    QueueNode,
    /// A thread that does not find the queue node sets the rescan flag (unevictable.UN3).
    Rescan,
}

/// A page that has frame 1, UNSTABLE and queued; frame 2 is free.
struct Pond {
    without: Rule,
    word: PageWord,
    epoch: Epoch,
    nodes: [QueueNode; 3],
    metas: [FrameMeta; 3],
    rescan: RescanFlag,
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
            rescan: RescanFlag::new(),
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
        let seen = self.word.load();
        (seen.is_ready() && self.queue_node_of(seen.frame()) == FrameIndex(1)).then_some(seen)
    }

    /// As `Queues::move_to_unevictable`, under the lock.
    fn move_to_list(&self) {
        let meta = &self.metas[1];
        meta.set_tags(MAIN | UNEVICTABLE);
        if self.without != Rule::SecondRead && !unevictable::is_still_unevictable(|| self.seen()) {
            meta.set_tags(MAIN);
        }
    }

    /// The evictor finds the page unevictable.
    fn look(&self) {
        let _queues = self.queues.lock().unwrap();
        if self.seen().is_some_and(Word::is_unevictable) {
            self.move_to_list();
        }
    }

    /// As a sync that covers the page, and `Cache::requeue_evictable`.
    fn clear_unstable(&self) {
        let change = self.word.clear_unstable();
        let rescan = if self.without == Rule::Rescan { &RescanFlag::new() } else { &self.rescan };
        let queue_node_of = |frame| self.queue_node_of(frame);
        let meta = |node: FrameIndex| &self.metas[node.0 as usize];
        let found = unevictable::find_to_requeue(&self.word, change, rescan, queue_node_of, meta);
        if let Some(node) = found
            && self.without != Rule::QueueNode
        {
            let _queues = self.queues.lock().unwrap();
            let meta = &self.metas[node.0 as usize];
            meta.set_tags(meta.tags() & !UNEVICTABLE);
        }
    }

    /// A write that goes through. The old frame is used for another page next, with the queue node
    /// that comes with it.
    fn overwrite(&self) {
        let (old, new) = (FrameIndex(1), FrameIndex(2));
        let change = self.word.try_replace(new, PublishFlags::default(), &self.epoch).unwrap();
        assert_eq!(change.was.frame(), old);
        self.nodes[1].swap(old, &self.nodes[2], new);
        self.metas[2].describe(PageIndex(7), BATCHED);
    }

    /// As an evictor that finds no other victim, after all other threads are done.
    fn check(&self) {
        let _queues = self.queues.lock().unwrap();
        if self.rescan.take() && self.metas[1].tags() & UNEVICTABLE != 0 {
            self.move_to_list();
        }
        assert!(!self.word.load().is_unevictable());
        assert!(self.seen().is_some());
        assert_eq!(self.metas[1].tags(), MAIN, "a page was left on the shelf");
    }
}

fn spawn(pond: &Arc<Pond>, body: fn(&Pond)) -> thread::JoinHandle<()> {
    let pond = Arc::clone(pond);
    thread::spawn(move || body(&pond))
}

/// Goal: a page that becomes evictable while the evictor moves it to the list does not stay on the
/// list.
fn a_page_is_requeued(without: Rule) {
    loom::model(move || {
        let pond = Pond::new(without);
        let evictor = spawn(&pond, Pond::look);
        pond.clear_unstable();
        evictor.join().unwrap();
        pond.check();
    });
}

#[test]
fn loom_a_page_is_requeued_while_it_is_moved() {
    a_page_is_requeued(Rule::None);
}

#[test]
#[should_panic(expected = "left on the shelf")]
fn loom_without_looking_again_a_page_is_left_on_the_shelf() {
    a_page_is_requeued(Rule::SecondRead);
}

#[test]
#[should_panic(expected = "left on the shelf")]
fn loom_without_looking_at_the_seat_a_page_is_left_on_the_shelf() {
    a_page_is_requeued(Rule::QueueNode);
}

/// Goal: the same if the page is overwritten concurrently, so that the thread that makes it
/// evictable does not find its queue node. Method: the page is on the list before, or is moved
/// there concurrently.
fn an_overwritten_page_is_requeued(without: Rule, listed: bool) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let pond = Pond::new(without);
        if listed {
            pond.look();
        }
        let writer = spawn(&pond, Pond::overwrite);
        let evictor = (!listed).then(|| spawn(&pond, Pond::look));
        pond.clear_unstable();
        writer.join().unwrap();
        if let Some(evictor) = evictor {
            evictor.join().unwrap();
        }
        pond.check();
    });
}

#[test]
fn loom_an_overwritten_page_is_requeued() {
    an_overwritten_page_is_requeued(Rule::None, true);
}

#[test]
fn loom_an_overwritten_page_is_requeued_from_the_list() {
    an_overwritten_page_is_requeued(Rule::None, false);
}

#[test]
#[should_panic(expected = "left on the shelf")]
fn loom_without_telling_of_a_stray_it_is_left_on_the_shelf() {
    an_overwritten_page_is_requeued(Rule::Rescan, true);
}
