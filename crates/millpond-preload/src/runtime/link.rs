//! Descriptors by their names in `/proc`.

use std::os::fd::RawFd;

use crate::runtime::sys::sys;

/// `/proc/self/fd/N`, NUL-terminated.
pub fn format_link(fd: RawFd, buffer: &mut [u8; 32]) -> &[u8] {
    use std::io::Write;
    let mut rest = &mut buffer[..31];
    // 31 bytes hold the longest number.
    let _ = write!(rest, "/proc/self/fd/{fd}");
    &buffer[..]
}

/// The path of the file at `fd`, as far as there is one.
pub fn path_of(fd: RawFd, path: &mut [u8; libc::PATH_MAX as usize]) -> &[u8] {
    let mut link = [0u8; 32];
    let text = format_link(fd, &mut link);
    // SAFETY: `text` is NUL-terminated, and the kernel writes at most the length of `path`.
    let len = unsafe {
        sys!(libc::SYS_readlinkat, libc::AT_FDCWD, text.as_ptr(), path.as_mut_ptr(), path.len())
    };
    &path[..len.max(0) as usize]
}
