//! Goal: `millpond keeper` and `millpond rescue` work, and `millpond run` reports the loss of its keeper.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use millpond::{BackendChoice, Engine, OpenOptions, WriteMode};

const ROLE: &str = "MILLPOND_TEST_KEEPER_ROLE";

fn millpond() -> Command {
    Command::new(env!("CARGO_BIN_EXE_millpond"))
}

/// Runs this test binary as a process that leaves a page dirty and dies.
fn dies(address: &Path, file: &Path) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["writer", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, format!("{}|{}", address.display(), file.display()));
    let output = command.output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("kept"), "{output:?}");
}

/// The process of `dies`.
#[test]
#[ignore = "a role, in which others start this program"]
fn writer() {
    let role = std::env::var(ROLE).unwrap();
    let (address, file) = role.split_once('|').unwrap();
    let builder = Engine::builder().cache_bytes(1 << 20).backend(BackendChoice::Threads);
    let engine = builder.keeper(address.parse().unwrap()).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).create(true);
    let opened = engine.open(file, &options.write_mode(WriteMode::Back)).unwrap();
    opened.write_all_at(&[5; 4096], 0).unwrap();
    assert_eq!(std::fs::metadata(file).unwrap().len(), 0);
    println!("kept");
    // Makes it visible that another process has changed the file.
    if file.ends_with("changed") {
        File::options().write(true).open(file).unwrap().write_all_at(b"other", 0).unwrap();
    }
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .unwrap();
}

fn start_keeper(address: &Path, stderr: Stdio) -> Child {
    let child = millpond().arg("keeper").arg(address).stderr(stderr).spawn().unwrap();
    while !address.exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

/// Sends SIGTERM to the keeper, and waits for it. It has written all dirty pages then.
fn end(mut keeper: Child) -> bool {
    let pid = rustix::process::Pid::from_raw(keeper.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    keeper.wait().unwrap().success()
}

/// Goal: a keeper whose standard error is not read continues.
/// Incident: it panicked at its first report.
#[test]
fn nobody_hears_the_keeper() {
    let dir = tempfile::tempdir().unwrap();
    let address = dir.path().join("door");
    let mut keeper = start_keeper(&address, Stdio::piped());
    drop(keeper.stderr.take());
    let files = ["one", "two", "three"].map(|name| dir.path().join(name));
    for file in &files {
        dies(&address, file);
    }
    assert!(end(keeper));
    for file in &files {
        assert_eq!(std::fs::read(file).unwrap(), [5; 4096]);
    }
}

fn rescue(arguments: &[&str]) -> Output {
    millpond().arg("rescue").args(arguments).output().unwrap()
}

/// Goal: the keeper's report names the rescue file, and the command writes it back.
#[test]
fn rescue_files_are_named_and_put_back() {
    let dir = tempfile::tempdir().unwrap();
    let address = dir.path().join("door");
    let file = dir.path().join("changed");
    let mut keeper = start_keeper(&address, Stdio::piped());
    let mut said = BufReader::new(keeper.stderr.take().unwrap());
    dies(&address, &file);
    let mut line = String::new();
    let path = loop {
        line.clear();
        assert_ne!(said.read_line(&mut line).unwrap(), 0, "it named none");
        if let Some((_, path)) = line.trim().split_once("are kept in ") {
            break path.to_string();
        }
    };
    assert_eq!(std::fs::read(&file).unwrap(), b"other");
    std::fs::write(&file, "changed since").unwrap();
    let refused = rescue(&[&path]);
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(text.contains("was changed since; --force"), "{text}");
    assert_eq!(std::fs::read(&file).unwrap(), b"changed since");
    let elsewhere = dir.path().join("elsewhere");
    std::fs::write(&elsewhere, "").unwrap();
    let onto = rescue(&[&path, "--onto", elsewhere.to_str().unwrap(), "--force"]);
    assert!(onto.status.success(), "{onto:?}");
    assert_eq!(std::fs::read(&elsewhere).unwrap(), [5; 4096]);
    // The bytes are written even if there is no place for the line about them.
    std::fs::write(&elsewhere, "").unwrap();
    let mut silent = millpond();
    silent.args(["rescue", &path, "--onto", elsewhere.to_str().unwrap(), "--force"]);
    let silent = silent.stdout(File::create("/dev/full").unwrap()).output().unwrap();
    let text = String::from_utf8_lossy(&silent.stderr);
    assert_eq!(silent.status.code(), Some(1), "{text}");
    assert!(text.starts_with("millpond: writing to standard output: "), "{text}");
    assert!(std::fs::metadata(&elsewhere).unwrap().len() > 0);
    assert!(rescue(&[&path, "--force"]).status.success());
    assert_eq!(std::fs::read(&file).unwrap(), [5; 4096]);
    drop(said);
    assert!(end(keeper));
}

/// Goal: a program whose keeper is killed continues, its writes are written through, and a line reports it.
#[test]
fn a_program_whose_keeper_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let script = "exec 3<>file; echo one >&3; echo ready; read line; cat other > copy; \
                  echo two >&3; wc -c < file; read line";
    std::fs::write(dir.path().join("file"), "").unwrap();
    std::fs::write(dir.path().join("other"), "three").unwrap();
    let mut command = millpond();
    command
        .args(["run", "--eager", "--mode", "back", "--", "sh", "-c", script])
        .current_dir(dir.path());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = command.spawn().unwrap();
    let mut stdin = run.stdin.take().unwrap();
    let mut stdout = BufReader::new(run.stdout.take().unwrap());
    let mut out = String::new();
    stdout.read_line(&mut out).unwrap();
    assert_eq!(out, "ready\n");
    run.kill().unwrap();
    run.wait().unwrap();
    writeln!(stdin, "go on").unwrap();
    writeln!(stdin, "end").unwrap();
    drop(stdin);
    let mut err = String::new();
    stdout.read_to_string(&mut out).unwrap();
    run.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(err.contains("the keeper died"), "{out:?} {err:?}");
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"one\ntwo\n");
    assert_eq!(std::fs::read(dir.path().join("copy")).unwrap(), b"three");
}
