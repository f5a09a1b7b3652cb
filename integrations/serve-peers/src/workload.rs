//! The processes of a measurement: a server, and readers with or without it. Each line of input is a command, and each line
//! of output its answer.

use std::io::{BufRead, Write, stdin, stdout};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use millpond_serve::{MemoryChoice, Server, SharedStore};
use object_store::{GetOptions, GetRange, ObjectStore};

use crate::peers::first_word;
use crate::peers::own::cache;
use crate::process::Done;
use crate::synthetic_store::{SyntheticStore, path, word};

#[derive(clap::Args)]
pub struct ServerArgs {
    #[arg(long)]
    socket: PathBuf,
    #[arg(long)]
    memory: u64,
    #[arg(long)]
    object_bytes: u64,
    #[arg(long)]
    delay_us: u64,
}

#[derive(clap::Args)]
pub struct WorkArgs {
    /// Reads by the server that listens there
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Otherwise the memory of a cache in the process
    #[arg(long, default_value_t = 0)]
    memory: u64,
    #[arg(long)]
    objects: u64,
    #[arg(long)]
    object_bytes: u64,
    #[arg(long)]
    delay_us: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

fn say(answer: impl std::fmt::Display) -> std::io::Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{answer}")?;
    out.flush()
}

pub fn serve(args: ServerArgs) -> Done<()> {
    let delay = Duration::from_micros(args.delay_us);
    let store = Arc::new(SyntheticStore::new(args.object_bytes, delay));
    let runtime = runtime()?;
    let _in_runtime = runtime.enter();
    let builder = cache(Arc::clone(&store) as _, args.memory).shared(MemoryChoice::Auto);
    let server = Server::bind(builder.build()?, &args.socket)?;
    runtime.spawn(server.run());
    say("ready")?;
    for line in stdin().lock().lines() {
        match line?.as_str() {
            "requests" => say(store.requests())?,
            _ => say("unknown")?,
        }
    }
    Ok(())
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Object numbers with a Zipf distribution.
struct Zipf {
    sums: Vec<f64>,
    random: Random,
}

impl Zipf {
    fn new(objects: u64, exponent: f64, seed: u64) -> Zipf {
        let mut sum = 0.0;
        let sums = (1..=objects).map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        });
        Zipf { sums: sums.collect(), random: Random(seed) }
    }

    fn next(&mut self) -> u64 {
        let at = self.random.unit() * self.sums.last().copied().unwrap_or(0.0);
        let rank = self.sums.partition_point(|sum| *sum <= at) as u64;
        // Ranks are scattered over the names.
        rank.min(self.sums.len() as u64 - 1)
    }
}

struct Reader {
    store: Arc<dyn ObjectStore>,
    args: WorkArgs,
    /// Calls of `zipf` so far: each has another sequence.
    rounds: AtomicU64,
}

impl Reader {
    async fn read(&self, object: u64, at: u64, len: u64) -> Done<()> {
        let range = Some(GetRange::Bounded(at..at + len));
        let read = self.store.get_opts(&path(object), GetOptions::new().with_range(range)).await?;
        let bytes = read.bytes().await?;
        if bytes.len() as u64 != len || first_word(&bytes) != word(object, at) {
            return Err(format!("wrong bytes of object {object} at {at}").into());
        }
        Ok(())
    }

    /// Reads all objects once, in pieces of a length.
    async fn scan(&self, len: u64) -> Done<()> {
        let len = self.args.object_bytes.min(len);
        for object in 0..self.args.objects {
            for at in (0..self.args.object_bytes).step_by(len as usize) {
                self.read(object, at, len).await?;
            }
        }
        Ok(())
    }

    async fn zipf(&self, reads: u64) -> Done<()> {
        let seed = self.args.seed + (self.rounds.fetch_add(1, Relaxed) << 32);
        let mut objects = Zipf::new(self.args.objects, 0.8, seed);
        let len = self.args.object_bytes.min(16 << 10);
        for _ in 0..reads {
            let object = objects.next();
            let at = objects.random.next() % (self.args.object_bytes / len) * len;
            self.read(object, at, len).await?;
        }
        Ok(())
    }

    /// Random reads for a time.
    async fn random(&self, time: Duration) -> Done<()> {
        let (mut random, started) = (Random(self.args.seed), Instant::now());
        while started.elapsed() < time {
            for _ in 0..64 {
                let object = random.next() % self.args.objects;
                let at = random.next() % (self.args.object_bytes / 4096) * 4096;
                self.read(object, at, 4096).await?;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }
}

pub fn work(args: WorkArgs) -> Done<()> {
    let delay = Duration::from_micros(args.delay_us);
    let remote = Arc::new(SyntheticStore::new(args.object_bytes, delay));
    let runtime = runtime()?;
    let _in_runtime = runtime.enter();
    let mut shared = None;
    let store: Arc<dyn ObjectStore> = match &args.socket {
        Some(socket) => {
            let client = SharedStore::new(Arc::clone(&remote) as _, socket);
            shared = Some(client.clone());
            Arc::new(client)
        }
        None => Arc::new(cache(Arc::clone(&remote) as _, args.memory).build()?),
    };
    let reader = Arc::new(Reader { store, args, rounds: AtomicU64::new(0) });
    say("ready")?;
    for line in stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let number = words.get(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        let name = words[0].to_owned();
        if name == "requests" {
            say(remote.requests())?;
            continue;
        }
        if name == "limit" {
            let client = shared.as_ref().ok_or("no server")?;
            say(runtime.block_on(client.set_memory_bytes(number))?.unwrap_or(0))?;
            continue;
        }
        let reader = Arc::clone(&reader);
        let started = Instant::now();
        // On a worker of the runtime, as the queries of an engine are.
        let done = runtime.block_on(runtime.spawn(async move {
            let done = match name.as_str() {
                "scan" => reader.scan(64 << 10).await,
                "whole" => reader.scan(u64::MAX).await,
                "zipf" => reader.zipf(number).await,
                "random" => reader.random(Duration::from_millis(number)).await,
                other => Err(format!("no work {other}").into()),
            };
            done.map_err(|error| error.to_string())
        }))?;
        done?;
        say(started.elapsed().as_secs_f64() * 1e6)?;
    }
    Ok(())
}
