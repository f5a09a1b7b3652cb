//! The counters of this process; see `totals` for the line on standard error.
//!
//! Threads count in blocks (`runtime::count_words`), whose sums only grow. A report has the counts since the last one.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use millpond::stats::Stats;

use crate::report::accounts;
use crate::report::reason::Reason;
use crate::report::totals::Totals;
use crate::runtime::count_words::*;
use crate::runtime::thread;

/// The counts that were reported before.
pub struct Reported([AtomicU64; WORDS]);

impl Reported {
    pub const fn nothing() -> Self {
        Self([const { AtomicU64::new(0) }; WORDS])
    }

    /// The part of `totals` that was not reported before. All of it counts as reported from now on.
    pub fn new_part(&self, mut totals: Totals) -> Totals {
        for (reported, total) in self.0.iter().zip(&mut totals.0) {
            *total = total.wrapping_sub(reported.swap(*total, Relaxed));
        }
        totals
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

/// They were counted, and are not to be.
pub fn uncount_bytes_passed(reason: Reason, bytes: u64) {
    thread::record().count(PASSED_BYTES + reason as usize, bytes.wrapping_neg());
}

/// Transfers with O_DIRECT of this engine that are in a block already: reads, writes.
static DIRECT_NOTED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// In a forked child, which has no engine yet.
pub fn after_fork() {
    DIRECT_NOTED.iter().for_each(|noted| noted.store(0, Relaxed));
}

/// The counts of this process. `stats`: of its engine.
pub fn totals(stats: Option<Stats>) -> Totals {
    if let Some(stats) = stats {
        let words = [(DIRECT_READS, stats.direct_reads), (DIRECT_WRITES, stats.direct_writes)];
        for ((word, count), noted) in words.into_iter().zip(&DIRECT_NOTED) {
            thread::record().count(word, count - noted.swap(count, Relaxed));
        }
    }
    Totals(thread::sums())
}
