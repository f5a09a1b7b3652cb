//! Error texts, and faults in the caller's memory.

use std::ffi::{c_char, c_int};

use crate::call::{call, last_text, write_text};

/// The version of the library; MILLPOND_VERSION is the header's. A static string.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Writes the reason of the last failed call of this thread to `text`: the operation, and how much of it is
/// done. Writes at most `bytes` bytes with the terminating NUL, as `snprintf(3)` does. The text is for
/// people; for a program the returned errno suffices (see `strerror(3)`).
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

/// Gives the resume address for a program that wants -EFAULT for inaccessible memory instead of SIGSEGV or
/// SIGBUS. The program's handler of both signals calls this with the interrupted program counter; if the
/// result is not 0, it sets the program counter to it and returns. The interrupted call then returns
/// -EFAULT.
///
/// Async-signal-safe.
///
/// Returns the address to resume at, or 0: the fault was not the library's access to the caller's memory.
#[unsafe(no_mangle)]
pub extern "C" fn millpond_fault_resume_address(program_counter: usize) -> usize {
    millpond::fault::resume_address(program_counter).unwrap_or(0)
}
