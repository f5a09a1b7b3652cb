//! The suite `mixed`: threads that read and threads that write one file at the same time.
//!
//! Millpond, whose reads and writes of any length are atomic, against the kernel's `pread` and
//! `pwrite` on the directory's file system, on ext4 and on XFS; the latter two on loop devices,
//! which needs root. Millpond is measured on each of them, too, with a separate file.
//!
//! - *warm*: both caches have the file, and neither engine writes back within a pair: both are
//!   clean at its start, and it ends before dirty pages reach their age.
//! - *beyond*: the file is four times as large as the cache. The kernel's baseline runs in a memory
//!   cgroup of the same limit. Each slice starts with a ramp and is followed by a sync, which are
//!   not counted, so that no engine writes back the pages of the other.
//!
//! [`work`] has the loops, [`mixed_target`] the files, [`mod@pair`] the order of slices and the rows,
//! [`test_file_system`] the file systems, [`case_setup`] the shared setup of cases, [`limit`] the memory cgroup,
//! [`interference`] cases with interfering threads.

mod case_setup;
mod interference;
mod limit;
mod mixed_target;
mod pair;
mod test_file_system;
mod work;

use std::io;
use std::time::Duration;

use millpond::{Advice, Engine};
use rustix::fs::OFlags;

use self::case_setup::{
    CaseSetup, cache_bytes_for_all_dirty, names, open_mapped, open_millpond, rounds, warm_up,
};
use self::limit::Limit;
pub use self::limit::leave as leave_limit;
use self::mixed_target::MixedTarget;
use self::pair::{MixedEngine, MixedPair, Names};
use self::test_file_system::{BlockFile, TestFileSystem};
use self::work::{Disturbance, Places, Work};
use super::data::{KIB, MIB};
use super::machine::Machine;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::{Context, Result};

const FILE_BYTES: u64 = 1024 * MIB;
const FILE_BYTES_QUICK: u64 = 256 * MIB;
/// The file is this number of times the cache, in the cases beyond it.
const BEYOND: u64 = 4;
/// A cgroup with less has no room for this process's threads.
const LIMIT_BYTES_MIN: u64 = 64 * MIB;
/// Which files fit into the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    Warm,
    Beyond,
}

/// Readers and writers at random over one file.
#[derive(Debug, Clone, Copy)]
struct MixedCase {
    names: Names,
    cache: Cache,
    block_bytes: u32,
    readers: u32,
    writers: u32,
    /// It has a target, so it takes all rounds.
    has_target: bool,
}

const fn case(
    names: Names,
    cache: Cache,
    kib: u32,
    [readers, writers]: [u32; 2],
    has_target: bool,
) -> MixedCase {
    MixedCase { names, cache, block_bytes: kib * KIB, readers, writers, has_target }
}

/// Grouped by block, since the blocks of a file are of one size, and by cache.
const CASES: [MixedCase; 13] = [
    case(names!("warm-8k-1+1"), Cache::Warm, 8, [1, 1], false),
    case(names!("warm-8k-4+4"), Cache::Warm, 8, [4, 4], false),
    case(names!("warm-8k-8+8"), Cache::Warm, 8, [8, 8], true),
    case(names!("writers-8k-8"), Cache::Warm, 8, [0, 8], true),
    case(names!("beyond-8k-1+1"), Cache::Beyond, 8, [1, 1], false),
    case(names!("beyond-8k-4+4"), Cache::Beyond, 8, [4, 4], false),
    case(names!("beyond-8k-8+8"), Cache::Beyond, 8, [8, 8], true),
    case(names!("warm-64k-1+1", total), Cache::Warm, 64, [1, 1], false),
    case(names!("warm-64k-4+4", total), Cache::Warm, 64, [4, 4], true),
    case(names!("warm-64k-8+8", total), Cache::Warm, 64, [8, 8], false),
    case(names!("beyond-64k-1+1", total), Cache::Beyond, 64, [1, 1], false),
    case(names!("beyond-64k-4+4", total), Cache::Beyond, 64, [4, 4], false),
    case(names!("beyond-64k-8+8", total), Cache::Beyond, 64, [8, 8], false),
];

impl MixedCase {
    fn work(&self, plan: &Plan) -> Work {
        Work {
            block_bytes: self.block_bytes,
            file_bytes: file_bytes(plan),
            readers: self.readers,
            writers: self.writers,
            places: if self.readers == 0 { Places::Disjoint } else { Places::Random },
            disturbance: Disturbance::None,
            ramp: match self.cache {
                Cache::Warm => Duration::ZERO,
                // Until the dirty limit is reached: before that the cache accepts more than it can
                // write back.
                Cache::Beyond => plan.slice(400, 40),
            },
        }
    }
}

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let of_directory = Machine::of(&plan.dir).file_system;
    for file_system in
        [TestFileSystem::Directory, TestFileSystem::Loop("ext4"), TestFileSystem::Loop("xfs")]
    {
        let name = file_system.name(&of_directory);
        let repeats = plan.quick
            && file_system == TestFileSystem::Loop("ext4")
            && of_directory.starts_with("ext");
        let setup = CaseSetup { name, file_system, plan, repeats };
        for block_bytes in [8 * KIB, 64 * KIB] {
            let wanted: Vec<&MixedCase> = CASES
                .iter()
                .filter(|case| case.block_bytes == block_bytes && plan.wants(case.names.case))
                .collect();
            if wanted.is_empty() {
                continue;
            }
            match setup.files(file_bytes(plan), block_bytes) {
                Ok(files) => group(&setup, &files, &wanted, &mut outcome)?,
                Err(reason) => {
                    for case in wanted {
                        outcome.skip(case.names.case, &setup.own(), &reason);
                        outcome.skip(case.names.case, &setup.kernel(), &reason);
                    }
                }
            }
        }
        interference::run(&setup, &mut outcome)?;
    }
    Ok(outcome)
}

/// The cases of one block size on one file system.
fn group(
    setup: &CaseSetup<'_>,
    files: &[BlockFile; 2],
    cases: &[&MixedCase],
    outcome: &mut Outcome,
) -> Result<()> {
    for cache in [Cache::Warm, Cache::Beyond] {
        let cases: Vec<&MixedCase> =
            cases.iter().filter(|case| case.cache == cache).copied().collect();
        if cases.is_empty() {
            continue;
        }
        for file in files {
            file.drop_kernel_cache().context(&setup.name)?;
        }
        match cache {
            Cache::Warm => warm(setup, files, &cases, outcome)?,
            Cache::Beyond => beyond(setup, files, &cases, outcome)?,
        }
        // The files have all blocks, whole.
        for file in files {
            file.check(cases[0].block_bytes).context(format!("{}, in the end", setup.name))?;
        }
    }
    Ok(())
}

/// Of either, a quarter fits the cache where it is beyond it.
fn file_bytes(plan: &Plan) -> u64 {
    plan.bytes_of(FILE_BYTES, FILE_BYTES_QUICK)
}

fn note_engine(engine: &Engine, outcome: &mut Outcome) {
    let stats = engine.stats();
    let (name, reason) = (stats.back_end, stats.back_end_reason);
    outcome.note(format!("mixed: back end {name} ({reason})"));
}

fn warm(
    setup: &CaseSetup<'_>,
    [own, others]: &[BlockFile; 2],
    cases: &[&MixedCase],
    outcome: &mut Outcome,
) -> Result<()> {
    let (engine, file) = open_millpond(cache_bytes_for_all_dirty(file_bytes(setup.plan)), own)?;
    note_engine(&engine, outcome);
    let kernel = others.open(OFlags::empty()).context(&setup.name)?;
    for case in cases {
        setup.plan.report_progress(&format!("{} on {}", case.names.case, setup.name));
        let work = case.work(setup.plan);
        warm_up(&file, &work).context(format!("warming up {}", setup.own()))?;
        warm_up(&kernel, &work).context(format!("warming up {}", setup.kernel()))?;
        let mut subject =
            MixedEngine::new(setup.own(), |work, length| work::slice(&file, &file, work, length));
        let mut baseline = MixedEngine::new(setup.kernel(), |work, length| {
            work::slice(&kernel, &kernel, work, length)
        });
        pair(setup, case, &work).measure(&mut subject, &mut baseline, outcome)?;
    }
    file.close().context("closing a file")?;
    warm_mapped(setup, own, &kernel, cases, outcome)
}

/// The same with mapped backing, where reads and writes are of the kernel's pages.
fn warm_mapped(
    setup: &CaseSetup<'_>,
    own: &BlockFile,
    kernel: &std::fs::File,
    cases: &[&MixedCase],
    outcome: &mut Outcome,
) -> Result<()> {
    let (_engine, file) = open_mapped(own)?;
    for case in cases.iter().filter(|case| case.has_target && case.readers > 0) {
        setup.plan.report_progress(&format!("{} on {}, mapped", case.names.case, setup.name));
        let work = case.work(setup.plan);
        warm_up(&file, &work).context(format!("warming up {}", setup.mapped()))?;
        warm_up(kernel, &work).context(format!("warming up {}", setup.kernel()))?;
        let mut subject = MixedEngine::new(setup.mapped(), |work, length| {
            work::slice(&file, &file, work, length)
        });
        let mut baseline = MixedEngine::new(setup.kernel(), |work, length| {
            work::slice(kernel, kernel, work, length)
        });
        pair(setup, case, &work).measure(&mut subject, &mut baseline, outcome)?;
    }
    file.close().context("closing a file")
}

fn pair<'a>(setup: &CaseSetup<'_>, case: &MixedCase, work: &'a Work) -> MixedPair<'a> {
    let rounds = rounds(setup.plan, case.has_target);
    let length = match case.cache {
        Cache::Warm => setup.plan.slice(200, 30),
        Cache::Beyond => setup.plan.slice(250, 50),
    };
    MixedPair { names: case.names, work: [work; 2], rounds, length }
}

fn beyond(
    setup: &CaseSetup<'_>,
    [own, others]: &[BlockFile; 2],
    cases: &[&MixedCase],
    outcome: &mut Outcome,
) -> Result<()> {
    let cache_bytes = file_bytes(setup.plan) / BEYOND;
    let (engine, file) = open_millpond(cache_bytes, own)?;
    file.advise(0, 0, Advice::Random).context(&setup.name)?;
    note_engine(&engine, outcome);
    let kernel = others.open(OFlags::empty()).context(&setup.name)?;
    rustix::fs::fadvise(&kernel, 0, None, rustix::fs::Advice::Random).context(&setup.name)?;
    let limit = Limit::new(cache_bytes.max(LIMIT_BYTES_MIN));
    let device = others.open(OFlags::DIRECT);
    for case in cases {
        setup.plan.report_progress(&format!("{} on {}", case.names.case, setup.name));
        let work = case.work(setup.plan);
        let settled = |target: &dyn Fn() -> io::Result<()>, slice| {
            target()?;
            slice
        };
        let mut subject = MixedEngine::new(setup.own(), |work, length| {
            settled(&|| MixedTarget::sync_data(&file), work::slice(&file, &file, work, length))
        });
        match &limit {
            Ok(limit) => {
                let mut baseline = MixedEngine::new(setup.kernel(), |work, length| {
                    let limited = limit.enter()?;
                    let slice = work::slice(&kernel, &kernel, work, length);
                    drop(limited);
                    settled(&|| kernel.sync_data(), slice)
                });
                pair(setup, case, &work).measure(&mut subject, &mut baseline, outcome)?;
            }
            Err(reason) => outcome.skip(case.names.case, &setup.kernel(), reason),
        }
        if !case.has_target {
            continue;
        }
        // The ratio to the device's own rate.
        match (&setup.file_system, &device) {
            (TestFileSystem::Directory, Ok(device)) => {
                others.drop_kernel_cache().context(&setup.name)?;
                let name = format!("{}, O_DIRECT", setup.kernel());
                let mut baseline = MixedEngine::new(name, |work, length| {
                    work::slice(device, device, work, length)
                });
                let pair =
                    MixedPair { rounds: rounds(setup.plan, false), ..pair(setup, case, &work) };
                pair.measure(&mut subject, &mut baseline, outcome)?;
            }
            (TestFileSystem::Directory, Err(error)) => {
                outcome.skip(case.names.case, &format!("{}, O_DIRECT", setup.kernel()), error);
            }
            _ => {}
        }
    }
    file.close().context("closing a file")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_that_was_agreed_on_is_there() {
        for cache in [Cache::Warm, Cache::Beyond] {
            for kib in [8, 64] {
                for threads in [1, 4, 8] {
                    let found = CASES.iter().filter(|case| {
                        case.cache == cache
                            && case.block_bytes == kib * KIB
                            && [case.readers, case.writers] == [threads, threads]
                    });
                    assert_eq!(found.count(), 1, "{cache:?}, {kib} KiB, {threads}");
                }
            }
        }
    }
}
