//! Tests that debug builds report a thread that waits for its own guard.
#![cfg(debug_assertions)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use millpond_rangelock::{ByteRange, Mode, RangeLock};

/// The child process that deadlocks; the test below runs it.
#[test]
#[ignore = "waits for itself; run by `a_self_deadlock_is_reported`"]
fn waits_for_itself() {
    std::thread::spawn(|| {
        // Ends the process if the parent does not kill it.
        std::thread::sleep(Duration::from_secs(20));
        std::process::exit(1);
    });
    let lock = RangeLock::new();
    let _own = lock.lock(ByteRange::at(0, 10).unwrap(), Mode::Shared);
    let _never = lock.lock(ByteRange::at(5, 10).unwrap(), Mode::Exclusive);
}

#[test]
fn a_self_deadlock_is_reported() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "waits_for_itself", "--ignored", "--nocapture"])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let message = BufReader::new(child.stderr.take().unwrap())
        .lines()
        .map_while(Result::ok)
        .find(|line| line.contains("locked itself"));
    child.kill().unwrap();
    child.wait().unwrap();
    let message = message.expect("a message");
    assert_eq!(message.matches("self_deadlock.rs").count(), 2, "both places: {message}");
}
