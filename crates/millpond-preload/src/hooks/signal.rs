//! The ways a program sets its handlers for SIGSEGV and SIGBUS; see `fault`.

use std::ffi::c_int;

use libc::sighandler_t;

use crate::runtime::fault;
use crate::runtime::libc_calls;

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sigaction(
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

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the same function under its other name.
    unsafe { sigaction(signal, new, old) }
}

/// Sets a plain handler with `flags`, if the signal is one of ours.
fn exchange_plain(signal: c_int, handler: sighandler_t, flags: c_int) -> Option<sighandler_t> {
    // SAFETY: an all-zero sigaction is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    fault::exchange(signal, Some(action)).map(|old| old.sa_sigaction)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    exchange_plain(signal, handler, libc::SA_RESTART)
        // SAFETY: as the caller vouches to `signal`.
        .unwrap_or_else(|| unsafe { libc_calls::signal(signal, handler) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn bsd_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the same function under its other name.
    unsafe { signal(number, handler) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __sysv_signal(
    signal: c_int,
    handler: sighandler_t,
) -> sighandler_t {
    exchange_plain(signal, handler, libc::SA_RESETHAND | libc::SA_NODEFER)
        // SAFETY: as the caller vouches to `sysv_signal`.
        .unwrap_or_else(|| unsafe { libc_calls::__sysv_signal(signal, handler) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t {
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
