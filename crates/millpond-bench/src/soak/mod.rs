//! `millpond-bench soak`: self-checking loads for hours, through the library and under `millpond run`.
//!
//! ```text
//! lane (a thread, a directory) -> rounds -> worker, a process: `millpond-bench soak-worker` -> ledger
//!                                        -> kills, of it and of its keeper -> check
//! ```
//!
//! [`slots`] generates and checks contents, [`ledger`] records writes, [`worker`] reads and writes,
//! [`alone`] has loads that check themselves, [`lane`] starts, kills and checks, [`verdict`] sums up.

mod alone;
mod lane;
mod ledger;
mod slots;
mod verdict;
mod worker;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use self::lane::{LANES, Lane};
use self::ledger::{Count, Ledger};
use self::verdict::{Operations, SoakCounts, SoakVerdict};
use crate::failure::{Context, Failure, REFUSED, Result};
use crate::millpond_command::millpond;

/// Runs self-checking mixed loads with evictions, kills and faults, for a given time
///
/// The loads use the library in both modes, with keepers and without, with direct I/O, and programs under
/// `millpond run`; others change extents, or use a simulated device that fails. Workers and keepers are
/// killed at random. All reads are checked, and after each round the kernel's files. Stops at the first
/// failure, and then keeps the files.
///
/// Exit status: 0 if there was no failure, 1 if there was one, 2 for arguments that can't be accepted.
#[derive(Debug, clap::Args)]
pub struct SoakArgs {
    /// The duration in hours
    #[arg(long, default_value_t = 0.5, conflicts_with = "seconds")]
    hours: f64,

    /// The duration in seconds
    #[arg(long)]
    seconds: Option<u64>,

    /// The directory for temporary files, which are removed at the end
    #[arg(long, default_value = ".")]
    dir: PathBuf,

    /// The seed of operations and kills; the timing of the machine matters, too
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// The cache of each worker, which has 9 MiB of files
    #[arg(long, value_name = "SIZE", default_value = "2m", value_parser = parse_size)]
    cache: u64,

    /// Print the verdict as JSON
    #[arg(long)]
    json: bool,
}

/// A size as fio writes it: `4k` is 4096.
fn parse_size(text: &str) -> std::result::Result<u64, String> {
    ::parse_size::Config::new().with_binary().parse_size(text).map_err(|error| error.to_string())
}

/// A worker of `millpond-bench soak`.
#[derive(Debug, clap::Args)]
pub struct WorkerArgs {
    #[command(subcommand)]
    load: WorkerLoad,
}

#[derive(Debug, clap::Subcommand)]
enum WorkerLoad {
    Slots(worker::Worker),
    Extents(alone::Alone),
    Faults(alone::Alone),
}

pub fn work(args: &WorkerArgs) -> Result<()> {
    match &args.load {
        WorkerLoad::Slots(worker) => worker::run(worker),
        WorkerLoad::Extents(alone) => alone::extents(alone),
        WorkerLoad::Faults(alone) => alone::faults(alone),
    }
}

pub fn run(args: &SoakArgs) -> Result<ExitCode> {
    if args.cache < 512 << 10 {
        return Err(Failure::new(REFUSED, "--cache: at least 512k"));
    }
    let is_wanted = args.hours > 0.0 && args.hours < 10_000.0;
    if !is_wanted {
        return Err(Failure::new(REFUSED, "--hours: more than 0, and less than 10,000"));
    }
    // Fails now if it is missing, not in a lane.
    millpond()?;
    let length = match args.seconds {
        Some(seconds) => Duration::from_secs(seconds),
        None => Duration::from_secs_f64(args.hours * 3600.0),
    };
    let parent = args.dir.canonicalize().context(args.dir.display())?;
    let dir = tempfile::Builder::new()
        .prefix("millpond-soak-")
        .tempdir_in(&parent)
        .context(parent.display())?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).context("signal handler")?;
    }
    let (is_over, tally) = (AtomicBool::new(false), SoakCounts::default());
    let begun = Instant::now();
    let mut failures = Vec::new();
    std::thread::scope(|scope| {
        let mut lanes = Vec::new();
        for (number, (name, kind)) in LANES.iter().enumerate() {
            let lane = Lane {
                name,
                kind: *kind,
                dir: dir.path().join(name),
                seed: args.seed.wrapping_mul(1_000_003).wrapping_add(number as u64),
                cache_bytes: args.cache,
                end: begun + length,
                is_over: &is_over,
                tally: &tally,
            };
            lanes.push(scope.spawn(move || {
                let outcome = lane.run();
                if outcome.is_err() {
                    lane.is_over.store(true, Relaxed);
                }
                outcome
            }));
        }
        progress(begun, length, &interrupted, &is_over, dir.path(), &tally, || {
            lanes.iter().all(|lane| lane.is_finished())
        });
        for lane in lanes {
            failures.extend(lane.join().expect("no panic").err());
        }
    });
    // Lanes that were interrupted have not failed.
    let failures: Vec<String> = failures
        .into_iter()
        .map(|failure| failure.message)
        .filter(|message| !message.ends_with(&lane::interruption().message))
        .collect();
    let operations = operations(dir.path());
    let mut verdict = SoakVerdict::new(begun.elapsed().as_secs(), args.seed, &tally, operations);
    verdict.interrupted = interrupted.load(Relaxed);
    verdict.kept = (!failures.is_empty()).then(|| dir.path().to_owned());
    verdict.failures = failures;
    if verdict.kept.is_some() {
        let _ = dir.keep();
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&verdict).context("the verdict")?);
    } else {
        print!("{verdict}");
    }
    Ok(if verdict.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints the progress: a line that changes on a terminal, otherwise a line each minute. Returns when all
/// lanes have ended.
fn progress(
    begun: Instant,
    length: Duration,
    interrupted: &AtomicBool,
    is_over: &AtomicBool,
    dir: &Path,
    tally: &SoakCounts,
    have_ended: impl Fn() -> bool,
) {
    let is_terminal = std::io::stderr().is_terminal();
    let period = Duration::from_secs(if is_terminal { 1 } else { 60 });
    let mut next = period;
    while !have_ended() {
        if interrupted.load(Relaxed) {
            is_over.store(true, Relaxed);
        }
        std::thread::sleep(Duration::from_millis(10));
        let elapsed = begun.elapsed();
        if elapsed < next {
            continue;
        }
        next += period;
        let Operations { reads, writes, syncs } = operations(dir);
        let (elapsed, length) = (elapsed.as_secs(), length.as_secs());
        let (kills, checks) = (tally.kills.load(Relaxed), tally.checks.load(Relaxed));
        let line = format!(
            "{elapsed} of {length} s: {reads} reads, {writes} writes, {syncs} syncs, {kills} kills, {checks} checks"
        );
        if is_terminal {
            eprint!("\r{line}");
        } else {
            eprintln!("{line}");
        }
    }
    if is_terminal {
        eprintln!();
    }
}

fn operations(dir: &Path) -> Operations {
    let mut all = Operations::default();
    for (name, _) in LANES {
        let Ok(ledger) = Ledger::open(&dir.join(name).join("ledger")) else { continue };
        let count = |count| ledger.count(count).unwrap_or(0);
        all.reads += count(Count::Reads);
        all.writes += count(Count::Writes);
        all.syncs += count(Count::Syncs);
    }
    all
}
