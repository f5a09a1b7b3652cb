//! Links of a page table: the node, its height or the generation of the slot, and a predicted frame
//! for the pages below (see `table`).
//!
//! ```text
//!   root:                  prediction (28 bits) | node (28) | levels (8)
//!   slot of an inner node: prediction           | node      | generation
//! ```
//!
//! The generation belongs to the slot: it is incremented with each node that is unlinked from it
//! (epoch.V4).
//!
//! Locks: none.

use crate::units::{FRAME_BITS, FrameIndex, UNIT_SHIFT};

const LINK_NODE_SHIFT: u32 = 8;
const LEVELS: u64 = (1 << LINK_NODE_SHIFT) - 1;
/// Shrunk under loom, so that a model can wrap it.
#[cfg(not(loom))]
const GENERATION_BITS: u32 = LINK_NODE_SHIFT;
#[cfg(loom)]
const GENERATION_BITS: u32 = 2;
const GENERATION: u64 = (1 << GENERATION_BITS) - 1;
const LINK_PREDICTION_SHIFT: u32 = LINK_NODE_SHIFT + FRAME_BITS;
const FRAME_MASK: u64 = (1 << FRAME_BITS) - 1;

/// A link to a node: the root, or a slot of an inner node.
#[derive(Clone, Copy)]
pub(in crate::cache) struct Link(pub(in crate::cache) u64);

impl Link {
    /// The link of a root.
    pub(in crate::cache) const fn root(node: FrameIndex, levels: u64) -> Link {
        Link((node.0 as u64) << LINK_NODE_SHIFT | levels)
    }

    /// The link of a slot without a node, changed to name `node`.
    pub(in crate::cache) fn naming(self, node: FrameIndex) -> Link {
        debug_assert!(self.is_none());
        Link(u64::from(node.0) << LINK_NODE_SHIFT | self.0 & GENERATION)
    }

    /// The link of a slot after its node was unlinked: no node, and the next generation.
    pub(in crate::cache) fn unlinked(self) -> Link {
        Link(self.0.wrapping_add(1) & GENERATION)
    }

    /// Whether the generation has wrapped, or is halfway to that.
    pub(in crate::cache) fn is_at_turn(self) -> bool {
        (self.0 & GENERATION).is_multiple_of(1 << (GENERATION_BITS - 1))
    }

    /// Whether it names no node.
    #[inline]
    pub(in crate::cache) fn is_none(self) -> bool {
        self.node() == FrameIndex::NONE
    }

    #[inline]
    pub(in crate::cache) fn node(self) -> FrameIndex {
        FrameIndex((self.0 >> LINK_NODE_SHIFT & FRAME_MASK) as u32)
    }

    /// The link of a root, in the form of a slot that never named a node.
    pub(in crate::cache) fn without_levels(self) -> Link {
        Link(self.0 & !LEVELS)
    }

    /// The number of levels below; roots only.
    #[inline]
    pub(in crate::cache) fn levels(self) -> u32 {
        (self.0 & LEVELS) as u32
    }

    /// Whether both name the same node, in the same generation of the slot. Their predictions may
    /// differ.
    #[inline]
    pub(in crate::cache) fn same_node(self, other: Link) -> bool {
        (self.0 ^ other.0) & ((1 << LINK_PREDICTION_SHIFT) - 1) == 0
    }

    /// Whether the generation of the slot is the same (epoch.V4), or the levels of the root, where
    /// another node comes with a raised epoch (epoch.V3). Comparing half of the link is cheaper
    /// than [`Link::same_node`]: `docs/benchmarks.md`.
    #[inline]
    pub(in crate::cache) fn same_generation(self, other: Link) -> bool {
        self.0 as u32 == other.0 as u32
    }

    /// The predicted frame of the page in `slot` of the leaf.
    #[inline]
    pub(in crate::cache) fn predicted(self, slot: usize, page_shift: u32) -> FrameIndex {
        let ahead = (slot as u64) << (page_shift - UNIT_SHIFT);
        FrameIndex(((self.0 >> LINK_PREDICTION_SHIFT).wrapping_add(ahead) & FRAME_MASK) as u32)
    }

    /// The same link, with the prediction that gives the page in `slot` the frame `frame`.
    pub(in crate::cache) fn predicting(
        self,
        slot: usize,
        page_shift: u32,
        frame: FrameIndex,
    ) -> Link {
        let ahead = (slot as u64) << (page_shift - UNIT_SHIFT);
        let predicted = u64::from(frame.0).wrapping_sub(ahead) & FRAME_MASK;
        Link(self.0 & ((1 << LINK_PREDICTION_SHIFT) - 1) | predicted << LINK_PREDICTION_SHIFT)
    }
}
