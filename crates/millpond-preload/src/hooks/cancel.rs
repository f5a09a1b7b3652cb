//! The functions by which a program requests cancellation, and enables or disables it; see `cancel`.

use std::ffi::c_int;

use crate::runtime::cancel::asynchronous::{note_state, requested, set_type};
use crate::runtime::cancel::state::{ASYNCHRONOUS, DEFERRED};
use crate::runtime::libc_calls;

pub unsafe fn pthread_cancel(thread: libc::pthread_t) -> c_int {
    // SAFETY: as the caller vouches to `pthread_cancel`.
    let result = unsafe { libc_calls::pthread_cancel(thread) };
    if result == 0 {
        requested(thread);
    }
    result
}

pub unsafe fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int {
    if !matches!(kind, DEFERRED | ASYNCHRONOUS) {
        return libc::EINVAL;
    }
    let was = set_type(kind);
    if !old.is_null() {
        // SAFETY: the caller's to write.
        unsafe { old.write(was) };
    }
    0
}

pub unsafe fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int {
    // SAFETY: as the caller vouches to `pthread_setcancelstate`.
    let result = unsafe { libc_calls::pthread_setcancelstate(state, old) };
    if result == 0 {
        note_state(state);
    }
    result
}
