//! Goal: `millpond demo` works for a new user: it prints a table, leaves no file behind, and prints one
//! clear line for a directory that cannot hold its files.

#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

fn demo(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millpond"));
    command.arg("demo").arg("--dir").arg(dir).stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Goal: each mechanism is in the table, no write is lost, and no file stays.
#[test]
fn the_table_has_every_mechanism() {
    let dir = tempfile::tempdir().unwrap();
    let Output { status, stdout, stderr } = demo(dir.path()).output().unwrap();
    let (stdout, stderr) = (text(&stdout), text(&stderr));
    assert!(status.success(), "{stdout}\n{stderr}");
    for row in ["cached reads", "readers", "torn reads", "in flight", "writes lost", "millpond run"]
    {
        assert!(stdout.contains(row), "no row of {row}:\n{stdout}");
    }
    let row = |name: &str| stdout.lines().find(|line| line.contains(name)).unwrap_or_default();
    let numbers = |name: &str| -> Vec<String> {
        row(name)
            .split_whitespace()
            .filter(|word| word.parse::<u64>().is_ok())
            .map(str::to_owned)
            .collect()
    };
    // The engine's count is the last one; the kernel's may be any number.
    assert_eq!(numbers("torn reads").last().map(String::as_str), Some("0"), "{stdout}");
    assert_eq!(row("writes lost").matches(" 0 of ").count(), 2, "{stdout}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Goal: a signal at any moment ends the process, its child and its files.
#[test]
fn a_signal_leaves_nothing_behind() {
    for wait_ms in [300, 1500] {
        let dir = tempfile::tempdir().unwrap();
        let mut child =
            demo(dir.path()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait_ms));
        let pid = Pid::from_child(&child);
        kill_process(pid, Signal::INT).unwrap();
        assert!(!child.wait().unwrap().success());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

/// Goal: the process that the demonstration kills does not outlive the demonstration.
#[test]
fn a_writer_ends_with_its_reader() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, vec![0; 1 << 20]).unwrap();
    let mut writer = Command::new(env!("CARGO_BIN_EXE_millpond"))
        .args(["demo-writer".as_ref(), path.as_os_str(), "kernel".as_ref()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(writer.stdout.take());
    let started = Instant::now();
    while writer.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_secs(60), "the writer goes on without a reader");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn refusal_in(dir: &Path) -> String {
    let Output { status, stderr, .. } = demo(dir).output().unwrap();
    let stderr = text(&stderr);
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert_eq!(stderr.trim().lines().count(), 1, "{stderr}");
    assert!(stderr.contains("--dir DIR"), "{stderr}");
    stderr
}

#[test]
fn a_directory_that_takes_no_file_is_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let missing = refusal_in(&dir.path().join("missing"));
    assert!(missing.contains("No such file"), "{missing}");
    let refused = refusal_in(Path::new("/proc"));
    assert!(refused.contains("cannot create a file in /proc"), "{refused}");
}

#[test]
fn a_full_disk_is_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let mount = |options: &str| {
        Command::new("mount").args(["-t", "tmpfs", "-o", options, "none"]).arg(dir.path()).output()
    };
    match mount("size=8m") {
        Ok(mounted) if mounted.status.success() => {}
        other => return skip::skip(format!("no tmpfs can be mounted: {other:?}")),
    }
    let refused = std::panic::catch_unwind(|| refusal_in(dir.path()));
    let unmounted = Command::new("umount").arg(dir.path()).status();
    assert!(unmounted.is_ok_and(|status| status.success()));
    let refused = refused.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    assert!(refused.contains("needs 200 MiB"), "{refused}");
}
