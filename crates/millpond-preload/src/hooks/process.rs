//! Exec, spawn, exit: where descriptors get a second owner, or the library ends. (For fork see `fork`.)
//!
//! Before exec and spawn the files of descriptors that are not close-on-exec are left to the kernel: only those
//! reach the new program. `vfork` is `fork`: a child that shares our memory but not our descriptors would
//! spoil the table.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::RawFd;

use crate::files::pin::Pin;
use crate::files::table::{self, Slot};
use crate::files::{late, process_locks, registry};
use crate::report::reason::Reason;
use crate::report::{self, tally};
use crate::runtime::cancel::point::{point, without};
use crate::runtime::cancel::state::disable;
use crate::runtime::libc_calls;
use crate::runtime::sys::sys;
use crate::runtime::{section, thread};

type Argv = *const *const c_char;

/// Descriptors that the calling thread alone has: the library's threads and table have others then.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn unshare(flags: c_int) -> c_int {
    if flags & libc::CLONE_FILES != 0 {
        registry::leave_all();
    }
    // SAFETY: as the caller vouches to `unshare`.
    unsafe { libc_calls::unshare(flags) }
}

type Start = extern "C" fn(*mut c_void) -> *mut c_void;

/// Threads that the engine starts are inside the library for good: what they open, read and close
/// is its own.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    extern "C" fn run(job: *mut c_void) -> *mut c_void {
        thread::record().enter_inside();
        // SAFETY: made below, for this thread alone.
        let (start, argument) = *unsafe { Box::from_raw(job.cast::<(Start, *mut c_void)>()) };
        start(argument)
    }
    if !thread::record().is_inside() {
        // SAFETY: as the caller vouches to `pthread_create`.
        return unsafe { libc_calls::pthread_create(thread, attributes, start, argument) };
    }
    let job = Box::into_raw(Box::new((start, argument)));
    // SAFETY: as above; `run` takes what it is given.
    let result = unsafe { libc_calls::pthread_create(thread, attributes, run, job.cast()) };
    if result != 0 {
        // SAFETY: no thread has taken it.
        drop(unsafe { Box::from_raw(job) });
    }
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vfork() -> libc::pid_t {
    // SAFETY: fork has no precondition; the handlers above run.
    unsafe { libc_calls::fork() }
}

/// Leaves to the kernel what another program will inherit. What it may look at is in the files.
fn give_inherited() {
    late::settle_all();
    section::run(|_| {
        // An exec that nobody was told had failed.
        process_locks::after_exec();
        let mut registry = registry::lock();
        let fds: Vec<RawFd> = table::known(0, u32::MAX)
            .filter(|(_, slot)| matches!(slot, Slot::File(description) if description.is_served()))
            .map(|(fd, _)| fd)
            .collect();
        for fd in fds {
            // SAFETY: no memory involved.
            let flags = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFD) };
            if flags & libc::FD_CLOEXEC as isize == 0 {
                registry.pass_fd(fd, Reason::Given);
            }
        }
    });
}

/// What is written from now on is not for this process to write back later.
extern "C" fn before_exec() {
    let paused = prepare_exec();
    section::run(|_| drop(paused));
}

fn prepare_exec() -> Vec<Pin> {
    let paused = late::pause_all();
    if !thread::record().is_inside() {
        give_inherited();
        // Nothing of this program is left after exec to tell it.
        report::put_by(registry::before_report);
        tally::keep_over_exec(true);
        section::run(|_| {
            registry::leave_keeper();
            process_locks::before_exec();
        });
    }
    paused
}

macro_rules! exec {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> c_int {
            let paused = prepare_exec();
            // SAFETY: as the caller vouches to the function of this name.
            let failed = unsafe { libc_calls::$name($($arg),*) };
            tally::keep_over_exec(false);
            section::run(|_| process_locks::after_exec());
            late::resume(paused);
            failed
        }
    )*};
}

exec! {
    execve(path: *const c_char, argv: Argv, env: Argv);
    execv(path: *const c_char, argv: Argv);
    execvp(path: *const c_char, argv: Argv);
    execvpe(path: *const c_char, argv: Argv, env: Argv);
    fexecve(fd: c_int, argv: Argv, env: Argv);
    execveat(dir: c_int, path: *const c_char, argv: Argv, env: Argv, flags: c_int);
}

/// A variadic function: calls `$before` with the first argument, then jumps to libc's with all
/// arguments as they came, those in vector registers and on the stack included.
#[cfg(target_arch = "x86_64")]
macro_rules! variadic {
    ($($name:ident, $before:path;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() -> c_int {
            std::arch::naked_asm!(
                ".cfi_startproc",
                "push rbp",
                // A handler may end the thread here.
                ".cfi_def_cfa_offset 16",
                ".cfi_offset rbp, -16",
                "mov rbp, rsp",
                ".cfi_def_cfa_register rbp",
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
                "push rax", "push rax",
                "sub rsp, 128",
                "movups [rsp], xmm0", "movups [rsp + 16], xmm1",
                "movups [rsp + 32], xmm2", "movups [rsp + 48], xmm3",
                "movups [rsp + 64], xmm4", "movups [rsp + 80], xmm5",
                "movups [rsp + 96], xmm6", "movups [rsp + 112], xmm7",
                "call {before}",
                "movups xmm0, [rsp]", "movups xmm1, [rsp + 16]",
                "movups xmm2, [rsp + 32]", "movups xmm3, [rsp + 48]",
                "movups xmm4, [rsp + 64]", "movups xmm5, [rsp + 80]",
                "movups xmm6, [rsp + 96]", "movups xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop rax", "pop rax",
                "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "pop rbp",
                ".cfi_def_cfa rsp, 8",
                "jmp qword ptr [rip + {real}]",
                ".cfi_endproc",
                before = sym $before,
                real = sym crate::runtime::libc_calls::slots::$name,
            )
        }
    )*};
}

extern "C" fn before_dprintf(fd: c_int) {
    registry::give_to_libc(fd);
}

#[cfg(target_arch = "x86_64")]
variadic! {
    execl, before_exec;
    execle, before_exec;
    execlp, before_exec;
    dprintf, before_dprintf;
    __dprintf_chk, before_dprintf;
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vdprintf(
    fd: c_int,
    format: *const c_char,
    args: *mut c_void,
) -> c_int {
    before_dprintf(fd);
    // SAFETY: as the caller vouches to `vdprintf`.
    unsafe { libc_calls::vdprintf(fd, format, args) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __vdprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    args: *mut c_void,
) -> c_int {
    before_dprintf(fd);
    // SAFETY: as the caller vouches to `__vdprintf_chk`.
    unsafe { libc_calls::__vdprintf_chk(fd, flag, format, args) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Argv,
    env: Argv,
) -> c_int {
    give_inherited();
    // SAFETY: as the caller vouches to `posix_spawn`.
    unsafe { libc_calls::posix_spawn(pid, path, actions, attributes, argv, env) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawnp(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Argv,
    env: Argv,
) -> c_int {
    give_inherited();
    // SAFETY: as the caller vouches to `posix_spawnp`.
    unsafe { libc_calls::posix_spawnp(pid, path, actions, attributes, argv, env) }
}

/// The child of a later spawn gets `fd` under another number, close-on-exec or not.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn posix_spawn_file_actions_adddup2(
    actions: *mut c_void,
    fd: c_int,
    new: c_int,
) -> c_int {
    section::run(|_| registry::lock().pass_fd(fd, Reason::Given));
    // SAFETY: as the caller vouches to this function.
    unsafe { libc_calls::posix_spawn_file_actions_adddup2(actions, fd, new) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn system(command: *const c_char) -> c_int {
    point();
    give_inherited();
    // SAFETY: as the caller vouches to `system`.
    unsafe { libc_calls::system(command) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn popen(
    command: *const c_char,
    mode: *const c_char,
) -> *mut libc::FILE {
    give_inherited();
    // SAFETY: as the caller vouches to `popen`.
    unsafe { libc_calls::popen(command, mode) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    // For good: the process ends here, whoever has asked this thread to.
    disable();
    late::end();
    report::say(registry::before_report);
    loop {
        // SAFETY: ends the process.
        unsafe { sys!(libc::SYS_exit_group, status) };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn quick_exit(status: c_int) -> ! {
    // Handlers of the program's follow, which may be cancelled.
    without(late::end);
    report::say(registry::before_report);
    // SAFETY: as the caller vouches to `quick_exit`.
    unsafe { libc_calls::quick_exit(status) };
    std::process::abort();
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the same function under its other name.
    unsafe { _exit(status) }
}
