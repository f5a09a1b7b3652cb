//! Clients that send garbage, stop sending or stop receiving: they harm only themselves.

mod common;
#[path = "../../millpond-objects/tests/common/mod.rs"]
mod far;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::Running;
use far::Far;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use http::Method;
use millpond_endpoint::{Builder, Limits};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

const SHORT: Duration = Duration::from_millis(300);

fn short_limits(builder: Builder) -> Builder {
    builder.limits(Limits {
        connections: 8,
        idle_max: SHORT,
        body_pause_max: SHORT,
        output_pause_max: SHORT,
        shutdown_grace: SHORT,
        ..Limits::default()
    })
}

fn start() -> Running {
    Running::start_with(Arc::new(InMemory::new()), short_limits)
}

/// Sends bytes, and reads until the endpoint closes the connection.
async fn exchange(running: &Running, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut reply = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut reply));
    let _ = read.await.expect("the endpoint closes the connection");
    String::from_utf8_lossy(&reply).into_owned()
}

/// The endpoint still serves its user.
async fn still_serves(running: &Running) {
    let put = running.request(Method::PUT, "alive").body("text").send().await;
    assert_eq!(put.status, 200, "{put:?}");
    assert_eq!(running.request(Method::GET, "alive").send().await.body, "text");
}

#[tokio::test]
async fn garbage_and_half_requests_end() {
    let running = start();
    let reply = exchange(&running, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03").await;
    assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 400"), "{reply}");
    let begun = Instant::now();
    for half in ["", "GET", "GET /bucket/a HTTP/1.1\r\nHost: x\r\n"] {
        let reply = exchange(&running, half.as_bytes()).await;
        assert!(!reply.contains("200 OK"), "{half}: {reply}");
    }
    assert!(begun.elapsed() >= 3 * SHORT, "each waits for the rest");
    let long = format!("GET / HTTP/1.1\r\nHost: x\r\nA: {}\r\n\r\n", "a".repeat(200_000));
    let reply = exchange(&running, long.as_bytes()).await;
    assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 431"), "{reply}");
    let many: String = (0..1000).map(|number| format!("A{number}: a\r\n")).collect();
    let many = format!("GET / HTTP/1.1\r\nHost: x\r\n{many}\r\n");
    let reply = exchange(&running, many.as_bytes()).await;
    assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 431"), "{reply}");
    still_serves(&running).await;
}

/// Goal: nothing is read for a form, whose signature would be checked after its file.
#[tokio::test]
async fn forms_are_refused_before_they_are_read() {
    let running = start();
    let head = "POST /bucket HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000000\r\n\
                Content-Type:  Multipart/form-data; boundary=b\r\n\r\n";
    let form = "--b\r\nContent-Disposition: form-data; name=\"key\"\r\n\r\na\r\n";
    let begun = Instant::now();
    let reply = exchange(&running, format!("{head}{form}").as_bytes()).await;
    assert!(reply.contains("501 Not Implemented") && reply.contains("PostObject"), "{reply}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

/// Goal: an unsigned request is answered without waiting for its body.
#[tokio::test]
async fn bodies_of_unsigned_requests_are_not_read() {
    let running = start();
    for head in ["PUT /bucket/a", "POST /bucket?delete="] {
        let head = format!("{head} HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000000\r\n\r\nabc");
        let reply = exchange(&running, head.as_bytes()).await;
        assert!(reply.contains("403 Forbidden") && reply.contains("AccessDenied"), "{reply}");
    }
}

/// Goal: a reply without `100 Continue` ends the connection: some clients misread the next reply on it.
#[tokio::test]
async fn expected_bodies_are_asked_for_or_the_connection_ends() {
    let running = start();
    let reply = |head: String, body: &'static str| {
        let head = head.replacen("\r\n", "\r\nExpect: 100-continue\r\n", 1);
        let running = &running;
        async move { exchange(running, format!("{head}{body}").as_bytes()).await }
    };
    let empty = reply(running.request(Method::PUT, "a").head(), "").await.to_lowercase();
    assert!(empty.starts_with("http/1.1 200") && empty.contains("connection: close"), "{empty}");
    let refused = reply(running.request_at(Method::PUT, "/other/a").body("text").head(), "").await;
    let refused = refused.to_lowercase();
    assert!(
        refused.starts_with("http/1.1 404") && refused.contains("connection: close"),
        "{refused}"
    );
    let asked = reply(running.request(Method::PUT, "a").body("text").head(), "text").await;
    assert!(asked.starts_with("HTTP/1.1 100") && asked.contains("HTTP/1.1 200"), "{asked}");
    assert!(!asked.to_lowercase().contains("connection: close"), "{asked}");
}

/// Goal: idle connections of others keep no request out.
#[tokio::test]
async fn idle_connections_make_room() {
    let unlimited =
        |builder: Builder| builder.limits(Limits { connections: 4, ..Limits::default() });
    let running = Running::start_with(Arc::new(InMemory::new()), unlimited);
    let mut idle = Vec::new();
    for _ in 0..12 {
        idle.push(TcpStream::connect(running.address).await.unwrap());
        still_serves(&running).await;
    }
    let mut closed = 0;
    for mut stream in idle {
        let mut byte = [0];
        let read = tokio::time::timeout(Duration::from_millis(100), stream.read(&mut byte)).await;
        closed += usize::from(read.is_ok());
    }
    assert!((8..=12).contains(&closed), "{closed} of 12 are closed");
}

/// Goal: a client with many threads opens all its connections before it sends a request on the first one.
#[tokio::test]
async fn a_burst_of_connections_is_served() {
    let running = Running::start();
    let request = running.request(Method::GET, "a").head();
    let (mut by_tcp, mut by_path) = (Vec::new(), Vec::new());
    for _ in 0..200 {
        by_tcp.push(TcpStream::connect(running.address).await.unwrap());
        by_path.push(UnixStream::connect(&running.socket).await.unwrap());
    }
    for (one, other) in by_tcp.iter_mut().zip(&mut by_path) {
        one.write_all(request.as_bytes()).await.unwrap();
        other.write_all(request.as_bytes()).await.unwrap();
    }
    for (number, (mut one, mut other)) in by_tcp.into_iter().zip(by_path).enumerate() {
        let mut reply = [0; 12];
        one.read_exact(&mut reply).await.unwrap_or_else(|error| panic!("TCP, {number}: {error}"));
        assert_eq!(&reply, b"HTTP/1.1 404");
        let read = other.read_exact(&mut reply).await;
        read.unwrap_or_else(|error| panic!("Unix, {number}: {error}"));
        assert_eq!(&reply, b"HTTP/1.1 404");
    }
}

/// Goal: a client without the key does not keep a connection: neither by waiting, nor by one request after the other.
#[tokio::test]
async fn connections_without_a_signature_end() {
    let patient =
        |builder: Builder| builder.limits(Limits { unsigned_age_max: SHORT, ..Limits::default() });
    let running = Running::start_with(Arc::new(InMemory::new()), patient);
    let begun = Instant::now();
    assert_eq!(exchange(&running, b"GET /bucket/a HTTP/1.1\r\n").await, "");
    assert!(begun.elapsed() >= SHORT && begun.elapsed() < 20 * SHORT, "{:?}", begun.elapsed());
    let unsigned = "GET /bucket/a HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut wrong = running.request(Method::GET, "a");
    wrong.key.1.push('x');
    for request in [unsigned, &wrong.head()] {
        let reply = exchange(&running, request.repeat(3).as_bytes()).await.to_lowercase();
        assert_eq!(reply.matches("403 forbidden").count(), 1, "{reply}");
        assert!(reply.contains("connection: close"), "{reply}");
    }
    // With a signature it stays, and is not closed by a request without one.
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    for request in [&running.request(Method::GET, "a").head(), unsigned, unsigned] {
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut reply = [0; 8192];
        let len = stream.read(&mut reply).await.unwrap();
        let reply = String::from_utf8_lossy(&reply[..len]).to_lowercase();
        assert!(
            reply.starts_with("http/1.1 40") && !reply.contains("connection: close"),
            "{reply}"
        );
        tokio::time::sleep(SHORT).await;
    }
}

/// Goal: a long signed chunk, which is checked as a whole, is refused before it is received.
#[tokio::test]
async fn long_signed_chunks_are_refused() {
    let running = Running::start();
    let mut put = running.request(Method::PUT, "a");
    put.sha256 = Some("STREAMING-AWS4-HMAC-SHA256-PAYLOAD".into());
    let put = put.header("x-amz-decoded-content-length", "4294967295");
    let head = put.header("content-encoding", "aws-chunked").head();
    let head = head.replace("content-length: 0", "content-length: 4294967400");
    let chunk = format!("ffffffff;chunk-signature={}\r\n", "a".repeat(64));
    let begun = Instant::now();
    let reply = exchange(&running, format!("{head}{chunk}water").as_bytes()).await;
    assert!(reply.contains("EntityTooLarge") && reply.contains("4294967295 bytes"), "{reply}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    still_serves(&running).await;
}

/// Goal: an upload that is cut, or is shorter than it declares, is no object: also if the request has no length, and the cut
/// is between two chunks.
#[tokio::test]
async fn a_cut_upload_is_not_written() {
    let running = Running::start();
    let (mebi, trailer) = ("a".repeat(1 << 20), "x-amz-checksum-crc32:AAAAAA==\r\n\r\n");
    let cut = [
        format!("300000\r\n{mebi}"),
        format!("100000\r\n{mebi}\r\n"),
        format!("100000\r\n{mebi}\r\n0\r\n{trailer}"),
        format!("300000\r\n{0}{0}{0}\r\n", mebi),
        format!("300000\r\n{0}{0}{0}\r\n0\r\n\r\n", mebi),
    ];
    for (number, body) in cut.iter().enumerate() {
        for has_length in [false, true] {
            let mut put = running.request(Method::PUT, "cut");
            put.sha256 = Some("STREAMING-UNSIGNED-PAYLOAD-TRAILER".into());
            let put = put.header("x-amz-trailer", "x-amz-checksum-crc32");
            let head = put.header("x-amz-decoded-content-length", "3145728").head();
            let request = if has_length {
                let length = format!("content-length: {}", body.len());
                head.replace("content-length: 0", &length) + body
            } else {
                let head = head.replace("content-length: 0", "transfer-encoding: chunked");
                format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len())
            };
            let mut stream = TcpStream::connect(running.address).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut reply = vec![0; 4096];
            let len = stream.read(&mut reply).await.unwrap();
            let reply = String::from_utf8_lossy(&reply[..len]);
            let code = if number == 4 { "MalformedTrailerError" } else { "IncompleteBody" };
            assert!(reply.starts_with("HTTP/1.1 400") && reply.contains(code), "{number}: {reply}");
            assert!(running.store.head(&Path::from("cut")).await.is_err(), "{number}");
        }
    }
}

/// Goal: a chunk without a signature, of any length, is passed on before its end, and not held in memory as a whole.
/// Method: the store is another endpoint, which lists the upload that the first bytes have begun there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_chunk_is_passed_on_before_its_end() {
    let behind = Running::start();
    let small =
        |builder: Builder| builder.limits(Limits { part_bytes: 1 << 20, ..Limits::default() });
    let running = Running::start_with(Arc::new(behind.client()), small);
    let bytes = "water lilies".repeat(1 << 20);
    let mut put = running.request(Method::PUT, "a");
    put.sha256 = Some("STREAMING-UNSIGNED-PAYLOAD-TRAILER".into());
    let put = put.header("x-amz-trailer", "x-amz-checksum-crc32");
    let head = put.header("x-amz-decoded-content-length", &bytes.len().to_string()).head();
    let body =
        format!("{:x}\r\n{bytes}\r\n0\r\nx-amz-checksum-crc32:TYi2Jg==\r\n\r\n", bytes.len());
    let head = head.replace("content-length: 0", &format!("content-length: {}", body.len()));
    let (first, last) = body.split_at(bytes.len() - 1000);
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    stream.write_all(format!("{head}{first}").as_bytes()).await.unwrap();
    let begun = Instant::now();
    while !behind.request(Method::GET, "?uploads").send().await.body.contains("<Upload>") {
        assert!(begun.elapsed() < Duration::from_secs(20), "it waits for the end of the chunk");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stream.write_all(last.as_bytes()).await.unwrap();
    let mut reply = [0; 12];
    stream.read_exact(&mut reply).await.unwrap();
    assert_eq!(&reply, b"HTTP/1.1 200");
    assert_eq!(running.request(Method::GET, "a").send().await.body, bytes);
}

/// Goal: a client that stops within its body gets an error, and its object is not written.
#[tokio::test]
async fn a_body_that_stops_ends() {
    let running = start();
    let signed = running.request(Method::PUT, "half").body("0123456789");
    let head = signed.head();
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    stream.write_all(format!("{head}01234").as_bytes()).await.unwrap();
    let begun = Instant::now();
    let mut reply = Vec::new();
    let _ = stream.read_to_end(&mut reply).await;
    let reply = String::from_utf8_lossy(&reply);
    assert!(begun.elapsed() >= SHORT && begun.elapsed() < 20 * SHORT, "{:?}", begun.elapsed());
    assert!(reply.contains("RequestTimeout"), "{reply}");
    assert!(running.store.head(&Path::from("half")).await.is_err());
    still_serves(&running).await;
}

/// Goal: a client that does not receive its response is disconnected, and the next request is served.
#[tokio::test]
async fn a_response_that_nobody_receives_ends() {
    let running = start();
    let large = PutPayload::from(vec![7; 64 << 20]);
    running.store.put(&Path::from("large"), large).await.unwrap();
    let head = running.request(Method::GET, "large").head();
    let mut stuck = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(running.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        stuck.push(stream);
    }
    // All connections are busy: this one waits until the others are disconnected.
    let begun = Instant::now();
    still_serves(&running).await;
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let mut bytes = Vec::new();
    let _ = stuck[0].read_to_end(&mut bytes).await;
    assert!(bytes.len() < 64 << 20, "{} bytes", bytes.len());
}

/// Goal: the Unix socket serves its user, however many connections the port has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listeners_have_connections_of_their_own() {
    let unlimited = |builder: Builder| {
        builder.limits(Limits {
            connections: 1,
            idle_max: Duration::from_secs(60),
            ..Limits::default()
        })
    };
    let running = Running::start_with(Arc::new(InMemory::new()), unlimited);
    let signed = running.request(Method::PUT, "a").body("0123456789").head();
    let mut busy = TcpStream::connect(running.address).await.unwrap();
    busy.write_all(signed.as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let client = running.local_client();
    client.put(&Path::from("b"), PutPayload::from_static(b"text")).await.unwrap();
    busy.write_all(b"0123456789").await.unwrap();
    let mut reply = [0; 12];
    busy.read_exact(&mut reply).await.unwrap();
    assert_eq!(&reply, b"HTTP/1.1 200");
}

#[tokio::test]
async fn requests_in_progress_are_finished_at_the_end() {
    let mut running = start();
    let head = running.request(Method::PUT, "a").body("0123456789").head();
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    running.end();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(TcpStream::connect(running.address).await.is_err(), "no new connections");
    stream.write_all(b"0123456789").await.unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).await.unwrap();
    assert!(reply.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&reply));
    (&mut running.serving).await.unwrap().unwrap();
    assert!(!running.socket.exists(), "the socket's path is removed");
    assert_eq!(running.store.head(&Path::from("a")).await.unwrap().size, 10);
}

/// A store whose bodies end early with an error, and that deletes nothing. Its errors name objects below `x`.
#[derive(Debug)]
struct FailingStore(Arc<InMemory>);

impl std::fmt::Display for FailingStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "failing")
    }
}

#[async_trait::async_trait]
impl ObjectStore for FailingStore {
    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        let head = options.head;
        let mut found = self.0.get_opts(at, options).await?;
        if !head {
            let error = object_store::Error::Generic { store: "failing", source: "lost".into() };
            let frames = [Ok(Bytes::from_static(b"0123")), Err(error)];
            found.payload = GetResultPayload::Stream(stream::iter(frames).boxed());
        }
        Ok(found)
    }

    async fn put_opts(
        &self,
        at: &Path,
        bytes: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.0.put_opts(at, bytes, options).await
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.put_multipart_opts(at, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let deleted = paths.map(|path| {
            let (path, source) = (format!("x/{}", path?), "the store's".into());
            Err(match path.as_str() {
                "x/b" => object_store::Error::NotFound { path, source },
                _ => object_store::Error::PermissionDenied { path, source },
            })
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.copy_opts(from, to, options).await
    }
}

/// Goal: a body that the store can't complete ends with a broken connection, not as a shorter object; and no copy of it
/// is written.
#[tokio::test]
async fn a_body_that_the_store_loses_is_no_short_object() {
    let store = Arc::new(FailingStore(Arc::new(InMemory::new())));
    let running = Running::start_with(store, short_limits);
    running.store.put(&Path::from("a"), PutPayload::from_static(b"0123456789")).await.unwrap();
    let reply = exchange(&running, running.request(Method::GET, "a").head().as_bytes()).await;
    // The error may come before the head was sent.
    assert!(reply.is_empty() || reply.contains("content-length: 10\r\n"), "{reply}");
    assert!(!reply.contains("0123456789"), "{reply}");
    let copy = running.request(Method::PUT, "b").header("x-amz-copy-source", "/bucket/a");
    let copy = copy.header("x-amz-metadata-directive", "REPLACE").send().await;
    assert_eq!((copy.status.as_u16(), copy.code()), (500, "InternalError"), "{copy:?}");
    assert!(copy.body.contains("lost"), "{copy:?}");
    assert_eq!(running.request(Method::HEAD, "b").send().await.status, 404);
}

/// Incident: a body of empty pieces without an end took a processor for as long, and a copy of a body without an error was
/// shorter than its source.
#[tokio::test]
async fn a_body_that_is_too_short_is_no_short_object() {
    let far = Far::default();
    let running = Running::start_with(Arc::new(far.clone()), short_limits);
    running.store.put(&Path::from("a"), PutPayload::from_static(b"0123456789")).await.unwrap();
    far.faults.lacks_last_byte.store(true, Relaxed);
    let is_polled_for_ever = || far.faults.empty_pieces.swap(0, Relaxed) > 100;
    let reply = exchange(&running, running.request(Method::GET, "a").head().as_bytes()).await;
    assert!(reply.is_empty() || reply.contains("content-length: 10\r\n"), "{reply}");
    assert!(!is_polled_for_ever(), "by GetObject");
    let copy = running.request(Method::PUT, "b").header("x-amz-copy-source", "/bucket/a");
    let copy = copy.header("x-amz-metadata-directive", "REPLACE").send().await;
    assert_eq!((copy.status.as_u16(), copy.code()), (500, "InternalError"), "{copy:?}");
    assert!(copy.body.contains("a: 9 bytes were received of 10"), "{copy:?}");
    assert!(!is_polled_for_ever(), "by CopyObject");
    assert_eq!(running.request(Method::HEAD, "b").send().await.status, 404);
}

/// Goal: an object that is not deleted is not reported as deleted, if its key looks like the path of another one in the
/// store. Each error is of its own key.
#[tokio::test]
async fn deletions_are_of_whole_keys() {
    let running = Running::start_with(Arc::new(FailingStore(Arc::default())), short_limits);
    let keys: String =
        ["b", "x/b", "c"].map(|key| format!("<Object><Key>{key}</Key></Object>")).concat();
    let body = format!("<Delete>{keys}</Delete>");
    let reply = running.request(Method::POST, "?delete").body(body).send().await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert!(reply.body.contains("<Deleted><Key>b</Key></Deleted>"), "{reply:?}");
    assert_eq!(reply.body.matches("<Deleted>").count(), 1, "{reply:?}");
    assert_eq!(reply.body.matches("<Code>AccessDenied</Code>").count(), 2, "{reply:?}");
    for (key, path) in [("x/b", "x/x/b"), ("c", "x/c")] {
        let error =
            reply.body.split("<Error>").find(|error| error.contains(&format!("<Key>{key}</Key>")));
        assert!(error.is_some_and(|error| error.contains(path)), "{key}: {reply:?}");
    }
}
