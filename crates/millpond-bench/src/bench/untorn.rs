//! The suite `untorn`: a store of pages that a power cut must not tear, on XFS on a loop device.
//!
//! Each store updates random pages of 16 KiB and makes a group of them durable at a time, as the
//! commits of several transactions. The baselines are the same store with a double-write buffer, as
//! InnoDB has it, and without any protection.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::time::Instant;

use millpond::{Backing, Engine, File, OpenOptions, WriteMode};

use super::data::{KIB, MIB, NamedFile};
use super::harness::{AlignedBuffer, Pair, Slice};
use super::histogram::Histogram;
use super::load::Load;
use super::loop_mount::{Image, LoopMount};
use super::outcome::Outcome;
use super::plan::Plan;
use super::write::timed;
use crate::failure::{Context, Result};

const UNTORN: &str = "millpond, untorn";
const DOUBLED: &str = "millpond, written twice";
const UNPROTECTED: &str = "millpond, unprotected";

const PAGE_BYTES: u32 = 16 * KIB;
/// Mount options: XFS logs 15 KiB for each block that it puts in place, and each log buffer is a flush of the device.
const LOG_BUFFERS: &str = "logbsize=256k";
/// The updates between two syncs.
const GROUPS: [(&str, usize); 2] = [("update-16k-32", 32), ("update-16k-4", 4)];

pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for (case, group) in GROUPS.into_iter().filter(|(case, _)| plan.wants(case)) {
        plan.report_progress(case);
        updates(case, group, plan, &mut outcome)?;
    }
    Ok(outcome)
}

fn updates(case: &'static str, group: usize, plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let bytes = plan.bytes_of(128 * MIB, 64 * MIB);
    let groups = plan.count(64, 16);
    let mount = match LoopMount::with(&plan.dir, "xfs", 4 * bytes, Image::Written, LOG_BUFFERS) {
        Ok(mount) => mount,
        Err(reason) => {
            [UNTORN, DOUBLED, UNPROTECTED]
                .iter()
                .for_each(|name| outcome.skip(case, name, &reason));
            return Ok(());
        }
    };
    // The updates beside the pages that are cached.
    let engine = Engine::builder().cache_bytes(4 * bytes + 64 * MIB).build().context(case)?;
    let load = Load::random(bytes, PAGE_BYTES, 1);
    let store = |protection| Store::open(&engine, &mount.at, bytes, group, protection);
    let untorn = match store(Protection::Untorn) {
        Ok(store) => store,
        Err(error) => {
            outcome.skip(case, UNTORN, error);
            return Ok(());
        }
    };
    for (name, protection) in [(DOUBLED, Protection::Twice), (UNPROTECTED, Protection::None)] {
        let other = store(protection).context(case)?;
        let pages = groups * group;
        // The first slices are not counted.
        for store in [&untorn, &other] {
            store.update(&load, pages).context(case)?;
            store.took.take();
        }
        let (block_bytes, threads) = (Some(PAGE_BYTES), 1);
        let pair = Pair { case, threads, block_bytes, subject: UNTORN, baseline: name };
        let [own, baseline] = pair.measure(
            plan.rounds(),
            || untorn.update(&load, pages),
            || other.update(&load, pages),
        )?;
        let latencies = [&untorn, &other].map(|store| store.took.take().latencies());
        let [p50, p99] =
            [latencies[0].p50_ns / latencies[1].p50_ns, latencies[0].p99_ns / latencies[1].p99_ns];
        outcome.note(format!("{case}: a commit's p50 {p50:.2}, p99 {p99:.2} times that of {name}"));
        let [own_latencies, other_latencies] = latencies;
        outcome.rows.extend([own.taking(own_latencies), baseline.taking(other_latencies)]);
    }
    Ok(())
}

/// How a store survives a page that is torn.
#[derive(Clone, Copy)]
enum Protection {
    None,
    Untorn,
    /// A copy of each page of a group, synced before.
    Twice,
}

/// A file of pages.
struct Store {
    file: File,
    copies: Option<File>,
    group: usize,
    next: RefCell<usize>,
    /// The duration of each commit.
    took: RefCell<Histogram>,
    _named: [NamedFile; 2],
}

impl Store {
    fn open(
        engine: &Engine,
        dir: &Path,
        bytes: u64,
        group: usize,
        protection: Protection,
    ) -> io::Result<Store> {
        let failed = |failure: crate::failure::Failure| io::Error::other(failure.message);
        let copies_bytes = (group as u64) * u64::from(PAGE_BYTES);
        let named = [bytes, copies_bytes].map(|bytes| NamedFile::create(dir, bytes));
        let [file, copies] = named;
        let named = [file.map_err(failed)?, copies.map_err(failed)?];
        let options = OpenOptions::new().read(true).write(true).backing(Backing::Direct);
        let options = options.write_mode(WriteMode::Back).page_bytes(PAGE_BYTES);
        let of_pages = match protection {
            Protection::Untorn => options.clone().untorn(PAGE_BYTES),
            _ => options.clone(),
        };
        let file = engine.open(&named[0].path, &of_pages)?;
        let copies = match protection {
            Protection::Twice => {
                let through = options.write_mode(WriteMode::Through).direct(true);
                Some(engine.open(&named[1].path, &through)?)
            }
            _ => None,
        };
        // All pages are cached.
        let mut page = vec![0; MIB as usize];
        for offset in (0..bytes).step_by(page.len()) {
            file.read_at(&mut page, offset)?;
        }
        let (next, took) = (RefCell::new(0), RefCell::default());
        Ok(Store { file, copies, group, next, took, _named: named })
    }

    /// Updates `count` pages, and makes each group durable.
    fn update(&self, load: &Load, count: usize) -> io::Result<Slice> {
        let page_bytes = PAGE_BYTES as usize;
        let mut buffer = AlignedBuffer::new(page_bytes * self.group);
        let group = buffer.bytes();
        let mut next = self.next.borrow_mut();
        timed(count as u64, || {
            for _ in 0..count / self.group {
                let begun = Instant::now();
                let blocks: Vec<u64> = (0..self.group)
                    .map(|number| {
                        u64::from(load.blocks[0][(*next + number) % load.blocks[0].len()])
                    })
                    .collect();
                for (page, block) in group.chunks_mut(page_bytes).zip(&blocks) {
                    page[..8].copy_from_slice(&block.to_le_bytes());
                    page[8..16].copy_from_slice(&(*next as u64).to_le_bytes());
                }
                if let Some(copies) = &self.copies {
                    copies.write_all_at(group, 0)?;
                    copies.sync_data()?;
                }
                for (page, block) in group.chunks(page_bytes).zip(&blocks) {
                    self.file.write_all_at(page, block * u64::from(PAGE_BYTES))?;
                }
                self.file.sync_data()?;
                *next += self.group;
                self.took.borrow_mut().add(begun.elapsed());
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: each store has the updated pages, and one with copies has them there, too.
    #[test]
    fn stores_have_their_pages() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let engine = Engine::builder().cache_bytes(16 << 20).build().unwrap();
        let load = Load::random(1 << 20, PAGE_BYTES, 1);
        let store = match Store::open(&engine, dir.path(), 1 << 20, 4, Protection::Twice) {
            Ok(store) => store,
            Err(error) => return println!("no direct I/O: {error}"),
        };
        store.update(&load, 8).unwrap();
        let [pages, copies] = [0, 1].map(|at| std::fs::read(&store._named[at].path).unwrap());
        for number in 4..8 {
            let block = load.blocks[0][number] as usize;
            let page = &pages[block * PAGE_BYTES as usize..][..PAGE_BYTES as usize];
            assert_eq!(page[..8], (block as u64).to_le_bytes());
            assert_eq!(page, &copies[(number - 4) * PAGE_BYTES as usize..][..page.len()]);
        }
        assert!(store.took.take().latencies().p50_ns > 0.0);
    }
}
