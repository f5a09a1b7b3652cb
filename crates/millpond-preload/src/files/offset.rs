//! The file offset of an open description, kept in user space.
//!
//! ```text
//! FREE(offset) -> try_advance -> FREE(offset + n)              a read that hits: one CAS
//! FREE(offset) -> lock -> LOCKED(offset) -> unlock -> FREE(new) everything else
//! ```
//!
//! POSIX wants the offset updates of calls on one description to be atomic: two threads that read
//! must not get the same bytes. A read that hits copies first and then moves the offset by one
//! compare-exchange; if another thread moved it in between, the copy is thrown away and done again.
//! It takes no lock, so a signal handler may do it at any time. Everything else locks the offset
//! with signals blocked.
//!
//! A description that was handed over leaves its offset to the kernel ([`IN_KERNEL`]).
//!
//! Offsets reach up to 2^62 - 2; the two bits above are LOCKED and WAITERS. Lock order: registry ->
//! offset; the holder of an offset takes no lock of this library but the heap's.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::runtime::lock::{wait, wake};
use crate::runtime::sys::sys;

const LOCKED: u64 = 1 << 63;
const WAITERS: u64 = 1 << 62;
/// Offsets from here on are left to the kernel.
pub const OFFSET_END: u64 = WAITERS - 1;
/// Says that the kernel has the offset, of a passed description. No other value, so that a compare-exchange begun before
/// fails.
pub const IN_KERNEL: u64 = OFFSET_END;

pub struct Offset {
    word: AtomicU64,
}

impl Offset {
    pub const fn new() -> Self {
        Self { word: AtomicU64::new(0) }
    }

    /// Starts a new life at `offset`; no other thread uses it yet.
    pub fn reset(&self, offset: u64) {
        self.word.store(offset, Release);
    }

    /// The offset, unless a thread has it locked or the kernel has it.
    #[inline]
    pub fn peek(&self) -> Option<u64> {
        // Acquire: pairs with the Release of `unlock`, so that a thread that sees an offset that a
        // write left also sees that write.
        let word = self.word.load(Acquire);
        (word < IN_KERNEL).then_some(word)
    }

    /// Moves the offset from `old` to `new` unless it changed.
    #[inline]
    pub fn try_advance(&self, old: u64, new: u64) -> bool {
        // AcqRel: as in `peek`, and for the next peek.
        self.word.compare_exchange(old, new, AcqRel, Relaxed).is_ok()
    }

    /// Locks the offset and returns it, or [`IN_KERNEL`]. Signals are blocked.
    pub fn lock(&self) -> u64 {
        let mut spins = 0;
        loop {
            let word = self.word.load(Relaxed);
            if word & LOCKED == 0 {
                // Acquire: pairs with the Release of `unlock`.
                if self.word.compare_exchange(word, word | LOCKED, Acquire, Relaxed).is_ok() {
                    return word;
                }
                continue;
            }
            if spins < 100 {
                spins += 1;
                std::hint::spin_loop();
                continue;
            }
            if word & WAITERS == 0
                && self.word.compare_exchange(word, word | WAITERS, Relaxed, Relaxed).is_err()
            {
                continue;
            }
            wait(self.high_half(), ((word | WAITERS) >> 32) as u32);
        }
    }

    /// Sets the offset and unlocks it.
    pub fn unlock(&self, offset: u64) {
        debug_assert!(offset <= IN_KERNEL);
        // Release: pairs with the Acquire in `lock` and `peek`. One swap, so that a waiter's mark
        // is never overwritten unseen.
        if self.word.swap(offset, Release) & WAITERS != 0 {
            wake(self.high_half());
        }
    }

    /// The half with the flags, on which a futex can wait.
    fn high_half(&self) -> &AtomicU32 {
        let index = usize::from(cfg!(target_endian = "little"));
        // SAFETY: the pointer stays within the eight bytes of `word`, aligned to four. Only the
        // kernel reads through it.
        unsafe { AtomicU32::from_ptr(self.word.as_ptr().cast::<u32>().add(index)) }
    }
}

/// The kernel's offset of the description behind `fd`.
pub fn kernel_offset(fd: RawFd) -> isize {
    // SAFETY: no memory involved.
    unsafe { sys!(libc::SYS_lseek, fd, 0, libc::SEEK_CUR) }
}

/// Sets the kernel's offset of the description behind `fd`.
pub fn push_offset(fd: RawFd, offset: u64) {
    debug_assert!(offset < OFFSET_END);
    // SAFETY: no memory involved.
    unsafe { sys!(libc::SYS_lseek, fd, offset, libc::SEEK_SET) };
}
