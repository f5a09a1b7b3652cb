//! Goal: `millpond-bench soak` reports failures, and only failures; and leaves no files behind.

#[path = "common/needs_millpond.rs"]
mod needs_millpond;
#[path = "../../millpond/tests/common/skip.rs"]
mod skip;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use needs_millpond::has_millpond;

const LIMIT: Duration = Duration::from_secs(120);

fn soak(dir: &Path, seconds: u64, options: &[&str]) -> Child {
    let mut soak = Command::new(env!("CARGO_BIN_EXE_millpond-bench"));
    soak.args(["soak", "--json", "--seconds", &seconds.to_string(), "--dir"])
        .arg(dir)
        .args(options);
    soak.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The exit status and the verdict.
fn verdict(soak: Child) -> (i32, Value) {
    let done = soak.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    let error = String::from_utf8_lossy(&done.stderr);
    let verdict = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}{error}"));
    (done.status.code().unwrap(), verdict)
}

/// The number of processes with `dir` in their command line.
fn processes_of(dir: &Path) -> usize {
    let lines = fs::read_dir("/proc").unwrap().flatten();
    let lines = lines.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let name = dir.to_str().unwrap().as_bytes();
    lines.filter(|line| line.windows(name.len()).any(|part| part == name)).count()
}

#[test]
fn a_short_one_is_clean() {
    if !has_millpond() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (status, verdict) = verdict(soak(dir.path(), 6, &["--seed", "7"]));
    assert_eq!(status, 0, "{verdict:#}");
    for count in ["rounds", "reads", "writes", "syncs", "checks", "kills"] {
        assert!(verdict[count].as_u64().unwrap() > 0, "{count}: {verdict:#}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "it leaves nothing");
}

/// Method: the test keeps changing bytes of one lane's files.
#[test]
fn a_wrong_byte_is_found() {
    if !has_millpond() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut running = soak(dir.path(), 100, &[]);
    let begun = Instant::now();
    let mut at = 100;
    while running.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < LIMIT, "nothing is found");
        for entry in fs::read_dir(dir.path()).unwrap().flatten() {
            let path = entry.path().join("through/data/pages");
            if let Ok(file) = File::options().write(true).open(path) {
                at = (at + 4096) % (4 << 20);
                file.write_all_at(b"damaged", at).unwrap();
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let (status, verdict) = verdict(running);
    assert_eq!(status, 1, "{verdict:#}");
    let failure = verdict["failures"][0].as_str().unwrap();
    assert!(
        failure.contains("lane through, seed") && failure.contains("MISMATCH in pages"),
        "{failure}"
    );
    let kept = Path::new(verdict["kept"].as_str().unwrap());
    assert!(kept.join("through/data/pages").exists(), "the files stay");
}

#[test]
fn an_interrupt_ends_it_and_leaves_nothing() {
    if !has_millpond() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let running = soak(dir.path(), 1000, &[]);
    let begun = Instant::now();
    while processes_of(dir.path()) < 5 {
        assert!(begun.elapsed() < LIMIT, "no workers");
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&running), Signal::INT).unwrap();
    let (status, verdict) = verdict(running);
    assert_eq!((status, &verdict["interrupted"]), (0, &Value::Bool(true)), "{verdict:#}");
    assert!(begun.elapsed() < LIMIT);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    assert_eq!(processes_of(dir.path()), 0);
}

#[test]
fn bad_arguments_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for options in [&["--cache", "1k"][..], &["--hours", "-1"]] {
        let mut soak = Command::new(env!("CARGO_BIN_EXE_millpond-bench"));
        let done = soak.arg("soak").args(options).arg("--dir").arg(dir.path()).output().unwrap();
        assert_eq!(done.status.code(), Some(2), "{done:?}");
    }
}
