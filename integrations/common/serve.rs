//! A running `millpond serve`.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::{Done, proportional_mib, variable};

/// A server of one bucket. It is killed when this is dropped.
pub struct Serve {
    process: Child,
    dir: TempDir,
    arguments: Vec<String>,
}

/// The program: MILLPOND_COMMAND, or `millpond` in PATH.
fn command() -> Command {
    let mut command =
        Command::new(std::env::var_os("MILLPOND_COMMAND").unwrap_or("millpond".into()));
    command.arg("serve");
    command
}

/// Returns when it serves.
fn start_process(arguments: &[String]) -> Done<Child> {
    let mut process = command().args(arguments).stdout(Stdio::piped()).spawn()?;
    let output = BufReader::new(process.stdout.take().ok_or("no pipe")?);
    for line in output.lines() {
        if line? == "serving" {
            return Ok(process);
        }
    }
    Err(format!("millpond serve has ended early: {}", process.wait()?).into())
}

/// The socket, in a directory that the server makes for its user alone.
fn socket_in(dir: &TempDir) -> PathBuf {
    dir.path().join("own").join("socket")
}

impl Serve {
    /// Starts a server with an empty cache, and returns when it serves.
    pub fn start(memory_bytes: u64, more: &[&str]) -> Done<Serve> {
        let dir = tempfile::tempdir()?;
        let mut arguments = vec!["--memory".to_owned(), memory_bytes.to_string()];
        arguments.push(format!("--store=s3://{}", variable("MILLPOND_STORE_BUCKET")?));
        arguments.push(format!("--socket={}", socket_in(&dir).display()));
        arguments.extend(more.iter().map(|&one| one.to_owned()));
        let process = start_process(&arguments)?;
        Ok(Serve { process, dir, arguments })
    }

    /// Kills the server, and starts another at its socket.
    pub fn restart(&mut self) -> Done<()> {
        self.process.kill()?;
        self.process.wait()?;
        self.process = start_process(&self.arguments)?;
        Ok(())
    }

    pub fn socket(&self) -> PathBuf {
        socket_in(&self.dir)
    }

    /// Its memory, with its share of memory that several processes have mapped.
    pub fn proportional_mib(&self) -> Done<f64> {
        proportional_mib(self.process.id())
    }

    /// How to reach its endpoint, as JSON.
    pub fn endpoint(&self) -> Done<String> {
        let output =
            command().arg("--print-endpoint").arg("--socket").arg(self.socket()).output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into());
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        // It may have ended.
        _ = self.process.kill();
        _ = self.process.wait();
    }
}
