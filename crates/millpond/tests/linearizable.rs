//! Histories of a few threads on one file, recorded and explained one operation at a time.
//!
//! What `stress` and `coherence` look for is what their data can tell; here every outcome is held
//! against a model of the file (`common/linear.rs`), in some order that respects who ended before
//! whom: so also lengths, offsets of appends, what lies beyond a cut and comes back with the next
//! extension, views, and reads that end with the file.
//!
//! Histories are short, so that they can be explained, and many: by default some hundreds of each
//! back end, more with `MILLPOND_TEST_SCALE`. The seed says which operations there are; how they
//! meet is up to the machine, so a failure comes back by repetition, not by its seed alone.

mod common;
#[path = "common/linear.rs"]
mod linear;

use std::io::{IoSlice, IoSliceMut};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use millpond::{
    Advice, BackendChoice, Backing, Engine, Error, File, OpenOptions, SimOptions, WriteMode,
};

use common::{Random, back_ends, builder, cache_for, read_write, scaled, temp_dir, within};
use linear::{Call, History, Op, Outcome, TORN, ZERO, stamp};

const THREADS: usize = 4;
const HANDLES: usize = 3;

/// An operation to come: what the model knows of it, and how to call it.
#[derive(Debug, Clone, Copy)]
struct Step {
    op: Op,
    how: How,
    handle: usize,
    /// Time to spend before.
    spins: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Plain,
    Vectored,
    View,
    Dsync,
    Zero,
    WriteBack,
    Sync,
    DontNeed,
    WillNeed,
    Invalidate,
}

impl How {
    fn name(self, op: Op) -> &'static str {
        match (self, op) {
            (How::View, _) => "view",
            (How::Vectored, Op::Read { .. }) => "read_vectored_at",
            (_, Op::Read { .. }) => "read_at",
            (How::Vectored, Op::Write { .. }) => "write_vectored_at",
            (How::Dsync, _) => "write_at_dsync",
            (_, Op::Write { .. }) => "write_at",
            (How::Vectored, Op::Append { .. }) => "append_vectored",
            (_, Op::Append { .. }) => "append",
            (_, Op::Truncate { .. }) => "truncate",
            (How::Zero, _) => "zero_range",
            (_, Op::Clear { .. }) => "punch_hole",
            (_, Op::Allocate { .. }) => "allocate",
            (_, Op::Len) => "len",
            (How::WriteBack, _) => "write_back",
            (How::Sync, _) => "sync_data",
            (How::DontNeed, _) => "advise DontNeed",
            (How::WillNeed, _) => "advise WillNeed",
            (_, Op::Nothing | Op::Adopt) => "invalidate",
        }
    }
}

/// One history to be made.
struct Plan {
    page_bytes: usize,
    cell_bytes: usize,
    cells: usize,
    threads: Vec<Vec<Step>>,
}

impl Plan {
    fn new(random: &mut Random, page_bytes: usize) -> Plan {
        // Of a page, or with no relation to pages.
        let eighths = [1, 1, 2, 4, 8][random.below(5) as usize];
        let odd = if random.chance(400) { random.below(200) as usize + 1 } else { 0 };
        let cell_bytes = page_bytes / 8 * eighths + odd;
        let most = 6 * page_bytes / cell_bytes;
        let cells = 1 + random.below(most as u64) as usize;
        let handles = 1 + random.below(HANDLES as u64) as usize;
        let mut value = 1;
        // Many histories are about few kinds of operations, on few pages.
        let kinds = if random.chance(500) {
            random.next() | random.next()
        } else {
            random.next() & random.next() & random.next()
        };
        let place = random.below(cells as u64) as usize;
        let hot = random.chance(500).then_some((place, 1 + page_bytes / cell_bytes));
        // And some are short reads across two pages, or the end, and writes of the same.
        let edge = random.chance(400).then(|| match (page_bytes / cell_bytes).max(1) {
            pages if random.chance(500) && cells > pages => cells / pages * pages,
            _ => cells,
        });
        let kinds = match edge {
            Some(edge) if edge == cells => 1 << 2 | 1 << 3,
            Some(_) => 0,
            None => kinds,
        };
        // Some have operations on all of the file, which is more than some caches hold.
        let longest = if random.chance(200) { most } else { (3 * page_bytes / cell_bytes).max(1) };
        let steps = |random: &mut Random| Step {
            op: Op::Nothing,
            how: How::Plain,
            handle: random.below(handles as u64) as usize,
            spins: match random.below(10) {
                0..=4 => 0,
                5..=8 => random.below(100),
                _ => random.below(3000),
            },
        };
        let mut threads = Vec::new();
        for _ in 0..THREADS - random.below(2) as usize {
            let count = 4 + random.below(5);
            let mut all = Vec::new();
            while all.len() < count as usize {
                let mut step = steps(random);
                (step.op, step.how) =
                    some_op(random, page_bytes, cell_bytes, [most, longest], hot, kinds);
                match (edge, &mut step.op) {
                    (Some(edge), Op::Read { at, len, limit_bytes }) => {
                        *at = edge.saturating_sub(1 + random.below(2) as usize);
                        *len = 2 + random.below(2) as usize;
                        *limit_bytes = *len * cell_bytes;
                    }
                    (Some(edge), Op::Write { at, len, .. }) => {
                        *at = edge.saturating_sub(1 + random.below(2) as usize);
                        *len = 2 + random.below(page_bytes as u64 / cell_bytes as u64) as usize;
                    }
                    (Some(edge), Op::Truncate { len }) => {
                        *len = edge.saturating_sub(1) + random.below(3) as usize;
                    }
                    _ => {}
                }
                if let Op::Write { value: new, .. } | Op::Append { value: new, .. } = &mut step.op {
                    value += 1;
                    *new = value;
                }
                all.push(step);
            }
            threads.push(all);
        }
        Plan { page_bytes, cell_bytes, cells, threads }
    }
}

/// Some operation of at most `longest` cells on a file of at most `most`; `kinds` has a bit for each kind there may be.
fn some_op(
    random: &mut Random,
    page_bytes: usize,
    cell_bytes: usize,
    [most, longest]: [usize; 2],
    hot: Option<(usize, usize)>,
    kinds: u64,
) -> (Op, How) {
    let at = match hot {
        Some((place, around)) => place + random.below(around as u64) as usize,
        None => random.below(most as u64) as usize,
    };
    let at = at.min(most - 1);
    let len = 1 + random.below((most - at).min(longest) as u64) as usize;
    let value = 0;
    let how = if random.chance(300) { How::Vectored } else { How::Plain };
    let limit_bytes = len * cell_bytes;
    loop {
        let kind = random.below(100);
        let (bit, chosen) = match kind {
            0..=25 => (63, (Op::Read { at, len, limit_bytes }, how)),
            26..=31 => {
                let rest = page_bytes - at * cell_bytes % page_bytes;
                (0, (Op::Read { at, len, limit_bytes: limit_bytes.min(rest) }, How::View))
            }
            32..=52 => (62, (Op::Write { at, len, value }, how)),
            53..=54 => (1, (Op::Write { at, len, value }, How::Dsync)),
            55..=61 => (2, (Op::Append { len: len.min(page_bytes / cell_bytes + 1), value }, how)),
            62..=68 => (3, (Op::Truncate { len: at }, How::Plain)),
            69..=72 => (4, (Op::Clear { at, len }, How::Plain)),
            73..=76 => (5, (Op::Clear { at, len }, How::Zero)),
            77..=79 => (6, (Op::Allocate { at, len }, How::Plain)),
            80..=84 => (7, (Op::Len, How::Plain)),
            85..=87 => (8, (Op::Nothing, How::WriteBack)),
            88..=89 => (9, (Op::Nothing, How::Sync)),
            90..=94 => (10, (Op::Nothing, How::DontNeed)),
            95..=97 => (11, (Op::Nothing, How::WillNeed)),
            _ => (12, (Op::Adopt, How::Invalidate)),
        };
        if bit >= 62 || kinds & (1 << bit) != 0 {
            return chosen;
        }
    }
}

/// A cell's bytes.
fn cell(content: u16, cell_bytes: usize) -> Vec<u8> {
    let mut bytes = content.to_le_bytes().repeat(cell_bytes.div_ceil(2));
    bytes.truncate(cell_bytes);
    bytes
}

/// The bytes of cells that hold parts of what operation `value` writes.
fn content(value: u8, len: usize, cell_bytes: usize) -> Vec<u8> {
    (0..len).map(|part| cell(stamp(value, part), cell_bytes)).collect::<Vec<_>>().concat()
}

/// The cells that bytes are; the last one may be cut off, and is left out if only a byte is there.
fn cells_of(bytes: &[u8], cell_bytes: usize) -> Vec<u16> {
    let whole = bytes.chunks(cell_bytes).filter(|bytes| bytes.len() > 1);
    let one = |bytes: &[u8]| {
        let first = u16::from_le_bytes([bytes[0], bytes[1]]);
        if *bytes == cell(first, bytes.len()) { first } else { TORN }
    };
    whole.map(one).collect()
}

/// A read beside which there is nothing else, as reads of its parts, so that it does not make one
/// object of all cells.
fn pieces(call: &Call, cell_bytes: usize) -> Vec<Call> {
    let Outcome::Read { bytes, cells } = &call.outcome else { return vec![call.clone()] };
    let count = cells.len().div_ceil(16).max(1);
    let piece = |number: usize| {
        let (at, last) = (number * count, (number + 1) * count >= cells.len());
        // The last one shows where the file ends.
        let len = if last { 255 - at } else { count };
        let seen = bytes.saturating_sub(at * cell_bytes).min(len * cell_bytes);
        let cells = cells[at..].iter().copied().take(len).collect();
        Call {
            op: Op::Read { at, len, limit_bytes: len * cell_bytes },
            outcome: Outcome::Read { bytes: seen, cells },
            ..call.clone()
        }
    };
    (0..cells.len().div_ceil(count).max(1)).map(piece).collect()
}

/// Waits until another thread gets here, but not for long: operations take little time, and threads
/// of a busy machine seldom run at once by themselves.
fn meet(met: &AtomicUsize) {
    let mine = met.fetch_add(1, SeqCst) + 1;
    for _ in 0..1000 {
        if met.load(SeqCst) != mine {
            return;
        }
        std::hint::spin_loop();
    }
}

/// An operation, and what is left to do where it failed.
fn with_growth(call: Call, cell_bytes: usize) -> impl Iterator<Item = Call> {
    let failed = match (call.op, &call.outcome) {
        (Op::Write { .. } | Op::Append { .. } | Op::Allocate { .. }, Outcome::Failed) => true,
        (Op::Write { len, .. }, Outcome::Wrote { bytes, .. }) => *bytes < len * cell_bytes,
        (Op::Append { len, .. }, Outcome::Wrote { bytes, .. }) => *bytes < len * cell_bytes,
        _ => false,
    };
    let grows = Call { op: Op::Adopt, outcome: Outcome::Done, how: "its length", ..call.clone() };
    [call].into_iter().chain(failed.then_some(grows))
}

/// What the histories of one engine have in common.
struct Setup {
    engine: Engine,
    options: OpenOptions,
    /// Of the second handle and those behind it, where they differ.
    others: OpenOptions,
    page_bytes: usize,
    /// Whether operations may fail; on while they are recorded.
    errors: Option<std::sync::Arc<std::sync::atomic::AtomicBool>>,
    name: String,
}

impl Setup {
    fn new(
        random: &mut Random,
        name: &str,
        backend: &BackendChoice,
        sim: Option<&SimOptions>,
    ) -> Setup {
        let page_bytes = if random.chance(500) { 4096 } else { 16384 };
        let cache_pages = [3, 4, 6, 10, 20][random.below(5) as usize];
        let direct = random.chance(500);
        let back = random.chance(600);
        let mut builder = builder(cache_for(cache_pages, page_bytes as u64), backend.clone())
            .hit_path(random.chance(900));
        if random.chance(500) {
            builder = builder.readahead_bytes_max(0);
        }
        if random.chance(300) {
            builder = builder.dirty_age_max(Duration::from_millis(1));
        }
        let options = read_write()
            .page_bytes(page_bytes as u32)
            .backing(if direct { Backing::Direct } else { Backing::Buffered })
            .write_mode(if back { WriteMode::Back } else { WriteMode::Through });
        // Whose reads and writes go past the cache.
        let others_direct = random.chance(300);
        Setup {
            engine: builder.build().unwrap(),
            others: options.clone().direct(others_direct).bounce(others_direct),
            options,
            page_bytes,
            errors: sim.map(SimOptions::errors_switch),
            name: format!(
                "{name}, pages of {page_bytes}, cache of {cache_pages}, {}, {}{}",
                if direct { "direct" } else { "buffered" },
                if back { "back" } else { "through" },
                if others_direct { ", direct handles" } else { "" },
            ),
        }
    }

    fn errors(&self, on: bool) {
        if let Some(errors) = &self.errors {
            errors.store(on, SeqCst);
        }
    }

    /// Carries out `plans`, one after the other, on a file. The threads stay the same, as starting
    /// one takes longer than most operations.
    fn record(&self, plans: &[Plan], path: &Path) -> Vec<History> {
        self.errors(false);
        let open = |options| self.engine.open(path, options).unwrap();
        let options = |number| if number == 0 { &self.options } else { &self.others };
        let handles: Vec<File> = (0..HANDLES).map(|number| open(options(number))).collect();
        let (clock, met, gathered) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        let gather = |time: usize| {
            gathered.fetch_add(1, SeqCst);
            for turn in 1.. {
                if gathered.load(SeqCst) >= THREADS * time {
                    return;
                }
                if turn % 200 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
            }
        };
        let run = |number: usize| {
            let mut all = Vec::new();
            for (round, plan) in plans.iter().enumerate() {
                let mut calls = Vec::new();
                if number == 0 {
                    self.errors(false);
                    let initial = content(1, plan.cells, plan.cell_bytes);
                    handles[0].truncate(0).unwrap();
                    handles[0].write_all_at(&initial, 0).unwrap();
                    self.errors(true);
                }
                gather(2 * round + 1);
                for step in plan.threads.get(number).into_iter().flatten() {
                    meet(&met);
                    let call = self.call(plan, step, number, &handles, &clock);
                    calls.extend(with_growth(call, plan.cell_bytes));
                }
                gather(2 * round + 2);
                if number == 0 {
                    self.errors(false);
                    calls.extend(self.look(plan, &handles, &clock));
                }
                all.push(calls);
            }
            all
        };
        let mut all: Vec<_> = std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> =
                (0..THREADS).map(|number| scope.spawn(move || run(number).into_iter())).collect();
            threads.into_iter().map(|thread| thread.join().expect("a step")).collect()
        });
        let history = |plan: &Plan| {
            let parts = all.iter_mut().flat_map(|calls| calls.next().expect("one for each plan"));
            let mut calls: Vec<Call> = parts.collect();
            calls.sort_by_key(|call| call.invoked);
            let initial = (0..plan.cells).map(|part| stamp(1, part)).collect();
            History { cell_bytes: plan.cell_bytes, initial, calls }
        };
        plans.iter().map(history).collect()
    }

    /// All of the file, as it is cached and as it is stored.
    fn look(&self, plan: &Plan, handles: &[File], clock: &AtomicU64) -> Vec<Call> {
        let all = Op::Read { at: 0, len: 255, limit_bytes: 255 * plan.cell_bytes };
        let last = [(all, How::Plain), (Op::Adopt, How::Invalidate), (all, How::Plain)];
        let look = |(op, how)| {
            let step = Step { op, how, handle: 0, spins: 0 };
            pieces(&self.call(plan, &step, THREADS, handles, clock), plan.cell_bytes)
        };
        last.into_iter().flat_map(look).collect()
    }

    fn call(
        &self,
        plan: &Plan,
        step: &Step,
        thread: usize,
        handles: &[File],
        clock: &AtomicU64,
    ) -> Call {
        for _ in 0..step.spins {
            std::hint::spin_loop();
        }
        let file = &handles[step.handle];
        // Buffers are made before: the time between both readings of the clock is the operation's.
        let cell_bytes = plan.cell_bytes;
        let mut bytes = match step.op {
            Op::Write { len, value, .. } | Op::Append { len, value } => {
                content(value, len, cell_bytes)
            }
            Op::Read { limit_bytes, .. } => vec![0xEE; limit_bytes],
            _ => Vec::new(),
        };
        let invoked = clock.fetch_add(1, SeqCst);
        let outcome = act(file, step, cell_bytes, &mut bytes);
        let returned = clock.fetch_add(1, SeqCst);
        let mut op = match step.how {
            How::Invalidate if self.errors.is_none() => Op::Nothing,
            _ => step.op,
        };
        let outcome = match outcome {
            Ok(Outcome::Read { bytes: moved, .. }) => {
                let cells = cells_of(&bytes[..moved], cell_bytes);
                Outcome::Read { bytes: moved, cells }
            }
            Ok(outcome) => {
                if let (Outcome::Wrote { bytes: moved, .. }, None) = (&outcome, &self.errors) {
                    assert_eq!(*moved, bytes.len(), "{step:?}: a short write, without errors");
                }
                outcome
            }
            Err(error) => {
                op = self.failed(op, step, &error);
                Outcome::Failed
            }
        };
        Call { thread, invoked, returned, op, outcome, how: step.how.name(step.op) }
    }

    /// What an operation that failed stands for.
    fn failed(&self, op: Op, step: &Step, error: &Error) -> Op {
        match error {
            // Views of others had all the frames.
            Error::NoBuffers { .. } if step.how == How::View => Op::Nothing,
            // The file system can't, and said so before anything changed.
            _ if error.errno() == libc::EOPNOTSUPP => Op::Nothing,
            Error::InvalidInput { .. } | Error::InvalidRange { .. } => panic!("{step:?}: {error}"),
            _ if self.errors.is_some() => op,
            _ => panic!("{step:?}: {error}"),
        }
    }

    /// Makes histories and has them explained. Returns the number of operations.
    fn run(&self, random: &mut Random, histories: u32, dir: &Path) -> usize {
        let seeds: Vec<u64> = (0..histories).map(|_| random.next()).collect();
        let plan = |&seed: &u64| Plan::new(&mut Random(seed), self.page_bytes);
        let plans: Vec<Plan> = seeds.iter().map(plan).collect();
        let path = dir.join("file");
        let recorded = self.record(&plans, &path);
        let _ = std::fs::remove_file(&path);
        for ((history, plan), &seed) in recorded.iter().zip(&plans).zip(&seeds) {
            if let Some(calls) = history.violation() {
                explain(&self.name, plan, seed, history, &calls);
            }
        }
        recorded.iter().map(|history| history.calls.len()).sum()
    }
}

fn explain(name: &str, plan: &Plan, seed: u64, history: &History, calls: &[Call]) -> ! {
    println!("the whole history:");
    history.calls.iter().for_each(|call| println!("  {call}"));
    println!("what no order explains of it:");
    calls.iter().for_each(|call| println!("  {call}"));
    panic!(
        "not linearizable: {name}; {} cells of {} bytes at first, pages of {}; seed {seed}",
        plan.cells, plan.cell_bytes, plan.page_bytes
    );
}

/// Calls the engine. What was read is in `bytes`.
fn act(file: &File, step: &Step, cell_bytes: usize, bytes: &mut [u8]) -> Result<Outcome, Error> {
    let offset = |at: usize| (at * cell_bytes) as u64;
    let cut = bytes.len() / 3;
    let wrote = |at: u64, bytes: usize| Outcome::Wrote { at: at as usize, bytes };
    let read = |bytes: usize| Outcome::Read { bytes, cells: Vec::new() };
    match (step.op, step.how) {
        (Op::Read { at, len, .. }, How::View) => {
            let view = file.view(offset(at), len * cell_bytes)?;
            // A view is a snapshot, so it may as well be looked at later.
            if step.spins.is_multiple_of(2) {
                std::thread::yield_now();
            }
            let moved = view.len();
            bytes[..moved].copy_from_slice(&view);
            Ok(read(moved))
        }
        (Op::Read { at, .. }, How::Vectored) => {
            let (head, tail) = bytes.split_at_mut(cut);
            let mut slices = [IoSliceMut::new(head), IoSliceMut::new(tail)];
            file.read_vectored_at(&mut slices, offset(at)).map(read)
        }
        (Op::Read { at, .. }, _) => file.read_at(bytes, offset(at)).map(read),
        (Op::Write { at, .. }, How::Vectored) => {
            let slices = [IoSlice::new(&bytes[..cut]), IoSlice::new(&bytes[cut..])];
            file.write_vectored_at(&slices, offset(at)).map(|moved| wrote(offset(at), moved))
        }
        (Op::Write { at, .. }, How::Dsync) => {
            file.write_at_dsync(bytes, offset(at)).map(|moved| wrote(offset(at), moved))
        }
        (Op::Write { at, .. }, _) => {
            file.write_at(bytes, offset(at)).map(|moved| wrote(offset(at), moved))
        }
        (Op::Append { .. }, how) => {
            let cut = if how == How::Vectored { cut } else { 0 };
            let slices = [IoSlice::new(&bytes[..cut]), IoSlice::new(&bytes[cut..])];
            match file.append_vectored(&slices) {
                Err(Error::Io { offset, len, ref source, .. })
                    if source.kind() == std::io::ErrorKind::WriteZero =>
                {
                    Ok(wrote(offset, len as usize))
                }
                outcome => outcome.map(|at| wrote(at, bytes.len())),
            }
        }
        (Op::Truncate { len }, _) => file.truncate(offset(len)).map(|()| Outcome::Done),
        (Op::Clear { at, len }, How::Zero) => {
            file.zero_range(offset(at), offset(len)).map(|()| Outcome::Done)
        }
        (Op::Clear { at, len }, _) => {
            file.punch_hole(offset(at), offset(len)).map(|()| Outcome::Done)
        }
        (Op::Allocate { at, len }, _) => {
            file.allocate(offset(at), offset(len)).map(|()| Outcome::Done)
        }
        (Op::Len, _) => file.len().map(|len| Outcome::Len(len as usize)),
        (Op::Nothing | Op::Adopt, how) => match how {
            How::WriteBack => file.write_back(),
            How::Sync => file.sync_data(),
            How::DontNeed => file.advise(0, 0, Advice::DontNeed),
            How::WillNeed => file.advise(0, 0, Advice::WillNeed),
            _ => file.invalidate(0, 1 << 20),
        }
        .map(|()| Outcome::Done),
    }
}

/// Goal: whatever a few threads do to one file, there is an order that explains all they saw.
/// Method: random histories on every back end, each engine with another page size, cache, backing
/// and mode of writing.
#[test]
fn histories_are_linearizable() {
    let mut random = Random::from_environment();
    for (name, backend) in back_ends(random.next()) {
        let mut random = random.fork();
        // Those on real files take longer.
        let engines = scaled(if matches!(name, "memory" | "sim") { 16 } else { 8 });
        within(Duration::from_secs(60 + u64::from(engines)), name, move || {
            let (dir, started) = (temp_dir(), Instant::now());
            let (mut operations, histories) = (0, 40);
            for _ in 0..engines {
                let setup = Setup::new(&mut random, name, &backend, None);
                operations += setup.run(&mut random, histories, dir.path());
            }
            let (count, took) = (engines * histories, started.elapsed());
            println!("{name}: {count} histories, {operations} operations, {took:.1?}");
        });
    }
}

/// Goal: an operation that fails has happened or not, or in part, but at one moment; and nothing
/// that was acknowledged is lost.
/// Method: the same on a device that fails at random, after any part was moved.
#[test]
fn histories_with_errors_are_linearizable() {
    let mut random = Random::from_environment();
    let engines = scaled(20);
    within(Duration::from_secs(60 + u64::from(engines)), "errors", move || {
        let dir = temp_dir();
        let mut operations = 0;
        for _ in 0..engines {
            let sim = SimOptions::new(random.next())
                .delay_us_max(random.below(60))
                .short_per_mille(random.below(400))
                .error_per_mille(1 + random.below(200));
            let backend = BackendChoice::Sim(sim.clone());
            let setup = Setup::new(&mut random, "sim with errors", &backend, Some(&sim));
            operations += setup.run(&mut random, 20, dir.path());
        }
        println!("{} histories, {operations} operations", engines * 20);
    });
}

/// A history on four cells of two pages, whose calls are given as (thread, invoked, returned, ..).
fn by_hand(calls: &[(usize, u64, u64, Op, Outcome)]) -> Option<Vec<Call>> {
    let calls = calls.iter().map(|&(thread, invoked, returned, op, ref outcome)| Call {
        thread,
        invoked,
        returned,
        op,
        outcome: outcome.clone(),
        how: "by hand",
    });
    let initial = (0..4).map(|part| stamp(1, part)).collect();
    History { cell_bytes: 10, initial, calls: calls.collect() }.violation()
}

fn read(at: usize, len: usize) -> Op {
    Op::Read { at, len, limit_bytes: len * 10 }
}

fn saw(cells: &[u16]) -> Outcome {
    Outcome::Read { bytes: cells.len() * 10, cells: cells.to_vec() }
}

fn write(at: usize, len: usize, value: u8) -> (Op, Outcome) {
    (Op::Write { at, len, value }, Outcome::Wrote { at: at * 10, bytes: len * 10 })
}

/// Goal: the checker explains what can be explained, and nothing else.
/// Method: each history both as it may be and with the smallest change that it may not have.
#[test]
fn the_checker_knows_good_histories_from_bad_ones() {
    let old = |part| stamp(1, part);
    let new = |part| stamp(2, part);
    let fine = |calls: &[_]| assert!(by_hand(calls).is_none(), "{:?}", by_hand(calls));
    // So many calls are needed to show it.
    let wrong = |calls: &[_], needed: usize| {
        let found = by_hand(calls).expect("a violation");
        let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), needed, "{shown:#?}");
    };
    let append = |value, at: usize| {
        (Op::Append { len: 1, value }, Outcome::Wrote { at: at * 10, bytes: 10 })
    };

    // While a write is under way a read may see it or not, but all of it; and not go back.
    let (put, put_done) = write(1, 2, 2);
    let during = |cells: [&[u16]; 2]| {
        let [first, second] = cells.map(saw);
        [
            (0, 0, 9, put, put_done.clone()),
            (1, 1, 2, read(1, 2), first),
            (1, 3, 4, read(1, 2), second),
            // Does not take part.
            (2, 5, 6, Op::Len, Outcome::Len(40)),
        ]
    };
    fine(&during([&[old(1), old(2)], &[old(1), old(2)]]));
    fine(&during([&[old(1), old(2)], &[new(0), new(1)]]));
    fine(&during([&[new(0), new(1)], &[new(0), new(1)]]));
    wrong(&during([&[new(0), new(1)], &[old(1), old(2)]]), 3);
    wrong(&during([&[new(0), old(2)], &[new(0), new(1)]]), 2);
    wrong(&during([&[TORN, new(1)], &[new(0), new(1)]]), 2);
    wrong(&during([&[old(2), old(1)], &[new(0), new(1)]]), 1);

    // After it has ended everyone sees it.
    let after =
        |cells: &[u16]| [(0, 0, 1, put, put_done.clone()), (1, 2, 3, read(0, 4), saw(cells))];
    fine(&after(&[old(0), new(0), new(1), old(3)]));
    wrong(&after(&[old(0), old(1), old(2), old(3)]), 2);

    // Two readers of two writers agree on who was first.
    let (put_3, put_3_done) = write(3, 1, 3);
    let two = |seen: [[u16; 2]; 2]| {
        let pair = |seen: [u16; 2]| saw(&seen);
        let [one, other] = seen.map(pair);
        let (put, done) = write(2, 1, 2);
        [
            (0, 0, 9, put, done),
            (1, 1, 10, put_3, put_3_done.clone()),
            (2, 2, 3, read(2, 2), one),
            (3, 4, 5, read(2, 2), other),
        ]
    };
    let three = stamp(3, 0);
    fine(&two([[new(0), old(3)], [new(0), three]]));
    wrong(&two([[new(0), old(3)], [old(2), three]]), 4);

    // No two appends at one place, no gap, none lost.
    let appends = |one, other, len| {
        let ((first, first_at), (second, second_at)) = (append(2, one), append(3, other));
        [
            (0, 0, 3, first, first_at),
            (1, 1, 2, second, second_at),
            (2, 4, 5, Op::Len, Outcome::Len(len)),
        ]
    };
    fine(&appends(4, 5, 60));
    fine(&appends(5, 4, 60));
    wrong(&appends(4, 4, 60), 2);
    wrong(&appends(5, 6, 60), 1);
    wrong(&appends(4, 5, 50), 2);

    // What was cut off does not come back when the file grows.
    let regrown = |seen: u16| {
        [
            (0, 0, 1, Op::Truncate { len: 2 }, Outcome::Done),
            (0, 2, 3, Op::Truncate { len: 4 }, Outcome::Done),
            (1, 4, 5, read(1, 3), saw(&[old(1), seen, ZERO])),
        ]
    };
    fine(&regrown(ZERO));
    wrong(&regrown(old(2)), 1);

    // A read at the end that grows is all of what was appended, or nothing of it.
    let growing = |bytes: usize, cells: &[u16]| {
        let seen = Outcome::Read { bytes, cells: cells.to_vec() };
        let (put, done) = write(3, 3, 2);
        [(0, 0, 5, put, done), (1, 1, 2, read(3, 3), seen)]
    };
    fine(&growing(10, &[old(3)]));
    fine(&growing(30, &[new(0), new(1), new(2)]));
    wrong(&growing(20, &[new(0), new(1)]), 2);
    wrong(&growing(10, &[new(0)]), 2);
    wrong(&growing(30, &[old(3), ZERO, ZERO]), 1);

    // Holes: all or nothing, and the length stays.
    let punched = |cells: [u16; 2], len| {
        [
            (0, 0, 9, Op::Clear { at: 2, len: 5 }, Outcome::Done),
            (1, 1, 2, read(2, 2), saw(&cells)),
            (1, 3, 4, Op::Len, Outcome::Len(len)),
        ]
    };
    fine(&punched([ZERO, ZERO], 40));
    fine(&punched([old(2), old(3)], 40));
    wrong(&punched([ZERO, old(3)], 40), 1);
    wrong(&punched([ZERO, ZERO], 70), 1);

    // What failed has happened, in part or not at all; but when that is known, it stays.
    let failed = |first: [u16; 2], second: [u16; 2]| {
        [
            (0, 0, 1, put, Outcome::Failed),
            (1, 2, 3, read(1, 2), saw(&first)),
            (1, 4, 5, read(1, 2), saw(&second)),
        ]
    };
    fine(&failed([old(1), old(2)], [old(1), old(2)]));
    fine(&failed([new(0), old(2)], [new(0), old(2)]));
    fine(&failed([new(0), TORN], [new(0), TORN]));
    wrong(&failed([old(1), old(2)], [new(0), new(1)]), 3);
    wrong(&failed([new(1), old(2)], [new(0), old(2)]), 2);
    // A failed cut changes nothing; a failed append may have left a part.
    fine(&[
        (0, 0, 1, Op::Truncate { len: 1 }, Outcome::Failed),
        (0, 2, 3, Op::Append { len: 2, value: 2 }, Outcome::Failed),
        (0, 2, 3, Op::Adopt, Outcome::Done),
        (1, 4, 5, Op::Len, Outcome::Len(47)),
        (1, 6, 7, Op::Append { len: 1, value: 3 }, Outcome::Wrote { at: 47, bytes: 10 }),
        (1, 8, 9, Op::Len, Outcome::Len(57)),
    ]);
    wrong(
        &[
            (0, 0, 1, Op::Truncate { len: 1 }, Outcome::Failed),
            (1, 4, 5, Op::Len, Outcome::Len(10)),
        ],
        1,
    );
}
