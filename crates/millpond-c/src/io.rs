//! Reads, writes and appends.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use libc::iovec;
use millpond::{Advice, File};

use crate::call::{self, Outcome, call, check_memory, invalid, status, store};
use crate::file::millpond_file;
use crate::handle::protect::Refusal;
use crate::handle::thread;
use crate::objects::FILES;

/// No particular pattern: read-ahead follows the detected pattern.
pub const MILLPOND_ADVICE_NORMAL: u32 = 0;
/// Sequential reads: read-ahead starts at once, with twice the window.
pub const MILLPOND_ADVICE_SEQUENTIAL: u32 = 1;
/// Random reads: this handle starts no read-ahead.
pub const MILLPOND_ADVICE_RANDOM: u32 = 2;
/// Will be read soon: reads the pages into the cache that need no wait for resources.
pub const MILLPOND_ADVICE_WILL_NEED: u32 = 3;
/// Won't be read soon: drops the cached pages that are not in use.
pub const MILLPOND_ADVICE_DONT_NEED: u32 = 4;
/// Reads of this handle need not be atomic across pages: each page of a read is whole, and no older than
/// the call. For programs with their own locks.
pub const MILLPOND_ADVICE_TORN_READS: u32 = 5;
/// Reads of this handle are atomic, however many pages they cover (the default).
pub const MILLPOND_ADVICE_ATOMIC_READS: u32 = 6;

/// Reads `len` bytes at byte `offset` into `memory`. Atomic with respect to all other operations on the
/// file, at any length. No alignment is required (except with O_DIRECT).
///
/// Cached bytes are read without a lock, a system call or a wait. Otherwise the call blocks until the pages
/// have been read, or until a writer of the same pages is done. Signals do not interrupt it.
///
/// Returns the bytes read: fewer than `len` only at the end of the file, or before bytes that can't be
/// read; a read of those returns the error. The rest of `memory` is unchanged, or zero. Or
/// -EBADF       there is no such file, it is not open for reading, or belongs to a parent process
/// -EINVAL      the range ends beyond INT64_MAX; with O_DIRECT, something is not aligned
/// -EFAULT      `memory` is NULL; or as the introduction says
/// -EIO, ...    the first byte could not be read; the content of `memory` is unspecified
///
/// # Safety
///
/// `memory` is valid for writes of `len` bytes, save that they may fault as the introduction says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_read(
    file: millpond_file,
    memory: *mut c_void,
    len: usize,
    offset: u64,
) -> i64 {
    call(move || {
        check_memory(memory, len)?;
        // SAFETY: our caller's promise.
        let hit = unsafe { try_hit(file, memory, len, offset) }?;
        match hit {
            Some(moved) => Ok(moved as i64),
            // SAFETY: our caller's promise.
            None => unsafe { read_missed(file, memory, len, offset) },
        }
    })
}

/// The lock-free part of a read. `None`: the read was not completed.
///
/// # Safety
///
/// As for [`millpond_read`].
#[inline(always)]
unsafe fn try_hit(
    file: millpond_file,
    memory: *mut c_void,
    len: usize,
    offset: u64,
) -> Result<Option<usize>, Refusal> {
    FILES.with(file.id, move |file| {
        // SAFETY: our caller's promise; the record is the thread's, in static thread-local storage.
        unsafe { file.try_read_hit_counted(&thread::record().counts, memory.cast(), len, offset) }
    })
}

/// Takes a reference to the file instead of its handle, so that a close does not wait for the device.
///
/// # Safety
///
/// As for [`millpond_read`].
#[cold]
unsafe fn read_missed(
    file: millpond_file,
    memory: *mut c_void,
    len: usize,
    offset: u64,
) -> Outcome<i64> {
    let file = FILES.get(file.id)?;
    // SAFETY: our caller's promise.
    Ok(unsafe { file.raw().read_at(memory.cast(), len, offset) }? as i64)
}

/// `millpond_read` into `count` vectors in turn, as one atomic read.
///
/// Returns as for `millpond_read`, and
/// -EINVAL      also: `count` is negative
///
/// # Safety
///
/// `vectors` is valid for `count` vectors, and they are as for `millpond_read`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_readv(
    file: millpond_file,
    vectors: *const iovec,
    count: c_int,
    offset: u64,
) -> i64 {
    call(|| {
        // SAFETY: our caller's promise.
        unsafe {
            let vectors = call::vectors(vectors, count)?;
            Ok(FILES.get(file.id)?.raw().read_vectored_at(vectors, offset)? as i64)
        }
    })
}

/// `millpond_read` of cached bytes, as `preadv2(2)` with RWF_NOWAIT: never waits, and starts no read of the
/// missing pages.
///
/// Returns as for `millpond_read`, and
/// -EAGAIN      a page is not cached, or being changed, or the bytes are more than 64 pages; the content of
///              `memory` is unspecified
/// -EINVAL      also: the file was opened with O_DIRECT
///
/// # Safety
///
/// As for `millpond_read`, but no access may fault.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_try_read(
    file: millpond_file,
    memory: *mut c_void,
    len: usize,
    offset: u64,
) -> i64 {
    call(|| {
        check_memory(memory, len)?;
        // SAFETY: our caller's promise.
        let hit = unsafe { try_hit(file, memory, len, offset) }?;
        if let Some(moved) = hit {
            return Ok(moved as i64);
        }
        let file = FILES.get(file.id)?;
        // The engine reports all other errors for a read of no bytes.
        file.try_read_at(&mut [], offset)?;
        if len == 0 {
            return Ok(0);
        }
        if offset.checked_add(len as u64).is_none_or(|end| end > i64::MAX as u64) {
            return Err(invalid("the range ends beyond the largest offset"));
        }
        Err(millpond::Error::WouldBlock { op: millpond::Op::Read, offset, len: len as u64 }.into())
    })
}

/// Announces how a range of the file will be used (`len` 0: to the end). NORMAL, SEQUENTIAL, RANDOM,
/// TORN_READS and ATOMIC_READS apply to all later reads by this handle, of any range. Never blocks.
///
/// `advice` is one of `MILLPOND_ADVICE_...`.
///
/// Returns 0, or
/// -EBADF       there is no such file
/// -EINVAL      unknown advice, or the range ends beyond INT64_MAX
#[unsafe(no_mangle)]
pub extern "C" fn millpond_advise(
    file: millpond_file,
    offset: u64,
    len: u64,
    advice: u32,
) -> c_int {
    status(|| {
        let advice = match advice {
            MILLPOND_ADVICE_NORMAL => Advice::Normal,
            MILLPOND_ADVICE_SEQUENTIAL => Advice::Sequential,
            MILLPOND_ADVICE_RANDOM => Advice::Random,
            MILLPOND_ADVICE_WILL_NEED => Advice::WillNeed,
            MILLPOND_ADVICE_DONT_NEED => Advice::DontNeed,
            MILLPOND_ADVICE_TORN_READS => Advice::TornReads,
            MILLPOND_ADVICE_ATOMIC_READS => Advice::AtomicReads,
            _ => return Err(invalid("unknown advice")),
        };
        Ok(FILES.get(file.id)?.advise(offset, len, advice)?)
    })
}

/// Writes `len` bytes from `memory` at byte `offset`. A reader sees the whole write or none of it. The
/// caller may reuse the memory when this returns.
///
/// With MILLPOND_WRITE_THROUGH the bytes are in the kernel on return; with MILLPOND_WRITE_BACK they are in
/// the cache; with O_DSYNC they are durable. Blocks for operations on the same pages, for the kernel, and
/// for free pages of the cache. Signals do not interrupt it.
///
/// Returns the bytes written: fewer than `len` if the file system accepted only a part; or
/// -EBADF       there is no such file, it is not open for writing, or belongs to a parent process
/// -EINVAL      the range ends beyond INT64_MAX; with O_DIRECT, something is not aligned
/// -EFAULT      `memory` is NULL; or as the introduction says; nothing was written
/// -EIO, -ENOSPC, -EFBIG, ...   nothing was written
///
/// # Safety
///
/// `memory` is valid for reads of `len` bytes, save that they may fault as the introduction says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_write(
    file: millpond_file,
    memory: *const c_void,
    len: usize,
    offset: u64,
) -> i64 {
    call(|| {
        check_memory(memory, len)?;
        // SAFETY: our caller's promise.
        Ok(unsafe { FILES.get(file.id)?.raw().write_at(memory.cast(), len, offset) }? as i64)
    })
}

/// `millpond_write` from `count` vectors in turn, as one atomic write.
///
/// Returns as for `millpond_write`, and
/// -EINVAL      also: `count` is negative
///
/// # Safety
///
/// `vectors` is valid for `count` vectors, and they are as for `millpond_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_writev(
    file: millpond_file,
    vectors: *const iovec,
    count: c_int,
    offset: u64,
) -> i64 {
    call(|| {
        // SAFETY: our caller's promise.
        unsafe {
            let vectors = call::vectors(vectors, count)?;
            Ok(FILES.get(file.id)?.raw().write_vectored_at(vectors, offset)? as i64)
        }
    })
}

/// Writes `len` bytes from `memory` at the end of the file. Appends never interleave, and leave no gaps.
/// Otherwise as `millpond_write`. Stores the offset of the first byte at `offset`, which may be NULL.
///
/// Returns as for `millpond_write`.
///
/// # Safety
///
/// As for `millpond_write`; `offset` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_append(
    file: millpond_file,
    memory: *const c_void,
    len: usize,
    offset: *mut u64,
) -> i64 {
    call(|| {
        check_memory(memory, len)?;
        let vector = [iovec { iov_base: memory.cast_mut(), iov_len: len }];
        // SAFETY: our caller's promise.
        unsafe { append(&FILES.get(file.id)?, &vector, offset) }
    })
}

/// `millpond_append` from `count` vectors in turn, as one atomic write.
///
/// Returns as for `millpond_writev`.
///
/// # Safety
///
/// As for `millpond_writev` and `millpond_append`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_appendv(
    file: millpond_file,
    vectors: *const iovec,
    count: c_int,
    offset: *mut u64,
) -> i64 {
    call(|| {
        // SAFETY: our caller's promise.
        unsafe {
            let vectors = call::vectors(vectors, count)?;
            append(&FILES.get(file.id)?, vectors, offset)
        }
    })
}

/// # Safety
///
/// As for [`millpond_appendv`].
unsafe fn append(file: &Arc<File>, vectors: &[iovec], offset: *mut u64) -> Outcome<i64> {
    // SAFETY: our caller's promise.
    let (at, moved) = unsafe { file.raw().append_vectored(vectors) }?;
    if !offset.is_null() {
        // SAFETY: our caller's promise.
        unsafe { store(offset, at) }?;
    }
    Ok(moved as i64)
}
