//! Goal: a command whose standard output can't be written fails with one line, and a server goes on.
//! Incident: it panicked.

#[path = "common/server.rs"]
mod server;

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use millpond_serve::set_server_memory;
use server::stop;

/// A device that has no space.
fn full() -> Stdio {
    OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

fn millpond(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millpond"));
    command.args(arguments).env_remove("XDG_RUNTIME_DIR");
    command
}

#[track_caller]
fn assert_fails(arguments: &[&str]) {
    let Output { status, stderr, .. } = millpond(arguments).stdout(full()).output().unwrap();
    let text = String::from_utf8_lossy(&stderr);
    assert_eq!(status.code(), Some(1), "{arguments:?}: {text}");
    let line = "millpond: writing to standard output: No space left on device";
    assert!(text.starts_with(line) && text.lines().count() == 1, "{arguments:?}: {text}");
}

#[test]
fn each_command_reports_that_its_output_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().to_str().unwrap();
    let (socket, endpoint) = (format!("{place}/socket"), format!("{place}/endpoint"));
    let store = ["--store", "memory:///", "--memory", "16M", "--socket", &socket];
    assert_fails(&["demo", "--dir", place]);
    assert_fails(&["check-untorn", place]);
    assert_fails(&["store", "check", "memory:///", "--rounds", "1"]);
    assert_fails(&["store", "check", "memory:///", "--rounds", "1", "--json"]);
    assert_fails(&["manual", "completions", "bash"]);
    assert_fails(&["top", "--once"]);
    assert_fails(&["top", "--prometheus", "127.0.0.1:0"]);
    assert_fails(&[&["serve", "--check"], &store[..]].concat());
    if cfg!(feature = "endpoint") {
        assert_fails(&[&["serve", "--check", "--endpoint-socket", &endpoint], &store[..]].concat());
    }
}

/// Waits until the server has done something.
fn await_server(server: &mut Child, errors: &Path, has_done: impl Fn() -> bool) {
    while !has_done() {
        let text = || fs::read_to_string(errors).unwrap();
        assert_eq!(server.try_wait().unwrap(), None, "it has ended: {}", text());
        thread::sleep(Duration::from_millis(20));
    }
}

/// Goal: a server serves although its lines can't be written, and the commands that ask it report that theirs can't.
#[test]
fn a_server_without_an_output_serves() {
    let dir = tempfile::tempdir().unwrap();
    // In a directory that the server creates, so that no other user may read the key there.
    let socket = dir.path().join("run/socket");
    let (name, endpoint) = (socket.to_str().unwrap(), dir.path().join("endpoint"));
    let mut arguments = vec!["serve", "--store", "memory:///", "--memory", "16M", "--socket", name];
    if cfg!(feature = "endpoint") {
        arguments.extend(["--endpoint-socket", endpoint.to_str().unwrap()]);
    }
    let errors = dir.path().join("errors");
    let mut command = millpond(&arguments);
    command.stdout(full()).stderr(fs::File::create(&errors).unwrap());
    let mut child = command.spawn().unwrap();
    await_server(&mut child, &errors, || set_server_memory(&socket, 16 << 20).is_ok());
    assert_fails(&["serve", "--set-memory", "16M", "--socket", name]);
    if cfg!(feature = "endpoint") {
        let description = dir.path().join("run/socket.endpoint.json");
        await_server(&mut child, &errors, || description.exists());
        assert_fails(&["serve", "--print-endpoint", "--socket", name]);
    }
    stop(child, "-TERM");
    assert_eq!(fs::read_to_string(errors).unwrap(), "");
}

/// Goal: a failure is an exit status, even if there is no place for its line.
#[test]
fn a_failure_without_standard_error_has_its_status() {
    let status = millpond(&["rescue", "/no/such/file"]).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(1));
}
