//! Whether the kernel has the pages of a read in its cache, asked for windows of 2 MiB at a time.
//!
//! A copy from a page that is not in the cache would fault, and the fault would read more of the device than
//! `pread` does, without its read-ahead. So a read uses the mapping only inside a window that was wholly cached a
//! moment ago; else it is the kernel's `pread`, which brings the pages. The answer is trusted for a time that
//! doubles with each good answer, and the question is put off for a number of reads that doubles with each bad
//! one.
//!
//! The windows of all files share one table. Two that share an entry ask more often, nothing else.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::sync::AtomicU64;

/// The unit of the question.
const WINDOW_BYTES: u64 = 2 << 20;
const WINDOWS: usize = 4096;
/// For how long an answer is trusted, at least and at most, in ticks.
const TRUST_MIN: u64 = Duration::from_millis(64).as_millis() as u64 / TICK_MS;
const TRUST_MAX: u64 = Duration::from_millis(1024).as_millis() as u64 / TICK_MS;
const TICK_MS: u64 = 4;
/// For how many reads the question is put off, at least and at most.
const PUT_OFF_MIN: u64 = 32;
const PUT_OFF_MAX: u64 = 4096;

/// An entry: a window, and the last answer for it.
///
/// ```text
/// 63..40 tag | 39..36 doublings | 35 cached | 34..0 the tick until which it is trusted, or reads to let pass
/// ```
pub(super) struct Windows {
    entries: [AtomicU64; WINDOWS],
}

const TAG_SHIFT: u32 = 40;
const DOUBLINGS_SHIFT: u32 = 36;
const CACHED: u64 = 1 << 35;
const VALUE: u64 = CACHED - 1;

#[cfg(not(loom))]
static TABLE: Windows = Windows { entries: [const { AtomicU64::new(0) }; WINDOWS] };

#[cfg(not(loom))]
pub(super) fn windows() -> &'static Windows {
    &TABLE
}

#[cfg(loom)]
pub(super) fn windows() -> &'static Windows {
    unreachable!("no model asks for residency")
}

impl Windows {
    /// Whether the bytes from `offset` to `end` may be copied. `readable`: where the mapping's use ends.
    #[inline]
    pub(super) fn is_resident(
        &self,
        salt: u64,
        fd: BorrowedFd<'_>,
        offset: u64,
        end: u64,
        readable: u64,
    ) -> bool {
        let (first, last) = (offset / WINDOW_BYTES, (end - 1) / WINDOW_BYTES);
        (first..=last).all(|window| self.is_window_resident(salt, fd, window, readable))
    }

    #[inline]
    fn is_window_resident(
        &self,
        salt: u64,
        fd: BorrowedFd<'_>,
        window: u64,
        readable: u64,
    ) -> bool {
        let key = key_of(salt, window);
        let entry = &self.entries[key as usize % WINDOWS];
        let known = entry.load(Relaxed);
        if known >> TAG_SHIFT == key >> TAG_SHIFT && known & CACHED != 0 {
            if now() < known & VALUE {
                return true;
            }
        } else if known >> TAG_SHIFT == key >> TAG_SHIFT && known & VALUE > 0 {
            // Additions of other threads may be lost: the question comes a little later.
            entry.store(known - 1, Relaxed);
            return false;
        }
        ask(entry, known, key, fd, window, readable)
    }

    /// Forgets the answers for a file, by forgetting all answers.
    pub(super) fn forget(&self, _salt: u64) {
        self.entries.iter().for_each(|entry| entry.store(0, Relaxed));
    }
}

#[inline]
fn key_of(salt: u64, window: u64) -> u64 {
    let key = (salt.wrapping_add(window)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    // A tag of zero is an empty entry's.
    key ^ (key >> 32) | 1 << TAG_SHIFT
}

/// Ticks since the machine was started.
#[inline]
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours to write. The kernel's shared page answers, without a system call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    (time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000) / TICK_MS
}

#[cold]
#[inline(never)]
fn ask(
    entry: &AtomicU64,
    known: u64,
    key: u64,
    fd: BorrowedFd<'_>,
    window: u64,
    readable: u64,
) -> bool {
    let start = window * WINDOW_BYTES;
    let len = WINDOW_BYTES.min(readable.saturating_sub(start));
    let is_cached = are_cached(fd, start, len);
    let is_same = known >> TAG_SHIFT == key >> TAG_SHIFT && (known & CACHED != 0) == is_cached;
    let doublings = if is_same { (known >> DOUBLINGS_SHIFT & 0xF).min(14) + 1 } else { 0 };
    let value = if is_cached {
        CACHED | ((now() + (TRUST_MIN << doublings).min(TRUST_MAX)) & VALUE)
    } else {
        (PUT_OFF_MIN << doublings).min(PUT_OFF_MAX)
    };
    entry.store(key >> TAG_SHIFT << TAG_SHIFT | doublings << DOUBLINGS_SHIFT | value, Relaxed);
    is_cached
}

/// Whether the kernel has all pages of `len` bytes at `start`; no, where it does not say (before Linux 6.5, or of a
/// file that the process neither owns nor may write).
fn are_cached(fd: BorrowedFd<'_>, start: u64, len: u64) -> bool {
    const CACHESTAT: libc::c_long = 451;
    #[repr(C)]
    struct Asked {
        offset: u64,
        len: u64,
    }
    #[derive(Default)]
    #[repr(C)]
    struct Answer {
        cached: u64,
        dirty: u64,
        writeback: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    if len == 0 {
        return false;
    }
    let (asked, mut answer) = (Asked { offset: start, len }, Answer::default());
    // SAFETY: the kernel reads the one and writes the other. The thread's errno is as before, since the read that asks
    // may succeed.
    let result = unsafe {
        let errno = libc::__errno_location();
        let before = errno.read();
        let result =
            libc::syscall(CACHESTAT, fd.as_raw_fd(), &raw const asked, &raw mut answer, 0_u32);
        errno.write(before);
        result
    };
    result == 0 && answer.cached >= len.div_ceil(super::versions::PAGE_BYTES)
}
