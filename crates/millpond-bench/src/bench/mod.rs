//! `millpond-bench SUITE`: measures Millpond and its baselines in turns on this machine.
//!
//! - [`harness`]: the parts of a suite: engines, slices, pairs. [`outcome`]: their results.
//! - [`data`], [`load`], [`loop_mount`]: the test files, the order of their blocks, and file
//!   systems for them.
//! - [`cached_read`], [`around_hit`], [`fio`], [`async_read`], [`fio_aio`], [`wakeups`], [`mod@write`],
//!   [`mixed`], [`range_lock`], [`no_copy`], [`stalls`], [`shared_hit`], [`untorn`], [`programs`]: the suites.
//! - [`plan`]: sizes and time limits. [`interrupt`], [`creation_lock`]: cleanup after a signal.
//! - [`machine`], [`catalog`], [`targets`]: the machine, the description of the cases, and their
//!   targets.
//! - [`report`], [`html`], [`mod@compare`], [`render_docs`]: output of reports, and commands on them.
//!
//! A new suite is a module with a `run(&Plan) -> Result<Outcome>`, a line in [`SUITES`], and its
//! cases in [`catalog`].

mod around_hit;
mod async_read;
mod cached_read;
mod catalog;
mod compare;
mod creation_lock;
mod data;
mod fio;
mod fio_aio;
mod harness;
mod histogram;
mod html;
mod interrupt;
mod load;
mod loop_mount;
mod machine;
mod mixed;
mod no_copy;
mod outcome;
mod plan;
mod programs;
mod range_lock;
mod render_docs;
mod report;
mod shared_hit;
mod stalls;
mod targets;
mod untorn;
mod wakeups;
mod write;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::ValueEnum;

pub use self::compare::{CompareArgs, run as compare};
use self::outcome::Outcome;
use self::plan::{Pace, Plan};
pub use self::render_docs::{FiguresArgs, run as render};
use self::report::Report;
use crate::failure::{Context, FAILED, Failure, REFUSED, Result};

/// What to measure, and where the results go.
#[derive(Debug, clap::Args)]
pub struct SuiteArgs {
    /// What to measure
    #[arg(value_enum, required = true)]
    suite: Option<Suite>,

    /// Where to create the test files, on the file system to measure; they are removed
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,

    /// Fewer and shorter rounds
    #[arg(long)]
    quick: bool,

    /// Write the results to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write a report with charts to FILE, one self-contained page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Measure only cases whose name contains TEXT
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,

    /// Divide all sizes and times by N: tests whether it runs, measures nothing
    #[arg(long, value_name = "N", default_value_t = 1, hide = true,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    shrink: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// Reads of cached data, and the cost of a miss
    CachedRead,
    /// Operations besides hits: misses, overwrites, opens, direct requests
    AroundTheHit,
    /// Reads of data that is not cached, many at a time, and of cached data as futures
    AsyncRead,
    /// Waits for completions in batches
    Wakeups,
    /// Writes, until they are durable
    Write,
    /// Direct I/O: the cost of a request, for any number of segments
    NoCopy,
    /// Reads and writes of one file by many threads at once
    Mixed,
    /// The longest sync, append or cached write beside other threads' work
    Stalls,
    /// Locks on byte ranges: Millpond's, and other implementations
    RangeLock,
    /// Hits in a cache that another process has
    Shared,
    /// A store of pages that a power cut must not tear, on XFS; needs root
    Untorn,
    /// Unmodified programs, under `millpond run` and on the kernel
    Programs,
    /// All of them except untorn and programs, which needs 8 GB and other packages
    All,
}

type Run = fn(&Plan) -> Result<Outcome>;

/// A suite, its time limit in seconds (full and quick), and its number of pairs on a machine with
/// two cores.
struct Timed {
    suite: Suite,
    run: Run,
    seconds: [u64; 2],
    pairs: u32,
}

const fn timed(suite: Suite, run: Run, seconds: [u64; 2], pairs: u32) -> Timed {
    Timed { suite, run, seconds, pairs }
}

/// All suites, in the order in which they run. All but the last two may take 23 minutes, or 3.7.
const SUITES: [Timed; 12] = [
    timed(Suite::CachedRead, cached_read::run, [210, 36], 37),
    timed(Suite::AroundTheHit, around_hit::run, [90, 16], 14),
    timed(Suite::AsyncRead, async_read::run, [200, 28], 32),
    timed(Suite::Wakeups, wakeups::run, [70, 10], 12),
    timed(Suite::Write, write::run, [140, 22], 9),
    timed(Suite::NoCopy, no_copy::run, [110, 18], 15),
    timed(Suite::Mixed, mixed::run, [330, 40], 51),
    timed(Suite::Stalls, stalls::run, [70, 12], 7),
    timed(Suite::RangeLock, range_lock::run, [110, 18], 160),
    timed(Suite::Shared, shared_hit::run, [60, 12], 12),
    timed(Suite::Untorn, untorn::run, [90, 20], 4),
    timed(Suite::Programs, programs::run, [1200, 240], 30),
];

impl Suite {
    fn name(self) -> &'static str {
        match self {
            Suite::CachedRead => "cached-read",
            Suite::AroundTheHit => "around-the-hit",
            Suite::AsyncRead => "async-read",
            Suite::Wakeups => "wakeups",
            Suite::Write => "write",
            Suite::NoCopy => "no-copy",
            Suite::Mixed => "mixed",
            Suite::Stalls => "stalls",
            Suite::RangeLock => "range-lock",
            Suite::Shared => "shared",
            Suite::Untorn => "untorn",
            Suite::Programs => "programs",
            Suite::All => "all",
        }
    }
}

/// Measures the suites of `args`, and reports the results.
pub fn run(args: &SuiteArgs) -> Result<()> {
    let suite = args.suite.unwrap_or(Suite::All);
    let dir = fs::canonicalize(&args.dir).context(format!("--dir {}", args.dir.display()))?;
    if !dir.is_dir() {
        let message = format!("--dir {}: not a directory", args.dir.display());
        return Err(Failure::new(REFUSED, message));
    }
    // Fails now if a file can't be written, not after the measurement.
    for file in [&args.json, &args.html].into_iter().flatten() {
        fs::write(file, []).context(file.display())?;
    }
    let plan = Plan::new(dir, args.quick, args.shrink, args.case.clone());
    interrupt::watch(&plan.dir)?;
    let machine = machine::Machine::of(&plan.dir);
    let mut outcome = Outcome::default();
    let is_wanted = |timed: &&Timed| {
        let is_apart = matches!(timed.suite, Suite::Untorn | Suite::Programs);
        timed.suite == suite || suite == Suite::All && !is_apart
    };
    let wanted: Vec<&Timed> = SUITES.iter().filter(is_wanted).collect();
    let share = |timed: &&Timed| Duration::from_secs(timed.seconds[usize::from(plan.quick)]);
    for (index, timed) in wanted.iter().enumerate() {
        let name = timed.suite.name();
        let (begun, pairs) = (Instant::now(), timed.pairs);
        let ends = begun + share(timed);
        plan.begin(Pace { name, ends, pairs, after: wanted[index + 1..].iter().map(share).sum() });
        outcome.extend(name, (timed.run)(&plan)?);
        let (took, share) = (begun.elapsed().as_secs(), share(timed).as_secs());
        outcome.note(format!("{name} took {took} s of {share}"));
    }
    plan.end();
    if outcome.is_empty() {
        return Err(Failure::new(REFUSED, "--case: no case has such a name"));
    }
    let has_failed = outcome.has_failed;
    let report = Report::new(suite.name(), machine, outcome);
    if args.shrink > 1 {
        eprintln!("sizes and times are divided by {}: these figures mean nothing", args.shrink);
    }
    println!("{}", report.table());
    save(args.json.as_deref(), || report.json())?;
    save(args.html.as_deref(), || html::page(&report))?;
    if has_failed {
        return Err(Failure::new(
            FAILED,
            "some cases failed; see the list of those that were not measured",
        ));
    }
    Ok(())
}

fn save(file: Option<&Path>, contents: impl FnOnce() -> Result<String>) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    fs::write(file, contents()?).context(file.display())
}
