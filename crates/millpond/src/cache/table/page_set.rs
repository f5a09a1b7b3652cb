//! A set of pages of one file: a bitmap for each leaf of the page table that has a member.
//!
//! The set is ordered, so that adjacent pages are written back together. It takes 64 bytes for 2
//! MiB of small pages at best, and some hundred bytes for a page that is alone in its leaf, which
//! itself takes 4 KiB. The owner of the set charges this to the memory limit after changes
//! ([`PageSet::heap_bytes`], [`HeapCharge`](crate::cache::accounting::heap::HeapCharge)).

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::cache::table::SLOTS;
use crate::units::PageIndex;

const WORDS: usize = SLOTS / 64;

type Bitmap = [u64; WORDS];

/// No bitmap is empty.
#[derive(Default)]
pub(crate) struct PageSet {
    /// The only bitmap. `None`: there are several, or none.
    only: Option<Box<(u64, Bitmap)>>,
    /// Two or more bitmaps, by leaf.
    others: BTreeMap<u64, Bitmap>,
}

impl PageSet {
    pub(crate) fn is_empty(&self) -> bool {
        self.leaves() == 0
    }

    /// An upper bound of its heap bytes: the only bitmap, or tree nodes of 11 members, of which at
    /// least five are used except in the first node, and the overhead of the allocator.
    pub(crate) fn heap_bytes(&self) -> u64 {
        const ONLY_BYTES: u64 = (size_of::<(u64, Bitmap)>() + 16) as u64;
        const NODE_BYTES: u64 = 960;
        const MEMBER_BYTES: u64 = NODE_BYTES / 5;
        match self.leaves() as u64 {
            0 => 0,
            1 if self.only.is_some() => ONLY_BYTES,
            leaves => NODE_BYTES + (leaves - 1) * MEMBER_BYTES,
        }
    }

    /// The number of bitmaps.
    pub(crate) fn leaves(&self) -> usize {
        self.others.len() + usize::from(self.only.is_some())
    }

    /// The bitmap of `leaf`, which is added if it is missing.
    fn bitmap(&mut self, leaf: u64) -> &mut Bitmap {
        let is_only = self.only.as_ref().is_none_or(|only| only.0 == leaf);
        if is_only && self.others.is_empty() {
            return &mut self.only.get_or_insert_with(|| Box::new((leaf, Bitmap::default()))).1;
        }
        self.others.extend(self.only.take().map(|only| *only));
        self.others.entry(leaf).or_default()
    }

    fn bitmaps(&self, leaves: RangeInclusive<u64>) -> impl Iterator<Item = (u64, &Bitmap)> {
        let only = self.only.as_deref().filter(|only| leaves.contains(&only.0));
        let others = self.others.range(leaves).map(|(&leaf, bitmap)| (leaf, bitmap));
        only.map(|(leaf, bitmap)| (*leaf, bitmap)).into_iter().chain(others)
    }

    fn bitmaps_mut(
        &mut self,
        leaves: RangeInclusive<u64>,
    ) -> impl Iterator<Item = (u64, &mut Bitmap)> {
        let only = self.only.as_deref_mut().filter(|only| leaves.contains(&only.0));
        let others = self.others.range_mut(leaves).map(|(&leaf, bitmap)| (leaf, bitmap));
        only.map(|(leaf, bitmap)| (*leaf, bitmap)).into_iter().chain(others)
    }

    pub(crate) fn insert(&mut self, page: PageIndex) {
        let (leaf, word, bit) = place(page);
        self.bitmap(leaf)[word] |= bit;
    }

    pub(crate) fn contains(&self, page: PageIndex) -> bool {
        let (leaf, word, bit) = place(page);
        self.bitmaps(leaf..=leaf).any(|(_, words)| words[word] & bit != 0)
    }

    /// Calls `visit` with each page, in order.
    pub(crate) fn for_each(&self, visit: &mut dyn FnMut(PageIndex)) {
        for (leaf, words) in self.bitmaps(0..=u64::MAX) {
            for (at, &bits) in words.iter().enumerate() {
                let mut bits = bits;
                while bits != 0 {
                    visit(page(leaf, at, bits.trailing_zeros()));
                    bits &= bits - 1;
                }
            }
        }
    }

    /// Whether a page from `first` to `last` is a member.
    pub(crate) fn intersects(&self, first: PageIndex, last: PageIndex) -> bool {
        let mut bitmaps = self.bitmaps(leaf_of(first)..=leaf_of(last));
        bitmaps.any(|(leaf, words)| {
            words.iter().enumerate().any(|(at, &bits)| bits & mask(leaf, at, first, last) != 0)
        })
    }

    /// Takes out about `at_most` of the pages from `first` to `last`, in order. The pages of a leaf
    /// are only separated at the ends of the range.
    pub(crate) fn take(
        &mut self,
        first: PageIndex,
        last: PageIndex,
        at_most: usize,
    ) -> Vec<PageIndex> {
        let mut taken = Vec::new();
        let leaf_range = leaf_of(first)..=leaf_of(last);
        let mut emptied = Vec::new();
        for (leaf, words) in self.bitmaps_mut(leaf_range) {
            if taken.len() >= at_most {
                break;
            }
            for (at, bits) in words.iter_mut().enumerate() {
                let mut found = *bits & mask(leaf, at, first, last);
                *bits &= !found;
                while found != 0 {
                    taken.push(page(leaf, at, found.trailing_zeros()));
                    found &= found - 1;
                }
            }
            if words.iter().all(|&bits| bits == 0) {
                emptied.push(leaf);
            }
        }
        for leaf in emptied {
            self.only.take_if(|only| only.0 == leaf);
            self.others.remove(&leaf);
        }
        if self.others.is_empty() {
            // An empty map keeps a node.
            self.others = BTreeMap::new();
        }
        taken
    }
}

fn leaf_of(page: PageIndex) -> u64 {
    page.0 / SLOTS as u64
}

/// The page of a bit of word `at` of `leaf`.
fn page(leaf: u64, at: usize, bit: u32) -> PageIndex {
    PageIndex(leaf * SLOTS as u64 + at as u64 * 64 + u64::from(bit))
}

/// The leaf, word and bit of `page`.
fn place(page: PageIndex) -> (u64, usize, u64) {
    let slot = page.0 as usize % SLOTS;
    (leaf_of(page), slot / 64, 1 << (slot % 64))
}

/// The bits of word `at` of `leaf` for pages from `first` to `last`.
fn mask(leaf: u64, at: usize, first: PageIndex, last: PageIndex) -> u64 {
    let start = page(leaf, at, 0).0;
    let from = first.0.saturating_sub(start).min(64) as u32;
    let to = (last.0 + 1).saturating_sub(start).min(64) as u32;
    let below = |bits: u32| if bits == 64 { u64::MAX } else { (1 << bits) - 1 };
    below(to) & !below(from)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Goal: the set of a small file fits into the spare bytes of a small cache.
    #[test]
    fn one_leaf_takes_little_of_the_heap() {
        let mut set = PageSet::default();
        (0..SLOTS as u64).for_each(|page| set.insert(PageIndex(page)));
        assert_eq!((set.leaves(), set.heap_bytes()), (1, 88));
        set.insert(PageIndex(SLOTS as u64));
        assert_eq!(set.leaves(), 2);
        assert!(set.heap_bytes() > 960);
        assert_eq!(set.take(PageIndex::FIRST, PageIndex::LAST, usize::MAX).len(), SLOTS + 1);
        assert_eq!((set.leaves(), set.heap_bytes()), (0, 0));
    }

    #[test]
    fn behaves_as_an_ordered_set() {
        let (mut set, mut model) = (PageSet::default(), BTreeSet::new());
        let mut random = 1u64;
        for step in 0..20_000u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(step | 1);
            let start = PageIndex(if random & 1 == 0 { 1 << 40 } else { 0 });
            let page = start + (random >> 33) % 3000;
            if step % 50 == 49 {
                let last = page + random % 700;
                assert_eq!(set.intersects(page, last), model.range(page..=last).next().is_some());
                let taken = set.take(page, last, usize::MAX);
                let expected: Vec<PageIndex> = model.range(page..=last).copied().collect();
                assert_eq!(taken, expected);
                model.retain(|member| !(page..=last).contains(member));
            } else {
                set.insert(page);
                model.insert(page);
            }
            assert_eq!(set.contains(page), model.contains(&page));
            assert_eq!(set.is_empty(), model.is_empty());
        }
        let mut all = Vec::new();
        set.for_each(&mut |page| all.push(page));
        assert!(all.iter().eq(model.iter()));
        let some = set.take(PageIndex::FIRST, PageIndex::LAST, 10);
        assert!(some.iter().eq(model.iter().take(some.len())) && some.len() >= 10);
        assert_eq!(
            set.take(PageIndex::FIRST, PageIndex::LAST, usize::MAX).len(),
            model.len() - some.len()
        );
        assert!(set.is_empty() && set.leaves() == 0);
    }
}
