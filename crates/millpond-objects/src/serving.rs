//! Reads for clients in other processes, which map the cache's memory read-only (feature `shared`).
//!
//! A server reads on behalf of its clients by [`CachedStore::read_shared`], and sends them the place of the object in the
//! cache, an [`ObjectPlace`]. With that a client reads the cached pages itself, as long as the version is current.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use millpond::EngineBuilder;
use millpond::internals::CACHE_BYTES_MIN;
use millpond::internals::shared::{MemoryChoice, SharedCache, SharedFile};
use object_store::path::Path;
use object_store::{Attributes, Error, GetOptions, GetRange, ObjectMeta, Result};

use crate::directory::ObjectEntry;
use crate::get::{COLLECTED_BYTES_MAX, Collected, resolve_range};
use crate::inner::{Inner, SharedParts};
use crate::options::{Builder, Freshness};
use crate::response::ResponseHead;
use crate::stats::MoreLines;
use crate::store::{CachedStore, WriteScope, is_plain_read};
use crate::validity::{SLOT_BYTES, ValidityTable};

pub use crate::boot_time::BootTime;
pub use crate::cacheable::CacheableReads;
pub use crate::validity::Validity;

/// The longest range that one read returns. Longer ones are read in pieces.
pub const PIECE_BYTES_MAX: u64 = COLLECTED_BYTES_MAX;

/// Memory of the directory for each slot of the validity table: less than an entry takes, so that slots do not run out
/// first.
const DIRECTORY_BYTES_PER_SLOT: u64 = 384;

/// Of 64 shards: more than a message has room for.
const RECENT_PER_SHARD: usize = 32;

/// Where the pages of an object's version are in the shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectPlace {
    /// The file that has the object's bytes, from `base` on.
    pub file: SharedFile,
    pub base: u64,
    /// The slot of the validity table, and the number in it while the version is current.
    pub slot: u32,
    pub number: u64,
}

/// A read for a client.
#[derive(Clone, Debug, Default)]
pub struct SharedRequest {
    /// Bounded ranges, or one range that depends on the object's length. Empty: only the metadata.
    pub ranges: Vec<Option<GetRange>>,
    /// The conditions of a read; the other fields are not used.
    pub conditions: GetOptions,
    /// The slot and number of a version that the caller's read has validated before.
    pub held: Option<(u32, u64)>,
}

/// A part of an object.
#[derive(Clone, Debug)]
pub struct ObjectPart {
    /// The first byte.
    pub start: u64,
    pub bytes: Bytes,
}

/// The result of [`CachedStore::read_shared`].
#[derive(Clone, Debug)]
pub enum SharedRead {
    /// A part for each range. Of a range that is longer than [`PIECE_BYTES_MAX`], only the beginning.
    Object {
        meta: Arc<ObjectMeta>,
        attributes: Attributes,
        /// `None`: the object is not cached.
        place: Option<ObjectPlace>,
        parts: Vec<ObjectPart>,
    },
    /// The underlying store has to serve the read, possibly with an error.
    Bypass,
}

/// An object in the cache.
#[derive(Clone, Debug)]
pub struct CachedObject {
    pub meta: ObjectMeta,
    pub attributes: Attributes,
    pub place: ObjectPlace,
}

/// Excludes responses that may be older than a write. Dropped at the end of the write, it removes the object's entry.
pub struct WriteGuard {
    _scope: WriteScope,
}

/// A server of a cache. Without one, clients hit no more: later writes may not show in their memory.
pub struct ServingScope {
    served: Arc<ServedTable>,
}

impl ServingScope {
    /// A guard for a task that serves a client.
    ///
    /// A runtime that ends drops its tasks in any order, so the one that has the scope may be the last. The guard ends the scope
    /// before its task closes the client's socket.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::internals::shared::MemoryChoice;
    /// use millpond_objects::CachedStore;
    ///
    /// # let remote = std::sync::Arc::new(object_store::memory::InMemory::new());
    /// let store = CachedStore::builder(remote).shared(MemoryChoice::Auto).build()?;
    /// let scope = store.begin_serving().expect("it is shared");
    /// drop(scope.guard()); // The runtime has ended during the task.
    /// # Ok::<(), object_store::Error>(())
    /// ```
    pub fn guard(&self) -> ServingGuard {
        ServingGuard { served: Some(Arc::clone(&self.served)) }
    }
}

impl Drop for ServingScope {
    fn drop(&mut self) {
        self.served.end();
    }
}

/// Ends a [`ServingScope`] when it is dropped, unless by a panic: then the server goes on.
#[must_use]
pub struct ServingGuard {
    served: Option<Arc<ServedTable>>,
}

impl ServingGuard {
    /// The task has ended by itself: the scope goes on.
    ///
    /// # Examples
    ///
    /// ```
    /// # use millpond::internals::shared::MemoryChoice;
    /// # let remote = std::sync::Arc::new(object_store::memory::InMemory::new());
    /// # let store = millpond_objects::CachedStore::builder(remote).shared(MemoryChoice::Auto).build()?;
    /// # let scope = store.begin_serving().expect("it is shared");
    /// let guard = scope.guard();
    /// guard.disarm(); // The client is gone.
    /// # Ok::<(), object_store::Error>(())
    /// ```
    pub fn disarm(mut self) {
        self.served = None;
    }
}

impl Drop for ServingGuard {
    fn drop(&mut self) {
        if let Some(served) = self.served.take().filter(|_| !std::thread::panicking()) {
            served.end();
        }
    }
}

/// The table of a scope, which ends once.
struct ServedTable {
    table: Arc<ValidityTable>,
    /// Locked until the table has ended: a task that finds it locked does not close its socket before.
    has_ended: Mutex<bool>,
}

impl ServedTable {
    fn end(&self) {
        let mut has_ended = self.has_ended.lock().expect("no panic under the lock");
        if !std::mem::replace(&mut *has_ended, true) {
            self.table.end_serving();
        }
    }
}

impl Builder {
    /// Adds lines of a name and a number each to the [published](Builder::published) statistics, such as those of a server.
    ///
    /// # Examples
    ///
    /// ```
    /// # let remote = std::sync::Arc::new(object_store::memory::InMemory::new());
    /// let builder = millpond_objects::CachedStore::builder(remote).published(true);
    /// let store = builder.more_lines(|| "serve_clients 3\n".into()).build()?;
    /// # drop(store);
    /// # Ok::<(), object_store::Error>(())
    /// ```
    #[must_use]
    pub fn more_lines(mut self, lines: impl Fn() -> String + Send + Sync + 'static) -> Builder {
        self.more_lines = MoreLines(Some(Arc::new(lines)));
        self
    }

    /// Puts the cache into memory that other processes may map read-only.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::internals::shared::MemoryChoice;
    /// use millpond_objects::CachedStore;
    /// # let remote = std::sync::Arc::new(object_store::memory::InMemory::new());
    ///
    /// let store = CachedStore::builder(remote).shared(MemoryChoice::Auto).build()?;
    /// assert!(store.shared_cache().is_some());
    /// # Ok::<(), object_store::Error>(())
    /// ```
    #[must_use]
    pub fn shared(mut self, memory: MemoryChoice) -> Builder {
        self.shared = Some(memory);
        self
    }

    /// The engine's options, the parts for clients, and the memory that is left for the directory.
    pub(crate) fn share(
        &self,
        engine: EngineBuilder,
        directory_bytes: u64,
        fixed_bytes: u64,
    ) -> Result<(EngineBuilder, Option<SharedParts>, u64)> {
        let Some(memory) = &self.shared else { return Ok((engine, None, directory_bytes)) };
        let slots = directory_bytes / (DIRECTORY_BYTES_PER_SLOT + SLOT_BYTES);
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        let table = ValidityTable::new(slots)
            .map_err(|error| Error::Generic { store: crate::NAME, source: error.into() })?;
        let left = directory_bytes - u64::from(slots) * SLOT_BYTES;
        Ok((
            engine.shared(memory.clone()),
            Some(SharedParts { table, fixed_bytes, memory_bytes: self.memory_bytes }),
            left,
        ))
    }
}

impl CachedStore {
    /// The engine's part for clients. `None`: the store was built without [`Builder::shared`].
    #[must_use]
    pub fn shared_cache(&self) -> Option<SharedCache> {
        self.inner.allocator.engine().shared_cache()
    }

    /// The validity table for a client, as a descriptor that is open for reading.
    ///
    /// # Errors
    ///
    /// `Unsupported`: the store was built without [`Builder::shared`]. Others: the system gives no descriptor.
    pub fn validity_for_client(&self) -> std::io::Result<OwnedFd> {
        let shared = self.inner.shared.as_ref().ok_or(std::io::ErrorKind::Unsupported)?;
        shared.table.open_for_client()
    }

    /// Begins to serve clients. `None`: the store was built without [`Builder::shared`].
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond_objects::{CachedStore, serving::ServingScope};
    ///
    /// # let remote = std::sync::Arc::new(object_store::memory::InMemory::new());
    /// let private = CachedStore::builder(remote).build()?;
    /// let scope: Option<ServingScope> = private.begin_serving();
    /// assert!(scope.is_none());
    /// # Ok::<(), object_store::Error>(())
    /// ```
    #[must_use]
    pub fn begin_serving(&self) -> Option<ServingScope> {
        let table = Arc::clone(&self.inner.shared.as_ref()?.table);
        table.begin_serving();
        Some(ServingScope { served: Arc::new(ServedTable { table, has_ended: Mutex::new(false) }) })
    }

    /// Some of the objects that were cached or used lately, by their names in the underlying store. The versions are current
    /// as the validity table says.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::internals::shared::MemoryChoice;
    /// use millpond_objects::{CachedStore, serving::CachedObject};
    /// use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> object_store::Result<()> {
    /// let remote = std::sync::Arc::new(InMemory::new());
    /// let store = CachedStore::builder(remote).shared(MemoryChoice::Auto).build()?;
    /// store.put(&Path::from("pond"), "water".into()).await?;
    /// store.get_range(&Path::from("pond"), 0..5).await?;
    /// let recent: Vec<CachedObject> = store.recent_objects();
    /// assert_eq!(recent[0].meta.size, 5);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn recent_objects(&self) -> Vec<CachedObject> {
        let entries = self.inner.directory.recent(RECENT_PER_SHARD).into_iter();
        let object = |entry: Arc<ObjectEntry>| {
            let place = entry.place()?;
            let meta =
                ObjectMeta { location: Path::parse(&*entry.key).ok()?, ..entry.meta.clone() };
            Some(CachedObject { meta, attributes: entry.attributes.clone(), place })
        };
        entries.filter_map(object).collect()
    }

    /// The name of the underlying store, by its `Display`.
    #[must_use]
    pub fn store_name(&self) -> String {
        self.inner.store.to_string()
    }

    /// The clock by which versions are validated, in milliseconds.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.inner.now_ms()
    }

    /// The choice of freshness.
    #[must_use]
    pub fn freshness(&self) -> Freshness {
        self.inner.freshness
    }

    /// The bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.inner.allocator.page_bytes()
    }

    /// Changes the memory limit, up to the one that the store was built with. Returns the limit that is reached now; the
    /// caller calls again if that is more.
    ///
    /// # Errors
    ///
    /// [`Error::Generic`]: the limit is out of range, or the store was built without [`Builder::shared`].
    pub fn set_memory_bytes(&self, bytes: u64) -> Result<u64> {
        let refused = |source| Error::Generic { store: crate::NAME, source };
        let Some(shared) = &self.inner.shared else {
            return Err(refused("the cache is not shared".into()));
        };
        let (least, most) = (shared.fixed_bytes + CACHE_BYTES_MIN, shared.memory_bytes);
        if !(least..=most).contains(&bytes) {
            let what = format!(
                "memory of {bytes} bytes: must be {least} to {most}, the limit that the cache was built with"
            );
            return Err(refused(what.into()));
        }
        let engine = self.inner.allocator.engine();
        let reached = engine.set_cache_bytes(bytes - shared.fixed_bytes);
        let reached = reached.map_err(|error| refused(error.into()))?;
        Ok(reached + shared.fixed_bytes)
    }

    /// Begins a write of an object by a client.
    #[must_use]
    pub fn begin_write(&self, location: &Path) -> WriteGuard {
        WriteGuard { _scope: self.write_scope(&[location]) }
    }

    /// Reads for a client: brings the bytes into the cache, and returns them with their place in it.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::internals::shared::MemoryChoice;
    /// use millpond_objects::serving::{ObjectPart, ObjectPlace, SharedRead, SharedRequest, Validity, WriteGuard};
    /// use millpond_objects::{CachedStore, Freshness};
    /// use object_store::{ObjectStore, ObjectStoreExt, path::Path};
    /// # use std::{os::fd::AsFd, sync::Arc};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///
    /// let remote = Arc::new(object_store::memory::InMemory::new());
    /// let builder = CachedStore::builder(Arc::clone(&remote) as Arc<dyn ObjectStore>);
    /// let store = builder.freshness(Freshness::Immutable).shared(MemoryChoice::Auto).build()?;
    /// assert_eq!((store.store_name(), store.page_bytes()), ("InMemory".into(), 16 << 10));
    /// let path = Path::from("pond");
    /// remote.put(&path, "water".into()).await?;
    ///
    /// let request = SharedRequest { ranges: vec![None], ..SharedRequest::default() };
    /// let read = store.read_shared(&path, &request).await?;
    /// let SharedRead::Object { place: Some(place), parts, .. } = read else { panic!("not cached") };
    /// let (place, part): (ObjectPlace, &ObjectPart) = (place, &parts[0]);
    /// assert_eq!((part.start, &part.bytes[..]), (0, &b"water"[..]));
    ///
    /// // In a client, with this descriptor and that of the cache.
    /// let validity = Validity::map(store.validity_for_client()?.as_fd())?;
    /// let validated_ms = validity.validated_ms(place.slot, place.number).expect("it is current");
    /// assert!(validated_ms <= store.now_ms() && store.freshness().max_age().is_none());
    /// let write: WriteGuard = store.begin_write(&path);
    /// drop(write);
    /// assert_eq!(validity.validated_ms(place.slot, place.number), None);
    /// assert_eq!(store.set_memory_bytes(128 << 20)?, 128 << 20);
    /// # assert!(store.shared_cache().is_some());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the underlying store. If the bounds of the range depend on the object's length, only errors that do not
    /// depend on the range; otherwise the result is [`SharedRead::Bypass`].
    pub async fn read_shared(
        &self,
        location: &Path,
        request: &SharedRequest,
    ) -> Result<SharedRead> {
        let inner = &self.inner;
        let found = inner.directory.find(location.as_ref());
        let held = found.as_ref().filter(|entry| entry.is_held(request.held)).cloned();
        let usable = held.clone().or(found.filter(|entry| inner.is_fresh(entry)));
        if usable.is_none() && !is_plain_read(&request.conditions) {
            return Ok(SharedRead::Bypass);
        }
        let [range] = &request.ranges[..] else {
            if request.ranges.is_empty() {
                return inner.head_shared(location, usable, &request.conditions).await;
            }
            let read = inner.collect_shared(location, &request.ranges, &request.conditions, held);
            return read.await;
        };
        let asked = match (range, &usable) {
            (Some(GetRange::Bounded(_)), _) => range.clone(),
            (_, Some(entry)) => match resolve_range(range, entry.meta.size) {
                Some(range) => Some(GetRange::Bounded(range)),
                None => return Ok(SharedRead::Bypass),
            },
            (None, None) => Some(GetRange::Bounded(0..PIECE_BYTES_MAX)),
            (Some(GetRange::Offset(from)), None) => {
                Some(GetRange::Bounded(*from..from.saturating_add(PIECE_BYTES_MAX)))
            }
            (Some(GetRange::Suffix(_)), None) => range.clone(),
        };
        let asked = match asked {
            Some(GetRange::Bounded(range)) => {
                let end = range.end.min(range.start.saturating_add(PIECE_BYTES_MAX));
                Some(GetRange::Bounded(range.start..end))
            }
            other => other,
        };
        let is_open = !matches!(range, Some(GetRange::Bounded(_)));
        let read = inner.collect_shared(location, &[asked], &request.conditions, held).await;
        match read {
            // An object that is not cached is read to its end by one request.
            Ok(SharedRead::Object { meta, place: None, parts, .. })
                if is_open && !is_whole(range, &meta, &parts) =>
            {
                Ok(SharedRead::Bypass)
            }
            Err(error) if is_open && !is_about_object(&error) => Ok(SharedRead::Bypass),
            read => read,
        }
    }
}

/// Whether the one part is all that was asked for.
fn is_whole(range: &Option<GetRange>, meta: &ObjectMeta, parts: &[ObjectPart]) -> bool {
    let resolved = resolve_range(range, meta.size);
    resolved.zip(parts.first()).is_some_and(|(range, part)| {
        part.start == range.start && part.bytes.len() as u64 == range.end - range.start
    })
}

/// Whether the error does not depend on the range.
fn is_about_object(error: &Error) -> bool {
    matches!(
        error,
        Error::NotFound { .. }
            | Error::NotModified { .. }
            | Error::Precondition { .. }
            | Error::PermissionDenied { .. }
            | Error::Unauthenticated { .. }
    )
}

impl ObjectEntry {
    fn is_held(&self, held: Option<(u32, u64)>) -> bool {
        let slot = self.slot.as_ref().map(|slot| (slot.index, slot.number));
        slot.is_some() && slot == held
    }

    fn place(&self) -> Option<ObjectPlace> {
        let slot = self.slot.as_ref()?;
        let file = self.allocation.blob.shared_file()?;
        let base = self.allocation.to_blob(&(0..0)).start;
        Some(ObjectPlace { file, base, slot: slot.index, number: slot.number })
    }
}

impl Inner {
    /// The metadata of an object. Concurrent callers share a request, which is cached.
    async fn head_shared(
        self: &Arc<Self>,
        location: &Path,
        usable: Option<Arc<ObjectEntry>>,
        conditions: &GetOptions,
    ) -> Result<SharedRead> {
        if let Some(entry) = usable {
            entry.mark_used();
            conditions.check_preconditions(&entry.meta)?;
            self.counters.saved.add();
            return Ok(object_read(&ResponseHead::Cached(entry), Vec::new()));
        }
        let key = location.as_ref();
        let leader = match self.first_requests.join(key) {
            Ok(leader) => Some(leader),
            Err(mut other) => {
                // The sender is dropped with the leader, and never sends.
                let _ = other.changed().await;
                let found = self.directory.find(key).filter(|entry| self.is_fresh(entry));
                if let Some(entry) = found {
                    return Ok(object_read(&ResponseHead::Cached(entry), Vec::new()));
                }
                None
            }
        };
        let stamp = self.stamp(key);
        let response = self.request(location, GetOptions::new().with_head(true)).await?;
        let head = match self.admit(key, &stamp, &response) {
            Some(entry) => ResponseHead::Cached(entry),
            None => ResponseHead::Uncached(response.meta, response.attributes),
        };
        drop(leader);
        Ok(object_read(&head, Vec::new()))
    }

    async fn collect_shared(
        self: &Arc<Self>,
        location: &Path,
        asked: &[Option<GetRange>],
        conditions: &GetOptions,
        held: Option<Arc<ObjectEntry>>,
    ) -> Result<SharedRead> {
        let mut found = held.map(|entry| (entry, Vec::new()));
        for is_first in [true, false] {
            match self.read_ranges(location, asked, conditions, found.take()).await? {
                Collected::Pieces(head, pieces) => {
                    let part = |piece: crate::fetch::Piece| ObjectPart {
                        start: piece.range.start,
                        bytes: piece.bytes,
                    };
                    return Ok(object_read(&head, pieces.into_iter().map(part).collect()));
                }
                // A suffix of an object without an entry: get the entry first.
                Collected::Stream if is_first => {
                    self.head_shared(location, None, conditions).await?;
                    let entry = self.directory.find(location.as_ref());
                    found = entry.map(|entry| (entry, Vec::new()));
                    if let Some((entry, _)) = &found
                        && resolve_range(&asked[0], entry.meta.size)
                            .is_none_or(|range| range.end - range.start > PIECE_BYTES_MAX)
                    {
                        return Ok(SharedRead::Bypass);
                    }
                }
                Collected::Stream | Collected::Bypass => break,
            }
        }
        Ok(SharedRead::Bypass)
    }
}

fn object_read(head: &ResponseHead, parts: Vec<ObjectPart>) -> SharedRead {
    let (place, attributes) = match head {
        ResponseHead::Cached(entry) => (entry.place(), entry.attributes.clone()),
        ResponseHead::Uncached(_, attributes) => (None, attributes.clone()),
    };
    SharedRead::Object { meta: Arc::new(head.meta().clone()), attributes, place, parts }
}

impl Freshness {
    /// For how long a version that was just validated may be served. `None`: as long as it is current.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use millpond_objects::Freshness;
    /// assert_eq!(Freshness::Revalidate.max_age(), Some(Duration::ZERO));
    /// assert_eq!(Freshness::Immutable.max_age(), None);
    /// ```
    #[must_use]
    pub fn max_age(self) -> Option<Duration> {
        match self {
            Freshness::Immutable => None,
            Freshness::Revalidate => Some(Duration::ZERO),
            Freshness::MaxAge(age) => Some(age),
        }
    }
}
