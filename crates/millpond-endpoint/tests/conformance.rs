//! Runs `object_store`'s own test suite through the endpoint, with its client for S3.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::Running;
use millpond_objects::{CachedStore, Freshness};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::{ObjectStore, integration};

/// The tests for every store.
async fn every_store(store: &dyn ObjectStore, has_update: bool) {
    integration::put_get_delete_list(store).await;
    integration::get_opts(store).await;
    // A store without updates answers 501, which the client repeats ten times and reports as another error.
    if has_update {
        integration::put_opts(store, true).await;
    }
    integration::list_uses_directories_correctly(store).await;
    integration::list_with_delimiter(store).await;
    integration::rename_and_copy(store).await;
    integration::copy_if_not_exists(store).await;
    integration::copy_rename_nonexistent_object(store).await;
    integration::stream_get(store).await;
    integration::list_with_offset_exclusivity(store).await;
}

/// Tests that need a store of their own, with metadata.
async fn with_metadata(start: impl Fn() -> Running) {
    integration::put_get_attributes(&start().client()).await;
    integration::multipart_race_condition(&start().client(), true).await;
    integration::multipart_out_of_order(&start().client()).await;
    let running = start();
    let client = running.client();
    integration::multipart(&client, &client).await;
    let running = start();
    let client = running.client();
    integration::multipart_with_opts(&client, &client).await;
    let running = start();
    let client = running.client();
    integration::multipart_put_part_out_of_order(&client, &client).await;
    let running = start();
    let client = running.client();
    integration::list_paginated(&client, &client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_memory() {
    let running = Running::start();
    every_store(&running.client(), true).await;
    with_metadata(Running::start).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_a_unix_socket() {
    let running = Running::start();
    let client = running.local_client();
    integration::put_get_delete_list(&client).await;
    integration::get_opts(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_a_cache() {
    let start = |freshness| {
        let cache = CachedStore::builder(Arc::new(InMemory::new())).memory_bytes(1 << 20);
        let cache = cache.freshness(freshness).build().unwrap();
        Running::start_with(Arc::new(cache), |builder| builder)
    };
    every_store(&start(Freshness::Revalidate).client(), true).await;
    with_metadata(|| start(Freshness::MaxAge(Duration::from_secs(1000)))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_local_files() {
    let dir = tempfile::tempdir().unwrap();
    let local = LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    let running = Running::start_with(Arc::new(local), |builder| builder.drop_metadata());
    every_store(&running.client(), false).await;
}
