//! Tests real S3 servers: their promises, and the cache over them, also while a node is killed, replies are late and
//! requests fail. `scripts/store-server SERVER scripts/...` starts a server and sets the environment.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use millpond_objects::{CachedStore, Freshness};
use millpond_store_check::{Options, Proxy, Verdict, check, open};
use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{
    ClientOptions, ObjectStore, ObjectStoreExt, PutPayload, RetryConfig, integration,
};

#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

const OBJECT_BYTES: usize = 300_000;
/// Time limit of one request; the client may retry it until `RETRY_TIMEOUT`.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_TIMEOUT: Duration = Duration::from_secs(15);
/// Time limit of a read: the last retry starts before `RETRY_TIMEOUT`, and the body may be requested again as often. The
/// limit leaves room for a busy machine.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// The endpoints of the server that the environment names.
fn endpoints() -> Option<Vec<String>> {
    let endpoints = std::env::var("MILLPOND_STORE_ENDPOINTS").ok();
    if endpoints.is_none() {
        skip::skip("no S3 server: scripts/store-server starts one");
    }
    endpoints.map(|all| all.split(',').map(String::from).collect())
}

fn bucket() -> String {
    std::env::var("MILLPOND_STORE_BUCKET").unwrap()
}

fn s3(endpoint: &str) -> Arc<dyn ObjectStore> {
    let retry = RetryConfig { retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
    let client = ClientOptions::new().with_allow_http(true).with_timeout(REQUEST_TIMEOUT);
    let builder = AmazonS3Builder::from_env().with_bucket_name(bucket()).with_endpoint(endpoint);
    Arc::new(builder.with_client_options(client).with_retry(retry).build().unwrap())
}

fn cache(store: Arc<dyn ObjectStore>, freshness: Freshness) -> CachedStore {
    // Less than the objects, so that requests continue.
    CachedStore::builder(store).memory_bytes(1 << 20).freshness(freshness).build().unwrap()
}

/// Bytes that differ by object and offset.
fn content(object: usize) -> Vec<u8> {
    let byte = |at: usize| (at.wrapping_mul(2_654_435_761).rotate_left(17) ^ (object * 77)) as u8;
    (0..OBJECT_BYTES).map(byte).collect()
}

fn place(test: &str, object: usize) -> Path {
    Path::from(format!("{test}/{object}"))
}

async fn write_objects(store: &dyn ObjectStore, test: &str, count: usize) {
    for object in 0..count {
        let bytes = PutPayload::from(content(object));
        store.put(&place(test, object), bytes).await.unwrap();
    }
}

#[derive(Debug, Default)]
struct Seen {
    right: u64,
    failed: u64,
    slowest: Duration,
}

/// Reads random ranges from concurrent tasks until `done`; panics at a wrong byte.
async fn read_until(store: &Arc<CachedStore>, test: &'static str, done: &Arc<AtomicBool>) -> Seen {
    let tasks: Vec<_> = (0..8_u64)
        .map(|task| {
            let (store, done) = (Arc::clone(store), Arc::clone(done));
            tokio::spawn(async move {
                let (mut seen, mut random) = (Seen::default(), task + 1);
                while !done.load(Relaxed) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let (object, start) = ((random >> 60) as usize, (random >> 33) as usize);
                    let start = start % (OBJECT_BYTES - 20_000);
                    let range = start as u64..start as u64 + 20_000;
                    let begun = Instant::now();
                    let at = place(test, object);
                    let read = store.get_range(&at, range);
                    let limited = tokio::time::timeout(READ_LIMIT, read).await;
                    match limited.expect("a read hangs beyond its limit") {
                        Ok(bytes) => {
                            assert!(bytes == content(object)[start..start + 20_000], "wrong bytes");
                            seen.right += 1;
                        }
                        Err(_) => seen.failed += 1,
                    }
                    seen.slowest = seen.slowest.max(begun.elapsed());
                }
                seen
            })
        })
        .collect();
    let mut all = Seen::default();
    for task in tasks {
        let seen = task.await.unwrap();
        all.right += seen.right;
        all.failed += seen.failed;
        all.slowest = all.slowest.max(seen.slowest);
    }
    all
}

/// Sets `done` after a time.
fn end_after(seconds: u64) -> Arc<AtomicBool> {
    let done = Arc::new(AtomicBool::new(false));
    let later = Arc::clone(&done);
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        later.store(true, Relaxed);
    });
    done
}

/// Runs all tests in this order, as `object_store`'s tests need an empty bucket, and a killed node does not return.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server() {
    let Some(endpoints) = endpoints() else { return };
    object_store_test_suite(&endpoints).await;
    promises(&endpoints).await;
    concurrent_misses_make_one_request(&endpoints).await;
    failing_and_slow_requests_corrupt_no_bytes(&endpoints).await;
    a_killed_node_corrupts_no_bytes(&endpoints).await;
}

/// Goal: 64 tasks that miss the same page send one request.
async fn concurrent_misses_make_one_request(endpoints: &[String]) {
    write_objects(&*s3(&endpoints[0]), "same", 1).await;
    let store = Arc::new(cache(s3(&endpoints[0]), Freshness::Immutable));
    // The object has an entry, but no cached pages.
    store.head(&place("same", 0)).await.unwrap();
    let before = store.stats().requests;
    let reads = (0..64).map(|_| {
        let store = Arc::clone(&store);
        tokio::spawn(async move { store.get_range(&place("same", 0), 4096..8192).await.unwrap() })
    });
    for read in reads.collect::<Vec<_>>() {
        assert!(read.await.unwrap() == content(0)[4096..8192]);
    }
    assert_eq!(store.stats().requests - before, 1);
}

async fn promises(endpoints: &[String]) {
    let options = Options { rounds: 20, ..Options::default() };
    let url = format!("s3://{}/checked", bucket());
    let report = check(&open(&url, endpoints, &options).await.unwrap(), &options).await.unwrap();
    println!("{report}");
    assert!(report.promises.iter().all(|promise| promise.verdict == Verdict::Kept), "{report}");
}

/// Runs the tests of `object_store` that the server passes without a cache. (One of them puts fractions of a second into
/// `If-Unmodified-Since`.)
async fn object_store_test_suite(endpoints: &[String]) {
    let age = Freshness::MaxAge(Duration::from_secs(1000));
    let bare = s3(&endpoints[0]);
    let mut own = 0;
    macro_rules! each {
        ($($name:ident($($more:expr),*)),*) => { $(
            let alone = Arc::clone(&bare);
            let alone = tokio::spawn(async move { integration::$name(&alone $(, $more)*).await });
            let passes = alone.await.is_ok();
            if !passes {
                println!("the server itself fails {}", stringify!($name));
            }
            for freshness in [Freshness::Revalidate, age, Freshness::Immutable] {
                empty(&*bare).await;
                if passes {
                    println!("{} {freshness:?}", stringify!($name));
                    integration::$name(&cache(Arc::clone(&bare), freshness) $(, $more)*).await;
                }
            }
            own += usize::from(passes);
        )* };
    }
    each!(
        put_get_delete_list(),
        get_opts(),
        put_opts(true),
        list_uses_directories_correctly(),
        list_with_delimiter(),
        rename_and_copy(),
        stream_get(),
        put_get_attributes(),
        multipart_out_of_order()
    );
    assert!(own >= 7, "{own} of nine");
}

async fn empty(store: &dyn ObjectStore) {
    let all: Vec<_> = store.list(None).try_collect().await.unwrap();
    for one in all {
        store.delete(&one.location).await.unwrap();
    }
}

async fn failing_and_slow_requests_corrupt_no_bytes(endpoints: &[String]) {
    let proxy = Proxy::start(endpoints[0].trim_start_matches("http://").into()).await.unwrap();
    let through = s3(&format!("http://127.0.0.1:{}", proxy.port()));
    write_objects(&*s3(&endpoints[0]), "failing", 16).await;
    let store = Arc::new(cache(through, Freshness::Revalidate));
    proxy.lose_per_mille(50);
    let seen = read_until(&store, "failing", &end_after(8)).await;
    println!("5% lost: {seen:?}, replies lost: {}", proxy.lost().0);
    assert!(seen.right > 0 && proxy.lost().0 > 0, "{seen:?}");
    proxy.delay(Duration::from_secs(1));
    let seen = read_until(&store, "failing", &end_after(8)).await;
    println!("and each reply late by 1 s: {seen:?}");
    assert!(seen.right > 0 && seen.slowest >= Duration::from_secs(1), "{seen:?}");
}

async fn a_killed_node_corrupts_no_bytes(endpoints: &[String]) {
    let Ok(pids) = std::env::var("MILLPOND_STORE_PIDS") else { return };
    let pids: Vec<&str> = pids.split_whitespace().collect();
    if pids.len() < 3 {
        return skip::skip("the server has one node, of which none can be killed");
    }
    write_objects(&*s3(&endpoints[0]), "killed", 16).await;
    let store = Arc::new(cache(s3(&endpoints[0]), Freshness::Revalidate));
    let done = end_after(14);
    let pid = pids[2].to_owned();
    let killer = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(3)).await;
        std::process::Command::new("kill").args(["-9", &pid]).status().unwrap()
    });
    let seen = read_until(&store, "killed", &done).await;
    assert!(killer.await.unwrap().success());
    println!("a node of three killed: {seen:?}");
    // Without the node, earlier objects are readable, and reads and writes work.
    write_objects(&*store, "after", 16).await;
    let after = read_until(&store, "after", &end_after(1)).await;
    assert!(seen.right > 0 && after.right > 0 && after.failed == 0, "{seen:?}, {after:?}");
}
