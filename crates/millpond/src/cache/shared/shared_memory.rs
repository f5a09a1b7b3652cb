//! The server's side of shared memory: its file, and the chunks that are mapped.
//!
//! ```text
//!   chunk 0: unit 0    frame 0, which is not in use and reads as zeros
//!            unit 1    the header, for clients
//!   chunk 1 ...        cores, nodes and pages, as chunks get a class
//!   a chunk at the end, which late readers may read (shared.SH2)
//! ```
//!
//! Locks: none.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::cache::shared::attempts::AttemptOrder;
use crate::cache::shared::client_list::ClientList;
use crate::huge_memory::{self, MemoryChoice, MemoryKind};
use crate::memory;
use crate::units::{CHUNK_BYTES, CHUNK_UNITS, UNIT_BYTES};

/// "MPSHARED", and the version of the layout: of the header, of cores, nodes and page words.
const SHARED_MAGIC: u64 = u64::from_le_bytes(*b"MPSHARED");
const SHARED_VERSION: u64 = 2;

/// The facts for clients. In unit 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) struct SharedHeader {
    magic: u64,
    version: u64,
    pub(super) units: u64,
    /// 1: the server calls `membarrier` for its clients.
    pub(super) has_membarrier: u64,
    /// 1: chunks may have huge pages.
    pub(super) may_be_huge: u64,
}

impl SharedHeader {
    fn new(units: u32, has_membarrier: bool, may_be_huge: bool) -> SharedHeader {
        SharedHeader {
            magic: SHARED_MAGIC,
            version: SHARED_VERSION,
            units: units.into(),
            has_membarrier: has_membarrier.into(),
            may_be_huge: may_be_huge.into(),
        }
    }

    /// Whether a file of so many bytes has this header, of this version.
    pub(super) fn is_valid(&self, bytes: u64) -> bool {
        let units = u32::try_from(self.units).unwrap_or(0);
        *self == SharedHeader::new(units, self.has_membarrier == 1, self.may_be_huge == 1)
            && units >= CHUNK_UNITS
            && file_bytes(units) == bytes
    }
}

/// The length of the file.
pub(super) fn file_bytes(units: u32) -> u64 {
    u64::from(units) * UNIT_BYTES as u64 + CHUNK_BYTES
}

/// The memory of a shared cache.
pub(crate) struct SharedMemory {
    file: OwnedFd,
    kind: MemoryKind,
    pub(crate) clients: ClientList,
    /// Groups that the last sweep gave back again, and groups that were given back since. Relaxed: hints.
    swept: AtomicU64,
    given_back: AtomicU64,
}

impl SharedMemory {
    /// The bytes that are resident from the start: frame 0 and the header.
    pub(crate) const FIXED_BYTES: u64 = 2 * UNIT_BYTES as u64;

    /// Creates the memory for a range of `units` at `base`, and maps the first chunk.
    ///
    /// # Safety
    ///
    /// The range is a mapping of the caller's that holds only zeros, and is in use by no other
    /// code.
    pub(crate) unsafe fn create(
        choice: &MemoryChoice,
        base: *mut u8,
        units: u32,
        limit_bytes: u64,
    ) -> io::Result<SharedMemory> {
        let (file, kind) = huge_memory::create_file(choice, file_bytes(units), limit_bytes)?;
        let shared = SharedMemory {
            file,
            kind,
            clients: ClientList::default(),
            swept: 0.into(),
            given_back: 0.into(),
        };
        // SAFETY: the caller's promise.
        if !unsafe { shared.place(0, base) }? {
            return Err(memory::no_memory());
        }
        let header =
            SharedHeader::new(units, AttemptOrder::is_offered(), shared.kind.may_be_huge());
        // SAFETY: the first chunk was just mapped, and no other code uses it yet.
        unsafe {
            _ = rustix::mm::madvise(base.cast(), CHUNK_BYTES as usize, Advice::LinuxNoHugepage);
            // Frame 0 gets its memory now: a client's look-up reads it where there is no node.
            base.write_volatile(0);
            base.add(UNIT_BYTES).cast::<SharedHeader>().write_volatile(header);
        }
        Ok(shared)
    }

    pub(crate) fn kind(&self) -> &MemoryKind {
        &self.kind
    }

    /// The bytes that have memory.
    pub(crate) fn resident_bytes(&self) -> u64 {
        rustix::fs::fstat(&self.file).map_or(0, |stat| stat.st_blocks as u64 * 512)
    }

    /// Whether as many groups were given back since the last sweep as that one took, so that sweeps take no more than half
    /// of the time. `groups`: given back just now.
    pub(crate) fn is_sweep_due(&self, groups: u64) -> bool {
        let given_back = self.given_back.fetch_add(groups, Relaxed) + groups;
        given_back > self.swept.load(Relaxed)
    }

    /// A sweep gave back so many groups again.
    pub(crate) fn note_sweep(&self, groups: u64) {
        self.swept.store(groups, Relaxed);
        self.given_back.store(0, Relaxed);
    }

    /// A descriptor for a client (shared.SH1).
    pub(crate) fn open_for_client(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Maps the chunk that begins with unit `first` at `at`, readable and writable. False: it failed, and the target
    /// must not be used again. An error: nothing has changed.
    ///
    /// # Safety
    ///
    /// The chunk at `at` is a mapping of the caller's that holds only zeros; it may be read concurrently, but not
    /// written.
    pub(crate) unsafe fn place(&self, first: u32, at: *mut u8) -> io::Result<bool> {
        let bytes = CHUNK_BYTES as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let from = u64::from(first) * UNIT_BYTES as u64;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let copy = unsafe {
            let copy = rustix::mm::mmap(ptr::null_mut(), bytes, access, flags, &self.file, from)?;
            // A child of fork finds zeros: see `forked_ranges`.
            if let Err(error) = rustix::mm::madvise(copy, bytes, Advice::LinuxDontFork) {
                _ = rustix::mm::munmap(copy, bytes);
                return Err(error.into());
            }
            copy
        };
        // SAFETY: the mapping above; the target is the caller's promise. A reader sees the old zeros, or those of
        // untouched shared memory.
        Ok(unsafe { memory::move_mapping(copy.cast(), bytes, at) })
    }
}
