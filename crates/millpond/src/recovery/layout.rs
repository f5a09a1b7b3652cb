//! The layout of the mapping, and how its words are read.
//!
//! ```text
//!   0        header, one page: magic, version, boot id, counts, offsets
//!   4 KiB    op slots
//!   ..       file entries
//!   ..       records, one per unit of frames
//!   2 MiB *  frames
//! ```
//!
//! Every word is a `u64` in the machine's byte order: both sides run on one machine, and a mapping
//! does not outlive it (hence the boot id).

use crate::units::{CHUNK_BYTES, FRAMES_MAX, UNIT_BYTES};

/// "MILLPOND", and the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"MILLPOND");
const VERSION: u64 = 2;
pub(crate) const HEADER_BYTES: usize = 4096;
/// The number of header words in use.
const HEADER_WORDS: usize = 12;

/// The maximum number of concurrent commits of several pages: more than the sensible number of threads. Two
/// pages of memory.
pub(crate) const OPS: u32 = 128;
pub(crate) const OP_WORDS: usize = 8;
pub(crate) const FILE_WORDS: usize = 8;
pub(crate) const RECORD_WORDS: usize = 4;
pub(crate) const OP_BYTES: usize = OP_WORDS * 8;
pub(crate) const FILE_BYTES: usize = FILE_WORDS * 8;
pub(crate) const RECORD_BYTES: usize = RECORD_WORDS * 8;

/// One file may be dirty for each 32 KiB of cache: the entries take 1/512 of it.
const CACHE_BYTES_PER_FILE: u64 = 32 << 10;
/// A page of entries.
const FILES_MIN: u64 = 64;
/// The keeper has a descriptor of each; a process may usually have more.
const FILES_MAX: u64 = 16 << 10;

/// A page's frame is DIRTY, or will be when its op slot commits.
pub(crate) const FREE: u64 = 0;
pub(crate) const DIRTY: u64 = 1;
const PENDING: u64 = 2;
const RECORD_KIND: u64 = 0b11;
const RECORD_OP_SHIFT: u32 = 2;
const RECORD_OP_MASK: u64 = (1 << 14) - 1;
const RECORD_GENERATION_SHIFT: u32 = 16;
/// Generations of op slots wrap, after 2^48 uses, between which every record was FREE.
const OP_GENERATION_MASK: u64 = (1 << 48) - 1;

const IDLE: u64 = 0;
const BUSY: u64 = 1;
const COMMITTED: u64 = 2;
const OP_KIND: u64 = 0b11;
const OP_GENERATION_SHIFT: u32 = 2;

/// In an op slot: the commit does not change the size.
pub(crate) const NO_SIZE: u64 = u64::MAX;

pub(crate) const INTENT_NONE: u64 = 0;
const INTENT_TRUNCATE: u64 = 1;
const INTENT_PUNCH: u64 = 2;
const INTENT_ZERO: u64 = 3;

/// A file that the keeper has: its entry, and the entry's generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) struct EntryUse {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl EntryUse {
    /// The form in which records and op slots name it.
    pub(crate) fn word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The inverse of [`EntryUse::word`].
    pub(crate) fn from_word(word: u64) -> EntryUse {
        EntryUse { index: word as u32, generation: (word >> 32) as u32 }
    }

    /// The first word of the entry while it is in use.
    pub(crate) fn used(self) -> u64 {
        u64::from(self.generation) << 1 | 1
    }

    pub(crate) fn unused(self) -> u64 {
        u64::from(self.generation) << 1
    }
}

/// A change of a file's space or length that is about to be made below the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Intent {
    /// The file gets this length.
    Truncate { len: u64 },
    /// The bytes from `start` to `end` are freed, and read as zeros.
    Punch { start: u64, end: u64 },
    /// The bytes from `start` to `end` read as zeros; the size stays.
    Zero { start: u64, end: u64 },
}

impl Intent {
    /// The kind and two numbers.
    pub(crate) fn words(self) -> [u64; 3] {
        match self {
            Intent::Truncate { len } => [INTENT_TRUNCATE, len, 0],
            Intent::Punch { start, end } => [INTENT_PUNCH, start, end],
            Intent::Zero { start, end } => [INTENT_ZERO, start, end],
        }
    }

    /// `Err` for words that no engine writes.
    pub(crate) fn from_words([kind, start, end]: [u64; 3]) -> Result<Option<Intent>, ()> {
        let largest = i64::MAX as u64;
        match kind {
            INTENT_NONE => Ok(None),
            INTENT_TRUNCATE if start <= largest => Ok(Some(Intent::Truncate { len: start })),
            INTENT_PUNCH if start <= end && end <= largest => {
                Ok(Some(Intent::Punch { start, end }))
            }
            INTENT_ZERO if start <= end && end <= largest => Ok(Some(Intent::Zero { start, end })),
            _ => Err(()),
        }
    }
}

/// One use of an op slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OpUse {
    pub(crate) op: u32,
    pub(crate) generation: u64,
}

impl OpUse {
    /// The state that `word`, an idle op slot's, changes to when it is claimed.
    pub(crate) fn claimed(op: u32, word: u64) -> Option<OpUse> {
        let generation = ((word >> OP_GENERATION_SHIFT) + 1) & OP_GENERATION_MASK;
        (word & OP_KIND == IDLE).then_some(OpUse { op, generation })
    }

    pub(crate) fn busy(self) -> u64 {
        self.generation << OP_GENERATION_SHIFT | BUSY
    }

    pub(crate) fn committed(self) -> u64 {
        self.generation << OP_GENERATION_SHIFT | COMMITTED
    }

    pub(crate) fn idle(self) -> u64 {
        self.generation << OP_GENERATION_SHIFT | IDLE
    }

    /// The state of a record that waits for this commit.
    pub(crate) fn pending(self) -> u64 {
        self.generation << RECORD_GENERATION_SHIFT | u64::from(self.op) << RECORD_OP_SHIFT | PENDING
    }
}

/// A record as it was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordWords {
    pub(crate) state: u64,
    pub(crate) file: u64,
    pub(crate) page: u64,
    pub(crate) sequence: u64,
}

impl RecordWords {
    pub(crate) fn from_words(words: [u64; RECORD_WORDS]) -> Self {
        let [state, file, page, sequence] = words;
        Self { state, file, page, sequence }
    }

    /// Whether the page is dirty, given the op slots `ops`.
    pub(crate) fn is_dirty(&self, ops: &[OpWords]) -> bool {
        match self.state & RECORD_KIND {
            DIRTY => self.state == DIRTY,
            PENDING => {
                let op = (self.state >> RECORD_OP_SHIFT & RECORD_OP_MASK) as u32;
                let generation = self.state >> RECORD_GENERATION_SHIFT;
                let waits_for = OpUse { op, generation };
                ops.get(op as usize)
                    .is_some_and(|op| op.state == waits_for.committed() && op.file == self.file)
            }
            _ => false,
        }
    }
}

/// An op slot as it was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpWords {
    pub(crate) state: u64,
    pub(crate) file: u64,
    pub(crate) size: u64,
}

impl OpWords {
    pub(crate) fn from_words(words: [u64; OP_WORDS]) -> Self {
        let [state, file, size, ..] = words;
        Self { state, file, size }
    }

    /// The size that a committed op gives to `file`.
    pub(crate) fn size_of(&self, file: EntryUse) -> Option<u64> {
        let committed = self.state & OP_KIND == COMMITTED;
        (committed && self.file == file.word() && self.size != NO_SIZE).then_some(self.size)
    }
}

/// A file entry as it was read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileEntryWords {
    pub(crate) life: u64,
    pub(crate) size: u64,
    pub(crate) intent: [u64; 3],
    pub(crate) changes: ChangeWords,
}

impl FileEntryWords {
    pub(crate) fn from_words(words: [u64; FILE_WORDS]) -> Self {
        let [life, size, kind, start, end, state, changed_ns, reach] = words;
        let changes = ChangeWords { state, changed_ns, reach };
        Self { life, size, intent: [kind, start, end], changes }
    }
}

/// In [`ChangeWords::state`]: space was reserved beyond the size.
const RESERVED: u64 = 1 << 63;

/// A process's record of its own changes to a file below its cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ChangeWords {
    pub(crate) state: u64,
    /// The file's mtime after the last one, by [`mtime_ns`].
    pub(crate) changed_ns: u64,
    /// The changes have made the file no longer than this.
    pub(crate) reach: u64,
}

impl ChangeWords {
    pub(crate) fn new(in_flight: u64, is_reserved: bool, changed_ns: u64, reach: u64) -> Self {
        let state = in_flight | if is_reserved { RESERVED } else { 0 };
        Self { state, changed_ns, reach }
    }

    /// Whether the process died during one.
    pub(crate) fn is_in_flight(&self) -> bool {
        self.state & !RESERVED != 0
    }

    pub(crate) fn is_reserved(&self) -> bool {
        self.state & RESERVED != 0
    }
}

/// The time of the last change of the file's bytes, in nanoseconds since 1970 (modulo 2^64). Not its ctime,
/// which a new name or mode changes, too.
pub(crate) fn mtime_ns(stat: &rustix::fs::Stat) -> u64 {
    (stat.st_mtime as u64).wrapping_mul(1_000_000_000).wrapping_add(stat.st_mtime_nsec)
}

/// The counts of a mapping, from which the offsets of its sections follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    pub(crate) files: u32,
    pub(crate) units: u32,
}

impl Layout {
    /// The layout for a cache of `limit_bytes`, whose frames are addressed by `units`.
    pub(crate) fn new(limit_bytes: u64, units: u32) -> Layout {
        let files = (limit_bytes / CACHE_BYTES_PER_FILE).clamp(FILES_MIN, FILES_MAX) as u32;
        Layout { files, units }
    }

    pub(crate) fn ops_at(self) -> usize {
        HEADER_BYTES
    }

    pub(crate) fn files_at(self) -> usize {
        self.ops_at() + OPS as usize * OP_BYTES
    }

    pub(crate) fn records_at(self) -> usize {
        (self.files_at() + self.files as usize * FILE_BYTES).next_multiple_of(UNIT_BYTES)
    }

    /// Aligned for huge pages.
    pub(crate) fn frames_at(self) -> usize {
        (self.records_at() + self.units as usize * RECORD_BYTES)
            .next_multiple_of(CHUNK_BYTES as usize)
    }

    pub(crate) fn bytes(self) -> usize {
        self.frames_at() + self.units as usize * UNIT_BYTES
    }

    /// The resident bytes other than frames and records.
    pub(crate) fn fixed_bytes(self) -> usize {
        self.records_at()
    }

    pub(crate) fn header(self, boot_id: [u64; 2]) -> [u64; HEADER_WORDS] {
        [
            MAGIC,
            VERSION,
            boot_id[0],
            boot_id[1],
            u64::from(OPS),
            u64::from(self.files),
            u64::from(self.units),
            self.ops_at() as u64,
            self.files_at() as u64,
            self.records_at() as u64,
            self.frames_at() as u64,
            self.bytes() as u64,
        ]
    }

    /// The layout in a header, if it is valid, of this boot, and consistent with a mapping of `bytes`.
    pub(crate) fn from_header(header: &[u8], bytes: u64, boot_id: [u64; 2]) -> Option<Layout> {
        let mut words = [0; HEADER_WORDS];
        for (at, word) in words.iter_mut().enumerate() {
            *word = read_word(header, at)?;
        }
        let (files, units) = (words[5], words[6]);
        if !(1..=FILES_MAX).contains(&files) || !(1..=FRAMES_MAX).contains(&units) {
            return None;
        }
        let layout = Layout { files: files as u32, units: units as u32 };
        (words == layout.header(boot_id) && layout.bytes() as u64 == bytes).then_some(layout)
    }
}

/// Word number `at` of `bytes`.
fn read_word(bytes: &[u8], at: usize) -> Option<u64> {
    let word = bytes.get(at * 8..at * 8 + 8)?;
    Some(u64::from_ne_bytes(word.try_into().expect("eight bytes")))
}

/// The words of an array of entries of `N` words each.
pub(crate) fn read_entries<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u64; N]> {
    bytes
        .chunks_exact(N * 8)
        .map(|entry| std::array::from_fn(|at| read_word(entry, at).expect("the entry has N words")))
}

/// The boot id of this machine; zeros if it is unknown.
pub(crate) fn boot_id() -> [u64; 2] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(32).collect();
    let half = |part: Option<&str>| u64::from_str_radix(part.unwrap_or("0"), 16).unwrap_or(0);
    [half(digits.get(..16)), half(digits.get(16..))]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn a_header_tells_its_layout() {
        let layout = Layout::new(64 << 20, 1 << 17);
        let header = bytes(&layout.header([1, 2]));
        let total = layout.bytes() as u64;
        assert_eq!(Layout::from_header(&header, total, [1, 2]), Some(layout));
        assert_eq!(Layout::from_header(&header, total, [1, 3]), None, "another boot");
        assert_eq!(Layout::from_header(&header, total - 1, [1, 2]), None, "another length");
        assert_eq!(Layout::from_header(&header[..50], total, [1, 2]), None, "too short");
        for bit in 0..header.len() * 8 {
            let mut header = header.clone();
            header[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Layout::from_header(&header, total, [1, 2]), None, "bit {bit}");
        }
    }

    #[test]
    fn sections_do_not_overlap() {
        for (limit, units) in [(1 << 20, 512), (256 << 20, 1 << 19), (512 << 30, 1 << 28)] {
            let layout = Layout::new(limit, units);
            assert!(layout.ops_at() + OPS as usize * OP_BYTES <= layout.files_at());
            assert!(layout.files_at() + layout.files as usize * FILE_BYTES <= layout.records_at());
            assert!(layout.records_at() + units as usize * RECORD_BYTES <= layout.frames_at());
            assert_eq!(layout.frames_at() % (2 << 20), 0);
        }
    }

    #[test]
    fn intents_come_back_as_they_went() {
        let largest = i64::MAX as u64;
        let intents = [
            Intent::Truncate { len: 7 },
            Intent::Punch { start: 1, end: largest },
            Intent::Zero { start: 5, end: 5 },
        ];
        for intent in intents {
            assert_eq!(Intent::from_words(intent.words()), Ok(Some(intent)));
        }
        assert_eq!(Intent::from_words([INTENT_NONE, 9, 9]), Ok(None));
        assert_eq!(Intent::from_words([INTENT_PUNCH, 9, 8]), Err(()));
        assert_eq!(Intent::from_words([INTENT_TRUNCATE, largest + 1, 0]), Err(()));
        assert_eq!(Intent::from_words([4, 0, 0]), Err(()));
    }
}
