//! The policy of the cache: which missed pages get a frame, and which pages are evicted.
//!
//! Locks: those of the modules.

pub(crate) mod admission;

pub(crate) mod evict;

pub(crate) mod fifo;
pub(in crate::cache) mod ghost;
pub(in crate::cache) mod insert_batch;
pub(crate) mod queue_node;
