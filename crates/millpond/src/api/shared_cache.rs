//! A cache that several processes read: the objects of its server, and of its clients.
//!
//! See `cache::shared` for the protocol.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use crate::api::blob::Blob;
use crate::api::file::{File, in_range};
use crate::cache::Cache;
use crate::cache::frames::frame_range::FrameRange;
use crate::cache::shared::client_block::{BLOCK_VERSION, ClientBlock, MappedBlock, THREADS_MAX};
use crate::cache::shared::client_list::ClientEntry;
use crate::cache::shared::client_range::MappedRange;
use crate::cache::shared::shared_memory::SharedMemory;
use crate::cache::table::FileCore;
use crate::huge_memory::MemoryKind;
use crate::inode::CachedFile;
use crate::process_local;
use crate::read::shared_hit::{ReaderCounts, SharedHitPath};
use crate::sync::MutexExt;

/// The cache of an engine that other processes may read.
#[derive(Clone)]
pub struct SharedCache {
    memory: Arc<SharedMemory>,
}

impl SharedCache {
    /// See [`Engine::shared_cache`](crate::Engine::shared_cache).
    pub(crate) fn of(cache: &Cache) -> Option<SharedCache> {
        Some(SharedCache { memory: Arc::clone(cache.frames.shared()?) })
    }

    /// The memory that the cache is in.
    #[must_use]
    pub fn memory(&self) -> &MemoryKind {
        self.memory.kind()
    }

    /// Adds a client. `client` is the descriptor of its [`ClientMemory`], and `process` a pidfd of it.
    ///
    /// # Errors
    ///
    /// `InvalidInput`: the descriptor is not of such memory. Others: the system gives no memory or no descriptor.
    pub fn attach(
        &self,
        client: &OwnedFd,
        process: impl Into<Arc<OwnedFd>>,
    ) -> io::Result<AttachedClient> {
        let entry = ClientEntry::new(client, process.into())?;
        let cache = self.memory.open_for_client()?;
        // Before the client has the memory (shared.SH4).
        self.memory.clients.attach(&entry);
        let attachment = ClientAttachment { memory: Arc::clone(&self.memory), entry };
        Ok(AttachedClient { attachment, cache })
    }
}

/// A number of this process that no ancestor of it has. No system call.
#[must_use]
pub fn process_number() -> u64 {
    process_local::number()
}

/// A client, and the descriptor of the cache for it. The client is detached when this is dropped.
pub struct AttachedClient {
    attachment: ClientAttachment,
    cache: OwnedFd,
}

/// A client, which is detached when this is dropped. The owner drops it when the client's process is gone; before that,
/// the client's late reads could take memory beyond the limit.
pub struct ClientAttachment {
    memory: Arc<SharedMemory>,
    entry: Arc<ClientEntry>,
}

impl AttachedClient {
    /// The descriptor of the cache for the client. It is open for reading, and can't be opened for writing.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.cache.as_fd()
    }

    /// Closes the descriptor, which the client has received. The client stays attached.
    #[must_use]
    pub fn close_descriptor(self) -> ClientAttachment {
        self.attachment
    }
}

impl Drop for ClientAttachment {
    fn drop(&mut self) {
        self.memory.clients.detach(&self.entry);
    }
}

/// The name of a file in a shared cache, which the server sends to a client. It is good until the server closes the file; then reads of it
/// miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SharedFile {
    /// Which core, from the start of the range.
    core: u64,
    generation: u64,
}

impl SharedFile {
    fn of(cached: &CachedFile) -> Option<SharedFile> {
        let frames = &cached.cache().frames;
        frames.shared()?;
        let core = frames.file_number(std::ptr::from_ref(cached.core()).cast());
        let core = (core / size_of::<FileCore>()) as u64;
        Some(SharedFile { core, generation: cached.core().generation() })
    }

    /// Two numbers, for a message.
    #[must_use]
    pub fn to_words(self) -> [u64; 2] {
        [self.core, self.generation]
    }

    /// The inverse of [`SharedFile::to_words`].
    #[must_use]
    pub fn from_words([core, generation]: [u64; 2]) -> SharedFile {
        SharedFile { core, generation }
    }
}

impl File {
    /// The name of this file for clients. `None`: the cache is not shared.
    ///
    /// # Examples
    ///
    /// ```
    /// use millpond::{Engine, OpenOptions};
    ///
    /// let engine = Engine::builder().cache_bytes(1 << 20).build()?;
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("data");
    /// let file = engine.open(&path, &OpenOptions::new().read(true).write(true).create(true))?;
    /// assert!(file.shared_file().is_none());
    /// # Ok::<(), millpond::Error>(())
    /// ```
    #[must_use]
    pub fn shared_file(&self) -> Option<SharedFile> {
        SharedFile::of(&self.cached)
    }
}

impl Blob {
    /// The name of this blob for clients. `None`: the cache is not shared.
    #[must_use]
    pub fn shared_file(&self) -> Option<SharedFile> {
        SharedFile::of(self.cached())
    }
}

/// The memory of a client that its server reads.
pub struct ClientMemory {
    block: MappedBlock,
    descriptor: OwnedFd,
}

impl ClientMemory {
    /// The version of its layout. Client and server must have the same one, and the same number of bytes: a protocol between
    /// them has a version of its own that covers both.
    pub const LAYOUT_VERSION: u32 = BLOCK_VERSION;
    /// Its length.
    pub const BYTES: usize = size_of::<ClientBlock>();

    /// Creates it.
    ///
    /// # Errors
    ///
    /// The system gives no memory or no descriptor.
    pub fn create() -> io::Result<ClientMemory> {
        let (block, descriptor) = MappedBlock::create()?;
        Ok(ClientMemory { block, descriptor })
    }

    /// The descriptor for the server.
    #[must_use]
    pub fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }
}

/// A client of a shared cache.
#[derive(Clone)]
pub struct SharedClient {
    inner: Arc<ClientParts>,
}

struct ClientParts {
    range: MappedRange,
    block: MappedBlock,
    /// The slots that no thread has, and the numbers of their last pushes.
    free: Mutex<Vec<(usize, u64)>>,
    creator: u64,
}

impl SharedClient {
    /// Maps the cache that the server has sent. The server has attached `memory` before.
    ///
    /// # Errors
    ///
    /// `InvalidData`: the descriptor is not of a shared cache, or of another version of this library. Others: the system
    /// gives no address space.
    pub fn map(memory: ClientMemory, cache: &OwnedFd) -> io::Result<SharedClient> {
        let inner = ClientParts {
            range: MappedRange::map(cache)?,
            block: memory.block,
            free: Mutex::new((0..THREADS_MAX).rev().map(|slot| (slot, 0)).collect()),
            creator: process_local::number(),
        };
        Ok(SharedClient { inner: Arc::new(inner) })
    }

    /// Has the server execute a fence for each later read, which saves these reads some nanoseconds. Takes 10 to 20 ms in a
    /// process with several threads, and the end of the process waits for the call.
    pub fn save_fences(&self) {
        self.inner.range.order.register();
    }

    /// Where the cache is mapped, and how many bytes.
    #[must_use]
    pub fn mapped(&self) -> (*const u8, usize) {
        self.inner.range.bytes()
    }

    /// Reads for one thread at a time. `None`: 64 threads have one already, or this is a child of fork, which has to
    /// attach itself.
    #[must_use]
    pub fn reader(&self) -> Option<SharedReader> {
        let inner = &self.inner;
        if inner.creator != process_local::number() {
            return None;
        }
        let (slot, pushes) = inner.free.acquire().pop()?;
        inner.block.block().use_slot(slot);
        let counts = ReaderCounts::default();
        counts.pushes.set(pushes);
        Some(SharedReader { client: Arc::clone(inner), slot, counts })
    }
}

/// Reads of a shared cache, by one thread at a time.
pub struct SharedReader {
    client: Arc<ClientParts>,
    slot: usize,
    counts: ReaderCounts,
}

impl SharedReader {
    /// Reads from byte `offset` of the file into `dst`, if all of its pages are cached. Returns the bytes read; fewer than
    /// `dst.len()` mean end of file. `None`: a page is not cached, the file is closed, or the read is longer than 64
    /// pages: ask the server. Atomic as a read of the server's own. No system call, no lock.
    #[inline]
    pub fn try_read(&self, file: SharedFile, dst: &mut [u8], offset: u64) -> Option<usize> {
        // SAFETY: the slice is valid for writes.
        unsafe { self.try_read_raw(file, dst.as_mut_ptr(), dst.len(), offset) }
    }

    /// As [`SharedReader::try_read`], into memory that need not be initialized. The bytes that were read are.
    #[inline]
    pub fn try_read_into(
        &self,
        file: SharedFile,
        dst: &mut [MaybeUninit<u8>],
        offset: u64,
    ) -> Option<usize> {
        // SAFETY: the slice is valid for writes.
        unsafe { self.try_read_raw(file, dst.as_mut_ptr().cast(), dst.len(), offset) }
    }

    /// # Safety
    ///
    /// The memory of `len` bytes at `at` is valid for writes; it may be uninitialized.
    #[inline]
    unsafe fn try_read_raw(
        &self,
        file: SharedFile,
        at: *mut u8,
        len: usize,
        offset: u64,
    ) -> Option<usize> {
        let client = &*self.client;
        if !in_range(offset, len as u64) || client.creator != process_local::number() {
            return None;
        }
        let (attempts, ring) = client.block.block().slot(self.slot);
        let range: &FrameRange = &client.range.range;
        let path = SharedHitPath {
            core: client.range.core(file.core)?,
            generation: file.generation,
            range,
            order: client.range.order.current(),
            attempts,
            ring,
            counts: &self.counts,
        };
        // SAFETY: the caller's promise.
        unsafe { path.try_read(at, len, offset) }
    }

    /// Reads that hit so far, and their bytes.
    #[must_use]
    pub fn hits(&self) -> (u64, u64) {
        (self.counts.hits.get(), self.counts.bytes.get())
    }

    /// Attempts that failed because a page changed during the copy.
    #[must_use]
    pub fn retries(&self) -> u64 {
        self.counts.retries.get()
    }
}

impl Drop for SharedReader {
    fn drop(&mut self) {
        let mut free = self.client.free.acquire();
        free.push((self.slot, self.counts.pushes.get()));
    }
}
