//! Appends by two threads while two others extend the file by writes at its present end.
//!
//! An append has to find the end of the file and hold it; a writer that extends the file moves it.
//! The kernel's baseline appends with O_APPEND, under the inode's lock.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use millpond::{Engine, OpenOptions, WriteMode};
use millpond_bench_peers::Usage;
use rustix::fs::OFlags;

use super::operation_times::{Measured, PATIENCE, TimedEngine, Times, measure};
use crate::bench::data::NamedFile;
use crate::bench::data::{KIB, MIB};
use crate::bench::harness::{AlignedBuffer, Slice};
use crate::bench::outcome::Outcome;
use crate::bench::plan::Plan;
use crate::bench::write::{WriteTarget, open};
use crate::failure::{Context, Result};

const APPENDERS: usize = 2;
const EXTENDERS: usize = 2;
const CACHE_BYTES: u64 = 256 * MIB;
/// Target: p99.9 is at most this number of times the median.
const TARGET: f64 = 20.0;

struct AppendCase {
    name: &'static str,
    engine: &'static str,
    baseline: &'static str,
    mode: WriteMode,
    dsync: bool,
}

const CASES: [AppendCase; 3] = [
    AppendCase {
        name: "append-through",
        engine: "millpond, through",
        baseline: "kernel O_APPEND",
        mode: WriteMode::Through,
        dsync: false,
    },
    AppendCase {
        name: "append-through-dsync",
        engine: "millpond, through, dsync",
        baseline: "kernel O_APPEND, O_DSYNC",
        mode: WriteMode::Through,
        dsync: true,
    },
    AppendCase {
        name: "append-back",
        engine: "millpond, back",
        baseline: "kernel O_APPEND",
        mode: WriteMode::Back,
        dsync: false,
    },
];

/// A file whose end can be read and set.
trait Growing: WriteTarget + Sync {
    fn end(&self) -> io::Result<u64>;
    fn clear(&self) -> io::Result<()>;
}

impl Growing for millpond::File {
    fn end(&self) -> io::Result<u64> {
        Ok(self.len()?)
    }

    fn clear(&self) -> io::Result<()> {
        Ok(self.truncate(0)?)
    }
}

impl Growing for File {
    fn end(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn clear(&self) -> io::Result<()> {
        self.set_len(0)
    }
}

/// Measures the cases.
pub fn run(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    for case in CASES.iter().filter(|case| plan.wants(case.name)) {
        plan.report_progress(case.name);
        one(case, plan, outcome)?;
    }
    Ok(())
}

fn one(case: &AppendCase, plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let [own, others] = [NamedFile::create(&plan.dir, 0)?, NamedFile::create(&plan.dir, 0)?];
    let engine =
        Engine::builder().cache_bytes(CACHE_BYTES).build().context("building a Millpond engine")?;
    let options = OpenOptions::new().read(true).write(true).write_mode(case.mode);
    let file = engine.open(&own.path, &options.dsync(case.dsync)).context(case.name)?;
    let dsync = if case.dsync { OFlags::DSYNC } else { OFlags::empty() };
    let appender = open(&others.path, OFlags::APPEND | dsync).context(case.name)?;
    // With O_APPEND every write would append.
    let extender = open(&others.path, dsync).context(case.name)?;
    let length = plan.slice(200, 100);
    let counts = RefCell::new(Vec::new());
    let subject =
        TimedEngine::new(case.engine, || slice(&file, &file, length, &mut counts.borrow_mut()));
    let baseline =
        TimedEngine::new(case.baseline, || slice(&appender, &extender, length, &mut Vec::new()));
    let times = measure(case.name, APPENDERS as u32, [subject, baseline], plan, outcome)?;
    if let Some([own, others]) = times {
        outcome.note(summary(case, [&own, &others], &counts.into_inner()));
    }
    Ok(())
}

fn summary(case: &AppendCase, times: [&Times; 2], counts: &[[u64; APPENDERS]]) -> String {
    let [own, baseline] = times.map(|times| times.quantile(0.999) / times.quantile(0.5));
    let median = times[0].quantile(0.5) / times[1].quantile(0.5);
    let of = |thread: usize| counts.iter().map(|counts| counts[thread]).sum::<u64>();
    let least = counts.iter().flatten().min().copied().unwrap_or(0);
    format!(
        "{}: {}: p99.9 is {own:.1} times the median (target {TARGET}), {}'s {baseline:.1} times; the median is \
         {median:.1} times {}'s; appends by thread: \
         {} and {}, in a slice at least {least}",
        case.name,
        case.engine,
        case.baseline,
        case.baseline,
        of(0),
        of(1)
    )
}

fn slice(
    appender: &impl Growing,
    extender: &impl Growing,
    length: Duration,
    counts: &mut Vec<[u64; APPENDERS]>,
) -> io::Result<Measured> {
    appender.clear()?;
    let stop = AtomicBool::new(false);
    let append = || -> io::Result<Vec<Duration>> {
        let mut buffer = AlignedBuffer::new(4 * KIB as usize);
        let (started, mut took) = (Instant::now(), Vec::new());
        while started.elapsed() < length {
            let begun = Instant::now();
            appender.append(buffer.bytes())?;
            took.push(begun.elapsed());
        }
        Ok(took)
    };
    let extend = || -> io::Result<()> {
        let mut buffer = AlignedBuffer::new(4 * KIB as usize);
        let started = Instant::now();
        while !stop.load(Relaxed) && started.elapsed() < PATIENCE {
            extender.write_at(buffer.bytes(), extender.end()?)?;
        }
        Ok(())
    };
    let panicked = |_| io::Error::other("a thread panicked");
    thread::scope(|scope| {
        let extenders: Vec<_> = (0..EXTENDERS).map(|_| scope.spawn(extend)).collect();
        let (before, started) = (Usage::now(), Instant::now());
        let appenders: [_; APPENDERS] = std::array::from_fn(|_| scope.spawn(append));
        // A thread without an append when its time is over continues, beside the extending threads,
        // until it has one.
        let appended =
            appenders.map(|thread| thread.join().map_err(panicked).and_then(|took| took));
        let elapsed = started.elapsed();
        let used = Usage::now().since(before);
        stop.store(true, Relaxed);
        for thread in extenders {
            thread.join().map_err(panicked)??;
        }
        let mut took = Vec::new();
        let mut count = [0; APPENDERS];
        for (appended, count) in appended.into_iter().zip(&mut count) {
            let appended = appended?;
            *count = appended.len() as u64;
            took.extend(appended);
        }
        counts.push(count);
        let ops = took.len() as u64;
        let ops_per_s = ops as f64 / elapsed.as_secs_f64();
        let Usage { cpu, context_switches, .. } = used;
        Ok(Measured { slice: Slice { ops, ops_per_s, cpu, context_switches }, took })
    })
}
