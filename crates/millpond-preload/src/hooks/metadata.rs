//! Calls that set what a later write would spoil: times (a write sets them), modes (it strips
//! setuid bits), attributes (it strips capabilities); and those that put a file in another's place,
//! after which others read it. Before each, what waits in the cache is written back.

use std::ffi::{c_char, c_int, c_void};

use crate::files::{late, mode_back};
use crate::runtime::libc_calls;

/// Before a call on a file that is named in the way of the `*at` calls.
pub fn settle_at(dir: c_int, path: *const c_char, flags: c_int) {
    if !mode_back::is_any() {
        return;
    }
    if path.is_null() || flags & libc::AT_EMPTY_PATH != 0 {
        late::settle(dir);
    }
    if !path.is_null() {
        late::settle_path(dir, path, flags & libc::AT_SYMLINK_NOFOLLOW == 0);
    }
}

const HERE: c_int = libc::AT_FDCWD;
const NOFOLLOW: c_int = libc::AT_SYMLINK_NOFOLLOW;

/// Each with what it does before libc's own function of that name.
macro_rules! settled {
    ($($name:ident($($arg:ident: $ty:ty),*) = $before:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> c_int {
            $before;
            // SAFETY: as the caller vouches to the function of this name.
            unsafe { libc_calls::$name($($arg),*) }
        }
    )*};
}

type Text = *const c_char;
type Bytes = *const c_void;

settled! {
    fchmod(fd: c_int, mode: libc::mode_t) = late::settle(fd);
    chmod(path: Text, mode: libc::mode_t) = settle_at(HERE, path, 0);
    fchmodat(dir: c_int, path: Text, mode: libc::mode_t, flags: c_int)
        = settle_at(dir, path, flags);
    fchown(fd: c_int, owner: u32, group: u32) = late::settle(fd);
    chown(path: Text, owner: u32, group: u32) = settle_at(HERE, path, 0);
    lchown(path: Text, owner: u32, group: u32) = settle_at(HERE, path, NOFOLLOW);
    fchownat(dir: c_int, path: Text, owner: u32, group: u32, flags: c_int)
        = settle_at(dir, path, flags);
    futimens(fd: c_int, times: Bytes) = late::settle(fd);
    futimes(fd: c_int, times: Bytes) = late::settle(fd);
    utimensat(dir: c_int, path: Text, times: Bytes, flags: c_int) = settle_at(dir, path, flags);
    futimesat(dir: c_int, path: Text, times: Bytes) = settle_at(dir, path, 0);
    utimes(path: Text, times: Bytes) = settle_at(HERE, path, 0);
    lutimes(path: Text, times: Bytes) = settle_at(HERE, path, NOFOLLOW);
    utime(path: Text, times: Bytes) = settle_at(HERE, path, 0);
    fsetxattr(fd: c_int, name: Text, value: Bytes, len: usize, flags: c_int) = late::settle(fd);
    setxattr(path: Text, name: Text, value: Bytes, len: usize, flags: c_int)
        = settle_at(HERE, path, 0);
    lsetxattr(path: Text, name: Text, value: Bytes, len: usize, flags: c_int)
        = settle_at(HERE, path, NOFOLLOW);
    fremovexattr(fd: c_int, name: Text) = late::settle(fd);
    removexattr(path: Text, name: Text) = settle_at(HERE, path, 0);
    lremovexattr(path: Text, name: Text) = settle_at(HERE, path, NOFOLLOW);
    link(old: Text, new: Text) = settle_at(HERE, old, NOFOLLOW);
    linkat(old_dir: c_int, old: Text, new_dir: c_int, new: Text, flags: c_int)
        = settle_at(old_dir, old, flags & libc::AT_EMPTY_PATH);
    rename(old: Text, new: Text) = settle_at(HERE, old, NOFOLLOW);
    renameat(old_dir: c_int, old: Text, new_dir: c_int, new: Text)
        = settle_at(old_dir, old, NOFOLLOW);
    renameat2(old_dir: c_int, old: Text, new_dir: c_int, new: Text, flags: u32)
        = settle_both(old_dir, old, new_dir, new, flags);
}

/// With `RENAME_EXCHANGE` there are two.
fn settle_both(old_dir: c_int, old: Text, new_dir: c_int, new: Text, flags: u32) {
    settle_at(old_dir, old, NOFOLLOW);
    if flags & libc::RENAME_EXCHANGE != 0 {
        settle_at(new_dir, new, NOFOLLOW);
    }
}
