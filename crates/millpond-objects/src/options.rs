//! Options of a [`CachedStore`](crate::CachedStore): [`Builder`] and [`Freshness`].

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use object_store::{GetOptions, ObjectStore};

use crate::cacheable::CacheableReads;
use crate::disk::DiskOptions;

/// How old a cached version may be when it is served.
///
/// A version of an object is named by its strong ETag, or by its version field if it has no ETag. A weak ETag (`W/...`)
/// counts as none. With each choice, the bytes that one call returns are of one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Freshness {
    /// Objects never change once they exist, and no object is created again under the same name: cached bytes stay valid
    /// while they are cached. The only choice that caches objects without ETag and version. Writes through the same
    /// [`CachedStore`](crate::CachedStore) may change objects.
    Immutable,
    /// Each call revalidates its object with the store: by a conditional request if all bytes are cached, else by the
    /// request for the missing bytes. So a call that starts after a write has completed returns the written version or
    /// a newer one, whichever program wrote it.
    Revalidate,
    /// As `Revalidate`, but a response stays valid for this long after the start of its request.
    MaxAge(Duration),
}

/// Options of a [`CachedStore`](crate::CachedStore); see [`CachedStore::builder`](crate::CachedStore::builder).
///
/// # Examples
///
/// ```
/// use millpond_objects::{CachedStore, Freshness};
/// # use std::sync::Arc;
/// # use object_store::{ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> object_store::Result<()> {
///
/// # let dir = tempfile::tempdir().unwrap();
/// # let remote: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
/// let builder = CachedStore::builder(remote)
///     .memory_bytes(64 << 20)
///     .page_bytes(16 << 10)
///     .freshness(Freshness::MaxAge(std::time::Duration::from_secs(60)))
///     .gap_bytes(64 << 10)
///     .readahead_bytes_max(4 << 20)
///     .published(true);
/// # if std::env::var_os("NO_SUCH_VARIABLE").is_some() {
/// // With a second tier, where the directory's file system has direct I/O:
/// let store = builder.disk(dir.path(), 1 << 30).build()?;
/// # }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Builder {
    pub(crate) inner: Arc<dyn ObjectStore>,
    pub(crate) memory_bytes: u64,
    pub(crate) page_bytes: u32,
    pub(crate) freshness: Freshness,
    pub(crate) gap_bytes: u64,
    pub(crate) readahead_bytes_max: u64,
    pub(crate) disk: Option<DiskOptions>,
    pub(crate) published: bool,
    pub(crate) cacheable_reads: CacheableReads,
    #[cfg(feature = "shared")]
    pub(crate) more_lines: crate::stats::MoreLines,
    #[cfg(feature = "shared")]
    pub(crate) shared: Option<millpond::internals::shared::MemoryChoice>,
}

impl Builder {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>) -> Builder {
        Builder {
            inner,
            memory_bytes: 256 << 20,
            page_bytes: 16 << 10,
            freshness: Freshness::Revalidate,
            gap_bytes: 1 << 20,
            readahead_bytes_max: 4 << 20,
            disk: None,
            published: false,
            cacheable_reads: CacheableReads::default(),
            #[cfg(feature = "shared")]
            more_lines: Default::default(),
            #[cfg(feature = "shared")]
            shared: None,
        }
    }

    /// Limit of the cache's memory, in bytes: at least 1 MiB; default 256 MiB. A sixteenth of it is for names and versions
    /// of objects, the rest for their bytes. The bodies of responses in progress are not included.
    #[must_use]
    pub fn memory_bytes(mut self, bytes: u64) -> Builder {
        self.memory_bytes = bytes;
        self
    }

    /// Page size in bytes: the unit of requests and of eviction. A power of two from [`millpond::PAGE_BYTES_MIN`] to
    /// [`millpond::PAGE_BYTES_MAX`]; default 16 KiB. The last part of each object takes a whole page.
    #[must_use]
    pub fn page_bytes(mut self, bytes: u32) -> Builder {
        self.page_bytes = bytes;
        self
    }

    /// How old a cached version may be when it is served; default [`Freshness::Revalidate`].
    #[must_use]
    pub fn freshness(mut self, freshness: Freshness) -> Builder {
        self.freshness = freshness;
        self
    }

    /// Missing ranges at most this far apart are merged into one request, and the gap is transferred and cached with them.
    /// A good value is the number of bytes that the store sends in the time of one request. Default 1 MiB, as in
    /// `object_store`'s own `get_ranges`; for a call with more than 32 ranges, its part of 32 MiB.
    #[must_use]
    pub fn gap_bytes(mut self, bytes: u64) -> Builder {
        self.gap_bytes = bytes;
        self
    }

    /// Largest read-ahead of a sequential reader, in bytes; default 4 MiB; 0 disables read-ahead.
    #[must_use]
    pub fn readahead_bytes_max(mut self, bytes: u64) -> Builder {
        self.readahead_bytes_max = bytes;
        self
    }

    /// Whether [`Stats`](crate::Stats) are published to other processes of the same user, such as `millpond top`, four
    /// times a second. Takes a thread and a descriptor; [`build`](Builder::build) fails if it can't get them. Off by
    /// default.
    #[must_use]
    pub fn published(mut self, on: bool) -> Builder {
        self.published = on;
        self
    }

    /// Which reads the cache may serve: those for whose object and options `may_cache` returns true. The others go to the store
    /// as they are. By default the cache may serve all reads without extensions, as a store could need extensions, for
    /// instance to choose the keys. Stores of the crate `object_store` ignore them.
    ///
    /// For programs that tag their reads with extensions, and for objects that are not to be cached. Requests of the cache to
    /// the store have no extensions. `may_cache` gets default options for `get_ranges`, and is called for hits, too.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use millpond_objects::CachedStore;
    /// # use object_store::{GetOptions, ObjectStore, ObjectStoreExt, memory::InMemory, path::Path};
    /// #[derive(Clone)]
    /// struct Tag {
    ///     is_repeated: bool,
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> object_store::Result<()> {
    /// # let remote: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    /// let store = CachedStore::builder(remote)
    ///     .cache_if(|location, options| {
    ///         let tag = options.extensions.get::<Tag>();
    ///         location.extension() != Some("log") && tag.is_none_or(|tag| !tag.is_repeated)
    ///     })
    ///     .build()?;
    /// # for (name, cached) in [("pond.log", 0), ("pond", 1)] {
    /// #     let (path, mut options) = (Path::from(name), GetOptions::new().with_range(Some(0..5)));
    /// #     store.put(&path, "water".into()).await?;
    /// #     options.extensions.insert(Tag { is_repeated: false });
    /// #     assert_eq!(store.get_opts(&path, options).await?.bytes().await?, "water");
    /// #     assert_eq!(store.stats().objects, cached);
    /// # }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn cache_if(
        mut self,
        may_cache: impl Fn(&Path, &GetOptions) -> bool + Send + Sync + 'static,
    ) -> Builder {
        self.cacheable_reads = CacheableReads::new(may_cache);
        self
    }

    /// Adds a disk tier: a file in `dir` of at most `bytes` bytes that caches the bytes from the store. Pages that have left
    /// memory are read from it, also by the next process that uses the directory. One store at a time may use a
    /// directory. Default: no disk tier.
    ///
    /// The tier stores objects that have a strong ETag or a version. It identifies them by the store's name
    /// ([`ObjectStore`]'s `Display`), the object's name and its version. All bytes are checksummed: bytes that a kill, a
    /// full disk or a failing disk damaged are requested from the store again.
    ///
    /// The directory has to be on a file system with direct I/O. It is created with mode 700 if it does not exist.
    /// [`build`](Builder::build) refuses a directory or file of another user (except a directory of root), and one that its
    /// group or other users may write to.
    ///
    /// The tier's memory is part of [`Builder::memory_bytes`]: 31 bytes for each page that `bytes` has room for (2 MiB per
    /// GiB with 16 KiB pages), and write buffers of a sixteenth of the memory: at least four times the smaller of 1 MiB and
    /// a 64th of `bytes`, at most 33 MiB.
    #[must_use]
    pub fn disk(mut self, dir: impl Into<PathBuf>, bytes: u64) -> Builder {
        self.disk = Some(DiskOptions { dir: dir.into(), bytes });
        self
    }
}
