//! `read`, `write` and their positional and vectored forms.
//!
//! Each first tries the lock-free hit (reads of one buffer only), then the slow path of the engine. If the engine can't do
//! the call, libc does. A call on a file that the library does not serve goes to libc at once. Each is a cancellation
//! point.

use crate::files::multi_open::try_to_serve;
use crate::files::segments::{Direction, Memory};
use crate::files::served_io::{self, At, Outcome};
use crate::files::table::{self, NumberState};
use crate::files::unserved::{is_due, reason as unserved_reason};
use crate::files::unserved_calls::{self, Way, begin};
use crate::files::{multi_open, registry};
use crate::page_cache;
use crate::report::counts;
use crate::report::reason::Reason;
use crate::runtime::c::{Off, Vectors, c_int, c_void};
use crate::runtime::cancel::point::point;
use crate::runtime::sys::{fail, to_libc};
use crate::runtime::thread::record;
use crate::runtime::{fault, libc_calls};

/// The memory of a vectored call.
pub fn many(vectors: Vectors, count: c_int) -> Memory {
    // A negative count becomes one above the limit, which is the same error.
    Memory::Many(vectors, count as usize)
}

/// A read to one buffer, which may hit. Here and below, `by_libc` makes the call if it is the
/// kernel's, and the caller vouches for the memory as to libc. It captures nothing, and the inlined part is that of a file that the library does not serve: else the arguments would go to the
/// stack before each hit, and registers before each of those.
#[inline(always)]
pub unsafe fn read_one(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    at: At,
    by_libc: impl Fn(c_int, *mut c_void, usize, Off) -> isize,
) -> isize {
    if page_cache::is_on() {
        // SAFETY: the caller's duty.
        return unsafe { page_cache::mapped_io::read_one(fd, buf, len, at, by_libc) };
    }
    if unserved_calls::is_kernels(fd) {
        return by_libc(fd, buf, len, at.arg());
    }
    if let NumberState::Unserved = table::get(fd) {
        return unserved_one(fd, buf, len, at, Direction::Read, by_libc);
    }
    // SAFETY: the caller's duty.
    unsafe { read_known(fd, buf, len, at, by_libc) }
}

#[inline(never)]
unsafe fn read_known(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    at: At,
    by_libc: impl Fn(c_int, *mut c_void, usize, Off) -> isize,
) -> isize {
    if let NumberState::File(_) = table::get(fd)
        // SAFETY: the caller's duty.
        && let Some(bytes) = unsafe { served_io::try_hit(fd, buf.cast(), len, at) }
    {
        return bytes as isize;
    }
    let memory = Memory::One(buf.cast(), len);
    // SAFETY: as above.
    unsafe { through(fd, memory, at, Direction::Read, || by_libc(fd, buf, len, at.arg())) }
}

/// A write of one buffer.
#[inline(always)]
pub unsafe fn write_one(
    fd: c_int,
    buf: *const c_void,
    len: usize,
    at: At,
    by_libc: impl Fn(c_int, *mut c_void, usize, Off) -> isize,
) -> isize {
    let buf = buf.cast_mut();
    if page_cache::is_on() {
        return page_cache::mapped_io::write(fd, len, at, || by_libc(fd, buf, len, at.arg()));
    }
    if unserved_calls::is_kernels(fd) {
        return by_libc(fd, buf, len, at.arg());
    }
    let memory = Memory::One(buf.cast(), len);
    // SAFETY: the caller's duty.
    unsafe { through(fd, memory, at, Direction::Write, || by_libc(fd, buf, len, at.arg())) }
}

#[inline(always)]
pub unsafe fn read(fd: c_int, memory: Memory, at: At, by_libc: impl Fn() -> isize) -> isize {
    if page_cache::is_on() {
        // SAFETY: the caller's duty.
        return unsafe { read_many_mapped(fd, memory, at, by_libc) };
    }
    // SAFETY: the caller's duty.
    unsafe { through(fd, memory, at, Direction::Read, by_libc) }
}

/// [`read`] where files are read from the kernel's page cache.
unsafe fn read_many_mapped(
    fd: c_int,
    memory: Memory,
    at: At,
    by_libc: impl Fn() -> isize,
) -> isize {
    let Memory::Many(vectors, count) = memory else { return by_libc() };
    let len = vectors_len(vectors, count);
    page_cache::mapped_io::read_many(fd, len, at, |place| match (at, place) {
        // SAFETY: the caller's duty.
        (At::Offset, At::Byte(offset)) => unsafe {
            libc_calls::preadv64(fd, vectors, count as c_int, offset)
        },
        _ => by_libc(),
    })
}

/// How many bytes the buffers have together; none where the kernel will refuse them.
fn vectors_len(vectors: Vectors, count: usize) -> usize {
    const IOV_MAX: usize = 1024;
    if count > IOV_MAX {
        return 0;
    }
    let mut len = 0_usize;
    for index in 0..count {
        // SAFETY: integers and pointers; the caller unmaps no argument during the call.
        match unsafe { fault::try_read(vectors.wrapping_add(index)) } {
            Some(vector) => len = len.saturating_add(vector.iov_len),
            None => return 0,
        }
    }
    len
}

#[inline(always)]
pub unsafe fn write(fd: c_int, memory: Memory, at: At, by_libc: impl Fn() -> isize) -> isize {
    if page_cache::is_on() {
        let len = match memory {
            Memory::One(_, len) => len,
            Memory::Many(vectors, count) => vectors_len(vectors, count),
        };
        return page_cache::mapped_io::write(fd, len, at, by_libc);
    }
    // SAFETY: the caller's duty.
    unsafe { through(fd, memory, at, Direction::Write, by_libc) }
}

/// A call that did not hit: by the engine, or the kernel's, whose calls are cancellation points by
/// themselves.
#[inline(always)]
unsafe fn through(
    fd: c_int,
    memory: Memory,
    at: At,
    direction: Direction,
    by_libc: impl Fn() -> isize,
) -> isize {
    if unserved_calls::is_kernels(fd) {
        return by_libc();
    }
    let done = match table::get(fd) {
        NumberState::Left => return left(fd, direction, by_libc),
        NumberState::Unserved => unserved(fd, direction, &by_libc),
        _ => None,
    };
    // SAFETY: the caller's duty.
    done.unwrap_or_else(|| unsafe { served(fd, memory, at, direction, by_libc) })
}

/// [`unserved`], of one buffer.
#[inline(never)]
fn unserved_one(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    at: At,
    direction: Direction,
    by_libc: impl Fn(c_int, *mut c_void, usize, Off) -> isize,
) -> isize {
    match unserved(fd, direction, || by_libc(fd, buf, len, at.arg())) {
        Some(result) => result,
        // SAFETY: the caller of the hook vouches for the memory.
        None => unsafe { served_one(fd, buf, len, at, direction, by_libc) },
    }
}

/// [`served`], of one buffer.
#[cold]
#[inline(never)]
unsafe fn served_one(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    at: At,
    direction: Direction,
    by_libc: impl Fn(c_int, *mut c_void, usize, Off) -> isize,
) -> isize {
    let by_libc = || by_libc(fd, buf, len, at.arg());
    // SAFETY: the caller's duty.
    unsafe { served(fd, Memory::One(buf.cast(), len), at, direction, by_libc) }
}

#[inline(never)]
fn left(fd: c_int, direction: Direction, by_libc: impl Fn() -> isize) -> isize {
    let result = by_libc();
    served_io::count_passed(fd, direction, result);
    result
}

/// The kernel's, and counted; `None` if it is not UNSERVED any more.
#[inline(always)]
fn unserved(fd: c_int, direction: Direction, by_libc: impl FnOnce() -> isize) -> Option<isize> {
    let record = record();
    let before = record.begin_call(fd);
    let is_it = matches!(table::get(fd), NumberState::Unserved);
    let result = is_it.then(by_libc);
    record.end_call(before);
    if let Some(bytes @ 1..) = result {
        record.count_passed(unserved_reason(fd) as usize, bytes as u64);
        served_io::explain_passed(fd, direction, bytes);
        if is_due(fd) {
            try_to_serve(fd);
        }
    }
    result
}

#[inline(never)]
unsafe fn served(
    fd: c_int,
    memory: Memory,
    at: At,
    direction: Direction,
    by_libc: impl Fn() -> isize,
) -> isize {
    point();
    let call = match begin(fd) {
        Way::Kernels | Way::Left => return by_libc(),
        Way::Open(call) => call,
    };
    // SAFETY: the caller's duty.
    let outcome = unsafe { served_io::read_or_write(fd, memory, at, direction) };
    let result = match outcome {
        Outcome::Done(result) => to_libc(result),
        Outcome::Kernel(reason) => {
            let result = by_libc();
            if let Some(reason) = reason {
                counts::count_bytes_passed(reason, result);
            }
            served_io::explain_passed(fd, direction, result);
            result
        }
    };
    call.end();
    result
}

/// Where `preadv2` and `pwritev2` begin: -1 stands for the file offset.
fn at_or_current(offset: Off) -> At {
    if offset == -1 { At::Offset } else { At::Byte(offset) }
}

pub unsafe fn preadv2(
    fd: c_int,
    vectors: Vectors,
    count: c_int,
    offset: Off,
    flags: c_int,
) -> isize {
    // SAFETY: the caller's duty.
    let by_libc = || unsafe { libc_calls::preadv64v2(fd, vectors, count, offset, flags) };
    if flags != 0 && page_cache::is_on() {
        if offset == -1 {
            page_cache::release(fd);
        }
        return by_libc();
    }
    if flags != 0 {
        return by_kernel_alone(fd, Direction::Read, by_libc);
    }
    // SAFETY: the caller's duty.
    unsafe { read(fd, many(vectors, count), at_or_current(offset), by_libc) }
}

pub unsafe fn pwritev2(
    fd: c_int,
    vectors: Vectors,
    count: c_int,
    offset: Off,
    flags: c_int,
) -> isize {
    // SAFETY: the caller's duty.
    let by_libc = || unsafe { libc_calls::pwritev64v2(fd, vectors, count, offset, flags) };
    if flags & libc::RWF_APPEND != 0 && page_cache::is_on() {
        // The write appends to the file, independent of the offset.
        return page_cache::mapped_io::change(fd, None, by_libc);
    }
    if flags != 0 && !page_cache::is_on() {
        return by_kernel_alone(fd, Direction::Write, by_libc);
    }
    // SAFETY: the caller's duty.
    unsafe { write(fd, many(vectors, count), at_or_current(offset), by_libc) }
}

/// A call with flags such as `RWF_DSYNC` and `RWF_APPEND`: the file is handed to the kernel.
#[cold]
fn by_kernel_alone(fd: c_int, direction: Direction, by_libc: impl Fn() -> isize) -> isize {
    point();
    let call = match begin(fd) {
        Way::Kernels => return by_libc(),
        Way::Left => return left(fd, direction, by_libc),
        Way::Open(call) => call,
    };
    registry::hand_over(fd, Reason::Changed);
    let result = if multi_open::is_bypassed(fd) { fail(libc::EOPNOTSUPP) } else { by_libc() };
    served_io::count_passed(fd, direction, result);
    call.end();
    result
}

unsafe extern "C" {
    /// glibc's answer to a buffer that the compiler knows to be too small: ends the program.
    safe fn __chk_fail() -> !;
}

/// Ends the program if a read of `len` bytes goes to a buffer that is known to have fewer.
pub fn check(len: usize, buf_len: usize) {
    if len > buf_len {
        __chk_fail();
    }
}
