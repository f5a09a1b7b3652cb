//! The report at the end of a process: numbers of served and passed files and bytes, and the reasons.
//!
//! One line goes to the stderr that existed at the start (`MILLPOND_QUIET=1` silences it). With direct backing it also
//! has transfers that were passed to the kernel with `O_DIRECT`, and served files without direct I/O.
//!
//! Of a program and its children only the program itself prints, the totals of all; see `shared_totals`. A program that is
//! killed prints no line: `millpond run --stats` reports for it.
//! A process that neither served nor passed a file prints nothing. Byte counts are those of read and
//! write calls on regular files under the served directories, and on other files until the library looks at their directory: in mode
//! through by the 64th read of a descriptor, in mode back never if a file is open for reading only. Memory mappings move no
//! bytes here.
//! `millpond run --explain` and `--stats` have counts of their own, by file: `accounts`.
//! Nothing can be lost at an end without a report: every write was through to the kernel, or the
//! keeper has it.

pub mod accounts;
pub mod counts;
mod layout;
pub mod lines;
pub mod reason;
mod shared_files;
pub mod shared_totals;
mod totals;

use std::os::fd::RawFd;

use millpond::Backing;
use millpond::stats::Stats;

use crate::report::counts::Reported;
use crate::report::totals::Totals;
use crate::runtime::{config, section};

/// In the shared totals.
static REPORTED: Reported = Reported::nothing();
/// Of the shared totals, in lines on standard error.
static PRINTED: Reported = Reported::nothing();

/// When the library is loaded: the descriptors that the report uses.
pub fn initialise() -> impl Iterator<Item = RawFd> {
    accounts::initialise();
    let totals = shared_totals::initialise();
    let prints = !config::get().is_quiet && totals.is_some();
    let stderr = if prints { lines::keep_stderr(libc::STDERR_FILENO) } else { None };
    totals.into_iter().chain(stderr)
}

/// In a forked child.
pub fn after_fork() {
    counts::after_fork();
    // The counts so far are the parent's, which reports them.
    REPORTED.new_part(counts::totals(None));
    PRINTED.new_part(Totals::none());
    lines::after_fork();
    shared_totals::after_fork();
    accounts::after_fork();
}

/// At the end of the process: reports its counts, and prints the totals if this is the main process. `last`
/// is called first: it counts bytes that were not counted yet, and returns the engine's statistics.
pub fn report_exit(last: fn() -> Option<Stats>) {
    section::run(|_| {
        report_counts(counts::totals(last()));
        if !shared_totals::is_main_process() || config::get().is_quiet {
            return;
        }
        let new = PRINTED.new_part(shared_totals::all());
        if !new.is_empty() {
            lines::print(&new.sentence(config::get().backing == Backing::Direct));
        }
    });
}

/// Before an exec: reports the counts of this process. The main process prints nothing yet, since the next
/// program is part of the same run.
pub fn report_exec(last: fn() -> Option<Stats>) {
    section::run(|_| report_counts(counts::totals(last())));
}

/// Adds the new counts to the shared totals.
fn report_counts(totals: Totals) {
    let new = REPORTED.new_part(totals);
    if !new.is_empty() {
        shared_totals::add(&new);
    }
}
