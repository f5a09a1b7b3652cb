//! How a [`CachedStore`](crate::CachedStore)(crate::CachedStore) is made.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;

use crate::disk::DiskOptions;

/// How old what is cached may be.
///
/// A version of an object is the one that its strong ETag names, or its version where it has no ETag; a weak ETag
/// (`W/...`) counts as none. Whatever is chosen,
/// the bytes that one call returns are of one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Freshness {
    /// Objects never change once they exist, and are not made anew by the same name: what is cached is
    /// right for as long as it is cached. The only choice that caches objects without ETag and version.
    /// What goes through the same [`CachedStore`](crate::CachedStore) may change them.
    Immutable,
    /// Each call asks the store whether its object is still of the version that is cached, by a conditional
    /// request if all is cached, or with the request for what is not: so a call that begins after a
    /// write has ended, by whomever, returns what was written or something newer.
    Revalidate,
    /// As `Revalidate`, but the answer holds for so long from the start of its request.
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
/// # let far: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
/// let builder = CachedStore::builder(far)
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
        }
    }

    /// The memory that the cache may take, in bytes: at least 1 MiB; 256 MiB unless said. A sixteenth of it
    /// is for names and versions of objects, the rest for their bytes. Not in it is what requests that
    /// are under way receive.
    #[must_use]
    pub fn memory_bytes(mut self, bytes: u64) -> Builder {
        self.memory_bytes = bytes;
        self
    }

    /// The size of a page, in bytes: what is asked of the store, and evicted, at least. A power of two that
    /// the engine takes ([`millpond::PAGE_BYTES_MIN`] to [`millpond::PAGE_BYTES_MAX`]); 16 KiB unless
    /// said. The end of each object takes a page, too.
    #[must_use]
    pub fn page_bytes(mut self, bytes: u32) -> Builder {
        self.page_bytes = bytes;
        self
    }

    /// How old what is cached may be; [`Freshness::Revalidate`] unless said.
    #[must_use]
    pub fn freshness(mut self, freshness: Freshness) -> Builder {
        self.freshness = freshness;
        self
    }

    /// Of missing bytes no further apart than this, one request is made, and what lies between is
    /// transferred, and cached, with them: what the store sends in the time that a request takes. 1 MiB unless said,
    /// as in `object_store`'s own `get_ranges`.
    #[must_use]
    pub fn gap_bytes(mut self, bytes: u64) -> Builder {
        self.gap_bytes = bytes;
        self
    }

    /// How far ahead of a reader that reads an object in order a request reaches at most; 4 MiB unless
    /// said; 0: not at all.
    #[must_use]
    pub fn readahead_bytes_max(mut self, bytes: u64) -> Builder {
        self.readahead_bytes_max = bytes;
        self
    }

    /// Whether [`Stats`](crate::Stats) are told to other processes of the same user, four times a second: to
    /// `millpond top`. Takes a thread and a descriptor; [`build`](Builder::build) fails where the system gives
    /// neither. Not unless said.
    #[must_use]
    pub fn published(mut self, on: bool) -> Builder {
        self.published = on;
        self
    }

    /// A second tier: what the store sent is also kept in a file in `dir`, of at most `bytes` bytes, and read
    /// from there when it is not in memory any more, also by the next process that uses the directory, which
    /// one store at a time may. None unless said.
    ///
    /// Kept are objects that have an ETag or a version, for which the name of the store
    /// ([`ObjectStore`]'s `Display`), the object's and its version say whether it is the same. All bytes are
    /// checksummed: what a kill, a full or a broken disk has left is asked of the store again. The
    /// directory has to be on a file system with direct I/O; it is made, with mode 700, if there is none. A directory
    /// or file of another user (root's directory excepted), or one that the group or others may write to, is refused. Memory for it is
    /// taken from [`Builder::memory_bytes`]: 31 bytes for each page that `bytes` has room for (2 MiB for
    /// each GiB with pages of 16 KiB), and a sixteenth for pages on their way to the disk, but at least four times a 64th of `bytes` or 1 MiB, whichever is less, and at most 33 MiB.
    #[must_use]
    pub fn disk(mut self, dir: impl Into<PathBuf>, bytes: u64) -> Builder {
        self.disk = Some(DiskOptions { dir: dir.into(), bytes });
        self
    }
}
