//! C's types and constants, as the table of calls writes them.

pub use std::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
pub use std::ptr::null_mut;

pub use libc::{FILE, mode_t as Mode, off64_t as Off, sighandler_t};

/// A path, or another string that ends with NUL.
pub type Text = *const c_char;
pub type Bytes = *const c_void;
/// Of a user or a group.
pub type Id = libc::uid_t;
pub type Argv = *const *const c_char;
pub type Vectors = *const libc::iovec;
pub type Stat = *mut libc::stat64;
pub type Start = extern "C" fn(*mut c_void) -> *mut c_void;

pub const HERE: c_int = libc::AT_FDCWD;
pub const NOFOLLOW: c_int = libc::AT_SYMLINK_NOFOLLOW;
pub const EMPTY_PATH: c_int = libc::AT_EMPTY_PATH;
