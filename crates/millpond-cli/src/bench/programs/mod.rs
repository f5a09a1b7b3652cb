//! The suite `programs`: programs as they are, on the kernel and under `millpond run`.
//!
//! - [`files`]: programs that go through files once. [`tools`]: git, an interpreter and a compiler.
//! - [`sqlite`], [`store`]: databases. [`threads`]: fio, and loops that do one thing.
//! - [`job`]: a program, how it is measured, and what is to be reached; [`child`]: one run of it;
//!   [`produced`]: what it left. [`fixtures`]: what the programs work on.
//!
//! `run` has the options that it has by default, but where a row says otherwise, and is part of what is
//! measured. Each slice is a run of the program from its start to its end; or what the program says that
//! a part of it took, where the start and the first pass are not the question. Before each slice of
//! either side what the last one made is removed, as much memory as a cache could take is touched, and
//! the files are read. What a program says and leaves must be the same on both sides.

mod child;
mod files;
mod fixtures;
mod job;
mod produced;
mod sqlite;
mod store;
mod threads;
mod tools;

use std::path::Path;
use std::time::Duration;

use self::fixtures::Workplace;
use self::job::Site;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::Result;

/// How often `run` is started to see what that alone takes.
const STARTS: u32 = 10;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let place = Workplace::new(&plan.dir)?;
    let mut site = Site::new(plan);
    files::run(&place, &mut site)?;
    tools::run(&place, &mut site)?;
    sqlite::run(&place, &mut site)?;
    store::run(&place, &mut site)?;
    threads::run(&place, &mut site)?;
    let mut outcome = site.finish();
    if !outcome.is_empty() {
        outcome.notes.extend(note_start(&place.path));
    }
    Ok(outcome)
}

/// What `run` itself takes, which every row has in it that counts a whole run.
fn note_start(dir: &Path) -> Option<String> {
    let time = |launcher: &[&str]| -> std::io::Result<Duration> {
        let own = std::env::current_exe()?;
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
