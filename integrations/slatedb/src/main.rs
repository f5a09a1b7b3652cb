//! SlateDB with its objects in one cache of several processes: a writer, and readers (`DbReader`), over an S3 server that
//! `scripts/store-server versitygw` starts.
//!
//! - [`kills`]: readers and `millpond serve` are killed beside a writer. Each value that is read was written, and no reader goes
//!   back in time.
//! - [`measure`]: requests and speed of readers, with and without `millpond serve`.

#[path = "../../common/mod.rs"]
mod common;
mod generations;
mod kills;
mod measure;
mod reader;
mod store;
mod writer;

use clap::{Parser, Subcommand};

use common::Done;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Kills readers and the server beside a writer, and checks each value of a read
    Kills(kills::KillsArgs),
    /// Counts requests of four readers, and measures their speed
    Measure(measure::MeasureArgs),
    /// The process that writes
    #[command(hide = true)]
    Writer(writer::WriterArgs),
    /// A process that reads
    #[command(hide = true)]
    Reader(reader::ReaderArgs),
}

#[tokio::main]
async fn main() -> Done<()> {
    match Args::parse().command {
        Command::Kills(args) => kills::run(&args),
        Command::Measure(args) => measure::run(&args),
        Command::Writer(args) => writer::run(args).await,
        Command::Reader(args) => reader::run(args).await,
    }
}
