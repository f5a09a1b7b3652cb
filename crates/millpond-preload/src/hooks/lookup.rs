//! Lookups of libc's functions: a program finds the hooks.
//!
//! A program that looks a function up in libc's own handle (`ctypes.CDLL("libc.so.6").pwrite`)
//! would go past the hooks. So `dlsym` and `dlvsym` are replaced: where a lookup in a handle ends
//! at the very definition that one of our functions stands before, the program gets ours. If another library's definition comes between ours and libc's, it does not: that one looks for
//! libc's, and ours calls it.
//!
//! Lookups with `RTLD_DEFAULT` and `RTLD_NEXT` depend on the caller. They are left to libc, by a
//! jump that leaves the caller's address where it was; the first finds our functions anyway, and
//! the second is how a definition finds the next. `dlopen` depends on its caller, too.
//!
//! `RTLD_DEEPBIND` has a library find libc's functions before ours, and so does a name space of its
//! own (`dlmopen`). The flag is not dropped: a program that sets it has symbols of the same names as another library, and would break. Instead all files are left to the kernel before
//! (`Registry::release_all_files`).

use std::ffi::{CStr, c_char, c_int, c_long, c_void};

use crate::hooks::process::release_all_files;
use crate::runtime::elf::{LIBC, Lookup, home_of, libcs, next, own_object};
use crate::runtime::libc_calls::slots;
use crate::runtime::thread;

type VersionLookup =
    unsafe extern "C-unwind" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

fn depends_on_caller(handle: *mut c_void) -> bool {
    [libc::RTLD_DEFAULT, libc::RTLD_NEXT].contains(&handle)
}

pub extern "C" fn route_dlsym(handle: *mut c_void) -> *const c_void {
    if depends_on_caller(handle) {
        libcs(&slots::dlsym, c"dlsym")
    } else {
        look_up as Lookup as *const c_void
    }
}

pub extern "C" fn route_dlvsym(handle: *mut c_void) -> *const c_void {
    if depends_on_caller(handle) {
        libcs(&slots::dlvsym, c"dlvsym")
    } else {
        look_up_version as VersionLookup as *const c_void
    }
}

unsafe extern "C-unwind" fn look_up(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: libc's function of that signature; as the caller vouches to `dlsym`.
    unsafe {
        let find = std::mem::transmute::<*mut c_void, Lookup>(libcs(&slots::dlsym, c"dlsym"));
        let found = find(handle, name);
        if found.is_null() { found } else { hook_of(found, CStr::from_ptr(name)) }
    }
}

unsafe extern "C-unwind" fn look_up_version(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    // SAFETY: as in `look_up`.
    unsafe {
        let find =
            std::mem::transmute::<*mut c_void, VersionLookup>(libcs(&slots::dlvsym, c"dlvsym"));
        let found = find(handle, name, version);
        if found.is_null() { found } else { hook_of(found, CStr::from_ptr(name)) }
    }
}

/// The result for a program that has found `found` under this name.
fn hook_of(found: *mut c_void, name: &CStr) -> *mut c_void {
    if thread::record().is_inside() {
        return found;
    }
    let Some(ours) = own_object().and_then(|object| object.find(name)) else { return found };
    let Some(home) = home_of(found) else { return found };
    let next = next(name);
    if next.is_null() {
        match home.file_name {
            // Its functions are system calls, and ours make them themselves.
            b"libaio.so.1" => return ours,
            // Ours have nothing to call on.
            name if name.starts_with(b"liburing.so") => release_all_files(),
            _ => {}
        }
        return found;
    }
    if LIBC.contains(&home.file_name) && home_of(next).is_some_and(|other| other.base == home.base)
    {
        return ours;
    }
    found
}

pub extern "C" fn route_dlopen(path: *const c_char, flags: c_int) -> *const c_void {
    if flags & libc::RTLD_DEEPBIND != 0 && !path.is_null() {
        release_all_files();
    }
    libcs(&slots::dlopen, c"dlopen")
}

pub extern "C" fn route_dlmopen(space: c_long) -> *const c_void {
    if space != libc::LM_ID_BASE {
        release_all_files();
    }
    libcs(&slots::dlmopen, c"dlmopen")
}
