//! [`CachedStore`]: an [`ObjectStore`] that reads through the cache and writes to the underlying store.

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt};
use millpond::Engine;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
    UploadPart,
};

use crate::directory::{ObjectEntry, WriteCounts};
use crate::disk::{DiskOptions, DiskTier};
use crate::get::{COLLECTED_BYTES_MAX, CachedRanges, Collected, resolve_range};
use crate::inner::Inner;
use crate::lists::try_list;
use crate::options::Builder;
use crate::response::{collected_response, stream_response};
use crate::stats::{Counters, Stats};

/// An object store that caches the reads of another one; see the [crate's documentation](crate).
///
/// Clones share one cache. Any number of tasks and threads may use it; no call blocks its thread.
///
/// The underlying store serves lists, requests for a named version, requests with extensions
/// (see [`Builder::cache_if`](crate::Builder::cache_if)), and conditional requests unless the cached entry is fresh by the
/// chosen [`Freshness`](crate::Freshness).
///
/// Conditions are checked on the version that is returned, even if the object was replaced after a check on a fresh
/// entry. `last_modified` and attributes are those of the first response that had the same ETag.
///
/// # Examples
///
/// ```
/// use millpond_objects::{CachedStore, Freshness, Stats};
/// # use std::sync::Arc;
/// # use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> object_store::Result<()> {
///
/// # let remote: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
/// let store = CachedStore::builder(Arc::clone(&remote)).memory_bytes(16 << 20).build()?;
/// let path = Path::from("pond");
/// remote.put(&path, "water".into()).await?;
/// for _ in 0..2 {
///     assert_eq!(store.get(&path).await?.bytes().await?, "water");
/// }
/// store.forget(&path); // after a notification that the object has changed
/// let stats: Stats = store.stats();
/// println!("{} requests, {} saved", stats.requests, stats.requests_saved);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct CachedStore {
    pub(crate) inner: Arc<Inner>,
}

impl CachedStore {
    /// Configures a cache over a store; [`Builder::build`] creates it.
    #[must_use]
    pub fn builder(store: Arc<dyn ObjectStore>) -> Builder {
        Builder::new(store)
    }

    /// Statistics since the store was created.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let engine = self.inner.allocator.engine().stats();
        let counters = &self.inner.counters;
        let mut stats = Stats {
            hits: engine.hits,
            misses: engine.misses,
            bytes_from_memory: engine.bytes_served - engine.bytes_passed,
            bytes_from_store: Counters::get(&counters.bytes),
            requests: Counters::get(&counters.requests),
            not_modified: Counters::get(&counters.not_modified),
            requests_saved: counters.saved.sum(),
            objects: self.inner.directory.len() as u64,
            memory_bytes: engine.memory_bytes,
            ..Stats::default()
        };
        if let Some(tier) = &self.inner.tier {
            tier.add_to(&mut stats);
        }
        stats
    }

    /// The statistics that `millpond top` shows besides the engine's.
    fn published_lines(&self) -> String {
        self.stats().published_lines()
    }

    /// The length of an object that is cached and fresh, or a part of it. No request.
    ///
    /// # Examples
    ///
    /// See [`CachedStore::try_read_into`].
    #[must_use]
    pub fn cached_size(&self, location: &Path) -> Option<u64> {
        let look = |entry: &Arc<ObjectEntry>| self.inner.is_fresh(entry).then_some(entry.meta.size);
        self.inner.directory.with_entry(location.as_ref(), look).flatten()
    }

    /// Copies bytes of an object from byte `start` on to memory of the caller, if all of them are cached and fresh. Returns the
    /// length of the object's version that they are of. No request, and no wait.
    ///
    /// `None`: they are not cached, or the object ends before. The content of `dst` is then not specified.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// use std::mem::MaybeUninit;
    ///
    /// use millpond_objects::{CachedStore, Freshness};
    /// # use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> object_store::Result<()> {
    ///
    /// # let remote: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    /// let store = CachedStore::builder(remote).freshness(Freshness::Immutable).build()?;
    /// let path = Path::from("pond");
    /// store.put(&path, "water lilies".into()).await?;
    /// let mut memory = [MaybeUninit::uninit(); 6];
    /// assert_eq!(store.try_read_into(&path, &mut memory, 6), None);
    /// store.get_range(&path, 0..12).await?;
    /// assert_eq!(store.cached_size(&path), Some(12));
    /// assert_eq!(store.try_read_into(&path, &mut memory, 6), Some(12));
    /// // SAFETY: the bytes were copied.
    /// assert_eq!(memory.map(|byte| unsafe { byte.assume_init() }), *b"lilies");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn try_read_into(
        &self,
        location: &Path,
        dst: &mut [MaybeUninit<u8>],
        start: u64,
    ) -> Option<u64> {
        self.try_read_ranges_into(location, &mut [(start, dst)])
    }

    /// [`try_read_into`](CachedStore::try_read_into) of several ranges of one version, each by its start and its memory.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// use std::mem::MaybeUninit;
    ///
    /// use millpond_objects::{CachedStore, Freshness};
    /// # use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> object_store::Result<()> {
    ///
    /// # let remote: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    /// let store = CachedStore::builder(remote).freshness(Freshness::Immutable).build()?;
    /// let path = Path::from("pond");
    /// store.put(&path, "water lilies".into()).await?;
    /// store.get_range(&path, 0..12).await?;
    /// let mut memory = [MaybeUninit::uninit(); 11];
    /// let (lilies, water) = memory.split_at_mut(6);
    /// assert_eq!(store.try_read_ranges_into(&path, &mut [(6, lilies), (0, water)]), Some(12));
    /// // SAFETY: the bytes were copied.
    /// assert_eq!(memory.map(|byte| unsafe { byte.assume_init() }), *b"lilieswater");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn try_read_ranges_into(
        &self,
        location: &Path,
        ranges: &mut [(u64, &mut [MaybeUninit<u8>])],
    ) -> Option<u64> {
        let look = |entry: &Arc<ObjectEntry>| {
            let is_copied = self.inner.is_fresh(entry)
                && ranges.iter_mut().all(|(start, dst)| entry.copy_cached(dst, *start));
            if !is_copied {
                return None;
            }
            entry.mark_used();
            self.inner.counters.saved.add();
            Some(entry.meta.size)
        };
        self.inner.directory.with_entry(location.as_ref(), look).flatten()
    }

    /// Removes an object from the cache: call it after another program has changed the object.
    pub fn forget(&self, location: &Path) {
        self.inner.directory.forget(location.as_ref());
    }

    /// The same for all objects. Pages of a disk tier stay, as they are used for the version that the store names.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use millpond_objects::{CachedStore, Freshness};
    /// # use object_store::{ObjectStoreExt, memory::InMemory, path::Path};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let remote = Arc::new(InMemory::new());
    /// let cached = CachedStore::builder(remote.clone()).freshness(Freshness::Immutable).build()?;
    /// let pond = Path::from("pond");
    /// remote.put(&pond, "water".into()).await?;
    /// assert_eq!(cached.get(&pond).await?.bytes().await?, "water");
    /// // By another program.
    /// remote.put(&pond, "lilies".into()).await?;
    /// cached.forget_all();
    /// assert_eq!(cached.get(&pond).await?.bytes().await?, "lilies");
    /// # Ok(())
    /// # }
    /// ```
    pub fn forget_all(&self) {
        self.inner.directory.forget_all();
    }

    /// Closes the locks of directories that a child of `fork` has inherited. Without this call the directory of a disk tier stays
    /// locked until the child ends. A child calls it first, beside [`millpond::Engine::forget_parent`].
    ///
    /// ```
    /// // SAFETY: the child only closes descriptors and ends.
    /// match unsafe { libc::fork() } {
    ///     0 => {
    ///         millpond_objects::CachedStore::forget_parent();
    ///         // SAFETY: ends the child.
    ///         unsafe { libc::_exit(0) };
    ///     }
    ///     child => assert_eq!(unsafe { libc::waitpid(child, &mut 0, 0) }, child),
    /// }
    /// ```
    pub fn forget_parent() {
        crate::disk::directory_lock::forget_parent();
    }
}

impl fmt::Debug for CachedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedStore").field("store", &self.inner.store).finish_non_exhaustive()
    }
}

impl fmt::Display for CachedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CachedStore({})", self.inner.store)
    }
}

/// Scope of a call that may change objects: their entries are removed when it ends, even if it fails or is dropped.
pub(crate) struct WriteScope {
    inner: Arc<Inner>,
    writes: Vec<(Path, Arc<WriteCounts>)>,
}

impl WriteScope {
    fn add(&mut self, location: &Path) {
        let writes = self.inner.directory.begin_write(location.as_ref());
        self.writes.push((location.clone(), writes));
    }
}

impl Drop for WriteScope {
    fn drop(&mut self) {
        for (location, writes) in &self.writes {
            self.inner.directory.end_write(location.as_ref(), writes);
        }
    }
}

impl CachedStore {
    pub(crate) fn write_scope(&self, locations: &[&Path]) -> WriteScope {
        let mut changing = WriteScope { inner: Arc::clone(&self.inner), writes: Vec::new() };
        locations.iter().for_each(|location| changing.add(location));
        changing
    }
}

/// Whether a request is a read without conditions or version.
pub(crate) fn is_plain_read(options: &GetOptions) -> bool {
    options.if_match.is_none()
        && options.if_none_match.is_none()
        && options.if_modified_since.is_none()
        && options.if_unmodified_since.is_none()
        && options.version.is_none()
}

#[async_trait]
impl ObjectStore for CachedStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let _changing = self.write_scope(&[location]);
        self.inner.store.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let upload = self.inner.store.put_multipart_opts(location, opts).await?;
        Ok(Box::new(Upload { upload, store: self.clone(), location: location.clone() }))
    }

    async fn get_opts(&self, location: &Path, mut options: GetOptions) -> Result<GetResult> {
        if !self.inner.cacheable_reads.admit(location, &mut options) {
            return self.inner.store.get_opts(location, options).await;
        }
        if let Some(response) = self.inner.cached_response(location, &options) {
            return Ok(response);
        }
        // Boxed, as the future takes kilobytes, which a hit must not allocate.
        Box::pin(self.get(location, options)).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let is_odd = |range: &Range<u64>| range.start >= range.end;
        let is_admitted = self.inner.cacheable_reads.admits_ranges(location);
        if is_admitted && !ranges.is_empty() && !ranges.iter().any(is_odd) {
            let found = match self.inner.cached_ranges(location, ranges) {
                CachedRanges::All(bytes) => return Ok(bytes),
                CachedRanges::Part(entry, pieces) => Some((entry, pieces)),
                CachedRanges::Unknown => None,
            };
            let bounded = |range: &Range<u64>| Some(GetRange::Bounded(range.clone()));
            let asked = try_list(ranges.len(), ranges.iter().map(bounded))?;
            let collected =
                Box::pin(self.inner.read_ranges(location, &asked, &GetOptions::new(), found))
                    .await?;
            if let Collected::Pieces(_, pieces) = collected {
                return Ok(pieces.into_iter().map(|piece| piece.bytes).collect());
            }
            return Box::pin(self.inner.uncached_ranges(location, ranges)).await;
        }
        self.inner.store.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let asked = Arc::new(Mutex::new(self.write_scope(&[])));
        let noted = Arc::clone(&asked);
        let locations = locations.inspect(move |location| {
            if let Ok(location) = location {
                noted.lock().expect("no panic under the lock").add(location);
            }
        });
        let inner = Arc::clone(&self.inner);
        let deleted = self.inner.store.delete_stream(locations.boxed());
        // Objects whose deletion failed or was not awaited are removed when the stream is dropped.
        let deleted = deleted.inspect(move |deleted| {
            let _ = &asked;
            if let Ok(location) = deleted {
                inner.directory.forget(location.as_ref());
            }
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.store.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.store.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let _changing = self.write_scope(&[to]);
        self.inner.store.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let _changing = self.write_scope(&[from, to]);
        self.inner.store.rename_opts(from, to, options).await
    }
}

impl CachedStore {
    async fn get(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (inner, key) = (&self.inner, location.as_ref());
        let pass = |options| async { inner.store.get_opts(location, options).await };
        if options.version.is_some() {
            return pass(options).await;
        }
        let fresh = inner.directory.find(key).filter(|entry| inner.is_fresh(entry));
        match fresh {
            Some(entry) if options.head => {
                options.check_preconditions(&entry.meta)?;
                inner.counters.saved.add();
                return Ok(stream_response(&entry, 0..0, futures_util::stream::empty().boxed()));
            }
            // The read below checks the conditions on the version that it returns.
            Some(_) => {}
            None if options.head || !is_plain_read(&options) => return pass(options).await,
            None => {}
        }
        // Only to choose between collecting and streaming: the length may be that of an earlier version.
        let size = inner.directory.with_entry(key, |entry| entry.meta.size);
        let range = match (&options.range, size) {
            (Some(GetRange::Bounded(range)), _) => Some(range.clone()),
            (range, Some(size)) => resolve_range(range, size),
            (_, None) => None,
        };
        let is_short = |range: &Range<u64>| {
            range.start < range.end && range.end - range.start <= COLLECTED_BYTES_MAX
        };
        if range.is_some_and(|range| is_short(&range)) {
            let asked = std::slice::from_ref(&options.range);
            match inner.read_ranges(location, asked, &options, None).await? {
                Collected::Pieces(head, mut pieces) => {
                    let piece = pieces.pop().expect("one for each range");
                    return Ok(head.into_response(piece.range, piece.bytes));
                }
                Collected::Stream => {}
                Collected::Bypass => return pass(options).await,
            }
        }
        inner.read_stream(location, options).await
    }
}

impl Inner {
    /// Serves a plain read of a cached and fresh range, without a lock or a write to shared memory.
    fn cached_response(&self, location: &Path, options: &GetOptions) -> Option<GetResult> {
        let Some(GetRange::Bounded(range)) = &options.range else { return None };
        if options.head || !is_plain_read(options) {
            return None;
        }
        self.directory
            .with_entry(location.as_ref(), |entry| self.cached_response_of(entry, range))
            .flatten()
    }

    fn cached_response_of(
        &self,
        entry: &Arc<ObjectEntry>,
        range: &Range<u64>,
    ) -> Option<GetResult> {
        if !self.is_fresh(entry) || range.end > entry.meta.size || range.start >= range.end {
            return None;
        }
        let bytes = entry.cached(range)?;
        entry.mark_used();
        self.counters.saved.add();
        Some(collected_response(entry, range.clone(), bytes))
    }
}

/// An upload that removes its object's entry when it ends.
#[derive(Debug)]
struct Upload {
    upload: Box<dyn MultipartUpload>,
    store: CachedStore,
    location: Path,
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.store.forget(&self.location);
    }
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.upload.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let _changing = self.store.write_scope(&[&self.location]);
        self.upload.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}

/// Share of the memory for the directory's entries: one part in so many.
const DIRECTORY_SHARE: u64 = 16;
const MEMORY_BYTES_MIN: u64 = 1 << 20;

impl Builder {
    /// Creates the store. With a [disk tier](Builder::disk), it starts a thread and reads the headers of the tier's file,
    /// 4 KiB of each MiB.
    ///
    /// # Errors
    ///
    /// [`Error::Generic`]: a size is out of range, the memory can't be reserved, or the directory of the disk tier
    /// can't be used, for example because another store uses it ([`DirectoryInUse`](crate::DirectoryInUse)).
    pub fn build(self) -> Result<CachedStore> {
        let refused = |what: String| Error::Generic { store: crate::NAME, source: what.into() };
        let memory_bytes = self.memory_bytes;
        if memory_bytes < MEMORY_BYTES_MIN {
            let what =
                format!("memory of {memory_bytes} bytes: must be at least {MEMORY_BYTES_MIN}");
            return Err(refused(what));
        }
        let failed =
            |error: millpond::Error| Error::Generic { store: crate::NAME, source: error.into() };
        let directory_bytes = memory_bytes / DIRECTORY_SHARE;
        let layout = self.disk.as_ref().map(|disk| disk.layout(self.page_bytes));
        let layout = layout.transpose().map_err(refused)?;
        let tier_bytes =
            layout.as_ref().map_or(0, |layout| DiskOptions::tier_bytes(layout, memory_bytes));
        if tier_bytes > memory_bytes / 2 {
            let what = format!(
                "memory of {memory_bytes} bytes: the disk tier takes {tier_bytes} of it, more than half"
            );
            return Err(refused(what));
        }
        let fixed_bytes = directory_bytes + tier_bytes;
        let engine = Engine::builder().cache_bytes(memory_bytes - fixed_bytes);
        #[cfg(feature = "shared")]
        let (engine, shared, directory_bytes) = self.share(engine, directory_bytes, fixed_bytes)?;
        let engine = engine.build().map_err(failed)?;
        // Reports a bad page size now, not at the first object.
        engine.blob(0, self.page_bytes).map_err(failed)?;
        let tier = self.disk.as_ref().zip(layout).map(|(disk, layout)| {
            DiskTier::open(disk, (layout, memory_bytes), &engine, self.inner.to_string())
        });
        let tier =
            tier.transpose().map_err(|source| Error::Generic { store: crate::NAME, source })?;
        let published = self.published;
        #[cfg(feature = "shared")]
        let more_lines = self.more_lines.clone();
        #[cfg_attr(not(feature = "shared"), expect(unused_mut, reason = "without clients"))]
        let mut inner = Inner::new(self, engine, directory_bytes, tier);
        #[cfg(feature = "shared")]
        {
            inner.shared = shared;
        }
        let inner = Arc::new(inner);
        let store = CachedStore { inner };
        if published {
            let inner = Arc::downgrade(&store.inner);
            let lines = move || {
                let lines = inner
                    .upgrade()
                    .map_or(String::new(), |inner| CachedStore { inner }.published_lines());
                #[cfg(feature = "shared")]
                let lines = lines + &more_lines.text();
                lines
            };
            store.inner.allocator.engine().publish_with(lines).map_err(failed)?;
        }
        Ok(store)
    }
}
