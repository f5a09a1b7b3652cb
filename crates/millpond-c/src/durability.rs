//! Syncs and write-back.

use std::ffi::{c_char, c_int};

use crate::call::{path, status};
use crate::file::millpond_file;
use crate::objects::FILES;

/// Makes the writes of all handles, and the file's metadata, durable: `fsync(2)`. Blocks until the device
/// has completed.
///
/// Drops nothing on failure: pages that could not be written stay cached, and the next sync tries again.
///
/// Returns 0, or
/// -EBADF       there is no such file
/// or the error of the file system (-EIO, -ENOSPC, ...), until a sync has succeeded.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_sync(file: millpond_file) -> c_int {
    status(|| Ok(FILES.get(file.id)?.sync_all()?))
}

/// `millpond_sync` of the data, and of the metadata that is needed to read it: `fdatasync(2)`.
///
/// Returns as for `millpond_sync`.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_sync_data(file: millpond_file) -> c_int {
    status(|| Ok(FILES.get(file.id)?.sync_data()?))
}

/// `millpond_sync_data` of the writes to `len` bytes at `offset` (`len` 0: to the end). Other bytes may
/// become durable, too.
///
/// Returns as for `millpond_sync`, and
/// -EINVAL      the range ends beyond INT64_MAX
#[unsafe(no_mangle)]
pub extern "C" fn millpond_sync_range(file: millpond_file, offset: u64, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.sync_range(offset, len)?))
}

/// Writes the file's dirty pages (MILLPOND_WRITE_BACK) to the kernel, so that other programs can see them;
/// does not make them durable. Blocks until the kernel has them.
///
/// Returns as for `millpond_sync`.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_write_back(file: millpond_file) -> c_int {
    status(|| Ok(FILES.get(file.id)?.write_back()?))
}

/// Makes the file durable, renames it from `from` to `to`, replacing a file of that name, and makes the
/// name durable. After a power cut `to` is either the old file or this one. `from` must be a name of this
/// file; if it equals `to`, nothing is renamed. Blocks until the device has completed all steps.
///
/// `flags` is 0, or MILLPOND_PERSIST_NOCLOBBER.
///
/// Returns 0, or the error of the step that failed; `millpond_error_text` names the step, and so which
/// steps are done and durable. Also
/// -EBADF       there is no such file
/// -EFAULT      a path is NULL
/// -EINVAL      `from` is not a name of this file, or an unknown flag
/// -EEXIST      a file has the name `to`, and MILLPOND_PERSIST_NOCLOBBER was set
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
            _ => Err(crate::call::invalid("an unknown flag")),
        }
    })
}

/// `millpond_persist` fails if a file has the new name.
pub const MILLPOND_PERSIST_NOCLOBBER: u32 = 1;
