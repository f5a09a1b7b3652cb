//! A heap that gives no large blocks: reads and the start of a disk tier do not end the process.

mod common;
#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use common::{Far, content};
use millpond_objects::{CachedStore, Freshness};
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt};
use skip::skip;

const REFUSED_BYTES: usize = 96 << 10;

thread_local! {
    /// Whether the heap refuses large blocks to this thread: others run other tests.
    static IS_SHORT: Cell<bool> = const { Cell::new(false) };
}

struct Heap;

// SAFETY: blocks are the system's, or refused.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= REFUSED_BYTES && IS_SHORT.get() {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's duty.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if bytes >= REFUSED_BYTES.max(layout.size() + 1) && IS_SHORT.get() {
            return std::ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.realloc(block, layout, bytes) }
    }
}

#[global_allocator]
static HEAP: Heap = Heap;

/// Runs `act`, on this thread alone, while the heap refuses large blocks.
async fn short<R>(act: impl Future<Output = R>) -> R {
    IS_SHORT.set(true);
    let done = act.await;
    IS_SHORT.set(false);
    done
}

#[track_caller]
fn assert_no_memory(error: &Error) {
    assert!(error.to_string().contains("(os error 12)"), "{error}");
}

/// Goal: without memory for the bytes of a cached range, the range is requested from the store.
#[tokio::test]
async fn cached_ranges_without_memory_are_requested() {
    let far = Far::default();
    let path = Path::from("object");
    let whole = content(1, 1 << 20);
    far.store.put(&path, whole.clone().into()).await.unwrap();
    let store = CachedStore::builder(Arc::new(far.clone()))
        .memory_bytes(16 << 20)
        .freshness(Freshness::Immutable)
        .build()
        .unwrap();
    let range = 0..whole.len() as u64;
    assert_eq!(store.get_range(&path, range.clone()).await.unwrap(), whole);
    far.gets();
    assert_eq!(store.get_range(&path, range.clone()).await.unwrap(), whole);
    assert_eq!(far.gets().len(), 0, "the range is cached");
    let get_all = async {
        let one = store.get_range(&path, range.clone()).await;
        (one, store.get_ranges(&path, &[range.clone(), 0..10]).await)
    };
    let (one, many) = short(get_all).await;
    assert_eq!(one.unwrap(), whole);
    assert_eq!(many.unwrap()[0], whole);
}

/// Goal: a call whose lists of ranges find no memory fails with ENOMEM, or does without them.
/// Method: each length is too long for one more of the lists that the call makes, cached and not cached.
#[tokio::test]
async fn many_ranges_without_memory_are_an_error() {
    let far = Far::default();
    let whole = content(2, 1 << 20);
    let mut refused = 0;
    for count in [2_100, 3_100, 4_200, 7_000] {
        for freshness in [Freshness::Immutable, Freshness::Revalidate] {
            let path = Path::from(format!("{count}"));
            far.store.put(&path, whole.clone().into()).await.unwrap();
            let builder = CachedStore::builder(Arc::new(far.clone())).memory_bytes(16 << 20);
            let store = builder.freshness(freshness).build().unwrap();
            let ranges: Vec<_> = (0..count).map(|number| number * 100..number * 100 + 10).collect();
            for _ in ["missing", "cached"] {
                match short(store.get_ranges(&path, &ranges)).await {
                    Ok(bytes) => assert_eq!(bytes.len(), ranges.len()),
                    Err(error) => {
                        assert_no_memory(&error);
                        refused += 1;
                    }
                }
                let bytes = store.get_ranges(&path, &ranges).await.unwrap();
                for (range, bytes) in ranges.iter().zip(bytes) {
                    assert_eq!(bytes, whole[range.start as usize..range.end as usize]);
                }
            }
        }
    }
    assert!(refused > 0);
}

/// Goal: a disk tier whose index finds no memory is an error of the store's start.
#[tokio::test]
async fn a_tier_without_memory_is_refused() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let build = || {
        let builder = CachedStore::builder(Arc::new(Far::default())).page_bytes(4096);
        builder.memory_bytes(32 << 20).disk(dir.path().join("tier"), 1 << 30).build()
    };
    match build() {
        Err(error) if error.to_string().contains("direct I/O") => {
            return skip(error);
        }
        built => drop(built.unwrap()),
    }
    let error = short(async { build() }).await.unwrap_err();
    assert!(error.to_string().contains("its index"), "{error}");
    assert_no_memory(&error);
    drop(build().unwrap());
}
