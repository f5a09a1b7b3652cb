//! A process that runs the queries: a round for each line of input.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, Write, stdin, stdout};
use std::path::PathBuf;
use std::sync::Arc;

use clap::ValueEnum;
use millpond_objects::{CachedStore, Freshness};
use millpond_serve::{SharedStore, store_name};
use object_store::ObjectStore;
use serde::{Deserialize, Serialize};

use crate::common::{Done, variable};
use crate::data;
use crate::session::{Session, s3};

/// How a process reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// By a cache of its own
    Private,
    /// By `SharedStore`
    Shared,
    /// By the endpoint of a server, which the environment names
    Endpoint,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Engine::Private => "private",
            Engine::Shared => "shared",
            Engine::Endpoint => "endpoint",
        })
    }
}

#[derive(clap::Args)]
pub struct WorkerArgs {
    engine: Engine,
    /// Limit of the process's own cache, in bytes
    #[arg(long, default_value_t = 0)]
    memory: u64,
    /// The socket of the server of `shared`
    #[arg(long)]
    socket: Option<PathBuf>,
    /// The first query of a round
    #[arg(long, default_value_t = 0)]
    first: usize,
}

/// The report of a process after a round.
#[derive(Serialize, Deserialize)]
pub struct RoundReport {
    pub seconds: f64,
    /// A hash of each query's answer, in the order of the queries.
    pub answers: Vec<u64>,
    /// Reads that a server should have served, and did not.
    pub fallbacks: u64,
}

fn hash(text: &str) -> u64 {
    // The same in each process.
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// The store of an engine, and the client if it is one.
fn open(args: &WorkerArgs, bucket: &str) -> Done<(Arc<dyn ObjectStore>, Option<SharedStore>)> {
    let below = s3(bucket)?;
    let store: Arc<dyn ObjectStore> = match args.engine {
        Engine::Endpoint => below,
        Engine::Private => {
            let cache = CachedStore::builder(below).memory_bytes(args.memory);
            Arc::new(cache.freshness(Freshness::Immutable).build()?)
        }
        Engine::Shared => {
            let socket = args.socket.as_ref().ok_or("--socket is missing")?;
            let name = store_name(&*below, Some(&variable("AWS_ENDPOINT")?));
            let shared = SharedStore::new(below, socket).named(name);
            return Ok((Arc::new(shared.clone()), Some(shared)));
        }
    };
    Ok((store, None))
}

pub async fn run(args: WorkerArgs) -> Done<()> {
    let bucket = variable("MILLPOND_STORE_BUCKET")?;
    let (store, client) = open(&args, &bucket)?;
    let session = Session::open(store, &bucket).await?;
    let mut out = stdout().lock();
    writeln!(out, "ready")?;
    for line in stdin().lock().lines() {
        line?;
        let count = data::QUERIES.len();
        let (mut seconds, mut answers) = (0.0, vec![0; count]);
        for place in 0..count {
            let number = (args.first + place) % count;
            let (time, answer) = session.ask(data::QUERIES[number]).await?;
            seconds += time;
            answers[number] = hash(&answer);
        }
        let fallbacks = client.as_ref().map_or(0, |client| client.stats().fallbacks);
        let report = RoundReport { seconds, answers, fallbacks };
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    }
    Ok(())
}
