//! The functions by which a program requests cancellation, and chooses its type; see `cancel`.

use std::ffi::c_int;

use crate::retirement;
use crate::runtime::cancel::state::ASYNCHRONOUS;
use crate::runtime::{libc_calls, thread};

pub unsafe fn pthread_cancel(thread: libc::pthread_t) -> c_int {
    // SAFETY: as the caller vouches to `pthread_cancel`.
    let result = unsafe { libc_calls::pthread_cancel(thread) };
    if result == 0 {
        thread::request_cancel(thread);
    }
    result
}

/// Before the calling thread gets a cancel type.
pub fn before_type(kind: c_int) {
    if kind == ASYNCHRONOUS {
        retirement::retire();
    }
}
