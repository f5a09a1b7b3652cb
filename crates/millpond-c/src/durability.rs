//! Syncs and write-back.

use std::ffi::{c_char, c_int};

use crate::call::{path, status};
use crate::file::millpond_file;
use crate::objects::FILES;

/// Makes what was written, through whatever handle, and the file's metadata durable: `fsync(2)`. Blocks
/// until the device has it.
///
/// Nothing is dropped on failure: what could not be written stays cached, and the next sync tries again.
///
/// Returns 0, or
/// -EBADF       there is no such file
/// or what the file system said (-EIO, -ENOSPC, ...), until a sync has succeeded.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_sync(file: millpond_file) -> c_int {
    status(|| Ok(FILES.get(file.id)?.sync_all()?))
}

/// `millpond_sync` of the bytes, and of as much metadata as is needed to read them: `fdatasync(2)`.
///
/// Returns as for `millpond_sync`.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_sync_data(file: millpond_file) -> c_int {
    status(|| Ok(FILES.get(file.id)?.sync_data()?))
}

/// `millpond_sync_data` of what was written to `len` bytes at `offset` (`len` 0: to the end). Other bytes
/// may become durable, too.
///
/// Returns as for `millpond_sync`, and
/// -EINVAL      the range ends beyond INT64_MAX
#[unsafe(no_mangle)]
pub extern "C" fn millpond_sync_range(file: millpond_file, offset: u64, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.sync_range(offset, len)?))
}

/// Hands what waits in the cache (MILLPOND_WRITE_BACK) to the kernel, so that others can see it there;
/// does not make it durable. Blocks until the kernel has it.
///
/// Returns as for `millpond_sync`.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_write_back(file: millpond_file) -> c_int {
    status(|| Ok(FILES.get(file.id)?.write_back()?))
}

/// Makes the file durable, renames it from `from` to `to`, in place of what had that name, and makes the
/// name durable. After a power cut `to` is what it was, or this file. `from` must be a name of this file;
/// equal to `to` it renames nothing. Blocks until the device has it all.
///
/// `flags` is 0, or MILLPOND_PERSIST_NOCLOBBER.
///
/// Returns 0, or what the failing step said; `millpond_error_text` says which step, and so what has changed
/// and what is durable. Also
/// -EBADF       there is no such file
/// -EFAULT      a path is NULL
/// -EINVAL      `from` is no name of this file, or a flag that there is not
/// -EEXIST      something has the name `to`, and MILLPOND_PERSIST_NOCLOBBER was set
///
/// # Safety
///
/// Both paths are NULL or strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_persist(
    file: millpond_file,
    from: *const c_char,
    to: *const c_char,
    flags: u32,
) -> c_int {
    status(|| {
        let file = FILES.get(file.id)?;
        // SAFETY: our caller's promise.
        let (from, to) = unsafe { (path(from)?, path(to)?) };
        match flags {
            0 => Ok(file.persist(from, to)?),
            MILLPOND_PERSIST_NOCLOBBER => Ok(file.persist_noclobber(from, to)?),
            _ => Err(crate::call::invalid("a flag that there is not")),
        }
    })
}

/// `millpond_persist` replaces nothing.
pub const MILLPOND_PERSIST_NOCLOBBER: u32 = 1;
