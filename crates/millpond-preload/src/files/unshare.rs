//! Hands a file over that several descriptions share: each gets a description of its own again. See `multi_open`.

use std::os::fd::RawFd;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use crate::files::hand_over::go_through;
use crate::files::offset::{IN_KERNEL, push_offset};
use crate::files::open_file::OpenFile;
use crate::files::table::{self, NumberState};
use crate::files::{lease, process_locks};
use crate::report::counts;
use crate::report::reason::Reason;
use crate::runtime::config;
use crate::runtime::link::format_link;
use crate::runtime::sys::sys;

/// Flags that the new description gets.
const KEPT: i32 = libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK;

/// Hands a file to the kernel that several descriptions share.
pub fn pass_together(all: &[&'static OpenFile], reason: Reason) {
    let Some(first) = all.first() else { return };
    let real = first.kernel_fd();
    if !go_through(first) {
        all.iter().for_each(|description| description.set_unwritten());
    }
    OpenFile::bypass_together(all, real);
    all.iter().filter_map(|description| description.row()).for_each(|row| row.end(Some(reason)));
    if let Some(file) = first.file() {
        // As in `pass`.
        let _ = file.invalidate(0, i64::MAX as u64);
    }
    lease::release_lease(real);
    unshare_descriptions(all, reason);
}

/// Gives each that is bypassed a description of its own, if it can be had: multi_open.G3 otherwise.
/// Whether one has.
pub fn unshare_descriptions(all: &[&'static OpenFile], reason: Reason) -> bool {
    let bypassed = || all.iter().filter(|d| d.is_bypassed() && d.is_served());
    let Some(first) = bypassed().next() else { return false };
    // SAFETY: the registry is locked.
    let id = unsafe { first.cold() }.id;
    if process_locks::is_locked(first.kernel_fd(), id) {
        // multi_open.G7: a lock that no hook has seen.
        return false;
    }
    let mut is_done = false;
    for description in bypassed() {
        let Some(flags) = description.shared_flags() else { continue };
        let offset = description.offset.lock();
        let numbers = table::numbers_of(description);
        if make_own(description.kernel_fd(), &numbers, flags, offset) {
            description.set_passed(reason);
            description.offset.unlock(IN_KERNEL);
            is_done = true;
            counts::count_file_passed(reason);
        } else {
            description.offset.unlock(offset);
        }
    }
    // Numbers are free again.
    have_spare();
    is_done
}

/// Makes `numbers` those of a description of their own, opened as `flags` say, at `offset`. Nothing
/// changes where that can't be.
pub fn make_own(real: RawFd, numbers: &[RawFd], flags: i32, offset: u64) -> bool {
    let Some(own) = open_anew(real, flags) else { return false };
    push_offset(own, offset);
    let done = numbers.iter().take_while(|number| replace(own, **number)).count();
    let is_whole = done == numbers.len();
    if !is_whole {
        for number in &numbers[..done] {
            replace(real, *number);
        }
    }
    process_locks::close(own);
    is_whole
}

/// Opens the file behind `fd` again; the result is a descriptor of the library.
pub fn open_anew(fd: RawFd, flags: i32) -> Option<RawFd> {
    let link = &mut [0; 32];
    let link = format_link(fd, link);
    let flags = flags & KEPT | libc::O_CLOEXEC | libc::O_NOCTTY;
    // SAFETY: the text is NUL-terminated.
    let open = || unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, link.as_ptr(), flags) } as RawFd;
    let mut own = open();
    if own == -libc::EMFILE {
        close_spare();
        own = open();
    }
    if own < 0 { None } else { process_locks::adopt(own) }
}

/// multi_open.G3: a spare number for opening a file when no other is free; -1: none. Relaxed: the registry is locked.
static SPARE: AtomicI32 = AtomicI32::new(-1);

/// Whether there is one, or could be had. Not a file: its close would end locks.
pub fn have_spare() -> bool {
    if SPARE.load(Relaxed) >= 0 {
        return true;
    }
    // SAFETY: no memory involved.
    let made = unsafe { sys!(libc::SYS_eventfd2, 0, libc::EFD_CLOEXEC) };
    let spare = config::renumber(made).and_then(process_locks::adopt);
    spare.inspect(|spare| SPARE.store(*spare, Relaxed));
    spare.is_some()
}

fn close_spare() {
    let spare = SPARE.swap(-1, Relaxed);
    // Else the program has closed it by a call of its own, and opened something else there.
    if spare >= 0 && matches!(table::get(spare), NumberState::Internal) {
        process_locks::close(spare);
    }
}

/// `number` becomes one of what `fd` stands for; it is close-on-exec where it was. Whether it has: the
/// limit on numbers may have become lower than one that is open.
pub fn replace(fd: RawFd, number: RawFd) -> bool {
    // SAFETY: no memory involved; the number is claimed, or the registry's.
    unsafe {
        let is_cloexec =
            sys!(libc::SYS_fcntl, number, libc::F_GETFD) & libc::FD_CLOEXEC as isize != 0;
        sys!(libc::SYS_dup3, fd, number, if is_cloexec { libc::O_CLOEXEC } else { 0 }) >= 0
    }
}
