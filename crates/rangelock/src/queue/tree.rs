//! The index of a queue: an interval tree in an arena.
//!
//! A treap (a search tree by start, a heap by random priority) in which each node records the largest end in its subtree.
//! Nodes are elements of one vector, addressed by index, and reused through a free list. So the tree allocates nothing once
//! it has reached its largest size. With `frees_memory_when_empty`, it frees most of its memory when it becomes empty.
//!
//! - T1. Nodes are ordered by `(start, index)`.
//! - T2. `max_end` is the largest end in the node's subtree.
//! - T3. A parent's priority is at least that of its children. So the depth is logarithmic for every order of insertion.

use std::ops::{Index, IndexMut};

use super::entry::{Entry, Links, NIL};
use crate::range::ByteRange;

/// Entries for which an empty tree keeps its memory: the initial capacity of a vector, so that wide ranges, one at a time,
/// do not allocate each time.
const KEPT_NODES_MAX: usize = 4;

/// An interval tree; see the module.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: Vec<Option<Entry>>,
    free: Vec<u32>,
    root: u32,
    len: usize,
    random: u32,
    /// Frees memory beyond [`KEPT_NODES_MAX`] entries when the tree becomes empty.
    pub(super) frees_memory_when_empty: bool,
}

impl Tree {
    pub(super) const fn new() -> Tree {
        Tree {
            nodes: Vec::new(),
            free: Vec::new(),
            root: NIL,
            len: 0,
            random: 0x9E37_79B9,
            frees_memory_when_empty: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn max_end(&self, at: u32) -> u64 {
        if at == NIL { 0 } else { self[at].links.max_end }
    }

    /// The first entry that overlaps `range`, or `NIL`.
    pub(super) fn first(&self, range: ByteRange) -> u32 {
        if self.max_end(self.root) <= range.start() { NIL } else { self.descend(self.root, range) }
    }

    /// The first overlap below `at`, whose `max_end` is beyond the start of `range`.
    fn descend(&self, mut at: u32, range: ByteRange) -> u32 {
        loop {
            let node = &self[at];
            let left = node.links.left;
            // If a range in the left subtree ends late enough, then either it overlaps, or it starts too
            // late, and so do all ranges further right: the search need not return here.
            if self.max_end(left) > range.start() {
                at = left;
                continue;
            }
            if node.range.start() >= range.end() {
                return NIL;
            }
            if node.range.end() > range.start() {
                return at;
            }
            at = node.links.right;
            if self.max_end(at) <= range.start() {
                return NIL;
            }
        }
    }

    /// The next overlap after `at`, or `NIL`.
    pub(super) fn next(&self, mut at: u32, range: ByteRange) -> u32 {
        loop {
            let right = self[at].links.right;
            if self.max_end(right) > range.start() {
                return self.descend(right, range);
            }
            loop {
                let parent = self[at].links.parent;
                if parent == NIL {
                    return NIL;
                }
                let from_left = self[parent].links.left == at;
                at = parent;
                if from_left {
                    break;
                }
            }
            let node = &self[at];
            if node.range.start() >= range.end() {
                return NIL;
            }
            if node.range.end() > range.start() {
                return at;
            }
        }
    }

    pub(super) fn insert(&mut self, mut entry: Entry) -> u32 {
        // Xorshift: T3 needs any sequence that does not correlate with the keys.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        let priority = self.random;
        let (start, end) = (entry.range.start(), entry.range.end());
        entry.links = Links { max_end: end, priority, ..Links::new() };

        let at = match self.free.pop() {
            Some(at) => at,
            None => {
                assert!(self.nodes.len() < NIL as usize, "too many requests in one lock");
                self.nodes.push(None);
                // Capacity for each node in the free list: freeing never allocates.
                self.free.reserve(self.nodes.len());
                self.nodes.len() as u32 - 1
            }
        };
        let mut parent = NIL;
        let mut next = self.root;
        let mut goes_left = false;
        while next != NIL {
            parent = next;
            let node = &mut self[next];
            node.links.max_end = node.links.max_end.max(end);
            goes_left = (start, at) < (node.range.start(), next);
            next = if goes_left { node.links.left } else { node.links.right };
        }
        entry.links.parent = parent;
        self.nodes[at as usize] = Some(entry);
        self.len += 1;
        match (parent, goes_left) {
            (NIL, _) => self.root = at,
            (_, true) => self[parent].links.left = at,
            (_, false) => self[parent].links.right = at,
        }
        loop {
            let parent = self[at].links.parent;
            if parent == NIL || self[parent].links.priority >= priority {
                return at;
            }
            self.rotate_up(at);
        }
    }

    pub(super) fn remove(&mut self, at: u32) -> Entry {
        let child = loop {
            let Links { left, right, .. } = self[at].links;
            if left == NIL {
                break right;
            }
            if right == NIL {
                break left;
            }
            let left_wins = self[left].links.priority > self[right].links.priority;
            self.rotate_up(if left_wins { left } else { right });
        };
        let mut parent = self[at].links.parent;
        if child != NIL {
            self[child].links.parent = parent;
        }
        self.replace_child(parent, at, child);
        while parent != NIL {
            let max_end = self.computed_max_end(parent);
            let links = &mut self[parent].links;
            if links.max_end == max_end {
                break;
            }
            links.max_end = max_end;
            parent = links.parent;
        }
        self.free.push(at);
        self.len -= 1;
        let removed = self.nodes[at as usize].take().expect("a live node");
        if self.len == 0 && self.frees_memory_when_empty && self.nodes.capacity() > KEPT_NODES_MAX {
            (self.nodes, self.free) = (Vec::new(), Vec::new());
        }
        removed
    }

    fn computed_max_end(&self, at: u32) -> u64 {
        let node = &self[at];
        let below = self.max_end(node.links.left).max(self.max_end(node.links.right));
        node.range.end().max(below)
    }

    /// Replaces the child `old` of `parent` by `new`.
    fn replace_child(&mut self, parent: u32, old: u32, new: u32) {
        if parent == NIL {
            self.root = new;
        } else {
            let links = &mut self[parent].links;
            *(if links.left == old { &mut links.left } else { &mut links.right }) = new;
        }
    }

    /// Swaps `at` with its parent, keeping T1 and T2.
    fn rotate_up(&mut self, at: u32) {
        let parent = self[at].links.parent;
        let above = self[parent].links.parent;
        let moved = if self[parent].links.left == at {
            let moved = std::mem::replace(&mut self[at].links.right, parent);
            self[parent].links.left = moved;
            moved
        } else {
            let moved = std::mem::replace(&mut self[at].links.left, parent);
            self[parent].links.right = moved;
            moved
        };
        if moved != NIL {
            self[moved].links.parent = parent;
        }
        self[parent].links.parent = at;
        self[at].links.parent = above;
        self.replace_child(above, parent, at);
        self[at].links.max_end = self[parent].links.max_end;
        self[parent].links.max_end = self.computed_max_end(parent);
    }

    /// Checks T1 to T3 everywhere.
    #[cfg(all(test, not(any(loom, shuttle))))]
    pub(super) fn check(&self) {
        fn below(tree: &Tree, at: u32, parent: u32, keys: &mut Vec<(u64, u32)>) {
            if at == NIL {
                return;
            }
            let Entry { links, range, .. } = &tree[at];
            assert_eq!(links.parent, parent);
            assert!(parent == NIL || tree[parent].links.priority >= links.priority, "T3");
            below(tree, links.left, at, keys);
            keys.push((range.start(), at));
            below(tree, links.right, at, keys);
            assert_eq!(links.max_end, tree.computed_max_end(at), "T2");
        }
        let mut keys = Vec::new();
        below(self, self.root, NIL, &mut keys);
        assert!(keys.is_sorted(), "T1");
        assert_eq!(keys.len(), self.len);
    }
}

impl Index<u32> for Tree {
    type Output = Entry;

    #[inline]
    fn index(&self, at: u32) -> &Entry {
        self.nodes[at as usize].as_ref().expect("a live node")
    }
}

impl IndexMut<u32> for Tree {
    #[inline]
    fn index_mut(&mut self, at: u32) -> &mut Entry {
        self.nodes[at as usize].as_mut().expect("a live node")
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::super::entry::GrantState;
    use super::*;
    use crate::range::Mode;
    use proptest::prelude::*;

    fn entry(start: u64, len: u64) -> Entry {
        Entry {
            links: Links::new(),
            range: ByteRange::raw(start, start + len),
            sequence: 0,
            blockers: 0,
            grant: GrantState::Taken,
            mode: Mode::Shared,
            adopted: false,
            notify: None,
        }
    }

    fn overlaps(tree: &Tree, range: ByteRange) -> Vec<u32> {
        let mut found = Vec::new();
        let mut at = tree.first(range);
        while at != NIL {
            found.push(at);
            at = tree.next(at, range);
        }
        found
    }

    /// Starts, lengths and operations.
    fn steps() -> impl Strategy<Value = Vec<(u64, u64, usize)>> {
        prop::collection::vec((0u64..60, 1u64..20, 0usize..3), 1..200)
    }

    proptest! {
        /// Goal: the tree finds exactly the overlaps that a list finds.
        #[test]
        fn agrees_with_a_list(steps in steps()) {
            compare_with_a_list(steps);
        }
    }

    fn compare_with_a_list(steps: Vec<(u64, u64, usize)>) {
        let mut tree = Tree::new();
        let mut list: Vec<(u32, ByteRange)> = Vec::new();
        for (start, len, kind) in steps {
            if kind == 0 && !list.is_empty() {
                let (at, range) = list.swap_remove(start as usize % list.len());
                assert_eq!(tree.remove(at).range, range);
            } else {
                list.push((tree.insert(entry(start, len)), ByteRange::raw(start, start + len)));
            }
            tree.check();
            let range = ByteRange::raw(start / 2, start / 2 + len);
            let mut found = overlaps(&tree, range);
            found.sort_unstable();
            let expected = list.iter().filter(|(_, r)| r.overlaps(range)).map(|(at, _)| *at);
            let mut expected: Vec<u32> = expected.collect();
            expected.sort_unstable();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn stays_shallow_under_sorted_insertion() {
        fn depth(tree: &Tree, at: u32) -> usize {
            if at == NIL {
                return 0;
            }
            let links = tree[at].links;
            1 + depth(tree, links.left).max(depth(tree, links.right))
        }
        let mut tree = Tree::new();
        for i in 0..10_000 {
            tree.insert(entry(i * 10, 10));
        }
        assert!(depth(&tree, tree.root) < 60);
    }
}
