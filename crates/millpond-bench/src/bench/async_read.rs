//! The suite `async-read`: reads of a file that is larger than the cache, several of them in
//! flight.
//!
//! The subject is a [`millpond::queue::Queue`] with one thread that submits and waits. The baselines: a
//! `preadv` loop; io_uring on the kernel's cache; the same with every read forced to a worker
//! thread, as on a kernel without asynchronous buffered reads; and io_uring with O_DIRECT, the
//! limit.
//!
//! All engines read the same list of offsets. Before each slice the caches of the kernel and of
//! Millpond drop the file, so no read hits. A read's latency is from before its submission until
//! its completion is seen. One case compares a future of a cached read with the same read by a
//! call. Another runs fio with libaio (`fio_aio`).

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::{Duration, Instant};

use millpond::queue::{Queue, Request};
use millpond::{Advice, AsyncFile, Backing, Buffer, OpenOptions};
use millpond_bench_peers::{Uring, Usage};
use rustix::fs::OFlags;

use super::data::{self, TestFile};
use super::fio_aio;
use super::harness::{Engine, Reader, Slice, compare};
use super::histogram::Histogram;
use super::load::Load;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::{Context, Result};

const MILLPOND: &str = "millpond, queue";
const MILLPOND_MAPPED: &str = "millpond, queue, mapped";
const MILLPOND_SYNC: &str = "millpond, read_at";
const MILLPOND_FUTURE: &str = "millpond, future";
const PREADV: &str = "preadv loop";
const BUFFERED: &str = "io_uring, buffered";
const FORCED: &str = "io_uring, buffered, forced to workers";
const DIRECT: &str = "io_uring, O_DIRECT";

const COLD: &str = "cold-random-4k";
const HIT: &str = "cached-random-4k";
const BLOCK_BYTES: u32 = 4096;
const FILE_BYTES: u64 = 1 << 30;
const FILE_BYTES_QUICK: u64 = 256 << 20;
/// This part of the file fits the cache.
const CACHE_SHARE: u64 = 8;
const DEPTHS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
/// The smallest and the largest depth, the depth of most published tables, and the depth of the fio
/// case.
const DEPTHS_QUICK: [u32; 4] = [1, 8, 32, 64];
const CACHED_BYTES: u64 = 64 << 20;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    if plan.wants(COLD) {
        cold(plan, &mut outcome)?;
    }
    if plan.wants(HIT) {
        plan.report_progress(HIT);
        hit(plan, &mut outcome)?;
    }
    if plan.wants(fio_aio::CASE) {
        fio_aio::run(plan, &mut outcome)?;
    }
    Ok(outcome)
}

fn cold(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let bytes = if plan.quick { FILE_BYTES_QUICK } else { FILE_BYTES };
    let file = TestFile::create(&plan.dir, plan.bytes(bytes))?;
    // No block is read again before all others, so no read of either engine hits.
    let load = Load::shuffled(file.bytes, BLOCK_BYTES, 1).checked_for(plan.slice(300, 20));
    let length = plan.slice(250, 30);
    let builder = millpond::Engine::builder().cache_bytes(file.bytes / CACHE_SHARE);
    let engine = builder.build().context("building an engine")?;
    let options = OpenOptions::new().read(true);
    let pond = engine
        .open(file.path(), &options.clone().backing(Backing::Direct))
        .or_else(|error| {
            outcome.note(format!("{COLD}: Millpond without O_DIRECT: {error}"));
            engine.open(file.path(), &options)
        })
        .context("opening the file in Millpond")?;
    pond.advise(0, 0, Advice::Random).context("advising")?;
    let pond = Arc::new(pond);
    let (reads, others_reads) = (AtomicU64::new(0), AtomicU64::new(0));
    let stats = engine.stats();
    let back_end = format!("back end {} ({})", stats.back_end, stats.back_end_reason);
    outcome.note(format!("{COLD}: {back_end}; the kernel's cache is dropped before each slice"));

    let depths = if plan.quick { &DEPTHS_QUICK[..] } else { &DEPTHS };
    for &depth in depths {
        plan.report_progress(&format!("{COLD}, depth {depth}"));
        let queue = engine.queue(depth as usize).context("making a queue")?;
        // Aligned as the baselines' buffers: the device may read into them.
        let buffers = engine.alloc_buffers(depth as usize, BLOCK_BYTES as usize);
        let buffers = buffers.context("buffers")?.into_iter().map(|buffer| vec![buffer]).collect();
        let subject = InFlight {
            name: MILLPOND,
            prepare: Box::new(|| {
                pond.advise(0, 0, Advice::DontNeed)?;
                file.drop_kernel_cache()
            }),
            reads: RefCell::new(ReadsByQueue { queue, file: Arc::clone(&pond), buffers }),
            reads_done: &reads,
            ended: Cell::new(0),
            latencies: RefCell::default(),
        };
        let uring = |name, flags, forced| {
            let opened = file.open(flags);
            let ring = opened.and_then(|file| Uring::new(&file, depth, BLOCK_BYTES, forced));
            let made = |ring| InFlight {
                name,
                prepare: Box::new(|| file.drop_kernel_cache()),
                reads: RefCell::new(ring),
                reads_done: &others_reads,
                ended: Cell::new(0),
                latencies: RefCell::default(),
            };
            (name, ring.map(made))
        };
        let baselines = [
            uring(DIRECT, OFlags::DIRECT, false),
            uring(BUFFERED, OFlags::empty(), false),
            uring(FORCED, OFlags::empty(), true),
        ];
        let mut measure =
            |baseline: &dyn Engine, latencies: Option<&RefCell<Histogram>>| -> Result<()> {
                let [mut own, mut other] = compare(COLD, &subject, baseline, &load, plan, length)?;
                own = own.taking(subject.latencies.borrow().latencies());
                if let Some(latencies) = latencies {
                    other = other.taking(latencies.borrow().latencies());
                }
                outcome.rows.extend([own, other].map(|row| row.in_flight(depth)));
                Ok(())
            };
        let mut skipped = Vec::new();
        for (name, baseline) in baselines {
            match baseline {
                Ok(baseline) => measure(&baseline, Some(&baseline.latencies))?,
                Err(error) => skipped.push((name, error)),
            }
        }
        if depth == 1 || !plan.quick {
            let preadv = file.open(OFlags::empty()).context("opening the file")?;
            let kernel = Reader::new(PREADV, move |dst: &mut [u8], at| preadv.read_at(dst, at));
            let again = file.open(OFlags::empty()).context("opening the file")?;
            measure(&kernel.prepared_by(move || drop_cached(&again)), None)?;
        }
        if depth == 1 {
            let (sync, reads) = (Arc::clone(&pond), &reads);
            let reader = Reader::new(MILLPOND_SYNC, move |dst: &mut [u8], at| {
                reads.fetch_add(1, Relaxed);
                Ok(sync.read_at(dst, at)?)
            });
            let dropped = Arc::clone(&pond);
            let drop_all = move || drop(dropped.advise(0, 0, Advice::DontNeed));
            measure(&reader.prepared_by(drop_all), None)?;
        }
        skipped.into_iter().for_each(|(name, error)| outcome.skip(COLD, name, error));
    }
    drop(pond);
    cold_mapped(&file, &load, length, plan, outcome)?;
    let missed = engine.stats().misses - stats.misses;
    let share = 100.0 * missed as f64 / reads.into_inner().max(1) as f64;
    outcome.note(format!(
        "{COLD}: {share:.1} of 100 reads of Millpond missed, all depths together; the others hit"
    ));
    Ok(())
}

/// Reads through the kernel's cache: by a queue of a file with mapped backing, and by io_uring.
fn cold_mapped(
    file: &TestFile,
    load: &Load,
    length: Duration,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    const DEPTH: u32 = 32;
    plan.report_progress(&format!("{COLD}, depth {DEPTH}, mapped"));
    let engine = millpond::Engine::builder().cache_bytes(16 << 20).build();
    let engine = engine.context("building an engine")?;
    let options = OpenOptions::new().read(true).backing(Backing::Mapped);
    let pond = Arc::new(engine.open(file.path(), &options).context("opening the file")?);
    pond.advise(0, 0, Advice::Random).context("advising")?;
    let buffers = engine.alloc_buffers(DEPTH as usize, BLOCK_BYTES as usize);
    let buffers = buffers.context("buffers")?.into_iter().map(|buffer| vec![buffer]).collect();
    let queue = engine.queue(DEPTH as usize).context("making a queue")?;
    let reads = [AtomicU64::new(0), AtomicU64::new(0)];
    let subject = InFlight {
        name: MILLPOND_MAPPED,
        prepare: Box::new(|| file.drop_kernel_cache()),
        reads: RefCell::new(ReadsByQueue { queue, file: pond, buffers }),
        reads_done: &reads[0],
        ended: Cell::new(0),
        latencies: RefCell::default(),
    };
    let plain = file.open(OFlags::empty()).context("opening the file")?;
    rustix::fs::fadvise(&plain, 0, None, rustix::fs::Advice::Random).context("advising")?;
    let baseline = match Uring::new(&plain, DEPTH, BLOCK_BYTES, false) {
        Ok(ring) => InFlight {
            name: BUFFERED,
            prepare: Box::new(|| file.drop_kernel_cache()),
            reads: RefCell::new(ring),
            reads_done: &reads[1],
            ended: Cell::new(0),
            latencies: RefCell::default(),
        },
        Err(error) => {
            outcome.skip(COLD, BUFFERED, error);
            return Ok(());
        }
    };
    let [own, other] = compare(COLD, &subject, &baseline, load, plan, length)?;
    let own = own.taking(subject.latencies.borrow().latencies());
    let other = other.taking(baseline.latencies.borrow().latencies());
    outcome.rows.extend([own, other].map(|row| row.in_flight(DEPTH)));
    Ok(())
}

fn drop_cached(file: &std::fs::File) {
    // If the kernel keeps some pages, its reads are faster than they should be, never slower.
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

/// Keeps a number of reads in flight until there are no more.
trait Reads {
    /// Reads at the offsets that `next` gives; shows each to `check`.
    fn run(
        &mut self,
        next: &mut dyn FnMut() -> Option<u64>,
        check: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<u64>;
}

impl Reads for Uring {
    fn run(
        &mut self,
        next: &mut dyn FnMut() -> Option<u64>,
        check: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        Self::run(self, next, check)
    }
}

struct ReadsByQueue {
    queue: Queue,
    file: Arc<millpond::File>,
    /// One for each request.
    buffers: Vec<Vec<Buffer>>,
}

impl Reads for ReadsByQueue {
    fn run(
        &mut self,
        next: &mut dyn FnMut() -> Option<u64>,
        check: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let depth = self.queue.capacity();
        let mut requests = Vec::new();
        let (mut in_flight, mut done) = (0, 0);
        let mut outcome = Ok(());
        loop {
            while outcome.is_ok()
                && !self.buffers.is_empty()
                && let Some(offset) = next()
            {
                let buffer = self.buffers.pop().expect("looked at above");
                let request = Request::read_buffers(&self.file, buffer, offset);
                requests.push(request.user_data(offset));
            }
            if in_flight + requests.len() == 0 {
                return outcome.map(|()| done);
            }
            in_flight += requests.len();
            let (ended, rest) = self.queue.submit_and_wait(requests, 1, depth, None)?;
            in_flight -= rest.len();
            requests = rest;
            for completion in ended {
                in_flight -= 1;
                done += 1;
                let offset = completion.user_data();
                let moved =
                    completion.result().map_err(|error| io::Error::other(error.to_string()));
                let buffer = completion.into_buffers();
                let read = match moved {
                    Ok(moved) if moved == buffer[0].len() => check(offset, &buffer[0]),
                    Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
                    Err(error) => Err(error),
                };
                self.buffers.push(buffer);
                outcome = outcome.and(read);
            }
        }
    }
}

/// An engine with a number of reads in flight, all of one thread.
struct InFlight<'a, R> {
    name: &'static str,
    /// Drops the cached pages before each slice.
    prepare: Box<dyn Fn() -> io::Result<()> + 'a>,
    reads: RefCell<R>,
    reads_done: &'a AtomicU64,
    /// The position in the list where the last slice ended.
    ended: Cell<usize>,
    /// Latencies of all slices since the warm-up, including the first one, which is not counted.
    latencies: RefCell<Histogram>,
}

impl<R: Reads> Engine for InFlight<'_, R> {
    fn name(&self) -> &str {
        self.name
    }

    fn warm_up(&self, load: &Load) -> io::Result<()> {
        self.latencies.take();
        let mut blocks = load.distinct_blocks();
        let started = Instant::now();
        let mut expected = vec![0; load.block_bytes as usize];
        let mut next = || {
            let is_over = load.checked_max.is_some_and(|max| started.elapsed() > max);
            let block = (!is_over).then(|| blocks.next()).flatten()?;
            Some(u64::from(block) * u64::from(load.block_bytes))
        };
        let mut check = |offset, bytes: &[u8]| {
            data::contents(offset, &mut expected);
            if bytes == expected {
                return Ok(());
            }
            Err(io::Error::other(format!("{} read wrong bytes at offset {offset}", self.name)))
        };
        let done = self.reads.borrow_mut().run(&mut next, &mut check)?;
        self.reads_done.fetch_add(done, Relaxed);
        Ok(())
    }

    fn slice(&self, load: &Load, length: Duration) -> io::Result<Slice> {
        /// Reads between two looks at the clock.
        const BATCH: u32 = 64;
        (self.prepare)()?;
        let blocks = &load.blocks[0];
        let mut at = self.ended.get();
        let mut left = BATCH;
        let before = Usage::now();
        let started = Instant::now();
        let mut latencies = self.latencies.borrow_mut();
        // A few reads, all at different offsets.
        let in_flight: RefCell<Vec<(u64, Instant)>> = RefCell::default();
        let mut next = || {
            if left == 0 {
                if started.elapsed() >= length {
                    return None;
                }
                left = BATCH;
            }
            left -= 1;
            at = (at + 1) % blocks.len();
            let offset = u64::from(blocks[at]) * u64::from(load.block_bytes);
            in_flight.borrow_mut().push((offset, Instant::now()));
            Some(offset)
        };
        let mut check = |offset, _: &[u8]| {
            let mut in_flight = in_flight.borrow_mut();
            let found = in_flight.iter().position(|begun| begun.0 == offset);
            let (_, begun) = in_flight.swap_remove(found.expect("begun by `next`"));
            latencies.add(begun.elapsed());
            Ok(())
        };
        let ops = self.reads.borrow_mut().run(&mut next, &mut check)?;
        self.ended.set(at);
        self.reads_done.fetch_add(ops, Relaxed);
        let elapsed = started.elapsed();
        let used = Usage::now().since(before);
        let ops_per_s = ops as f64 / elapsed.as_secs_f64();
        Ok(Slice { ops, ops_per_s, cpu: used.cpu, context_switches: used.context_switches })
    }
}

/// Reads cached blocks, as a future and by a call.
fn hit(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let file = TestFile::create(&plan.dir, plan.bytes(CACHED_BYTES))?;
    let builder = millpond::Engine::builder().cache_bytes(file.bytes * 2 + (32 << 20));
    let engine = builder.build().context("building an engine")?;
    let opened = engine.open(file.path(), &OpenOptions::new().read(true));
    let pond = AsyncFile::from(opened.context("opening the file in Millpond")?);
    let load = Load::random(file.bytes, BLOCK_BYTES, 1);
    let subject = Reader::new(MILLPOND_FUTURE, |dst: &mut [u8], at| {
        let mut context = TaskContext::from_waker(Waker::noop());
        match pin!(pond.read_at(dst, at)).poll(&mut context) {
            Poll::Ready(read) => Ok(read?),
            // The first time, in the warm-up.
            Poll::Pending => Ok(pond.file().read_at(dst, at)?),
        }
    });
    let baseline =
        Reader::new(MILLPOND_SYNC, |dst: &mut [u8], at| Ok(pond.file().read_at(dst, at)?));
    let rows = compare(HIT, &subject, &baseline, &load, plan, plan.slice(60, 20))?;
    outcome.rows.extend(rows);
    Ok(())
}
