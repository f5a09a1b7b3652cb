//! An object store with foyer's in-memory cache: pages by path and number, as in Millpond.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use async_trait::async_trait;
use bytes::Bytes;
use equivalent::Equivalent;
use foyer_memory::{Cache, CacheBuilder, S3FifoConfig};
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

pub const PAGE_BYTES: u64 = 16 << 10;

#[derive(Debug, PartialEq, Eq)]
struct Key(Box<str>, u64);

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Asked(&self.0, self.1).hash(state);
    }
}

/// A borrowed key, for lookups without an allocation.
#[derive(Hash)]
struct Asked<'a>(&'a str, u64);

impl Equivalent<Key> for Asked<'_> {
    fn equivalent(&self, key: &Key) -> bool {
        self.0 == &*key.0 && self.1 == key.1
    }
}

#[derive(Clone)]
struct Page {
    bytes: Bytes,
    meta: ObjectMeta,
}

/// A store that caches pages in foyer's cache.
pub struct Foyer {
    store: Arc<dyn ObjectStore>,
    cache: Cache<Key, Page>,
}

impl Foyer {
    pub fn new(store: Arc<dyn ObjectStore>, limit_bytes: u64) -> Foyer {
        let builder = CacheBuilder::new(limit_bytes as usize).with_shards(16);
        let builder = builder.with_eviction_config(S3FifoConfig::default());
        let weigh = |key: &Key, page: &Page| key.0.len() * 2 + page.bytes.len() + 256;
        Foyer { store, cache: builder.with_weighter(weigh).build() }
    }

    fn page(&self, path: &Path, range: &Range<u64>) -> Option<(Bytes, ObjectMeta)> {
        let number = range.start / PAGE_BYTES;
        let entry = self.cache.get(&Asked(path.as_ref(), number))?;
        let (start, end) = (range.start - number * PAGE_BYTES, range.end - number * PAGE_BYTES);
        let page = entry.value();
        (end as usize <= page.bytes.len())
            .then(|| (page.bytes.slice(start as usize..end as usize), page.meta.clone()))
    }

    /// A lookup in the cache alone: bytes of one page.
    pub fn lookup(&self, path: &Path, range: Range<u64>) -> Option<Bytes> {
        let number = range.start / PAGE_BYTES;
        let entry = self.cache.get(&Asked(path.as_ref(), number))?;
        let start = (range.start - number * PAGE_BYTES) as usize;
        Some(entry.value().bytes.slice(start..start + (range.end - range.start) as usize))
    }
}

impl fmt::Debug for Foyer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Foyer")
    }
}

impl fmt::Display for Foyer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Foyer")
    }
}

/// A store that counts requests for bytes.
#[derive(Debug)]
pub struct Counted<S> {
    store: S,
    requests: AtomicU64,
}

impl<S> Counted<S> {
    pub fn new(store: S) -> Arc<Counted<S>> {
        Arc::new(Counted { store, requests: AtomicU64::new(0) })
    }

    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }
}

impl<S: fmt::Display> fmt::Display for Counted<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

/// Implements `ObjectStore` with given reads; all other calls go to the underlying store.
macro_rules! store {
    ([$($generic:tt)*] $store:ty, $($read:tt)*) => {
        #[async_trait]
        impl<$($generic)*> ObjectStore for $store {
            $($read)*

        async fn put_opts(
            &self,
            at: &Path,
            bytes: PutPayload,
            options: PutOptions,
        ) -> Result<PutResult> {
            self.store.put_opts(at, bytes, options).await
        }

        async fn put_multipart_opts(
            &self,
            at: &Path,
            options: PutMultipartOptions,
        ) -> Result<Box<dyn MultipartUpload>> {
            self.store.put_multipart_opts(at, options).await
        }

        fn delete_stream(
            &self,
            at: BoxStream<'static, Result<Path>>,
        ) -> BoxStream<'static, Result<Path>> {
            self.store.delete_stream(at)
        }

        fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
            self.store.list(prefix)
        }

        async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
            self.store.list_with_delimiter(prefix).await
        }

        async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
            self.store.copy_opts(from, to, options).await
        }
        }
    };
}

store! {
    [S: ObjectStore] Counted<S>,
    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.requests.fetch_add(1, Relaxed);
        self.store.get_opts(at, options).await
    }
}

store! {
    [] Foyer,
    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        let Some(GetRange::Bounded(range)) = options.range.clone() else {
            return self.store.get_opts(at, options).await;
        };
        let answer = |bytes: Bytes, meta| GetResult {
            payload: GetResultPayload::Stream(stream::once(std::future::ready(Ok(bytes))).boxed()),
            meta,
            range: range.clone(),
            attributes: Default::default(),
            extensions: Default::default(),
        };
        if let Some((bytes, meta)) = self.page(at, &range) {
            return Ok(answer(bytes, meta));
        }
        let start = range.start / PAGE_BYTES * PAGE_BYTES;
        let page = GetOptions::new().with_range(Some(start..start + PAGE_BYTES));
        let page = self.store.get_opts(at, page).await?;
        let meta = page.meta.clone();
        // A copy, so that the cache accounts for exactly this memory.
        let bytes = Bytes::copy_from_slice(&page.bytes().await?);
        let key = Key(at.as_ref().into(), start / PAGE_BYTES);
        self.cache.insert(key, Page { bytes: bytes.clone(), meta: meta.clone() });
        let (from, to) = ((range.start - start) as usize, (range.end - start) as usize);
        Ok(answer(bytes.slice(from..to), meta))
    }
}
