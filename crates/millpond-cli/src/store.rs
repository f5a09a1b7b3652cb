//! `millpond store check`: what an object store promises of conditional writes.

use std::process::ExitCode;
use std::time::Duration;

use millpond_store_check::{Options, Verdict, check, open};

use crate::failure::{Context, Failure, REFUSED, Result};

/// The store does not offer all that was tried.
const NOT_OFFERED: u8 = 3;

/// Finds out what an object store promises
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Check(CheckArgs),
}

/// Races conditional writes, and loses replies, to see which promises a store keeps.
///
/// Writes below a prefix of its own, and removes that. Keys for S3 are those of the environment:
/// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION. Exit status: 0 if all that could be tried is
/// kept, 1 if a promise is broken or nothing could be tried, 2 for arguments that can't be accepted, 3 if
/// the store does not offer all of it.
#[derive(Debug, clap::Args)]
struct CheckArgs {
    /// s3://BUCKET/PREFIX, file:///DIR or memory:///
    url: String,

    /// A server of the store: all of them are written through at once
    #[arg(long = "endpoint", value_name = "URL")]
    endpoints: Vec<String>,

    /// Writes at once in a race
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(2..=1024))]
    racers: u16,

    /// Races of creates, and as many of updates
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Seconds after which a request has no known outcome
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    timeout: u16,

    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let Command::Check(args) = &args.command;
    let options = Options {
        racers: args.racers.into(),
        rounds: args.rounds as usize,
        request_timeout: Duration::from_secs(args.timeout.into()),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start of the runtime")?;
    runtime.block_on(async {
        let endpoints = open(&args.url, &args.endpoints, &options)
            .await
            .map_err(|error| Failure::new(REFUSED, error))?;
        let report = check(&endpoints, &options).await.context(&args.url)?;
        if args.json {
            println!("{}", serde_json::to_string_pretty(&report).context("report")?);
        } else {
            print!("{report}");
        }
        Ok(if report.has(Verdict::Broken) {
            ExitCode::FAILURE
        } else if report.has(Verdict::NotOffered) {
            ExitCode::from(NOT_OFFERED)
        } else {
            ExitCode::SUCCESS
        })
    })
}
