//! Cancellation of threads during I/O on served and on other files, and threads that end in a signal handler or in a
//! callback of libc.
//!
//! Incident: a thread that waited in `read` of a pipe was cancelled, and the program died of SIGABRT, because
//! unwinding met frames that do not let it pass. Threads that looped in hits were never cancelled, so `pthread_join`
//! hung. Threads with the asynchronous cancel type died inside the library's code.

mod common;

use common::{ALL_MODES, Mode, Pond, Report, succeed};

/// Runs the scenario in all modes and on the kernel alone; the printed output must be the same. Returns each mode's
/// report.
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

/// Like `run`, and checks that a thread that has ended left no file open and no lock held: a file that is opened
/// again would be left to the kernel then.
fn run_and_let_go(scenario: &str) {
    for (mode, report) in run(scenario) {
        for reason in ["open-elsewhere", "open-twice"] {
            assert_eq!(report.passed_for(reason), 0, "{mode:?}: {}", report.lines);
        }
        assert!(report.served_bytes > 100_000, "{mode:?}: {}", report.lines);
    }
}

/// Goal: each cancellation point acts on a request, and has no other effect then; other calls do not act on it.
#[test]
fn a_pending_request_is_acted_on_where_libc_would() {
    run("points");
}

/// Goal: a cancel request interrupts each call that waits in the kernel.
#[test]
fn waits_are_interrupted() {
    run("waits");
}

/// Goal: a thread that does only served I/O can be cancelled, and leaves no resource behind.
#[test]
fn loops_are_cancelled() {
    run_and_let_go("deferred");
}

/// Goal: the same with the asynchronous cancel type, also between calls that are no cancellation points, and with all
/// signals blocked. The kernel has all files from the first such thread on.
#[test]
fn loops_are_cancelled_asynchronously() {
    run("asynchronous");
}

/// Goal: requests stay pending as long as cancellation is disabled, whichever functions are called during that time.
#[test]
fn requests_wait_while_disabled() {
    run("held_off");
}

/// Goal: cleanup handlers and destructors of a cancelled thread's values use served files.
#[test]
fn cleanup_uses_files() {
    run("cleanup");
}

/// Goal: `pthread_exit` works in a handler at each point that the signal interrupts, and within callbacks of libc's
/// streams.
#[test]
fn threads_end_anywhere() {
    run_and_let_go("ends_of_threads");
}

/// Goal: unwinding passes through every frame of the library.
/// Incident: a handler ended the thread while `syscall` or `dlopen` left files to the kernel. Unwinding met a frame
/// without unwind information, and the destructors of all its callers were skipped.
#[test]
fn frames_are_described() {
    let pond = Pond::new();
    let program = pond.compile_with("unwinding.c", &["-O1"], &["-ldl", "-lgcc_s"]);
    assert_eq!(succeed(&mut pond.plain(&program)), "");
    assert_eq!(succeed(&mut pond.served(&program)), "");
}
