//! Length, holes and space of a file, and changes by other programs.

use std::ffi::c_int;

use crate::call::{Failure, Outcome, call, status};
use crate::file::millpond_file;
use crate::objects::FILES;

/// Sets the file's length, in bytes: truncates the file, or extends it with zeros. Blocks for operations
/// beyond the smaller of both lengths.
///
/// Returns 0, or
/// -EBADF       there is no such file, or it is not open for writing
/// -EINVAL      `len` is more than INT64_MAX
/// or the error of the file system; nothing has changed.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_truncate(file: millpond_file, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.truncate(len)?))
}

/// Makes `len` bytes at `offset` read as zeros, and frees their space. The file's length stays; the part of
/// the range beyond it is ignored. A reader sees the whole change or none of it. Blocks for operations on
/// pages of the range, and until the file system is done.
///
/// Returns 0, or
/// -EBADF       there is no such file, or it is not open for writing
/// -EINVAL      `len` is 0, or the range ends beyond INT64_MAX
/// -EOPNOTSUPP  the file system does not support it; nothing has changed
/// or the error of the file system; each byte of the range may be as it was, or zero.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_punch_hole(file: millpond_file, offset: u64, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.punch_hole(offset, len)?))
}

/// Makes `len` bytes at `offset` read as zeros, and keeps their space. The file's length stays, and the
/// range is clipped to it. Writes zeros where the file system does not support the operation. Blocks as
/// `millpond_punch_hole` does.
///
/// Returns as for `millpond_punch_hole`.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_zero_range(file: millpond_file, offset: u64, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.zero_range(offset, len)?))
}

/// Reserves space for `len` bytes at `offset`, so that writes to them do not fail for lack of space. A
/// shorter file is extended with zeros. Blocks while the range is being changed.
///
/// Returns 0, or
/// -EBADF       there is no such file, or it is not open for writing
/// -EINVAL      `len` is 0, or the range ends beyond INT64_MAX
/// -EOPNOTSUPP  the file system does not support it
/// -ENOSPC, -EDQUOT, -EFBIG     a part may be reserved, and the file may have been extended by a part
#[unsafe(no_mangle)]
pub extern "C" fn millpond_allocate(file: millpond_file, offset: u64, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.allocate(offset, len)?))
}

fn offset_or_enxio(place: Option<u64>) -> Outcome<i64> {
    let none = Failure::Refused(libc::ENXIO, "no data or hole from the offset on");
    place.map(|place| place as i64).ok_or(none)
}

/// Finds the first byte from `offset` on that is not in a hole, as `lseek(2)` with SEEK_DATA; no file
/// offset changes. May wait for the file system, and writes back dirty pages from `offset` on.
///
/// Returns its offset, or
/// -ENXIO       only a hole follows, or the file ends before `offset`
/// -EBADF       there is no such file
/// -EINVAL      `offset` is more than INT64_MAX
/// or the error of the file system.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_seek_data(file: millpond_file, offset: u64) -> i64 {
    call(|| offset_or_enxio(FILES.get(file.id)?.seek_data(offset)?))
}

/// Finds the first byte from `offset` on that is in a hole; the end of the file counts as one.
///
/// Returns as for `millpond_seek_data`; -ENXIO: `offset` is at or beyond the end.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_seek_hole(file: millpond_file, offset: u64) -> i64 {
    call(|| offset_or_enxio(FILES.get(file.id)?.seek_hole(offset)?))
}

/// Invalidates cached bytes after another program changed the file: drops the cached bytes of the range
/// (`len` 0: none) and loads the file's current length. Blocks for operations on the range.
///
/// Returns 0, or
/// -EBADF       there is no such file
/// -EINVAL      the range ends beyond INT64_MAX
/// or the error of the system when the length was read.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_invalidate(file: millpond_file, offset: u64, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.invalidate(offset, len)?))
}
