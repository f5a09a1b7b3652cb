//! What is counted, and how it is said.

use std::fmt::Write as _;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use millpond::{Backing, Stats};

use crate::report::reason::{REASONS, Reason};
use crate::runtime::{config, thread};

const _: () = assert!(REASONS.len() <= thread::REASONS_MAX);

static FILES_SERVED: AtomicU64 = AtomicU64::new(0);
static FILES_PASSED: [AtomicU64; REASONS.len()] = [const { AtomicU64::new(0) }; REASONS.len()];
/// Bytes that an earlier line has told already.
static PASSED_TOLD: [AtomicU64; REASONS.len()] = [const { AtomicU64::new(0) }; REASONS.len()];
/// Files served through the kernel's cache though direct backing was asked for.
static FILES_UNDIRECTED: AtomicU64 = AtomicU64::new(0);
/// How often the cache shrank under memory pressure.
static SHRUNK: AtomicU64 = AtomicU64::new(0);
/// Transfers with `O_DIRECT` that an earlier line has told already: reads, writes.
static DIRECT_TOLD: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// Bytes served that an earlier line has told already.
static BYTES_TOLD: AtomicU64 = AtomicU64::new(0);

pub fn count_file_served() {
    FILES_SERVED.fetch_add(1, Relaxed);
}

pub fn count_file_undirected() {
    FILES_UNDIRECTED.fetch_add(1, Relaxed);
}

pub fn count_shrunk() {
    SHRUNK.fetch_add(1, Relaxed);
}

pub fn count_file_passed(reason: Reason) {
    FILES_PASSED[reason as usize].fetch_add(1, Relaxed);
}

pub fn count_bytes_passed(reason: Reason, result: isize) {
    if result > 0 {
        thread::record().count_passed(reason as usize, result as u64);
    }
}

/// Forgets the counts: in a forked child.
pub fn after_fork() {
    let single = [&FILES_SERVED, &FILES_UNDIRECTED, &BYTES_TOLD, &SHRUNK];
    let all = single.into_iter().chain(&DIRECT_TOLD).chain(&FILES_PASSED).chain(&PASSED_TOLD);
    for count in all {
        count.store(0, Relaxed);
    }
}

/// What was counted.
#[derive(Default)]
pub struct Counts {
    served_files: u64,
    served_bytes: u64,
    shrunk: u64,
    /// With direct backing: files that went without, transfers that were direct.
    undirected_files: u64,
    direct_reads: u64,
    direct_writes: u64,
    /// Per reason: files, bytes.
    passed: [(u64, u64); REASONS.len()],
}

impl Counts {
    /// What this process has counted since the last time, with what the engine has.
    pub fn take(stats: Option<Stats>) -> Self {
        let all = thread::bytes_served();
        let mut counts = Self {
            served_files: FILES_SERVED.swap(0, Relaxed),
            served_bytes: all.saturating_sub(BYTES_TOLD.swap(all, Relaxed)),
            shrunk: SHRUNK.swap(0, Relaxed),
            ..Self::default()
        };
        if config::get().backing == Backing::Direct {
            counts.undirected_files = FILES_UNDIRECTED.swap(0, Relaxed);
            if let Some(stats) = stats {
                let since = |all: u64, told: &AtomicU64| all - told.swap(all, Relaxed);
                counts.direct_reads = since(stats.direct_reads, &DIRECT_TOLD[0]);
                counts.direct_writes = since(stats.direct_writes, &DIRECT_TOLD[1]);
            }
        }
        for (index, passed) in counts.passed.iter_mut().enumerate() {
            let bytes = thread::bytes_passed(index);
            let told = PASSED_TOLD[index].swap(bytes, Relaxed);
            *passed = (FILES_PASSED[index].swap(0, Relaxed), bytes.saturating_sub(told));
        }
        counts
    }

    fn passed_files(&self) -> u64 {
        self.passed.iter().map(|(files, _)| files).sum()
    }

    fn passed_bytes(&self) -> u64 {
        self.passed.iter().map(|(_, bytes)| bytes).sum()
    }

    pub fn is_empty(&self) -> bool {
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

    /// The line for programs; `program` is what the process runs.
    pub fn fields(&self, program: &str) -> String {
        let mut line = format!(
            "pid={} program={} served_files={} served_bytes={} passed_files={} passed_bytes={}",
            std::process::id(),
            program,
            self.served_files,
            self.served_bytes,
            self.passed_files(),
            self.passed_bytes(),
        );
        for (text, files, bytes) in self.reasons() {
            let _ = write!(line, " passed:{text}={files}/{bytes}");
        }
        if self.shrunk > 0 {
            let _ = write!(line, " shrunk={}", self.shrunk);
        }
        for (name, count) in self.direct() {
            let _ = write!(line, " {name}={count}");
        }
        line.push('\n');
        line
    }

    /// Adds what lines for programs say.
    pub fn add(&mut self, lines: &str) {
        for (name, value) in lines.split_whitespace().filter_map(|field| field.split_once('=')) {
            let number = value.parse().unwrap_or(0);
            match name {
                "served_files" => self.served_files += number,
                "served_bytes" => self.served_bytes += number,
                "shrunk" => self.shrunk += number,
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
    pub fn sentence(&self) -> String {
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
        if self.shrunk > 0 {
            let _ = write!(line, "; {} times less cache, for want of memory", self.shrunk);
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
