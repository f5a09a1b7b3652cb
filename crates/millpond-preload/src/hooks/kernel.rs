//! Calls that only the kernel does, on files that may be served.
//!
//! Before most of them the file is handed to the kernel. Reservations and holes are made by the kernel while the engine
//! serves the file: dirty pages are written back before, and cached pages are dropped after them.

use crate::files::multi_open::{is_bypassed, may_not_write};
use crate::files::registry::{hand_over, holds_leases, lock};
use crate::files::segments::Direction;
use crate::files::unserved_calls::during;
use crate::files::{identity, served_io, writeback_policy};
use crate::hooks::descriptor;
use crate::page_cache;
use crate::report::reason::Reason;
use crate::runtime::c::{HERE, Off, Text, c_int, c_ulong, c_void};
use crate::runtime::cancel::point::point;
use crate::runtime::libc_calls;
use crate::runtime::sys::{fail, sys, to_libc};
use crate::runtime::{fault, section, thread};

pub unsafe fn mmap64(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: Off,
) -> *mut c_void {
    if flags & libc::MAP_ANONYMOUS == 0 {
        hand_over(fd, Reason::Mapped);
        let is_written = flags & libc::MAP_SHARED != 0 && prot & libc::PROT_WRITE != 0;
        if is_written && is_bypassed(fd) {
            fail(libc::EACCES);
            return libc::MAP_FAILED;
        }
    }
    // SAFETY: as the caller vouches to `mmap64`. Not through libc: programs map memory in their
    // allocators, before libc's own definition can be looked up.
    let result = unsafe { sys!(libc::SYS_mmap, address, len, prot, flags, fd, offset) };
    std::ptr::with_exposed_provenance_mut(to_libc(result) as usize)
}

/// The kernel changes the file at `fd`. `cut`: the size that it has then at most, if it may get shorter. `refuse`: the
/// result where the description may not write, which the kernel does not know.
fn change<R: Copy>(
    fd: c_int,
    cut: Option<u64>,
    refuse: impl FnOnce() -> R,
    call: impl FnOnce() -> R,
) -> R {
    during([fd, -1], || {
        if page_cache::is_on() {
            page_cache::mapped_io::change(fd, cut, call)
        } else if may_not_write(fd) {
            refuse()
        } else {
            writeback_policy::change_by_kernel(fd, call)
        }
    })
}

pub unsafe fn fallocate64(fd: c_int, mode: c_int, offset: Off, len: Off) -> c_int {
    point();
    let cut = (mode & libc::FALLOC_FL_COLLAPSE_RANGE != 0).then_some(0);
    // SAFETY: as the caller vouches to `fallocate64`.
    let call = || unsafe { libc_calls::fallocate64(fd, mode, offset, len) };
    change(fd, cut, || fail(libc::EBADF) as c_int, call)
}

pub unsafe fn posix_fallocate64(fd: c_int, offset: Off, len: Off) -> c_int {
    // SAFETY: as the caller vouches to `posix_fallocate64`.
    let call = || unsafe { libc_calls::posix_fallocate64(fd, offset, len) };
    change(fd, None, || libc::EBADF, call)
}

pub unsafe fn ftruncate64(fd: c_int, len: Off) -> c_int {
    // SAFETY: no memory involved.
    let call = || unsafe { sys!(libc::SYS_ftruncate, fd, len) };
    to_libc(change(fd, u64::try_from(len).ok(), || -libc::EINVAL as isize, call)) as c_int
}

pub fn before_fadvise(fd: c_int, offset: Off, len: Off, advice: c_int) {
    let (offset, len) = (u64::try_from(offset), u64::try_from(len));
    if let (libc::POSIX_FADV_DONTNEED, Ok(offset), Ok(len)) = (advice, offset, len) {
        page_cache::mapped_io::drop_pages(fd, offset, len);
    }
}

pub unsafe fn ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int {
    const FIONREAD: c_ulong = 0x541b;
    const FIONBIO: c_ulong = 0x5421;
    const FIONCLEX: c_ulong = 0x5450;
    const FIOCLEX: c_ulong = 0x5451;
    const FIOASYNC: c_ulong = 0x5452;
    const FICLONE: c_ulong = 0x4004_9409;
    const FICLONERANGE: c_ulong = 0x4020_940d;
    // SAFETY: as the caller vouches to `ioctl`; an argument it did not give is not looked at.
    let call = || unsafe { libc_calls::ioctl(fd, request, arg) };
    if page_cache::is_on() {
        return match request {
            FICLONE | FICLONERANGE => page_cache::mapped_io::change(fd, None, call),
            FIOCLEX | FIONCLEX => {
                let flag = if request == FIOCLEX { libc::FD_CLOEXEC as usize } else { 0 };
                page_cache::note_flags_changed(fd, libc::F_SETFD, flag);
                call()
            }
            _ if is_terminals(request) && request != FIONREAD => call(),
            _ => {
                page_cache::release(fd);
                call()
            }
        };
    }
    if matches!(request, FIOCLEX | FIONCLEX) {
        return descriptor::of_number(fd, call);
    }
    // Those of terminals change no file, and may wait.
    if is_terminals(request) && !matches!(request, FIONBIO | FIOASYNC | FIONREAD) {
        return call();
    }
    let source = match request {
        FICLONE => arg as c_int,
        // It begins with the source's descriptor.
        // SAFETY: integers; the caller unmaps no argument during the call.
        FICLONERANGE => unsafe { fault::try_read(std::ptr::with_exposed_provenance::<i64>(arg)) }
            .map_or(-1, |source| source as c_int),
        _ => -1,
    };
    during([fd, source], || {
        hand_over(fd, Reason::Changed);
        hand_over(source, Reason::Changed);
        call()
    })
}

fn is_terminals(request: c_ulong) -> bool {
    (request >> 8) & 0xff == 0x54
}

pub unsafe fn copy_file_range(
    from: c_int,
    from_offset: *mut Off,
    to: c_int,
    to_offset: *mut Off,
    len: usize,
    flags: u32,
) -> isize {
    point();
    // SAFETY: as the caller vouches to `copy_file_range`.
    move_bytes((from, !from_offset.is_null()), (to, !to_offset.is_null()), || unsafe {
        libc_calls::copy_file_range(from, from_offset, to, to_offset, len, flags)
    })
}

pub unsafe fn sendfile64(to: c_int, from: c_int, offset: *mut Off, len: usize) -> isize {
    // SAFETY: as the caller vouches to `sendfile64`.
    move_bytes((from, !offset.is_null()), (to, false), || unsafe {
        libc_calls::sendfile64(to, from, offset, len)
    })
}

pub unsafe fn splice(
    from: c_int,
    from_offset: *mut Off,
    to: c_int,
    to_offset: *mut Off,
    len: usize,
    flags: u32,
) -> isize {
    point();
    // SAFETY: as the caller vouches to `splice`.
    move_bytes((from, !from_offset.is_null()), (to, !to_offset.is_null()), || unsafe {
        libc_calls::splice(from, from_offset, to, to_offset, len, flags)
    })
}

/// Hands two files to the kernel, which moves bytes from the one to the other. Each comes with whether the call has an
/// offset for it.
fn move_bytes(from: (c_int, bool), to: (c_int, bool), call: impl FnOnce() -> isize) -> isize {
    during([from.0, to.0], || {
        for (fd, has_offset) in [from, to] {
            if page_cache::is_on() && !has_offset {
                page_cache::release(fd);
            }
            hand_over(fd, Reason::Changed);
        }
        let result = call();
        served_io::count_passed(from.0, Direction::Read, result);
        served_io::count_passed(to.0, Direction::Write, result);
        result
    })
}

pub unsafe fn truncate64(path: Text, len: Off) -> c_int {
    before_truncate(path);
    // SAFETY: as the caller vouches to `truncate64`.
    page_cache::truncate(HERE, path, len, || unsafe { libc_calls::truncate64(path, len) })
}

/// Before the kernel would wait for our lease.
fn before_truncate(path: Text) {
    if holds_leases() && !thread::record().is_inside() {
        section::run(|_| {
            if let Some(identity) = identity::identify_path(HERE, path, true) {
                lock().pass_file(identity.id, Reason::Changed);
            }
        });
    }
}

/// Leaves to the kernel the files whose descriptors a message carries to another process.
pub unsafe fn before_sendmsg(message: *const libc::msghdr) {
    // SAFETY: integers and pointers; the caller unmaps no argument during the call.
    if let Some(message) = unsafe { fault::try_read(message) } {
        release_passed_files(&message);
    }
}

/// Walks the control data as the kernel does: up to a header that can't be read, or whose length the kernel refuses.
fn release_passed_files(message: &libc::msghdr) {
    const HEADER_BYTES: usize = size_of::<libc::cmsghdr>();
    let mut at = message.msg_control.cast::<u8>().cast_const();
    let mut left = message.msg_controllen;
    while left >= HEADER_BYTES {
        // SAFETY: as in `before_sendmsg`.
        let Some(header) = (unsafe { fault::try_read(at.cast::<libc::cmsghdr>()) }) else { return };
        let bytes = header.cmsg_len;
        if !(HEADER_BYTES..=left).contains(&bytes) {
            return;
        }
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            let fds = at.wrapping_add(HEADER_BYTES).cast::<c_int>();
            for index in 0..(bytes - HEADER_BYTES) / size_of::<c_int>() {
                // SAFETY: as above.
                let Some(fd) = (unsafe { fault::try_read(fds.wrapping_add(index)) }) else {
                    return;
                };
                if page_cache::is_on() {
                    page_cache::share(fd);
                }
                hand_over(fd, Reason::Given);
            }
        }
        let step = bytes.next_multiple_of(align_of::<usize>());
        (at, left) = (at.wrapping_add(step), left.saturating_sub(step));
    }
}

pub unsafe fn before_sendmmsg(messages: *const libc::mmsghdr, count: u32) {
    // The kernel sends no more in one call.
    const MESSAGES_MAX: usize = 1024;
    for index in 0..(count as usize).min(MESSAGES_MAX) {
        // SAFETY: as in `before_sendmsg`.
        match unsafe { fault::try_read(messages.wrapping_add(index)) } {
            Some(message) => release_passed_files(&message.msg_hdr),
            None => return,
        }
    }
}

/// Hands over the file of a control block of POSIX AIO, which begins with the descriptor. Libc reads and writes later, on
/// a thread of its own.
pub unsafe fn release_to_aio(block: *const c_void) {
    // SAFETY: the caller vouches for the block.
    if let Some(fd) = unsafe { block.cast::<c_int>().as_ref() } {
        hand_over(*fd, Reason::InLibc);
    }
}

pub unsafe fn before_lio_listio(list: *const *mut c_void, count: c_int) {
    if !list.is_null() {
        for index in 0..count.max(0) as usize {
            // SAFETY: the caller vouches for so many.
            unsafe { release_to_aio(list.add(index).read()) };
        }
    }
}
