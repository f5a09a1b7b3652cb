//! Loom models of a cache that another process reads (see `shared`), on the real types. The client stores nothing in the
//! server's memory; so it sets no REFERENCED, holds no node and pins no frame. The `loom_without_*` mutation tests leave
//! out a rule, and must fail.
//!
//! Loom has no `membarrier`: the models' clients fence themselves (shared.SH4 argues the other order).

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::Relaxed;
use loom::thread;

use crate::cache::loom_tests::{Pond, Rule, SHOWN};
use crate::cache::shared::attempts::{self, AttemptCount, AttemptOrder};
use crate::cache::shared::touched::TouchRing;
use crate::cache::table::FileCore;
use crate::cache::table::link::Link;
use crate::cache::table::page::PageWord;
use crate::cache::table::step::{self, Followed, LinkSlot};
use crate::units::FrameIndex;

/// A rule that a mutation test leaves out.
#[derive(Clone, Copy, PartialEq)]
enum SharedRule {
    None,
    /// The server looks at the attempts before it gives memory back (shared.SH4).
    Attempts,
    /// The server orders its look behind the eviction (shared.SH4).
    LookAfterEviction,
    /// The epoch rises before a core is used again (shared.SH5).
    Raise,
    /// The generation is compared again after the size (shared.SH5).
    GenerationAfterSize,
    /// A node is zeroed before it is linked (shared.SH6).
    ZeroedBefore,
}

/// A client reads a page and pushes its frame. Concurrently the server drains the ring; if the frame is not there, it evicts
/// the page and uses the frame for another one.
fn reader_without_referenced(without: Rule) {
    loom::model(move || {
        let pond = Pond::new(without);
        pond.size.set(1);
        let ring = Arc::new(TouchRing::new());
        let client = thread::spawn({
            let (pond, ring) = (Arc::clone(&pond), Arc::clone(&ring));
            move || {
                if let Some(seen) = pond.try_read() {
                    assert_eq!(seen, [0], "bytes of another page");
                    ring.push(1, FrameIndex(1));
                }
            }
        });
        let word = &pond.words[0];
        let drain = |last| {
            ring.drain(last, |frame| {
                assert_eq!(frame, FrameIndex(1), "a frame that was not pushed");
                let seen = word.load();
                if seen.is_ready() && seen.frame() == frame {
                    word.mark_referenced(seen);
                }
            })
        };
        let last = drain(0);
        if last == 0 {
            pond.evict(0);
            pond.build(1, 1);
        } else {
            // So it is not evicted.
            assert!(word.load().is_referenced(), "a page that was read");
        }
        client.join().unwrap();
        assert!(drain(last) <= 1, "a push is seen once");
    });
}

/// Goal: a client that sets no REFERENCED reads whole pages, and the server keeps a page whose push it has seen.
#[test]
fn loom_client_without_referenced() {
    reader_without_referenced(Rule::None);
}

#[test]
#[should_panic(expected = "bytes of another page")]
fn loom_without_validation_by_a_client() {
    reader_without_referenced(Rule::Validation);
}

/// Two copies in one attempt of a client, while the page's frame is used for another page, and the page comes back.
fn frame_reused_under_a_client(without: Rule) {
    loom::model(move || {
        let pond = Pond::new(without);
        pond.size.set(1);
        let client = thread::spawn({
            let pond = Arc::clone(&pond);
            move || {
                let begun = pond.epoch.begin();
                let seen = pond.words[0].load();
                if !seen.is_hit() {
                    return;
                }
                let frame = &pond.frames[seen.frame().0 as usize];
                let (first, second) = (frame.load(Relaxed), frame.load(Relaxed));
                let is_same = step::is_consistent([(&pond.words[0], seen)], [], &pond.epoch, begun);
                if is_same || pond.without == Rule::Validation {
                    assert_eq!((first, second), (0, 0), "bytes of another page");
                }
            }
        });
        pond.evict(0);
        pond.evict(1);
        pond.fill(1, 1, 5);
        pond.fill(0, 2, 0);
        client.join().unwrap();
    });
}

/// Goal: the reuse of a frame during a client's copy is noticed, without a pin.
#[test]
fn loom_frame_reused_under_a_client() {
    frame_reused_under_a_client(Rule::None);
}

#[test]
#[should_panic(expected = "bytes of another page")]
fn loom_without_validation_of_a_reused_frame() {
    frame_reused_under_a_client(Rule::Validation);
}

/// A core that goes from a file without cached pages to another one, with a page.
struct ReusedCore {
    without: SharedRule,
    core: FileCore,
    root: LinkSlot,
    word: PageWord,
    frame: AtomicUsize,
}

impl ReusedCore {
    fn new(without: SharedRule, size: u64) -> Arc<ReusedCore> {
        Arc::new(ReusedCore {
            without,
            core: FileCore::new(size, 12),
            root: LinkSlot::new(0),
            word: PageWord::new(),
            frame: AtomicUsize::new(77),
        })
    }

    /// The file is closed, and another one gets the core.
    fn close_and_reopen(&self, size: u64) {
        self.core.retire();
        if self.without == SharedRule::Raise {
            self.core.size.set(size);
        } else {
            self.core.reopen(size);
        }
    }

    fn is_current(&self) -> bool {
        self.core.generation() == 0
    }
}

fn core_reused(without: SharedRule) {
    loom::model(move || {
        let file = ReusedCore::new(without, 4096);
        let client = thread::spawn({
            let file = Arc::clone(&file);
            // An attempt with the handle of the first file, which has no page in the cache.
            move || {
                let begun = file.core.epoch.begin();
                if !file.is_current() {
                    return;
                }
                let leaf = Followed::new(&file.root);
                if leaf.node() == FrameIndex::NONE {
                    return;
                }
                let seen = file.word.load();
                if !seen.is_hit() {
                    return;
                }
                file.frame.load(Relaxed);
                let words = [(&file.word, seen)];
                let is_same = step::is_consistent(words, [leaf], &file.core.epoch, begun);
                assert!(!is_same, "bytes of another file");
            }
        });
        file.close_and_reopen(8192);
        file.root.try_link(0, Link::root(FrameIndex(3), 1).0).unwrap();
        file.word.try_fill(FrameIndex(1)).unwrap();
        step::begin_reuse();
        file.frame.store(5, Relaxed);
        let _ = file.word.finish_fill(FrameIndex(1), SHOWN);
        client.join().unwrap();
    });
}

/// Goal: a client whose file was closed reads no bytes of the file that has the core next.
#[test]
fn loom_core_reused_under_a_client() {
    core_reused(SharedRule::None);
}

#[test]
#[should_panic(expected = "bytes of another file")]
fn loom_without_the_raise_for_a_reused_core() {
    core_reused(SharedRule::Raise);
}

fn end_of_a_reused_core(without: SharedRule) {
    loom::model(move || {
        let file = ReusedCore::new(without, 4096);
        let client = thread::spawn({
            let file = Arc::clone(&file);
            // A read of the first file at 2048, which misses: is that its end?
            move || {
                file.core.epoch.begin();
                if !file.is_current() {
                    return;
                }
                let size = file.core.size.get();
                let is_current = without == SharedRule::GenerationAfterSize || file.is_current();
                assert!(size > 2048 || !is_current, "the end of another file");
            }
        });
        file.close_and_reopen(100);
        client.join().unwrap();
    });
}

/// Goal: a client whose file was closed does not take the size of the next file for its own.
#[test]
fn loom_end_of_a_reused_core() {
    end_of_a_reused_core(SharedRule::None);
}

#[test]
#[should_panic(expected = "the end of another file")]
fn loom_without_the_generation_after_the_size() {
    end_of_a_reused_core(SharedRule::GenerationAfterSize);
}

/// The content of a frame whose memory was given back.
const HOLE: usize = 99;

struct GivenBack {
    pond: Arc<Pond>,
    attempts: AttemptCount,
    /// The frame's memory, of which loom reports an access that races.
    memory: UnsafeCell<usize>,
}

// SAFETY: loom checks accesses to the cell.
unsafe impl Sync for GivenBack {}

/// Attempts of a client, while the server evicts a page and gives its memory back.
fn memory_given_back(without: SharedRule) {
    loom::model(move || {
        let shared = Arc::new(GivenBack {
            pond: Pond::new(Rule::None),
            attempts: AttemptCount::new(),
            memory: UnsafeCell::new(1),
        });
        let client = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                for _ in 0..2 {
                    let _attempting = shared.attempts.begin(AttemptOrder::ByFence);
                    let seen = shared.pond.words[0].load();
                    if seen.is_hit() {
                        let content = shared.pond.frames[seen.frame().0 as usize].load(Relaxed);
                        assert_ne!(content, HOLE, "a hole was read, and filled");
                        if without == SharedRule::None {
                            // SAFETY: loom reports a race.
                            shared.memory.with(|memory| unsafe { *memory });
                        }
                    }
                }
            }
        });
        // Without `retire`, whose fence would order the look as well. (Frames in magazines and lists were retired long
        // before, or by other threads.)
        let word = &shared.pond.words[0];
        assert!(word.try_evict(word.load(), &shared.pond.epoch));
        if without != SharedRule::LookAfterEviction {
            attempts::begin_look();
        }
        let is_quiet = match shared.attempts.under_way() {
            None => true,
            Some(attempt) => shared.attempts.has_ended(attempt),
        };
        if is_quiet || without == SharedRule::Attempts {
            shared.pond.frames[1].store(HOLE, Relaxed);
            if without == SharedRule::None {
                // SAFETY: loom reports a race.
                shared.memory.with_mut(|memory| unsafe { *memory = HOLE });
            }
        }
        client.join().unwrap();
    });
}

/// Goal: memory is given back only when no attempt can read it.
#[test]
fn loom_memory_given_back_beside_attempts() {
    memory_given_back(SharedRule::None);
}

#[test]
#[should_panic(expected = "a hole was read")]
fn loom_without_a_look_at_the_attempts() {
    memory_given_back(SharedRule::Attempts);
}

#[test]
#[should_panic(expected = "a hole was read")]
fn loom_without_the_order_of_the_look() {
    memory_given_back(SharedRule::LookAfterEviction);
}

/// A chunk gets its class while a client reads: a node in it, and a frame.
fn growth(without: SharedRule) {
    loom::model(move || {
        let pond = Pond::new(Rule::None);
        // The new node holds a link of its earlier life.
        let table = Arc::new([LinkSlot::new(0), LinkSlot::new(Link::root(FrameIndex(77), 0).0)]);
        let client = thread::spawn({
            let (pond, table) = (Arc::clone(&pond), Arc::clone(&table));
            move || {
                let [root, slot] = &*table;
                if Followed::new(root).node() == FrameIndex::NONE {
                    return;
                }
                let node = Followed::new(slot).node();
                if node == FrameIndex::NONE {
                    return;
                }
                assert_eq!(node, FrameIndex(4), "a link of the node's earlier life");
                let word = &pond.words[0];
                let seen = word.load();
                if seen.is_hit() && seen.frame() == FrameIndex(3) {
                    assert_eq!(pond.frames[3].load(Relaxed), 1, "a frame without its bytes");
                }
            }
        });
        pond.evict(0);
        let [root, slot] = &*table;
        if without != SharedRule::ZeroedBefore {
            slot.init(0);
        }
        root.try_link(0, Link::root(FrameIndex(2), 2).0).unwrap();
        if without == SharedRule::ZeroedBefore {
            slot.init(0);
        }
        slot.try_link(0, Link(0).naming(FrameIndex(4)).0).unwrap();
        pond.fill(0, 3, 1);
        client.join().unwrap();
    });
}

/// Goal: a client that attached before finds nodes and frames of a new chunk as they were made.
#[test]
fn loom_growth_beside_a_client() {
    growth(SharedRule::None);
}

#[test]
#[should_panic(expected = "earlier life")]
fn loom_without_a_zeroed_node() {
    growth(SharedRule::ZeroedBefore);
}
