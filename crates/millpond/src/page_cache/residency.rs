//! Whether the kernel has the pages of a read in its cache, asked for windows of 2 MiB at a time.
//!
//! A copy from a page that is not in the cache would fault, and the fault would read more of the device than
//! `pread` does, without its read-ahead. So a read uses the mapping only inside a window that was wholly cached a
//! moment ago; else it is the kernel's `pread`, which brings the pages. The answer is trusted for a time that
//! doubles with each good answer, and the question is put off for a number of reads that doubles with each bad
//! one.
//!
//! The kernel does not answer before Linux 6.5, nor about a file that the process neither owns nor may write. There
//! each read asks for one of its own bytes without waiting (`RWF_NOWAIT`), until enough reads of the window
//! in a row have found theirs.
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
/// So many reads of a window in a row find their byte before it is trusted, where the kernel does not answer.
const SAMPLES: u64 = 8;

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
        (first..=last).all(|window| {
            let byte = offset.max(window * WINDOW_BYTES);
            self.is_window_resident(salt, fd, byte, readable)
        })
    }

    /// The pages of the bytes from `offset` to `end` may leave the cache: the next read asks.
    pub(super) fn forget(&self, salt: u64, offset: u64, end: u64) {
        let windows = offset / WINDOW_BYTES..end.div_ceil(WINDOW_BYTES);
        for window in windows.take(WINDOWS) {
            self.entry(salt, window).store(0, Relaxed);
        }
    }

    /// Windows of one file lie side by side: a process that reads few files touches few pages of the table.
    #[inline]
    fn entry(&self, salt: u64, window: u64) -> &AtomicU64 {
        &self.entries[salt.wrapping_add(window) as usize % WINDOWS]
    }

    #[inline]
    fn is_window_resident(&self, salt: u64, fd: BorrowedFd<'_>, byte: u64, readable: u64) -> bool {
        let key = key_of(salt, byte / WINDOW_BYTES);
        let entry = self.entry(salt, byte / WINDOW_BYTES);
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
        query_window(entry, known, key, fd, byte, readable)
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

/// Asks the kernel about the window of `byte`, which a read is about to copy.
#[cold]
#[inline(never)]
fn query_window(
    entry: &AtomicU64,
    known: u64,
    key: u64,
    fd: BorrowedFd<'_>,
    byte: u64,
    readable: u64,
) -> bool {
    let start = byte / WINDOW_BYTES * WINDOW_BYTES;
    let len = WINDOW_BYTES.min(readable.saturating_sub(start));
    let is_known = known >> TAG_SHIFT == key >> TAG_SHIFT;
    let answers = if is_known { known >> DOUBLINGS_SHIFT & 0xF } else { 0 };
    let (is_cached, doublings) = match are_cached(fd, start, len) {
        Some(is_cached) => {
            let is_same = is_known && (known & CACHED != 0) == is_cached;
            (is_cached, if is_same { answers.min(14) + 1 } else { 0 })
        }
        None if !has_byte(fd, byte) => (false, 0),
        None if answers < SAMPLES => {
            // One more in a row; the next read asks, too.
            entry.store(key >> TAG_SHIFT << TAG_SHIFT | (answers + 1) << DOUBLINGS_SHIFT, Relaxed);
            return false;
        }
        None => (true, SAMPLES),
    };
    let value = if is_cached {
        CACHED | ((now() + (TRUST_MIN << doublings).min(TRUST_MAX)) & VALUE)
    } else {
        (PUT_OFF_MIN << doublings).min(PUT_OFF_MAX)
    };
    entry.store(key >> TAG_SHIFT << TAG_SHIFT | doublings << DOUBLINGS_SHIFT | value, Relaxed);
    is_cached
}

/// Whether the kernel has all pages of `len` bytes at `start`. `None`: it does not say.
fn are_cached(fd: BorrowedFd<'_>, start: u64, len: u64) -> Option<bool> {
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
        return Some(false);
    }
    let (asked, mut answer) = (Asked { offset: start, len }, Answer::default());
    // SAFETY: the kernel reads the one and writes the other.
    let result = unsafe {
        let (asked, answer) = (&raw const asked, &raw mut answer);
        let (asked, answer) = (asked.expose_provenance(), answer.expose_provenance());
        call(CACHESTAT, [fd.as_raw_fd() as usize, asked, answer, 0, 0, 0])
    };
    (result == 0).then(|| answer.cached >= len.div_ceil(super::versions::PAGE_BYTES))
}

/// Whether the kernel has the page of `byte`: whether a read of it does not wait. The kernel begins to read a page that
/// it does not have, as the caller is about to.
fn has_byte(fd: BorrowedFd<'_>, byte: u64) -> bool {
    let mut target = 0_u8;
    let segment = libc::iovec { iov_base: (&raw mut target).cast(), iov_len: 1 };
    // SAFETY: the kernel reads the segment and writes the byte.
    let result = unsafe {
        let segment = (&raw const segment).expose_provenance();
        let flags = libc::RWF_NOWAIT as usize;
        let fd = fd.as_raw_fd() as usize;
        call(libc::SYS_preadv2 as usize, [fd, segment, 1, byte as usize, 0, flags])
    };
    result == 1
}

/// A system call past libc: a read that succeeds leaves errno as it is, and takes little of a small stack. Returns a
/// negative errno on failure.
///
/// # Safety
///
/// The arguments are valid for the system call `number`.
#[cfg(target_arch = "x86_64")]
unsafe fn call(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel changes rcx and r11 alone; the caller vouches for the arguments.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// A system call past libc. Returns a negative errno on failure.
///
/// # Safety
///
/// The arguments are valid for the system call `number`.
#[cfg(target_arch = "aarch64")]
unsafe fn call(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let result;
    // SAFETY: the kernel preserves all registers except x0; the caller vouches for the arguments.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
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
unsafe fn call(_number: usize, _arguments: [usize; 6]) -> isize {
    -(libc::ENOSYS as isize)
}
