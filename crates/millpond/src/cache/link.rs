//! Links of a page table: which node, how high it is, and a guess at the frames below (see `table`).
//!
//! ```text
//!   root, slot of an inner node:   guess (28 bits) | node (28) | levels (8, root only)
//! ```
//!
//! Locks: none.

use crate::units::{FRAME_BITS, FrameIndex, UNIT_SHIFT};

const LEVELS: u64 = 0xff;
const LINK_NODE_SHIFT: u32 = 8;
const LINK_GUESS_SHIFT: u32 = LINK_NODE_SHIFT + FRAME_BITS;
const FRAME_MASK: u64 = (1 << FRAME_BITS) - 1;

/// A link to a node: the root, or a slot of an inner node. 0 is none.
#[derive(Clone, Copy)]
pub(super) struct Link(pub(super) u64);

impl Link {
    pub(super) fn new(node: FrameIndex, levels: u64) -> Link {
        Link(u64::from(node.0) << LINK_NODE_SHIFT | levels)
    }

    #[inline]
    pub(super) fn node(self) -> FrameIndex {
        FrameIndex((self.0 >> LINK_NODE_SHIFT & FRAME_MASK) as u32)
    }

    /// A root's link, as it is in a slot.
    pub(super) fn without_levels(self) -> Link {
        Link(self.0 & !LEVELS)
    }

    /// The number of levels below; roots only.
    #[inline]
    pub(super) fn levels(self) -> u32 {
        (self.0 & LEVELS) as u32
    }

    /// Whether both lead to the same node; their guesses may differ.
    pub(super) fn same_node(self, other: Link) -> bool {
        (self.0 ^ other.0) & ((1 << LINK_GUESS_SHIFT) - 1) == 0
    }

    /// The frame that the page in `slot` of the leaf may have.
    #[inline]
    pub(super) fn guess(self, slot: usize, page_shift: u32) -> FrameIndex {
        let ahead = (slot as u64) << (page_shift - UNIT_SHIFT);
        FrameIndex(((self.0 >> LINK_GUESS_SHIFT).wrapping_add(ahead) & FRAME_MASK) as u32)
    }

    /// The same link, with the guess that gives the page in `slot` the frame `frame`.
    pub(super) fn guessing(self, slot: usize, page_shift: u32, frame: FrameIndex) -> Link {
        let ahead = (slot as u64) << (page_shift - UNIT_SHIFT);
        let guess = u64::from(frame.0).wrapping_sub(ahead) & FRAME_MASK;
        Link(self.0 & ((1 << LINK_GUESS_SHIFT) - 1) | guess << LINK_GUESS_SHIFT)
    }
}
