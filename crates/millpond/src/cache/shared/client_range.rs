//! A client's mapping of the server's memory.
//!
//! Locks: none.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr;

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::cache::frames::frame_range::FrameRange;
use crate::cache::shared::attempts::ClientOrder;
use crate::cache::shared::shared_memory::SharedHeader;
use crate::cache::table::FileCore;
use crate::process_local;
use crate::units::{CHUNK_BYTES, UNIT_BYTES};

/// The mapping, read-only, which stays as long as the value.
pub(crate) struct MappedRange {
    mapped: *mut u8,
    mapped_bytes: usize,
    pub(crate) range: FrameRange,
    pub(crate) order: ClientOrder,
    /// The process that has the mapping: a child of fork has other memory there, or none.
    creator: u64,
}

// SAFETY: a mapping of the process, which is only read.
unsafe impl Send for MappedRange {}
// SAFETY: as above.
unsafe impl Sync for MappedRange {}

impl MappedRange {
    /// Maps the memory of a server, by a descriptor of it.
    pub(crate) fn map(memory: &OwnedFd) -> io::Result<MappedRange> {
        let bytes = rustix::fs::fstat(memory)?.st_size as u64;
        let chunk = CHUNK_BYTES as usize;
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not a cache of this version");
        if !bytes.is_multiple_of(CHUNK_BYTES) || bytes < 2 * CHUNK_BYTES {
            return Err(invalid());
        }
        let mapped_bytes = bytes as usize + chunk;
        // Aligned as the file is, for huge pages.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), mapped_bytes, ProtFlags::empty(), flags)
        }?;
        let base = mapped.cast::<u8>().map_addr(|at| at.next_multiple_of(chunk));
        let mut this = MappedRange {
            mapped: mapped.cast(),
            mapped_bytes,
            // SAFETY: no units, so no memory.
            range: unsafe { FrameRange::new(base, 0) },
            order: ClientOrder::new(false),
            creator: process_local::number(),
        };
        // A child of fork attaches itself, and would keep this memory when the server is gone.
        // SAFETY: the mapping above; the advice does not change its contents here.
        unsafe { rustix::mm::madvise(mapped, mapped_bytes, Advice::LinuxDontFork) }?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: within the mapping above, which no other code has.
        unsafe {
            // First without access: under `mlockall(MCL_FUTURE)` the kernel would fill all holes of a readable one.
            let none = ProtFlags::empty();
            let at = rustix::mm::mmap(base.cast(), bytes as usize, none, flags, memory, 0)?;
            // The new mapping does not have the advice of the one that it replaces.
            rustix::mm::madvise(at, bytes as usize, Advice::LinuxDontFork)?;
            _ = rustix::mm::madvise(at, bytes as usize, Advice::LinuxDontDump);
            rustix::mm::mprotect(at, bytes as usize, MprotectFlags::READ)?;
        }
        // SAFETY: the header lies in the mapping; the server wrote it before it had clients.
        let header = unsafe { base.add(UNIT_BYTES).cast::<SharedHeader>().read_volatile() };
        if !header.is_valid(bytes) {
            return Err(invalid());
        }
        if header.may_be_huge == 0 {
            // Else khugepaged could fill holes through this mapping, where the system has huge pages for all shared memory.
            // SAFETY: within the mapping above; the advice does not change its contents.
            unsafe {
                _ = rustix::mm::madvise(base.cast(), bytes as usize, Advice::LinuxNoHugepage);
            }
        }
        // SAFETY: the file has a chunk behind the units, the mapping is read-only and stays as long as the value, and
        // the server's rules hold for its memory.
        this.range = unsafe { FrameRange::new(base, header.units as u32) };
        this.order = ClientOrder::new(header.has_membarrier == 1);
        Ok(this)
    }

    /// Its first byte, and the number of bytes that are the server's.
    pub(crate) fn bytes(&self) -> (*const u8, usize) {
        (self.range.base, self.range.units as usize * UNIT_BYTES + CHUNK_BYTES as usize)
    }

    /// The core with this number, which the server has sent.
    pub(crate) fn core(&self, number: u64) -> Option<&FileCore> {
        let at = (number as usize).checked_mul(size_of::<FileCore>())?;
        let is_inside = at >= CHUNK_BYTES as usize && at < self.range.units as usize * UNIT_BYTES;
        // SAFETY: within the range and aligned. Its fields are atomics; except the page size, which does not change
        // after the server has sent the number (shared.SH5).
        is_inside.then(|| unsafe { &*self.range.base.add(at).cast::<FileCore>() })
    }
}

impl Drop for MappedRange {
    fn drop(&mut self) {
        if self.creator != process_local::number() {
            return;
        }
        // SAFETY: the mapping of `map`, in the process that made it; `&mut self` shows that it is not in use.
        unsafe { _ = rustix::mm::munmap(self.mapped.cast(), self.mapped_bytes) };
    }
}
