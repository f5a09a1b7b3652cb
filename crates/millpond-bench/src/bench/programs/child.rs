//! One run of a program: start, wait, measure.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use millpond_bench_peers::Usage;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// A program that has ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    /// From before it was started until its end was noticed.
    pub elapsed: Duration,
    /// Its own and its children's.
    pub used: Usage,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// The summary line of `millpond run`, without its name.
    pub fn summary(&self) -> Option<&str> {
        self.stderr.lines().rev().find_map(|line| line.strip_prefix("millpond: "))
    }
}

/// Runs `command` to its end; one that takes longer than `limit` is killed, and that is an error.
pub fn run(command: &mut Command, limit: Duration) -> io::Result<Ended> {
    // Memory files instead of pipes, whose reader would need processor time.
    let (stdout, stderr) = (memory_file()?, memory_file()?);
    command.stdout(Stdio::from(stdout.try_clone()?)).stderr(Stdio::from(stderr.try_clone()?));
    // A group of its own: so it can be killed together with its children.
    command.process_group(0);
    let before = Usage::of_children();
    let started = Instant::now();
    let mut child = command.spawn()?;
    let pid = Pid::from_child(&child);
    let in_time = ends_within(pid, limit);
    if !matches!(in_time, Ok(true)) {
        // The program was not waited for, so its number was not reused.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let status = child.wait()?;
    let elapsed = started.elapsed();
    if !in_time? {
        let message = format!("did not end within {} s", limit.as_secs());
        return Err(io::Error::new(io::ErrorKind::TimedOut, message));
    }
    let used = Usage::of_children().since(before);
    Ok(Ended { status, elapsed, used, stdout: text(stdout)?, stderr: text(stderr)? })
}

fn ends_within(pid: Pid, limit: Duration) -> io::Result<bool> {
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn memory_file() -> io::Result<File> {
    Ok(memfd_create("output", MemfdFlags::CLOEXEC)?.into())
}

/// The contents of the file.
fn text(mut file: File) -> io::Result<String> {
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit_ms: u64) -> io::Result<Ended> {
        let mut command = Command::new("sh");
        run(command.args(["-c", script]), Duration::from_millis(limit_ms))
    }

    #[test]
    fn what_a_program_did_is_told() {
        let script = "echo out; echo oh >&2; echo millpond: served >&2; exit 3";
        let ended = shell(script, 60_000).unwrap();
        assert_eq!((ended.status.code(), &*ended.stdout), (Some(3), "out\n"));
        assert_eq!(ended.summary(), Some("served"));
        assert!(ended.stderr.starts_with("oh\n") && ended.elapsed > Duration::ZERO, "{ended:?}");
    }

    /// Goal: a program that takes too long is killed, with its children.
    #[test]
    fn what_hangs_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let script = format!("sleep 1000 & echo $! >{}; wait", pid.display());
        let error = shell(&script, 2000).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let pid = std::fs::read_to_string(pid).unwrap();
        // Dead, or not yet fetched by the process that inherited it.
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        let is_gone = || stat().map_or(true, |stat| stat.contains(") Z "));
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_gone() {
            assert!(Instant::now() < deadline, "{pid} lives on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
