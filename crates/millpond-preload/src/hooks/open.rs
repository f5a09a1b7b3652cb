//! `open` and similar calls: the kernel opens the file, and the library decides whether to serve it.
//!
//! An open of a file that this process has a lease on gets a duplicate of the served descriptor (`reopen`). If that can't be,
//! the file is handed to the kernel first, because the open would otherwise wait for this process's own lease. No lock is
//! held while the kernel opens.
//!
//! An open waits for a keeper that still writes the file for a dead process. No lock is held then either, and signals are
//! taken.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::files::forked::FORKS;
use crate::files::identity::{self, FileId};
use crate::files::open_file::Access;
use crate::files::table::{self, NumberState};
use crate::files::{registry, reopen, unserved};
use crate::fork::ensure_initialised;
use crate::page_cache;
use crate::report::reason::Reason;
use crate::runtime::c::{HERE, Mode, Text, c_char, c_int, c_void};
use crate::runtime::cancel::point::point;
use crate::runtime::forks::ForkCount;
use crate::runtime::libc_calls;
use crate::runtime::sys::{errno, sys, to_libc};
use crate::runtime::{config, fault, section, thread};

/// So often an open that may not wait hands the file over first: another thread may have it served again in between.
/// Chosen, not measured.
const WAYS_MADE: usize = 4;

/// Opens, and describes the descriptor.
pub unsafe fn open_at(dir: c_int, path: Text, flags: c_int, mode: Mode) -> c_int {
    if thread::record().is_inside() {
        // The library's own: large-file semantics are the kernel's only ones on 64-bit targets.
        // SAFETY: the caller's duty.
        return to_libc(unsafe { sys!(libc::SYS_openat, dir, path, flags, mode) }) as c_int;
    }
    point();
    ensure_initialised();
    if registry::holds_leases() {
        if let Some(fd) = reopen::open(dir, path, flags) {
            return fd;
        }
        make_way(dir, path, flags);
    }
    let before = FORKS.before();
    // SAFETY: the caller's duty.
    let open = || unsafe { libc_calls::openat64(dir, path, flags, mode) };
    let mut fd = without_waiting(flags, open, || make_way(dir, path, flags));
    if fd < 0 && errno() == libc::EMFILE && section::run(|_| registry::lock().shed()) {
        // The numbers that the engine had are free now.
        fd = open();
    }
    if fd >= 0 {
        describe(fd, flags, before);
    }
    fd
}

/// Opens; where the open may not wait, and a lease of this process is in its way, hands the file over.
#[inline]
fn without_waiting(flags: c_int, open: impl Fn() -> c_int, make_way: impl Fn()) -> c_int {
    let may_not_wait = flags & libc::O_NONBLOCK != 0;
    // Asked before: an open that fails for a lease of our own has the watcher give it up.
    let mut has_lease = may_not_wait && registry::holds_leases();
    let mut fd = open();
    for _ in 0..WAYS_MADE {
        has_lease |= may_not_wait && registry::holds_leases();
        if fd >= 0 || !has_lease || errno() != libc::EAGAIN {
            break;
        }
        make_way();
        fd = open();
    }
    fd
}

/// `openat2`, by number only: libc has no function for it.
pub unsafe fn open_at2(dir: c_int, path: Text, how: *const u64, bytes: usize) -> isize {
    if thread::record().is_inside() {
        // SAFETY: the caller's duty.
        return to_libc(unsafe { sys!(libc::SYS_openat2, dir, path, how, bytes) });
    }
    ensure_initialised();
    let mut flags = 0u64;
    // They come first; the kernel refuses a shorter structure, and one that can't be read.
    section::run(|_| {
        fault::install();
        let wanted = size_of_val(&flags).min(bytes);
        // SAFETY: `flags` has room; `how` may be any address.
        unsafe { fault::copy_in((&raw mut flags).cast(), how.cast(), wanted) }
    });
    let flags = flags as c_int;
    if registry::holds_leases() {
        make_way(dir, path, flags);
    }
    let before = FORKS.before();
    // SAFETY: the caller's duty.
    let fd = to_libc(unsafe { sys!(libc::SYS_openat2, dir, path, how, bytes) });
    if fd >= 0 {
        describe(fd as c_int, flags, before);
    }
    fd
}

pub unsafe fn open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int {
    ensure_initialised();
    let before = FORKS.before();
    // SAFETY: as the caller vouches to `open_by_handle_at`.
    let open = || unsafe { libc_calls::open_by_handle_at(mount, handle, flags) };
    if registry::holds_leases() && !thread::record().is_inside() {
        // It may be one of these files.
        section::run(|_| registry::lock().pass_all(Reason::OpenTwice));
    }
    let fd = open();
    if fd >= 0 && !thread::record().is_inside() {
        describe(fd, flags, before);
    }
    fd
}

/// A descriptor of any process, perhaps of this one: a description with an offset and writers
/// elsewhere.
pub unsafe fn pidfd_getfd(process: c_int, fd: c_int, flags: u32) -> c_int {
    // SAFETY: no memory involved.
    let call = || unsafe { libc_calls::pidfd_getfd(process, fd, flags) };
    if thread::record().is_inside() {
        return call();
    }
    let is_mapped = page_cache::is_on();
    // It may be one of this process's.
    if is_mapped {
        page_cache::release_for_fork();
    } else {
        section::run(|_| registry::lock().pass_all(Reason::Given));
    }
    let new = call();
    if new >= 0 && is_mapped {
        page_cache::forget_closed(new);
    } else if new >= 0 {
        section::run(|_| registry::lock().forget_lost(new));
    }
    new
}

/// Before libc opens the file of a path by itself, which would wait for a lease of this process.
pub fn before_open_by_libc(path: Text, flags: c_int) {
    if registry::holds_leases() && !thread::record().is_inside() {
        make_way(HERE, path, flags);
    }
}

#[cold]
fn make_way(dir: c_int, path: Text, flags: c_int) {
    if flags & libc::O_PATH != 0 {
        return;
    }
    section::run(|_| {
        let follow = flags & libc::O_NOFOLLOW == 0;
        let known = identity::identify_path(dir, path, follow);
        if let Some(identity) = known.filter(|identity| identity.is_regular) {
            let truncates = flags & libc::O_TRUNC != 0;
            registry::lock().before_open(identity.id, Access::of_flags(flags), truncates);
        }
    });
}

/// How long an open waits for a keeper that writes dirty pages of a dead process: so many
/// times so long. Handlers run in between.
const KEEPER_SLICES: usize = 600;
const KEEPER_SLICE: Duration = Duration::from_millis(100);

/// Whether no keeper has pages of a dead process left to write to the file. Asked
/// before the lease, which a keeper's own descriptor keeps from us, and without the registry's
/// lock.
fn is_written(fd: c_int, id: FileId) -> bool {
    if registry::lock().is_known(id) {
        // The keeper that has it is ours; and who opened it first has waited.
        return true;
    }
    // SAFETY: the caller has just opened it.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let waited = millpond::keeper::await_written(file, KEEPER_SLICE);
    // Without an answer there is no keeper to wait for.
    !waited.is_err_and(|error| error.kind() == std::io::ErrorKind::ResourceBusy)
}

/// Describes a descriptor that was just opened with `flags`.
pub fn describe(fd: c_int, flags: c_int, before: ForkCount) {
    if page_cache::is_on() {
        page_cache::note_open(fd, flags);
        return;
    }
    let is_directory = flags & libc::O_DIRECTORY != 0 && flags & libc::O_TMPFILE != libc::O_TMPFILE;
    if flags & libc::O_PATH != 0 || is_directory || fd as usize >= table::SLOTS {
        describe_foreign(fd);
        return;
    }
    if flags & libc::O_ACCMODE == libc::O_RDONLY && !config::is_eager() {
        describe_unserved(fd, flags, before);
        return;
    }
    for slice in 1..=KEEPER_SLICES {
        if section::run(|_| try_describe(fd, flags, before, slice == KEEPER_SLICES)) {
            break;
        }
    }
}

/// The kernel's, unless the program opens the file for writing, too.
fn describe_unserved(fd: c_int, flags: c_int, before: ForkCount) {
    if matches!(table::get(fd), NumberState::File(_) | NumberState::Claimed) {
        // Closed where no hook saw it.
        section::run(|_| registry::lock().forget_lost(fd));
    }
    unserved::note_reader(fd);
    let is_kernels = flags & libc::O_DIRECT != 0 || fd <= registry::STDERR;
    if is_kernels || FORKS.has_forked(before) {
        table::try_change(fd, NumberState::Unserved, NumberState::Left);
    }
}

/// In a section. False if a keeper has to be waited for, unless it was for the last time.
fn try_describe(fd: c_int, flags: c_int, before: ForkCount, is_last: bool) -> bool {
    if let Some(identity) = identity::identify(fd)
        && identity.is_regular
        && identity::is_in_served_directory(fd)
    {
        let is_written = is_written(fd, identity.id);
        if !is_written && !is_last {
            return false;
        }
        let is_local = identity::is_local(fd);
        let mut registry = registry::lock();
        let refusal = if FORKS.has_forked(before) {
            Some(Reason::Forked)
        } else if !is_written {
            Some(Reason::Engine)
        } else {
            (!is_local).then_some(Reason::FileSystem)
        };
        registry.describe(fd, identity.id, flags, refusal);
    } else if matches!(table::get(fd), NumberState::File(_)) {
        registry::lock().forget_lost(fd);
    } else {
        table::set(fd, NumberState::Foreign);
    }
    true
}

fn describe_foreign(fd: c_int) {
    if !matches!(
        table::get(fd),
        NumberState::Unknown | NumberState::Foreign | NumberState::Internal
    ) {
        // Its last owner was closed where no hook saw it.
        section::run(|_| registry::lock().forget_lost(fd));
    }
    table::set(fd, NumberState::Foreign);
}

pub const CREATE: c_int = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;

unsafe extern "C" {
    /// glibc's answer to a fortified call that breaks its contract: says so, ends the program.
    fn __fortify_fail(message: Text) -> !;
}

/// The fortified names take no mode, and refuse flags that need one.
pub unsafe fn fortified(dir: c_int, path: Text, flags: c_int) -> c_int {
    if flags & libc::O_CREAT != 0 || flags & libc::O_TMPFILE == libc::O_TMPFILE {
        // SAFETY: the message is NUL-terminated.
        unsafe { __fortify_fail(c"invalid open call: O_CREAT or O_TMPFILE without mode".as_ptr()) };
    }
    // SAFETY: the caller's duty.
    unsafe { open_at(dir, path, flags, 0) }
}

/// A temporary file: libc makes up the name and opens it, always for reading and writing.
pub unsafe fn make_temporary(template: *mut c_char, suffix_len: c_int, flags: c_int) -> c_int {
    let before = FORKS.before();
    // SAFETY: the caller's duty.
    let fd = unsafe { libc_calls::mkostemps64(template, suffix_len, flags) };
    if fd >= 0 && !thread::record().is_inside() {
        describe(fd, (flags & !libc::O_ACCMODE) | libc::O_RDWR, before);
    }
    fd
}
