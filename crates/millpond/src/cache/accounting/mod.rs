//! The accounting of the cache: memory outside of frames, and the bytes that write-back keeps
//! unevictable.
//!
//! Locks: those of the modules.

pub(crate) mod copies;

pub(crate) mod heap;

pub(in crate::cache) mod percpu_counter;
pub(crate) mod writeback_counts;
