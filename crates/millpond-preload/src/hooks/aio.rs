//! Linux AIO, by the functions of libaio.
//!
//! They are system calls with another way to fail: they return the negative errno. libaio makes
//! them itself, past libc; so its functions are replaced.

use std::ffi::{c_int, c_long};

use crate::aio::iocb::{Event, Handle, Iocb};
use crate::aio::submit as aio;
use crate::fork::ensure_initialised;

type Callback = unsafe extern "C" fn(Handle, *mut Iocb, c_long, c_long);

/// The last argument of the system call `io_pgetevents`.
#[repr(C)]
struct Signals {
    set: *const libc::sigset_t,
    bytes: usize,
}

/// The size of the kernel's signal sets.
const SIGNALS_BYTES: usize = 8;

pub unsafe fn io_setup(capacity: c_int, handle: *mut Handle) -> c_int {
    ensure_initialised();
    // SAFETY: as the caller vouches to `io_setup`.
    unsafe { aio::set_up(capacity as u32, handle) as c_int }
}

pub unsafe fn io_destroy(handle: Handle) -> c_int {
    ensure_initialised();
    aio::destroy(handle) as c_int
}

pub unsafe fn io_submit(handle: Handle, count: c_long, blocks: *const *mut Iocb) -> c_int {
    ensure_initialised();
    // SAFETY: as the caller vouches to `io_submit`.
    unsafe { aio::submit(handle, count as isize, blocks) as c_int }
}

pub unsafe fn io_cancel(handle: Handle, block: *mut Iocb, result: *mut Event) -> c_int {
    ensure_initialised();
    // SAFETY: as the caller vouches to `io_cancel`.
    unsafe { aio::cancel(handle, block, result) as c_int }
}

/// `io_getevents`, and with `signals` `io_pgetevents`: as the system calls.
pub unsafe fn get_events(
    handle: Handle,
    min: c_long,
    max: c_long,
    events: *mut Event,
    timeout: *const libc::timespec,
    signals: Option<usize>,
) -> c_int {
    ensure_initialised();
    let (min, max) = (min as isize, max as isize);
    // SAFETY: the caller's duty.
    unsafe { aio::get_events(handle, min, max, events, timeout, signals) as c_int }
}

pub unsafe fn io_pgetevents(
    handle: Handle,
    min: c_long,
    max: c_long,
    events: *mut Event,
    timeout: *const libc::timespec,
    set: *const libc::sigset_t,
) -> c_int {
    let signals = Signals { set, bytes: SIGNALS_BYTES };
    let signals = Some((&raw const signals).expose_provenance());
    // SAFETY: as the caller vouches to `io_pgetevents`.
    unsafe { get_events(handle, min, max, events, timeout, signals) }
}

pub unsafe fn io_queue_init(capacity: c_int, handle: *mut Handle) -> c_int {
    if capacity <= 0 {
        return -libc::EINVAL;
    }
    // SAFETY: as the caller vouches to `io_queue_init`.
    unsafe {
        handle.write(0);
        io_setup(capacity, handle)
    }
}

/// Calls back for all completions that there are.
pub unsafe fn io_queue_run(handle: Handle) -> c_int {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let mut event = Event::default();
    loop {
        // SAFETY: `event` and `now` are ours; the block's data is a callback, as the caller
        // vouches.
        unsafe {
            let got = get_events(handle, 0, 1, &raw mut event, &raw const now, None);
            if got != 1 {
                return got;
            }
            let (block, callback) = event.callback();
            let call: Callback = std::mem::transmute(callback);
            call(handle, block, event.result as c_long, event.more as c_long);
        }
    }
}
