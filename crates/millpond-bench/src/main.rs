//! The `millpond-bench` program: measures Millpond, and tests it for hours. `millpond` has the commands for users.
//!
//! - [`mod@bench`]: measures Millpond and its baselines on this machine.
//! - [`soak`]: runs self-checking loads for hours.
//! - [`crash`]: computes the states that a power cut could leave of a program's files, and checks them.
//! - [`millpond_command`]: finds the `millpond` program, which all three start.
//!
//! Exit status: 2 for arguments that can't be accepted, 1 for any other failure.

#![forbid(unsafe_code)]

mod bench;
mod crash;
mod descendants;
#[allow(dead_code, reason = "some exit statuses are those of `millpond run`")]
#[path = "../../millpond-cli/src/failure.rs"]
mod failure;
mod millpond_command;
#[path = "../../millpond-cli/src/printable.rs"]
mod printable;
mod soak;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The suites count the allocations of a request.
#[global_allocator]
static ALLOCATOR: millpond_bench_peers::Counting = millpond_bench_peers::Counting;

/// Measures Millpond and its baselines on this machine.
///
/// Every suite reads or writes files of the same size, in the same order, through each engine in
/// turn, and prints a table of the results. Programs run under the `millpond` beside this program, or
/// under the one that the variable MILLPOND names.
#[derive(Debug, Parser)]
#[command(name = "millpond-bench", version)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct BenchCli {
    #[command(flatten)]
    measured: bench::SuiteArgs,

    #[command(subcommand)]
    command: Option<BenchCommand>,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    Compare(bench::CompareArgs),
    Figures(bench::FiguresArgs),
    Crash(crash::CrashArgs),
    Soak(soak::SoakArgs),
    #[command(hide = true)]
    SoakWorker(soak::WorkerArgs),
}

fn main() -> ExitCode {
    let BenchCli { measured, command } = BenchCli::parse();
    let outcome = match command {
        None => bench::run(&measured).map(|()| ExitCode::SUCCESS),
        Some(BenchCommand::Compare(args)) => bench::compare(&args).map(|()| ExitCode::SUCCESS),
        Some(BenchCommand::Figures(args)) => bench::render(&args).map(|()| ExitCode::SUCCESS),
        Some(BenchCommand::Crash(args)) => crash::run(&args),
        Some(BenchCommand::Soak(args)) => soak::run(&args),
        Some(BenchCommand::SoakWorker(args)) => soak::work(&args).map(|()| ExitCode::SUCCESS),
    };
    outcome.unwrap_or_else(|failure| {
        failure.report("millpond-bench");
        ExitCode::from(failure.status)
    })
}
