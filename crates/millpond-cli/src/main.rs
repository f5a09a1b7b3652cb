//! The `millpond` program.
//!
//! - [`demo`]: shows each mechanism beside the kernel's, in 15 seconds.
//! - [`run`]: starts another program with its file I/O served by Millpond. Looks at the program
//!   first ([`run::program`]), lays the preload library out on disk ([`run::preload`]), execs; or
//!   stays as its keeper ([`run::kept`]).
//! - [`keeper`]: writes back what other processes left dirty when they died; [`rescue`]: puts what it
//!   could not write into the file after all.
//! - [`bench`]: measures Millpond and its peers on this machine.
//! - [`soak`]: loads that check themselves, for hours.
//! - [`store`]: finds out what an object store promises.
//! - [`crash`]: what a power cut would leave of a program's files.
//! - [`top`]: shows what running engines do.
//! - [`manual`]: man pages and completions.
//!
//! Before all of that, and before std's runtime starts, `run` with the options that most have is started by
//! [`early`]: the whole command line's description took half of the time until the program ran.
//!
//! Exit status: that of the program that was run; 2 for arguments or a program that can't be
//! served, 126 and 127 as a shell has them, 1 for anything else that fails.

#![forbid(unsafe_code)]

mod bench;
mod crash;
mod demo;
mod descendants;
mod failure;
mod keeper;
mod manual;
mod printable;
mod rescue;
mod run;
mod soak;
mod store;
mod top;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::failure::Failure;

/// `bench` tells how often a request allocates memory.
#[global_allocator]
static ALLOCATOR: millpond_bench_peers::Counting = millpond_bench_peers::Counting;

/// A user-space page cache for unmodified programs, and its benchmarks.
#[derive(Debug, Parser)]
#[command(name = "millpond", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Args),
    #[command(hide = true)]
    DemoWriter(demo::WriterArgs),
    Run(run::Args),
    Keeper(keeper::Args),
    Rescue(rescue::Args),
    Bench(bench::Args),
    Crash(crash::Args),
    Soak(soak::Args),
    #[command(hide = true)]
    SoakWorker(soak::WorkerArgs),
    Store(store::Args),
    Top(top::Args),
    Manual(manual::Args),
}

// A test's first argument may be anything.
#[cfg(not(test))]
millpond_exit_watcher::before_main!(early);

/// Becomes the program, where the command line is of the simple kind; `main` has all others.
#[cfg_attr(test, expect(dead_code, reason = "not called in tests"))]
fn early() {
    let mut words = std::env::args_os().skip(1);
    if words.next().is_some_and(|word| word == "run")
        && let Some(args) = run::Args::of_plain(words)
    {
        // Returns only if that has failed.
        let Err(failure) = run::run(&args) else { return };
        std::process::exit(tell(&failure).into());
    }
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args).map(|()| ExitCode::SUCCESS),
        Command::DemoWriter(args) => demo::write_until_killed(&args).map(|()| ExitCode::SUCCESS),
        Command::Run(args) => run::run(&args),
        Command::Keeper(args) => keeper::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Rescue(args) => rescue::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Bench(args) => bench::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Crash(args) => crash::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::SoakWorker(args) => soak::work(&args).map(|()| ExitCode::SUCCESS),
        Command::Store(args) => store::run(&args),
        Command::Top(args) => top::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Manual(args) => manual::run(&args, Cli::command()).map(|()| ExitCode::SUCCESS),
    };
    match outcome {
        Ok(status) => status,
        Err(failure) => ExitCode::from(tell(&failure)),
    }
}

/// Says it; the exit status.
fn tell(failure: &Failure) -> u8 {
    eprintln!("millpond: {}", printable::printable_lines(&failure.message));
    failure.status
}
