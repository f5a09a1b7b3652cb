//! Random sequences of operations against a vector of bytes, on every back end.
//!
//! Caches are a few pages, so that eviction is always under way. A failing sequence is shrunk and
//! printed, and its seed is kept in `model.proptest-regressions` beside this file, which replays it
//! first in every later run; `PROPTEST_RNG_SEED` fixes all others. `MILLPOND_TEST_SCALE` makes the
//! tests longer.

#[path = "model/case.rs"]
mod case;
mod common;

use std::io::{IoSlice, IoSliceMut};

use millpond::sim::SimOptions;
use millpond::{Advice, BackendChoice, Backing, Engine, Error, File, OpenOptions, View, WriteMode};
use proptest::prelude::*;
use proptest::test_runner::Config;

use case::{Case, Span, Step, SyncKind, cases};
use common::{builder, cache_for, has_uring, scaled, temp_dir};

/// Pages that a file of a model may have; more than fit into the cache.
const FILE_PAGES: usize = 24;
const HANDLES: usize = 3;

/// The contents of the file, and the alternatives where a write failed.
struct Model {
    bytes: Vec<u8>,
    /// Alternative values of bytes after a failed write of them.
    others: Vec<Vec<u8>>,
    /// The length, and the greatest possible length after a failed write beyond the end.
    len: usize,
    len_max: usize,
}

impl Model {
    fn new(limit: usize) -> Model {
        Model { bytes: vec![0; limit], others: vec![Vec::new(); limit], len: 0, len_max: 0 }
    }

    fn limit(&self) -> usize {
        self.bytes.len()
    }

    fn write(&mut self, at: usize, src: &[u8]) {
        if src.is_empty() {
            return;
        }
        self.bytes[at..at + src.len()].copy_from_slice(src);
        self.others[at..at + src.len()].iter_mut().for_each(Vec::clear);
        self.len = self.len.max(at + src.len());
        self.len_max = self.len_max.max(self.len);
    }

    fn write_failed(&mut self, at: usize, src: &[u8]) {
        if src.is_empty() {
            return;
        }
        for (others, &byte) in self.others[at..].iter_mut().zip(src) {
            others.push(byte);
        }
        self.len_max = self.len_max.max(at + src.len());
    }

    fn truncate(&mut self, len: usize) {
        self.bytes[len..].fill(0);
        self.others[len..].iter_mut().for_each(Vec::clear);
        (self.len, self.len_max) = (len, len);
    }

    /// Zeros in place of the present bytes, up to the end.
    fn clear(&mut self, at: usize, len: usize) {
        let end = (at + len).min(self.len);
        if at < end {
            self.bytes[at..end].fill(0);
            self.others[at..end].iter_mut().for_each(Vec::clear);
        }
    }

    fn clear_failed(&mut self, at: usize, len: usize) {
        let end = (at + len).min(self.len);
        if at < end {
            self.others[at..end].iter_mut().for_each(|others| others.push(0));
        }
    }

    fn allocate(&mut self, end: usize) {
        self.len = self.len.max(end);
        self.len_max = self.len_max.max(end);
    }

    /// Checks the length against the possible ones; it is known from now on.
    fn learn_len(&mut self, now: u64) -> usize {
        let now = now as usize;
        assert!((self.len..=self.len_max).contains(&now), "length {now}, not {}", self.len);
        self.len = now;
        now
    }

    fn check(&self, at: usize, seen: &[u8], what: &str) {
        if seen == &self.bytes[at..at + seen.len()] {
            return;
        }
        for (i, &byte) in seen.iter().enumerate() {
            let (expected, others) = (self.bytes[at + i], &self.others[at + i]);
            assert!(
                byte == expected || others.contains(&byte),
                "{what}: byte {} (of {}) is {byte:#x}, not {expected:#x} or one of {others:x?}",
                at + i,
                self.len,
            );
        }
    }
}

/// A running sequence.
struct Run<'v> {
    case: &'v Case,
    engine: Engine,
    options: OpenOptions,
    path: std::path::PathBuf,
    errors: Option<std::sync::Arc<std::sync::atomic::AtomicBool>>,
    model: Model,
    handles: [Option<File>; HANDLES],
    /// A handle that stays open, and the views taken through it with the bytes that they showed.
    viewer: Option<&'v File>,
    views: Vec<(View<'v>, Vec<u8>)>,
    stamp: u8,
}

impl<'v> Run<'v> {
    fn page_bytes(&self) -> usize {
        1 << self.case.page_shift
    }

    fn place(&self, span: Span) -> (usize, usize) {
        let page = self.page_bytes() as i64;
        let at = span.page as i64 * page + i64::from(span.within) * page / 256;
        let at = (at + i64::from(span.nudge)).clamp(0, self.model.limit() as i64) as usize;
        let len = (span.len as usize).min(self.case.bytes_max);
        (at, len.min(self.model.limit() - at))
    }

    fn handle(&mut self, number: usize) -> &File {
        let (engine, path, options) = (&self.engine, &self.path, &self.options);
        self.handles[number].get_or_insert_with(|| engine.open(path, options).unwrap())
    }

    /// Bytes that identify the write and the position of each.
    fn content(&mut self, at: usize, len: usize) -> Vec<u8> {
        self.stamp = self.stamp.wrapping_add(1);
        let stamp = self.stamp;
        (at..at + len).map(|i| (i / 512 + i % 7) as u8 ^ stamp.wrapping_mul(37) | 1).collect()
    }

    fn may_fail(&self, error: &Error) {
        assert!(self.errors.is_some() && error.errno() == libc::EIO, "{error}");
    }

    fn may_have_failed(&self, outcome: Result<(), Error>) {
        if let Err(error) = outcome {
            self.may_fail(&error);
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Open(number) => {
                self.handle(number);
            }
            Step::Close(number) => {
                if let Some(file) = self.handles[number].take() {
                    self.may_have_failed(file.close());
                }
            }
            Step::Read { handle, span, pieces } => self.read(handle, span, pieces),
            Step::View { handle, span } => self.view(handle, span),
            Step::Write { handle, span, pieces } => {
                let (at, len) = self.place(span);
                self.write(handle, at, len, pieces);
            }
            Step::Append { handle, len, pieces } => self.append(handle, len as usize, pieces),
            Step::Truncate { handle, span } => {
                let (at, _) = self.place(span);
                match self.handle(handle).truncate(at as u64) {
                    Ok(()) => self.model.truncate(at),
                    Err(error) => self.may_fail(&error),
                }
            }
            Step::Punch { handle, span } => {
                let (at, len) = self.place(span);
                let outcome = self.handle(handle).punch_hole(at as u64, len as u64);
                self.cleared(outcome, at, len);
            }
            Step::Zero { handle, span } => {
                let (at, len) = self.place(span);
                let outcome = self.handle(handle).zero_range(at as u64, len as u64);
                self.cleared(outcome, at, len);
            }
            Step::Allocate { handle, span } => {
                let (at, len) = self.place(span);
                match self.handle(handle).allocate(at as u64, len as u64) {
                    Ok(()) => self.model.allocate(at + len),
                    Err(Error::InvalidInput { .. }) if len == 0 => {}
                    Err(error) => {
                        self.may_fail(&error);
                        self.model.len_max = self.model.len_max.max(at + len);
                    }
                }
            }
            Step::Seek { handle, span } => {
                let (at, _) = self.place(span);
                self.seek(handle, at);
            }
            Step::Invalidate { handle, span } => {
                let (at, len) = self.place(span);
                let outcome = self.handle(handle).invalidate(at as u64, len as u64);
                self.may_have_failed(outcome);
            }
            Step::Advise { handle, span, advice } => {
                let (at, len) = self.place(span);
                let outcome = self.handle(handle).advise(at as u64, len as u64, advice);
                self.may_have_failed(outcome);
            }
            Step::WriteBack { handle } => {
                let outcome = self.handle(handle).write_back();
                self.may_have_failed(outcome);
            }
            Step::Sync { handle, kind, span } => {
                let (at, len) = self.place(span);
                let file = self.handle(handle);
                let outcome = match kind {
                    SyncKind::All => file.sync_all(),
                    SyncKind::Data => file.sync_data(),
                    SyncKind::Range => file.sync_range(at as u64, len as u64),
                };
                self.may_have_failed(outcome);
            }
            Step::WriteDurably { handle, span } => {
                let (at, len) = self.place(span);
                let src = self.content(at, len);
                let outcome = self.handle(handle).write_at_dsync(&src, at as u64);
                self.written(at, &src, outcome);
            }
            Step::HitPath(on) => self.engine.set_hit_path(on),
            Step::DropViews => self.check_views(),
            Step::Errors(on) => {
                if let Some(errors) = &self.errors {
                    errors.store(on, std::sync::atomic::Ordering::Relaxed);
                }
            }
        }
        let now = self.handle(0).len().unwrap();
        self.model.learn_len(now);
        let stats = self.engine.stats();
        assert!(stats.memory_bytes <= self.engine.cache_bytes(), "{stats:?}");
    }

    fn cleared(&mut self, outcome: Result<(), Error>, at: usize, len: usize) {
        match outcome {
            Ok(()) => self.model.clear(at, len),
            Err(Error::InvalidInput { .. }) if len == 0 => {}
            Err(error) => {
                self.may_fail(&error);
                self.model.clear_failed(at, len);
            }
        }
    }

    /// Holes must read as zeros.
    fn seek(&mut self, handle: usize, at: usize) {
        let file = self.handle(handle);
        let (data, hole) = (file.seek_data(at as u64), file.seek_hole(at as u64));
        let len = self.model.len;
        match data {
            Ok(None) if at >= len => {}
            Ok(found) => {
                let data = found.map_or(len, |data| data as usize);
                assert!((at..=len).contains(&data) && found != Some(len as u64), "{found:?}");
                self.model.check(at, &vec![0; data - at], "before data");
            }
            Err(error) => self.may_fail(&error),
        }
        match hole {
            Ok(None) => assert!(at >= len),
            Ok(Some(hole)) => {
                let hole = hole as usize;
                assert!((at..=len).contains(&hole) && at < len, "{hole}");
                self.model.check(hole, &[0][..usize::from(hole < len)], "a hole");
            }
            Err(error) => self.may_fail(&error),
        }
    }

    fn read(&mut self, handle: usize, span: Span, pieces: usize) {
        let (at, len) = self.place(span);
        let mut bytes = vec![0xEE; len];
        let file = self.handle(handle);
        let outcome = if pieces == 1 {
            file.read_at(&mut bytes, at as u64)
        } else {
            let piece = len.div_ceil(pieces).max(1);
            let mut slices: Vec<_> = bytes.chunks_mut(piece).map(IoSliceMut::new).collect();
            slices.insert(slices.len() / 2, IoSliceMut::new(&mut []));
            file.read_vectored_at(&mut slices, at as u64)
        };
        let now = file.len().unwrap();
        let end = self.model.learn_len(now);
        match outcome {
            Ok(moved) => {
                let whole = len.min(end.saturating_sub(at));
                // The part before the bytes that the device failed to read.
                let is_part = self.errors.is_some() && moved > 0 && moved < whole;
                assert!(moved == whole || is_part, "read of {len} at {at}: {moved}");
                self.model.check(at, &bytes[..moved], "read");
                let is_left = |byte: &u8| *byte == 0xEE || (is_part && *byte == 0);
                assert!(bytes[moved..].iter().all(is_left), "beyond the end");
            }
            Err(error) => self.may_fail(&error),
        }
    }

    fn view(&mut self, handle: usize, span: Span) {
        let (at, len) = self.place(span);
        let page_end = (at / self.page_bytes() + 1) * self.page_bytes();
        let expected = len.min(page_end - at).min(self.model.len.saturating_sub(at));
        if let Some(viewer) = self.viewer {
            match viewer.view(at as u64, len) {
                Ok(view) => {
                    assert_eq!(view.len(), expected);
                    self.model.check(at, &view, "view");
                    let bytes = view.to_vec();
                    self.views.push((view, bytes));
                }
                Err(Error::NoBuffers { .. }) => self.check_views(),
                Err(error) => self.may_fail(&error),
            }
            return;
        }
        let room = 2 * self.page_bytes() as u64 + 20000 < self.engine.cache_bytes();
        let file = self.handle(handle);
        let mut outcome = file.view(at as u64, len).map(|view| view.to_vec());
        // Read-ahead may have all frames in flight for a moment.
        for _ in 0..1000 {
            if !matches!(outcome, Err(Error::NoBuffers { .. })) || !room {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
            outcome = file.view(at as u64, len).map(|view| view.to_vec());
        }
        match outcome {
            Ok(bytes) => {
                assert_eq!(bytes.len(), expected);
                self.model.check(at, &bytes, "view");
            }
            Err(Error::NoBuffers { .. }) => assert!(!room, "no view, though none pins anything"),
            Err(error) => self.may_fail(&error),
        }
    }

    fn check_views(&mut self) {
        for (view, bytes) in self.views.drain(..) {
            assert!(*view == *bytes, "a view changed");
        }
    }

    fn write(&mut self, handle: usize, at: usize, len: usize, pieces: usize) {
        let src = self.content(at, len);
        let file = self.handle(handle);
        let outcome = if pieces == 1 {
            file.write_at(&src, at as u64)
        } else {
            let piece = len.div_ceil(pieces).max(1);
            let mut slices: Vec<_> = src.chunks(piece).map(IoSlice::new).collect();
            slices.insert(slices.len() / 2, IoSlice::new(&[]));
            file.write_vectored_at(&slices, at as u64)
        };
        self.written(at, &src, outcome);
    }

    fn written(&mut self, at: usize, src: &[u8], outcome: Result<usize, Error>) {
        let len = src.len();
        match outcome {
            Ok(moved) => {
                assert!(moved == len || self.errors.is_some() && moved > 0 && moved < len);
                self.model.write(at, &src[..moved]);
                self.model.write_failed(at + moved, &src[moved..]);
            }
            Err(error) => {
                self.may_fail(&error);
                self.model.write_failed(at, src);
            }
        }
    }

    fn append(&mut self, handle: usize, len: usize, pieces: usize) {
        let now = self.handle(handle).len().unwrap();
        let end = self.model.learn_len(now);
        let len = len.min(self.model.limit() - end);
        let src = self.content(end, len);
        let piece = len.div_ceil(pieces).max(1);
        let slices: Vec<_> = src.chunks(piece).map(IoSlice::new).collect();
        match self.handle(handle).append_vectored(&slices) {
            Ok(at) => {
                assert_eq!(at as usize, end);
                self.model.write(end, &src);
            }
            Err(Error::Io { offset, len: moved, ref source, .. })
                if source.kind() == std::io::ErrorKind::WriteZero =>
            {
                assert!(self.errors.is_some() && offset as usize == end && moved < len as u64);
                self.model.write(end, &src[..moved as usize]);
                self.model.write_failed(end + moved as usize, &src[moved as usize..]);
            }
            Err(error) => {
                self.may_fail(&error);
                self.model.write_failed(end, &src);
            }
        }
    }

    /// Reads the whole file twice through the engine, the second time from below.
    fn finish(&mut self) {
        self.check_views();
        if let Some(errors) = &self.errors {
            errors.store(false, std::sync::atomic::Ordering::Relaxed);
        }
        // Bytes of which there is no copy may be in doubt, as a durable write failed.
        let outcome = self.handle(0).sync_all();
        self.may_have_failed(outcome);
        let limit = self.model.limit();
        let mut first = vec![0; limit + 1];
        let file = self.handle(0);
        let moved = file.read_at(&mut first, 0).unwrap();
        let len = file.len().unwrap() as usize;
        assert_eq!(moved, len);
        let now = self.model.learn_len(len as u64);
        self.model.check(0, &first[..now], "in the end");
        let file = self.handle(0);
        file.invalidate(0, limit as u64).unwrap();
        let mut second = vec![0; limit + 1];
        let moved = file.read_at(&mut second, 0).unwrap();
        let now = file.len().unwrap();
        let now = self.model.learn_len(now);
        assert_eq!(moved, now);
        self.model.check(0, &second[..now], "after all was dropped");
        let file = self.handle(0);
        file.invalidate(0, limit as u64).unwrap();
        assert_eq!(file.read_at(&mut first, 0).unwrap(), now);
        assert!(first[..now] == second[..now], "stored bytes do not change by themselves");
    }
}

fn run(case: &Case, backend: BackendChoice, errors: Option<&SimOptions>) {
    let dir = temp_dir();
    let path = dir.path().join("file");
    let page_bytes = 1usize << case.page_shift;
    let cache_bytes = match case.cache_pages {
        0 => 16384,
        pages => cache_for(pages, page_bytes as u64),
    };
    let in_memory = matches!(backend, BackendChoice::Memory | BackendChoice::Sim(_));
    let engine = builder(cache_bytes, backend)
        .hit_path(case.hit_path)
        .readahead_bytes_max(if case.readahead { 1 << 20 } else { 0 })
        .dirty_bytes_max(case.dirty_pages * page_bytes as u64)
        .build()
        .unwrap();
    let backing = match case.direct {
        true if case.readahead => Backing::DirectInPlace,
        true => Backing::Direct,
        false if !case.back && case.page_shift == 12 => Backing::Mapped,
        false => Backing::Buffered,
    };
    let mode = if case.back { WriteMode::Back } else { WriteMode::Through };
    let options = common::read_write().page_bytes(page_bytes as u32).backing(backing);
    let options = options.write_mode(mode);
    // Contents in memory are lost with the last handle.
    let viewer = (in_memory || case.keep_views).then(|| engine.open(&path, &options).unwrap());
    let mut run = Run {
        case,
        engine,
        options,
        path: path.clone(),
        errors: errors.map(SimOptions::errors_switch),
        model: Model::new(page_bytes * FILE_PAGES),
        handles: Default::default(),
        viewer: viewer.as_ref().filter(|_| case.keep_views),
        views: Vec::new(),
        stamp: 0,
    };
    for step in &case.steps {
        run.step(step);
    }
    run.finish();
    if !in_memory {
        let stored = std::fs::read(&path).unwrap();
        assert!(stored == run.model.bytes[..run.model.len], "the file differs from the model");
    }
}

fn config(cases: u32) -> Config {
    Config { cases: scaled(cases), max_shrink_iters: 2000, ..Config::default() }
}

fn sim(case: &Case) -> SimOptions {
    SimOptions::new(case.seed)
        .delay_us_max(if case.delays { 30 } else { 0 })
        .short_per_mille(case.short_per_mille)
}

/// Goal: a program reads its own writes through any of its handles of one file, and the kernel has
/// the same bytes at the end.
/// Method: random sequences over io_uring, caches from 3 pages up.
#[test]
fn uring_agrees_with_the_model() {
    if !has_uring() {
        return;
    }
    proptest!(config(60), |(case in cases())| run(&case, BackendChoice::Uring, None));
}

/// As above, over plain system calls.
#[test]
fn threads_agree_with_the_model() {
    proptest!(config(60), |(case in cases())| run(&case, BackendChoice::Threads, None));
}

/// As above, over memory: no device takes part, so more sequences in the same time.
#[test]
fn memory_agrees_with_the_model() {
    proptest!(config(150), |(case in cases())| run(&case, BackendChoice::Memory, None));
}

/// As above, over a device that is slow, unordered and moves less than it was asked for.
#[test]
fn sim_agrees_with_the_model() {
    proptest!(config(100), |(case in cases())| {
        run(&case, BackendChoice::Sim(sim(&case)), None);
    });
}

/// Goal: an error of the device affects the bytes of its operation only, and no earlier
/// acknowledged bytes. After the errors all bytes can be read.
/// Method: the same sequences, with errors after any part of a transfer, turned on and off at
/// random. A byte of a failed write may have its old or its new value.
#[test]
fn errors_leave_what_was_acknowledged() {
    proptest!(config(100), |(case in cases(), per_mille in 1u64..400)| {
        let sim = sim(&case).error_per_mille(per_mille);
        run(&case, BackendChoice::Sim(sim.clone()), Some(&sim));
    });
}

/// The greatest number of steps on one engine, in long sequences.
const STEPS_LONG: usize = 20_000;

/// As long as `fsx` runs: MILLPOND_OPERATIONS on each back end, in sequences of many thousand on one engine each.
/// MILLPOND_TEST_SEED: where they begin.
fn long(name: &str, backend: impl Fn(&Case) -> BackendChoice) {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

    let operations = std::env::var("MILLPOND_OPERATIONS").ok().and_then(|count| count.parse().ok());
    let operations = operations.unwrap_or(scaled(STEPS_LONG as u32) as usize);
    let mut random = common::Random::from_environment();
    let (cases, steps) = (cases(), case::steps());
    let mut done = 0;
    while done < operations {
        let seed = random.0;
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&random.next().to_le_bytes());
        let source = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(Config::default(), source);
        let mut some = || steps.new_tree(&mut runner).unwrap().current();
        let all = (0..STEPS_LONG.min(operations - done)).map(|_| some()).collect();
        let mut case = cases.new_tree(&mut runner).unwrap().current();
        // Small transfers, so that operations take most of the time.
        (case.page_shift, case.bytes_max, case.steps) = (case.page_shift.min(13), 16 << 10, all);
        case.delays &= seed.is_multiple_of(8);
        let backend = backend(&case);
        let act = std::panic::AssertUnwindSafe(|| run(&case, backend, None));
        let ended = std::panic::catch_unwind(act);
        if let Err(panic) = ended {
            println!("{name}: MILLPOND_TEST_SEED={seed} begins with it");
            std::panic::resume_unwind(panic);
        }
        done += case.steps.len();
    }
    println!("operations on {name}: {done}, 0 mismatches");
}

/// Goal: as above, for a file that is changed for a long time.
/// Method: thousands of steps on one engine and one file, more of them with MILLPOND_OPERATIONS.
#[test]
fn long_sequences_over_uring() {
    if has_uring() {
        long("uring", |_| BackendChoice::Uring);
    }
}

#[test]
fn long_sequences_over_threads() {
    long("threads", |_| BackendChoice::Threads);
}

#[test]
fn long_sequences_over_memory() {
    long("memory", |_| BackendChoice::Memory);
}

#[test]
fn long_sequences_over_sim() {
    long("sim", |case| BackendChoice::Sim(sim(case)));
}
