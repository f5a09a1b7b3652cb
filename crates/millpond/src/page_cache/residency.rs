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

static TABLE: Windows = Windows { entries: [const { AtomicU64::new(0) }; WINDOWS] };

pub(super) fn windows() -> &'static Windows {
    &TABLE
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
    const CACHESTAT: usize = 451;
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
    // SAFETY: the kernel reads the one and writes the other.
    let result = unsafe {
        let (asked, answer) = (&raw const asked, &raw mut answer);
        call(
            CACHESTAT,
            [fd.as_raw_fd() as usize, asked.expose_provenance(), answer.expose_provenance()],
        )
    };
    result == 0 && answer.cached >= len.div_ceil(super::versions::PAGE_BYTES)
}

/// A system call with three arguments, and zero as the fourth, past libc: a read that succeeds leaves errno as it is,
/// and takes little of a small stack. Returns a negative errno on failure.
///
/// # Safety
///
/// The arguments are valid for the system call `number`.
#[cfg(target_arch = "x86_64")]
unsafe fn call(number: usize, [a, b, c]: [usize; 3]) -> isize {
    let result;
    // SAFETY: the kernel changes rcx and r11 alone; the caller vouches for the arguments.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") 0_usize,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// A system call with three arguments, and zero as the fourth, past libc. Returns a negative errno on failure.
///
/// # Safety
///
/// The arguments are valid for the system call `number`.
#[cfg(target_arch = "aarch64")]
unsafe fn call(number: usize, [a, b, c]: [usize; 3]) -> isize {
    let result;
    // SAFETY: the kernel preserves all registers except x0; the caller vouches for the arguments.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => result,
            in("x1") b, in("x2") c, in("x3") 0_usize,
            options(nostack),
        );
    }
    result
}

/// The kernel is not asked: each read is its own.
///
/// # Safety
///
/// None is needed.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn call(_number: usize, _arguments: [usize; 3]) -> isize {
    -(libc::ENOSYS as isize)
}
