//! The suite `write`: writes in mode back and through, until they are durable.
//!
//! The baselines are the kernel's ways to write a file: `pwrite` into its page cache with one
//! `fdatasync`; O_DIRECT with several writes in flight (fio with io_uring); and O_DIRECT with
//! O_DSYNC, as a database appends to its log.
//!
//! - Every slice of either engine finds its file in the same state: the same length, the same
//!   allocated and cached part, and no dirty pages.
//! - A slice is a number of writes, not a length of time, as the sync at its end is part of it.
//! - The first slice of each engine is not measured: its bytes are read back from the device.

mod write_fio;
mod write_target;

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use millpond::{Backing, Engine, OpenOptions, WriteMode};
use rustix::fs::OFlags;

use self::write_target::{Dsync, Stamped, check, drop_kernel_cache};
pub(super) use self::write_target::{WriteTarget, open, timed};
use super::data::{KIB, MIB, NamedFile, TestFile};
use super::harness::{Pair, Slice, quantile};
use super::load::Load;
use super::outcome::{Outcome, Row};
use super::plan::Plan;
use crate::failure::{Context, Result};

const BACK: &str = "millpond, back, direct";
const THROUGH_DIRECT: &str = "millpond, through, direct";
const THROUGH: &str = "millpond, through";
const THROUGH_MAPPED: &str = "millpond, through, mapped";
const FIO: &str = "fio, io_uring, O_DIRECT";
const PWRITE: &str = "kernel pwrite";
const PWRITE_SYNC: &str = "kernel pwrite, fdatasync";
const PWRITE_DSYNC: &str = "kernel pwrite, O_DIRECT, O_DSYNC";

const SEQUENTIAL: &[&str] = &[BACK, FIO, PWRITE_SYNC];

/// Rounds against a baseline without a target, where a slice takes seconds: full and quick.
const LISTED_ROUNDS_MAX: [u32; 2] = [5, 3];

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    type Measure = fn(&'static str, &Plan, &mut Outcome) -> Result<()>;
    /// A case, and its engines if they need O_DIRECT.
    type WriteCase = (&'static str, Measure, &'static [&'static str]);
    let cases: [WriteCase; 5] = [
        ("sequential-1m", |case, plan, outcome| sequential(case, true, plan, outcome), SEQUENTIAL),
        (
            "sequential-1m-overwrite",
            |case, plan, outcome| sequential(case, false, plan, outcome),
            SEQUENTIAL,
        ),
        ("random-4k-sync", random_sync, &[BACK, PWRITE_SYNC]),
        ("commit", commit, &[BACK, THROUGH_DIRECT, PWRITE_SYNC, PWRITE_DSYNC]),
        ("through-4k", through, &[]),
    ];
    let refused = no_direct(plan)?;
    for (case, measure, direct) in cases.into_iter().filter(|(case, ..)| plan.wants(case)) {
        match &refused {
            Some(error) if !direct.is_empty() => direct.iter().for_each(|engine| {
                outcome.skip(case, engine, format!("no O_DIRECT here: {error}"))
            }),
            _ => {
                plan.report_progress(case);
                measure(case, plan, &mut outcome)?;
            }
        }
    }
    Ok(outcome)
}

/// Why no file in the directory can be opened with O_DIRECT, if none can.
fn no_direct(plan: &Plan) -> Result<Option<io::Error>> {
    let named = NamedFile::create(&plan.dir, 0)?;
    Ok(write_target::open(&named.path, OFlags::DIRECT).err())
}

/// One side of a pair: makes its file ready, then writes it against the clock.
struct WriteEngine<'a> {
    name: &'static str,
    slice: Box<dyn FnMut() -> io::Result<Slice> + 'a>,
    queue_depth: Option<u32>,
    rounds_max: u32,
}

impl<'a> WriteEngine<'a> {
    fn new(name: &'static str, slice: impl FnMut() -> io::Result<Slice> + 'a) -> Self {
        Self { name, slice: Box::new(slice), queue_depth: None, rounds_max: u32::MAX }
    }
}

/// Measures `subject` against each baseline; returns the rows of those that could be.
fn measure(
    case: &'static str,
    block_bytes: u32,
    mut subject: WriteEngine<'_>,
    baselines: Vec<WriteEngine<'_>>,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    (subject.slice)().context(format!("{case}: {}", subject.name))?;
    for mut baseline in baselines {
        let (name, block_bytes) = (baseline.name, Some(block_bytes));
        let pair = Pair { case, threads: 1, block_bytes, subject: subject.name, baseline: name };
        if !pair.try_baseline((baseline.slice)(), outcome) {
            continue;
        }
        let rounds = plan.rounds().at_most(baseline.rounds_max);
        let [own, other] = pair.measure(rounds, || (subject.slice)(), || (baseline.slice)())?;
        let queue_depth = baseline.queue_depth;
        outcome.rows.extend([own, Row { queue_depth, ..other }]);
    }
    Ok(())
}

fn engine(case: &str, cache_bytes: u64, outcome: &mut Outcome) -> Result<Engine> {
    let engine =
        Engine::builder().cache_bytes(cache_bytes).build().context("building a Millpond engine")?;
    let stats = engine.stats();
    outcome.note(format!("{case}: back end {} ({})", stats.back_end, stats.back_end_reason));
    Ok(engine)
}

fn options(mode: WriteMode, backing: Backing) -> OpenOptions {
    OpenOptions::new().read(true).write(true).write_mode(mode).backing(backing)
}

/// 1 MiB writes in order, of a new file or of one that is there, and one sync.
fn sequential(case: &'static str, fresh: bool, plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    const BLOCK_BYTES: u32 = 1024 * KIB;
    let bytes = plan.bytes_of(2048 * MIB, 128 * MIB);
    let load = Load::sequential(bytes, BLOCK_BYTES, 1);
    let named = NamedFile::create(&plan.dir, bytes)?;
    let path = &*named.path;
    let prepare = || -> io::Result<()> {
        let file = write_target::open(path, OFlags::empty())?;
        if fresh {
            file.set_len(0)?;
        }
        drop_kernel_cache(&file)
    };
    // A quarter of the bytes, for any size: writing pages that do not fit is part of the case.
    let engine = engine(case, (bytes / 4).max(32 * MIB), outcome)?;
    let mut bytes_of = [Stamped::new(BLOCK_BYTES), Stamped::new(BLOCK_BYTES)];
    let [own_bytes, baseline_bytes] = &mut bytes_of;
    let subject = WriteEngine::new(BACK, || {
        prepare()?;
        let file = engine.open(path, &options(WriteMode::Back, Backing::Direct))?;
        written_and_synced(&file, path, &load, own_bytes)
    });
    let fio = WriteEngine::new(FIO, || {
        prepare()?;
        write_fio::write(path, bytes, BLOCK_BYTES, !fresh)
    });
    let pwrite = WriteEngine::new(PWRITE_SYNC, || {
        prepare()?;
        written_and_synced(&write_target::open(path, OFlags::empty())?, path, &load, baseline_bytes)
    });
    let baselines = vec![
        WriteEngine { queue_depth: Some(write_fio::QUEUE_DEPTH), ..fio },
        WriteEngine { rounds_max: LISTED_ROUNDS_MAX[usize::from(plan.quick)], ..pwrite },
    ];
    measure(case, BLOCK_BYTES, subject, baselines, plan, outcome)
}

/// 4 KiB overwrites at random of a file that is cached, and one sync.
fn random_sync(case: &'static str, plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    const BLOCK_BYTES: u32 = 4 * KIB;
    let bytes = plan.bytes_of(256 * MIB, 64 * MIB);
    let load = Load::random(bytes, BLOCK_BYTES, 1).first(plan.count(1 << 16, 1 << 14));
    // Separate files: direct writes would drop the baseline's file from the kernel's cache.
    let [own, others] = [TestFile::create(&plan.dir, bytes)?, TestFile::create(&plan.dir, bytes)?];
    own.drop_kernel_cache().context(case)?;
    let engine = engine(case, 1024 * MIB, outcome)?;
    let (own_path, baseline_path) = (own.path(), others.path());
    let file = engine.open(&own_path, &options(WriteMode::Back, Backing::Direct)).context(case)?;
    let mut bytes_of = [Stamped::new(BLOCK_BYTES), Stamped::new(BLOCK_BYTES)];
    let [own_bytes, baseline_bytes] = &mut bytes_of;
    let subject = WriteEngine::new(BACK, || {
        read_all(|dst, offset| Ok(file.read_at(dst, offset)?))?;
        written_and_synced(&file, &own_path, &load, own_bytes)
    });
    let baseline = write_target::open(&baseline_path, OFlags::empty()).context(case)?;
    let baseline = WriteEngine::new(PWRITE_SYNC, || {
        warm(&baseline)?;
        written_and_synced(&baseline, &baseline_path, &load, baseline_bytes)
    });
    measure(case, BLOCK_BYTES, subject, vec![baseline], plan, outcome)
}

/// 4 KiB overwrites at random of a file that both the engine and the kernel have cached, into the
/// kernel's cache.
fn through(case: &'static str, plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    const BLOCK_BYTES: u32 = 4 * KIB;
    let bytes = plan.bytes_of(256 * MIB, 64 * MIB);
    let load = Load::random(bytes, BLOCK_BYTES, 1).first(plan.count(1 << 16, 1 << 14));
    let engine = engine(case, bytes + bytes / 4 + 32 * MIB, outcome)?;
    for (name, backing) in [(THROUGH, Backing::Buffered), (THROUGH_MAPPED, Backing::Mapped)] {
        let file = TestFile::create(&plan.dir, bytes)?;
        overwrites(case, (name, backing), &file, &load, &engine, plan, outcome)?;
    }
    Ok(())
}

/// Overwrites of a file with that backing.
fn overwrites(
    case: &'static str,
    (name, backing): (&'static str, Backing),
    shared: &TestFile,
    load: &Load,
    engine: &Engine,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    let path = shared.path();
    let own = engine.open(&path, &options(WriteMode::Through, backing)).context(case)?;
    let baseline = write_target::open(&path, OFlags::empty()).context(case)?;
    let mut bytes_of = [Stamped::new(load.block_bytes), Stamped::new(load.block_bytes)];
    let [own_bytes, baseline_bytes] = &mut bytes_of;
    // The slice before has left no dirty pages.
    let prepare = || {
        baseline.sync_data()?;
        warm(&baseline)
    };
    let subject = WriteEngine::new(name, || {
        prepare()?;
        read_all(|dst, offset| Ok(own.read_at(dst, offset)?))?;
        written(&own, &path, load, own_bytes)
    });
    let pwrite = WriteEngine::new(PWRITE, || {
        prepare()?;
        written(&baseline, &path, load, baseline_bytes)
    });
    measure(case, load.block_bytes, subject, vec![pwrite], plan, outcome)
}

/// Appends of 4 KiB, each durable before the next: as a database commits transactions.
fn commit(case: &'static str, plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let commits = plan.count(100, 30);
    let engine = engine(case, 64 * MIB, outcome)?;
    let own = |mode| {
        let engine = &engine;
        move |path: &Path| Ok(engine.open(path, &options(mode, Backing::Direct))?)
    };
    let direct = |path: &Path| {
        write_target::open(path, OFlags::APPEND | OFlags::DIRECT | OFlags::DSYNC).map(Dsync)
    };
    let buffered = |path: &Path| write_target::open(path, OFlags::APPEND);
    let (back, through) = (own(WriteMode::Back), own(WriteMode::Through));
    let dir = &*plan.dir;

    let [latencies, others] = [WriteLatencies::default(), WriteLatencies::default()];
    let mut add = |subject: WriteEngine<'_>, baseline: WriteEngine<'_>| -> Result<()> {
        let names = [subject.name, baseline.name];
        let from = outcome.rows.len();
        measure(case, Commits::BLOCK_BYTES, subject, vec![baseline], plan, outcome)?;
        if let [own, other] = &mut outcome.rows[from..] {
            latencies.tell(own);
            others.tell(other);
            outcome.note(latencies.beside(&others, names));
        }
        latencies.clear();
        others.clear();
        Ok(())
    };
    let commits_of = |name, latencies| Commits::new(name, commits, dir, latencies);
    add(commits_of(BACK, &latencies).side(back), commits_of(PWRITE_DSYNC, &others).side(direct))?;
    add(commits_of(BACK, &latencies).side(back), commits_of(PWRITE_SYNC, &others).side(buffered))?;
    add(
        commits_of(THROUGH_DIRECT, &latencies).side(through),
        commits_of(PWRITE_DSYNC, &others).side(direct),
    )
}

/// Appends to a new file in every slice.
struct Commits<'a> {
    name: &'static str,
    count: usize,
    dir: &'a Path,
    latencies: &'a WriteLatencies,
}

impl<'a> Commits<'a> {
    const BLOCK_BYTES: u32 = 4 * KIB;

    fn new(name: &'static str, count: usize, dir: &'a Path, latencies: &'a WriteLatencies) -> Self {
        Self { name, count, dir, latencies }
    }

    fn side<T: WriteTarget + 'a>(
        self,
        open: impl Fn(&Path) -> io::Result<T> + 'a,
    ) -> WriteEngine<'a> {
        let Self { name, count, dir, latencies } = self;
        let mut bytes = Stamped::new(Self::BLOCK_BYTES);
        WriteEngine::new(name, move || {
            let named =
                NamedFile::create(dir, 0).map_err(|error| io::Error::other(error.message))?;
            let target = open(&named.path)?;
            let first = bytes.begin();
            let mut took = Vec::new();
            let slice = timed(count as u64, || {
                took = write_target::commit_blocks(&target, count, Self::BLOCK_BYTES, &mut bytes)?;
                Ok(())
            })?;
            if first {
                check(&named.path, 0..count as u32, Self::BLOCK_BYTES, &mut bytes)?;
            } else {
                latencies.0.borrow_mut().push(took);
            }
            Ok(slice)
        })
    }
}

/// Duration of each operation, by slice.
#[derive(Default)]
struct WriteLatencies(RefCell<Vec<Vec<Duration>>>);

impl WriteLatencies {
    fn clear(&self) {
        self.0.borrow_mut().clear();
    }

    /// A quantile over all slices.
    fn quantile_ns(&self, q: f64) -> f64 {
        let slices = self.0.borrow();
        let mut all: Vec<_> = slices.iter().flatten().map(|took| took.as_nanos() as f64).collect();
        quantile(&mut all, q)
    }

    fn tell(&self, row: &mut Row) {
        row.p50_ns = Some(self.quantile_ns(0.5));
        row.p99_ns = Some(self.quantile_ns(0.99));
        row.p999_ns = Some(self.quantile_ns(0.999));
    }

    /// The ratios of latencies, where less is better.
    fn beside(&self, other: &Self, [name, baseline]: [&str; 2]) -> String {
        let ratio = |q| self.quantile_ns(q) / other.quantile_ns(q);
        let (count, p50, p99) = (self.0.borrow().iter().flatten().count(), ratio(0.5), ratio(0.99));
        format!("commit: {count} each: p50 {p50:.2}, p99 {p99:.2} times {baseline}'s: {name}")
    }
}

fn written_and_synced(
    target: &impl WriteTarget,
    path: &Path,
    load: &Load,
    bytes: &mut Stamped,
) -> io::Result<Slice> {
    slice(target, path, load, bytes, true)
}

fn written(
    target: &impl WriteTarget,
    path: &Path,
    load: &Load,
    bytes: &mut Stamped,
) -> io::Result<Slice> {
    slice(target, path, load, bytes, false)
}

fn slice(
    target: &impl WriteTarget,
    path: &Path,
    load: &Load,
    bytes: &mut Stamped,
    sync: bool,
) -> io::Result<Slice> {
    let first = bytes.begin();
    let slice = timed(load.blocks[0].len() as u64, || {
        write_target::write_blocks(target, load, bytes)?;
        if sync { target.sync_data() } else { Ok(()) }
    })?;
    if first {
        check(path, load.distinct_blocks(), load.block_bytes, bytes)?;
    }
    Ok(slice)
}

/// Reads the whole file into the kernel's cache.
fn warm(file: &File) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    read_all(|dst, offset| file.read_at(dst, offset))
}

fn read_all(read_at: impl Fn(&mut [u8], u64) -> io::Result<usize>) -> io::Result<()> {
    let mut buffer = vec![0; MIB as usize];
    let mut offset = 0;
    loop {
        match read_at(&mut buffer, offset)? {
            0 => return Ok(()),
            len => offset += len as u64,
        }
    }
}
