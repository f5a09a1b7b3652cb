//! Tests that hits leave the reference count of an entry alone: changing it would be a write to shared memory.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use futures_util::FutureExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::{CachedStore, Freshness};

/// Goal: reads of cached ranges do not write to memory that threads share, the entry's reference count included.
/// Method: two threads read while a third samples that count, some 10^5 times. One reference more would show.
#[tokio::test]
async fn hits_add_no_owner() {
    let far = Arc::new(InMemory::new());
    let path = Path::from("object");
    let bytes: Vec<u8> = (0..100_000u32).map(|at| (at / 9) as u8).collect();
    far.put(&path, bytes.clone().into()).await.unwrap();
    let store = CachedStore::builder(far).memory_bytes(4 << 20).freshness(Freshness::Immutable);
    let store = store.build().unwrap();
    store.get_range(&path, 0..100_000).await.unwrap();
    let directory = &store.inner.directory;
    let owners = || directory.with_entry(path.as_ref(), Arc::strong_count).unwrap();
    let (expected, is_over) = (owners(), AtomicBool::new(false));
    let requests = store.stats().requests;
    let most = |read: &(dyn Fn(u64) + Sync)| {
        is_over.store(false, Relaxed);
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut most = 0;
                while !is_over.load(Relaxed) {
                    most = most.max(owners());
                }
                most
            });
            let read = |seed| move || (0..20_000u64).for_each(|number| read(number * 2 + seed));
            let readers = [0, 1].map(|seed| scope.spawn(read(seed)));
            readers.into_iter().for_each(|reader| reader.join().unwrap());
            is_over.store(true, Relaxed);
            watch.join().unwrap()
        })
    };
    let read = |number: u64| {
        let range = |number: u64| {
            let start = number * 977 % 90_000;
            start..start + 5000
        };
        let one = store.get_range(&path, range(number)).now_or_never().expect("a hit").unwrap();
        let at = range(number).start as usize;
        assert_eq!(one, bytes[at..at + 5000]);
        let ranges = [range(number + 1), range(number + 5)];
        let some = store.get_ranges(&path, &ranges).now_or_never().expect("hits").unwrap();
        let at = ranges[1].start as usize;
        assert_eq!(some[1], bytes[at..at + 5000]);
    };
    assert_eq!(most(&read), expected, "reads own the entry");
    assert_eq!(store.stats().requests, requests, "all were hits");
    let _owner = directory.find(path.as_ref());
    assert_eq!(owners(), expected + 1, "an owner is seen");
}
