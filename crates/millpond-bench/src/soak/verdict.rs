//! The sum of all lanes: counts and failures.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;

/// The counts of all lanes.
#[derive(Debug, Default)]
pub struct SoakCounts {
    pub rounds: AtomicU64,
    pub kills: AtomicU64,
    pub keeper_kills: AtomicU64,
    /// The number of complete checks of a worker's files.
    pub checks: AtomicU64,
    resident_bytes_max: AtomicU64,
}

impl SoakCounts {
    pub fn resident(&self, bytes: u64) {
        self.resident_bytes_max.fetch_max(bytes, Relaxed);
    }
}

/// Reads, writes and syncs, as the workers recorded them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Operations {
    pub reads: u64,
    pub writes: u64,
    pub syncs: u64,
}

#[derive(Debug, Serialize)]
pub struct SoakVerdict {
    pub seconds: u64,
    pub seed: u64,
    pub rounds: u64,
    pub reads: u64,
    pub writes: u64,
    pub syncs: u64,
    pub kills: u64,
    pub keeper_kills: u64,
    pub checks: u64,
    pub resident_bytes_max: u64,
    pub interrupted: bool,
    /// The failure of each lane that has failed.
    pub failures: Vec<String>,
    /// The directory of the files, if there was a failure.
    pub kept: Option<PathBuf>,
}

impl SoakVerdict {
    pub fn new(seconds: u64, seed: u64, tally: &SoakCounts, operations: Operations) -> SoakVerdict {
        SoakVerdict {
            seconds,
            seed,
            rounds: tally.rounds.load(Relaxed),
            reads: operations.reads,
            writes: operations.writes,
            syncs: operations.syncs,
            kills: tally.kills.load(Relaxed),
            keeper_kills: tally.keeper_kills.load(Relaxed),
            checks: tally.checks.load(Relaxed),
            resident_bytes_max: tally.resident_bytes_max.load(Relaxed),
            interrupted: false,
            failures: Vec::new(),
            kept: None,
        }
    }
}

impl fmt::Display for SoakVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} s, seed {}: {} rounds, {} reads that were looked at, {} writes, {} syncs; {} workers and {} \
             keepers killed, {} times all that was left looked at; at most {} KiB resident",
            self.seconds,
            self.seed,
            self.rounds,
            self.reads,
            self.writes,
            self.syncs,
            self.kills,
            self.keeper_kills,
            self.checks,
            self.resident_bytes_max >> 10
        )?;
        for failure in &self.failures {
            writeln!(f, "FAILED: {failure}")?;
        }
        if let Some(kept) = &self.kept {
            writeln!(f, "the files are in {}", kept.display())?;
        }
        let begun = if self.interrupted { "interrupted; so far " } else { "" };
        let is_clean = self.failures.is_empty();
        writeln!(f, "{begun}{}", if is_clean { "no failures" } else { "NOT CLEAN" })
    }
}
