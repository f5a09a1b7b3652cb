//! Objects that change while they are read.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use common::Far;
use millpond_objects::{CachedStore, Freshness};
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt};

/// An object of one version: a number, over and over.
fn version(number: u64, len: usize) -> Vec<u8> {
    number.to_le_bytes().repeat(len / 8)
}

/// The number of which all bytes are.
fn number(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes[8..] == bytes[..bytes.len() - 8], "two versions in one read");
    number
}

/// Goal: versions are never mixed in one call, and what was written through the store is never older than the
/// last write that has ended, while one task writes through it and others read.
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
    let readers = (0..4).map(|reader| {
        let (store, path) = (store.clone(), path.clone());
        let (written, is_over) = (Arc::clone(&written), Arc::clone(&is_over));
        tokio::spawn(async move {
            let mut reads = 0u64;
            let mut at = reader * 4096;
            while !is_over.load(Relaxed) {
                // The clock of the runtime wants a turn.
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
            }
            reads
        })
    });
    let readers: Vec<_> = readers.collect();
    for number in 2..400 {
        store.put(&path, version(number, len).into()).await.unwrap();
        written.store(number, Release);
        tokio::task::yield_now().await;
        if number % 16 == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    is_over.store(true, Relaxed);
    for reader in readers {
        assert!(reader.await.unwrap() > 10);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_version_is_mixed_or_older_than_what_was_written() {
    let age = Freshness::MaxAge(Duration::from_secs(1000));
    for freshness in [Freshness::Revalidate, age, Freshness::Immutable] {
        for ignores_conditions in [false, true] {
            let has_disk = !ignores_conditions;
            race(freshness, ignores_conditions, has_disk, 128 << 10).await;
        }
    }
}

#[tokio::test]
async fn an_answer_that_a_write_overtook_is_not_kept() {
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
        // Longer than it takes to write.
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

/// Incident: the age of an answer was counted from its arrival, so one that took long was served for longer than `MaxAge`.
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
async fn what_is_gone_is_gone() {
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

/// Goal: names of objects keep to their share of the memory, and the newest are there.
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
