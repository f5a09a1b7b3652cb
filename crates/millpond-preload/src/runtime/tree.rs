//! This process's place among those that came of one by fork: the page that they have together
//! (`holders`), and how each knows whether another one is gone.
//!
//! Each has a lock on one byte of a memory file, that of its slot: a POSIX lock, which belongs to the
//! process and its table of descriptors. The kernel ends it when the process dies, whatever of, after the
//! last call of its last thread; and by an exec, which closes the descriptor, after all other threads have
//! ended. So who asks for the lock and finds none knows that the process makes no call any more on what it
//! held, and has no mapping of it.
//!
//! - **T1** One descriptor of the file is open in each process, and no other is ever closed there: that would
//!   end the lock. The child has its parent's, under the same number.
//! - **T2** A child takes its lock before it runs anything of the program's; its slot is BORN until then.
//! - **T3** Nothing is made before the first fork that needs it. Where that can't be had, or what it takes (a
//!   filter of system calls, the limit on descriptors), nothing is shared that could be found alone.
//!
//! What is stored here, but for the page, changes with the registry locked, or in a child's only thread.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize};

use crate::runtime::config;
use crate::runtime::holders::Holders;
use crate::runtime::sys::sys;

const NONE: usize = usize::MAX;

static PAGE: AtomicPtr<Holders> = AtomicPtr::new(std::ptr::null_mut());
static LOCKS: AtomicI32 = AtomicI32::new(-1);
static SLOT: AtomicUsize = AtomicUsize::new(NONE);
/// T3.
static IS_REFUSED: AtomicBool = AtomicBool::new(false);

/// What this process has of the tree.
#[derive(Clone, Copy)]
pub struct Place {
    pub holders: &'static Holders,
    pub slot: usize,
}

/// The descriptor of the locks (T1), once there is one; negative before.
pub fn locks() -> RawFd {
    LOCKS.load(Relaxed)
}

/// This process's place, if it has one.
pub fn place() -> Option<Place> {
    // SAFETY: null, or a mapping that is never unmapped. Acquire: pairs with the Release in `make`.
    let holders = unsafe { PAGE.load(Acquire).as_ref() }?;
    let slot = SLOT.load(Relaxed);
    (slot != NONE).then_some(Place { holders, slot })
}

/// The same; it gets one if it has none.
pub fn take_place() -> Option<Place> {
    if let Some(place) = place() {
        return Some(place);
    }
    if IS_REFUSED.load(Relaxed) || (LOCKS.load(Relaxed) < 0 && !make()) {
        IS_REFUSED.store(true, Relaxed);
        return None;
    }
    // SAFETY: as in `place`.
    let holders = unsafe { PAGE.load(Acquire).as_ref() }?;
    let slot = holders.claim(is_gone)?;
    begin(holders, slot).then_some(Place { holders, slot })
}

/// In a child that no handler saw: it has none of its parent's, and no lock. What its parent's descriptor is there
/// the program may have closed, and something else may be by now.
pub fn leave() {
    PAGE.store(std::ptr::null_mut(), Relaxed);
    LOCKS.store(-1, Relaxed);
    SLOT.store(NONE, Relaxed);
}

/// In a child: its slot, if its parent has taken one for it. Otherwise it has none yet.
pub fn after_fork(slot: Option<usize>) {
    SLOT.store(NONE, Relaxed);
    // SAFETY: as in `place`.
    let holders = unsafe { PAGE.load(Acquire).as_ref() };
    if let (Some(holders), Some(slot)) = (holders, slot) {
        begin(holders, slot);
    }
}

/// T2. Without its lock a slot stays BORN, and is nobody's.
fn begin(holders: &Holders, slot: usize) -> bool {
    let is_locked = lock(libc::F_SETLK, &mut byte(slot)) == 0;
    if is_locked {
        holders.begin(slot);
        SLOT.store(slot, Relaxed);
    }
    is_locked
}

/// Whether who has the slot has died, or is another program. Not this process: the kernel tells it nothing
/// of its own locks.
pub fn is_gone(slot: usize) -> bool {
    let mut byte = byte(slot);
    slot != SLOT.load(Relaxed)
        && lock(libc::F_GETLK, &mut byte) == 0
        && byte.l_type == libc::F_UNLCK as i16
}

fn byte(slot: usize) -> libc::flock64 {
    // SAFETY: all integers.
    let mut byte: libc::flock64 = unsafe { std::mem::zeroed() };
    byte.l_type = libc::F_WRLCK as i16;
    (byte.l_start, byte.l_len) = (slot as i64, 1);
    byte
}

fn lock(command: i32, byte: &mut libc::flock64) -> isize {
    // SAFETY: the kernel reads and writes `byte`.
    unsafe { sys!(libc::SYS_fcntl, LOCKS.load(Relaxed), command, &raw mut *byte) }
}

/// Makes the page, and the file of the locks.
fn make() -> bool {
    const CLOSE_ON_EXEC: usize = 1;
    let first = config::get().internal_fd_min;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, and descriptors that are made here.
    let (page, fd) = unsafe {
        let low = sys!(libc::SYS_memfd_create, c"millpond-forks".as_ptr(), CLOSE_ON_EXEC);
        if low < 0 {
            return false;
        }
        let fd = sys!(libc::SYS_fcntl, low, libc::F_DUPFD_CLOEXEC, first) as RawFd;
        // Before there is a lock, T1.
        sys!(libc::SYS_close, low);
        if fd < 0 {
            return false;
        }
        (sys!(libc::SYS_mmap, 0, size_of::<Holders>(), protection, flags, -1isize, 0), fd)
    };
    if (-4095..0).contains(&page) {
        // SAFETY: made above.
        unsafe { sys!(libc::SYS_close, fd) };
        return false;
    }
    LOCKS.store(fd, Relaxed);
    // Release: pairs with the Acquire in `place`; the bytes are zero.
    PAGE.store(std::ptr::with_exposed_provenance_mut(page as usize), Release);
    true
}
