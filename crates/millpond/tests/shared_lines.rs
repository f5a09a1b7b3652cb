//! Counts the cache lines that operations of two threads both write, or that hits of one read and
//! the other writes, and simulates the effect on many processors: docs/scaling.md.

mod common;

#[path = "shared_lines/simulation.rs"]
mod simulation;

#[path = "shared_lines/trace.rs"]
mod trace;

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::channel;
use std::time::Instant;

use millpond::{Admission, Advice, AsyncFile, BackendChoice, Backing, Engine, File, WriteMode};

use common::{block_on, builder, read_write, temp_dir};
use trace::{SharedLine, Trace};

const PAGE: u64 = 4096;
const FILE_PAGES: u64 = 4096;

/// Words that are written before and after each operation, to find it in the trace.
static MARKS: [AtomicU64; 2 * OPERATIONS] = [const { AtomicU64::new(0) }; 2 * OPERATIONS];
/// One operation of each thread, and then a hit of the second one.
const OPERATIONS_OF_A_RUN: usize = 3;
/// Rounds of a run that are not traced: frames and counters are allocated then. And rounds that are.
const WARM_ROUNDS: usize = 2;
const TRACED_ROUNDS: usize = 4;
/// Each case is run with one file, and with a file for each thread.
const OPERATIONS: usize = OPERATIONS_OF_A_RUN * TRACED_ROUNDS * 2 * CASES.len();

/// The number of the first operation of a round.
const fn first_operation(case: usize, each: usize, round: usize) -> usize {
    OPERATIONS_OF_A_RUN * (TRACED_ROUNDS * (2 * case + each) + round)
}

/// How the file of a case is opened.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Back,
    Through,
    /// By an engine whose reads bypass the cache.
    Bypass,
    Mapped,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Hit,
    /// A hit of 16 pages.
    LongHit,
    /// An asynchronous hit.
    HitByTask,
    /// A view of a cached page.
    View,
    /// A read of a page that is not cached.
    Miss,
    Overwrite,
    /// An overwrite of a page that was written back.
    OverwriteClean,
    /// An overwrite of 16 pages.
    OverwriteLong,
    /// An overwrite of 512 bytes.
    OverwritePart,
    Append,
    /// Cuts off the last page.
    Truncate,
    Sync,
}

struct Case {
    name: &'static str,
    kind: Kind,
    what: What,
    /// The maximum of lines that both threads write, and of lines that one thread writes and a hit of the other reads:
    /// in one file, and in a file each.
    max: [[usize; 2]; 2],
}

const fn case(
    name: &'static str,
    kind: Kind,
    what: What,
    one_file: [usize; 2],
    a_file_each: [usize; 2],
) -> Case {
    Case { name, kind, what, max: [one_file, a_file_each] }
}

const CASES: [Case; 22] = [
    case("hit", Kind::Through, What::Hit, [0, 0], [0, 0]),
    case("hit of 64 KiB", Kind::Through, What::LongHit, [0, 0], [0, 0]),
    case("hit of a task", Kind::Through, What::HitByTask, [0, 0], [0, 0]),
    case("view of a cached page", Kind::Through, What::View, [2, 0], [2, 0]),
    case("miss", Kind::Through, What::Miss, [6, 0], [1, 0]),
    case("miss that bypasses the cache", Kind::Bypass, What::Miss, [2, 0], [0, 0]),
    case("overwrite, back, of a dirty page", Kind::Back, What::Overwrite, [4, 0], [1, 0]),
    case("overwrite, back, of a clean page", Kind::Back, What::OverwriteClean, [12, 0], [2, 0]),
    case("append, back", Kind::Back, What::Append, [12, 1], [0, 0]),
    case("overwrite, through", Kind::Through, What::Overwrite, [4, 0], [0, 0]),
    case("append, through", Kind::Through, What::Append, [9, 1], [0, 0]),
    case("mapped: hit", Kind::Mapped, What::Hit, [0, 0], [0, 0]),
    case("mapped: hit of 64 KiB", Kind::Mapped, What::LongHit, [0, 0], [0, 0]),
    case("mapped: hit of a task", Kind::Mapped, What::HitByTask, [0, 0], [0, 0]),
    case("mapped: view", Kind::Mapped, What::View, [1, 0], [1, 0]),
    // The residency entries of the two windows lie in one line or in two, by the number of the inode.
    case("mapped: read of an absent page", Kind::Mapped, What::Miss, [2, 2], [1, 1]),
    case("mapped: overwrite", Kind::Mapped, What::Overwrite, [4, 0], [0, 0]),
    case("mapped: overwrite of 512 bytes", Kind::Mapped, What::OverwritePart, [4, 0], [0, 0]),
    case("mapped: overwrite of 64 KiB", Kind::Mapped, What::OverwriteLong, [4, 0], [0, 0]),
    case("mapped: append", Kind::Mapped, What::Append, [8, 0], [0, 0]),
    case("mapped: truncate", Kind::Mapped, What::Truncate, [13, 5], [0, 0]),
    case("mapped: sync", Kind::Mapped, What::Sync, [10, 0], [0, 0]),
];

/// Goal: operations on separate files, and on separate leaves of one file, write to a limited
/// number of shared cache lines, and hits to none. The number of shared lines determines how many
/// processors these operations can use.
/// Method: two threads, one after the other, run the same operation in different places. valgrind's
/// lackey traces the writes of each, and the reads of a hit by the second thread. Lines that both
/// wrote are the shared ones. A hit must read no line that the first thread wrote, as it would have
/// to fetch it each time. Of some rounds the one with the fewest lines counts: a round may do work
/// that is due once in many operations, as the refill of a batch of frames. With `MILLPOND_WRITE_DOCS=1` the test also times the operations, and writes
/// the tables of docs/scaling.md.
#[test]
#[cfg_attr(debug_assertions, ignore = "of optimized code: run by ./test at full speed")]
fn operations_write_few_shared_lines() {
    if std::env::var_os("MILLPOND_TRACED").is_some() {
        return run_traced();
    }
    // A background thread may wake in each round of a case, as the trace is slow.
    let mut found: Vec<[Option<Vec<SharedLine>>; 2]> = CASES.iter().map(|_| [None, None]).collect();
    let mut taken = [[usize::MAX; 2]; CASES.len()];
    for attempt in 1.. {
        let Some(trace) = trace() else { return common::skip("there is no valgrind") };
        for (number, each) in cases() {
            let (shared, read) = fewest_lines(&trace, number, each);
            let before = &mut found[number][each];
            if before.as_ref().is_none_or(|before| shared.len() < before.len()) {
                *before = Some(shared);
            }
            taken[number][each] = taken[number][each].min(read);
        }
        let mut exceeded = Vec::new();
        for (number, each) in cases() {
            let case = &CASES[number];
            let counts = [found[number][each].as_ref().map_or(0, Vec::len), taken[number][each]];
            if counts.iter().zip(case.max[each]).any(|(count, max)| *count > max) {
                exceeded.push((case.name, FILES[each], counts, case.max[each]));
            }
        }
        if exceeded.is_empty() {
            break;
        }
        assert!(
            attempt < 3,
            "lines that both write, lines of a hit, and their limits: {exceeded:#?}"
        );
    }
    for (number, each) in cases() {
        let shared = found[number][each].as_deref().unwrap_or_default();
        let visits: Vec<u32> = shared.iter().map(|line| line.visits).collect();
        println!("{}, {}: visits of shared lines: {visits:?}", CASES[number].name, FILES[each]);
    }
    if std::env::var_os("MILLPOND_WRITE_DOCS").is_some() {
        let rows = CASES.iter().zip(found).zip(local_times());
        let rows = rows.map(|((case, found), local_ns)| simulation::Row {
            name: case.name,
            local_ns,
            shared: found.map(Option::unwrap_or_default),
        });
        simulation::write_tables(&rows.collect::<Vec<_>>());
    }
}

/// Each case with one file, and with a file for each thread.
fn cases() -> impl Iterator<Item = (usize, usize)> {
    (0..CASES.len()).flat_map(|number| [(number, 0), (number, 1)])
}

/// glibc clears and copies memory by string instructions from these lengths on. The record has a line for each byte
/// of those.
const WITHOUT_STRING_INSTRUCTIONS: &str =
    "glibc.cpu.x86_rep_stosb_threshold=1073741824:glibc.cpu.x86_rep_movsb_threshold=1073741824";

/// The trace of `run_traced`. `None`: there is no valgrind.
fn trace() -> Option<Trace> {
    let mut traced = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--log-fd=1"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "operations_write_few_shared_lines", "--nocapture"])
        .env("MILLPOND_TRACED", "1")
        .env("GLIBC_TUNABLES", WITHOUT_STRING_INSTRUCTIONS)
        .stdout(Stdio::piped())
        .spawn()
        .ok()?;
    let trace = Trace::read(traced.stdout.take().unwrap(), size_of_val(&MARKS));
    assert!(traced.wait().unwrap().success());
    Some(trace)
}

/// The visits of the lines that both threads write, and the number of lines that one thread writes and a hit of the
/// other reads. Of each thread's rounds the one with the fewest lines counts.
fn fewest_lines(trace: &Trace, case: usize, each: usize) -> (Vec<SharedLine>, usize) {
    let [one, other, hit] = [0, 1, 2].map(|operation| {
        let rounds = (0..TRACED_ROUNDS)
            .map(|round| trace.operation(first_operation(case, each, round) + operation));
        rounds.min_by_key(|traced| traced.written_count()).expect("a round")
    });
    (one.lines_shared_with(other), one.lines_read_by(hit))
}

/// The engines and files of the cases.
struct Bench {
    /// Of each case: for both threads, and then one for each.
    files: Vec<[[Arc<File>; 2]; 2]>,
    _engines: [Engine; 3],
    _dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let dir = temp_dir();
        let engine = |backend, admission| {
            let builder = builder(32 << 20, backend).admission(admission);
            // No write-back in the background.
            builder.dirty_age_max(std::time::Duration::from_secs(3600)).build().unwrap()
        };
        let engines = [
            engine(BackendChoice::Null, Admission::Always),
            engine(BackendChoice::Null, Admission::Never),
            // Mapped backing needs a file of the kernel.
            engine(BackendChoice::Threads, Admission::Always),
        ];
        let open = |case: &Case, name: &str| {
            let path = dir.path().join(format!("{} {name}", case.name));
            std::fs::File::create(&path).unwrap().set_len(FILE_PAGES * PAGE).unwrap();
            let options = read_write();
            let (engine, options) = match case.kind {
                Kind::Back => (&engines[0], options.write_mode(WriteMode::Back)),
                Kind::Through => (&engines[0], options.write_mode(WriteMode::Through)),
                Kind::Bypass => (&engines[1], options.write_mode(WriteMode::Through)),
                Kind::Mapped => {
                    (&engines[2], options.write_mode(WriteMode::Through).backing(Backing::Mapped))
                }
            };
            let file = engine.open(&path, &options).unwrap();
            file.advise(0, 0, Advice::Random).unwrap();
            Arc::new(file)
        };
        let files = CASES.iter().map(|case| {
            let both = open(case, "both");
            [[Arc::clone(&both), both], [open(case, "0"), open(case, "1")]]
        });
        Bench { files: files.collect(), _engines: engines, _dir: dir }
    }
}

/// Runs the operations, each by both threads.
fn run_traced() {
    println!("marks at {}", MARKS.as_ptr().expose_provenance());
    let bench = &Bench::new();
    std::thread::scope(|scope| {
        let turns = [0usize, 1].map(|thread| {
            let (go, goes) = channel::<(usize, usize, Option<usize>)>();
            let (done, is_done) = channel();
            scope.spawn(move || {
                for (number, each, traced) in goes {
                    let case = &CASES[number];
                    let file = &bench.files[number][each][thread];
                    // In separate leaves.
                    let page = 1000 + 2000 * thread as u64;
                    let marked = |operation: usize, operate: &mut dyn FnMut()| {
                        let Some(round) = traced else { return operate() };
                        let first = first_operation(number, each, round);
                        let marks = &MARKS[2 * (first + operation)..][..2];
                        marks[0].store(1, SeqCst);
                        operate();
                        marks[1].store(1, SeqCst);
                    };
                    let mut operation = Operation::prepare(case, file, page);
                    marked(thread, &mut || operation.run());
                    if thread == 1 {
                        // Of a page that is cached after the operation.
                        let mut hit = Operation::prepare(&HIT, file, page + 1);
                        marked(2, &mut || hit.run());
                    }
                    done.send(()).unwrap();
                }
            });
            (go, is_done)
        });
        for (number, each) in cases() {
            for round in 0..WARM_ROUNDS + TRACED_ROUNDS {
                for (go, is_done) in &turns {
                    go.send((number, each, round.checked_sub(WARM_ROUNDS))).unwrap();
                    is_done.recv().unwrap();
                }
            }
        }
    });
}

const FILES: [&str; 2] = ["one file", "a file each"];

const HIT: Case = case("", Kind::Through, What::Hit, [0, 0], [0, 0]);

/// The time of each case's operation by one thread in a file of its own, in nanoseconds: the median.
fn local_times() -> Vec<u64> {
    let bench = Bench::new();
    let times = CASES.iter().zip(&bench.files).map(|(case, files)| {
        let needs_new_state =
            matches!(case.what, What::Miss | What::OverwriteClean | What::Truncate | What::Sync);
        let prepare = || Operation::prepare(case, &files[1][0], 1000);
        let mut operation = prepare();
        let mut times: Vec<u64> = (0..2000)
            .map(|_| {
                if needs_new_state {
                    operation = prepare();
                }
                let begun = Instant::now();
                operation.run();
                begun.elapsed().as_nanos() as u64
            })
            .collect();
        times.sort_unstable();
        times[times.len() / 2]
    });
    times.collect()
}

/// An operation of a case, on one page.
struct Operation<'f> {
    what: What,
    file: &'f File,
    of_task: Option<AsyncFile>,
    at: u64,
    bytes: Vec<u8>,
}

impl<'f> Operation<'f> {
    fn prepare(case: &Case, file: &'f Arc<File>, page: u64) -> Operation<'f> {
        let at = page * PAGE;
        let len = match case.what {
            What::LongHit | What::OverwriteLong => 16 * PAGE,
            What::OverwritePart => 512,
            _ => PAGE,
        };
        let mut bytes = vec![1; len as usize];
        match case.what {
            What::Miss => {
                // A cached page beside it keeps the leaf.
                file.write_all_at(&bytes, at + PAGE).unwrap();
                if case.kind == Kind::Mapped {
                    file.sync_data().unwrap();
                }
                file.advise(at, PAGE, Advice::DontNeed).unwrap();
            }
            What::Overwrite if case.kind == Kind::Back => file.write_all_at(&bytes, at).unwrap(),
            What::OverwriteClean => {
                file.write_all_at(&bytes, at).unwrap();
                file.sync_data().unwrap();
            }
            What::Truncate => file.truncate(file.len().unwrap() + PAGE).unwrap(),
            What::Sync => file.write_all_at(&bytes, at).unwrap(),
            _ => {}
        }
        if case.what != What::Miss {
            let mut page = vec![0; PAGE as usize];
            file.read_exact_at(&mut page, at + PAGE).unwrap();
            let mut all = vec![0; bytes.len()];
            // Mapped pages are copied once eight reads in a row have found them in the kernel.
            let reads = if case.kind == Kind::Mapped { 10 } else { 1 };
            (0..reads).for_each(|_| file.read_exact_at(&mut all, at).unwrap());
        }
        if case.what == What::View {
            bytes.clear();
        }
        let of_task = (case.what == What::HitByTask).then(|| AsyncFile::from(Arc::clone(file)));
        Operation { what: case.what, file, of_task, at, bytes }
    }

    fn run(&mut self) {
        let (file, at, bytes) = (self.file, self.at, &mut self.bytes[..]);
        match self.what {
            What::Hit | What::LongHit | What::Miss => file.read_exact_at(bytes, at).unwrap(),
            What::HitByTask => {
                let of_task = self.of_task.as_ref().expect("prepared");
                block_on(of_task.read_exact_at(bytes, at)).unwrap();
            }
            What::View => drop(file.view(at, PAGE as usize).unwrap()),
            What::Append => drop(file.append(bytes).unwrap()),
            What::Truncate => file.truncate(file.len().unwrap() - PAGE).unwrap(),
            What::Sync => file.sync_data().unwrap(),
            _ => file.write_all_at(bytes, at).unwrap(),
        }
    }
}
