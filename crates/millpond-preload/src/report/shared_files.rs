//! Files without a name in any directory, which one process names to others in their environment.
//!
//! ```text
//! VARIABLE=/proc/PID/fd/NUMBER:DEVICE:INODE
//! ```
//!
//! By the time a process opens it the number may be another file, and the process id another process. So the file is used only if its device and inode match.

use std::ffi::{CStr, CString};
use std::os::fd::RawFd;

use crate::runtime::sys::sys;

/// What another process may open by [`open`].
pub fn text(fd: RawFd) -> Option<CString> {
    let (device, inode) = identity(fd)?;
    let path = format!("/proc/{}/fd/{fd}:{device}:{inode}", std::process::id());
    CString::new(path).ok()
}

/// Opens the file that the variable names, if it is still there.
pub fn open(variable: &CStr, flags: i32) -> Option<RawFd> {
    // SAFETY: the name is NUL-terminated; the value is copied at once.
    let value = unsafe {
        let value = libc::getenv(variable.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))?.to_str().ok()?.to_owned()
    };
    let mut parts = value.split(':');
    let path = CString::new(parts.next()?).ok()?;
    let id = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let flags = flags | libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: `path` is NUL-terminated.
    let fd = unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0) } as RawFd;
    if fd < 0 {
        return None;
    }
    if identity(fd) != Some(id) {
        // SAFETY: opened above.
        unsafe { sys!(libc::SYS_close, fd) };
        return None;
    }
    Some(fd)
}

/// The device and inode of a regular file.
fn identity(fd: RawFd) -> Option<(u64, u64)> {
    let mut stat = std::mem::MaybeUninit::<libc::stat64>::uninit();
    // SAFETY: the kernel fills `stat`.
    unsafe {
        (sys!(libc::SYS_fstat, fd, stat.as_mut_ptr()) == 0)
            .then(|| stat.assume_init())
            .filter(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFREG)
            .map(|stat| (stat.st_dev, stat.st_ino))
    }
}
