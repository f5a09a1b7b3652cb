//! `stat` and similar calls, which must report the size and times of dirty pages; and the calls that make them
//! durable.
//!
//! The kernel answers first. If the file has dirty pages, they are written back and the kernel is asked again: its size
//! and its times are those of the last write then.

use crate::files::{mode_back, writeback_policy};
use crate::runtime::c::{Off, Stat, Text, c_int};
use crate::runtime::cancel::point::point;
use crate::runtime::libc_calls;
use crate::runtime::sys::{fail, sys, to_libc};
use crate::runtime::thread;

/// Asks until the answer is of a file that has all its bytes.
fn stat_when_complete(ask: impl Fn() -> isize, id: impl Fn() -> (u64, u64)) -> c_int {
    let mut result = ask();
    if result == 0 && mode_back::is_any() && writeback_policy::settle_id(id()) {
        result = ask();
    }
    to_libc(result) as c_int
}

pub unsafe fn fstatat64(dir: c_int, path: Text, buf: Stat, flags: c_int) -> c_int {
    stat_when_complete(
        // SAFETY: the kernel checks the addresses; its structure is libc's on 64-bit targets.
        || unsafe { sys!(libc::SYS_newfstatat, dir, path, buf, flags) },
        // SAFETY: the kernel has filled it.
        || unsafe { ((*buf).st_dev, (*buf).st_ino) },
    )
}

pub unsafe fn fstat64(fd: c_int, buf: Stat) -> c_int {
    stat_when_complete(
        // SAFETY: as in `fstatat64`.
        || unsafe {
            if thread::is_away() {
                // As libc asks: a filter of system calls may know no other.
                return sys!(libc::SYS_newfstatat, fd, c"".as_ptr(), buf, libc::AT_EMPTY_PATH);
            }
            sys!(libc::SYS_fstat, fd, buf)
        },
        // SAFETY: as in `fstatat64`.
        || unsafe { ((*buf).st_dev, (*buf).st_ino) },
    )
}

pub unsafe fn statx(
    dir: c_int,
    path: Text,
    flags: c_int,
    mask: u32,
    buf: *mut libc::statx,
) -> c_int {
    stat_when_complete(
        // SAFETY: as in `fstatat64`.
        || unsafe { sys!(libc::SYS_statx, dir, path, flags, mask, buf) },
        || {
            // SAFETY: the kernel has filled it.
            let (major, minor, inode) =
                unsafe { ((*buf).stx_dev_major, (*buf).stx_dev_minor, (*buf).stx_ino) };
            (libc::makedev(major, minor), inode)
        },
    )
}

/// `fsync` and `fdatasync`.
pub fn sync(fd: c_int, data_only: bool, by_libc: impl FnOnce() -> c_int) -> c_int {
    point();
    match writeback_policy::sync(fd, data_only) {
        Some(Ok(())) => 0,
        Some(Err(errno)) => fail(errno) as c_int,
        None => by_libc(),
    }
}

pub unsafe fn sync_file_range(fd: c_int, offset: Off, len: Off, flags: u32) -> c_int {
    point();
    if let Some(Err(errno)) = writeback_policy::write_back(fd) {
        return fail(errno) as c_int;
    }
    // SAFETY: no memory involved.
    unsafe { libc_calls::sync_file_range(fd, offset, len, flags) }
}
