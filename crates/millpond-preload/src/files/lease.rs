//! Leases: how the library learns that another process opens a file it serves.
//!
//! A file lease (`F_SETLEASE`) is granted only while no other description of the file is open for
//! writing (read lease), or is open at all (write lease). A process that then opens it in such a way
//! waits in the kernel until the lease is given up, and the kernel sends us a signal. So:
//!
//! - a description opened read-only takes a read lease, which fails while another description may write;
//! - a writable one takes a write lease, which fails while another description is open at all;
//! - on a break, the *watcher* thread passes the file to the kernel, then gives the lease up. The
//!   opener continues and finds a file that only the kernel serves.
//!
//! The signal is directed at the watcher by thread id, and blocked there: the watcher waits with `sigtimedwait`, so no
//! thread of the program is interrupted. A program can neither send this signal nor wait for it: a wait
//! by the watcher for any other signal could take one that the process was sent. If the queue of signals is full, none comes; so once a second
//! the watcher asks every lease how it stands.
//!
//! Limits. An opener is let in after `/proc/sys/fs/lease-break-time` (45 s) whether we answer or
//! not: a process stopped for longer may serve one more hit from before. Only open breaks leases;
//! a descriptor that another process has held all along would have prevented the lease. Leases
//! need the file's owner or CAP_LEASE; without, the file is passed.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};

use crate::files::open_file::Access;
use crate::files::pressure::{Gauge, PAUSE};
use crate::report::reason::Reason;
use crate::runtime::lock::{wait, wake};
use crate::runtime::sys::sys;

/// libc's own for `pthread_cancel`, which no function of libc lets a program send or wait for. It comes to the
/// watcher's thread alone, which is never cancelled and has it blocked.
const BREAK_SIGNAL: i32 = 32;
const F_OWNER_TID: i32 = 0;
const F_SETOWN_EX: i32 = 15;

const NO_WATCHER: u32 = 0;
const STARTING: u32 = u32::MAX;
/// The watcher's thread id, once it waits.
static WATCHER: AtomicU32 = AtomicU32::new(NO_WATCHER);
/// The watcher is to end.
static IS_OVER: AtomicBool = AtomicBool::new(false);

#[repr(C)]
struct OwnerEx {
    kind: i32,
    pid: i32,
}

/// A break, as far as the watcher knows it.
pub enum Break {
    /// Another process waits for the lease on this descriptor.
    Of(RawFd),
    /// Another process waits for some lease.
    OfSome,
    /// The kernel refuses the watcher's wait: no lease may be held.
    Untold,
}

/// Called by the watcher.
pub type Broken = fn(Break);

/// Takes the lease that protects `access` on the description behind `fd`. The registry is locked.
pub fn take(fd: RawFd, access: Access, broken: Broken) -> Result<(), Reason> {
    let watcher = watcher(broken).ok_or(Reason::Engine)?;
    let owner = OwnerEx { kind: F_OWNER_TID, pid: watcher as i32 };
    let kind = if access.write { libc::F_WRLCK } else { libc::F_RDLCK };
    const F_SETSIG: i32 = 10;
    // SAFETY: fcntl on our own descriptor; `owner` outlives the call that reads it.
    let result = unsafe {
        sys!(libc::SYS_fcntl, fd, F_SETSIG, BREAK_SIGNAL);
        sys!(libc::SYS_fcntl, fd, F_SETOWN_EX, &raw const owner);
        sys!(libc::SYS_fcntl, fd, libc::F_SETLEASE, kind)
    };
    match -(result as i32) {
        0 => Ok(()),
        libc::EAGAIN => Err(Reason::OpenElsewhere),
        _ => Err(Reason::NoLease),
    }
}

/// Gives the lease up; a process that waits for it continues. The kernel then removes the owner, and leaves another kind of
/// owner than a new description has.
pub fn release_lease(fd: RawFd) {
    let none = OwnerEx { kind: F_OWNER_TID, pid: 0 };
    // SAFETY: fcntl on our own descriptor; `none` outlives the call that reads it.
    unsafe {
        sys!(libc::SYS_fcntl, fd, libc::F_SETLEASE, libc::F_UNLCK);
        sys!(libc::SYS_fcntl, fd, F_SETOWN_EX, &raw const none);
    }
}

/// Whether the lease on `fd` still stands, and no process waits for it.
pub fn stands(fd: RawFd, access: Access) -> bool {
    let kind = if access.write { libc::F_WRLCK } else { libc::F_RDLCK };
    // SAFETY: fcntl on our own descriptor.
    unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETLEASE) == kind as isize }
}

/// The watcher's thread id; starts it on first use.
fn watcher(broken: Broken) -> Option<u32> {
    // Acquire: pairs with the Release in `watch`.
    let mut tid = WATCHER.load(Acquire);
    if tid == NO_WATCHER {
        WATCHER.store(STARTING, Relaxed);
        let started = std::thread::Builder::new()
            .name("millpond-lease".into())
            .stack_size(128 << 10)
            .spawn(move || watch(broken));
        if started.is_err() {
            WATCHER.store(NO_WATCHER, Relaxed);
            return None;
        }
        tid = STARTING;
    }
    while tid == STARTING {
        wait(&WATCHER, STARTING);
        tid = WATCHER.load(Acquire);
    }
    Some(tid)
}

/// In a forked child there is no watcher.
pub fn after_fork() {
    WATCHER.store(NO_WATCHER, Relaxed);
}

/// Ends the watcher, after the last lease was given up. It is not started again.
pub fn end() {
    IS_OVER.store(true, Release);
    let watcher = WATCHER.load(Acquire);
    if watcher != NO_WATCHER && watcher != STARTING {
        // SAFETY: to our own thread, which waits for it.
        unsafe { sys!(libc::SYS_tgkill, std::process::id(), watcher, BREAK_SIGNAL) };
    }
}

/// Whether there is a watcher.
pub fn is_watched() -> bool {
    WATCHER.load(Relaxed) != NO_WATCHER
}

fn watch(broken: Broken) {
    let everything = !0u64;
    let awaited = 1u64 << (BREAK_SIGNAL - 1);
    // glibc's other internal signal stays open: setuid waits for every thread to take one.
    let blocked = everything & !(1 << BREAK_SIGNAL);
    // SAFETY: the set is eight bytes, and this thread runs no code but ours.
    let tid = unsafe {
        sys!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const blocked, 0, 8);
        sys!(libc::SYS_gettid)
    } as u32;
    WATCHER.store(tid, Release);
    wake(&WATCHER);
    let mut gauge = Gauge::find();
    let pause = libc::timespec { tv_sec: PAUSE.as_secs() as i64, tv_nsec: 0 };
    // Acquire: pairs with the Release in `end`.
    while !IS_OVER.load(Acquire) {
        gauge.as_mut().map(Gauge::poll_pressure);
        let mut info = std::mem::MaybeUninit::<LeaseSignalInfo>::zeroed();
        // SAFETY: the set is eight bytes; `info` is as large as the kernel's siginfo.
        let signal = unsafe {
            sys!(
                libc::SYS_rt_sigtimedwait,
                &raw const awaited,
                info.as_mut_ptr(),
                &raw const pause,
                8
            )
        };
        // SAFETY: zeroed, then filled by the kernel; all bytes are plain integers.
        let info = unsafe { info.assume_init() };
        match signal as i32 {
            BREAK_SIGNAL if info.code > 0 => broken(Break::Of(info.fd)),
            BREAK_SIGNAL => {}
            // The kernel may have had no room to queue a signal.
            error if error == -libc::EAGAIN || error == -libc::EINTR => broken(Break::OfSome),
            // A filter of system calls: the next try would be refused, too.
            _ => {
                broken(Break::Untold);
                break;
            }
        }
    }
    WATCHER.store(NO_WATCHER, Relaxed);
}

/// The kernel's siginfo, as far as a lease break fills it.
#[repr(C)]
struct LeaseSignalInfo {
    signal: i32,
    errno: i32,
    code: i32,
    _padding: i32,
    band: i64,
    fd: i32,
    _rest: [i32; 25],
}
