//! The program is a child of this process: which is its keeper, in mode back.
//!
//! ```text
//!   keeper thread: serves -------------------------------> .. until nobody has anything with it
//!   main thread:   starts the program, waits for its end, then for the keeper
//!   signal thread: hands on to the program what was sent to us
//! ```
//!
//! The engines in the program, and in whatever it starts, find the keeper by an address in their
//! environment. When such a process dies, however it dies, the keeper writes to the files what it
//! left; when `millpond run` has returned, all of it is there. So this process must not die first: it
//! takes the signals that end processes and hands them on. What the terminal sends has reached the
//! program already.
//!
//! The exit status, or the signal that ended the program, becomes our own.

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

use crate::failure::{Context, Result};

/// What the preload library reads beside this: the keeper's address.
const KEEPER: &str = "MILLPOND_KEEPER";
pub const MODE: &str = "MILLPOND_MODE";

/// Those that a terminal sends to the program, too.
const OF_TERMINALS: [i32; 4] = [SIGINT, SIGQUIT, SIGHUP, SIGWINCH];
const HANDED_ON: [i32; 5] = [SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGCONT];
/// These concern the process that writes: the keeper gets the error.
const TAKEN: [i32; 2] = [SIGPIPE, SIGXFSZ];

/// What was written back for processes that died.
#[derive(Debug, Default)]
struct Recovered {
    files: usize,
    pages: u64,
    bytes: u64,
    /// Lines about what could not be written.
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
        // Whether or not anybody reads it: the status of the program is to be passed on.
        let mut text = self.failures.clone();
        if self.pages > 0 && !is_quiet {
            let Recovered { files, pages, bytes, .. } = self;
            text += &format!("millpond: recovered {files} files, {pages} pages, {bytes} bytes\n");
        }
        let _ = io::stderr().write_all(text.as_bytes());
    }
}

/// The thread that is the keeper.
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

    /// When nobody has anything with it any more: removes its socket.
    fn end(self) -> Result<Arc<Mutex<Recovered>>> {
        self.stopper.stop_when_idle();
        if let Ok(served) = self.thread.join() {
            served.context("keeper")?;
        }
        Ok(self.recovered)
    }
}

/// Runs the program to its end; `keeps`: as its keeper. `Err` inside: it could not be started.
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
        use_all_descriptors();
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

/// Hands signals on to the program for as long as it is there.
fn hand_on(mut signals: Signals, program: Pid) {
    for number in signals.forever() {
        let is_the_programs = if OF_TERMINALS.contains(&number) {
            !is_in_foreground()
        } else {
            HANDED_ON.contains(&number)
        };
        if let Some(signal) = Signal::from_named_raw(number).filter(|_| is_the_programs) {
            // It may have ended.
            let _ = rustix::process::kill_process(program, signal);
        }
    }
}

/// Whether a terminal would send its signals to our process group, and so to the program.
fn is_in_foreground() -> bool {
    let Ok(terminal) = std::fs::File::open("/dev/tty") else { return false };
    rustix::termios::tcgetpgrp(&terminal).ok() == Some(rustix::process::getpgrp())
}

/// The keeper holds a descriptor of each dirty file. The program has got its own limit already.
fn use_all_descriptors() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ =
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// The exit status to end with; or ends by the signal that the program ended by.
pub fn end_as(status: ExitStatus) -> ExitCode {
    if let Some(number) = status.signal() {
        // The program has dumped core, if anybody wants one.
        let _ = rustix::process::setrlimit(
            Resource::Core,
            Rlimit { current: Some(0), ..rustix::process::getrlimit(Resource::Core) },
        );
        let _ = signal_hook::low_level::emulate_default_handler(number);
        // One that does not end processes by default.
        return ExitCode::from(128 + number as u8);
    }
    ExitCode::from(status.code().unwrap_or(1) as u8)
}
