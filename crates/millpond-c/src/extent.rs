//! Length, holes and space, and what others changed.

use std::ffi::c_int;

use crate::call::{Failure, Outcome, call, status};
use crate::file::millpond_file;
use crate::objects::FILES;

/// Sets the file's length, in bytes: cuts it, or extends it with zeros. Blocks while operations beyond the
/// smaller of both lengths are under way.
///
/// Returns 0, or
/// -EBADF       there is no such file, or it is not open for writing
/// -EINVAL      `len` is more than INT64_MAX
/// or what the file system said; nothing has changed then.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_truncate(file: millpond_file, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.truncate(len)?))
}

/// Makes `len` bytes at `offset` read as zeros, and gives their space back. The file's length stays; what
/// lies beyond it is ignored. Readers see all of it, or nothing. Blocks while operations on pages of the
/// range are under way, and until the file system is done.
///
/// Returns 0, or
/// -EBADF       there is no such file, or it is not open for writing
/// -EINVAL      `len` is 0, or the range ends beyond INT64_MAX
/// -EOPNOTSUPP  the file system can't; nothing has changed
/// or what the file system said; each byte of the range may be as it was, or zero.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_punch_hole(file: millpond_file, offset: u64, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.punch_hole(offset, len)?))
}

/// Makes `len` bytes at `offset` read as zeros and keeps their space. The file's length stays, and the
/// range is clipped to it. Where the file system can't, zeros are written. Blocks as
/// `millpond_punch_hole` does.
///
/// Returns as for `millpond_punch_hole`.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_zero_range(file: millpond_file, offset: u64, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.zero_range(offset, len)?))
}

/// Reserves space for `len` bytes at `offset`, so that writes to them do not fail for lack of it; a file
/// that ends before is extended, with zeros. Blocks while the range is being changed.
///
/// Returns 0, or
/// -EBADF       there is no such file, or it is not open for writing
/// -EINVAL      `len` is 0, or the range ends beyond INT64_MAX
/// -EOPNOTSUPP  the file system can't
/// -ENOSPC, -EDQUOT, -EFBIG     a part may be reserved, and the file may have been extended by a part
#[unsafe(no_mangle)]
pub extern "C" fn millpond_allocate(file: millpond_file, offset: u64, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.allocate(offset, len)?))
}

fn found(place: Option<u64>) -> Outcome<i64> {
    let none = Failure::Refused(libc::ENXIO, "nothing of that kind from the offset on");
    place.map(|place| place as i64).ok_or(none)
}

/// The first byte from `offset` on that is not in a hole, as `lseek(2)` with SEEK_DATA; the offset of no
/// file changes. May wait for the file system, and writes back what waits from `offset` on.
///
/// Returns its offset, or
/// -ENXIO       only a hole follows, or the file ends before `offset`
/// -EBADF       there is no such file
/// -EINVAL      `offset` is more than INT64_MAX
/// or what the file system said.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_seek_data(file: millpond_file, offset: u64) -> i64 {
    call(|| found(FILES.get(file.id)?.seek_data(offset)?))
}

/// The first byte from `offset` on that is in a hole; the end of the file counts as one.
///
/// Returns as for `millpond_seek_data`; -ENXIO: `offset` is at or beyond the end.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_seek_hole(file: millpond_file, offset: u64) -> i64 {
    call(|| found(FILES.get(file.id)?.seek_hole(offset)?))
}

/// Tells the cache that something else changed the file: drops the cached bytes of the range (`len` 0:
/// none) and adopts the length that the file has now. Blocks while operations on the range are under way.
///
/// Returns 0, or
/// -EBADF       there is no such file
/// -EINVAL      the range ends beyond INT64_MAX
/// or what the system said when it was asked for the length.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_invalidate(file: millpond_file, offset: u64, len: u64) -> c_int {
    status(|| Ok(FILES.get(file.id)?.invalidate(offset, len)?))
}
