//! Readers and writers of one file: four threads of each, 8 KiB blocks at random.
//!
//! Each write fills its block with one stamp, so a reader sees a torn block as two stamps. Both sides are
//! cached, and write back nothing while they are measured. Each has a file of its own.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use millpond::{Backing, Engine, OpenOptions, WriteMode};
use rustix::fs::OFlags;

use super::scratch::{MIB, Scratch, ScratchFile, fill_block, sequence_of, stamp};
use super::slices::{BlockRandom, ReadTarget, compare, rate_of};
use super::table::{Table, count, per_second};
use crate::failure::{Context, Result};

/// Small, so that readers and writers often meet in a block.
const FILE_BYTES: u64 = 4 * MIB;
const BLOCK_BYTES: usize = 8192;
const SLICE: Duration = Duration::from_millis(200);
const ROUNDS: usize = 2;
const READERS: u32 = 4;
const WRITERS: u32 = 4;

pub fn run(scratch: &Scratch, table: &mut Table) -> Result<()> {
    let [file, kernel_file] =
        [scratch.create(FILE_BYTES, BLOCK_BYTES)?, scratch.create(FILE_BYTES, BLOCK_BYTES)?];
    let kernel = kernel_file.open(OFlags::empty()).context("opening the file")?;
    let engine = Engine::builder().cache_bytes(64 * MIB).dirty_age_max(Duration::from_secs(60));
    let engine = engine.build().context("building an engine")?;
    let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
    let millpond = engine
        .open(file.path(), &options.clone().backing(Backing::Direct))
        .or_else(|_| engine.open(file.path(), &options))
        .context("opening the file in Millpond")?;
    let (torn_kernel, torn_millpond) = (AtomicU64::new(0), AtomicU64::new(0));
    let compared = compare(
        ROUNDS,
        || slice(&kernel, &kernel_file, &torn_kernel),
        || slice(&millpond, &file, &torn_millpond),
    )?;
    let what = format!("{READERS} readers + {WRITERS} writers, one file, 8 KiB: reads");
    let rates = [compared.kernel[0], compared.millpond[0]].map(per_second);
    let [kernel_rate, millpond_rate] = rates;
    table.add_ratio(&what, kernel_rate, millpond_rate, compared.ratio[0]);
    let [kernel_rate, millpond_rate] = [compared.kernel[1], compared.millpond[1]].map(per_second);
    table.add_ratio("  writes", kernel_rate, millpond_rate, compared.ratio[1]);
    let [torn_kernel, torn_millpond] = [torn_kernel, torn_millpond].map(AtomicU64::into_inner);
    table.add_counts(
        "  torn reads (0 is right)",
        count(torn_kernel),
        count(torn_millpond),
        torn_millpond == 0,
    );
    // Nothing reads these bytes again, but a failed write-back is an error of the engine.
    millpond.close().context("closing the file in Millpond")
}

/// Reads and writes a second; adds torn reads to `torn`.
fn slice(target: &impl ReadTarget, file: &ScratchFile, torn: &AtomicU64) -> io::Result<[f64; 2]> {
    let (reads, writes) = (AtomicU64::new(0), AtomicU64::new(0));
    // One loop serves both kinds of threads: the number decides, and each kind has a counter.
    rate_of(READERS + WRITERS, SLICE, |thread| {
        let mut random = BlockRandom::seeded(u64::from(thread) + 1);
        let (mut block_bytes, mut sequence) = (vec![0; file.block_bytes], 0);
        let (reads, writes) = (&reads, &writes);
        move || {
            let block = random.below(file.blocks());
            if thread < READERS {
                let len = target.read_at(&mut block_bytes, file.offset_of(block))?;
                whole(len, block_bytes.len())?;
                torn.fetch_add(u64::from(sequence_of(&block_bytes, block)?.is_none()), Relaxed);
                reads.fetch_add(1, Relaxed);
            } else {
                sequence += 1;
                fill_block(&mut block_bytes, stamp(thread, block, sequence));
                whole(target.write_at(&block_bytes, file.offset_of(block))?, block_bytes.len())?;
                writes.fetch_add(1, Relaxed);
            }
            Ok(())
        }
    })?;
    Ok([reads, writes].map(|ops| ops.into_inner() as f64 / SLICE.as_secs_f64()))
}

fn whole(len: usize, wanted: usize) -> io::Result<()> {
    match len == wanted {
        true => Ok(()),
        false => Err(io::Error::other(format!("{len} of {wanted} bytes"))),
    }
}
