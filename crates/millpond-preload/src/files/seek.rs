//! Moves the file offset, and sets the kernel's.

use std::os::fd::RawFd;

use crate::files::offset::{OFFSET_END, push_offset};
use crate::files::pin::Pin;
use crate::files::registry;
use crate::files::table::{self, NumberState};
use crate::files::unserved_calls::{Way, begin};
use crate::report::reason::Reason;
use crate::runtime::sys::sys;
use crate::runtime::{section, thread};

/// Offsets up to here are valid on every file system; beyond, the kernel is asked.
const OFFSET_SURELY_VALID: i64 = i32::MAX as i64;

/// `lseek`; the result in the kernel's form.
#[inline]
pub fn seek(fd: RawFd, offset: libc::off64_t, whence: i32) -> isize {
    if let NumberState::File(_) = table::get(fd)
        && let Some(moved) = try_seek(fd, offset, whence)
    {
        return moved as isize;
    }
    // SAFETY: no memory involved.
    let by_kernel = || unsafe { sys!(libc::SYS_lseek, fd, offset, whence) };
    let Way::Open(call) = begin(fd) else { return by_kernel() };
    let result = match call.known {
        NumberState::File(_) => seek_slow(fd, offset, whence).unwrap_or_else(by_kernel),
        _ => by_kernel(),
    };
    call.end();
    result
}

/// The common seeks, without a lock.
#[inline]
fn try_seek(fd: i32, offset: libc::off64_t, whence: i32) -> Option<libc::off64_t> {
    let record = thread::record();
    record.enter();
    let moved = table::description(fd).and_then(|description| {
        let old = description.offset.peek()?;
        if !description.is_served() {
            return None;
        }
        let new = match whence {
            libc::SEEK_SET => offset,
            libc::SEEK_CUR if offset == 0 => return Some(old as libc::off64_t),
            libc::SEEK_CUR => offset.checked_add(old as i64)?,
            _ => return None,
        };
        let is_valid = (0..=OFFSET_SURELY_VALID).contains(&new);
        (is_valid && description.offset.try_advance(old, new as u64)).then_some(new)
    });
    record.exit();
    moved
}

fn seek_slow(fd: i32, offset: libc::off64_t, whence: i32) -> Option<isize> {
    section::run(|_| {
        let pin = Pin::of(fd)?;
        let old = pin.offset.lock();
        if !pin.is_served() {
            pin.offset.unlock(old);
            return None;
        }
        let kernel_fd = pin.kernel_fd();
        if let Some(file) = pin.late_file().filter(|_| !pin.is_bypassed()) {
            if whence == libc::SEEK_END
                && let Some(new) = offset.checked_add(file.len().ok()? as i64)
                && (0..=OFFSET_SURELY_VALID).contains(&new)
            {
                pin.offset.unlock(new as u64);
                return Some(new as isize);
            }
            // Where its holes are.
            let _ = file.write_back();
        }
        // SAFETY: no memory involved. The kernel knows valid offsets of this file system, and
        // where the file ends and its holes are.
        let result = unsafe {
            if whence == libc::SEEK_CUR {
                // One call: the kernel's offset may be several descriptions'.
                sys!(
                    libc::SYS_lseek,
                    kernel_fd,
                    offset.wrapping_add(old as libc::off64_t),
                    libc::SEEK_SET
                )
            } else {
                sys!(libc::SYS_lseek, kernel_fd, offset, whence)
            }
        };
        let is_ours = (0..OFFSET_END as isize).contains(&result);
        pin.offset.unlock(if is_ours { result as u64 } else { old });
        if result >= 0 && !is_ours {
            // Farther than offsets reach here: the kernel's from now on.
            registry::lock().pass_fd(fd, Reason::Changed);
            return None;
        }
        Some(result)
    })
}

/// Sets the kernel's offset of a served description, for a call that uses it.
pub fn set_kernel_offset(fd: i32) {
    section::run(|_| {
        if let Some(pin) = Pin::of(fd) {
            let offset = pin.offset.lock();
            if pin.is_served() {
                push_offset(pin.kernel_fd(), offset);
            }
            pin.offset.unlock(offset);
        }
    });
}
