//! Threads that are cancelled, that end in a signal handler or where libc calls back, while they do
//! I/O on files of ours or on others.
//!
//! The incident: a thread that waited in `read` of a pipe was cancelled, and the program died of
//! SIGABRT, as unwinding met frames that were built to stop it. Threads that looped in hits were never
//! cancelled, so that their joins hung; those with asynchronous cancel type died in our midst.

mod common;

use common::{ALL_MODES, Mode, Pond, Report, succeed};

/// In all modes, and on the kernel alone; what was printed must be the same. Returns what each mode
/// reported.
fn run(scenario: &str) -> Vec<(Mode, Report)> {
    let alone = Pond::new();
    let program = alone.compile("cancel.c", &["-O1"]);
    let expected = succeed(alone.plain(&program).arg(scenario));
    for pond in Pond::unmeasured() {
        assert_eq!(succeed(pond.served(&program).arg(scenario)), expected, "at random");
    }
    ALL_MODES
        .map(|mode| {
            let pond = Pond::new().in_mode(mode);
            let found = succeed(pond.served(&program).arg(scenario));
            for (expected, found) in expected.lines().zip(found.lines()) {
                assert_eq!(found, expected, "{mode:?}");
            }
            assert_eq!(found.lines().count(), expected.lines().count(), "{mode:?}");
            (mode, pond.report())
        })
        .into()
}

/// The same; and nothing may have stayed open, or held, by a thread that is gone: a file that is
/// opened again would be left to the kernel then.
fn run_and_let_go(scenario: &str) {
    for (mode, report) in run(scenario) {
        for reason in ["open-elsewhere", "open-twice"] {
            assert_eq!(report.passed_for(reason), 0, "{mode:?}: {}", report.lines);
        }
        assert!(report.served_bytes > 100_000, "{mode:?}: {}", report.lines);
    }
}

/// Goal: what is a cancellation point is one, and does nothing then; what is none is none.
#[test]
fn a_pending_request_is_acted_on_where_libc_would() {
    run("points");
}

/// Goal: whatever waits in the kernel is interrupted.
#[test]
fn waits_are_interrupted() {
    run("waits");
}

/// Goal: a thread that does nothing but served I/O can be cancelled, and leaves nothing behind.
#[test]
fn loops_are_cancelled() {
    run_and_let_go("deferred");
}

/// Goal: the same with asynchronous cancel type, also between calls that are no cancellation points,
/// and with all signals blocked.
#[test]
fn loops_are_cancelled_asynchronously() {
    run_and_let_go("asynchronous");
}

/// Goal: requests wait while cancellation is disabled, however long, whatever is called meanwhile.
#[test]
fn requests_wait_while_disabled() {
    run_and_let_go("held_off");
}

/// Goal: cleanup handlers and destructors of a cancelled thread's values use served files.
#[test]
fn cleanup_uses_files() {
    run("cleanup");
}

/// Goal: `pthread_exit` in a handler, whatever it interrupted, and within callbacks of libc's streams.
#[test]
fn threads_end_anywhere() {
    run_and_let_go("ends_of_threads");
}

/// Goal: unwinding goes through every frame of ours. The incident: a handler that ended the thread while
/// `syscall` or `dlopen` left files to the kernel met a frame without unwind information, and the
/// destructors of all its callers were left out.
#[test]
fn frames_are_described() {
    let pond = Pond::new();
    let program = pond.compile_with("unwinding.c", &["-O1"], &["-ldl", "-lgcc_s"]);
    assert_eq!(succeed(&mut pond.plain(&program)), "");
    assert_eq!(succeed(&mut pond.served(&program)), "");
}
