//! Tests of reads: which requests reach the underlying store, and which results the callers get.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use common::{Far, bounded, content};
use futures_util::future::{join_all, try_join_all};
use futures_util::{StreamExt, TryStreamExt};
use millpond_objects::{Builder, CachedStore, Freshness};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error, GetOptions, ObjectStore, ObjectStoreExt, PutOptions,
};

const PAGE: u64 = 4096;

fn over(far: &Far) -> Builder {
    let builder = CachedStore::builder(Arc::new(far.clone())).page_bytes(PAGE as u32);
    builder.memory_bytes(4 << 20).freshness(Freshness::Immutable).readahead_bytes_max(0)
}

async fn with_object(len: usize) -> (Far, Path, Vec<u8>) {
    let (far, path, bytes) = (Far::default(), Path::from("a/b"), content(1, len));
    far.store.put(&path, bytes.clone().into()).await.unwrap();
    (far, path, bytes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_misses_of_a_page_make_one_request() {
    let (far, path, bytes) = with_object(100_000).await;
    let store = over(&far).build().unwrap();
    far.faults.delay_ms.store(20, Relaxed);
    // An object without an entry, and one with an entry.
    for range in [5000..5100, 50_000..50_100] {
        let tasks = (0..64).map(|_| {
            let (store, path, range) = (store.clone(), path.clone(), range.clone());
            tokio::spawn(async move { store.get_range(&path, range).await.unwrap() })
        });
        for got in try_join_all(tasks).await.unwrap() {
            assert_eq!(got, bytes[range.start as usize..range.end as usize]);
        }
        assert_eq!(far.gets().len(), 1);
    }
    assert_eq!(store.stats().requests, 2);
}

#[tokio::test]
async fn cached_ranges_are_read_without_a_request() {
    let (far, path, bytes) = with_object(3 * PAGE as usize + 77).await;
    let store = over(&far).build().unwrap();
    let len = bytes.len() as u64;
    assert_eq!(store.get_range(&path, 0..len).await.unwrap(), bytes);
    assert_eq!(far.gets(), [bounded(0..4 * PAGE)]);
    for range in [0..1, len - 1..len, len - 78..len, 4000..9000, 0..len, len - 10..len + 10] {
        let got = store.get_range(&path, range.clone()).await.unwrap();
        assert_eq!(got, bytes[range.start as usize..range.end.min(len) as usize], "{range:?}");
    }
    let got = store.get(&path).await.unwrap();
    assert_eq!((got.range.clone(), got.meta.size), (0..len, len));
    assert_eq!(got.bytes().await.unwrap(), bytes);
    let suffix = GetOptions::new().with_range(Some(object_store::GetRange::Suffix(100)));
    let got = store.get_opts(&path, suffix).await.unwrap().bytes().await.unwrap();
    assert_eq!(got, bytes[bytes.len() - 100..]);
    assert_eq!(store.head(&path).await.unwrap().size, len);
    assert!(far.gets().is_empty());
    // Six ranges, the whole object, a suffix and a head.
    let stats = store.stats();
    assert_eq!((stats.requests, stats.requests_saved), (1, 9));
    let text = stats.to_string();
    assert!(text.contains("store: 1 requests (0 not modified), 9 saved, 0.0 MiB"), "{text}");
    assert!(text.starts_with("memory: ") && !text.contains("disk"), "{text}");
    // Errors of invalid ranges come from the store.
    assert!(matches!(store.get_range(&path, len..len + 1).await, Err(Error::Generic { .. })));
    let none = store.get_range(&Path::from("none"), 0..1).await;
    assert!(matches!(none, Err(Error::NotFound { .. })));
}

/// Goal: reads with extensions reach the store with them. A program may choose other reads.
#[tokio::test]
async fn the_program_chooses_which_reads_are_cached() {
    let (far, path, bytes) = with_object(2 * PAGE as usize).await;
    let log = Path::from("a/log");
    far.store.put(&log, bytes.clone().into()).await.unwrap();
    let tagged = |tag: &str| {
        let mut options = GetOptions::new().with_range(Some(0..100));
        options.extensions.insert(tag.to_owned());
        options
    };
    let plain = over(&far).build().unwrap();
    let choosing = over(&far).cache_if(|location, options| {
        let tag = options.extensions.get::<String>();
        location.filename() != Some("log") && tag.is_none_or(|tag| tag == "read")
    });
    let choosing = choosing.build().unwrap();
    for (store, path, tag, requests) in [
        (&plain, &path, "read", 3),
        (&choosing, &path, "read", 1),
        (&choosing, &path, "read again", 3),
        (&choosing, &log, "read", 3),
    ] {
        for _ in 0..3 {
            let read = store.get_opts(path, tagged(tag)).await.unwrap();
            assert_eq!(read.bytes().await.unwrap(), bytes[..100]);
        }
        assert_eq!(far.gets().len(), requests, "{path}: {tag}");
    }
    let head = GetOptions { head: true, ..tagged("read") };
    assert_eq!(choosing.get_opts(&path, head).await.unwrap().meta.size, 2 * PAGE);
    choosing.get_ranges(&path, &[0..10, 20..30]).await.unwrap();
    assert!(far.gets().is_empty());
    choosing.get_ranges(&log, &[0..10, 20..30]).await.unwrap();
    assert_eq!(far.gets().len(), 1);
}

#[tokio::test]
async fn near_ranges_are_one_request_and_far_ones_are_not() {
    let (far, path, bytes) = with_object(1 << 20).await;
    let store = over(&far).gap_bytes(2 * PAGE).build().unwrap();
    let ranges = [600_000..600_010, 10..20, 3 * PAGE + 5..3 * PAGE + 10, 10..4000];
    let expect = |got: Vec<bytes::Bytes>| {
        for (got, range) in got.iter().zip(&ranges) {
            assert_eq!(*got, bytes[range.start as usize..range.end as usize]);
        }
    };
    expect(store.get_ranges(&path, &ranges).await.unwrap());
    let at = 600_000 / PAGE * PAGE;
    assert_eq!(far.gets(), [bounded(0..4 * PAGE), bounded(at..at + PAGE)]);
    expect(store.get_ranges(&path, &ranges).await.unwrap());
    assert!(far.gets().is_empty());
    // Page 1 is cached, as part of the first request; only page 4 is requested.
    let ranges = [PAGE..PAGE + 1, 4 * PAGE..4 * PAGE + 1];
    store.get_ranges(&path, &ranges).await.unwrap();
    assert_eq!(far.gets(), [bounded(4 * PAGE..5 * PAGE)]);
    // The gap between the ranges is cached with them.
    let ranges = [6 * PAGE..6 * PAGE + 1, 8 * PAGE..8 * PAGE + 1];
    store.get_ranges(&path, &ranges).await.unwrap();
    assert_eq!(far.gets(), [bounded(6 * PAGE..9 * PAGE)]);
    let between = 7 * PAGE..8 * PAGE;
    let whole = &bytes[between.start as usize..between.end as usize];
    assert_eq!(store.get_range(&path, between).await.unwrap(), whole);
    assert!(far.gets().is_empty());
}

/// Incident: 200 ranges of one byte, 1 MiB apart, were one request of 200 MiB, which stayed in memory for as long as one
/// of the bytes did.
///
/// Goal: the gaps that one call reads in addition are limited.
#[tokio::test]
async fn many_far_ranges_are_not_one_request() {
    let (far, path, bytes) = with_object(36 << 20).await;
    let store = over(&far).gap_bytes(1 << 20).build().unwrap();
    let ranges: Vec<_> = (0..72u64).map(|at| at << 19..(at << 19) + 1).collect();
    for (got, range) in store.get_ranges(&path, &ranges).await.unwrap().iter().zip(&ranges) {
        assert_eq!(got[0], bytes[range.start as usize]);
    }
    assert_eq!(far.gets().len(), ranges.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_reach_the_caller_and_cache_nothing() {
    let (far, path, bytes) = with_object(40_000).await;
    let store = over(&far).build().unwrap();
    far.faults.fail_every.store(1, Relaxed);
    let failed = store.get_range(&path, 0..10).await.unwrap_err();
    assert_eq!(failed.to_string(), "Generic far error: fault 1");
    far.faults.fail_every.store(0, Relaxed);
    assert_eq!(store.get_range(&path, 0..10).await.unwrap(), bytes[..10]);
    far.faults.fail_every.store(1, Relaxed);
    far.faults.delay_ms.store(10, Relaxed);
    // All fail together: no caller waits for more than its own request and one other.
    let tasks = (0..16).map(|_| store.get_range(&path, 20_000..20_010));
    let began = std::time::Instant::now();
    assert!(join_all(tasks).await.iter().all(Result::is_err));
    assert!(began.elapsed() < Duration::from_secs(10));
    far.faults.fail_every.store(0, Relaxed);
    assert_eq!(store.get_range(&path, 20_000..20_010).await.unwrap(), bytes[20_000..20_010]);
    far.gets();
    assert_eq!(store.get_range(&path, 20_000..20_010).await.unwrap(), bytes[20_000..20_010]);
    assert!(far.gets().is_empty());
}

/// Goal: an error of the store costs a second request only if the failed one was not for the first byte of a range.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_is_returned_unless_its_request_began_late() {
    let (far, path, _) = with_object(20 * PAGE as usize).await;
    let asked = 0..10 * PAGE;
    for (cached, gets) in [
        // A hole in the middle: the first request is for the first byte of the range.
        (4 * PAGE..5 * PAGE, 2),
        // The request is for a part behind the first byte, so the store is asked for all.
        (0..PAGE, 2),
        (9 * PAGE..10 * PAGE, 1),
    ] {
        let store = over(&far).gap_bytes(0).build().unwrap();
        store.get_range(&path, cached.clone()).await.unwrap();
        far.gets();
        far.faults.fail_every.store(1, Relaxed);
        store.get_range(&path, asked.clone()).await.unwrap_err();
        far.faults.fail_every.store(0, Relaxed);
        assert_eq!(far.gets().len(), gets, "{cached:?} was cached");
    }
}

#[tokio::test]
async fn a_failed_stream_returns_the_error_and_is_not_cached_as_whole() {
    let (far, path, bytes) = with_object(9 << 20).await;
    let store = over(&far).memory_bytes(32 << 20).build().unwrap();
    let mut stream = store.get(&path).await.unwrap().into_stream();
    // The failed stream is not read further.
    stream.next().await.unwrap().unwrap();
    drop(stream);
    let got = store.get(&path).await.unwrap().bytes().await.unwrap();
    assert_eq!(got, bytes);
    far.gets();
    let got = store.get(&path).await.unwrap().bytes().await.unwrap();
    assert_eq!(got, bytes);
    assert!(far.gets().is_empty(), "the whole object fits");
}

#[tokio::test]
async fn each_freshness_keeps_its_promise() {
    let (far, path, _) = with_object(10_000).await;
    let immutable = over(&far).build().unwrap();
    let revalidate = over(&far).freshness(Freshness::Revalidate).build().unwrap();
    let aged = over(&far).freshness(Freshness::MaxAge(Duration::from_millis(300))).build().unwrap();
    for store in [&immutable, &revalidate, &aged] {
        store.get_range(&path, 0..10).await.unwrap();
    }
    far.gets();
    revalidate.get_range(&path, 0..10).await.unwrap();
    assert_eq!((far.gets().len(), revalidate.stats().not_modified), (1, 1));
    let new = content(2, 20_000);
    far.store.put(&path, new.clone().into()).await.unwrap();
    let old = content(1, 10_000);
    assert_eq!(immutable.get_range(&path, 0..10).await.unwrap(), old[..10]);
    assert_eq!(aged.get_range(&path, 0..10).await.unwrap(), old[..10]);
    assert_eq!(revalidate.get_range(&path, 0..10).await.unwrap(), new[..10]);
    tokio::time::sleep(Duration::from_millis(350)).await;
    assert_eq!(aged.get_range(&path, 0..10).await.unwrap(), new[..10]);
    // A page of the old version is no longer available: the read fails rather than mix versions.
    assert_eq!(immutable.get_range(&path, 0..8000).await.unwrap(), new[..8000]);
    immutable.forget(&path);
    assert_eq!(immutable.get_range(&path, 0..10).await.unwrap(), new[..10]);
}

#[tokio::test]
async fn unversioned_objects_are_cached_only_if_immutable() {
    let (far, path, bytes) = with_object(10_000).await;
    far.faults.without_tags.store(true, Relaxed);
    let revalidate = over(&far).freshness(Freshness::Revalidate).build().unwrap();
    for _ in 0..3 {
        assert_eq!(revalidate.get_range(&path, 5..100).await.unwrap(), bytes[5..100]);
    }
    assert_eq!(far.gets().len(), 3);
    let immutable = over(&far).build().unwrap();
    for _ in 0..3 {
        assert_eq!(immutable.get_range(&path, 5..100).await.unwrap(), bytes[5..100]);
    }
    assert_eq!(far.gets().len(), 1);
}

/// Goal: a body that is longer than its range is an error, in short reads and in streams, as the offsets of its bytes are
/// unknown.
#[tokio::test]
async fn a_body_that_is_too_long_is_an_error() {
    // A longer read is a stream.
    let (far, path, bytes) = with_object(5 << 20).await;
    let store = over(&far).build().unwrap();
    far.faults.has_longer_bodies.store(true, Relaxed);
    assert!(store.get_range(&path, 0..10).await.is_err());
    store.forget(&path);
    assert!(store.get_range(&path, 0..9_000).await.is_err());
    store.forget(&path);
    assert!(store.get(&path).await.unwrap().bytes().await.is_err());
    store.forget(&path);
    far.faults.has_longer_bodies.store(false, Relaxed);
    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), bytes);
}

/// Incident: after a truncation of a local file its stream has empty pieces without an end, and so had the stream of the cache.
#[tokio::test]
async fn a_body_that_is_too_short_is_an_error() {
    // A longer read is a stream.
    const LEN: u64 = 5 << 20;
    let (far, path, bytes) = with_object(LEN as usize).await;
    let store = over(&far).build().unwrap();
    let is_short = |error: Error, expected: u64| {
        let what = format!("a/b: {} bytes were received of {expected}", expected - 1);
        assert!(error.to_string().contains(&what), "{error}");
        let taken = far.faults.empty_pieces.swap(0, Relaxed);
        assert!((1..100).contains(&taken), "{taken} empty pieces");
    };
    let all = async || store.get(&path).await.unwrap().into_stream().try_collect::<Vec<_>>().await;
    far.faults.lacks_last_byte.store(true, Relaxed);
    is_short(store.get_range(&path, 0..10).await.unwrap_err(), PAGE);
    store.forget(&path);
    is_short(all().await.unwrap_err(), LEN);
    // The rest after a cached page.
    store.forget(&path);
    far.faults.lacks_last_byte.store(false, Relaxed);
    store.get_range(&path, 0..10).await.unwrap();
    far.faults.lacks_last_byte.store(true, Relaxed);
    is_short(all().await.unwrap_err(), LEN - PAGE);
    far.faults.lacks_last_byte.store(false, Relaxed);
    assert!(all().await.unwrap().concat() == bytes);
}

/// Goal: an object with a weak ETag counts as unversioned, as equal weak ETags do not imply equal bytes.
#[tokio::test]
async fn objects_with_weak_tags_count_as_unversioned() {
    let (far, path, bytes) = with_object(100_000).await;
    far.faults.weak_tag.store(true, Relaxed);
    let revalidate = over(&far).freshness(Freshness::Revalidate).build().unwrap();
    let immutable = over(&far).build().unwrap();
    for range in [0..10, 0..10, 50_000..50_010, 0..60_000] {
        for store in [&revalidate, &immutable] {
            let got = store.get_range(&path, range.clone()).await.unwrap();
            assert_eq!(got, bytes[range.start as usize..range.end as usize]);
        }
    }
    // One request for each read; one for each missing page, and the pages between them.
    assert_eq!((revalidate.stats().requests, immutable.stats().requests), (4, 3));
    let new = content(2, 100_000);
    far.store.put(&path, new.clone().into()).await.unwrap();
    assert_eq!(revalidate.get_range(&path, 0..60_000).await.unwrap(), new[..60_000]);
    assert_eq!(revalidate.get(&path).await.unwrap().bytes().await.unwrap(), new);
}

#[tokio::test]
async fn sequential_reads_are_read_ahead() {
    let (far, path, bytes) = with_object(1 << 20).await;
    let store = over(&far).readahead_bytes_max(64 * PAGE).build().unwrap();
    for at in (0..1 << 20).step_by(PAGE as usize) {
        let got = store.get_range(&path, at..at + PAGE).await.unwrap();
        assert_eq!(got, bytes[at as usize..(at + PAGE) as usize]);
        // Wait for the read-ahead.
        while store.stats().bytes_from_store < at + PAGE {
            tokio::task::yield_now().await;
        }
    }
    let requests = far.gets().len();
    assert!(requests < 64, "{requests} requests for 256 pages");
    assert_eq!(store.stats().bytes_from_store, 1 << 20, "no byte is transferred twice");
}

/// Goal: several tasks that read an object in order, at the same time, cause the requests of one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_sequential_readers_share_the_read_ahead() {
    const LEN: u64 = 4 << 20;
    let mut requests = Vec::new();
    for readers in [1, 8] {
        let (far, path, bytes) = with_object(LEN as usize).await;
        far.faults.delay_ms.store(3, Relaxed);
        let store = over(&far).memory_bytes(32 << 20).readahead_bytes_max(256 * PAGE);
        let store = store.build().unwrap();
        let read = |store: CachedStore, path: Path, bytes: Vec<u8>| async move {
            for at in (0..LEN).step_by(4 * PAGE as usize) {
                let got = store.get_range(&path, at..at + 4 * PAGE).await.unwrap();
                assert_eq!(got, bytes[at as usize..(at + 4 * PAGE) as usize]);
            }
        };
        let tasks: Vec<_> = (0..readers)
            .map(|_| tokio::spawn(read(store.clone(), path.clone(), bytes.clone())))
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        requests.push(far.gets().len());
    }
    println!("requests: {requests:?}");
    // Windows of 256 pages, and of less at the beginning.
    assert!(requests[0] <= 24 && requests[1] <= requests[0] + 4, "{requests:?}");
}

#[tokio::test]
async fn reads_work_outside_of_a_runtime_and_in_a_tiny_cache() {
    let (far, path, bytes) = with_object(2 << 20).await;
    let store = over(&far).memory_bytes(1 << 20).build().unwrap();
    let read = || async {
        for at in (0..bytes.len() - 9000).step_by(70_001) {
            let range = at as u64..at as u64 + 9000;
            assert_eq!(store.get_range(&path, range).await.unwrap(), bytes[at..at + 9000]);
        }
        assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), bytes);
    };
    read().await;
    let handle = std::thread::scope(|scope| {
        scope.spawn(|| futures_util::future::FutureExt::now_or_never(read()).is_some()).join()
    });
    assert!(handle.unwrap(), "a store in memory never waits");
}

/// Goal: a claim on a single-threaded runtime that no thread drives blocks no reader elsewhere.
#[test]
fn a_stopped_runtime_blocks_no_other_reader() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let many = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build();
    let (far, path, bytes) = first.block_on(with_object(100_000));
    let store = over(&far).build().unwrap();
    first.block_on(store.get_range(&path, 0..10)).unwrap();
    far.faults.delay_ms.store(100, Relaxed);
    first.block_on(async {
        for path in [path.clone(), Path::from("unknown")] {
            let given_up = store.get_range(&path, 50_000..50_010);
            let limit = Duration::from_millis(10);
            assert!(tokio::time::timeout(limit, given_up).await.is_err());
        }
    });
    for other in [&second, &many.unwrap()] {
        let got = other.block_on(store.get_range(&path, 50_000..50_010)).unwrap();
        assert_eq!(got, bytes[50_000..50_010]);
        assert!(other.block_on(store.get_range(&Path::from("unknown"), 0..10)).is_err());
    }
    let got = first.block_on(store.get_range(&path, 50_000..50_010)).unwrap();
    assert_eq!(got, bytes[50_000..50_010]);
}

/// Incident: attributes of any length counted 128 bytes each, so objects with long ones exceeded the limit of memory.
#[tokio::test]
async fn attributes_are_within_the_memory_limit() {
    const VALUE_BYTES: u64 = 8 << 10;
    let far = Arc::new(InMemory::new());
    let store = CachedStore::builder(far.clone()).page_bytes(4096).memory_bytes(16 << 20);
    let store = store.freshness(Freshness::Immutable).build().unwrap();
    for number in 0..300 {
        let path = Path::from(format!("pond/{number}"));
        let mut attributes = Attributes::new();
        let value = "x".repeat(VALUE_BYTES as usize);
        attributes.insert(Attribute::Metadata("note".into()), value.into());
        let options = PutOptions { attributes, ..PutOptions::default() };
        far.put_opts(&path, "water".into(), options).await.unwrap();
        store.get_range(&path, 0..5).await.unwrap();
    }
    // A sixteenth of the memory is for entries.
    let held = store.stats().objects * VALUE_BYTES;
    assert!((1..=1 << 20).contains(&held), "{held} bytes of attributes");
}
