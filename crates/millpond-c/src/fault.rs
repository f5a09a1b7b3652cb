//! Bad memory, and why calls fail.

use std::ffi::{c_char, c_int};

use crate::call::{call, last_text, write_text};

/// The version of the library, as MILLPOND_VERSION is that of the header. A string that stays.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Writes why the last call of this thread that failed did so: what it was about, and what of it is done.
/// At most `bytes` bytes, the NUL that ends it included, as `snprintf(3)` does. What a call returns that
/// fails says enough to go on (see `strerror(3)`); this is for people.
///
/// Returns the length of the text, 0 where no call has failed, or
/// -EFAULT      `text` is NULL and `bytes` is not 0
///
/// # Safety
///
/// `text` is valid for writes of `bytes` bytes, or NULL and `bytes` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_error_text(text: *mut c_char, bytes: usize) -> c_int {
    call(|| {
        let last = last_text().unwrap_or_default();
        // SAFETY: our caller's promise.
        unsafe { write_text(&last, text, bytes) }
    }) as c_int
}

/// For a program that wants -EFAULT for memory that can't be accessed, instead of SIGSEGV or SIGBUS: its
/// handler of both calls this with the interrupted program counter, and if the result is not 0, sets the
/// program counter to it and returns. The call that was interrupted then returns -EFAULT.
///
/// Async-signal-safe.
///
/// Returns where to go on, or 0: the fault was not one of the library with the caller's memory; always 0 on
/// AArch64, where such a fault can't be turned into an error yet.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_fault_resume_address(program_counter: usize) -> usize {
    millpond::fault::resume_address(program_counter).unwrap_or(0)
}
