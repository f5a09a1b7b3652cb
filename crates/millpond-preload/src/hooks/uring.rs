//! io_uring: what a program reads and writes by a ring is seen by nobody but the kernel.
//!
//! So before it sets one up, its files are left to the kernel, and stay there: `Registry::leave_all`.
//! liburing makes its system calls itself, past libc; so the functions that set a ring up are replaced.
//! By number is in `by_number`.

use std::ffi::{c_int, c_void};

use crate::files::registry::leave_all;
use crate::runtime::libc_calls;

macro_rules! rings {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> c_int {
            leave_all();
            // SAFETY: as the caller vouches to the function of this name.
            unsafe { libc_calls::$name($($arg),*) }
        }
    )*};
}

rings! {
    io_uring_queue_init(entries: u32, ring: *mut c_void, flags: u32);
    io_uring_queue_init_params(entries: u32, ring: *mut c_void, params: *mut c_void);
    io_uring_queue_init_mem(entries: u32, ring: *mut c_void, params: *mut c_void,
        memory: *mut c_void, bytes: usize);
    io_uring_setup(entries: u32, params: *mut c_void);
}
