//! Hands a description to the kernel: dirty pages, the offset, the lease.

use std::os::fd::RawFd;

use crate::files::description::Description;
use crate::files::lease;
use crate::files::offset::{IN_KERNEL, kernel_offset, push_offset};
use crate::report::reason::Reason;
use crate::report::{counts, lines};
use crate::runtime::sys::sys;

/// SERVED -> PASSED: writes dirty pages back, sets the kernel's offset, and gives the lease up.
pub fn pass(description: &'static Description, reason: Reason) {
    if !description.is_served() {
        return;
    }
    let fd = description.kernel_fd();
    if !go_through(description) {
        description.set_unwritten();
    }
    let offset = description.offset.lock();
    if offset != IN_KERNEL {
        push_offset(fd, offset);
    }
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
pub fn go_through(description: &Description) -> bool {
    if let Some(file) = description.late_file()
        && let Err(error) = file.begin_through()
    {
        lines::warn_unwritten(description.kernel_fd(), error.errno());
        return false;
    }
    true
}

/// Counts what libc has moved by itself since it shares the description. The registry is locked.
pub fn count_moved_by_libc(description: &Description) {
    // SAFETY: the registry is locked.
    let cold = unsafe { description.cold() };
    let Some(given) = cold.offset_given else { return };
    if let Ok(now) = u64::try_from(kernel_offset(description.kernel_fd())) {
        let ours = description.moved_in_kernel();
        let moved = now.wrapping_sub(given).wrapping_sub(ours);
        counts::count_bytes_passed(Reason::Stdio, moved as isize);
        cold.offset_given = Some(now.wrapping_sub(ours));
    }
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
