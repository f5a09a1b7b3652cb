//! Random sequences of operations, failures and power cuts, against a model of the states that a
//! crash may leave.
//!
//! The model has for each byte the values that it may have now, and after a power cut: the value
//! that the last successful sync covered, or one written since. A failing sequence is shrunk and
//! printed, and stored in `crash.proptest-regressions` beside this file; `PROPTEST_RNG_SEED`
//! repeats all others. `MILLPOND_TEST_SCALE` makes the tests longer.

#[cfg(not(scheduled))]
mod common;
#[cfg(scheduled)]
use crate::common;

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use millpond::sim::{SimDevice, SimOptions};
use millpond::{BackendChoice, Engine, Error, File, OpenOptions, WriteMode};
use proptest::prelude::*;
use proptest::test_runner::Config;

#[cfg(not(scheduled))]
use common::scaled;
use common::{Random, cache_for, read_write, temp_dir};

/// The greatest length of a modelled file.
const FILE_BYTES: usize = 24 * BLOCK;
const BLOCK: usize = 4096;
/// Each write has its own value, so there are no more steps than values of a byte.
const STEPS_MAX: usize = 60;
/// More appends than the engine needs to recognize a log.
const LOGGED: usize = 7;

/// A range: where in which block it starts, and its length.
#[derive(Debug, Clone, Copy)]
struct Span {
    block: usize,
    within: usize,
    len: usize,
}

#[derive(Debug, Clone)]
enum Step {
    Write(Span),
    DurableWrite(Span),
    Append(usize),
    /// Some appends, each of which is synced.
    Log(usize),
    Truncate(Span),
    Read(Span),
    WriteBack,
    SyncAll,
    SyncData,
    SyncRange(Span),
    /// Lets dirty pages grow old.
    Wait,
    Faults(bool),
    /// Checks several states that a power cut could leave.
    Crashes(u64),
    /// Cuts the power, and continues with one of these states.
    Restart(u64),
    /// Closes the engine and opens the file with a new one.
    Reopen,
}

fn spans() -> impl Strategy<Value = Span> {
    let within = prop_oneof![4 => Just(0usize), 1 => Just(4095), 2 => Just(512), 4 => 0usize..4096];
    let lens = prop_oneof![
        1 => Just(0usize),
        8 => 1usize..600,
        6 => prop_oneof![Just(4096usize), Just(8192), Just(512)],
        6 => 1usize..10_000,
        1 => 1usize..60_000,
    ];
    (0..FILE_BYTES / BLOCK, within, lens).prop_map(|(block, within, len)| Span {
        block,
        within,
        len,
    })
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => spans().prop_map(Step::Write),
        5 => spans().prop_map(Step::DurableWrite),
        5 => (0usize..6000).prop_map(Step::Append),
        2 => (1usize..3000).prop_map(Step::Log),
        6 => spans().prop_map(Step::Truncate),
        8 => spans().prop_map(Step::Read),
        6 => Just(Step::WriteBack),
        5 => Just(Step::SyncAll),
        5 => Just(Step::SyncData),
        4 => spans().prop_map(Step::SyncRange),
        1 => Just(Step::Wait),
        4 => any::<bool>().prop_map(Step::Faults),
        8 => any::<u64>().prop_map(Step::Crashes),
        3 => any::<u64>().prop_map(Step::Restart),
        3 => Just(Step::Reopen),
    ]
}

#[derive(Debug, Clone)]
struct Case {
    back: bool,
    page_shift: u32,
    cache_pages: u64,
    dirty_pages: u64,
    seed: u64,
    delays: bool,
    short_per_mille: u64,
    /// Every k-th write or sync fails; 0: none.
    write_k: u64,
    sync_k: u64,
    steps: Vec<Step>,
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (12u32..15, prop_oneof![4u64..12, 12u64..100], prop_oneof![1u64..8, 8u64..60]);
    let device = (any::<u64>(), any::<bool>(), prop_oneof![2 => Just(0u64), 1 => 0u64..500]);
    let faults =
        (prop_oneof![1 => Just(0u64), 1 => 1u64..12], prop_oneof![1 => Just(0u64), 1 => 1u64..5]);
    let back = prop_oneof![3 => Just(true), 1 => Just(false)];
    let steps = prop::collection::vec(steps(), 1..STEPS_MAX);
    (back, sizes, device, faults, steps).prop_map(
        |(back, (page_shift, cache_pages, dirty_pages), (seed, delays, short), faults, steps)| {
            Case {
                back,
                page_shift,
                cache_pages,
                dirty_pages,
                seed,
                delays,
                short_per_mille: short,
                write_k: faults.0,
                sync_k: faults.1,
                steps,
            }
        },
    )
}

fn place(span: Span) -> (usize, usize) {
    let at = span.block * BLOCK + span.within;
    (at, span.len.min(FILE_BYTES - at))
}

/// The values that a byte may have: a bit for each.
type Values = u64;

fn only(value: u8) -> Values {
    assert!(value < 64, "{value:#x} was never written");
    1 << value
}

/// The contents that a file may have now, and after a power cut. Bytes beyond its end are zero.
struct Model {
    now: Vec<Values>,
    disk: Vec<Values>,
    len: usize,
    /// The greatest possible length after a failed write beyond the end.
    len_max: usize,
    /// The least and greatest length after a power cut.
    disk_len: (usize, usize),
    /// Bytes of which only the device has a copy: written past the cache since the last sync.
    passed: Vec<bool>,
    /// Whether a sync failed and none has succeeded since.
    unsettled: bool,
}

impl Model {
    fn new(content: &[u8]) -> Model {
        let mut now: Vec<Values> = content.iter().map(|&byte| only(byte)).collect();
        now.resize(FILE_BYTES, only(0));
        let len = content.len();
        let disk = now.clone();
        let passed = vec![false; FILE_BYTES];
        Model { now, disk, len, len_max: len, disk_len: (len, len), passed, unsettled: false }
    }

    fn write(&mut self, at: usize, len: usize, stamp: u8) {
        if len > 0 {
            self.now[at..at + len].fill(only(stamp));
            self.disk[at..at + len].iter_mut().for_each(|values| *values |= only(stamp));
            self.set_len(self.len.max(at + len));
        }
    }

    fn write_failed(&mut self, at: usize, len: usize, stamp: u8) {
        if len > 0 {
            self.now[at..at + len].iter_mut().for_each(|values| *values |= only(stamp));
            self.disk[at..at + len].iter_mut().for_each(|values| *values |= only(stamp));
            self.len_max = self.len_max.max(at + len);
            self.disk_len.1 = self.disk_len.1.max(at + len);
        }
    }

    fn truncate(&mut self, len: usize) {
        self.now[len..].fill(only(0));
        self.disk[len..].iter_mut().for_each(|values| *values |= only(0));
        self.len_max = len;
        self.set_len(len);
    }

    fn set_len(&mut self, len: usize) {
        self.len = len;
        self.len_max = self.len_max.max(len);
        self.disk_len = (self.disk_len.0.min(len), self.disk_len.1.max(len));
    }

    fn learn_len(&mut self, len: u64) {
        let len = len as usize;
        assert!((self.len..=self.len_max).contains(&len), "length {len}, not {}", self.len);
        self.set_len(len);
    }

    fn synced(&mut self) {
        self.disk.clone_from(&self.now);
        self.disk_len = (self.len, self.len_max);
        self.passed.fill(false);
        self.unsettled = false;
    }

    fn synced_range(&mut self, at: usize, end: usize) {
        let end = end.min(self.len);
        if at < end {
            self.disk[at..end].copy_from_slice(&self.now[at..end]);
            self.disk_len.0 = self.disk_len.0.max(end);
        }
    }

    /// After a failed sync, lost bytes without a cached copy may already be read as the device has
    /// them.
    fn check(&self, at: usize, seen: &[u8], what: &str) {
        let is_lost = |at: usize| self.unsettled && self.passed[at];
        let of = |at: usize| if is_lost(at) { self.disk[at] } else { self.now[at] };
        let allowed: Vec<Values> = (at..at + seen.len()).map(of).collect();
        check(at, seen, &allowed, what);
    }

    fn check_crash(&self, left: &[u8]) {
        let (min, max) = self.disk_len;
        assert!((min..=max).contains(&left.len()), "{} bytes left, not {min}..={max}", left.len());
        check(0, left, &self.disk[..left.len()], "crash");
    }
}

/// Whether each byte of `seen`, which begins at `at`, is one of those that are `allowed` there.
fn check(at: usize, seen: &[u8], allowed: &[Values], what: &str) {
    for (at, (byte, allowed)) in (at..).zip(seen.iter().zip(allowed)) {
        assert!(
            *byte < 64 && 1 << byte & allowed != 0,
            "{what}: {byte} at {at}, not of {allowed:#b}"
        );
    }
}

/// A running sequence.
struct Run<'a> {
    case: &'a Case,
    model: Model,
    file: File,
    engine: Engine,
    device: SimDevice,
    sim: SimOptions,
    dir: tempfile::TempDir,
    files: u64,
    stamp: u8,
    /// Failures of the device that were seen.
    failures: u64,
    /// Whether a write went past the cache since the last sync.
    has_passed: bool,
}

impl Run<'_> {
    fn new(case: &Case) -> Run<'_> {
        let sim = SimOptions::new(case.seed)
            .delay_us_max(if case.delays { 30 } else { 0 })
            .short_per_mille(case.short_per_mille)
            .fail_every_kth_write(case.write_k, libc::EIO)
            .fail_every_kth_sync(case.sync_k);
        let dir = temp_dir();
        let path = dir.path().join("0");
        let (engine, file) = open(case, &sim, &path);
        let device = sim.device();
        let model = Model::new(&[]);
        Run {
            case,
            model,
            file,
            engine,
            device,
            sim,
            dir,
            files: 1,
            stamp: 0,
            failures: 0,
            has_passed: false,
        }
    }

    fn content(&mut self, len: usize) -> Vec<u8> {
        self.stamp += 1;
        vec![self.stamp; len]
    }

    fn may_fail(&self, error: &Error) {
        assert_eq!(error.errno(), libc::EIO, "{error}");
        let failed = self.device.failed_writes() + self.device.failed_syncs();
        assert!(failed > 0, "nothing failed, and yet: {error}");
    }

    /// Whether a sync succeeded.
    fn synced(&self, outcome: Result<(), Error>) -> bool {
        outcome.map_err(|error| self.may_fail(&error)).is_ok()
    }

    /// Counts the failures since the last call, including those in the background by the flusher.
    fn count_failures(&mut self) {
        let failures = self.device.failed_syncs() + self.device.failed_writes();
        self.model.unsettled |= failures > std::mem::replace(&mut self.failures, failures);
    }

    fn append(&mut self, src: &[u8]) {
        let at = self.model.len;
        let src = &src[..src.len().min(FILE_BYTES - at)];
        let (len, before) = (src.len(), self.engine.stats().bytes_passed);
        match self.file.append(src) {
            Ok(offset) => {
                assert_eq!(offset, at as u64);
                self.model.write(at, len, self.stamp);
            }
            Err(error) => {
                let part = matches!(&error, Error::Io { source, .. }
                    if source.kind() == std::io::ErrorKind::WriteZero);
                assert!(part || error.errno() == libc::EIO, "{error}");
                self.model.write_failed(at, len, self.stamp);
            }
        }
        self.record_bypass(at, len, before);
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Write(span) => {
                let (at, len) = place(span);
                let (src, before) = (self.content(len), self.engine.stats().bytes_passed);
                let outcome = self.file.write_at(&src, at as u64);
                self.written(at, len, outcome);
                self.record_bypass(at, len, before);
            }
            Step::DurableWrite(span) => {
                let (at, len) = place(span);
                let (src, before) = (self.content(len), self.engine.stats().bytes_passed);
                let outcome = self.file.write_at_dsync(&src, at as u64);
                let moved = self.written(at, len, outcome);
                self.record_bypass(at, len, before);
                if let Some(moved) = moved {
                    self.model.synced_range(at, at + moved);
                }
            }
            Step::Append(len) => {
                let src = self.content(len);
                self.append(&src);
            }
            Step::Log(len) => {
                // One stamp for all pieces: the model can distinguish only a limited number.
                let src = self.content(len);
                for _ in 0..LOGGED {
                    self.append(&src);
                    self.step(&Step::SyncData);
                }
            }
            Step::Truncate(span) => {
                let (len, _) = place(span);
                if len < self.model.len {
                    // The last page is written back, and dropped if it finds no frame.
                    self.mark_uncached(len, usize::from(len % (1 << self.case.page_shift) > 0));
                }
                match self.file.truncate(len as u64) {
                    Ok(()) => self.model.truncate(len),
                    Err(error) => self.may_fail(&error),
                }
            }
            Step::Read(span) => {
                let (at, len) = place(span);
                self.read(at, len);
            }
            Step::WriteBack => {
                let outcome = self.file.write_back();
                if self.synced(outcome) && self.case.back {
                    let image = self.device.image();
                    assert!(image.len() >= self.model.len);
                }
            }
            Step::SyncAll => {
                let outcome = self.file.sync_all();
                if self.synced(outcome) {
                    self.model.synced();
                    self.has_passed = false;
                }
            }
            Step::SyncData => {
                let outcome = self.file.sync_data();
                if self.synced(outcome) {
                    self.model.synced();
                    self.has_passed = false;
                }
            }
            Step::SyncRange(span) => {
                let (at, len) = place(span);
                let outcome = self.file.sync_range(at as u64, len as u64);
                if self.synced(outcome) {
                    self.model.synced_range(at, at + len);
                }
            }
            Step::Wait => std::thread::sleep(Duration::from_millis(6)),
            Step::Faults(on) => {
                self.sim.errors_switch().store(on, SeqCst);
            }
            Step::Crashes(seed) => self.crashes(seed),
            Step::Restart(seed) => self.restart(seed),
            Step::Reopen => self.reopen(),
        }
        self.count_failures();
        self.model.learn_len(self.file.len().unwrap());
        let stats = self.engine.stats();
        assert!(stats.memory_bytes <= self.engine.cache_bytes(), "{stats:?}");
        assert!(self.device.len() <= self.model.len_max as u64, "longer than the file");
    }

    fn written(&mut self, at: usize, len: usize, outcome: Result<usize, Error>) -> Option<usize> {
        match outcome {
            Ok(moved) => {
                self.model.write(at, moved, self.stamp);
                self.model.write_failed(at + moved, len - moved, self.stamp);
                Some(moved)
            }
            Err(error) => {
                self.may_fail(&error);
                self.model.write_failed(at, len, self.stamp);
                None
            }
        }
    }

    fn read(&mut self, at: usize, len: usize) {
        let mut bytes = vec![0xEE; len];
        let moved = self.file.read_at(&mut bytes, at as u64).unwrap();
        self.count_failures();
        self.model.learn_len(self.file.len().unwrap());
        assert_eq!(moved, len.min(self.model.len.saturating_sub(at)));
        self.model.check(at, &bytes[..moved], "read");
    }

    /// Records whether a write of these bytes left them to the device alone; `before` is the number
    /// of bytes that had bypassed the cache until then. Writes of many pages bypass it, and so do
    /// writes for which failed syncs have left no frames. Their pages are dropped, whose other
    /// bytes the device already had; in mode through, all clean pages are.
    fn record_bypass(&mut self, at: usize, len: usize, before: u64) {
        let failed = self.model.now[at..at + len].iter().any(|values| !values.is_power_of_two());
        if !self.case.back || failed || self.engine.stats().bytes_passed > before {
            self.mark_uncached(at, len);
        } else {
            self.model.passed[at..at + len].fill(false);
        }
    }

    /// Only the device has the pages of these bytes from now on.
    fn mark_uncached(&mut self, at: usize, len: usize) {
        if len > 0 {
            let page_bytes = 1usize << self.case.page_shift;
            let end = (at + len).next_multiple_of(page_bytes).min(FILE_BYTES);
            self.model.passed[at / page_bytes * page_bytes..end].fill(true);
            self.has_passed = true;
        }
    }

    fn crashes(&self, seed: u64) {
        let mut random = Random(seed);
        for _ in 0..4 {
            CUTS.fetch_add(1, Relaxed);
            self.model.check_crash(&self.device.crash(random.next()));
        }
    }

    /// Cuts the power and starts a new engine on the remaining bytes.
    fn restart(&mut self, seed: u64) {
        let left = self.device.crash(seed);
        CUTS.fetch_add(1, Relaxed);
        self.model.check_crash(&left);
        self.restart_with(&left);
        self.model = Model::new(&left);
        self.read(0, FILE_BYTES);
    }

    /// Closes all handles, and opens the file by a new engine. If a close fails, the old ones stay.
    fn reopen(&mut self) {
        let closed = self.file.write_back();
        self.count_failures();
        if !self.synced(closed) || self.model.unsettled {
            return;
        }
        let left = self.device.image();
        self.model.learn_len(left.len() as u64);
        self.model.check(0, &left, "left by the engine before");
        let was = std::mem::replace(&mut self.model, Model::new(&[]));
        self.restart_with(&left);
        // A byte with several possible values has one now.
        let now = left.iter().map(|&byte| only(byte)).chain(was.now[left.len()..].iter().copied());
        self.model = Model { now: now.collect(), ..was };
        self.model.synced();
        self.read(0, FILE_BYTES);
    }

    /// A new engine, on a file with these bytes.
    fn restart_with(&mut self, left: &[u8]) {
        let path = self.dir.path().join(self.files.to_string());
        self.files += 1;
        std::fs::write(&path, left).unwrap();
        let (engine, file) = open(self.case, &self.sim, &path);
        (self.engine, self.file) = (engine, file);
        self.has_passed = false;
    }

    /// Without faults, a sync succeeds, unless bytes without a cached copy were lost.
    fn finish(mut self) {
        self.sim.errors_switch().store(false, SeqCst);
        let synced = self.file.sync_all().or_else(|_| self.file.sync_all());
        let may_have_lost =
            (self.case.sync_k > 0 || self.device.failed_writes() > 0) && self.has_passed;
        if let Err(error) = synced {
            assert!(may_have_lost, "the last sync: {error}");
            self.may_fail(&error);
            self.file.close().expect_err("close is silent");
            return;
        }
        self.model.synced();
        self.model.learn_len(self.file.len().unwrap());
        self.read(0, FILE_BYTES);
        let stored = self.device.durable();
        assert_eq!(stored.len(), self.model.len);
        self.model.check(0, &stored, "stored");
        // The bytes of a failed durable write may be read now, and lost after a crash.
        let failed = self.device.failed_writes() > 0 && self.case.sync_k > 0;
        let image = self.device.image();
        assert!(failed || image == stored, "the device has more than it was asked for");
        assert_eq!(self.device.violations(), [""; 0]);
        self.file.close().unwrap();
    }
}

fn open(case: &Case, sim: &SimOptions, path: &PathBuf) -> (Engine, File) {
    let _watched = sim.device();
    let page_bytes = 1u64 << case.page_shift;
    let engine = Engine::builder()
        .cache_bytes(cache_for(case.cache_pages, page_bytes))
        .dirty_bytes_max(case.dirty_pages * page_bytes)
        .dirty_age_max(Duration::from_millis(case.seed % 8 + 1))
        .backend(BackendChoice::Sim(sim.clone()))
        .build()
        .unwrap();
    let mode = if case.back { WriteMode::Back } else { WriteMode::Through };
    let options: OpenOptions = read_write().write_mode(mode).page_bytes(page_bytes as u32);
    let file = engine.open(path, &options).unwrap();
    (engine, file)
}

/// Carries out a case.
fn run_case(case: &Case) {
    let mut run = Run::new(case);
    for step in &case.steps {
        run.step(step);
    }
    run.finish();
}

/// Number of power cuts that this process has checked.
static CUTS: AtomicU64 = AtomicU64::new(0);

/// Goal: bytes that a successful sync covered survive a power cut. Of later bytes any part may
/// survive, and nothing else. Failures lose no bytes that can still be synced.
/// Method: random sequences in both write modes, over a device that loses power and fails every
/// k-th write and sync; failures are turned on and off at random.
#[test]
#[cfg(not(scheduled))]
fn crashes_leave_what_was_synced() {
    let config = Config { cases: scaled(250), max_shrink_iters: 2000, ..Config::default() };
    proptest!(config, |(case in cases())| run_case(&case));
    println!("power cuts: {}", CUTS.load(Relaxed));
}

/// The same under one scheduler: `keep` chooses the steps to run; returns the number of all steps.
#[cfg(scheduled)]
pub fn run_case_with_steps(seed: u64, keep: impl Fn(usize) -> bool) -> usize {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), random);
    let mut case = cases().new_tree(&mut runner).expect("no filter").current();
    let count = case.steps.len();
    let mut numbers = 0..;
    case.steps.retain(|_| keep(numbers.next().expect("no end")));
    run_case(&case);
    count
}
