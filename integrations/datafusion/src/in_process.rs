//! One process: without a cache, with Millpond's, and with foyer's of the same limit. Each variant runs the queries twice.
//!
//! The variants alternate, and their results are compared. Prints time, requests and bytes of each query, and the medians of
//! the ratios of the rounds.

use std::sync::Arc;

use millpond_objects::{CachedStore, Freshness};
use object_store::ObjectStore;

use crate::common::Done;
use crate::counted::{Counted, Counts};
use crate::session::{Session, s3};
use crate::statistics::{median, with_range};
use crate::{data, foyer};

#[derive(clap::Args)]
pub struct InProcessArgs {
    /// Bytes of Parquet
    #[arg(long, default_value_t = 1 << 30)]
    bytes: u64,
    /// Number of runs of each variant
    #[arg(long, default_value_t = 3)]
    turns: usize,
    /// Memory limit of each cache, in bytes
    #[arg(long, default_value_t = 2 << 30)]
    limit: u64,
}

const ENGINES: [&str; 3] = ["none", "millpond", "foyer"];

#[derive(Clone, Default)]
struct QueryCost {
    seconds: f64,
    counts: Counts,
}

/// Costs of one run of a variant: by round and query.
type EngineRun = [Vec<QueryCost>; 2];

async fn run_engine(
    engine: &str,
    bucket: &str,
    limit: u64,
    answers: &mut Vec<String>,
) -> Done<EngineRun> {
    let counted = Counted::new(s3(bucket)?);
    let below: Arc<dyn ObjectStore> = Arc::clone(&counted) as _;
    let store: Arc<dyn ObjectStore> = match engine {
        "none" => below,
        "foyer" => Arc::new(foyer::Foyer::new(below, limit)),
        _ => Arc::new(
            CachedStore::builder(below)
                .memory_bytes(limit)
                .freshness(Freshness::Immutable)
                .build()?,
        ),
    };
    let session = Session::open(store, bucket).await?;
    let mut rounds = [Vec::new(), Vec::new()];
    for round in &mut rounds {
        for (number, query) in data::QUERIES.iter().enumerate() {
            let before = counted.counts();
            let (seconds, answer) = session.ask(query).await?;
            round.push(QueryCost { seconds, counts: counted.counts() - before });
            match answers.get(number) {
                Some(known) => assert_eq!(*known, answer, "{engine}: {query}"),
                None => answers.push(answer),
            }
        }
    }
    Ok(rounds)
}

fn total(round: &[QueryCost]) -> QueryCost {
    round.iter().fold(QueryCost::default(), |mut sum, one| {
        sum.seconds += one.seconds;
        sum.counts.requests += one.counts.requests;
        sum.counts.bytes += one.counts.bytes;
        sum
    })
}

fn format_cell(cost: &QueryCost) -> String {
    let mib = cost.counts.bytes as f64 / (1 << 20) as f64;
    format!("{:.3} s, {}, {mib:.1}", cost.seconds, cost.counts.requests)
}

pub async fn run(args: InProcessArgs) -> Done<()> {
    let bucket = std::env::var("MILLPOND_STORE_BUCKET")?;
    let (files, bytes) = data::put(&*s3(&bucket)?, args.bytes).await?;
    println!("{files} files, {bytes} bytes; limit of each cache {} bytes", args.limit);
    let mut answers = Vec::new();
    // A first run, so that the caches of the server and the kernel are the same for all runs.
    run_engine("none", &bucket, args.limit, &mut answers).await?;
    let mut turns: [Vec<EngineRun>; 3] = Default::default();
    for number in 0..args.turns {
        for place in 0..ENGINES.len() {
            // A B C, C B A.
            let engine = if number % 2 == 0 { place } else { ENGINES.len() - 1 - place };
            turns[engine]
                .push(run_engine(ENGINES[engine], &bucket, args.limit, &mut answers).await?);
        }
    }
    for round in 0..2 {
        println!("\nround {}: seconds, requests, MiB fetched (the last run)\n", round + 1);
        println!("| query | {} |\n|---|---|---|---|", ENGINES.join(" | "));
        for question in 0..data::QUERIES.len() {
            let cells =
                turns.iter().map(|turns| format_cell(&turns[args.turns - 1][round][question]));
            println!("| {} | {} |", question + 1, cells.collect::<Vec<_>>().join(" | "));
        }
        let sums = turns.iter().map(|turns| format_cell(&total(&turns[args.turns - 1][round])));
        println!("| all | {} |", sums.collect::<Vec<_>>().join(" | "));
        for other in [0, 2] {
            let pairs = || turns[1].iter().zip(&turns[other]);
            let seconds =
                pairs().map(|(own, peer)| total(&own[round]).seconds / total(&peer[round]).seconds);
            let requests = pairs().map(|(own, peer)| {
                total(&own[round]).counts.requests as f64
                    / total(&peer[round]).counts.requests.max(1) as f64
            });
            println!(
                "millpond / {}: time {}, requests {:.3}",
                ENGINES[other],
                with_range(seconds.collect()),
                median(requests.collect())
            );
        }
    }
    Ok(())
}
