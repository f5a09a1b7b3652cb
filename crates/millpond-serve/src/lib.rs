//! One cache of an object store for all processes of a user.
//!
//! A [`Server`] reads the store, into a cache in shared memory. A [`SharedStore`] is the client, an
//! [`ObjectStore`](object_store::ObjectStore) over the program's own store: it reads cached bytes itself, from memory that
//! it can't write, without a system call. The server gets the rest.
//!
//! ```
//! # use std::sync::Arc;
//! use millpond_objects::{CachedStore, Freshness};
//! use millpond_serve::{MemoryChoice, Server, SharedStore};
//! use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
//!
//! # #[tokio::main(flavor = "multi_thread", worker_threads = 2)] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let socket = dir.path().join("socket");
//! let remote: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
//! let cache = CachedStore::builder(Arc::clone(&remote)).memory_bytes(64 << 20);
//! let cache = cache.freshness(Freshness::Immutable).shared(MemoryChoice::Auto).build()?;
//! let server = tokio::spawn(Server::bind(cache, &socket)?.run());
//!
//! // Usually in other processes.
//! let store = SharedStore::new(remote, &socket);
//! let path = Path::from("pond");
//! store.put(&path, "water lilies".into()).await?;
//! assert_eq!(store.get_range(&path, 6..12).await?, "lilies"); // the server's request
//! assert_eq!(store.get_range(&path, 0..5).await?, "water"); // from memory
//! assert_eq!(store.stats().hits, 1);
//! # server.abort();
//! # Ok(()) }
//! ```
//!
//! # Guarantees
//!
//! - Those of [`CachedStore`](millpond_objects::CachedStore): one version per call, freshness by the server's choice, one
//!   request to the store for concurrent misses, of all clients.
//! - A write through a client removes the object from the cache of all before it returns.
//! - Without a server, or when it dies, a client reads and writes its own store.
//! - A client's death, at any moment, leaves nothing in the server but what its requests have cached.

#[cfg(not(any(feature = "object_store_0_13", feature = "object_store_0_14")))]
compile_error!("millpond-serve needs one of the features object_store_0_13 and object_store_0_14");

#[cfg(feature = "object_store_0_13")]
extern crate object_store_0_13 as object_store;

mod client;
#[cfg(feature = "systemd")]
mod inherited;
pub mod protocol;
mod server;
mod socket;
mod stores;

pub use client::{ClientStats, SharedStore, set_server_memory};
#[cfg(feature = "systemd")]
pub use inherited::{InheritedSocket, inherited_socket};
pub use millpond::internals::shared::{MemoryChoice, MemoryKind};
pub use server::{Server, ServerCounts, ServerHandle};
pub use socket::default_socket;
pub use stores::{StoreSet, store_name};

/// The store name in errors of this crate.
const NAME: &str = "millpond";

/// The example of the guide compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/serve.md")]
struct Guide;
