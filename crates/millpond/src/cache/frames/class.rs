//! Classes of cache memory, which determine the size of frames.

use crate::units::{PAGE_SHIFTS, UNIT_BYTES, UNIT_SHIFT};

/// The use of a chunk's frames, and so their size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Class(u8);

impl Class {
    /// Inner nodes of page tables: 4 KiB.
    pub(crate) const INNER: Class = Class(0);
    /// Leaves of page tables: 4 KiB. They are separate from inner nodes, as a late reader may still
    /// set REFERENCED in a word of a recycled leaf.
    pub(crate) const LEAF: Class = Class(1);
    /// Slabs of file objects: 4 KiB.
    pub(crate) const SLAB: Class = Class(2);
    /// Pages of one unit.
    pub(crate) const UNIT_PAGE: Class = Class(3);
    pub(in crate::cache) const COUNT: usize = 8;
    /// The number of classes for pages.
    pub(in crate::cache) const PAGES: usize = Self::COUNT - Self::UNIT_PAGE.0 as usize;

    /// Pages of `1 << page_shift` bytes.
    pub(crate) fn page(page_shift: u32) -> Class {
        debug_assert!(PAGE_SHIFTS.contains(&page_shift));
        Class((page_shift - UNIT_SHIFT) as u8 + Self::SLAB.0 + 1)
    }

    pub(crate) fn bytes(self) -> usize {
        UNIT_BYTES << self.0.saturating_sub(Self::SLAB.0 + 1)
    }

    pub(crate) fn units(self) -> u32 {
        (self.bytes() / UNIT_BYTES) as u32
    }

    pub(crate) fn from_tag(tag: u8) -> Class {
        debug_assert!((tag as usize) < Self::COUNT);
        Class(tag)
    }

    pub(crate) fn tag(self) -> u8 {
        self.0
    }

    /// Whether its frames hold pages of files.
    pub(in crate::cache) fn is_page(self) -> bool {
        self.0 > Self::SLAB.0
    }

    /// The index among the classes for pages.
    pub(in crate::cache) fn page_number(self) -> usize {
        usize::from(self.0 - Self::UNIT_PAGE.0)
    }

    pub(in crate::cache) fn all() -> impl Iterator<Item = Class> {
        (0..Self::COUNT as u8).map(Class)
    }
}
