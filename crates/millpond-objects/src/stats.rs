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
    /// Bytes that were read from memory.
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
