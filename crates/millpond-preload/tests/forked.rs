//! Files that are open across a fork: the kernel's while several processes have them, and served again.

mod common;

use common::{Adoption, MODES, Pond, Report, succeed};

const PAGE_BYTES: u64 = 4096;
/// As in `forked.c`.
const AFTER: u64 = 8000 * PAGE_BYTES;

/// On the kernel alone, and served in all ways that there are. What was reported of those that are not random,
/// and may be asked how much was served: the first is with `--eager`.
fn run(scenario: &[&str]) -> Vec<Report> {
    let alone = Pond::new();
    let program = alone.compile("forked.c", &["-O1"]);
    succeed(alone.plain(&program).args(scenario));
    let mut reports = Vec::new();
    for adoption in [Adoption::AtOpen, Adoption::OnUse, Adoption::After(1)] {
        for mode in MODES {
            let pond = Pond::new().in_mode(mode).adopting(adoption);
            succeed(pond.served(&program).args(scenario));
            reports.push(pond.report());
        }
    }
    for pond in Pond::unmeasured() {
        succeed(pond.served(&program).args(scenario));
    }
    reports
}

#[track_caller]
fn assert_served(reports: &[Report], bytes_min: u64) {
    for report in reports {
        assert!(report.passed_for("forked") >= 1, "{}", report.lines);
        assert!(report.served_bytes > bytes_min, "{}", report.lines);
    }
}

/// Goal: a child that execs without the file leaves it to its parent. When the third does, it does not tell.
#[test]
fn a_child_that_execs() {
    assert_served(&run(&["execs"]), 2 * AFTER * 8 / 10);
}

/// Goal: so does one that closes it, by whatever call, and lives on; or ends.
#[test]
fn a_child_that_closes() {
    assert_served(&run(&["closes"]), 4 * AFTER * 8 / 10);
}

/// Goal: so does one that is killed.
#[test]
fn a_child_that_is_killed() {
    assert_served(&run(&["killed"]), AFTER / 2);
}

/// Goal: a grandchild has it still when the child has ended or become another program: what it writes is read.
/// When it has ended, too, the file is served.
#[test]
fn a_grandchild_that_goes_on() {
    assert_served(&run(&["grandchild", "0"]), AFTER / 2);
    run(&["grandchild", "1"]);
}

/// Goal: another program that has it after an exec goes on at its offset, and what it writes is read: for
/// good. By fork and exec, by a child's spawn, by a second number, and by one that replaced a file that an exec would
/// have closed.
/// Incident: the parent took it for closed by the exec of a child. It served the file, and left the program behind at
/// an old offset.
#[test]
fn a_program_that_keeps_it() {
    for way in ["0", "1", "2", "3"] {
        for report in run(&["kept", way]) {
            assert!(report.served_bytes < 3000 * PAGE_BYTES, "{way}: {}", report.lines);
        }
    }
}

/// Goal: so it is of one that got it from a child in a message.
#[test]
fn one_who_was_sent_it() {
    run(&["sent"]);
}

/// Goal: what a child writes by a mapping is read, though it has closed the file, and what it reads there was
/// written; served when it has ended.
#[test]
fn a_child_that_maps_and_closes() {
    for way in ["0", "1"] {
        assert_served(&run(&["mapped", way]), AFTER / 2);
    }
}

/// Goal: a child has it for itself when its parent has ended or closed it.
#[test]
fn a_parent_that_goes_first() {
    for way in ["0", "1"] {
        assert_served(&run(&["orphan", way]), AFTER * 8 / 10);
    }
}

/// Goal: who has other programs do work goes on with its files served.
#[test]
fn a_server_that_calls_others() {
    assert_served(&run(&["server"]), 30 * 2000 * PAGE_BYTES / 2);
}

/// Goal: streams are served again where they were before.
#[test]
fn a_stream() {
    assert_served(&run(&["stream"])[..MODES.len()], 8000 * 256 * 8 / 10);
}

/// Goal: a file of several descriptions is served again when no other process has one of them.
#[test]
fn one_of_several_descriptions() {
    let reports = run(&["several"]);
    // With --eager such a file is the kernel's.
    assert_served(&reports[MODES.len()..], AFTER);
}

/// Goal: a child has none of its parent's locks, and its own are not ended by what the library closes.
#[test]
fn locks_of_a_child() {
    assert_served(&run(&["locks"]), AFTER / 2);
}

/// Goal: a call that goes on while a child closes the file is over when its parent has it alone.
#[test]
fn calls_that_go_on_over_the_close() {
    run(&["races"]);
}

/// Goal: what a child can't have it neither reads nor writes, nor has another file in its place: where the limit on
/// numbers is below them, and where no number is free.
#[test]
fn what_a_child_can_not_have() {
    for way in ["0", "1"] {
        run(&["hidden", way]);
    }
}

/// Goal: of a file that one thread opens while another one forks the child has none, or it is shared.
#[test]
fn opens_beside_a_fork() {
    run(&["opens"]);
}

/// Goal: whatever the processes of a tree do with what they share, each finds what the kernel would show.
#[test]
fn a_tree_at_random() {
    let alone = Pond::new();
    let program = alone.compile("forked_tree.c", &["-O1"]);
    let model = alone.aside("model");
    let run = |mut command: std::process::Command, seed: u64| {
        println!("seed {seed}");
        succeed(command.arg(seed.to_string()).arg(&model));
    };
    let first =
        std::env::var("MILLPOND_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    run(alone.plain(&program), first);
    let adoptions =
        [Adoption::AtOpen, Adoption::OnUse, Adoption::After(1), Adoption::Random(first)];
    let ponds = adoptions
        .into_iter()
        .flat_map(|adoption| MODES.map(|mode| Pond::new().in_mode(mode).adopting(adoption)));
    for (seed, pond) in (first..).zip(ponds) {
        run(pond.served(&program), seed);
        let report = pond.report();
        assert!(report.served_bytes > 1 << 20, "{}", report.lines);
    }
}
