//! Processes of a benchmark.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::{Done, proportional_mib};

/// This program in another process, which answers each line with a line. It is killed when this is dropped.
pub struct Worker {
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts this program again. Its first line says that it is ready.
    pub fn start(arguments: &[&str], environment: &[(&str, &str)]) -> Done<Worker> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments).envs(environment.iter().copied());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let commands = process.stdin.take().ok_or("no pipe")?;
        let answers = BufReader::new(process.stdout.take().ok_or("no pipe")?);
        Ok(Worker { process, commands, answers })
    }

    pub fn send(&mut self, command: &str) -> Done<()> {
        Ok(writeln!(self.commands, "{command}")?)
    }

    pub fn answer(&mut self) -> Done<String> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err(format!("process {} has ended early", self.process.id()).into());
        }
        Ok(line.trim().to_owned())
    }

    pub fn ask(&mut self, command: &str) -> Done<String> {
        self.send(command)?;
        self.answer()
    }

    /// Its memory, with its share of memory that several processes have mapped.
    pub fn proportional_mib(&self) -> Done<f64> {
        proportional_mib(self.process.id())
    }
}

impl Worker {
    /// # Errors
    ///
    /// It has ended before.
    pub fn kill(mut self) -> Done<()> {
        match self.process.try_wait()? {
            Some(status) => {
                Err(format!("process {} has ended: {status}", self.process.id()).into())
            }
            None => Ok(self.process.kill()?),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended.
        _ = self.process.kill();
        _ = self.process.wait();
    }
}
