//! `fopen` and its kin.
//!
//! libc's streams read and write inside libc, where no hook sees them. So files that streams open are the kernel's, and
//! a served file is handed to the kernel before it gets a stream. libc closes the numbers of its streams unseen: `fclose`
//! and `freopen` have the library forget them before.

use std::ffi::{CStr, c_char, c_int};

use libc::FILE;

use crate::files::table::{self, NumberState};
use crate::files::{process_locks, registry, writeback_policy};
use crate::hooks::open::before_open_by_libc;
use crate::page_cache;
use crate::runtime::sys::fail;
use crate::runtime::{libc_calls, section, thread};

unsafe extern "C" {
    fn fileno(stream: *mut FILE) -> c_int;
}

/// Before libc opens `path`: the flags that it opens with, as far as leases matter.
fn before_opening(path: *const c_char, mode: *const c_char) {
    if path.is_null() || mode.is_null() {
        return;
    }
    // SAFETY: the caller of the hook vouches for the text.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    let is_updating = mode.contains(&b'+');
    let flags = match mode.first() {
        Some(b'r') if is_updating => libc::O_RDWR,
        Some(b'r') => libc::O_RDONLY,
        Some(b'w') => libc::O_RDWR | libc::O_TRUNC,
        _ => libc::O_RDWR,
    };
    before_open_by_libc(path, flags);
}

pub unsafe fn fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE {
    before_opening(path, mode);
    // SAFETY: as the caller vouches to `fopen64`.
    let stream = unsafe { libc_calls::fopen64(path, mode) };
    if !stream.is_null() {
        // SAFETY: just opened.
        forget_former(unsafe { fileno(stream) });
    }
    stream
}

/// libc has opened a file of its own at `fd`: the state of the number is that of a file that was closed where no hook saw it.
fn forget_former(fd: c_int) {
    if page_cache::is_on() {
        page_cache::forget(fd);
    }
    if matches!(table::get(fd), NumberState::Unserved | NumberState::Left | NumberState::File(_))
        && !thread::record().is_inside()
    {
        section::run(|_| registry::lock().forget_lost(fd));
    }
}

/// Before libc closes the number of its stream.
unsafe fn before_libc_closes(stream: *mut FILE) -> Option<writeback_policy::Closing> {
    if stream.is_null() {
        return None;
    }
    // SAFETY: the stream is open until libc closes it.
    let fd = unsafe { fileno(stream) };
    if page_cache::is_on() && fd >= 0 {
        // SAFETY: as above.
        unsafe { libc::fflush(stream) };
        page_cache::forget(fd);
        return None;
    }
    match table::get(fd) {
        NumberState::File(_) | NumberState::Claimed => {}
        slot @ (NumberState::Unserved | NumberState::Left) if !table::forget(fd, slot) => {}
        _ => return None,
    }
    // SAFETY: as above.
    unsafe { libc::fflush(stream) };
    let closing = writeback_policy::before_close(fd);
    section::run(|_| registry::lock().forget(fd));
    closing
}

pub unsafe fn fclose(stream: *mut FILE) -> c_int {
    // SAFETY: as the caller vouches to `fclose`.
    let closing = unsafe { before_libc_closes(stream) };
    // SAFETY: as above.
    let result = unsafe { libc_calls::fclose(stream) };
    process_locks::close_retired();
    match closing.and_then(writeback_policy::Closing::end) {
        Some(errno) if result == 0 => fail(errno) as c_int,
        _ => result,
    }
}

pub unsafe fn freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
    // SAFETY: as the caller vouches to `freopen64`.
    let stream = unsafe {
        before_libc_closes(stream);
        before_opening(path, mode);
        libc_calls::freopen64(path, mode, stream)
    };
    process_locks::close_retired();
    stream
}
