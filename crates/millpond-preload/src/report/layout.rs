//! The form of the memory file in which processes account for their files: `accounts` writes it, and
//! `millpond run` reads it when the program has ended, however it has.
//!
//! ```text
//! header:  8 words                         row, row, ..   each in whole units, its MARK stored last
//! row:     WORDS words, then the file's path, then the program's
//! ```
//!
//! Words are of 64 bits in the machine's order. Room is taken by adding to [`NEXT`], so a process that is killed
//! while it makes a row leaves units without a mark: a reader goes on unit by unit, and no text can be
//! taken for a mark, since that has a byte of zero.

/// As large as the file ever gets; unused parts take no memory. Rows take about 384 bytes.
pub const FILE_BYTES: u64 = 64 << 20;
pub const UNIT_BYTES: usize = 64;
pub const WORD_BYTES: usize = 8;

/// Words of the header: a mark, the moment at which the run began (nanoseconds of CLOCK_MONOTONIC), the
/// first free unit, rows for which there was no room, opens of files outside the served
/// directories, processes; how often a cache shrank for want of memory.
pub const FORM: usize = 0;
pub const START: usize = 1;
pub const NEXT: usize = 2;
pub const LOST: usize = 3;
pub const OUTSIDE: usize = 4;
pub const PROCESSES: usize = 5;
pub const SHRUNK: usize = 6;

/// Of a whole header, and of a whole row.
pub const FORM_MARK: u64 = u64::from_le_bytes(*b"mp-run\x001");
pub const ROW_MARK: u64 = u64::from_le_bytes(*b"mp-row\x001");

/// Words of a row. Times are nanoseconds since the start of the run.
pub const MARK: usize = 0;
/// Bytes of the two texts: the path's in the lower half.
pub const TEXT_BYTES: usize = 1;
pub const PID: usize = 2;
pub const DEVICE: usize = 3;
pub const INODE: usize = 4;
pub const OPENED_NS: usize = 5;
pub const OPENS: usize = 6;
/// Why the kernel has it, or had it last.
pub const REASON: usize = 7;
/// Descriptions that are served now; how often it was served.
pub const SERVED_NOW: usize = 8;
pub const ADOPTIONS: usize = 9;
/// Reads that were answered at once, and those that were served and not answered at once.
pub const HITS: usize = 10;
pub const MISSES: usize = 11;
pub const READ_SERVED: usize = 12;
pub const READ_PASSED: usize = 13;
pub const WRITTEN_SERVED: usize = 14;
pub const WRITTEN_PASSED: usize = 15;
/// The first times that it was served, and the last one: from, to (0: not ended), why ended.
pub const PERIODS: usize = 16;
pub const PERIODS_MAX: usize = 6;
pub const PERIOD_WORDS: usize = 3;
pub const WORDS: usize = PERIODS + PERIODS_MAX * PERIOD_WORDS;

/// Why a period ended, beside the reasons: the program closed the file.
pub const CLOSED: u64 = u64::MAX;
