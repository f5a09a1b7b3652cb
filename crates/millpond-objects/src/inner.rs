//! The state that all clones of a [`CachedStore`](crate::CachedStore) share.

use std::ops::Range;
use std::sync::Arc;

use millpond::Engine;
use millpond::blob::Fill;
use object_store::{GetResult, ObjectStore};

use crate::allocation::BlobAllocator;
use crate::boot_time::BootTime;
use crate::cacheable::CacheableReads;
use crate::directory::{Directory, ObjectEntry, Stamp, is_unversioned};
use crate::disk::DiskTier;
use crate::home_runtime::HomeRuntime;
use crate::options::{Builder, Freshness};
use crate::single_flight::SingleFlight;
use crate::stats::Counters;
#[cfg(feature = "shared")]
use crate::validity::ValidityTable;

/// Restarts of a read whose object changes version, before the read bypasses the cache. Untuned.
pub(crate) const VERSIONS_MAX: u32 = 4;

/// Parts of a shared cache besides the engine's memory.
#[cfg(feature = "shared")]
pub(crate) struct SharedParts {
    pub(crate) table: Arc<ValidityTable>,
    /// The part of the memory that is not the engine's.
    pub(crate) fixed_bytes: u64,
    /// The memory limit that the store was built with.
    pub(crate) memory_bytes: u64,
}

pub(crate) struct Inner {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) allocator: BlobAllocator,
    pub(crate) directory: Directory,
    pub(crate) first_requests: Arc<SingleFlight>,
    pub(crate) home: HomeRuntime,
    pub(crate) freshness: Freshness,
    pub(crate) cacheable_reads: CacheableReads,
    pub(crate) gap_bytes: u64,
    pub(crate) readahead_bytes_max: u64,
    pub(crate) counters: Counters,
    pub(crate) tier: Option<DiskTier>,
    #[cfg(feature = "shared")]
    pub(crate) shared: Option<SharedParts>,
    began: BootTime,
}

impl Inner {
    pub(crate) fn new(
        options: Builder,
        engine: Engine,
        directory_bytes: u64,
        tier: Option<DiskTier>,
    ) -> Inner {
        Inner {
            store: options.inner,
            allocator: BlobAllocator::new(engine, options.page_bytes),
            directory: Directory::new(directory_bytes),
            first_requests: Arc::default(),
            home: HomeRuntime::default(),
            freshness: options.freshness,
            cacheable_reads: options.cacheable_reads,
            gap_bytes: options.gap_bytes,
            readahead_bytes_max: options.readahead_bytes_max,
            counters: Counters::default(),
            tier,
            #[cfg(feature = "shared")]
            shared: None,
            began: BootTime::now(),
        }
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    /// Whether the entry may be served without revalidation.
    pub(crate) fn is_fresh(&self, entry: &ObjectEntry) -> bool {
        match self.freshness {
            Freshness::Immutable => true,
            Freshness::Revalidate => false,
            Freshness::MaxAge(age) => {
                let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
                self.now_ms().saturating_sub(entry.validated_ms()) < age_ms
            }
        }
    }

    #[cfg(feature = "shared")]
    fn with_slot(&self, mut entry: ObjectEntry) -> ObjectEntry {
        let shared = self.shared.as_ref();
        entry.slot = shared.and_then(|shared| shared.table.allocate(entry.validated_ms()));
        entry
    }

    /// A stamp for the request that follows.
    pub(crate) fn stamp(&self, key: &str) -> Stamp {
        self.directory.stamp(key, self.now_ms())
    }

    /// Inserts the entry that a response describes. `None`: the response can't be cached.
    pub(crate) fn admit(
        &self,
        key: &str,
        stamp: &Stamp,
        response: &GetResult,
    ) -> Option<Arc<ObjectEntry>> {
        self.admit_claimed(key, stamp, response, None).map(|(entry, _)| entry)
    }

    /// The same, and claims the pages of a range before others find a new entry: they wait for the claims, and would send
    /// requests of their own otherwise.
    pub(crate) fn admit_claimed(
        &self,
        key: &str,
        stamp: &Stamp,
        response: &GetResult,
        claimed: Option<Range<u64>>,
    ) -> Option<(Arc<ObjectEntry>, Vec<Fill>)> {
        let claim = |entry: &ObjectEntry| {
            claimed.as_ref().map(|range| entry.claim(range).fills).unwrap_or_default()
        };
        let meta = &response.meta;
        if is_unversioned(meta) && self.freshness != Freshness::Immutable {
            return None;
        }
        // Without ETag and version, equal sizes do not mean equal versions (directory.N4).
        if let Some(entry) = self.directory.find(key)
            && entry.is_same_version(meta)
            && !entry.is_unversioned()
        {
            entry.validate(stamp.requested_ms);
            let fills = claim(&entry);
            return Some((entry, fills));
        }
        let allocation = self.allocator.allocate(meta.size)?;
        let (meta, attributes) = (meta.clone(), response.attributes.clone());
        let entry = ObjectEntry::new(key, meta, attributes, allocation, stamp.requested_ms);
        #[cfg(feature = "shared")]
        let entry = self.with_slot(entry);
        let entry = Arc::new(entry);
        let mut fills = claim(&entry);
        let admitted = self.directory.admit(stamp, Arc::clone(&entry))?;
        if !Arc::ptr_eq(&admitted, &entry) {
            // Another request of this version was faster.
            drop(fills);
            fills = claim(&admitted);
        }
        Some((admitted, fills))
    }
}
