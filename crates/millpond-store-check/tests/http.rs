//! Tests the check over TCP, with small correct and broken S3 servers, and with lost replies.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use millpond_store_check::{Options, Report, Verdict, check, open};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Good,
    IgnoresConditions,
    ChecksThenWrites,
    /// Every third conditional write gets status 409 and is not executed.
    Conflicts,
}

#[derive(Debug, Default)]
struct Objects {
    by_path: HashMap<String, Object>,
    writes: u64,
    conditional: u64,
}

#[derive(Debug, Clone)]
struct Object {
    tag: String,
    bytes: Vec<u8>,
    metadata: Vec<String>,
}

struct Request {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Request {
    async fn read(stream: &mut TcpStream) -> Option<Self> {
        let mut bytes = Vec::new();
        let end = loop {
            if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            (stream.read_buf(&mut bytes).await.ok()? > 0).then_some(())?;
        };
        let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let mut lines = head.lines();
        let mut first = lines.next()?.split(' ');
        let (method, path) = (first.next()?.to_owned(), first.next()?.to_owned());
        let headers: Vec<_> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
            .collect();
        let mut request = Self { method, path, headers, body: bytes.split_off(end) };
        let len = request.header("content-length").map_or(0, |len| len.parse().unwrap());
        while request.body.len() < len {
            (stream.read_buf(&mut request.body).await.ok()? > 0).then_some(())?;
        }
        Some(request)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(had, _)| had == name).map(|(_, value)| value.as_str())
    }

    /// Whether the conditions of a write do not hold.
    fn refused(&self, objects: &Objects) -> bool {
        let found = objects.by_path.get(&self.path);
        let tag = found.map(|object| object.tag.as_str());
        (self.header("if-none-match") == Some("*") && found.is_some())
            || self.header("if-match").is_some_and(|wanted| Some(wanted) != tag)
    }
}

fn reply(status: &str, headers: &[String], body: &[u8], with_body: bool) -> Vec<u8> {
    let len = body.len();
    let mut reply = format!("HTTP/1.1 {status}\r\ncontent-length: {len}\r\n").into_bytes();
    for header in headers {
        reply.extend_from_slice(format!("{header}\r\n").as_bytes());
    }
    reply.extend_from_slice(b"\r\n");
    if with_body {
        reply.extend_from_slice(body);
    }
    reply
}

async fn put(kind: Kind, request: &Request, objects: &Mutex<Objects>) -> Vec<u8> {
    let conditional = ["if-match", "if-none-match"].iter().any(|h| request.header(h).is_some());
    if conditional && kind == Kind::ChecksThenWrites {
        if request.refused(&objects.lock().unwrap()) {
            return reply("412 Precondition Failed", &[], b"", true);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let mut objects = objects.lock().unwrap();
    objects.conditional += u64::from(conditional);
    if conditional && kind == Kind::Conflicts && objects.conditional.is_multiple_of(3) {
        return reply("409 Conflict", &[], b"", true);
    }
    if matches!(kind, Kind::Good | Kind::Conflicts) && request.refused(&objects) {
        return reply("412 Precondition Failed", &[], b"", true);
    }
    objects.writes += 1;
    let tag = format!("\"{}\"", objects.writes);
    let metadata = request.headers.iter().filter(|(name, _)| name.starts_with("x-amz-meta-"));
    let metadata = metadata.map(|(name, value)| format!("{name}: {value}")).collect();
    let object = Object { tag: tag.clone(), bytes: request.body.clone(), metadata };
    objects.by_path.insert(request.path.clone(), object);
    reply("200 OK", &[format!("etag: {tag}")], b"", true)
}

fn get(request: &Request, objects: &Objects) -> Vec<u8> {
    if request.path.contains("list-type=2") {
        let none = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>";
        return reply("200 OK", &[], none, true);
    }
    let Some(object) = objects.by_path.get(&request.path) else {
        return reply("404 Not Found", &[], b"", true);
    };
    if request.header("if-none-match") == Some(&object.tag) {
        return reply("304 Not Modified", &[], b"", true);
    }
    if request.header("if-match").is_some_and(|wanted| wanted != object.tag) {
        return reply("412 Precondition Failed", &[], b"", true);
    }
    let mut headers = object.metadata.clone();
    headers.push(format!("etag: {}", object.tag));
    headers.push("last-modified: Mon, 01 Jan 2024 00:00:00 GMT".into());
    reply("200 OK", &headers, &object.bytes, request.method == "GET")
}

async fn serve(kind: Kind) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let objects = Arc::new(Mutex::new(Objects::default()));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let objects = Arc::clone(&objects);
            tokio::spawn(async move {
                while let Some(request) = Request::read(&mut stream).await {
                    let reply = match request.method.as_str() {
                        "PUT" => put(kind, &request, &objects).await,
                        _ => get(&request, &objects.lock().unwrap()),
                    };
                    if stream.write_all(&reply).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    url
}

async fn checked(kind: Kind) -> Report {
    let options = Options { rounds: 10, ..Options::default() };
    let endpoint = serve(kind).await;
    let endpoints = open("s3://bucket/some/place", &[endpoint], &options).await.unwrap();
    check(&endpoints, &options).await.unwrap()
}

fn broken(report: &Report) -> Vec<&'static str> {
    report.promises.iter().filter(|p| p.verdict == Verdict::Broken).map(|p| p.name).collect()
}

/// Checks that keys are set, which the servers ignore.
fn keys() {
    let set = std::env::var("AWS_ACCESS_KEY_ID").is_ok();
    assert!(set, "run with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY set to anything");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_good_server_keeps_all_promises() {
    keys();
    let report = checked(Kind::Good).await;
    assert!(report.promises.iter().all(|p| p.verdict == Verdict::Kept), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_servers_are_detected() {
    keys();
    let report = checked(Kind::IgnoresConditions).await;
    let all = ["create_twice", "racing_creates", "stale_update", "racing_updates", "lost_replies"];
    assert_eq!(broken(&report), all, "{report}");
    let report = checked(Kind::ChecksThenWrites).await;
    assert_eq!(broken(&report), ["racing_creates", "racing_updates"], "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflicts_leave_promises_undecided() {
    keys();
    let report = checked(Kind::Conflicts).await;
    let races = report.promises.iter().filter(|p| p.name.starts_with("racing"));
    assert!(races.clone().count() == 2 && races.clone().all(|p| p.verdict == Verdict::Kept));
}
