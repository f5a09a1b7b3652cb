//! A sync while four threads overwrite the file at random, as fast as they can, in mode back.
//!
//! It has to write the pages that were dirty at its start, at most the dirty limit. The target is
//! the time for the same amount without writers: the same threads stop before the sync, and its
//! bytes and rate are measured in the same rounds.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use millpond::{Backing, Engine, OpenOptions, WriteMode};
use millpond_bench_peers::Usage;
use rustix::fs::OFlags;

use super::operation_times::{Measured, PATIENCE, TimedEngine, measure};
use crate::bench::data::{KIB, MIB};
use crate::bench::data::{Random, TestFile};
use crate::bench::harness::{AlignedBuffer, Slice};
use crate::bench::outcome::Outcome;
use crate::bench::plan::Plan;
use crate::bench::write::{WriteTarget, open};
use crate::failure::{Context, Result};

const CASE: &str = "sync-under-writers";
const BACK: &str = "millpond, back, direct";
const QUIET: &str = "millpond, back, direct, writers stopped before";
const KERNEL: &str = "kernel pwrite, fdatasync";

const WRITERS: u64 = 4;
const FILE_BYTES: u64 = 256 * MIB;
const DIRTY_BYTES_MAX: u64 = 64 * MIB;
const SYNCS: usize = 3;
/// Target: a sync takes at most this number of times the time for the dirty limit.
const TARGET: f64 = 2.0;

/// Times of one engine's syncs, and the bytes written to the device during them, by any process.
#[derive(Default)]
struct Syncs {
    took: Vec<Duration>,
    bytes: Vec<u64>,
}

impl Syncs {
    fn bytes_per_s(&self) -> f64 {
        let bytes: u64 = self.bytes.iter().sum();
        bytes as f64 / self.took.iter().sum::<Duration>().as_secs_f64()
    }
}

/// How the writers and the syncs go together.
#[derive(Clone, Copy, PartialEq)]
enum Writers {
    GoOn,
    StopBefore,
}

/// Measures the case.
pub fn run(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    if !plan.wants(CASE) {
        return Ok(());
    }
    plan.report_progress(CASE);
    let bytes = plan.bytes_of(FILE_BYTES, FILE_BYTES / 4);
    let limit = DIRTY_BYTES_MAX * bytes / FILE_BYTES;
    let [own, others] = [TestFile::create(&plan.dir, bytes)?, TestFile::create(&plan.dir, bytes)?];
    let engine = Engine::builder()
        .cache_bytes(bytes * 2)
        .dirty_bytes_max(limit)
        .build()
        .context("building a Millpond engine")?;
    let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
    let file = match engine.open(own.path(), &options.backing(Backing::Direct)) {
        Ok(file) => file,
        Err(error) => {
            outcome.skip(CASE, BACK, &error);
            for baseline in [QUIET, KERNEL] {
                outcome.skip(CASE, baseline, format!("{BACK} failed: {error}"));
            }
            return Ok(());
        }
    };
    let kernel = open(&others.path(), OFlags::empty()).context(CASE)?;
    let ramp = plan.slice(400, 100);
    let blocks = (bytes / u64::from(4 * KIB)) as u32;
    let [under, quiet] = [RefCell::new(Syncs::default()), RefCell::new(Syncs::default())];
    let subject = || {
        TimedEngine::new(BACK, || {
            slice(&file, blocks, ramp, Writers::GoOn, &mut under.borrow_mut())
        })
    };
    let stopped = TimedEngine::new(QUIET, || {
        slice(&file, blocks, ramp, Writers::StopBefore, &mut quiet.borrow_mut())
    });
    let baseline = TimedEngine::new(KERNEL, || {
        slice(&kernel, blocks, ramp, Writers::GoOn, &mut Syncs::default())
    });
    measure(CASE, 1, [subject(), stopped], plan, outcome)?;
    measure(CASE, 1, [subject(), baseline], plan, outcome)?;
    let (under, quiet) = (under.into_inner(), quiet.into_inner());
    outcome.note(summary(&under, &quiet, limit));
    Ok(())
}

fn summary(under: &Syncs, quiet: &Syncs, limit: u64) -> String {
    let longest = under.took.iter().max().map_or(0.0, Duration::as_secs_f64);
    let rate = quiet.bytes_per_s();
    let limit_s = limit as f64 / rate;
    let most = under.bytes.iter().max().map_or(0.0, |most| *most as f64 / limit as f64);
    format!(
        "{CASE}: {BACK}: {} syncs, the longest {:.1} ms, {:.2} times the {:.1} ms that the dirty limit of {} \
         MiB takes at the {:.0} MB/s of a sync without writers (target {TARGET}); at most {most:.2} times \
         the limit was written during one, by writers over the limit, too",
        under.took.len(),
        longest * 1e3,
        longest / limit_s,
        limit_s * 1e3,
        limit / MIB,
        rate / 1e6
    )
}

/// Bytes that this process has sent to devices.
fn written_bytes() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/self/io")?;
    let mut values = text.lines().filter_map(|line| line.strip_prefix("write_bytes: "));
    let value = values.next().and_then(|value| value.parse().ok());
    value.ok_or_else(|| io::Error::other("/proc/self/io has no write_bytes"))
}

fn slice(
    target: &(impl WriteTarget + Sync),
    blocks: u32,
    ramp: Duration,
    writers: Writers,
    syncs: &mut Syncs,
) -> io::Result<Measured> {
    let mut slice = Slice::default();
    let mut took = Vec::new();
    // With the writers stopped before a sync, there is one for each time that they write.
    let (rounds, syncs_each) = match writers {
        Writers::GoOn => (1, SYNCS),
        Writers::StopBefore => (SYNCS, 1),
    };
    for round in 0..rounds {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| -> io::Result<()> {
            let threads: Vec<_> = (0..WRITERS)
                .map(|thread| {
                    let (stop, seed) = (&stop, thread << 32 | round as u64);
                    scope.spawn(move || overwrite(target, blocks, seed, stop))
                })
                .collect();
            thread::sleep(ramp);
            let join = |threads: Vec<thread::ScopedJoinHandle<'_, io::Result<()>>>| {
                stop.store(true, Relaxed);
                threads.into_iter().try_for_each(|thread| {
                    thread.join().map_err(|_| io::Error::other("a thread panicked"))?
                })
            };
            let mut threads = Some(threads);
            if writers == Writers::StopBefore {
                join(threads.take().unwrap_or_default())?;
            }
            let before = Usage::now();
            let synced = (0..syncs_each).try_for_each(|_| {
                let (started, written) = (Instant::now(), written_bytes()?);
                target.sync_data()?;
                took.push(started.elapsed());
                syncs.bytes.push(written_bytes()? - written);
                Ok(())
            });
            let used = Usage::now().since(before);
            slice.cpu += used.cpu;
            slice.context_switches += used.context_switches;
            join(threads.take().unwrap_or_default())?;
            synced
        })?;
    }
    slice.ops = took.len() as u64;
    slice.ops_per_s = took.len() as f64 / took.iter().sum::<Duration>().as_secs_f64();
    syncs.took.extend(&took);
    // The next slice begins with nothing dirty.
    target.sync_data()?;
    Ok(Measured { slice, took })
}

fn overwrite(
    target: &impl WriteTarget,
    blocks: u32,
    seed: u64,
    stop: &AtomicBool,
) -> io::Result<()> {
    let mut buffer = AlignedBuffer::new(4 * KIB as usize);
    let mut random = Random::seeded(seed);
    let started = Instant::now();
    while !stop.load(Relaxed) && started.elapsed() < PATIENCE {
        let offset = u64::from(random.below(blocks)) * u64::from(4 * KIB);
        target.write_at(buffer.bytes(), offset)?;
    }
    Ok(())
}
