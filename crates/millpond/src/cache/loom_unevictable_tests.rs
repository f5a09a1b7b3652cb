//! Loom models of the [`shelf`](super::shelf): the evictor that puts a page there, against write-back that lets
//! it go and a writer that overwrites it, with the types and steps that the engine has.

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::cache::frames::FrameMeta;
use crate::cache::policy::fifo::{BATCHED, QUEUE, UNEVICTABLE};
use crate::cache::policy::queue_node::QueueNode;
use crate::cache::policy::unevictable::{self, RescanFlag};
use crate::cache::table::epoch::Epoch;
use crate::cache::table::page::{PageWord, Shown, Word, WritebackEnd};

use crate::units::{FrameIndex, PageIndex};

/// In a node's tags: it is queued in main.
const MAIN: u32 = 3;
const _: () = assert!(MAIN & QUEUE == MAIN);

/// A rule that a twin leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    None,
    /// The evictor looks at the word again (unevictable.UN2).
    Again,
    /// Who lets the page go looks at its node (unevictable.UN2).
    QueueNode,
    /// One who does not find it says so (unevictable.UN3).
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
        let dirty = Shown { dirty: true, ..Shown::default() };
        let _ = pond.word.finish_fill(FrameIndex(1), dirty);
        let _ = pond.word.try_writeback(pond.word.load()).unwrap();
        let _ = pond.word.end_writeback(WritebackEnd::Unstable);
        pond.metas[1].set_tags(MAIN);
        Arc::new(pond)
    }

    fn queue_node_of(&self, frame: FrameIndex) -> FrameIndex {
        self.nodes[frame.0 as usize].of(frame)
    }

    /// As `Place::of`, of node 1.
    fn seen(&self) -> Option<Word> {
        let seen = self.word.load();
        (seen.is_ready() && self.queue_node_of(seen.frame()) == FrameIndex(1)).then_some(seen)
    }

    /// As `Queues::shelve`, under the lock.
    fn shelve(&self) {
        let meta = &self.metas[1];
        meta.set_tags(MAIN | UNEVICTABLE);
        if self.without != Rule::Again && !unevictable::is_still_unevictable(|| self.seen()) {
            meta.set_tags(MAIN);
        }
    }

    /// The evictor finds the page kept.
    fn look(&self) {
        let _queues = self.queues.lock().unwrap();
        if self.seen().is_some_and(Word::is_unevictable) {
            self.shelve();
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

    /// A write that goes through; and its old frame is another page's next, with the node that comes with it.
    fn overwrite(&self) {
        let (old, new) = (FrameIndex(1), FrameIndex(2));
        let change = self.word.try_replace(new, Shown::default(), &self.epoch).unwrap();
        assert_eq!(change.was.frame(), old);
        self.nodes[1].swap(old, &self.nodes[2], new);
        self.metas[2].describe(PageIndex(7), BATCHED);
    }

    /// As an evictor that finds nothing else, when all others are done.
    fn check(&self) {
        let _queues = self.queues.lock().unwrap();
        if self.rescan.take() && self.metas[1].tags() & UNEVICTABLE != 0 {
            self.shelve();
        }
        assert!(!self.word.load().is_unevictable());
        assert!(self.seen().is_some());
        assert_eq!(self.metas[1].tags(), MAIN, "a page was left on the shelf");
    }
}

fn beside(pond: &Arc<Pond>, body: fn(&Pond)) -> thread::JoinHandle<()> {
    let pond = Arc::clone(pond);
    thread::spawn(move || body(&pond))
}

/// Goal: a page that write-back lets go while the evictor puts it on the shelf is not left there.
fn a_page_is_let_go(without: Rule) {
    loom::model(move || {
        let pond = Pond::new(without);
        let evictor = beside(&pond, Pond::look);
        pond.clear_unstable();
        evictor.join().unwrap();
        pond.check();
    });
}

#[test]
fn loom_a_page_is_let_go_while_it_is_shelved() {
    a_page_is_let_go(Rule::None);
}

#[test]
#[should_panic(expected = "left on the shelf")]
fn loom_without_looking_again_a_page_is_left_on_the_shelf() {
    a_page_is_let_go(Rule::Again);
}

#[test]
#[should_panic(expected = "left on the shelf")]
fn loom_without_looking_at_the_seat_a_page_is_left_on_the_shelf() {
    a_page_is_let_go(Rule::QueueNode);
}

/// Goal: the same where the page is overwritten meanwhile, and who lets it go does not find its node.
/// Method: the page is on the shelf before, or is put there beside it.
fn an_overwritten_page_is_let_go(without: Rule, shelved: bool) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let pond = Pond::new(without);
        if shelved {
            pond.look();
        }
        let writer = beside(&pond, Pond::overwrite);
        let evictor = (!shelved).then(|| beside(&pond, Pond::look));
        pond.clear_unstable();
        writer.join().unwrap();
        if let Some(evictor) = evictor {
            evictor.join().unwrap();
        }
        pond.check();
    });
}

#[test]
fn loom_an_overwritten_page_is_let_go() {
    an_overwritten_page_is_let_go(Rule::None, true);
}

#[test]
fn loom_an_overwritten_page_is_let_go_while_it_is_shelved() {
    an_overwritten_page_is_let_go(Rule::None, false);
}

#[test]
#[should_panic(expected = "left on the shelf")]
fn loom_without_telling_of_a_stray_it_is_left_on_the_shelf() {
    an_overwritten_page_is_let_go(Rule::Rescan, true);
}
