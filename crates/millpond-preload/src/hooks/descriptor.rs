//! Calls on the descriptor itself: `close`, `dup`, `fcntl`, `lseek`.

use std::ffi::{CStr, c_int, c_uint};

use crate::files::multi_open::{self, make_real};
use crate::files::registry::{self, is_served};
use crate::files::seek::{seek, set_kernel_offset};
use crate::files::table::{self, NumberState};
use crate::files::unserved_calls::{during, is_kernels};
use crate::files::{process_locks, served_io, writeback_policy};
use crate::hooks::process::release_all_files;
use crate::page_cache;
use crate::report::lines;
use crate::report::reason::Reason;
use crate::runtime::cancel::point::{point, without};
use crate::runtime::libc_calls;
use crate::runtime::sys::{fail, sys, to_libc};
use crate::runtime::{fault, section, thread};

pub unsafe fn close(fd: c_int) -> c_int {
    // SAFETY: no memory involved; the number is the caller's to close.
    let by_libc = || unsafe { libc_calls::close(fd) };
    if thread::record().is_left_alone() {
        return by_libc();
    }
    if thread::record().is_inside() {
        return to_libc(process_locks::close(fd)) as c_int;
    }
    point();
    if page_cache::is_on() {
        page_cache::forget_closed(fd);
        return by_libc();
    }
    match table::get(fd) {
        NumberState::Internal => return fail(libc::EBADF) as c_int,
        NumberState::File(_) | NumberState::Claimed => return close_file(fd),
        NumberState::Unknown => {}
        slot if table::forget(fd, slot) => {}
        // Another thread has described it.
        NumberState::Foreign => {}
        _ => return close_file(fd),
    }
    let result = by_libc();
    process_locks::close_retired();
    result
}

fn close_file(fd: c_int) -> c_int {
    let closing = writeback_policy::before_close(fd);
    // In one section: a thread that ends here has closed the number, or not begun to.
    let result = section::run(|_| {
        registry::lock().forget(fd);
        // SAFETY: no memory involved; the number is the caller's to close.
        unsafe { sys!(libc::SYS_close, fd) }
    });
    process_locks::close_retired();
    match closing.and_then(writeback_policy::Closing::end) {
        Some(errno) if result == 0 => fail(errno) as c_int,
        _ => to_libc(result) as c_int,
    }
}

pub unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const CLOSE_RANGE_UNSHARE: c_int = 2;
    const CLOSE_RANGE_CLOEXEC: c_int = 4;
    if thread::record().is_left_alone() {
        // SAFETY: no memory involved.
        return to_libc(unsafe { sys!(libc::SYS_close_range, first, last, flags) }) as c_int;
    }
    if flags & CLOSE_RANGE_UNSHARE != 0 {
        release_all_files();
    }
    if page_cache::is_on() && flags & CLOSE_RANGE_CLOEXEC == 0 && first <= last {
        page_cache::forget_range(first, last);
    }
    if first > last || flags & CLOSE_RANGE_CLOEXEC != 0 {
        // Ours are close-on-exec already. Under the lock, as `dup3` sets the flag again that was there
        // before (`unshare`).
        return section::run(|_| {
            let _registry = registry::lock();
            // SAFETY: no memory involved.
            to_libc(unsafe { sys!(libc::SYS_close_range, first, last, flags) }) as c_int
        });
    }
    // The library opens no file of its own while the registry is locked.
    let open = section::run(|_| {
        let _registry = registry::lock();
        let open = open_numbers(first, last).filter(|_| flags == 0);
        open.map(|open| open.into_iter().filter(|fd| !is_library_number(*fd as c_int)).collect())
    });
    if let Some(open) = open {
        let open: Vec<_> = open;
        for fd in &open {
            // SAFETY: no memory involved; the number is the caller's to close.
            without(|| unsafe { close(*fd as c_int) });
        }
        section::run(|_| drop(open));
        return 0;
    }
    // The ranges between the library's own numbers.
    let mut start = first;
    for (fd, slot) in table::known(first, last) {
        if let NumberState::Internal = slot {
            if fd as c_uint > start {
                // SAFETY: as above.
                unsafe { sys!(libc::SYS_close_range, start, fd - 1, flags) };
            }
            start = fd as c_uint + 1;
        } else {
            // SAFETY: as above.
            without(|| unsafe { close(fd) });
        }
    }
    if start > last {
        return 0;
    }
    // SAFETY: as above.
    to_libc(unsafe { sys!(libc::SYS_close_range, start, last, flags) }) as c_int
}

/// The open numbers from `first` to `last`; `None` where the kernel does not list them.
fn open_numbers(first: c_uint, last: c_uint) -> Option<Vec<c_uint>> {
    const FLAGS: c_int = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    /// Of `linux_dirent64`: the entry's length, and its name.
    const LEN_AT: usize = 16;
    const NAME_AT: usize = 19;
    let mut numbers = Vec::new();
    let mut entries = [0_u8; 2048];
    // SAFETY: the path is NUL-terminated, and the kernel writes at most the length of `entries`.
    unsafe {
        let path = c"/proc/self/fd".as_ptr();
        let list = sys!(libc::SYS_openat, libc::AT_FDCWD, path, FLAGS);
        if list < 0 {
            return None;
        }
        let read = loop {
            let read = sys!(libc::SYS_getdents64, list, entries.as_mut_ptr(), entries.len());
            if read <= 0 {
                break read;
            }
            let mut rest = &entries[..read as usize];
            while !rest.is_empty() {
                let len = usize::from(u16::from_ne_bytes([rest[LEN_AT], rest[LEN_AT + 1]]));
                let name = CStr::from_bytes_until_nul(&rest[NAME_AT..len]).ok();
                // "." and ".." are none.
                let number = name.and_then(|name| name.to_str().ok()?.parse::<c_uint>().ok());
                numbers.extend(number.filter(|fd| (first..=last).contains(fd)));
                rest = &rest[len..];
            }
        };
        sys!(libc::SYS_close, list);
        numbers.retain(|fd| *fd as isize != list);
        (read == 0).then_some(numbers)
    }
}

pub unsafe fn closefrom(first: c_int) {
    // SAFETY: as the caller vouches to `closefrom`.
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

pub unsafe fn dup(fd: c_int) -> c_int {
    // SAFETY: no memory involved.
    duplicate(fd, || unsafe { sys!(libc::SYS_dup, fd) })
}

/// `call` makes a second number for what `fd` is: in one step, as `fd` may become another description's
/// (`multi_open.G1`).
fn duplicate(fd: c_int, call: impl Fn() -> isize) -> c_int {
    if thread::record().is_inside() {
        return to_libc(call()) as c_int;
    }
    if page_cache::is_on() {
        page_cache::share(fd);
        let new = to_libc(call()) as c_int;
        if new >= 0 {
            // A number that was closed where no hook saw it.
            page_cache::forget_closed(new);
        }
        return new;
    }
    section::run(|_| {
        let mut registry = registry::lock();
        let mut new = call();
        if new == -(libc::EMFILE as isize) && registry.shed() {
            // The numbers that the engine had are free now.
            new = call();
        }
        let new = to_libc(new) as c_int;
        if new >= 0 {
            registry.share(fd, new);
        }
        new
    })
}

/// A call that changes the number `fd`, not its description. The registry is locked, so the description is not replaced.
pub fn of_number<R>(fd: c_int, call: impl FnOnce() -> R) -> R {
    if !served_io::may_be_served(fd) || thread::record().is_inside() {
        return call();
    }
    section::run(|_| {
        let _registry = registry::lock();
        call()
    })
}

pub unsafe fn dup2(fd: c_int, new: c_int) -> c_int {
    #[cfg(target_arch = "x86_64")]
    if thread::record().is_left_alone() {
        // SAFETY: no memory involved.
        return to_libc(unsafe { sys!(libc::SYS_dup2, fd, new) }) as c_int;
    }
    if fd == new {
        // SAFETY: no memory involved.
        let flags = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFD) };
        return if flags < 0 { fail(libc::EBADF) as c_int } else { new };
    }
    replace(fd, new, 0)
}

pub unsafe fn dup3(fd: c_int, new: c_int, flags: c_int) -> c_int {
    replace(fd, new, flags)
}

/// `dup3`: what `new` was is closed, and it becomes `fd`'s.
///
/// Another thread may be writing to `new`, as when a log is rotated. It finds the old description
/// or the new one, never a gap. But if the kernel has what `new` was, its call may be on its way
/// there already, and come out at the new file: at the kernel's offset, and past the cache. So the
/// kernel gets the new file, too. (A number that was not open is no such case: a call on it fails,
/// or races with an open.)
fn replace(fd: c_int, new: c_int, flags: c_int) -> c_int {
    if thread::record().is_left_alone() {
        // SAFETY: no memory involved.
        return to_libc(unsafe { sys!(libc::SYS_dup3, fd, new, flags) }) as c_int;
    }
    if page_cache::is_on() {
        // SAFETY: no memory involved.
        let is_open = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFD) } >= 0;
        if is_open && fd != new && flags & !libc::O_CLOEXEC == 0 && !is_library_number(new) {
            page_cache::share(fd);
            page_cache::forget(new);
        }
    }
    let closing = if fd == new { None } else { writeback_policy::before_close(new) };
    let result = section::run(|record| {
        let mut registry = registry::lock();
        // SAFETY: no memory involved.
        let call = || unsafe { sys!(libc::SYS_dup3, fd, new, flags) };
        // SAFETY: as above.
        let is_open = unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFD) } >= 0;
        if !is_open || fd == new || new < 0 || flags & !libc::O_CLOEXEC != 0 {
            // Fails and changes nothing.
            return to_libc(call()) as c_int;
        }
        if matches!(table::get(new), NumberState::Internal) && record.inside_depth() == 1 {
            if !lines::is_stderr(new) {
                // The engine's number. Linux programs must expect this errno of dup2.
                return fail(libc::EBUSY) as c_int;
            }
            // The program wants the number of our stderr for itself.
            table::set(new, NumberState::Unknown);
            if let Some(moved) = lines::keep_stderr(new) {
                table::set(moved, NumberState::Internal);
            }
        }
        // SAFETY: as above.
        let replaces = unsafe { sys!(libc::SYS_fcntl, new, libc::F_GETFD) } >= 0;
        if replaces && !is_served(new) {
            if is_served(fd) {
                let is_standard = (0..=libc::STDERR_FILENO).contains(&new);
                registry.pass_fd(fd, if is_standard { Reason::Stdio } else { Reason::Changed });
            }
            // The kernel has both, so the table may say so before. The close of what `new` is may wait, as of a
            // socket that lingers: not with the registry locked.
            registry.replace(fd, new);
            drop(registry);
            let result = call();
            if result < 0 {
                registry::lock().forget_lost(new);
            }
            return to_libc(result) as c_int;
        }
        let result = call();
        if result >= 0 {
            registry.replace(fd, new);
        }
        to_libc(result) as c_int
    });
    process_locks::close_retired();
    closing.and_then(writeback_policy::Closing::end);
    result
}

/// Whether `fd` is a descriptor of the library's own.
fn is_library_number(fd: c_int) -> bool {
    matches!(table::get(fd), NumberState::Internal)
}

pub unsafe fn fcntl64(fd: c_int, command: c_int, arg: usize) -> c_int {
    // SAFETY: as the caller vouches to `fcntl64`; an argument it did not give is a register's old value, which is not used.
    let call = || unsafe { libc_calls::fcntl64(fd, command, arg) };
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            // SAFETY: no memory involved.
            return duplicate(fd, || unsafe { sys!(libc::SYS_fcntl, fd, command, arg) });
        }
        libc::F_SETFD if page_cache::is_on() => {
            page_cache::note_flags_changed(fd, command, arg);
            return call();
        }
        libc::F_SETFD => return of_number(fd, call),
        libc::F_GETFD => return call(),
        _ => {}
    }
    if page_cache::is_on() {
        if !thread::record().is_inside() {
            before_fcntl_mapped(fd, command, arg);
        }
        return call();
    }
    let is_outside = !thread::record().is_inside();
    if is_outside && matches!(table::get(fd), NumberState::Unserved | NumberState::Claimed) {
        before_fcntl(fd, command, arg);
    }
    if matches!(command, libc::F_SETLK | libc::F_SETLKW) {
        note_process_lock(fd);
    }
    if !is_outside {
        return call();
    }
    use libc::{
        F_OFD_SETLK as OFD_SETLK, F_OFD_SETLKW as OFD_SETLKW, F_SETFL as SETFL, F_SETLK as SETLK,
        F_SETLKW as SETLKW,
    };
    // Not claimed meanwhile: the call is about this number's description.
    during([fd, -1], || match (table::get(fd), command) {
        (NumberState::File(description), libc::F_GETFL) => {
            description.shared_flags().unwrap_or_else(|| {
                let hides_direct = writeback_policy::hides_direct(fd);
                let flags = call();
                // The kernel sets O_ASYNC on what carries a lease, and on no other regular file.
                let hidden = libc::O_ASYNC | if hides_direct { libc::O_DIRECT } else { 0 };
                if flags >= 0 { flags & !hidden } else { flags }
            })
        }
        (NumberState::File(_), SETFL | SETLK | SETLKW | OFD_SETLK | OFD_SETLKW) if is_stuck(fd) => {
            fail(libc::ENOLCK) as c_int
        }
        (NumberState::File(_), _) => {
            before_fcntl(fd, command, arg);
            call()
        }
        _ => call(),
    })
}

/// Where files are read from the kernel's page cache.
fn before_fcntl_mapped(fd: c_int, command: c_int, arg: usize) {
    match command {
        libc::F_SETFL => page_cache::note_flags_changed(fd, command, arg),
        libc::F_SETLK
        | libc::F_SETLKW
        | libc::F_GETLK
        | libc::F_OFD_SETLK
        | libc::F_OFD_SETLKW
        | libc::F_OFD_GETLK => set_lock_base(fd, arg),
        _ => {}
    }
}

fn before_fcntl(fd: c_int, command: c_int, arg: usize) {
    const F_SETSIG: c_int = 10;
    const F_GETSIG: c_int = 11;
    const F_SETOWN_EX: c_int = 15;
    const F_GETOWN_EX: c_int = 16;
    match command {
        // The library keeps the flags (`multi_open`), and the engine sets some (`writeback_policy.L5`).
        libc::F_SETFL if !is_served(fd) => {}
        // The program's own lease, or signals, on a descriptor that carries ours.
        libc::F_SETFL
        | libc::F_SETLEASE
        | libc::F_GETLEASE
        | libc::F_SETOWN
        | libc::F_GETOWN
        | F_SETSIG
        | F_GETSIG
        | F_SETOWN_EX
        | F_GETOWN_EX => {
            registry::hand_over(fd, Reason::Changed);
        }
        libc::F_SETLK | libc::F_SETLKW | libc::F_GETLK => set_lock_base(fd, arg),
        libc::F_OFD_SETLK | libc::F_OFD_SETLKW | libc::F_OFD_GETLK => {
            before_flock(fd);
            set_lock_base(fd, arg);
        }
        _ => make_real(fd),
    }
}

/// Before the kernel looks at the lock at `lock`: gives it the offset, or the size, that the range is relative to.
fn set_lock_base(fd: c_int, lock: usize) {
    // `l_type` and `l_whence`, which come first.
    let head = std::ptr::with_exposed_provenance::<[i16; 2]>(lock);
    // SAFETY: integers; the caller unmaps no argument during the call.
    match unsafe { fault::try_read(head) }.map(|[_, whence]| i32::from(whence)) {
        Some(libc::SEEK_CUR) if page_cache::is_on() => page_cache::release(fd),
        Some(libc::SEEK_CUR) => set_kernel_offset(fd),
        // In mode back the kernel may not have the last bytes yet.
        Some(libc::SEEK_END) => writeback_policy::flush_before_kernel_call(fd),
        // From a byte that the program names; or refused.
        _ => {}
    }
}

/// A directory, whose number libc closes unseen in the end: the next file there is not this one.
pub fn before_fdopendir(fd: c_int) {
    if page_cache::is_on() {
        page_cache::forget(fd);
    }
    if !matches!(table::get(fd), NumberState::Unknown | NumberState::Foreign)
        && !thread::record().is_inside()
    {
        section::run(|_| registry::lock().forget_lost(fd));
    }
}

pub unsafe fn flock(fd: c_int, operation: c_int) -> c_int {
    before_flock(fd);
    if is_stuck(fd) {
        return fail(libc::ENOLCK) as c_int;
    }
    // SAFETY: no memory involved.
    unsafe { libc_calls::flock(fd, operation) }
}

/// Whether a call about the description at `fd` would affect other descriptors, too: `multi_open.G3`.
fn is_stuck(fd: c_int) -> bool {
    multi_open::is_bypassed(fd) && {
        make_real(fd);
        multi_open::is_bypassed(fd)
    }
}

/// Before a lock on the description.
fn before_flock(fd: c_int) {
    if !is_kernels(fd) && !thread::record().is_inside() {
        section::run(|_| registry::lock().note_lock(fd));
        make_real(fd);
    }
}

/// Before libc locks from the offset of `fd` on, by a call that no hook sees.
pub fn before_lockf(fd: c_int) {
    if page_cache::is_on() {
        return page_cache::release(fd);
    }
    note_process_lock(fd);
    set_kernel_offset(fd);
}

/// The standard streams are about to become the terminal `fd`, by calls that no hook sees, and that is closed.
pub fn before_login_tty(fd: c_int) {
    let numbers = [libc::STDIN_FILENO, libc::STDOUT_FILENO, libc::STDERR_FILENO, fd];
    numbers.into_iter().for_each(before_fdopendir);
}

/// Before the process takes a POSIX lock by `fd`, which the library may not know yet.
fn note_process_lock(fd: c_int) {
    if thread::record().is_inside() || matches!(table::get(fd), NumberState::Internal) {
        return;
    }
    section::run(|_| {
        if !matches!(table::get(fd), NumberState::File(_)) {
            served_io::describe_passed(fd);
        }
        registry::lock().note_process_lock(fd);
    });
}

pub unsafe fn lseek64(fd: c_int, offset: libc::off64_t, whence: c_int) -> libc::off64_t {
    let moved = if page_cache::is_on() {
        page_cache::seek(fd, offset, whence)
    } else {
        seek(fd, offset, whence)
    };
    to_libc(moved) as libc::off64_t
}
