//! Hits and misses of a client beside those of a cache in its own process, in turns.
//!
//! `cargo run --profile release-tests -p millpond-serve --example latency [OBJECT_MIB] [STORE_US]`. The server is another process. The store is in
//! memory, and takes 3 ms for each read.

use std::fmt;
use std::io::Write;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use millpond_objects::{CachedStore, Freshness};
use millpond_serve::{MemoryChoice, Server, SharedStore};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

const READ_BYTES: u64 = 4096;
const HITS: u64 = 200_000;
const MISSES: u64 = 200;

#[derive(Debug)]
struct SlowStore {
    store: InMemory,
    delay: Duration,
}

impl fmt::Display for SlowStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("slow")
    }
}

#[async_trait]
impl ObjectStore for SlowStore {
    async fn put_opts(&self, at: &Path, bytes: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.store.put_opts(at, bytes, opts).await
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(at, opts).await
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        // Finer than a timer of the runtime.
        let delay = self.delay;
        tokio::task::spawn_blocking(move || std::thread::sleep(delay)).await.unwrap();
        self.store.get_opts(at, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}

fn path() -> Path {
    Path::from("measured/object")
}

async fn store(bytes: u64, delay: Duration) -> Arc<dyn ObjectStore> {
    let store = InMemory::new();
    let content: Vec<u8> = (0..bytes).map(|at| (at / 4096) as u8).collect();
    store.put(&path(), content.into()).await.unwrap();
    Arc::new(SlowStore { store, delay })
}

fn cache(store: Arc<dyn ObjectStore>, bytes: u64) -> millpond_objects::Builder {
    let builder = CachedStore::builder(store).memory_bytes(2 * bytes + (32 << 20));
    builder.freshness(Freshness::Immutable).readahead_bytes_max(0).gap_bytes(0)
}

/// A place that no other call with this object returns, far from the last one.
fn place(at: u64, bytes: u64) -> Range<u64> {
    let pages = bytes >> 14;
    let page = at.wrapping_mul(0x9E37_79B9_7F4A_7C15) % pages;
    page << 14..(page << 14) + READ_BYTES
}

fn quantile(sorted: &[Duration], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e6
}

async fn hits(store: &dyn ObjectStore, bytes: u64) -> f64 {
    let started = Instant::now();
    for at in 0..HITS {
        let range = place(at, bytes);
        let read = store.get_range_of(&path(), range).await;
        std::hint::black_box(read);
    }
    started.elapsed().as_secs_f64() * 1e9 / HITS as f64
}

#[async_trait]
trait GetRangeOf {
    async fn get_range_of(&self, path: &Path, range: Range<u64>) -> usize;
}

#[async_trait]
impl<S: ObjectStore + ?Sized> GetRangeOf for S {
    async fn get_range_of(&self, path: &Path, range: Range<u64>) -> usize {
        let options = GetOptions::new().with_range(Some(object_store::GetRange::Bounded(range)));
        let read = self.get_opts(path, options).await.unwrap();
        read.bytes().await.unwrap().len()
    }
}

/// Sorted times of misses. `idle`: before each.
async fn misses(store: &dyn ObjectStore, bytes: u64, idle: Duration) -> Vec<Duration> {
    let mut times = Vec::new();
    // Opened before.
    store.get_range_of(&path(), bytes - READ_BYTES..bytes).await;
    for at in 0..MISSES {
        tokio::time::sleep(idle).await;
        let started = Instant::now();
        store.get_range_of(&path(), place(at, bytes)).await;
        times.push(started.elapsed());
    }
    times.sort();
    times
}

/// Requests that the server answers at once.
async fn round_trips(client: &SharedStore, idle: Duration) {
    let mut times = Vec::new();
    for _ in 0..MISSES {
        tokio::time::sleep(idle).await;
        let started = Instant::now();
        client.forget(&Path::from("no object")).await;
        times.push(started.elapsed());
    }
    times.sort();
    println!(
        "a round trip: p50 {:.1} us, p99 {:.1}",
        quantile(&times, 0.5),
        quantile(&times, 0.99)
    );
}

/// Round trips of a thread that blocks in its own socket to the server: without the client's part.
fn bare_round_trips(socket: &std::path::Path, idle: Duration) -> f64 {
    use millpond_serve::protocol::{Hello, PROTOCOL_VERSION, Request};
    use rustix::net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
        SocketAddrUnix, SocketType,
    };
    let connection = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::connect(&connection, &SocketAddrUnix::new(socket).unwrap()).unwrap();
    let memory = millpond::internals::shared::ClientMemory::create().unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [std::os::fd::AsFd::as_fd(memory.descriptor())];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let hello = Hello { version: PROTOCOL_VERSION, store_name: None }.encode().unwrap();
    let parts = [std::io::IoSlice::new(&hello)];
    rustix::net::sendmsg(&connection, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
    let mut buffer = [0; 4096];
    rustix::net::recv(&connection, &mut buffer[..], RecvFlags::empty()).unwrap();
    let ping = Request::Ping.encode(1).unwrap();
    let mut times = Vec::new();
    for _ in 0..MISSES {
        std::thread::sleep(idle);
        let started = Instant::now();
        rustix::net::send(&connection, &ping, SendFlags::NOSIGNAL).unwrap();
        rustix::net::recv(&connection, &mut buffer[..], RecvFlags::empty()).unwrap();
        times.push(started.elapsed());
    }
    times.sort();
    quantile(&times, 0.5)
}

/// The floor of any way to another process and back: a byte to a thread that sleeps in `read`, and its answer.
fn wake_ups(idle: Duration) -> f64 {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    let (mut own, mut other) = UnixStream::pair().unwrap();
    let answering = std::thread::spawn(move || {
        let mut byte = [0];
        while other.read_exact(&mut byte).is_ok() {
            other.write_all(&byte).unwrap();
        }
    });
    let mut times = Vec::new();
    for _ in 0..MISSES {
        std::thread::sleep(idle);
        let started = Instant::now();
        own.write_all(&[1]).unwrap();
        own.read_exact(&mut [0]).unwrap();
        times.push(started.elapsed());
    }
    drop(own);
    answering.join().unwrap();
    times.sort();
    quantile(&times, 0.5)
}

async fn serve(bytes: u64, delay: Duration, socket: &str) {
    let cache = cache(store(bytes, delay).await, bytes).shared(MemoryChoice::Auto).build().unwrap();
    eprintln!("{}", cache.shared_cache().unwrap().memory());
    let server = Server::bind(cache, socket).unwrap();
    println!("ready");
    std::io::stdout().flush().unwrap();
    server.run().await.unwrap();
}

fn main() {
    let workers: usize = std::env::var("WORKERS").map_or(2, |text| text.parse().unwrap());
    let mut builder = match workers {
        0 => tokio::runtime::Builder::new_current_thread(),
        workers => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(workers);
            builder
        }
    };
    // On a worker, as the queries of an engine are.
    let runtime = builder.enable_all().build().unwrap();
    runtime.block_on(async { tokio::spawn(measure()).await.unwrap() });
}

async fn measure() {
    let arguments: Vec<String> = std::env::args().collect();
    let number =
        |at: usize, default| arguments.get(at).map_or(default, |text| text.parse().unwrap());
    let (bytes, delay) = (number(1, 64) << 20, Duration::from_micros(number(2, 3000)));
    if let Some(socket) = arguments.get(3) {
        return serve(bytes, delay, socket).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let round = async |name: &str, shared: bool, idle: Duration| {
        let store = store(bytes, delay).await;
        let socket = dir.path().join("socket");
        let mut server = None;
        let tested: Arc<dyn ObjectStore> = if shared {
            let mut child = Command::new(std::env::current_exe().unwrap());
            let (mib, us) = ((bytes >> 20).to_string(), delay.as_micros().to_string());
            let workers = std::env::var("SERVER_WORKERS").unwrap_or("2".into());
            child.env("WORKERS", workers);
            child.args([mib, us]).arg(&socket).stdout(Stdio::piped());
            let mut child = child.spawn().unwrap();
            let mut line = [0; 6];
            std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
            server = Some(child);
            let client = SharedStore::new(store, &socket);
            client.attach().await;
            println!(
                "a round trip of a bare socket: p50 {:.1} us",
                bare_round_trips(&socket, idle)
            );
            round_trips(&client, idle).await;
            Arc::new(client)
        } else {
            Arc::new(cache(store, bytes).build().unwrap())
        };
        let times = misses(&*tested, bytes, idle).await;
        // Fill the rest.
        for at in (0..bytes).step_by(1 << 20) {
            tested.get_range_of(&path(), at..at + (1 << 20)).await;
        }
        hits(&*tested, bytes).await;
        let hit_ns = hits(&*tested, bytes).await;
        println!(
            "{name:<11} miss p50 {:7.1} us, p99 {:7.1}; hit of 4 KiB {hit_ns:6.1} ns",
            quantile(&times, 0.5),
            quantile(&times, 0.99)
        );
        if let Some(mut server) = server {
            server.kill().unwrap();
            server.wait().unwrap();
        }
    };
    for idle_ms in [0, 3, 10] {
        let floor = wake_ups(Duration::from_millis(idle_ms));
        println!("after {idle_ms} ms, two wake-ups by a socket: p50 {floor:.1} us");
    }
    for idle_ms in [0, 10] {
        println!("{idle_ms} ms idle before each miss, {} MiB, {delay:?}:", bytes >> 20);
        let idle = Duration::from_millis(idle_ms);
        for shared in [false, true, true, false] {
            round(if shared { "shared" } else { "in process" }, shared, idle).await;
        }
    }
}
