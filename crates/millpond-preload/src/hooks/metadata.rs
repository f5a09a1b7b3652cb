//! Calls that set attributes which a later write would change: times (a write sets them), modes (it strips setuid bits),
//! extended attributes (it strips capabilities); and those that rename a file over another one, after which other processes
//! read it. Before each, dirty pages are written back.

use crate::files::{mode_back, multi_open, writeback_policy};
use crate::runtime::c::{NOFOLLOW, Text, c_int};

/// Before a call on a file that is named in the way of the `*at` calls.
pub fn settle_at(dir: c_int, path: Text, flags: c_int) {
    if !mode_back::is_any() {
        return;
    }
    if path.is_null() || flags & libc::AT_EMPTY_PATH != 0 {
        writeback_policy::flush_before_kernel_call(dir);
    }
    if !path.is_null() {
        writeback_policy::settle_path(dir, path, flags & libc::AT_SYMLINK_NOFOLLOW == 0);
    }
}

/// The same before its rights change, by which a shared description could no longer be parted
/// (`multi_open.G3`).
pub fn settle_rights_at(dir: c_int, path: Text, flags: c_int) {
    multi_open::before_rights();
    settle_at(dir, path, flags);
}

pub fn settle_rights(fd: c_int) {
    multi_open::make_real(fd);
    writeback_policy::flush_before_kernel_call(fd);
}

/// With `RENAME_EXCHANGE` there are two.
pub fn settle_both(old_dir: c_int, old: Text, new_dir: c_int, new: Text, flags: u32) {
    settle_at(old_dir, old, NOFOLLOW);
    if flags & libc::RENAME_EXCHANGE != 0 {
        settle_at(new_dir, new, NOFOLLOW);
    }
}
