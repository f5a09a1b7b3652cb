//! The store below a server's cache: a cache in this process, made at the first read that no server serves.
//!
//! - **P1** A child of fork opens the store again, with a cache of its own: connections and threads are the parent's. It leaks
//!   the parent's, by [`OfProcess`].
//! - **P2** Without a cache in this process, writes go to the store itself. Another thread may make the cache during the
//!   write, which therefore removes its objects from it at the end: reads never return an earlier version.
//! - **P3** The directory of a disk tier is for one cache. A child of fork, a pickle and a process whose server has ended may
//!   find it in use by another process of the program, so their caches do without it.

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use millpond_objects::{CachedStore, DirectoryInUse, Freshness, Stats};
#[cfg(feature = "endpoint")]
use object_store::list::PaginatedListStore;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
    UploadPart,
};

use crate::store::place::{self, Place};
use crate::store::runtime::OfProcess;
use crate::store::server_watch;
use crate::store::settings::StoreSettings;

/// The store, opened by this process.
struct Opened {
    place: Place,
    cache: OnceLock<CachedStore>,
    /// Locked to make the cache.
    making: Mutex<()>,
}

impl Opened {
    fn new(place: Place) -> Arc<OfProcess<Opened>> {
        let (cache, making) = Default::default();
        Arc::new(OfProcess::new(Opened { place, cache, making }))
    }
}

/// See the module.
pub(crate) struct ProcessStore {
    settings: Arc<StoreSettings>,
    name: String,
    prefix: Path,
    opened: ArcSwap<OfProcess<Opened>>,
}

/// The parts of this process, for the time of one call.
struct OwnParts(Arc<OfProcess<Opened>>);

impl OwnParts {
    fn get(&self) -> &Opened {
        self.0.get().expect("of this process")
    }

    /// The store for a write.
    fn store(&self) -> Arc<dyn ObjectStore> {
        match self.get().cache.get() {
            Some(cache) => Arc::new(cache.clone()),
            None => Arc::clone(&self.get().place.store),
        }
    }
}

/// Removes objects from the cache at the end of a write, even if it fails or is dropped (P2).
struct WriteEnd {
    parts: OwnParts,
    names: Mutex<Vec<Path>>,
}

impl WriteEnd {
    fn add(&self, name: &Path) {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).push(name.clone());
    }

    fn forget(&self, name: &Path) {
        // In a child of fork the parts are the parent's.
        if let Some(cache) = self.parts.0.get().and_then(|opened| opened.cache.get()) {
            cache.forget(name);
        }
    }
}

impl Drop for WriteEnd {
    fn drop(&mut self) {
        let names = self.names.get_mut().unwrap_or_else(PoisonError::into_inner);
        for name in std::mem::take(names) {
            self.forget(&name);
        }
    }
}

impl ProcessStore {
    /// Opens the store. May wait for a disk.
    pub(crate) fn open(settings: &Arc<StoreSettings>) -> place::Result<ProcessStore> {
        let place = place::open(&settings.url, &settings.options)?;
        Ok(ProcessStore {
            settings: Arc::clone(settings),
            name: place.name.clone(),
            prefix: place.prefix.clone(),
            opened: ArcSwap::new(Opened::new(place)),
        })
    }

    fn parts(&self) -> Result<OwnParts> {
        let opened = self.opened.load_full();
        if opened.is_of_this_process() {
            return Ok(OwnParts(opened));
        }
        // P1. Another thread of the child may be faster.
        let place = place::open(&self.settings.url, &self.settings.options)?;
        drop(self.opened.compare_and_swap(&opened, Opened::new(place)));
        Ok(OwnParts(self.opened.load_full()))
    }

    /// The prefix of the URL, below which all names are.
    pub(crate) fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// The lists of the store, page by page, if it has these, and whether it keeps metadata of objects.
    #[cfg(feature = "endpoint")]
    pub(crate) fn of_endpoint(&self) -> (Option<Arc<dyn PaginatedListStore>>, bool) {
        let opened = self.opened.load();
        let place = opened.get().map(|opened| &opened.place);
        (
            place.and_then(|place| place.lists.clone()),
            place.is_none_or(|place| place.keeps_metadata),
        )
    }

    /// The cache of this process. Its start may wait for a disk.
    pub(crate) fn cache(&self) -> Result<CachedStore> {
        self.cache_with(false)
    }

    /// The same, with the disk tier of the settings if `needs_disk` (P3).
    pub(crate) fn cache_with(&self, needs_disk: bool) -> Result<CachedStore> {
        let parts = self.parts()?;
        let opened = parts.get();
        if let Some(cache) = opened.cache.get() {
            return Ok(cache.clone());
        }
        let _making = opened.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cache) = opened.cache.get() {
            return Ok(cache.clone());
        }
        let settings = &self.settings;
        let builder = || {
            CachedStore::builder(Arc::clone(&opened.place.store))
                .memory_bytes(settings.memory)
                .freshness(settings.freshness.unwrap_or(Freshness::Revalidate))
        };
        let built = match &settings.disk {
            Some((folder, bytes)) => builder().disk(folder, *bytes).build(),
            None => builder().build(),
        };
        let cache = match built {
            Err(error) if !needs_disk && is_directory_in_use(&error) => {
                server_watch::note(format!("{}: cached without a disk: {error}", settings.url));
                builder().build()?
            }
            built => built?,
        };
        Ok(opened.cache.get_or_init(|| cache).clone())
    }

    /// The cache of this process, if it has been made.
    fn made_cache(&self) -> Option<CachedStore> {
        self.parts().ok()?.get().cache.get().cloned()
    }

    /// As [`CachedStore::cached_size`].
    pub(crate) fn cached_size(&self, name: &Path) -> Option<u64> {
        self.made_cache()?.cached_size(name)
    }

    /// As [`CachedStore::try_read_ranges_into`].
    pub(crate) fn try_read_into(
        &self,
        name: &Path,
        ranges: &mut [(u64, &mut [MaybeUninit<u8>])],
    ) -> Option<u64> {
        self.made_cache()?.try_read_ranges_into(name, ranges)
    }

    /// Statistics of the cache of this process; zeros before its first read.
    pub(crate) fn stats(&self) -> Stats {
        self.made_cache().map(|cache| cache.stats()).unwrap_or_default()
    }

    /// Removes an object from the cache of this process.
    pub(crate) fn forget(&self, name: &Path) {
        if let Ok(parts) = self.parts() {
            WriteEnd { parts, names: Mutex::default() }.forget(name);
        }
    }

    /// The store, and the end of a write of these objects.
    fn begin_write(&self, names: &[&Path]) -> Result<(Arc<dyn ObjectStore>, WriteEnd)> {
        let parts = self.parts()?;
        if parts.get().place.is_read_only {
            let what = "http(s):// is read-only: nothing is written, copied or removed";
            return Err(Error::NotSupported { source: what.into() });
        }
        let names = names.iter().map(|&name| name.clone()).collect();
        Ok((parts.store(), WriteEnd { parts, names: Mutex::new(names) }))
    }
}

impl fmt::Debug for ProcessStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessStore").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The name of the store itself, by which a server compares stores.
impl fmt::Display for ProcessStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

fn is_directory_in_use(error: &Error) -> bool {
    matches!(error, Error::Generic { source, .. } if source.is::<DirectoryInUse>())
}

fn failed<T: Send + 'static>(error: Error) -> BoxStream<'static, Result<T>> {
    stream::once(std::future::ready(Err(error))).boxed()
}

#[async_trait]
impl ObjectStore for ProcessStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let (store, _end) = self.begin_write(&[location])?;
        store.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let (store, end) = self.begin_write(&[location])?;
        let upload = store.put_multipart_opts(location, options).await?;
        Ok(Box::new(ProcessUpload { upload, end: Some(end) }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.cache()?.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.cache()?.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let (store, end) = match self.begin_write(&[]) {
            Ok(begun) => begun,
            Err(error) => return failed(error),
        };
        let end = Arc::new(end);
        let deleting = Arc::clone(&end);
        let locations = locations.inspect(move |name| {
            if let Ok(name) = name {
                deleting.add(name);
            }
        });
        let deleted = store.delete_stream(locations.boxed());
        deleted.inspect(move |name| _ = name.as_ref().map(|name| end.forget(name))).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.parts() {
            Ok(parts) => parts.store().list(prefix),
            Err(error) => failed(error),
        }
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.parts() {
            Ok(parts) => parts.store().list_with_offset(prefix, offset),
            Err(error) => failed(error),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let store = self.parts()?.store();
        store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let (store, _end) = self.begin_write(&[to])?;
        store.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let (store, _end) = self.begin_write(&[from, to])?;
        store.rename_opts(from, to, options).await
    }
}

/// An upload whose object is removed from the cache when it ends.
struct ProcessUpload {
    upload: Box<dyn MultipartUpload>,
    end: Option<WriteEnd>,
}

impl fmt::Debug for ProcessUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessUpload").field("upload", &self.upload).finish_non_exhaustive()
    }
}

#[async_trait]
impl MultipartUpload for ProcessUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.upload.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let completed = self.upload.complete().await;
        self.end = None;
        completed
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}
