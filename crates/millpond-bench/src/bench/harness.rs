//! The measurement: two ways to do I/O run the same workload in turns.
//!
//! An [`Engine`] is one way to do I/O: Millpond, `pread`, `mmap` and others. It runs a [`Load`], the workload, for a slice
//! of time. A round is four slices of a [`Pair`] of engines. A pair gives two [`Row`]s of the table of results: the
//! subject's, with its ratio to the baseline, and the baseline's.
//!
//! - B1. Subject and baseline are measured in the order A B B A, round after round, so that a
//!   machine that gets slower or faster does so for both. The result is the median of the rounds'
//!   ratios; the quartiles show the spread.
//! - B2. All engines run the same loop in [`Reader::thread`], compiled for each, so its cost is the
//!   same for all. It reads the same offsets in the same order from a list made before.
//! - B3. No engine is measured before it has read the whole file correctly in the same case.

use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use millpond_bench_peers::Usage;

use super::data;
use super::load::Load;
use super::outcome::{Outcome, Row};
use super::plan::{Plan, Rounds};
use crate::failure::{Context, Result};

/// The result of one slice.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Slice {
    pub ops: u64,
    pub ops_per_s: f64,
    pub cpu: Duration,
    pub context_switches: u64,
}

/// An engine that can run a load.
pub trait Engine {
    fn name(&self) -> &str;

    /// Reads the file into the engine's cache, and checks the bytes (B3).
    fn warm_up(&self, load: &Load) -> io::Result<()>;

    /// Runs the load for about `length`.
    fn slice(&self, load: &Load, length: Duration) -> io::Result<Slice>;
}

/// An engine that reads when called, in the calling thread.
pub struct Reader<R> {
    name: &'static str,
    prepare: Option<Box<dyn Fn() + Sync>>,
    read_at: R,
    /// The file was read and checked: a subject has several baselines.
    is_checked: AtomicBool,
    /// The position in each thread's list where its last slice ended.
    ended: Mutex<Vec<usize>>,
}

impl<R> Reader<R>
where
    R: Fn(&mut [u8], u64) -> io::Result<usize> + Sync,
{
    /// Reads between two readings of the clock.
    const BATCH: usize = 64;

    pub fn new(name: &'static str, read_at: R) -> Self {
        Self {
            name,
            prepare: None,
            read_at,
            is_checked: AtomicBool::new(false),
            ended: Mutex::default(),
        }
    }

    /// Sets a function to call before each slice.
    pub fn prepared_by(mut self, prepare: impl Fn() + Sync + 'static) -> Self {
        self.prepare = Some(Box::new(prepare));
        self
    }

    fn prepare(&self) {
        if let Some(prepare) = &self.prepare {
            prepare();
        }
    }

    /// The measured loop (B2); returns the number of operations and their time.
    fn thread(
        &self,
        load: &Load,
        blocks: &[u32],
        start: usize,
        length: Duration,
    ) -> io::Result<(u64, Duration)> {
        let mut buffer = AlignedBuffer::new(load.block_bytes as usize);
        let dst = buffer.bytes();
        let mut next = start % blocks.len();
        let mut ops = 0;
        let started = Instant::now();
        loop {
            for _ in 0..Self::BATCH {
                let offset = u64::from(blocks[next]) * u64::from(load.block_bytes);
                next += 1;
                if next == blocks.len() {
                    next = 0;
                }
                let len = (self.read_at)(black_box(&mut *dst), offset)?;
                if black_box(len) != dst.len() {
                    return Err(short_read(offset, len, dst.len()));
                }
            }
            ops += Self::BATCH as u64;
            let elapsed = started.elapsed();
            if elapsed >= length {
                return Ok((ops, elapsed));
            }
        }
    }
}

impl<R> Engine for Reader<R>
where
    R: Fn(&mut [u8], u64) -> io::Result<usize> + Sync,
{
    fn name(&self) -> &str {
        self.name
    }

    fn warm_up(&self, load: &Load) -> io::Result<()> {
        if self.is_checked.load(Relaxed) {
            return Ok(());
        }
        self.prepare();
        let mut buffer = AlignedBuffer::new(load.block_bytes as usize);
        let mut expected = vec![0; load.block_bytes as usize];
        let started = Instant::now();
        for block in load.distinct_blocks() {
            let offset = u64::from(block) * u64::from(load.block_bytes);
            let dst = buffer.bytes();
            let len = (self.read_at)(dst, offset)?;
            if len != dst.len() {
                return Err(short_read(offset, len, dst.len()));
            }
            data::contents(offset, &mut expected);
            if *dst != expected[..] {
                let message = format!("{} read wrong bytes at offset {offset}", self.name);
                return Err(io::Error::other(message));
            }
            if load.checked_max.is_some_and(|max| started.elapsed() > max) {
                break;
            }
        }
        self.is_checked.store(true, Relaxed);
        Ok(())
    }

    fn slice(&self, load: &Load, length: Duration) -> io::Result<Slice> {
        self.prepare();
        let mut ended = self.ended.lock().map_err(|_| io::Error::other("a thread panicked"))?;
        if !load.goes_on || ended.len() != load.blocks.len() {
            *ended = vec![load.next_start(); load.blocks.len()];
        }
        let (ready, go) =
            (Barrier::new(load.blocks.len() + 1), Barrier::new(load.blocks.len() + 1));
        thread::scope(|scope| {
            let threads: Vec<_> = load
                .blocks
                .iter()
                .zip(&*ended)
                .map(|(blocks, &start)| {
                    let (ready, go) = (&ready, &go);
                    scope.spawn(move || {
                        ready.wait();
                        go.wait();
                        self.thread(load, blocks, start, length)
                    })
                })
                .collect();
            ready.wait();
            let before = Usage::now();
            go.wait();
            let mut slice = Slice::default();
            let mut done = Vec::with_capacity(load.blocks.len());
            for thread in threads {
                let joined = thread.join().map_err(|_| io::Error::other("a thread panicked"))?;
                let (ops, elapsed) = joined?;
                done.push(ops as usize);
                slice.ops += ops;
                slice.ops_per_s += ops as f64 / elapsed.as_secs_f64();
            }
            let used = Usage::now().since(before);
            ended.iter_mut().zip(done).for_each(|(at, ops)| *at += ops);
            Ok(Slice { cpu: used.cpu, context_switches: used.context_switches, ..slice })
        })
    }
}

fn short_read(offset: u64, len: usize, wanted: usize) -> io::Error {
    io::Error::other(format!("read of {wanted} bytes at offset {offset} returned {len}"))
}

/// Memory aligned for O_DIRECT, which all engines get, so that none copies to better aligned memory
/// than another.
pub struct AlignedBuffer {
    memory: Vec<u8>,
    len: usize,
}

impl AlignedBuffer {
    const ALIGNMENT: usize = 4096;

    pub fn new(len: usize) -> Self {
        Self { memory: vec![0; len + Self::ALIGNMENT], len }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        let start = self.memory.as_ptr().align_offset(Self::ALIGNMENT);
        &mut self.memory[start..start + self.len]
    }
}

/// Measures `subject` against `baseline` on the same load; returns a row for each.
pub fn compare(
    case: &'static str,
    subject: &dyn Engine,
    baseline: &dyn Engine,
    load: &Load,
    plan: &Plan,
    length: Duration,
) -> Result<[Row; 2]> {
    for engine in [subject, baseline] {
        engine.warm_up(load).context(format!("{case}: warming up {}", engine.name()))?;
        engine.slice(load, length).context(format!("{case}: {}", engine.name()))?;
    }
    let (threads, block_bytes) = (load.threads(), Some(load.block_bytes));
    let pair =
        Pair { case, threads, block_bytes, subject: subject.name(), baseline: baseline.name() };
    pair.measure(plan.rounds(), || subject.slice(load, length), || baseline.slice(load, length))
}

/// Takes slices of two engines in the order A B B A (B1).
pub fn alternate<S, E>(
    rounds: Rounds,
    mut subject: impl FnMut() -> std::result::Result<S, E>,
    mut baseline: impl FnMut() -> std::result::Result<S, E>,
) -> std::result::Result<[Vec<S>; 2], E> {
    let (mut own, mut other) = (Vec::new(), Vec::new());
    for taken in 0.. {
        if !rounds.wants_more(taken) {
            break;
        }
        own.push(subject()?);
        other.extend([baseline()?, baseline()?]);
        own.push(subject()?);
    }
    Ok([own, other])
}

/// Two engines in one case, and the common part of their rows.
#[derive(Debug)]
pub struct Pair<'a> {
    pub case: &'static str,
    pub threads: u32,
    pub block_bytes: Option<u32>,
    pub subject: &'a str,
    pub baseline: &'a str,
}

impl Pair<'_> {
    /// Whether the baseline can run a slice, which is not counted; if not, the reason is recorded.
    pub fn try_baseline<S>(&self, slice: io::Result<S>, outcome: &mut Outcome) -> bool {
        let error = slice.err();
        if let Some(error) = &error {
            outcome.skip(self.case, self.baseline, error);
        }
        error.is_none()
    }

    /// Takes rounds of slices; returns a row for each engine.
    pub fn measure(
        &self,
        rounds: Rounds,
        mut subject: impl FnMut() -> io::Result<Slice>,
        mut baseline: impl FnMut() -> io::Result<Slice>,
    ) -> Result<[Row; 2]> {
        let slices = alternate(
            rounds,
            || subject().context(format!("{}: {}", self.case, self.subject)),
            || baseline().context(format!("{}: {}", self.case, self.baseline)),
        )?;
        Ok(self.rows(&slices))
    }

    /// The rows of slices that [`alternate`].
    pub fn rows(&self, [own, other]: &[Vec<Slice>; 2]) -> [Row; 2] {
        // The slices of a round have the same positions in both lists.
        let sum =
            |slices: &[Slice], figure: fn(&Slice) -> f64| slices.iter().map(figure).sum::<f64>();
        let rate = |slice: &Slice| slice.ops_per_s;
        let rounds = || own.chunks(2).zip(other.chunks(2));
        let mut ratios: Vec<f64> = rounds().map(|(a, b)| sum(a, rate) / sum(b, rate)).collect();
        let mut cpu_ratios: Vec<f64> =
            rounds().map(|(a, b)| sum(b, cpu_ns) / sum(a, cpu_ns)).collect();
        let mut row = self.row(self.subject, own);
        row.ratio_to = Some(self.baseline.to_owned());
        row.ratio_median = Some(quantile(&mut ratios, 0.5));
        row.ratio_q1 = Some(quantile(&mut ratios, 0.25));
        row.ratio_q3 = Some(quantile(&mut ratios, 0.75));
        row.cpu_ratio_median = Some(quantile(&mut cpu_ratios, 0.5));
        [row, self.row(self.baseline, other)]
    }

    fn row(&self, engine: &str, slices: &[Slice]) -> Row {
        let median = |figure: fn(&Slice) -> f64| {
            quantile(&mut slices.iter().map(figure).collect::<Vec<_>>(), 0.5)
        };
        let ops_per_s = median(|slice| slice.ops_per_s);
        Row {
            suite: "",
            case: self.case,
            engine: engine.to_owned(),
            threads: self.threads,
            block_bytes: self.block_bytes,
            queue_depth: None,
            ops_per_s,
            ns_per_op: f64::from(self.threads) * 1e9 / ops_per_s,
            cpu_ns_per_op: median(cpu_ns),
            context_switches_per_op: median(|slice| {
                slice.context_switches as f64 / slice.ops.max(1) as f64
            }),
            p50_ns: None,
            p99_ns: None,
            p999_ns: None,
            torn_reads: None,
            rounds: slices.len() as u32 / 2,
            ratio_to: None,
            ratio_median: None,
            ratio_q1: None,
            ratio_q3: None,
            cpu_ratio_median: None,
        }
    }
}

fn cpu_ns(slice: &Slice) -> f64 {
    slice.cpu.as_nanos() as f64 / slice.ops.max(1) as f64
}

/// The value below which the share `q` of `values` lies, interpolated between two of them.
pub fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let position = q * (values.len() - 1) as f64;
    let (below, above) = (values[position.floor() as usize], values[position.ceil() as usize]);
    below + (above - below) * position.fract()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::path::PathBuf;

    #[test]
    fn quantiles_fall_between_values() {
        assert_eq!(quantile(&mut [3.0, 1.0, 2.0], 0.5), 2.0);
        assert_eq!(quantile(&mut [4.0, 1.0, 2.0, 3.0], 0.5), 2.5);
        assert_eq!(quantile(&mut [5.0, 4.0, 3.0, 2.0, 1.0], 0.25), 2.0);
        assert_eq!(quantile(&mut [7.0], 0.75), 7.0);
    }

    /// An engine whose every slice is recorded, and twice as fast as another.
    struct Scripted<'a> {
        name: &'static str,
        ops_per_s: f64,
        order: &'a RefCell<String>,
    }

    impl Engine for Scripted<'_> {
        fn name(&self) -> &str {
            self.name
        }

        fn warm_up(&self, _: &Load) -> io::Result<()> {
            Ok(())
        }

        fn slice(&self, _: &Load, length: Duration) -> io::Result<Slice> {
            self.order.borrow_mut().push_str(self.name);
            let ops = (self.ops_per_s * length.as_secs_f64()) as u64;
            Ok(Slice { ops, ops_per_s: self.ops_per_s, cpu: length, context_switches: ops })
        }
    }

    #[test]
    fn pairs_are_interleaved() {
        let order = RefCell::default();
        let a = Scripted { name: "A", ops_per_s: 2000.0, order: &order };
        let b = Scripted { name: "B", ops_per_s: 1000.0, order: &order };
        let plan = Plan::new(PathBuf::new(), true, 1, None);
        let load = Load::sequential(4096, 4096, 1);
        let [row, baseline] =
            compare("case", &a, &b, &load, &plan, Duration::from_secs(1)).unwrap();
        assert_eq!(order.borrow().as_str(), "AB".to_owned() + &"ABBA".repeat(5));
        assert_eq!((row.ratio_median, row.cpu_ratio_median), (Some(2.0), Some(2.0)));
        assert_eq!((row.ratio_q1, row.ratio_to.as_deref()), (Some(2.0), Some("B")));
        assert_eq!((row.ns_per_op, row.context_switches_per_op), (500_000.0, 1.0));
        assert_eq!((baseline.ops_per_s, baseline.ratio_median), (1000.0, None));
    }

    #[test]
    fn wrong_bytes_and_short_reads_are_not_measured() {
        let load = Load::sequential(8192, 4096, 1);
        let zeros = Reader::new("zeros", |dst: &mut [u8], _| Ok(dst.len()));
        assert!(zeros.warm_up(&load).unwrap_err().to_string().contains("wrong bytes"));
        let short = Reader::new("short", |_: &mut [u8], _| Ok(1));
        assert!(short.slice(&load, Duration::ZERO).is_err());
        let right = Reader::new("right", |dst: &mut [u8], offset| {
            data::contents(offset, dst);
            Ok(dst.len())
        });
        right.warm_up(&load).unwrap();
        assert!(right.slice(&load, Duration::ZERO).unwrap().ops >= 64);
    }
}
