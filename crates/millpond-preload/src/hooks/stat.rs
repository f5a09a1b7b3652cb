//! `stat` and its kin, which tell of writes that wait in the cache; and the calls that make them
//! durable.
//!
//! The kernel answers first. Where the file turns out to be one whose writes wait, they are written
//! back and the kernel is asked again: its size and its times are those of the last write then.

use std::ffi::{c_char, c_int};

use libc::stat64 as Stat;

use crate::files::{late, mode_back};
use crate::runtime::cancel::point::point;
use crate::runtime::libc_calls;
use crate::runtime::sys::{fail, sys, to_libc};

type Off = libc::off64_t;

/// Asks until the answer is of a file that has all its bytes.
fn look(ask: impl Fn() -> isize, id: impl Fn() -> (u64, u64)) -> c_int {
    let mut result = ask();
    if result == 0 && mode_back::is_any() && late::settle_id(id()) {
        result = ask();
    }
    to_libc(result) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fstatat64(
    dir: c_int,
    path: *const c_char,
    buf: *mut Stat,
    flags: c_int,
) -> c_int {
    look(
        // SAFETY: the kernel checks the addresses; its structure is libc's on 64-bit targets.
        || unsafe { sys!(libc::SYS_newfstatat, dir, path, buf, flags) },
        // SAFETY: the kernel has filled it.
        || unsafe { ((*buf).st_dev, (*buf).st_ino) },
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fstat64(fd: c_int, buf: *mut Stat) -> c_int {
    look(
        // SAFETY: as in `fstatat64`.
        || unsafe { sys!(libc::SYS_fstat, fd, buf) },
        // SAFETY: as in `fstatat64`.
        || unsafe { ((*buf).st_dev, (*buf).st_ino) },
    )
}

/// The other names, which come down to the two above. Those with a version are what programs were
/// linked to before glibc 2.33.
macro_rules! stats {
    ($($name:ident($($arg:ident: $ty:ty),*) = $call:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> c_int {
            // SAFETY: the same function under its other name.
            unsafe { $call }
        }
    )*};
}

const HERE: c_int = libc::AT_FDCWD;
const NOFOLLOW: c_int = libc::AT_SYMLINK_NOFOLLOW;
type Text = *const c_char;
type Buf = *mut Stat;

stats! {
    stat(path: Text, buf: Buf) = fstatat64(HERE, path, buf, 0);
    stat64(path: Text, buf: Buf) = fstatat64(HERE, path, buf, 0);
    lstat(path: Text, buf: Buf) = fstatat64(HERE, path, buf, NOFOLLOW);
    lstat64(path: Text, buf: Buf) = fstatat64(HERE, path, buf, NOFOLLOW);
    fstat(fd: c_int, buf: Buf) = fstat64(fd, buf);
    fstatat(dir: c_int, path: Text, buf: Buf, flags: c_int) = fstatat64(dir, path, buf, flags);
    __xstat(_version: c_int, path: Text, buf: Buf) = fstatat64(HERE, path, buf, 0);
    __xstat64(_version: c_int, path: Text, buf: Buf) = fstatat64(HERE, path, buf, 0);
    __lxstat(_version: c_int, path: Text, buf: Buf) = fstatat64(HERE, path, buf, NOFOLLOW);
    __lxstat64(_version: c_int, path: Text, buf: Buf) = fstatat64(HERE, path, buf, NOFOLLOW);
    __fxstat(_version: c_int, fd: c_int, buf: Buf) = fstat64(fd, buf);
    __fxstat64(_version: c_int, fd: c_int, buf: Buf) = fstat64(fd, buf);
    __fxstatat(_version: c_int, dir: c_int, path: Text, buf: Buf, flags: c_int)
        = fstatat64(dir, path, buf, flags);
    __fxstatat64(_version: c_int, dir: c_int, path: Text, buf: Buf, flags: c_int)
        = fstatat64(dir, path, buf, flags);
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn statx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: u32,
    buf: *mut libc::statx,
) -> c_int {
    look(
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

fn synced(result: Result<(), c_int>) -> c_int {
    result.map_or_else(|errno| fail(errno) as c_int, |()| 0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fsync(fd: c_int) -> c_int {
    point();
    match late::sync(fd, false) {
        Some(result) => synced(result),
        // SAFETY: no memory involved.
        None => unsafe { libc_calls::fsync(fd) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fdatasync(fd: c_int) -> c_int {
    point();
    match late::sync(fd, true) {
        Some(result) => synced(result),
        // SAFETY: no memory involved.
        None => unsafe { libc_calls::fdatasync(fd) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sync() {
    late::settle_all();
    // SAFETY: no memory involved.
    unsafe { libc_calls::sync() };
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn syncfs(fd: c_int) -> c_int {
    late::settle_all();
    // SAFETY: no memory involved.
    unsafe { libc_calls::syncfs(fd) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sync_file_range(
    fd: c_int,
    offset: Off,
    len: Off,
    flags: u32,
) -> c_int {
    point();
    if let Some(Err(errno)) = late::write_back(fd) {
        return fail(errno) as c_int;
    }
    // SAFETY: no memory involved.
    unsafe { libc_calls::sync_file_range(fd, offset, len, flags) }
}
