//! Files at a fork: written back, and the kernel's for good in parent and child.
//!
//! Parent and child share each open file description with its offset, and one lease covers both processes. So the
//! parent hands all its files to the kernel before the fork.
//!
//! - **K5** Descriptors that could not be parted (`multi_open`: G3) still share one description of the kernel's, which the
//!   parent serves on. The child gets none of them: each becomes a descriptor that can be neither read nor written
//!   (O_PATH). Its number stays taken, because the next open would otherwise get it.
//! - **K7** Another thread may have opened a file that the fork does not find in the table yet. The open notices that
//!   there was a fork (`runtime::forks`), and leaves the file to the kernel.

use std::os::fd::RawFd;

use crate::files::registry::Registry;
use crate::files::{multi_open, table};
use crate::report::reason::Reason;
use crate::runtime::forks::Forks;
use crate::runtime::sys::sys;

/// K7. Opens are from before one to when the file is in the table, or will be with the registry locked.
pub static FORKS: Forks = Forks::new();

impl Registry {
    /// Before a fork. Returns the descriptors that the child may not have (K5).
    pub fn hand_over_for_fork(&mut self) -> Vec<RawFd> {
        FORKS.begin();
        self.pass_all(Reason::Forked);
        self.pass_shared();
        let numbers = table::known(0, u32::MAX).map(|(fd, _)| fd);
        numbers.filter(|fd| multi_open::is_bypassed(*fd)).collect()
    }
}

/// K5, in the child: the number names the root directory from then on.
pub fn hide(fd: RawFd) {
    // SAFETY: the text is NUL-terminated, and the number is made here.
    unsafe {
        let closes = sys!(libc::SYS_fcntl, fd, libc::F_GETFD) & libc::FD_CLOEXEC as isize != 0;
        let cloexec = if closes { libc::O_CLOEXEC } else { 0 };
        let path = c"/".as_ptr();
        let name = sys!(libc::SYS_openat, libc::AT_FDCWD, path, libc::O_PATH | libc::O_CLOEXEC);
        if name < 0 || sys!(libc::SYS_dup3, name, fd, cloexec) < 0 {
            // No number was free, or the limit on numbers is below this one.
            sys!(libc::SYS_close, fd);
        }
        if name >= 0 {
            sys!(libc::SYS_close, name);
        }
    }
}
