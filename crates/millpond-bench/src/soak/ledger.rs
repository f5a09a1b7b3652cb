//! The ledger of a worker: a file that records which writes it has begun, done and synced. It outlives the
//! worker.
//!
//! It is written with plain system calls, not through the engine: the entries survive a kill of the worker.
//! Each slot has three numbers; only the slot's writer changes them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::slots::SHAPES;

const WORD: usize = 8;

/// The slots of all shapes.
fn slots() -> usize {
    SHAPES.iter().map(|shape| shape.slots).sum()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    Begun,
    Done,
    Synced,
}

/// Counts of all workers of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Count {
    /// The id of the process that writes.
    Pid,
    Reads,
    Writes,
    Syncs,
}

const COUNTS: usize = 4;

#[derive(Debug)]
pub struct Ledger {
    file: File,
}

impl Ledger {
    pub fn create(path: &Path) -> io::Result<Ledger> {
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        file.set_len(((COUNTS + 3 * slots()) * WORD) as u64)?;
        Ok(Ledger { file })
    }

    pub fn open(path: &Path) -> io::Result<Ledger> {
        Ok(Ledger { file: File::options().read(true).write(true).open(path)? })
    }

    fn place(shape: usize, slot: usize, word: Word) -> u64 {
        let before: usize = SHAPES[..shape].iter().map(|shape| shape.slots).sum();
        ((COUNTS + 3 * (before + slot) + word as usize) * WORD) as u64
    }

    fn at(&self, place: u64) -> io::Result<u64> {
        let mut word = [0; WORD];
        self.file.read_exact_at(&mut word, place)?;
        Ok(u64::from_le_bytes(word))
    }

    pub fn get(&self, shape: usize, slot: usize, word: Word) -> io::Result<u64> {
        self.at(Ledger::place(shape, slot, word))
    }

    pub fn set(&self, shape: usize, slot: usize, word: Word, version: u64) -> io::Result<()> {
        self.file.write_all_at(&version.to_le_bytes(), Ledger::place(shape, slot, word))
    }

    pub fn count(&self, count: Count) -> io::Result<u64> {
        self.at((count as usize * WORD) as u64)
    }

    pub fn set_count(&self, count: Count, n: u64) -> io::Result<()> {
        self.file.write_all_at(&n.to_le_bytes(), (count as usize * WORD) as u64)
    }
}
