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
//! With direct backing also ` direct_reads=3 direct_writes=4 undirected_files=1`: transfers that
//! were handed to the kernel with `O_DIRECT`, and served files for which that could not be had.
//!
//! Of a program and its children only the program itself speaks to people, for all; see `tally`.
//! A process that neither served nor passed a file says nothing. Byte counts are those of read and
//! write calls on regular files under the served directories; memory mappings move no bytes here.
//! What `millpond run --explain` and `--stats` tell is counted apart, by file: `accounts`.
//! Nothing can be lost at an end without a report: every write was through to the kernel, or the
//! keeper has it.

pub mod accounts;
pub mod counts;
mod layout;
pub mod lines;
mod named;
pub mod reason;
pub mod tally;

use std::os::fd::RawFd;

use millpond::Stats;

use crate::report::counts::Counts;
use crate::runtime::{config, section};

/// When the library is loaded: which numbers are the report's.
pub fn initialise() -> impl Iterator<Item = RawFd> {
    accounts::initialise();
    let tally = tally::initialise();
    let is_told = !config::get().is_quiet && tally.is_some();
    let stderr = if is_told { lines::keep_stderr(libc::STDERR_FILENO) } else { None };
    tally.into_iter().chain(stderr)
}

/// In a forked child.
pub fn after_fork() {
    counts::after_fork();
    lines::after_fork();
    tally::after_fork();
    accounts::after_fork();
}

/// At the end of the process: says what it and its children did, or tells the main process. `last`
/// is called first: it counts what was not counted yet, and tells what the engine has done.
pub fn say(last: fn() -> Option<Stats>) {
    section::run(|_| {
        let mut counts = tell_programs(last());
        if !tally::is_own() {
            if !counts.is_empty() {
                tally::append(&counts.fields("-"));
            }
            return;
        }
        counts.add(&tally::take());
        if !config::get().is_quiet && !counts.is_empty() {
            lines::say(&counts.sentence());
        }
    });
}

/// Before exec: the same program goes on under another name, so the line for people can wait.
pub fn put_by(last: fn() -> Option<Stats>) {
    section::run(|_| {
        let counts = tell_programs(last());
        if !counts.is_empty() {
            tally::append(&counts.fields("-"));
        }
    });
}

fn tell_programs(stats: Option<Stats>) -> Counts {
    let counts = Counts::take(stats);
    if let Some(path) = &config::get().report_file
        && !counts.is_empty()
    {
        lines::append(path, &counts.fields(&lines::program()));
    }
    counts
}
