//! A node of the OLC B-tree, with its lock.
//!
//! ```text
//! version = OBSOLETE | count << 1 | LOCKED
//!
//! even -> lock, try_lock_at -> LOCKED -> unlock -> next even
//!                              LOCKED -> retire -> OBSOLETE
//! ```
//!
//! - N1. Only the thread that has LOCKED a node changes its fields. Each unlock creates a new version number.
//! - N2. A reader loads the version, reads fields, and compares the version again. If it is equal and even, the fields had
//!   these values at one moment. Before that the reader may have seen any value that was ever stored. So every field is
//!   atomic, and the reader follows a child only after validation.
//! - N3. A retired node never changes again; a thread that finds one restarts at the root.

use millpond_rangelock::ByteRange;
use millpond_rangelock::parts::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use millpond_rangelock::parts::sync::relax;

/// Number of records in a leaf, and of children in an inner node: 14, 210, 3150 at one, two, three levels. At least 3, as a
/// root that has just been split has 2 children, and must not be full.
pub(super) const FAN_OUT: usize = if cfg!(loom) {
    3
} else if cfg!(shuttle) {
    4
} else {
    14
};

const LOCKED: u64 = 1;
const OBSOLETE: u64 = 1 << 63;

/// The `shares` of an exclusively held record.
pub(super) const EXCLUSIVE: u32 = 0;

/// A leaf or an inner node.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Node {
    version: AtomicU64,
    len: AtomicU32,
    pub(super) is_leaf: bool,
    /// In a leaf: starts, sorted. In an inner node: the least start below each child; the first is 0. Unused elements
    /// contain `u64::MAX`.
    keys: [AtomicU64; FAN_OUT],
    /// In a leaf: the end of each record.
    ends: [AtomicU64; FAN_OUT],
    /// In a leaf: the shared holders of each record, or `EXCLUSIVE`.
    shares: [AtomicU32; FAN_OUT],
    /// In an inner node: the children.
    children: [AtomicPtr<Node>; FAN_OUT],
    /// The starts that belong to this leaf: `low..high`.
    low: AtomicU64,
    high: AtomicU64,
    /// End of the range that starts before `low` and ends after it; 0 if there is none.
    spill: AtomicU64,
}

/// One record of a leaf.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) shares: u32,
}

/// An even version that was current.
#[derive(Clone, Copy, Debug)]
pub(super) struct Version(u64);

impl Node {
    pub(super) fn new(is_leaf: bool) -> Node {
        Node {
            version: AtomicU64::new(0),
            len: AtomicU32::new(0),
            is_leaf,
            keys: std::array::from_fn(|_| AtomicU64::new(u64::MAX)),
            ends: std::array::from_fn(|_| AtomicU64::new(0)),
            shares: std::array::from_fn(|_| AtomicU32::new(0)),
            children: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
            low: AtomicU64::new(0),
            high: AtomicU64::new(u64::MAX),
            spill: AtomicU64::new(0),
        }
    }

    /// Waits for an even version; `None` if the node is retired.
    #[inline]
    pub(super) fn read(&self) -> Option<Version> {
        let mut tries = 0;
        loop {
            // Acquire: pairs with the Release in `unlock`: the caller sees the fields of this version.
            let version = self.version.load(Ordering::Acquire);
            if version & OBSOLETE != 0 {
                return None;
            }
            if version & LOCKED == 0 {
                return Some(Version(version));
            }
            relax(&mut tries);
        }
    }

    /// Whether all fields loaded since `read` were of that version (N2).
    #[inline]
    pub(super) fn validate(&self, version: Version) -> bool {
        // Acquire: if an earlier load saw a store of a later writer, that writer's fence in
        // `try_lock_at` precedes the store, and the load below sees its version.
        fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == version.0
    }

    /// Locks the node, waiting for the holder; false if the node is retired.
    pub(super) fn lock(&self) -> bool {
        loop {
            let Some(version) = self.read() else {
                return false;
            };
            if self.try_lock_at(version) {
                return true;
            }
        }
    }

    /// Locks the node, if it still has that version.
    #[inline]
    pub(super) fn try_lock_at(&self, version: Version) -> bool {
        // Acquire: pairs with the Release in `unlock`.
        let locked = self.version.compare_exchange(
            version.0,
            version.0 | LOCKED,
            Ordering::Acquire,
            Ordering::Relaxed,
        );
        // Release: orders the LOCKED version before the stores that follow, for readers that see one of
        // them; pairs with the fence in `validate`.
        fence(Ordering::Release);
        locked.is_ok()
    }

    /// Locks the node, if it is unlocked.
    pub(super) fn try_lock(&self) -> bool {
        let version = self.version.load(Ordering::Relaxed);
        version & (LOCKED | OBSOLETE) == 0 && self.try_lock_at(Version(version))
    }

    #[inline]
    pub(super) fn unlock(&self) {
        let version = self.version.load(Ordering::Relaxed);
        // Release: pairs with the Acquire in `read` and `try_lock_at`.
        self.version.store(version + LOCKED, Ordering::Release);
    }

    /// Unlocks for the last time (N3).
    pub(super) fn retire(&self) {
        // Relaxed: a thread that finds it restarts, and follows no pointer.
        self.version.store(OBSOLETE, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        // A reader that will fail validation may see any value: keep it within the arrays.
        (self.len.load(Ordering::Relaxed) as usize).min(FAN_OUT)
    }

    pub(super) fn is_full(&self) -> bool {
        self.len() == FAN_OUT
    }

    /// Number of keys that are at most `key`.
    #[inline]
    pub(super) fn rank(&self, key: u64) -> usize {
        self.keys.iter().map(|k| usize::from(k.load(Ordering::Relaxed) <= key)).sum()
    }

    pub(super) fn key(&self, at: usize) -> u64 {
        self.keys[at].load(Ordering::Relaxed)
    }

    pub(super) fn fences(&self) -> (u64, u64) {
        (self.low.load(Ordering::Relaxed), self.high.load(Ordering::Relaxed))
    }

    pub(super) fn spill(&self) -> u64 {
        self.spill.load(Ordering::Relaxed)
    }

    /// The index of the child for `key`, and the child; may be null if validation will fail.
    #[inline]
    pub(super) fn child_for(&self, key: u64) -> (usize, *mut Node) {
        let at = self.rank(key).max(1) - 1;
        (at, self.child(at))
    }

    pub(super) fn child(&self, at: usize) -> *mut Node {
        // Relaxed: a thread follows it only after validating the version (N2) or under the lock, and the
        // child was initialised before that version.
        self.children[at].load(Ordering::Relaxed)
    }

    pub(super) fn record(&self, at: usize) -> Record {
        Record {
            start: self.keys[at].load(Ordering::Relaxed),
            end: self.ends[at].load(Ordering::Relaxed),
            shares: self.shares[at].load(Ordering::Relaxed),
        }
    }
}

/// While LOCKED (N1).
impl Node {
    fn set_child(&self, at: usize, child: *mut Node) {
        // Relaxed: see `child`.
        self.children[at].store(child, Ordering::Relaxed);
    }

    fn set_record(&self, at: usize, record: Record) {
        self.keys[at].store(record.start, Ordering::Relaxed);
        self.ends[at].store(record.end, Ordering::Relaxed);
        self.shares[at].store(record.shares, Ordering::Relaxed);
    }

    fn set_len(&self, len: usize) {
        self.len.store(len as u32, Ordering::Relaxed);
    }

    pub(super) fn set_shares(&self, at: usize, shares: u32) {
        self.shares[at].store(shares, Ordering::Relaxed);
    }

    pub(super) fn set_fences(&self, low: u64, high: u64) {
        self.low.store(low, Ordering::Relaxed);
        self.high.store(high, Ordering::Relaxed);
    }

    pub(super) fn set_spill(&self, end: u64) {
        self.spill.store(end, Ordering::Relaxed);
    }

    pub(super) fn insert_record(&self, at: usize, record: Record) {
        let len = self.len();
        for to in (at + 1..=len).rev() {
            self.set_record(to, self.record(to - 1));
        }
        self.set_record(at, record);
        self.set_len(len + 1);
    }

    pub(super) fn remove_record(&self, at: usize) {
        let len = self.len();
        for to in at..len - 1 {
            self.set_record(to, self.record(to + 1));
        }
        self.keys[len - 1].store(u64::MAX, Ordering::Relaxed);
        self.set_len(len - 1);
    }

    pub(super) fn insert_child(&self, at: usize, key: u64, child: *mut Node) {
        let len = self.len();
        for to in (at + 1..=len).rev() {
            self.keys[to].store(self.key(to - 1), Ordering::Relaxed);
            self.set_child(to, self.child(to - 1));
        }
        self.keys[at].store(key, Ordering::Relaxed);
        self.set_child(at, child);
        self.set_len(len + 1);
    }

    pub(super) fn remove_child(&self, at: usize) {
        let len = self.len();
        for to in at..len - 1 {
            self.keys[to].store(self.key(to + 1), Ordering::Relaxed);
            self.set_child(to, self.child(to + 1));
        }
        self.keys[len - 1].store(u64::MAX, Ordering::Relaxed);
        self.keys[0].store(if len > 1 { 0 } else { u64::MAX }, Ordering::Relaxed);
        self.set_len(len - 1);
    }

    /// Moves the elements from `cut` on to a new node; returns the node and its first key.
    pub(super) fn split_off(&self, cut: usize) -> (Box<Node>, u64) {
        let right = Box::new(Node::new(self.is_leaf));
        let (len, key) = (self.len(), self.key(cut));
        for from in cut..len {
            if self.is_leaf {
                right.set_record(from - cut, self.record(from));
            } else {
                right.keys[from - cut].store(self.key(from), Ordering::Relaxed);
                right.set_child(from - cut, self.child(from));
            }
            self.keys[from].store(u64::MAX, Ordering::Relaxed);
        }
        if self.is_leaf {
            let (low, high) = self.fences();
            right.set_fences(key, high);
            self.set_fences(low, key);
        } else {
            right.keys[0].store(0, Ordering::Relaxed);
        }
        right.set_len(len - cut);
        self.set_len(cut);
        (right, key)
    }

    /// Appends the children of `right`, whose least start is `key`.
    pub(super) fn append_children(&self, right: &Node, key: u64) {
        let len = self.len();
        for from in 0..right.len() {
            let key = if from == 0 { key } else { right.key(from) };
            self.keys[len + from].store(key, Ordering::Relaxed);
            self.set_child(len + from, right.child(from));
        }
        self.set_len(len + right.len());
    }
}

impl Record {
    pub(super) fn overlaps(self, range: ByteRange) -> bool {
        self.start < range.end() && range.start() < self.end
    }
}
