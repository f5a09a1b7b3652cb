//! `sendfile`, `copy_file_range` and `splice` on served files. Each call moves as many bytes as on the kernel, with
//! the same offsets and errors, even if another process opens the files during the call.
//!
//! Two incidents. Copies between served files ended after 256 KiB. POSIX lets a call be short, but many callers do
//! not expect it, and their copies had only the beginning of the file. If another process opened the destination
//! during such a copy, the call failed with EAGAIN: `cp` gave up, and left its destination cut.

mod common;

use std::process::Stdio;

use common::{MODES, Mode, Pond, Report, succeed};

/// Runs the scenario in all modes and on the kernel alone; returns each mode's report.
fn run(scenario: &str) -> Vec<(Mode, Report)> {
    let alone = Pond::new();
    let program = alone.compile("copies.c", &["-O1"]);
    succeed(alone.plain(&program).arg(scenario));
    for pond in Pond::unmeasured() {
        succeed(pond.served(&program).arg(scenario));
    }
    MODES
        .map(|mode| {
            let pond = Pond::new().in_mode(mode);
            succeed(pond.served(&program).arg(scenario));
            (mode, pond.report())
        })
        .into()
}

/// Goal: one call copies a whole file, and moves the offset of each description whose offset the caller did not pass.
#[test]
fn one_call_moves_all() {
    for (mode, report) in run("whole") {
        // The files are handed to the kernel, which copies.
        assert!(report.passed_for("changed") >= 2, "{mode:?}: {}", report.lines);
    }
}

/// Goal: a copy to a full destination ends where the room ends, and the next call returns the error.
#[test]
fn what_has_no_room_is_not_consumed() {
    run("no_room");
}

/// Goal: sockets and pipes receive as many bytes as they have room for.
#[test]
fn to_sockets_and_pipes() {
    run("streams");
}

/// Goal: a copy continues when another process opens one of its files during the call.
#[test]
fn files_opened_while_they_are_copied() {
    run("opened_meanwhile");
}

/// Goal: `cp`, which copies by long calls, continues likewise.
#[test]
fn cp_onto_a_file_that_is_opened() {
    for mode in MODES {
        let pond = Pond::new().in_mode(mode);
        let bytes: Vec<u8> = common::lines(2 << 20);
        std::fs::write(pond.path("big"), &bytes).unwrap();
        for round in 0..8u64 {
            let _ = std::fs::remove_file(pond.path("copy"));
            let mut cp = pond.served("cp");
            cp.args(["big", "copy"]).stdout(Stdio::null()).stderr(Stdio::piped());
            let cp = cp.spawn().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(5 + 7 * round));
            let _ = std::fs::File::open(pond.path("copy"));
            let output = cp.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{mode:?}, round {round}: {said}");
            assert!(std::fs::read(pond.path("copy")).unwrap() == bytes, "{mode:?}: differs");
        }
    }
}
