//! libmillpond: the engine for C, as `include/millpond.h` declares it.
//!
//! ```text
//!   engine, file, io, extent, durability, view, queue, pipeline, buffers, stats, fault     a family of calls each
//!        -> call       the frame of every call: no panic leaves it, errors become numbers
//!        -> handle     numbers that stand for objects
//! ```
//!
//! cbindgen generates the header from the documentation in these files; `cbindgen.toml` has its
//! introduction. A test fails if the header is out of date. The comments on `extern` functions address
//! callers in C.

#![allow(non_camel_case_types, reason = "types are named as in C")]
#![cfg_attr(loom, allow(dead_code, reason = "the protocol alone"))]

#[cfg(not(loom))]
mod engine;

#[cfg(not(loom))]
mod file;

#[cfg(not(loom))]
mod io;

#[cfg(not(loom))]
mod extent;

#[cfg(not(loom))]
mod durability;

#[cfg(not(loom))]
mod view;

#[cfg(not(loom))]
mod queue;

#[cfg(not(loom))]
mod pipeline;

#[cfg(not(loom))]
mod buffers;

#[cfg(not(loom))]
mod stats;

#[cfg(not(loom))]
mod fault;

#[cfg(not(loom))]
mod call;

#[cfg(not(loom))]
mod objects;

mod handle;

mod sync;
