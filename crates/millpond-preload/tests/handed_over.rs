//! Files of mode back that are handed to the kernel amid reads and writes: nothing is lost, and nothing is old.

mod common;

use common::{MODES, Pond, Report, ServedFiles, succeed};

/// On the kernel alone, in mode back, and handed over at random moments. Returns the reports of mode back.
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

/// Goal: a thread reads its own writes, at whichever moment the file is handed over.
#[test]
fn while_threads_write() {
    run("handed_over.c", &["writers"]);
}

/// Goal: each call moves the offset once.
#[test]
fn while_the_offset_moves() {
    run("handed_over.c", &["offsets"]);
}

/// Goal: the same of seeks.
#[test]
fn while_a_thread_seeks() {
    run("handed_over.c", &["seeks"]);
}

/// Goal: a child that shares the offset gets its part, once, also after an exec.
#[test]
fn while_the_process_forks() {
    run("handed_over.c", &["forked"]);
}

/// Goal: the program reads what another process has written.
#[test]
fn while_another_process_opens_the_file() {
    for report in run("handed_over.c", &["others"]) {
        assert!(report.passed_for("opened-elsewhere") >= 1, "{}", report.lines);
    }
}

/// Incident: a write that went on by a descriptor that had been closed landed after the file was served to another
/// one, and the cache kept the old bytes.
#[test]
fn writes_by_closed_descriptors() {
    run("hands.c", &["closed"]);
}

/// Incident: one of two descriptors was opened before the file was renamed into the served directory, and its writes
/// went past the cache of the other.
#[test]
fn files_that_are_renamed_into_served_directories() {
    let elsewhere = Pond::new();
    run("hands.c", &["renamed", elsewhere.aside("renamed").to_str().unwrap()]);
}

/// Incident: a lock that a child had, too, was taken from it when the parent closed its descriptor.
#[test]
fn locks_that_a_child_has() {
    run("hands.c", &["forked"]);
}

/// Incident: flags of a call, and of a description, were forgotten: bytes that were to be appended overwrote the first.
#[test]
fn flags_of_calls_and_descriptions() {
    run("hands.c", &["flags"]);
    run("hands.c", &["status"]);
}

/// Goal: pages of a file that is only read are as they are in the file, also after the first write.
#[test]
fn read_and_then_written() {
    run("hands.c", &["mapped"]);
}
