//! The accounting of the cache: memory outside of frames, and bytes that write-back keeps in memory.
//!
//! Locks: see the modules.

pub(crate) mod copies;

pub(crate) mod heap;

pub(in crate::cache) mod percpu_counter;
pub(crate) mod writeback_counts;
