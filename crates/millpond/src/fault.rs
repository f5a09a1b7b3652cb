//! Faults in the engine's copies, which become errors instead of signals.
//!
//! The kernel answers EFAULT for a buffer that can't be accessed; code in the same process gets SIGSEGV or SIGBUS
//! instead. A program (or a library that stands between a program and the kernel) that wants the kernel's answer
//! installs a handler for both. The handler continues the interrupted thread at the address that
//! [`resume_address`] returns: the copy then stops, and the operation returns [`crate::Error::Fault`].
//!
//! Files with [`Backing::Mapped`](crate::Backing::Mapped) need a handler of SIGBUS in any case: a page of the mapping
//! may be unreadable, or cut by another process. [`install_handler`] installs one.

#[cfg(not(loom))]
use std::cell::UnsafeCell;
use std::io;
#[cfg(not(loom))]
use std::mem::MaybeUninit;
#[cfg(not(loom))]
use std::sync::atomic::AtomicBool;
#[cfg(not(loom))]
use std::sync::atomic::Ordering::{Acquire, Release};

/// The address at which to continue a thread that faulted at program counter `pc`, if it did so in a copy of the
/// engine's; `None` for any other fault.
///
/// Async-signal-safe.
///
/// # Examples
///
/// ```
/// assert_eq!(millpond::fault::resume_address(0), None);
/// ```
#[must_use]
pub fn resume_address(pc: usize) -> Option<usize> {
    crate::copy::resume_address(pc)
}

/// Whether faults in copies can be turned into errors on this architecture.
pub(crate) const fn can_resume() -> bool {
    cfg!(all(target_arch = "x86_64", not(scheduled), not(loom)))
}

/// Installs a handler of SIGBUS that ends faulting copies of the engine's. Any other fault goes to the handler that was
/// there before, or has the signal's default action. Opening a file with
/// [`Backing::Mapped`](crate::Backing::Mapped) calls this; later calls have no effect while the handler is there.
///
/// A handler of SIGBUS that the program installs later must consult [`resume_address`], or call this one as the handler
/// before it. On AArch64 no handler is installed: there, files with mapped backing are read by system calls.
///
/// # Errors
///
/// The error of `sigaction(2)`.
///
/// # Examples
///
/// ```
/// millpond::fault::install_handler()?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[cfg(not(loom))]
pub fn install_handler() -> io::Result<()> {
    static INSTALLING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    if !can_resume() || IS_INSTALLED.load(Acquire) {
        return Ok(());
    }
    let _installing = INSTALLING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if IS_INSTALLED.load(Acquire) {
        return Ok(());
    }
    // SAFETY: a structure of integers, for which zeros are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = end_copy;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let before = PREVIOUS.0.get().cast::<libc::sigaction>();
    // Before the handler can run: it needs the action of before.
    // SAFETY: the lock makes this thread the only writer, and no handler of ours reads the action yet.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the handler is async-signal-safe.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    IS_INSTALLED.store(true, Release);
    Ok(())
}

/// The action of SIGBUS before [`install_handler`], written once, before the handler is installed.
#[cfg(not(loom))]
struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: one write under a lock, before the handler that reads it exists.
#[cfg(not(loom))]
unsafe impl Sync for Previous {}

#[cfg(not(loom))]
static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::uninit()));
#[cfg(not(loom))]
static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

#[cfg(loom)]
pub(crate) fn install_handler() -> io::Result<()> {
    Ok(())
}

/// Whether the calling thread blocks SIGBUS.
pub(crate) fn blocks_sigbus() -> bool {
    #[cfg(not(loom))]
    {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the call writes the present mask and changes nothing; the mask is read after that.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr()) != 0
                || libc::sigismember(set.as_ptr(), libc::SIGBUS) != 0
        }
    }
    #[cfg(loom)]
    true
}

/// The handler of SIGBUS.
#[cfg(not(loom))]
extern "C" fn end_copy(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: the kernel passes the interrupted thread's context to a handler with SA_SIGINFO.
        let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
        let pc = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
        if let Some(resume) = resume_address(*pc as usize) {
            *pc = resume as i64;
            return;
        }
    }
    // SAFETY: written before this handler was installed.
    let previous = unsafe { (*PREVIOUS.0.get()).assume_init_ref() };
    let handler = previous.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // The access is repeated after the return, and then kills the process.
        // SAFETY: `signal` is async-signal-safe.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    } else if previous.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: with SA_SIGINFO the handler has this type.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: without SA_SIGINFO the handler has this type.
        let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}
