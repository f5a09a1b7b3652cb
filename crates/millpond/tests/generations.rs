//! Readers beside writers, truncations and holes. Readers judge by the bytes alone: no mixture, no
//! bytes older than the read, no deleted bytes that come back.
//!
//! The histories of `linearizable` are short, for the checker's sake. Here they are long: the
//! contents after each step are known in advance. A read is correct if it shows the result of one
//! step, which had not been replaced before the read began, and had begun before the read ended.

mod common;

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use millpond::sim::SimOptions;
use millpond::{Advice, BackendChoice, Backing, Engine, File, OpenOptions, WriteMode};

use common::{Random, back_ends, builder, cache_for, read_write, stress_time, temp_dir, within};

const PAGE: usize = 4096;

/// An engine whose cache has few pages, and the options to open files with.
fn setup(random: &mut Random, backend: &BackendChoice) -> (Engine, OpenOptions, String) {
    let cache_pages = [3, 5, 9, 40][random.below(4) as usize];
    let (direct, back) = (random.chance(500), random.chance(600));
    let builder = builder(cache_for(cache_pages, PAGE as u64), backend.clone())
        .hit_path(random.chance(900))
        .dirty_age_max(Duration::from_millis(1 + random.below(2000)));
    let options = read_write()
        .backing(if direct { Backing::Direct } else { Backing::Buffered })
        .write_mode(if back { WriteMode::Back } else { WriteMode::Through });
    let name = format!("cache of {cache_pages}, direct {direct}, back {back}");
    (builder.build().unwrap(), options, name)
}

/// The back ends and a failing device, each with a name and its share of time.
fn setups(random: &mut Random) -> Vec<(&'static str, BackendChoice, Option<SimOptions>)> {
    let mut all: Vec<_> = (back_ends(random.next()).into_iter())
        .map(|(name, backend)| (name, backend, None))
        .collect();
    let sim =
        SimOptions::new(random.next()).delay_us_max(60).short_per_mille(100).error_per_mille(60);
    all.push(("sim with errors", BackendChoice::Sim(sim.clone()), Some(sim)));
    all
}

/// The file after a step; after a failed step, a possible state.
#[derive(Clone)]
struct Version {
    step: u64,
    /// By byte offset from the first on: the length.
    bytes: Arc<Vec<u8>>,
    /// Set before and after a failed step: bytes of either, and of any length between.
    doubtful: Arc<AtomicBool>,
}

impl Version {
    fn new(step: u64, bytes: Vec<u8>) -> Version {
        Version { step, bytes: Arc::new(bytes), doubtful: Arc::default() }
    }
}

/// Every version that a read in flight may still see, the newest last.
struct Versions {
    all: Mutex<VecDeque<Version>>,
    /// The last completed step.
    ended: AtomicU64,
}

/// A read that takes longer than this number of steps is not checked.
const KEPT: usize = 64;

impl Versions {
    fn new(bytes: Vec<u8>) -> Versions {
        let first = Version::new(0, bytes);
        Versions { all: Mutex::new(VecDeque::from([first])), ended: AtomicU64::new(0) }
    }

    fn last(&self) -> Version {
        self.all.lock().unwrap().back().unwrap().clone()
    }

    /// Called before a step begins, with the contents that it produces.
    fn begin(&self, bytes: Vec<u8>) -> u64 {
        let mut all = self.all.lock().unwrap();
        let step = all.back().unwrap().step + 1;
        all.push_back(Version::new(step, bytes));
        if all.len() > KEPT {
            all.pop_front();
        }
        step
    }

    fn doubt(&self, step: u64) {
        let all = self.all.lock().unwrap();
        all.iter().rev().find(|version| version.step == step).unwrap().doubtful.store(true, SeqCst);
    }

    /// Whether a read of at most `len` bytes at `offset`, begun when `from` had ended, may have
    /// returned `seen`. `None`: the versions it would need are no longer stored.
    fn explain(&self, from: u64, offset: usize, len: usize, seen: &[u8]) -> Option<bool> {
        let possible: Vec<Version> = {
            let all = self.all.lock().unwrap();
            if all.front().unwrap().step > from {
                return None;
            }
            all.iter().filter(|version| version.step >= from).cloned().collect()
        };
        let part = |version: &'_ Version| {
            let end = version.bytes.len().min(offset + len);
            version.bytes.get(offset..end).unwrap_or(&[]).to_vec()
        };
        if possible.iter().any(|version| part(version) == seen) {
            return Some(true);
        }
        // A failed step, or the step that repairs it, may show any part of its result. Whether the
        // newest step fails is only known at its end.
        let newest = possible.last().unwrap().step;
        while self.ended.load(SeqCst) < newest {
            std::thread::yield_now();
        }
        let in_doubt = possible.iter().any(|version| version.doubtful.load(SeqCst));
        let parts: Vec<Vec<u8>> = possible.iter().map(part).collect();
        let is_known = |at: usize, byte: u8| parts.iter().any(|part| part.get(at) == Some(&byte));
        let mut bytes = seen.iter().enumerate();
        Some(in_doubt && bytes.all(|(at, &byte)| byte == 0 || is_known(at, byte)))
    }
}

/// One step: the file after it, and how to get there.
fn step(random: &mut Random, now: &[u8], token: u8, longest: usize) -> (Vec<u8>, Step) {
    let mut after = now.to_vec();
    let at = random.below(now.len().min(longest) as u64 + 1) as usize;
    let most = [100, 2 * PAGE, longest][random.below(3) as usize];
    let len = 1 + random.below(most as u64) as usize;
    let done = match random.below(9) {
        0..=2 => {
            after.resize(now.len().max(at + len), 0);
            after[at..at + len].fill(token);
            Step::Write { at, len }
        }
        3 if now.len() < 2 * longest => {
            after.resize(now.len() + len, token);
            Step::Append { len }
        }
        4 => {
            after.truncate(at);
            Step::Truncate { to: at }
        }
        5 if now.len() < 2 * longest => {
            after.resize(now.len() + len, 0);
            Step::Truncate { to: now.len() + len }
        }
        6 if now.len() < 2 * longest => {
            after.resize(now.len().max(at + len), 0);
            Step::Allocate { at, len }
        }
        7 => {
            after.get_mut(at..(at + len).min(now.len())).unwrap_or_default().fill(0);
            Step::Punch { at, len }
        }
        _ => {
            after.get_mut(at..(at + len).min(now.len())).unwrap_or_default().fill(0);
            Step::Zero { at, len }
        }
    };
    (after, done)
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Write { at: usize, len: usize },
    Append { len: usize },
    Truncate { to: usize },
    Allocate { at: usize, len: usize },
    Punch { at: usize, len: usize },
    Zero { at: usize, len: usize },
}

impl Step {
    /// Runs the step; returns whether it was done completely.
    fn act(self, file: &File, token: u8) -> Result<bool, millpond::Error> {
        match self {
            Step::Write { at, len } if len.is_multiple_of(2) => {
                let bytes = vec![token; len];
                let (head, tail) = bytes.split_at(len / 3);
                let slices = [IoSlice::new(head), IoSlice::new(tail)];
                Ok(file.write_vectored_at(&slices, at as u64)? == len)
            }
            Step::Write { at, len } => Ok(file.write_at(&vec![token; len], at as u64)? == len),
            Step::Append { len } => file.append(&vec![token; len]).map(|_| true),
            Step::Truncate { to } => file.truncate(to as u64).map(|()| true),
            Step::Allocate { at, len } => file.allocate(at as u64, len as u64).map(|()| true),
            Step::Punch { at, len } => file.punch_hole(at as u64, len as u64).map(|()| true),
            Step::Zero { at, len } => file.zero_range(at as u64, len as u64).map(|()| true),
        }
    }
}

/// Goal: one thread changes a file, also with operations longer than the cache. Readers see the
/// result of one step, and none that was replaced before they began: no bytes come back that were
/// truncated, punched or overwritten.
/// Method: random steps by one thread; readers with separate handles, which also sync, and have
/// pages dropped and fetched; caches of a few pages, on every back end, and on a failing device.
#[test]
fn readers_see_one_step_and_none_that_is_over() {
    let mut random = Random::from_environment();
    for (name, backend, sim) in setups(&mut random) {
        let mut random = random.fork();
        within(Duration::from_secs(60) + stress_time(4.0), name, move || {
            let started = Instant::now();
            let (mut steps, mut reads, mut late, mut files) = (0, 0, 0, 0);
            while reads < 20 || started.elapsed() < stress_time(0.4) {
                let (engine, options, what) = setup(&mut random, &backend);
                let what = format!("{name}, {what}");
                let counted = one_file(&engine, &options, sim.as_ref(), &mut random, &what);
                (steps, reads) = (steps + counted[0], reads + counted[1]);
                (late, files) = (late + counted[2], files + 1);
            }
            println!("{name}: {files} files, {steps} steps, {reads} reads, {late} too long");
        });
    }
}

fn one_file(
    engine: &Engine,
    options: &OpenOptions,
    sim: Option<&SimOptions>,
    random: &mut Random,
    what: &str,
) -> [u64; 3] {
    const READERS: usize = 3;
    let dir = temp_dir();
    let path = dir.path().join("file");
    let open = || engine.open(&path, options).unwrap();
    // One reader bypasses the cache.
    let direct = options.clone().direct(true).bounce(true);
    let errors = sim.map(SimOptions::errors_switch);
    let fails = |on: bool| errors.iter().for_each(|switch| switch.store(on, SeqCst));
    fails(false);
    let file = open();
    let longest = [PAGE, 6 * PAGE, 50 * PAGE][random.below(3) as usize];
    let (versions, stop) = (Versions::new(Vec::new()), AtomicBool::new(false));
    let reads = [const { AtomicU64::new(0) }; 2];
    let (seed, time) = (random.next(), stress_time(0.12));
    let mut taken = 0;
    std::thread::scope(|scope| {
        for number in 0..READERS as u64 {
            let options = if number == 1 { &direct } else { options };
            let handle = engine.open(&path, options).unwrap();
            let (versions, stop, reads) = (&versions, &stop, &reads);
            let mut random = Random(seed ^ number);
            scope.spawn(move || {
                let mut bytes = vec![0; 3 * longest];
                while !stop.load(SeqCst) {
                    disturb(&handle, &mut random);
                    let offset = random.below(2 * longest as u64) as usize;
                    let len = 1 + random.below(longest as u64) as usize;
                    let from = versions.ended.load(SeqCst);
                    let Ok(moved) = read(&handle, &mut bytes[..len], offset as u64) else {
                        assert!(sim.is_some(), "{what}: a read failed");
                        continue;
                    };
                    // Or it ends before the bytes that the device failed to read.
                    let is_cut = sim.is_some() && moved > 0;
                    let len = if is_cut { moved } else { len };
                    let explained = versions.explain(from, offset, len, &bytes[..moved]);
                    // A read that took too long shows nothing.
                    reads[usize::from(explained.is_none())].fetch_add(1, SeqCst);
                    assert!(
                        explained != Some(false),
                        "{what}: seed {seed}: {len} at {offset}: {moved} bytes that no step from \
                         {from} on left: {:?}",
                        runs(&bytes[..moved])
                    );
                }
            });
        }
        let mut random = Random(seed);
        let started = Instant::now();
        fails(true);
        while started.elapsed() < time {
            taken += 1;
            let token = 1 + (taken % 255) as u8;
            let now = versions.last();
            let (after, done) = step(&mut random, &now.bytes, token, longest);
            let number = versions.begin(after.clone());
            match done.act(&file, token) {
                Ok(true) => versions.ended.store(number, SeqCst),
                Err(error) if error.errno() == libc::EOPNOTSUPP => {
                    // Back to the version before; a reader that sees these bytes saw that version.
                    let number = versions.begin(now.bytes.to_vec());
                    versions.ended.store(number, SeqCst);
                }
                outcome => {
                    assert!(sim.is_some(), "{what}: {done:?}: {outcome:?}");
                    // The present contents are in doubt until all of the file is written again,
                    // without failures.
                    versions.doubt(number);
                    fails(false);
                    let mending = versions.begin(Vec::new());
                    // The first attempt may still return an error of an earlier operation.
                    assert!((0..3).any(|_| file.truncate(0).is_ok()), "{what}: {done:?}");
                    versions.ended.store(mending, SeqCst);
                    fails(true);
                }
            }
            if random.chance(100) {
                // A sync error is not checked here: cached pages stay.
                let _ = file.sync_data();
            }
        }
        stop.store(true, SeqCst);
    });
    fails(false);
    let last = versions.last().bytes;
    let mut bytes = vec![0; last.len() + 1];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), last.len(), "{what}: seed {seed}");
    assert!(bytes[..last.len()] == last[..], "{what}: seed {seed}: in the end");
    let [explained, late] = reads.map(AtomicU64::into_inner);
    [taken, explained, late]
}

/// Hints that evict and fill pages.
fn disturb(file: &File, random: &mut Random) {
    match random.below(20) {
        0 => file.advise(0, 0, Advice::DontNeed).unwrap(),
        1 => file.advise(0, 0, Advice::WillNeed).unwrap(),
        2 => drop(file.write_back()),
        3 => drop(file.view(random.below(9 * PAGE as u64), PAGE)),
        // So that the writer gets a processor, too.
        4..=9 => std::thread::sleep(Duration::from_micros(50)),
        _ => {}
    }
}

fn read(file: &File, dst: &mut [u8], offset: u64) -> Result<usize, millpond::Error> {
    if dst.len().is_multiple_of(2) {
        let cut = dst.len() / 3;
        let (head, tail) = dst.split_at_mut(cut);
        return file.read_vectored_at(&mut [head, tail].map(IoSliceMut::new), offset);
    }
    file.read_at(dst, offset)
}

/// Bytes as they are printed: value and count.
fn runs(bytes: &[u8]) -> Vec<(u8, usize)> {
    let chunks = bytes.chunk_by(|one, other| one == other);
    chunks.map(|run| (run[0], run.len())).collect()
}

/// Goal: several writers write all of a shared range; its readers see one write, never a mixture,
/// for every length. Appends neither mix nor leave gaps.
/// Method: each write is one token over the whole range: a part of a page, pages that it straddles,
/// or several times the cache; readers reject any other contents. A log beside it: each record is
/// one token, and the records are counted at the end.
#[test]
fn readers_reject_any_mixture() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        let mut random = random.fork();
        within(Duration::from_secs(60) + stress_time(3.0), name, move || {
            let started = Instant::now();
            while started.elapsed() < stress_time(0.4) {
                let (engine, options, what) = setup(&mut random, &backend);
                tokens(&engine, &options, &mut random, &format!("{name}, {what}"));
            }
        });
    }
}

fn tokens(engine: &Engine, options: &OpenOptions, random: &mut Random, what: &str) {
    let dir = temp_dir();
    let open = |name: &str| engine.open(dir.path().join(name), options).unwrap();
    let at = random.below(2 * PAGE as u64);
    let len = [100, PAGE, 2 * PAGE + 77, 20 * PAGE, 90 * PAGE][random.below(5) as usize];
    let record = 1 + random.below(3 * PAGE as u64) as usize;
    let (range, log) = (open("range"), open("log"));
    range.write_all_at(&vec![1; len], at).unwrap();
    let stop = AtomicBool::new(false);
    let appended: u64 = std::thread::scope(|scope| {
        let direct = options.clone().direct(true).bounce(true);
        let appenders: Vec<_> = (2u8..5)
            .map(|token| {
                // The writes and appends of one writer bypass the cache.
                let options = if token == 3 { &direct } else { options };
                let open = |name: &str| engine.open(dir.path().join(name), options).unwrap();
                let (range, log, stop) = (open("range"), open("log"), &stop);
                scope.spawn(move || {
                    let (whole, part) = (vec![token; len], vec![token; record]);
                    let mut appended = 0;
                    while !stop.load(SeqCst) {
                        assert_eq!(range.write_at(&whole, at).unwrap(), len);
                        let offset = log.append(&part).unwrap();
                        assert!(offset.is_multiple_of(record as u64), "{what}: a gap");
                        appended += 1;
                    }
                    appended
                })
            })
            .collect();
        for _ in 0..2 {
            let (range, log, stop) = (open("range"), open("log"), &stop);
            let mut random = random.fork();
            scope.spawn(move || {
                let (mut bytes, mut parts) = (vec![0; len], vec![0; 3 * record]);
                while !stop.load(SeqCst) {
                    disturb(&range, &mut random);
                    assert_eq!(read(&range, &mut bytes, at).unwrap(), len, "{what}");
                    assert_eq!(runs(&bytes).len(), 1, "{what}: {:?}", runs(&bytes));
                    let end = log.len().unwrap();
                    assert!(end.is_multiple_of(record as u64), "{what}: {end}");
                    let from = end.saturating_sub(2 * record as u64);
                    let moved = read(&log, &mut parts, from).unwrap();
                    let whole = |part: &[u8]| part.len() == record && runs(part).len() == 1;
                    assert!(moved as u64 >= end - from, "{what}: shorter than it was");
                    assert!(parts[..moved].chunks(record).all(whole), "{what}: half a record");
                }
            });
        }
        std::thread::sleep(stress_time(0.06));
        stop.store(true, SeqCst);
        appenders.into_iter().map(|appender| appender.join().unwrap()).sum()
    });
    assert_eq!(log.len().unwrap(), appended * record as u64, "{what}: records were lost");
}
