//! Servers in a thread of their own, and stores that count requests.
#![allow(dead_code, unused_imports, reason = "each test program uses a part")]

#[path = "../../../millpond-objects/tests/common/mod.rs"]
mod far;
mod forks;
mod shared_disk;
#[path = "../../../millpond/tests/common/skip.rs"]
mod skip;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_objects::{CachedStore, Freshness};
use millpond_serve::{MemoryChoice, Server, ServerHandle};
use object_store::ObjectStore;
use tokio::runtime::Runtime;

pub use far::{Far, Faults, bounded, content};
pub use forks::{ForkParent, serve_forks};
pub use shared_disk::{SharedDisk, name_of, version_in, words_of};
pub use skip::skip;

/// A server in this process, on a runtime of its own.
pub struct TestServer {
    pub handle: ServerHandle,
    runtime: Option<Runtime>,
}

impl TestServer {
    pub fn start(store: Arc<dyn ObjectStore>, socket: &Path, freshness: Freshness) -> TestServer {
        TestServer::with_memory(store, socket, freshness, 64 << 20)
    }

    pub fn with_memory(
        store: Arc<dyn ObjectStore>,
        socket: &Path,
        freshness: Freshness,
        memory_bytes: u64,
    ) -> TestServer {
        let cache = CachedStore::builder(store).memory_bytes(memory_bytes).freshness(freshness);
        let cache = cache.shared(MemoryChoice::Small).build().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let server = {
            let _entered = runtime.enter();
            Server::bind(cache, socket).unwrap()
        };
        let handle = server.handle();
        runtime.spawn(server.run());
        TestServer { handle, runtime: Some(runtime) }
    }

    /// The server is gone when this returns.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Not on a thread of another runtime.
            let end = move || runtime.shutdown_timeout(std::time::Duration::from_secs(10));
            std::thread::spawn(end).join().unwrap();
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.end();
    }
}

pub fn temp_dir() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// How much longer than by default the random tests are: MILLPOND_TEST_SCALE.
pub fn scaled(n: u32) -> u32 {
    let scale = std::env::var("MILLPOND_TEST_SCALE").ok().and_then(|scale| scale.parse().ok());
    ((f64::from(n) * scale.unwrap_or(1.0)) as u32).max(1)
}

/// SplitMix64 (Steele et al., OOPSLA 2014).
pub struct Random(pub u64);

impl Random {
    /// Seeded by MILLPOND_TEST_SEED or the clock; says so, for a replay.
    pub fn from_environment() -> Random {
        let seed = std::env::var("MILLPOND_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            now.as_nanos() as u64
        });
        println!("MILLPOND_TEST_SEED={seed}");
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, below: u64) -> u64 {
        self.next() % below.max(1)
    }
}

const ROLE: &str = "MILLPOND_TEST_ROLE";
const ROLE_DIR: &str = "MILLPOND_TEST_ROLE_DIR";

/// The role of this process in `test`, and its directory. `None`: it is the test itself.
pub fn role_in(test: &str) -> Option<(String, PathBuf)> {
    let role = std::env::var(ROLE).ok()?;
    let (of, role) = role.split_once(' ')?;
    (of == test).then(|| (role.to_owned(), std::env::var_os(ROLE_DIR).unwrap().into()))
}

/// Starts this test program again, which runs `test` in a role.
pub fn start_role(test: &str, role: &str, dir: &Path) -> Child {
    role_command(test, role, dir).spawn().unwrap()
}

fn role_command(test: &str, role: &str, dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([test, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(ROLE, format!("{test} {role}"))
        .env(ROLE_DIR, dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    command
}

/// A child process that is killed when this is dropped.
pub struct Killed(pub Child);

impl Killed {
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// Waits until a condition holds.
#[track_caller]
pub fn wait_until(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn block_on<R>(future: impl Future<Output = R>) -> R {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(future)
}
