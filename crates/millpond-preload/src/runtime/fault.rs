//! Bad memory: a buffer that can't be read or written must give EFAULT, not kill the program.
//!
//! The kernel detects such a buffer while it copies. Here the engine copies, in the program's own
//! thread, and the processor raises SIGSEGV or SIGBUS. The handler installed here checks whether the
//! faulting instruction belongs to a copy ([`millpond::fault`], or [`copy_in`] and [`copy_out`] below).
//! If so, it continues where the copy reports failure. The call is then repeated by the kernel,
//! which returns exactly its usual result.
//!
//! Any other fault is the program's. The program's handler is stored when the library's is installed (with the
//! first file served) or when the program sets one later. `sigaction` returns it, and a fault calls it with its
//! own mask and flags. Limit: a program that *blocks* SIGSEGV or SIGBUS and passes bad memory is
//! killed, where the kernel would have returned EFAULT.

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::runtime::libc_calls;
use crate::runtime::lock::Lock;
use crate::runtime::section;
use crate::runtime::sys::sys;

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// The program's actions for SIGSEGV and SIGBUS. Accessed in sections only, where no fault is
/// the program's; so the handler may lock it.
static PROGRAM: Lock<[Option<libc::sigaction>; 2]> = Lock::new([None; 2]);
static INSTALLED: AtomicBool = AtomicBool::new(false);

fn index(signal: c_int) -> Option<usize> {
    SIGNALS.iter().position(|known| *known == signal)
}

/// Installs the handlers, once. In a section.
pub fn install() {
    // Acquire, Release: a thread that sees the flag finds the program's actions noted.
    if INSTALLED.load(Acquire) {
        return;
    }
    let mut program = PROGRAM.lock();
    // Another thread may have installed the library's handlers: they must not be stored as the program's.
    if INSTALLED.load(Acquire) {
        return;
    }
    for (slot, signal) in program.iter_mut().zip(SIGNALS) {
        // SAFETY: an all-zero sigaction is valid: the default action, no flags, no mask.
        let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
        ours.sa_sigaction = handle as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESTART;
        // SAFETY: as above; both are ours.
        let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `handle` is a handler of the three-argument form, as the flags say.
        if unsafe { libc_calls::sigaction(signal, &ours, &mut old) } == 0 {
            *slot = Some(old);
        }
    }
    INSTALLED.store(true, Release);
}

/// Whether a file was ever served, so that [`copy_in`] works.
pub fn is_installed() -> bool {
    INSTALLED.load(Acquire)
}

/// Copies a structure of the program's, at any address; `None` where it can't be read, which the kernel refuses.
///
/// # Safety
///
/// All bit patterns are values of `T`. Where the handlers are not installed, no other thread unmaps `from` during the call.
pub unsafe fn try_read<T: Copy>(from: *const T) -> Option<T> {
    if !is_installed() && !is_readable(from.addr(), size_of::<T>()) {
        return None;
    }
    let mut copy = std::mem::MaybeUninit::<T>::uninit();
    // Not in a section: the copy holds no lock, and a handler may interrupt it.
    // SAFETY: `copy` has room; `from` may be any address with the handlers, and can be read without them.
    let is_read = unsafe { copy_in(copy.as_mut_ptr().cast(), from.cast(), size_of::<T>()) };
    // SAFETY: all its bytes were copied, and any are a value.
    is_read.then(|| unsafe { copy.assume_init() })
}

/// Whether the kernel can read `len` bytes at `address`, which are few: asks for a change of the signal mask that it
/// refuses once it has read the set.
fn is_readable(address: usize, len: usize) -> bool {
    const WORD_BYTES: usize = 8;
    const NO_CHANGE: isize = -1;
    let Some(last) = address.checked_add(len.saturating_sub(1)) else { return false };
    // Whole words, which are on one page each.
    (address & !(WORD_BYTES - 1)..=last).step_by(WORD_BYTES).all(|word| {
        // SAFETY: the kernel checks the address, and changes nothing.
        let asked = unsafe { sys!(libc::SYS_rt_sigprocmask, NO_CHANGE, word, 0, WORD_BYTES) };
        asked == -libc::EINVAL as isize
    })
}

/// `sigaction` for a signal with the library's handler; `None` for other signals. Both the old and the new action
/// are the program's.
pub fn exchange(signal: c_int, new: Option<libc::sigaction>) -> Option<libc::sigaction> {
    let index = index(signal)?;
    if !INSTALLED.load(Acquire) {
        return None;
    }
    section::run(|_| {
        let mut program = PROGRAM.lock();
        let slot = program[index].as_mut()?;
        let old = *slot;
        if let Some(new) = new {
            *slot = new;
        }
        Some(old)
    })
}

/// Before fork and after, in parent and child: the lock is free in the child.
pub fn before_fork() {
    PROGRAM.acquire();
}

pub fn after_fork() {
    PROGRAM.release();
}

/// The program's own handler, called by it, may end the thread: so it may unwind.
extern "C-unwind" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel calls this with a valid context, which it will restore.
    let resumed = unsafe { try_resume(context.cast()) };
    if !resumed {
        // SAFETY: the arguments are the kernel's.
        unsafe { call_program(signal, info, context) };
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn try_resume(context: *mut libc::ucontext_t) -> bool {
    // SAFETY: the caller's duty.
    let pc = unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize] };
    match resume_address(*pc as usize) {
        Some(address) => {
            *pc = address as i64;
            true
        }
        None => false,
    }
}

#[cfg(target_arch = "aarch64")]
unsafe fn try_resume(context: *mut libc::ucontext_t) -> bool {
    // SAFETY: the caller's duty.
    let pc = unsafe { &mut (*context).uc_mcontext.pc };
    match resume_address(*pc as usize) {
        Some(address) => {
            *pc = address as u64;
            true
        }
        None => false,
    }
}

unsafe fn call_program(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(action) = exchange(signal, None) else { return };
    // SAFETY: `info` is the kernel's. Positive codes are faults; signals with other codes were sent by a process.
    let is_fault = unsafe { (*info).si_code } > 0;
    match action.sa_sigaction {
        libc::SIG_IGN if !is_fault => return,
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: an all-zero sigaction is the default action. The instruction faults again
            // on return, and the kernel takes the default action.
            unsafe {
                let default: libc::sigaction = std::mem::zeroed();
                libc_calls::sigaction(signal, &default, std::ptr::null_mut());
                if !is_fault {
                    let (pid, tid) = (sys!(libc::SYS_getpid), sys!(libc::SYS_gettid));
                    sys!(libc::SYS_tgkill, pid, tid, signal);
                }
            }
            return;
        }
        _ => {}
    }
    if action.sa_flags & libc::SA_RESETHAND != 0 {
        // SAFETY: as above.
        exchange(signal, Some(unsafe { std::mem::zeroed() }));
    }
    // SAFETY: the program's own handler, called as the kernel would: with its mask, which the
    // return from our handler undoes, and with arguments that the one-argument form ignores.
    unsafe {
        let mut mask = (&raw const action.sa_mask).cast::<u64>().read();
        if action.sa_flags & libc::SA_NODEFER == 0 {
            mask |= 1 << (signal - 1);
        }
        sys!(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, &raw const mask, 0, 8);
        let handler: extern "C-unwind" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
            std::mem::transmute(action.sa_sigaction);
        handler(signal, info, context);
    }
}

fn resume_address(pc: usize) -> Option<usize> {
    millpond::fault::resume_address(pc).or_else(|| own_resume_address(pc))
}

#[cfg(target_arch = "x86_64")]
mod copy {
    //! Copies memory that may fault.

    std::arch::global_asm!(
        ".pushsection .text",
        ".hidden millpond_preload_copy_in",
        ".globl millpond_preload_copy_in",
        ".type millpond_preload_copy_in, @function",
        "millpond_preload_copy_in:",
        ".cfi_startproc",
        "mov rcx, rdx",
        ".hidden millpond_preload_copy_in_movs",
        ".globl millpond_preload_copy_in_movs",
        "millpond_preload_copy_in_movs:",
        "rep movsb",
        "mov eax, 1",
        "ret",
        ".hidden millpond_preload_copy_in_fault",
        ".globl millpond_preload_copy_in_fault",
        "millpond_preload_copy_in_fault:",
        "xor eax, eax",
        "ret",
        ".cfi_endproc",
        ".size millpond_preload_copy_in, . - millpond_preload_copy_in",
        ".popsection",
    );

    unsafe extern "C" {
        fn millpond_preload_copy_in(dst: *mut u8, src: *const u8, len: usize) -> u32;
        static millpond_preload_copy_in_movs: u8;
        static millpond_preload_copy_in_fault: u8;
    }

    /// # Safety
    ///
    /// `dst` has room for `len` bytes; `src` may be any address, once the handlers are installed.
    pub unsafe fn copy_in(dst: *mut u8, src: *const u8, len: usize) -> bool {
        // SAFETY: the caller's duty; a fault at `src` resumes where false is returned.
        unsafe { millpond_preload_copy_in(dst, src, len) != 0 }
    }

    pub fn own_resume_address(pc: usize) -> Option<usize> {
        let at = &raw const millpond_preload_copy_in_movs;
        let fault = &raw const millpond_preload_copy_in_fault;
        (pc == at.addr()).then(|| fault.addr())
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod copy {
    //! Copies memory; a fault is the program's to handle.

    /// # Safety
    ///
    /// `dst` has room for `len` bytes, and `src` has them.
    pub unsafe fn copy_in(dst: *mut u8, src: *const u8, len: usize) -> bool {
        // SAFETY: the caller's duty.
        unsafe { std::ptr::copy(src, dst, len) };
        true
    }

    pub fn own_resume_address(_pc: usize) -> Option<usize> {
        None
    }
}

pub use copy::copy_in;
use copy::own_resume_address;
