//! Calls that only the kernel does, on files that may be served.
//!
//! Reading ones are coherent as they are, because every write is through, or is written back before
//! (see `writeback_policy`). Two things need care:
//! a call that reads from the file offset must find it in the kernel, and one that changes the file
//! past the engine must leave no stale byte in its cache. Rare ones simply pass the file to the
//! kernel.
//!

use crate::files::multi_open::{is_bypassed, make_real, may_not_write};
use crate::files::pin::Pin;
use crate::files::registry::{holds_leases, is_served, lock};
use crate::files::segments::Direction;
use crate::files::table::{self, NumberState};
use crate::files::unserved_calls::during;
use crate::files::{identity, served_io, writeback_policy};
use crate::hooks::descriptor;
use crate::hooks::process::release_to_libc;
use crate::page_cache;
use crate::report::reason::Reason;
use crate::runtime::c::{HERE, Off, Text, c_int, c_ulong, c_void};
use crate::runtime::cancel::point::point;
use crate::runtime::libc_calls;
use crate::runtime::sys::{fail, sys, to_libc};
use crate::runtime::{fault, section, thread};

/// Leaves the file behind `fd` to the kernel.
fn pass(fd: c_int, reason: Reason) {
    if let NumberState::File(description) = table::get(fd)
        && description.is_served()
        && !thread::record().is_inside()
    {
        section::run(|_| lock().pass_fd(fd, reason));
    }
}

/// The same, and of one that may be served some day.
fn release_file(fd: c_int, reason: Reason) {
    if page_cache::is_on() && reason == Reason::Given {
        page_cache::share(fd);
    }
    release_unserved(fd);
    pass(fd, reason);
}

/// Leaves `fd` to the kernel for good, if it is UNSERVED.
fn release_unserved(fd: c_int) {
    let is_it = matches!(table::get(fd), NumberState::Unserved | NumberState::Claimed);
    if is_it && !thread::record().is_inside() {
        section::run(|_| lock().release_descriptor(fd));
    }
}

pub unsafe fn mmap64(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: Off,
) -> *mut c_void {
    let is_shared = flags & libc::MAP_SHARED != 0 && flags & libc::MAP_ANONYMOUS == 0;
    if flags & libc::MAP_ANONYMOUS == 0 {
        release_unserved(fd);
    }
    if is_shared
        && let NumberState::File(description) = table::get(fd)
        && description.access().write
    {
        // Writable now, or by mprotect at any time. Mappings that can't write are coherent.
        pass(fd, Reason::Mapped);
    } else if flags & libc::MAP_ANONYMOUS == 0 {
        make_real(fd);
        writeback_policy::go_through(fd);
        if is_shared && prot & libc::PROT_WRITE != 0 && is_bypassed(fd) {
            fail(libc::EACCES);
            return libc::MAP_FAILED;
        }
    }
    // SAFETY: as the caller vouches to `mmap64`. Not through libc: programs map memory in their
    // allocators, before libc's own definition can be looked up.
    let result = unsafe { sys!(libc::SYS_mmap, address, len, prot, flags, fd, offset) };
    std::ptr::with_exposed_provenance_mut(to_libc(result) as usize)
}

/// Drops the engine's pages of the file behind `fd`, which the kernel has just changed.
fn forget_bytes(fd: c_int) {
    if !is_served(fd) || thread::record().is_inside() {
        return;
    }
    let failed = section::run(|_| {
        let pin = Pin::of(fd)?;
        pin.file()?.invalidate(0, i64::MAX as u64).err()
    });
    if failed.is_some() {
        pass(fd, Reason::Engine);
    }
}

pub unsafe fn fallocate64(fd: c_int, mode: c_int, offset: Off, len: Off) -> c_int {
    point();
    // SAFETY: as the caller vouches to `fallocate64`.
    during([fd, -1], || unsafe { allocate(fd, mode, offset, len) })
}

unsafe fn allocate(fd: c_int, mode: c_int, offset: Off, len: Off) -> c_int {
    if page_cache::is_on() {
        const SHORTENS: c_int = libc::FALLOC_FL_COLLAPSE_RANGE;
        let cut = (mode & SHORTENS != 0).then_some(0);
        // SAFETY: as the caller vouches to `fallocate64`.
        let call = || unsafe { libc_calls::fallocate64(fd, mode, offset, len) };
        return page_cache::mapped_io::change(fd, cut, call);
    }
    if may_not_write(fd) {
        return fail(libc::EBADF) as c_int;
    }
    // SAFETY: as the caller vouches to `fallocate64`.
    let result = writeback_policy::change_by_kernel(fd, || unsafe {
        libc_calls::fallocate64(fd, mode, offset, len)
    });
    if result == 0 && mode != libc::FALLOC_FL_KEEP_SIZE {
        forget_bytes(fd);
    }
    result
}

pub unsafe fn posix_fallocate64(fd: c_int, offset: Off, len: Off) -> c_int {
    // SAFETY: as the caller vouches to `posix_fallocate64`.
    during([fd, -1], || unsafe { reserve(fd, offset, len) })
}

unsafe fn reserve(fd: c_int, offset: Off, len: Off) -> c_int {
    if page_cache::is_on() {
        // SAFETY: as the caller vouches to `posix_fallocate64`.
        let call = || unsafe { libc_calls::posix_fallocate64(fd, offset, len) };
        return page_cache::mapped_io::change(fd, None, call);
    }
    if may_not_write(fd) {
        return libc::EBADF;
    }
    // SAFETY: as the caller vouches to `posix_fallocate64`.
    let result = writeback_policy::change_by_kernel(fd, || unsafe {
        libc_calls::posix_fallocate64(fd, offset, len)
    });
    // Even where it failed, it may have written within libc.
    forget_bytes(fd);
    result
}

pub unsafe fn ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int {
    const FIONREAD: c_ulong = 0x541b;
    const FIONBIO: c_ulong = 0x5421;
    const FIONCLEX: c_ulong = 0x5450;
    const FIOCLEX: c_ulong = 0x5451;
    const FIOASYNC: c_ulong = 0x5452;
    const FICLONE: c_ulong = 0x4004_9409;
    const FICLONERANGE: c_ulong = 0x4020_940d;
    let before = || {
        make_real(fd);
        if !is_served(fd) {
            return;
        }
        // Terminals' requests, and those that every descriptor knows, say nothing about the file.
        if !is_terminals(request) || request == FIONREAD {
            pass(fd, Reason::Changed);
        }
    };
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
    if !matches!(request, FICLONE | FICLONERANGE) {
        let is_read_only = matches!(table::get(fd), NumberState::Unserved | NumberState::Claimed);
        let control = || {
            before();
            call()
        };
        // Those of terminals change no file, and may wait.
        let is_quiet = is_terminals(request) && !matches!(request, FIONBIO | FIOASYNC | FIONREAD);
        return if is_read_only && !is_quiet { during([fd, -1], control) } else { control() };
    }
    let source = match request {
        FICLONE => arg as c_int,
        // It begins with the source's descriptor.
        // SAFETY: integers; the caller unmaps no argument during the call.
        _ => match unsafe { fault::try_read(std::ptr::with_exposed_provenance::<i64>(arg)) } {
            Some(source) => source as c_int,
            None => return call(),
        },
    };
    during([fd, source], || {
        make_real(fd);
        make_real(source);
        writeback_policy::flush_before_kernel_call(source);
        let result = writeback_policy::change_by_kernel(fd, call);
        if result == 0 {
            forget_bytes(fd);
        }
        result
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
    // SAFETY: the caller's duty.
    during([from, to], || unsafe { copy(from, from_offset, to, to_offset, len, flags) })
}

unsafe fn copy(
    from: c_int,
    from_offset: *mut Off,
    to: c_int,
    to_offset: *mut Off,
    len: usize,
    flags: u32,
) -> isize {
    if page_cache::is_on() {
        release_unless(from, !from_offset.is_null());
        release_unless(to, !to_offset.is_null());
    }
    pass(from, Reason::Changed);
    pass(to, Reason::Changed);
    // SAFETY: as the caller vouches to `copy_file_range`.
    let result =
        unsafe { libc_calls::copy_file_range(from, from_offset, to, to_offset, len, flags) };
    served_io::count_passed(from, Direction::Read, result);
    served_io::count_passed(to, Direction::Write, result);
    result
}

pub unsafe fn sendfile64(to: c_int, from: c_int, offset: *mut Off, len: usize) -> isize {
    // SAFETY: the caller's duty.
    during([from, to], || unsafe { send(to, from, offset, len) })
}

unsafe fn send(to: c_int, from: c_int, offset: *mut Off, len: usize) -> isize {
    if page_cache::is_on() {
        release_unless(from, !offset.is_null());
        page_cache::release(to);
    }
    make_real(from);
    make_real(to);
    if offset.is_null() {
        pass(from, Reason::Changed);
    }
    writeback_policy::flush_before_kernel_call(from);
    pass(to, Reason::Changed);
    // SAFETY: as the caller vouches to `sendfile64`.
    let call = || unsafe { libc_calls::sendfile64(to, from, offset, len) };
    let result = writeback_policy::undirected(from, call);
    served_io::count_passed(from, Direction::Read, result);
    served_io::count_passed(to, Direction::Write, result);
    result
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
    // SAFETY: the caller's duty.
    during([from, to], || unsafe { splice_open(from, from_offset, to, to_offset, len, flags) })
}

unsafe fn splice_open(
    from: c_int,
    from_offset: *mut Off,
    to: c_int,
    to_offset: *mut Off,
    len: usize,
    flags: u32,
) -> isize {
    if page_cache::is_on() {
        release_unless(from, !from_offset.is_null());
        release_unless(to, !to_offset.is_null());
    }
    make_real(from);
    make_real(to);
    if from_offset.is_null() {
        pass(from, Reason::Changed);
    }
    writeback_policy::flush_before_kernel_call(from);
    pass(to, Reason::Changed);
    // SAFETY: as the caller vouches to `splice`.
    let call = || unsafe { libc_calls::splice(from, from_offset, to, to_offset, len, flags) };
    let result = writeback_policy::undirected(from, call);
    served_io::count_passed(from, Direction::Read, result);
    served_io::count_passed(to, Direction::Write, result);
    result
}

/// Before a call that uses the offset of `fd`, unless it has one of its own.
fn release_unless(fd: c_int, has_offset: bool) {
    if !has_offset {
        page_cache::release(fd);
    }
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

pub extern "C" fn before_dprintf(fd: c_int) {
    release_to_libc(fd);
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
                release_file(fd, Reason::Given);
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

/// Does something to the descriptor of a control block of POSIX AIO, with which that begins. Libc
/// reads and writes later, on a thread of its own.
pub unsafe fn with_block(block: *const c_void, act: impl FnOnce(c_int)) {
    // SAFETY: the caller vouches for the block.
    if let Some(fd) = unsafe { block.cast::<c_int>().as_ref() } {
        act(*fd);
    }
}

/// Before POSIX AIO reads at `fd`.
pub fn before_aio_read(fd: c_int) {
    release_unserved(fd);
    writeback_policy::go_through(fd);
}

pub fn release_to_aio(fd: c_int) {
    release_file(fd, Reason::InLibc);
}

pub unsafe fn before_lio_listio(list: *const *mut c_void, count: c_int) {
    if !list.is_null() {
        for index in 0..count.max(0) as usize {
            // SAFETY: the caller vouches for so many.
            unsafe { with_block(list.add(index).read(), release_to_aio) };
        }
    }
}
