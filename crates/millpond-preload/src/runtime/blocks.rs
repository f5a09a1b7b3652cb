//! The memory of threads' counts (`block` has their form): the process's own, or, in the main process of a
//! run, the tally's file.
//!
//! - **B1** A block is never unmapped, and belongs to one thread record permanently.
//! - **B2** After a fork the child has its own memory in place of the parent's shared blocks. If libc's handlers of
//!   `fork` are called, that is so before the child counts anything. Otherwise its counts go to the parent until the
//!   child is noticed (`fork::ensure_initialised`).

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize};

use crate::runtime::block::WORDS;
use crate::runtime::sys::sys;

/// Padded so that two threads never share a line.
#[repr(C, align(128))]
pub struct Block([AtomicU64; WORDS]);

impl Block {
    #[inline]
    pub fn word(&self, word: usize) -> &AtomicU64 {
        &self.0[word]
    }
}

const FIRST_MAX: usize = 32;

/// The first blocks, which need no system call.
static FIRST: [Block; FIRST_MAX] =
    [const { Block([const { AtomicU64::new(0) }; WORDS]) }; FIRST_MAX];
static IS_FIRST_USED: AtomicBool = AtomicBool::new(false);

/// The blocks that other processes may read: address, number, and number in use. Null: none.
static SHARED: AtomicPtr<Block> = AtomicPtr::new(std::ptr::null_mut());
static SHARED_MAX: AtomicUsize = AtomicUsize::new(0);
static SHARED_USED: AtomicUsize = AtomicUsize::new(0);

/// `count` consecutive blocks, for new records. Mapped by a direct system call: a signal handler may need them.
pub fn take(count: usize) -> *mut Block {
    let shared = SHARED.load(Relaxed);
    if !shared.is_null() {
        let first = SHARED_USED.fetch_add(count, Relaxed);
        if first + count <= SHARED_MAX.load(Relaxed) {
            return shared.wrapping_add(first);
        }
    }
    if count <= FIRST_MAX && !IS_FIRST_USED.swap(true, Relaxed) {
        return FIRST.as_ptr().cast_mut();
    }
    map(count * size_of::<Block>()).cast()
}

/// From here on blocks are taken from `blocks`, an array of length `max`.
pub fn share(blocks: *mut Block, max: usize) {
    SHARED_MAX.store(max, Relaxed);
    SHARED_USED.store(0, Relaxed);
    SHARED.store(blocks, Relaxed);
}

/// B2: in a forked child, which has one thread.
pub fn unshare() {
    let shared = SHARED.swap(std::ptr::null_mut(), Relaxed);
    if shared.is_null() {
        return;
    }
    let bytes = SHARED_MAX.load(Relaxed) * size_of::<Block>();
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: replaces the mapping of the parent's shared blocks, and no other.
    let mapped = unsafe { sys!(libc::SYS_mmap, shared, bytes, prot, flags, -1isize, 0) };
    if (-4095..0).contains(&mapped) {
        std::process::abort();
    }
}

/// Zero bytes in a new private mapping, which is never unmapped.
pub fn map(bytes: usize) -> *mut u8 {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new private mapping.
    let mapped = unsafe { sys!(libc::SYS_mmap, 0, bytes, prot, flags, -1isize, 0) };
    if (-4095..0).contains(&mapped) {
        std::process::abort();
    }
    std::ptr::with_exposed_provenance_mut(mapped as usize)
}
