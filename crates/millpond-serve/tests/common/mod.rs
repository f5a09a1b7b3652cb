//! Servers in a thread of their own, and stores that count requests.
#![allow(dead_code, unused_imports, reason = "each test program uses a part")]

#[path = "../../../millpond-objects/tests/common/mod.rs"]
mod far;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use millpond_objects::{CachedStore, Freshness};
use millpond_serve::{MemoryChoice, Server, ServerHandle};
use object_store::ObjectStore;
use tokio::runtime::Runtime;

pub use far::{Far, Faults, bounded, content};

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
