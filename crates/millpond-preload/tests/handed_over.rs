//! Files of mode back that are handed to the kernel during reads and writes: no write is lost, and no read returns
//! old bytes.

mod common;

use common::{MODES, Pond, Report, ServedFiles, succeed};

/// Runs the scenario on the kernel alone, in mode back, and handed over at random moments. Returns the reports of
/// mode back.
fn run(source: &str, scenario: &[&str]) -> Vec<Report> {
    let alone = Pond::new();
    let program = alone.compile(source, &["-O1"]);
    succeed(alone.plain(&program).args(scenario));
    for pond in Pond::unmeasured() {
        succeed(pond.served(&program).args(scenario));
    }
    let choices = [ServedFiles::Default, ServedFiles::Eager];
    let ponds = MODES.into_iter().flat_map(|mode| choices.map(|files| (mode, files)));
    ponds
        .map(|(mode, files)| {
            let pond = Pond::new().in_mode(mode).serving(files);
            succeed(pond.served(&program).args(scenario));
            pond.report()
        })
        .collect()
}

/// Goal: a thread reads its own writes, at each moment at which the file may be handed over.
#[test]
fn while_threads_write() {
    run("handed_over.c", &["writers"]);
}

/// Goal: each call moves the offset once.
#[test]
fn while_the_offset_moves() {
    run("handed_over.c", &["offsets"]);
}

/// Goal: the same for seeks.
#[test]
fn while_a_thread_seeks() {
    run("handed_over.c", &["seeks"]);
}

/// Goal: a child that shares the offset reads its part, once, also after an exec.
#[test]
fn while_the_process_forks() {
    run("handed_over.c", &["forked"]);
}

/// Goal: the program reads the bytes that another process has written.
#[test]
fn while_another_process_opens_the_file() {
    for report in run("handed_over.c", &["others"]) {
        assert!(report.passed_for("opened-elsewhere") >= 1, "{}", report.lines);
    }
}

/// Incident: a write continued by a descriptor that had been closed. It reached the file after the file was served to
/// another descriptor, and the cache kept the old bytes.
#[test]
fn writes_by_closed_descriptors() {
    run("hands.c", &["closed"]);
}

/// Incident: one of two descriptors was opened before the file was renamed into the served directory. Its writes
/// bypassed the cache of the other descriptor.
#[test]
fn files_that_are_renamed_into_served_directories() {
    let elsewhere = Pond::new();
    run("hands.c", &["renamed", elsewhere.aside("renamed").to_str().unwrap()]);
}

/// Incident: the close of a descriptor in the parent ended a lock that a child held, too.
#[test]
fn locks_that_a_child_has() {
    run("hands.c", &["forked"]);
}

/// Incident: flags of a call and of a description were lost: bytes that the program appended overwrote the first
/// bytes of the file.
#[test]
fn flags_of_calls_and_descriptions() {
    run("hands.c", &["flags"]);
    run("hands.c", &["status"]);
}

/// Goal: the pages of a file that is only read have the file's bytes, also after the first write.
#[test]
fn read_and_then_written() {
    run("hands.c", &["mapped"]);
}
