//! The API: engines, files and their futures, views, blobs, pipelines.

pub(crate) mod engine;

pub(crate) mod publish;

pub(crate) mod file;

pub(crate) mod view;

pub(crate) mod watch;

pub(crate) mod blob;

#[cfg(feature = "internals")]
pub(crate) mod shared_cache;

mod persist;

pub(crate) mod async_file;

#[cfg(all(feature = "tokio", not(any(loom, scheduled))))]
pub(crate) mod async_cursor;

pub(crate) mod background_read;

pub(crate) mod pipeline;
