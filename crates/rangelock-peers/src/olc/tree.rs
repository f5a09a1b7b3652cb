//! The OLC B-tree: descents take no locks, changes lock only the changed nodes.
//!
//! - O1. Ranges in the tree are disjoint; a range with several shared holders is one record with their number.
//! - O2. A leaf has the records whose starts lie within its fences, and records in `spill` how far a range of an earlier
//!   leaf extends into it. So the leaves that a range touches decide whether it fits; its inserter locks all of them, from
//!   left to right.
//! - O3. Descents take no locks. Splits and merges lock parent, then node, then sibling, and never wait: a thread that fails
//!   to lock one releases all and restarts. A thread waits only for a leaf, while it holds no lock or locks of leaves to
//!   the left: so there is no cycle.
//! - O4. Unlinked nodes are freed when no thread that could have seen them is still pinned.
//! - O5. A change reads `gate` under the locks of all leaves that it touches. A thread that sets the gate and then locks
//!   these leaves either sees the change, or the change sees the gate and goes to the mutex.

use crossbeam_epoch::{self as epoch, Guard, Shared};

use super::node::{EXCLUSIVE, FAN_OUT, Node, Record, Version};
use millpond_rangelock::parts::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use millpond_rangelock::parts::sync::relax;
use millpond_rangelock::{ByteRange, Mode};

/// A range that touches more leaves than this is held in the queue.
const LEAVES_MAX: usize = 4;

/// The tree; see the module.
#[derive(Debug)]
pub(super) struct Tree {
    root: AtomicPtr<Node>,
    /// Not 0 while changes have to be made under the mutex.
    pub(super) gate: AtomicU32,
}

/// Outcome of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Outcome {
    Done,
    /// The range overlaps a record that it cannot share, or touches too many leaves.
    Refused,
    /// The gate is set: make the change under the mutex.
    Gated,
}

/// Locked leaves, left to right; unlocked when dropped.
struct Leaves<'g> {
    leaves: [Option<&'g Node>; LEAVES_MAX],
    len: usize,
}

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.leaves[..self.len].iter().flatten().for_each(|leaf| leaf.unlock());
    }
}

impl<'g> Leaves<'g> {
    fn first(&self) -> &'g Node {
        self.leaves[0].expect("a range touches a leaf")
    }

    fn others(&self) -> impl Iterator<Item = &'g Node> + '_ {
        self.leaves[1..self.len].iter().flatten().copied()
    }
}

/// A node on the path to a leaf, with the version that was read.
struct PathNode<'g> {
    node: &'g Node,
    version: Version,
}

impl Tree {
    pub(super) fn new() -> Tree {
        Tree {
            root: AtomicPtr::new(Box::into_raw(Box::new(Node::new(true)))),
            gate: AtomicU32::new(0),
        }
    }

    /// Borrows a node that was reached while pinned.
    ///
    /// # Safety
    ///
    /// `node` was read, while `guard` was pinned, from the root or from a node that passed
    /// validation after the read; or under the lock of that node.
    unsafe fn node(node: *mut Node, _guard: &Guard) -> &Node {
        // SAFETY: the node was linked at that moment, so it is not freed before `guard` ends (O4).
        unsafe { &*node }
    }

    fn root<'g>(&self, guard: &'g Guard) -> &'g Node {
        // Acquire: pairs with the Release in `split_node` and `shrink_root`.
        // SAFETY: read from the root.
        unsafe { Tree::node(self.root.load(Ordering::Acquire), guard) }
    }

    fn is_root(&self, node: &Node) -> bool {
        // Relaxed: compared, and not followed. A root is locked while it is replaced: a thread that holds its
        // lock sees the current value, and for other threads the fences of the leaf decide (O2).
        std::ptr::eq(self.root.load(Ordering::Relaxed), node)
    }

    /// One level down, towards `key`; `None` if `step` has changed.
    fn down<'g>(step: &PathNode<'g>, key: u64, guard: &'g Guard) -> Option<(usize, PathNode<'g>)> {
        let (at, child) = step.node.child_for(key);
        if !step.node.validate(step.version) {
            return None;
        }
        // SAFETY: read from a node that passed validation.
        let node = unsafe { Tree::node(child, guard) };
        let version = node.read()?;
        // Validate again, so that the child's version was read while it was a child of this node.
        step.node.validate(step.version).then_some((at, PathNode { node, version }))
    }

    fn top<'g>(&self, guard: &'g Guard) -> Option<PathNode<'g>> {
        let node = self.root(guard);
        let version = node.read()?;
        self.is_root(node).then_some(PathNode { node, version })
    }

    /// The leaf that `key` belongs to, locked.
    fn lock_leaf<'g>(&self, key: u64, guard: &'g Guard) -> &'g Node {
        let mut tries = 0;
        loop {
            if let Some(leaf) = self.leaf(key, guard)
                && leaf.lock()
            {
                // The leaf may have been split or merged before it was locked (O2).
                let (low, high) = leaf.fences();
                if low <= key && (key < high || high == u64::MAX) {
                    return leaf;
                }
                leaf.unlock();
            }
            relax(&mut tries);
        }
    }

    /// The leaf that `key` belonged to during the descent; `None` if a node on the path changed.
    fn leaf<'g>(&self, key: u64, guard: &'g Guard) -> Option<&'g Node> {
        let mut step = self.top(guard)?;
        while !step.node.is_leaf {
            step = Tree::down(&step, key, guard)?.1;
        }
        Some(step.node)
    }

    /// Locks all leaves that `range` touches (O2); `None` if there are too many.
    fn lock_leaves<'g>(&self, range: ByteRange, guard: &'g Guard) -> Option<Leaves<'g>> {
        let mut locked = Leaves { leaves: [None; LEAVES_MAX], len: 0 };
        let mut key = range.start();
        loop {
            let leaf = self.lock_leaf(key, guard);
            locked.leaves[locked.len] = Some(leaf);
            locked.len += 1;
            let (_, high) = leaf.fences();
            if range.end() <= high {
                return Some(locked);
            }
            if locked.len == LEAVES_MAX {
                return None;
            }
            key = high;
        }
    }

    /// Adds a hold of `range`; `gated`: the caller has the mutex.
    pub(super) fn insert(&self, range: ByteRange, mode: Mode, gated: bool) -> Outcome {
        let guard = &epoch::pin();
        let mut tries = 0;
        loop {
            let Some(leaves) = self.lock_leaves(range, guard) else {
                return Outcome::Refused;
            };
            // Acquire: pairs with the Release in `unlock_queue`: the caller sees the writes of holders in the
            // queue.
            if !gated && self.gate.load(Ordering::Acquire) != 0 {
                return Outcome::Gated;
            }
            let leaf = leaves.first();
            let at = leaf.rank(range.start());
            if let Some(before) = at.checked_sub(1).map(|at| leaf.record(at))
                && before.end > range.start()
            {
                let same = (before.start, before.end) == (range.start(), range.end());
                if !same || mode == Mode::Exclusive || before.shares == EXCLUSIVE {
                    return Outcome::Refused;
                }
                leaf.set_shares(at - 1, before.shares + 1);
                return Outcome::Done;
            }
            let next_starts = if at < leaf.len() { leaf.key(at) } else { u64::MAX };
            let crossed = leaves.others().any(|leaf| leaf.len() > 0 && leaf.key(0) < range.end());
            if leaf.spill() > range.start() || next_starts < range.end() || crossed {
                return Outcome::Refused;
            }
            if leaf.is_full() {
                drop(leaves);
                self.split(range.start(), guard);
                relax(&mut tries);
                continue;
            }
            let shares = if mode == Mode::Shared { 1 } else { EXCLUSIVE };
            let (start, end) = (range.start(), range.end());
            leaf.insert_record(at, Record { start, end, shares });
            leaves.others().for_each(|leaf| leaf.set_spill(range.end()));
            return Outcome::Done;
        }
    }

    /// Removes a hold of `range`, which is in the tree.
    pub(super) fn remove(&self, range: ByteRange, gated: bool) -> Outcome {
        let guard = &epoch::pin();
        let leaves = self.lock_leaves(range, guard).expect("no more leaves than at its insertion");
        if !gated && self.gate.load(Ordering::Relaxed) != 0 {
            return Outcome::Gated;
        }
        let leaf = leaves.first();
        let at = leaf.rank(range.start()) - 1;
        let record = leaf.record(at);
        debug_assert_eq!((record.start, record.end), (range.start(), range.end()));
        if record.shares > 1 {
            leaf.set_shares(at, record.shares - 1);
            return Outcome::Done;
        }
        leaf.remove_record(at);
        leaves.others().for_each(|leaf| leaf.set_spill(0));
        let emptied = leaf.len() == 0;
        drop(leaves);
        if emptied {
            self.merge(range.start(), guard);
        }
        Outcome::Done
    }

    /// Changes the shares of a record, if they are `from`. Under the mutex.
    pub(super) fn replace_shares(&self, range: ByteRange, from: u32, to: u32) -> bool {
        let guard = &epoch::pin();
        let leaf = self.lock_leaf(range.start(), guard);
        let at = leaf.rank(range.start()) - 1;
        let replaced = leaf.record(at).shares == from;
        if replaced {
            leaf.set_shares(at, to);
        }
        leaf.unlock();
        replaced
    }

    /// Calls `f` for each record that overlaps `range`. Under the mutex, and gated: no record is added or removed in the
    /// part that has been visited (O5).
    pub(super) fn for_each_overlap(&self, range: ByteRange, mut f: impl FnMut(Record)) {
        let guard = &epoch::pin();
        let mut key = range.start();
        // Start at the leaf of a range that extends into this one.
        loop {
            let leaf = self.lock_leaf(key, guard);
            let (low, _) = leaf.fences();
            let back = leaf.rank(key) == 0 && leaf.spill() > key && low > 0;
            leaf.unlock();
            if !back {
                break;
            }
            key = low - 1;
        }
        loop {
            let leaf = self.lock_leaf(key, guard);
            let (_, high) = leaf.fences();
            (0..leaf.len())
                .map(|at| leaf.record(at))
                .filter(|r| r.overlaps(range))
                .for_each(&mut f);
            leaf.unlock();
            if high >= range.end() {
                return;
            }
            key = high;
        }
    }

    /// Splits the full leaf of `key`, or a full node above it; the caller tries again.
    #[cold]
    fn split(&self, key: u64, guard: &Guard) {
        let Some(mut step) = self.top(guard) else {
            return;
        };
        let mut parent: Option<(PathNode<'_>, usize)> = None;
        loop {
            if step.node.is_full() {
                self.split_node(parent, &step, key);
                return;
            }
            if step.node.is_leaf {
                return;
            }
            let Some((at, next)) = Tree::down(&step, key, guard) else {
                return;
            };
            parent = Some((std::mem::replace(&mut step, next), at));
        }
    }

    fn split_node(&self, parent: Option<(PathNode<'_>, usize)>, step: &PathNode<'_>, key: u64) {
        if let Some((above, _)) = &parent
            && !above.node.try_lock_at(above.version)
        {
            return;
        }
        if step.node.try_lock_at(step.version) {
            let node = step.node;
            // Appends will probably continue: leave the left node full.
            let appends = node.rank(key) == FAN_OUT && node.is_leaf;
            let cut = if appends { FAN_OUT - 1 } else { FAN_OUT / 2 };
            match &parent {
                Some((above, at)) => {
                    let (right, first) = node.split_off(cut);
                    above.node.insert_child(at + 1, first, Box::into_raw(right));
                }
                // Checked under its lock, as a root is locked while it is replaced.
                None if self.is_root(node) => {
                    let (right, first) = node.split_off(cut);
                    let root = Box::new(Node::new(false));
                    root.insert_child(0, 0, std::ptr::from_ref(node).cast_mut());
                    root.insert_child(1, first, Box::into_raw(right));
                    // Release: pairs with the Acquire in `root`.
                    self.root.store(Box::into_raw(root), Ordering::Release);
                }
                None => {}
            }
            node.unlock();
        }
        if let Some((above, _)) = parent {
            above.node.unlock();
        }
    }

    /// Unlinks the empty leaf of `key`, and merges nodes above it. Best effort, as an empty leaf is harmless: the next thread
    /// that empties a leaf here tries again.
    #[cold]
    fn merge(&self, key: u64, guard: &Guard) {
        for _ in 0..4 {
            let Some(mut step) = self.top(guard) else {
                continue;
            };
            if !step.node.is_leaf && step.node.len() == 1 {
                self.shrink_root(&step, guard);
                continue;
            }
            loop {
                if step.node.is_leaf {
                    return;
                }
                let Some((at, next)) = Tree::down(&step, key, guard) else {
                    break;
                };
                let thin = if next.node.is_leaf { 0 } else { FAN_OUT / 4 };
                if next.node.len() <= thin && step.node.len() > 1 {
                    self.merge_child(&step, at, &next, guard);
                    break;
                }
                step = next;
            }
        }
    }

    /// Replaces a root that has a single child by that child.
    fn shrink_root(&self, step: &PathNode<'_>, guard: &Guard) {
        if !step.node.try_lock_at(step.version) {
            return;
        }
        if self.is_root(step.node) && step.node.len() == 1 {
            // Release: pairs with the Acquire in `root`. Argued: it publishes the initialisation of the node
            // and its non-atomic fields, neither of which loom checks.
            self.root.store(step.node.child(0), Ordering::Release);
            Tree::free(step.node, guard);
        } else {
            step.node.unlock();
        }
    }

    /// Merges child `at` of `above` with its left neighbour, or its right one if it is the first.
    fn merge_child(&self, above: &PathNode<'_>, at: usize, child: &PathNode<'_>, guard: &Guard) {
        if !above.node.try_lock_at(above.version) {
            return;
        }
        let beside = if at == 0 { 1 } else { at - 1 };
        // SAFETY: read under the lock of its parent.
        let sibling = unsafe { Tree::node(above.node.child(beside), guard) };
        let sibling_locked = sibling.try_lock();
        let child_locked = sibling_locked && child.node.try_lock_at(child.version);
        if child_locked {
            let fits = child.node.len() + sibling.len() <= FAN_OUT;
            if child.node.is_leaf && child.node.len() == 0 {
                Tree::absorb_leaf(child.node, sibling, at == 0);
                above.node.remove_child(at);
                Tree::free(child.node, guard);
            } else if !child.node.is_leaf && fits {
                // Always merge the right node into the left one.
                let (left, right, right_at) = match at {
                    0 => (child.node, sibling, 1),
                    _ => (sibling, child.node, at),
                };
                left.append_children(right, above.node.key(right_at));
                above.node.remove_child(right_at);
                Tree::free(right, guard);
                left.unlock();
                above.node.unlock();
                return;
            } else {
                child.node.unlock();
            }
        }
        if sibling_locked {
            sibling.unlock();
        }
        above.node.unlock();
    }

    /// Gives the starts of an empty leaf to its neighbour (O2).
    fn absorb_leaf(empty: &Node, sibling: &Node, is_left_of_it: bool) {
        let (empty_low, empty_high) = empty.fences();
        let (low, high) = sibling.fences();
        if is_left_of_it {
            sibling.set_fences(empty_low, high);
            // A range that extended into the empty leaf from the left now extends into the neighbour.
            sibling.set_spill(sibling.spill().max(empty.spill()));
        } else {
            sibling.set_fences(low, empty_high);
        }
    }

    /// Frees an unlinked, locked node once no thread can access it.
    fn free(node: &Node, guard: &Guard) {
        node.retire();
        // SAFETY: the node came from a box. It has just been unlinked under its parent's lock, which
        // happens once, and threads that reached it before are pinned (O4).
        unsafe { guard.defer_destroy(Shared::from(std::ptr::from_ref(node))) };
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        fn free(node: *mut Node) {
            // SAFETY: linked nodes come from boxes, each has one parent, and `&mut self` proves that no
            // other thread accesses them.
            let node = unsafe { Box::from_raw(node) };
            if !node.is_leaf {
                (0..node.len()).for_each(|at| free(node.child(at)));
            }
        }
        free(self.root.load(Ordering::Relaxed));
    }
}
