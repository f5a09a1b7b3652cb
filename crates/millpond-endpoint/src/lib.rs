//! Serves object stores over the S3 protocol to the programs of one user on one machine.
//!
//! Programs that speak S3 themselves, in any language, share a store in this process, for example a cached one: reads
//! are served from the cache, and writes go through it to the store, signed with the store's own credentials. The
//! programs know only the endpoint's access key.
//!
//! - [`Endpoint::builder`]: buckets, a loopback address or a Unix socket, the key file, [`Limits`].
//! - [`Endpoint::serve`]: accepts connections until a future is ready.
//!
//! HTTP is `hyper`'s; requests, signatures and XML are parsed by `s3s`. This crate maps operations to
//! [`ObjectStore`](object_store::ObjectStore) and limits the time and memory of each client.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use millpond_endpoint::Endpoint;
//! use object_store::memory::InMemory;
//!
//! # async fn example() -> Result<(), millpond_endpoint::Error> {
//! let endpoint = Endpoint::builder()
//!     .store("data", Arc::new(InMemory::new())) // any ObjectStore, such as a cached S3
//!     .listen("127.0.0.1:9000".parse().unwrap())
//!     .build()?;
//! println!("the key is in {}", endpoint.key_path().display());
//! endpoint.serve(std::future::pending()).await
//! # }
//! ```

#![forbid(unsafe_code)]

mod options;

mod endpoint;

mod serve;

mod chunks;
mod connections;
mod filter;
mod stalls;

mod gateway;

mod copy;
mod delete;
mod get;
mod list;
mod put;
mod uploads;

mod attributes;
mod body;
mod bucket;
mod counts;
mod failures;
mod memory;

mod key;
mod listeners;

mod error;
mod limits;

pub use counts::RequestCounts;
pub use endpoint::Endpoint;
pub use error::Error;
pub use limits::Limits;
pub use options::Builder;

/// The examples of the page for users, as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/endpoint.md")]
mod page {}
