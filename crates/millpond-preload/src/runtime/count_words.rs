//! The counts of a thread, for the report: a block of words that only the thread writes, and all threads may read.
//!
//! A word is the sum of a thread, and of earlier threads with its record. A child of fork starts with its parent's counts.

/// Words of a block: threads never share a cache line. Words of files may go up and down in different blocks (one
/// thread opens a file, another serves it): their sum is right, as sums wrap around.
pub const WORDS: usize = 64;
pub const SERVED_FILES: usize = 0;
pub const SERVED_BYTES: usize = 1;
/// How often the cache shrank under memory pressure.
pub const SHRUNK: usize = 2;
/// Files served through the kernel's cache though direct backing was asked for.
pub const UNDIRECTED_FILES: usize = 3;
/// Transfers with O_DIRECT: the engine counts them, and they are added here before a line, or an exec.
pub const DIRECT_READS: usize = 4;
pub const DIRECT_WRITES: usize = 5;
/// A word for each reason: files left to the kernel; bytes that it moved.
pub const PASSED_FILES: usize = 8;
pub const PASSED_BYTES: usize = PASSED_FILES + REASONS_MAX;
pub const REASONS_MAX: usize = 28;

const _: () = assert!(PASSED_BYTES + REASONS_MAX == WORDS);
