//! Statistics of a cache.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;
use thread_local::ThreadLocal;

/// Counts since the store was created; see [`crate::CachedStore::stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Pages read from memory.
    pub hits: u64,
    /// Pages that were not in memory when they were requested.
    pub misses: u64,
    /// Bytes read from memory, including pages that were just read from the disk.
    pub bytes_from_memory: u64,
    /// Bytes that the store sent.
    pub bytes_from_store: u64,
    /// Read requests sent to the store, whether or not they succeeded.
    pub requests: u64,
    /// Of these, revalidations that the store answered with "not modified".
    pub not_modified: u64,
    /// Calls that were served without a request.
    pub requests_saved: u64,
    /// Objects that have an entry in the directory.
    pub objects: u64,
    /// Memory of pages and page tables, in bytes.
    pub memory_bytes: u64,
    /// Pages read from the disk. This and the following fields are of the [disk tier](crate::Builder::disk).
    pub disk_hits: u64,
    /// Bytes read from the disk.
    pub bytes_from_disk: u64,
    /// Pages on the disk.
    pub disk_pages: u64,
    /// Bytes written to the disk.
    pub disk_bytes_written: u64,
    /// Pages not written to the disk, because it was too slow or a write failed.
    pub disk_pages_dropped: u64,
    /// Pages with a wrong checksum on the disk; they were requested from the store.
    pub disk_pages_damaged: u64,
    /// Failed reads and writes of the disk.
    pub disk_errors: u64,
    /// Writing to the disk is paused after a failed write.
    pub disk_is_off: bool,
}

impl Stats {
    /// The counts that the engine does not have, a line with name and number each.
    pub(crate) fn published_lines(&self) -> String {
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
    /// A line for memory, one for the store, and one for the disk tier if there is one.
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
            if self.disk_is_off { "; writing paused after an error" } else { "" }
        )
    }
}

/// Further lines of the published statistics.
#[cfg(feature = "shared")]
#[derive(Clone, Default)]
pub(crate) struct MoreLines(pub(crate) Option<std::sync::Arc<dyn Fn() -> String + Send + Sync>>);

#[cfg(feature = "shared")]
impl MoreLines {
    pub(crate) fn text(&self) -> String {
        self.0.as_ref().map_or(String::new(), |lines| lines())
    }
}

#[cfg(feature = "shared")]
impl fmt::Debug for MoreLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MoreLines").field(&self.0.is_some()).finish()
    }
}

/// A count per thread, so that hits write to no cache line that threads share.
#[derive(Debug, Default)]
pub(crate) struct SavedRequests(ThreadLocal<CachePadded<AtomicU64>>);

impl SavedRequests {
    pub(crate) fn add(&self) {
        let mine = self.0.get_or_default();
        // Relaxed, and no read-modify-write: only this thread writes the count.
        mine.store(mine.load(Relaxed) + 1, Relaxed);
    }

    pub(crate) fn sum(&self) -> u64 {
        self.0.iter().map(|count| count.load(Relaxed)).sum()
    }
}

/// Counts of requests. A request costs so much more than a shared write that shared counters do.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) bytes: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) not_modified: AtomicU64,
    pub(crate) saved: SavedRequests,
}

impl Counters {
    // Relaxed: a count publishes no other data.
    pub(crate) fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Relaxed);
    }

    pub(crate) fn get(counter: &AtomicU64) -> u64 {
        counter.load(Relaxed)
    }
}
