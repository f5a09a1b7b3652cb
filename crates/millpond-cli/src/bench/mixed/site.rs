//! Where a case is measured, and what every case there needs: names, an engine, rounds.

use std::io;
use std::time::Duration;

use millpond::{Backing, Engine, File, OpenOptions, WriteMode};

use super::place::{BlockFile, Place, check_blocks};
use super::target::Target;
use super::work::Work;
use crate::bench::data::MIB;
use crate::bench::plan::{Plan, Rounds};
use crate::failure::{Context, Result};

pub const MILLPOND: &str = "millpond";
/// What is dirty stays in a warm cache for longer than a pair takes.
pub const DIRTY_AGE_MAX: Duration = Duration::from_secs(120);
/// Rounds of cases that no bar is set for: full and quick.
pub const LISTED_ROUNDS_MAX: [u32; 2] = [5, 3];

/// The names of a case and of its rows.
macro_rules! names {
    ($case:literal) => {
        Names {
            case: $case,
            reads: concat!($case, "-reads"),
            writes: concat!($case, "-writes"),
            total: None,
        }
    };
    ($case:literal, total) => {
        Names { total: Some(concat!($case, "-total")), ..names!($case) }
    };
}
pub(super) use names;

pub fn rounds(plan: &Plan, barred: bool) -> Rounds {
    let listed = LISTED_ROUNDS_MAX[usize::from(plan.quick)];
    if barred { plan.rounds() } else { plan.rounds().at_most(listed) }
}

/// A place, and how it is called in the names of engines.
pub struct Site<'a> {
    pub place: Place,
    pub name: String,
    pub plan: &'a Plan,
    /// On the kind of file system that was measured on already, with little time.
    pub repeats: bool,
}

impl Site<'_> {
    pub fn own(&self) -> String {
        match self.place {
            Place::Directory => MILLPOND.into(),
            Place::Loop(_) => format!("{MILLPOND}, {}", self.name),
        }
    }

    pub fn kernel(&self) -> String {
        format!("kernel, {}", self.name)
    }

    pub fn files(
        &self,
        bytes: u64,
        block_bytes: u32,
    ) -> std::result::Result<[BlockFile; 2], String> {
        if self.repeats {
            return Err("quick, and the directory is on such a file system".into());
        }
        self.place.files(&self.plan.dir, bytes, block_bytes)
    }
}

/// An engine with so large a cache, and a file in it.
pub fn pond(cache_bytes: u64, file: &BlockFile) -> Result<(Engine, File)> {
    let engine = Engine::builder()
        .cache_bytes(cache_bytes)
        .dirty_age_max(DIRTY_AGE_MAX)
        .build()
        .context("building a Millpond engine")?;
    let options = OpenOptions::new()
        .read(true)
        .write(true)
        .write_mode(WriteMode::Back)
        .backing(Backing::Direct);
    let opened = engine.open(file.path(), &options).context("opening a file with Millpond")?;
    Ok((engine, opened))
}

/// Room for a file of which everything is dirty and yet nothing is written back.
pub fn roomy(file_bytes: u64) -> u64 {
    5 * file_bytes + 64 * MIB
}

/// Makes what is dirty durable, and reads and checks the whole file.
pub fn warm_up(target: &impl Target, work: &Work) -> io::Result<()> {
    target.sync_data()?;
    check_blocks(work.blocks(), work.block_bytes, |dst, offset| target.read_at(dst, offset))
}
