//! The ways a program sets its handlers for SIGSEGV and SIGBUS; see `fault`.

use std::ffi::c_int;

use libc::sighandler_t;

use crate::runtime::fault;
use crate::runtime::libc_calls;

pub unsafe fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: as the caller vouches to `sigaction`.
    unsafe {
        match fault::exchange(signal, new.as_ref().copied()) {
            Some(action) => {
                if let Some(old) = old.as_mut() {
                    *old = action;
                }
                0
            }
            None => libc_calls::sigaction(signal, new, old),
        }
    }
}

/// Sets a plain handler with `flags`, if the signal is one of ours.
fn exchange_plain(signal: c_int, handler: sighandler_t, flags: c_int) -> Option<sighandler_t> {
    // SAFETY: an all-zero sigaction is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    fault::exchange(signal, Some(action)).map(|old| old.sa_sigaction)
}

pub unsafe fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    exchange_plain(signal, handler, libc::SA_RESTART)
        // SAFETY: as the caller vouches to `signal`.
        .unwrap_or_else(|| unsafe { libc_calls::signal(signal, handler) })
}

pub unsafe fn __sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    exchange_plain(signal, handler, libc::SA_RESETHAND | libc::SA_NODEFER)
        // SAFETY: as the caller vouches to `sysv_signal`.
        .unwrap_or_else(|| unsafe { libc_calls::__sysv_signal(signal, handler) })
}

pub unsafe fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t {
    const SIG_HOLD: sighandler_t = 2;
    if handler == SIG_HOLD {
        // Changes the mask, not the handler.
        // SAFETY: as the caller vouches to `sigset`.
        return unsafe { libc_calls::sigset(signal, handler) };
    }
    exchange_plain(signal, handler, 0)
        // SAFETY: as above.
        .unwrap_or_else(|| unsafe { libc_calls::sigset(signal, handler) })
}

pub unsafe fn sigignore(signal: c_int) -> c_int {
    match exchange_plain(signal, libc::SIG_IGN, 0) {
        Some(_) => 0,
        // SAFETY: as the caller vouches to `sigignore`.
        None => unsafe { libc_calls::sigignore(signal) },
    }
}
