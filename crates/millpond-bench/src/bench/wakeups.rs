//! The suite `wakeups`: threads that wait for completions in batches, which arrive at a fixed rate.
//!
//! One thread submits reads of cached bytes, which complete at submission, one at a time on a
//! schedule, and does not sleep. K threads wait, each for a minimum. If the waiters have different
//! minima, the submitter keeps 64 device reads in flight instead: a waiter whose minimum is not in
//! flight never wakes. Then the device determines the rate.
//!
//! The suite measures whether a [`millpond::queue::Queue`] avoids useless wake-ups. The peers are the
//! same queue with each waiter woken for every event until it has its batch, and the kernel's AIO,
//! whose `io_getevents` also takes a minimum. Context switches and processor time are those of the
//! waiters alone.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use millpond::queue::{Queue, Request};
use millpond::{Advice, Backing, OpenOptions};
use millpond_bench_peers::{Aio, Usage};
use rustix::fs::OFlags;

use super::data::{Random, TestFile};
use super::harness::{Pair, Slice};
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::{Context, Result};

const BATCHED: &str = "millpond, one wake-up per batch";
const PER_EVENT: &str = "millpond, woken per event";
const LIBAIO: &str = "kernel AIO";

const BLOCK_BYTES: u32 = 4096;
const CAPACITY: usize = 256;
/// Completions per second.
const RATE: u32 = 20_000;
/// Time limit of a wait; reached only at the end of a slice.
const PATIENCE: Duration = Duration::from_millis(20);
/// The same for waiters with different minima: the time that the queue's contract gives each.
const PATIENCE_MIXED: Duration = Duration::from_millis(100);

/// The minima of a case's waiters.
const CASES: [(&str, &[usize]); 6] = [
    ("1-waiter-min-1", &[1]),
    ("1-waiter-min-8", &[8]),
    ("1-waiter-min-32", &[32]),
    ("1-waiter-min-64", &[64]),
    ("4-waiters-min-8", &[8, 8, 8, 8]),
    (MIXED, &[1, 2, 8, 32]),
];

const MIXED: &str = "4-waiters-min-1-2-8-32";
const MIXED_DEPTH: usize = 64;
const MIXED_FILE_BYTES: u64 = 256 << 20;

/// A source of completions.
trait Source: Sync {
    /// Submits a read of a block; false if there is no room.
    fn submit_one(&self, block: u32) -> io::Result<bool>;

    /// Waits for `min` completions and takes no more; returns the number that arrived in time.
    fn wait(&self, min: usize, patience: Duration) -> io::Result<usize>;
}

struct MillpondSource {
    queue: Queue,
    file: Arc<millpond::File>,
    per_event: bool,
}

impl Source for MillpondSource {
    fn submit_one(&self, block: u32) -> io::Result<bool> {
        let buffer = vec![0; BLOCK_BYTES as usize];
        let offset = u64::from(block) * u64::from(BLOCK_BYTES);
        Ok(self.queue.submit(Request::read(&self.file, buffer, offset)).is_ok())
    }

    fn wait(&self, min: usize, patience: Duration) -> io::Result<usize> {
        if !self.per_event {
            return Ok(self.queue.wait(min, min, Some(patience))?.len());
        }
        let mut got = 0;
        while got < min {
            match self.queue.wait(1, min - got, Some(patience))?.len() {
                0 => break,
                more => got += more,
            }
        }
        Ok(got)
    }
}

impl Source for Aio {
    fn submit_one(&self, block: u32) -> io::Result<bool> {
        match self.submit(u64::from(block) * u64::from(BLOCK_BYTES)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn wait(&self, min: usize, patience: Duration) -> io::Result<usize> {
        match Aio::wait(self, min, min, patience) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            other => other,
        }
    }
}

/// The results of one waiter.
#[derive(Default, Clone, Copy)]
struct Waits {
    /// Whole batches.
    batches: u64,
    /// Waits that ended at their time limit.
    broken: u64,
    /// Number of sleeps, including those for locks, in this number of waits. The last wait, which
    /// the end of the slice may have cut short, is included.
    wake_ups: u64,
    waits: u64,
    longest: Duration,
}

impl Waits {
    fn add(&mut self, other: Waits) {
        self.batches += other.batches;
        self.broken += other.broken;
        self.wake_ups += other.wake_ups;
        self.waits += other.waits;
        self.longest = self.longest.max(other.longest);
    }
}

/// The results of all waiters in all slices.
#[derive(Default)]
struct Seen {
    waiters: Vec<Waits>,
    /// Completions that found no free place in time.
    late: u64,
}

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    if !CASES.iter().any(|(case, _)| plan.wants(case)) {
        return Ok(outcome);
    }
    for (case, minima) in CASES.into_iter().filter(|(case, _)| plan.wants(case)) {
        plan.report_progress(case);
        let feed = if case == MIXED { Feed::Full } else { Feed::Rate };
        let (bytes, capacity, flags, backing) = match feed {
            Feed::Rate => (1 << 20, CAPACITY, OFlags::empty(), Backing::Buffered),
            Feed::Full => {
                (plan.bytes(MIXED_FILE_BYTES), MIXED_DEPTH, OFlags::DIRECT, Backing::Direct)
            }
        };
        let file = TestFile::create(&plan.dir, bytes)?;
        let cached = match file.open(flags) {
            Ok(cached) => cached,
            Err(error) => {
                outcome.skip(case, BATCHED, format!("no O_DIRECT in this directory: {error}"));
                continue;
            }
        };
        let engine = millpond::Engine::builder().cache_bytes(8 << 20);
        let engine = engine.build().context("building an engine")?;
        let opened = engine.open(file.path(), &OpenOptions::new().read(true).backing(backing));
        let pond = Arc::new(opened.context("opening the file in Millpond")?);
        pond.advise(0, 0, Advice::Random).context("advising")?;
        if matches!(feed, Feed::Rate) {
            pond.read_at(&mut vec![0; 1 << 20], 0).context("reading the file")?;
        }
        let queue = |per_event| -> Result<MillpondSource> {
            let queue = engine.queue(capacity).context("making a queue")?;
            Ok(MillpondSource { queue, file: Arc::clone(&pond), per_event })
        };
        let (subject, per_event) = (queue(false)?, queue(true)?);
        let libaio = Aio::new(cached, capacity as u32, BLOCK_BYTES);
        let blocks = (bytes / u64::from(BLOCK_BYTES)) as u32;
        let mut baselines: Vec<(&str, &dyn Source)> = vec![(PER_EVENT, &per_event)];
        match &libaio {
            Ok(aio) => baselines.push((LIBAIO, aio)),
            Err(error) => outcome.skip(case, LIBAIO, error),
        }
        for (baseline_name, baseline) in baselines {
            let length = plan.slice(200, 30);
            let threads = minima.len() as u32;
            let block_bytes = Some(BLOCK_BYTES);
            let pair =
                Pair { case, threads, block_bytes, subject: BATCHED, baseline: baseline_name };
            // The first slice of each is not counted.
            for source in [&subject as &dyn Source, baseline] {
                slice(source, minima, feed, blocks, length, &mut Seen::default()).context(case)?;
            }
            let mut seen = Seen::default();
            let rows = pair.measure(
                plan.rounds(),
                || slice(&subject, minima, feed, blocks, length, &mut seen),
                || slice(baseline, minima, feed, blocks, length, &mut Seen::default()),
            )?;
            outcome.rows.extend(rows);
            if baseline_name == PER_EVENT {
                outcome.note(summary(case, minima, &seen));
            }
        }
    }
    outcome.note(format!(
        "figures are of the waiters alone; {RATE} completions a second, but {MIXED}"
    ));
    Ok(outcome)
}

fn summary(case: &str, minima: &[usize], seen: &Seen) -> String {
    let waiters: Vec<String> = (minima.iter().zip(&seen.waiters))
        .map(|(min, waits)| {
            let Waits { batches, broken, longest, .. } = *waits;
            let per_wait = waits.wake_ups as f64 / waits.waits.max(1) as f64;
            let ms = longest.as_secs_f64() * 1e3;
            format!(
                "for {min}: {batches} batches whole, {broken} not, {per_wait:.3} wake-ups per wait, \
                 longest wait {ms:.1} ms"
            )
        })
        .collect();
    let sum = |of: fn(&Waits) -> u64| seen.waiters.iter().map(of).sum::<u64>();
    let per_wait = sum(|waits| waits.wake_ups) as f64 / sum(|waits| waits.waits).max(1) as f64;
    format!(
        "{case}: {BATCHED}: {}; all: {per_wait:.3} wake-ups per wait; {} completions late",
        waiters.join("; "),
        seen.late
    )
}

/// The time of the submissions.
#[derive(Clone, Copy)]
enum Feed {
    /// On a schedule.
    Rate,
    /// Whenever the queue has a free place.
    Full,
}

impl Feed {
    fn patience(self) -> Duration {
        match self {
            Feed::Rate => PATIENCE,
            Feed::Full => PATIENCE_MIXED,
        }
    }
}

fn slice(
    source: &dyn Source,
    minima: &[usize],
    feed: Feed,
    blocks: u32,
    length: Duration,
    seen: &mut Seen,
) -> io::Result<Slice> {
    let (stop, begun_to_come) = (AtomicBool::new(false), AtomicBool::new(false));
    let waiter = |min: usize| -> io::Result<(u64, Usage, Waits)> {
        let before = Usage::of_thread();
        let (mut events, mut waits) = (0, Waits::default());
        while !stop.load(Relaxed) {
            let begun = Instant::now();
            let got = source.wait(min, feed.patience())?;
            waits.waits += 1;
            events += got as u64;
            begun_to_come.fetch_or(got > 0, Relaxed);
            if stop.load(Relaxed) {
                break;
            }
            waits.batches += u64::from(got == min);
            waits.broken += u64::from(got != min);
            waits.longest = waits.longest.max(begun.elapsed());
        }
        let used = Usage::of_thread().since(before);
        waits.wake_ups = used.sleeps;
        Ok((events, used, waits))
    };
    thread::scope(|scope| {
        let waiters: Vec<_> = minima
            .iter()
            .map(|&min| {
                scope.spawn({
                    let waiter = &waiter;
                    move || waiter(min)
                })
            })
            .collect();
        let fed = feed_for(source, feed, blocks, length, &begun_to_come, seen);
        stop.store(true, Relaxed);
        let elapsed = fed?;
        let mut all = Slice::default();
        seen.waiters.resize(minima.len(), Waits::default());
        for (waiter, seen) in waiters.into_iter().zip(&mut seen.waiters) {
            let joined = waiter.join().map_err(|_| io::Error::other("a thread panicked"))?;
            let (events, used, waits) = joined?;
            all.ops += events;
            all.cpu += used.cpu;
            all.context_switches += used.context_switches;
            seen.add(waits);
        }
        // Takes the remaining completions.
        while source.wait(1, PATIENCE)? > 0 {}
        all.ops_per_s = all.ops as f64 / elapsed.as_secs_f64();
        Ok(all)
    })
}

/// Submits for `length`, and until a completion has arrived; returns the time.
fn feed_for(
    source: &dyn Source,
    feed: Feed,
    blocks: u32,
    length: Duration,
    begun_to_come: &AtomicBool,
    seen: &mut Seen,
) -> io::Result<Duration> {
    let started = Instant::now();
    let gap = Duration::from_secs(1) / RATE;
    let mut submitted = 0;
    let mut random = Random::seeded(started.elapsed().as_nanos() as u64);
    // On a busy machine a short slice could end before the waiters run.
    while started.elapsed() < length || !begun_to_come.load(Relaxed) {
        // Spins, without sleeping, so that the rate is exact.
        if matches!(feed, Feed::Rate) && started.elapsed() < gap * submitted {
            std::hint::spin_loop();
        } else if source.submit_one(random.below(blocks))? {
            submitted += 1;
        } else if matches!(feed, Feed::Full) {
            thread::sleep(Duration::from_micros(50));
        } else {
            seen.late += 1;
            thread::yield_now();
        }
    }
    Ok(started.elapsed())
}
