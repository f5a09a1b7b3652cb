//! POSIX locks by numbers that share a description: `several.G7`.

use std::ffi::{c_int, c_void};

use crate::files::description::Description;
use crate::files::identity;
use crate::files::pin::Pin;
use crate::files::registry;
use crate::files::several::make_real;
use crate::files::table::{self, Known};
use crate::report::reason::Reason;
use crate::runtime::cancel::point::{point, with_cleanup};
use crate::runtime::sys::{errno, set_errno, sys, to_libc};
use crate::runtime::{fault, libc_calls, section};

type Off = libc::off64_t;

/// What the kernel was asked with the registry locked.
enum Asked {
    Done(isize),
    /// The number does not share any more.
    Kernels,
    /// Others hold a lock, and the description can't be given up.
    Waits(libc::flock64, Pin),
}

/// F_SETLK and its kin at `fd`; `None`: it does not share any more.
///
/// # Safety
///
/// As `fcntl`: `arg` is the caller's to give; it may be any address.
pub unsafe fn by_shared(fd: c_int, command: c_int, arg: usize) -> Option<c_int> {
    if command == libc::F_SETLKW {
        point();
    }
    // SAFETY: the caller's duty.
    let result = match section::run(|_| unsafe { ask(fd, command, arg) }) {
        Asked::Kernels => return None,
        Asked::Done(result) => to_libc(result) as c_int,
        Asked::Waits(lock, pin) => wait(fd, &lock, pin),
    };
    if matches!(table::get(fd), Known::File(description) if description.is_bypassed()) {
        // several.G7: perhaps it was the last lock to write.
        let told = errno();
        make_real(fd);
        set_errno(told);
    }
    Some(result)
}

/// # Safety
///
/// As for [`by_shared`].
unsafe fn ask(fd: c_int, command: c_int, arg: usize) -> Asked {
    let program = std::ptr::with_exposed_provenance_mut::<libc::flock64>(arg);
    // SAFETY: all integers.
    let mut lock: libc::flock64 = unsafe { std::mem::zeroed() };
    // SAFETY: `lock` has room; `program` may be any address, as a file is served.
    if !unsafe { fault::copy_in((&raw mut lock).cast(), program.cast(), size_of_val(&lock)) } {
        return Asked::Done(-libc::EFAULT as isize);
    }
    let mut registry = registry::lock();
    let Some(description) = table::description(fd)
        .filter(|description| description.shares() && description.is_served())
    else {
        return Asked::Kernels;
    };
    if let Err(errno) = place(description, command, &mut lock) {
        return Asked::Done(-errno as isize);
    }
    let at_once = if command == libc::F_SETLKW { libc::F_SETLK } else { command };
    // SAFETY: the kernel reads and writes `lock`.
    let result = unsafe { sys!(libc::SYS_fcntl, fd, at_once, &raw mut lock) };
    if command == libc::F_GETLK && result == 0 {
        // Of no lock only the type is told.
        let is_none = i32::from(lock.l_type) == libc::F_UNLCK;
        let bytes = if is_none { size_of_val(&lock.l_type) } else { size_of_val(&lock) };
        // SAFETY: `lock` has so many bytes, and the type comes first.
        let is_told = unsafe { fault::copy_out(program.cast(), (&raw const lock).cast(), bytes) };
        return Asked::Done(if is_told { 0 } else { -libc::EFAULT as isize });
    }
    let is_held = [-libc::EAGAIN, -libc::EACCES].contains(&(result as c_int));
    if command != libc::F_SETLKW || !is_held {
        return Asked::Done(result);
    }
    // Somebody else's: so it has the file open, and waits for the lease or has it broken.
    registry.pass_fd(fd, Reason::Locked);
    match table::description(fd) {
        Some(description) if description.shares() && description.is_served() => {
            description.begin_lock_wait();
            Asked::Waits(lock, Pin::of_registered(description))
        }
        _ => Asked::Kernels,
    }
}

/// What the kernel would see to by the number's own description: its rights and its offset.
fn place(description: &Description, command: c_int, lock: &mut libc::flock64) -> Result<(), c_int> {
    let access = description.access();
    let may = match i32::from(lock.l_type) {
        _ if command == libc::F_GETLK => true,
        libc::F_RDLCK => access.read,
        libc::F_WRLCK => access.write,
        _ => true,
    };
    let base = match i32::from(lock.l_whence) {
        libc::SEEK_CUR => {
            let offset = description.offset.lock();
            description.offset.unlock(offset);
            offset
        }
        libc::SEEK_END => {
            let engines = description.served_file().and_then(|file| file.len().ok());
            engines.or_else(|| identity::len(description.kernel_fd())).ok_or(libc::EIO)?
        }
        _ => 0,
    };
    if matches!(i32::from(lock.l_whence), libc::SEEK_CUR | libc::SEEK_END) {
        lock.l_start = lock.l_start.checked_add(base as Off).ok_or(libc::EOVERFLOW)?;
        lock.l_whence = libc::SEEK_SET as i16;
    }
    if may { Ok(()) } else { Err(libc::EBADF) }
}

/// Waits in the kernel; meanwhile the number keeps what it stands for (`carried.K1`).
fn wait(fd: c_int, lock: &libc::flock64, pin: Pin) -> c_int {
    /// Once: it may be called twice.
    unsafe extern "C" fn end(pin: *mut c_void) {
        // SAFETY: `wait`'s own, on this thread.
        let pin = unsafe { &mut *pin.cast::<Option<Pin>>() };
        section::run(|_| {
            if let Some(pin) = pin.take() {
                pin.end_lock_wait();
            }
        });
    }
    let mut pin = std::mem::ManuallyDrop::new(Some(pin));
    let pin: *mut Option<Pin> = &raw mut *pin;
    let lock = (&raw const *lock).expose_provenance();
    // SAFETY: the kernel reads `lock`; `end` takes what it is made for.
    unsafe { with_cleanup(end, pin.cast(), || libc_calls::fcntl64(fd, libc::F_SETLKW, lock)) }
}
