//! Whether libc may act on a request to cancel the calling thread.

use std::ffi::c_int;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

pub const ENABLE: c_int = 0;
pub const DISABLE: c_int = 1;
pub const DEFERRED: c_int = 0;
pub const ASYNCHRONOUS: c_int = 1;

/// Disables cancellation; returns what [`restore`] needs.
#[inline]
pub fn disable() -> c_int {
    let mut old = ENABLE;
    // SAFETY: `old` is ours to write. Acts on nothing.
    unsafe { pthread_setcancelstate(DISABLE, &mut old) };
    old
}

/// Sets what [`disable`] found. Acts on nothing, as the library does its work only while every thread's type is
/// deferred (cancel.C4).
#[inline]
pub fn restore(state: c_int) {
    if state == ENABLE {
        // SAFETY: a null pointer: the old state is not asked for.
        unsafe { pthread_setcancelstate(ENABLE, std::ptr::null_mut()) };
    }
}
