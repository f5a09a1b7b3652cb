//! The program's signal handlers, which wait while their thread is in a section that has signals open.
//!
//! To block all signals and to unblock them takes two system calls: a third of the time of a cached
//! write. So the section of each served write and of each miss leaves them open
//! ([`section::open`](crate::runtime::section::open)), and the kernel calls [`deliver`] instead of each handler of the
//! program:
//!
//! ```text
//! deliver: not inside -> the handler
//!          inside     -> block all; note the interrupted mask;  block all in the interrupted context;
//!                        queue the signal to the thread again;  return
//! end of the section: outside;  was a mask noted? -> set it: queued signals are delivered, to the handler
//! ```
//!
//! - **S1** Only a thread that gets a signal in such a section pays for masks. From then on the section behaves as if
//!   it had begun with signals blocked: later signals wait, and those of one number become one.
//! - **S2** A section is *inside* before it takes a lock, and outside after it has released all locks.
//!   It checks for a mask when it is outside. A signal in between finds the thread outside, or was
//!   noted before that check.
//! - **S3** `deliver` may interrupt itself before all signals are blocked. The outermost one is the last to note the
//!   mask, and has the mask that the program had set.
//! - **S4** The signal is queued with all its data, which the kernel allows a process for itself. It is queued to
//!   the thread, not the process, as the thread had been chosen. It comes after signals of its number that were sent to
//!   the thread in between. For a standard signal there are none, or the kernel merges them into one. Real-time
//!   signals come in order, so a program with a handler of one has all sections block signals.
//! - **S5** The kernel applies masks and flags as the program set them, except `SA_SIGINFO`,
//!   which `deliver` needs, and `SA_RESETHAND`: the action would be gone when the signal comes again. `deliver` sets the
//!   default action before it calls such a handler, with signals blocked and under the lock of changes.
//!   The program gets back the flags that it has set.
//! - **S6** Signals that the thread's own instructions raise, and libc's two, have no `deliver`: they are
//!   open in every section.
//! - **S7** A system call in such a section may end with EINTR. The engine's transfers then continue
//!   (`transfer` in the engine). A call of the program may return it, as without the library. All other work of the
//!   library blocks signals.
//!
//! Handlers that were set without the library (by system call, by another libc) would run during a section.
//! The library checks for them when a file is served ([`find_foreign_handlers`]), and if it finds one, all later sections
//! block signals. A handler that is set during a section may run in that section.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use libc::sighandler_t;

use crate::runtime::libc_calls;
use crate::runtime::lock::Lock;
use crate::runtime::section::{self, BLOCKED, change_mask};
use crate::runtime::sys::sys;
use crate::runtime::thread;

/// One more than the greatest number of a signal.
const SIGNALS: usize = 65;

/// The program's settings, in addition to those in the kernel.
struct Handler {
    address: AtomicUsize,
    flags: AtomicU32,
}

/// Wants three arguments.
const INFO: u32 = 1;
/// Is for one signal, which has not come.
const ONCE: u32 = 2;
/// Was for one signal, which has come.
const SPENT: u32 = 4;

static HANDLERS: [Handler; SIGNALS] =
    [const { Handler { address: AtomicUsize::new(0), flags: AtomicU32::new(0) } }; SIGNALS];
/// Held while an action changes, so that the kernel's action and the library's are of the same call. Its holder has
/// blocked all signals, so a handler finds it free or held by another thread.
static CHANGES: Lock<()> = Lock::new(());

fn is_delayed(signal: c_int) -> bool {
    (1..SIGNALS as c_int).contains(&signal)
        && BLOCKED & (1 << (signal - 1)) != 0
        && !matches!(signal, libc::SIGKILL | libc::SIGSTOP)
}

fn ours() -> sighandler_t {
    deliver as *const () as sighandler_t
}

/// Whether it is a function of the program's.
fn is_function(handler: sighandler_t) -> bool {
    const SIG_HOLD: sighandler_t = 2;
    !matches!(handler, libc::SIG_DFL | libc::SIG_IGN | SIG_HOLD | libc::SIG_ERR)
}

/// `sigaction`.
///
/// # Safety
///
/// As for libc's.
pub unsafe fn exchange(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    if !is_delayed(signal) {
        // SAFETY: the caller's duty.
        return unsafe { libc_calls::sigaction(signal, new, old) };
    }
    // SAFETY: the caller's duty.
    let new = unsafe { new.as_ref().copied() };
    // SAFETY: an all-zero sigaction is valid.
    let mut was: libc::sigaction = unsafe { std::mem::zeroed() };
    let result = section::run(|_| {
        let _changes = CHANGES.lock();
        let known = KnownHandler::of(signal);
        if signal >= libc::SIGRTMIN() && new.is_some_and(|new| is_function(new.sa_sigaction)) {
            section::block_from_now_on();
        }
        let action = new.map(|action| known.replace(action));
        let action = action.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: both are ours; the handler is the caller's, or `deliver`.
        let result = unsafe { libc_calls::sigaction(signal, action, &raw mut was) };
        if result == 0 {
            known.replace_action(&mut was);
        } else {
            known.undo();
        }
        result
    });
    if result == 0 && !old.is_null() {
        // SAFETY: the caller's duty.
        unsafe { old.write(was) };
    }
    result
}

/// One of the simpler functions that set a handler: `call` is libc's function, which gets a handler.
pub fn exchange_plain(
    signal: c_int,
    handler: sighandler_t,
    call: impl FnOnce(sighandler_t) -> sighandler_t,
) -> sighandler_t {
    if !is_delayed(signal) {
        return call(handler);
    }
    section::run(|_| {
        let _changes = CHANGES.lock();
        let known = KnownHandler::of(signal);
        // SAFETY: an all-zero sigaction is valid.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler;
        if signal >= libc::SIGRTMIN() && is_function(handler) {
            section::block_from_now_on();
        }
        let was = call(known.replace(action).sa_sigaction);
        if was == libc::SIG_ERR {
            known.undo();
        } else if is_function(handler) {
            // Libc has chosen the flags.
            // SAFETY: the action is libc's but for the flags.
            unsafe {
                libc_calls::sigaction(signal, std::ptr::null(), &raw mut action);
                let is_once = action.sa_flags & libc::SA_RESETHAND != 0;
                known.handler.flags.store(if is_once { ONCE } else { 0 }, Relaxed);
                action.sa_flags = kernels(action.sa_flags);
                libc_calls::sigaction(signal, &raw const action, std::ptr::null_mut());
            }
        }
        if was == ours() { known.address } else { was }
    })
}

/// The handler that the program has set, for libc's function that returned `handler`.
pub fn program_handler(signal: c_int, handler: sighandler_t) -> sighandler_t {
    if handler == ours() { KnownHandler::of(signal).address } else { handler }
}

/// S5.
fn kernels(flags: c_int) -> c_int {
    flags & !libc::SA_RESETHAND | libc::SA_SIGINFO
}

/// The state of a signal before a change.
struct KnownHandler {
    handler: &'static Handler,
    address: sighandler_t,
    flags: u32,
}

impl KnownHandler {
    fn of(signal: c_int) -> Self {
        let handler = &HANDLERS[signal as usize];
        let (address, flags) = (handler.address.load(Relaxed), handler.flags.load(Relaxed));
        Self { handler, address, flags }
    }

    /// Notes a function of the program; returns the action for the kernel in its place. Called before the
    /// kernel has that action: `deliver` must always find a function to call.
    fn replace(&self, mut action: libc::sigaction) -> libc::sigaction {
        if is_function(action.sa_sigaction) {
            let info = if action.sa_flags & libc::SA_SIGINFO != 0 { INFO } else { 0 };
            let once = if action.sa_flags & libc::SA_RESETHAND != 0 { ONCE } else { 0 };
            self.handler.flags.store(info | once, Relaxed);
            self.handler.address.store(action.sa_sigaction, Relaxed);
            action.sa_sigaction = ours();
            action.sa_flags = kernels(action.sa_flags);
        }
        action
    }

    fn undo(&self) {
        self.handler.flags.store(self.flags, Relaxed);
        self.handler.address.store(self.address, Relaxed);
    }

    /// Replaces the kernel's old action by the program's.
    fn replace_action(&self, action: &mut libc::sigaction) {
        if action.sa_sigaction != ours() {
            return;
        }
        action.sa_sigaction = self.address;
        if self.flags & INFO == 0 {
            action.sa_flags &= !libc::SA_SIGINFO;
        }
        if self.flags & (ONCE | SPENT) != 0 {
            action.sa_flags |= libc::SA_RESETHAND;
        }
    }
}

/// Before fork and after, in parent and child: the lock is free in the child.
pub fn before_fork() {
    CHANGES.acquire();
}

pub fn after_fork() {
    CHANGES.release();
}

/// Called before the program's handlers, which may end the thread, or jump away: so it may unwind.
unsafe extern "C-unwind" fn deliver(
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    if let Some(record) = thread::try_record().filter(|record| record.inside_depth() > 0) {
        // S3.
        change_mask(libc::SIG_BLOCK, BLOCKED);
        // SAFETY: the kernel's context; the part of the mask that it has is the first word.
        let mask =
            unsafe { (&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>() };
        // SAFETY: as above.
        unsafe {
            record.note_mask(mask.read());
            mask.write(mask.read() | BLOCKED);
        }
        queue(signal, info);
        return;
    }
    let handler = &HANDLERS[signal as usize];
    let flags = handler.flags.load(Relaxed);
    if flags & (ONCE | SPENT) != 0 && !take_once(signal, handler, info) {
        return;
    }
    // SAFETY: the program's handler, which was stored before `deliver` was set, with the kernel's arguments. A handler
    // with one argument ignores the others.
    unsafe {
        let call: unsafe extern "C-unwind" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
            std::mem::transmute(handler.address.load(Relaxed));
        call(signal, info, context);
    }
}

/// S5, for a handler of one signal. Returns whether this is that signal. Otherwise the signal comes again, when
/// the action is the default.
#[cold]
fn take_once(signal: c_int, handler: &Handler, info: *mut libc::siginfo_t) -> bool {
    // With SA_NODEFER a second signal would interrupt this one before the default action is set, and queue itself without end.
    let mask = change_mask(libc::SIG_BLOCK, BLOCKED);
    let changes = CHANGES.lock();
    let flags = handler.flags.load(Relaxed);
    let is_first = flags & ONCE != 0;
    if is_first {
        handler.flags.store(flags & !ONCE | SPENT, Relaxed);
        // SAFETY: an all-zero sigaction is the default action.
        unsafe {
            let default: libc::sigaction = std::mem::zeroed();
            libc_calls::sigaction(signal, &raw const default, std::ptr::null_mut());
        }
    } else {
        queue(signal, info);
    }
    drop(changes);
    change_mask(libc::SIG_SETMASK, mask);
    is_first
}

/// S4: the signal comes to this thread again.
fn queue(signal: c_int, info: *mut libc::siginfo_t) {
    // SAFETY: the kernel reads `info`, which it has filled.
    unsafe {
        let (pid, tid) = (sys!(libc::SYS_getpid), sys!(libc::SYS_gettid));
        if sys!(libc::SYS_rt_tgsigqueueinfo, pid, tid, signal, info) == 0 {
            return;
        }
        (*info).si_code = libc::SI_USER;
        if sys!(libc::SYS_rt_tgsigqueueinfo, pid, tid, signal, info) != 0 {
            // Refused by a filter.
            sys!(libc::SYS_tgkill, pid, tid, signal);
        }
    }
}

/// Checks for handlers that were set without the library; less and less often, as that takes a system call for each
/// signal.
pub fn find_foreign_handlers() {
    static LOOKS: AtomicU64 = AtomicU64::new(0);
    if section::must_block() || !(LOOKS.fetch_add(1, Relaxed) + 1).is_power_of_two() {
        return;
    }
    let is_other = |signal: &c_int| {
        // The kernel's `sigaction`: the handler is its first word.
        let mut action = [0usize; 4];
        // SAFETY: eight bytes of mask; the structure has room for it.
        let result = unsafe { sys!(libc::SYS_rt_sigaction, *signal, 0, action.as_mut_ptr(), 8) };
        result == 0 && is_function(action[0]) && action[0] != ours()
    };
    if (1..SIGNALS as c_int).filter(|signal| is_delayed(*signal)).any(|signal| is_other(&signal)) {
        section::block_from_now_on();
    }
}
