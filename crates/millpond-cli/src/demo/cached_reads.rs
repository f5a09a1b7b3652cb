//! Cached reads: 4 KiB at random from a file that both caches hold, by one and by two threads.

use std::io;
use std::time::Duration;

use millpond::{Engine, OpenOptions};
use rustix::fs::OFlags;

use super::scratch::{MIB, Scratch, ScratchFile};
use super::slices::{BlockRandom, ReadTarget, compare, rate_of, read_random};
use super::table::{Table, per_second};
use crate::failure::{Context, Result};

const FILE_BYTES: u64 = 128 * MIB;
const BLOCK_BYTES: usize = 4096;
const SLICE: Duration = Duration::from_millis(80);
const ROUNDS: usize = 3;

pub fn run(scratch: &Scratch, table: &mut Table) -> Result<()> {
    let file = scratch.create(FILE_BYTES, BLOCK_BYTES)?;
    let kernel = file.open(OFlags::empty()).context("opening the file")?;
    let engine =
        Engine::builder().cache_bytes(2 * FILE_BYTES).build().context("building an engine")?;
    let options = OpenOptions::new().read(true);
    let millpond = engine.open(file.path(), &options).context("opening the file in Millpond")?;
    for threads in [1, 2] {
        let compared = compare(
            ROUNDS,
            || slice(&kernel, &file, threads).map(|rate| [rate]),
            || slice(&millpond, &file, threads).map(|rate| [rate]),
        )?;
        let what = match threads {
            1 => "cached reads of 4 KiB, 1 thread".into(),
            _ => format!("the same, {threads} threads"),
        };
        let [kernel, millpond] = [compared.kernel[0], compared.millpond[0]].map(per_second);
        table.add_ratio(&what, kernel, millpond, compared.ratio[0]);
    }
    Ok(())
}

fn slice(target: &impl ReadTarget, file: &ScratchFile, threads: u32) -> io::Result<f64> {
    // The kernel trims its cache of files that nothing has read for a moment: one pass, not counted.
    let mut chunk = vec![0; MIB as usize];
    for offset in (0..file.bytes).step_by(MIB as usize) {
        target.read_at(&mut chunk, offset)?;
    }
    rate_of(threads, SLICE, |thread| {
        let (mut random, mut dst) =
            (BlockRandom::seeded(u64::from(thread) + 1), vec![0; file.block_bytes]);
        move || read_random(target, file, &mut random, &mut dst).map(|_| ())
    })
}
