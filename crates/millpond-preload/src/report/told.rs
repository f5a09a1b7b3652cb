//! The tally, a memory file in which the processes of a run count: its form, and the line for people. The
//! preload library writes it; it says the line when the program ends, and `millpond run` does when the program
//! could not.
//!
//! ```text
//! 0          header: MARK, SAID, LOADED
//! CHILDREN   a block: what children have added when they ended
//! BLOCKS_AT  the main process's blocks, each a thread's
//! ```
//!
//! Words are of 64 bits in the machine's order. A main process that execs counts on where it was.

use std::fmt::{self, Write};

use super::block::*;
use super::reason::REASONS;

/// Bytes.
pub const WORD_BYTES: usize = 8;
pub const BLOCK_BYTES: usize = WORDS * WORD_BYTES;
pub const CHILDREN: usize = BLOCK_BYTES;
/// A multiple of any page's size.
pub const BLOCKS_AT: usize = 64 << 10;
/// Threads beyond these count where only their process sees it.
pub const BLOCKS_MAX: usize = 2048;
pub const FILE_BYTES: usize = BLOCKS_AT + BLOCKS_MAX * BLOCK_BYTES;

/// Words of the header: a mark; whether the line was said, or is just being; whether there was a main process.
pub const MARK: usize = 0;
pub const SAID: usize = 1;
pub const LOADED: usize = 2;

/// How `millpond run` names it: to the process that has it at this number.
pub const BY_SELF: &str = "/proc/self/fd/";

/// The value of [`MARK`].
pub const FORM: u64 = u64::from_le_bytes(*b"mp-sum\x001");

const _: () = assert!(REASONS.len() <= REASONS_MAX);

/// The part of the line about direct backing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direct {
    /// It was not asked for.
    Nothing,
    /// The engine that has counted the transfers is gone.
    Files,
    All,
}

/// Sums over blocks.
#[derive(Clone)]
pub struct Sums(pub [u64; WORDS]);

impl Sums {
    pub const fn none() -> Self {
        Self([0; WORDS])
    }

    pub fn add(&mut self, word: usize, count: u64) {
        self.0[word] = self.0[word].wrapping_add(count);
    }

    pub fn get(&self, word: usize) -> u64 {
        self.0[word]
    }

    fn passed(&self, index: usize) -> (u64, u64) {
        (self.0[PASSED_FILES + index], self.0[PASSED_BYTES + index])
    }

    pub fn passed_files(&self) -> u64 {
        (0..REASONS.len()).map(|index| self.passed(index).0).fold(0, u64::wrapping_add)
    }

    pub fn passed_bytes(&self) -> u64 {
        (0..REASONS.len()).map(|index| self.passed(index).1).fold(0, u64::wrapping_add)
    }

    pub fn is_empty(&self) -> bool {
        self.get(SERVED_FILES) == 0
            && self.get(SERVED_BYTES) == 0
            && (0..REASONS.len()).all(|index| self.passed(index) == (0, 0))
    }

    /// The reasons that count, in words: files, bytes.
    pub fn reasons(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        REASONS
            .iter()
            .enumerate()
            .map(|(index, (_, text))| (*text, self.passed(index).0, self.passed(index).1))
            .filter(|(_, files, bytes)| *files != 0 || *bytes != 0)
    }

    /// The line for people.
    pub fn sentence(&self, direct: Direct) -> String {
        let mut line = String::new();
        // Into memory.
        let _ = self.say(&mut line, direct);
        line
    }

    fn say(&self, line: &mut String, direct: Direct) -> fmt::Result {
        write!(
            line,
            "millpond: served {} files, {} bytes; passed {} files, {} bytes to the kernel",
            self.get(SERVED_FILES),
            self.get(SERVED_BYTES),
            self.passed_files(),
            self.passed_bytes(),
        )?;
        let mut lead = " (";
        for (text, files, bytes) in self.reasons() {
            write!(line, "{lead}{text}: {files} files, {bytes} bytes")?;
            lead = "; ";
        }
        if lead != " (" {
            line.push(')');
        }
        if self.get(SHRUNK) > 0 {
            write!(line, "; {} times less cache, for want of memory", self.get(SHRUNK))?;
        }
        let (reads, writes) = (self.get(DIRECT_READS), self.get(DIRECT_WRITES));
        let files = self.get(UNDIRECTED_FILES);
        match direct {
            Direct::Nothing => {}
            Direct::Files => write!(line, "; direct: {files} files without")?,
            Direct::All => {
                write!(line, "; direct: {reads} reads, {writes} writes, {files} files without")?;
            }
        }
        line.write_char('\n')
    }
}
