//! Replies to single requests: conditions, ranges, lists, errors, checksums.

mod common;

use std::sync::Arc;

use common::{BUCKET, Running};
use http::Method;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};

async fn with_object() -> Running {
    let running = Running::start();
    running.store.put(&Path::from("a/b"), PutPayload::from_static(b"0123456789")).await.unwrap();
    running.store.put(&Path::from("empty"), PutPayload::new()).await.unwrap();
    running
}

#[tokio::test]
async fn ranges() {
    let running = with_object().await;
    for (range, status, content_range, body) in [
        ("bytes=0-3", 206, "bytes 0-3/10", "0123"),
        ("bytes=4-", 206, "bytes 4-9/10", "456789"),
        ("bytes=8-100", 206, "bytes 8-9/10", "89"),
        ("bytes=-3", 206, "bytes 7-9/10", "789"),
        ("bytes=-100", 206, "bytes 0-9/10", "0123456789"),
        ("bytes=10-", 416, "bytes */10", ""),
        ("bytes=10-12", 416, "bytes */10", ""),
        ("bytes=-0", 416, "bytes */10", ""),
    ] {
        let reply = running.request(Method::GET, "a/b").header("range", range).send().await;
        assert_eq!(reply.status, status, "{range}: {reply:?}");
        assert_eq!(reply.header("content-range"), content_range, "{range}");
        if status == 206 {
            assert_eq!(reply.body, body, "{range}");
            assert_eq!(reply.header("content-length"), body.len().to_string(), "{range}");
        } else {
            assert_eq!(reply.code(), "InvalidRange", "{range}");
        }
        let head = running.request(Method::HEAD, "a/b").header("range", range).send().await;
        assert_eq!(head.status, status, "HEAD {range}: {head:?}");
    }
    for range in ["bytes=0-", "bytes=-1"] {
        let reply = running.request(Method::GET, "empty").header("range", range).send().await;
        assert_eq!((reply.status.as_u16(), reply.code()), (416, "InvalidRange"), "{range}");
    }
    let reply = running.request(Method::GET, "empty").send().await;
    assert_eq!((reply.status.as_u16(), reply.header("content-length")), (200, "0"));
}

#[tokio::test]
async fn conditions_of_reads() {
    let running = with_object().await;
    let head = running.request(Method::HEAD, "a/b").send().await;
    assert_eq!(head.status, 200);
    let (tag, date) = (head.header("etag").to_owned(), head.header("last-modified").to_owned());
    assert!(tag.starts_with('"') && tag.ends_with('"'), "{tag}");
    assert_eq!(head.header("content-type"), "binary/octet-stream");
    assert_eq!(head.header("accept-ranges"), "bytes");
    let before = "Mon, 01 Jan 2001 00:00:00 GMT";
    for method in [Method::GET, Method::HEAD] {
        for (name, value, status) in [
            ("if-match", tag.as_str(), 200),
            ("if-match", "\"other\"", 412),
            ("if-match", "*", 200),
            ("if-none-match", tag.as_str(), 304),
            ("if-none-match", "\"other\"", 200),
            ("if-none-match", "*", 304),
            // A date has whole seconds, the store's has fractions.
            ("if-modified-since", date.as_str(), 304),
            ("if-modified-since", before, 200),
            ("if-unmodified-since", date.as_str(), 200),
            ("if-unmodified-since", before, 412),
        ] {
            let reply = running.request(method.clone(), "a/b").header(name, value).send().await;
            assert_eq!(reply.status, status, "{method} {name}: {value}: {reply:?}");
            if status == 304 {
                assert_eq!(reply.body, "", "{method} {name}");
            }
            if status == 412 && method == Method::GET {
                assert_eq!(reply.code(), "PreconditionFailed");
            }
        }
    }
    let reply = running.request(Method::GET, "a/b").header("if-none-match", &tag).send().await;
    assert_eq!(reply.header("etag"), tag);
}

/// Goal: the first request of a new endpoint may have a condition, before it has seen an ETag of the store.
#[tokio::test]
async fn a_condition_in_the_first_request() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let put = store.put(&Path::from("a"), PutPayload::from_static(b"a")).await.unwrap();
    let running = Running::start_with(store, |builder| builder);
    let quoted = format!("\"{}\"", put.e_tag.unwrap().trim_matches('"'));
    let reply = running.request(Method::GET, "a").header("if-none-match", &quoted).send().await;
    assert_eq!(reply.status, 304);
}

#[tokio::test]
async fn conditions_of_writes() {
    let running = Running::start();
    let put = |body: &'static str, name: &'static str, value: String| {
        running.request(Method::PUT, "a").header(name, &value).body(body).send()
    };
    let first = put("1", "if-none-match", "*".into()).await;
    assert_eq!(first.status, 200, "{first:?}");
    let again = put("2", "if-none-match", "*".into()).await;
    assert_eq!((again.status.as_u16(), again.code()), (412, "PreconditionFailed"));
    let tag = first.header("etag").to_owned();
    assert_eq!(put("3", "if-match", tag.clone()).await.status, 200);
    let stale = put("4", "if-match", tag).await;
    assert_eq!((stale.status.as_u16(), stale.code()), (412, "PreconditionFailed"));
    let other = put("5", "if-none-match", "\"a\"".into()).await;
    assert_eq!((other.status.as_u16(), other.code()), (501, "NotImplemented"));
    assert_eq!(running.request(Method::GET, "a").send().await.body, "3");
}

#[tokio::test]
async fn metadata_are_kept() {
    let running = Running::start();
    let put = running.request(Method::PUT, "a").body("text");
    let put = put.header("content-type", "text/plain").header("x-amz-meta-one", "1");
    let put = put.header("content-encoding", "gzip").header("cache-control", "no-store");
    assert_eq!(put.send().await.status, 200);
    let copy =
        running.request(Method::PUT, "b").header("x-amz-copy-source", "/bucket/a").send().await;
    assert_eq!(copy.status, 200, "{copy:?}");
    for key in ["a", "b"] {
        let reply = running.request(Method::HEAD, key).send().await;
        for (name, value) in [
            ("content-type", "text/plain"),
            ("x-amz-meta-one", "1"),
            ("content-encoding", "gzip"),
            ("cache-control", "no-store"),
            ("content-length", "4"),
        ] {
            assert_eq!(reply.header(name), value, "{key} {name}");
        }
    }
    let replaced = running.request(Method::PUT, "a").header("x-amz-copy-source", "/bucket/a");
    let replaced =
        replaced.header("x-amz-metadata-directive", "REPLACE").header("x-amz-meta-two", "2");
    assert_eq!(replaced.send().await.status, 200);
    let reply = running.request(Method::GET, "a?response-content-type=a%2Fb").send().await;
    assert_eq!((reply.header("x-amz-meta-one"), reply.header("x-amz-meta-two")), ("", "2"));
    assert_eq!((reply.header("content-type"), reply.body.as_str()), ("a/b", "text"));
    let same =
        running.request(Method::PUT, "a").header("x-amz-copy-source", "/bucket/a").send().await;
    assert_eq!((same.status.as_u16(), same.code()), (400, "InvalidRequest"));
}

#[tokio::test]
async fn a_store_without_metadata_says_so_or_drops_them() {
    let dir = tempfile::tempdir().unwrap();
    let local = Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap());
    let keeps = Running::start_with(local.clone(), |builder| builder);
    let refused = keeps.request(Method::PUT, "a").header("content-type", "text/plain");
    let refused = refused.body("text").send().await;
    assert_eq!((refused.status.as_u16(), refused.code()), (501, "NotImplemented"), "{refused:?}");
    let drops = Running::start_with(local, |builder| builder.drop_metadata());
    let put = drops.request(Method::PUT, "a").header("content-type", "text/plain").body("text");
    assert_eq!(put.send().await.status, 200);
    let reply = drops.request(Method::GET, "a").send().await;
    assert_eq!((reply.header("content-type"), &*reply.body), ("binary/octet-stream", "text"));
}

#[tokio::test]
async fn errors_have_the_codes_of_s3() {
    let running = with_object().await;
    let at = |method, path: &str| running.request_at(method, path);
    for (request, status, code) in [
        (at(Method::GET, "/bucket/missing"), 404, "NoSuchKey"),
        (at(Method::GET, "/bucket/a//b"), 404, "NoSuchKey"),
        (at(Method::GET, "/other/a"), 404, "NoSuchBucket"),
        (at(Method::PUT, "/other/a"), 404, "NoSuchBucket"),
        (at(Method::GET, "/other?list-type=2"), 404, "NoSuchBucket"),
        (at(Method::PUT, "/bucket/a//b").body("text"), 400, "InvalidArgument"),
        (at(Method::PUT, "/bucket/a/").body("text"), 400, "InvalidArgument"),
        (at(Method::GET, "/bucket/a/b?acl"), 501, "NotImplemented"),
        (at(Method::GET, "/bucket?versioning"), 501, "NotImplemented"),
        (at(Method::GET, "/bucket/a/b?partNumber=1"), 501, "NotImplemented"),
        (at(Method::PUT, "/bucket/a").header("x-amz-acl", "public-read"), 501, "NotImplemented"),
        (
            at(Method::PUT, "/bucket/a").header("x-amz-server-side-encryption", "AES256"),
            501,
            "NotImplemented",
        ),
        (at(Method::PUT, "/bucket"), 409, "BucketAlreadyOwnedByYou"),
        (at(Method::PUT, "/new-bucket"), 403, "AccessDenied"),
        (at(Method::PUT, "/bucket/a?partNumber=1&uploadId=none"), 404, "NoSuchUpload"),
        (at(Method::DELETE, "/bucket/a?uploadId=none"), 404, "NoSuchUpload"),
        (at(Method::GET, "/bucket?list-type=2&continuation-token=x"), 400, "InvalidArgument"),
        (at(Method::GET, "/bucket?list-type=2&continuation-token=k%C3%A9"), 400, "InvalidArgument"),
    ] {
        let reply = request.send().await;
        assert_eq!((reply.status.as_u16(), reply.code()), (status, code), "{reply:?}");
        assert_eq!(reply.header("content-type"), "application/xml");
    }
    let reply = at(Method::GET, "/bucket/a/b?acl").send().await;
    assert!(reply.body.contains("GetObjectAcl"), "the operation is named: {}", reply.body);
    for (path, status) in
        [("/bucket", 200), ("/other", 404), ("/bucket/a/b", 200), ("/bucket/a", 404)]
    {
        assert_eq!(at(Method::HEAD, path).send().await.status, status, "{path}");
    }
    for key in ["missing", "a//b"] {
        assert_eq!(running.request(Method::DELETE, key).send().await.status, 204, "{key}");
    }
    let marker = running.request(Method::PUT, "dir/").send().await;
    assert_eq!(marker.status, 200, "a directory marker succeeds: {marker:?}");
}

#[tokio::test]
async fn buckets_are_listed() {
    let second =
        |builder: millpond_endpoint::Builder| builder.store("second", Arc::new(InMemory::new()));
    let running = Running::start_with(Arc::new(InMemory::new()), second);
    let reply = running.request_at(Method::GET, "/").send().await;
    assert_eq!(reply.status, 200);
    let (first, second) = (reply.body.find("<Name>bucket<"), reply.body.find("<Name>second<"));
    assert!(first.is_some() && first < second, "{}", reply.body);
    let reply = running.request(Method::GET, "?location").send().await;
    assert!(reply.status == 200 && reply.body.contains("LocationConstraint"), "{reply:?}");
    // Objects of one bucket are not in the other.
    let put = running.request(Method::PUT, "a").body("text").send().await;
    assert_eq!(put.status, 200);
    assert_eq!(running.request_at(Method::GET, "/second/a").send().await.code(), "NoSuchKey");
    let copy = running.request_at(Method::PUT, "/second/b").header("x-amz-copy-source", "bucket/a");
    assert_eq!(copy.send().await.status, 200);
    assert_eq!(running.request_at(Method::GET, "/second/b").send().await.body, "text");
}

/// All keys and common prefixes of a list, in the order of the pages, and the number of pages.
async fn listed(running: &Running, query: &str, page: usize) -> (Vec<String>, usize) {
    let (mut keys, mut pages, mut token) = (Vec::new(), 0, String::new());
    loop {
        let query = format!("?list-type=2&max-keys={page}&{query}{token}");
        let reply = running.request(Method::GET, &query).send().await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let texts = |tag: &str| -> Vec<String> {
            let start = format!("<{tag}>");
            let parts = reply.body.split(&start).skip(1);
            parts.map(|part| part.split_once("</").unwrap().0.to_owned()).collect()
        };
        let mut of_page = texts("Key");
        of_page.extend(texts("CommonPrefixes").iter().map(|text| text.replace("<Prefix>", "")));
        of_page.sort_unstable();
        assert!(of_page.len() <= page);
        keys.extend(of_page);
        pages += 1;
        match texts("NextContinuationToken").first() {
            Some(next) => token = format!("&continuation-token={next}"),
            None => return (keys, pages),
        }
    }
}

#[tokio::test]
async fn lists_are_in_order_whatever_the_pages() {
    let dir = tempfile::tempdir().unwrap();
    let local = Arc::new(LocalFileSystem::new_with_prefix(dir.path()).unwrap());
    // The order of S3 differs from that of folders: `a-b` < `a.txt` < `a/c` < `ab`.
    let keys = ["a-b", "a.txt", "a/c", "a/d/e", "a/d/f", "ab", "b/1", "b/2", "b/3", "c d+e&é"];
    for store in [local as Arc<dyn ObjectStore>, Arc::new(InMemory::new())] {
        for key in keys {
            store.put(&Path::parse(key).unwrap(), PutPayload::from_static(b"x")).await.unwrap();
        }
        let running = Running::start_with(store, |builder| builder.drop_metadata());
        for page in [1, 2, 3, 1000] {
            let all = listed(&running, "", page).await;
            let escaped: Vec<_> = keys.iter().map(|key| key.replace('&', "&amp;")).collect();
            assert_eq!(all.0, escaped, "{page}");
            assert_eq!(all.1, keys.len().div_ceil(page), "{page}");
            for (query, expected) in [
                ("delimiter=%2F", &["a-b", "a.txt", "a/", "ab", "b/", "c d+e&amp;é"][..]),
                ("delimiter=%2F&prefix=a", &["a-b", "a.txt", "a/", "ab"]),
                ("delimiter=%2F&prefix=a%2F", &["a/c", "a/d/"]),
                ("prefix=a%2Fd", &["a/d/e", "a/d/f"]),
                ("prefix=a%2F%2F", &[]),
                ("prefix=none", &[]),
                ("prefix=b&start-after=b%2F1", &["b/2", "b/3"]),
                ("delimiter=%2F&start-after=b%2F1", &["b/", "c d+e&amp;é"]),
                ("delimiter=%2F&start-after=b%2F3", &["c d+e&amp;é"]),
                (
                    "delimiter=.",
                    &[
                        "a-b",
                        "a.",
                        "a/c",
                        "a/d/e",
                        "a/d/f",
                        "ab",
                        "b/1",
                        "b/2",
                        "b/3",
                        "c d+e&amp;é",
                    ],
                ),
                ("encoding-type=url&prefix=c", &["c%20d%2Be%26%C3%A9"]),
            ] {
                assert_eq!(
                    listed(&running, query, page).await.0,
                    expected,
                    "{query}, pages of {page}"
                );
            }
        }
        let none = running.request(Method::GET, "?list-type=2&max-keys=0").send().await;
        assert!(none.body.contains("<IsTruncated>false"), "{}", none.body);
        let negative = running.request(Method::GET, "?list-type=2&max-keys=-1").send().await;
        assert_eq!(negative.code(), "InvalidArgument");
        // The last key of a page need not have the prefix.
        for query in ["", "&marker=a", "&marker=z"] {
            let query = format!("?delimiter=%2F&prefix=a%2Fd%2F{query}");
            let version_1 = running.request(Method::GET, &query).send().await;
            let found = version_1.body.matches("<Key>a/d/").count();
            let expected = if query.ends_with('z') { 0 } else { 2 };
            assert_eq!(
                (version_1.status.as_u16(), found),
                (200, expected),
                "{query}: {version_1:?}"
            );
        }
        let version_1 = running.request(Method::GET, "?delimiter=%2F&max-keys=3").send().await;
        assert!(version_1.body.contains("<NextMarker>a/</NextMarker>"), "{}", version_1.body);
        let version_1 =
            running.request(Method::GET, "?delimiter=%2F&marker=a%2F&max-keys=1").send().await;
        assert!(version_1.body.contains("<Key>ab</Key>"), "{}", version_1.body);
    }
}

/// Goal: a store with paginated lists gets one request for each page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paginated_lists_of_the_store_are_used() {
    let behind = Running::start();
    for key in ["a/b", "a/c", "ab", "b"] {
        behind.store.put(&Path::from(key), PutPayload::from_static(b"x")).await.unwrap();
    }
    let client = Arc::new(behind.client());
    let running = Running::start_with(client.clone(), |builder| builder.lists(client));
    for page in [1, 2, 1000] {
        assert_eq!(listed(&running, "", page).await.0, ["a/b", "a/c", "ab", "b"], "{page}");
        let folders = listed(&running, "delimiter=%2F&prefix=a", page).await.0;
        assert_eq!(folders, ["a/", "ab"], "{page}");
    }
}

#[tokio::test]
async fn many_are_deleted() {
    let running = with_object().await;
    let body = "<Delete><Object><Key>a/b</Key></Object><Object><Key>missing</Key></Object>\
                <Object><Key>a//b</Key></Object></Delete>";
    let reply = running.request(Method::POST, "?delete").body(body).send().await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.body.matches("<Deleted>").count(), 3, "{}", reply.body);
    assert_eq!(running.request(Method::HEAD, "a/b").send().await.status, 404);
    let quiet = body.replace("</Delete>", "<Quiet>true</Quiet></Delete>");
    let reply = running.request(Method::POST, "?delete").body(quiet).send().await;
    assert!(reply.status == 200 && !reply.body.contains("<Deleted>"), "{reply:?}");
    let none = running.request(Method::POST, "?delete").body("<Delete></Delete>").send().await;
    assert_eq!(none.status, 400, "{none:?}");
}

/// Goal: a body with a wrong checksum does not become an object.
#[tokio::test]
async fn checksums_are_checked() {
    let running = Running::start();
    let put = |name: &str, value: &str| {
        running.request(Method::PUT, "a").header(name, value).body("foob").send()
    };
    // Of "foob", and of other bytes.
    for (name, right, wrong) in [
        ("content-md5", "0IcaK1PGLeXgRv7eQvP3qw==", "AAAAAAAAAAAAAAAAAAAAAA=="),
        ("x-amz-checksum-crc32", "PVuMwg==", "AAAAAA=="),
    ] {
        let refused = put(name, wrong).await;
        assert_eq!((refused.status.as_u16(), refused.code()), (400, "BadDigest"), "{refused:?}");
        assert_eq!(running.request(Method::HEAD, "a").send().await.status, 404, "{name}");
        assert_eq!(put(name, right).await.status, 200, "{name}");
        assert_eq!(running.request(Method::DELETE, "a").send().await.status, 204);
    }
    let mut lies = running.request(Method::PUT, "a").body("foob");
    lies.sha256 = Some("0".repeat(64));
    let refused = lies.send().await;
    assert_eq!(
        (refused.status.as_u16(), refused.code()),
        (400, "XAmzContentSHA256Mismatch"),
        "{refused:?}"
    );
    assert_eq!(running.request(Method::HEAD, "a").send().await.status, 404);
    let mut unsigned = running.request(Method::PUT, "a").body("foob");
    unsigned.sha256 = Some("UNSIGNED-PAYLOAD".into());
    assert_eq!(unsigned.send().await.status, 200);
}

#[tokio::test]
async fn trailing_checksums_are_checked() {
    let running = Running::start();
    let put = |trailer: &str| {
        let body = format!("4\r\nfoob\r\n0\r\nx-amz-checksum-crc32:{trailer}\r\n\r\n");
        let mut put = running.request(Method::PUT, "a").body(body);
        put.sha256 = Some("STREAMING-UNSIGNED-PAYLOAD-TRAILER".into());
        put.header("x-amz-trailer", "x-amz-checksum-crc32")
            .header("x-amz-decoded-content-length", "4")
            .header("content-encoding", "aws-chunked")
            .send()
    };
    let refused = put("AAAAAA==").await;
    assert_eq!((refused.status.as_u16(), refused.code()), (400, "BadDigest"), "{refused:?}");
    assert_eq!(running.request(Method::HEAD, "a").send().await.status, 404);
    let right = put("PVuMwg==").await;
    assert_eq!(right.status, 200, "{right:?}");
    let reply = running.request(Method::GET, "a").send().await;
    assert_eq!((reply.header("content-encoding"), &*reply.body), ("", "foob"));
}

/// Goal: a part that a client sends as one chunk without a signature, as the SDK for Go does, is received.
#[tokio::test]
async fn a_long_chunk_is_received() {
    let running = Running::start();
    let text = "water lilies".repeat(300_000);
    let body = format!("{:x}\r\n{text}\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n", text.len());
    let put = |trailer: &str| {
        let mut put = running.request(Method::PUT, "a").body(body.replace("AAAAAA==", trailer));
        put.sha256 = Some("STREAMING-UNSIGNED-PAYLOAD-TRAILER".into());
        put.header("x-amz-trailer", "x-amz-checksum-crc32")
            .header("x-amz-decoded-content-length", &text.len().to_string())
            .send()
    };
    let refused = put("AAAAAA==").await;
    assert_eq!((refused.status.as_u16(), refused.code()), (400, "BadDigest"), "{refused:?}");
    let right = put("ofY0EA==").await;
    assert_eq!(right.status, 200, "{right:?}");
    assert_eq!(running.request(Method::GET, "a").send().await.body, text);
}

#[tokio::test]
async fn requests_are_refused_unless_the_key_signs_them() {
    let running = with_object().await;
    let get = || running.request(Method::GET, "a/b");
    assert_eq!(get().send().await.status, 200);
    let unsigned = get().unsigned().await;
    assert_eq!((unsigned.status.as_u16(), unsigned.code()), (403, "AccessDenied"), "{unsigned:?}");
    let list = running.request_at(Method::GET, "/").unsigned().await;
    assert_eq!((list.status.as_u16(), list.code()), (403, "AccessDenied"));
    let mut other = get();
    other.key.0 = "AKIAIOSFODNN7EXAMPLE".into();
    let other = other.send().await;
    assert_eq!((other.status.as_u16(), other.code()), (403, "InvalidAccessKeyId"));
    let mut wrong = get();
    wrong.key.1.push('x');
    let wrong = wrong.send().await;
    assert_eq!((wrong.status.as_u16(), wrong.code()), (403, "SignatureDoesNotMatch"));
    for seconds in [-1000, 1000] {
        let mut late = get();
        late.seconds = seconds;
        let late = late.send().await;
        assert_eq!((late.status.as_u16(), late.code()), (403, "RequestTimeTooSkewed"), "{seconds}");
    }
    for (name, value) in [("authorization", "AWS id:signature"), ("authorization", "Basic YTpi")] {
        let old = get().header(name, value).unsigned().await;
        assert_eq!(old.status, 400, "{value}: {old:?}");
    }
    let old =
        running.request(Method::GET, "a/b?AWSAccessKeyId=a&Expires=1&Signature=b").unsigned().await;
    assert_eq!((old.status.as_u16(), old.code()), (400, "InvalidRequest"));
    assert_eq!(running.request(Method::PUT, "new").body("x").unsigned().await.status, 403);
    assert!(running.store.head(&Path::from("new")).await.is_err());
}

#[tokio::test]
async fn signed_urls_work_until_they_expire() {
    use object_store::signer::Signer;
    let running = with_object().await;
    let client = running.client();
    let url = |seconds| {
        let (client, path) = (&client, Path::from("a/b"));
        async move {
            let time = std::time::Duration::from_secs(seconds);
            client.signed_url(Method::GET, &path, time).await.unwrap().to_string()
        }
    };
    let path = |url: String| url.split_once(&format!("/{BUCKET}/")).unwrap().1.to_owned();
    let long = path(url(100).await);
    let reply = running.request(Method::GET, &long).unsigned().await;
    assert_eq!((reply.status.as_u16(), &*reply.body), (200, "0123456789"), "{reply:?}");
    let reply = running.request(Method::PUT, &long).body("x").unsigned().await;
    assert_eq!(reply.code(), "SignatureDoesNotMatch", "the URL is for another method");
    let short = path(url(1).await);
    tokio::time::sleep(std::time::Duration::from_millis(2100)).await;
    let reply = running.request(Method::GET, &short).unsigned().await;
    assert_eq!((reply.status.as_u16(), reply.code()), (403, "AccessDenied"), "{reply:?}");
}

/// Goal: the holder of a signed URL can make the request that it was signed for, and no other.
#[tokio::test]
async fn headers_that_a_signed_url_does_not_sign_are_refused() {
    use object_store::signer::Signer;
    let running = with_object().await;
    let (client, path) = (running.client(), Path::from("drop"));
    let time = std::time::Duration::from_secs(100);
    let url = client.signed_url(Method::PUT, &path, time).await.unwrap().to_string();
    let put = url.split_once(&format!("/{BUCKET}/")).unwrap().1.to_owned();
    // Another encoding has the same signature.
    let encoded = put.replace("X-Amz-Signature", "X-Amz-Signatur%65");
    for (name, value) in
        [("x-amz-copy-source", "/bucket/a/b"), ("x-amz-meta-a", "b"), ("x-amz-tagging", "a=b")]
    {
        for put in [&put, &encoded] {
            let reply = running.request(Method::PUT, put).header(name, value).unsigned().await;
            let (status, code) = (reply.status.as_u16(), reply.code());
            assert_eq!((status, code), (403, "AccessDenied"), "{name}: {reply:?}");
        }
    }
    assert!(running.store.head(&path).await.is_err());
    for put in [&put, &encoded] {
        let reply = running.request(Method::PUT, put).header("content-type", "text/plain");
        let reply = reply.body("x").unsigned().await;
        assert_eq!(reply.status, 200, "{reply:?}");
    }
}

/// Goal: a store without versions does not serve the present version as another one.
#[tokio::test]
async fn a_version_that_is_not_there_is_not_served() {
    let running = with_object().await;
    for method in [Method::GET, Method::HEAD] {
        let other = running.request(method.clone(), "a/b?versionId=other").send().await;
        assert_eq!(other.status, 404, "{other:?}");
        let only = running.request(method, "a/b?versionId=null").send().await;
        assert_eq!(only.status, 200, "{only:?}");
    }
    let copy = running.request(Method::PUT, "c");
    let copy = copy.header("x-amz-copy-source", "/bucket/a/b?versionId=other").send().await;
    assert_eq!((copy.status.as_u16(), copy.code()), (404, "NoSuchVersion"), "{copy:?}");
}

/// Goal: a condition on the target of a copy is refused, and not ignored.
#[tokio::test]
async fn conditions_on_the_target_of_a_copy_are_refused() {
    let running = with_object().await;
    for (name, value) in [("if-none-match", "*"), ("if-match", "\"other\"")] {
        let copy = running.request(Method::PUT, "empty").header(name, value);
        let copy = copy.header("x-amz-copy-source", "/bucket/a/b").send().await;
        assert_eq!((copy.status.as_u16(), copy.code()), (501, "NotImplemented"), "{copy:?}");
    }
    assert_eq!(running.request(Method::GET, "empty").send().await.body, "");
}

/// Incident: a local file of a time beyond the year 9999 made the list of its bucket panic. Few file systems have such times.
#[tokio::test]
async fn a_file_of_the_far_future_is_listed() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = std::fs::File::create(dir.path().join("pond")).unwrap();
    let times = std::time::UNIX_EPOCH + std::time::Duration::from_secs(300_000_000_000);
    file.set_modified(times).unwrap();
    assert_eq!(file.metadata().unwrap().modified().unwrap(), times, "/dev/shm is a tmpfs");
    let store = LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    let running = Running::start_with(Arc::new(store), |builder| builder);
    let client = running.client();
    let listed = client.list_with_delimiter(None).await.unwrap();
    let names: Vec<_> = listed.objects.iter().map(|meta| meta.location.to_string()).collect();
    assert_eq!(names, ["pond"]);
    let head = running.request(Method::HEAD, "pond").send().await;
    assert_eq!((head.status.as_u16(), head.header("last-modified").contains("9999")), (200, true));
}
