//! Reports tests that this machine can't run, in one format. `./test` prints their number and
//! reasons at its end.
//!
//! The tests of the other crates include this file by its path.

use std::fmt::Display;
use std::io::Write;
use std::panic::Location;

/// The file that gets a line for each skip; without it they are only printed.
const FILE: &str = "MILLPOND_SKIPPED_FILE";

/// With `1`, a skipped test fails.
const STRICT: &str = "MILLPOND_STRICT";

/// Reports that this machine can't run the calling test, or a case of it, for `reason`.
#[track_caller]
pub fn skip(reason: impl Display) {
    let (place, thread) = (Location::caller(), std::thread::current());
    // In a process with one test, the thread is the main thread.
    let inside = std::env::var("MILLPOND_TEST_INSIDE").ok();
    let test = inside.as_deref().or(thread.name()).unwrap_or("?");
    let reason = reason.to_string().replace('\n', " ");
    let line = format!("{}:{}: {test}: {reason}\n", place.file(), place.line());
    print!("SKIPPED: {line}");
    if let Some(path) = std::env::var_os(FILE) {
        let file = std::fs::File::options().append(true).create(true).open(&path);
        // One write, as other processes append, too.
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("{}: {error}; skipped: {line}", path.display()));
    }
    let is_strict = std::env::var(STRICT).is_ok_and(|value| value == "1");
    assert!(!is_strict, "skipped, which {STRICT}=1 forbids: {line}");
}
