//! Threads of asynchronous cancel type: `cancel.C4`.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};

use crate::runtime::cancel::point::point;
use crate::runtime::cancel::state::{ASYNCHRONOUS, DEFERRED, DISABLE};
use crate::runtime::sys::sys;
use crate::runtime::thread::{self, Record};

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// glibc's signal for cancellation.
const SIGNAL: c_int = 32;
/// Time that [`on_signal`] gives the thread to leave the library before it checks again. Chosen,
/// not measured.
const PAUSE_NS: i64 = 1_000_000;

/// The program sets the calling thread's cancel type; returns the old one.
pub fn set_type(kind: c_int) -> c_int {
    let record = thread::record();
    if kind == ASYNCHRONOUS {
        text::find();
    }
    let was = record.set_asynchronous(kind == ASYNCHRONOUS);
    if kind == ASYNCHRONOUS {
        // Either `requested` sees the type, or this sees the request.
        fence(SeqCst);
        point();
    }
    if was { ASYNCHRONOUS } else { DEFERRED }
}

/// The program has set the calling thread's cancel state.
pub fn note_state(state: c_int) {
    let record = thread::record();
    record.set_cancel_disabled(state == DISABLE);
    if record.is_asynchronous() {
        // As in `set_type`.
        fence(SeqCst);
        point();
    }
}

/// After libc's `pthread_cancel` of that thread.
pub fn requested(thread: libc::pthread_t) {
    // Libc has noted the request before. Pairs with those in `set_type`, `note_state`, and in
    // `CancelRequest::act`.
    fence(SeqCst);
    thread::request_cancel(thread, |record| {
        if record.is_asynchronous() && !record.is_cancel_disabled() && watch_signal() {
            poke(record.tid());
        }
    });
    // SAFETY: no precondition.
    if thread == unsafe { libc::pthread_self() } && thread::record().is_asynchronous() {
        point();
    }
}

/// Its address is the value of the library's own signals, to distinguish them from libc's.
static MARK: u8 = 0;
/// libc's own handler of the signal.
static LIBC_HANDLER: AtomicUsize = AtomicUsize::new(0);
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

/// The kernel's `sigaction`.
#[repr(C)]
#[derive(Default)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// The kernel's `siginfo`: the fields that `rt_tgsigqueueinfo` and timers fill.
#[repr(C)]
struct TimerSignalInfo {
    signal: c_int,
    errno: c_int,
    code: c_int,
    _padding: c_int,
    pid: c_int,
    uid: c_int,
    value: usize,
    _rest: [u64; 12],
}

/// Puts [`on_signal`] before libc's handler, which libc has set at its first `pthread_cancel`.
fn watch_signal() -> bool {
    // Acquire: pairs with the Release below.
    if IS_WATCHED.load(Acquire) {
        return true;
    }
    let mut action = Action::default();
    // SAFETY: the structures are the kernel's. The new action is libc's but for the handler, which
    // takes the same three arguments.
    unsafe {
        if sys!(libc::SYS_rt_sigaction, SIGNAL, 0, &raw mut action, 8) != 0 || action.handler <= 1 {
            return false;
        }
        let ours = on_signal as *const () as usize;
        if action.handler != ours {
            // Two threads may come here at once: both store the same.
            LIBC_HANDLER.store(action.handler, Relaxed);
            action.handler = ours;
            action.flags |= (libc::SA_SIGINFO | libc::SA_RESTART) as u64;
            // The system call orders: a thread that runs the handler finds libc's.
            sys!(libc::SYS_rt_sigaction, SIGNAL, &raw const action, 0, 8);
        }
    }
    IS_WATCHED.store(true, Release);
    true
}

/// Runs [`on_signal`] on the thread `tid`. If another thread has that id by now, the handler does
/// nothing.
fn poke(tid: c_int) {
    // SAFETY: an all-zero structure of integers is valid.
    let mut info: TimerSignalInfo = unsafe { std::mem::zeroed() };
    info.signal = SIGNAL;
    info.code = libc::SI_QUEUE;
    info.value = (&raw const MARK).addr();
    // SAFETY: the kernel reads `info`, whose size is that of its own structure.
    unsafe {
        let pid = sys!(libc::SYS_getpid);
        info.pid = pid as c_int;
        sys!(libc::SYS_rt_tgsigqueueinfo, pid, tid, SIGNAL, &raw const info);
    }
}

/// cancel.C4. Passes libc's signals to libc. On the library's signals, a thread of asynchronous type acts on a
/// request.
unsafe extern "C-unwind" fn on_signal(
    signal: c_int,
    info: *mut TimerSignalInfo,
    context: *mut c_void,
) {
    // SAFETY: the kernel's.
    let (code, value) = unsafe { ((*info).code, (*info).value) };
    let is_ours =
        matches!(code, libc::SI_QUEUE | libc::SI_TIMER) && value == (&raw const MARK).addr();
    if !is_ours {
        // SAFETY: libc's handler, with the kernel's arguments.
        unsafe {
            let handler: unsafe extern "C-unwind" fn(c_int, *mut TimerSignalInfo, *mut c_void) =
                std::mem::transmute(LIBC_HANDLER.load(Relaxed));
            handler(signal, info, context);
        }
        return;
    }
    let Some(record) = thread::try_record().filter(|record| record.is_asynchronous()) else {
        return;
    };
    // SAFETY: the kernel's context.
    let is_busy =
        record.inside_depth() > 0 || record.is_reading() || text::holds(unsafe { pc(context) });
    if is_busy {
        repeat_signal(record);
    } else {
        // SAFETY: the thread is in the program's code, or where libc acts on a request itself.
        unsafe { pthread_testcancel() };
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn pc(context: *mut c_void) -> usize {
    // SAFETY: the caller's duty.
    unsafe {
        (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] as usize
    }
}

#[cfg(target_arch = "aarch64")]
unsafe fn pc(context: *mut c_void) -> usize {
    // SAFETY: the caller's duty.
    unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.pc as usize }
}

/// The kernel's `sigevent`.
#[repr(C)]
struct TimerEvent {
    value: usize,
    signal: c_int,
    notify: c_int,
    tid: c_int,
    _rest: [c_int; 11],
}

/// Repeats the signal later, by a timer of the thread's own. In the handler.
fn repeat_signal(record: &Record) {
    let timer = record.timer().or_else(|| {
        let value = (&raw const MARK).addr();
        let (notify, tid) = (libc::SIGEV_THREAD_ID, record.tid());
        let event = TimerEvent { value, signal: SIGNAL, notify, tid, _rest: [0; 11] };
        let mut timer = 0 as c_int;
        // SAFETY: both are ours, of the kernel's sizes.
        let made = unsafe {
            sys!(libc::SYS_timer_create, libc::CLOCK_MONOTONIC, &raw const event, &raw mut timer)
        };
        (made == 0).then(|| record.set_timer(timer))
    });
    // Without a timer, the next cancellation point acts on the request.
    let Some(timer) = timer else { return };
    let pause: [i64; 4] = [0, 0, 0, PAUSE_NS];
    // SAFETY: interval and value, two times each.
    unsafe { sys!(libc::SYS_timer_settime, timer, 0, &raw const pause, 0) };
}

mod text {
    //! The address range of this library's instructions.

    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

    use crate::runtime::{elf, section};

    static START: AtomicUsize = AtomicUsize::new(0);
    static END: AtomicUsize = AtomicUsize::new(0);

    /// Called before any thread has the asynchronous type.
    pub fn find() {
        // Acquire: pairs with the Release below.
        if END.load(Acquire) == 0
            && let Some(text) = section::run(|_| elf::own_text())
        {
            START.store(text.start, Relaxed);
            // Release: a thread that reads the end finds the start.
            END.store(text.end, Release);
        }
    }

    pub fn holds(address: usize) -> bool {
        (START.load(Relaxed)..END.load(Relaxed)).contains(&address)
    }
}
