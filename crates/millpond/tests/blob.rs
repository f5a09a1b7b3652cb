//! Blobs: cached bytes that the program provides.

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::task::{Context, Poll, Wake, Waker};

use common::{block_on, temp_dir};
use millpond::blob::Blob;
use millpond::{AsyncFile, Engine, Error, OpenOptions};

const PAGE: u64 = 4096;

fn far(range: std::ops::Range<u64>) -> Vec<u8> {
    range.map(|at| (at / 7 + at % 251) as u8).collect()
}

fn blob(cache_bytes: u64, len: u64) -> Blob {
    Engine::builder().cache_bytes(cache_bytes).build().unwrap().blob(len, PAGE as u32).unwrap()
}

/// Reads cached bytes into memory that is not initialized.
fn read_into(blob: &Blob, range: std::ops::Range<u64>) -> Option<Vec<u8>> {
    let mut memory = vec![std::mem::MaybeUninit::uninit(); (range.end - range.start) as usize];
    if !blob.try_read_into(&mut memory, range.start) {
        return None;
    }
    // SAFETY: a hit has written it.
    Some(memory.iter().map(|byte| unsafe { byte.assume_init() }).collect())
}

fn is_cached(blob: &Blob, range: std::ops::Range<u64>) -> bool {
    let mut bytes = vec![1, 2];
    let is_hit = blob.try_read(&mut bytes, range.clone());
    let expect = far(range.start..range.end.min(blob.len()));
    assert_eq!(bytes[..2], [1, 2]);
    assert_eq!(bytes[2..], if is_hit { expect } else { Vec::new() });
    is_hit
}

#[test]
fn only_complete_pages_are_cached() {
    let len = 10 * PAGE + 100;
    let blob = blob(1 << 20, len);
    assert!(is_cached(&blob, len..len + 5), "there is nothing to bring");
    let mut claim = blob.claim(PAGE + 1..u64::MAX);
    assert!(claim.is_complete);
    let [fill] = &mut claim.fills[..] else { panic!("{claim:?}") };
    assert_eq!(fill.range(), PAGE..len);
    assert!(blob.claim(0..len).fills.iter().all(|other| other.range() == (0..PAGE)));
    let front = fill.split_front(3);
    assert_eq!((front.range(), fill.range()), (PAGE..4 * PAGE, 4 * PAGE..len));
    // The third page is not whole.
    front.bring(&far(PAGE..4 * PAGE - 1));
    assert!(is_cached(&blob, PAGE..3 * PAGE));
    assert!(!is_cached(&blob, 3 * PAGE..3 * PAGE + 1));
    let mut claim = claim;
    claim.fills.pop().unwrap().bring(&far(4 * PAGE..len));
    assert!(is_cached(&blob, 4 * PAGE + 5..len) && is_cached(&blob, 4 * PAGE..u64::MAX));
    assert!(!is_cached(&blob, 0..2 * PAGE));
    drop(blob.claim(0..len));
    assert!(!is_cached(&blob, 0..1), "dropped");
    blob.forget(PAGE..2 * PAGE);
    assert!(!is_cached(&blob, PAGE..PAGE + 1) && is_cached(&blob, 2 * PAGE..2 * PAGE + 1));
}

#[test]
fn the_rest_of_the_last_page_reads_as_zeros() {
    let blob = blob(1 << 20, 1 << 30);
    let fill = blob.claim(7 * PAGE..9 * PAGE).fills.pop().unwrap();
    fill.bring_last(&far(7 * PAGE..8 * PAGE + 5));
    let mut bytes = Vec::new();
    assert!(blob.try_read(&mut bytes, 7 * PAGE..9 * PAGE));
    assert_eq!(read_into(&blob, 7 * PAGE + 1..9 * PAGE).unwrap(), bytes[1..]);
    assert_eq!(read_into(&blob, (1 << 30) - 8..(1 << 30) + 1), None, "beyond the end");
    assert_eq!(bytes[..PAGE as usize + 5], far(7 * PAGE..8 * PAGE + 5));
    assert!(bytes[PAGE as usize + 5..].iter().all(|&byte| byte == 0));
}

#[test]
fn views_keep_their_pages_during_evictions() {
    let blob = blob(256 << 10, 1 << 30);
    let bring = |page: u64| {
        for fill in blob.claim(page * PAGE..(page + 1) * PAGE).fills {
            let range = fill.range();
            fill.bring(&far(range));
        }
    };
    bring(3);
    let view = blob.try_view(3 * PAGE + 10..3 * PAGE + 20).unwrap();
    (100..1000).for_each(bring);
    blob.forget(0..1 << 30);
    assert_eq!(view.as_ref(), far(3 * PAGE + 10..3 * PAGE + 20));
    assert!(blob.try_view(50 * PAGE..51 * PAGE).is_none());
    drop(blob);
    assert_eq!(view.as_ref(), far(3 * PAGE + 10..3 * PAGE + 20));
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn an_arrival_waits_for_another_fill() {
    let blob = blob(1 << 20, 1 << 20);
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut cx = Context::from_waker(&waker);
    assert!(pin!(blob.arrival(0..u64::MAX)).poll(&mut cx).is_ready());
    for is_brought in [true, false] {
        let fill = blob.claim(5 * PAGE..6 * PAGE).fills.pop().unwrap();
        let mut arrival = pin!(blob.arrival(0..1 << 20));
        assert!(arrival.as_mut().poll(&mut cx).is_pending());
        assert!(!woken.0.load(Relaxed));
        if is_brought {
            fill.bring(&far(5 * PAGE..6 * PAGE));
        } else {
            drop(fill);
        }
        assert!(woken.0.swap(false, Relaxed));
        assert!(arrival.as_mut().poll(&mut cx).is_ready());
        assert_eq!(is_cached(&blob, 5 * PAGE..6 * PAGE), is_brought);
        blob.forget(0..1 << 20);
    }
}

#[test]
fn threads_read_correct_bytes_in_a_small_cache() {
    let blob = blob(128 << 10, 1 << 22);
    let hits = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (blob, hits) = (&blob, &hits);
            scope.spawn(move || {
                let mut at = thread * 77_777;
                for round in 0..1000u64 {
                    at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round | 1);
                    let start = (at >> 20) % (200 * PAGE);
                    let range = start..start + 1 + (at >> 40) % (3 * PAGE);
                    if is_cached(blob, range.clone()) {
                        hits.fetch_add(1, Relaxed);
                        continue;
                    }
                    for fill in blob.claim(range.clone()).fills {
                        let range = fill.range();
                        match round % 5 {
                            0 => drop(fill),
                            _ => fill.bring(&far(range)),
                        }
                    }
                    if round % 64 == 0 {
                        blob.forget(range);
                    }
                }
            });
        }
    });
    assert!(hits.load(Relaxed) > 20);
}

#[test]
fn invalid_arguments_are_refused() {
    let engine = Engine::builder().cache_bytes(1 << 20).build().unwrap();
    assert!(engine.blob(1, 1000).is_err());
    assert!(engine.blob(u64::MAX, 4096).is_err());
    let empty = engine.blob(0, 4096).unwrap();
    assert!(is_cached(&empty, 0..100) && empty.claim(0..100).fills.is_empty());
    assert_eq!(
        pin!(empty.arrival(0..9)).poll(&mut Context::from_waker(Waker::noop())),
        Poll::Ready(())
    );
}

#[test]
fn the_rest_of_a_fill_ends_with_the_blob() {
    let blob = blob(1 << 20, 10_000);
    let mut fill = blob.claim(0..10_000).fills.pop().unwrap();
    assert_eq!(fill.split_front(3).range(), 0..10_000);
    assert_eq!(fill.range(), 10_000..10_000);
    // A blob that is larger than the cache can search.
    let far_end = Engine::builder().cache_bytes(1 << 20).build().unwrap();
    let large = far_end.blob(i64::MAX as u64, PAGE as u32).unwrap();
    let arrival = pin!(large.arrival(0..u64::MAX));
    assert!(arrival.poll(&mut Context::from_waker(Waker::noop())).is_ready());
}

/// Goal: a page read in place becomes cached when its fill is completed and not before. Where the
/// file is shorter, only a part of the page is cached. A read in the background leaves its pages to
/// other fills.
#[test]
fn pages_are_read_in_place_from_a_direct_file() {
    let dir = temp_dir();
    let path = dir.path().join("file");
    // Three pages, and half a one.
    std::fs::write(&path, far(PAGE..9 * PAGE / 2)).unwrap();
    let engine = Engine::builder().cache_bytes(1 << 20).build().unwrap();
    let options = OpenOptions::new().read(true);
    let open = |options: &OpenOptions| AsyncFile::from(engine.open(&path, options).unwrap());
    let (direct, plain) = (open(&options.clone().direct(true)), open(&options));
    let blob = engine.blob(64 * PAGE, PAGE as u32).unwrap();
    let fill = || blob.claim(PAGE..6 * PAGE).fills.pop().unwrap();

    let (refused, fill_back) = block_on(fill().read_direct(&plain, 0));
    assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
    assert_eq!(fill_back.pages_read().count(), 0);
    drop(fill_back);

    let mut future = Box::pin(fill().read_direct(&direct, 0));
    let _ = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    drop(future);
    block_on(blob.arrival(PAGE..6 * PAGE));
    assert!(!is_cached(&blob, PAGE..PAGE + 1));

    let (moved, mut fill) = block_on(fill().read_direct(&direct, 0));
    assert_eq!(moved.unwrap() as u64, 7 * PAGE / 2);
    assert!(!is_cached(&blob, PAGE..PAGE + 1), "it may be wrong as yet");
    let pages: Vec<&[u8]> = fill.pages_read().collect();
    assert_eq!(pages.concat(), far(PAGE..4 * PAGE));
    let front = fill.split_front(2);
    assert_eq!((front.pages_read().count(), fill.pages_read().count()), (2, 1));
    fill.bring_read();
    assert!(is_cached(&blob, 3 * PAGE..4 * PAGE) && !is_cached(&blob, 4 * PAGE..4 * PAGE + 1));
    drop(front);
    assert!(!is_cached(&blob, PAGE..PAGE + 1), "dropped");
}

/// Goal: a read that finds a byte missing leaves its vector's bytes and capacity as they were.
///
/// Incident: each attempt reserved memory for all of its range, a gigabyte for a failed read.
#[test]
fn a_read_that_misses_reserves_nothing() {
    const PAGES: u64 = 300;
    let engine = Engine::builder().cache_bytes(8 << 20).build().unwrap();
    let blob = engine.blob(1 << 40, 4096).unwrap();
    let range = 0..PAGES * 4096;
    for missing in [1, 70, PAGES - 1] {
        blob.claim(range.clone()).fills.into_iter().for_each(|fill| {
            let len = fill.range().end - fill.range().start;
            fill.bring(&vec![7; len as usize]);
        });
        let mut bytes = b"a pond".to_vec();
        bytes.shrink_to_fit();
        let capacity = bytes.capacity();
        assert!(blob.try_read(&mut bytes, range.clone()), "{missing}: all is there");
        assert_eq!(read_into(&blob, range.clone()).unwrap(), bytes[6..], "{missing}");
        assert_eq!(bytes.len(), 6 + range.end as usize);
        bytes.truncate(6);
        bytes.shrink_to_fit();
        blob.forget(missing * 4096..(missing + 1) * 4096);
        assert!(!blob.try_read(&mut bytes, range.clone()), "{missing}");
        assert_eq!(read_into(&blob, range.clone()), None, "{missing}");
        assert!(!blob.try_read(&mut bytes, range.start..1 << 40), "{missing}");
        assert_eq!((&bytes[..], bytes.capacity()), (&b"a pond"[..], capacity), "{missing}");
    }
}
