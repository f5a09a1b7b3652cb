//! Setup that the cases on one file system share: it names the files, builds the engine and runs the rounds.

use std::io;
use std::time::Duration;

use millpond::{Backing, Engine, File, OpenOptions, WriteMode};

use super::mixed_target::MixedTarget;
use super::test_file_system::{BlockFile, TestFileSystem, check_blocks};
use super::work::Work;
use crate::bench::data::MIB;
use crate::bench::plan::{Plan, Rounds};
use crate::failure::{Context, Result};

pub const MILLPOND: &str = "millpond";
/// Longer than a pair takes, so that dirty pages stay in a warm cache.
pub const DIRTY_AGE_MAX: Duration = Duration::from_secs(120);
/// Rounds of cases without a target: full and quick.
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

pub fn rounds(plan: &Plan, has_target: bool) -> Rounds {
    let listed = LISTED_ROUNDS_MAX[usize::from(plan.quick)];
    if has_target { plan.rounds() } else { plan.rounds().at_most(listed) }
}

/// A file system, and its name in the names of engines.
pub struct CaseSetup<'a> {
    pub file_system: TestFileSystem,
    pub name: String,
    pub plan: &'a Plan,
    /// Whether, in a quick run, this kind of file system was measured already.
    pub repeats: bool,
}

impl CaseSetup<'_> {
    pub fn own(&self) -> String {
        match self.file_system {
            TestFileSystem::Directory => MILLPOND.into(),
            TestFileSystem::Loop(_) => format!("{MILLPOND}, {}", self.name),
        }
    }

    pub fn mapped(&self) -> String {
        match self.file_system {
            TestFileSystem::Directory => format!("{MILLPOND}, mapped"),
            TestFileSystem::Loop(_) => format!("{MILLPOND}, mapped, {}", self.name),
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
        self.file_system.files(&self.plan.dir, bytes, block_bytes)
    }
}

/// An engine with a cache of that size, and a file in it.
pub fn open_millpond(cache_bytes: u64, file: &BlockFile) -> Result<(Engine, File)> {
    open_with(cache_bytes, file, WriteMode::Back, Backing::Direct)
}

/// An engine, and a file with mapped backing: the cache is the kernel's.
pub fn open_mapped(file: &BlockFile) -> Result<(Engine, File)> {
    open_with(MIB, file, WriteMode::Through, Backing::Mapped)
}

fn open_with(
    cache_bytes: u64,
    file: &BlockFile,
    mode: WriteMode,
    backing: Backing,
) -> Result<(Engine, File)> {
    let engine = Engine::builder()
        .cache_bytes(cache_bytes)
        .dirty_age_max(DIRTY_AGE_MAX)
        .build()
        .context("building a Millpond engine")?;
    let options = OpenOptions::new().read(true).write(true).write_mode(mode).backing(backing);
    let opened = engine.open(file.path(), &options).context("opening a file with Millpond")?;
    Ok((engine, opened))
}

/// Cache size for a file whose pages are all dirty without being written back.
pub fn cache_bytes_for_all_dirty(file_bytes: u64) -> u64 {
    5 * file_bytes + 64 * MIB
}

/// Makes dirty bytes durable, and reads and checks the whole file.
pub fn warm_up(target: &impl MixedTarget, work: &Work) -> io::Result<()> {
    target.sync_data()?;
    check_blocks(work.blocks(), work.block_bytes, |dst, offset| target.read_at(dst, offset))
}
