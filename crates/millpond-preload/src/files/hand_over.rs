//! Hands a description to the kernel: dirty pages, the offset, the lease.

use std::os::fd::RawFd;

use crate::files::lease;
use crate::files::offset::{IN_KERNEL, push_offset};
use crate::files::open_file::OpenFile;
use crate::report::reason::Reason;
use crate::report::{counts, lines};
use crate::runtime::sys::sys;

/// SERVED -> PASSED: writes dirty pages back, sets the kernel's offset, and gives the lease up.
pub fn pass(description: &'static OpenFile, reason: Reason) {
    if !description.is_served() {
        return;
    }
    let fd = description.kernel_fd();
    if !go_through(description) {
        description.set_unwritten();
    }
    push_offset(fd, description.offset.lock());
    description.set_passed(reason);
    description.offset.unlock(IN_KERNEL);
    description.row().inspect(|row| row.end(Some(reason)));
    counts::count_file_passed(reason);
    if let Some(file) = description.file() {
        // The cached bytes are not used again. If they can't be dropped now, they go with the file.
        let _ = file.invalidate(0, i64::MAX as u64);
    }
    lease::release_lease(fd);
}

/// Writes dirty pages back; later writes go through. Whether that succeeded.
pub fn go_through(description: &OpenFile) -> bool {
    if let Some(file) = description.late_file()
        && let Err(error) = file.begin_through()
    {
        lines::warn_unwritten(description.kernel_fd(), error.errno());
        return false;
    }
    true
}

/// Ends the locks that belong to the description behind `fd`, as its last close would.
pub fn end_locks(fd: RawFd) {
    // SAFETY: an all-zero lock is the whole file's.
    let mut whole: libc::flock64 = unsafe { std::mem::zeroed() };
    whole.l_type = libc::F_UNLCK as i16;
    // SAFETY: the kernel reads `whole`.
    unsafe {
        sys!(libc::SYS_flock, fd, libc::LOCK_UN);
        sys!(libc::SYS_fcntl, fd, libc::F_OFD_SETLK, &raw const whole);
    }
}
