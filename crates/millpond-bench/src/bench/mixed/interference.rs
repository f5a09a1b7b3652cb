//! Cases with interfering threads: a reader and a writer of one page; extent changes above the
//! blocks that are read and written; syncs beside hits.

use std::time::Duration;

use rustix::fs::OFlags;

use super::case_setup::{
    CaseSetup, MILLPOND, cache_bytes_for_all_dirty, names, open_millpond, rounds, warm_up,
};
use super::pair::{MixedEngine, MixedPair, Names};
use super::test_file_system::TestFileSystem;
use super::work::{self, Disturbance, MixedSlice, Places, Work};
use crate::bench::data::{KIB, MIB};
use crate::bench::outcome::Outcome;
use crate::failure::{Context, Result};

const HAMMER: Names = names!("hammer-4k-1+1");
const EXTENTS: Names = names!("extents-8k-1+1");
const SYNCED: Names = names!("synced-8k-1");

/// Measures these cases on one file system.
pub fn run(setup: &CaseSetup<'_>, outcome: &mut Outcome) -> Result<()> {
    type Measure = fn(&CaseSetup<'_>, &mut Outcome) -> Result<Option<String>>;
    let cases: [(Names, Measure); 3] = [(HAMMER, hammer), (EXTENTS, extents), (SYNCED, synced)];
    for (names, measure) in cases {
        if !setup.plan.wants(names.case) {
            continue;
        }
        setup.plan.report_progress(&format!("{} on {}", names.case, setup.name));
        if let Some(reason) = measure(setup, outcome)? {
            outcome.skip(names.case, &setup.own(), &reason);
            outcome.skip(names.case, &setup.kernel(), &reason);
        }
    }
    Ok(())
}

fn shape(setup: &CaseSetup<'_>, kib: u32, mib: u64, [readers, writers]: [u32; 2]) -> Work {
    Work {
        block_bytes: kib * KIB,
        file_bytes: setup.plan.bytes(mib * MIB),
        readers,
        writers,
        places: Places::LowerHalf,
        disturbance: Disturbance::None,
        ramp: Duration::ZERO,
    }
}

/// One writer and one reader of one page.
fn hammer(setup: &CaseSetup<'_>, outcome: &mut Outcome) -> Result<Option<String>> {
    let work = Work { places: Places::One, ..shape(setup, 4, 16, [1, 1]) };
    let [own, others] = match setup.files(work.file_bytes, work.block_bytes) {
        Ok(files) => files,
        Err(reason) => return Ok(Some(reason)),
    };
    let (_engine, file) = open_millpond(cache_bytes_for_all_dirty(work.file_bytes), &own)?;
    let kernel = others.open(OFlags::empty()).context(&setup.name)?;
    warm_up(&file, &work).context(setup.own())?;
    warm_up(&kernel, &work).context(setup.kernel())?;
    let mut subject =
        MixedEngine::new(setup.own(), |work, length| work::slice(&file, &file, work, length));
    let mut baseline = MixedEngine::new(setup.kernel(), |work, length| {
        work::slice(&kernel, &kernel, work, length)
    });
    let (rounds, length) = (rounds(setup.plan, true), setup.plan.slice(200, 50));
    MixedPair { names: HAMMER, work: [&work; 2], rounds, length }.measure(
        &mut subject,
        &mut baseline,
        outcome,
    )?;
    Ok(None)
}

/// Hits and writes in the lower half of a file, while a thread punches, truncates and appends above
/// it. The baseline has that thread on another file: with few processors it takes processor time
/// from the others on any file.
fn extents(setup: &CaseSetup<'_>, outcome: &mut Outcome) -> Result<Option<String>> {
    // One file system is enough, as the kernel's part is not measured.
    if setup.file_system != TestFileSystem::Directory {
        return Ok(None);
    }
    let work = Work { disturbance: Disturbance::Extents, ..shape(setup, 8, 256, [1, 1]) };
    let quiet = Work { disturbance: Disturbance::None, ..work.clone() };
    let [own, other] = match setup.files(work.file_bytes, work.block_bytes) {
        Ok(files) => files,
        Err(reason) => return Ok(Some(reason)),
    };
    let (_engine, file) = open_millpond(2 * cache_bytes_for_all_dirty(work.file_bytes), &own)?;
    warm_up(&file, &work).context(setup.own())?;
    let (_engine, another) = open_millpond(2 * cache_bytes_for_all_dirty(work.file_bytes), &other)?;
    warm_up(&another, &work).context(setup.own())?;
    let mut turns = [0, 0];
    let [here, there] = &mut turns;
    let counted = |slice: MixedSlice, turns: &mut u64| {
        *turns += slice.disturbances;
        slice
    };
    let mut subject = MixedEngine::new(MILLPOND, |work, length| {
        Ok(counted(work::slice(&file, &file, work, length)?, here))
    });
    let mut elsewhere =
        MixedEngine::new(format!("{MILLPOND}, another file is changed"), |work, length| {
            Ok(counted(work::slice(&file, &another, work, length)?, there))
        });
    let mut unchanged =
        MixedEngine::new(format!("{MILLPOND}, nothing is changed"), |work, length| {
            work::slice(&file, &file, work, length)
        });
    let length = setup.plan.slice(200, 60);
    let full =
        MixedPair { names: EXTENTS, work: [&work; 2], rounds: rounds(setup.plan, true), length };
    full.measure(&mut subject, &mut elsewhere, outcome)?;
    MixedPair { work: [&work, &quiet], rounds: rounds(setup.plan, false), ..full }.measure(
        &mut subject,
        &mut unchanged,
        outcome,
    )?;
    drop((subject, elsewhere));
    outcome.note(format!(
        "{}: {} changes of the file itself, {} of the other",
        EXTENTS.case, turns[0], turns[1]
    ));
    Ok(None)
}

/// Hits, while another thread writes a block and syncs, over and over, beside hits alone.
fn synced(setup: &CaseSetup<'_>, outcome: &mut Outcome) -> Result<Option<String>> {
    let work = Work { disturbance: Disturbance::Sync, ..shape(setup, 8, 256, [1, 0]) };
    let quiet = Work { disturbance: Disturbance::None, ..work.clone() };
    let [own, others] = match setup.files(work.file_bytes, work.block_bytes) {
        Ok(files) => files,
        Err(reason) => return Ok(Some(reason)),
    };
    let (_engine, file) = open_millpond(cache_bytes_for_all_dirty(work.file_bytes), &own)?;
    let kernel = others.open(OFlags::empty()).context(&setup.name)?;
    warm_up(&file, &work).context(setup.own())?;
    warm_up(&kernel, &work).context(setup.kernel())?;
    let (rounds, length) = (rounds(setup.plan, true), setup.plan.slice(200, 60));
    let pair = MixedPair { names: SYNCED, work: [&work, &quiet], rounds, length };
    let from = outcome.rows.len();
    for kernels in [false, true] {
        let name = if kernels { setup.kernel() } else { setup.own() };
        let slice = |work: &Work, length| match kernels {
            true => work::slice(&kernel, &kernel, work, length),
            false => work::slice(&file, &file, work, length),
        };
        let mut synced = MixedEngine::new(name.clone(), slice);
        let mut alone = MixedEngine::new(format!("{name}, no syncs"), slice);
        pair.measure(&mut synced, &mut alone, outcome)?;
    }
    let rows = outcome.rows[from..].chunks(2);
    let ratio = |rows: &[crate::bench::outcome::Row]| {
        let [synced, alone] = [&rows[0], &rows[1]].map(|row| row.p999_ns.unwrap_or(f64::NAN));
        format!(
            "{}: {}: p99.9 {:.2} times the quiet one",
            SYNCED.case,
            rows[0].engine,
            synced / alone
        )
    };
    let notes: Vec<String> = rows.map(ratio).collect();
    outcome.notes.extend(notes);
    Ok(None)
}
