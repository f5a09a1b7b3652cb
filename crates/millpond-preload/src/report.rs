//! What was served and what was passed, and why; said once, when the process ends.
//!
//! To people: one line on the stderr that existed at the start (`MILLPOND_QUIET=1` silences it).
//! To programs: one line appended to `MILLPOND_REPORT_FILE`, of the form
//!
//! ```text
//! pid=7 program=/usr/bin/sort served_files=2 served_bytes=512 passed_files=1 passed_bytes=9 \
//!     passed:inherited=1/9
//! ```
//!
//! A process that neither served nor passed a file says nothing. Byte counts are those of read and
//! write calls on regular files under the served directories; memory mappings move no bytes here.
//! Nothing can be lost at an end without a report: every write was through to the kernel.

use std::fmt::Write as _;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU64};

use crate::config;
use crate::real::sys;
use crate::registry;
use crate::section;
use crate::table::{self, Slot};
use crate::thread;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident => $text:literal,)*) => {
        /// Why a file is left to the kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Reason { $($(#[$doc])* $name,)* }

        const REASONS: &[(Reason, &str)] = &[$((Reason::$name, $text),)*];
    };
}

reasons! {
    /// Open when the program started, or received, or opened past the hooks.
    Inherited => "inherited",
    /// Standard input, output or error: libc reads and writes there by itself.
    Stdio => "stdio",
    /// Somebody else had it open in a way that allows changes.
    OpenElsewhere => "open-elsewhere",
    /// Somebody else opened it, and broke the lease.
    OpenedElsewhere => "opened-elsewhere",
    /// The program has it open twice, once for writing.
    OpenTwice => "open-twice",
    /// The file system, or the file's owner, allows no lease.
    NoLease => "no-lease",
    /// Not on a local file system.
    FileSystem => "file-system",
    /// Opened with `O_DIRECT`.
    Direct => "o-direct",
    /// Opened with `O_APPEND` on a kernel that can't write there at an offset (before 6.9).
    Append => "o-append",
    /// Open at a fork: the child shares it.
    Forked => "forked",
    /// Given to another program: exec, spawn, or over a socket.
    Given => "given",
    /// Mapped shared and writable.
    Mapped => "mapped",
    /// Changed in a way that only the kernel does: its flags, its blocks, or by path.
    Changed => "changed",
    /// Written inside libc.
    InLibc => "in-libc",
    /// No descriptor was left for the engine.
    Descriptors => "descriptors",
    /// The engine could not take it.
    Engine => "engine",
}

impl Reason {
    pub fn of_bits(bits: u32) -> Self {
        REASONS.get(bits as usize).map_or(Reason::Engine, |(reason, _)| *reason)
    }
}

static FILES_SERVED: AtomicU64 = AtomicU64::new(0);
static FILES_PASSED: [AtomicU64; REASONS.len()] = [const { AtomicU64::new(0) }; REASONS.len()];
static BYTES_PASSED: [AtomicU64; REASONS.len()] = [const { AtomicU64::new(0) }; REASONS.len()];
/// Bytes served that an earlier line has told already.
static BYTES_TOLD: AtomicU64 = AtomicU64::new(0);
/// The stderr of the start, out of the program's way; -1 if there is none.
static STDERR: AtomicI32 = AtomicI32::new(-1);

pub fn count_file_served() {
    FILES_SERVED.fetch_add(1, Relaxed);
}

pub fn count_file_passed(reason: Reason) {
    FILES_PASSED[reason as usize].fetch_add(1, Relaxed);
}

pub fn count_bytes_passed(reason: Reason, result: isize) {
    if result > 0 {
        BYTES_PASSED[reason as usize].fetch_add(result as u64, Relaxed);
    }
}

/// Keeps a duplicate of stderr: programs close it before they end.
pub fn initialise() {
    if !config::get().is_quiet {
        keep_stderr(2);
    }
}

fn keep_stderr(fd: RawFd) {
    // SAFETY: duplicating a descriptor touches no memory.
    let copy =
        unsafe { sys!(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, config::get().internal_fd_min) }
            as RawFd;
    if copy >= 0 {
        STDERR.store(copy, Relaxed);
        table::set(copy, Slot::Internal);
    }
}

/// The program wants the number of our stderr for itself.
pub fn move_stderr(fd: RawFd) {
    if STDERR.load(Relaxed) == fd {
        keep_stderr(fd);
        table::set(fd, Slot::Unknown);
    }
}

/// Forgets the counts: in a forked child.
pub fn after_fork() {
    FILES_SERVED.store(0, Relaxed);
    BYTES_TOLD.store(0, Relaxed);
    for count in FILES_PASSED.iter().chain(&BYTES_PASSED) {
        count.store(0, Relaxed);
    }
    let stderr = STDERR.load(Relaxed);
    if stderr >= 0 {
        table::set(stderr, Slot::Internal);
    }
}

/// Says what has happened since the last report, if anything has. At exit and before exec.
pub fn say() {
    section::run(|_| {
        registry::lock().count_moved_by_libc();
        let files_served = FILES_SERVED.swap(0, Relaxed);
        let all = thread::bytes_served();
        let bytes_served = all.saturating_sub(BYTES_TOLD.swap(all, Relaxed));
        let mut passed = Vec::new();
        let (mut files_passed, mut bytes_passed) = (0, 0);
        for (reason, text) in REASONS {
            let files = FILES_PASSED[*reason as usize].swap(0, Relaxed);
            let bytes = BYTES_PASSED[*reason as usize].swap(0, Relaxed);
            if files + bytes > 0 {
                passed.push((*text, files, bytes));
                files_passed += files;
                bytes_passed += bytes;
            }
        }
        if files_served + files_passed + bytes_served + bytes_passed == 0 {
            return;
        }
        if let Some(path) = &config::get().report_file {
            let mut line = format!(
                "pid={} program={} served_files={files_served} served_bytes={bytes_served} \
                 passed_files={files_passed} passed_bytes={bytes_passed}",
                std::process::id(),
                config::get().program,
            );
            for (text, files, bytes) in &passed {
                let _ = write!(line, " passed:{text}={files}/{bytes}");
            }
            line.push('\n');
            append(path, &line);
        }
        let stderr = STDERR.load(Relaxed);
        if stderr >= 0 && !config::get().is_quiet {
            let mut line = format!(
                "millpond: served {files_served} files, {bytes_served} bytes; passed {files_passed} \
                 files, {bytes_passed} bytes to the kernel"
            );
            for (index, (text, files, bytes)) in passed.iter().enumerate() {
                let lead = if index == 0 { " (" } else { "; " };
                let _ = write!(line, "{lead}{text}: {files} files, {bytes} bytes");
            }
            line.push_str(if passed.is_empty() { "\n" } else { ")\n" });
            write(stderr, &line);
        }
    });
}

fn append(path: &std::ffi::CStr, line: &str) {
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT | libc::O_CLOEXEC;
    // SAFETY: `path` is NUL-terminated.
    let fd = unsafe { sys!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0o644) };
    if fd >= 0 {
        write(fd as RawFd, line);
        // SAFETY: the descriptor was opened above and is nobody else's.
        unsafe { sys!(libc::SYS_close, fd) };
    }
}

fn write(fd: RawFd, line: &str) {
    // SAFETY: the kernel reads `line`. A report that can't be written has nowhere to be reported.
    unsafe { sys!(libc::SYS_write, fd, line.as_ptr(), line.len()) };
}
