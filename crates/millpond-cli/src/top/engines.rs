//! Finds the engines of running processes: the memory files in which they publish statistics.
//!
//! There are two kinds: the file of an engine that publishes its statistics (`EngineBuilder::published`),
//! and the accounts of a `millpond run --stats`. The content is untrusted: lengths, magic numbers and
//! checksums are checked, and an invalid file is skipped. Root finds the files of all users, and reads a
//! bounded number of bytes from those of another user ([`Budgets`]).

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::OFlags;
use serde::Serialize;

use crate::run::explain::{self, FileSoFar};

const ENGINE_FILE: &str = "/memfd:millpond-stats (deleted)";
const RUN_FILE: &str = "/memfd:millpond-accounts (deleted)";
const HEADER_BYTES: u64 = 64;
/// The maximum length of an engine's text. A few KiB are usual.
const TEXT_BYTES_MAX: u64 = 1 << 20;
/// The number of reads of a text that is being written, and the time between: its writer may have been
/// preempted.
const TRIES: usize = 10;
const PAUSE: Duration = Duration::from_millis(2);
/// The maximum number of files per run: those with the most reads.
const FILES_MAX: usize = 100;

/// The statistics of an engine, or of all processes of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Watched {
    /// `engine` or `run`.
    pub kind: &'static str,
    pub pid: u32,
    pub program: String,
    /// The memory file's inode; distinguishes engines of one process.
    pub id: u64,
    pub values: BTreeMap<String, u64>,
    pub latencies: BTreeMap<String, LatencySnapshot>,
    pub files: Vec<FileSoFar>,
}

/// The latencies of one kind of operation; one of `one_in` operations was timed.
#[derive(Debug, Clone, Serialize)]
pub struct LatencySnapshot {
    pub one_in: u64,
    pub count: u64,
    pub sum_ns: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub max_ns: u64,
    /// Buckets: the upper bound in nanoseconds, and the count.
    #[serde(skip)]
    pub buckets: Vec<(u64, u64)>,
}

impl Watched {
    pub fn value(&self, name: &str) -> u64 {
        self.values.get(name).copied().unwrap_or(0)
    }

    /// The number of operations: reads, and the timed operations of other kinds, scaled by `one_in`.
    pub fn operations(&self) -> u64 {
        let others = self.latencies.iter().filter(|(kind, _)| !kind.starts_with("read_"));
        let others = others.map(|(_, latency)| latency.count.saturating_mul(latency.one_in));
        let reads = self.value("hits").saturating_add(self.value("misses"));
        others.fold(reads, u64::saturating_add)
    }
}

/// All engines; with a `pid` only those of that process, or the run it belongs to.
pub fn find(pid: Option<u32>) -> io::Result<Vec<Watched>> {
    let mut found = BTreeMap::new();
    let mut budgets = Budgets::default();
    for process in fs::read_dir("/proc")? {
        let process = process?;
        let Some(owner) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // Processes of other users are inaccessible, and processes end.
        let Ok(descriptors) = fs::read_dir(process.path().join("fd")) else { continue };
        for descriptor in descriptors.flatten() {
            if let Some((key, file)) = open(&descriptor.path())
                && !found.contains_key(&key)
                && let Some(watched) = read_statistics(owner, key.1, &file, &mut budgets)
            {
                found.insert(key, watched);
            }
        }
    }
    let is_wanted = |watched: &Watched| {
        let has_row = |pid: u32| watched.files.iter().any(|file| file.pid == u64::from(pid));
        pid.is_none_or(|pid| watched.pid == pid || has_row(pid))
    };
    let mut all: Vec<_> = found.into_values().collect();
    all.retain(is_wanted);
    all.sort_by_key(|watched| (watched.pid, watched.id));
    Ok(all)
}

/// A memory file, and its kind by its name.
struct Memory {
    file: File,
    user: u32,
    is_run: bool,
}

/// Opens the memory file behind a descriptor, if it has one of the names; also returns its device and
/// inode.
fn open(descriptor: &Path) -> Option<((u64, u64), Memory)> {
    let target = fs::read_link(descriptor).ok()?;
    let is_run = match target.to_str()? {
        ENGINE_FILE => false,
        RUN_FILE => true,
        _ => return None,
    };
    // The descriptor may have been reused for a file whose open would block.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(descriptor).ok()?;
    let metadata = file.metadata().ok().filter(fs::Metadata::is_file)?;
    let memory = Memory { file, user: metadata.uid(), is_run };
    Some(((metadata.dev(), metadata.ino()), memory))
}

fn read_statistics(owner: u32, id: u64, memory: &Memory, budgets: &mut Budgets) -> Option<Watched> {
    let left = budgets.remaining_of(memory.user);
    *left = left.checked_sub(FILE_COST)?;
    if memory.is_run {
        run(owner, id, &memory.file, left)
    } else {
        engine(owner, id, &memory.file, left)
    }
}

/// The bytes that this program still reads from files of each user. There is no bound for the calling user,
/// who can stop this program.
#[derive(Default)]
struct Budgets(HashMap<u32, u64>);

/// The budget of each other user in one scan: as many bytes as one file of a run may have.
const BUDGET_BYTES: u64 = 64 << 20;
/// The cost of any file, for its open.
const FILE_COST: u64 = 4 << 10;
/// The cost of an incomplete engine text, for the pauses until it is complete.
const BROKEN_COST: u64 = 4 << 20;

impl Budgets {
    fn remaining_of(&mut self, user: u32) -> &mut u64 {
        let is_own = user == rustix::process::geteuid().as_raw();
        self.0.entry(user).or_insert(if is_own { u64::MAX } else { BUDGET_BYTES })
    }
}

fn program(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(String::from_utf8_lossy).collect::<Vec<_>>().join(" ")
}

fn run(owner: u32, id: u64, file: &File, left: &mut u64) -> Option<Watched> {
    let bytes = explain::used_bytes(file).ok()??;
    *left = left.checked_sub(bytes)?;
    let (values, mut files) = explain::so_far(file, bytes).ok()??;
    files.sort_by_key(|file| std::cmp::Reverse(file.hits.saturating_add(file.misses)));
    files.truncate(FILES_MAX);
    Some(Watched {
        kind: "run",
        pid: owner,
        program: program(owner),
        id,
        values,
        latencies: BTreeMap::new(),
        files,
    })
}

fn engine(owner: u32, id: u64, file: &File, left: &mut u64) -> Option<Watched> {
    let whole = text(file);
    if whole.is_none() {
        *left = left.checked_sub(BROKEN_COST)?;
    }
    let text = whole.or_else(|| text_with_retries(file))?;
    *left = left.checked_sub(text.len() as u64)?;
    let mut watched = Watched {
        kind: "engine",
        pid: owner,
        program: program(owner),
        id,
        values: BTreeMap::new(),
        latencies: BTreeMap::new(),
        files: Vec::new(),
    };
    for line in text.lines() {
        match line.split_once(' ')? {
            ("latency", rest) => {
                let (kind, rest) = rest.split_once(' ')?;
                watched.latencies.insert(kind.to_owned(), LatencySnapshot::parse(rest)?);
            }
            (name, value) => {
                watched.values.insert(name.to_owned(), value.parse().ok()?);
            }
        }
    }
    // A child of fork has inherited its parent's file, which has no statistics of the child.
    let stated_pid = watched.values.remove("pid")?.to_string();
    is_known_as(owner, &stated_pid).then_some(watched)
}

/// The engine's text after retries: its writer may have been preempted.
fn text_with_retries(file: &File) -> Option<String> {
    (1..TRIES).find_map(|_| {
        sleep(PAUSE);
        text(file)
    })
}

/// Whether the process has that id, here or in its PID namespace.
fn is_known_as(pid: u32, stated_pid: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.unwrap_or_default().split_ascii_whitespace().any(|id| id == stated_pid)
}

/// The engine's text, if it is complete.
fn text(file: &File) -> Option<String> {
    let mut header = [0; HEADER_BYTES as usize];
    file.read_exact_at(&mut header, 0).ok()?;
    let line = header.split(|byte| *byte == b'\n').next()?;
    let mut words = std::str::from_utf8(line).ok()?.split(' ');
    if (words.next(), words.next()) != (Some("millpond-stats"), Some("1")) {
        return None;
    }
    let len: u64 = words.next()?.parse().ok().filter(|len| *len <= TEXT_BYTES_MAX)?;
    let stated_pid = u64::from_str_radix(words.next()?, 16).ok()?;
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, HEADER_BYTES).ok()?;
    // FNV-1a, as the engine computes it.
    let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    if sum == stated_pid { String::from_utf8(bytes).ok() } else { None }
}

impl LatencySnapshot {
    /// `ONE_IN SUM_NS [UPPER_NS:COUNT]...`
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let one_in = words.next()?.parse().ok()?;
        let sum_ns = words.next()?.parse().ok()?;
        let bucket = |word: &str| {
            let (upper_ns, count) = word.split_once(':')?;
            Some((upper_ns.parse().ok()?, count.parse().ok()?))
        };
        let buckets: Vec<(u64, u64)> = words.map(bucket).collect::<Option<_>>()?;
        let count = buckets.iter().try_fold(0_u64, |sum, (_, count)| sum.checked_add(*count))?;
        let at = |permille: u128| {
            let wanted = (u128::from(count) * permille).div_ceil(1000);
            let mut seen = 0;
            let found = buckets.iter().find(|(_, count)| {
                seen += u128::from(*count);
                seen >= wanted
            });
            found.map_or(0, |(upper_ns, _)| *upper_ns)
        };
        let (p50_ns, p99_ns, max_ns) = (at(500), at(990), at(1000));
        Some(Self { one_in, count, sum_ns, p50_ns, p99_ns, max_ns, buckets })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_text_that_is_not_whole_is_not_believed() {
        let engine = millpond::Engine::builder().cache_bytes(1 << 20).published(true).build();
        let engine = engine.unwrap();
        let own = find(Some(std::process::id())).unwrap();
        assert_eq!(own.len(), 1, "{own:?}");
        assert_eq!(own[0].value("limit_bytes"), 1 << 20);
        drop(engine);

        let read = |bytes: &[u8]| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(bytes).unwrap();
            text(&file)
        };
        let framed = |header: &str, text: &str| {
            let mut bytes = header.as_bytes().to_vec();
            bytes.resize(HEADER_BYTES as usize, 0);
            [&bytes, text.as_bytes()].concat()
        };
        // FNV-1a of "a", from its reference page.
        let sum = "af63dc4c8601ec8c";
        let whole = framed(&format!("millpond-stats 1 1 {sum}\n"), "a");
        assert_eq!(read(&whole).as_deref(), Some("a"));
        for (header, text) in [
            (format!("millpond-stats 1 1 {sum}\n"), "b"),
            (format!("millpond-stats 2 1 {sum}\n"), "a"),
            (format!("millpond-stats 1 2 {sum}\n"), "a"),
            (format!("millpond-stats 1 99999999999 {sum}\n"), "a"),
            (format!("something-else 1 1 {sum}\n"), "a"),
        ] {
            assert_eq!(read(&framed(&header, text)), None, "{header}{text}");
        }
        assert_eq!(read(b""), None);
    }

    #[test]
    fn percentiles_come_from_the_buckets() {
        let latency = LatencySnapshot::parse("64 900 9:98 19:1 29:1").unwrap();
        assert_eq!((latency.count, latency.p50_ns), (100, 9));
        assert_eq!((latency.p99_ns, latency.max_ns), (19, 29));
        assert!(LatencySnapshot::parse("64 900 9:98 x").is_none());
        assert!(LatencySnapshot::parse(&format!("1 1 1:{0} 2:{0}", u64::MAX)).is_none());
    }
}
