//! `vfork`: the child has the memory of its parent, which waits until the child has become another program, or ended.
//!
//! ```text
//! before:  as before a fork (`fork`): files are handed to the kernel
//! child:   runs on with the parent's memory: its hooks go straight to the kernel (Record::begin_vfork)
//! parent:  goes on when the child has become another program, or ended
//! ```
//!
//! - **V1** The child takes no lock: it may be killed at any time, and other threads of its parent go on. Its
//!   changes to the library's state are single atomic operations.
//! - **V2** The registry's lock is held from `before` until the kernel has made the child, so that no other thread
//!   opens a file in between (`forked.K7`); the child gives it back, or the parent, if the child did not run.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::files::forked::{self, FORKS};
use crate::files::registry;
use crate::fork::ensure_initialised;
use crate::page_cache;
use crate::runtime::elf::libcs;
use crate::runtime::libc_calls::slots;
use crate::runtime::section::{self, BLOCKED, change_mask};
use crate::runtime::sys::to_libc;
use crate::runtime::thread;

/// State of the forking thread across the call.
struct VforkCrossing {
    /// `forked.K5`.
    hidden: Vec<RawFd>,
    /// The thread's signals, as the program has them blocked.
    mask: u64,
    /// V2: the child runs.
    has_begun: AtomicBool,
}

pub extern "C" fn route_vfork() -> *const c_void {
    if thread::record().is_inside() {
        return libcs(&slots::vfork, c"vfork");
    }
    ensure_initialised();
    if page_cache::is_on() {
        page_cache::release_for_fork();
    }
    let mask = change_mask(libc::SIG_BLOCK, BLOCKED);
    section::run(|record| {
        let mut registry = registry::lock();
        let hidden = registry.hand_over_for_fork();
        let crossing = VforkCrossing { hidden, mask, has_begun: AtomicBool::new(false) };
        record.keep_over_vfork(Box::into_raw(Box::new(crossing)).cast());
        registry::before_fork(registry);
    });
    thread::record().begin_vfork();
    share_memory as *const () as *const c_void
}

/// In the child, before it returns to the program.
extern "C" fn in_child() {
    // SAFETY: made in `route_vfork`, and freed when this process has gone.
    let crossing = unsafe { &*thread::record().kept_over_vfork().cast::<VforkCrossing>() };
    // Release: pairs with the Acquire in `in_parent`.
    crossing.has_begun.store(true, Release);
    FORKS.end();
    registry::after_fork_parent();
    crossing.hidden.iter().for_each(|fd| forked::hide(*fd));
    change_mask(libc::SIG_SETMASK, crossing.mask);
}

/// In the parent, when the child has its own memory, or none.
extern "C" fn in_parent(child_pid: isize) -> isize {
    let record = thread::record();
    // SAFETY: made in `route_vfork`, and taken once.
    let crossing = unsafe { Box::from_raw(record.kept_over_vfork().cast::<VforkCrossing>()) };
    record.keep_over_vfork(null_mut());
    record.end_vfork();
    // Acquire: pairs with the Release in `in_child`.
    if !crossing.has_begun.load(Acquire) {
        FORKS.end();
        registry::after_fork_parent();
    }
    let mask = crossing.mask;
    section::run(|_| drop(crossing));
    change_mask(libc::SIG_SETMASK, mask);
    to_libc(child_pid)
}

/// The system call, which returns twice. The child's calls overwrite the stack below the caller's frame, so the return
/// address is kept in a register.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn share_memory() {
    std::arch::naked_asm!(
        ".cfi_startproc",
        "pop rdi",
        ".cfi_def_cfa_offset 0",
        ".cfi_register rip, rdi",
        "mov eax, {number}",
        "syscall",
        "push rdi",
        ".cfi_def_cfa_offset 8",
        ".cfi_offset rip, -8",
        "sub rsp, 8",
        ".cfi_def_cfa_offset 16",
        "test rax, rax",
        "jz 2f",
        "mov rdi, rax",
        "call {in_parent}",
        "jmp 3f",
        "2:",
        "call {in_child}",
        "xor eax, eax",
        "3:",
        "add rsp, 8",
        ".cfi_def_cfa_offset 8",
        "ret",
        ".cfi_endproc",
        number = const libc::SYS_vfork,
        in_parent = sym in_parent,
        in_child = sym in_child,
    );
}

/// The system call, which returns twice: the return address is in a register until the child's calls are over.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn share_memory() {
    std::arch::naked_asm!(
        ".cfi_startproc",
        "mov x0, {flags}",
        "mov x1, xzr",
        "mov x8, {number}",
        "svc 0",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "cbz x0, 2f",
        "bl {in_parent}",
        "b 3f",
        "2:",
        "bl {in_child}",
        "mov x0, xzr",
        "3:",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa sp, 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "ret",
        ".cfi_endproc",
        flags = const libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
        number = const libc::SYS_clone,
        in_parent = sym in_parent,
        in_child = sym in_child,
    );
}
