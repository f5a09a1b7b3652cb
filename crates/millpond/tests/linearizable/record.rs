//! Runs the threads of a plan on a random engine, records their outcomes, and has them checked.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use millpond::sim::SimOptions;
use millpond::{BackendChoice, Backing, Engine, Error, OpenOptions, WriteMode};

use crate::call::{cells_of, content};
use crate::common::{Random, builder, cache_for, read_write};
use crate::faces::{Acted, Faces, Handles, act_alone};
use crate::history::{Call, History, Op, Outcome, stamp};
use crate::plan::{Face, HANDLES, How, Plan, STEPS_MAX, Step, THREADS};

/// The time that threads wait for each other; under a scheduler each spin is a scheduling step.
const SPINS: u64 = if cfg!(scheduled) { 10 } else { 1000 };

/// The settings that the histories of one engine share.
pub struct Setup {
    engine: Engine,
    options: OpenOptions,
    /// Options of the second and later handles, where they differ.
    others: OpenOptions,
    page_bytes: usize,
    /// Whether operations may fail; on while they are recorded.
    errors: Option<Arc<AtomicBool>>,
    /// The APIs that the operations use.
    faces: &'static [Face],
    /// Operations with an outcome, by [`Face::ALL`].
    ended: [AtomicUsize; Face::ALL.len()],
    name: String,
}

impl Setup {
    pub fn new(
        random: &mut Random,
        name: &str,
        backend: &BackendChoice,
        sim: Option<&SimOptions>,
        faces: &'static [Face],
    ) -> Setup {
        let page_bytes = if random.chance(500) { 4096 } else { 16384 };
        let cache_pages = [3, 4, 6, 10, 20][random.below(5) as usize];
        let direct = random.chance(500);
        let back = random.chance(600);
        let backing = match direct {
            true => Backing::Direct,
            false if !back && random.chance(600) => Backing::Mapped,
            false => Backing::Buffered,
        };
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
            .backing(backing)
            .write_mode(if back { WriteMode::Back } else { WriteMode::Through });
        // These handles bypass the cache.
        let others_direct = random.chance(300);
        Setup {
            engine: builder.build().unwrap(),
            others: options.clone().direct(others_direct).bounce(others_direct),
            options,
            page_bytes,
            errors: sim.map(SimOptions::errors_switch),
            faces,
            ended: Default::default(),
            name: format!(
                "{name}, pages of {page_bytes}, cache of {cache_pages}, {}, {}{}",
                format!("{backing:?}").to_lowercase(),
                if back { "back" } else { "through" },
                if others_direct { ", direct handles" } else { "" },
            ),
        }
    }

    #[cfg(scheduled)]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    fn errors(&self, on: bool) {
        if let Some(errors) = &self.errors {
            errors.store(on, SeqCst);
        }
    }

    /// Runs `plans`, one after the other, on a file. The threads stay the same, as starting a
    /// thread takes longer than most operations.
    fn record(&self, plans: &[Plan], path: &Path) -> Vec<History> {
        self.errors(false);
        let open = |options| Arc::new(self.engine.open(path, options).unwrap());
        let options = |number| if number == 0 { &self.options } else { &self.others };
        let all = (0..HANDLES).map(|number| open(options(number))).collect();
        let has_pipeline = self.faces.contains(&Face::Pipeline);
        let direct = self.options.clone().direct(true);
        // Not every file system has direct I/O.
        let direct = has_pipeline.then(|| self.engine.open(path, &direct).ok()).flatten();
        let handles = Handles { all, direct: direct.map(Arc::new) };
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
            let mut faces = Faces::new(&self.engine, STEPS_MAX);
            for (round, plan) in plans.iter().enumerate() {
                let mut calls = Vec::new();
                if number == 0 {
                    self.errors(false);
                    let initial = content(1, plan.cells, plan.cell_bytes);
                    handles.all[0].truncate(0).unwrap();
                    handles.all[0].write_all_at(&initial, 0).unwrap();
                    self.errors(true);
                }
                gather(2 * round + 1);
                let steps = plan.threads.get(number).map_or(&[][..], Vec::as_slice);
                let are_together =
                    |one: &Step, other: &Step| one.face == other.face && one.face.is_batched();
                for steps in steps.chunk_by(are_together) {
                    meet(&met);
                    for _ in 0..steps[0].spins * SPINS / 1000 {
                        std::hint::spin_loop();
                    }
                    for acted in faces.act(steps, plan.cell_bytes, &handles, &clock) {
                        let call = self.call(plan, acted, number);
                        calls.extend(with_growth(call, plan.cell_bytes));
                    }
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

    /// Reads the whole file, as it is cached and as it is stored.
    fn look(&self, plan: &Plan, handles: &Handles, clock: &AtomicU64) -> Vec<Call> {
        let all = Op::Read { at: 0, len: 255, limit_bytes: 255 * plan.cell_bytes };
        let last = [(all, How::Plain), (Op::Adopt, How::Invalidate), (all, How::Plain)];
        let look = |(op, how)| {
            let step = Step { op, how, face: Face::File, handle: 0, spins: 0 };
            let acted = act_alone(&step, plan.cell_bytes, &handles.all[0], clock);
            pieces(&self.call(plan, acted, THREADS), plan.cell_bytes)
        };
        last.into_iter().flat_map(look).collect()
    }

    /// An operation in the form of the model.
    fn call(&self, plan: &Plan, acted: Acted, thread: usize) -> Call {
        let Acted { step, when: (invoked, returned), bytes, outcome } = acted;
        let cell_bytes = plan.cell_bytes;
        let mut op = match step.how {
            How::Invalidate if self.errors.is_none() => Op::Nothing,
            _ => step.op,
        };
        let outcome = match outcome {
            Ok(Outcome::Read { bytes: moved, .. }) => {
                if let (Some(_), Op::Read { limit_bytes, .. }) = (&self.errors, &mut op)
                    && moved > 0
                {
                    // The read may have ended before the bytes that the device failed to read.
                    *limit_bytes = moved;
                }
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
                op = self.failed(op, &step, &error);
                Outcome::Failed
            }
        };
        if outcome != Outcome::Failed {
            self.ended[step.face as usize].fetch_add(1, SeqCst);
        }
        let how = format!("{:?}, {}", step.face, step.how.name(step.op));
        Call { thread, invoked, returned, op, outcome, how }
    }

    /// The operation of the model for a failed one.
    fn failed(&self, op: Op, step: &Step, error: &Error) -> Op {
        match error {
            // Views of other threads had all the frames.
            Error::NoBuffers { .. } if step.how == How::View => Op::Nothing,
            // A pipeline accepts no unaligned request.
            Error::Unaligned { .. } if step.face == Face::Pipeline => Op::Nothing,
            // The file system does not support it, and refused it before any change.
            _ if error.errno() == libc::EOPNOTSUPP => Op::Nothing,
            Error::InvalidInput { .. } | Error::InvalidRange { .. } => panic!("{step:?}: {error}"),
            _ if self.errors.is_some() => op,
            _ => panic!("{step:?}: {error}"),
        }
    }

    /// How many operations of each of [`Face::ALL`] had an outcome.
    pub fn ended(&self) -> [usize; Face::ALL.len()] {
        self.ended.each_ref().map(|count| count.load(SeqCst))
    }

    /// Makes histories and has them explained. Returns the number of operations.
    pub fn run(&self, random: &mut Random, histories: u32, dir: &Path) -> usize {
        self.run_plans(&self.plans(random, histories), dir)
    }

    pub fn plans(&self, random: &mut Random, histories: u32) -> Vec<Plan> {
        (0..histories).map(|_| Plan::new(random.next(), self.page_bytes, self.faces)).collect()
    }

    /// Makes these.
    pub fn run_plans(&self, plans: &[Plan], dir: &Path) -> usize {
        let path = dir.join("file");
        let recorded = self.record(plans, &path);
        let _ = std::fs::remove_file(&path);
        for (history, plan) in recorded.iter().zip(plans) {
            if let Some(calls) = history.violation() {
                explain(&self.name, plan, history, &calls);
            }
        }
        recorded.iter().map(|history| history.calls.len()).sum()
    }
}

/// Waits for another thread at this point, but not for long: operations are short, and on a busy
/// machine threads seldom run at the same time otherwise.
fn meet(met: &AtomicUsize) {
    let mine = met.fetch_add(1, SeqCst) + 1;
    for _ in 0..SPINS {
        if met.load(SeqCst) != mine {
            return;
        }
        std::hint::spin_loop();
    }
}

/// An operation and, where it failed, the call for its late growth.
fn with_growth(call: Call, cell_bytes: usize) -> impl Iterator<Item = Call> {
    let failed = match (call.op, &call.outcome) {
        (Op::Write { .. } | Op::Append { .. } | Op::Allocate { .. }, Outcome::Failed) => true,
        (Op::Write { len, .. }, Outcome::Wrote { bytes, .. }) => *bytes < len * cell_bytes,
        (Op::Append { len, .. }, Outcome::Wrote { bytes, .. }) => *bytes < len * cell_bytes,
        _ => false,
    };
    let grows =
        Call { op: Op::Adopt, outcome: Outcome::Done, how: "its length".into(), ..call.clone() };
    [call].into_iter().chain(failed.then_some(grows))
}

/// Splits a read without concurrent operations into reads of its parts, so that it does not join
/// all cells into one object.
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

fn explain(name: &str, plan: &Plan, history: &History, calls: &[Call]) -> ! {
    println!("the whole history:");
    history.calls.iter().for_each(|call| println!("  {call}"));
    println!("what no order explains of it:");
    calls.iter().for_each(|call| println!("  {call}"));
    panic!(
        "not linearizable: {name}; {} cells of {} bytes at first, pages of {}; seed {}",
        plan.cells, plan.cell_bytes, plan.page_bytes, plan.seed
    );
}
