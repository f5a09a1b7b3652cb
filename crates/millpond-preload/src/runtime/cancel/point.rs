//! Calls that are cancellation points, and calls that are not: `cancel.C2`.

use std::ffi::{c_int, c_void};

use crate::runtime::cancel::state::{DEFERRED, ENABLE, disable, restore};
use crate::runtime::thread::{self, Record};

unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn _pthread_cleanup_push(buffer: *mut CleanupBuffer, routine: Cleanup, argument: *mut c_void);
    fn _pthread_cleanup_pop(buffer: *mut CleanupBuffer, execute: c_int);
}

/// A cancellation point: acts on a request, if there is one and cancellation is enabled.
#[inline]
pub fn point() {
    match thread::try_record().map(Record::request).filter(|request| request.is_asked()) {
        Some(request) => request.act(|| {
            act();
            let state = disable();
            restore(state);
            state == ENABLE
        }),
        None => act(),
    }
}

fn act() {
    // SAFETY: cancel.C2: the callers of points hold nothing.
    unsafe { pthread_testcancel() };
}

/// Makes a call that must not be a cancellation point, though the called function is one.
pub fn without<R: Copy>(call: impl FnOnce() -> R) -> R {
    let state = disable();
    let result = call();
    restore(state);
    result
}

pub type Cleanup = unsafe extern "C" fn(*mut c_void);

/// libc's entry in the thread's list of cleanup routines.
#[repr(C)]
struct CleanupBuffer {
    routine: Option<Cleanup>,
    argument: *mut c_void,
    cancel_type: c_int,
    previous: *mut CleanupBuffer,
}

/// Makes a call that may not return, because the thread ends in it. `cleanup` is called after it in
/// any case, and twice if the thread ends just then.
///
/// # Safety
///
/// `cleanup` accepts `argument`, on this thread.
pub unsafe fn with_cleanup<R: Copy>(
    cleanup: Cleanup,
    argument: *mut c_void,
    call: impl FnOnce() -> R,
) -> R {
    let mut buffer = CleanupBuffer {
        routine: None,
        argument: std::ptr::null_mut(),
        cancel_type: DEFERRED,
        previous: std::ptr::null_mut(),
    };
    let buffer = &raw mut buffer;
    // SAFETY: libc fills the buffer and uses it until it is popped, or until unwinding leaves this
    // frame; then libc calls the routine first.
    unsafe { _pthread_cleanup_push(buffer, cleanup, argument) };
    let result = call();
    // SAFETY: as the caller vouches. The buffer was pushed above, and everything pushed since has
    // been popped.
    unsafe {
        cleanup(argument);
        _pthread_cleanup_pop(buffer, 0);
    }
    result
}
