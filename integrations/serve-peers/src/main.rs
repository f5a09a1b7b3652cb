//! Compares one cache for several processes (`millpond serve`) with other caches of a machine: latency and processor time of
//! warm reads, and what several processes cost together.
//!
//! Sides alternate in rounds, forwards and backwards. Values are medians, with quartiles in parentheses. A peer that can't
//! run is listed with the reason.

mod cases;
mod measure;
mod peers;
mod process;
mod synthetic_store;
mod warm;
mod workload;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use process::Done;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Warm reads of 4 KiB, 64 KiB and 1 MiB, by all engines. CACHEY, VERSITYGW and JUICEFS name programs.
    Warm {
        #[arg(long, default_value_t = 10)]
        rounds: usize,
        /// Only engines whose names contain this
        #[arg(long, default_value = "")]
        only: String,
        /// Where the files are
        #[arg(long, default_value = "/tmp")]
        dir: PathBuf,
    },
    /// Several processes: requests to the store, memory, a new process, a lower limit, idle processes
    Cases {
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Only cases whose names contain this
        #[arg(long, default_value = "")]
        only: String,
    },
    /// The server of a measurement
    #[command(hide = true)]
    Serve(workload::ServerArgs),
    /// A process of a measurement
    #[command(hide = true)]
    Work(workload::WorkArgs),
    #[command(hide = true)]
    WriteLmdb { dir: PathBuf },
}

fn main() -> Done<()> {
    match Args::parse().command {
        Command::Warm { rounds, only, dir } => warm::run(rounds, &only, &dir),
        Command::Cases { rounds, only } => cases::run(rounds, &only),
        Command::Serve(args) => workload::serve(args),
        Command::Work(args) => workload::work(args),
        Command::WriteLmdb { dir } => peers::lmdb::write(&dir, warm::OBJECT_BYTES),
    }
}
