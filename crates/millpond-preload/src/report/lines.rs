//! Lines on the standard error of the start.

use std::os::fd::RawFd;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use crate::runtime::sys::sys;
use crate::runtime::{config, link};

/// The stderr of the start, out of the program's way; -1 if there is none.
static STDERR: AtomicI32 = AtomicI32::new(-1);

/// Keeps a duplicate of the stderr that is `fd`, as programs close it before they end: which number
/// is ours now, if there is one.
pub fn keep_stderr(fd: RawFd) -> Option<RawFd> {
    // SAFETY: duplicating a descriptor touches no memory.
    let copy =
        unsafe { sys!(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, config::get().internal_fd_min) }
            as RawFd;
    STDERR.store(copy.max(-1), Relaxed);
    (copy >= 0).then_some(copy)
}

/// Whether `fd` is our stderr.
pub fn is_stderr(fd: RawFd) -> bool {
    STDERR.load(Relaxed) == fd
}

/// Prints a sentence on that stderr, if there is one.
pub fn print(sentence: &str) {
    let stderr = STDERR.load(Relaxed);
    if stderr >= 0 {
        write(stderr, sentence);
    }
}

/// In a forked child.
pub fn after_fork() {
    let stderr = STDERR.swap(-1, Relaxed);
    if stderr >= 0 {
        // SAFETY: the duplicate of the library's own descriptor that fork made.
        unsafe { sys!(libc::SYS_close, stderr) };
    }
}

/// Bytes written to the file behind `fd` are not in the file, and there may be no call that could return the error.
pub fn warn_unwritten(fd: RawFd, errno: i32) {
    let mut path = [0u8; libc::PATH_MAX as usize];
    let path = printable(link::path_of(fd, &mut path));
    let error = std::io::Error::from_raw_os_error(errno);
    warn(&format!("millpond: {path}: written bytes are not in the file yet: {error}\n"));
}

/// Dirty pages have no keeper any more that would write them if this process were killed.
pub fn warn_lost_keeper() {
    let pid = std::process::id();
    warn(&format!("millpond: process {pid}: the keeper died; writes go through from now on\n"));
}

/// A path without control characters, which a terminal would obey.
fn printable(path: &[u8]) -> String {
    let path = String::from_utf8_lossy(path);
    path.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn warn(line: &str) {
    let stderr = STDERR.load(Relaxed);
    write(if stderr >= 0 { stderr } else { libc::STDERR_FILENO }, line);
}

fn write(fd: RawFd, line: &str) {
    // SAFETY: the kernel reads `line`. A report that can't be written has nowhere to be reported.
    unsafe { sys!(libc::SYS_write, fd, line.as_ptr(), line.len()) };
}

/// The process's executable.
pub fn program() -> String {
    std::fs::read_link("/proc/self/exe")
        .map(|path| path.to_string_lossy().replace([' ', '\n'], "_"))
        .unwrap_or_default()
}
