//! Runs the user's check command on a state.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::history::History;
use super::model::Atoms;
use super::search::State;
use crate::failure::{Context, Result};

/// The environment variable with the path of a file: the program's output before the cut.
const SAID: &str = "MILLPOND_CRASH_SAID";
/// How much of a check's output is shown. Chosen, not measured.
const SHOWN_BYTES: u64 = 4096;
const PAUSE: Duration = Duration::from_millis(1);

pub struct Checker<'a> {
    pub command: &'a str,
    pub timeout: Duration,
    pub atoms: &'a Atoms,
    pub history: &'a History,
    /// The length of the program's output after each number of steps.
    pub said: &'a [usize],
}

/// The result of a check that failed.
#[derive(Debug, Clone)]
pub struct CheckFailure {
    pub how: String,
    pub words: String,
}

impl Checker<'_> {
    /// Writes the state to an empty directory, and the program's output before the cut to a file.
    pub fn write_state(&self, state: &State, dir: &Path, said: &Path) -> Result<()> {
        let tree = self.atoms.tree(state.cut, &state.lost);
        tree.write(dir).context(format!("writing a state to {}", dir.display()))?;
        let words = &self.history.output[..self.said[state.cut]];
        std::fs::write(said, words).context(said.display())
    }

    pub fn check(&self, state: &State) -> Result<Option<CheckFailure>> {
        let place = tempfile::tempdir().context("creating a directory for a state")?;
        let (dir, said) = (place.path().join("state"), place.path().join("said"));
        std::fs::create_dir(&dir).context(dir.display())?;
        self.write_state(state, &dir, &said)?;
        let mut words = tempfile::tempfile().context("creating a file for a check's output")?;
        let copy = |file: &File| file.try_clone().context("creating a file for a check's output");
        let mut child = Command::new("/bin/sh")
            .args(["-c", self.command])
            .current_dir(&dir)
            .env(SAID, &said)
            .stdin(Stdio::null())
            .stdout(copy(&words)?)
            .stderr(copy(&words)?)
            // Its process group is ended with it.
            .process_group(0)
            .spawn()
            .context("/bin/sh")?;
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().context("waiting for a check")? {
                break Some(status);
            }
            if begun.elapsed() > self.timeout {
                let group = Pid::from_child(&child);
                let _ = kill_process_group(group, Signal::KILL);
                child.wait().context("waiting for a check")?;
                break None;
            }
            std::thread::sleep(PAUSE);
        };
        let how = match status {
            Some(status) if status.success() => return Ok(None),
            Some(status) => ended(status),
            None => format!("took longer than {} s", self.timeout.as_secs_f64()),
        };
        words.rewind().context("reading a check's output")?;
        let mut said = Vec::new();
        words.take(SHOWN_BYTES).read_to_end(&mut said).context("reading a check's output")?;
        Ok(Some(CheckFailure { how, words: String::from_utf8_lossy(&said).into_owned() }))
    }
}

pub fn ended(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("ended by signal {signal}"),
        (None, None) => status.to_string(),
    }
}
