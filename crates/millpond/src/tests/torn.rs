//! Reads that fail their validation, and reads that may be torn.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use millpond_rangelock::Mode;

use crate::{Advice, BackendChoice, Engine, File, OpenOptions};

const PAGE: usize = 4096;

fn open(engine: &Engine, dir: &tempfile::TempDir) -> File {
    let options = OpenOptions::new().read(true).write(true).create(true);
    engine.open(dir.path().join("file"), &options).unwrap()
}

fn engine() -> Engine {
    Engine::builder().cache_bytes(4 << 20).backend(BackendChoice::Memory).build().unwrap()
}

/// Goal: a read that may be torn waits for no holder of a page other than the missing ones; the
/// same read through any other handle does. Method: an exclusive guard over a cached page; the page
/// before it is cached, or not.
#[test]
fn a_torn_read_does_not_wait_for_holders_of_other_pages() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine();
    let (torn, whole) = (open(&engine, &dir), open(&engine, &dir));
    torn.advise(0, 0, Advice::TornReads).unwrap();
    whole.write_all_at(&[7; 4 * PAGE], 0).unwrap();
    let page = |page: usize| (page * PAGE) as u64;
    for missing in [false, true] {
        // The first, the middle and the last page of the read in turn.
        for (held, gone) in [(0, 1), (1, 0), (1, 2), (2, 1)] {
            whole.read_at(&mut [0; 3 * PAGE], 0).unwrap();
            if missing {
                whole.advise(page(gone), PAGE as u64, Advice::DontNeed).unwrap();
            }
            let cached = whole.cached();
            let guard = cached.lock(page(held), page(held + 1), Mode::Exclusive);
            let mut bytes = [0; 3 * PAGE];
            assert_eq!(torn.read_at(&mut bytes, 0).unwrap(), bytes.len());
            assert_eq!(bytes, [7; 3 * PAGE]);
            if missing {
                whole.advise(page(gone), PAGE as u64, Advice::DontNeed).unwrap();
            }
            std::thread::scope(|scope| {
                let (done, ended) = mpsc::channel();
                let other = &whole;
                scope.spawn(move || {
                    other.read_at(&mut [0; 3 * PAGE], 0).unwrap();
                    done.send(()).unwrap();
                });
                // It waits as it should, or has not begun yet.
                let waits = ended.recv_timeout(Duration::from_millis(30)).is_err();
                assert_eq!(waits, missing, "the page {held} is held");
                drop(guard);
                if missing {
                    ended.recv_timeout(Duration::from_secs(20)).expect("reads in the end");
                }
            });
        }
    }
}

/// Goal: a read that may be torn ends at the end of the file, has whole pages of it, and follows
/// the last advice. Method: every offset around the end, cached and not, into one buffer and
/// several.
#[test]
fn a_torn_read_ends_with_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine();
    let file = open(&engine, &dir);
    let contents: Vec<u8> = (0..3 * PAGE + 100).map(|at| (at / 7) as u8).collect();
    file.write_all_at(&contents, 0).unwrap();
    file.advise(0, 0, Advice::TornReads).unwrap();
    for on in [true, false] {
        engine.set_hit_path(on);
        for offset in [0, 1, PAGE - 1, PAGE, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 99, 3 * PAGE + 100]
        {
            for len in [1, 100, PAGE, 2 * PAGE + 1, 5 * PAGE] {
                for gone in 0..4 {
                    file.advise((gone * PAGE) as u64, PAGE as u64, Advice::DontNeed).unwrap();
                    let expected = &contents[offset..contents.len().min(offset + len)];
                    let mut bytes = vec![0; len];
                    let moved = file.read_at(&mut bytes, offset as u64).unwrap();
                    assert_eq!(&bytes[..moved], expected, "{len} at {offset}, {gone} missing");
                    let (mut bytes, cut) = (vec![0; len], len / 3);
                    let (head, tail) = bytes.split_at_mut(cut);
                    let mut slices = [head, tail].map(std::io::IoSliceMut::new);
                    let moved = file.read_vectored_at(&mut slices, offset as u64).unwrap();
                    assert_eq!(&bytes[..moved], expected, "{len} at {offset}, {gone} missing");
                }
            }
        }
    }
}

/// Goal: torn reads have whole pages, none older than the call. Concurrent reads through other
/// handles stay atomic, and so do later ones of the same handle after it is switched back. Method:
/// a writer stamps four pages at a time, on a cache of a few pages; a handle of each kind.
#[test]
fn only_the_handles_own_reads_are_torn_and_never_within_a_page() {
    const PAGES: usize = 4;
    let dir = tempfile::tempdir().unwrap();
    let backend = BackendChoice::Memory;
    let engine = Engine::builder().cache_bytes(64 << 10).backend(backend).build().unwrap();
    let file = open(&engine, &dir);
    let block = |stamp: u64| stamp.to_le_bytes().repeat(PAGES * PAGE / 8);
    file.write_all_at(&block(0), 0).unwrap();
    let (ended, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let stamps = |bytes: &[u8]| -> Vec<u64> {
        let page_stamp = |page: &[u8]| {
            let stamp = u64::from_le_bytes(page[..8].try_into().unwrap());
            assert!(page.chunks(8).all(|word| word == stamp.to_le_bytes()), "torn within a page");
            stamp
        };
        bytes.chunks(PAGE).map(page_stamp).collect()
    };
    let mixtures = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for stamp in 1.. {
                file.write_all_at(&block(stamp), 0).unwrap();
                ended.store(stamp, SeqCst);
                if stop.load(SeqCst) {
                    break;
                }
            }
        });
        let readers: Vec<_> = [true, false, false]
            .into_iter()
            .enumerate()
            .map(|(number, torn)| {
                let handle = open(&engine, &dir);
                if torn || number == 2 {
                    handle.advise(0, 0, Advice::TornReads).unwrap();
                }
                if number == 2 {
                    handle.advise(0, 0, Advice::AtomicReads).unwrap();
                }
                let (ended, stop, mixtures) = (&ended, &stop, &mixtures);
                scope.spawn(move || {
                    let mut bytes = vec![0; PAGES * PAGE];
                    while !stop.load(SeqCst) {
                        let before = ended.load(SeqCst);
                        assert_eq!(handle.read_at(&mut bytes, 0).unwrap(), bytes.len());
                        let seen = stamps(&bytes);
                        assert!(seen.iter().all(|&stamp| stamp >= before), "{seen:?}, {before}");
                        let mixed = seen.iter().any(|&stamp| stamp != seen[0]);
                        assert!(torn || !mixed, "a mixture: {seen:?}");
                        mixtures.fetch_add(u64::from(mixed), SeqCst);
                        // A missing page is read separately: torn reads see writes in between.
                        if torn {
                            handle.advise(PAGE as u64, 1, Advice::DontNeed).unwrap();
                        }
                    }
                })
            })
            .collect();
        // For a while, and until a read was torn.
        let started = Instant::now();
        let is_over =
            |limit| started.elapsed() > limit || readers.iter().any(|it| it.is_finished());
        while !is_over(Duration::from_millis(300))
            || mixtures.load(SeqCst) == 0 && !is_over(Duration::from_secs(30))
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, SeqCst);
    });
    assert!(mixtures.into_inner() > 0, "no read was torn: the test shows nothing");
}

/// Goal: a read whose validation fails repeatedly waits for the range lock after at most 8
/// attempts: no livelock. Method: two writers write one page repeatedly; reads of 32 pages, whose
/// first and last page are read at distant times, and of that page alone. Attempts are counted.
#[test]
fn a_write_storm_does_not_keep_a_reader_away() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine();
    let file = open(&engine, &dir);
    file.write_all_at(&[0; 32 * PAGE], 0).unwrap();
    let stop = AtomicBool::new(false);
    let (reads, longest) = std::thread::scope(|scope| {
        for value in 1..3 {
            let (file, stop) = (&file, &stop);
            scope.spawn(move || {
                while !stop.load(SeqCst) {
                    file.write_all_at(&[value; PAGE], 0).unwrap();
                }
            });
        }
        let started = Instant::now();
        let (mut reads, mut longest) = (0, Duration::ZERO);
        let mut bytes = [0; 32 * PAGE];
        while started.elapsed() < Duration::from_millis(400) || reads < 10 {
            for len in [32 * PAGE, PAGE] {
                let begun = Instant::now();
                assert_eq!(file.read_at(&mut bytes[..len], 0).unwrap(), len);
                assert!(bytes[..PAGE].iter().all(|byte| *byte == bytes[0]), "torn");
                longest = longest.max(begun.elapsed());
                reads += 1;
            }
        }
        stop.store(true, SeqCst);
        (reads, longest)
    });
    let retries = engine.stats().hit_retries;
    println!("{reads} reads, {retries} attempts that failed, the longest read {longest:?}");
    assert!(
        retries <= u64::from(crate::read::hit::TRIES_MAX) * reads,
        "{retries} of {reads} reads"
    );
    assert!(longest < Duration::from_secs(10), "{longest:?}");
}
