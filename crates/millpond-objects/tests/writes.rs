//! Tests of objects that change while they are read.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use common::Far;
use millpond_objects::{CachedStore, Freshness};
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt};

/// The content of a version: its number, repeated.
fn version(number: u64, len: usize) -> Vec<u8> {
    number.to_le_bytes().repeat(len / 8)
}

/// The version number that all bytes belong to.
fn number(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes[8..] == bytes[..bytes.len() - 8], "two versions in one read");
    number
}

/// Goal: a read returns bytes of one version, and no version older than the last completed write through the store, while
/// one task writes through the store and other tasks read.
async fn race(freshness: Freshness, ignores_conditions: bool, has_disk: bool, len: usize) {
    let far = Far::default();
    far.faults.ignores_conditions.store(ignores_conditions, Relaxed);
    let builder = CachedStore::builder(Arc::new(far.clone())).page_bytes(4096);
    let mut builder = builder.memory_bytes(1 << 20).freshness(freshness);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if has_disk {
        builder = builder.disk(dir.path(), 1 << 20);
    }
    let store = builder.build().unwrap();
    let path = Path::from("x");
    store.put(&path, version(1, len).into()).await.unwrap();
    let written = Arc::new(AtomicU64::new(1));
    let is_over = Arc::new(AtomicBool::new(false));
    // Number of readers that are done.
    let ready = Arc::new(AtomicU64::new(0));
    let readers = (0..4).map(|reader| {
        let (store, path) = (store.clone(), path.clone());
        let (written, is_over) = (Arc::clone(&written), Arc::clone(&is_over));
        let ready = Arc::clone(&ready);
        tokio::spawn(async move {
            let mut reads = 0u64;
            let mut at = reader * 4096;
            while !is_over.load(Relaxed) {
                // Yields, so that the runtime can advance its timers.
                tokio::task::yield_now().await;
                let least = written.load(Acquire);
                at = (at + 12_288) % (len as u64 - 40_000);
                let bytes = match reads % 3 {
                    0 => store.get_range(&path, at..at + 40_000).await.unwrap().to_vec(),
                    1 => {
                        let ranges = [at..at + 4096, at + 20_480..at + 24_576, 0..8];
                        store.get_ranges(&path, &ranges).await.unwrap().concat()
                    }
                    _ => match store.get(&path).await.unwrap().bytes().await {
                        Ok(bytes) => bytes.to_vec(),
                        // Replaced while it was read.
                        Err(Error::Precondition { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    },
                };
                let number = number(&bytes);
                assert!(number >= least, "{number} was read after {least} was written");
                reads += 1;
                if reads == 10 {
                    ready.fetch_add(1, Relaxed);
                }
            }
        })
    });
    let readers: Vec<_> = readers.collect();
    for number in 2.. {
        if number > 400 && ready.load(Relaxed) == 4 {
            break;
        }
        store.put(&path, version(number, len).into()).await.unwrap();
        written.store(number, Release);
        tokio::task::yield_now().await;
        if number % 16 == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    is_over.store(true, Relaxed);
    for reader in readers {
        reader.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_mix_no_versions_and_return_no_older_one() {
    let age = Freshness::MaxAge(Duration::from_secs(1000));
    for freshness in [Freshness::Revalidate, age, Freshness::Immutable] {
        for ignores_conditions in [false, true] {
            let has_disk = !ignores_conditions;
            race(freshness, ignores_conditions, has_disk, 128 << 10).await;
        }
    }
}

#[tokio::test]
async fn a_response_that_a_write_overtook_is_not_cached() {
    for is_long in [false, true] {
        let far = Far::default();
        let builder = CachedStore::builder(Arc::new(far.clone())).freshness(Freshness::Immutable);
        let store = builder.memory_bytes(1 << 20).build().unwrap();
        let path = Path::from("x");
        far.store.put(&path, version(1, 4096).into()).await.unwrap();
        let read = || async {
            let bytes = match is_long {
                true => store.get(&path).await.unwrap().bytes().await.unwrap(),
                false => store.get_range(&path, 0..4096).await.unwrap(),
            };
            number(&bytes)
        };
        // Longer than the write takes.
        far.faults.way_back_ms.store(200, Relaxed);
        let write = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            store.put(&path, version(2, 4096).into()).await.unwrap();
        };
        let (_, old) = tokio::join!(write, read());
        assert_eq!(old, 1);
        assert_eq!(read().await, 2);
    }
}

/// Incident: during a get, an object without ETag was replaced through the store by one of the same size. The response,
/// of the old version, was taken for one of the new version, so later reads returned the old bytes.
#[tokio::test]
async fn a_late_response_without_a_version_is_not_cached() {
    for is_long in [false, true] {
        let far = Far::default();
        far.faults.without_tags.store(true, Relaxed);
        let builder = CachedStore::builder(Arc::new(far.clone())).freshness(Freshness::Immutable);
        let store = builder.memory_bytes(1 << 20).page_bytes(4096).readahead_bytes_max(0);
        let (store, path) = (store.build().unwrap(), Path::from("x"));
        store.put(&path, version(1, 40_960).into()).await.unwrap();
        far.faults.way_back_ms.store(100, Relaxed);
        let read_late = async {
            let bytes = match is_long {
                true => store.get(&path).await.unwrap().bytes().await.unwrap(),
                false => store.get_range(&path, 0..40_960).await.unwrap(),
            };
            number(&bytes)
        };
        let write_and_read = async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            far.faults.way_back_ms.store(0, Relaxed);
            store.put(&path, version(2, 40_960).into()).await.unwrap();
            if is_long {
                // After the head request the object has an entry, but no cached pages.
                store.get(&path).await.unwrap();
            }
            number(&store.get_range(&path, 0..8).await.unwrap())
        };
        assert_eq!(tokio::join!(read_late, write_and_read), (1, 2));
        for at in (0..40_960).step_by(4096) {
            assert_eq!(number(&store.get_range(&path, at..at + 8).await.unwrap()), 2, "at {at}");
        }
    }
}

/// Goal: without ETags, a read never mixes pages of two versions, even if the object is written through the store during
/// the read.
#[tokio::test]
async fn a_write_between_two_requests_of_a_read_makes_it_begin_again() {
    let far = Far::default();
    far.faults.without_tags.store(true, Relaxed);
    let builder = CachedStore::builder(Arc::new(far.clone())).freshness(Freshness::Immutable);
    let store = builder.memory_bytes(1 << 20).page_bytes(4096).readahead_bytes_max(0);
    let (store, path) = (store.build().unwrap(), Path::from("x"));
    store.put(&path, version(1, 40_960).into()).await.unwrap();
    store.get_range(&path, 0..8).await.unwrap();
    // The second page is requested before the write, but the store reads it after the write.
    far.faults.delay_ms.store(100, Relaxed);
    let ranges = [0..8, 4096..4104];
    let read = async { number(&store.get_ranges(&path, &ranges).await.unwrap().concat()) };
    let write = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        store.put(&path, version(2, 40_960).into()).await.unwrap();
    };
    assert_eq!(tokio::join!(read, write).0, 2);
}

/// Incident: writes were counted per shard, a 64th of all names, so writes of other objects kept an object out of the
/// cache.
#[tokio::test]
async fn writes_of_other_objects_keep_none_out_of_the_cache() {
    let far = Far::default();
    let builder = CachedStore::builder(Arc::new(far.clone())).freshness(Freshness::Immutable);
    let store = builder.memory_bytes(16 << 20).page_bytes(4096).build().unwrap();
    let path = |number: u64| Path::from(format!("read/{number}"));
    for number in 0..200 {
        far.store.put(&path(number), version(number, 64).into()).await.unwrap();
    }
    far.faults.way_back_ms.store(200, Relaxed);
    let reads = (0..200).map(|number| {
        let (store, path) = (&store, path(number));
        async move { store.get_range(&path, 0..64).await.unwrap() }
    });
    let write = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        for number in 0..1000u64 {
            let path = Path::from(format!("written/{number}"));
            store.put(&path, version(number, 64).into()).await.unwrap();
        }
    };
    tokio::join!(futures_util::future::join_all(reads), write);
    far.gets();
    for number in 0..200 {
        let got = store.get_range(&path(number), 0..64).await.unwrap();
        assert_eq!(got, version(number, 64));
    }
    assert_eq!(far.gets().len(), 0);
}

/// Incident: the age of a response was counted from its arrival, so a slow response was served for longer than `MaxAge`.
#[tokio::test]
async fn the_age_of_an_answer_counts_from_its_request() {
    let far = Far::default();
    let age = Freshness::MaxAge(Duration::from_millis(200));
    let store = CachedStore::builder(Arc::new(far.clone())).memory_bytes(1 << 20).freshness(age);
    let (store, path) = (store.build().unwrap(), Path::from("x"));
    far.store.put(&path, version(1, 4096).into()).await.unwrap();
    far.faults.way_back_ms.store(300, Relaxed);
    let read = || async { number(&store.get_range(&path, 0..4096).await.unwrap()) };
    let write = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        far.store.put(&path, version(2, 4096).into()).await.unwrap();
    };
    let (_, old) = tokio::join!(write, read());
    assert_eq!((old, read().await), (1, 2));
}

#[tokio::test]
async fn deleted_and_renamed_objects_are_gone() {
    let far = Far::default();
    let builder = CachedStore::builder(Arc::new(far.clone())).freshness(Freshness::Immutable);
    let store = builder.memory_bytes(1 << 20).build().unwrap();
    let (a, b) = (Path::from("a"), Path::from("b"));
    store.put(&a, "first".into()).await.unwrap();
    store.put(&b, "second".into()).await.unwrap();
    let read = |path: &Path| {
        let (store, path) = (store.clone(), path.clone());
        async move { store.get_range(&path, 0..5).await }
    };
    assert_eq!(read(&a).await.unwrap(), "first");
    assert_eq!(read(&b).await.unwrap(), "secon");
    store.copy(&b, &a).await.unwrap();
    assert_eq!(read(&a).await.unwrap(), "secon");
    store.delete(&a).await.unwrap();
    assert!(matches!(read(&a).await, Err(Error::NotFound { .. })));
    store.rename(&b, &a).await.unwrap();
    assert!(matches!(read(&b).await, Err(Error::NotFound { .. })));
    assert_eq!(read(&a).await.unwrap(), "secon");
    let mut upload = store.put_multipart(&a).await.unwrap();
    upload.put_part("third".into()).await.unwrap();
    assert_eq!(read(&a).await.unwrap(), "secon");
    upload.complete().await.unwrap();
    assert_eq!(read(&a).await.unwrap(), "third");
}

/// Goal: the directory keeps to its share of the memory, and the newest entries stay.
#[tokio::test]
async fn names_of_many_objects_keep_to_the_limit() {
    let far = Far::default();
    let builder = CachedStore::builder(Arc::new(far.clone())).freshness(Freshness::Immutable);
    let store = builder.memory_bytes(1 << 20).page_bytes(4096).build().unwrap();
    for number in 0..3000 {
        let path = Path::from(format!("objects/{number}"));
        far.store.put(&path, version(number, 64).into()).await.unwrap();
        assert_eq!(store.get_range(&path, 0..64).await.unwrap(), version(number, 64));
    }
    let stats = store.stats();
    assert!(stats.objects < 64 * 1024 / 128, "{} objects", stats.objects);
    assert!(stats.objects > 50, "{} objects", stats.objects);
    assert!(stats.memory_bytes <= 1 << 20);
    far.gets();
    store.get_range(&Path::from("objects/2999"), 0..64).await.unwrap();
    assert!(far.gets().is_empty());
    assert!(ObjectStore::get_ranges(&store, &Path::from("none"), &[0..1, 5..6]).await.is_err());
}
