//! What can't be tested here says so, in one form, and is counted: `./test` tells of it at its end.
//!
//! The tests of the other crates include this file by its path.

use std::fmt::Display;
use std::io::Write;
use std::panic::Location;

/// The file that gets a line for each skip; without it they are only printed.
const FILE: &str = "MILLPOND_SKIPPED_FILE";

/// With `1`, what is skipped fails.
const STRICT: &str = "MILLPOND_STRICT";

/// Tells that the calling test, or a case of it, can't be here, for `reason`.
#[track_caller]
pub fn skip(reason: impl Display) {
    let (place, thread) = (Location::caller(), std::thread::current());
    // Of a process with one test, the thread is the main one.
    let inside = std::env::var("MILLPOND_TEST_INSIDE").ok();
    let test = inside.as_deref().or(thread.name()).unwrap_or("?");
    let reason = reason.to_string().replace('\n', " ");
    let line = format!("{}:{}: {test}: {reason}\n", place.file(), place.line());
    print!("SKIPPED: {line}");
    if let Some(path) = std::env::var_os(FILE) {
        let file = std::fs::File::options().append(true).create(true).open(&path);
        // One write, as other processes append, too.
        let told = file.and_then(|mut file| file.write_all(line.as_bytes()));
        told.unwrap_or_else(|error| panic!("{}: {error}; skipped: {line}", path.display()));
    }
    let is_strict = std::env::var(STRICT).is_ok_and(|value| value == "1");
    assert!(!is_strict, "skipped, which {STRICT}=1 forbids: {line}");
}
