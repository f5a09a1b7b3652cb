//! The liveness of a keeper: a word that the kernel changes when the keeper dies.
//!
//! The keeper has a page of memory, which its clients map read-only. It contains a robust futex that a
//! thread of the keeper holds while the keeper serves: however that thread ends, the kernel marks the word
//! (`get_robust_list(2)`, `FUTEX_OWNER_DIED`). So an engine checks by one load, before each write that
//! stays in the cache, and needs no running thread or open descriptor in the program.
//!
//! ```text
//!   0 -- the holder starts --> its thread id -- it ends, or is killed --> FUTEX_OWNER_DIED (or 0)
//! ```
//!
//! - **LF1** The list that the kernel walks at the holder's death is in the keeper's own memory, and the
//!   word in a mapping that no client can write to (sealed): so a client can fake nothing.
//! - **LF2** The kernel marks the word before the process counts as dead, and so before the program can
//!   learn of the death in another way.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

pub(super) const PAGE_BYTES: usize = 4096;
const OWNER_DIED: u32 = 0x4000_0000;
pub(super) const OWNER: u32 = 0x3fff_ffff;

/// The page, mapped.
pub(super) struct Page(NonNull<AtomicU32>);

// SAFETY: a mapping that lives as long as the value, with an atomic in it.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    pub(super) fn map(fd: BorrowedFd<'_>, protection: ProtFlags) -> io::Result<Page> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), PAGE_BYTES, protection, MapFlags::SHARED, fd, 0)
        }?;
        Ok(Page(NonNull::new(at.cast()).expect("a mapping is not at 0")))
    }

    pub(super) fn word(&self) -> &AtomicU32 {
        // SAFETY: the page is mapped until `drop`, and can't shrink (its seals).
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map`, without borrows.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), PAGE_BYTES) };
    }
}

/// A keeper's liveness, as its clients see it.
pub(super) struct Seen(Page);

impl Seen {
    /// Maps the page that the keeper sent; EINVAL if it is not valid.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Seen> {
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        let bytes = rustix::fs::fstat(&fd)?.st_size;
        if !seals.contains(SealFlags::SHRINK) || bytes < PAGE_BYTES as i64 {
            return Err(Errno::INVAL.into());
        }
        Ok(Seen(Page::map(fd.as_fd(), ProtFlags::READ)?))
    }

    /// Whether the keeper lives. Once false it stays so.
    #[inline]
    pub(super) fn is_alive(&self) -> bool {
        // Relaxed: no other data is read depending on it.
        let word = self.0.word().load(Relaxed);
        word & OWNER != 0 && word & OWNER_DIED == 0
    }
}
