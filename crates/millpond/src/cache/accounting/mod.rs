//! The accounting of the cache: memory outside of frames, and the bytes of dirty pages and of pages
//! under write-back, which the evictor can't take. The counts enforce the memory limit and the dirty
//! limit.

pub(crate) mod copies;

pub(crate) mod heap;

pub(in crate::cache) mod percpu_counter;
pub(crate) mod writeback_counts;
