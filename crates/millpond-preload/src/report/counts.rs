//! The counters, and the line for programs; see `told` for people.
//!
//! Threads count in blocks (`runtime::block`), whose sums only grow, over an exec too. A line has the counts since the last one.

use std::fmt::Write as _;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use millpond::{Backing, Stats};

use crate::report::accounts;
use crate::report::reason::Reason;
use crate::report::told::{Direct, Sums};
use crate::runtime::block::*;
use crate::runtime::{config, thread};

/// The counts of earlier lines.
pub struct Told([AtomicU64; WORDS]);

impl Told {
    pub const fn nothing() -> Self {
        Self([const { AtomicU64::new(0) }; WORDS])
    }

    /// The difference of `sums` to earlier lines, which it then belongs to.
    pub fn take(&self, mut sums: Sums) -> Sums {
        for (told, sum) in self.0.iter().zip(&mut sums.0) {
            *sum = sum.wrapping_sub(told.swap(*sum, Relaxed));
        }
        sums
    }

    pub fn forget(&self) {
        self.0.iter().for_each(|told| told.store(0, Relaxed));
    }
}

pub fn count_file_served() {
    thread::record().count(SERVED_FILES, 1);
}

pub fn count_file_undirected() {
    thread::record().count(UNDIRECTED_FILES, 1);
}

pub fn count_shrunk() {
    thread::record().count(SHRUNK, 1);
    accounts::count_shrunk();
}

pub fn count_file_passed(reason: Reason) {
    thread::record().count(PASSED_FILES + reason as usize, 1);
}

/// It has another reason, or is served.
pub fn uncount_file_passed(reason: Reason) {
    thread::record().count(PASSED_FILES + reason as usize, 1_u64.wrapping_neg());
}

pub fn count_bytes_passed(reason: Reason, result: isize) {
    if result > 0 {
        thread::record().count_passed(reason as usize, result as u64);
    }
}

/// Transfers with O_DIRECT of this engine that are in a block already: reads, writes.
static DIRECT_NOTED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// In a forked child, which has no engine yet.
pub fn after_fork() {
    DIRECT_NOTED.iter().for_each(|noted| noted.store(0, Relaxed));
}

/// The counts of this process, before an exec too, and of the engine.
pub fn sums(stats: Option<Stats>) -> Sums {
    if let Some(stats) = stats {
        let words = [(DIRECT_READS, stats.direct_reads), (DIRECT_WRITES, stats.direct_writes)];
        for ((word, count), noted) in words.into_iter().zip(&DIRECT_NOTED) {
            thread::record().count(word, count - noted.swap(count, Relaxed));
        }
    }
    Sums(thread::sums())
}

/// The part of the line about direct backing.
pub fn direct() -> Direct {
    if config::get().backing == Backing::Direct { Direct::All } else { Direct::Nothing }
}

/// The line for programs; `program` is the process's executable.
pub fn fields(sums: &Sums, program: &str) -> String {
    let mut line = format!(
        "pid={} program={} served_files={} served_bytes={} passed_files={} passed_bytes={}",
        std::process::id(),
        program,
        sums.get(SERVED_FILES),
        sums.get(SERVED_BYTES),
        sums.passed_files(),
        sums.passed_bytes(),
    );
    for (text, files, bytes) in sums.reasons() {
        let _ = write!(line, " passed:{text}={files}/{bytes}");
    }
    if sums.get(SHRUNK) > 0 {
        let _ = write!(line, " shrunk={}", sums.get(SHRUNK));
    }
    if direct() == Direct::All {
        let _ = write!(
            line,
            " direct_reads={} direct_writes={} undirected_files={}",
            sums.get(DIRECT_READS),
            sums.get(DIRECT_WRITES),
            sums.get(UNDIRECTED_FILES),
        );
    }
    line.push('\n');
    line
}
