//! Loom models of reads of several pages, concurrent with operations that remove pages: writes,
//! truncations, evictions and fills, and frames that move from one page to the other. The pages are
//! those of `loom_tests`.
//!
//! Contents identify the page and the time: the content of page 1 is that of page 0 plus 10.

use loom::sync::Arc;
use loom::thread;

use super::loom_tests::{Pond, Rule, SHOWN};
use crate::cache::table::step::Hiding;

/// Both pages hold time 0.
fn pond(without: Rule) -> Arc<Pond> {
    let pond = Pond::new(without);
    pond.build(2, 10);
    pond
}

fn spawn(pond: &Arc<Pond>, body: impl FnOnce(&Pond) + 'static) -> thread::JoinHandle<()> {
    let pond = Arc::clone(pond);
    thread::spawn(move || body(&pond))
}

/// Goal: a read of two pages is whole because all pages of a write are hidden before any is published,
/// because the reader checks the words again, and because the size is changed before the pages.
/// Method: one write, extending or not, without each of the rules.
fn read_races_a_write(without: Rule, size: u64) {
    loom::model(move || {
        let pond = Pond::new(without);
        pond.size.set(size);
        let writer = spawn(&pond, move |pond| {
            pond.write_both([3, 4], 1, (size == 1).then_some(2));
        });
        if let Some(seen) = pond.try_read() {
            let before = vec![0; size as usize];
            assert!(seen == before || seen == [1, 1], "half of a write: {seen:?}");
        }
        writer.join().unwrap();
    });
}

#[test]
#[should_panic(expected = "half of a write")]
fn loom_without_hiding_all_first_a_write_is_seen_in_part() {
    read_races_a_write(Rule::HideAll, 2);
}

#[test]
#[should_panic(expected = "half of a write")]
fn loom_without_the_second_look_a_write_is_seen_in_part() {
    read_races_a_write(Rule::Validation, 2);
}

#[test]
#[should_panic(expected = "half of a write")]
fn loom_with_the_size_after_the_pages_an_extending_write_is_seen_in_part() {
    read_races_a_write(Rule::SizeBeforeShow, 1);
}

#[test]
#[should_panic(expected = "half of a write")]
fn loom_with_the_size_read_before_the_words_an_extending_write_is_seen_in_part() {
    read_races_a_write(Rule::SizeAfterWords, 1);
}

/// Goal: a truncation and a later extension show the old file, the shorter file, or zeros. Method:
/// the second page is hidden, the size lowered, the page dropped, the size raised, and the page
/// filled with its new bytes; concurrently, one attempt of the hit path.
fn read_races_a_cut(without: Rule) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let pond = pond(without);
        let cutter = spawn(&pond, |pond| {
            let hide = || {
                let mut hiding = Hiding::new(&pond.epoch);
                hiding.hide(&pond.words[1]);
                hiding.finish();
            };
            if pond.without != Rule::HideBeforeSize {
                hide();
            }
            pond.size.set(1);
            if pond.without == Rule::HideBeforeSize {
                // Extended before the page is dropped: the size does not protect the reader then.
                pond.size.set(2);
                thread::yield_now();
                hide();
            }
            let _ = pond.words[1].drop_hidden();
            pond.size.set(2);
            pond.fill(1, 3, 0);
        });
        // A second attempt of the reader: the result of the first one stays true.
        let mut cut = false;
        for _ in 0..2 {
            if let Some(seen) = pond.try_read() {
                assert!(!cut || seen != [0, 10], "truncated bytes came back");
                assert!(seen == [0, 10] || seen == [0] || seen == [0, 0], "torn: {seen:?}");
                cut |= seen != [0, 10];
            }
        }
        cutter.join().unwrap();
        assert_eq!(pond.try_read(), Some(vec![0, 0]));
    });
}

#[test]
fn loom_read_races_a_cut_and_an_extension() {
    read_races_a_cut(Rule::None);
}

#[test]
#[should_panic(expected = "truncated bytes came back")]
fn loom_without_hiding_before_the_size_truncated_bytes_come_back() {
    read_races_a_cut(Rule::HideBeforeSize);
}

/// Goal: frames that move between the pages of a read are never read as the other page's.
/// Method: both pages are evicted; each is filled again, in the frame that the other one had.
fn read_races_a_move(without: Rule) {
    loom::model(move || {
        let pond = pond(without);
        let mover = spawn(&pond, |pond| {
            pond.evict(0);
            pond.evict(1);
            pond.fill(1, 1, 10);
            pond.fill(0, 2, 0);
        });
        if let Some(seen) = pond.try_read() {
            assert!(seen == [0, 10], "another page's bytes: {seen:?}");
        }
        mover.join().unwrap();
        assert_eq!(pond.try_read(), Some(vec![0, 10]));
    });
}

#[test]
fn loom_read_races_frames_that_move_between_its_pages() {
    read_races_a_move(Rule::None);
}

#[test]
#[should_panic(expected = "another page's bytes")]
fn loom_without_the_second_look_frames_that_move_are_mixed_up() {
    read_races_a_move(Rule::Validation);
}

/// Goal: the same with a concurrent writer and evictor: one page is replaced in one step, the other
/// one is evicted and filled with the old frame of the first.
#[test]
fn loom_read_races_a_one_page_write_and_a_refill() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let pond = pond(Rule::None);
        let writer = spawn(&pond, |pond| {
            // The old frame is free: the other page gets it, if that page was evicted.
            if let Some(old) = pond.replace(0, 3, 1)
                && pond.words[1].try_fill(old).is_ok()
            {
                pond.build(old.0, 10);
                let _ = pond.words[1].finish_fill(old, SHOWN);
            }
        });
        let evictor = spawn(&pond, |pond| {
            let seen = pond.words[1].load();
            if seen.is_ready() && pond.words[1].try_evict(seen, &pond.epoch) {
                assert!(pond.retire(seen.frame()), "the frame is not pinned");
            }
        });
        if let Some(seen) = pond.try_read() {
            assert!(seen == [0, 10] || seen == [1, 10], "torn: {seen:?}");
        }
        writer.join().unwrap();
        evictor.join().unwrap();
    });
}
