//! A further open of a file that is served: it gets a descriptor that shares the served description (`multi_open`).
//!
//! ```text
//! the path's inode is a served one                       else the kernel opens
//! O_PATH: a look at the file without opening it
//! registry: still served, and shared, or may be          F1
//! the rights that the open asks for                      F2
//! a duplicate of the real one; its description           multi_open, open_file.D6
//! ```
//!
//! - F1. A file that was opened once can be shared if it is open to read and write, and could be opened again
//!   (`multi_open.G1`).
//! - F2. If the rights are not proved, the kernel opens or refuses, and the file is handed over. So it does for O_TRUNC,
//!   O_EXCL, flags that can't be shared, and O_CREAT of a file of another user, which depends on its directory.

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::files::identity::{self, FileId, status_flags};
use crate::files::multi_open::LOST;
use crate::files::open_file::{Access, OpenFile};
use crate::files::registry::{self, Registry, STDERR};
use crate::files::table::{self, NumberState};
use crate::files::{process_locks, unserved};
use crate::report::accounts;
use crate::report::reason::Reason;
use crate::runtime::section;
use crate::runtime::sys::sys;

/// The number that an open of `path` gets, if it needs none of the kernel's.
pub fn open(dir: RawFd, path: *const libc::c_char, flags: i32) -> Option<RawFd> {
    const KERNELS: i32 = LOST | libc::O_TRUNC | libc::O_EXCL | libc::O_PATH | libc::O_DIRECTORY;
    let access = Access::of_flags(flags);
    if flags & KERNELS != 0 || !(access.read || access.write) {
        return None;
    }
    section::run(|_| {
        let is_followed = flags & libc::O_NOFOLLOW == 0;
        let found = identity::identify_path(dir, path, is_followed)?;
        if !registry::lock().may_share(found.id) {
            return None;
        }
        let looked = libc::O_PATH | libc::O_CLOEXEC | flags & libc::O_NOFOLLOW;
        // SAFETY: a bad `path` makes the kernel return EFAULT.
        let place = unsafe { sys!(libc::SYS_openat, dir, path, looked) } as RawFd;
        if place < 0 {
            return None;
        }
        let permitted = identity::identify(place).filter(|_| is_permitted(place, flags, access));
        // Before: the number may be the one that is due.
        // SAFETY: opened above; its close ends no lock.
        unsafe { sys!(libc::SYS_close, place) };
        registry::lock().open_further(permitted?.id, flags)
    })
}

/// F2.
fn is_permitted(place: RawFd, flags: i32, access: Access) -> bool {
    const SYS_FACCESSAT2: i64 = 439;
    let mode = if access.read { libc::R_OK } else { 0 } | if access.write { libc::W_OK } else { 0 };
    let how = libc::AT_EACCESS | libc::AT_EMPTY_PATH;
    // SAFETY: the text is NUL-terminated.
    let may = unsafe { sys!(SYS_FACCESSAT2, place, c"".as_ptr(), mode, how) == 0 };
    // SAFETY: no memory involved.
    let is_own = || unsafe { identity::owner(place) == Some(sys!(libc::SYS_geteuid) as u32) };
    may && (flags & libc::O_CREAT == 0 || is_own())
}

impl Registry {
    /// Whether a further open of the file may share its description, as far as is known yet.
    fn may_share(&self, id: FileId) -> bool {
        let Some(inode) = self.inodes.get(&id).filter(|inode| inode.passed.is_none()) else {
            return false;
        };
        match inode.descriptions[..] {
            [single] => single.shares() || may_be_shared(single, id),
            [first, ..] => first.shares(),
            [] => false,
        }
    }

    /// The rights are proved.
    fn open_further(&mut self, id: FileId, flags: i32) -> Option<RawFd> {
        const KEPT: i32 = libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK;
        if !self.may_share(id) {
            return None;
        }
        let first = *self.inodes.get(&id)?.descriptions.first()?;
        let file = Arc::clone(first.shared_file()?);
        let real = first.kernel_fd();
        // The one is the engine's (`writeback_policy.L5`), the other the lease's.
        let told = status_flags(real) & !(libc::O_DIRECT | libc::O_ASYNC);
        let is_cloexec = flags & libc::O_CLOEXEC != 0;
        let command = if is_cloexec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
        // SAFETY: no memory involved.
        let new = unsafe { sys!(libc::SYS_fcntl, real, command, 0) } as RawFd;
        if new < 0 {
            return None;
        }
        if new as usize >= table::SLOTS {
            process_locks::close(new);
            return None;
        }
        if !matches!(table::get(new), NumberState::Unknown) {
            self.forget_lost(new);
        }
        if !first.shares() {
            // F1.
            first.set_sharing(told);
        }
        if accounts::is_kept() {
            unserved::row_of(new);
        }
        let flags = told & !KEPT | flags & KEPT;
        let description = OpenFile::acquire(id, flags, 0, real, Ok(file));
        description.set_sharing(flags);
        self.push_served(id, description);
        table::set(new, NumberState::File(description));
        if new <= STDERR {
            self.pass_fd(new, Reason::Stdio);
        }
        Some(new)
    }
}

/// F1. The registry is locked.
fn may_be_shared(single: &'static OpenFile, id: FileId) -> bool {
    let Access { read, write, append } = single.access();
    // SAFETY: the registry is locked.
    let cold = unsafe { single.cold() };
    single.is_served()
        && read
        && write
        && !append
        && !cold.is_locked
        && status_flags(single.kernel_fd()) & LOST & !libc::O_DIRECT == 0
        // multi_open.G7.
        && !process_locks::is_noted(id)
        && !process_locks::is_locked(single.kernel_fd(), id)
}
