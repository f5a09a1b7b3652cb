//! A set of pages of one file: a bitmap for each table leaf that has a member.
//!
//! Ordered, so that what is written back together lies together. 64 bytes for 2 MiB of small pages
//! at best, and some hundred for a page that is alone in its leaf, which itself takes 4 KiB. That is
//! counted against the memory limit by who has the set, after changes ([`PageSet::heap_bytes`],
//! [`HeapCharge`](crate::cache::heap::HeapCharge)).

use std::collections::BTreeMap;

use crate::cache::table::{PageIndex, SLOTS};

const WORDS: usize = SLOTS / 64;

#[derive(Default)]
pub(crate) struct PageSet {
    leaves: BTreeMap<u64, [u64; WORDS]>,
    pages: u64,
}

impl PageSet {
    pub(crate) fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// What it takes of the heap, at most: nodes of 11 members each, at least five of which are used
    /// but in the first, and what the allocator adds.
    pub(crate) fn heap_bytes(&self) -> u64 {
        const NODE_BYTES: u64 = 960;
        const MEMBER_BYTES: u64 = NODE_BYTES / 5;
        match self.leaves.len() as u64 {
            0 => 0,
            leaves => NODE_BYTES + (leaves - 1) * MEMBER_BYTES,
        }
    }

    /// The number of bitmaps.
    pub(crate) fn leaves(&self) -> usize {
        self.leaves.len()
    }

    pub(crate) fn insert(&mut self, page: PageIndex) {
        let (leaf, word, bit) = place(page);
        let word = &mut self.leaves.entry(leaf).or_default()[word];
        self.pages += u64::from(*word & bit == 0);
        *word |= bit;
    }

    pub(crate) fn contains(&self, page: PageIndex) -> bool {
        let (leaf, word, bit) = place(page);
        self.leaves.get(&leaf).is_some_and(|words| words[word] & bit != 0)
    }

    /// Calls `visit` with each page, in order.
    pub(crate) fn for_each(&self, visit: &mut dyn FnMut(PageIndex)) {
        for (&leaf, words) in &self.leaves {
            for (at, &bits) in words.iter().enumerate() {
                let mut bits = bits;
                while bits != 0 {
                    visit(leaf * SLOTS as u64 + at as u64 * 64 + u64::from(bits.trailing_zeros()));
                    bits &= bits - 1;
                }
            }
        }
    }

    /// Whether a page from `first` to `last` is a member.
    pub(crate) fn intersects(&self, first: PageIndex, last: PageIndex) -> bool {
        let leaves = self.leaves.range(first / SLOTS as u64..=last / SLOTS as u64);
        leaves.into_iter().any(|(&leaf, words)| {
            words.iter().enumerate().any(|(at, &bits)| bits & mask(leaf, at, first, last) != 0)
        })
    }

    /// Takes out the pages from `first` to `last`, in order, about `at_most` of them: a leaf's are
    /// not taken apart unless the range does.
    pub(crate) fn take(
        &mut self,
        first: PageIndex,
        last: PageIndex,
        at_most: usize,
    ) -> Vec<PageIndex> {
        let mut taken = Vec::new();
        let leaf_range = first / SLOTS as u64..=last / SLOTS as u64;
        let mut emptied = Vec::new();
        for (&leaf, words) in self.leaves.range_mut(leaf_range) {
            if taken.len() >= at_most {
                break;
            }
            for (at, bits) in words.iter_mut().enumerate() {
                let mut found = *bits & mask(leaf, at, first, last);
                *bits &= !found;
                while found != 0 {
                    let slot = at as u64 * 64 + u64::from(found.trailing_zeros());
                    taken.push(leaf * SLOTS as u64 + slot);
                    found &= found - 1;
                }
            }
            if words.iter().all(|&bits| bits == 0) {
                emptied.push(leaf);
            }
        }
        for leaf in emptied {
            self.leaves.remove(&leaf);
        }
        if self.leaves.is_empty() {
            // An empty map keeps a node.
            self.leaves = BTreeMap::new();
        }
        self.pages -= taken.len() as u64;
        taken
    }
}

fn place(page: PageIndex) -> (u64, usize, u64) {
    let slot = page as usize % SLOTS;
    (page / SLOTS as u64, slot / 64, 1 << (slot % 64))
}

/// The bits of word `at` of `leaf` that stand for pages from `first` to `last`.
fn mask(leaf: u64, at: usize, first: PageIndex, last: PageIndex) -> u64 {
    let start = leaf * SLOTS as u64 + at as u64 * 64;
    let from = first.saturating_sub(start).min(64) as u32;
    let to = (last.saturating_add(1)).saturating_sub(start).min(64) as u32;
    let below = |bits: u32| if bits == 64 { u64::MAX } else { (1 << bits) - 1 };
    below(to) & !below(from)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn behaves_as_an_ordered_set() {
        let (mut set, mut model) = (PageSet::default(), BTreeSet::new());
        let mut random = 1u64;
        for step in 0..20_000u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(step | 1);
            let page = (random >> 33) % 3000 + if random & 1 == 0 { 1 << 40 } else { 0 };
            if step % 50 == 49 {
                let last = page + random % 700;
                assert_eq!(set.intersects(page, last), model.range(page..=last).next().is_some());
                let taken = set.take(page, last, usize::MAX);
                let expected: Vec<u64> = model.range(page..=last).copied().collect();
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
        let some = set.take(0, u64::MAX, 10);
        assert!(some.iter().eq(model.iter().take(some.len())) && some.len() >= 10);
        assert_eq!(set.take(0, u64::MAX, usize::MAX).len(), model.len() - some.len());
        assert!(set.is_empty() && set.leaves() == 0);
    }
}
