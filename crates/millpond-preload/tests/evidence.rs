//! What shows that it pays to serve a file. The library itself can't be tested in its own process: its
//! hooks would take over what the test harness calls.

#[path = "../src/files/evidence.rs"]
#[allow(dead_code, reason = "the library uses all of it")]
mod evidence;

use evidence::Evidence;

const PAGE: u64 = 4096;
const NEED: u32 = 16;

fn fresh() -> Evidence {
    fresh_that(true)
}

/// Of a file whose pages are to be filled, or are mapped.
fn fresh_that(fills: bool) -> Evidence {
    let evidence = Evidence::none();
    evidence.reset(NEED, fills);
    evidence
}

/// Whether these reads are enough, if pages are filled.
fn reads(starts: impl IntoIterator<Item = u64>, bytes: u64) -> bool {
    reads_of(true, starts, bytes)
}

/// The same; of what need not be filled, fewer are.
fn reads_of(fills: bool, starts: impl IntoIterator<Item = u64>, bytes: u64) -> bool {
    let evidence = fresh_that(fills);
    starts.into_iter().any(|start| evidence.count(Some(start), bytes, false))
}

/// Goal: what is read once, in order, shows nothing, in whatever pieces.
#[test]
fn what_is_read_once_in_order_is_left_alone() {
    for fills in [true, false] {
        assert!(!reads_of(fills, (0..100_000).map(|page| page * PAGE), PAGE));
        assert!(!reads_of(fills, (0..10_000).map(|page| page * 131_072), 131_072));
        assert!(!reads_of(fills, (0..100_000).map(|part| part * 2000), 2000));
    }
    assert!(!reads_of(false, (0..800_000).map(|part| part * 512), 512));
}

/// The same of what is read once in another order: backwards, and at distances.
#[test]
fn what_is_read_once_in_any_order_is_left_alone() {
    for fills in [true, false] {
        assert!(!reads_of(fills, (0..100_000).map(|page| (100_000 - page) * PAGE), PAGE));
        for stride in [2, 3, 64, 89, 2584, 4096, 1 << 20] {
            assert!(
                !reads_of(fills, (0..20_000).map(|page| page * stride * PAGE), PAGE),
                "{stride}"
            );
        }
    }
}

/// Goal: a file is adopted when filling the cache would have paid: after three rounds of what is read
/// over and over, as far as pages can be told.
#[test]
fn filling_is_reckoned_with() {
    for pages in [1, 3, 10, 30, 50, 100, 300, 1000, 10_000, 100_000] {
        let evidence = fresh();
        let mut reads = 0..;
        let came = reads.find(|read| evidence.count(Some(read % pages * PAGE), PAGE, false));
        let rounds = (came.unwrap() - u64::from(NEED)) as f64 / pages as f64;
        assert!((1.8..4.8).contains(&rounds), "{pages} pages: {rounds} rounds");
    }
}

/// Goal: the same where nothing is filled; and the first write takes it back.
#[test]
fn what_takes_no_frames_is_adopted_sooner() {
    for pages in [1, 3, 10, 30, 50, 100, 300, 1000, 10_000, 100_000] {
        let (mapped, written) = (fresh_that(false), fresh_that(false));
        written.note_write();
        let rounds = |evidence: &Evidence| {
            let mut reads = 0..;
            let came = reads.find(|read| evidence.count(Some(read % pages * PAGE), PAGE, false));
            (came.unwrap() - u64::from(NEED)) as f64 / pages as f64
        };
        let (mapped, written) = (rounds(&mapped), rounds(&written));
        println!("{pages} pages: {mapped}, {written}");
        assert!((1.0..3.2).contains(&mapped), "{pages} pages: {mapped} rounds");
        assert!(written > 1.3 * mapped, "{pages} pages: {written} rounds, {mapped} mapped");
    }
}

/// Goal: what is read again does, and what is read in small pieces.
#[test]
fn what_is_read_again_is_adopted() {
    assert!(reads((0..1000).map(|n| n % 10 * PAGE), PAGE));
    assert!(reads((0..1000).map(|n| n * 512), 512));
    assert!(reads((0..100).map(|n| n % 4 * 131_072), 131_072));
}

/// Goal: what is seldom read again does not.
#[test]
fn what_is_seldom_read_again_is_left_alone() {
    assert!(!reads((0..400).map(|n| if n % 20 == 0 { 0 } else { (400 - n) * PAGE }), PAGE));
}

/// Goal: writes that cost more undo what reads have shown; those that do not show use themselves.
#[test]
fn writes_count_by_what_they_cost() {
    for (costs, enough) in [(true, false), (false, true)] {
        let evidence = fresh();
        let is_enough = (0..1000).any(|n| evidence.count(Some(0), PAGE, n % 2 == 0 && costs));
        assert_eq!(is_enough, enough);
    }
}

/// Goal: reads at the offset are known by where it is.
#[test]
fn the_offset_is_followed() {
    let evidence = fresh();
    assert!((0..100).all(|_| !evidence.count(None, PAGE, false)));
    let again = |_| {
        evidence.set_position(0);
        evidence.count(None, PAGE, false)
    };
    assert!((0..400).any(again));
}

/// Goal: after a postponement more is needed.
#[test]
fn postponed_is_longer() {
    let evidence = fresh();
    let count = || (0..1000).position(|_| evidence.count(Some(0), PAGE, false)).unwrap();
    let first = count();
    evidence.postpone(8);
    assert!(count() > 4 * first);
}
