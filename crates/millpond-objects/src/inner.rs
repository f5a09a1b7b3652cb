//! What clones of a store share, and what is known of objects through it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use millpond::Engine;
use object_store::{GetResult, ObjectStore};

use crate::directory::{Directory, Known, Stamp, is_blind};
use crate::disk::Tier;
use crate::home::Home;
use crate::opening::Opening;
use crate::options::{Builder, Freshness};
use crate::place::Places;
use crate::stats::Counters;

/// How often a read begins anew because its object is of another version, before it goes past the cache.
/// Chosen, not measured.
pub(crate) const VERSIONS_MAX: u32 = 4;
pub(crate) struct Inner {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) places: Places,
    pub(crate) directory: Directory,
    pub(crate) opening: Arc<Opening>,
    pub(crate) home: Home,
    pub(crate) freshness: Freshness,
    pub(crate) gap_bytes: u64,
    pub(crate) readahead_bytes_max: u64,
    pub(crate) counters: Counters,
    pub(crate) tier: Option<Tier>,
    began: Instant,
}

impl Inner {
    pub(crate) fn new(
        options: Builder,
        engine: Engine,
        directory_bytes: u64,
        tier: Option<Tier>,
    ) -> Inner {
        Inner {
            store: options.inner,
            places: Places::new(engine, options.page_bytes),
            directory: Directory::new(directory_bytes),
            opening: Arc::default(),
            home: Home::default(),
            freshness: options.freshness,
            gap_bytes: options.gap_bytes,
            readahead_bytes_max: options.readahead_bytes_max,
            counters: Counters::default(),
            tier,
            began: Instant::now(),
        }
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    /// Whether nobody needs to be asked if the object is still of that version.
    pub(crate) fn is_fresh(&self, known: &Known) -> bool {
        match self.freshness {
            Freshness::Immutable => true,
            Freshness::Revalidate => false,
            Freshness::MaxAge(age) => {
                let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
                self.now_ms().saturating_sub(known.checked_ms.load(Relaxed)) < age_ms
            }
        }
    }

    /// The moment before a request.
    pub(crate) fn stamp(&self, key: &str) -> Stamp {
        self.directory.stamp(key, self.now_ms())
    }

    /// Enters what an answer says of its object; `None`: it can't be cached.
    pub(crate) fn admit(&self, key: &str, stamp: &Stamp, answer: &GetResult) -> Option<Arc<Known>> {
        let meta = &answer.meta;
        if is_blind(meta) && self.freshness != Freshness::Immutable {
            return None;
        }
        // Without ETag and version the same size does not make it the same version (N4 of the directory).
        if let Some(known) = self.directory.find(key)
            && known.is_of(meta)
            && !known.is_blind()
        {
            known.checked_ms.fetch_max(stamp.asked_ms, Relaxed);
            return Some(known);
        }
        let place = self.places.take(meta.size)?;
        let (meta, attributes) = (meta.clone(), answer.attributes.clone());
        self.directory.admit(stamp, Known::new(key, meta, attributes, place, stamp.asked_ms))
    }
}
