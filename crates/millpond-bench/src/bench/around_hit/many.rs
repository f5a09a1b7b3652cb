//! The cost of a file among many open ones: 10^5 open files are each written and synced once,
//! compared with 10^3.
//!
//! The device completes at once, so only the engine's own work is measured.

use std::time::Duration;

use millpond::{BackendChoice, Engine, File, OpenOptions, WriteMode};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::bench::around_hit::small_files::{BLOCK_BYTES, Directory};
use crate::bench::data::MIB;
use crate::bench::harness::{Pair, Slice};
use crate::bench::outcome::Outcome;
use crate::bench::plan::Plan;
use crate::bench::write::timed;
use crate::failure::{Context, Result};

const CASE: &str = "open-files-write-sync";
const MANY: u32 = 100_000;
const MANY_QUICK: u32 = 20_000;
const FEW: u32 = 1000;
/// Memory of each file: its page, a leaf of its table, and its heap memory.
const FILE_BYTES: u64 = 16 << 10;

/// Other descriptors of the process.
const OTHERS: u64 = 100;

struct ManyFiles {
    files: Vec<File>,
    _engine: Engine,
    _directory: Directory,
}

impl ManyFiles {
    fn open(plan: &Plan, count: u32) -> Result<Self> {
        let directory = Directory::create(&plan.dir, count, 0)?;
        let engine = Engine::builder()
            .cache_bytes(u64::from(count) * FILE_BYTES + 64 * MIB)
            .backend(BackendChoice::Null)
            .build()
            .context("building an engine")?;
        let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
        let files = (0..count).map(|number| engine.open(directory.path(number), &options));
        let files = files.collect::<millpond::Result<_>>().context(CASE)?;
        Ok(Self { files, _engine: engine, _directory: directory })
    }

    fn slice(&self, length: Duration) -> std::io::Result<Slice> {
        let block = [1; BLOCK_BYTES as usize];
        let mut all = Slice::default();
        let mut took = Duration::ZERO;
        // Few files are used more than once, as the clock is coarse.
        while took < length {
            let slice = timed(self.files.len() as u64, || {
                for file in &self.files {
                    file.write_all_at(&block, 0)?;
                    file.sync_data()?;
                }
                Ok(())
            })?;
            took += Duration::from_secs_f64(slice.ops as f64 / slice.ops_per_s);
            all.ops += slice.ops;
            all.cpu += slice.cpu;
            all.context_switches += slice.context_switches;
        }
        all.ops_per_s = all.ops as f64 / took.as_secs_f64();
        Ok(all)
    }
}

pub fn run(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    if !plan.wants(CASE) {
        return Ok(());
    }
    plan.report_progress(CASE);
    let wanted = plan.count(MANY as usize, MANY_QUICK as usize) as u32;
    let few = plan.count(FEW as usize, FEW as usize) as u32;
    let many =
        wanted.min(descriptors(u64::from(wanted + few) + OTHERS) as u32 - few - OTHERS as u32);
    let [subject, baseline] = [many, few].map(|count| format!("millpond, null, {count} files"));
    if many < wanted {
        outcome.note(format!(
            "{CASE}: {many} files, as RLIMIT_NOFILE allows no more; {wanted} wanted"
        ));
    }
    let (own, other) = (ManyFiles::open(plan, many)?, ManyFiles::open(plan, few)?);
    let pair = Pair {
        case: CASE,
        threads: 1,
        block_bytes: Some(BLOCK_BYTES),
        subject: &subject,
        baseline: &baseline,
    };
    let length = plan.slice(100, 50);
    own.slice(length).and(other.slice(length)).context(CASE)?;
    outcome.rows.extend(pair.measure(
        plan.rounds(),
        || own.slice(length),
        || other.slice(length),
    )?);
    Ok(())
}

/// Raises the limit to `wanted` descriptors, as far as permitted; returns the limit.
fn descriptors(wanted: u64) -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.current.unwrap_or(u64::MAX);
    if current >= wanted {
        return wanted;
    }
    let soft = limit.maximum.unwrap_or(u64::MAX).min(wanted);
    let raised =
        Rlimit { current: Some(wanted), maximum: limit.maximum.map(|max| max.max(wanted)) };
    if setrlimit(Resource::Nofile, raised).is_ok() {
        return wanted;
    }
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(soft), ..limit });
    soft.max(current)
}
