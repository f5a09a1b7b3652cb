//! The queue: requests in their order, held and waiting, in one place.
//!
//! Every implementation has one, under a mutex. An implementation may also keep held ranges
//! elsewhere, in its *front* (stripes, a tree, a counter), where the common case is quick; the
//! queue is where requests wait, and where those stay that were granted out of it.
//!
//! ```text
//! insert -> Waiting -> (blockers reach 0) -> Held -> remove
//! insert -> Held -> remove            Waiting -> remove (cancelled)
//! ```
//!
//! - Q1. A waiting entry counts its *blockers*: the entries before it (queue entries with a lower
//!   sequence, and front entries) that overlap and conflict. It is held exactly when
//!   that count is zero.
//! - Q2. Whoever removes an entry, or weakens it (downgrade), takes it out of the count of every
//!   later waiting entry that counted it; whoever strengthens one (upgrade) adds it.
//!   Those that reach zero are granted there and then, in the same critical section.
//! - Q3. Front entries come before every queue entry that they overlap: while a queue entry
//!   exists, no overlapping range enters the front. So the blockers in the front are exactly
//!   those that overlap, and nobody has to remember an order for them.
//! - Q4. Counts only point backwards (by sequence), so there is no cycle: the oldest entry of
//!   any set of waiting entries is blocked by held entries alone.
//! - Q5. Grants are told after the mutex is released, each to its own waiter: telling is the last
//!   touch of that waiter, and nobody else is woken.
//! - Q6. No waker is cloned, woken or dropped under the mutex: that is the caller's code, and may
//!   come back to this very lock.

mod tree;

use std::collections::VecDeque;

use crate::raw::Request;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::wait::Notify;
use crate::{ByteRange, Mode};
use tree::{Links, NIL, Tree};

/// An entry of a queue. Its owner gives it back exactly once, by value.
#[derive(Debug)]
pub struct Ticket(u32);

impl Ticket {
    /// For who keeps it among other things in a word.
    pub(crate) fn into_number(self) -> u32 {
        self.0
    }

    /// Undoes `into_number`.
    pub(crate) fn from_number(number: u32) -> Ticket {
        Ticket(number)
    }
}

/// One request.
#[derive(Debug)]
pub(crate) struct Entry {
    links: Links,
    range: ByteRange,
    sequence: u64,
    /// Waiting while not 0 (Q1).
    blockers: u32,
    mode: Mode,
    /// Came from the front when that was rebuilt; its guard does not know its ticket.
    adopted: bool,
    /// Whom to tell; only while waiting.
    notify: Option<Notify>,
}

impl Entry {
    fn is_waiting(&self) -> bool {
        self.blockers > 0
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Queue {
    tree: Tree,
    sequence: u64,
    waiting: usize,
    /// Granted in this critical section, told after it (Q5).
    told: VecDeque<Notify>,
}

impl Default for Queue {
    fn default() -> Queue {
        Queue { tree: Tree::new(), sequence: 0, waiting: 0, told: VecDeque::new() }
    }
}

impl Queue {
    pub(crate) fn is_empty(&self) -> bool {
        self.tree.is_empty()
    }

    /// Whether any entry, held or waiting, overlaps `range`.
    pub(crate) fn overlaps(&self, range: ByteRange) -> bool {
        self.tree.first(range) != NIL
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// How many entries `range` in `mode` would have to wait for.
    fn blockers(&self, range: ByteRange, mode: Mode) -> u32 {
        let mut blockers = 0;
        let mut at = self.tree.first(range);
        while at != NIL {
            blockers += u32::from(self.tree[at].mode.conflicts_with(mode));
            at = self.tree.next(at, range);
        }
        blockers
    }

    /// Appends a request that has `in_front` blockers in the front: held if it has none at all,
    /// else waiting, and then it takes `notify`. `None`, and nothing happened, if it would have to
    /// wait and there is nobody to tell.
    pub(crate) fn insert(
        &mut self,
        range: ByteRange,
        mode: Mode,
        in_front: u32,
        notify: &mut Option<Notify>,
    ) -> Option<Request<Ticket, Ticket>> {
        let blockers = in_front + self.blockers(range, mode);
        if blockers == 0 {
            return Some(Request::Granted(self.append(range, mode, 0, None)));
        }
        let notify = notify.take()?;
        self.waiting += 1;
        Some(Request::Queued(self.append(range, mode, blockers, Some(notify))))
    }

    /// Takes over a range that was held in the front, and whoever counted it there.
    pub(crate) fn adopt(&mut self, range: ByteRange, mode: Mode) {
        let ticket = self.append(range, mode, 0, None);
        let entry = &mut self.tree[ticket.0];
        entry.adopted = true;
        // Before everything that overlaps it, as it was in the front (Q3).
        entry.sequence = 0;
    }

    /// Finds an adopted range. Two that are equal are interchangeable.
    pub(crate) fn find_adopted(&self, range: ByteRange, mode: Mode) -> Option<Ticket> {
        let mut at = self.tree.first(range);
        while at != NIL {
            let entry = &self.tree[at];
            if entry.adopted && entry.range == range && entry.mode == mode {
                return Some(Ticket(at));
            }
            at = self.tree.next(at, range);
        }
        None
    }

    fn append(
        &mut self,
        range: ByteRange,
        mode: Mode,
        blockers: u32,
        notify: Option<Notify>,
    ) -> Ticket {
        self.sequence += 1;
        Ticket(self.tree.insert(Entry {
            links: Links::new(),
            range,
            sequence: self.sequence,
            blockers,
            mode,
            adopted: false,
            notify,
        }))
    }

    /// Collects a grant, or else exchanges whom to tell with `notify`.
    pub(crate) fn poll(&mut self, ticket: Ticket, notify: &mut Notify) -> Request<Ticket, Ticket> {
        match &mut self.tree[ticket.0].notify {
            Some(mine) => std::mem::swap(mine, notify),
            // Taken when it was granted.
            None => return Request::Granted(ticket),
        }
        Request::Queued(ticket)
    }

    pub(crate) fn is_waiting(&self, ticket: &Ticket) -> bool {
        self.tree[ticket.0].is_waiting()
    }

    /// Ends a hold or a wait (Q2). Who would have been told comes back, to be dropped outside
    /// of the mutex (Q6).
    #[must_use]
    pub(crate) fn remove(&mut self, ticket: Ticket) -> Option<Notify> {
        let entry = self.tree.remove(ticket.0);
        self.waiting -= usize::from(entry.is_waiting());
        self.unblock(entry.range, entry.sequence, |mode| mode.conflicts_with(entry.mode));
        entry.notify
    }

    /// Ends a hold (Q2).
    pub(crate) fn release(&mut self, ticket: Ticket) {
        let notify = self.remove(ticket);
        debug_assert!(notify.is_none(), "told when it was granted");
    }

    /// Shared to exclusive; true if nobody who overlaps holds, or waits from before.
    pub(crate) fn try_upgrade(&mut self, ticket: &Ticket) -> bool {
        let Entry { range, sequence, .. } = self.tree[ticket.0];
        let mut at = self.tree.first(range);
        while at != NIL {
            let entry = &self.tree[at];
            if at != ticket.0 && (!entry.is_waiting() || entry.sequence < sequence) {
                return false;
            }
            at = self.tree.next(at, range);
        }
        self.tree[ticket.0].mode = Mode::Exclusive;
        self.block_shared(range);
        true
    }

    /// Exclusive to shared (Q2).
    pub(crate) fn downgrade(&mut self, ticket: &Ticket) {
        let entry = &mut self.tree[ticket.0];
        entry.mode = Mode::Shared;
        let (range, sequence) = (entry.range, entry.sequence);
        self.unblock(range, sequence, |mode| mode == Mode::Shared);
    }

    /// A range left the front.
    pub(crate) fn front_released(&mut self, range: ByteRange, mode: Mode) {
        // Every overlapping entry is later (Q3): sequence 0.
        self.unblock(range, 0, |other| other.conflicts_with(mode));
    }

    /// Whether an entry that overlaps `range` is held.
    pub(crate) fn is_held(&self, range: ByteRange) -> bool {
        let mut at = self.tree.first(range);
        while at != NIL {
            if !self.tree[at].is_waiting() {
                return true;
            }
            at = self.tree.next(at, range);
        }
        false
    }

    /// A shared range of the front became exclusive; nothing that overlaps it is held here.
    pub(crate) fn front_upgraded(&mut self, range: ByteRange) {
        self.block_shared(range);
    }

    /// An exclusive range of the front became shared.
    pub(crate) fn front_downgraded(&mut self, range: ByteRange) {
        self.unblock(range, 0, |other| other == Mode::Shared);
    }

    /// Takes one blocker from each waiting entry after `sequence` that overlaps and is in a
    /// mode that counted it.
    fn unblock(&mut self, range: ByteRange, sequence: u64, counted: impl Fn(Mode) -> bool) {
        if self.waiting == 0 {
            return;
        }
        let mut at = self.tree.first(range);
        while at != NIL {
            let entry = &mut self.tree[at];
            if entry.is_waiting() && entry.sequence > sequence && counted(entry.mode) {
                entry.blockers -= 1;
                if entry.blockers == 0 {
                    self.waiting -= 1;
                    self.told.extend(entry.notify.take());
                }
            }
            at = self.tree.next(at, range);
        }
    }

    /// Adds a blocker to each waiting shared entry that overlaps: it did not count the one
    /// that has just become exclusive, and is behind it.
    fn block_shared(&mut self, range: ByteRange) {
        let mut at = self.tree.first(range);
        while at != NIL {
            let entry = &mut self.tree[at];
            if entry.is_waiting() && entry.mode == Mode::Shared {
                entry.blockers += 1;
            }
            at = self.tree.next(at, range);
        }
    }

    /// Calls `f` for the range of every entry.
    pub(crate) fn for_each_range(&self, mut f: impl FnMut(ByteRange)) {
        let mut at = self.tree.first(ByteRange::ALL);
        while at != NIL {
            f(self.tree[at].range);
            at = self.tree.next(at, ByteRange::ALL);
        }
    }

    pub(crate) fn range_of(&self, ticket: &Ticket) -> ByteRange {
        self.tree[ticket.0].range
    }
}

/// How many are told between two looks at the queue.
const TOLD_BATCH: usize = 8;

/// Ends a critical section and tells those that were granted in it (Q5).
pub(crate) fn unlock_and_tell<'a, T>(
    mutex: &'a Mutex<T>,
    mut guard: MutexGuard<'a, T>,
    queue: impl Fn(&mut T) -> &mut Queue,
) {
    loop {
        let told = &mut queue(&mut guard).told;
        if told.is_empty() {
            return;
        }
        let mut batch: [Option<Notify>; TOLD_BATCH] = Default::default();
        for place in &mut batch {
            *place = told.pop_front();
        }
        let more = !told.is_empty();
        drop(guard);
        batch.into_iter().flatten().for_each(Notify::tell);
        if !more {
            return;
        }
        guard = lock(mutex);
    }
}
