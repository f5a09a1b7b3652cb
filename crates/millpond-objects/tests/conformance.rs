//! Runs `object_store`'s own test suite on the cache, over an in-memory store and over local files.

use std::sync::Arc;
use std::time::Duration;

use millpond_objects::{CachedStore, Freshness};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::{ObjectStore, integration};

/// The tested caches: small and large pages, each freshness.
fn caches(store: &Arc<dyn ObjectStore>) -> Vec<CachedStore> {
    let age = Freshness::MaxAge(Duration::from_secs(1000));
    let kinds = [(4096, Freshness::Revalidate), (65536, age), (16384, Freshness::Immutable)];
    let cache = |(page_bytes, freshness)| {
        let builder = CachedStore::builder(Arc::clone(store)).page_bytes(page_bytes);
        builder.freshness(freshness).memory_bytes(1 << 20).build().unwrap()
    };
    kinds.into_iter().map(cache).collect()
}

/// The tests for every store. `has_update`: the store supports conditional replacement.
async fn every_store(store: &CachedStore, has_update: bool) {
    integration::put_get_delete_list(store).await;
    integration::get_opts(store).await;
    integration::put_opts(store, has_update).await;
    integration::list_uses_directories_correctly(store).await;
    integration::list_with_delimiter(store).await;
    integration::rename_and_copy(store).await;
    integration::copy_if_not_exists(store).await;
    integration::copy_rename_nonexistent_object(store).await;
    integration::stream_get(store).await;
}

#[tokio::test]
async fn over_memory() {
    for at in 0..3 {
        let make = || -> Arc<dyn ObjectStore> { Arc::new(InMemory::new()) };
        let fresh = || caches(&make()).swap_remove(at);
        let store = fresh();
        every_store(&store, true).await;
        integration::put_get_attributes(&store).await;
        integration::list_with_offset_exclusivity(&store).await;
        integration::multipart_race_condition(&fresh(), true).await;
        integration::multipart_out_of_order(&fresh()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_local_files() {
    for at in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let local: Arc<dyn ObjectStore> =
            Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap());
        let store = caches(&local).swap_remove(at);
        every_store(&store, false).await;
    }
}
