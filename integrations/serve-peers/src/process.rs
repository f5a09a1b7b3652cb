//! Child processes, and counters of the kernel about a process.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

pub type Done<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A child that is ended when this is dropped.
pub struct Running(pub Child);

impl Running {
    pub fn start(command: &mut Command) -> io::Result<Running> {
        command.spawn().map(Running)
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Asked to end first, as some servers have children.
        let id = rustix::process::Pid::from_child(&self.0);
        _ = rustix::process::kill_process(id, rustix::process::Signal::TERM);
        for _ in 0..100 {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// A child of this program, which answers each line with a line.
pub struct Worker {
    pub process: Running,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts this program again, and waits for its first line.
    pub fn start(arguments: &[String]) -> Done<Worker> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let commands = child.stdin.take().ok_or("no pipe")?;
        let answers = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        let mut worker = Worker { process: Running(child), commands, answers };
        worker.answer()?;
        Ok(worker)
    }

    pub fn send(&mut self, command: &str) -> Done<()> {
        Ok(writeln!(self.commands, "{command}")?)
    }

    pub fn answer(&mut self) -> Done<String> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err("a process has ended early".into());
        }
        Ok(line.trim().to_owned())
    }

    pub fn ask(&mut self, command: &str) -> Done<f64> {
        self.send(command)?;
        Ok(self.answer()?.parse()?)
    }
}

/// Waits until `is_ready`, at most ten seconds.
pub fn await_true(what: &str, mut is_ready: impl FnMut() -> bool) -> Done<()> {
    let started = Instant::now();
    while !is_ready() {
        if started.elapsed() > Duration::from_secs(10) {
            return Err(format!("{what}: not ready after 10 s").into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// All processes that descend from `process`, and it.
pub fn family(process: u32) -> Vec<u32> {
    let mut all = vec![process];
    let mut at = 0;
    while at < all.len() {
        let threads = fs::read_dir(format!("/proc/{}/task", all[at]));
        for thread in threads.into_iter().flatten().flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            all.extend(children.split_whitespace().filter_map(|id| id.parse::<u32>().ok()));
        }
        at += 1;
    }
    all
}

/// For each thread of the process the value that `read` takes from a file of it.
fn of_threads(process: u32, file: &str, read: impl Fn(&str) -> u64) -> u64 {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    threads.map(|one| fs::read_to_string(one.path().join(file)).map_or(0, |text| read(&text))).sum()
}

/// Processor time of the living threads.
pub fn processor_ns(process: u32) -> u64 {
    of_threads(process, "schedstat", |text| {
        text.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
    })
}

/// How often threads of the process have given up the processor to wait.
pub fn waits(process: u32) -> u64 {
    of_threads(process, "status", |text| {
        let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    })
}

/// A value in KiB of a file below /proc.
pub fn kib(process: u32, file: &str, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{process}/{file}")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.trim_matches([':', ' ', '\t']).split(' ').next()?.parse().ok())
        .unwrap_or(0)
}

/// The memory of shared files that the process has created without a name.
pub fn shared_memory_bytes(process: u32) -> u64 {
    let descriptors = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut seen = std::collections::HashSet::new();
    let mut sum = 0;
    for descriptor in descriptors {
        let target = fs::read_link(descriptor.path()).unwrap_or_default();
        if !target.to_string_lossy().contains("memfd:") {
            continue;
        }
        if let Ok(found) = fs::metadata(descriptor.path())
            && seen.insert(found.ino())
        {
            sum += found.blocks() * 512;
        }
    }
    sum
}
