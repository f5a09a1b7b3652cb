//! A heap that gives no large blocks: a read of cached bytes does not end the process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use common::{Far, content};
use millpond_objects::{CachedStore, Freshness};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

const REFUSED_BYTES: usize = 96 << 10;

static IS_SHORT: AtomicBool = AtomicBool::new(false);

struct Heap;

// SAFETY: blocks are the system's, or refused.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= REFUSED_BYTES && IS_SHORT.load(SeqCst) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's duty.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static HEAP: Heap = Heap;

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
    IS_SHORT.store(true, SeqCst);
    let one = store.get_range(&path, range.clone()).await;
    let many = store.get_ranges(&path, &[range.clone(), 0..10]).await;
    IS_SHORT.store(false, SeqCst);
    assert_eq!(one.unwrap(), whole);
    assert_eq!(many.unwrap()[0], whole);
}
