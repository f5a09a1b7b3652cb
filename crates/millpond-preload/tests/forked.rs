//! Files of mode back that are open across a fork: the kernel serves them from then on, in parent and child.

mod common;

use common::{MODES, Pond, Report, ServedFiles, succeed};

/// Runs the scenario on the kernel alone, and in mode back in all ways. Returns the reports of the runs that do not
/// hand files over at random moments.
fn run(scenario: &[&str]) -> Vec<Report> {
    let alone = Pond::new();
    let program = alone.compile("forked.c", &["-O1"]);
    succeed(alone.plain(&program).args(scenario));
    let mut reports = Vec::new();
    for files in [ServedFiles::Eager, ServedFiles::Default] {
        for mode in MODES {
            let pond = Pond::new().in_mode(mode).serving(files);
            succeed(pond.served(&program).args(scenario));
            reports.push(pond.report());
        }
    }
    for pond in Pond::unmeasured() {
        succeed(pond.served(&program).args(scenario));
    }
    reports
}

/// Goal: parent and child find the bytes and the offset of the kernel, after each call that the child may make on the
/// shared file.
#[track_caller]
fn assert_handed_over(scenario: &[&str]) {
    for report in run(scenario) {
        assert!(report.passed_for("forked") >= 1, "{scenario:?}: {}", report.lines);
    }
}

#[test]
fn a_child_that_execs() {
    assert_handed_over(&["execs"]);
}

#[test]
fn a_child_that_closes() {
    assert_handed_over(&["closes"]);
}

#[test]
fn a_child_that_is_killed() {
    assert_handed_over(&["killed"]);
}

#[test]
fn a_grandchild_that_goes_on() {
    assert_handed_over(&["grandchild", "0"]);
    assert_handed_over(&["grandchild", "1"]);
}

/// Goal: a program that inherits the file over an exec continues at its offset, and the parent reads its writes.
#[test]
fn a_program_that_keeps_it() {
    for way in ["0", "1", "2", "3"] {
        run(&["kept", way]);
    }
}

/// Goal: the same for a process that received the descriptor from a child in a message.
#[test]
fn a_process_that_was_sent_it() {
    run(&["sent"]);
}

/// Goal: the parent reads a child's writes by a mapping, even after the child has closed the file.
#[test]
fn a_child_that_maps_and_closes() {
    for way in ["0", "1"] {
        assert_handed_over(&["mapped", way]);
    }
}

#[test]
fn a_parent_that_goes_first() {
    for way in ["0", "1"] {
        assert_handed_over(&["orphan", way]);
    }
}

#[test]
fn a_server_that_calls_other_programs() {
    run(&["server"]);
}

#[test]
fn a_stream() {
    run(&["stream"]);
}

#[test]
fn one_of_several_descriptions() {
    run(&["several"]);
}

/// Goal: a child has none of its parent's locks, and closes by the library do not end the child's own locks.
#[test]
fn locks_of_a_child() {
    run(&["locks"]);
}

#[test]
fn calls_that_go_on_over_the_close() {
    run(&["races"]);
}

/// Goal: a descriptor that a child may not have can be neither read nor written there, and no other file takes its
/// number. This holds if the limit on descriptors is below these numbers, and if no number is free.
#[test]
fn descriptors_that_a_child_may_not_have() {
    for way in ["0", "1"] {
        run(&["hidden", way]);
    }
}

/// Goal: if one thread opens a file while another thread forks, the child does not have the file, or it is shared.
#[test]
fn opens_beside_a_fork() {
    run(&["opens"]);
}
