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
//! With direct backing also ` direct_reads=3 direct_writes=4 undirected_files=1`: transfers that were
//! handed to the kernel with `O_DIRECT`, and served files for which that could not be had.
//!
//! Of a program and its children only the program itself speaks to people, for all; see `tally`.
//! A process that neither served nor passed a file says nothing. Byte counts are those of read and
//! write calls on regular files under the served directories; memory mappings move no bytes here.
//! Nothing can be lost at an end without a report: every write was through to the kernel, or the
//! keeper has it.

use std::fmt::Write as _;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU64};

use millpond::Backing;

use crate::config;
use crate::identity;
use crate::real::sys;
use crate::registry;
use crate::section;
use crate::table::{self, Slot};
use crate::tally;
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
    /// The program has I/O of its own that no hook sees: by io_uring, by a library that binds to libc
    /// first, or with descriptors that only some of its threads have.
    Unseen => "unseen",
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
/// Files served through the kernel's cache though direct backing was asked for.
static FILES_UNDIRECTED: AtomicU64 = AtomicU64::new(0);
/// Transfers with `O_DIRECT` that an earlier line has told already: reads, writes.
static DIRECT_TOLD: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// Bytes served that an earlier line has told already.
static BYTES_TOLD: AtomicU64 = AtomicU64::new(0);
/// The stderr of the start, out of the program's way; -1 if there is none.
static STDERR: AtomicI32 = AtomicI32::new(-1);

pub fn count_file_served() {
    FILES_SERVED.fetch_add(1, Relaxed);
}

pub fn count_file_undirected() {
    FILES_UNDIRECTED.fetch_add(1, Relaxed);
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
    if !config::get().is_quiet && tally::is_own() {
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
    let single = [&FILES_SERVED, &FILES_UNDIRECTED, &BYTES_TOLD];
    let all = single.into_iter().chain(&DIRECT_TOLD).chain(&FILES_PASSED).chain(&BYTES_PASSED);
    for count in all {
        count.store(0, Relaxed);
    }
    let stderr = STDERR.swap(-1, Relaxed);
    if stderr >= 0 {
        // SAFETY: the duplicate of the library's own descriptor that fork made.
        unsafe { sys!(libc::SYS_close, stderr) };
    }
}

/// What was counted, by whom.
#[derive(Default)]
struct Counts {
    served_files: u64,
    served_bytes: u64,
    /// With direct backing: files that went without, transfers that were direct.
    undirected_files: u64,
    direct_reads: u64,
    direct_writes: u64,
    /// Per reason: files, bytes.
    passed: [(u64, u64); REASONS.len()],
}

impl Counts {
    /// What this process has counted since the last time.
    fn take() -> Self {
        let all = thread::bytes_served();
        let mut counts = Self {
            served_files: FILES_SERVED.swap(0, Relaxed),
            served_bytes: all.saturating_sub(BYTES_TOLD.swap(all, Relaxed)),
            ..Self::default()
        };
        if config::get().backing == Backing::Direct {
            counts.undirected_files = FILES_UNDIRECTED.swap(0, Relaxed);
            // Takes time in proportion to what is cached.
            if let Some(stats) = registry::stats() {
                let since = |all: u64, told: &AtomicU64| all - told.swap(all, Relaxed);
                counts.direct_reads = since(stats.direct_reads, &DIRECT_TOLD[0]);
                counts.direct_writes = since(stats.direct_writes, &DIRECT_TOLD[1]);
            }
        }
        for (index, passed) in counts.passed.iter_mut().enumerate() {
            *passed = (FILES_PASSED[index].swap(0, Relaxed), BYTES_PASSED[index].swap(0, Relaxed));
        }
        counts
    }

    fn passed_files(&self) -> u64 {
        self.passed.iter().map(|(files, _)| files).sum()
    }

    fn passed_bytes(&self) -> u64 {
        self.passed.iter().map(|(_, bytes)| bytes).sum()
    }

    fn is_empty(&self) -> bool {
        self.served_files + self.served_bytes + self.passed_files() + self.passed_bytes() == 0
    }

    /// The reasons that count, in words.
    fn reasons(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        REASONS
            .iter()
            .zip(self.passed)
            .filter(|(_, (files, bytes))| files + bytes > 0)
            .map(|((_, text), (files, bytes))| (*text, files, bytes))
    }

    /// What is told of direct backing, where that was asked for.
    fn direct(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let all = [
            ("direct_reads", self.direct_reads),
            ("direct_writes", self.direct_writes),
            ("undirected_files", self.undirected_files),
        ];
        all.into_iter().filter(|_| config::get().backing == Backing::Direct)
    }

    /// The line for programs.
    fn fields(&self) -> String {
        let mut line = format!(
            "pid={} program={} served_files={} served_bytes={} passed_files={} passed_bytes={}",
            std::process::id(),
            config::get().program,
            self.served_files,
            self.served_bytes,
            self.passed_files(),
            self.passed_bytes(),
        );
        for (text, files, bytes) in self.reasons() {
            let _ = write!(line, " passed:{text}={files}/{bytes}");
        }
        for (name, count) in self.direct() {
            let _ = write!(line, " {name}={count}");
        }
        line.push('\n');
        line
    }

    /// Adds what lines for programs say.
    fn add(&mut self, lines: &str) {
        for (name, value) in lines.split_whitespace().filter_map(|field| field.split_once('=')) {
            let number = value.parse().unwrap_or(0);
            match name {
                "served_files" => self.served_files += number,
                "served_bytes" => self.served_bytes += number,
                "direct_reads" => self.direct_reads += number,
                "direct_writes" => self.direct_writes += number,
                "undirected_files" => self.undirected_files += number,
                _ => {
                    let Some(reason) = name.strip_prefix("passed:") else { continue };
                    let index = REASONS.iter().position(|(_, text)| *text == reason);
                    let parts = value.split_once('/').unwrap_or_default();
                    if let Some(index) = index {
                        self.passed[index].0 += parts.0.parse::<u64>().unwrap_or(0);
                        self.passed[index].1 += parts.1.parse::<u64>().unwrap_or(0);
                    }
                }
            }
        }
    }

    /// The line for people.
    fn sentence(&self) -> String {
        let mut line = format!(
            "millpond: served {} files, {} bytes; passed {} files, {} bytes to the kernel",
            self.served_files,
            self.served_bytes,
            self.passed_files(),
            self.passed_bytes(),
        );
        for (index, (text, files, bytes)) in self.reasons().enumerate() {
            let lead = if index == 0 { " (" } else { "; " };
            let _ = write!(line, "{lead}{text}: {files} files, {bytes} bytes");
        }
        if self.passed_files() + self.passed_bytes() > 0 {
            line.push(')');
        }
        if config::get().backing == Backing::Direct {
            let _ = write!(
                line,
                "; direct: {} reads, {} writes, {} files without",
                self.direct_reads, self.direct_writes, self.undirected_files,
            );
        }
        line.push('\n');
        line
    }
}

/// At the end of the process: says what it and its children did, or tells the main process.
pub fn say() {
    section::run(|_| {
        let mut counts = tell_programs();
        if !tally::is_own() {
            if !counts.is_empty() {
                tally::append(&counts.fields());
            }
            return;
        }
        counts.add(&tally::take());
        let stderr = STDERR.load(Relaxed);
        if stderr >= 0 && !config::get().is_quiet && !counts.is_empty() {
            write(stderr, &counts.sentence());
        }
    });
}

/// Before exec: the same program goes on under another name, so the line for people can wait.
pub fn put_by() {
    section::run(|_| {
        let counts = tell_programs();
        if !counts.is_empty() {
            tally::append(&counts.fields());
        }
    });
}

fn tell_programs() -> Counts {
    let registry = registry::lock();
    registry::tell_lost_keeper(&registry);
    registry.count_moved_by_libc();
    drop(registry);
    let counts = Counts::take();
    if let Some(path) = &config::get().report_file
        && !counts.is_empty()
    {
        append(path, &counts.fields());
    }
    counts
}

/// What was written to the file behind `fd` is not in the file, and there may be no call that could
/// say so.
pub fn warn_unwritten(fd: RawFd, errno: i32) {
    let mut link = [0u8; 32];
    let text = identity::format_link(fd, &mut link);
    let mut path = [0u8; libc::PATH_MAX as usize];
    // SAFETY: `text` is NUL-terminated, and the kernel writes at most the length of `path`.
    let len = unsafe {
        sys!(libc::SYS_readlinkat, libc::AT_FDCWD, text.as_ptr(), path.as_mut_ptr(), path.len())
    };
    let path = String::from_utf8_lossy(&path[..len.max(0) as usize]);
    let error = std::io::Error::from_raw_os_error(errno);
    let stderr = STDERR.load(Relaxed);
    let stderr = if stderr >= 0 { stderr } else { libc::STDERR_FILENO };
    write(stderr, &format!("millpond: {path}: written bytes are not in the file yet: {error}\n"));
}

/// What waits in the cache has nobody any more who would write it if this process were killed.
pub fn warn_lost_keeper() {
    let stderr = STDERR.load(Relaxed);
    let stderr = if stderr >= 0 { stderr } else { libc::STDERR_FILENO };
    let pid = std::process::id();
    write(
        stderr,
        &format!("millpond: process {pid}: the keeper died; writes go through from now on\n"),
    );
}

/// Appends a line to a file, by one write.
pub fn append(path: &std::ffi::CStr, line: &str) {
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
