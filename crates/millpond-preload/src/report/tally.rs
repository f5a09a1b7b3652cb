//! One report for a program and all its children.
//!
//! The first process that loads the library, the *main* one, keeps a tally: a memory file that it
//! names to its children in `MILLPOND_TALLY` (`named`). Each child appends its own line there when it ends,
//! and says nothing itself: its standard error may be somebody's input. At its end the main process
//! adds the lines up. Children that outlive it are not counted.
//!
//! A main process that execs another program stays the main one: the memory file goes along.

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use crate::report::{lines, named};
use crate::runtime::budget::Budget;
use crate::runtime::config;
use crate::runtime::sys::sys;

const VARIABLE: &CStr = c"MILLPOND_TALLY";
const NONE: RawFd = -1;

/// The memory file, in the main process.
static OWN: AtomicI32 = AtomicI32::new(NONE);

/// Finds out whether this is the main process, and makes the tally if so: its number.
pub fn initialise() -> Option<RawFd> {
    // SAFETY: the name is NUL-terminated; nothing changes the environment while programs load.
    let named = unsafe {
        let value = libc::getenv(VARIABLE.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_string_lossy().into_owned())
    };
    let fd = match named {
        None => make()?,
        Some(path) => {
            // Before exec this was the main process already.
            let own = path.strip_prefix(&format!("/proc/{}/fd/", std::process::id()))?;
            let fd = own.split(':').next()?.parse().ok()?;
            if named::text(fd)?.to_bytes() != path.as_bytes() {
                return None;
            }
            set_close_on_exec(fd, true);
            fd
        }
    };
    OWN.store(fd, Relaxed);
    Some(fd)
}

fn make() -> Option<RawFd> {
    const CLOSE_ON_EXEC: usize = 1;
    let first = config::get().internal_fd_min;
    // SAFETY: the name is NUL-terminated; the descriptors are made here.
    let fd = unsafe {
        let low = sys!(libc::SYS_memfd_create, c"millpond-tally".as_ptr(), CLOSE_ON_EXEC);
        if low < 0 {
            return None;
        }
        let fd = sys!(libc::SYS_fcntl, low, libc::F_DUPFD_CLOEXEC, first);
        sys!(libc::SYS_close, low);
        fd as RawFd
    };
    if fd < 0 {
        return None;
    }
    if lines_start() > 0 {
        // SAFETY: no memory involved.
        unsafe { sys!(libc::SYS_ftruncate, fd, lines_start()) };
    }
    let name = named::text(fd)?;
    // SAFETY: both are NUL-terminated, and no other thread runs while the program loads.
    unsafe { libc::setenv(VARIABLE.as_ptr(), name.as_ptr(), 1) };
    Some(fd)
}

/// The budget that lies in front of the lines, mapped; where the cache is shared.
pub fn map_budget() -> Option<*mut Budget> {
    let own = OWN.load(Relaxed);
    let fd = if own == NONE { named::open(VARIABLE, libc::O_RDWR)? } else { own };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of our own memory file, whose head nobody cuts; the descriptor is ours if it was
    // opened here.
    let mapped = unsafe {
        let mapped =
            sys!(libc::SYS_mmap, 0, size_of::<Budget>(), protection, libc::MAP_SHARED, fd, 0);
        if own == NONE {
            sys!(libc::SYS_close, fd);
        }
        mapped
    };
    (!(-4095..0).contains(&mapped)).then(|| std::ptr::with_exposed_provenance_mut(mapped as usize))
}

/// Where the lines begin.
fn lines_start() -> usize {
    if config::get().is_cache_shared { size_of::<Budget>() } else { 0 }
}

/// Whether this is the main process.
pub fn is_own() -> bool {
    OWN.load(Relaxed) != NONE
}

/// In a forked child: the tally is the parent's. The descriptor may be closed.
pub fn after_fork() {
    let fd = OWN.swap(NONE, Relaxed);
    if fd != NONE {
        // SAFETY: the duplicate of the library's own descriptor that fork made.
        unsafe { sys!(libc::SYS_close, fd) };
    }
}

/// Lets the tally survive an exec, or not.
pub fn keep_over_exec(keep: bool) {
    let fd = OWN.load(Relaxed);
    if fd != NONE {
        set_close_on_exec(fd, !keep);
    }
}

fn set_close_on_exec(fd: RawFd, on: bool) {
    // SAFETY: no memory involved.
    unsafe { sys!(libc::SYS_fcntl, fd, libc::F_SETFD, if on { libc::FD_CLOEXEC } else { 0 }) };
}

/// Adds a line to the main process's tally.
pub fn append(line: &str) {
    if let Some(fd) = named::open(VARIABLE, libc::O_WRONLY | libc::O_APPEND) {
        lines::append_to(fd, line);
    }
}

/// The lines so far, emptying the tally.
pub fn take() -> String {
    let fd = OWN.load(Relaxed);
    let mut text = Vec::new();
    let mut part = [0u8; 4096];
    loop {
        // SAFETY: the kernel writes at most the length of `part`.
        let read = unsafe {
            sys!(libc::SYS_pread64, fd, part.as_mut_ptr(), part.len(), lines_start() + text.len())
        };
        match usize::try_from(read) {
            Ok(bytes) if bytes > 0 => text.extend_from_slice(&part[..bytes]),
            _ => break,
        }
    }
    // SAFETY: no memory involved.
    unsafe { sys!(libc::SYS_ftruncate, fd, lines_start()) };
    String::from_utf8_lossy(&text).into_owned()
}
