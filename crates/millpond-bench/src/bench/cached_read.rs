//! The suite `cached-read`: reads of cached data, compared with the alternatives.
//!
//! The baselines: the kernel's `pread`, the usual way; `memcpy` from memory of the same page size
//! as Millpond's frames, the limit; `mmap`; and Millpond without its hit path, which shows the gain
//! of the hit path. One case measures the opposite, a miss.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use millpond::keeper::{Address, Server};
use millpond::{Backing, EngineBuilder, OpenOptions};
use millpond_bench_peers::{Arena, Mapped};
use rustix::fs::OFlags;

use super::data::{MIB, TestFile};
use super::fio;
use super::harness::{Engine, Reader, compare};
use super::load::Load;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::{Context, Result};

const MILLPOND: &str = "millpond";
const MAPPED: &str = "millpond, mapped";
const MEMCPY: &str = "memcpy";
const MMAP: &str = "mmap";
const PREAD: &str = "kernel pread";
const PREAD_DIRECT: &str = "kernel pread, O_DIRECT";
const WITH_KEEPER: &str = "millpond, with a keeper";
const NO_HIT_PATH: &str = "millpond, hit path off";

/// How the threads go over the file.
#[derive(Debug, Clone, Copy)]
enum Shape {
    Random,
    /// All threads over the same blocks, in order (will-it-scale's `read2`).
    Sequential,
    /// Each thread over its own part, in order (will-it-scale's `pread3`).
    Partitioned,
}

#[derive(Debug)]
struct CachedReadCase {
    name: &'static str,
    file_bytes: u64,
    block_bytes: u32,
    page_bytes: u32,
    shape: Shape,
    /// Whether to measure with 1, 2, .. threads, or with 1 only.
    scaled: bool,
    /// Whether to measure without the hit path too.
    without_hit_path: bool,
    /// Whether to measure an engine with a keeper, whose frames are shared memory, too.
    with_keeper: bool,
    /// Whether to measure mapped backing too.
    with_mapped: bool,
}

const CASES: [CachedReadCase; 5] = [
    CachedReadCase {
        name: "random-4k",
        file_bytes: 256 * MIB,
        block_bytes: 4096,
        page_bytes: 4096,
        shape: Shape::Random,
        scaled: true,
        without_hit_path: true,
        with_keeper: true,
        with_mapped: true,
    },
    CachedReadCase {
        name: "random-16k",
        file_bytes: 256 * MIB,
        block_bytes: 16384,
        page_bytes: 16384,
        shape: Shape::Random,
        scaled: true,
        without_hit_path: false,
        with_keeper: false,
        with_mapped: false,
    },
    CachedReadCase {
        name: "read2-4k",
        file_bytes: MIB,
        block_bytes: 4096,
        page_bytes: 4096,
        shape: Shape::Sequential,
        scaled: true,
        without_hit_path: false,
        with_keeper: false,
        with_mapped: false,
    },
    CachedReadCase {
        name: "pread3-4k",
        file_bytes: 4 * MIB,
        block_bytes: 4096,
        page_bytes: 4096,
        shape: Shape::Partitioned,
        scaled: true,
        without_hit_path: false,
        with_keeper: false,
        with_mapped: false,
    },
    CachedReadCase {
        name: "sequential-512",
        file_bytes: 256 * MIB,
        block_bytes: 512,
        page_bytes: 4096,
        shape: Shape::Sequential,
        scaled: false,
        without_hit_path: true,
        with_keeper: false,
        with_mapped: true,
    },
];

/// The miss: a file that the cache holds a small part of.
const COLD: &str = "cold-random-4k";
const COLD_FILE_BYTES: u64 = 1024 * MIB;
const COLD_FILE_BYTES_QUICK: u64 = 256 * MIB;
/// The file is this number of times the cache, so this part of the reads hits.
const COLD_CACHE_SHARE: u64 = 64;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut file: Option<TestFile> = None;
    for case in CASES.iter().filter(|case| plan.wants(case.name)) {
        let bytes = plan.bytes(case.file_bytes);
        let file = match &mut file {
            Some(file) if file.bytes == bytes => file,
            other => other.insert(TestFile::create(&plan.dir, bytes)?),
        };
        for threads in plan.thread_counts().filter(|threads| case.scaled || *threads == 1) {
            plan.report_progress(&format!("{} with {threads} thread(s)", case.name));
            cached(case, file, threads, plan, &mut outcome)?;
        }
    }
    drop(file);
    if plan.wants(COLD) {
        plan.report_progress(COLD);
        cold(plan, &mut outcome)?;
    }
    fio::run(plan, &mut outcome)?;
    Ok(outcome)
}

fn cached(
    case: &CachedReadCase,
    file: &TestFile,
    threads: u32,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    let load = match case.shape {
        Shape::Random => Load::random(file.bytes, case.block_bytes, threads),
        Shape::Sequential => Load::sequential(file.bytes, case.block_bytes, threads),
        Shape::Partitioned => Load::partitioned(file.bytes, case.block_bytes, threads),
    };
    // Enough for the file, its tables, and the free frames of an eviction policy.
    let cache_bytes = file.bytes + file.bytes / 4 + 32 * MIB;
    let options = OpenOptions::new().read(true).page_bytes(case.page_bytes);
    let pond =
        OpenMillpond::open(file, millpond::Engine::builder().cache_bytes(cache_bytes), &options)?;
    outcome.note(format!("{}: {}", case.name, pond.back_end()));

    let subject = pond.reader(MILLPOND, true);
    let length = plan.slice(60, 12);
    let mut baselines: Vec<(&str, io::Result<Box<dyn Engine + '_>>)> = vec![
        (PREAD, file.open(OFlags::empty()).map(|file| pread(PREAD, file))),
        (MEMCPY, file.open(OFlags::empty()).and_then(|file| memcpy(&file))),
        (MMAP, file.open(OFlags::empty()).and_then(|file| mapped(&file))),
    ];
    if case.without_hit_path {
        baselines.push((NO_HIT_PATH, Ok(Box::new(pond.reader(NO_HIT_PATH, false)))));
    }
    for (name, baseline) in baselines {
        match baseline {
            Ok(baseline) => {
                let rows = compare(case.name, &subject, &*baseline, &load, plan, length)?;
                outcome.rows.extend(rows);
            }
            Err(error) => outcome.skip(case.name, name, error),
        }
    }
    if case.with_mapped {
        mapped_backing(case, file.bytes, &load, plan, outcome)?;
    }
    if case.with_keeper {
        // A separate file: an engine reads a file through the engine that has it open already.
        let copy = TestFile::create(&plan.dir, file.bytes)?;
        let keeper = Server::bind(&Address::unique()).context("binding a keeper")?;
        let (address, stopper) = (keeper.address().clone(), keeper.stopper());
        let keeper = std::thread::spawn(move || keeper.serve(|_| ()));
        let engine = millpond::Engine::builder().cache_bytes(cache_bytes).keeper(address);
        let shared = OpenMillpond::open(&copy, engine, &options)?;
        let baseline = shared.reader(WITH_KEEPER, true);
        outcome.rows.extend(compare(case.name, &subject, &baseline, &load, plan, length)?);
        drop(baseline);
        drop(shared);
        stopper.stop_when_idle();
        let _ = keeper.join();
    }
    Ok(())
}

/// Mapped backing against `pread`, both of the kernel's pages.
fn mapped_backing(
    case: &CachedReadCase,
    bytes: u64,
    load: &Load,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    // A separate file: an engine reads a file with the backing that has it open already.
    let file = TestFile::create(&plan.dir, bytes)?;
    let options = OpenOptions::new().read(true).backing(Backing::Mapped);
    let pond = OpenMillpond::open(&file, millpond::Engine::builder(), &options)?;
    let subject = pond.reader(MAPPED, true);
    let baseline = pread(PREAD, file.open(OFlags::empty()).context("opening the file")?);
    let length = plan.slice(60, 12);
    outcome.rows.extend(compare(case.name, &subject, &*baseline, load, plan, length)?);
    Ok(())
}

fn cold(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let bytes = if plan.quick { COLD_FILE_BYTES_QUICK } else { COLD_FILE_BYTES };
    let file = TestFile::create(&plan.dir, plan.bytes(bytes))?;
    file.drop_kernel_cache().context("dropping the kernel's cache of the file")?;
    let direct = match file.open(OFlags::DIRECT) {
        Ok(direct) => direct,
        Err(error) => {
            outcome.skip(COLD, PREAD_DIRECT, format!("no O_DIRECT in this directory: {error}"));
            return Ok(());
        }
    };
    let load = Load::random(file.bytes, 4096, 1).checked_for(plan.slice(1000, 200));
    let options = OpenOptions::new().read(true).backing(Backing::Direct);
    let engine = millpond::Engine::builder().cache_bytes(file.bytes / COLD_CACHE_SHARE);
    let pond = OpenMillpond::open(&file, engine, &options)?;
    let subject = pond.reader(MILLPOND, true);
    let baseline = pread(PREAD_DIRECT, direct);
    outcome.rows.extend(compare(COLD, &subject, &*baseline, &load, plan, plan.slice(300, 80))?);
    let stats = pond.engine.stats();
    outcome.note(format!(
        "{COLD}: {}; {} hits, {} misses",
        pond.back_end(),
        stats.hits,
        stats.misses
    ));
    Ok(())
}

/// A Millpond engine with the file open.
struct OpenMillpond {
    engine: millpond::Engine,
    file: millpond::File,
}

impl OpenMillpond {
    fn open(file: &TestFile, engine: EngineBuilder, options: &OpenOptions) -> Result<Self> {
        let engine = engine.build().context("building a Millpond engine")?;
        let file = engine.open(file.path(), options).context("opening the file in Millpond")?;
        Ok(Self { engine, file })
    }

    fn reader(&self, name: &'static str, hit_path: bool) -> impl Engine {
        let engine = self.engine.clone();
        Reader::new(name, |dst: &mut [u8], offset| Ok(self.file.read_at(dst, offset)?))
            .prepared_by(move || engine.set_hit_path(hit_path))
    }

    fn back_end(&self) -> String {
        let stats = self.engine.stats();
        format!("back end {} ({})", stats.back_end, stats.back_end_reason)
    }
}

fn pread(name: &'static str, file: File) -> Box<dyn Engine> {
    Box::new(Reader::new(name, move |dst: &mut [u8], offset| file.read_at(dst, offset)))
}

fn memcpy(file: &File) -> io::Result<Box<dyn Engine>> {
    let arena = Arena::read(file)?;
    Ok(Box::new(Reader::new(MEMCPY, move |dst: &mut [u8], offset| Ok(arena.read_at(dst, offset)))))
}

fn mapped(file: &File) -> io::Result<Box<dyn Engine>> {
    let mapped = Mapped::new(file)?;
    Ok(Box::new(Reader::new(MMAP, move |dst: &mut [u8], offset| Ok(mapped.read_at(dst, offset)))))
}
