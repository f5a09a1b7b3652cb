//! Descriptors that `dup2` replaces during writes: every line that was written must be in one of the files.
//!
//! Incident: a program that rotated its log by `dup2` lost lines. A thread wrote while the descriptor referred to no
//! file known to the library, so the library passed the write to the kernel. The kernel wrote at its own offset, and
//! the engine overwrote the line.

mod common;

use common::{ALL_MODES, Pond, succeed};

fn rotate(how: &str) {
    let alone = Pond::new();
    let program = alone.compile("rotation.c", &["-O1"]);
    succeed(alone.plain(&program).arg(how));
    for mode in ALL_MODES {
        let pond = Pond::new().in_mode(mode);
        succeed(pond.served(&program).arg(how));
    }
}

#[test]
fn as_fast_as_it_can() {
    rotate("fast");
}

/// With pauses most writes come between two rotations, and some in the middle of one.
#[test]
fn with_pauses() {
    rotate("slow");
}

#[test]
fn by_dup3() {
    rotate("dup3");
}

#[test]
fn by_number() {
    rotate("number");
}

#[test]
fn by_several_threads() {
    rotate("threads");
}

#[test]
fn at_the_end() {
    rotate("append");
}

#[test]
fn of_files_that_are_read_too() {
    rotate("both");
}

/// The kernel serves the descriptor's first file; one of its writes may be in flight when the file is replaced.
#[test]
fn of_what_was_no_file() {
    rotate("null");
}

#[test]
fn of_a_file_that_was_passed() {
    rotate("passed");
}

#[test]
fn of_standard_output() {
    rotate("output");
}

/// Incident: a program printed to such a file with one thread and wrote to it with another, and lost nearly half of
/// its lines. libc may move the kernel's offset at any time.
#[test]
fn of_standard_output_that_libc_writes_too() {
    rotate("printed");
}
