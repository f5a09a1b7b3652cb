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
//! processes and forwards them. It does not forward a signal of the terminal, which the program gets directly.
//!
//! This process ends with the exit status of the program, or by the same signal.

use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use millpond::keeper::{Address, Report, Server, Stopper};
use rustix::process::{Pid, Resource, Rlimit, Signal};
use signal_hook::consts::{
    SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH,
    SIGXFSZ,
};
use signal_hook::iterator::Signals;

use crate::descriptors;
use crate::failure::{Context, Result};

/// Another environment variable that the preload library reads: the keeper's address.
const KEEPER: &str = "MILLPOND_KEEPER";
pub const MODE: &str = "MILLPOND_MODE";

/// Signals that a terminal also sends to the program.
const OF_TERMINALS: [i32; 4] = [SIGINT, SIGQUIT, SIGHUP, SIGWINCH];
const HANDED_ON: [i32; 5] = [SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGCONT];
/// Signals that concern the writing process: the keeper gets an error instead.
const TAKEN: [i32; 2] = [SIGPIPE, SIGXFSZ];

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
    let all = [&OF_TERMINALS[..], &HANDED_ON, &TAKEN].concat();
    let signals = Signals::new(all).context("taking signals")?;
    let keeper = keeps.then(|| Keeper::start(command)).transpose()?;
    let mut program = match command.spawn() {
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
    if let Some(pid) = Pid::from_raw(program.id() as i32) {
        thread::spawn(move || hand_on(signals, pid));
    }
    let status = program.wait().context("waiting for the program")?;
    if let Some(keeper) = keeper {
        keeper.end()?.lock().expect("no panic under the lock").say(is_quiet);
    }
    Ok(Ok(status))
}

/// Forwards signals to the program until it ends.
fn hand_on(mut signals: Signals, program: Pid) {
    for number in signals.forever() {
        let is_the_programs = if OF_TERMINALS.contains(&number) {
            !is_in_foreground()
        } else {
            HANDED_ON.contains(&number)
        };
        if let Some(signal) = Signal::from_named_raw(number).filter(|_| is_the_programs) {
            // Ignored: the program may have ended.
            let _ = rustix::process::kill_process(program, signal);
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
        let _ = signal_hook::low_level::emulate_default_handler(number);
        // A signal that does not end processes by default.
        return ExitCode::from(128 + number as u8);
    }
    ExitCode::from(status.code().unwrap_or(1) as u8)
}
