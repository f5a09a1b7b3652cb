//! Runs the program as a child of this process, which in mode back is the keeper.
//!
//! ```text
//!   keeper thread: serves ----------------------------> .. until the last process has left the keeper
//!   main thread:   starts the program, waits for its end, then for the keeper
//!   signal thread: forwards signals from this process to the program
//! ```
//!
//! The engines in the program and in its descendants find the keeper by an address in their environment. When
//! such a process dies, from any cause, the keeper writes its dirty pages to the files. All of them are written
//! when `millpond run` has returned. So this process must not die first: it handles the signals that end
//! processes and forwards them. It does not forward a signal of the terminal, which the program gets directly. Signals of
//! faults (such as SIGSEGV and SIGABRT) and of job control (such as SIGTSTP) keep their action.
//!
//! This process ends with the exit status of the program, or by the same signal.

use std::fs;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use millpond::keeper::{Address, Report, Server, Stopper};
use millpond_bench_peers::{end_by_signal, send_signal, send_signal_by_id, stop_ignoring_children};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, pidfd_open};
use signal_hook::consts::{
    SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGIO, SIGPIPE, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2,
    SIGVTALRM, SIGWINCH, SIGXCPU, SIGXFSZ,
};
use signal_hook::iterator::Signals;

use crate::descriptors;
use crate::failure::{Context, Result};

/// Another environment variable that the preload library reads: the keeper's address.
pub const KEEPER: &str = "MILLPOND_KEEPER";
pub const MODE: &str = "MILLPOND_MODE";

/// Signals that a terminal also sends to the program.
const OF_TERMINALS: [i32; 4] = [SIGINT, SIGQUIT, SIGHUP, SIGWINCH];
const HANDED_ON: [i32; 10] =
    [SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO, SIGPWR, SIGSTKFLT, SIGCONT];
const SIGSTKFLT: i32 = 16;
const SIGPWR: i32 = 30;
/// Real-time signals, all of which are forwarded. glibc has the two numbers below for itself.
const REAL_TIME: RangeInclusive<i32> = 34..=64;
/// Signals about this process's own writes and processor time, which the program gets about its own. The keeper gets an
/// error instead, or goes on.
const TAKEN: [i32; 3] = [SIGPIPE, SIGXFSZ, SIGXCPU];

/// Number of files, pages and bytes that the keeper wrote for processes that died.
#[derive(Debug, Default)]
struct Recovered {
    files: usize,
    pages: u64,
    bytes: u64,
    /// Lines about dirty pages that could not be written.
    failures: String,
}

impl Recovered {
    fn add(&mut self, report: &Report) {
        let written = report.files.iter().filter(|file| file.pages > 0);
        self.files += written.count();
        self.pages += report.pages();
        self.bytes += report.files.iter().map(|file| file.bytes).sum::<u64>();
        if !report.is_complete() {
            self.failures += &format!("millpond: {report}\n");
        }
    }

    fn say(&self, is_quiet: bool) {
        // A write error is ignored: the program's exit status must be passed on.
        let mut text = self.failures.clone();
        if self.pages > 0 && !is_quiet {
            let Recovered { files, pages, bytes, .. } = self;
            text += &format!("millpond: recovered {files} files, {pages} pages, {bytes} bytes\n");
        }
        let _ = io::stderr().write_all(text.as_bytes());
    }
}

/// The keeper's thread.
struct Keeper {
    stopper: Stopper,
    thread: JoinHandle<io::Result<()>>,
    recovered: Arc<Mutex<Recovered>>,
}

impl Keeper {
    fn start(command: &mut Command) -> Result<Self> {
        let server = Server::bind(&Address::unique()).context("starting the keeper")?;
        let stopper = server.stopper();
        command.env(KEEPER, server.address().to_string());
        let recovered = Arc::new(Mutex::new(Recovered::default()));
        let thread = thread::spawn({
            let recovered = Arc::clone(&recovered);
            move || {
                server.serve(|report| {
                    recovered.lock().expect("no panic under the lock").add(&report);
                })
            }
        });
        Ok(Self { stopper, thread, recovered })
    }

    /// Waits until the last process has left the keeper, then removes the keeper's socket.
    fn end(self) -> Result<Arc<Mutex<Recovered>>> {
        self.stopper.stop_when_idle();
        if let Ok(served) = self.thread.join() {
            served.context("keeper")?;
        }
        Ok(self.recovered)
    }
}

/// Runs the program to its end, with a keeper if `keeps`. `Err` inside: the program could not be started.
pub fn run(command: &mut Command, keeps: bool, is_quiet: bool) -> Result<io::Result<ExitStatus>> {
    let signals = take_signals().context("taking signals")?;
    let keeper = keeps.then(|| Keeper::start(command)).transpose()?;
    stop_ignoring_children(command);
    let mut program = match spawn(command) {
        Ok(program) => program,
        Err(error) => {
            let _ = keeper.map(Keeper::end);
            return Ok(Err(error));
        }
    };
    if keeps {
        // The keeper holds a descriptor of each dirty file. The program already has its own limit.
        descriptors::use_all();
    }
    // A pidfd, as the process id may be another process's once the program has been waited for. A sandbox may refuse it.
    let process = pidfd_open(Pid::from_child(&program), PidfdFlags::empty());
    let id = program.id();
    thread::spawn(move || {
        hand_on(signals, |number| match &process {
            Ok(process) => send_signal(process.as_fd(), number),
            Err(_) => send_signal_by_id(id, number),
        });
    });
    // The keeper ends first, in any case: it writes the pages of the program.
    let status = program.wait().context("waiting for the program");
    if let Some(keeper) = keeper {
        keeper.end()?.lock().expect("no panic under the lock").say(is_quiet);
    }
    Ok(Ok(status?))
}

/// Starts the program. The kernel refuses a script without `#!`, which `execvp` then gives to the shell.
fn spawn(command: &mut Command) -> io::Result<Child> {
    match command.spawn() {
        Err(error) if error.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()) => {
            let mut shell = Command::new("/bin/sh");
            shell.arg(command.get_program()).args(command.get_args());
            for (name, value) in command.get_envs() {
                match value {
                    Some(value) => shell.env(name, value),
                    None => shell.env_remove(name),
                };
            }
            shell.spawn()
        }
        started => started,
    }
}

/// Handles all signals that may come from elsewhere and end this process, but those that it was started to ignore, such as SIGHUP
/// of `nohup`: the program inherits that they are ignored, and not that they are handled.
fn take_signals() -> io::Result<Signals> {
    let ignored = ignored_signals();
    let named = [&OF_TERMINALS[..], &HANDED_ON, &TAKEN].concat();
    let all = named.into_iter().chain(REAL_TIME);
    Signals::new(all.filter(|number| ignored & 1 << (number - 1) == 0))
}

/// The signals that this process ignores: bit 0 is signal 1.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Forwards signals to the program until it ends.
fn hand_on(mut signals: Signals, send: impl Fn(i32) -> io::Result<()>) {
    for number in signals.forever() {
        let is_the_programs = if OF_TERMINALS.contains(&number) {
            !is_in_foreground()
        } else {
            HANDED_ON.contains(&number) || REAL_TIME.contains(&number)
        };
        if is_the_programs {
            // Ignored: the program may have ended.
            let _ = send(number);
        }
    }
}

/// Whether a terminal would send its signals to this process group, and so to the program.
fn is_in_foreground() -> bool {
    let Ok(terminal) = std::fs::File::open("/dev/tty") else { return false };
    rustix::termios::tcgetpgrp(&terminal).ok() == Some(rustix::process::getpgrp())
}

/// The exit status to end with. If a signal ended the program, ends this process by the same signal.
pub fn end_as(status: ExitStatus) -> ExitCode {
    if let Some(number) = status.signal() {
        // The program has already dumped core, if core dumps are enabled.
        let _ = rustix::process::setrlimit(
            Resource::Core,
            Rlimit { current: Some(0), ..rustix::process::getrlimit(Resource::Core) },
        );
        end_by_signal(number);
        // A signal that does not end processes by default.
        return ExitCode::from(128 + number as u8);
    }
    ExitCode::from(status.code().unwrap_or(1) as u8)
}
