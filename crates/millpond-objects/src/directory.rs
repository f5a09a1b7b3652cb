//! The directory maps the name of each cached object to its entry: version, length and pages.
//!
//! ```text
//!   find, with_entry:       look up an entry, without a lock and without a write to shared memory
//!   stamp:                  before a request
//!   admit:                  after its response, with the stamp: inserts the entry, unless the object was written
//!                           between the two
//!   begin_write, end_write: around a write of the object, whether it succeeds or not
//!   watch_entry:            a stamp for requests about an entry; none if the entry has left the map
//! ```
//!
//! - **N1** The calls for one object hold one lock, except for lookups. The writes of an object are counted as long
//!   as a stamp or a write refers to the count. So a response that may be older than a completed write never enters
//!   the map.
//! - **N4** A response about an object without strong ETag and without version does not show its version. It is used
//!   only if no write of the object through this store ran between the request and the response. The start of such a
//!   write removes the entry from the map. So all bytes in the pages of an entry are of one version.
//! - **N2** An entry never changes, except for its counters and flags. Another version of the object has another
//!   entry, with other pages.
//! - **N3** Entries take no more memory than their limit, by an estimate. Beyond it, CLOCK evicts entries that were
//!   not used since its last pass.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use foldhash::quality::RandomState;
use object_store::{Attribute, AttributeValue, Attributes, ObjectMeta};

use crate::allocation::Allocation;
#[cfg(feature = "shared")]
use crate::validity::ValiditySlot;

/// Number of locks: usually more than there are threads at work.
const SHARDS: usize = 64;
/// A ring is compacted when half of it and this many entries more are removed ones. Untuned.
const RING_REMOVED_MAX: usize = 16;
/// A shard keeps at least this many write counts before it drops the unused ones. Untuned.
const WRITES_LEN_MIN: usize = 16;
/// Memory of an entry besides its strings: the entry, its slots in map and ring, the allocator's overhead.
const ENTRY_BYTES: u64 = 128 + size_of::<ObjectEntry>() as u64;
/// Memory of an attribute besides its strings.
const ATTRIBUTE_BYTES: usize = 128;

/// One version of an object.
#[derive(Debug)]
pub(crate) struct ObjectEntry {
    pub(crate) key: Box<str>,
    pub(crate) meta: ObjectMeta,
    pub(crate) attributes: Attributes,
    pub(crate) allocation: Allocation,
    /// Start of the last request whose response named this version, in milliseconds of the cache's clock.
    validated_ms: AtomicU64,
    /// Where clients see that the entry is in the map, and when it was validated.
    #[cfg(feature = "shared")]
    pub(crate) slot: Option<ValiditySlot>,
    /// End of the last sequential miss: a miss that starts here continues the sequence.
    pub(crate) sequential_end: AtomicU64,
    /// Read-ahead window of that sequence.
    pub(crate) readahead_bytes: AtomicU64,
    used: AtomicBool,
    is_removed: AtomicBool,
}

impl ObjectEntry {
    pub(crate) fn new(
        key: &str,
        meta: ObjectMeta,
        attributes: Attributes,
        allocation: Allocation,
        requested_ms: u64,
    ) -> ObjectEntry {
        ObjectEntry {
            key: key.into(),
            meta,
            attributes,
            allocation,
            validated_ms: AtomicU64::new(requested_ms),
            #[cfg(feature = "shared")]
            slot: None,
            sequential_end: AtomicU64::new(u64::MAX),
            readahead_bytes: AtomicU64::new(0),
            used: AtomicBool::new(false),
            is_removed: AtomicBool::new(false),
        }
    }

    /// Whether a response is of this version.
    pub(crate) fn is_same_version(&self, meta: &ObjectMeta) -> bool {
        // Objects without ETag and version are cached only if they never change.
        (&self.meta.e_tag, &self.meta.version, self.meta.size)
            == (&meta.e_tag, &meta.version, meta.size)
    }

    /// The start of the last request whose response named this version.
    pub(crate) fn validated_ms(&self) -> u64 {
        // Relaxed, here and in `validate`: the time carries nothing.
        self.validated_ms.load(Relaxed)
    }

    /// A response to a request of this time named this version.
    pub(crate) fn validate(&self, requested_ms: u64) {
        self.validated_ms.fetch_max(requested_ms, Relaxed);
        #[cfg(feature = "shared")]
        if let Some(slot) = &self.slot {
            slot.validate(requested_ms);
        }
    }

    /// Responses about the object do not show their version (N4).
    pub(crate) fn is_unversioned(&self) -> bool {
        is_unversioned(&self.meta)
    }

    /// Marks the entry used for CLOCK. Writes to shared memory only at the first use after a pass.
    pub(crate) fn mark_used(&self) {
        // Relaxed, here and in `evict_to_limit`: a hint.
        if !self.used.load(Relaxed) {
            self.used.store(true, Relaxed);
        }
    }

    fn bytes(&self) -> u64 {
        let tag = |tag: &Option<String>| tag.as_ref().map_or(0, String::len);
        let strings = self.key.len() * 3 + tag(&self.meta.e_tag) + tag(&self.meta.version);
        let of_attribute = |(name, value): (&Attribute, &AttributeValue)| {
            let name = if let Attribute::Metadata(name) = name { name.len() } else { 0 };
            ATTRIBUTE_BYTES + name + value.len()
        };
        let attributes: usize = self.attributes.iter().map(of_attribute).sum();
        ENTRY_BYTES + (strings + attributes) as u64
    }
}

/// Whether the object has neither a strong ETag nor a version.
pub(crate) fn is_unversioned(meta: &ObjectMeta) -> bool {
    strong_tag(meta).is_none() && meta.version.is_none()
}

/// The ETag, if it is a strong one: different bytes may share a weak one (RFC 9110, 8.8.1).
pub(crate) fn strong_tag(meta: &ObjectMeta) -> Option<&str> {
    meta.e_tag.as_deref().filter(|tag| !tag.starts_with("W/"))
}

/// Counts the writes of one object through this store. Relaxed throughout: the shard's lock guards both counts.
#[derive(Debug, Default)]
pub(crate) struct WriteCounts {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// State of an object's writes at the start of a request (N1).
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    writes: Arc<WriteCounts>,
    begun: u64,
    ended: u64,
    /// The age of the response counts from here, as the store may have read the object at once.
    pub(crate) requested_ms: u64,
}

#[derive(Debug, Default)]
struct Shard {
    /// CLOCK order. Includes some removed entries.
    ring: VecDeque<Arc<ObjectEntry>>,
    entries: usize,
    bytes: u64,
    /// Counts of objects with requests or writes in progress, and some unused ones.
    writes: HashMap<Box<str>, Weak<WriteCounts>, RandomState>,
    /// At this length the unused ones are dropped.
    writes_len_max: usize,
}

impl Shard {
    fn writes_of(&mut self, key: &str) -> Arc<WriteCounts> {
        if let Some(writes) = self.writes.get(key).and_then(Weak::upgrade) {
            return writes;
        }
        if self.writes.len() >= self.writes_len_max {
            self.writes.retain(|_, writes| writes.strong_count() > 0);
            self.writes_len_max = WRITES_LEN_MIN.max(self.writes.len() * 2);
        }
        let writes = Arc::default();
        self.writes.insert(key.into(), Arc::downgrade(&writes));
        writes
    }

    fn stamp(&mut self, key: &str, requested_ms: u64) -> Stamp {
        let writes = self.writes_of(key);
        let (begun, ended) = (writes.begun.load(Relaxed), writes.ended.load(Relaxed));
        Stamp { writes, begun, ended, requested_ms }
    }
}

impl Stamp {
    /// Whether the response to a request that started at the stamp may be older than a completed write. For an object
    /// without version: whether any write has run since (N4). The caller holds the shard's lock.
    fn may_predate_write(&self, is_unversioned: bool) -> bool {
        let (begun, ended) = (self.writes.begun.load(Relaxed), self.writes.ended.load(Relaxed));
        ended != self.ended || (is_unversioned && (begun != self.begun || begun != ended))
    }
}

#[derive(Debug)]
pub(crate) struct Directory {
    map: papaya::HashMap<Box<str>, Arc<ObjectEntry>, RandomState>,
    /// Randomly seeded, and fast, as each hit hashes a name.
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    shard_bytes_max: u64,
}

impl Directory {
    pub(crate) fn new(bytes_max: u64) -> Directory {
        let hasher = RandomState::default();
        Directory {
            map: papaya::HashMap::with_hasher(hasher.clone()),
            hasher,
            shards: std::array::from_fn(|_| Mutex::default()),
            shard_bytes_max: bytes_max / SHARDS as u64,
        }
    }

    fn shard_of(&self, key: &str) -> usize {
        self.hasher.hash_one(key) as usize % SHARDS
    }

    /// Calls `look` with the entry of an object, without a lock.
    pub(crate) fn with_entry<R>(
        &self,
        key: &str,
        look: impl FnOnce(&Arc<ObjectEntry>) -> R,
    ) -> Option<R> {
        let map = self.map.pin();
        map.get(key).map(look)
    }

    pub(crate) fn find(&self, key: &str) -> Option<Arc<ObjectEntry>> {
        self.with_entry(key, Arc::clone)
    }

    fn shard(&self, key: &str) -> MutexGuard<'_, Shard> {
        self.shards[self.shard_of(key)].lock().expect("no panic under the lock")
    }

    pub(crate) fn stamp(&self, key: &str, now_ms: u64) -> Stamp {
        self.shard(key).stamp(key, now_ms)
    }

    /// A stamp for requests about an entry without ETag and version. `None`: the entry has left the map, so the object
    /// may have another version.
    pub(crate) fn watch_entry(&self, entry: &Arc<ObjectEntry>, now_ms: u64) -> Option<Stamp> {
        let mut shard = self.shard(&entry.key);
        self.is_current(entry).then(|| shard.stamp(&entry.key, now_ms))
    }

    /// Whether the response to a request since the stamp may be of another version than its entry (N4).
    pub(crate) fn may_be_of_another_version(&self, watch: &Stamp, key: &str) -> bool {
        let _shard = self.shard(key);
        watch.may_predate_write(true)
    }

    fn is_current(&self, entry: &Arc<ObjectEntry>) -> bool {
        self.map.pin().get(&entry.key).is_some_and(|there| Arc::ptr_eq(there, entry))
    }

    /// Inserts an entry, in place of another version of its object, unless the response to the request at `stamp` may be
    /// older than a write (N1, N4). Returns the entry of this version that is then in the map, if any.
    pub(crate) fn admit(&self, stamp: &Stamp, entry: Arc<ObjectEntry>) -> Option<Arc<ObjectEntry>> {
        let mut shard = self.shard(&entry.key);
        if stamp.may_predate_write(entry.is_unversioned()) {
            return None;
        }
        let map = self.map.pin();
        if let Some(there) = map.get(&entry.key) {
            if there.is_same_version(&entry.meta) {
                there.validate(entry.validated_ms());
                return Some(Arc::clone(there));
            }
            let there = Arc::clone(there);
            self.remove_entry(&mut shard, &there);
        }
        if entry.bytes() > self.shard_bytes_max {
            return None;
        }
        shard.bytes += entry.bytes();
        shard.entries += 1;
        // Before the entry is in the ring: if all other entries are marked used, CLOCK would evict this one.
        self.evict_to_limit(&mut shard);
        shard.ring.push_back(Arc::clone(&entry));
        map.insert(entry.key.clone(), Arc::clone(&entry));
        Some(entry)
    }

    /// Call at the start of a write of the object, and `end_write` at its end.
    pub(crate) fn begin_write(&self, key: &str) -> Arc<WriteCounts> {
        let mut shard = self.shard(key);
        let writes = shard.writes_of(key);
        writes.begun.fetch_add(1, Relaxed);
        // N4.
        let there = self.find(key).filter(|entry| entry.is_unversioned());
        if let Some(there) = there {
            self.remove_entry(&mut shard, &there);
        }
        writes
    }

    /// Removes the object's entry at the end of a write, whether the write succeeded or not.
    pub(crate) fn end_write(&self, key: &str, writes: &WriteCounts) {
        let mut shard = self.shard(key);
        writes.ended.fetch_add(1, Relaxed);
        if let Some(there) = self.find(key) {
            self.remove_entry(&mut shard, &there);
        }
    }

    /// Removes the entry of an object that was written, or may have been.
    pub(crate) fn forget(&self, key: &str) {
        let writes = self.begin_write(key);
        self.end_write(key, &writes);
    }

    /// The same for all objects.
    pub(crate) fn forget_all(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().expect("no panic under the lock");
            // As a write of each object that has a request or a write under way (N1, N4).
            for writes in shard.writes.values().filter_map(Weak::upgrade) {
                writes.begun.fetch_add(1, Relaxed);
                writes.ended.fetch_add(1, Relaxed);
            }
            for entry in shard.ring.iter().cloned().collect::<Vec<_>>() {
                self.remove_entry(&mut shard, &entry);
            }
        }
    }

    /// Removes an entry, unless another version has replaced it.
    pub(crate) fn forget_version(&self, entry: &Arc<ObjectEntry>) {
        let mut shard = self.shard(&entry.key);
        if self.is_current(entry) {
            self.remove_entry(&mut shard, entry);
        }
    }

    /// Removes an entry from the map. Its slot in the ring is freed later, by compaction or by the next CLOCK pass.
    fn remove_entry(&self, shard: &mut Shard, entry: &Arc<ObjectEntry>) {
        if !entry.is_removed.swap(true, AcqRel) {
            shard.bytes -= entry.bytes();
            shard.entries -= 1;
            self.map.pin().remove(&entry.key);
            #[cfg(feature = "shared")]
            if let Some(slot) = &entry.slot {
                slot.invalidate();
            }
            if entry.meta.size > 0 {
                entry.allocation.blob.forget(entry.allocation.to_blob(&(0..entry.meta.size)));
            }
        }
        if shard.ring.len() > 2 * shard.entries + RING_REMOVED_MAX {
            shard.ring.retain(|entry| !entry.is_removed.load(Relaxed));
        }
    }

    fn evict_to_limit(&self, shard: &mut Shard) {
        while shard.bytes > self.shard_bytes_max {
            let Some(entry) = shard.ring.pop_front() else { return };
            if entry.is_removed.load(Relaxed) {
                continue;
            }
            if entry.used.swap(false, Relaxed) {
                shard.ring.push_back(entry);
            } else {
                self.remove_entry(shard, &entry);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Entries that were inserted, or found used by CLOCK, most recently: at most `count` of each shard.
    #[cfg(feature = "shared")]
    pub(crate) fn recent(&self, count: usize) -> Vec<Arc<ObjectEntry>> {
        let of_shard = |shard: &Mutex<Shard>| -> Vec<_> {
            let shard = shard.lock().expect("no panic under the lock");
            let present = |entry: &&Arc<ObjectEntry>| !entry.is_removed.load(Relaxed);
            shard.ring.iter().rev().filter(present).take(count).cloned().collect()
        };
        self.shards.iter().flat_map(of_shard).collect()
    }
}
