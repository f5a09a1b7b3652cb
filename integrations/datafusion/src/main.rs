//! Benchmarks of 20 DataFusion queries on Parquet files on an S3 server, which `scripts/store-server` starts:
//!
//! - [`in_process`]: without a cache, with Millpond's, and with foyer's.
//! - [`processes`]: several processes with one `millpond serve`, and with caches of their own.

#[path = "../../common/mod.rs"]
mod common;
mod counted;
mod data;
mod foyer;
mod in_process;
mod processes;
mod session;
mod statistics;
mod worker;

use clap::{Parser, Subcommand};

use common::Done;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// One process: without a cache, with Millpond's, and with foyer's of the same limit
    InProcess(in_process::InProcessArgs),
    /// Several processes: by `millpond serve`, as SharedStore and by its endpoint, and with a cache in each process
    Processes(processes::ProcessesArgs),
    /// A process of the latter
    #[command(hide = true)]
    Worker(worker::WorkerArgs),
}

#[tokio::main]
async fn main() -> Done<()> {
    match Args::parse().command {
        Command::InProcess(args) => in_process::run(args).await,
        Command::Processes(args) => processes::run(args).await,
        Command::Worker(args) => worker::run(args).await,
    }
}
