//! Holes, zeros and space in mode back, and a sudden death. Either the program dies, and its keeper writes the dirty
//! pages that it left; or the keeper dies, and the program continues without it.
//!
//! The program `extents` reports each call before and after it; a model of its files is compared with the files.
//! `MILLPOND_TEST_SEED` and `MILLPOND_TEST_SCALE` have the same meaning as in the tests of the engine.

mod common;

use std::collections::HashMap;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{Mode, Pond, start_keeper};
use millpond::keeper::{Address, Server};

const RECORD_BYTES: usize = 40;

const WRITE: u32 = 1;
const TRUNCATE: u32 = 2;
const PUNCH: u32 = 3;
const ZERO: u32 = 4;
const ALLOCATE: u32 = 5;

const CALLED: u32 = 0;
const RETURNED: u32 = 1;

/// Has the layout of the program's `struct record`.
#[derive(Clone, Debug)]
struct Record {
    kind: u32,
    state: u32,
    thread: u32,
    file: u32,
    offset: usize,
    len: usize,
    sequence: u64,
}

impl Record {
    fn of(bytes: &[u8]) -> Record {
        let u32_at = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        Record {
            kind: u32_at(0),
            state: u32_at(4),
            thread: u32_at(8),
            file: u32_at(12),
            offset: u64_at(16) as usize,
            len: u64_at(24) as usize,
            sequence: u64_at(32),
        }
    }

    fn bytes(&self) -> impl Iterator<Item = u8> {
        let start = self.sequence.wrapping_mul(2_654_435_761) + u64::from(self.thread) * 77;
        let step = move |at: u64| start.wrapping_add(at * 40503);
        (0..self.len as u64).map(step).map(|x| ((x >> 13) ^ x) as u8)
    }

    fn apply(&self, data: &mut Vec<u8>) {
        let end = self.offset + self.len;
        match self.kind {
            WRITE | ALLOCATE => {
                data.resize(data.len().max(end), 0);
                if self.kind == WRITE {
                    data[self.offset..end].iter_mut().zip(self.bytes()).for_each(|(to, b)| *to = b);
                }
            }
            TRUNCATE => data.resize(self.offset, 0),
            PUNCH | ZERO => {
                let (start, end) = (self.offset.min(data.len()), end.min(data.len()));
                data[start..end].fill(0);
            }
            _ => {}
        }
    }
}

/// A file's bytes after the last call that returned, and the call that has not returned.
#[derive(Default)]
struct Model {
    data: Vec<u8>,
    under_way: Option<Record>,
}

/// The expected files according to the program's records, and the number of calls that returned.
fn models(account: &[u8]) -> (HashMap<String, Model>, usize) {
    let (mut models, mut returned) = (HashMap::<String, Model>::new(), 0);
    for record in account.chunks_exact(RECORD_BYTES).skip(1).map(Record::of) {
        let model = models.entry(format!("t{}-{}", record.thread, record.file)).or_default();
        model.under_way = match record.state {
            CALLED => Some(record),
            RETURNED => {
                record.apply(&mut model.data);
                returned += 1;
                None
            }
            // Refused: the file system does not support the operation.
            _ => None,
        };
    }
    (models, returned)
}

/// Whether each page in the range of an unfinished write has its old or its new bytes. The kernel ends a write
/// between two pages when its process is killed. Without the library, 3,000 kills of a program that wrote 36 KiB
/// repeatedly left 2,354 such writes. With the smallest cache few pages may be dirty, and writes go to the kernel at
/// once.
fn is_ended_by_kernel(
    found: &[u8],
    before: &[u8],
    after: &[u8],
    under_way: &Option<Record>,
) -> bool {
    const PAGE: usize = 4096;
    under_way.as_ref().is_some_and(|record| record.kind == WRITE)
        && (before.len()..=after.len()).contains(&found.len())
        && found.chunks(PAGE).enumerate().all(|(page, found)| {
            let is_of =
                |model: &[u8]| model.get(page * PAGE..).is_some_and(|rest| rest.starts_with(found));
            is_of(before) || is_of(after)
        })
}

/// The differences between the files and their models.
fn wrongs(pond: &Pond, models: &HashMap<String, Model>, cache_bytes: u64) -> Vec<String> {
    let mut wrongs = Vec::new();
    for (name, Model { data, under_way }) in models {
        let found = std::fs::read(pond.path(name)).unwrap();
        let mut after = data.clone();
        if let Some(record) = under_way {
            record.apply(&mut after);
        }
        let is_small = cache_bytes == CACHES[2];
        if found != *data
            && found != after
            && !(is_small && is_ended_by_kernel(&found, data, &after, under_way))
        {
            let differs = |model: &[u8]| found.iter().zip(model).position(|(one, two)| one != two);
            wrongs.push(format!(
                "{name}: {} bytes, not {} or {}; differs at {:?} and {:?}; under way: {under_way:?}",
                found.len(),
                data.len(),
                after.len(),
                differs(data),
                differs(&after),
            ));
        }
    }
    wrongs
}

/// Starts the program and reads its first record.
fn start(pond: &Pond, program: &Path, args: [u64; 2], keeper: &Address) -> Child {
    let mut command = pond.served(program);
    command.args(args.map(|number| number.to_string()));
    command.env("MILLPOND_KEEPER", keeper.to_string()).env_remove("MILLPOND_QUIET");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut hello = [0; RECORD_BYTES];
    child.stdout.as_mut().unwrap().read_exact(&mut hello).unwrap();
    assert_eq!(Record::of(&hello).sequence, u64::from(child.id()));
    child
}

/// Reads all further records of the program.
fn account_of(child: &mut Child) -> Vec<u8> {
    let mut account = vec![0; RECORD_BYTES];
    child.stdout.take().unwrap().read_to_end(&mut account).unwrap();
    account
}

/// Reads records as `account_of` does, then kills the program: at any moment, or while it makes a hole or zeros.
fn account_until_killed(child: &mut Child, seed: u64) -> Vec<u8> {
    let (begun, delay) = (Instant::now(), some_delay(seed, 150_000));
    let mut account = vec![0; RECORD_BYTES];
    let stdout = child.stdout.as_mut().unwrap();
    loop {
        let mut record = [0; RECORD_BYTES];
        stdout.read_exact(&mut record).expect("the program goes on until it is killed");
        account.extend(record);
        let record = Record::of(&record);
        let is_clearing = matches!(record.kind, PUNCH | ZERO) && record.state == CALLED;
        if begun.elapsed() > delay && (is_clearing || seed.is_multiple_of(4)) {
            break;
        }
    }
    for _ in 0..some_delay(seed, 30_000).as_micros() {
        std::hint::spin_loop();
    }
    child.kill().unwrap();
    child.stdout.take().unwrap().read_to_end(&mut account).unwrap();
    account
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn first_seed() -> u64 {
    let seed = variable("MILLPOND_TEST_SEED");
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20);
    println!("MILLPOND_TEST_SEED={seed}");
    seed
}

fn runs(few: u64) -> u64 {
    few * variable("MILLPOND_TEST_SCALE").unwrap_or(1)
}

fn some_delay(seed: u64, below_us: u64) -> Duration {
    Duration::from_micros((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) % below_us)
}

/// Smaller than the usual 64 MiB, in which no page would be evicted.
const CACHES: [u64; 3] = [16 << 20, 4 << 20, 512 << 10];

fn cache_of(seed: u64) -> u64 {
    CACHES[seed as usize % CACHES.len()]
}

fn pond(seed: u64) -> Pond {
    let cache_bytes = cache_of(seed);
    let mode = [Mode::Back, Mode::BackDirect][seed as usize / 3 % 2];
    Pond::with_cache_bytes(cache_bytes).in_mode(mode)
}

/// Goal: after a program was killed and the keeper has finished, the files have the effect of every call that
/// returned, also of calls that make a hole, zeros or space. The unfinished call took effect or did not.
#[test]
fn killed_in_changes_of_extents() {
    let (first, kills) = (first_seed(), runs(24));
    let program = Pond::new();
    let program = (program.compile("extents.c", &["-O1"]), program);
    let (mut returned, mut recovered) = (0, 0);
    for seed in first..first + kills {
        let pond = pond(seed);
        let server = Server::bind(&Address::unique()).unwrap();
        let (address, stopper) = (server.address().clone(), server.stopper());
        let keeper = std::thread::spawn(move || {
            let (mut pages, mut incomplete) = (0, Vec::new());
            let served = server.serve(|report| {
                pages += report.pages();
                if !report.is_complete() {
                    incomplete.push(report.to_string());
                }
            });
            served.map(|()| (pages, incomplete))
        });
        let mut child = start(&pond, &program.0, [seed, 0], &address);
        let account = account_until_killed(&mut child, seed);
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.signal(), Some(9), "the program's end is not ours: {said}");
        stopper.stop_when_idle();
        let (pages, incomplete) = keeper.join().unwrap().unwrap();
        assert_eq!(incomplete, [""; 0], "seed {seed}");
        let (models, calls) = models(&account);
        assert_eq!(wrongs(&pond, &models, cache_of(seed)), [""; 0], "seed {seed}");
        returned += calls;
        recovered += u64::from(pages > 0);
    }
    println!("{kills} kills: {returned} calls returned, {recovered} times there were dirty pages");
    assert!(recovered > kills / 2, "the keeper had nothing to do");
}

/// Goal: the death of a keeper does not affect a running program. The program continues to its end, no call fails,
/// the files have all writes then, and the library reports the death.
#[test]
fn the_keeper_dies_under_a_running_program() {
    let (first, kills) = (first_seed(), runs(12));
    let program = Pond::new();
    let program = (program.compile("extents.c", &["-O1"]), program);
    let (mut returned, mut reports) = (0, 0);
    for seed in first..first + kills {
        let pond = pond(seed);
        let (mut keeper, address) = start_keeper(drop);
        let mut child = start(&pond, &program.0, [seed, 1500], &address);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(some_delay(seed, 100_000));
            keeper.kill().unwrap();
            keeper.wait().unwrap();
        });
        let account = account_of(&mut child);
        killer.join().unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "seed {seed}: {}: {said}", output.status);
        let (models, calls) = models(&account);
        assert_eq!(wrongs(&pond, &models, cache_of(seed)), [""; 0], "seed {seed}: {said}");
        assert!(models.values().all(|model| model.under_way.is_none()), "a call did not return");
        returned += calls;
        reports += u64::from(said.contains("the keeper died"));
    }
    println!("{kills} keepers killed: {returned} calls returned, {reports} deaths were reported");
    assert!(reports > kills / 2, "{reports} of {kills} deaths were reported");
}
