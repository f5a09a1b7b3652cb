//! A worker: threads that each write their own slots and read all slots, until the time is up or the
//! process is killed.
//!
//! A thread records in the ledger the version that it begins to write, then writes, then records that it is
//! done; after a sync it records the versions that the sync covered. A reader looks up the version done
//! before its read, and the version begun after it: the version read must lie between them.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use millpond::{Backing, Engine, File, OpenOptions, WriteMode};

use super::ledger::{Count, Ledger, Word};
use super::slots::{SHAPES, SlotRandom};
use crate::failure::{Context, FAILED, Failure, Result};

const THREADS: usize = 3;
/// The average number of operations between syncs; the counts are recorded as often.
const SYNC_EVERY: usize = 60;
/// A wait that is reported. Chosen, not measured.
const LONG_WAIT: Duration = Duration::from_secs(20);

/// The options of a worker.
#[derive(Debug, Clone, clap::Args)]
pub struct Worker {
    #[arg(long)]
    pub data: PathBuf,
    #[arg(long)]
    pub ledger: PathBuf,
    #[arg(long)]
    pub seed: u64,
    #[arg(long)]
    pub millis: u64,
    /// The library's mode; without it the worker uses system calls.
    #[arg(long, value_enum)]
    pub library: Option<Library>,
    #[arg(long, default_value_t = 2 << 20)]
    pub cache_bytes: u64,
    #[arg(long)]
    pub keeper: Option<millpond::keeper::Address>,
    /// Reads are as atomic as writes.
    #[arg(long)]
    pub atomic: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Library {
    Through,
    Back,
    Direct,
}

/// A file, through the library or system calls.
enum SoakFile {
    Engine(File),
    Kernel(std::fs::File),
}

impl SoakFile {
    fn read(&self, bytes: &mut [u8], offset: u64, how: &mut SlotRandom) -> io::Result<()> {
        let file = match self {
            SoakFile::Kernel(file) => return file.read_exact_at(bytes, offset),
            SoakFile::Engine(file) => file,
        };
        let page_end = 4096 - offset as usize % 4096;
        let done = match how.below(4) {
            0 if bytes.len() <= page_end => {
                file.view(offset, bytes.len()).map(|view| bytes.copy_from_slice(&view))
            }
            1 => {
                let (first, rest) = bytes.split_at_mut(how.below(bytes.len()));
                let mut parts = [io::IoSliceMut::new(first), io::IoSliceMut::new(rest)];
                file.read_vectored_at(&mut parts, offset).map(drop)
            }
            _ => file.read_exact_at(bytes, offset),
        };
        done.map_err(|error| io::Error::other(error.to_string()))
    }

    fn write(&self, bytes: &[u8], offset: u64, how: &mut SlotRandom) -> io::Result<()> {
        let file = match self {
            SoakFile::Kernel(file) => return file.write_all_at(bytes, offset),
            SoakFile::Engine(file) => file,
        };
        let done = if how.one_in(3) {
            let (first, rest) = bytes.split_at(how.below(bytes.len()));
            let parts = [io::IoSlice::new(first), io::IoSlice::new(rest)];
            file.write_vectored_at(&parts, offset).map(drop)
        } else {
            file.write_all_at(bytes, offset)
        };
        done.map_err(|error| io::Error::other(error.to_string()))
    }

    fn sync(&self) -> io::Result<()> {
        match self {
            SoakFile::Kernel(file) => file.sync_data(),
            SoakFile::Engine(file) => {
                file.sync_data().map_err(|error| io::Error::other(error.to_string()))
            }
        }
    }
}

fn open(worker: &Worker, engine: Option<&Engine>, path: &Path) -> Result<SoakFile> {
    let Some(engine) = engine else {
        let file = std::fs::File::options().read(true).write(true).open(path);
        return file.map(SoakFile::Kernel).context(path.display());
    };
    let options = OpenOptions::new().read(true).write(true);
    let options = match worker.library {
        Some(Library::Back) => options.write_mode(WriteMode::Back),
        Some(Library::Direct) => options.write_mode(WriteMode::Back).backing(Backing::Direct),
        _ => options,
    };
    engine.open(path, &options).map(SoakFile::Engine).context(path.display())
}

/// The state of each slot that only this process has, in addition to the ledger.
struct Known {
    begun: AtomicU64,
    done: AtomicU64,
}

struct WorkerRun<'w> {
    worker: &'w Worker,
    ledger: Ledger,
    targets: Vec<SoakFile>,
    known: Vec<Vec<Known>>,
    counts: [AtomicU64; 3],
    is_over: AtomicBool,
}

pub fn run(worker: &Worker) -> Result<()> {
    let ledger = Ledger::open(&worker.ledger).context(worker.ledger.display())?;
    let note = "the ledger";
    let engine = match worker.library {
        None => None,
        Some(_) => {
            let mut builder = Engine::builder().cache_bytes(worker.cache_bytes);
            builder = builder.report_waits_over(LONG_WAIT, |waiting| eprintln!("{waiting}"));
            if let Some(keeper) = &worker.keeper {
                builder = builder.keeper(keeper.clone());
            }
            Some(builder.build().context("the engine")?)
        }
    };
    let targets = SHAPES
        .iter()
        .map(|shape| open(worker, engine.as_ref(), &worker.data.join(shape.name)))
        .collect::<Result<Vec<_>>>()?;
    let mut known = Vec::new();
    for (number, shape) in SHAPES.iter().enumerate() {
        let of_slot = |slot| {
            let version = ledger.get(number, slot, Word::Done)?;
            Ok(Known { begun: AtomicU64::new(version), done: AtomicU64::new(version) })
        };
        known.push((0..shape.slots).map(of_slot).collect::<io::Result<_>>().context(note)?);
    }
    // From here on the worker, and its keeper, may be killed.
    ledger.set_count(Count::Pid, u64::from(std::process::id())).context(note)?;
    let counts = [Count::Reads, Count::Writes, Count::Syncs];
    let counted = counts.map(|count| ledger.count(count).unwrap_or(0)).map(AtomicU64::new);
    let work = WorkerRun {
        worker,
        ledger,
        targets,
        known,
        counts: counted,
        is_over: AtomicBool::new(false),
    };
    let end = Instant::now() + Duration::from_millis(worker.millis);
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let work = &work;
                scope.spawn(move || {
                    let outcome = work.thread(thread, end);
                    if outcome.is_err() {
                        work.is_over.store(true, Relaxed);
                    }
                    outcome
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    outcomes.into_iter().collect::<Result<()>>()?;
    work.record_counts().context(note)?;
    for target in work.targets {
        if let SoakFile::Engine(file) = target {
            file.close().context("close")?;
        }
    }
    Ok(())
}

impl WorkerRun<'_> {
    fn thread(&self, thread: usize, end: Instant) -> Result<()> {
        let mut random = SlotRandom(self.worker.seed ^ (thread as u64) << 56);
        // This thread's slots that were written since the last sync of their file.
        let mut unsynced: Vec<Vec<usize>> = vec![Vec::new(); SHAPES.len()];
        while Instant::now() < end && !self.is_over.load(Relaxed) {
            let shape = random.below(SHAPES.len());
            let any = random.below(SHAPES[shape].slots);
            let own = any - any % THREADS + thread;
            if random.one_in(SYNC_EVERY) {
                self.sync(shape, &mut unsynced[shape])?;
            } else if random.one_in(2) && own < SHAPES[shape].slots {
                self.write(shape, own, &mut random)?;
                unsynced[shape].push(own);
            } else {
                let slot = if self.worker.atomic || own >= SHAPES[shape].slots { any } else { own };
                if self.worker.atomic || slot % THREADS == thread {
                    self.read(shape, slot, &mut random)?;
                }
            }
        }
        Ok(())
    }

    fn read(&self, shape: usize, slot: usize, random: &mut SlotRandom) -> Result<()> {
        let (of, known) = (&SHAPES[shape], &self.known[shape][slot]);
        let mut bytes = vec![0; of.slot_bytes];
        let least = known.done.load(Acquire);
        let doing = || format!("reading {} at {}", of.name, of.offset(slot));
        self.targets[shape].read(&mut bytes, of.offset(slot), random).context(doing())?;
        let most = known.begun.load(Acquire);
        self.counts[0].fetch_add(1, Relaxed);
        let wrong = |why: String| {
            let place = format!("{}: slot {slot} at {}", of.name, of.offset(slot));
            Failure::new(FAILED, format!("MISMATCH in {place}: {why}"))
        };
        match of.version(self.worker.seed_of_data(), slot, &bytes) {
            Ok(version) if (least..=most).contains(&version) => Ok(()),
            Ok(version) => Err(wrong(format!("version {version}, wanted {least} to {most}"))),
            Err(at) => Err(wrong(format!(
                "byte {} does not belong to version {}, wanted {least} to {most}",
                at.offset, at.version
            ))),
        }
    }

    fn write(&self, shape: usize, slot: usize, random: &mut SlotRandom) -> Result<()> {
        let (of, known) = (&SHAPES[shape], &self.known[shape][slot]);
        let version = known.begun.load(Relaxed) + 1;
        let mut bytes = vec![0; of.slot_bytes];
        of.fill(self.worker.seed_of_data(), slot, version, &mut bytes);
        self.record(shape, slot, Word::Begun, version)?;
        known.begun.store(version, Release);
        let doing = || format!("writing {} at {}", of.name, of.offset(slot));
        self.targets[shape].write(&bytes, of.offset(slot), random).context(doing())?;
        known.done.store(version, Release);
        self.record(shape, slot, Word::Done, version)?;
        self.counts[1].fetch_add(1, Relaxed);
        Ok(())
    }

    fn sync(&self, shape: usize, unsynced: &mut Vec<usize>) -> Result<()> {
        let done = |slot: usize| (slot, self.known[shape][slot].done.load(Relaxed));
        let covered: Vec<(usize, u64)> = unsynced.drain(..).map(done).collect();
        self.targets[shape].sync().context(format!("sync of {}", SHAPES[shape].name))?;
        for (slot, version) in covered {
            self.record(shape, slot, Word::Synced, version)?;
        }
        self.counts[2].fetch_add(1, Relaxed);
        self.record_counts().context("the ledger")
    }

    fn record(&self, shape: usize, slot: usize, word: Word, version: u64) -> Result<()> {
        self.ledger.set(shape, slot, word, version).context("the ledger")
    }

    fn record_counts(&self) -> io::Result<()> {
        let counts = [Count::Reads, Count::Writes, Count::Syncs];
        for (count, counted) in counts.into_iter().zip(&self.counts) {
            self.ledger.set_count(count, counted.load(Relaxed))?;
        }
        Ok(())
    }
}

impl Worker {
    /// The low half, which is the same in all rounds.
    pub fn seed_of_data(&self) -> u64 {
        self.seed & 0xFFFF_FFFF
    }
}
