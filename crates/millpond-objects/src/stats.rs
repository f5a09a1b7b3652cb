//! What the cache has done.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;
use thread_local::ThreadLocal;

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
    /// Calls that were answered without a request: each would have been one.
    pub requests_saved: u64,
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

impl Stats {
    /// A name and a number each, of what the engine does not count itself.
    pub(crate) fn lines(&self) -> String {
        let counts = [
            ("requests", self.requests),
            ("not_modified", self.not_modified),
            ("requests_saved", self.requests_saved),
            ("bytes_from_store", self.bytes_from_store),
            ("count", self.objects),
            ("disk_hits", self.disk_hits),
            ("disk_bytes_read", self.bytes_from_disk),
            ("disk_bytes_written", self.disk_bytes_written),
            ("disk_pages_dropped", self.disk_pages_dropped),
            ("disk_errors", self.disk_errors),
            ("disk_is_off", self.disk_is_off.into()),
        ];
        counts
            .iter()
            .fold(String::new(), |text, (name, count)| text + &format!("objects_{name} {count}\n"))
    }
}

impl fmt::Display for Stats {
    /// A line for each tier, and one for the disk if there is one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        writeln!(
            f,
            "memory: {} hits, {} misses, {:.1} MiB read; {:.1} MiB of pages, {} objects",
            self.hits,
            self.misses,
            mib(self.bytes_from_memory),
            mib(self.memory_bytes),
            self.objects
        )?;
        write!(
            f,
            "store: {} requests ({} not modified), {} saved, {:.1} MiB received",
            self.requests,
            self.not_modified,
            self.requests_saved,
            mib(self.bytes_from_store)
        )?;
        if (self.disk_pages, self.disk_bytes_written, self.disk_errors) == (0, 0, 0) {
            return Ok(());
        }
        write!(
            f,
            "\ndisk: {} pages read, {:.1} MiB; {} pages there, {:.1} MiB written, {} pages dropped, {} damaged, {} errors{}",
            self.disk_hits,
            mib(self.bytes_from_disk),
            self.disk_pages,
            mib(self.disk_bytes_written),
            self.disk_pages_dropped,
            self.disk_pages_damaged,
            self.disk_errors,
            if self.disk_is_off { "; not written to for a while" } else { "" }
        )
    }
}

/// What hits count: each thread for itself, and no other line is written to.
#[derive(Debug, Default)]
pub(crate) struct SavedRequests(ThreadLocal<CachePadded<AtomicU64>>);

impl SavedRequests {
    pub(crate) fn add(&self) {
        let mine = self.0.get_or_default();
        // Relaxed, and no read-modify-write: its thread's alone.
        mine.store(mine.load(Relaxed) + 1, Relaxed);
    }

    pub(crate) fn sum(&self) -> u64 {
        self.0.iter().map(|count| count.load(Relaxed)).sum()
    }
}

/// What is counted where requests are made: next to those, a shared write is nothing.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) bytes: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) not_modified: AtomicU64,
    pub(crate) saved: SavedRequests,
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
