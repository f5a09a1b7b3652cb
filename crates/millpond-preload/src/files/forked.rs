//! Files at a fork: written back, and the kernel's for good in parent and child.
//!
//! Parent and child share each open file description with its offset, and one lease covers both processes. So the
//! parent hands all its files to the kernel before the fork.
//!
//! - **K5** Descriptors that could not be parted (`multi_open`: G3) still share one description of the kernel's, which the
//!   parent serves on. The child gets none of them: each becomes a descriptor that names its file and can be neither
//!   read nor written (O_PATH). Its number stays taken, because the next open would otherwise get it.
//! - **K7** Another thread may have opened a file that the fork does not find in the table yet. The open notices that
//!   there was a fork (`runtime::forks`), and leaves the file to the kernel.

use std::os::fd::RawFd;

use crate::files::registry::Registry;
use crate::files::table::{self, NumberState};
use crate::report::reason::Reason;
use crate::runtime::forks::Forks;
use crate::runtime::link::format_link;
use crate::runtime::sys::sys;

/// K7. Opens are from before one to when the file is in the table, or will be with the registry locked.
pub static FORKS: Forks = Forks::new();

impl Registry {
    /// Before a fork. Returns the descriptors that the child may not have (K5).
    pub fn hand_over_for_fork(&mut self) -> Vec<RawFd> {
        FORKS.begin();
        self.pass_where(Reason::Forked, |_| true);
        self.pass_shared();
        self.release_all_unserved();
        table::known(0, u32::MAX)
            .filter(
                |(_, slot)| matches!(slot, NumberState::File(description) if description.shares()),
            )
            .filter(|(fd, _)| super::multi_open::is_bypassed(*fd))
            .map(|(fd, _)| fd)
            .collect()
    }
}

/// K5, in the child: leaves of the descriptor only the name of its file. Where there is no `/proc`, or no free number,
/// it names the root directory.
pub fn hide(fd: RawFd) {
    let link = &mut [0; 32];
    let link = format_link(fd, link);
    // SAFETY: the texts are NUL-terminated, and the number is made here.
    unsafe {
        let closes = sys!(libc::SYS_fcntl, fd, libc::F_GETFD) & libc::FD_CLOEXEC as isize != 0;
        let flags = libc::O_PATH | if closes { libc::O_CLOEXEC } else { 0 };
        let open = |path| sys!(libc::SYS_openat, libc::AT_FDCWD, path, flags);
        let mut name = open(link.as_ptr().cast());
        if name < 0 {
            name = open(c"/".as_ptr());
        }
        let is_hidden = name >= 0 && sys!(libc::SYS_dup3, name, fd, flags & libc::O_CLOEXEC) >= 0;
        if name >= 0 {
            sys!(libc::SYS_close, name);
        }
        if is_hidden {
            return;
        }
        // No number was free, or the limit on numbers is below this one.
        sys!(libc::SYS_close, fd);
        let other = open(c"/".as_ptr());
        if other >= 0 && other != fd as isize {
            sys!(libc::SYS_close, other);
        }
    }
}
