//! The process that writes.
//!
//! Commands: `write` writes the next generation, and `checkpoint` creates a checkpoint. The answer is the number of the
//! latest generation, which is durable, and the checkpoint's ID. `close` ends the process when all is written to tables.

use std::io::{BufRead, Write, stdin, stdout};
use std::path::PathBuf;
use std::time::Duration;

use slatedb::config::{
    CheckpointOptions, CheckpointScope, GarbageCollectorDirectoryOptions, GarbageCollectorOptions,
    Settings,
};
use slatedb::{Db, WriteBatch};

use crate::common::Done;
use crate::generations::{LATEST, key, value, writes};
use crate::store::{DATABASE, open};

#[derive(clap::Args)]
pub struct WriterArgs {
    /// The server's socket; without it the store itself is used
    #[arg(long)]
    socket: Option<PathBuf>,
    #[arg(long)]
    keys: u64,
    #[arg(long)]
    table_bytes: usize,
}

/// Small tables that are soon compacted and removed, so that a short run has all kinds of writes.
fn settings(table_bytes: usize) -> Settings {
    let often = Some(GarbageCollectorDirectoryOptions {
        interval: Some(Duration::from_secs(1)),
        min_age: Duration::from_secs(3),
        dry_run: false,
    });
    Settings {
        l0_sst_size_bytes: table_bytes,
        garbage_collector_options: Some(GarbageCollectorOptions {
            manifest_options: often,
            wal_options: often,
            compacted_options: often,
            compactions_options: often,
            ..GarbageCollectorOptions::default()
        }),
        ..Settings::default()
    }
}

async fn write(db: &Db, keys: u64, generation: u64) -> Done<()> {
    let mut batch = WriteBatch::new();
    batch.put(LATEST, generation.to_le_bytes());
    for number in (0..keys).filter(|&number| writes(generation, number)) {
        batch.put(key(number), value(number, generation));
    }
    db.write(batch).await?.await_durable().await?;
    Ok(())
}

pub async fn run(args: WriterArgs) -> Done<()> {
    let (store, _) = open(args.socket.as_deref())?;
    let db = Db::builder(DATABASE, store).with_settings(settings(args.table_bytes)).build().await?;
    let mut latest = 0;
    write(&db, args.keys, latest).await?;
    let mut out = stdout().lock();
    writeln!(out, "ready")?;
    for line in stdin().lock().lines() {
        match &*line? {
            "write" => {
                latest += 1;
                write(&db, args.keys, latest).await?;
                writeln!(out, "{latest}")?;
            }
            "checkpoint" => {
                let options = CheckpointOptions::default();
                let made = db.create_checkpoint(CheckpointScope::Durable, &options).await?;
                writeln!(out, "{latest} {}", made.id)?;
            }
            "close" => {
                db.close().await?;
                writeln!(out, "{latest}")?;
                break;
            }
            other => return Err(format!("unknown command {other}").into()),
        }
    }
    Ok(())
}
