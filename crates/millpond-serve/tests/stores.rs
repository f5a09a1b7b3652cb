//! Several stores behind one cache: each client reads its own, and the others are refused.

mod common;

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt};
use millpond_objects::{CachedStore, Freshness};
use millpond_serve::{MemoryChoice, Server, SharedStore, StoreSet, store_name};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{CopyOptions, Error, ObjectStore, ObjectStoreExt};

use common::{Far, content, temp_dir};

/// A server of `stores`. Ends with the returned task.
fn start(
    stores: &StoreSet,
    socket: &std::path::Path,
) -> (CachedStore, tokio::task::JoinHandle<()>) {
    let cache = CachedStore::builder(Arc::new(stores.clone())).memory_bytes(64 << 20);
    let cache = cache.freshness(Freshness::Immutable).shared(MemoryChoice::Small).build().unwrap();
    let server = Server::bind_stores(cache.clone(), stores, socket).unwrap();
    (cache, tokio::spawn(async move { server.run().await.unwrap() }))
}

/// Goal: two stores with objects of the same names are never mixed up, by the clients and by their writes. A client of a
/// store that the server does not have reads its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_client_reads_its_store() {
    let (dir, far) = (temp_dir(), Far::default());
    let socket = dir.path().join("socket");
    let local: Arc<dyn ObjectStore> =
        Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap());
    let remote: Arc<dyn ObjectStore> = Arc::new(far.clone());
    let stores = StoreSet::default().with(Arc::clone(&remote)).unwrap();
    let stores = stores.with(Arc::clone(&local)).unwrap();
    let (cache, serving) = start(&stores, &socket);
    let both = [Arc::clone(&remote), Arc::clone(&local)];
    let clients = both.clone().map(|store| SharedStore::new(store, &socket));
    let views = [0, 1].map(|number| stores.view(number, Arc::new(cache.clone())));
    let path = Path::from("a b/pond");
    for round in 0..4 {
        for (number, client) in clients.iter().enumerate() {
            let bytes = content(2 * round + number as u64, 200_000);
            match round % 2 {
                0 => client.put(&path, bytes.clone().into()).await.unwrap(),
                _ => views[number].put(&path, bytes.clone().into()).await.unwrap(),
            };
            for _ in 0..2 {
                assert!(
                    client.get_range(&path, 10..150_000).await.unwrap()[..] == bytes[10..150_000]
                );
                let read = views[number].get(&path).await.unwrap();
                assert_eq!(read.meta.location, path);
                assert!(read.bytes().await.unwrap()[..] == bytes[..]);
            }
            assert!(both[number].get(&path).await.unwrap().bytes().await.unwrap()[..] == bytes[..]);
        }
    }
    for client in &clients {
        let stats = client.stats();
        assert!(stats.is_attached && stats.fallbacks == 0 && stats.hits >= 4, "{stats:?}");
    }
    // New clients know the objects of their own stores.
    for store in &both {
        let client = SharedStore::new(Arc::clone(store), &socket);
        assert!(client.attach().await);
        let read = client.get_range(&path, 10..150_000).await.unwrap();
        let stored = store.get_range(&path, 10..150_000).await.unwrap();
        assert!(read == stored);
        assert_eq!((client.stats().hits, client.stats().requests), (1, 0));
    }
    // Cached bytes cause no request, by a client or by a view.
    far.gets();
    clients[0].get_range(&path, 0..100).await.unwrap();
    views[0].get_range(&path, 0..100).await.unwrap();
    assert_eq!(far.gets(), []);

    let missing = clients[1].get(&Path::from("none")).await.unwrap_err();
    assert!(
        matches!(&missing, Error::NotFound { path, .. } if !path.contains("StoreSet")),
        "{missing}"
    );
    clients[0].delete(&path).await.unwrap();
    assert!(matches!(views[0].get(&path).await.unwrap_err(), Error::NotFound { .. }));
    views[1].get(&path).await.unwrap();

    let other: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    let stranger = SharedStore::new(Arc::clone(&other), &socket);
    other.put(&path, "its own".into()).await.unwrap();
    assert_eq!(stranger.get(&path).await.unwrap().bytes().await.unwrap(), "its own");
    assert!(!stranger.stats().is_attached && stranger.stats().fallbacks > 0);
    serving.abort();
}

/// Goal: objects outside of the prefixes are read from the client's own store, and refused by views, whose lists have the
/// objects below the prefixes and no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_limit_what_is_served() {
    let (dir, far) = (temp_dir(), Far::default());
    let socket = dir.path().join("socket");
    let remote: Arc<dyn ObjectStore> = Arc::new(far.clone());
    for name in ["a/1", "a/b/2", "ab/3", "c/d/4", "c/e/5", "6"] {
        remote.put(&Path::from(name), name.into()).await.unwrap();
    }
    let prefixes = ["a", "a/b", "c/d", "c/none"].map(Path::from);
    let stores = StoreSet::default().with_prefixes(Arc::clone(&remote), prefixes).unwrap();
    let (cache, serving) = start(&stores, &socket);
    let client = SharedStore::new(remote, &socket);
    let view = stores.view(0, Arc::new(cache));
    for (name, is_inside) in [("a/1", true), ("a/b/2", true), ("ab/3", false), ("6", false)] {
        let path = Path::from(name);
        for _ in 0..2 {
            assert_eq!(client.get_range(&path, 0..1).await.unwrap()[..], name.as_bytes()[..1]);
        }
        let read = view.get(&path).await;
        assert_eq!(read.is_ok(), is_inside, "{name}");
        let written = view.put(&path, name.into()).await;
        let copied = view.copy_opts(&Path::from("a/1"), &path, CopyOptions::default()).await;
        for outcome in [read.map(drop), written.map(drop), copied] {
            let is_denied = matches!(outcome, Err(Error::PermissionDenied { .. }));
            assert_eq!(is_denied, !is_inside, "{name}: {outcome:?}");
        }
        view.put(&Path::from("a/1"), "a/1".into()).await.unwrap();
        client.put(&path, name.into()).await.unwrap();
    }
    let stats = client.stats();
    assert_eq!((stats.hits, stats.bypassed, stats.fallbacks), (2, 4, 0), "{stats:?}");
    let names = |prefix: Option<&str>| {
        let listed = view.list(prefix.map(Path::from).as_ref());
        async move {
            let all: Vec<_> =
                listed.map_ok(|meta| meta.location.to_string()).try_collect().await.unwrap();
            let mut all = all;
            all.sort();
            all.join(" ")
        }
    };
    assert_eq!(names(None).await, "a/1 a/b/2 c/d/4");
    assert_eq!(names(Some("a")).await, "a/1 a/b/2");
    assert_eq!(names(Some("a/b")).await, "a/b/2");
    assert_eq!(names(Some("c")).await, "c/d/4");
    assert_eq!(names(Some("ab")).await, "");
    let folders = async |prefix: Option<&str>| {
        let found = view.list_with_delimiter(prefix.map(Path::from).as_ref()).await.unwrap();
        let folders: Vec<_> = found.common_prefixes.iter().map(|path| path.to_string()).collect();
        let objects = found.objects.iter().map(|meta| meta.location.to_string());
        format!("{} | {}", folders.join(" "), objects.collect::<Vec<_>>().join(" "))
    };
    assert_eq!(folders(None).await, "a c | ");
    assert_eq!(folders(Some("a")).await, "a/b | a/1");
    assert_eq!(folders(Some("c")).await, "c/d | ");
    assert_eq!(folders(Some("ab")).await, " | ");
    serving.abort();
}

/// Goal: a disk tier stays warm when a store is added before the others, and a store with the same names reads its own bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_tier_survives_another_order() {
    let (dir, far) = (temp_dir(), Far::default());
    let remote: Arc<dyn ObjectStore> = Arc::new(far.clone());
    let path = Path::from("pond");
    let bytes = content(1, 400_000);
    remote.put(&path, bytes.clone().into()).await.unwrap();
    let built = async |set: &StoreSet| loop {
        let cache = CachedStore::builder(Arc::new(set.clone())).memory_bytes(64 << 20);
        let cache = cache.freshness(Freshness::Immutable).shared(MemoryChoice::Small);
        match cache.disk(dir.path().join("tier"), 64 << 20).build() {
            // Tasks of the cache before have its directory for a moment.
            Err(error) if error.to_string().contains("another store") => {
                tokio::task::yield_now().await;
            }
            built => break built.unwrap(),
        }
    };
    let one = StoreSet::default().with(Arc::clone(&remote)).unwrap();
    let cache = built(&one).await;
    let read = one.view(0, Arc::new(cache.clone())).get(&path).await.unwrap();
    assert!(read.bytes().await.unwrap()[..] == bytes[..]);
    drop(cache);

    let objects = dir.path().join("objects");
    std::fs::create_dir(&objects).unwrap();
    let local: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new_with_prefix(&objects).unwrap());
    let others = content(2, 400_000);
    local.put(&path, others.clone().into()).await.unwrap();
    let two = StoreSet::default().with(local).unwrap().with(remote).unwrap();
    let cache = built(&two).await;
    for (number, bytes) in [(0, &others), (1, &bytes)] {
        let before = cache.stats().bytes_from_disk;
        let view = two.view(number, Arc::new(cache.clone()));
        // The first request finds the version.
        for start in (0..400_000).step_by(50_000) {
            let read = view.get_range(&path, start..start + 50_000).await.unwrap();
            assert!(read[..] == bytes[start as usize..][..50_000], "store {number} at {start}");
        }
        let from_disk = cache.stats().bytes_from_disk - before;
        assert_eq!(from_disk > 200_000, number == 1, "store {number}: {from_disk} bytes");
    }
}

/// Goal: deletions of several stores reach theirs, in order, and an error of one stops no other.
#[tokio::test]
async fn deletions_reach_their_stores() {
    let dir = temp_dir();
    let local: Arc<dyn ObjectStore> =
        Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap());
    let remote: Arc<dyn ObjectStore> = Arc::new(Far::default());
    let set =
        StoreSet::default().with(Arc::clone(&remote)).unwrap().with(Arc::clone(&local)).unwrap();
    let all: Arc<dyn ObjectStore> = Arc::new(set.clone());
    let views = [0, 1].map(|number| set.view(number, Arc::clone(&all)));
    let mut expected = Vec::new();
    for name in ["1", "2", "3"] {
        for view in &views {
            view.put(&Path::from(name), name.into()).await.unwrap();
        }
    }
    let listed: Vec<_> = all.list(None).map_ok(|meta| meta.location).try_collect().await.unwrap();
    assert_eq!(listed.len(), 6);
    let mut locations = Vec::new();
    for location in listed {
        expected.push(location.to_string());
        locations.push(Ok(location));
    }
    locations.insert(3, Ok(Path::from("no store/1")));
    let deleted: Vec<_> =
        all.delete_stream(futures_util::stream::iter(locations).boxed()).collect().await;
    let names = deleted.iter().flatten().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(names, expected);
    let error = deleted[3].as_ref().unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    for store in [&remote, &local] {
        assert!(store.list(None).next().await.is_none());
    }
    let twice = set.with(remote).unwrap_err();
    assert!(matches!(twice, Error::AlreadyExists { .. }), "{twice}");
    let across = [Path::from("far/1"), locations_of(&local)];
    let copied = all.copy_opts(&across[0], &across[1], CopyOptions::default()).await.unwrap_err();
    assert!(matches!(copied, Error::NotSupported { .. }), "{copied}");
}

/// An object of a store, by its name in a set.
fn locations_of(store: &Arc<dyn ObjectStore>) -> Path {
    Path::from_iter([store.to_string(), "1".into()])
}

/// Incident: a bucket of a test server has the name of another one, and a client was given the other one's bytes.
///
/// Goal: a server is used by the clients that name its store as it does, and by no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_elsewhere_is_another_store() {
    let dir = temp_dir();
    let socket = dir.path().join("socket");
    let (own, other) = (Far::default(), Far::default());
    let path = Path::from("pond");
    own.put(&path, "own".into()).await.unwrap();
    other.put(&path, "other".into()).await.unwrap();
    let name = store_name(&other, Some("http://[::1]:9000"));
    let stores = StoreSet::default().with_named(name.clone(), Arc::new(other.clone()), []).unwrap();
    let (_cache, serving) = start(&stores, &socket);
    let unnamed = SharedStore::new(Arc::new(own), &socket);
    assert_eq!(unnamed.get_range(&path, 0..3).await.unwrap(), "own");
    assert!(
        unnamed.attach_failure().unwrap().to_string().contains(&name) && !unnamed.is_attached()
    );
    let named = SharedStore::new(Arc::new(other), &socket).named(name);
    assert_eq!(named.get_range(&path, 0..5).await.unwrap(), "other");
    assert!(named.is_attached());
    serving.abort();
}
