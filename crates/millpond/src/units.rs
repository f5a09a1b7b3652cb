//! Numbers of pages and frames, and the units into which memory is divided.

use std::ops::{Add, AddAssign, Sub};

/// The unit of frame indexes, and the size of table nodes.
pub(crate) const UNIT_BYTES: usize = 1 << UNIT_SHIFT;
pub(crate) const UNIT_SHIFT: u32 = 12;
/// Units of a chunk: the size of a huge page.
pub(crate) const CHUNK_UNITS: u32 = 512;
pub(crate) const CHUNK_BYTES: u64 = CHUNK_UNITS as u64 * UNIT_BYTES as u64;
/// The binary logarithms of the sizes that pages may have: 4 to 64 KiB.
pub(crate) const PAGE_SHIFTS: std::ops::Range<u32> = UNIT_SHIFT..UNIT_SHIFT + 5;

/// Bits that a frame index takes in page words and in links between table nodes.
pub(crate) const FRAME_BITS: u32 = 28;
/// The number of frames that an index of that many bits can address: 1 TiB of them.
pub(crate) const FRAMES_MAX: u64 = 1 << FRAME_BITS;

/// The number of a page within its file.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub(crate) struct PageIndex(pub(crate) u64);

impl PageIndex {
    pub(crate) const FIRST: PageIndex = PageIndex(0);
    /// The last page that a file can have, and so "to the end".
    pub(crate) const LAST: PageIndex = PageIndex(i64::MAX as u64 >> UNIT_SHIFT);

    /// The page of byte `offset`, of a file with pages of `1 << page_shift` bytes.
    #[inline]
    pub(crate) fn of_byte(offset: u64, page_shift: u32) -> PageIndex {
        PageIndex(offset >> page_shift)
    }

    /// The offset of the page's first byte.
    #[inline]
    pub(crate) fn first_byte(self, page_shift: u32) -> u64 {
        self.0 << page_shift
    }

    /// The pages from this one on.
    #[inline]
    pub(crate) fn onwards(self) -> impl Iterator<Item = PageIndex> + Clone {
        (self.0..).map(PageIndex)
    }

    /// The pages from this one to `last`.
    #[inline]
    pub(crate) fn to(self, last: PageIndex) -> impl Iterator<Item = PageIndex> + Clone {
        (self.0..=last.0).map(PageIndex)
    }
}

/// So many pages further.
impl Add<u64> for PageIndex {
    type Output = PageIndex;

    #[inline]
    fn add(self, pages: u64) -> PageIndex {
        PageIndex(self.0 + pages)
    }
}

impl AddAssign<u64> for PageIndex {
    #[inline]
    fn add_assign(&mut self, pages: u64) {
        self.0 += pages;
    }
}

impl Sub<u64> for PageIndex {
    type Output = PageIndex;

    #[inline]
    fn sub(self, pages: u64) -> PageIndex {
        PageIndex(self.0 - pages)
    }
}

/// By how many pages they differ.
impl Sub for PageIndex {
    type Output = u64;

    #[inline]
    fn sub(self, first: PageIndex) -> u64 {
        self.0 - first.0
    }
}

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

/// The page size of the kernel's cache: 4 KiB on x86-64; 4, 16 or 64 KiB on AArch64.
pub(crate) fn kernel_page_bytes() -> u64 {
    // SAFETY: the call takes any name, and no memory of the caller.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(PAGE_BYTES_MIN.into())
}
