//! A program that rotated its log by `dup2` lost lines: a thread that wrote while the number had no file
//! that the library knew of left its write to the kernel, which wrote at its own offset, and the engine
//! wrote over it. Every line that was written must be in one of the files.

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

/// Most writes come between two rotations then, and some into the middle of one.
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

/// A number whose writes the kernel has: one may be on its way there when the file changes.
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

/// Another incident: a program that printed to such a file with one thread, and wrote with another, lost
/// near half of its lines. libc moves the kernel's offset whenever it likes.
#[test]
fn of_standard_output_that_libc_writes_too() {
    rotate("printed");
}
