//! The `millpond` program.
//!
//! - [`demo`]: compares each mechanism with the kernel's, in 15 seconds.
//! - [`run`]: starts another program with its file I/O served by Millpond. It inspects the program
//!   ([`run::program`]), writes the preload library to disk ([`run::preload`]), and calls exec; or it stays
//!   as the program's keeper ([`run::kept`]).
//! - [`keeper`]: writes back the dirty pages of processes that died; [`rescue`]: applies a rescue file,
//!   which has the bytes that a keeper could not write.
//! - [`serve`]: one cache of an object store for all processes of the user.
//! - [`store_check`]: tests the promises of an object store.
//! - [`top`]: shows the statistics of running engines.
//! - [`check_untorn`]: shows which blocks a power cut can't tear.
//! - [`manual`]: man pages and completions.
//!
//! Benchmarks and long tests are in another program, `millpond-bench`.
//!
//! Exit status: that of the program that was run; 2 for arguments or a program that can't be served, 126
//! and 127 as in a shell, 1 for any other failure.

#![forbid(unsafe_code)]
// They panic if the output can't be written: `standard_output` returns an error.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod check_untorn;
mod demo;
mod descriptors;
mod failure;
mod keeper;
mod manual;
mod printable;
mod rescue;
mod run;
mod serve;
mod standard_output;
mod store_check;
mod top;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// A user-space page cache for unmodified programs.
#[derive(Debug, Parser)]
#[command(name = "millpond", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::DemoArgs),
    #[command(hide = true)]
    DemoWriter(demo::WriterArgs),
    Run(run::Args),
    Keeper(keeper::KeeperArgs),
    Rescue(rescue::RescueArgs),
    Serve(serve::ServeArgs),
    Store(store_check::StoreArgs),
    Top(top::TopArgs),
    CheckUntorn(check_untorn::CheckUntornArgs),
    Manual(manual::ManualArgs),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args).map(|()| ExitCode::SUCCESS),
        Command::DemoWriter(args) => demo::write_until_killed(&args).map(|()| ExitCode::SUCCESS),
        Command::Run(args) => run::run(&args),
        Command::Keeper(args) => keeper::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Rescue(args) => rescue::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Serve(args) => serve::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Store(args) => store_check::run(&args),
        Command::Top(args) => top::run(&args).map(|()| ExitCode::SUCCESS),
        Command::CheckUntorn(args) => check_untorn::run(&args),
        Command::Manual(args) => manual::run(&args, Cli::command()).map(|()| ExitCode::SUCCESS),
    };
    match outcome {
        Ok(status) => status,
        Err(failure) => {
            failure.report("millpond");
            ExitCode::from(failure.status)
        }
    }
}
