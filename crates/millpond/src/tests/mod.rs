//! Tests of the whole engine that need to look inside it.

mod async_reads;
mod bounded;
mod claims;
mod eviction_scans;
mod extents;
mod frame_reservations;
mod in_flight;
mod last_close;
mod misses;
mod no_shared_write;
mod overwrites;
mod recycled_leaves;
mod short;
mod short_reads;
mod shutdown;
pub(crate) mod slow;
mod system_pages;
mod torn;
mod under_writeback;
mod unevictable_pages;
mod woken;
mod worker_threads;
