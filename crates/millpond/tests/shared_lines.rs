//! Counts the cache lines that operations of two threads both write, or that hits of one read and
//! the other writes: docs/scaling.md.

mod common;

use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, Sender, channel};

use millpond::{Admission, Advice, BackendChoice, Engine, File, WriteMode};

use common::{builder, read_write, temp_dir};

const PAGE: u64 = 4096;
const FILE_PAGES: u64 = 4096;
const LINE_BYTES: u64 = 64;

/// Words that are written before and after each operation, to find it in the trace.
static MARKS: [AtomicU64; 2 * OPERATIONS] = [const { AtomicU64::new(0) }; 2 * OPERATIONS];
/// One operation of each thread, and then a hit of the second one.
const OF_A_CASE: usize = 3;
const OPERATIONS: usize = OF_A_CASE * CASES.len();

#[derive(Clone, Copy)]
enum What {
    Hit,
    Miss,
    Around,
    /// Of a page that is dirty already, in mode back.
    OverwriteDirty,
    /// Of a page that was written back, in mode back.
    OverwriteClean,
    OverwriteThrough,
}

struct Case {
    name: &'static str,
    what: What,
    /// Whether both threads use one file, in separate leaves.
    one_file: bool,
    /// Maximum of lines that both threads write.
    shared_max: usize,
    /// Maximum of lines that one thread writes and a hit of the other reads.
    taken_max: usize,
}

const fn case(
    name: &'static str,
    what: What,
    one_file: bool,
    [shared_max, taken_max]: [usize; 2],
) -> Case {
    Case { name, what, one_file, shared_max, taken_max }
}

const CASES: [Case; 12] = [
    case("hit, one file", What::Hit, true, [0, 0]),
    case("hit, a file each", What::Hit, false, [0, 0]),
    case("miss, one file", What::Miss, true, [4, 0]),
    case("miss, a file each", What::Miss, false, [1, 0]),
    case("miss that goes around, one file", What::Around, true, [2, 0]),
    case("miss that goes around, a file each", What::Around, false, [0, 0]),
    case("overwrite, dirty already, one file", What::OverwriteDirty, true, [5, 0]),
    case("overwrite, dirty already, a file each", What::OverwriteDirty, false, [2, 0]),
    case("overwrite, written back, one file", What::OverwriteClean, true, [13, 0]),
    case("overwrite, written back, a file each", What::OverwriteClean, false, [3, 0]),
    case("overwrite, through, one file", What::OverwriteThrough, true, [6, 0]),
    case("overwrite, through, a file each", What::OverwriteThrough, false, [2, 0]),
];

/// Goal: operations on separate files, and on separate leaves of one file, write to a limited
/// number of shared cache lines, and hits to none. The number of shared lines determines how many
/// processors these operations can use.
/// Method: two threads, one after the other, run the same operation in different places. valgrind's
/// lackey traces the writes of each, and the reads of a hit by the second thread. Lines that both
/// wrote are the shared ones. A hit must read no line that the first thread wrote, as it would have
/// to fetch it each time. Earlier operations of each thread are not traced: frames and counters are
/// allocated by then.
#[test]
#[cfg_attr(debug_assertions, ignore = "of optimized code: run by ./test at full speed")]
fn operations_write_few_shared_lines() {
    if std::env::var_os("MILLPOND_TRACED").is_some() {
        return traced();
    }
    let Ok(mut traced) = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--log-fd=1"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "operations_write_few_shared_lines", "--nocapture"])
        .env("MILLPOND_TRACED", "1")
        .stdout(Stdio::piped())
        .spawn()
    else {
        return common::skip("there is no valgrind");
    };
    let mut written = Written::default();
    for line in BufReader::new(traced.stdout.take().unwrap()).split(b'\n') {
        written.line(&line.unwrap());
    }
    assert!(traced.wait().unwrap().success());
    let mut failed = Vec::new();
    for (number, case) in CASES.iter().enumerate() {
        let [one, other] = [0, 1].map(|who| &written.lines[&(OF_A_CASE * number + who)]);
        let hit = &written.read[&(OF_A_CASE * number + 2)];
        let (shared, taken) = (one.intersection(other).count(), one.intersection(hit).count());
        let (one, other) = (one.len(), other.len());
        println!("{}: {shared} shared of {one} and {other} lines, {taken} of a hit's", case.name);
        if shared > case.shared_max || taken > case.taken_max {
            failed.push((case.name, [shared, taken], [case.shared_max, case.taken_max]));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// The lines that a trace has as written between two marks.
#[derive(Default)]
struct Written {
    marks_at: Option<u64>,
    /// The operation whose marks surround the next lines of the trace.
    within: Option<usize>,
    lines: BTreeMap<usize, HashSet<u64>>,
    /// The lines that hits have read or written.
    read: BTreeMap<usize, HashSet<u64>>,
}

impl Written {
    fn line(&mut self, line: &[u8]) {
        // " S 04222cac,4": a store; L: a load; M: both at once.
        let [b' ', kind @ (b'S' | b'M' | b'L'), b' ', place @ ..] = line else {
            if self.marks_at.is_none()
                && let Ok(text) = std::str::from_utf8(line)
                && let Some(at) = text.split("marks at ").nth(1)
            {
                self.marks_at = at.trim().parse().ok();
            }
            return;
        };
        let Some(marks_at) = self.marks_at else { return };
        let mut parts = place.split(|&byte| byte == b',');
        let number = |part: Option<&[u8]>, radix| {
            u64::from_str_radix(std::str::from_utf8(part.unwrap()).unwrap(), radix).unwrap()
        };
        let at = number(parts.next(), 16);
        let len = number(parts.next(), 10);
        if (marks_at..marks_at + size_of_val(&MARKS) as u64).contains(&at) {
            let mark = ((at - marks_at) / 8) as usize;
            self.within = mark.is_multiple_of(2).then_some(mark / 2);
            self.lines.entry(mark / 2).or_default();
            self.read.entry(mark / 2).or_default();
        } else if let Some(operation) = self.within {
            let lines = at / LINE_BYTES..=(at + len - 1) / LINE_BYTES;
            if *kind != b'L' {
                self.lines.get_mut(&operation).unwrap().extend(lines.clone());
            }
            if operation % OF_A_CASE == 2 {
                self.read.get_mut(&operation).unwrap().extend(lines);
            }
        }
    }
}

/// Runs the operations, each by both threads.
fn traced() {
    let marks = MARKS.as_ptr().expose_provenance();
    println!("marks at {marks}");
    let dir = temp_dir();
    let engine = |admission| {
        let builder = builder(32 << 20, BackendChoice::Null).admission(admission);
        // No write-back in the background.
        builder.dirty_age_max(std::time::Duration::from_secs(3600)).build().unwrap()
    };
    let engines = [engine(Admission::Always), engine(Admission::Never)];
    let open = |engine: &Engine, mode, name: &str, who: usize| {
        let path = dir.path().join(format!("{name} {who}"));
        let made = std::fs::File::create(&path).unwrap();
        made.set_len(FILE_PAGES * PAGE).unwrap();
        let file = engine.open(&path, &read_write().write_mode(mode)).unwrap();
        file.advise(0, 0, Advice::Random).unwrap();
        file
    };
    let files = CASES.each_ref().map(|case| {
        let engine = &engines[usize::from(matches!(case.what, What::Around))];
        let mode = match case.what {
            What::OverwriteThrough => WriteMode::Through,
            _ => WriteMode::Back,
        };
        [0, 1].map(|who| open(engine, mode, case.name, who))
    });
    let files = &files;
    std::thread::scope(|scope| {
        let turns = [0u64, 1].map(|who| {
            let (go, goes): (Sender<(usize, bool)>, Receiver<_>) = channel();
            let (done, is_done) = channel();
            scope.spawn(move || {
                for (number, is_marked) in goes {
                    let case = &CASES[number];
                    let file = &files[number][if case.one_file { 0 } else { who as usize }];
                    // In separate leaves.
                    let page = 1000 + 2000 * who;
                    prepare(case.what, file, page);
                    let marked = |operation: usize, operate: &dyn Fn()| {
                        let marks = &MARKS[2 * (OF_A_CASE * number + operation)..][..2];
                        if is_marked {
                            marks[0].store(1, SeqCst);
                        }
                        operate();
                        if is_marked {
                            marks[1].store(1, SeqCst);
                        }
                    };
                    marked(who as usize, &|| operate(case.what, file, page));
                    if who == 1 {
                        marked(2, &|| operate(What::Hit, file, cached(case.what, page)));
                    }
                    done.send(()).unwrap();
                }
            });
            (go, is_done)
        });
        for number in 0..CASES.len() {
            for is_marked in [false, false, true] {
                for (go, is_done) in &turns {
                    go.send((number, is_marked)).unwrap();
                    is_done.recv().unwrap();
                }
            }
        }
    });
}

fn prepare(what: What, file: &File, page: u64) {
    let (at, mut bytes) = (page * PAGE, [0; PAGE as usize]);
    match what {
        What::Hit | What::OverwriteThrough => file.read_exact_at(&mut bytes, at).unwrap(),
        // A cached page beside it keeps the leaf.
        What::Miss | What::Around => {
            file.write_all_at(&bytes, at + PAGE).unwrap();
            file.advise(at, PAGE, Advice::DontNeed).unwrap();
        }
        What::OverwriteDirty => file.write_all_at(&bytes, at).unwrap(),
        What::OverwriteClean => {
            file.write_all_at(&bytes, at).unwrap();
            file.sync_data().unwrap();
        }
    }
}

/// A page that is cached after the operation.
fn cached(what: What, page: u64) -> u64 {
    if matches!(what, What::Miss | What::Around) { page + 1 } else { page }
}

fn operate(what: What, file: &File, page: u64) {
    let (at, mut bytes) = (page * PAGE, [1; PAGE as usize]);
    match what {
        What::Hit | What::Miss | What::Around => file.read_exact_at(&mut bytes, at).unwrap(),
        _ => file.write_all_at(&bytes, at).unwrap(),
    }
}
