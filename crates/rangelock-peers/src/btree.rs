//! A B+tree of disjoint ranges, for one thread at a time.
//!
//! Leaves hold up to 14 ranges, sorted by start. The starts have a separate array, so a search compares whole cache lines
//! of them. Nodes are elements of two arenas, addressed by index. Freed nodes are reused, so a tree that does not exceed
//! its largest size allocates nothing.
//!
//! - M1. Ranges in the tree are disjoint. A range with several shared holders is one record with their number. The tree
//!   rejects ranges that overlap in any other way.
//! - M2. Unused elements of a node contain `u64::MAX`, which is no valid start. So a search may compare all 14.
//! - M3. `keys[i]` is at most the first start below child i, and greater than any start below child i-1; `keys[0]` is 0. No
//!   leaf except the root is empty: a node is freed with its last record or child.

use millpond_rangelock::{ByteRange, Mode};

/// Number of records in a leaf, and of children in an inner node.
const FAN_OUT: usize = 14;

/// More levels than any tree of `u32` records reaches in practice, as only a split of a full root adds a level.
const DEPTH_MAX: usize = 12;

const NIL: u32 = u32::MAX;
const EXCLUSIVE: u32 = 0;

#[derive(Debug)]
struct Leaf {
    starts: [u64; FAN_OUT],
    rest: [RecordTail; FAN_OUT],
    len: u32,
    previous: u32,
    next: u32,
}

/// The part of a record besides its start.
#[derive(Clone, Copy, Debug)]
struct RecordTail {
    end: u64,
    /// Shared holders, or `EXCLUSIVE`.
    shares: u32,
}

#[derive(Debug)]
struct Inner {
    keys: [u64; FAN_OUT],
    children: [u32; FAN_OUT],
    len: u32,
}

/// The tree; see the module.
#[derive(Debug)]
pub(super) struct BTree {
    leaves: Vec<Leaf>,
    inners: Vec<Inner>,
    free_leaves: Vec<u32>,
    free_inners: Vec<u32>,
    root: u32,
    /// Inner levels above the leaves.
    height: usize,
}

/// The inner nodes above a leaf, with the index of the child taken in each.
type Path = [(u32, u32); DEPTH_MAX];

fn shares(mode: Mode) -> u32 {
    match mode {
        Mode::Shared => 1,
        Mode::Exclusive => EXCLUSIVE,
    }
}

/// Number of `starts` that are at most `start` (M2).
#[inline]
fn rank(starts: &[u64; FAN_OUT], start: u64) -> usize {
    starts.iter().map(|&s| usize::from(s <= start)).sum()
}

/// Inserts `value` at `at` and moves the rest of the first `len` elements up.
#[inline]
fn insert_at<T: Copy>(array: &mut [T; FAN_OUT], len: usize, at: usize, value: T) {
    if at < len {
        array.copy_within(at..len, at + 1);
    }
    array[at] = value;
}

/// Removes the element `at`, and writes `unused` at the end.
#[inline]
fn remove_at<T: Copy>(array: &mut [T; FAN_OUT], len: usize, at: usize, unused: T) {
    array.copy_within(at + 1..len, at);
    array[len - 1] = unused;
}

impl Leaf {
    fn new() -> Leaf {
        Leaf {
            starts: [u64::MAX; FAN_OUT],
            rest: [RecordTail { end: u64::MAX, shares: 0 }; FAN_OUT],
            len: 0,
            previous: NIL,
            next: NIL,
        }
    }

    fn insert(&mut self, at: usize, range: ByteRange, shares: u32) {
        let len = self.len as usize;
        insert_at(&mut self.starts, len, at, range.start());
        insert_at(&mut self.rest, len, at, RecordTail { end: range.end(), shares });
        self.len += 1;
    }

    fn remove(&mut self, at: usize) {
        let len = self.len as usize;
        remove_at(&mut self.starts, len, at, u64::MAX);
        remove_at(&mut self.rest, len, at, RecordTail { end: u64::MAX, shares: 0 });
        self.len -= 1;
    }

    /// Moves the records from index `at` on to a new leaf.
    fn split_off(&mut self, at: usize) -> Leaf {
        let mut right = Leaf::new();
        for from in at..self.len as usize {
            let range = ByteRange::new(self.starts[from], self.rest[from].end)
                .expect("records are not empty");
            right.insert(from - at, range, self.rest[from].shares);
        }
        self.starts[at..].fill(u64::MAX);
        self.len = at as u32;
        right
    }
}

impl Inner {
    fn new() -> Inner {
        Inner { keys: [u64::MAX; FAN_OUT], children: [NIL; FAN_OUT], len: 0 }
    }

    /// Which child `start` belongs to.
    #[inline]
    fn child(&self, start: u64) -> usize {
        rank(&self.keys, start) - 1
    }

    fn insert(&mut self, at: usize, key: u64, child: u32) {
        let len = self.len as usize;
        insert_at(&mut self.keys, len, at, key);
        insert_at(&mut self.children, len, at, child);
        self.len += 1;
    }
}

/// Position of a record in the tree.
#[derive(Clone, Copy)]
struct RecordPosition {
    leaf: u32,
    at: usize,
}

impl BTree {
    pub(super) fn new() -> BTree {
        BTree {
            leaves: Vec::new(),
            inners: Vec::new(),
            free_leaves: Vec::new(),
            free_inners: Vec::new(),
            root: NIL,
            height: 0,
        }
    }

    /// The leaf for `start`, and the path to it.
    #[inline]
    fn descend(&self, start: u64, path: &mut Path) -> u32 {
        let mut node = self.root;
        for step in &mut path[..self.height] {
            let inner = &self.inners[node as usize];
            let child = inner.child(start);
            *step = (node, child as u32);
            node = inner.children[child];
        }
        node
    }

    /// Adds `range`; false, without any change, if it overlaps a record that it cannot share (M1).
    pub(super) fn insert(&mut self, range: ByteRange, mode: Mode) -> bool {
        if self.root == NIL {
            self.root = self.new_leaf(Leaf::new());
        }
        let mut path = [(NIL, 0); DEPTH_MAX];
        let id = self.descend(range.start(), &mut path);
        let leaf = &self.leaves[id as usize];
        let at = rank(&leaf.starts, range.start());
        if at > 0 {
            if leaf.rest[at - 1].end > range.start() {
                let leaf = &mut self.leaves[id as usize];
                let same =
                    leaf.starts[at - 1] == range.start() && leaf.rest[at - 1].end == range.end();
                let shared = same && mode == Mode::Shared && leaf.rest[at - 1].shares != EXCLUSIVE;
                leaf.rest[at - 1].shares += u32::from(shared);
                return shared;
            }
        } else if leaf.previous != NIL {
            let previous = &self.leaves[leaf.previous as usize];
            if previous.rest[previous.len as usize - 1].end > range.start() {
                return false;
            }
        }
        let leaf = &self.leaves[id as usize];
        let following = if at < leaf.len as usize {
            leaf.starts[at]
        } else if leaf.next != NIL {
            self.leaves[leaf.next as usize].starts[0]
        } else {
            u64::MAX
        };
        if following < range.end() {
            return false;
        }
        if (leaf.len as usize) < FAN_OUT {
            self.leaves[id as usize].insert(at, range, shares(mode));
        } else {
            self.insert_splitting(id, at, range, mode, &path);
        }
        true
    }

    #[cold]
    fn insert_splitting(&mut self, id: u32, at: usize, range: ByteRange, mode: Mode, path: &Path) {
        let leaf = &mut self.leaves[id as usize];
        // Appends will probably continue: leave the left leaf full.
        let cut = if at == FAN_OUT { FAN_OUT } else { FAN_OUT / 2 };
        let mut right = leaf.split_off(cut);
        if at < cut {
            leaf.insert(at, range, shares(mode));
        } else {
            right.insert(at - cut, range, shares(mode));
        }
        let key = right.starts[0];
        (right.previous, right.next) = (id, leaf.next);
        let next = leaf.next;
        let right = self.new_leaf(right);
        self.leaves[id as usize].next = right;
        if next != NIL {
            self.leaves[next as usize].previous = right;
        }
        self.add_child(key, right, path);
    }

    /// Adds a sibling of the last node of `path`.
    fn add_child(&mut self, mut key: u64, mut child: u32, path: &Path) {
        for &(id, taken) in path[..self.height].iter().rev() {
            let at = taken as usize + 1;
            let inner = &mut self.inners[id as usize];
            if (inner.len as usize) < FAN_OUT {
                inner.insert(at, key, child);
                return;
            }
            let cut = if at == FAN_OUT { FAN_OUT } else { FAN_OUT / 2 };
            let mut right = Inner::new();
            for from in cut..FAN_OUT {
                right.insert(from - cut, inner.keys[from], inner.children[from]);
            }
            inner.keys[cut..].fill(u64::MAX);
            inner.len = cut as u32;
            if at < cut {
                inner.insert(at, key, child);
            } else {
                right.insert(at - cut, key, child);
            }
            key = std::mem::replace(&mut right.keys[0], 0);
            child = self.new_inner(right);
        }
        assert!(self.height < DEPTH_MAX, "too many ranges in one lock");
        let mut root = Inner::new();
        root.insert(0, 0, self.root);
        root.insert(1, key, child);
        self.root = self.new_inner(root);
        self.height += 1;
    }

    /// Removes a hold of `range`, which is in the tree.
    pub(super) fn remove(&mut self, range: ByteRange) {
        let mut path = [(NIL, 0); DEPTH_MAX];
        let id = self.descend(range.start(), &mut path);
        let leaf = &mut self.leaves[id as usize];
        let at = rank(&leaf.starts, range.start()) - 1;
        debug_assert_eq!((leaf.starts[at], leaf.rest[at].end), (range.start(), range.end()));
        if leaf.rest[at].shares > 1 {
            leaf.rest[at].shares -= 1;
            return;
        }
        leaf.remove(at);
        if leaf.len == 0 && self.height > 0 {
            self.free_leaf(id, &path);
        }
    }

    #[cold]
    fn free_leaf(&mut self, id: u32, path: &Path) {
        let Leaf { previous, next, .. } = self.leaves[id as usize];
        if previous != NIL {
            self.leaves[previous as usize].next = next;
        }
        if next != NIL {
            self.leaves[next as usize].previous = previous;
        }
        self.free_leaves.push(id);
        for &(id, taken) in path[..self.height].iter().rev() {
            let inner = &mut self.inners[id as usize];
            let len = inner.len as usize;
            remove_at(&mut inner.keys, len, taken as usize, u64::MAX);
            remove_at(&mut inner.children, len, taken as usize, NIL);
            inner.keys[0] = 0;
            inner.len -= 1;
            if inner.len > 0 {
                break;
            }
            self.free_inners.push(id);
        }
        // A root with one child is an unnecessary level. (A root without children is impossible: then the
        // tree was a single leaf.)
        while self.height > 0 && self.inners[self.root as usize].len == 1 {
            self.free_inners.push(self.root);
            self.root = self.inners[self.root as usize].children[0];
            self.height -= 1;
        }
    }

    fn new_leaf(&mut self, leaf: Leaf) -> u32 {
        if let Some(id) = self.free_leaves.pop() {
            self.leaves[id as usize] = leaf;
            return id;
        }
        self.leaves.push(leaf);
        self.leaves.len() as u32 - 1
    }

    fn new_inner(&mut self, inner: Inner) -> u32 {
        if let Some(id) = self.free_inners.pop() {
            self.inners[id as usize] = inner;
            return id;
        }
        self.inners.push(inner);
        self.inners.len() as u32 - 1
    }

    /// Number of holds that overlap `range` and conflict with `mode`.
    pub(super) fn conflicts(&self, range: ByteRange, mode: Mode) -> u32 {
        let mut count = 0;
        self.for_each_overlap(range, |held| {
            count += match (held, mode) {
                (EXCLUSIVE, _) => 1,
                (holders, Mode::Exclusive) => holders,
                (_, Mode::Shared) => 0,
            };
        });
        count
    }

    /// Calls `f` with the shares of each record that overlaps.
    fn for_each_overlap(&self, range: ByteRange, mut f: impl FnMut(u32)) {
        if self.root == NIL {
            return;
        }
        let mut id = self.descend(range.start(), &mut [(NIL, 0); DEPTH_MAX]);
        // Only the last record at or before the start can extend into the range from the left (M1).
        let mut at = rank(&self.leaves[id as usize].starts, range.start());
        if at > 0 {
            at -= 1;
        } else if self.leaves[id as usize].previous != NIL {
            id = self.leaves[id as usize].previous;
            at = self.leaves[id as usize].len as usize - 1;
        }
        while id != NIL {
            let leaf = &self.leaves[id as usize];
            for at in at..leaf.len as usize {
                if leaf.starts[at] >= range.end() {
                    return;
                }
                if leaf.rest[at].end > range.start() {
                    f(leaf.rest[at].shares);
                }
            }
            (id, at) = (leaf.next, 0);
        }
    }

    /// Makes the only hold of `range` exclusive; false if there are several.
    pub(super) fn try_upgrade(&mut self, range: ByteRange) -> bool {
        let RecordPosition { leaf, at } = self.find(range);
        let shares = &mut self.leaves[leaf as usize].rest[at].shares;
        let alone = *shares == 1;
        if alone {
            *shares = EXCLUSIVE;
        }
        alone
    }

    pub(super) fn downgrade(&mut self, range: ByteRange) {
        let RecordPosition { leaf, at } = self.find(range);
        self.leaves[leaf as usize].rest[at].shares = 1;
    }

    fn find(&self, range: ByteRange) -> RecordPosition {
        let leaf = self.descend(range.start(), &mut [(NIL, 0); DEPTH_MAX]);
        let at = rank(&self.leaves[leaf as usize].starts, range.start()) - 1;
        RecordPosition { leaf, at }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Starts, lengths and operations.
    fn steps() -> impl Strategy<Value = Vec<(u64, u64, u8)>> {
        prop::collection::vec((0u64..4000, 1u64..6, 0u8..3), 1..2500)
    }

    proptest! {
        /// Goal: the tree agrees with a map of disjoint ranges, through splits and frees at every level.
        #[test]
        fn agrees_with_a_map(steps in steps()) {
            let mut tree = BTree::new();
            let mut map = BTreeMap::new();
            for (start, len, kind) in steps {
                let range = span(start, start + len);
                match kind {
                    0 => remove_next(&mut tree, &mut map, start),
                    1 => insert(&mut tree, &mut map, range, Mode::Shared),
                    _ => insert(&mut tree, &mut map, range, Mode::Exclusive),
                }
                let probe = span(start / 2, start / 2 + 40);
                let overlaps = |(s, (end, _)): &(&u64, &(u64, u32))| {
                    span(**s, *end).overlaps(probe)
                };
                let holds = map.iter().filter(overlaps).map(|(_, (_, shares))| (*shares).max(1));
                prop_assert_eq!(tree.conflicts(probe, Mode::Exclusive), holds.sum::<u32>());
            }
        }
    }

    type Map = BTreeMap<u64, (u64, u32)>;

    fn span(start: u64, end: u64) -> ByteRange {
        ByteRange::new(start, end).unwrap()
    }

    fn remove_next(tree: &mut BTree, map: &mut Map, from: u64) {
        let Some((&start, &(end, shares))) = map.range(from..).next() else { return };
        tree.remove(span(start, end));
        if shares > 1 {
            map.insert(start, (end, shares - 1));
        } else {
            map.remove(&start);
        }
    }

    fn insert(tree: &mut BTree, map: &mut Map, range: ByteRange, mode: Mode) {
        let before = map.range(..range.end()).next_back().map(|(&start, &value)| (start, value));
        let expected = match before {
            Some((start, (end, shares))) if end > range.start() => {
                let same = (start, end) == (range.start(), range.end());
                (same && mode == Mode::Shared && shares != EXCLUSIVE).then_some(shares + 1)
            }
            _ => Some(shares(mode)),
        };
        assert_eq!(tree.insert(range, mode), expected.is_some());
        if let Some(shares) = expected {
            map.insert(range.start(), (range.end(), shares));
        }
    }
}
