//! What is known of objects: version, length, where their pages are.
//!
//! ```text
//!   find:   of the map, without a lock and without a shared write
//!   stamp:  before a request for an object of which nothing is known
//!   admit:  with the stamp, after its answer: entered unless something was written meanwhile
//!   forget: after a write of the object ended, well or not
//! ```
//!
//! - **N1** `admit` and `forget` of one object are under one lock, and `forget` raises what `stamp`
//!   reads: so an answer that may be older than a write that has ended is not entered after it.
//! - **N2** What an entry says never changes but for `checked_ms` and `used`: of another version there is
//!   another entry, with other pages.
//! - **N3** Entries take no more memory than was allowed, by an estimate: beyond it those go that were not
//!   used since they were looked at last (CLOCK).

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use foldhash::quality::RandomState;
use object_store::{Attributes, ObjectMeta};

use crate::place::Place;

/// Of locks. More than threads are at it at once, as a rule.
const SHARDS: usize = 64;
/// Of a ring, so many entries may be gone beside half of it. Chosen, not measured.
const RING_GONE_MAX: usize = 16;
/// What an entry takes beside its strings: itself, its places in map and ring, and what the allocator adds.
const ENTRY_BYTES: u64 = 128 + size_of::<Known>() as u64;

/// An object of one version.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) key: Box<str>,
    pub(crate) meta: ObjectMeta,
    pub(crate) attributes: Attributes,
    pub(crate) place: Place,
    /// When the last request began whose answer names this version, in milliseconds of the cache's clock.
    pub(crate) checked_ms: AtomicU64,
    /// Where a sequence of misses ended last, and the next may go on.
    pub(crate) reached: AtomicU64,
    /// How far that is to be read ahead, in bytes.
    pub(crate) window: AtomicU64,
    used: AtomicBool,
    is_gone: AtomicBool,
}

impl Known {
    pub(crate) fn new(
        key: &str,
        meta: ObjectMeta,
        attributes: Attributes,
        place: Place,
        asked_ms: u64,
    ) -> Known {
        Known {
            key: key.into(),
            meta,
            attributes,
            place,
            checked_ms: AtomicU64::new(asked_ms),
            reached: AtomicU64::new(u64::MAX),
            window: AtomicU64::new(0),
            used: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
        }
    }

    /// Whether that is an answer about the same version.
    pub(crate) fn is_of(&self, meta: &ObjectMeta) -> bool {
        // Without ETag and version, only what never changes is known.
        (&self.meta.e_tag, &self.meta.version, self.meta.size)
            == (&meta.e_tag, &meta.version, meta.size)
    }

    /// Writes to shared memory only the first time after somebody looked.
    pub(crate) fn note_use(&self) {
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

/// The moment before a request; see N1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    forgotten: u64,
    /// The age of the answer counts from here: the store may have looked at the object at once.
    pub(crate) asked_ms: u64,
}

#[derive(Debug, Default)]
struct Shard {
    /// Also of some that are gone.
    ring: VecDeque<Arc<Known>>,
    entries: usize,
    bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Directory {
    map: papaya::HashMap<Box<str>, Arc<Known>, RandomState>,
    /// Seeded at random, and fast: each hit hashes a name.
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    /// How often something was forgotten, of each shard.
    forgotten: [AtomicU64; SHARDS],
    shard_bytes_max: u64,
}

impl Directory {
    pub(crate) fn new(bytes_max: u64) -> Directory {
        let hasher = RandomState::default();
        Directory {
            map: papaya::HashMap::with_hasher(hasher.clone()),
            hasher,
            shards: std::array::from_fn(|_| Mutex::default()),
            forgotten: std::array::from_fn(|_| AtomicU64::new(0)),
            shard_bytes_max: bytes_max / SHARDS as u64,
        }
    }

    fn shard_of(&self, key: &str) -> usize {
        self.hasher.hash_one(key) as usize % SHARDS
    }

    /// Calls `look` with what is known of an object, without a lock.
    pub(crate) fn with<R>(&self, key: &str, look: impl FnOnce(&Arc<Known>) -> R) -> Option<R> {
        let map = self.map.pin();
        map.get(key).map(look)
    }

    pub(crate) fn find(&self, key: &str) -> Option<Arc<Known>> {
        self.with(key, Arc::clone)
    }

    pub(crate) fn stamp(&self, key: &str, now_ms: u64) -> Stamp {
        // Acquire: what was forgotten before it was forgotten in the store's order, too.
        let forgotten = self.forgotten[self.shard_of(key)].load(Acquire);
        Stamp { forgotten, asked_ms: now_ms }
    }

    /// Enters an object, unless what was asked for at `stamp` may be older than a write that has ended (N1);
    /// in place of another version of it. Returns the entry that is of this version now, if there is one.
    pub(crate) fn admit(&self, stamp: Stamp, known: Known) -> Option<Arc<Known>> {
        let at = self.shard_of(&known.key);
        let mut shard = self.shards[at].lock().expect("no panic under the lock");
        if self.forgotten[at].load(Relaxed) != stamp.forgotten {
            return None;
        }
        let map = self.map.pin();
        if let Some(there) = map.get(&known.key) {
            if there.is_of(&known.meta) {
                there.checked_ms.fetch_max(known.checked_ms.load(Relaxed), Relaxed);
                return Some(Arc::clone(there));
            }
            let there = Arc::clone(there);
            self.take_out(&mut shard, &there);
        }
        if known.bytes() > self.shard_bytes_max {
            return None;
        }
        let known = Arc::new(known);
        shard.bytes += known.bytes();
        shard.entries += 1;
        // Before it is in the ring: others may all have been used.
        self.make_room(&mut shard);
        shard.ring.push_back(Arc::clone(&known));
        map.insert(known.key.clone(), Arc::clone(&known));
        Some(known)
    }

    /// Forgets an object, of whatever version: it was written to, or may have been.
    pub(crate) fn forget(&self, key: &str) {
        let at = self.shard_of(key);
        let mut shard = self.shards[at].lock().expect("no panic under the lock");
        // Release: pairs with `stamp`.
        self.forgotten[at].fetch_add(1, Release);
        let there = self.map.pin().get(key).map(Arc::clone);
        if let Some(there) = there {
            self.take_out(&mut shard, &there);
        }
    }

    /// Forgets an object if it is of that version still.
    pub(crate) fn forget_version(&self, known: &Arc<Known>) {
        let mut shard =
            self.shards[self.shard_of(&known.key)].lock().expect("no panic under the lock");
        let is_there =
            self.map.pin().get(&known.key).is_some_and(|there| Arc::ptr_eq(there, known));
        if is_there {
            self.take_out(&mut shard, known);
        }
    }

    /// Its place in the ring is given up with others', or when the hand comes round.
    fn take_out(&self, shard: &mut Shard, known: &Arc<Known>) {
        if !known.is_gone.swap(true, AcqRel) {
            shard.bytes -= known.bytes();
            shard.entries -= 1;
            self.map.pin().remove(&known.key);
            if known.meta.size > 0 {
                known.place.blob.forget(known.place.locate(&(0..known.meta.size)));
            }
        }
        if shard.ring.len() > 2 * shard.entries + RING_GONE_MAX {
            shard.ring.retain(|known| !known.is_gone.load(Relaxed));
        }
    }

    fn make_room(&self, shard: &mut Shard) {
        while shard.bytes > self.shard_bytes_max {
            let Some(known) = shard.ring.pop_front() else { return };
            if known.is_gone.load(Relaxed) {
                continue;
            }
            if known.used.swap(false, Relaxed) {
                shard.ring.push_back(known);
            } else {
                self.take_out(shard, &known);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }
}
