//! How pages and frames are numbered, and in which units memory is cut.

/// The unit of frame indexes, and the size of table nodes.
pub(crate) const UNIT_BYTES: usize = 1 << UNIT_SHIFT;
pub(crate) const UNIT_SHIFT: u32 = 12;
/// Units of a chunk: what a huge page holds.
pub(crate) const CHUNK_UNITS: u32 = 512;
pub(crate) const CHUNK_BYTES: u64 = CHUNK_UNITS as u64 * UNIT_BYTES as u64;
/// The binary logarithms of the sizes that pages may have: 4 to 64 KiB.
pub(crate) const PAGE_SHIFTS: std::ops::Range<u32> = UNIT_SHIFT..UNIT_SHIFT + 5;

/// Bits that a frame index takes in page words and in links between table nodes.
pub(crate) const FRAME_BITS: u32 = 28;
/// Frames that so many bits tell apart: 1 TiB of them.
pub(crate) const FRAMES_MAX: u64 = 1 << FRAME_BITS;

/// The number of a page within its file.
pub(crate) type PageIndex = u64;

/// A frame, as its distance from the base of the reservation in units. 0 is no frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) struct FrameIndex(pub(crate) u32);

impl FrameIndex {
    pub(crate) const NONE: FrameIndex = FrameIndex(0);
}

/// The smallest and the default page size, in bytes.
pub const PAGE_BYTES_MIN: u32 = 4096;
/// The largest page size, in bytes.
pub const PAGE_BYTES_MAX: u32 = 65536;
