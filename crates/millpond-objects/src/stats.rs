//! What the cache has done.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Counts since the store was made; see [`crate::CachedStore::stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Pages that were read from memory.
    pub hits: u64,
    /// Pages that were not cached when they were asked for.
    pub misses: u64,
    /// Bytes that were read from memory, also of pages that came from the disk just before.
    pub bytes_from_memory: u64,
    /// Bytes that the store sent.
    pub bytes_from_store: u64,
    /// Requests for bytes that were made of the store, whether or not they succeeded.
    pub requests: u64,
    /// Of these, those that only asked whether a version is the newest, and it was.
    pub not_modified: u64,
    /// Objects of which something is known.
    pub objects: u64,
    /// Memory that pages and their tables take, in bytes.
    pub memory_bytes: u64,
    /// Pages that were read from the disk; this and what follows is of the tier that
    /// [`Builder::disk`](crate::Builder::disk) asks for.
    pub disk_hits: u64,
    /// Bytes of these.
    pub bytes_from_disk: u64,
    /// Pages that are on the disk.
    pub disk_pages: u64,
    /// Bytes that were written to the disk.
    pub disk_bytes_written: u64,
    /// Pages that were not kept on the disk: it was too slow for them, or writing failed.
    pub disk_pages_dropped: u64,
    /// Pages whose bytes on the disk were wrong: they were asked of the store.
    pub disk_pages_damaged: u64,
    /// Reads and writes of the disk that failed.
    pub disk_errors: u64,
    /// Nothing is written to the disk for a while, as a write failed.
    pub disk_is_off: bool,
}

/// What is counted where requests are made: next to those, a shared write is nothing.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) bytes: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) not_modified: AtomicU64,
}

impl Counters {
    // Relaxed: nothing goes with a count.
    pub(crate) fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Relaxed);
    }

    pub(crate) fn get(counter: &AtomicU64) -> u64 {
        counter.load(Relaxed)
    }
}
