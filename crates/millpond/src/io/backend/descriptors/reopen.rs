//! Opens the file of a descriptor again.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

/// Opens another description of the same file, with separate flags.
pub(super) fn reopen(fd: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let opened = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?;
    if opened.as_raw_fd() > fd.as_raw_fd() {
        return Ok(opened);
    }
    // The program may expect to get the lower numbers in order.
    Ok(rustix::io::fcntl_dupfd_cloexec(&opened, fd.as_raw_fd() + 1)?)
}
