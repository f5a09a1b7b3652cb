//! Linux AIO, by the functions of libaio.
//!
//! They are system calls with another way to fail: they return the negative errno. libaio makes them
//! itself, past libc; so its functions are replaced. `syscall` by number is in `by_number`.

use std::ffi::{c_int, c_long};

use crate::aio::block::{Block, Event};
use crate::aio::submit::{self as aio, Wanted};
use crate::fork::ensure_initialised;

type Handle = usize;
type Callback = unsafe extern "C" fn(Handle, *mut Block, c_long, c_long);

/// The last argument of the system call `io_pgetevents`.
#[repr(C)]
struct Signals {
    set: *const libc::sigset_t,
    bytes: usize,
}

/// The size of the kernel's signal sets.
const SIGNALS_BYTES: usize = 8;

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_setup(capacity: c_int, handle: *mut Handle) -> c_int {
    ensure_initialised();
    // SAFETY: as the caller vouches to `io_setup`.
    unsafe { aio::set_up(capacity as u32, handle) as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_destroy(handle: Handle) -> c_int {
    ensure_initialised();
    aio::destroy(handle) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_submit(
    handle: Handle,
    count: c_long,
    blocks: *const *mut Block,
) -> c_int {
    ensure_initialised();
    // SAFETY: as the caller vouches to `io_submit`.
    unsafe { aio::submit(handle, count as isize, blocks) as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_cancel(
    handle: Handle,
    block: *mut Block,
    result: *mut Event,
) -> c_int {
    ensure_initialised();
    // SAFETY: as the caller vouches to `io_cancel`.
    unsafe { aio::cancel(handle, block, result) as c_int }
}

/// `io_getevents`, and with `signals` `io_pgetevents`: as the system calls.
pub unsafe fn get_events(
    handle: Handle,
    min: isize,
    max: isize,
    events: *mut Event,
    timeout: *const libc::timespec,
    signals: Option<usize>,
) -> isize {
    ensure_initialised();
    // SAFETY: the caller's duty.
    unsafe { aio::get_events(handle, Wanted { min, max, events, timeout, signals }) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_getevents(
    handle: Handle,
    min: c_long,
    max: c_long,
    events: *mut Event,
    timeout: *const libc::timespec,
) -> c_int {
    // SAFETY: as the caller vouches to `io_getevents`.
    unsafe { get_events(handle, min as isize, max as isize, events, timeout, None) as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_pgetevents(
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
    unsafe { get_events(handle, min as isize, max as isize, events, timeout, signals) as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_queue_init(capacity: c_int, handle: *mut Handle) -> c_int {
    if capacity <= 0 {
        return -libc::EINVAL;
    }
    // SAFETY: as the caller vouches to `io_queue_init`.
    unsafe {
        handle.write(0);
        io_setup(capacity, handle)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_queue_release(handle: Handle) -> c_int {
    ensure_initialised();
    aio::destroy(handle) as c_int
}

/// Calls back for all completions that there are.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_queue_run(handle: Handle) -> c_int {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let mut event = Event::default();
    loop {
        // SAFETY: `event` and `now` are ours; the block's data is a callback, as the caller vouches.
        unsafe {
            let got = io_getevents(handle, 0, 1, &raw mut event, &raw const now);
            if got != 1 {
                return got;
            }
            let (block, callback) = event.callback();
            let call: Callback = std::mem::transmute(callback);
            call(handle, block, event.result as c_long, event.more as c_long);
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_queue_wait(
    handle: Handle,
    timeout: *const libc::timespec,
) -> c_int {
    // SAFETY: as the caller vouches to `io_queue_wait`.
    unsafe { io_getevents(handle, 0, 0, std::ptr::null_mut(), timeout) }
}
