//! `kill -9` in mode back: a child overwrites blocks of a file and is killed; the parent compares the file.
//!
//! The child acknowledges its writes by their count. The sequence of blocks follows from a seed, so the
//! parent knows which stamps the file must hold: of each block the last acknowledged write, or a later one.
//! The writes wait in the child's cache, and the keeper, a process of its own, writes them to the file.
//! The kernel's side is the same child with `pwrite`, whose bytes are the kernel's before it is killed.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use millpond::{Backing, Engine, WriteMode};

use super::scratch::{MIB, Scratch, ScratchFile, fill_block, sequence_of, stamp};
use super::slices::{BlockRandom, ReadTarget};
use super::table::{Table, count, per_second};
use crate::failure::{Context, FAILED, Failure, Result};

const FILE_BYTES: u64 = 32 * MIB;
const BLOCK_BYTES: usize = 4096;
const LENGTH: Duration = Duration::from_millis(400);
/// Writes between two acknowledgements.
const BATCH: u32 = 64;
const SEED: u64 = 11;
/// A bound on the keeper's write-back.
const PATIENCE: Duration = Duration::from_secs(20);

pub fn run(scratch: &Scratch, table: &mut Table) -> Result<()> {
    let [kernel, own] =
        [WriterKind::Kernel, WriterKind::Millpond].map(|side| overwrite_and_kill(scratch, side));
    let [kernel, own] = [kernel?, own?];
    let [kernel_rate, own_rate] = [&kernel, &own].map(|side| per_second(side.rate));
    table.add_ratio(
        "overwrites of 4 KiB, mode back, until kill -9",
        kernel_rate,
        own_rate,
        own.rate / kernel.rate,
    );
    let of = |side: &Killed| format!("{} of {}", count(side.lost), count(side.acknowledged));
    table.add_counts("  acknowledged writes lost", of(&kernel), of(&own), own.lost == 0);
    Ok(())
}

/// The process that writes until it is killed. Its parent is `millpond demo`.
#[derive(Debug, clap::Args)]
pub struct WriterArgs {
    /// The file
    file: PathBuf,
    /// What writes it
    side: WriterKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum WriterKind {
    Kernel,
    Millpond,
}

/// The writes that a child acknowledged, and those in the file.
struct Killed {
    rate: f64,
    acknowledged: u64,
    lost: u64,
}

fn overwrite_and_kill(scratch: &Scratch, side: WriterKind) -> Result<Killed> {
    let file = scratch.create(FILE_BYTES, BLOCK_BYTES)?;
    let program = std::env::current_exe().context("finding this program's file")?;
    let name = clap::ValueEnum::to_possible_value(&side).expect("no side is skipped");
    let mut child = Command::new(program)
        .arg("demo-writer")
        .args([file.path(), name.get_name().into()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting a process")?;
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    // The first line says that the child is about to write.
    let ready = lines.next();
    let (started, mut acknowledged, mut failure) = (Instant::now(), 0, None);
    if ready.is_some() {
        while started.elapsed() < LENGTH {
            let Some(Ok(line)) = lines.next() else { break };
            acknowledged = line.parse().context("reading an acknowledgement")?;
        }
    }
    let elapsed = started.elapsed();
    if child.try_wait().context("asking for the process")?.is_some() || acknowledged == 0 {
        failure = Some(Failure::new(
            FAILED,
            format!("demo's {} writer ended by itself", name.get_name()),
        ));
    }
    child.kill().context("killing the process")?;
    // Acknowledgements that were in the pipe count, too.
    for line in lines.map_while(io::Result::ok) {
        acknowledged = line.parse().unwrap_or(acknowledged);
    }
    child.wait().context("waiting for the process")?;
    if let Some(failure) = failure {
        return Err(failure);
    }
    millpond::keeper::await_written(file.file().as_fd(), PATIENCE)
        .context("waiting for the keeper")?;
    let lost = lost_writes(&file, acknowledged).context("reading the file")?;
    let rate = f64::from(acknowledged) / elapsed.as_secs_f64();
    Ok(Killed { rate, acknowledged: acknowledged.into(), lost })
}

/// The number of blocks whose last acknowledged write is not in the file.
fn lost_writes(file: &ScratchFile, acknowledged: u32) -> io::Result<u64> {
    let mut last = vec![0; file.blocks() as usize];
    let mut random = BlockRandom::seeded(SEED);
    for sequence in 1..=acknowledged {
        last[random.below(file.blocks()) as usize] = sequence;
    }
    let (mut block_bytes, mut lost) = (vec![0; BLOCK_BYTES], 0);
    for block in 0..file.blocks() {
        file.file().read_exact_at(&mut block_bytes, file.offset_of(block))?;
        let found = sequence_of(&block_bytes, block)?;
        lost += u64::from(found.is_none_or(|sequence| sequence < last[block as usize]));
    }
    Ok(lost)
}

/// Overwrites blocks and prints how many, until a signal or a closed pipe ends the process.
///
/// # Errors
///
/// Those of the engine and of the writes.
pub fn write_until_killed(args: &WriterArgs) -> Result<()> {
    let written = match args.side {
        WriterKind::Kernel => {
            let file = OpenOptions::new().read(true).write(true).open(&args.file);
            let file: File = file.context(args.file.display())?;
            write_all(&file, &file)
        }
        WriterKind::Millpond => {
            // A fork: before the engine starts threads.
            let keeper = millpond::keeper::spawn().context("starting a keeper")?;
            let engine = Engine::builder().cache_bytes(8 * FILE_BYTES).keeper(keeper);
            let engine = engine.dirty_age_max(Duration::from_secs(60)).build();
            let engine = engine.context("building an engine")?;
            let options =
                millpond::OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
            let file = engine
                .open(&args.file, &options.clone().backing(Backing::Direct))
                .or_else(|_| engine.open(&args.file, &options))
                .context(args.file.display())?;
            let size = File::open(&args.file).context(args.file.display())?;
            write_all(&file, &size)
        }
    };
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context(args.file.display()),
    }
}

fn write_all(target: &impl ReadTarget, size: &File) -> io::Result<()> {
    let blocks = (size.metadata()?.len() / BLOCK_BYTES as u64) as u32;
    let (mut random, mut block_bytes) = (BlockRandom::seeded(SEED), vec![0; BLOCK_BYTES]);
    let mut stdout = io::stdout().lock();
    // Both caches hold the file before the clock starts.
    for block in 0..blocks {
        target.read_at(&mut block_bytes, u64::from(block) * BLOCK_BYTES as u64)?;
    }
    writeln!(stdout, "0")?;
    for sequence in 1.. {
        let block = random.below(blocks);
        fill_block(&mut block_bytes, stamp(1, block, sequence));
        target.write_at(&block_bytes, u64::from(block) * BLOCK_BYTES as u64)?;
        if sequence.is_multiple_of(BATCH) {
            writeln!(stdout, "{sequence}")?;
        }
    }
    Ok(())
}
