//! Millpond: a user-space file I/O engine for Linux.
//!
//! A page cache in the program itself: cached reads take no lock and write no shared memory, reads
//! and writes of one file are atomic with respect to each other however many pages they cover, and
//! the memory in use has a hard limit. A write goes through to the kernel before it returns, or waits in
//! the cache to be written back, as the file was opened ([`WriteMode`]).
//!
//! ```
//! use millpond::{Engine, OpenOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("data");
//! let engine = Engine::builder().cache_bytes(64 << 20).build()?;
//! let file = engine.open(&path, &OpenOptions::new().read(true).write(true).create(true))?;
//! file.write_all_at(b"hello, pond", 0)?;
//! let mut bytes = [0; 4];
//! assert_eq!(file.read_at(&mut bytes, 7)?, 4);
//! assert_eq!(&bytes, b"pond");
//! file.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! Data flows one way, and each folder knows only those below it: `api` and `queue` -> `direct_io`, `write`,
//! `read` -> `writeback` -> `inode` -> `writeback::state`, `cache` -> `backend` -> `recovery` -> `io`.
//!
//! With the feature `sim` there are back ends without files, too: a device that is slow and faulty on purpose,
//! for tests, and one that moves no bytes, to measure the way to it.
//!
//! A target must be multi-copy atomic (x86-64 and AArch64 are): else two readers could see two
//! writes in opposite orders.

#![deny(missing_docs)]
#![cfg_attr(loom, allow(dead_code, reason = "what the models use alone"))]
#![cfg_attr(not(feature = "internals"), allow(dead_code, reason = "what `internals` uses alone"))]

// One scheduler decides who runs, by a seed.
#[cfg(scheduled)]
extern crate millpond_schedule as std;

mod api;

#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;

/// Completion queues: many operations are submitted at once, and one wake-up returns a batch of completions.
pub mod queue;

mod read;

mod write;

mod direct_io;

mod inode;

mod writeback;

mod cache;

mod backend;

mod recovery;

#[cfg(feature = "sim")]
pub mod sim;

mod io;

mod buffers;

mod units;

pub mod fault;

mod workers;

mod advice;
mod copy;
#[cfg(not(loom))]
mod page_cache;
/// The parts that have models.
#[cfg(loom)]
mod page_cache {
    mod mapping;
    mod model;
    mod versions;

    pub(crate) use model::{Inode, maps_what_it_reads};
    pub(crate) use versions::PAGE_BYTES;
}
mod error;
mod event;
mod file_id;
#[cfg_attr(not(feature = "internals"), allow(dead_code, reason = "only internals offer it"))]
mod huge_memory;
mod latency;
mod memory;
mod options;
mod process_local;
/// What an engine has counted and measured, and what its operations wait for.
pub mod stats;
mod sync;
mod thread;
mod waits;

#[cfg(all(test, not(loom)))]
#[path = "../tests/common/skip.rs"]
mod skip;
#[cfg(all(test, not(loom)))]
mod tests;

pub use advice::Advice;
pub use api::async_file::{AsyncFile, ReadAt, ReadVectoredAt};
pub use api::engine::Engine;
pub use api::file::File;
pub use api::view::View;
pub use buffers::{BUFFER_ALIGN_BYTES, Buffer};
pub use error::{Error, Op, PersistStep, Result};
#[cfg(fuzzing)]
#[doc(hidden)]
pub use io::segment::fuzz::segment_lists as fuzz_segment_lists;
pub use options::{
    Admission, BackendChoice, Backing, EngineBuilder, OpenOptions, PAGE_BYTES_MAX, PAGE_BYTES_MIN,
    WriteMode,
};
pub use recovery::keeper;

/// Blobs: cached bytes that come from elsewhere than a file, such as an object store.
pub mod blob {
    pub use crate::api::blob::{Arrival, Blob, BlobView, Claim, Fill};
}

/// A file with a position, a file's operations on raw memory, and what suspends the write-back of a file.
pub mod file {
    #[cfg(all(feature = "tokio", not(any(loom, scheduled))))]
    pub use crate::api::async_cursor::AsyncCursor;
    pub use crate::api::file::cursor::Cursor;
    pub use crate::api::file::raw::RawFile;
    pub use crate::api::file::writeback::{DirectSuspended, WritebackSuspended};
}

/// Direct I/O with many requests in flight, and lists of memory for requests.
pub mod direct {
    pub use crate::api::pipeline::{
        DirectRequest, Lane, PIPELINE_DEPTH_MAX, Pipeline, Registration,
    };
    pub use crate::io::segment_list::{Access, Const, Mut, SegmentList};
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("Millpond needs a multi-copy atomic architecture: x86-64 or AArch64");

/// The programs of the guide compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/rust.md")]
#[doc = include_str!("../../../docs/guide/tuning.md")]
struct Guide;
