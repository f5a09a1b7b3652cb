//! The sum of a process's counts or of several processes', and the line that reports it.

use std::fmt::{self, Write};

use crate::report::reason::REASONS;
use crate::runtime::count_words::*;

const _: () = assert!(REASONS.len() <= REASONS_MAX);

/// The sums of blocks of counts; see `runtime::count_words`.
#[derive(Clone)]
pub struct Totals(pub [u64; WORDS]);

impl Totals {
    pub const fn none() -> Self {
        Self([0; WORDS])
    }

    pub fn get(&self, word: usize) -> u64 {
        self.0[word]
    }

    fn passed(&self, index: usize) -> (u64, u64) {
        // An addition may be lost of which the bytes were taken back.
        let bytes = self.0[PASSED_BYTES + index].cast_signed().max(0);
        (self.0[PASSED_FILES + index], bytes.cast_unsigned())
    }

    fn passed_files(&self) -> u64 {
        (0..REASONS.len()).map(|index| self.passed(index).0).fold(0, u64::wrapping_add)
    }

    fn passed_bytes(&self) -> u64 {
        (0..REASONS.len()).map(|index| self.passed(index).1).fold(0, u64::wrapping_add)
    }

    pub fn is_empty(&self) -> bool {
        self.get(SERVED_FILES) == 0
            && self.get(SERVED_BYTES) == 0
            && (0..REASONS.len()).all(|index| self.passed(index) == (0, 0))
    }

    /// The reasons that count, in words: files, bytes.
    fn reasons(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        REASONS
            .iter()
            .enumerate()
            .map(|(index, (_, text))| (*text, self.passed(index).0, self.passed(index).1))
            .filter(|(_, files, bytes)| *files != 0 || *bytes != 0)
    }

    /// The line on standard error. `has_direct_backing`: with the numbers of direct transfers.
    pub fn sentence(&self, has_direct_backing: bool) -> String {
        let mut line = String::new();
        // A write to a string does not fail.
        let _ = self.write_sentence(&mut line, has_direct_backing);
        line
    }

    fn write_sentence(&self, line: &mut String, has_direct_backing: bool) -> fmt::Result {
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
            write!(line, "; the cache shrank {} times, as memory was short", self.get(SHRUNK))?;
        }
        if has_direct_backing {
            let (reads, writes) = (self.get(DIRECT_READS), self.get(DIRECT_WRITES));
            let files = self.get(UNDIRECTED_FILES);
            write!(
                line,
                "; direct: {reads} reads, {writes} writes, {files} files without direct I/O"
            )?;
        }
        line.write_char('\n')
    }
}
