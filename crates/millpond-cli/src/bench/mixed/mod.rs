//! The suite `mixed`: threads that read and threads that write one file at once.
//!
//! Millpond, whose reads and writes are atomic whatever they cover, against the kernel's `pread` and
//! `pwrite` on the directory's file system, on ext4 and on XFS; the latter two on loop devices, if the
//! user is root. Millpond is measured on each of them, too, on a file of its own beside the peer's.
//!
//! - *warm*: the file is in the caches of both, and neither has to write back within a pair: both are
//!   clean when it begins, and it ends before what is dirty is old.
//! - *beyond*: the file is four times as large as the cache. The kernel's peer runs in a memory cgroup
//!   of the same limit. Each slice begins with a ramp that does not count, and is followed by a sync
//!   that does not count either, so that nobody writes back what the other one wrote.
//!
//! [`work`] has the loops, [`target`] what they call, [`pair`] the order of slices and the rows,
//! [`place`] the files, [`site`] what every case needs there, [`limit`] the memory cgroup, [`special`] the cases with a shape of their own.

mod limit;
mod pair;
mod place;
mod site;
mod special;
mod target;
mod work;

use std::io;
use std::time::Duration;

use millpond::{Advice, Engine};
use rustix::fs::OFlags;

use self::limit::Limit;
pub use self::limit::leave as leave_limit;
use self::pair::{Names, Pair, Side};
use self::place::{BlockFile, Place};
use self::site::{Site, names, pond, roomy, rounds, warm_up};
use self::target::Target;
use self::work::{Disturbance, Places, Work};
use super::data::{KIB, MIB};
use super::machine::Machine;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::{Context, Result};

const FILE_BYTES: u64 = 1024 * MIB;
const FILE_BYTES_QUICK: u64 = 256 * MIB;
/// The file is so many times the cache, in the cases beyond it.
const BEYOND: u64 = 4;
/// A cgroup with less has no room for this process's threads.
const LIMIT_BYTES_MIN: u64 = 64 * MIB;
/// Which file fits what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    Warm,
    Beyond,
}

/// Readers and writers at random over one file.
#[derive(Debug, Clone, Copy)]
struct Case {
    names: Names,
    cache: Cache,
    block_bytes: u32,
    readers: u32,
    writers: u32,
    /// There is a bar for it, so it takes all rounds.
    barred: bool,
}

const fn case(
    names: Names,
    cache: Cache,
    kib: u32,
    [readers, writers]: [u32; 2],
    barred: bool,
) -> Case {
    Case { names, cache, block_bytes: kib * KIB, readers, writers, barred }
}

/// Grouped by block, since the blocks of a file are of one size, and by cache.
const CASES: [Case; 13] = [
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

impl Case {
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
                // Until as much is dirty as may be: what the cache takes in is not what it can move on.
                Cache::Beyond => plan.slice(400, 40),
            },
        }
    }
}

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let file_system = Machine::of(&plan.dir).file_system;
    for place in [Place::Directory, Place::Loop("ext4"), Place::Loop("xfs")] {
        let name = place.name(&file_system);
        let repeats = plan.quick && place == Place::Loop("ext4") && file_system.starts_with("ext");
        let site = Site { name, place, plan, repeats };
        for block_bytes in [8 * KIB, 64 * KIB] {
            let wanted: Vec<&Case> = CASES
                .iter()
                .filter(|case| case.block_bytes == block_bytes && plan.wants(case.names.case))
                .collect();
            if wanted.is_empty() {
                continue;
            }
            match site.files(file_bytes(plan), block_bytes) {
                Ok(files) => group(&site, &files, &wanted, &mut outcome)?,
                Err(reason) => {
                    for case in wanted {
                        outcome.skip(case.names.case, &site.own(), &reason);
                        outcome.skip(case.names.case, &site.kernel(), &reason);
                    }
                }
            }
        }
        special::run(&site, &mut outcome)?;
    }
    Ok(outcome)
}

/// The cases of one size of blocks in one place.
fn group(
    site: &Site<'_>,
    files: &[BlockFile; 2],
    cases: &[&Case],
    outcome: &mut Outcome,
) -> Result<()> {
    for cache in [Cache::Warm, Cache::Beyond] {
        let cases: Vec<&Case> = cases.iter().filter(|case| case.cache == cache).copied().collect();
        if cases.is_empty() {
            continue;
        }
        for file in files {
            file.drop_kernel_cache().context(&site.name)?;
        }
        match cache {
            Cache::Warm => warm(site, files, &cases, outcome)?,
            Cache::Beyond => beyond(site, files, &cases, outcome)?,
        }
        // What everyone wrote is in the files, whole.
        for file in files {
            file.check(cases[0].block_bytes).context(format!("{}, in the end", site.name))?;
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
    site: &Site<'_>,
    [own, others]: &[BlockFile; 2],
    cases: &[&Case],
    outcome: &mut Outcome,
) -> Result<()> {
    let (engine, file) = pond(roomy(file_bytes(site.plan)), own)?;
    note_engine(&engine, outcome);
    let kernel = others.open(OFlags::empty()).context(&site.name)?;
    for case in cases {
        site.plan.tell(&format!("{} on {}", case.names.case, site.name));
        let work = case.work(site.plan);
        warm_up(&file, &work).context(format!("warming up {}", site.own()))?;
        warm_up(&kernel, &work).context(format!("warming up {}", site.kernel()))?;
        let mut subject =
            Side::new(site.own(), |work, length| work::slice(&file, &file, work, length));
        let mut peer =
            Side::new(site.kernel(), |work, length| work::slice(&kernel, &kernel, work, length));
        pair(site, case, &work).measure(&mut subject, &mut peer, outcome)?;
    }
    file.close().context("closing a file")
}

fn pair<'a>(site: &Site<'_>, case: &Case, work: &'a Work) -> Pair<'a> {
    let rounds = rounds(site.plan, case.barred);
    let length = match case.cache {
        Cache::Warm => site.plan.slice(200, 30),
        Cache::Beyond => site.plan.slice(250, 50),
    };
    Pair { names: case.names, work: [work; 2], rounds, length }
}

fn beyond(
    site: &Site<'_>,
    [own, others]: &[BlockFile; 2],
    cases: &[&Case],
    outcome: &mut Outcome,
) -> Result<()> {
    let cache_bytes = file_bytes(site.plan) / BEYOND;
    let (engine, file) = pond(cache_bytes, own)?;
    file.advise(0, 0, Advice::Random).context(&site.name)?;
    note_engine(&engine, outcome);
    let kernel = others.open(OFlags::empty()).context(&site.name)?;
    rustix::fs::fadvise(&kernel, 0, None, rustix::fs::Advice::Random).context(&site.name)?;
    let limit = Limit::new(cache_bytes.max(LIMIT_BYTES_MIN));
    let device = others.open(OFlags::DIRECT);
    for case in cases {
        site.plan.tell(&format!("{} on {}", case.names.case, site.name));
        let work = case.work(site.plan);
        let settled = |target: &dyn Fn() -> io::Result<()>, slice| {
            target()?;
            slice
        };
        let mut subject = Side::new(site.own(), |work, length| {
            settled(&|| Target::sync_data(&file), work::slice(&file, &file, work, length))
        });
        match &limit {
            Ok(limit) => {
                let mut peer = Side::new(site.kernel(), |work, length| {
                    let limited = limit.enter()?;
                    let slice = work::slice(&kernel, &kernel, work, length);
                    drop(limited);
                    settled(&|| kernel.sync_data(), slice)
                });
                pair(site, case, &work).measure(&mut subject, &mut peer, outcome)?;
            }
            Err(reason) => outcome.skip(case.names.case, &site.kernel(), reason),
        }
        if !case.barred {
            continue;
        }
        // How close to the device.
        match (&site.place, &device) {
            (Place::Directory, Ok(device)) => {
                others.drop_kernel_cache().context(&site.name)?;
                let name = format!("{}, O_DIRECT", site.kernel());
                let mut peer =
                    Side::new(name, |work, length| work::slice(device, device, work, length));
                let pair = Pair { rounds: rounds(site.plan, false), ..pair(site, case, &work) };
                pair.measure(&mut subject, &mut peer, outcome)?;
            }
            (Place::Directory, Err(error)) => {
                outcome.skip(case.names.case, &format!("{}, O_DIRECT", site.kernel()), error);
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
