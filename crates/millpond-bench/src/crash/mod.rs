//! `millpond-bench crash`: computes and checks the states that a power cut could leave of a program's files.
//!
//! ```text
//! program -> engine -> recorder (FUSE) -> history -> atoms -> states -> each written to a directory, and
//! checked
//! ```
//!
//! [`tree`] is a directory in memory, [`history`] records its changes, [`mount`] presents it to the
//! program. [`model`] defines which changes may be lost, [`search`] chooses states, [`check`] runs the
//! user's command, [`crash_report`] prints the result.

mod check;
mod crash_report;
mod history;
mod model;
mod mount;
mod recorded_program;
mod search;
#[cfg(test)]
mod tests;
mod tree;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use self::check::{CheckFailure, Checker};
use self::crash_report::{CrashReport, Failed};
use self::history::{Event, History};
use self::model::{Atoms, Grain, Model};
use self::search::State;
use crate::failure::{Context, Failure, REFUSED, Result};

/// The unit of a write that is atomic on the disk; the second one with `--torn`.
const PAGE_BYTES: u64 = 4096;
const SECTOR_BYTES: u64 = 512;
/// Bounds the search for the shortest state that fails. Chosen, not measured.
const CHECKS_TO_SHRINK: usize = 300;

/// Checks the states that a power cut could leave of a program's files
///
/// The program runs in DIR, which shows a copy of itself until the program ends: the original content stays
/// as it was. Writes, changes of names and syncs are recorded below the engine. Then each state that a
/// power cut could have left, or a sample of --states of them, is written to an empty directory, and
/// /bin/sh runs CMD there. CMD fails if the state is invalid. The file $MILLPOND_CRASH_SAID has the
/// program's standard output before the cut. All of DIR is kept in memory. Needs FUSE.
///
/// Exit status: 0 if no check failed, 1 if a check or the program failed, 2 for arguments that can't be
/// accepted.
#[derive(Debug, clap::Args)]
pub struct CrashArgs {
    /// The command that checks a state
    #[arg(long, value_name = "CMD")]
    check: String,

    /// The directory in which the program runs, and whose files are recorded
    #[arg(long, default_value = ".")]
    dir: PathBuf,

    /// The promises of the file system
    #[arg(long, value_enum, default_value_t = Model::Strict)]
    model: Model,

    /// Writes may be torn within pages, between sectors of 512 bytes
    #[arg(long)]
    torn: bool,

    /// Aligned blocks of BYTES are whole, of the writes that cover them, as of a file with untorn blocks
    #[arg(long, value_name = "BYTES", value_parser = untorn_bytes)]
    untorn: Option<u64>,

    /// The maximum number of states to check
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    states: u32,

    /// The seed of the sample, if there are more states
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// The time limit of a check, in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,

    /// Write the shortest state that fails to this directory
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,

    /// Print the report as JSON; the program's output goes to standard error
    #[arg(long)]
    json: bool,

    /// Run the program without the engine
    #[arg(long, conflicts_with_all = ["mode", "cache", "eager"])]
    kernel: bool,

    /// See `millpond run`
    #[arg(long)]
    mode: Option<String>,

    /// See `millpond run`
    #[arg(long)]
    cache: Option<String>,

    /// See `millpond run`
    #[arg(long)]
    eager: bool,

    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

fn untorn_bytes(text: &str) -> std::result::Result<u64, String> {
    let bytes = text.parse().unwrap_or(0u64);
    let is_block = bytes.is_power_of_two() && (PAGE_BYTES..=64 << 10).contains(&bytes);
    is_block.then_some(bytes).ok_or_else(|| "a power of two from 4096 to 65536".into())
}

impl CrashArgs {
    /// The options that are passed to `millpond run`.
    fn engine(&self) -> Option<Vec<OsString>> {
        if self.kernel {
            return None;
        }
        let mut words = vec![OsString::from("--quiet")];
        for (name, value) in [("--mode", &self.mode), ("--cache", &self.cache)] {
            words.extend(value.iter().flat_map(|value| [name.into(), value.into()]));
        }
        words.extend(self.eager.then(|| "--eager".into()));
        Some(words)
    }
}

pub fn run(args: &CrashArgs) -> Result<ExitCode> {
    if let Some(keep) = &args.keep
        && keep.exists()
    {
        let message = format!("--keep {}: exists already", keep.display());
        return Err(Failure::new(REFUSED, message));
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).context("signal handler")?;
    }
    let program = recorded_program::Program {
        dir: &args.dir,
        words: &args.program,
        engine: args.engine(),
        to_stderr: args.json,
        interrupted: &interrupted,
    };
    let history = program.record()?;
    let page_bytes = if args.torn { SECTOR_BYTES } else { PAGE_BYTES };
    let grain = Grain { page_bytes, untorn_bytes: args.untorn.unwrap_or(0) };
    let atoms = Atoms::from_history(&history, args.model, grain);
    let said = output_lengths(&history);
    let checker = Checker {
        command: &args.check,
        timeout: Duration::from_secs(args.timeout.into()),
        atoms: &atoms,
        history: &history,
        said: &said,
    };
    let steps = history.steps.len();
    let found = search::states(&atoms, steps, &said, args.states as usize, args.seed);
    let failed = check_all(&checker, &found.states, &interrupted)?;
    let shortest = match failed.iter().min_by_key(|(state, _)| (state.lost.len(), state.cut)) {
        Some((state, complaint)) => Some(shrunk(&checker, state, complaint, &interrupted)?),
        None => None,
    };
    let report = CrashReport {
        history: &history,
        atoms: &atoms,
        states: found.states.len(),
        is_all: found.is_all,
        seed: args.seed,
        failed: failed.len(),
        shortest,
    };
    if let (Some(keep), Some(Failed { state, .. })) = (&args.keep, &report.shortest) {
        let dir = keep.join("state");
        std::fs::create_dir_all(&dir).context(dir.display())?;
        checker.write_state(state, &dir, &keep.join("said"))?;
        std::fs::write(keep.join("report"), report.to_string()).context(keep.display())?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report.json()).context("report")?);
    } else {
        print!("{report}");
    }
    Ok(if report.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The length of the program's output after each number of steps.
fn output_lengths(history: &History) -> Vec<usize> {
    let mut so_far = vec![0];
    for step in &history.steps {
        let before = so_far[so_far.len() - 1];
        so_far.push(if let Event::Output(bytes) = step.event { bytes } else { before });
    }
    so_far
}

/// The states that fail, checked by one thread per processor.
fn check_all(
    checker: &Checker<'_>,
    states: &[State],
    interrupted: &AtomicBool,
) -> Result<Vec<(State, CheckFailure)>> {
    let work = Mutex::new((states.iter().enumerate(), Ok(Vec::new())));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let is_shown = std::io::stderr().is_terminal();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let (number, state) = {
                        let mut work = locked(&work);
                        if interrupted.load(Relaxed) {
                            work.1 = Err(recorded_program::interruption());
                        }
                        match work.0.next() {
                            Some(next) if work.1.is_ok() => next,
                            _ => return,
                        }
                    };
                    if is_shown {
                        eprint!("\r{} of {} states", number + 1, states.len());
                    }
                    let checked = checker.check(state);
                    let mut work = locked(&work);
                    match (checked, &mut work.1) {
                        (Ok(Some(complaint)), Ok(failed)) => {
                            failed.push((state.clone(), complaint))
                        }
                        (Err(failure), failed @ Ok(_)) => *failed = Err(failure),
                        _ => {}
                    }
                }
            });
        }
    });
    if is_shown {
        eprintln!();
    }
    work.into_inner().expect("no panic under the lock").1
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic under the lock")
}

/// The same failure with fewer lost atoms: restores one after the other while the check still fails.
fn shrunk(
    checker: &Checker<'_>,
    state: &State,
    complaint: &CheckFailure,
    interrupted: &AtomicBool,
) -> Result<Failed> {
    let mut failed = Failed { state: state.clone(), complaint: complaint.clone() };
    let mut checks = 0;
    loop {
        let lost = &failed.state.lost;
        let may_return = |number: &&usize| {
            checker.atoms.all[**number].needs.iter().all(|need| !lost.contains(need))
        };
        let mut less = None;
        for number in lost.iter().filter(may_return) {
            checks += 1;
            if checks > CHECKS_TO_SHRINK || interrupted.load(Relaxed) {
                return Ok(failed);
            }
            let mut lost = lost.clone();
            lost.remove(number);
            let state = State { lost, ..failed.state.clone() };
            if let Some(complaint) = checker.check(&state)? {
                less = Some(Failed { state, complaint });
                break;
            }
        }
        match less {
            Some(less) => failed = less,
            None => return Ok(failed),
        }
    }
}
