//! The ways a program sets its handlers; see `handlers`, and for SIGSEGV and SIGBUS `fault`.

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use libc::sighandler_t;

use crate::page_cache;
use crate::page_cache::mapped_io::before_jump;
use crate::runtime::elf::libcs;
use crate::runtime::libc_calls::{self, slots};
use crate::runtime::section::change_mask;
use crate::runtime::{fault, handlers, thread};

pub unsafe fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: as the caller vouches to `sigaction`.
    unsafe {
        if let Some(action) = fault::exchange(signal, new.as_ref().copied()) {
            if let Some(old) = old.as_mut() {
                *old = action;
            }
            0
        } else if page_cache::is_on() {
            exchange_mapped(signal, new, old)
        } else {
            handlers::exchange(signal, new, old)
        }
    }
}

/// The numbers of signals whose handlers the program wants to run with SIGBUS or SIGSEGV blocked.
static BLOCKS_BUS: AtomicU64 = AtomicU64::new(0);
static BLOCKS_SEGV: AtomicU64 = AtomicU64::new(0);

/// `sigaction` where files are read from the kernel's page cache. No handler is wrapped. A read in a handler may fault,
/// so handlers run with the signals of faults open; the program finds the mask that it has set.
unsafe fn exchange_mapped(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: as the caller vouches to `sigaction`; the sets are libc's.
    unsafe {
        let wanted = new.as_ref().copied();
        let opened = wanted.map(|mut action| {
            libc::sigdelset(&raw mut action.sa_mask, libc::SIGBUS);
            libc::sigdelset(&raw mut action.sa_mask, libc::SIGSEGV);
            action
        });
        let opened = opened.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let result = libc_calls::sigaction(signal, opened, old);
        if result != 0 {
            return result;
        }
        let bit = 1_u64 << ((signal - 1) & 63);
        for (blocks, fault) in [(&BLOCKS_BUS, libc::SIGBUS), (&BLOCKS_SEGV, libc::SIGSEGV)] {
            if let Some(old) = old.as_mut()
                && blocks.load(Relaxed) & bit != 0
            {
                libc::sigaddset(&raw mut old.sa_mask, fault);
            }
            match wanted {
                Some(action) if libc::sigismember(&raw const action.sa_mask, fault) == 1 => {
                    blocks.fetch_or(bit, Relaxed);
                }
                Some(_) => {
                    blocks.fetch_and(!bit, Relaxed);
                }
                None => {}
            }
        }
        result
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

/// `signal` and its kin, which set a handler with `flags`; `call` is libc's own.
pub fn set_plain(
    signal: c_int,
    handler: sighandler_t,
    flags: c_int,
    call: impl FnOnce(sighandler_t) -> sighandler_t,
) -> sighandler_t {
    match exchange_plain(signal, handler, flags) {
        Some(old) => old,
        None if page_cache::is_on() => call(handler),
        None => handlers::exchange_plain(signal, handler, call),
    }
}

pub unsafe fn sigset(number: c_int, handler: sighandler_t) -> sighandler_t {
    const SIG_HOLD: sighandler_t = 2;
    if handler == SIG_HOLD {
        // Changes the mask, not the handler.
        // SAFETY: as the caller vouches to `sigset`.
        return handlers::program_handler(number, unsafe { libc_calls::sigset(number, handler) });
    }
    // As libc does it. Not by libc's: in a section it would look at the section's mask.
    // SAFETY: an all-zero sigaction is valid; the handler is the caller's.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        let mut old = action;
        if sigaction(number, &raw const action, &raw mut old) != 0 {
            return libc::SIG_ERR;
        }
        let bit = 1 << (number - 1);
        if change_mask(libc::SIG_UNBLOCK, bit) & bit != 0 { SIG_HOLD } else { old.sa_sigaction }
    }
}

/// A stack for handlers: `stack` has to know of it.
pub unsafe fn sigaltstack(new: *const libc::stack_t, old: *mut libc::stack_t) -> c_int {
    // SAFETY: as the caller vouches to `sigaltstack`.
    let result = unsafe { libc_calls::sigaltstack(new, old) };
    if result == 0
        // SAFETY: as above; the kernel has read it.
        && let Some(new) = unsafe { new.as_ref() }
    {
        let is_disabled = new.ss_flags & libc::SS_DISABLE != 0;
        thread::record()
            .set_handler_stack(new.ss_sp.addr(), if is_disabled { 0 } else { new.ss_size });
    }
    result
}

/// The jumps out of frames, perhaps of a handler that has interrupted a write. Each goes on in libc's own, which is looked
/// up if the jump comes before the library is loaded.
macro_rules! jumps {
    ($($route:ident, $name:ident, $text:literal;)*) => {$(
        #[allow(non_snake_case)]
        pub extern "C" fn $route() -> *const c_void {
            before_jump();
            libcs(&slots::$name, $text)
        }
    )*};
}

jumps! {
    route_longjmp, longjmp, c"longjmp";
    route__longjmp, _longjmp, c"_longjmp";
    route_siglongjmp, siglongjmp, c"siglongjmp";
    route___longjmp_chk, __longjmp_chk, c"__longjmp_chk";
}

/// A change of the calling thread's mask, which may block the signals of faults.
pub fn note_mask(call: impl FnOnce() -> c_int) -> c_int {
    let result = call();
    forget_mask();
    result
}

/// Before a change by number: the mask is asked for at the thread's next read. One that is in a handler then may
/// find the old one.
pub fn forget_mask() {
    if let Some(record) = thread::try_record() {
        record.forget_fault_mask();
    }
}

pub unsafe fn sigignore(signal: c_int) -> c_int {
    match exchange_plain(signal, libc::SIG_IGN, 0) {
        Some(_) => 0,
        // SAFETY: as the caller vouches to `sigignore`.
        None => unsafe { libc_calls::sigignore(signal) },
    }
}
