//! Fork, exec, spawn, exit: where descriptors get a second owner, or the library ends.
//!
//! A description that another process holds too can change in ways we can't see (its offset, and
//! its bytes if it is writable). So before a fork, every served file is left to the kernel, with
//! its offset; what parent and child open afterwards is served again. Before exec and spawn the
//! same is done for the descriptors that are not close-on-exec: only those reach the new program.
//!
//! The child of a fork starts the library afresh and leaves the parent's engine alone. `vfork` is
//! `fork`: a child that shares our memory but not our descriptors would spoil the table. A raw
//! `clone` with memory shared and descriptors not is a documented limit; one without shared memory
//! is noticed by the wiped table.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::RawFd;

use crate::description::Pin;
use crate::real::{libc_calls, sys};
use crate::report::{self, Reason};
use crate::section::{self, Section};
use crate::table::{self, Slot};
use crate::{
    HEAP, aio, aio_context, cancel, description, fault, hooks_stdio, late, lease, process_locks,
    registry, tally, thread,
};

type Argv = *const *const c_char;

/// What the forking thread carries across the fork. The registry lock protects it.
struct Crossing(UnsafeCell<Option<(Section, Vec<RawFd>)>>);

// SAFETY: touched between `before_fork` and `after_fork_*` only, by the thread that holds the
// registry lock.
unsafe impl Sync for Crossing {}

static CROSSING: Crossing = Crossing(UnsafeCell::new(None));

pub fn initialise() {
    // SAFETY: the three functions may be called around any fork.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
}

/// Leaves to the kernel what a child shares that may not come by [`libc_calls::fork`].
pub fn give_to_child() {
    section::run(|_| registry::lock().pass_where(Reason::Forked, |_| true));
}

/// A fork by system call: it calls nobody.
pub fn fork_by(call: impl FnOnce() -> isize) -> isize {
    // SAFETY: they are called around a fork.
    unsafe {
        prepare();
        let child_pid = call();
        if child_pid == 0 {
            child()
        } else {
            parent()
        }
        child_pid
    }
}

/// Descriptors that the calling thread alone has: the library's threads and table have others then.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn unshare(flags: c_int) -> c_int {
    if flags & libc::CLONE_FILES != 0 {
        crate::symbols::leave_all();
    }
    // SAFETY: as the caller vouches to `unshare`.
    unsafe { libc_calls::unshare(flags) }
}

unsafe extern "C" fn prepare() {
    let section = Section::enter();
    if !table::is_initialised() {
        start_afresh(&[]);
    }
    let mut registry = registry::lock();
    registry.pass_where(Reason::Forked, |_| true);
    // From here on the engine's threads close nothing.
    let mut internal_fds = process_locks::before_fork();
    internal_fds.extend(registry.internal_fds());
    internal_fds.extend(aio_context::internal_fd());
    registry::before_fork(registry);
    // SAFETY: the registry is locked.
    unsafe { *CROSSING.0.get() = Some((section, internal_fds)) };
    hooks_stdio::before_fork();
    fault::before_fork();
    HEAP.before_fork();
}

unsafe extern "C" fn parent() {
    HEAP.after_fork();
    fault::after_fork();
    hooks_stdio::after_fork();
    // SAFETY: the registry is locked since `prepare`.
    let crossing = unsafe { (*CROSSING.0.get()).take() };
    process_locks::after_fork_parent();
    registry::after_fork_parent();
    drop(crossing);
}

unsafe extern "C" fn child() {
    HEAP.after_fork();
    fault::after_fork();
    hooks_stdio::after_fork();
    // SAFETY: the registry is locked since `prepare`.
    if let Some((_section, internal_fds)) = unsafe { (*CROSSING.0.get()).take() } {
        start_afresh(&internal_fds);
    }
}

/// In a child: forgets the parent's files, engine and locks. The engine's duplicates are closed,
/// else they would keep the parent's files open here, and their flocks held.
fn start_afresh(internal_fds: &[RawFd]) {
    table::after_fork();
    for fd in internal_fds {
        // SAFETY: duplicates that the child's program knows nothing of.
        unsafe { sys!(libc::SYS_close, *fd) };
    }
    thread::after_fork();
    lease::after_fork();
    // SAFETY: a child of fork has one thread, this one.
    unsafe {
        aio::after_fork();
        description::after_fork();
        registry::after_fork_child();
        process_locks::after_fork_child();
    }
    table::initialise();
    late::after_fork();
    report::after_fork();
    tally::after_fork();
}

/// Called first by hooks that describe files: notices a child of a fork that no handler saw.
pub fn ensure_initialised() {
    if !table::is_initialised() {
        section::run(|_| start_afresh(&[]));
    }
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
#[cfg(target_arch = "x86_64")]
extern "C" fn before_exec() {
    let paused = prepare_exec();
    section::run(|_| drop(paused));
}

fn prepare_exec() -> Vec<Pin> {
    let paused = late::pause_all();
    if !thread::record().is_inside() {
        give_inherited();
        // Nothing of this program is left after exec to tell it.
        report::put_by();
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
                real = sym crate::real::slots::$name,
            )
        }
    )*};
}

extern "C" fn before_dprintf(fd: c_int) {
    crate::hooks_kernel::give_to_libc(fd);
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
    cancel::point();
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
    cancel::disable();
    late::end();
    report::say();
    loop {
        // SAFETY: ends the process.
        unsafe { sys!(libc::SYS_exit_group, status) };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn quick_exit(status: c_int) -> ! {
    // Handlers of the program's follow, which may be cancelled.
    cancel::without(late::end);
    report::say();
    // SAFETY: as the caller vouches to `quick_exit`.
    unsafe { libc_calls::quick_exit(status) };
    std::process::abort();
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the same function under its other name.
    unsafe { _exit(status) }
}
