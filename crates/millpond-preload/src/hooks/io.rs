//! `read`, `write` and their positional and vectored forms.
//!
//! Each first tries the lock-free hit (reads of one buffer only), then the slow path, then libc. Each is a
//! cancellation point.

use std::ffi::{c_int, c_void};

use crate::files::io::{self, At, Outcome};
use crate::files::segments::Memory;
use crate::files::{late, mode_back, registry};
use crate::report::counts;
use crate::report::reason::Reason;
use crate::runtime::cancel::point::point;
use crate::runtime::libc_calls;
use crate::runtime::section;
use crate::runtime::sys::{fail, to_libc};

type Off = libc::off64_t;

/// Settles a call as `outcome` says, by `$kernel` if it is the kernel's.
macro_rules! settle {
    ($outcome:expr, $kernel:expr) => {
        match $outcome {
            Outcome::Settled(result) => to_libc(result),
            // SAFETY: the hook's caller vouches for the arguments, as it would to libc.
            Outcome::Kernel(reason) => count(reason, unsafe { $kernel }),
        }
    };
}

fn count(reason: Option<Reason>, result: isize) -> isize {
    if let Some(reason) = reason {
        counts::count_bytes_passed(reason, result);
    }
    result
}

fn many(vectors: *const libc::iovec, count: c_int) -> Memory {
    // A negative count becomes one above the limit, which is the same error.
    Memory::Many(vectors, count as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn read(fd: c_int, buf: *mut c_void, len: usize) -> isize {
    // SAFETY: as the caller vouches to `read`.
    if let Some(bytes) = unsafe { io::try_hit(fd, buf.cast(), len, At::Offset) } {
        return bytes as isize;
    }
    point();
    // SAFETY: as above.
    let outcome = unsafe { io::read(fd, Memory::One(buf.cast(), len), At::Offset) };
    settle!(outcome, libc_calls::read(fd, buf, len))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pread64(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    offset: Off,
) -> isize {
    // SAFETY: as the caller vouches to `pread64`.
    if let Some(bytes) = unsafe { io::try_hit(fd, buf.cast(), len, At::Byte(offset)) } {
        return bytes as isize;
    }
    point();
    // SAFETY: as above.
    let outcome = unsafe { io::read(fd, Memory::One(buf.cast(), len), At::Byte(offset)) };
    settle!(outcome, libc_calls::pread64(fd, buf, len, offset))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pread(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    offset: Off,
) -> isize {
    // SAFETY: the same function under its other name; offsets have 64 bits.
    unsafe { pread64(fd, buf, len, offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn write(fd: c_int, buf: *const c_void, len: usize) -> isize {
    point();
    // SAFETY: as the caller vouches to `write`; the memory is only read.
    let outcome = unsafe { io::write(fd, Memory::One(buf.cast_mut().cast(), len), At::Offset) };
    settle!(outcome, libc_calls::write(fd, buf, len))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwrite64(
    fd: c_int,
    buf: *const c_void,
    len: usize,
    offset: Off,
) -> isize {
    point();
    // SAFETY: as the caller vouches to `pwrite64`; the memory is only read.
    let outcome =
        unsafe { io::write(fd, Memory::One(buf.cast_mut().cast(), len), At::Byte(offset)) };
    settle!(outcome, libc_calls::pwrite64(fd, buf, len, offset))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwrite(
    fd: c_int,
    buf: *const c_void,
    len: usize,
    offset: Off,
) -> isize {
    // SAFETY: the same function under its other name; offsets have 64 bits.
    unsafe { pwrite64(fd, buf, len, offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn readv(
    fd: c_int,
    vectors: *const libc::iovec,
    vector_count: c_int,
) -> isize {
    point();
    // SAFETY: as the caller vouches to `readv`.
    let outcome = unsafe { io::read(fd, many(vectors, vector_count), At::Offset) };
    settle!(outcome, libc_calls::readv(fd, vectors, vector_count))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn writev(
    fd: c_int,
    vectors: *const libc::iovec,
    vector_count: c_int,
) -> isize {
    point();
    // SAFETY: as the caller vouches to `writev`.
    let outcome = unsafe { io::write(fd, many(vectors, vector_count), At::Offset) };
    settle!(outcome, libc_calls::writev(fd, vectors, vector_count))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv64(
    fd: c_int,
    vectors: *const libc::iovec,
    vector_count: c_int,
    offset: Off,
) -> isize {
    point();
    // SAFETY: as the caller vouches to `preadv64`.
    let outcome = unsafe { io::read(fd, many(vectors, vector_count), At::Byte(offset)) };
    settle!(outcome, libc_calls::preadv64(fd, vectors, vector_count, offset))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv(
    fd: c_int,
    vectors: *const libc::iovec,
    vector_count: c_int,
    offset: Off,
) -> isize {
    // SAFETY: the same function under its other name.
    unsafe { preadv64(fd, vectors, vector_count, offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev64(
    fd: c_int,
    vectors: *const libc::iovec,
    vector_count: c_int,
    offset: Off,
) -> isize {
    point();
    // SAFETY: as the caller vouches to `pwritev64`.
    let outcome = unsafe { io::write(fd, many(vectors, vector_count), At::Byte(offset)) };
    settle!(outcome, libc_calls::pwritev64(fd, vectors, vector_count, offset))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev(
    fd: c_int,
    vectors: *const libc::iovec,
    vector_count: c_int,
    offset: Off,
) -> isize {
    // SAFETY: the same function under its other name.
    unsafe { pwritev64(fd, vectors, vector_count, offset) }
}

/// Where `preadv2` and `pwritev2` begin: -1 stands for the file offset.
fn at_or_current(offset: Off) -> At {
    if offset == -1 { At::Offset } else { At::Byte(offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv64v2(
    fd: c_int,
    vectors: *const libc::iovec,
    vector_count: c_int,
    offset: Off,
    flags: c_int,
) -> isize {
    point();
    if flags != 0 {
        leave_to_kernel(fd);
    }
    // SAFETY: as the caller vouches to `preadv64v2`.
    let outcome = unsafe { io::read(fd, many(vectors, vector_count), at_or_current(offset)) };
    settle!(outcome, libc_calls::preadv64v2(fd, vectors, vector_count, offset, flags))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv2(
    fd: c_int,
    vectors: *const libc::iovec,
    vector_count: c_int,
    offset: Off,
    flags: c_int,
) -> isize {
    // SAFETY: the same function under its other name.
    unsafe { preadv64v2(fd, vectors, vector_count, offset, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev64v2(
    fd: c_int,
    vectors: *const libc::iovec,
    vector_count: c_int,
    offset: Off,
    flags: c_int,
) -> isize {
    const DURABLE: c_int = libc::RWF_DSYNC | libc::RWF_SYNC;
    point();
    if flags & !DURABLE == 0 && flags != 0 && mode_back::is_any() {
        // SAFETY: as the caller vouches to `pwritev64v2`.
        let written = unsafe { pwritev64v2(fd, vectors, vector_count, offset, 0) };
        let data_only = flags & libc::RWF_SYNC == 0;
        return match late::sync_written(fd, data_only) {
            Err(errno) if written > 0 => fail(errno),
            _ => written,
        };
    }
    if flags != 0 {
        leave_to_kernel(fd);
    }
    // SAFETY: as the caller vouches to `pwritev64v2`.
    let outcome = unsafe { io::write(fd, many(vectors, vector_count), at_or_current(offset)) };
    settle!(outcome, libc_calls::pwritev64v2(fd, vectors, vector_count, offset, flags))
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev2(
    fd: c_int,
    vectors: *const libc::iovec,
    vector_count: c_int,
    offset: Off,
    flags: c_int,
) -> isize {
    // SAFETY: the same function under its other name.
    unsafe { pwritev64v2(fd, vectors, vector_count, offset, flags) }
}

/// Flags such as `RWF_NOWAIT` and `RWF_APPEND` mean things that only the kernel does.
#[cold]
fn leave_to_kernel(fd: c_int) {
    section::run(|_| registry::lock().pass_fd(fd, Reason::Changed));
}

unsafe extern "C" {
    /// glibc's answer to a buffer that the compiler knows to be too small: ends the program.
    safe fn __chk_fail() -> !;
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __read_chk(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    buf_len: usize,
) -> isize {
    if len > buf_len {
        __chk_fail();
    }
    // SAFETY: as the caller vouches to `__read_chk`.
    unsafe { read(fd, buf, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __pread64_chk(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    offset: Off,
    buf_len: usize,
) -> isize {
    if len > buf_len {
        __chk_fail();
    }
    // SAFETY: as the caller vouches to `__pread64_chk`.
    unsafe { pread64(fd, buf, len, offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __pread_chk(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    offset: Off,
    buf_len: usize,
) -> isize {
    // SAFETY: the same function under its other name.
    unsafe { __pread64_chk(fd, buf, len, offset, buf_len) }
}

/// One of libc's internal names, exported too, which old programs and libraries were linked to.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __read(fd: c_int, buf: *mut c_void, len: usize) -> isize {
    // SAFETY: the same function under its other name.
    unsafe { read(fd, buf, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __write(fd: c_int, buf: *const c_void, len: usize) -> isize {
    // SAFETY: the same function under its other name.
    unsafe { write(fd, buf, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __pread64(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    offset: Off,
) -> isize {
    // SAFETY: the same function under its other name.
    unsafe { pread64(fd, buf, len, offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __pwrite64(
    fd: c_int,
    buf: *const c_void,
    len: usize,
    offset: Off,
) -> isize {
    // SAFETY: the same function under its other name.
    unsafe { pwrite64(fd, buf, len, offset) }
}
