//! One report for a program and all its children.
//!
//! The *main* process keeps a tally: a memory file (`told` has its form) that it names to its children in
//! `MILLPOND_TALLY` (`named`). `millpond run` makes it for the process that becomes the program, and names it by
//! `/proc/self`; otherwise the first process that loads the library does. Each child adds its counts when it ends, and prints no line: its standard error may be read by another program. At its
//! end the main process says all. Children that outlive it are not counted, nor are those that are killed.
//!
//! The main process counts in the tally, so that `millpond run` can say the line where the program could not.
//!
//! A main process that execs another program stays the main one: the memory file goes along.

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64};

use crate::report::named;
use crate::report::told::*;
use crate::runtime::block::WORDS;
use crate::runtime::sys::sys;
use crate::runtime::{blocks, config, thread};

const VARIABLE: &CStr = c"MILLPOND_TALLY";
const NONE: RawFd = -1;
const PAGE: usize = 4096;

const _: () = assert!(BLOCK_BYTES == size_of::<blocks::Block>());

/// The memory file, in the main process.
static OWN: AtomicI32 = AtomicI32::new(NONE);
/// Its first page, mapped, in the main process; else null.
static HEAD: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// Finds out whether this is the main process, and makes the tally if so: its number. No other thread exists.
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
    count_in(fd)?;
    OWN.store(fd, Relaxed);
    Some(fd)
}

/// The number at which this process has had the tally since before its exec, if it is the main one.
fn inherited(path: &str) -> Option<RawFd> {
    let own = format!("/proc/{}/fd/", std::process::id());
    let is_from_run = path.starts_with(BY_SELF);
    let number = path.strip_prefix(if is_from_run { BY_SELF } else { &own })?;
    let (number, id) = number.split_once(':')?;
    let fd = number.parse().ok()?;
    if named::text(fd)?.to_str().ok()?.split_once(':')?.1 != id {
        return None;
    }
    if is_from_run {
        name(fd)?;
    }
    set_close_on_exec(fd, true);
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
    // SAFETY: no memory involved.
    (fd >= 0 && unsafe { sys!(libc::SYS_ftruncate, fd, FILE_BYTES) } == 0).then_some(fd)
}

/// Names the tally to children.
fn name(fd: RawFd) -> Option<()> {
    let name = named::text(fd)?;
    // SAFETY: both are NUL-terminated, and no other thread runs while the program loads.
    (unsafe { libc::setenv(VARIABLE.as_ptr(), name.as_ptr(), 1) } == 0).then_some(())
}

/// Maps it, and has threads count there.
fn count_in(fd: RawFd) -> Option<()> {
    let head = map(fd, 0, FILE_BYTES)?;
    HEAD.store(head.cast(), Relaxed);
    word(MARK).inspect(|mark| mark.store(FORM, Relaxed));
    // Each byte signals the process that waits for the end of this one.
    let loaded_before = word(LOADED).map_or(0, |loaded| loaded.swap(u64::MAX, Relaxed));
    // SAFETY: mapped for good, and it is the main process's to write.
    unsafe {
        let blocks = head.wrapping_byte_add(BLOCKS_AT).cast();
        thread::share_blocks(blocks, BLOCKS_MAX, loaded_before != 0);
    }
    Some(())
}

fn map(fd: RawFd, offset: usize, bytes: usize) -> Option<*mut u8> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of the tally, which is not truncated.
    let mapped =
        unsafe { sys!(libc::SYS_mmap, 0, bytes, protection, libc::MAP_SHARED, fd, offset) };
    (!(-4095..0).contains(&mapped)).then(|| std::ptr::with_exposed_provenance_mut(mapped as usize))
}

/// A word of the first page, in the main process.
fn word(index: usize) -> Option<&'static AtomicU64> {
    let head = HEAD.load(Relaxed);
    // SAFETY: null, or mapped for good; `index` is within a page.
    (!head.is_null()).then(|| unsafe { &*head.add(index) })
}

/// Whether this is the main process.
pub fn is_own() -> bool {
    OWN.load(Relaxed) != NONE
}

/// In a forked child: the tally is the parent's. The descriptor may be closed. Blocks are `thread`'s.
pub fn after_fork() {
    HEAD.store(std::ptr::null_mut(), Relaxed);
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

/// Adds a child's counts to the main process's tally.
pub fn add(sums: &Sums) {
    let Some(fd) = named::open(VARIABLE, libc::O_RDWR) else { return };
    let head = map(fd, 0, PAGE);
    // SAFETY: opened above. `map` has mapped a page, which no other code uses.
    unsafe {
        sys!(libc::SYS_close, fd);
        let Some(head) = head else { return };
        let words = head.cast::<AtomicU64>();
        if (*words.add(MARK)).load(Relaxed) == FORM {
            for (index, sum) in sums.0.iter().enumerate().filter(|(_, sum)| **sum != 0) {
                (*words.add(CHILDREN / WORD_BYTES + index)).fetch_add(*sum, Relaxed);
            }
        }
        sys!(libc::SYS_munmap, head, PAGE);
    }
}

/// What children have added so far.
pub fn of_children() -> Sums {
    let mut sums = Sums::none();
    for index in 0..WORDS {
        if let Some(word) = word(CHILDREN / WORD_BYTES + index) {
            sums.add(index, word.load(Relaxed));
        }
    }
    sums
}

/// The line is about to be said here: not by `millpond run` after all. Relaxed: its reader waits for the end of this process first.
pub fn note_said() {
    word(SAID).inspect(|said| said.store(1, Relaxed));
}
