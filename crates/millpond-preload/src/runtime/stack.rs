//! Stacks for the library's own work, as a thread of the program may have little stack.
//!
//! POSIX allows a thread 16 KiB, and the kernel a handler 8 KiB (SIGSTKSZ): the library's slow paths
//! need more. So the outermost [`section`](crate::runtime::section) of a thread runs on a stack of the
//! thread's [`Record`](crate::runtime::thread::Record), which is made at the first one and never unmapped.
//!
//! - **ST1** A stack is in use only while its thread is in a section. Of the program's handlers, only those of
//!   signals that the thread's own instructions raise run there.
//! - **ST2** If the section begins in a handler on the thread's stack for handlers (`sigaltstack`), that stack is
//!   disabled until the section ends: the kernel would take it for unused, and start another handler at its end. Such
//!   a section blocks signals, as the disabling takes effect after the switch of stacks.

use std::ffi::c_void;

use crate::runtime::sys::{self, PRIVATE, sys};

/// Chosen: twice the stack of the lease's thread. Only used pages take memory.
const STACK_BYTES: usize = 256 << 10;
const GUARD_BYTES: usize = 4096;

/// The end of a new stack, above a page that may not be touched.
pub fn make() -> Option<usize> {
    let bytes = GUARD_BYTES + STACK_BYTES;
    let flags = PRIVATE | libc::MAP_NORESERVE | libc::MAP_STACK;
    let start = sys::map(bytes, flags, -1)?;
    // SAFETY: the first page of the new mapping is made the guard.
    unsafe { sys!(libc::SYS_mprotect, start, GUARD_BYTES, libc::PROT_NONE) };
    Some(start.addr() + bytes)
}

/// ST2: keeps the stack for handlers disabled until this is dropped. Must be made on another stack, as the kernel
/// refuses to change one that is in use.
pub struct Disabled(libc::stack_t);

impl Disabled {
    pub fn begin() -> Self {
        // SAFETY: all integers and a null pointer.
        let (mut none, mut old): (libc::stack_t, libc::stack_t) = unsafe { std::mem::zeroed() };
        none.ss_flags = libc::SS_DISABLE;
        // SAFETY: both are ours.
        unsafe { sys!(libc::SYS_sigaltstack, &raw const none, &raw mut old) };
        Self(old)
    }
}

impl Drop for Disabled {
    fn drop(&mut self) {
        // SAFETY: the kernel has filled it.
        unsafe { sys!(libc::SYS_sigaltstack, &raw const self.0, 0) };
    }
}

/// Runs `work` on the stack that ends at `end`.
///
/// # Safety
///
/// The stack was made by [`make`], and the calling thread uses none of it.
pub unsafe fn run<R, W: FnOnce() -> R>(end: usize, work: W) -> R {
    struct Job<R, W> {
        work: Option<W>,
        result: Option<R>,
    }
    extern "C" fn carry_out<R, W: FnOnce() -> R>(job: *mut c_void) {
        // SAFETY: the job below, whose owner waits for this call.
        let job = unsafe { &mut *job.cast::<Job<R, W>>() };
        job.result = job.work.take().map(|work| work());
    }
    let mut job = Job { work: Some(work), result: None };
    // SAFETY: the caller's duty; `carry_out` takes the job.
    unsafe { call_on((&raw mut job).cast(), carry_out::<R, W>, end) };
    match job.result {
        Some(result) => result,
        None => std::process::abort(),
    }
}

/// Calls `function` with `job` on the stack that ends at `end`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn call_on(job: *mut c_void, function: extern "C" fn(*mut c_void), end: usize) {
    std::arch::naked_asm!(
        ".cfi_startproc",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "mov rsp, rdx",
        "call rsi",
        "mov rsp, rbp",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        "ret",
        ".cfi_endproc",
    );
}

/// Calls `function` with `job` on the stack that ends at `end`.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn call_on(job: *mut c_void, function: extern "C" fn(*mut c_void), end: usize) {
    std::arch::naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x29, sp",
        ".cfi_def_cfa_register x29",
        "mov sp, x2",
        "blr x1",
        "mov sp, x29",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa sp, 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "ret",
        ".cfi_endproc",
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: work on another stack has its captured values there, and its result comes back.
    #[test]
    fn work_runs_on_the_other_stack() {
        let end = make().unwrap();
        let mut place = 0;
        let numbers = [1_u64, 2, 3];
        // SAFETY: made above, for this thread alone.
        let sum = unsafe {
            run(end, || {
                let local = 0_u8;
                place = (&raw const local).addr();
                numbers.iter().sum::<u64>()
            })
        };
        assert_eq!(sum, 6);
        assert!((end - STACK_BYTES..end).contains(&place));
    }
}
