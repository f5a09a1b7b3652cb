//! Several processes that run the queries: by one server, as `SharedStore` and by its endpoint, and with a cache in each.
//! `scripts/store-server versitygw` starts the store and runs this.

use std::sync::OnceLock;

use serde::Deserialize;

use crate::common::{Done, RequestLog, Serve, Worker, variable};
use crate::data;
use crate::session::s3;
use crate::statistics::{median, with_range};
use crate::worker::{Engine, RoundReport};

#[derive(clap::Args)]
pub struct ProcessesArgs {
    /// Bytes of Parquet
    #[arg(long, default_value_t = 256 << 20)]
    bytes: u64,
    /// Measured rounds of each engine, and repetitions of each count of requests
    #[arg(long, default_value_t = 6)]
    turns: usize,
    /// Processes that run at once when times are measured
    #[arg(long, default_value_t = 4)]
    processes: usize,
    /// Only cases whose names contain this: warm, memory, together
    #[arg(long, default_value = "")]
    only: String,
}

/// Processes whose requests are counted.
const COUNTED_PROCESSES: usize = 8;
const MIB: u64 = 1 << 20;

/// The fields of the endpoint's description that a client needs.
#[derive(Deserialize)]
struct Endpoint {
    url: String,
    access_key_id: String,
    secret_access_key: String,
}

/// Processes of one engine that run rounds at the same time.
struct Group {
    engine: Engine,
    workers: Vec<Worker>,
}

impl Group {
    /// Starts processes, and waits until they have read the schema. `spread`: each one starts with another query.
    fn start(
        engine: Engine,
        count: usize,
        spread: bool,
        options: &[&str],
        environment: &[(&str, &str)],
    ) -> Done<Group> {
        let start = |number: usize| {
            let first = if spread { number * data::QUERIES.len() / count } else { 0 };
            let (engine, first) = (engine.to_string(), first.to_string());
            let mut arguments = vec!["worker", &engine, "--first", &first];
            arguments.extend(options);
            Worker::start(&arguments, environment)
        };
        let mut group = Group { engine, workers: (0..count).map(start).collect::<Done<_>>()? };
        for worker in &mut group.workers {
            worker.answer()?;
        }
        Ok(group)
    }

    fn private(memory_bytes: u64, count: usize, spread: bool) -> Done<Group> {
        let memory = memory_bytes.to_string();
        Group::start(Engine::Private, count, spread, &["--memory", &memory], &[])
    }

    fn shared(server: &Serve, count: usize, spread: bool) -> Done<Group> {
        let socket = server.socket().display().to_string();
        Group::start(Engine::Shared, count, spread, &["--socket", &socket], &[])
    }

    fn endpoint(server: &Serve, count: usize) -> Done<Group> {
        let endpoint: Endpoint = serde_json::from_str(&server.endpoint()?)?;
        let environment = [
            ("AWS_ENDPOINT", endpoint.url.as_str()),
            ("AWS_ACCESS_KEY_ID", endpoint.access_key_id.as_str()),
            ("AWS_SECRET_ACCESS_KEY", endpoint.secret_access_key.as_str()),
        ];
        Group::start(Engine::Endpoint, count, false, &[], &environment)
    }

    /// Has all processes run the queries once. Returns the mean of their times.
    fn round(&mut self) -> Done<f64> {
        static ANSWERS: OnceLock<Vec<u64>> = OnceLock::new();
        for worker in &mut self.workers {
            worker.send("round")?;
        }
        let mut sum = 0.0;
        for worker in &mut self.workers {
            let report: RoundReport = serde_json::from_str(&worker.answer()?)?;
            if report.fallbacks > 0 {
                return Err(format!(
                    "{}: {} reads bypassed the server",
                    self.engine, report.fallbacks
                )
                .into());
            }
            let known = ANSWERS.get_or_init(|| report.answers.clone());
            if let Some(query) = (0..known.len()).find(|&at| known[at] != report.answers[at]) {
                return Err(
                    format!("{}: another answer to {}", self.engine, data::QUERIES[query]).into()
                );
            }
            sum += report.seconds;
        }
        Ok(sum / self.workers.len() as f64)
    }
}

/// A server with an empty cache.
fn start_server(memory_bytes: u64) -> Done<Serve> {
    Serve::start(memory_bytes, &["--freshness", "immutable", "--endpoint"])
}

/// Times of processes that run at once, and whose data is cached.
fn warm(args: &ProcessesArgs, bytes: u64) -> Done<()> {
    let (count, memory) = (args.processes, 2 * bytes + 64 * MIB);
    let server = start_server(memory)?;
    // Fills the server's cache.
    Group::shared(&server, 1, false)?.round()?;
    let mut groups = [
        Group::private(memory, count, false)?,
        Group::shared(&server, count, false)?,
        Group::endpoint(&server, count)?,
    ];
    let mut firsts = Vec::new();
    for group in &mut groups {
        let seconds = group.round()?;
        firsts.push(format!("{} {seconds:.3}", group.engine));
    }
    let mut times = [const { Vec::new() }; 3];
    for turn in 0..args.turns {
        for place in 0..groups.len() {
            // A B C, C B A.
            let at = if turn % 2 == 0 { place } else { groups.len() - 1 - place };
            times[at].push(groups[at].round()?);
        }
    }
    println!(
        "\n{count} processes x {} queries, warm; seconds of a process, {} rounds:",
        data::QUERIES.len(),
        args.turns
    );
    println!("  first round (private: cold; others: a warm server): {}", firsts.join(", "));
    for (group, times) in groups.iter().zip(&times) {
        println!("  {}: {}", group.engine, with_range(times.clone()));
    }
    for (at, target) in [(1, 1.05), (2, 1.5)] {
        let ratios = times[at].iter().zip(&times[0]).map(|(own, peer)| own / peer).collect();
        println!("  {} over private: {} (target {target})", groups[at].engine, with_range(ratios));
    }
    Ok(())
}

/// Requests with one cache, and with eight caches of the same memory together.
fn same_memory(args: &ProcessesArgs, bytes: u64, log: &mut RequestLog) -> Done<()> {
    println!(
        "\n{COUNTED_PROCESSES} processes, two rounds, each starts with another query; the same total memory:"
    );
    for (part, name) in [(4, "a quarter of the data"), (1, "all of the data")] {
        let total = bytes / part;
        let (mut ratios, mut shared, mut private) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..args.turns.div_ceil(2) {
            log.take()?;
            let server = start_server(total)?;
            let mut group = Group::shared(&server, COUNTED_PROCESSES, true)?;
            group.round()?;
            group.round()?;
            let with_one = log.take()?.reads() as f64;
            drop((group, server));
            let each = total / COUNTED_PROCESSES as u64;
            let mut group = Group::private(each, COUNTED_PROCESSES, true)?;
            group.round()?;
            group.round()?;
            let with_eight = log.take()?.reads() as f64;
            ratios.push(with_one / with_eight);
            shared.push(with_one);
            private.push(with_eight);
        }
        println!(
            "  {name}: {} of {} requests, {} (target 0.333)",
            median(shared),
            median(private),
            with_range(ratios)
        );
    }
    Ok(())
}

/// Requests of processes that start with the same query at once, and of one process.
fn together(args: &ProcessesArgs, bytes: u64, log: &mut RequestLog) -> Done<()> {
    let mut requests = |count: usize| -> Done<f64> {
        log.take()?;
        let server = start_server(2 * bytes + 64 * MIB)?;
        Group::shared(&server, count, false)?.round()?;
        Ok(log.take()?.reads() as f64)
    };
    let (mut ratios, mut all) = (Vec::new(), Vec::new());
    for _ in 0..args.turns.div_ceil(2) {
        let one = requests(1)?;
        let several = requests(COUNTED_PROCESSES)?;
        ratios.push(several / one);
        all.push(several);
    }
    println!(
        "\n{COUNTED_PROCESSES} processes, one working set, started together: {} requests, {} of one process's (target 1.05)",
        median(all),
        with_range(ratios)
    );
    Ok(())
}

pub async fn run(args: ProcessesArgs) -> Done<()> {
    let mut log = RequestLog::from_environment()?;
    let bucket = variable("MILLPOND_STORE_BUCKET")?;
    let (files, bytes) = data::put(&*s3(&bucket)?, args.bytes).await?;
    println!("{files} files, {bytes} bytes");
    let is_wanted = |name: &str| name.contains(&args.only);
    if is_wanted("warm") {
        warm(&args, bytes)?;
    }
    if is_wanted("memory") {
        same_memory(&args, bytes, &mut log)?;
    }
    if is_wanted("together") {
        together(&args, bytes, &mut log)?;
    }
    Ok(())
}
