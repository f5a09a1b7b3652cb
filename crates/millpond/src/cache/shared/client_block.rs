//! The memory of a client that the server reads: attempt counts and rings, a slot for each thread.
//!
//! The client makes it, a memfd whose length is sealed, so that it can't make the server fault. The server maps it
//! read-only. Neither trusts it with anything but hints: see shared.SH3 and shared.SH7.
//!
//! Locks: none.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::cache::shared::attempts::AttemptCount;
use crate::cache::shared::touched::TouchRing;
use crate::process_local;

/// Threads of a client that can read at the same time.
pub(crate) const THREADS_MAX: usize = 64;

/// In a cache line of its own.
#[repr(C, align(64))]
struct PaddedCount(AttemptCount);

/// Rises with each change of [`ClientBlock`].
pub(crate) const BLOCK_VERSION: u32 = 2;

/// All zeros at first. Client and server have the same layout, by the version of their protocol.
#[repr(C)]
pub(crate) struct ClientBlock {
    attempts: [PaddedCount; THREADS_MAX],
    /// The slots that were used so far. The others have no memory yet.
    slots_used: AtomicU32,
    rings: [TouchRing; THREADS_MAX],
}

impl ClientBlock {
    /// The counts of all threads.
    pub(crate) fn attempts(&self) -> impl Iterator<Item = &AttemptCount> {
        self.attempts.iter().map(|padded| &padded.0)
    }

    /// The rings of the slots that were used so far.
    pub(crate) fn rings(&self) -> impl Iterator<Item = &TouchRing> {
        // Relaxed: a hint, which another process writes.
        let used = self.slots_used.load(Relaxed) as usize;
        self.rings.iter().take(used.min(THREADS_MAX))
    }

    /// The client uses this slot from now on.
    pub(crate) fn use_slot(&self, slot: usize) {
        // Relaxed: as in `rings`.
        self.slots_used.fetch_max(slot as u32 + 1, Relaxed);
    }

    /// The parts of thread number `slot`.
    #[inline]
    pub(crate) fn slot(&self, slot: usize) -> (&AttemptCount, &TouchRing) {
        (&self.attempts[slot].0, &self.rings[slot])
    }
}

/// A mapping of a [`ClientBlock`].
pub(crate) struct MappedBlock {
    block: NonNull<ClientBlock>,
    /// The process that has the mapping: a child of fork has other memory there, or none.
    creator: u64,
}

// SAFETY: the block consists of atomics, and the mapping is process-wide.
unsafe impl Send for MappedBlock {}
// SAFETY: as above.
unsafe impl Sync for MappedBlock {}

impl MappedBlock {
    /// A block for this process, a client, and its descriptor for the server.
    pub(crate) fn create() -> io::Result<(MappedBlock, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("millpond-client", flags)?;
        rustix::fs::ftruncate(&memory, size_of::<ClientBlock>() as u64)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&memory, seals)?;
        let block = Self::map(&memory, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok((block, memory))
    }

    /// Maps a client's block, in the server. Checks that it has the length for good.
    pub(crate) fn of_client(memory: impl AsFd) -> io::Result<MappedBlock> {
        let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let sealed = rustix::fs::fcntl_get_seals(&memory)?.contains(SealFlags::SHRINK);
        let (bytes, own_bytes) = (rustix::fs::fstat(&memory)?.st_size, size_of::<ClientBlock>());
        if bytes != own_bytes as i64 {
            return invalid(format!(
                "the client's memory has {bytes} bytes, and the server's version has {own_bytes}"
            ));
        }
        if !sealed {
            return invalid("the length of the client's memory is not sealed".into());
        }
        Self::map(&memory, ProtFlags::READ)
    }

    fn map(memory: impl AsFd, access: ProtFlags) -> io::Result<MappedBlock> {
        let bytes = size_of::<ClientBlock>();
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            rustix::mm::mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, memory, 0)
        }?;
        // A child of fork is another process, with no part in it.
        // SAFETY: our own mapping; the advice does not change its contents here.
        unsafe { rustix::mm::madvise(at, bytes, Advice::LinuxDontFork) }?;
        let block = NonNull::new(at.cast()).expect("the kernel maps nothing at 0");
        Ok(MappedBlock { block, creator: process_local::number() })
    }

    #[inline]
    pub(crate) fn block(&self) -> &ClientBlock {
        // SAFETY: mapped, of that length (sealed), as long as `self`; any bytes are valid atomics.
        unsafe { self.block.as_ref() }
    }
}

impl Drop for MappedBlock {
    fn drop(&mut self) {
        if self.creator != process_local::number() {
            return;
        }
        // SAFETY: the mapping of `map`, in the process that made it, which is not used again.
        unsafe { _ = rustix::mm::munmap(self.block.as_ptr().cast(), size_of::<ClientBlock>()) };
    }
}
