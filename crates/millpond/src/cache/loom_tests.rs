//! Loom models of the page word, the pins and the holds, on the real types.
//!
//! In the models a frame is one number, and the version has one bit, so that two departures from
//! READY wrap it. The fences that callers of the transitions add (around taking, hiding and
//! copying) are in `step` and `pin`, which the callers and the models use; `scripts/weaken` removes
//! each in turn. The `loom_without_*` mutation tests leave out a rule of order that the callers
//! keep, and must fail.

use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::thread;

use crate::cache::frames::pin::{Pins, Retiring};
use crate::cache::table::epoch::Epoch;
use crate::cache::table::page::{PageState, PageWord, PublishFlags};
use crate::cache::table::step::{self, FileSize, Hiding};
use crate::units::FrameIndex;

pub(super) const SHOWN: PublishFlags =
    PublishFlags { referenced: false, marker: false, dirty: false };

/// A rule of the protocol that a mutation test leaves out.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Rule {
    None,
    /// The comparison of the epoch at the end of a read.
    Epoch,
    /// All pages of a write are hidden before the first is published.
    HideAll,
    /// The size is published before the first page is published.
    SizeBeforeShow,
    /// The pages whose bytes change with the size are hidden before it changes.
    HideBeforeSize,
    /// The reader checks its words and the epoch again after the copy.
    Validation,
    /// The size is loaded after the words.
    SizeAfterWords,
}

/// Page words, frames and their context, shared by the threads of a model.
pub(super) struct Pond {
    pub(super) without: Rule,
    pub(super) words: [PageWord; 2],
    pub(super) epoch: Epoch,
    /// In pages.
    pub(super) size: FileSize,
    pub(super) frames: [AtomicUsize; 5],
    pub(super) pins: [Pins; 5],
}

impl Pond {
    /// Page `i` is READY with frame `i + 1`, whose content is 0.
    pub(super) fn new(without: Rule) -> Arc<Pond> {
        let pond = Pond {
            without,
            words: [PageWord::new(), PageWord::new()],
            epoch: Epoch::new(),
            size: FileSize::new(2),
            // The content of a free frame must not be visible.
            frames: std::array::from_fn(|frame| AtomicUsize::new(if frame < 3 { 0 } else { 77 })),
            pins: Default::default(),
        };
        for page in 0..2 {
            pond.fill(page, page as u32 + 1, 0);
        }
        Arc::new(pond)
    }

    /// Takes a frame and writes its content.
    pub(super) fn build(&self, frame: u32, content: usize) {
        step::begin_reuse();
        self.frames[frame as usize].store(content, Relaxed);
    }

    pub(super) fn fill(&self, page: usize, frame: u32, content: usize) {
        self.words[page].try_fill(FrameIndex(frame)).unwrap();
        self.build(frame, content);
        let _ = self.words[page].finish_fill(FrameIndex(frame), SHOWN);
    }

    pub(super) fn evict(&self, page: usize) {
        let word = &self.words[page];
        let seen = word.load();
        assert!(word.try_evict(seen, &self.epoch));
        assert!(self.retire(seen.frame()), "the frame is not pinned");
    }

    /// Whether the frame, which has left its page, is free now.
    pub(super) fn retire(&self, frame: FrameIndex) -> bool {
        Retiring::begin().try_retire(&self.pins[frame.0 as usize])
    }

    /// Replaces one page in one step. The caller owns the old frame.
    pub(super) fn replace(&self, page: usize, fresh: u32, content: usize) -> Option<FrameIndex> {
        self.build(fresh, content);
        let change = self.words[page].try_replace(FrameIndex(fresh), SHOWN, &self.epoch).ok()?;
        assert!(self.retire(change.was.frame()), "the frame is not pinned");
        Some(change.was.frame())
    }

    /// A write of both pages with fresh frames, as `write::Write::install` does it.
    pub(super) fn write_both(&self, fresh: [u32; 2], content: usize, size: Option<u64>) {
        fresh.iter().for_each(|&frame| self.build(frame, content));
        let show = |page: usize| {
            let _ = self.words[page].publish(FrameIndex(fresh[page]), SHOWN);
        };
        let publish = || {
            if let Some(size) = size {
                self.size.set(size);
            }
        };
        let mut hiding = Hiding::new(&self.epoch);
        for (page, word) in self.words.iter().enumerate() {
            hiding.hide(word);
            if self.without == Rule::HideAll {
                show(page);
            }
        }
        hiding.finish();
        if self.without != Rule::SizeBeforeShow {
            publish();
        }
        if self.without != Rule::HideAll {
            (0..2).for_each(show);
        }
        if self.without == Rule::SizeBeforeShow {
            publish();
        }
    }

    /// One attempt of the hit path over the pages below the size, as in `read::attempt_pages`.
    pub(super) fn try_read(&self) -> Option<Vec<usize>> {
        let mut begun = self.epoch.begin();
        let hint = self.size.hint();
        let early_size = self.size.get();
        let words = &self.words[..hint as usize];
        let seen: Vec<_> = words.iter().map(PageWord::load).collect();
        if !seen.iter().all(|seen| seen.is_hit()) {
            return None;
        }
        let late_size = self.size.get();
        let size = if self.without == Rule::SizeAfterWords { early_size } else { late_size };
        if size > hint {
            return None;
        }
        let bytes: Vec<_> = seen[..size as usize]
            .iter()
            .map(|seen| self.frames[seen.frame().0 as usize].load(Relaxed))
            .collect();
        if self.without == Rule::Epoch {
            begun = self.epoch.begin();
        }
        let is_whole = step::is_consistent(words.iter().zip(seen), [], &self.epoch, begun);
        (is_whole || self.without == Rule::Validation).then_some(bytes)
    }
}

/// Goal: a reader sees one whole multi-page write or none.
/// Method: one write of two pages with fresh frames, against one attempt of the hit path.
#[test]
fn loom_read_races_a_write_of_two_pages() {
    loom::model(|| {
        let pond = Pond::new(Rule::None);
        let writer = thread::spawn({
            let pond = Arc::clone(&pond);
            move || pond.write_both([3, 4], 1, None)
        });
        if let Some(seen) = pond.try_read() {
            assert!(seen == [0, 0] || seen == [1, 1], "torn: {seen:?}");
        }
        writer.join().unwrap();
        assert_eq!(pond.try_read(), Some(vec![1, 1]));
    });
}

/// Goal: a write that extends the file is seen with its size and its bytes, or not at all.
/// Method: the size goes from one page to two within a write that also changes the first page.
#[test]
fn loom_read_races_an_extending_write() {
    loom::model(|| {
        let pond = Pond::new(Rule::None);
        pond.size.set(1);
        let writer = thread::spawn({
            let pond = Arc::clone(&pond);
            move || pond.write_both([3, 4], 1, Some(2))
        });
        if let Some(seen) = pond.try_read() {
            assert!(seen == [0] || seen == [1, 1], "half of the write: {seen:?}");
        }
        writer.join().unwrap();
    });
}

/// Goal: a version that wraps to its old value does not fool a stalled reader. Method: with
/// versions of one bit, the page leaves READY twice and comes back with the same frame and version
/// and other bytes, while the reader copies.
fn wrap_under_a_stalled_reader(without: Rule) {
    loom::model(move || {
        let pond = Pond::new(without);
        pond.size.set(1);
        let reader = thread::spawn({
            let pond = Arc::clone(&pond);
            move || {
                // Two copies of the page in one attempt: they must be of one content.
                let mut begun = pond.epoch.begin();
                let seen = pond.words[0].load();
                if !seen.is_hit() {
                    return;
                }
                let frame = &pond.frames[seen.frame().0 as usize];
                let (first, second) = (frame.load(Relaxed), frame.load(Relaxed));
                if pond.without == Rule::Epoch {
                    begun = pond.epoch.begin();
                }
                if step::is_consistent([(&pond.words[0], seen)], [], &pond.epoch, begun) {
                    assert_eq!(first, second, "two contents under one version");
                }
            }
        });
        for content in 1..=2 {
            pond.evict(0);
            pond.fill(0, 1, content);
        }
        reader.join().unwrap();
    });
}

#[test]
fn loom_a_wrapped_version_does_not_fool_a_stalled_reader() {
    wrap_under_a_stalled_reader(Rule::None);
}

#[test]
#[should_panic(expected = "two contents under one version")]
fn loom_without_the_epoch_a_wrapped_version_fools_it() {
    wrap_under_a_stalled_reader(Rule::Epoch);
}

/// Goal: the same if two different threads evict and fill the page: each passes on the epoch that
/// the other has seen.
#[test]
fn loom_a_version_that_others_wrapped_does_not_fool_a_stalled_reader() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(1);
    model.check(|| {
        let pond = Pond::new(Rule::None);
        let filler = thread::spawn({
            let pond = Arc::clone(&pond);
            move || {
                for content in 1..=2 {
                    while pond.words[0].try_fill(FrameIndex(1)).is_err() {
                        thread::yield_now();
                    }
                    pond.build(1, content);
                    let _ = pond.words[0].finish_fill(FrameIndex(1), SHOWN);
                }
            }
        });
        let reader = thread::spawn({
            let pond = Arc::clone(&pond);
            move || {
                let begun = pond.epoch.begin();
                let seen = pond.words[0].load();
                if seen.is_hit() {
                    let frame = &pond.frames[1];
                    let (first, second) = (frame.load(Relaxed), frame.load(Relaxed));
                    if step::is_consistent([(&pond.words[0], seen)], [], &pond.epoch, begun) {
                        assert_eq!(first, second, "two contents under one version");
                    }
                }
            }
        });
        for _ in 0..2 {
            while !pond.words[0].load().is_ready() {
                thread::yield_now();
            }
            assert!(pond.words[0].try_evict(pond.words[0].load(), &pond.epoch));
        }
        filler.join().unwrap();
        reader.join().unwrap();
    });
}

/// Goal: a frame that goes from one page to another is not read as the first one's.
/// Method: page 0 gets a fresh frame in one RMW, and its old frame is rebuilt for page 1.
#[test]
fn loom_read_races_the_reuse_of_its_frame() {
    loom::model(|| {
        let pond = Pond::new(Rule::None);
        pond.size.set(1);
        let writer = thread::spawn({
            let pond = Arc::clone(&pond);
            move || {
                let old = pond.replace(0, 3, 7).unwrap();
                pond.build(old.0, 99);
            }
        });
        if let Some(seen) = pond.try_read() {
            assert!(seen == [0] || seen == [7], "another page's bytes: {seen:?}");
        }
        writer.join().unwrap();
    });
}

/// Goal: the same if another thread takes the frame from the free list. Method: the free list is a
/// flag, passed with release and acquire.
#[test]
fn loom_read_races_the_reuse_of_its_frame_by_another_thread() {
    loom::model(|| {
        let pond = Pond::new(Rule::None);
        pond.size.set(1);
        let free = Arc::new(AtomicUsize::new(0));
        let evictor = thread::spawn({
            let (pond, free) = (Arc::clone(&pond), Arc::clone(&free));
            move || {
                pond.evict(0);
                free.store(1, Release);
            }
        });
        let taker = thread::spawn({
            let (pond, free) = (Arc::clone(&pond), Arc::clone(&free));
            move || {
                if free.load(Acquire) == 1 {
                    pond.build(1, 99);
                }
            }
        });
        if let Some(seen) = pond.try_read() {
            assert!(seen == [0], "another page's bytes: {seen:?}");
        }
        evictor.join().unwrap();
        taker.join().unwrap();
    });
}

/// A copy of page 0 on a slow path, while `reuse` evicts the page and reuses its frame.
fn a_slow_copy_races(reuse: fn(&Pond)) {
    loom::model(move || {
        let pond = Pond::new(Rule::None);
        let evictor = thread::spawn({
            let pond = Arc::clone(&pond);
            move || reuse(&pond)
        });
        let look = step::HeldPage::begin(&pond.words[0], &pond.epoch);
        if look.seen.is_ready() {
            let frame = &pond.frames[look.seen.frame().0 as usize];
            let copied = look.copy_if_unchanged(|| frame.load(Relaxed));
            assert!(matches!(copied, None | Some(0)), "another page's bytes: {copied:?}");
        }
        evictor.join().unwrap();
    });
}

/// Goal: a copy of a page on a slow path has no bytes of another page.
#[test]
fn loom_a_slow_copy_races_the_reuse_of_its_frame() {
    a_slow_copy_races(|pond| {
        pond.evict(0);
        pond.build(1, 99);
    });
}

/// Goal: the same if the page has its frame again, and its version has wrapped.
#[test]
fn loom_a_slow_copy_races_a_wrap_of_the_version() {
    a_slow_copy_races(|pond| {
        pond.evict(0);
        pond.build(1, 99);
        pond.fill(0, 1, 0);
        pond.evict(0);
        pond.fill(0, 1, 0);
    });
}

/// Goal: two operations that each check for the other's change after their own change do not both
/// miss it. Method: store buffering.
fn changes_are_seen_by_the_next(change: fn(&Pond, usize), sees: fn(&Pond, usize) -> bool) {
    loom::model(move || {
        let pond = Pond::new(Rule::None);
        let other = thread::spawn({
            let pond = Arc::clone(&pond);
            move || {
                change(&pond, 1);
                sees(&pond, 0)
            }
        });
        change(&pond, 0);
        let mine = sees(&pond, 1);
        let theirs = other.join().unwrap();
        assert!(mine || theirs, "both missed the other's change");
    });
}

fn sees_no_old_page(pond: &Pond, page: usize) -> bool {
    let seen = pond.words[page].load();
    !seen.is_ready() || pond.frames[seen.frame().0 as usize].load(Relaxed) == 1
}

#[test]
fn loom_a_page_is_seen_by_the_next_writer() {
    changes_are_seen_by_the_next(
        |pond, page| {
            pond.build(3 + page as u32, 1);
            let fresh = FrameIndex(3 + page as u32);
            let _ = pond.words[page].try_replace(fresh, SHOWN, &pond.epoch).unwrap();
        },
        sees_no_old_page,
    );
}

#[test]
fn loom_hidden_pages_are_seen_by_the_next_to_hide() {
    changes_are_seen_by_the_next(
        |pond, page| {
            let mut hiding = Hiding::new(&pond.epoch);
            hiding.hide(&pond.words[page]);
            hiding.finish();
        },
        sees_no_old_page,
    );
}

/// The sizes are of two files.
#[test]
fn loom_a_size_is_seen_by_the_next_change() {
    loom::model(|| {
        let sizes = Arc::new([FileSize::new(1), FileSize::new(1)]);
        let extend = |sizes: &[FileSize; 2], file: usize| {
            sizes[file].set(2);
            sizes[1 - file].get()
        };
        let other = thread::spawn({
            let sizes = Arc::clone(&sizes);
            move || extend(&sizes, 1)
        });
        let seen = [extend(&sizes, 0), other.join().unwrap()];
        assert!(seen.contains(&2), "both saw the other's old size");
    });
}

/// Goal: an extending write and a concurrent write of one page are each followed by a read of the
/// other's page. At least one read finds the new content. Method: the first page is overwritten in
/// one step; the second is published beyond the old end.
#[test]
fn loom_an_extension_is_seen_by_the_next_writer() {
    loom::model(|| {
        let pond = Pond::new(Rule::None);
        pond.size.set(1);
        let other = thread::spawn({
            let pond = Arc::clone(&pond);
            move || {
                pond.build(3, 1);
                let _ = pond.words[0].try_replace(FrameIndex(3), SHOWN, &pond.epoch).unwrap();
                // As the hit path does: the page is not there, and beyond the end.
                !pond.words[1].load().is_hit() && pond.size.get() < 2
            }
        });
        pond.build(4, 1);
        let mut hiding = Hiding::new(&pond.epoch);
        hiding.hide(&pond.words[1]);
        hiding.finish();
        pond.size.set(2);
        let _ = pond.words[1].publish(FrameIndex(4), SHOWN);
        let saw_old = !sees_no_old_page(&pond, 0);
        let saw_end = other.join().unwrap();
        assert!(!(saw_old && saw_end), "both missed the other's write");
    });
}

/// Goal: each page is filled once, and the transition that ends the fill wakes each waiter. Method:
/// a filler, and a thread that needs the page, and sets WAITERS if it finds the page FILLING.
#[test]
fn loom_the_end_of_a_fill_finds_its_waiters() {
    loom::model(|| {
        let page = Arc::new(PageWord::new());
        page.try_fill(FrameIndex(1)).unwrap();
        let waiter = thread::spawn({
            let page = Arc::clone(&page);
            move || {
                let seen = page.load();
                assert!(page.try_fill(FrameIndex(2)).is_err(), "filled twice");
                seen.state() == PageState::Filling && page.set_waiters(seen).is_some()
            }
        });
        let sleepers = page.finish_fill(FrameIndex(1), SHOWN);
        let armed = waiter.join().unwrap();
        assert!(!armed || sleepers.any(), "a waiter sleeps on a READY page");
    });
}

/// Goal: REFERENCED, which may land at any time, neither undoes nor fakes a transition.
/// Method: a reader marks the page while it is evicted and filled again.
#[test]
fn loom_referenced_lands_on_any_state() {
    loom::model(|| {
        let pond = Pond::new(Rule::None);
        let reader = thread::spawn({
            let pond = Arc::clone(&pond);
            move || {
                let seen = pond.words[0].load();
                pond.words[0].mark_referenced(seen);
            }
        });
        let seen = pond.words[0].load();
        if pond.words[0].try_evict(seen, &pond.epoch) {
            assert_eq!(pond.words[0].load().state(), PageState::Empty);
            pond.fill(0, 3, 5);
        }
        reader.join().unwrap();
        assert!(pond.words[0].load().is_hit());
    });
}

/// Goal: a thread that sees a size finds the file below as long.
/// Method: a truncation extends the file, and then the size, against a reader of it.
#[test]
fn loom_a_size_comes_after_the_file_below_is_as_long() {
    loom::model(|| {
        let shared = Arc::new((FileSize::new(1), AtomicUsize::new(1)));
        let truncation = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                shared.1.store(2, Relaxed);
                shared.0.set(2);
            }
        });
        if shared.0.get() == 2 {
            assert_eq!(shared.1.load(Relaxed), 2, "the file below ends before");
        }
        truncation.join().unwrap();
    });
}

/// Goal: the last user of a file evicts each page, even one that a late reader marks at the same
/// time. Incident: the mark came between the read and the exchange. The page stayed, and its frame
/// and queue node were lost until the engine's end.
#[test]
fn loom_tear_down_evicts_a_page_that_is_marked() {
    loom::model(|| {
        let pond = Pond::new(Rule::None);
        let reader = thread::spawn({
            let pond = Arc::clone(&pond);
            move || pond.words[0].mark_referenced(pond.words[0].load())
        });
        pond.words[0].take_referenced();
        let evicted = pond.words[0].evict_for_good(&pond.epoch);
        assert_eq!(evicted.map(|seen| seen.frame()), Some(FrameIndex(1)));
        reader.join().unwrap();
        assert_eq!(pond.words[0].load().state(), PageState::Empty);
    });
}
