//! Layout of the tier's file, and the checksums of its parts.
//!
//! ```text
//!   head: magic, sizes, checksum | chunk 0 | chunk 1 | ...
//!   chunk:  header: magic, sequence, count, checksum, an entry for each page | page 0 | page 1 | ...
//!   entry:  object, page, checksum of its bytes, location
//! ```
//!
//! - **L1** The checksum of a page is seeded by object and page number. So the bytes of another page, object or version,
//!   and a torn page, have a wrong checksum, even if the header is right.
//! - **L2** The checksum of a header is seeded by its chunk number: a header at another chunk's position is invalid.
//! - **L3** An object is identified by a 128-bit hash of store, location, ETag, version and size.

use twox_hash::{XxHash3_64, XxHash3_128};

/// Alignment of direct I/O.
pub(crate) const ALIGN_BYTES: u64 = 4096;
/// Size of the file's head, before the first chunk.
pub(crate) const HEAD_BYTES: u64 = ALIGN_BYTES;
/// The last byte is the version of the format.
const HEAD_MAGIC: &[u8; 8] = b"MPobj\0\0\x01";
const CHUNK_MAGIC: &[u8; 8] = b"MPchk\0\0\x01";
/// Most page bytes of a chunk, and so of a write: large enough for any device. Untuned.
const CHUNK_BYTES_MAX: u64 = 1 << 20;
/// A chunk, which is dropped as a whole, is at most about this fraction of the file.
const CHUNKS_MIN: u64 = 64;
const SLOTS_MIN: u64 = 8;
const PREFIX_BYTES: usize = 32;
const ENTRY_BYTES: usize = 40;

/// Sizes of the file's parts, computed from the options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) page_bytes: u64,
    /// Pages of a chunk.
    pub(crate) slots: u32,
    pub(crate) chunks: u32,
}

/// Identity of an object version (L3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Object {
    pub(crate) id: u128,
    /// Hash of the object's name.
    pub(crate) location: u32,
}

/// Identity of a page of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageId {
    pub(crate) object: Object,
    pub(crate) page: u64,
}

/// A page's entry in a chunk header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) id: PageId,
    pub(crate) checksum: u64,
}

impl Layout {
    /// Layout of a file of at most `bytes` bytes. `None`: the file would be too small.
    pub(crate) fn new(bytes: u64, page_bytes: u64) -> Option<Layout> {
        let slots =
            (bytes / CHUNKS_MIN / page_bytes).clamp(SLOTS_MIN, CHUNK_BYTES_MAX / page_bytes);
        let layout = Layout { page_bytes, slots: slots as u32, chunks: 0 };
        let chunks = bytes.saturating_sub(HEAD_BYTES) / layout.chunk_bytes();
        // Page numbers have 32 bits.
        let chunks = chunks.min(u64::from(u32::MAX - 1) / slots) as u32;
        (chunks >= 4).then_some(Layout { chunks, ..layout })
    }

    pub(crate) fn header_bytes(&self) -> usize {
        let bytes = PREFIX_BYTES + self.slots as usize * ENTRY_BYTES;
        bytes.next_multiple_of(ALIGN_BYTES as usize)
    }

    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.header_bytes() as u64 + u64::from(self.slots) * self.page_bytes
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.chunk_offset(self.chunks)
    }

    pub(crate) fn chunk_offset(&self, chunk: u32) -> u64 {
        HEAD_BYTES + u64::from(chunk) * self.chunk_bytes()
    }

    /// Number of pages in the file; they are numbered from 0.
    pub(crate) fn page_count(&self) -> usize {
        self.chunks as usize * self.slots as usize
    }

    pub(crate) fn page_offset(&self, page_number: u32) -> u64 {
        let (chunk, slot) = (page_number / self.slots, page_number % self.slots);
        let pages = u64::from(slot) * self.page_bytes;
        self.chunk_offset(chunk) + self.header_bytes() as u64 + pages
    }

    /// Writes the file's head into a block.
    pub(crate) fn write_head(&self, block: &mut [u8]) {
        block.fill(0);
        block[..8].copy_from_slice(HEAD_MAGIC);
        block[8..16].copy_from_slice(&self.page_bytes.to_le_bytes());
        block[16..20].copy_from_slice(&self.slots.to_le_bytes());
        let checksum = XxHash3_64::oneshot(&block[..24]);
        block[24..32].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Whether a block is the head of a file with this page size and chunk size.
    pub(crate) fn is_head(&self, block: &[u8]) -> bool {
        let mut expected = [0; 32];
        self.write_head(&mut expected);
        block.get(..32) == Some(&expected)
    }

    /// Writes the header of a chunk.
    pub(crate) fn write_header(
        &self,
        header: &mut [u8],
        chunk: u32,
        sequence: u64,
        entries: &[Entry],
    ) {
        let header = &mut header[..self.header_bytes()];
        header.fill(0);
        header[..8].copy_from_slice(CHUNK_MAGIC);
        header[8..16].copy_from_slice(&sequence.to_le_bytes());
        header[16..20].copy_from_slice(&(entries.len() as u32).to_le_bytes());
        for (at, entry) in header[PREFIX_BYTES..].chunks_exact_mut(ENTRY_BYTES).zip(entries) {
            at[..16].copy_from_slice(&entry.id.object.id.to_le_bytes());
            at[16..24].copy_from_slice(&entry.id.page.to_le_bytes());
            at[24..32].copy_from_slice(&entry.checksum.to_le_bytes());
            at[32..36].copy_from_slice(&entry.id.object.location.to_le_bytes());
        }
        let checksum = header_checksum(header, chunk);
        header[24..32].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Sequence number and entries of a header. `None`: the header is damaged or of another chunk (L2).
    pub(crate) fn read_header(&self, header: &[u8], chunk: u32) -> Option<(u64, Vec<Entry>)> {
        let mut copy = header.get(..self.header_bytes())?.to_vec();
        let number = |at: &[u8]| u64::from_le_bytes(at[..8].try_into().expect("8 bytes"));
        let (checksum, sequence) = (number(&copy[24..]), number(&copy[8..]));
        let count = u32::from_le_bytes(copy[16..20].try_into().expect("4 bytes"));
        copy[24..32].fill(0);
        if &copy[..8] != CHUNK_MAGIC
            || count > self.slots
            || checksum != header_checksum(&copy, chunk)
        {
            return None;
        }
        let entry = |at: &[u8]| {
            let id = u128::from_le_bytes(at[..16].try_into().expect("16 bytes"));
            let location = u32::from_le_bytes(at[32..36].try_into().expect("4 bytes"));
            let id = PageId { object: Object { id, location }, page: number(&at[16..]) };
            Entry { id, checksum: number(&at[24..]) }
        };
        let entries = copy[PREFIX_BYTES..].chunks_exact(ENTRY_BYTES).take(count as usize);
        Some((sequence, entries.map(entry).collect()))
    }
}

/// Checksum of a header whose checksum field is zero.
fn header_checksum(header: &[u8], chunk: u32) -> u64 {
    XxHash3_64::oneshot_with_seed(u64::from(chunk) + 1, header)
}

impl Object {
    /// Hashes each part of the name with its length, so that different splits differ.
    pub(crate) fn new(store: &str, location: &str, tags: [Option<&str>; 2], size: u64) -> Object {
        let mut name = Vec::with_capacity(128);
        for part in [Some(store), Some(location), tags[0], tags[1]] {
            let len = part.map_or(u64::MAX, |part| part.len() as u64);
            name.extend_from_slice(&len.to_le_bytes());
            name.extend_from_slice(part.unwrap_or("").as_bytes());
        }
        name.extend_from_slice(&size.to_le_bytes());
        Object { id: XxHash3_128::oneshot(&name), location: Object::location(store, location) }
    }

    pub(crate) fn location(store: &str, location: &str) -> u32 {
        let seed = XxHash3_64::oneshot(store.as_bytes());
        XxHash3_64::oneshot_with_seed(seed, location.as_bytes()) as u32
    }
}

impl PageId {
    pub(crate) fn hash(&self) -> u64 {
        let mut bytes = [0; 24];
        bytes[..16].copy_from_slice(&self.object.id.to_le_bytes());
        bytes[16..].copy_from_slice(&self.page.to_le_bytes());
        XxHash3_64::oneshot(&bytes)
    }

    /// Checksum of the page's bytes (L1).
    pub(crate) fn checksum(&self, bytes: &[u8]) -> u64 {
        let seed = (self.object.id >> 64) as u64 ^ self.page.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        XxHash3_64::oneshot_with_seed(seed, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(page: u64) -> PageId {
        let tags = [Some("tag"), None];
        PageId { object: Object::new("store", "a/b", tags, 100_000), page }
    }

    /// Goal: a header with any byte changed, or read as another chunk's, is rejected.
    #[test]
    fn a_damaged_or_misplaced_header_is_rejected() {
        let layout = Layout::new(8 << 20, 4096).unwrap();
        let entry = |page| Entry { id: id(page), checksum: id(page).checksum(&[page as u8; 4096]) };
        let entries: Vec<_> = (0..layout.slots.into()).map(entry).collect();
        let mut header = vec![0; layout.header_bytes()];
        layout.write_header(&mut header, 3, 77, &entries);
        assert_eq!(layout.read_header(&header, 3), Some((77, entries)));
        assert_eq!(layout.read_header(&header, 4), None);
        assert_eq!(layout.read_header(&vec![0; layout.header_bytes()], 0), None);
        for at in 0..header.len() {
            header[at] ^= 1;
            assert_eq!(layout.read_header(&header, 3), None, "byte {at}");
            header[at] ^= 1;
        }
        let mut head = vec![0; 4096];
        layout.write_head(&mut head);
        assert!(layout.is_head(&head));
        let other = Layout::new(8 << 20, 8192).unwrap();
        assert!(!other.is_head(&head) && !layout.is_head(&[0; 4096]) && !layout.is_head(&[]));
    }

    #[test]
    fn sizes_fit_and_pages_are_aligned_and_apart() {
        for page_bytes in [4096, 16384, 65536] {
            for bytes in [1 << 22, 10_000_000, 1 << 26, (1 << 30) + 5, 1 << 40, u64::MAX] {
                let layout = Layout::new(bytes, page_bytes).unwrap();
                assert!(layout.file_bytes() <= bytes, "{layout:?}");
                let used = layout.page_count() as u64 * page_bytes;
                let most = bytes.min(u64::from(u32::MAX - 1) * page_bytes);
                assert!(used >= most / 5 * 4 - layout.chunk_bytes(), "{layout:?}: {used}");
                let last = layout.page_count() as u32 - 1;
                assert_eq!(layout.page_offset(last) + page_bytes, layout.file_bytes());
                for page_number in [0, 1, layout.slots - 1, layout.slots, last] {
                    assert_eq!(layout.page_offset(page_number) % ALIGN_BYTES, 0);
                }
            }
            assert_eq!(Layout::new(20 * page_bytes, page_bytes), None);
        }
    }

    #[test]
    fn different_names_are_different_objects() {
        let names = [
            Object::new("s", "ab", [Some("t"), None], 5),
            Object::new("s", "a", [Some("bt"), None], 5),
            Object::new("s", "ab", [None, Some("t")], 5),
            Object::new("s", "ab", [Some("t"), Some("")], 5),
            Object::new("s", "ab", [Some("t"), None], 6),
            Object::new("sa", "b", [Some("t"), None], 5),
        ];
        for (at, one) in names.iter().enumerate() {
            assert!(names[at + 1..].iter().all(|other| other.id != one.id));
        }
        assert_ne!(id(0).checksum(&[0; 4096]), id(1).checksum(&[0; 4096]));
    }
}
