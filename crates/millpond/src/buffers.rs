//! Buffers for direct I/O: aligned, and in regions that a ring can register.
//!
//! A region that is registered with a ring is mapped and pinned once, instead of for each request. The kernel counts
//! pinned memory against `RLIMIT_MEMLOCK`. So memory comes in regions of a few MiB, and as many of them are
//! registered as the limit allows. The other regions work as well, unregistered.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, Op, Result};
use crate::memory::try_with_capacity;

/// The alignment of buffers, in bytes: enough for direct I/O on every file system known to us.
pub const BUFFER_ALIGN_BYTES: usize = 4096;
/// Buffers that fit together share a region of this size: two huge pages of 2 MiB. Chosen, not
/// measured.
const REGION_BYTES: usize = 4 << 20;

/// Memory that is registered as one.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the region is only an address and a length; access to the memory goes through its buffers.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn new(len: usize) -> rustix::io::Result<Region> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, flags)?
        };
        // SAFETY: our mapping; the advice changes no contents. Refused where there are none.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast()).expect("a mapping is not at 0");
        Ok(Region { base, len })
    }

    /// In the kernel's form, for registration.
    pub(crate) fn as_iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.base.as_ptr().cast(), iov_len: self.len }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: ours; no buffer and no ring refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The identity of the region that has a list's memory. The list's buffers keep the region alive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RegionId(*const Region);

// SAFETY: only compared, except by `region`, whose caller knows that the region is alive.
unsafe impl Send for RegionId {}
// SAFETY: as above.
unsafe impl Sync for RegionId {}

impl RegionId {
    pub(crate) fn of(region: &Arc<Region>) -> RegionId {
        RegionId(Arc::as_ptr(region))
    }

    /// # Safety
    ///
    /// A buffer of the region must be alive.
    pub(crate) unsafe fn region(self) -> Arc<Region> {
        // SAFETY: the pointer is an Arc's, of which the buffer has a count.
        unsafe {
            Arc::increment_strong_count(self.0);
            Arc::from_raw(self.0)
        }
    }
}

/// Memory for direct I/O, from [`crate::Engine::alloc_buffers`]: aligned to [`BUFFER_ALIGN_BYTES`],
/// zero at first, and the fastest where a [`crate::direct::Pipeline`] could register it. It is the caller's:
/// the engine's memory limit does not count it.
///
/// # Examples
///
/// ```
/// let engine = millpond::Engine::builder().cache_bytes(1 << 20).build()?;
/// let mut buffers = engine.alloc_buffers(8, 64 << 10)?;
/// buffers[7][..4].copy_from_slice(b"pond");
/// assert!(buffers[0].as_ptr() as usize % millpond::BUFFER_ALIGN_BYTES == 0);
/// assert!(buffers[0].same_region(&buffers[7]));
/// # Ok::<(), millpond::Error>(())
/// ```
#[derive(Debug)]
pub struct Buffer {
    base: NonNull<u8>,
    len: usize,
    region: Arc<Region>,
}

// SAFETY: a buffer alone refers to its part of the region, as a Vec to its memory.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Whether both lie in one region, so that one request can use both as registered memory.
    #[must_use]
    pub fn same_region(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.region, &other.region)
    }

    pub(crate) fn region_id(&self) -> RegionId {
        RegionId::of(&self.region)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: within the region, which the buffer keeps alive; no other buffer has this part.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

/// `count` buffers of `bytes` bytes each.
pub(crate) fn alloc(count: usize, bytes: usize) -> Result<Vec<Buffer>> {
    let refused = || Error::InvalidInput {
        op: Op::Allocate,
        what: format!("{count} buffers of {bytes} bytes: at least 1 byte, at most isize::MAX"),
    };
    let stride = bytes.checked_next_multiple_of(BUFFER_ALIGN_BYTES).ok_or_else(refused)?;
    let total = stride.checked_mul(count).filter(|&total| isize::try_from(total).is_ok());
    if bytes == 0 || total.is_none() {
        return Err(refused());
    }
    let per_region = (REGION_BYTES / stride).max(1);
    let mut buffers = try_with_capacity(count)
        .map_err(|error| Error::io(Op::Allocate, 0, total.unwrap_or(0) as u64, error))?;
    while buffers.len() < count {
        let here = per_region.min(count - buffers.len());
        let region = Region::new(here * stride)
            .map_err(|error| Error::io(Op::Allocate, 0, (here * stride) as u64, error))?;
        let region = Arc::new(region);
        buffers.extend((0..here).map(|number| Buffer {
            // SAFETY: within the region.
            base: unsafe { region.base.add(number * stride) },
            len: bytes,
            region: Arc::clone(&region),
        }));
    }
    Ok(buffers)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_apart_and_zero() {
        for (count, bytes) in [(1, 1), (3, 4096), (1500, 5000), (2, 5 << 20), (0, 8)] {
            let mut buffers = alloc(count, bytes).unwrap();
            assert_eq!(buffers.len(), count);
            for (number, buffer) in buffers.iter_mut().enumerate() {
                assert_eq!(buffer.as_ptr() as usize % BUFFER_ALIGN_BYTES, 0);
                assert!(buffer.iter().all(|&byte| byte == 0));
                assert_eq!(buffer.len(), bytes);
                buffer.fill(number as u8 | 1);
            }
            for (number, buffer) in buffers.iter().enumerate() {
                assert!(buffer.iter().all(|&byte| byte == number as u8 | 1));
            }
        }
    }

    #[test]
    fn impossible_sizes_are_refused_by_name() {
        for (count, bytes) in [(1, 0), (usize::MAX, 4096), (1, usize::MAX), (1 << 40, 1 << 30)] {
            let error = alloc(count, bytes).unwrap_err().to_string();
            assert!(error.contains(&bytes.to_string()), "{error}");
        }
    }
}
