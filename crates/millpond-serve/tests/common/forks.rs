//! Children of fork, of a process that does nothing else: they start in a millisecond, and a program in some tens.
//!
//! ```text
//!   test -- "fork ARGUMENT", "kill PID" --> parent: fork -> child
//!        <-- "child PID", "dead PID SIGNAL" -- parent
//!        <-- "ready PID" --------------------------------- child
//! ```

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Stdio};

use super::{Killed, role_command};

/// The process whose children a test starts and kills.
pub struct ForkParent {
    commands: ChildStdin,
    replies: BufReader<ChildStdout>,
    /// Replies that were read before they were waited for.
    early: VecDeque<String>,
    _process: Killed,
}

impl ForkParent {
    /// Starts it: this test program, which runs `test` in a role and calls [`serve_forks`].
    pub fn start(test: &str, dir: &Path) -> ForkParent {
        let mut command = role_command(test, "forks", dir);
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        ForkParent {
            commands: process.stdin.take().unwrap(),
            replies: BufReader::new(process.stdout.take().unwrap()),
            early: VecDeque::new(),
            _process: Killed(process),
        }
    }

    /// The rest of the next reply of this kind.
    fn reply(&mut self, kind: &str) -> String {
        if let Some(at) = self.early.iter().position(|line| line.starts_with(kind)) {
            return self.early.remove(at).unwrap()[kind.len()..].to_owned();
        }
        loop {
            let mut line = String::new();
            assert!(
                self.replies.read_line(&mut line).unwrap() > 0,
                "the parent of the forks ended"
            );
            let line = line.trim_end().to_owned();
            match line.strip_prefix(kind) {
                Some(rest) => return rest.to_owned(),
                // Also the lines of the test harness.
                None => self.early.push_back(line),
            }
        }
    }

    fn command(&mut self, command: &str) {
        self.commands.write_all(command.as_bytes()).unwrap();
    }

    /// Starts a child.
    pub fn fork(&mut self, argument: &str) -> u32 {
        self.command(&format!("fork {argument}\n"));
        self.reply("child ").parse().unwrap()
    }

    /// Waits until any child is ready.
    pub fn await_ready(&mut self) -> u32 {
        self.reply("ready ").parse().unwrap()
    }

    /// Kills a child. Panics if it had ended itself, such as after it found wrong bytes, or by another signal.
    pub fn kill(&mut self, child: u32) {
        self.command(&format!("kill {child}\n"));
        assert_eq!(self.reply("dead "), format!("{child} {}", libc::SIGKILL), "the end of a child");
    }
}

/// Runs the parent of the forks, to the end of its input. `body` is a child's, with the argument and a function that says
/// that it is ready.
pub fn serve_forks(body: impl Fn(&str, &dyn Fn())) {
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (command, argument) = line.split_once(' ').unwrap();
        match command {
            "fork" => {
                // SAFETY: the child makes calls that are not async-signal-safe, which glibc allows for memory and threads.
                let child = unsafe { libc::fork() };
                assert!(child >= 0, "{}", std::io::Error::last_os_error());
                if child == 0 {
                    run_child(argument, &body);
                }
                say(&format!("child {child}\n"));
            }
            "kill" => {
                let child = argument.parse().unwrap();
                let mut status = 0;
                // SAFETY: the child is not reaped before, so the number is its own; the status is valid memory.
                unsafe {
                    assert_eq!(libc::kill(child, libc::SIGKILL), 0);
                    assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                }
                let signal = if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { 0 };
                say(&format!("dead {child} {signal}\n"));
            }
            other => panic!("{other}"),
        }
    }
}

/// One write, so that lines of several processes are not mixed. The test harness has begun a line.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("\n{line}").as_bytes()).unwrap();
    out.flush().unwrap();
}

fn run_child(argument: &str, body: &dyn Fn(&str, &dyn Fn())) -> ! {
    // SAFETY: no memory is passed.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let ready = || say(&format!("ready {}\n", std::process::id()));
    let outcome = catch_unwind(AssertUnwindSafe(|| body(argument, &ready)));
    // SAFETY: the process ends without its parent's handlers.
    unsafe { libc::_exit(if outcome.is_ok() { 0 } else { 101 }) }
}
