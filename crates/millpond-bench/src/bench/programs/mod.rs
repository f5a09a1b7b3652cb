//! The suite `programs`: unmodified programs with the kernel's file I/O, and the same programs under `millpond run`.
//!
//! - [`program_files`]: programs that read or write files once. [`tools`]: git, an interpreter and a
//!   compiler.
//! - [`sqlite`], [`store`]: databases. [`threads`]: fio, and loops of one system call.
//! - [`job`]: one benchmark: a program, the time that is measured, and the required ratios; [`child`]: one run of it;
//!   [`produced`]: the files that it writes. [`fixtures`]: the files that the programs read.
//!
//! The time includes the start of `millpond run`, which has its default options unless a row of the table names
//! others. A slice is one run of the program. Some programs report the time of a part themselves; that time is used
//! where the start and the first pass are not of interest. Both sides begin a slice in the same state: the files that
//! the last slice wrote are removed, as much memory as a cache could take is touched, and the files are read into the
//! kernel's page cache. A program's output and files must be the same on both sides.

mod child;
mod fixtures;
mod job;
mod produced;
mod program_files;
mod sqlite;
mod store;
mod threads;
mod tools;

use std::path::Path;
use std::time::Duration;

use self::fixtures::WorkDirectory;
use self::job::JobRunner;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::Result;
use crate::millpond_command::millpond;

/// Number of starts of `run` that measure its own time.
const STARTS: u32 = 10;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let work_dir = WorkDirectory::new(&plan.dir)?;
    let mut runner = JobRunner::new(plan);
    program_files::run(&work_dir, &mut runner)?;
    tools::run(&work_dir, &mut runner)?;
    sqlite::run(&work_dir, &mut runner)?;
    store::run(&work_dir, &mut runner)?;
    threads::run(&work_dir, &mut runner)?;
    let mut outcome = runner.finish();
    if !outcome.is_empty() {
        outcome.notes.extend(note_start(&work_dir.path));
    }
    Ok(outcome)
}

/// The time of `run` itself, which is part of every row of a whole run.
fn note_start(dir: &Path) -> Option<String> {
    let time = |launcher: &[&str]| -> std::io::Result<Duration> {
        let own = millpond().map_err(|failure| std::io::Error::other(failure.message))?;
        let mut least = Duration::MAX;
        for _ in 0..STARTS {
            let mut command = match launcher {
                [] => std::process::Command::new("true"),
                words => {
                    let mut command = std::process::Command::new(&own);
                    command.args(words).arg("true");
                    command
                }
            };
            let ended = child::run(command.current_dir(dir), Duration::from_secs(60))?;
            least = least.min(ended.elapsed);
        }
        Ok(least)
    };
    let (with, without) = (time(&["run", "--"]).ok()?, time(&[]).ok()?);
    Some(format!(
        "programs: true takes {:.1} ms under run, and {:.1} on the kernel (the least of {STARTS})",
        with.as_secs_f64() * 1e3,
        without.as_secs_f64() * 1e3
    ))
}
