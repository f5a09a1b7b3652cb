//! A page cache for objects: an [`ObjectStore`](object_store::ObjectStore) over any other, that keeps what
//! was read in memory, under a hard limit.
//!
//! ```
//! # use std::sync::Arc;
//! use millpond_objects::{CachedStore, Freshness};
//! use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> object_store::Result<()> {
//! let far: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
//! let store = CachedStore::builder(far).memory_bytes(64 << 20).freshness(Freshness::Immutable).build()?;
//! let path = Path::from("pond/1.parquet");
//! store.put(&path, "water lilies".into()).await?;
//! assert_eq!(store.get_range(&path, 6..12).await?, "lilies"); // a request to `far`
//! assert_eq!(store.get_range(&path, 0..5).await?, "water"); // none
//! assert_eq!(store.stats().requests, 1);
//! # Ok(()) }
//! ```
//!
//! # What it promises
//!
//! - **One version a call.** Pages are cached by object and version (its ETag, or its version where it has
//!   no ETag), and what is missing is asked for with `If-Match`: the bytes that a call returns are
//!   of one version, or the call fails. A long `get` whose object is replaced meanwhile, and part of which
//!   was evicted before it was returned, ends with [`object_store::Error::Precondition`].
//! - **Freshness** is a choice: see [`Freshness`]. What is written, copied, renamed or deleted through the
//!   same store is never read as it was before, once the call has returned, or was dropped.
//! - **One request** for a page that many miss at once; few for neighbouring pages
//!   ([`Builder::gap_bytes`]). That holds in a tokio runtime, on which requests are spawned: there they go
//!   on when whoever asked gives up. Outside of one each caller makes its own.
//! - **Errors pass unchanged**, to the caller whose request it was; others who waited for the same bytes
//!   make their own request. A failed request leaves nothing in the cache.
//! - **Memory**: pages and names together stay below [`Builder::memory_bytes`].
//!
//! - **Disk**, where it is asked for ([`Builder::disk`]): a second tier, under a limit of its own, that survives
//!   restarts. Bytes are believed for their checksum alone, so neither a kill nor a full or broken disk makes
//!   a wrong byte.
//!
//! # Which `object_store`
//!
//! 0.14. Programs whose other crates are at 0.13 (DataFusion 55 is) take the feature `object_store_0_13` without the
//! default ones.

#[cfg(not(any(feature = "object_store_0_13", feature = "object_store_0_14")))]
compile_error!(
    "millpond-objects needs one of its features object_store_0_13 and object_store_0_14"
);
#[cfg(all(feature = "object_store_0_13", feature = "object_store_0_14"))]
compile_error!(
    "millpond-objects has one of its features object_store_0_13 and object_store_0_14: the former wants \
     default-features = false"
);

#[cfg(feature = "object_store_0_13")]
extern crate object_store_0_13 as object_store;

mod allocation;
mod directory;
mod disk;
mod fetch;
mod get;
#[cfg(test)]
mod hits_tests;
mod home_runtime;
mod inner;
mod options;
mod response;
mod single_flight;
mod stats;
mod store;
mod stream;

pub use options::{Builder, Freshness};
pub use stats::Stats;
pub use store::CachedStore;

/// What errors of ours give as the store.
const NAME: &str = "millpond";
