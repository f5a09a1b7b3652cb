//! The record of all loads and stores of a program, by valgrind's lackey.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{BufRead, BufReader, Read};

const LINE_BYTES: u64 = 64;
/// Stores to one line with fewer accesses between them need one transfer of the line.
const VISIT_ACCESSES: u64 = 32;

/// The lines of one operation.
#[derive(Default)]
pub struct Traced {
    /// Of each line that it writes: the visits, and the number of the first and the last access.
    written: HashMap<u64, Visits>,
    /// The lines that it reads or writes.
    accessed: HashSet<u64>,
}

struct Visits {
    count: u32,
    first: u64,
    last: u64,
    /// The 8-byte words of the line that it writes, as bits.
    words: u8,
}

/// A line that two operations write.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedLine {
    pub visits: u32,
    /// Both write the same word. If not, the line holds data of two neighbours.
    pub has_common_word: bool,
}

impl Traced {
    pub fn written_count(&self) -> usize {
        self.written.len()
    }

    /// The lines that both write, in the order of the first visits.
    pub fn lines_shared_with(&self, other: &Traced) -> Vec<SharedLine> {
        let both = self.written.iter().filter_map(|(line, visits)| {
            let has_common_word = other.written.get(line)?.words & visits.words != 0;
            Some((visits.first, SharedLine { visits: visits.count, has_common_word }))
        });
        let mut shared: Vec<_> = both.collect();
        shared.sort_by_key(|(first, _)| *first);
        shared.into_iter().map(|(_, line)| line).collect()
    }

    /// The number of lines that this operation writes and `hit` reads.
    pub fn lines_read_by(&self, hit: &Traced) -> usize {
        self.written.keys().filter(|line| hit.accessed.contains(line)).count()
    }
}

/// The operations that lie between two marks each.
#[derive(Default)]
pub struct Trace {
    marks_at: Option<u64>,
    marks_bytes: u64,
    /// The operation whose marks surround the next lines of the record.
    within: Option<usize>,
    accesses: u64,
    operations: BTreeMap<usize, Traced>,
}

impl Trace {
    /// Reads the record of a program that prints the address of `marks_bytes` bytes with its marks.
    pub fn read(record: impl Read, marks_bytes: usize) -> Trace {
        let mut trace = Trace { marks_bytes: marks_bytes as u64, ..Trace::default() };
        for line in BufReader::new(record).split(b'\n') {
            trace.line(&line.unwrap());
        }
        trace
    }

    pub fn operation(&self, number: usize) -> &Traced {
        &self.operations[&number]
    }

    fn line(&mut self, line: &[u8]) {
        // " S 04222cac,4": a store; L: a load; M: both at once.
        let [b' ', kind @ (b'S' | b'M' | b'L'), b' ', place @ ..] = line else {
            if self.marks_at.is_none()
                && let Ok(text) = std::str::from_utf8(line)
                && let Some(at) = text.split("marks at ").nth(1)
            {
                self.marks_at = at.trim().parse().ok();
            }
            return;
        };
        let Some(marks_at) = self.marks_at else { return };
        let mut parts = place.split(|&byte| byte == b',');
        let number = |part: Option<&[u8]>, radix| {
            u64::from_str_radix(std::str::from_utf8(part.unwrap()).unwrap(), radix).unwrap()
        };
        let at = number(parts.next(), 16);
        let len = number(parts.next(), 10);
        if (marks_at..marks_at + self.marks_bytes).contains(&at) {
            let mark = ((at - marks_at) / 8) as usize;
            self.within = mark.is_multiple_of(2).then_some(mark / 2);
            self.operations.entry(mark / 2).or_default();
            self.accesses = 0;
        } else if let Some(operation) = self.within {
            self.accesses += 1;
            let now = self.accesses;
            let traced = self.operations.get_mut(&operation).unwrap();
            for line in at / LINE_BYTES..=(at + len - 1) / LINE_BYTES {
                traced.accessed.insert(line);
                if *kind == b'L' {
                    continue;
                }
                let fresh = Visits { count: 1, first: now, last: now, words: 0 };
                let visits = traced.written.entry(line).or_insert(fresh);
                let (low, high) = (at.max(line * LINE_BYTES), at + len - 1);
                let words = low / 8..=high.min(line * LINE_BYTES + LINE_BYTES - 1) / 8;
                words.for_each(|word| visits.words |= 1 << (word % 8));
                if now - visits.last > VISIT_ACCESSES {
                    visits.count += 1;
                }
                visits.last = now;
            }
        }
    }
}
