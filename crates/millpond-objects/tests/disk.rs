//! The tier on a disk: what survives, and that nothing makes a wrong byte.

mod common;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

use common::{Far, content};
use millpond_objects::{Builder, CachedStore, Freshness};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tempfile::TempDir;

const PAGE: u64 = 4096;
const DISK: u64 = 4 << 20;

/// A directory on a real disk, removed at the end.
fn temp_dir() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn over(far: &Far, dir: &TempDir) -> Builder {
    let builder = CachedStore::builder(Arc::new(far.clone())).page_bytes(PAGE as u32);
    let builder = builder.memory_bytes(2 << 20).freshness(Freshness::Immutable);
    builder.readahead_bytes_max(0).disk(tier_dir(dir), DISK)
}

fn tier_dir(dir: &TempDir) -> PathBuf {
    dir.path().join("tier")
}

/// As soon as tasks of an earlier one on the directory have ended.
async fn built(builder: impl Fn() -> Builder) -> CachedStore {
    loop {
        match builder().build() {
            Ok(store) => return store,
            Err(error) if error.to_string().contains("another store") => {
                tokio::task::yield_now().await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn object(number: u64) -> (Path, Vec<u8>) {
    (Path::from(format!("objects/{number}")), content(number, 100_000 + number as usize * 777))
}

async fn with_objects(count: u64) -> Far {
    let far = Far::default();
    for number in 0..count {
        let (path, bytes) = object(number);
        far.store.put(&path, bytes.into()).await.unwrap();
    }
    far
}

/// Reads all of each object, in ranges.
async fn read_all(store: &CachedStore, count: u64) {
    for number in 0..count {
        let (path, bytes) = object(number);
        for at in (0..bytes.len()).step_by(30_000) {
            let range = at as u64..(at as u64 + 30_000).min(bytes.len() as u64);
            let got = store.get_range(&path, range.clone()).await.unwrap();
            assert_eq!(got, bytes[range.start as usize..range.end as usize], "{path} {range:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_read_survives_a_restart() {
    let (far, dir) = (with_objects(20).await, temp_dir());
    // With room for all on its way to the disk.
    let store = over(&far, &dir).memory_bytes(64 << 20).build().unwrap();
    read_all(&store, 20).await;
    assert_eq!(store.stats().disk_pages_dropped, 0);
    let first = far.gets().len();
    assert!(first >= 80, "{first} requests");
    drop(store);
    let store = built(|| over(&far, &dir)).await;
    let stats = store.stats();
    assert_eq!((stats.disk_pages_damaged, stats.disk_errors, stats.disk_is_off), (0, 0, false));
    assert!(stats.disk_pages >= 20 * 100_000 / PAGE, "{stats:?}");
    read_all(&store, 20).await;
    // One for each object, which says what its version is.
    assert_eq!(far.gets().len(), 20);
    let stats = store.stats();
    assert!(stats.bytes_from_disk > 20 * 70_000, "{stats:?}");
    assert_eq!(stats.disk_pages_damaged, 0);
    // A whole object, of which nothing is known.
    drop(store);
    let large = Path::from("large");
    let bytes = content(7, 2_500_000);
    far.store.put(&large, bytes.clone().into()).await.unwrap();
    for requests in [1, 1] {
        let store = built(|| over(&far, &dir).memory_bytes(64 << 20)).await;
        assert_eq!(store.get(&large).await.unwrap().bytes().await.unwrap(), bytes);
        assert_eq!(far.gets().len(), requests);
        assert_eq!(store.stats().disk_pages_dropped, 0);
    }
    let revalidate = || over(&far, &dir).memory_bytes(16 << 20).freshness(Freshness::Revalidate);
    let store = built(revalidate).await;
    for _ in 0..2 {
        assert_eq!(store.get(&large).await.unwrap().bytes().await.unwrap(), bytes);
        assert_eq!(store.get_range(&large, 5..70_000).await.unwrap(), bytes[5..70_000]);
    }
    let stats = store.stats();
    assert!(stats.bytes_from_store < 100_000, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_bytes_on_the_disk_are_asked_of_the_store() {
    let (far, dir) = (with_objects(20).await, temp_dir());
    let store = over(&far, &dir).build().unwrap();
    read_all(&store, 20).await;
    drop(store);
    let pages = built(|| over(&far, &dir)).await.stats().disk_pages;
    for (seed, every) in [(1, 500_000), (2, 10_000), (3, 700)] {
        let file = OpenOptions::new().read(true).write(true).open(tier_dir(&dir).join("pages"));
        let (file, mut at) = (file.unwrap(), seed);
        while at < file.metadata().unwrap().len() {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
            at += every;
        }
        drop(file);
        let store = built(|| over(&far, &dir)).await;
        let before = store.stats();
        read_all(&store, 20).await;
        let stats = store.stats();
        let is_damaged = stats.disk_pages_damaged > 0 || before.disk_pages < pages;
        assert!(is_damaged, "{before:?} {stats:?}");
        drop(store);
    }
    // Neither a file that ends early nor one of something else.
    for (len, bytes) in [(1_000_001, None), (5000, None), (9000, Some([7; 9000]))] {
        let path = tier_dir(&dir).join("pages");
        OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
        if let Some(bytes) = bytes {
            fs::write(&path, bytes).unwrap();
        }
        read_all(&built(|| over(&far, &dir)).await, 20).await;
        let store = built(|| over(&far, &dir)).await;
        assert!(store.stats().disk_pages > 300, "{:?}", store.stats());
    }
}

/// Bytes that the directory takes on the disk.
fn du(dir: &TempDir) -> u64 {
    let entries = fs::read_dir(tier_dir(dir)).unwrap();
    entries.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_directory_keeps_to_its_limit_and_what_is_used_stays() {
    let (far, dir) = (with_objects(60).await, temp_dir());
    let store = over(&far, &dir).build().unwrap();
    let (hot, hot_bytes) = object(0);
    for round in 0..3 {
        for number in 0..60 {
            let (path, bytes) = object(number);
            let got = store.get_range(&path, 0..bytes.len() as u64).await.unwrap();
            assert_eq!(got, bytes);
            if number % 15 == 14 {
                // Out of memory, and known again.
                store.forget(&hot);
                store.get_range(&hot, 0..1).await.unwrap();
                let got = store.get_range(&hot, 8192..40_000).await.unwrap();
                assert_eq!(got, hot_bytes[8192..40_000]);
            }
            assert!(du(&dir) <= DISK, "{} in round {round}", du(&dir));
        }
    }
    drop(store);
    assert!(du(&dir) <= DISK && du(&dir) > DISK / 2, "{}", du(&dir));
    let store = built(|| over(&far, &dir)).await;
    store.get_range(&hot, 0..1).await.unwrap();
    far.gets();
    assert_eq!(store.get_range(&hot, 8192..40_000).await.unwrap(), hot_bytes[8192..40_000]);
    assert!(far.gets().is_empty(), "{:?}", store.stats());
    drop(store);
    // A smaller limit holds from the start.
    let small = || over(&far, &dir).disk(tier_dir(&dir), DISK / 4);
    let store = built(small).await;
    assert!(du(&dir) <= DISK / 4, "{}", du(&dir));
    read_all(&store, 20).await;
    assert!(du(&dir) <= DISK / 4, "{}", du(&dir));
}
