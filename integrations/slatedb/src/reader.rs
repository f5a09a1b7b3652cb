//! A process that reads: the latest generation, which its poller follows, or a checkpoint.
//!
//! For each line of input, a number, it reads so many keys at random, checks them, and answers with a [`ReadReport`]. The line
//! `blocks` makes it read keys of all blocks.
//!
//! - **R1** A value was written, and is not of an earlier generation than the one that the latest number seen before implies.
//! - **R2** The number of the latest generation does not decrease. It is not below the number that the process was started
//!   with, and not below any generation that a value was of.

use std::io::{BufRead, Write, stdin, stdout};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use millpond_serve::SharedStore;
use serde::{Deserialize, Serialize};
use slatedb::config::{DbReaderOptions, ObjectStoreCacheOptions};
use slatedb::{DbReader, DbReaderMode};
use uuid::Uuid;

use crate::common::Done;
use crate::generations::{LATEST, decode_latest, generation_of, key, latest_that_writes};
use crate::store::{DATABASE, open};

#[derive(clap::Args)]
pub struct ReaderArgs {
    /// The server's socket; without it the store itself is used
    #[arg(long)]
    socket: Option<PathBuf>,
    #[arg(long)]
    keys: u64,
    #[arg(long)]
    seed: u64,
    /// A generation that the writer has reported as durable
    #[arg(long, default_value_t = 0)]
    at_least: u64,
    /// Reads this checkpoint, whose latest generation is `--at-least`
    #[arg(long)]
    checkpoint: Option<Uuid>,
    /// Without SlateDB's cache in the memory of this process
    #[arg(long)]
    uncached: bool,
    /// With SlateDB's cache of parts of objects, in this directory
    #[arg(long)]
    disk_cache: Option<PathBuf>,
}

/// The report of a process after its reads.
#[derive(Debug, Serialize, Deserialize)]
pub struct ReadReport {
    pub seconds: f64,
    /// The latest generation.
    pub latest: u64,
    /// Reads that were served from the server's memory, and those that went to the store because no server answered.
    pub hits: u64,
    pub fallbacks: u64,
    pub is_attached: bool,
}

/// Reads of keys between two looks at the latest generation.
const READS_BETWEEN: u64 = 20;
/// Fewer than the keys of a block, which has 4 KiB.
const KEYS_OF_BLOCK: usize = 8;

struct Checker {
    db: DbReader,
    keys: u64,
    random: u64,
    latest: u64,
}

impl Checker {
    fn random_key(&mut self) -> u64 {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (word ^ (word >> 27)) % self.keys
    }

    /// R2. `at_least`: the latest generation of any value so far.
    async fn check_latest(&mut self, at_least: u64) -> Done<()> {
        let found = self.db.get(LATEST).await?.ok_or("there is no latest generation")?;
        let (found, expected) = (decode_latest(&found)?, self.latest.max(at_least));
        if found < expected {
            return Err(format!("generation {found} after {expected}: back in time").into());
        }
        self.latest = found;
        Ok(())
    }

    async fn read(&mut self, count: u64) -> Done<()> {
        let mut newest = 0;
        for at in 0..count {
            if at % READS_BETWEEN == 0 {
                self.check_latest(newest).await?;
            }
            let number = self.random_key();
            let found = self.db.get(key(number)).await?;
            let found = found.ok_or_else(|| format!("key {number} is missing"))?;
            let generation = generation_of(number, &found)?;
            // R1.
            let earliest = latest_that_writes(number, self.latest);
            if generation < earliest {
                return Err(format!(
                    "key {number} is of generation {generation}, after {} and so {earliest}",
                    self.latest
                )
                .into());
            }
            newest = newest.max(generation);
        }
        self.check_latest(newest).await
    }

    async fn read_blocks(&self) -> Done<()> {
        for number in (0..self.keys).step_by(KEYS_OF_BLOCK) {
            let found = self.db.get(key(number)).await?;
            generation_of(number, &found.ok_or_else(|| format!("key {number} is missing"))?)?;
        }
        Ok(())
    }
}

async fn open_reader(args: &ReaderArgs) -> Done<(DbReader, Option<SharedStore>)> {
    let (store, client) = open(args.socket.as_deref())?;
    let options = DbReaderOptions {
        manifest_poll_interval: Duration::from_millis(200),
        object_store_cache_options: ObjectStoreCacheOptions {
            root_folder: args.disk_cache.clone(),
            ..ObjectStoreCacheOptions::default()
        },
        ..DbReaderOptions::default()
    };
    let mode = args.checkpoint.map_or(DbReaderMode::ManagedCheckpoint, DbReaderMode::Checkpoint);
    let mut builder =
        DbReader::builder(DATABASE, store).with_options(options).with_reader_mode(mode);
    if args.uncached {
        builder = builder.with_db_cache_disabled();
    }
    Ok((builder.build().await?, client))
}

pub async fn run(args: ReaderArgs) -> Done<()> {
    let (db, client) = open_reader(&args).await?;
    let (keys, random, latest) = (args.keys, args.seed, args.at_least);
    let mut checker = Checker { db, keys, random, latest };
    checker.check_latest(0).await?;
    let mut out = stdout().lock();
    writeln!(out, "ready")?;
    for line in stdin().lock().lines() {
        let begun = Instant::now();
        match &*line? {
            "blocks" => checker.read_blocks().await?,
            count => checker.read(count.parse()?).await?,
        }
        if args.checkpoint.is_some() && checker.latest != args.at_least {
            let (found, expected) = (checker.latest, args.at_least);
            return Err(format!("the checkpoint has generation {found}, not {expected}").into());
        }
        let stats = client.as_ref().map(SharedStore::stats).unwrap_or_default();
        let report = ReadReport {
            seconds: begun.elapsed().as_secs_f64(),
            latest: checker.latest,
            hits: stats.hits,
            fallbacks: stats.fallbacks,
            is_attached: stats.is_attached,
        };
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    }
    Ok(())
}
