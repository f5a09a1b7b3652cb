//! `syscall(2)`: the system calls of the other hooks, asked for by number.
//!
//! Programs do so where libc had no function once (`close_range`, `copy_file_range`), and some as a
//! habit. What is asked for so must be as what is called by name: a close past the hooks, and the table
//! takes the next file under that number for the one before; a write past them, and hits are stale.
//! `tests/system_calls.rs` has every number that there is, and what becomes of it.
//!
//! A system call that the program makes itself, by an instruction of its own, is not seen.

use std::ffi::{c_int, c_long, c_void};

use crate::aio::block::SYS_IO_PGETEVENTS;
use crate::files::late;
use crate::files::registry::leave_all;
use crate::fork::{fork_by, give_to_child};
use crate::hooks::jump::routed;
use crate::hooks::metadata::settle_at;
use crate::hooks::{aio, descriptor, io, kernel, open, process, stat};
use crate::runtime::cancel::point::without;
use crate::runtime::elf::libcs;
use crate::runtime::libc_calls::{self, slots};
use crate::runtime::sys::{sys, to_libc};
use crate::runtime::{fault, section, thread};

const HERE: c_int = libc::AT_FDCWD;
const NOFOLLOW: c_int = libc::AT_SYMLINK_NOFOLLOW;
// Not in the libc crate for every architecture.
const SYS_FCHMODAT2: c_long = 452;
const SYS_SETXATTRAT: c_long = 463;
const SYS_REMOVEXATTRAT: c_long = 466;
const SYS_FILE_SETATTR: c_long = 469;

routed! {
    syscall, route;
    clone, route_clone;
    __clone, route_clone;
}

/// libc's `clone`, whose child runs a function of the program's on a stack of its own.
extern "C" fn route_clone(_: *const c_void, stack: usize, flags: c_int) -> *const c_void {
    let request = CloneRequest { flags: flags as u64, stack: stack as u64 };
    if !thread::record().is_inside() && !request.is_thread() {
        request.before();
    }
    libcs(&slots::clone, c"clone")
}

/// Where a system call goes on. One that makes a thread or process on another stack returns there: not to
/// a function of ours, which has its own.
extern "C" fn route(number: c_long, a: usize, b: usize) -> *const c_void {
    let by_libc = || libcs(&slots::syscall, c"syscall").cast_const();
    let request = match number {
        libc::SYS_clone => CloneRequest { flags: a as u64, stack: b as u64 },
        libc::SYS_clone3 => match CloneRequest::of_clone3(a, b) {
            Some(request) => request,
            // The kernel refuses it.
            None => return by_libc(),
        },
        _ => return by_number as *const () as *const c_void,
    };
    if thread::record().is_inside() || request.is_thread() {
        return by_libc();
    }
    if request.is_fork() {
        return by_number as *const () as *const c_void;
    }
    request.before();
    by_libc()
}

struct CloneRequest {
    flags: u64,
    stack: u64,
}

impl CloneRequest {
    const VM: u64 = libc::CLONE_VM as u64;
    const FILES: u64 = libc::CLONE_FILES as u64;

    /// The arguments of `clone3`; `None` if there are too few, or they can't be read.
    fn of_clone3(args: usize, bytes: usize) -> Option<Self> {
        // Those of the first version. The sixth is the stack.
        const WORDS: usize = 8;
        let mut words = [0u64; WORDS];
        if args == 0 || bytes < size_of_val(&words) {
            return None;
        }
        let is_read = section::run(|_| {
            fault::install();
            let args = std::ptr::with_exposed_provenance::<u8>(args);
            // SAFETY: `words` has room; `args` may be any address.
            unsafe { fault::copy_in(words.as_mut_ptr().cast(), args, size_of_val(&words)) }
        });
        is_read.then(|| Self { flags: words[0], stack: words[5] })
    }

    /// Shares memory and descriptors.
    fn is_thread(&self) -> bool {
        self.flags & Self::VM != 0 && self.flags & Self::FILES != 0
    }

    /// As `fork` or `vfork`: both come back from the same call.
    fn is_fork(&self) -> bool {
        let is_vfork = self.flags & libc::CLONE_VFORK as u64 != 0;
        self.stack == 0 && self.flags & Self::FILES == 0 && (self.flags & Self::VM == 0 || is_vfork)
    }

    /// Before one that is neither.
    fn before(&self) {
        if self.flags & Self::FILES != 0 {
            // The child opens and closes here.
            leave_all();
        } else {
            give_to_child();
        }
    }
}

unsafe extern "C-unwind" fn by_number(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let fd = a as c_int;
    if !thread::record().is_inside() {
        // SAFETY: as the caller vouches to the system call of this number; arguments that it did
        // not give are not looked at.
        let call = || unsafe {
            match number {
                libc::SYS_read => Some(io::read(fd, b as _, c)),
                libc::SYS_write => Some(io::write(fd, b as _, c)),
                libc::SYS_pread64 => Some(io::pread64(fd, b as _, c, d as i64)),
                libc::SYS_pwrite64 => Some(io::pwrite64(fd, b as _, c, d as i64)),
                libc::SYS_readv => Some(io::readv(fd, b as _, c as c_int)),
                libc::SYS_writev => Some(io::writev(fd, b as _, c as c_int)),
                // A file's offset has 64 bits: the word of its upper half is not looked at.
                libc::SYS_preadv => Some(io::preadv64(fd, b as _, c as c_int, d as i64)),
                libc::SYS_pwritev => Some(io::pwritev64(fd, b as _, c as c_int, d as i64)),
                libc::SYS_preadv2 => {
                    Some(io::preadv64v2(fd, b as _, c as c_int, d as i64, f as c_int))
                }
                libc::SYS_pwritev2 => {
                    Some(io::pwritev64v2(fd, b as _, c as c_int, d as i64, f as c_int))
                }
                libc::SYS_openat => {
                    Some(open::open_at(fd, b as _, c as c_int, d as libc::mode_t) as isize)
                }
                #[cfg(target_arch = "x86_64")]
                libc::SYS_open => Some(open::open(a as _, b as c_int, c as u32) as isize),
                #[cfg(target_arch = "x86_64")]
                libc::SYS_dup2 => Some(descriptor::dup2(fd, b as c_int) as isize),
                libc::SYS_close => Some(descriptor::close(fd) as isize),
                libc::SYS_close_range => {
                    Some(descriptor::close_range(a as u32, b as u32, c as c_int) as isize)
                }
                libc::SYS_dup => Some(descriptor::dup(fd) as isize),
                libc::SYS_dup3 => Some(descriptor::dup3(fd, b as c_int, c as c_int) as isize),
                libc::SYS_fcntl => Some(descriptor::fcntl64(fd, b as c_int, c) as isize),
                libc::SYS_lseek => Some(descriptor::lseek64(fd, b as i64, c as c_int) as isize),
                libc::SYS_ftruncate => Some(descriptor::ftruncate64(fd, b as i64) as isize),
                libc::SYS_fallocate => {
                    Some(kernel::fallocate64(fd, b as c_int, c as i64, d as i64) as isize)
                }
                libc::SYS_fsync => Some(stat::fsync(fd) as isize),
                libc::SYS_fdatasync => Some(stat::fdatasync(fd) as isize),
                libc::SYS_sync => {
                    stat::sync();
                    Some(0)
                }
                libc::SYS_syncfs => Some(stat::syncfs(fd) as isize),
                libc::SYS_fstat => Some(stat::fstat64(fd, b as _) as isize),
                libc::SYS_newfstatat => {
                    Some(stat::fstatat64(fd, b as _, c as _, d as c_int) as isize)
                }
                libc::SYS_statx => {
                    Some(stat::statx(fd, b as _, c as c_int, d as u32, e as _) as isize)
                }
                libc::SYS_io_setup => Some(to_libc(aio::io_setup(a as c_int, b as _) as isize)),
                libc::SYS_io_destroy => Some(to_libc(aio::io_destroy(a) as isize)),
                libc::SYS_io_submit => {
                    Some(to_libc(aio::io_submit(a, b as c_long, c as _) as isize))
                }
                libc::SYS_io_cancel => Some(to_libc(aio::io_cancel(a, b as _, c as _) as isize)),
                libc::SYS_io_getevents => {
                    let (min, max) = (b as c_long, c as c_long);
                    Some(to_libc(aio::io_getevents(a, min, max, d as _, e as _) as isize))
                }
                SYS_IO_PGETEVENTS => {
                    let (min, max) = (b as isize, c as isize);
                    Some(to_libc(aio::get_events(a, min, max, d as _, e as _, Some(f))))
                }
                libc::SYS_exit_group => process::_exit(fd),
                libc::SYS_copy_file_range => {
                    Some(kernel::copy_file_range(fd, b as _, c as c_int, d as _, e, f as u32))
                }
                libc::SYS_sendfile => Some(kernel::sendfile64(fd, b as c_int, c as _, d)),
                libc::SYS_splice => {
                    Some(kernel::splice(fd, b as _, c as c_int, d as _, e, f as u32))
                }
                libc::SYS_mmap => {
                    let (prot, flags, file) = (c as c_int, d as c_int, e as c_int);
                    let map = kernel::mmap64(a as _, b, prot, flags, file, f as i64);
                    Some(map.expose_provenance() as isize)
                }
                libc::SYS_ioctl => Some(kernel::ioctl(fd, b as _, c) as isize),
                libc::SYS_flock => Some(descriptor::flock(fd, b as c_int) as isize),
                libc::SYS_truncate => Some(kernel::truncate64(a as _, b as i64) as isize),
                libc::SYS_sync_file_range => {
                    Some(stat::sync_file_range(fd, b as i64, c as i64, d as u32) as isize)
                }
                libc::SYS_sendmsg => Some(kernel::sendmsg(fd, b as _, c as c_int)),
                libc::SYS_sendmmsg => {
                    Some(kernel::sendmmsg(fd, b as _, c as u32, d as c_int) as isize)
                }
                libc::SYS_openat2 => Some(open::open_at2(fd, b as _, c as _, d)),
                libc::SYS_open_by_handle_at => {
                    Some(open::open_by_handle_at(fd, b as _, c as c_int) as isize)
                }
                libc::SYS_pidfd_getfd => Some(open::pidfd_getfd(fd, b as c_int, c as u32) as isize),
                libc::SYS_execve => Some(process::execve(a as _, b as _, c as _) as isize),
                libc::SYS_execveat => {
                    let flags = e as c_int;
                    Some(process::execveat(fd, b as _, c as _, d as _, flags) as isize)
                }
                libc::SYS_clone => {
                    // A child on our stack and in our memory, while we wait for it: in its own.
                    let flags = a & !((libc::CLONE_VM | libc::CLONE_VFORK) as usize);
                    Some(to_libc(fork_by(|| sys!(number, flags, 0, c, d, e))))
                }
                libc::SYS_clone3 => match CloneRequest::of_clone3(a, b) {
                    Some(request) if request.flags & CloneRequest::VM != 0 => {
                        Some(process::vfork() as isize)
                    }
                    Some(_) => Some(to_libc(fork_by(|| sys!(number, a, b)))),
                    // The kernel refuses it.
                    None => None,
                },
                libc::SYS_unshare => Some(process::unshare(fd) as isize),
                libc::SYS_io_uring_setup
                | libc::SYS_io_uring_enter
                | libc::SYS_io_uring_register => {
                    leave_all();
                    None
                }
                _ => {
                    settle_before(number, [a, b, c, d, e]);
                    only_here(number, a, b)
                }
            }
        };
        // However the system call is called, this is no cancellation point.
        let result = without(call);
        if let Some(result) = result {
            return result as c_long;
        }
        // By libc, where a thread of asynchronous cancel type may end.
        // SAFETY: as above.
        return unsafe { libc_calls::syscall(number, a, b, c, d, e, f) };
    }
    // SAFETY: as above.
    to_libc(unsafe { sys!(number, a, b, c, d, e, f) }) as c_long
}

/// Before a call that only the kernel does, and that looks at a file or sets what a later write would
/// spoil: see `metadata`.
fn settle_before(number: c_long, [a, b, c, d, e]: [usize; 5]) {
    let (dir, path) = (a as c_int, b as *const _);
    match number {
        libc::SYS_fchmod
        | libc::SYS_fchown
        | libc::SYS_fsetxattr
        | libc::SYS_fremovexattr
        | libc::SYS_finit_module => late::settle(dir),
        libc::SYS_kexec_file_load => {
            late::settle(a as c_int);
            late::settle(b as c_int);
        }
        libc::SYS_setxattr | libc::SYS_removexattr | libc::SYS_swapon | libc::SYS_acct => {
            settle_at(HERE, a as _, 0)
        }
        libc::SYS_lsetxattr | libc::SYS_lremovexattr => settle_at(HERE, a as _, NOFOLLOW),
        libc::SYS_fchmodat => settle_at(dir, path, 0),
        SYS_FCHMODAT2 => settle_at(dir, path, d as c_int),
        libc::SYS_fchownat => settle_at(dir, path, e as c_int),
        libc::SYS_utimensat => settle_at(dir, path, d as c_int),
        SYS_SETXATTRAT | SYS_REMOVEXATTRAT => settle_at(dir, path, c as c_int),
        SYS_FILE_SETATTR => settle_at(dir, path, e as c_int),
        libc::SYS_linkat => settle_at(dir, path, e as c_int & libc::AT_EMPTY_PATH),
        libc::SYS_renameat => settle_at(dir, path, NOFOLLOW),
        libc::SYS_renameat2 => {
            settle_at(dir, path, NOFOLLOW);
            if e as u32 & libc::RENAME_EXCHANGE != 0 {
                settle_at(c as c_int, d as _, NOFOLLOW);
            }
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_chmod | libc::SYS_chown | libc::SYS_utime | libc::SYS_utimes => {
            settle_at(HERE, a as _, 0);
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_lchown | libc::SYS_link | libc::SYS_rename => settle_at(HERE, a as _, NOFOLLOW),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_futimesat => settle_at(dir, path, 0),
        _ => {}
    }
}

/// Calls that newer architectures have not.
///
/// # Safety
///
/// As the system call.
#[cfg(target_arch = "x86_64")]
unsafe fn only_here(number: c_long, a: usize, b: usize) -> Option<isize> {
    // SAFETY: the caller's duty.
    unsafe {
        match number {
            libc::SYS_creat => Some(open::creat(a as _, b as u32) as isize),
            libc::SYS_stat => Some(stat::stat(a as _, b as _) as isize),
            libc::SYS_lstat => Some(stat::lstat(a as _, b as _) as isize),
            libc::SYS_fork => Some(to_libc(fork_by(|| sys!(number)))),
            libc::SYS_vfork => Some(process::vfork() as isize),
            _ => None,
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn only_here(_number: c_long, _a: usize, _b: usize) -> Option<isize> {
    None
}
