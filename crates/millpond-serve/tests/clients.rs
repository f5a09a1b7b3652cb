//! Clients and a server in one process: hits, misses, writes, and what happens without a server.

mod common;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt};
use millpond_objects::Freshness;
use millpond_serve::SharedStore;
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, MultipartUpload, ObjectStore, ObjectStoreExt};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use common::{Far, TestServer, content, temp_dir, wait_until};

fn far() -> (Far, Arc<dyn ObjectStore>) {
    let far = Far::default();
    (far.clone(), Arc::new(far))
}

/// Goal: bytes that one client has read are hits of the others, and all of them see a write of one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_share_what_one_has_read() {
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let server = TestServer::start(Arc::clone(&store), &socket, Freshness::Immutable);
    let clients = [0; 3].map(|_| SharedStore::new(Arc::clone(&store), &socket));
    let (path, bytes) = (Path::from("a/pond"), content(1, 1_000_000));
    clients[0].put(&path, bytes.clone().into()).await.unwrap();
    for (number, client) in clients.iter().enumerate() {
        for start in (0..900_000).step_by(50_000) {
            let read = client.get_range(&path, start..start + 70_000).await.unwrap();
            assert!(read[..] == bytes[start as usize..][..70_000]);
        }
        let meta = client.head(&path).await.unwrap();
        assert_eq!((meta.size, &meta.location), (1_000_000, &path));
        let requests = far.gets().len();
        assert_eq!(requests > 0, number == 0, "{requests} requests of client {number}");
    }
    for client in &clients[1..] {
        let before = client.stats();
        let read = client.get_range(&path, 5..100_000).await.unwrap();
        assert!(read[..] == bytes[5..100_000]);
        let stats = client.stats();
        assert_eq!((stats.hits, stats.requests), (before.hits + 1, before.requests));
    }
    // The server counts a client after it has greeted it.
    wait_until(Duration::from_secs(1), "all are attached", || server.handle.clients() == 3);
    // A write through one client.
    let newer = content(2, 5000);
    clients[1].put(&path, newer.clone().into()).await.unwrap();
    for client in &clients {
        assert!(client.get(&path).await.unwrap().bytes().await.unwrap()[..] == newer[..]);
    }
    clients[2].delete(&path).await.unwrap();
    for client in &clients {
        let gone = client.get(&path).await.unwrap_err();
        assert!(matches!(gone, Error::NotFound { .. }), "{gone}");
    }
    // A server notices the end of clients.
    drop(clients);
    let until = Instant::now() + Duration::from_secs(1);
    while server.handle.clients() > 0 {
        assert!(Instant::now() < until, "the clients are gone for a second");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A socket that takes connections and sends nothing.
fn silent_listener(path: &std::path::Path) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 64).unwrap();
    socket
}

async fn text_at(store: &SharedStore, path: &Path) -> bytes::Bytes {
    store.get(path).await.unwrap().bytes().await.unwrap()
}

/// Incident: a write between two attempts to attach sent no message, so later reads returned the old version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_reaches_a_server_that_has_replaced_a_silent_one() {
    let (dir, (_, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let silent = silent_listener(&socket);
    let [writer, reader] = [0; 2].map(|_| SharedStore::new(Arc::clone(&store), &socket));
    let path = Path::from("pond");
    store.put(&path, "one".into()).await.unwrap();
    assert!(!writer.attach().await);
    let failure = writer.attach_failure().unwrap();
    assert_eq!(failure.kind(), std::io::ErrorKind::TimedOut, "{failure}");
    std::fs::remove_file(&socket).unwrap();
    drop(silent);
    let _server = TestServer::start(Arc::clone(&store), &socket, Freshness::Immutable);
    assert_eq!(text_at(&reader, &path).await, "one");
    writer.put(&path, "two".into()).await.unwrap();
    assert_eq!(text_at(&reader, &path).await, "two");
    assert_eq!(text_at(&writer, &path).await, "two");
    assert_eq!((writer.is_attached(), reader.stats().fallbacks), (true, 0));
}

/// Goal: a server receives the names of earlier writes before their client reads by it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn earlier_writes_reach_a_server_before_it_is_used() {
    let (dir, (_, store)) = (temp_dir(), far());
    let [live, used] = ["live", "used"].map(|name| dir.path().join(name));
    let _silent = silent_listener(&used);
    let _server = TestServer::start(Arc::clone(&store), &live, Freshness::Immutable);
    let reader = SharedStore::new(Arc::clone(&store), &live);
    let writer = SharedStore::new(Arc::clone(&store), &used);
    let [path, dropped] = ["pond", "lake"].map(Path::from);
    for path in [&path, &dropped] {
        store.put(path, "one".into()).await.unwrap();
        assert_eq!(text_at(&reader, path).await, "one");
    }
    writer.put(&path, "two".into()).await.unwrap();
    let mut upload = writer.put_multipart(&dropped).await.unwrap();
    upload.put_part("two".into()).await.unwrap();
    upload.complete().await.unwrap();
    drop(upload);
    assert!(!writer.is_attached());
    // As a server that is slow, and then goes on.
    std::fs::rename(&live, &used).unwrap();
    writer.forget(&Path::from("another")).await;
    assert!(writer.is_attached());
    for path in [&path, &dropped] {
        assert_eq!(text_at(&reader, path).await, "two");
        assert_eq!(text_at(&writer, path).await, "two");
    }
}

/// Incident: a runtime without I/O panicked at each read that missed.
#[test]
fn a_runtime_without_io_reads_by_the_links_thread() {
    static PANICS: AtomicU64 = AtomicU64::new(0);
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let server = TestServer::start(Arc::clone(&store), &socket, Freshness::Immutable);
    let client = SharedStore::new(store, &socket);
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.to_string().contains("IO is disabled") {
            PANICS.fetch_add(1, Relaxed);
        } else {
            previous(info);
        }
    }));
    runtime.block_on(async {
        for number in 0..20 {
            let path = Path::from(format!("pond/{number}"));
            far.store.put(&path, "water".into()).await.unwrap();
            // By a task, so on a thread of the runtime.
            let client = client.clone();
            let reading = tokio::spawn(async move { client.get_range(&path, 0..5).await });
            assert_eq!(reading.await.unwrap().unwrap(), "water");
        }
    });
    let (panics, stats) = (PANICS.load(Relaxed), client.stats());
    assert_eq!((stats.requests, stats.fallbacks), (20, 0), "{stats:?}");
    // One panic says that the runtime has no I/O.
    assert!(panics <= 1, "{panics} panics");
    drop(server);
}

/// Goal: a new client hits objects that are cached, without a request for each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_clients_know_the_cached_objects() {
    const OBJECTS: u64 = 200;
    let name = |object| Path::from(format!("set/{object}"));
    for freshness in [Freshness::Immutable, Freshness::MaxAge(Duration::from_secs(100))] {
        let (dir, (_, store)) = (temp_dir(), far());
        let socket = dir.path().join("socket");
        let _server = TestServer::start(Arc::clone(&store), &socket, freshness);
        let [first, second] = [0; 2].map(|_| SharedStore::new(Arc::clone(&store), &socket));
        for object in 0..OBJECTS {
            first.put(&name(object), content(object, 3000).into()).await.unwrap();
            first.get_range(&name(object), 0..3000).await.unwrap();
        }
        assert!(second.attach().await);
        // The second client has the place of the old version.
        first.put(&name(7), content(1000, 3000).into()).await.unwrap();
        for object in 0..OBJECTS {
            let read = second.get_range(&name(object), 0..3000).await.unwrap();
            let seed = if object == 7 { 1000 } else { object };
            assert!(read[..] == content(seed, 3000)[..], "{object}");
        }
        let stats = second.stats();
        assert_eq!((stats.hits, stats.requests), (OBJECTS - 1, 1), "{stats:?}");
    }
}

/// Goal: a version may be served as long as the server's freshness says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn freshness_is_the_servers() {
    for (freshness, requests) in [
        (Freshness::Immutable, 1),
        (Freshness::MaxAge(Duration::from_secs(100)), 1),
        (Freshness::Revalidate, 6),
    ] {
        let (dir, (far, store)) = (temp_dir(), far());
        let socket = dir.path().join("socket");
        let _server = TestServer::start(Arc::clone(&store), &socket, freshness);
        let client = SharedStore::new(Arc::clone(&store), &socket);
        let path = Path::from("pond");
        far.store.put(&path, "water".into()).await.unwrap();
        for _ in 0..3 {
            assert_eq!(client.get_range(&path, 0..3).await.unwrap(), "wat");
            assert_eq!(client.get_ranges(&path, &[1..2, 3..5]).await.unwrap(), ["a", "er"]);
        }
        assert_eq!(far.gets().len(), requests, "{freshness:?}");
    }
    // An age that passes.
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let age = Duration::from_millis(300);
    let _server = TestServer::start(Arc::clone(&store), &socket, Freshness::MaxAge(age));
    let client = SharedStore::new(Arc::clone(&store), &socket);
    let path = Path::from("pond");
    far.store.put(&path, "water".into()).await.unwrap();
    client.get_range(&path, 0..3).await.unwrap();
    far.store.put(&path, "lilies".into()).await.unwrap();
    let started = Instant::now();
    let read = client.get_range(&path, 0..3).await.unwrap();
    assert!(read == "wat" || started.elapsed() > age / 2);
    tokio::time::sleep(age).await;
    assert_eq!(client.get_range(&path, 0..3).await.unwrap(), "lil");
}

/// Goal: long reads are whole and of one version, in any form.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_reads_are_whole() {
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    // Room for a third of the object.
    let _server =
        TestServer::with_memory(Arc::clone(&store), &socket, Freshness::Revalidate, 8 << 20);
    let client = SharedStore::new(Arc::clone(&store), &socket);
    let (path, bytes) = (Path::from("pond"), content(1, 20_000_000));
    far.store.put(&path, bytes.clone().into()).await.unwrap();
    for _ in 0..2 {
        let read = client.get(&path).await.unwrap();
        assert_eq!(read.range, 0..20_000_000);
        assert!(read.bytes().await.unwrap()[..] == bytes[..]);
        for (range, expected) in [
            (GetRange::Offset(7), 7..20_000_000),
            (GetRange::Suffix(9_000_001), 10_999_999..20_000_000),
            (GetRange::Bounded(5..19_000_000), 5..19_000_000),
            (GetRange::Bounded(19_999_999..30_000_000), 19_999_999..20_000_000),
        ] {
            let options = GetOptions::new().with_range(Some(range.clone()));
            let read = client.get_opts(&path, options).await.unwrap();
            assert_eq!(read.range, expected, "{range:?}");
            let expected = expected.start as usize..expected.end as usize;
            assert!(read.bytes().await.unwrap()[..] == bytes[expected], "{range:?}");
        }
        let ranges = [3..9_000_000, 8_000_000..8_000_001, 19_000_000..30_000_000];
        let read = client.get_ranges(&path, &ranges).await.unwrap();
        assert!(read[0][..] == bytes[3..9_000_000] && read[2][..] == bytes[19_000_000..]);
        assert_eq!(read[1].len(), 1);
    }
    assert_eq!(client.stats().fallbacks, 0);
    // Replaced during the read.
    let mut stream = client.get(&path).await.unwrap().into_stream();
    let first = stream.next().await.unwrap().unwrap();
    assert!(first[..] == bytes[..first.len()]);
    far.store.put(&path, content(2, 20_000_000).into()).await.unwrap();
    let rest: Result<Vec<_>, Error> = stream.try_collect().await;
    assert!(matches!(rest, Err(Error::Precondition { .. })));
}

/// Incident: the rest of a read from the store, after the end of the server, could end early without an error, or never.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rest_of_a_read_from_the_store_is_whole() {
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let freshness = Freshness::Immutable;
    let server = TestServer::with_memory(Arc::clone(&store), &socket, freshness, 8 << 20);
    let client = SharedStore::new(Arc::clone(&store), &socket);
    let (path, bytes) = (Path::from("pond"), content(1, 20_000_000));
    far.store.put(&path, bytes.clone().into()).await.unwrap();
    let mut stream = client.get(&path).await.unwrap().into_stream();
    assert!(!stream.next().await.unwrap().unwrap().is_empty());
    server.stop();
    far.faults.lacks_last_byte.store(true, Relaxed);
    let rest: Result<Vec<_>, Error> = stream.try_collect().await;
    let error = rest.unwrap_err().to_string();
    assert!(error.contains("pond: ") && error.contains(" bytes were received of "), "{error}");
    let taken = far.faults.empty_pieces.load(Relaxed);
    assert!((1..100).contains(&taken), "{taken} empty pieces");
}

/// Goal: a range that is much longer than the object takes no more requests and memory than the object.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_range_may_be_longer_than_the_object() {
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let _server = TestServer::start(Arc::clone(&store), &socket, Freshness::Immutable);
    let (path, bytes) = (Path::from("pond"), content(1, 5_000_000));
    far.store.put(&path, bytes.clone().into()).await.unwrap();
    // Of an unknown object, of a known one, and of one whose bytes are cached.
    for (end, requests) in [(1 << 40, 3), (u64::MAX, 0), (u64::MAX, 0)] {
        let client = SharedStore::new(Arc::clone(&store), &socket);
        if requests == 0 {
            client.head(&path).await.unwrap();
        }
        let read = client.get_ranges(&path, &[7..end, 3..9, 4_999_999..end]).await.unwrap();
        assert!(read[0][..] == bytes[7..] && read[1][..] == bytes[3..9]);
        assert!(read[2][..] == bytes[4_999_999..]);
        let stats = client.stats();
        assert!(stats.requests <= 3 && stats.bypassed == 0, "{stats:?}");
        let beyond = client.get_ranges(&path, &[3..9, 5_000_000..end]).await;
        assert!(beyond.is_err());
    }
}

/// Goal: a long read is of one version, or fails, where nothing names the version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_reads_without_names_of_versions_are_of_one() {
    const BYTES: usize = 10_000_000;
    for (freshness, stops) in [
        (Freshness::Revalidate, false),
        (Freshness::Immutable, false),
        (Freshness::Immutable, true),
    ] {
        let (dir, (far, store)) = (temp_dir(), far());
        far.faults.without_tags.store(true, Relaxed);
        let socket = dir.path().join("socket");
        let server = TestServer::start(Arc::clone(&store), &socket, freshness);
        let client = SharedStore::new(Arc::clone(&store), &socket);
        let (path, old) = (Path::from("pond"), content(1, BYTES));
        far.store.put(&path, old.clone().into()).await.unwrap();
        let options = GetOptions::new().with_range(Some(GetRange::Bounded(0..BYTES as u64)));
        let mut stream = client.get_opts(&path, options).await.unwrap().into_stream();
        let mut all = stream.next().await.unwrap().unwrap().to_vec();
        far.store.put(&path, content(2, BYTES).into()).await.unwrap();
        if stops {
            server.stop();
        } else {
            client.forget(&path).await;
        }
        while let Some(Ok(bytes)) = stream.next().await {
            all.extend_from_slice(&bytes);
        }
        assert!(old.starts_with(&all), "{freshness:?}: bytes of two versions");
    }
}

/// Goal: without a server all goes to the store. A server that appears is used within a second, and one that goes away
/// holds nothing up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_come_and_go() {
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let client = SharedStore::new(Arc::clone(&store), &socket);
    let (path, bytes) = (Path::from("pond"), content(1, 200_000));
    client.put(&path, bytes.clone().into()).await.unwrap();
    let read = async || {
        let started = Instant::now();
        let read = client.get_range(&path, 100..150_000).await.unwrap();
        assert!(read[..] == bytes[100..150_000]);
        assert!(started.elapsed() < Duration::from_millis(100), "{:?}", started.elapsed());
    };
    read().await;
    let stats = client.stats();
    assert!(!stats.is_attached && stats.fallbacks == 1 && stats.attaches == 0, "{stats:?}");
    for round in 1..=3 {
        let server = TestServer::start(Arc::clone(&store), &socket, Freshness::Immutable);
        let started = Instant::now();
        while client.stats().attaches < round {
            read().await;
            assert!(started.elapsed() < Duration::from_secs(1));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        read().await;
        let hits = client.stats().hits;
        read().await;
        assert_eq!(client.stats().hits, hits + 1);
        server.stop();
        let fallbacks = client.stats().fallbacks;
        // The client may hit until its thread has seen the end of the socket.
        while client.stats().fallbacks == fallbacks {
            read().await;
        }
        assert!(!client.stats().is_attached);
        assert!(!socket.exists());
    }
    far.gets();
    read().await;
    assert_eq!(far.gets().len(), 1);
}

/// Goal: a server that is there but caches another store, or does not answer, is not used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_servers_are_not_used() {
    let (dir, (_, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let memory: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    let server = TestServer::start(memory, &socket, Freshness::Immutable);
    let client = SharedStore::new(Arc::clone(&store), &socket);
    assert!(client.is_attach_due());
    assert!(!client.attach().await && !client.is_attached() && !client.is_attach_due());
    let failure = client.attach_failure().unwrap().to_string();
    assert!(failure.contains("InMemory"), "{failure}");
    let path = Path::from("pond");
    client.put(&path, "water".into()).await.unwrap();
    assert_eq!(client.get_range(&path, 0..3).await.unwrap(), "wat");
    drop(server);
    // A socket that accepts, and is silent.
    let (listener, silent) = (dir.path().join("silent"), rustix::net::SocketType::SEQPACKET);
    let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, silent, None).unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&listener).unwrap()).unwrap();
    rustix::net::listen(&socket, 5).unwrap();
    let client = SharedStore::new(store, &listener);
    let started = Instant::now();
    assert_eq!(client.get_range(&path, 0..3).await.unwrap(), "wat");
    assert!(started.elapsed() < Duration::from_secs(2));
    let started = Instant::now();
    assert_eq!(client.get_range(&path, 0..3).await.unwrap(), "wat");
    assert!(started.elapsed() < Duration::from_millis(500), "it is not asked again at once");
}

/// Goal: a server that validates less often than a client wants is not used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stricter_clients_do_not_use_a_server() {
    use Freshness::{Immutable, MaxAge, Revalidate};
    let age = |seconds| MaxAge(Duration::from_secs(seconds));
    for (server, wanted, is_used) in [
        (Immutable, Immutable, true),
        (Revalidate, Immutable, true),
        (age(30), age(30), true),
        (age(31), age(30), false),
        (Immutable, age(30), false),
        (age(1), Revalidate, false),
        (Revalidate, Revalidate, true),
    ] {
        let (dir, (_, store)) = (temp_dir(), far());
        let socket = dir.path().join("socket");
        let client = SharedStore::new(Arc::clone(&store), &socket).require_freshness(wanted);
        assert!(!client.attach().await);
        assert_eq!(client.attach_failure().unwrap().kind(), std::io::ErrorKind::NotFound);
        let _server = TestServer::start(Arc::clone(&store), &socket, server);
        let client = SharedStore::new(store, &socket).require_freshness(wanted);
        assert_eq!(client.attach().await, is_used, "{server:?} {wanted:?}");
        let failure = client.attach_failure().map(|error| error.to_string());
        assert_eq!(failure.is_none(), is_used, "{failure:?}");
    }
}

/// Goal: reads with extensions go to the client's own store. A program may choose other reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_program_chooses_which_reads_are_cached() {
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let _server = TestServer::start(Arc::clone(&store), &socket, Freshness::Immutable);
    let (path, log) = (Path::from("pond"), Path::from("log"));
    for path in [&path, &log] {
        far.store.put(path, "water".into()).await.unwrap();
    }
    let tagged = |tag: &str| {
        let mut options = GetOptions::new().with_range(Some(0..3));
        options.extensions.insert(tag.to_owned());
        options
    };
    let plain = SharedStore::new(Arc::clone(&store), &socket);
    let choosing = SharedStore::new(Arc::clone(&store), &socket).cache_if(|location, options| {
        let tag = options.extensions.get::<String>();
        location.filename() != Some("log") && tag.is_none_or(|tag| tag == "read")
    });
    for (client, path, tag, hits, requests) in [
        (&plain, &path, "read", 0, 3),
        (&choosing, &path, "read", 2, 1),
        (&choosing, &path, "read again", 2, 3),
        (&choosing, &log, "read", 2, 3),
    ] {
        for _ in 0..3 {
            let read = client.get_opts(path, tagged(tag)).await.unwrap();
            assert_eq!(read.bytes().await.unwrap(), "wat");
        }
        assert_eq!(client.stats().hits, hits, "{path}: {tag}");
        assert_eq!(far.gets().len(), requests, "{path}: {tag}");
    }
    choosing.get_ranges(&path, &[0..1, 2..3]).await.unwrap();
    assert_eq!(choosing.stats().hits, 3);
    choosing.get_ranges(&log, &[0..1, 2..3]).await.unwrap();
    assert_eq!(choosing.stats().hits, 3);
}

/// Goal: cached and fresh bytes are copied to the caller's memory, and no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_bytes_are_copied_to_memory_of_the_caller() {
    let (dir, (_, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let _server = TestServer::start(Arc::clone(&store), &socket, Freshness::Immutable);
    let client = SharedStore::new(store, &socket);
    let (path, bytes) = (Path::from("pond"), content(1, 1_000_000));
    client.put(&path, bytes.clone().into()).await.unwrap();
    let mut memory = vec![std::mem::MaybeUninit::uninit(); 700_000];
    assert_eq!(client.cached_size(&path), None);
    assert_eq!(client.try_read_into(&path, &mut memory, 0), None);
    client.get_range(&path, 200_000..900_000).await.unwrap();
    assert_eq!(client.cached_size(&path), Some(1_000_000));
    let hits = client.stats().hits;
    assert_eq!(client.try_read_into(&path, &mut memory, 200_000), Some(1_000_000));
    assert_eq!(client.stats().hits, hits + 1);
    // SAFETY: written by the hit.
    let read: Vec<u8> = memory.iter().map(|byte| unsafe { byte.assume_init() }).collect();
    assert!(read == bytes[200_000..900_000]);
    assert_eq!(client.try_read_into(&path, &mut memory, 300_001), None, "beyond the end");
    let (one, other) = memory.split_at_mut(100_000);
    let mut ranges = [(700_000, one), (200_000, &mut other[..1000])];
    assert_eq!(client.try_read_ranges_into(&path, &mut ranges), Some(1_000_000));
    assert_eq!(client.stats().hits, hits + 2);
    // SAFETY: written by the hits.
    let read: Vec<u8> = memory.iter().map(|byte| unsafe { byte.assume_init() }).collect();
    assert!(read[..100_000] == bytes[700_000..800_000]);
    assert!(read[100_000..101_000] == bytes[200_000..201_000]);
    let (one, other) = memory.split_at_mut(100_000);
    // A page that is not cached, and a range beyond the end.
    for start in [150_000, 999_001] {
        let mut ranges = [(700_000, &mut *one), (start, &mut other[..1000])];
        assert_eq!(client.try_read_ranges_into(&path, &mut ranges), None, "{start}");
    }
    client.forget(&path).await;
    assert_eq!(client.cached_size(&path), None);
    assert_eq!(client.try_read_into(&path, &mut memory, 200_000), None);
}

/// Goal: 80 readers of one object, each with a connection of its own, cause one request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn staggered_first_readers_cause_one_request() {
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let _server = TestServer::start(Arc::clone(&store), &socket, Freshness::Immutable);
    let (path, bytes) = (Path::from("pond"), content(1, 600_000));
    far.store.put(&path, bytes.clone().into()).await.unwrap();
    far.faults.delay_ms.store(40, Relaxed);
    let readers = (0..80u64).map(|number| {
        let client = SharedStore::new(Arc::clone(&store), &socket);
        let (path, bytes) = (path.clone(), bytes.clone());
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(number)).await;
            let read = client.get(&path).await.unwrap().bytes().await.unwrap();
            assert!(read[..] == bytes[..]);
        })
    });
    for reader in readers.collect::<Vec<_>>() {
        reader.await.unwrap();
    }
    assert_eq!(far.gets().len(), 1);
}

/// Goal: errors of the store are those that its own user would get.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_keep_their_kind() {
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let _server = TestServer::start(Arc::clone(&store), &socket, Freshness::Revalidate);
    let client = SharedStore::new(Arc::clone(&store), &socket);
    let path = Path::from("pond");
    let missing = client.get_range(&path, 0..4).await.unwrap_err();
    assert!(matches!(&missing, Error::NotFound { path, .. } if path == "pond"), "{missing}");
    far.store.put(&path, "water".into()).await.unwrap();
    let tag = client.head(&path).await.unwrap().e_tag.unwrap();
    let conditional = |options| client.get_opts(&path, options);
    let same = conditional(GetOptions::new().with_if_none_match(Some(tag.clone()))).await;
    assert!(matches!(same, Err(Error::NotModified { .. })));
    let other = conditional(GetOptions::new().with_if_match(Some("other"))).await;
    assert!(matches!(other, Err(Error::Precondition { .. })));
    assert!(client.get_range(&path, 7..9).await.is_err(), "beyond the end");
    assert_eq!(client.get_range(&path, 3..9).await.unwrap(), "er");
    far.faults.fail_every.store(1, Relaxed);
    let failed = client.get_range(&path, 0..4).await.unwrap_err();
    assert!(failed.to_string().contains("fault"), "{failed}");
    assert_eq!(client.stats().fallbacks, 0);
}

/// Goal: a connection outlives the runtime that made it, and serves any other, and callers without one.
#[test]
fn any_runtime_or_none_will_do() {
    let (dir, (far, store)) = (temp_dir(), far());
    let socket = dir.path().join("socket");
    let _server = TestServer::start(Arc::clone(&store), &socket, Freshness::Immutable);
    let client = SharedStore::new(store, &socket);
    let (path, bytes) = (Path::from("pond"), content(1, 4_000_000));
    let put = far.store.put(&path, bytes.clone().into());
    common::block_on(async { put.await.unwrap() });
    let mut at = 0;
    let mut read = async || {
        // A miss, and a hit.
        for _ in 0..2 {
            let read = client.get_range(&path, at..at + 100_000).await.unwrap();
            assert!(read[..] == bytes[at as usize..][..100_000]);
        }
        at += 200_000;
    };
    let one_thread = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for _ in 0..3 {
        let started = Instant::now();
        common::block_on(read());
        one_thread.block_on(read());
        // Without a runtime.
        let waker = std::task::Waker::noop();
        let mut context = std::task::Context::from_waker(waker);
        let mut reading = std::pin::pin!(read());
        while reading.as_mut().poll(&mut context).is_pending() {
            std::thread::sleep(Duration::from_micros(200));
        }
        assert!(started.elapsed() < Duration::from_millis(900), "{:?}", started.elapsed());
    }
    let stats = client.stats();
    assert_eq!((stats.attaches, stats.fallbacks), (1, 0), "{stats:?}");
    assert!(stats.hits >= 9, "{stats:?}");
}

/// Goal: requests that take seconds are no sign of a dead server; a server that is stopped is abandoned.
#[test]
fn slow_requests_wait_and_stopped_servers_do_not_hold_up() {
    const TEST: &str = "slow_requests_wait_and_stopped_servers_do_not_hold_up";
    let serve = |dir: &std::path::Path| {
        let store = common::SharedDisk::open(dir, Duration::from_millis(3500));
        let server = TestServer::start(store, &dir.join("socket"), Freshness::Immutable);
        std::thread::sleep(Duration::from_secs(60));
        drop(server);
    };
    if let Some((_, dir)) = common::role_in(TEST) {
        return serve(&dir);
    }
    let dir = temp_dir();
    let server = common::Killed(common::start_role(TEST, "server", dir.path()));
    let socket = dir.path().join("socket");
    common::wait_until(Duration::from_secs(20), "the server listens", || socket.exists());
    let disk = common::SharedDisk::open(dir.path(), Duration::ZERO);
    let client = SharedStore::new(Arc::clone(&disk) as Arc<dyn ObjectStore>, &socket);
    common::block_on(async {
        let path = Path::from("pond");
        disk.put(&path, content(1, 100_000).into()).await.unwrap();
        let started = Instant::now();
        client.get_range(&path, 0..10).await.unwrap();
        assert!(started.elapsed() > Duration::from_secs(3));
        let stats = client.stats();
        assert_eq!((stats.attaches, stats.fallbacks), (1, 0), "{stats:?}");
        // SAFETY: a signal to a child of this process.
        assert_eq!(unsafe { libc::kill(server.0.id() as i32, libc::SIGSTOP) }, 0);
        let started = Instant::now();
        client.get_range(&path, 50_000..50_010).await.unwrap();
        let took = started.elapsed();
        assert!(took < Duration::from_secs(4), "{took:?}");
        assert_eq!(client.stats().fallbacks, 1);
    });
}
