//! The objects that a client knows, by name: bounded, and found without a lock.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use foldhash::quality::RandomState;
use millpond_objects::serving::ObjectPlace;
use object_store::path::Path;
use object_store::{Attributes, ObjectMeta};

/// A version of an object in the server's cache.
#[derive(Debug)]
pub(crate) struct KnownObject {
    pub(crate) meta: ObjectMeta,
    pub(crate) attributes: Attributes,
    pub(crate) place: ObjectPlace,
    is_used: AtomicBool,
    is_removed: AtomicBool,
}

impl KnownObject {
    pub(crate) fn new(meta: ObjectMeta, attributes: Attributes, place: ObjectPlace) -> Self {
        let (is_used, is_removed) = Default::default();
        Self { meta, attributes, place, is_used, is_removed }
    }

    /// Marks the object used for CLOCK. Writes only at the first use after a pass.
    #[inline]
    pub(crate) fn mark_used(&self) {
        // Relaxed, here and below: hints.
        if !self.is_used.load(Relaxed) {
            self.is_used.store(true, Relaxed);
        }
    }

    /// Whether the other is of the same version: for an object without a strong ETag and version, in the same place.
    pub(crate) fn is_same_version(&self, other: &KnownObject) -> bool {
        is_same_version(&self.meta, &other.meta)
            && (self.place == other.place || is_named(&self.meta))
    }
}

pub(crate) fn is_same_version(one: &ObjectMeta, other: &ObjectMeta) -> bool {
    (&one.e_tag, &one.version, one.size) == (&other.e_tag, &other.version, other.size)
}

/// Whether the metadata identify the version.
pub(crate) fn is_named(meta: &ObjectMeta) -> bool {
    strong_tag(meta).is_some() || meta.version.is_some()
}

/// The ETag, if different bytes have different ones.
pub(crate) fn strong_tag(meta: &ObjectMeta) -> Option<&str> {
    meta.e_tag.as_deref().filter(|tag| !tag.starts_with("W/"))
}

/// The map's table is not allocated again for the objects of a greeting, which are about so many.
const CAPACITY: usize = 1024;

/// The map. Beyond its length, CLOCK removes objects.
pub(crate) struct KnownObjects {
    map: papaya::HashMap<Box<str>, Arc<KnownObject>, RandomState>,
    ring: Mutex<VecDeque<Arc<KnownObject>>>,
    len_max: usize,
}

impl KnownObjects {
    pub(crate) fn new(len_max: usize) -> KnownObjects {
        let capacity = len_max.min(CAPACITY);
        let map = papaya::HashMap::with_capacity_and_hasher(capacity, RandomState::default());
        KnownObjects { map, ring: Mutex::default(), len_max }
    }

    /// Calls `look` with an object, without a lock.
    #[inline]
    pub(crate) fn with<R>(
        &self,
        location: &Path,
        look: impl FnOnce(&Arc<KnownObject>) -> R,
    ) -> Option<R> {
        let map = self.map.pin();
        map.get(location.as_ref()).map(look)
    }

    pub(crate) fn find(&self, location: &Path) -> Option<Arc<KnownObject>> {
        self.with(location, Arc::clone)
    }

    pub(crate) fn insert(&self, object: Arc<KnownObject>) {
        let mut ring = self.ring.lock().expect("no panic under the lock");
        let map = self.map.pin();
        if let Some(there) = map.get(object.meta.location.as_ref()) {
            if there.place == object.place {
                return;
            }
            there.is_removed.store(true, Relaxed);
        }
        while ring.len() >= self.len_max {
            let Some(oldest) = ring.pop_front() else { break };
            if oldest.is_removed.load(Relaxed) {
                continue;
            }
            if oldest.is_used.swap(false, Relaxed) {
                ring.push_back(oldest);
            } else {
                oldest.is_removed.store(true, Relaxed);
                map.remove(oldest.meta.location.as_ref());
            }
        }
        map.insert(object.meta.location.as_ref().into(), Arc::clone(&object));
        ring.push_back(object);
    }

    /// Removes an object, such as before a write.
    pub(crate) fn remove(&self, location: &Path) {
        // The ring has it until CLOCK passes.
        if let Some(there) = self.map.pin().remove(location.as_ref()) {
            there.is_removed.store(true, Relaxed);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }
}

#[cfg(test)]
mod tests {
    use millpond::internals::shared::SharedFile;

    use super::*;

    fn object(number: u64) -> Arc<KnownObject> {
        let location = Path::from(format!("object {}", number % 1000));
        let last_modified = chrono::DateTime::UNIX_EPOCH;
        let meta = ObjectMeta { location, last_modified, size: 1, e_tag: None, version: None };
        let file = SharedFile::from_words([0, 0]);
        let place = ObjectPlace { file, base: 0, slot: 0, number };
        Arc::new(KnownObject::new(meta, Attributes::default(), place))
    }

    #[test]
    fn the_length_is_bounded_and_used_objects_stay() {
        let objects = KnownObjects::new(100);
        let hot = object(7);
        objects.insert(Arc::clone(&hot));
        for number in (0..5000).filter(|number| number % 1000 != 7) {
            hot.mark_used();
            objects.insert(object(number));
            assert!(objects.len() <= 100);
            assert!(objects.find(&hot.meta.location).is_some(), "{number}");
        }
        objects.remove(&hot.meta.location);
        assert!(objects.find(&hot.meta.location).is_none());
        (0..300).for_each(|number| objects.insert(object(number)));
        assert!(objects.len() <= 100);
        // Another version of a known object.
        objects.insert(object(299 + 1000));
        let found = objects.find(&object(299).meta.location).unwrap();
        assert_eq!(found.place.number, 1299);
    }
}
