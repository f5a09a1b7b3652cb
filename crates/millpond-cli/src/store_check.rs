//! `millpond store check`: tests which promises of conditional writes an object store keeps.

use std::process::ExitCode;
use std::time::Duration;

use millpond_store_check::{Options, Verdict, check, open};

use crate::failure::{Context, Failure, REFUSED, Result};
use crate::standard_output::print_line;

/// The store does not support all that was tested.
const NOT_OFFERED: u8 = 3;

/// Tests the promises of an object store
#[derive(Debug, clap::Args)]
pub struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(Debug, clap::Subcommand)]
enum StoreCommand {
    Check(CheckArgs),
}

/// Races conditional writes, and loses replies, to test which promises a store keeps.
///
/// Writes objects below a unique prefix, and removes them. The environment has the keys for S3:
/// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION. Exit status: 0 if the store keeps all promises
/// that could be tested, 1 if it breaks one or none could be tested, 2 for arguments that can't be
/// accepted, 3 if the store does not support all of the operations.
#[derive(Debug, clap::Args)]
struct CheckArgs {
    /// s3://BUCKET/PREFIX, file:///DIR or memory:///
    url: String,

    /// A server of the store. With several, the test writes through all of them concurrently
    #[arg(long = "endpoint", value_name = "URL")]
    endpoints: Vec<String>,

    /// Concurrent writes in a race
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(2..=1024))]
    racers: u16,

    /// Races of creates, and the same number of races of updates
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Seconds after which the outcome of a request is unknown
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    timeout: u16,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &StoreArgs) -> Result<ExitCode> {
    let StoreCommand::Check(args) = &args.command;
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
        let text = if args.json {
            serde_json::to_string_pretty(&report).context("report")?
        } else {
            report.to_string()
        };
        print_line(text.trim_end())?;
        Ok(if report.has(Verdict::Broken) {
            ExitCode::FAILURE
        } else if report.has(Verdict::NotOffered) {
            ExitCode::from(NOT_OFFERED)
        } else {
            ExitCode::SUCCESS
        })
    })
}
