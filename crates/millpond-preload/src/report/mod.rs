//! Served and passed files and bytes, and the reasons; said once, when the process ends.
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
//! Of a program and its children only the program itself speaks to people, for all; see `tally`. Where it
//! can't, as a signal has ended it, or a system call of its own, `millpond run` does.
//! A process that neither served nor passed a file says nothing. Byte counts are those of read and
//! write calls on regular files under the served directories; memory mappings move no bytes here.
//! `millpond run --explain` and `--stats` have counts of their own, by file: `accounts`.
//! Nothing can be lost at an end without a report: every write was through to the kernel, or the
//! keeper has it.

pub mod accounts;
pub mod counts;
mod layout;
pub mod lines;
mod named;
pub mod reason;
pub mod tally;
#[allow(dead_code, reason = "some of it is `millpond run`'s alone")]
mod told;

use std::os::fd::RawFd;

use millpond::Stats;

use crate::report::counts::Told;
use crate::report::told::Sums;
// `told` is compiled into `millpond run`, too, which has its own places for these.
use crate::runtime::block;
use crate::runtime::{config, section};

/// In lines for programs, or to the main process; and, in that, in lines for people.
static TOLD: Told = Told::nothing();
static TOLD_PEOPLE: Told = Told::nothing();

/// When the library is loaded: which numbers are the report's.
pub fn initialise() -> impl Iterator<Item = RawFd> {
    accounts::initialise();
    let tally = tally::initialise();
    // This process has reported before its exec.
    TOLD.take(counts::sums(None));
    let is_told = !config::get().is_quiet && tally.is_some();
    let stderr = if is_told { lines::keep_stderr(libc::STDERR_FILENO) } else { None };
    tally.into_iter().chain(stderr)
}

/// In a forked child.
pub fn after_fork() {
    counts::after_fork();
    TOLD.forget();
    TOLD_PEOPLE.forget();
    lines::after_fork();
    tally::after_fork();
    accounts::after_fork();
}

/// At the end of the process: reports the counts of it and its children, or adds them to those of the main process. `last`
/// is called first: it counts bytes that were not counted yet, and returns the engine's statistics.
pub fn say(last: fn() -> Option<Stats>) {
    section::run(|_| {
        let own = counts::sums(last());
        tell(own.clone());
        if !tally::is_own() || config::get().is_quiet {
            return;
        }
        let mut all = own;
        let children = tally::of_children();
        children.0.iter().enumerate().for_each(|(word, count)| all.add(word, *count));
        let all = TOLD_PEOPLE.take(all);
        tally::note_said();
        if !all.is_empty() {
            lines::say(&all.sentence(counts::direct()));
        }
    });
}

/// Before exec: the same program goes on under another name, so the line for people can wait.
pub fn put_by(last: fn() -> Option<Stats>) {
    section::run(|_| tell(counts::sums(last())));
}

/// Tells programs, and the main process if this is a child: the new counts in `sums`.
fn tell(sums: Sums) {
    let new = TOLD.take(sums);
    if new.is_empty() {
        return;
    }
    if let Some(path) = &config::get().report_file {
        lines::append(path, &counts::fields(&new, &lines::program()));
    }
    if !tally::is_own() {
        tally::add(&new);
    }
}
