//! Uploads in parts, and long bodies: order, replacement, limits, memory.

mod common;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use common::{BUCKET, Running};
use http::Method;
use millpond_endpoint::{Builder, Limits};
use millpond_objects::{CachedStore, Freshness};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use object_store::{
    Attribute, Attributes, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutPayload,
};

async fn create(running: &Running, key: &str) -> String {
    let reply = running.request(Method::POST, &format!("{key}?uploads")).send().await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let id = reply.body.split_once("<UploadId>").unwrap().1;
    id.split_once('<').unwrap().0.to_owned()
}

async fn part(running: &Running, key: &str, id: &str, number: u32, body: &str) -> String {
    let query = format!("{key}?partNumber={number}&uploadId={id}");
    let reply = running.request(Method::PUT, &query).body(body).send().await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.header("etag").to_owned()
}

fn completion(parts: &[(u32, &str)]) -> String {
    let parts: String = parts
        .iter()
        .map(|(number, tag)| {
            format!("<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>")
        })
        .collect();
    format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>")
}

#[tokio::test]
async fn parts_in_any_order_with_gaps_and_replacements() {
    let running = Running::start();
    let id = create(&running, "a").await;
    let nine = part(&running, "a", &id, 9, "nine").await;
    let two = part(&running, "a", &id, 2, "wrong").await;
    let five = part(&running, "a", &id, 5, "five").await;
    let new_two = part(&running, "a", &id, 2, "two").await;
    assert_ne!(two, new_two);
    assert_eq!(five, "\"30056e1cab7a61d256fc8edd970d14f5\"", "the MD5 of the part");
    let list = running.request(Method::GET, &format!("a?uploadId={id}&max-parts=2")).send().await;
    assert!(list.body.contains("<NextPartNumberMarker>5<"), "{}", list.body);
    assert!(
        list.body.contains("<IsTruncated>true<") && list.body.contains("<Size>3<"),
        "{}",
        list.body
    );
    let uploads = running.request(Method::GET, "?uploads").send().await;
    assert!(uploads.body.contains(&id), "{}", uploads.body);
    let complete =
        |body: String| running.request(Method::POST, &format!("a?uploadId={id}")).body(body).send();
    for (parts, code) in [
        (vec![(9, &*nine), (2, &new_two)], "InvalidPartOrder"),
        (vec![(2, &*two), (9, &nine)], "InvalidPart"),
        (vec![(1, &*nine)], "InvalidPart"),
    ] {
        let refused = complete(completion(&parts)).await;
        assert_eq!((refused.status.as_u16(), refused.code()), (400, code), "{refused:?}");
    }
    // The object has the named parts only.
    let named = completion(&[(2, &new_two), (9, &nine)]);
    let done = complete(named.clone()).await;
    assert_eq!(done.status, 200, "{done:?}");
    assert_eq!(running.request(Method::GET, "a").send().await.body, "twonine");
    // The reply may have been lost.
    let again = complete(named).await;
    assert_eq!((again.status, again.body), (done.status, done.body));
    let late = running
        .request(Method::PUT, &format!("a?partNumber=1&uploadId={id}"))
        .body("x")
        .send()
        .await;
    assert_eq!((late.status.as_u16(), late.code()), (404, "NoSuchUpload"));
    let uploads = running.request(Method::GET, "?uploads").send().await;
    assert!(!uploads.body.contains(&id), "{}", uploads.body);
}

#[tokio::test]
async fn an_aborted_upload_writes_nothing() {
    let running = Running::start();
    let id = create(&running, "a").await;
    let tag = part(&running, "a", &id, 1, "one").await;
    let abort = running.request(Method::DELETE, &format!("a?uploadId={id}")).send().await;
    assert_eq!(abort.status, 204, "{abort:?}");
    let complete = running.request(Method::POST, &format!("a?uploadId={id}"));
    let complete = complete.body(completion(&[(1, &tag)])).send().await;
    assert_eq!((complete.status.as_u16(), complete.code()), (404, "NoSuchUpload"));
    assert_eq!(running.request(Method::HEAD, "a").send().await.status, 404);
}

#[tokio::test]
async fn conditions_and_copies() {
    let running = Running::start();
    running.store.put(&Path::from("source"), PutPayload::from_static(b"0123456789")).await.unwrap();
    let id = create(&running, "a").await;
    let tag = part(&running, "a", &id, 1, "one").await;
    let copy = running
        .request(Method::PUT, &format!("a?partNumber=2&uploadId={id}"))
        .header("x-amz-copy-source", &format!("/{BUCKET}/source"))
        .header("x-amz-copy-source-range", "bytes=2-4")
        .send()
        .await;
    assert_eq!(copy.status, 200, "{copy:?}");
    // Fewer bytes than were asked for would be a part of another length than the client knows.
    let beyond = running.request(Method::PUT, &format!("a?partNumber=3&uploadId={id}"));
    let beyond = beyond.header("x-amz-copy-source", &format!("/{BUCKET}/source"));
    let beyond = beyond.header("x-amz-copy-source-range", "bytes=5-10").send().await;
    assert_eq!(beyond.code(), "InvalidRange", "{beyond:?}");
    let copied = copy.body.split_once("<ETag>").unwrap().1.split_once("</").unwrap().0.to_owned();
    let complete = |name: &'static str, value: &'static str| {
        let request = running.request(Method::POST, &format!("a?uploadId={id}"));
        request.header(name, value).body(completion(&[(1, &tag), (2, &copied)])).send()
    };
    let stale = complete("if-match", "\"other\"").await;
    assert!(matches!(stale.status.as_u16(), 404 | 412), "{stale:?}");
    let done = complete("if-none-match", "*").await;
    assert_eq!(done.status, 200, "{done:?}");
    assert_eq!(running.request(Method::GET, "a").send().await.body, "one234");
}

/// Goal: a completion that takes long is answered before it ends, so that the client keeps waiting.
#[tokio::test]
async fn a_slow_completion_is_answered_in_advance() {
    let slow =
        ThrottleConfig { wait_put_per_call: Duration::from_secs(6), ..ThrottleConfig::default() };
    let running =
        Running::start_with(Arc::new(ThrottledStore::new(InMemory::new(), slow)), |builder| {
            builder
        });
    let id = create(&running, "a").await;
    let tag = part(&running, "a", &id, 1, "one").await;
    let begun = Instant::now();
    let body = completion(&[(1, &tag)]);
    let complete = running.request(Method::POST, &format!("a?uploadId={id}")).body(body).send();
    // The whole reply; its head came before.
    let done = complete.await;
    assert!(begun.elapsed() >= Duration::from_secs(6));
    assert_eq!(done.status, 200, "{done:?}");
    assert!(
        done.body.contains("<CompleteMultipartUploadResult") && done.body.contains("<ETag>"),
        "{done:?}"
    );
    assert!(done.body.contains("?>   "), "spaces keep the connection alive: {done:?}");
    assert_eq!(running.request(Method::GET, "a").send().await.body, "one");
}

/// Small parts, so that tests need little memory.
fn small_parts(builder: Builder) -> Builder {
    builder.limits(Limits {
        part_bytes: 64 << 10,
        conditional_bytes_max: 256 << 10,
        upload_memory_bytes: 512 << 10,
        spool_bytes: 4 << 20,
        ..Limits::default()
    })
}

fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// Goal: bodies of each length arrive whole, by one request to the store or by several.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_each_length() {
    let running = Running::start_with(Arc::new(InMemory::new()), small_parts);
    let client = running.client();
    let part = 64 << 10;
    for length in [0, 1, part - 1, part, part + 1, 4 * part, 10 * part + 5] {
        let path = Path::from(format!("length {length}"));
        let mut attributes = Attributes::new();
        attributes.insert(Attribute::ContentType, "text/plain".into());
        client.put_opts(&path, bytes(length).into(), attributes.clone().into()).await.unwrap();
        let found = client.get(&path).await.unwrap();
        assert_eq!(found.attributes.get(&Attribute::ContentType), Some(&"text/plain".into()));
        assert!(found.bytes().await.unwrap() == bytes(length), "{length}");
        // The same through a multipart upload of the client.
        let options = PutMultipartOptions { attributes, ..PutMultipartOptions::default() };
        let mut upload = client.put_multipart_opts(&path, options).await.unwrap();
        let (first, second) = bytes(length).split_at(length / 3).to_owned_pair();
        upload.put_part(first.into()).await.unwrap();
        upload.put_part(second.into()).await.unwrap();
        upload.complete().await.unwrap();
        let found = client.get(&path).await.unwrap();
        assert_eq!(found.attributes.get(&Attribute::ContentType), Some(&"text/plain".into()));
        assert!(found.bytes().await.unwrap() == bytes(length), "{length} in parts");
    }
}

trait ToOwnedPair {
    fn to_owned_pair(self) -> (Vec<u8>, Vec<u8>);
}

impl ToOwnedPair for (&[u8], &[u8]) {
    fn to_owned_pair(self) -> (Vec<u8>, Vec<u8>) {
        (self.0.to_vec(), self.1.to_vec())
    }
}

#[tokio::test]
async fn limits_are_told() {
    let running = Running::start_with(Arc::new(InMemory::new()), small_parts);
    let long = running.request(Method::PUT, "a").header("if-none-match", "*");
    let long = long.body(bytes((256 << 10) + 1)).send().await;
    assert_eq!((long.status.as_u16(), long.code()), (501, "NotImplemented"), "{long:?}");
    assert!(long.body.contains("262144"), "{}", long.body);
    let fits = running.request(Method::PUT, "a").header("if-none-match", "*");
    assert_eq!(fits.body(bytes(256 << 10)).send().await.status, 200);
    let id = create(&running, "b").await;
    let put = |number: u32, length: usize| {
        let query = format!("b?partNumber={number}&uploadId={id}");
        running.request(Method::PUT, &query).body(bytes(length)).send()
    };
    assert_eq!(put(1, 3 << 20).await.status, 200);
    let full = put(2, 3 << 20).await;
    assert_eq!((full.status.as_u16(), full.code()), (503, "ServiceUnavailable"), "{full:?}");
    assert_eq!(put(10_001, 1).await.code(), "InvalidArgument");
    // The refused part takes no space, and neither does a replaced one.
    for _ in 0..4 {
        assert_eq!(put(2, 400 << 10).await.status, 200);
    }
    let abort = running.request(Method::DELETE, &format!("b?uploadId={id}")).send().await;
    assert_eq!(abort.status, 204);
    let id = create(&running, "b").await;
    let query = format!("b?partNumber=1&uploadId={id}");
    assert_eq!(running.request(Method::PUT, &query).body(bytes(4 << 20)).send().await.status, 200);
}

/// Goal: uploads that need more memory than there is wait for each other, and all end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_wait_for_memory() {
    let running = Arc::new(Running::start_with(Arc::new(InMemory::new()), small_parts));
    let done = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..24)
        .map(|number| {
            let (running, done) = (Arc::clone(&running), Arc::clone(&done));
            tokio::spawn(async move {
                let client = running.client();
                let path = Path::from(format!("{number}"));
                client.put(&path, bytes(300_000).into()).await.unwrap();
                done.fetch_add(1, Relaxed);
            })
        })
        .collect();
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(60), task).await.unwrap().unwrap();
    }
    assert_eq!(done.load(Relaxed), 24);
}

/// Goal: reads are cached, and each kind of write through the endpoint evicts the replaced version.
#[tokio::test]
async fn a_cache_behind_forgets_before_each_write() {
    let store = Arc::new(InMemory::new());
    let cache = CachedStore::builder(store.clone()).memory_bytes(8 << 20);
    let cache =
        Arc::new(cache.freshness(Freshness::MaxAge(Duration::from_secs(1000))).build().unwrap());
    let running = Running::start_with(cache.clone(), |builder| builder);
    let read = || running.request(Method::GET, "a").send();
    assert_eq!(running.request(Method::PUT, "a").body("1").send().await.status, 200);
    assert_eq!(read().await.body, "1");
    let before = cache.stats().requests;
    for _ in 0..5 {
        assert_eq!(read().await.body, "1");
    }
    assert_eq!(cache.stats().requests, before, "all are hits");
    store.put(&Path::from("a"), PutPayload::from_static(b"unseen")).await.unwrap();
    assert_eq!(read().await.body, "1", "a write beside the endpoint is not seen yet");
    assert_eq!(running.request(Method::PUT, "a").body("2").send().await.status, 200);
    assert_eq!(read().await.body, "2");
    let id = create(&running, "a").await;
    let tag = part(&running, "a", &id, 1, "3").await;
    let complete = running.request(Method::POST, &format!("a?uploadId={id}"));
    assert_eq!(complete.body(completion(&[(1, &tag)])).send().await.status, 200);
    assert_eq!(read().await.body, "3");
    assert_eq!(running.request(Method::PUT, "b").body("4").send().await.status, 200);
    let copy = running.request(Method::PUT, "a").header("x-amz-copy-source", "/bucket/b");
    assert_eq!(copy.send().await.status, 200);
    assert_eq!(read().await.body, "4");
    assert_eq!(running.request(Method::DELETE, "a").send().await.status, 204);
    assert_eq!(read().await.status, 404);
}
