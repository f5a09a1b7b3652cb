//! A shim whose `pread` is a bare memcpy: the upper bound of a shim's speed, for a comparison with fio.
//!
//! The first `pread` of a regular file reads all of it into anonymous memory with huge pages, like
//! the engine's frames; from then on a `pread` checks the range and copies. The copy is never
//! updated, so the shim is only for measurements.

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::missing_safety_doc)]

use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicUsize};

const FILES: usize = 1024;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The contents of an open file, once `bytes` is not null.
struct Contents {
    bytes: AtomicPtr<u8>,
    len: AtomicUsize,
}

static TABLE: [Contents; FILES] =
    [const { Contents { bytes: AtomicPtr::new(std::ptr::null_mut()), len: AtomicUsize::new(0) } };
        FILES];
static LOADING: Mutex<()> = Mutex::new(());

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread64(fd: c_int, buf: *mut c_void, len: usize, offset: i64) -> isize {
    let Some(contents) = TABLE.get(fd as usize) else { return by_kernel(fd, buf, len, offset) };
    // Acquire: pairs with the Release in `load`.
    let mut bytes = contents.bytes.load(Acquire);
    if bytes.is_null() {
        bytes = load(fd, contents);
    }
    if bytes.is_null() || offset < 0 {
        return by_kernel(fd, buf, len, offset);
    }
    let offset = offset as usize;
    let len = len.min(contents.len.load(Relaxed).saturating_sub(offset));
    // SAFETY: the range lies within the contents; the caller vouches for `buf`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.add(offset), buf.cast::<u8>(), len) };
    len as isize
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread(fd: c_int, buf: *mut c_void, len: usize, offset: i64) -> isize {
    // SAFETY: the same function under its other name.
    unsafe { pread64(fd, buf, len, offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if let Some(contents) = TABLE.get(fd as usize) {
        // The memory is left behind: another thread may be copying from it.
        contents.bytes.store(std::ptr::null_mut(), Relaxed);
    }
    // SAFETY: no memory involved.
    unsafe { libc::syscall(libc::SYS_close, fd) as c_int }
}

fn by_kernel(fd: c_int, buf: *mut c_void, len: usize, offset: i64) -> isize {
    // SAFETY: the kernel checks the address.
    unsafe { libc::syscall(libc::SYS_pread64, fd, buf, len, offset) as isize }
}

/// Reads a whole regular file into memory; null if it is none.
#[cold]
fn load(fd: c_int, contents: &Contents) -> *mut u8 {
    let Ok(_loading) = LOADING.lock() else { return std::ptr::null_mut() };
    let known = contents.bytes.load(Acquire);
    if !known.is_null() {
        return known;
    }
    // SAFETY: an all-zero stat is valid, and the kernel fills it.
    let stat = unsafe {
        let mut stat: libc::stat64 = std::mem::zeroed();
        if libc::fstat64(fd, &mut stat) != 0 || stat.st_mode & libc::S_IFMT != libc::S_IFREG {
            return std::ptr::null_mut();
        }
        stat
    };
    let len = stat.st_size as usize;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new private mapping, larger than the file by what aligning it takes; it is never
    // unmapped.
    let bytes = unsafe {
        let mapped = libc::mmap(std::ptr::null_mut(), len + HUGE_PAGE_BYTES, prot, flags, -1, 0);
        if mapped == libc::MAP_FAILED {
            return std::ptr::null_mut();
        }
        let bytes = mapped.cast::<u8>();
        let bytes = bytes.add(bytes.align_offset(HUGE_PAGE_BYTES));
        libc::madvise(bytes.cast(), len, libc::MADV_HUGEPAGE);
        bytes
    };
    let mut done = 0;
    while done < len {
        // SAFETY: `done` is within the mapping.
        let at = unsafe { bytes.add(done) };
        let moved = by_kernel(fd, at.cast(), len - done, done as i64);
        if moved <= 0 {
            break;
        }
        done += moved as usize;
    }
    contents.len.store(done, Relaxed);
    contents.bytes.store(bytes, Release);
    bytes
}
