//! Cases with a shape of their own: one page that is hammered; changes of the file's extent above what
//! is read and written; hits while somebody syncs.

use std::time::Duration;

use rustix::fs::OFlags;

use super::pair::{Names, Pair, Side};
use super::place::Place;
use super::site::{MILLPOND, Site, names, pond, roomy, rounds, warm_up};
use super::work::{self, Disturbance, MixedSlice, Places, Work};
use crate::bench::data::{KIB, MIB};
use crate::bench::outcome::Outcome;
use crate::failure::{Context, Result};

const HAMMER: Names = names!("hammer-4k-1+1");
const EXTENTS: Names = names!("extents-8k-1+1");
const SYNCED: Names = names!("synced-8k-1");

/// Measures these cases in one place.
pub fn run(site: &Site<'_>, outcome: &mut Outcome) -> Result<()> {
    type Measure = fn(&Site<'_>, &mut Outcome) -> Result<Option<String>>;
    let cases: [(Names, Measure); 3] = [(HAMMER, hammer), (EXTENTS, extents), (SYNCED, synced)];
    for (names, measure) in cases {
        if !site.plan.wants(names.case) {
            continue;
        }
        site.plan.tell(&format!("{} on {}", names.case, site.name));
        if let Some(reason) = measure(site, outcome)? {
            outcome.skip(names.case, &site.own(), &reason);
            outcome.skip(names.case, &site.kernel(), &reason);
        }
    }
    Ok(())
}

fn shape(site: &Site<'_>, kib: u32, mib: u64, [readers, writers]: [u32; 2]) -> Work {
    Work {
        block_bytes: kib * KIB,
        file_bytes: site.plan.bytes(mib * MIB),
        readers,
        writers,
        places: Places::LowerHalf,
        disturbance: Disturbance::None,
        ramp: Duration::ZERO,
    }
}

/// One writer and one reader of one page.
fn hammer(site: &Site<'_>, outcome: &mut Outcome) -> Result<Option<String>> {
    let work = Work { places: Places::One, ..shape(site, 4, 16, [1, 1]) };
    let [own, others] = match site.files(work.file_bytes, work.block_bytes) {
        Ok(files) => files,
        Err(reason) => return Ok(Some(reason)),
    };
    let (_engine, file) = pond(roomy(work.file_bytes), &own)?;
    let kernel = others.open(OFlags::empty()).context(&site.name)?;
    warm_up(&file, &work).context(site.own())?;
    warm_up(&kernel, &work).context(site.kernel())?;
    let mut subject = Side::new(site.own(), |work, length| work::slice(&file, &file, work, length));
    let mut peer =
        Side::new(site.kernel(), |work, length| work::slice(&kernel, &kernel, work, length));
    let (rounds, length) = (rounds(site.plan, true), site.plan.slice(200, 50));
    Pair { names: HAMMER, work: [&work; 2], rounds, length }.measure(
        &mut subject,
        &mut peer,
        outcome,
    )?;
    Ok(None)
}

/// Hits and writes in the lower half of a file, while a thread punches, truncates and appends above it;
/// beside the same with that thread at work on another file: with few processors it costs the others
/// their time, wherever it works.
fn extents(site: &Site<'_>, outcome: &mut Outcome) -> Result<Option<String>> {
    // One place shows it; the kernel's way is not the subject.
    if site.place != Place::Directory {
        return Ok(None);
    }
    let work = Work { disturbance: Disturbance::Extents, ..shape(site, 8, 256, [1, 1]) };
    let quiet = Work { disturbance: Disturbance::None, ..work.clone() };
    let [own, other] = match site.files(work.file_bytes, work.block_bytes) {
        Ok(files) => files,
        Err(reason) => return Ok(Some(reason)),
    };
    let (_engine, file) = pond(2 * roomy(work.file_bytes), &own)?;
    warm_up(&file, &work).context(site.own())?;
    let (_engine, another) = pond(2 * roomy(work.file_bytes), &other)?;
    warm_up(&another, &work).context(site.own())?;
    let mut turns = [0, 0];
    let [here, there] = &mut turns;
    let counted = |slice: MixedSlice, turns: &mut u64| {
        *turns += slice.disturbances;
        slice
    };
    let mut subject = Side::new(MILLPOND, |work, length| {
        Ok(counted(work::slice(&file, &file, work, length)?, here))
    });
    let mut elsewhere =
        Side::new(format!("{MILLPOND}, another file is changed"), |work, length| {
            Ok(counted(work::slice(&file, &another, work, length)?, there))
        });
    let mut unchanged = Side::new(format!("{MILLPOND}, nothing is changed"), |work, length| {
        work::slice(&file, &file, work, length)
    });
    let length = site.plan.slice(200, 60);
    let full = Pair { names: EXTENTS, work: [&work; 2], rounds: rounds(site.plan, true), length };
    full.measure(&mut subject, &mut elsewhere, outcome)?;
    Pair { work: [&work, &quiet], rounds: rounds(site.plan, false), ..full }.measure(
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
fn synced(site: &Site<'_>, outcome: &mut Outcome) -> Result<Option<String>> {
    let work = Work { disturbance: Disturbance::Sync, ..shape(site, 8, 256, [1, 0]) };
    let quiet = Work { disturbance: Disturbance::None, ..work.clone() };
    let [own, others] = match site.files(work.file_bytes, work.block_bytes) {
        Ok(files) => files,
        Err(reason) => return Ok(Some(reason)),
    };
    let (_engine, file) = pond(roomy(work.file_bytes), &own)?;
    let kernel = others.open(OFlags::empty()).context(&site.name)?;
    warm_up(&file, &work).context(site.own())?;
    warm_up(&kernel, &work).context(site.kernel())?;
    let (rounds, length) = (rounds(site.plan, true), site.plan.slice(200, 60));
    let pair = Pair { names: SYNCED, work: [&work, &quiet], rounds, length };
    let from = outcome.rows.len();
    for kernels in [false, true] {
        let name = if kernels { site.kernel() } else { site.own() };
        let slice = |work: &Work, length| match kernels {
            true => work::slice(&kernel, &kernel, work, length),
            false => work::slice(&file, &file, work, length),
        };
        let mut synced = Side::new(name.clone(), slice);
        let mut alone = Side::new(format!("{name}, no syncs"), slice);
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
