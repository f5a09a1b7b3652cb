//! RocksDB, a log-structured key-value store, by its own benchmark: repeated random reads in one
//! process.

use std::io;
use std::path::Path;
use std::process::Command;

use super::child::Ended;
use super::fixtures::{self, WorkDirectory, program};
use super::job::{JobRunner, JobTarget, ProgramJob, Reading, remove, slice, target};
use crate::bench::harness::Slice;
use crate::failure::{Context, Result};

const FIRST: JobTarget = target("kv-first", 0.95);
const FOURTH: JobTarget = target("kv-fourth", 1.4);

/// Keys, full and quick: 640 and 80 MB with values of 100 bytes.
const KEYS: [usize; 2] = [5_500_000, 690_000];
/// Reads of each thread in a pass; a block has some thirty keys.
const READS: [usize; 2] = [250_000, 31_000];
const PASSES: usize = 4;

pub fn run(work_dir: &WorkDirectory, runner: &mut JobRunner<'_>) -> Result<()> {
    let targets = [FIRST, FOURTH];
    if !runner.wants(&targets) {
        return Ok(());
    }
    if let Err(reason) = program("db_bench", "rocksdb-tools") {
        runner.skip(&targets, reason);
        return Ok(());
    }
    let path = work_dir.at("store");
    let keys = runner.plan.count(KEYS[0], KEYS[1]);
    let mut command = Command::new("db_bench");
    command.args(words(&path, keys)).args(["--benchmarks=fillseq", "--disable_wal=1"]);
    fixtures::make(&mut command)?;
    fixtures::settle(&work_dir.path)?;
    for threads in [1, 2] {
        let reads = runner.plan.count(READS[0], READS[1]);
        let mut command = vec!["db_bench".to_owned()];
        command.extend(words(&path, keys));
        command.push(format!("--benchmarks={}", ["readrandom"; PASSES].join(",")));
        command.push(format!("--threads={threads}"));
        command.push(format!("--reads={reads}"));
        command.extend(["--use_existing_db=1", "--readonly=1", "--seed=1"].map(str::to_owned));
        let job =
            ProgramJob::timing_itself(targets, command, read).threads(threads).reads(&[&path]);
        runner.measure(&work_dir.path, &job);
    }
    remove(&path).context(path.display())
}

fn words(path: &Path, keys: usize) -> Vec<String> {
    let path = path.display();
    ["--compression_type=none".into(), format!("--db={path}"), format!("--num={keys}")].into()
}

/// The first and the last pass.
fn read(ended: &Ended) -> io::Result<Reading> {
    let passes: Vec<Pass> = ended.stdout.lines().filter_map(Pass::of).collect();
    if passes.len() != PASSES {
        return Err(io::Error::other(format!("db_bench: {} passes", passes.len())));
    }
    let slices = [&passes[0], &passes[PASSES - 1]]
        .map(|pass| Slice { ops_per_s: pass.ops_per_s, ..slice(pass.ops, ended.elapsed, ended) });
    let found: Vec<&str> = passes.iter().map(|pass| &*pass.found).collect();
    Ok(Reading { slices: slices.into(), said: found.join("\n") })
}

/// The report of one pass.
#[derive(Debug, PartialEq)]
struct Pass {
    ops: u64,
    /// Reported with more digits than the time.
    ops_per_s: f64,
    found: String,
}

impl Pass {
    /// From a line such as `readrandom : 6.9 micros/op 142972 ops/sec 0.699 seconds 100000 operations; 15.8
    /// MB/s (100000 of 100000 found)`.
    fn of(line: &str) -> Option<Self> {
        let (_, found) = line.strip_prefix("readrandom")?.split_once('(')?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let before = |unit: &str| {
            let at = words.iter().position(|word| word.trim_end_matches(';') == unit)?;
            words.get(at.checked_sub(1)?).copied()
        };
        Some(Self {
            ops: before("operations")?.parse().ok()?,
            ops_per_s: before("ops/sec")?.parse().ok()?,
            found: found.trim_end_matches(')').to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_are_understood() {
        let line = "readrandom   :       6.994 micros/op 142972 ops/sec 0.699 seconds 100000 \
                    operations;   15.8 MB/s (99 of 100000 found)";
        let found = "99 of 100000 found".to_owned();
        assert_eq!(Pass::of(line), Some(Pass { ops: 100_000, ops_per_s: 142_972.0, found }));
        assert_eq!(Pass::of("fillseq : 1.2 micros/op"), None);
        assert_eq!(Pass::of("readrandom : "), None);
    }
}
