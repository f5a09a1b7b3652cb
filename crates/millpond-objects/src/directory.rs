//! What is known of objects: version, length, where their pages are.
//!
//! ```text
//!   find:   of the map, without a lock and without a shared write
//!   stamp:  before a request
//!   admit:  with the stamp, after its answer: entered unless the object was written between the two
//!   begin_write, end_write: around a write of the object, whether it succeeds or not
//!   watch:  a stamp for requests about an entry, which is void once the entry is out of the map
//! ```
//!
//! - **N1** The calls above for one object are under one lock. The writes of an object are counted as long as a stamp
//!   or a write refers to the count. So no answer enters the map after a write has ended, if the answer may be older.
//! - **N4** An answer about an object without (strong) ETag and version does not show which version it is of. It is used only
//!   if no write of the object through this store was under way between its request and its arrival; and an entry
//!   leaves the map when such a write begins. So all bytes in the pages of an entry are of one version.
//! - **N2** What an entry says never changes but for `checked_ms` and `used`: of another version there is
//!   another entry, with other pages.
//! - **N3** Entries take no more memory than was allowed, by an estimate: beyond it those go that were not
//!   used since they were looked at last (CLOCK).

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use foldhash::quality::RandomState;
use object_store::{Attributes, ObjectMeta};

use crate::allocation::Allocation;

/// Of locks. More than threads are at it at once, as a rule.
const SHARDS: usize = 64;
/// Of a ring, so many entries may be gone beside half of it. Chosen, not measured.
const RING_REMOVED_MAX: usize = 16;
/// Counts of writes of a shard, before those that are not needed are removed. Chosen, not measured.
const WRITES_LEN_MIN: usize = 16;
/// What an entry takes beside its strings: itself, its places in map and ring, and what the allocator adds.
const ENTRY_BYTES: u64 = 128 + size_of::<ObjectEntry>() as u64;

/// An object of one version.
#[derive(Debug)]
pub(crate) struct ObjectEntry {
    pub(crate) key: Box<str>,
    pub(crate) meta: ObjectMeta,
    pub(crate) attributes: Attributes,
    pub(crate) allocation: Allocation,
    /// When the last request began whose answer names this version, in milliseconds of the cache's clock.
    pub(crate) validated_ms: AtomicU64,
    /// Where a sequence of misses ended last, and the next may go on.
    pub(crate) sequential_end: AtomicU64,
    /// How far that is to be read ahead, in bytes.
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
            sequential_end: AtomicU64::new(u64::MAX),
            readahead_bytes: AtomicU64::new(0),
            used: AtomicBool::new(false),
            is_removed: AtomicBool::new(false),
        }
    }

    /// Whether that is an answer about the same version.
    pub(crate) fn is_same_version(&self, meta: &ObjectMeta) -> bool {
        // Without ETag and version, only what never changes is known.
        (&self.meta.e_tag, &self.meta.version, self.meta.size)
            == (&meta.e_tag, &meta.version, meta.size)
    }

    /// Answers about the object do not show which version they are of (N4).
    pub(crate) fn is_unversioned(&self) -> bool {
        is_unversioned(&self.meta)
    }

    /// Writes to shared memory only the first time after somebody looked.
    pub(crate) fn mark_used(&self) {
        // Relaxed, here and in `make_room`: a hint.
        if !self.used.load(Relaxed) {
            self.used.store(true, Relaxed);
        }
    }

    fn bytes(&self) -> u64 {
        let tag = |tag: &Option<String>| tag.as_ref().map_or(0, String::len);
        let strings = self.key.len() * 3 + tag(&self.meta.e_tag) + tag(&self.meta.version);
        let attributes = self.attributes.len() * 128;
        ENTRY_BYTES + (strings + attributes) as u64
    }
}

/// Neither a strong ETag nor a version names the bytes of the object.
pub(crate) fn is_unversioned(meta: &ObjectMeta) -> bool {
    strong_tag(meta).is_none() && meta.version.is_none()
}

/// The ETag, if it names the bytes of the object: a weak one may be that of other bytes, too (RFC 9110, 8.8.1).
pub(crate) fn strong_tag(meta: &ObjectMeta) -> Option<&str> {
    meta.e_tag.as_deref().filter(|tag| !tag.starts_with("W/"))
}

/// The writes of one object through this store. Relaxed throughout: read and changed under the shard's lock.
#[derive(Debug, Default)]
pub(crate) struct WriteCounts {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// The moment before a request; see N1.
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    writes: Arc<WriteCounts>,
    begun: u64,
    ended: u64,
    /// The age of the answer counts from here: the store may have looked at the object at once.
    pub(crate) requested_ms: u64,
}

#[derive(Debug, Default)]
struct Shard {
    /// Also of some that are gone.
    ring: VecDeque<Arc<ObjectEntry>>,
    entries: usize,
    bytes: u64,
    /// Of objects with requests or writes under way, and of some without.
    writes: HashMap<Box<str>, Weak<WriteCounts>, RandomState>,
    /// At this length those without are removed.
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
    /// Whether an answer to a request that began at the stamp may be older than a write that has ended; if `is_blind`,
    /// whether a write was under way at any moment since (N4). Under the shard's lock.
    fn may_predate_write(&self, is_unversioned: bool) -> bool {
        let (begun, ended) = (self.writes.begun.load(Relaxed), self.writes.ended.load(Relaxed));
        ended != self.ended || (is_unversioned && (begun != self.begun || begun != ended))
    }
}

#[derive(Debug)]
pub(crate) struct Directory {
    map: papaya::HashMap<Box<str>, Arc<ObjectEntry>, RandomState>,
    /// Seeded at random, and fast: each hit hashes a name.
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

    /// Calls `look` with what is known of an object, without a lock.
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

    /// A stamp for requests about an entry without ETag and version; `None`: the entry is out of the map, and the object
    /// may be of another version.
    pub(crate) fn watch_entry(&self, entry: &Arc<ObjectEntry>, now_ms: u64) -> Option<Stamp> {
        let mut shard = self.shard(&entry.key);
        self.is_current(entry).then(|| shard.stamp(&entry.key, now_ms))
    }

    /// Whether an answer to a request since the stamp may be of another version than its entry (N4).
    pub(crate) fn may_be_of_another_version(&self, watch: &Stamp, key: &str) -> bool {
        let _shard = self.shard(key);
        watch.may_predate_write(true)
    }

    fn is_current(&self, entry: &Arc<ObjectEntry>) -> bool {
        self.map.pin().get(&entry.key).is_some_and(|there| Arc::ptr_eq(there, entry))
    }

    /// Enters an object in place of another version of it, unless the answer to a request at `stamp` may be older than a
    /// write (N1, N4). Returns the entry of this version, if there is one afterwards.
    pub(crate) fn admit(&self, stamp: &Stamp, entry: ObjectEntry) -> Option<Arc<ObjectEntry>> {
        let mut shard = self.shard(&entry.key);
        if stamp.may_predate_write(entry.is_unversioned()) {
            return None;
        }
        let map = self.map.pin();
        if let Some(there) = map.get(&entry.key) {
            if there.is_same_version(&entry.meta) {
                there.validated_ms.fetch_max(entry.validated_ms.load(Relaxed), Relaxed);
                return Some(Arc::clone(there));
            }
            let there = Arc::clone(there);
            self.remove_entry(&mut shard, &there);
        }
        if entry.bytes() > self.shard_bytes_max {
            return None;
        }
        let entry = Arc::new(entry);
        shard.bytes += entry.bytes();
        shard.entries += 1;
        // Before it is in the ring: others may all have been used.
        self.evict_to_limit(&mut shard);
        shard.ring.push_back(Arc::clone(&entry));
        map.insert(entry.key.clone(), Arc::clone(&entry));
        Some(entry)
    }

    /// A write of the object begins; each has an `end_write`.
    pub(crate) fn begin_write(&self, key: &str) -> Arc<WriteCounts> {
        let mut shard = self.shard(key);
        let writes = shard.writes_of(key);
        writes.begun.fetch_add(1, Relaxed);
        // N4
        let there = self.find(key).filter(|entry| entry.is_unversioned());
        if let Some(there) = there {
            self.remove_entry(&mut shard, &there);
        }
        writes
    }

    /// A write of the object has ended, whether it succeeded or not: forgets the object.
    pub(crate) fn end_write(&self, key: &str, writes: &WriteCounts) {
        let mut shard = self.shard(key);
        writes.ended.fetch_add(1, Relaxed);
        if let Some(there) = self.find(key) {
            self.remove_entry(&mut shard, &there);
        }
    }

    /// Forgets an object: it was written, or may have been.
    pub(crate) fn forget(&self, key: &str) {
        let writes = self.begin_write(key);
        self.end_write(key, &writes);
    }

    /// Forgets an object if it is of that version still.
    pub(crate) fn forget_version(&self, entry: &Arc<ObjectEntry>) {
        let mut shard = self.shard(&entry.key);
        if self.is_current(entry) {
            self.remove_entry(&mut shard, entry);
        }
    }

    /// Its place in the ring is given up with others', or when the hand comes round.
    fn remove_entry(&self, shard: &mut Shard, entry: &Arc<ObjectEntry>) {
        if !entry.is_removed.swap(true, AcqRel) {
            shard.bytes -= entry.bytes();
            shard.entries -= 1;
            self.map.pin().remove(&entry.key);
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
}
