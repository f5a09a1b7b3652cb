//! The suite `around-the-hit`: operations other than hits, compared with the kernel, which has the
//! same bytes in its cache.
//!
//! - *Misses*: every read misses a page that the kernel has cached. A note has the share that
//!   missed.
//! - *Overwrites* of cached bytes, each thread in its own part of one file, or in its own file. The
//!   kernel's file is cached page by page: its writes to large folios take longer.
//! - *Open, read, close* of small files, through the library, without a cache in between.
//! - [`many`]: a file among many open ones. [`null_reads`]: direct requests, and requests that do
//!   nothing.

mod many;
mod null_reads;
mod small_files;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use millpond::{Advice, Backing, Engine, OpenOptions, WriteMode};
use rustix::fs::OFlags;

use self::small_files::{BLOCK_BYTES, Directory};
use super::data::{MIB, NamedFile};
use super::harness::{self, Reader, Slice, compare};
use super::load::Load;
use super::outcome::Outcome;
use super::plan::Plan;
use super::write::open;
use crate::failure::{Context, Result};

const MISS: &str = "miss-4k";
const OPEN: &str = "open-read-close";
const MILLPOND: &str = "millpond";
const PREAD: &str = "kernel pread";
const PWRITE: &str = "kernel pwrite";

/// The file of misses is this number of times the cache: a page is evicted, and left the ghost
/// queue, before it is read again.
const CACHES: u64 = 16;
const MISS_BYTES: u64 = 256 * MIB;
const WRITTEN_BYTES: u64 = 32 * MIB;
const WRITTEN_BYTES_QUICK: u64 = 8 * MIB;
const SMALL_FILES: u32 = 1000;

/// Whether threads share a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Files {
    One,
    Each,
}

/// How a file is opened.
#[derive(Clone, Copy)]
struct OpenedAs {
    mode: WriteMode,
    backing: Backing,
}

const BACK: OpenedAs = OpenedAs { mode: WriteMode::Back, backing: Backing::Buffered };
const THROUGH: OpenedAs = OpenedAs { mode: WriteMode::Through, backing: Backing::Buffered };
const MAPPED: OpenedAs = OpenedAs { mode: WriteMode::Through, backing: Backing::Mapped };

const OVERWRITES: [(&str, OpenedAs, Files); 6] = [
    ("overwrite-4k-back-one", BACK, Files::One),
    ("overwrite-4k-back-each", BACK, Files::Each),
    ("overwrite-4k-through-one", THROUGH, Files::One),
    ("overwrite-4k-through-each", THROUGH, Files::Each),
    ("overwrite-4k-mapped-one", MAPPED, Files::One),
    ("overwrite-4k-mapped-each", MAPPED, Files::Each),
];

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    if plan.wants(MISS) {
        for threads in plan.thread_counts() {
            plan.report_progress(&format!("{MISS} with {threads} thread(s)"));
            misses(threads, plan, &mut outcome)?;
        }
    }
    for (case, opened_as, files) in OVERWRITES {
        for threads in plan.thread_counts().filter(|_| plan.wants(case)) {
            plan.report_progress(&format!("{case} with {threads} thread(s)"));
            overwrites(case, opened_as, files, threads, plan, &mut outcome)?;
        }
    }
    if plan.wants(OPEN) {
        plan.report_progress(OPEN);
        open_read_close(plan, &mut outcome)?;
    }
    null_reads::run(plan, &mut outcome)?;
    many::run(plan, &mut outcome)?;
    Ok(outcome)
}

fn misses(threads: u32, plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let bytes = plan.bytes_of(MISS_BYTES, MISS_BYTES / 2);
    let named = NamedFile::create(&plan.dir, bytes)?;
    let engine = Engine::builder().cache_bytes((bytes / CACHES).max(MIB)).build();
    let engine = engine.context("building an engine")?;
    let own = engine.open(&named.path, &OpenOptions::new().read(true)).context(MISS)?;
    own.advise(0, 0, Advice::Random).context(MISS)?;
    let load = Load::shuffled(bytes, BLOCK_BYTES, threads);
    let kernel = open(&named.path, OFlags::empty()).context(MISS)?;
    let [own_warm, baseline_warm] = [cacher(&named.path)?, cacher(&named.path)?];
    let subject =
        Reader::new(MILLPOND, |dst: &mut [u8], at| Ok(own.read_at(dst, at)?)).prepared_by(own_warm);
    let baseline = Reader::new(PREAD, |dst: &mut [u8], at| kernel.read_at(dst, at));
    let baseline = baseline.prepared_by(baseline_warm);
    let before = engine.stats();
    let rows = compare(MISS, &subject, &baseline, &load, plan, plan.slice(100, 30))?;
    let after = engine.stats();
    let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
    let part = misses as f64 / (hits + misses).max(1) as f64;
    outcome.note(format!("{MISS}: {threads} thread(s): {:.2}% of the reads missed", part * 100.0));
    outcome.rows.extend(rows);
    Ok(())
}

/// Reads the whole file into the kernel's cache, page by page.
fn cacher(path: &Path) -> Result<impl Fn() + Sync + 'static> {
    let file = open(path, OFlags::empty()).context(path.display())?;
    // Without it the kernel reads ahead into large folios.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
    Ok(move || {
        let mut block = [0; BLOCK_BYTES as usize];
        let mut at = 0;
        // The measured engine will report read errors.
        while matches!(file.read_at(&mut block, at), Ok(read) if read > 0) {
            at += u64::from(BLOCK_BYTES);
        }
    })
}

/// The files of one engine as consecutive parts of one range of bytes.
struct Parts<F> {
    files: Vec<F>,
    bytes_each: u64,
}

impl<F> Parts<F> {
    fn at(&self, offset: u64) -> (&F, u64) {
        (&self.files[(offset / self.bytes_each) as usize], offset % self.bytes_each)
    }
}

/// An engine that writes where the loop of a [`Reader`] reads.
struct Writer<R, W> {
    reader: Reader<R>,
    warm_up: W,
}

impl<R, W> harness::Engine for Writer<R, W>
where
    R: Fn(&mut [u8], u64) -> io::Result<usize> + Sync,
    W: Fn() -> io::Result<()>,
{
    fn name(&self) -> &str {
        self.reader.name()
    }

    fn warm_up(&self, _: &Load) -> io::Result<()> {
        (self.warm_up)()
    }

    fn slice(&self, load: &Load, length: Duration) -> io::Result<Slice> {
        // Dirty pages of the slice before are not part of this one.
        (self.warm_up)()?;
        self.reader.slice(load, length)
    }
}

fn overwrites(
    case: &'static str,
    opened_as: OpenedAs,
    files: Files,
    threads: u32,
    plan: &Plan,
    outcome: &mut Outcome,
) -> Result<()> {
    let written_bytes = plan.bytes_of(WRITTEN_BYTES, WRITTEN_BYTES_QUICK);
    let bytes_each = match files {
        Files::One => written_bytes * u64::from(threads),
        Files::Each => written_bytes,
    };
    let bytes = written_bytes * u64::from(threads);
    let count = bytes / bytes_each;
    let make = || -> Result<Vec<NamedFile>> {
        let made = (0..count).map(|_| NamedFile::create(&plan.dir, bytes_each));
        let made = made.collect::<Result<Vec<_>>>()?;
        for named in &made {
            let file = open(&named.path, OFlags::empty()).context(case)?;
            // Drops the large folios from its creation.
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).context(case)?;
            cacher(&named.path)?();
        }
        Ok(made)
    };
    let [own_files, baseline_files] = [make()?, make()?];
    // All pages may be dirty.
    let engine = Engine::builder().cache_bytes(4 * bytes + 32 * MIB).build().context(case)?;
    let options = OpenOptions::new().read(true).write(true).write_mode(opened_as.mode);
    let options = options.backing(opened_as.backing);
    let own = own_files.iter().map(|named| engine.open(&named.path, &options));
    let own = Parts { files: own.collect::<millpond::Result<_>>().context(case)?, bytes_each };
    let baseline = baseline_files.iter().map(|named| open(&named.path, OFlags::empty()));
    let baseline =
        Parts { files: baseline.collect::<io::Result<Vec<File>>>().context(case)?, bytes_each };
    let load = Load::shuffled(bytes, BLOCK_BYTES, threads);
    let mut block = [0; BLOCK_BYTES as usize];
    let own_warm = || {
        let mut block = [0; BLOCK_BYTES as usize];
        for file in &own.files {
            file.sync_data()?;
            for at in (0..bytes_each).step_by(block.len()) {
                file.read_exact_at(&mut block, at)?;
            }
        }
        Ok(())
    };
    let baseline_warm = || {
        let mut block = [0; BLOCK_BYTES as usize];
        for file in &baseline.files {
            file.sync_data()?;
            for at in (0..bytes_each).step_by(block.len()) {
                file.read_exact_at(&mut block, at)?;
            }
        }
        Ok(())
    };
    let write = |src: &mut [u8], at: u64| {
        let (file, at) = own.at(at);
        Ok(file.write_at(src, at)?)
    };
    let subject = Writer { reader: Reader::new(MILLPOND, write), warm_up: own_warm };
    let pwrite = |src: &mut [u8], at: u64| {
        let (file, at) = baseline.at(at);
        file.write_at(src, at)
    };
    let other = Writer { reader: Reader::new(PWRITE, pwrite), warm_up: baseline_warm };
    let rows = compare(case, &subject, &other, &load, plan, plan.slice(100, 30))?;
    // The bytes that were written are zeros, and the files had none.
    let last = load.blocks.iter().map(|list| u64::from(list[0]) * u64::from(BLOCK_BYTES));
    for at in last {
        let (file, at) = own.at(at);
        file.read_exact_at(&mut block, at).context(case)?;
        if block.iter().any(|byte| *byte != 0) {
            outcome.fail(case, MILLPOND, format!("the block written at {at} is not there"));
        }
    }
    outcome.rows.extend(rows);
    Ok(())
}

fn open_read_close(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let count = plan.count(SMALL_FILES as usize, SMALL_FILES as usize) as u32;
    let made = Directory::create(&plan.dir, count, BLOCK_BYTES as usize)?;
    let paths: Vec<PathBuf> = (0..count).map(|number| made.path(number)).collect();
    let path = |at: u64| &paths[(at / u64::from(BLOCK_BYTES)) as usize];
    let engine = Engine::builder().cache_bytes(64 * MIB).build().context("building an engine")?;
    let options = OpenOptions::new().read(true);
    let load = Load::sequential(u64::from(count) * u64::from(BLOCK_BYTES), BLOCK_BYTES, 1);
    let subject = Reader::new(MILLPOND, |dst: &mut [u8], at| {
        Ok(engine.open(path(at), &options)?.read_at(dst, 0)?)
    });
    let baseline = Reader::new("kernel open, pread, close", |dst: &mut [u8], at| {
        File::open(path(at))?.read_at(dst, 0)
    });
    let rows = compare(OPEN, &subject, &baseline, &load, plan, plan.slice(100, 30))?;
    outcome.rows.extend(rows);
    Ok(())
}
