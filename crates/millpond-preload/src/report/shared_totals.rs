//! One report for a program and all its children: the totals of all of them, in shared memory.
//!
//! The first process that loads the library is the *main* process. It makes a memory file, and names it to its children in
//! `MILLPOND_TOTALS` (`shared_files`). Each process adds its counts when it exits, and before an exec. Only the main process prints a
//! line, at its exit: the standard error of a child may be read by another program. Children that outlive the main process
//! are not counted, nor are processes that are killed.
//!
//! A main process that execs another program stays the main process: it keeps the memory file.
//!
//! ```text
//! word 0     a mark
//! word 1..   the totals, a word for each of `runtime::count_words`
//! ```

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64};

use crate::report::shared_files;
use crate::report::totals::Totals;
use crate::runtime::config;
use crate::runtime::count_words::WORDS;
use crate::runtime::sys::{self, sys};

const VARIABLE: &CStr = c"MILLPOND_TOTALS";
const NONE: RawFd = -1;
const FILE_BYTES: usize = 4096;
/// The value of the first word.
const FORM: u64 = u64::from_le_bytes(*b"mp-sum\x002");

const _: () = assert!((1 + WORDS) * size_of::<u64>() <= FILE_BYTES);

/// The memory file, in the main process.
static OWN: AtomicI32 = AtomicI32::new(NONE);
/// The mapping of the memory file, in the main process; else null.
static MAPPED: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// The descriptor of the memory file, if this is the main process. No other thread exists.
pub fn initialise() -> Option<RawFd> {
    // SAFETY: the name is NUL-terminated; nothing changes the environment while programs load.
    let named = unsafe {
        let value = libc::getenv(VARIABLE.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_string_lossy().into_owned())
    };
    let fd = match named {
        None => {
            let fd = make()?;
            name(fd)?;
            fd
        }
        Some(path) => inherited(&path)?,
    };
    let words = map(fd)?;
    // SAFETY: mapped just now, for good.
    unsafe { &*words }.store(FORM, Relaxed);
    MAPPED.store(words, Relaxed);
    OWN.store(fd, Relaxed);
    Some(fd)
}

/// The descriptor that this process has kept over its exec, if it is the main process.
fn inherited(path: &str) -> Option<RawFd> {
    let own = format!("/proc/{}/fd/", std::process::id());
    let (number, id) = path.strip_prefix(&own)?.split_once(':')?;
    let fd = number.parse().ok()?;
    if shared_files::text(fd)?.to_str().ok()?.split_once(':')?.1 != id {
        return None;
    }
    set_close_on_exec(fd, true);
    Some(fd)
}

fn make() -> Option<RawFd> {
    const CLOSE_ON_EXEC: usize = 1;
    // SAFETY: the name is NUL-terminated.
    let made = unsafe { sys!(libc::SYS_memfd_create, c"millpond-totals".as_ptr(), CLOSE_ON_EXEC) };
    let fd = config::renumber(made)?;
    // SAFETY: no memory involved.
    (unsafe { sys!(libc::SYS_ftruncate, fd, FILE_BYTES) } == 0).then_some(fd)
}

/// Names the memory file to children.
fn name(fd: RawFd) -> Option<()> {
    let name = shared_files::text(fd)?;
    // SAFETY: both are NUL-terminated, and no other thread runs while the program loads.
    (unsafe { libc::setenv(VARIABLE.as_ptr(), name.as_ptr(), 1) } == 0).then_some(())
}

/// The memory file is not truncated.
fn map(fd: RawFd) -> Option<*mut AtomicU64> {
    sys::map(FILE_BYTES, libc::MAP_SHARED, fd).map(|file| file.cast())
}

/// Whether this is the main process.
pub fn is_main_process() -> bool {
    OWN.load(Relaxed) != NONE
}

/// In a forked child: the memory file is the parent's. The descriptor may be closed.
pub fn after_fork() {
    MAPPED.store(std::ptr::null_mut(), Relaxed);
    let fd = OWN.swap(NONE, Relaxed);
    if fd != NONE {
        // SAFETY: the duplicate of the library's own descriptor that fork made.
        unsafe { sys!(libc::SYS_close, fd) };
    }
}

/// Keeps the memory file over an exec, or not.
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

/// Adds the counts of this process.
pub fn add(new: &Totals) {
    let own = MAPPED.load(Relaxed);
    if !own.is_null() {
        // SAFETY: mapped for good.
        return unsafe { add_to(own, new) };
    }
    let Some(fd) = shared_files::open(VARIABLE, libc::O_RDWR) else { return };
    let mapped = map(fd);
    // SAFETY: opened above. `map` has mapped the whole file, which no other code uses.
    unsafe {
        sys!(libc::SYS_close, fd);
        let Some(words) = mapped else { return };
        if (*words).load(Relaxed) == FORM {
            add_to(words, new);
        }
        sys!(libc::SYS_munmap, words, FILE_BYTES);
    }
}

/// # Safety
///
/// `words` is a mapping of the memory file.
unsafe fn add_to(words: *const AtomicU64, new: &Totals) {
    for (index, count) in new.0.iter().enumerate().filter(|(_, count)| **count != 0) {
        // SAFETY: within the mapping, whose words are only accessed atomically.
        unsafe { &*words.add(1 + index) }.fetch_add(*count, Relaxed);
    }
}

/// The totals of all processes so far, in the main process.
pub fn all() -> Totals {
    let mut totals = Totals::none();
    let words = MAPPED.load(Relaxed);
    if !words.is_null() {
        for (index, total) in totals.0.iter_mut().enumerate() {
            // SAFETY: mapped for good; within the mapping.
            *total = unsafe { &*words.add(1 + index) }.load(Relaxed);
        }
    }
    totals
}
