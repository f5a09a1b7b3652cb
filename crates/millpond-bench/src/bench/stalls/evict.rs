//! A cached write while another thread misses, the cache is full, and every page in it was used
//! twice: a search for a page to evict finds no cold one.
//!
//! The file is a hole read past the kernel's cache, so that a miss costs little besides the
//! eviction. The baseline reads a cached page. The target is for the longest write that overlaps a
//! miss in time: other long writes have other causes, for example a missing processor.

use std::cell::Cell;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use millpond::{Advice, Backing, Engine, File, OpenOptions, WriteMode};
use millpond_bench_peers::Usage;
use rustix::fs::OFlags;

use super::operation_times::{Measured, TimedEngine, measure};
use crate::bench::data::NamedFile;
use crate::bench::data::{KIB, MIB};
use crate::bench::harness::{AlignedBuffer, Slice};
use crate::bench::outcome::Outcome;
use crate::bench::plan::Plan;
use crate::bench::write::open;
use crate::failure::{Context, Result};

const CASES: [(&str, u64); 2] = [("evict-256m", 256 * MIB), ("evict-4g", 4096 * MIB)];
const QUICK_BYTES_MAX: u64 = 1024 * MIB;
const EVICTING: &str = "millpond, back, one eviction";
const RESTING: &str = "millpond, back, no eviction";

const PAGE_BYTES: u64 = 4 * KIB as u64;
/// Number of overwritten pages.
const WRITTEN_PAGES: u64 = 16;
const TARGET_US: f64 = 200.0;

/// A file with as many cached pages as the cache holds.
struct Full<'a> {
    engine: &'a Engine,
    file: File,
    pages: u64,
    /// The next page that was not read yet.
    next: Cell<u64>,
}

/// The start and the duration of each write.
type TimedEvictions = Vec<(Instant, Duration)>;

/// The reads beside the writes, and their effect.
#[derive(Default)]
struct Missed {
    evictions: u64,
    /// Of each slice, the longest write that overlapped a read.
    beside: Vec<Duration>,
}

impl Missed {
    fn longest_us(&self) -> f64 {
        self.beside.iter().max().map_or(0.0, |longest| longest.as_secs_f64() * 1e6)
    }
}

impl Full<'_> {
    fn new<'a>(engine: &'a Engine, file: File) -> io::Result<Full<'a>> {
        const READ_BYTES: u64 = 64 * KIB as u64;
        file.advise(0, 0, Advice::Random)?;
        let mut buffer = AlignedBuffer::new(READ_BYTES as usize);
        let before = engine.stats().evictions;
        let mut offset = 0;
        while engine.stats().evictions == before {
            file.read_exact_at(buffer.bytes(), offset)?;
            offset += READ_BYTES;
        }
        let pages = offset / PAGE_BYTES;
        let full = Full { engine, file, pages, next: Cell::new(pages) };
        full.use_all()?;
        Ok(full)
    }

    /// Uses each page twice, in two passes.
    fn use_all(&self) -> io::Result<()> {
        let mut byte = [0];
        for page in (0..self.pages).chain(0..self.pages) {
            self.file.read_exact_at(&mut byte, page * PAGE_BYTES)?;
        }
        Ok(())
    }

    /// One thread overwrites a few pages, and measures each write. Another thread reads pages at
    /// the same time: pages that miss, if `evicts`.
    fn slice(&self, evicts: bool, length: Duration, missed: &mut Missed) -> io::Result<Measured> {
        self.use_all()?;
        let file = &self.file;
        let (stop, begun) = (AtomicBool::new(false), AtomicBool::new(false));
        let write = || -> io::Result<(TimedEvictions, Usage, Duration)> {
            let mut buffer = AlignedBuffer::new(PAGE_BYTES as usize);
            let mut took = Vec::with_capacity(1 << 20);
            let (before, started) = (Usage::of_thread(), Instant::now());
            for page in (0..WRITTEN_PAGES).cycle() {
                let at = Instant::now();
                file.write_at(buffer.bytes(), page * PAGE_BYTES)?;
                took.push((at, at.elapsed()));
                begun.store(true, Relaxed);
                if stop.load(Relaxed) {
                    break;
                }
            }
            Ok((took, Usage::of_thread().since(before), started.elapsed()))
        };
        thread::scope(|scope| {
            let writer = scope.spawn(write);
            while !begun.load(Relaxed) && !writer.is_finished() {
                thread::yield_now();
            }
            thread::sleep(length / 2);
            let evictions = self.engine.stats().evictions;
            let page = if evicts { self.next.replace(self.next.get() + 1) } else { 0 };
            let reading = Instant::now();
            let read = self.file.read_exact_at(&mut [0], page * PAGE_BYTES);
            let read_by = Instant::now();
            missed.evictions += self.engine.stats().evictions - evictions;
            thread::sleep(length / 2);
            stop.store(true, Relaxed);
            let written = writer.join().map_err(|_| io::Error::other("a thread panicked"))?;
            read?;
            let (took, used, elapsed) = written?;
            let is_beside = |at: Instant, took| at < read_by && at + took > reading;
            let beside_it = took.iter().filter(|(at, took)| is_beside(*at, *took));
            missed.beside.extend(beside_it.map(|(_, took)| *took).max());
            let took: Vec<Duration> = took.into_iter().map(|(_, took)| took).collect();
            let ops = took.len() as u64;
            let ops_per_s = ops as f64 / elapsed.as_secs_f64();
            let Usage { cpu, context_switches, .. } = used;
            Ok(Measured { slice: Slice { ops, ops_per_s, cpu, context_switches }, took })
        })
    }
}

/// Measures the cases.
pub fn run(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    for (case, bytes) in CASES.into_iter().filter(|(case, _)| plan.wants(case)) {
        plan.report_progress(case);
        let bytes = plan.bytes(bytes);
        // Filling the cache, and reading it twice before each slice, takes most of the time.
        let is_short = !plan.quick || bytes <= QUICK_BYTES_MAX;
        let done = match is_short {
            true => one(case, bytes, plan, outcome)?,
            false => Err("left out with --quick: it takes half a minute".into()),
        };
        if let Err(reason) = done {
            outcome.skip(case, EVICTING, &reason);
            outcome.skip(case, RESTING, &reason);
        }
    }
    Ok(())
}

/// Memory that is available for a cache, as the kernel reports it.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Returns the reason if it can't be measured here.
fn one(
    case: &'static str,
    cache_bytes: u64,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<std::result::Result<(), String>> {
    let available = available_bytes().unwrap_or(u64::MAX);
    if available < cache_bytes + cache_bytes / 4 {
        return Ok(Err(format!("{} MiB of memory are free", available / MIB)));
    }
    let named = NamedFile::create(&plan.dir, 0)?;
    // All cached pages, and a page for each slice that misses.
    let sparse = open(&named.path, OFlags::empty()).context(case)?;
    sparse.set_len(cache_bytes * 2).context(case)?;
    let engine =
        Engine::builder().cache_bytes(cache_bytes).build().context("building a Millpond engine")?;
    let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
    let file = match engine.open(&named.path, &options.backing(Backing::Direct)) {
        Ok(file) => file,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let full = Full::new(&engine, file).context(case)?;
    let length = plan.slice(100, 50);
    let [mut missed, mut hit] = [Missed::default(), Missed::default()];
    let engines = [
        TimedEngine::new(EVICTING, || full.slice(true, length, &mut missed)),
        TimedEngine::new(RESTING, || full.slice(false, length, &mut hit)),
    ];
    let times = measure(case, 1, engines, plan, outcome)?;
    if let Some([own, baseline]) = times {
        outcome.note(format!(
            "{case}: the longest write: {:.1} us beside an eviction (target {TARGET_US}), {:.1} in the median slice; \
             beside a read that hits {:.1} and {:.1}; {} pages were cached, {} evicted in all slices",
            missed.longest_us(),
            own.longest_median() / 1e3,
            hit.longest_us(),
            baseline.longest_median() / 1e3,
            full.pages,
            missed.evictions
        ));
    }
    Ok(Ok(()))
}
