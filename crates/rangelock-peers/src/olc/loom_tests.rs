//! Loom models of the OLC B-tree: all interleavings of two threads, in trees of a few nodes.
//!
//! `scripts/weaken` weakens each ordering in turn and expects one of these models to fail. Under loom a node has room for
//! three elements. Loom does not model the reclamation of nodes, which crossbeam's epochs do as usual.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use millpond_rangelock::{ByteRange, Mode, RangeLock};

use super::OlcBTree;
use super::node::{EXCLUSIVE, Node, Record};
use super::tree::{Outcome, Tree};

fn r(start: u64, end: u64) -> ByteRange {
    ByteRange::new(start, end).unwrap()
}

/// The data that the ranges guard: loom fails if two threads access it without an order between them.
struct Bytes(UnsafeCell<u64>);

// SAFETY: the tests check that the tree orders all accesses.
unsafe impl Sync for Bytes {}
// SAFETY: as above.
unsafe impl Send for Bytes {}

impl Bytes {
    fn new() -> Arc<Bytes> {
        Arc::new(Bytes(UnsafeCell::new(0)))
    }

    fn write(&self) {
        // SAFETY: loom checks it.
        self.0.with_mut(|bytes| unsafe { *bytes += 1 });
    }
}

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_branches = 10_000;
    builder.check(f);
}

fn record(start: u64, end: u64) -> Record {
    Record { start, end, shares: EXCLUSIVE }
}

/// Goal: validated fields had their values at one moment (node.N2).
#[test]
fn loom_readers_see_one_moment() {
    model(|| {
        let node = Arc::new(Node::new(true));
        node.insert_record(0, record(1, 2));
        // The writer runs first: see `docs/testing.md`.
        let reader = thread::spawn({
            let node = Arc::clone(&node);
            move || {
                if let Some(version) = node.read() {
                    let Record { start, end, .. } = node.record(0);
                    if node.validate(version) {
                        assert!(matches!((start, end), (1, 2) | (3, 4)), "torn: {start}..{end}");
                    }
                }
            }
        });
        assert!(node.lock());
        node.remove_record(0);
        node.insert_record(0, record(3, 4));
        node.unlock();
        reader.join().unwrap();
    });
}

/// Goal: a thread that locks a node sees the writes of the last holder, with each way of locking (node.N1).
#[test]
fn loom_the_lock_hands_over() {
    model(|| {
        let (node, bytes) = (Arc::new(Node::new(true)), Bytes::new());
        let other = thread::spawn({
            let (node, bytes) = (Arc::clone(&node), Arc::clone(&bytes));
            move || {
                if node.try_lock() {
                    bytes.write();
                    node.unlock();
                }
                assert!(node.lock());
                bytes.write();
                node.unlock();
            }
        });
        assert!(node.lock());
        bytes.write();
        node.unlock();
        other.join().unwrap();
    });
}

/// Holds `range` exclusively for a moment, if it is free.
fn hold(tree: &Tree, range: ByteRange, bytes: &Bytes) {
    if tree.insert(range, Mode::Exclusive, false) == Outcome::Done {
        bytes.write();
        assert_eq!(tree.remove(range, false), Outcome::Done);
    }
}

fn tree(held: &[ByteRange]) -> Tree {
    let tree = Tree::new();
    for range in held {
        assert_eq!(tree.insert(*range, Mode::Exclusive, false), Outcome::Done);
    }
    tree
}

fn count(tree: &Tree) -> usize {
    let mut count = 0;
    tree.for_each_overlap(ByteRange::ALL, |_| count += 1);
    count
}

/// Two threads hold overlapping ranges of a tree that contains other ranges.
fn pair(tree: Tree, ranges: [ByteRange; 2]) {
    let (held, tree, bytes) = (count(&tree), Arc::new(tree), Bytes::new());
    let other = thread::spawn({
        let (tree, bytes) = (Arc::clone(&tree), Arc::clone(&bytes));
        move || hold(&tree, ranges[1], &bytes)
    });
    hold(&tree, ranges[0], &bytes);
    other.join().unwrap();
    assert_eq!(count(&tree), held, "a range is still locked");
}

/// Goal: overlapping ranges exclude each other in one leaf.
#[test]
fn loom_one_leaf() {
    model(|| pair(tree(&[]), [r(0, 2), r(1, 3)]));
}

/// Goal: the same while the root, a leaf, is split during one of the operations, and merged again.
#[test]
fn loom_split_of_the_root() {
    model(|| pair(tree(&[r(10, 11), r(20, 21), r(30, 31)]), [r(12, 14), r(13, 15)]));
}

/// Goal: the same if the leaf has a parent.
#[test]
fn loom_split_below_the_root() {
    model(|| {
        let held = [r(10, 11), r(20, 21), r(30, 31), r(40, 41), r(50, 51)];
        pair(tree(&held), [r(32, 34), r(33, 35)]);
    });
}

/// Goal: the same if one range extends into the next leaf (tree.O2).
#[test]
fn loom_two_leaves() {
    model(|| {
        let tree = tree(&[r(10, 11), r(20, 21), r(30, 31), r(40, 41)]);
        // The second leaf's fence is still at 30.
        assert_eq!(tree.remove(r(30, 31), false), Outcome::Done);
        pair(tree, [r(12, 35), r(34, 36)]);
    });
}

/// Goal: a leaf that becomes empty is merged during a descent to it (node.N3).
#[test]
fn loom_merge_beside_a_descent() {
    model(|| {
        let tree = Arc::new(tree(&[r(10, 11), r(20, 21), r(30, 31), r(40, 41)]));
        assert_eq!(tree.remove(r(40, 41), false), Outcome::Done);
        let bytes = Bytes::new();
        let other = thread::spawn({
            let (tree, bytes) = (Arc::clone(&tree), Arc::clone(&bytes));
            move || {
                bytes.write();
                assert_eq!(tree.remove(r(30, 31), false), Outcome::Done);
            }
        });
        hold(&tree, r(30, 32), &bytes);
        other.join().unwrap();
    });
}

/// Goal: the same through the queue: no range enters the tree over a queue entry, the gate orders the holders in the queue
/// before later ones, and no thread sleeps indefinitely (tree.O5).
#[test]
fn loom_tree_and_queue_exclude() {
    model(|| {
        let (lock, bytes) = (Arc::new(RangeLock::<OlcBTree>::with_raw()), Bytes::new());
        let other = thread::spawn({
            let (lock, bytes) = (Arc::clone(&lock), Arc::clone(&bytes));
            move || {
                let _guard = lock.lock(r(1, 3), Mode::Exclusive);
                bytes.write();
            }
        });
        for _ in 0..2 {
            if let Some(_guard) = lock.try_lock(r(0, 2), Mode::Exclusive) {
                bytes.write();
            }
        }
        other.join().unwrap();
        assert!(
            lock.try_lock(ByteRange::ALL, Mode::Exclusive).is_some(),
            "a range is still locked"
        );
    });
}
