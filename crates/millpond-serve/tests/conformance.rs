//! Runs `object_store`'s own test suite through a client and its server, over an in-memory store and over local files.

mod common;

use std::sync::Arc;
use std::time::Duration;

use millpond_objects::Freshness;
use millpond_serve::SharedStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::{ObjectStore, integration};

use common::{TestServer, temp_dir};

fn choices() -> [Freshness; 3] {
    let age = Freshness::MaxAge(Duration::from_secs(1000));
    [Freshness::Revalidate, age, Freshness::Immutable]
}

/// The tests for every store. `has_update`: the store supports conditional replacement.
async fn every_store(store: &SharedStore, has_update: bool) {
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

/// A server, and the directory of its socket.
struct Served(#[expect(dead_code)] TestServer, #[expect(dead_code)] tempfile::TempDir);

fn served(store: &Arc<dyn ObjectStore>, freshness: Freshness) -> (SharedStore, Served) {
    let dir = temp_dir();
    let socket = dir.path().join("socket");
    let server = TestServer::start(Arc::clone(store), &socket, freshness);
    (SharedStore::new(Arc::clone(store), socket), Served(server, dir))
}

#[tokio::test]
async fn over_memory() {
    for freshness in choices() {
        let make = || -> Arc<dyn ObjectStore> { Arc::new(InMemory::new()) };
        let (store, _server) = served(&make(), freshness);
        assert!(store.attach().await);
        every_store(&store, true).await;
        integration::put_get_attributes(&store).await;
        integration::list_with_offset_exclusivity(&store).await;
        let (store, _server) = served(&make(), freshness);
        integration::multipart_race_condition(&store, true).await;
        let (store, _server) = served(&make(), freshness);
        integration::multipart_out_of_order(&store).await;
        let stats = store.stats();
        assert!(stats.is_attached && stats.fallbacks == 0, "{stats:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_local_files() {
    for freshness in choices() {
        let dir = temp_dir();
        let local: Arc<dyn ObjectStore> =
            Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap());
        let (store, _server) = served(&local, freshness);
        every_store(&store, false).await;
        let stats = store.stats();
        assert!(stats.is_attached && stats.fallbacks == 0 && stats.attaches == 1, "{stats:?}");
    }
}
