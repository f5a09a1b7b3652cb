//! Goal: after a kill of a program under `millpond run --mode back` at any moment, the files have the
//! effect of all calls that had returned, no operation is there by halves, and no file is too long.
//!
//! One exception: with a small limit of dirty bytes, writes go to the kernel at once. The kernel ends a
//! write of a killed process between two pages, as without `millpond run`. (Of 3,000 kills of a program
//! that wrote 36 KiB over and over, 2,354 left such a write.)
//!
//! `MILLPOND_TEST_SCALE=50` makes it 1,000 kills for each backing.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const KILLS: u64 = 20;
/// From a cache in which nothing is evicted to one with a small limit of dirty bytes.
const CACHES: [&str; 3] = ["16m", "4m", SMALLEST];
const SMALLEST: &str = "512k";
const PAGE: usize = 4096;
const RECORD_BYTES: usize = 64;

fn compile(dir: &Path) -> PathBuf {
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../millpond-preload/tests/programs/writer.c");
    let binary = dir.join("writer");
    let mut gcc = Command::new("gcc");
    gcc.args(["-O1", "-w", "-pthread", "-o"]).arg(&binary).arg(source);
    assert!(gcc.status().expect("gcc is missing: install the package gcc").success());
    binary
}

/// The program's `struct record`.
#[derive(Clone, Debug)]
struct Record {
    kind: u32,
    returned: bool,
    thread: u32,
    file: u32,
    offset: u64,
    len: u64,
    sequence: u64,
    name: String,
}

const HELLO: u32 = 0;
const CREATE: u32 = 1;
const WRITE: u32 = 2;
const TRUNCATE: u32 = 3;
const RENAME: u32 = 4;
const UNLINK: u32 = 5;

impl Record {
    fn of(bytes: &[u8]) -> Record {
        let u32_at = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        let name = bytes[40..].split(|byte| *byte == 0).next().unwrap();
        Record {
            kind: u32_at(0),
            returned: u32_at(4) == 1,
            thread: u32_at(8),
            file: u32_at(12),
            offset: u64_at(16),
            len: u64_at(24),
            sequence: u64_at(32),
            name: String::from_utf8(name.to_vec()).unwrap(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let start = self.sequence.wrapping_mul(2_654_435_761) + u64::from(self.thread) * 77;
        (0..self.len)
            .map(|at| start.wrapping_add(at * 40503))
            .map(|x| ((x >> 13) ^ x) as u8)
            .collect()
    }
}

/// The expected content of a file, and its name.
#[derive(Clone, Default, Debug, PartialEq)]
struct Model {
    name: Option<String>,
    data: Vec<u8>,
}

impl Model {
    fn apply(&mut self, record: &Record) {
        match record.kind {
            CREATE => *self = Model { name: Some(record.name.clone()), data: Vec::new() },
            WRITE => {
                let (start, end) = (record.offset as usize, (record.offset + record.len) as usize);
                if self.data.len() < end {
                    self.data.resize(end, 0);
                }
                self.data[start..end].copy_from_slice(&record.bytes());
            }
            TRUNCATE => self.data.resize(record.len as usize, 0),
            RENAME => self.name = Some(record.name.clone()),
            UNLINK => self.name = None,
            _ => {}
        }
    }
}

/// Differences.
#[derive(Clone, Default, Debug, PartialEq)]
struct Wrong {
    lost: usize,
    torn: usize,
    too_long: usize,
    missing: usize,
    /// Files with unexpected names.
    left_over: usize,
}

/// Compares a file with its expected state before and after the call that did not return: under each of the
/// names, it has its content or does not exist.
fn compare(dir: &Path, before: &Model, after: &Model, wrong: &mut Wrong) {
    let read = |model: &Model| fs::read(dir.join(model.name.as_ref()?)).ok();
    let is_as = |model: &Model| {
        let mut names = before.name.iter().chain(&after.name);
        names.all(|name| match fs::read(dir.join(name)) {
            Ok(found) => model.name.as_ref() == Some(name) && found == model.data,
            Err(_) => model.name.as_ref() != Some(name),
        })
    };
    if is_as(before) || is_as(after) {
        return;
    }
    let Some(found) = read(before).or_else(|| read(after)) else {
        eprintln!("{:?} or {:?}: missing", before.name, after.name);
        wrong.missing += 1;
        return;
    };
    let lengths = (found.len(), before.data.len(), after.data.len());
    let differs = |model: &Model| {
        let len = found.len().min(model.data.len());
        (0..len).find(|&at| found[at] != model.data[at])
    };
    eprintln!(
        "{:?}: is {}, was {}, would be {} bytes; differs at {:?} and {:?}",
        before.name,
        lengths.0,
        lengths.1,
        lengths.2,
        differs(before),
        differs(after),
    );
    // Each byte is the old or the new one.
    let of = |model: &Model, at: usize| model.data.get(at).copied();
    let is_mixed =
        (0..found.len()).all(|at| [of(before, at), of(after, at)].contains(&Some(found[at])));
    match () {
        () if found.len() > before.data.len().max(after.data.len()) => wrong.too_long += 1,
        () if is_mixed && found.len() >= before.data.len().min(after.data.len()) => wrong.torn += 1,
        () => wrong.lost += 1,
    }
}

/// Whether each page of a file is the old or the new one.
fn has_whole_pages(dir: &Path, before: &Model, after: &Model) -> bool {
    let Some(name) = &before.name else { return false };
    let Ok(found) = fs::read(dir.join(name)) else { return false };
    before.name == after.name
        && (before.data.len().min(after.data.len())..=after.data.len()).contains(&found.len())
        && found.chunks(PAGE).enumerate().all(|(page, found)| {
            let is_of = |model: &Model| {
                model.data[..].get(page * PAGE..).is_some_and(|rest| rest.starts_with(found))
            };
            is_of(before) || is_of(after)
        })
}

/// Counts of the runs.
#[derive(Default, Debug)]
struct Seen {
    returned: usize,
    /// Writes that the kernel ended between two pages.
    in_part: usize,
    /// Runs in which the keeper wrote pages, and how many.
    recoveries: u64,
    pages: u64,
}

impl Seen {
    fn add_line(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("millpond: recovered ") {
            let pages = rest.split(", ").nth(1).and_then(|part| part.strip_suffix(" pages"));
            self.recoveries += 1;
            self.pages += pages.unwrap().parse::<u64>().unwrap();
        }
    }
}

/// One run, killed after a while.
fn kill_once(seed: u64, backing: &str, program: &Path, seen: &mut Seen, wrong: &mut Wrong) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cache = CACHES[seed as usize % CACHES.len()];
    let mut run = Command::new(env!("CARGO_BIN_EXE_millpond"));
    run.args(["run", "--eager", "--mode", "back", "--backing", backing]);
    run.args(["--cache", cache, "--"]);
    run.arg(program).arg(seed.to_string()).current_dir(dir.path());
    run.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = run.spawn().unwrap();
    let mut output = run.stdout.take().unwrap();
    let mut record = [0; RECORD_BYTES];
    output.read_exact(&mut record).unwrap();
    let hello = Record::of(&record);
    assert_eq!(hello.kind, HELLO);
    let pid = rustix::process::Pid::from_raw(hello.sequence as i32).unwrap();
    let delay = Duration::from_micros(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 120_000);
    let killer = std::thread::spawn(move || {
        std::thread::sleep(delay);
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    });
    let mut account = Vec::new();
    output.read_to_end(&mut account).unwrap();
    killer.join().unwrap();
    let output = run.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.signal(), Some(9), "the program's end is not ours: {said}");
    said.lines().for_each(|line| seen.add_line(line));

    let mut models: HashMap<(u32, u32), Model> = HashMap::new();
    let mut pending: HashMap<(u32, u32), Record> = HashMap::new();
    for record in account.chunks_exact(RECORD_BYTES).map(Record::of) {
        let file = (record.thread, record.file);
        if record.returned {
            pending.remove(&file);
            models.entry(file).or_default().apply(&record);
            seen.returned += 1;
        } else {
            pending.insert(file, record);
        }
    }
    for file in pending.keys() {
        models.entry(*file).or_default();
    }
    let mut names: HashSet<String> = HashSet::new();
    for (file, before) in &models {
        let mut after = before.clone();
        if let Some(record) = pending.get(file) {
            after.apply(record);
        }
        names.extend(before.name.iter().chain(&after.name).cloned());
        let earlier = wrong.clone();
        compare(dir.path(), before, &after, wrong);
        let is_write = pending.get(file).is_some_and(|record| record.kind == WRITE);
        if wrong.torn > earlier.torn
            && cache == SMALLEST
            && is_write
            && has_whole_pages(dir.path(), before, &after)
        {
            *wrong = earlier;
            seen.in_part += 1;
        } else if *wrong != earlier {
            eprintln!("seed {seed}, file {file:?}, under way: {:?}", pending.get(file));
        }
    }
    for entry in fs::read_dir(dir.path()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !names.contains(&name) {
            eprintln!("seed {seed}: {name} is left over");
            wrong.left_over += 1;
        }
    }
}

#[test]
fn a_killed_program_loses_nothing() {
    kill_often("buffered");
}

/// The keeper finds the description in the state at the kill: with `O_DIRECT` or without.
#[test]
fn nor_does_it_with_direct_backing() {
    kill_often("direct");
}

fn kill_often(backing: &str) {
    let aside = tempfile::tempdir().unwrap();
    let program = compile(aside.path());
    let scale = std::env::var("MILLPOND_TEST_SCALE").ok().and_then(|text| text.parse().ok());
    let kills = KILLS * scale.unwrap_or(1);
    let first = std::env::var("MILLPOND_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let first: u64 = first.unwrap_or_else(|| u64::from(std::process::id()) << 20);
    let mut wrong = Wrong::default();
    let mut seen = Seen::default();
    for seed in first..first + kills {
        kill_once(seed, backing, &program, &mut seen, &mut wrong);
    }
    println!("{backing}: {kills} kills from seed {first}: {seen:?}, {wrong:?}");
    assert_eq!(wrong, Wrong::default(), "seed {first}");
    assert!(seen.recoveries > kills / 2, "the keeper had nothing to do: {seen:?}");
}
