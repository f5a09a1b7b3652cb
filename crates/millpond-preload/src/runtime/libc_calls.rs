//! libc's own definitions of the functions that this library replaces, found with `dlsym(RTLD_NEXT)` (see
//! `elf`): a program's call that is passed on goes through them, because a libc call that may block is also
//! a cancellation point.
//!
//! A cancelled thread unwinds through the frame of the hook, so hooks are `extern "C-unwind"` and
//! hold nothing that needs dropping when they call on: see `cancel`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::runtime::elf;
use crate::runtime::sys::set_errno;

/// Finds the next definition of a symbol after this library, and remembers it in `slot`.
#[cold]
fn resolve(slot: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let found = elf::next(name);
    // Relaxed, here and in the wrappers: whoever reads null resolves again, to the same address,
    // and the code behind it was mapped before this library was.
    slot.store(found, Relaxed);
    found
}

/// Declares the libc functions this library replaces: a wrapper of each, and [`resolve_all`].
macro_rules! libc_calls {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $missing:expr;)*) => {
        $(
            /// libc's own; for the arguments' duties see its manual.
            ///
            /// # Safety
            ///
            /// As the function of the same name in libc.
            $(#[$meta])*
            #[inline]
            #[allow(dead_code)]
            pub unsafe fn $name($($arg: $ty),*) -> $ret {
                let mut found = slots::$name.load(Relaxed);
                if found.is_null() {
                    found = resolve(&slots::$name, name_of(concat!(stringify!($name), "\0")));
                }
                if found.is_null() {
                    set_errno(libc::ENOSYS);
                    return $missing;
                }
                // SAFETY: libc defines this symbol with this signature; the caller vouches for
                // the arguments.
                unsafe {
                    let call: unsafe extern "C-unwind" fn($($ty),*) -> $ret =
                        std::mem::transmute(found);
                    call($($arg),*)
                }
            }
        )*
        #[allow(non_upper_case_globals)]
        pub mod slots {
            use super::*;
            $(pub static $name: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());)*
        }
        /// Looks all of them up: `dlsym` is not async-signal-safe, so it should not be left to
        /// their first use.
        pub fn resolve_all() {
            $(resolve(&slots::$name, name_of(concat!(stringify!($name), "\0")));)*
        }
    };
}

fn name_of(text: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(text.as_bytes()).unwrap_or(c"")
}

type Argv = *const *const c_char;
type File = libc::FILE;
type Off = libc::off64_t;

libc_calls! {
    fn openat64(dir: c_int, path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int = -1;
    fn read(fd: c_int, buf: *mut c_void, len: usize) -> isize = -1;
    fn write(fd: c_int, buf: *const c_void, len: usize) -> isize = -1;
    fn pread64(fd: c_int, buf: *mut c_void, len: usize, offset: Off) -> isize = -1;
    fn pwrite64(fd: c_int, buf: *const c_void, len: usize, offset: Off) -> isize = -1;
    fn readv(fd: c_int, iov: *const libc::iovec, count: c_int) -> isize = -1;
    fn writev(fd: c_int, iov: *const libc::iovec, count: c_int) -> isize = -1;
    fn preadv64(fd: c_int, iov: *const libc::iovec, count: c_int, offset: Off) -> isize = -1;
    fn pwritev64(fd: c_int, iov: *const libc::iovec, count: c_int, offset: Off) -> isize = -1;
    fn preadv64v2(fd: c_int, iov: *const libc::iovec, count: c_int, offset: Off, flags: c_int)
        -> isize = -1;
    fn pwritev64v2(fd: c_int, iov: *const libc::iovec, count: c_int, offset: Off, flags: c_int)
        -> isize = -1;
    fn close(fd: c_int) -> c_int = -1;
    fn fcntl64(fd: c_int, command: c_int, arg: usize) -> c_int = -1;
    fn flock(fd: c_int, operation: c_int) -> c_int = -1;
    fn lockf64(fd: c_int, command: c_int, len: Off) -> c_int = -1;
    fn truncate64(path: *const c_char, len: Off) -> c_int = -1;
    fn posix_fallocate64(fd: c_int, offset: Off, len: Off) -> c_int = libc::ENOSYS;
    fn fallocate64(fd: c_int, mode: c_int, offset: Off, len: Off) -> c_int = -1;
    fn sendfile64(to: c_int, from: c_int, offset: *mut Off, len: usize) -> isize = -1;
    fn splice(from: c_int, from_offset: *mut Off, to: c_int, to_offset: *mut Off, len: usize,
        flags: u32) -> isize = -1;
    fn copy_file_range(from: c_int, from_offset: *mut Off, to: c_int, to_offset: *mut Off,
        len: usize, flags: u32) -> isize = -1;
    fn ioctl(fd: c_int, request: libc::c_ulong, arg: usize) -> c_int = -1;
    fn sendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize = -1;
    fn sendmmsg(fd: c_int, messages: *mut libc::mmsghdr, count: u32, flags: c_int) -> c_int = -1;
    #[allow(clippy::unused_unit)]
    fn sync() -> () = ();
    fn fsync(fd: c_int) -> c_int = -1;
    fn fdatasync(fd: c_int) -> c_int = -1;
    fn syncfs(fd: c_int) -> c_int = -1;
    fn sync_file_range(fd: c_int, offset: Off, len: Off, flags: u32) -> c_int = -1;
    fn fchmod(fd: c_int, mode: libc::mode_t) -> c_int = -1;
    fn chmod(path: *const c_char, mode: libc::mode_t) -> c_int = -1;
    fn fchmodat(dir: c_int, path: *const c_char, mode: libc::mode_t, flags: c_int) -> c_int = -1;
    fn fchown(fd: c_int, owner: u32, group: u32) -> c_int = -1;
    fn chown(path: *const c_char, owner: u32, group: u32) -> c_int = -1;
    fn lchown(path: *const c_char, owner: u32, group: u32) -> c_int = -1;
    fn fchownat(dir: c_int, path: *const c_char, owner: u32, group: u32, flags: c_int) -> c_int
        = -1;
    fn futimens(fd: c_int, times: *const c_void) -> c_int = -1;
    fn futimes(fd: c_int, times: *const c_void) -> c_int = -1;
    fn utimensat(dir: c_int, path: *const c_char, times: *const c_void, flags: c_int) -> c_int
        = -1;
    fn futimesat(dir: c_int, path: *const c_char, times: *const c_void) -> c_int = -1;
    fn utimes(path: *const c_char, times: *const c_void) -> c_int = -1;
    fn lutimes(path: *const c_char, times: *const c_void) -> c_int = -1;
    fn utime(path: *const c_char, times: *const c_void) -> c_int = -1;
    fn fsetxattr(fd: c_int, name: *const c_char, value: *const c_void, len: usize, flags: c_int)
        -> c_int = -1;
    fn setxattr(path: *const c_char, name: *const c_char, value: *const c_void, len: usize,
        flags: c_int) -> c_int = -1;
    fn lsetxattr(path: *const c_char, name: *const c_char, value: *const c_void, len: usize,
        flags: c_int) -> c_int = -1;
    fn fremovexattr(fd: c_int, name: *const c_char) -> c_int = -1;
    fn removexattr(path: *const c_char, name: *const c_char) -> c_int = -1;
    fn lremovexattr(path: *const c_char, name: *const c_char) -> c_int = -1;
    fn link(old: *const c_char, new: *const c_char) -> c_int = -1;
    fn linkat(old_dir: c_int, old: *const c_char, new_dir: c_int, new: *const c_char, flags: c_int)
        -> c_int = -1;
    fn rename(old: *const c_char, new: *const c_char) -> c_int = -1;
    fn renameat(old_dir: c_int, old: *const c_char, new_dir: c_int, new: *const c_char) -> c_int
        = -1;
    fn renameat2(old_dir: c_int, old: *const c_char, new_dir: c_int, new: *const c_char,
        flags: u32) -> c_int = -1;
    fn aio_read64(block: *mut c_void) -> c_int = -1;
    fn aio_fsync64(operation: c_int, block: *mut c_void) -> c_int = -1;
    fn aio_write64(block: *mut c_void) -> c_int = -1;
    fn lio_listio64(mode: c_int, list: *const *mut c_void, count: c_int, event: *mut c_void)
        -> c_int = -1;
    fn mkostemps64(template: *mut c_char, suffix_len: c_int, flags: c_int) -> c_int = -1;
    fn fopen64(path: *const c_char, mode: *const c_char) -> *mut File = std::ptr::null_mut();
    fn freopen64(path: *const c_char, mode: *const c_char, stream: *mut File) -> *mut File
        = std::ptr::null_mut();
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut File = std::ptr::null_mut();
    fn fclose(stream: *mut File) -> c_int = -1;
    fn fileno(stream: *mut File) -> c_int = -1;
    fn vdprintf(fd: c_int, format: *const c_char, args: *mut c_void) -> c_int = -1;
    fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, args: *mut c_void)
        -> c_int = -1;
    fn dprintf() -> c_int = -1;
    fn __dprintf_chk() -> c_int = -1;
    fn pthread_create(thread: *mut libc::pthread_t, attributes: *const libc::pthread_attr_t,
        start: extern "C" fn(*mut c_void) -> *mut c_void, argument: *mut c_void) -> c_int
        = libc::EAGAIN;
    fn pthread_cancel(thread: libc::pthread_t) -> c_int = libc::ESRCH;
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int = libc::EINVAL;
    fn syscall(number: libc::c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize)
        -> libc::c_long = -1;
    fn fork() -> libc::pid_t = -1;
    fn unshare(flags: c_int) -> c_int = -1;
    fn clone() -> c_int = -1;
    fn open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int = -1;
    fn pidfd_getfd(process: c_int, fd: c_int, flags: u32) -> c_int = -1;
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void = std::ptr::null_mut();
    fn dlmopen(space: std::ffi::c_long, path: *const c_char, flags: c_int) -> *mut c_void
        = std::ptr::null_mut();
    fn io_uring_queue_init(entries: u32, ring: *mut c_void, flags: u32) -> c_int = -libc::ENOSYS;
    fn io_uring_queue_init_params(entries: u32, ring: *mut c_void, params: *mut c_void) -> c_int
        = -libc::ENOSYS;
    fn io_uring_queue_init_mem(entries: u32, ring: *mut c_void, params: *mut c_void,
        memory: *mut c_void, bytes: usize) -> c_int = -libc::ENOSYS;
    fn io_uring_setup(entries: u32, params: *mut c_void) -> c_int = -libc::ENOSYS;
    fn quick_exit(status: c_int) -> c_int = -1;
    fn system(command: *const c_char) -> c_int = -1;
    fn popen(command: *const c_char, mode: *const c_char) -> *mut File = std::ptr::null_mut();
    fn execve(path: *const c_char, argv: Argv, env: Argv) -> c_int = -1;
    fn execv(path: *const c_char, argv: Argv) -> c_int = -1;
    fn execvp(path: *const c_char, argv: Argv) -> c_int = -1;
    fn execvpe(path: *const c_char, argv: Argv, env: Argv) -> c_int = -1;
    fn fexecve(fd: c_int, argv: Argv, env: Argv) -> c_int = -1;
    fn execveat(dir: c_int, path: *const c_char, argv: Argv, env: Argv, flags: c_int)
        -> c_int = -1;
    fn execl() -> c_int = -1;
    fn execle() -> c_int = -1;
    fn execlp() -> c_int = -1;
    fn posix_spawn(pid: *mut libc::pid_t, path: *const c_char, actions: *const c_void,
        attributes: *const c_void, argv: Argv, env: Argv) -> c_int = libc::ENOSYS;
    fn posix_spawnp(pid: *mut libc::pid_t, path: *const c_char, actions: *const c_void,
        attributes: *const c_void, argv: Argv, env: Argv) -> c_int = libc::ENOSYS;
    fn posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, new: c_int) -> c_int
        = libc::ENOSYS;
    fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int
        = -1;
    fn signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t = libc::SIG_ERR;
    fn __sysv_signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t
        = libc::SIG_ERR;
    fn sigset(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t = libc::SIG_ERR;
}
