//! A read cache for object stores: an [`ObjectStore`](object_store::ObjectStore) that caches pages of another one's
//! objects in memory, under a hard limit.
//!
//! ```
//! # use std::sync::Arc;
//! use millpond_objects::{CachedStore, Freshness};
//! use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> object_store::Result<()> {
//! let remote: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
//! let store = CachedStore::builder(remote).memory_bytes(64 << 20).freshness(Freshness::Immutable).build()?;
//! let path = Path::from("pond/1.parquet");
//! store.put(&path, "water lilies".into()).await?;
//! assert_eq!(store.get_range(&path, 6..12).await?, "lilies"); // a request to `remote`
//! assert_eq!(store.get_range(&path, 0..5).await?, "water"); // cached: no request
//! assert_eq!(store.stats().requests, 1);
//! # Ok(()) }
//! ```
//!
//! # Guarantees
//!
//! - **One version per call.** Pages are cached by object and version (its ETag, or its version field if it has no
//!   ETag), and missing bytes are requested with `If-Match`. The bytes that a call returns are of one version, or the call
//!   fails. A long `get` ends with [`object_store::Error::Precondition`] if its object is replaced during the read and a
//!   part of the old version was evicted before it was returned.
//! - **Freshness** is a choice: see [`Freshness`]. After a write, copy, rename or delete through the same store has
//!   returned, no read returns the earlier version. A write whose future was dropped may still reach the store later.
//! - **One request** for concurrent misses of a page, and few requests for neighbouring pages ([`Builder::gap_bytes`]).
//!   This holds in a tokio runtime, where requests are spawned as tasks and continue when their caller is dropped.
//!   Outside of a runtime each caller sends its own requests.
//! - **Errors pass unchanged** to the caller that sent the request. Other callers that waited for the same bytes send
//!   their own request. A failed request leaves nothing in the cache.
//! - **Memory**: pages and names together stay below [`Builder::memory_bytes`].
//! - **Disk** (optional, [`Builder::disk`]): a second tier with a separate limit, which survives restarts. A page is
//!   served only if its checksum is right, so a kill, a full disk or a failing disk never causes wrong bytes.
//!
//! # Version of `object_store`
//!
//! 0.14. Programs whose other crates use 0.13 (such as DataFusion 55) enable the feature `object_store_0_13` and disable
//! the default features.

#[cfg(not(any(feature = "object_store_0_13", feature = "object_store_0_14")))]
compile_error!(
    "millpond-objects needs one of the features object_store_0_13 and object_store_0_14"
);
#[cfg(all(feature = "object_store_0_13", feature = "object_store_0_14"))]
compile_error!(
    "millpond-objects can't have both features object_store_0_13 and object_store_0_14: the former needs \
     default-features = false"
);

#[cfg(feature = "object_store_0_13")]
extern crate object_store_0_13 as object_store;

mod allocation;
mod body;
mod boot_time;
mod cacheable;
mod directory;
mod disk;
mod fetch;
mod get;
#[cfg(test)]
mod hits_tests;
mod home_runtime;
mod inner;
mod lists;
#[cfg(feature = "local")]
mod local_files;
mod options;
#[cfg(feature = "shared")]
mod owner;
mod response;
#[cfg(feature = "shared")]
pub mod serving;
mod single_flight;
mod stats;
mod store;
mod stream;
#[cfg(feature = "shared")]
mod validity;

pub use body::checked_body;
pub use disk::directory_lock::DirectoryInUse;
#[cfg(feature = "local")]
pub use local_files::LocalFiles;
pub use options::{Builder, Freshness};
pub use stats::Stats;
pub use store::CachedStore;

/// The store name in errors of this crate.
const NAME: &str = "millpond";

/// The example of the guide compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/objects.md")]
struct Guide;
