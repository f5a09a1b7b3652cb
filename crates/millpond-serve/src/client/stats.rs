//! Statistics of a client.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;
use thread_local::ThreadLocal;

/// Counts since the store was created; see [`SharedStore::stats`](crate::SharedStore::stats).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientStats {
    /// Reads that were served from the server's memory, without a request.
    pub hits: u64,
    /// The bytes of these.
    pub hit_bytes: u64,
    /// Reads that asked the server.
    pub misses: u64,
    /// Messages to the server.
    pub requests: u64,
    /// Reads that the server left to the store: conditional ones, and those that can't be cached.
    pub bypassed: u64,
    /// Reads that went to the store because no server answered.
    pub fallbacks: u64,
    /// How often a server has accepted this client.
    pub attaches: u64,
    /// Whether it is attached now.
    pub is_attached: bool,
    /// Objects that are known now.
    pub objects: u64,
}

/// Counts of a thread, so that hits write to no cache line that threads share.
#[derive(Debug, Default)]
struct HitCounts {
    hits: AtomicU64,
    bytes: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct ClientCounters {
    hits: ThreadLocal<CachePadded<HitCounts>>,
    pub(crate) misses: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) bypassed: AtomicU64,
    pub(crate) fallbacks: AtomicU64,
    pub(crate) attaches: AtomicU64,
}

impl ClientCounters {
    #[inline]
    pub(crate) fn hit(&self, bytes: u64) {
        let mine = self.hits.get_or_default();
        // Relaxed, and no read-modify-write: only this thread writes the counts.
        mine.hits.store(mine.hits.load(Relaxed) + 1, Relaxed);
        mine.bytes.store(mine.bytes.load(Relaxed) + bytes, Relaxed);
    }

    pub(crate) fn add(counter: &AtomicU64) {
        // Relaxed: a count publishes no other data.
        counter.fetch_add(1, Relaxed);
    }

    pub(crate) fn stats(&self) -> ClientStats {
        ClientStats {
            hits: self.hits.iter().map(|mine| mine.hits.load(Relaxed)).sum(),
            hit_bytes: self.hits.iter().map(|mine| mine.bytes.load(Relaxed)).sum(),
            misses: self.misses.load(Relaxed),
            requests: self.requests.load(Relaxed),
            bypassed: self.bypassed.load(Relaxed),
            fallbacks: self.fallbacks.load(Relaxed),
            attaches: self.attaches.load(Relaxed),
            ..ClientStats::default()
        }
    }
}
