//! `syscall(2)`: the system calls of the other hooks, asked for by number.
//!
//! Programs do so where libc had no function once (`close_range`, `copy_file_range`). A close past
//! the hooks is what must not happen: the table would take the next file under that number for the
//! one before.

use std::ffi::{c_int, c_long};

use crate::real::{libc_calls, sys, to_libc};
use crate::{aio, cancel, hooks_descriptor, hooks_io, hooks_kernel, hooks_metadata, hooks_open};
use crate::{hooks_process, hooks_stat, thread};

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn syscall(
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
                libc::SYS_read => Some(hooks_io::read(fd, b as _, c)),
                libc::SYS_write => Some(hooks_io::write(fd, b as _, c)),
                libc::SYS_pread64 => Some(hooks_io::pread64(fd, b as _, c, d as i64)),
                libc::SYS_pwrite64 => Some(hooks_io::pwrite64(fd, b as _, c, d as i64)),
                libc::SYS_readv => Some(hooks_io::readv(fd, b as _, c as c_int)),
                libc::SYS_writev => Some(hooks_io::writev(fd, b as _, c as c_int)),
                libc::SYS_openat => {
                    Some(hooks_open::open_at(fd, b as _, c as c_int, d as libc::mode_t) as isize)
                }
                #[cfg(target_arch = "x86_64")]
                libc::SYS_open => Some(hooks_open::open(a as _, b as c_int, c as u32) as isize),
                #[cfg(target_arch = "x86_64")]
                libc::SYS_dup2 => Some(hooks_descriptor::dup2(fd, b as c_int) as isize),
                libc::SYS_close => Some(hooks_descriptor::close(fd) as isize),
                libc::SYS_close_range => {
                    Some(hooks_descriptor::close_range(a as u32, b as u32, c as c_int) as isize)
                }
                libc::SYS_dup => Some(hooks_descriptor::dup(fd) as isize),
                libc::SYS_dup3 => Some(hooks_descriptor::dup3(fd, b as c_int, c as c_int) as isize),
                libc::SYS_fcntl => Some(hooks_descriptor::fcntl64(fd, b as c_int, c) as isize),
                libc::SYS_lseek => {
                    Some(hooks_descriptor::lseek64(fd, b as i64, c as c_int) as isize)
                }
                libc::SYS_ftruncate => Some(hooks_descriptor::ftruncate64(fd, b as i64) as isize),
                libc::SYS_fallocate => {
                    Some(hooks_kernel::fallocate64(fd, b as c_int, c as i64, d as i64) as isize)
                }
                libc::SYS_fsync => Some(hooks_stat::fsync(fd) as isize),
                libc::SYS_fdatasync => Some(hooks_stat::fdatasync(fd) as isize),
                libc::SYS_sync => {
                    hooks_stat::sync();
                    Some(0)
                }
                libc::SYS_syncfs => Some(hooks_stat::syncfs(fd) as isize),
                libc::SYS_fstat => Some(hooks_stat::fstat64(fd, b as _) as isize),
                libc::SYS_newfstatat => {
                    Some(hooks_stat::fstatat64(fd, b as _, c as _, d as c_int) as isize)
                }
                libc::SYS_statx => {
                    Some(hooks_stat::statx(fd, b as _, c as c_int, d as u32, e as _) as isize)
                }
                libc::SYS_renameat2 => {
                    Some(hooks_metadata::renameat2(fd, b as _, c as c_int, d as _, e as u32)
                        as isize)
                }
                libc::SYS_io_setup => Some(to_libc(aio::set_up(a as u32, b as _))),
                libc::SYS_io_destroy => Some(to_libc(aio::destroy(a))),
                libc::SYS_io_submit => Some(to_libc(aio::submit(a, b as isize, c as _))),
                libc::SYS_io_cancel => Some(to_libc(aio::cancel(a, b as _, c as _))),
                libc::SYS_io_getevents | aio::SYS_IO_PGETEVENTS => {
                    let signals = (number == aio::SYS_IO_PGETEVENTS).then_some(f);
                    let (min, max) = (b as isize, c as isize);
                    let (events, timeout) = (d as _, e as _);
                    let wanted = aio::Wanted { min, max, events, timeout, signals };
                    Some(to_libc(aio::get_events(a, wanted)))
                }
                libc::SYS_exit_group => hooks_process::_exit(fd),
                libc::SYS_copy_file_range => {
                    Some(hooks_kernel::copy_file_range(fd, b as _, c as c_int, d as _, e, f as u32))
                }
                _ => None,
            }
        };
        // However the system call is called, this is no cancellation point.
        let result = cancel::without(call);
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
