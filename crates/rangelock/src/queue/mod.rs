//! The queue: requests in their order, held and waiting, in one place.
//!
//! Every implementation has one, under a mutex. An implementation may also keep held ranges
//! elsewhere, in its *front* (stripes, a tree, a counter), where the common case is quick; the
//! queue is where requests wait, and where those stay that were granted out of it.
//!
//! ```text
//! insert -> Waiting -> (blockers reach 0) -> Held, of a thread -> remove
//!                                         -> Offered, to a task -> poll -> Held -> remove
//!                                            Offered -> expire -> Lapsed -> poll -> Held | Waiting
//! insert -> Held -> remove            Waiting | Offered | Lapsed -> remove (cancelled)
//! ```
//!
//! - Q1. A waiting entry counts its *blockers*: the held and offered entries, those in the front,
//!   and the waiting entries with a lower sequence, that overlap and conflict. When that count
//!   reaches zero it is held, or offered.
//! - Q2. The call that removes an entry, or weakens it (downgrade, expire), takes it out of the count of
//!   every waiting entry that counted it; the call that strengthens one (upgrade, or a poll that renews a
//!   lapsed one) adds it. Those that reach zero are granted there and then, in the same
//!   critical section.
//! - Q3. Front entries come before every queue entry that they overlap: while a queue entry
//!   exists, no overlapping range enters the front. So the blockers in the front are exactly
//!   those that overlap, and nobody has to remember an order for them.
//! - Q4. Counts only point to what holds or is offered, or backwards (by sequence); so there is no
//!   cycle: the oldest of any set of waiting entries is blocked by held and offered ones alone.
//! - Q5. Grants are told after the mutex is released, each to its own waiter: telling is the last
//!   touch of that waiter, and nobody else is woken.
//! - Q6. No waker is cloned, woken or dropped under the mutex: that is the caller's code, and may
//!   come back to this very lock.
//!
//! # Offers
//!
//! A thread that is told of its grant takes it. A task may be woken and not polled for long: its
//! executor is busy, or the future sits in a `select!` that is itself not polled. So what it gets
//! is an *offer*: it excludes others like a hold, for a time of grace. Then it may *lapse*, and
//! excludes nobody; but it keeps its sequence. The poll that comes at last *renews* it: it is held
//! at once if nothing that conflicts is held or waits from before, else it waits for exactly that;
//! what waits from after it waits for it again.
//!
//! - L1. Only a poll ends an offer as a hold, and only `expire` as a lapse, both under the mutex:
//!   whichever comes first. A poll takes its own offer before it looks at the clock.
//! - L2. A lapsed entry counts nobody and is counted by nobody. It is still in the tree, so
//!   nothing enters the front over it, and its count in the front can be taken again.
//! - L3. Nobody runs a timer for it. Offers expire in each `insert`, `poll` and `remove`, wherever
//!   in the file that is; and a thread that waits behind a request of a task does not sleep for
//!   longer than that time. (A lock on which only tasks wait, with no request,
//!   release or poll at all, stays as it is: the next call finds it lapsed.)
//!
//! Without tasks that costs a test of a flag under the mutex, and nothing outside.

mod entry;
mod tree;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::range::{ByteRange, Mode};
use crate::raw::Request;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::wait::Notify;
use entry::{Entry, GrantState, Links, NIL};
use tree::Tree;

/// How long a granted [`lock_async`](crate::RangeLock::lock_async) that is not polled keeps
/// others out, unless [`set_offer_grace`](crate::RangeLock::set_offer_grace) says otherwise.
pub const OFFER_GRACE: Duration = Duration::from_millis(10);

/// An entry of a queue. Its owner gives it back exactly once, by value.
#[derive(Debug)]
pub struct Ticket {
    at: u32,
    /// How long its thread may sleep until it has to `expire` (L3); else until it is told.
    patience: Option<Duration>,
}

impl Ticket {
    /// For a caller that keeps it with other things in one word.
    pub(crate) fn into_number(self) -> u32 {
        self.at
    }

    /// Undoes `into_number`.
    pub(crate) fn from_number(number: u32) -> Ticket {
        Ticket { at: number, patience: None }
    }

    /// How long a thread that waits with it may sleep until it has to `expire` (L3).
    pub fn patience(&self) -> Option<Duration> {
        self.patience
    }
}

/// The requests of a lock, held and waiting; under a mutex.
#[derive(Debug)]
pub struct Queue {
    tree: Tree,
    sequence: u64,
    waiting: usize,
    /// Granted in this critical section, told after it (Q5).
    wakeups: VecDeque<Notify>,
    /// No offer is older; some, if there is any offer.
    offers_since: Option<Instant>,
    /// How long an offer lasts at least.
    grace: Duration,
}

impl Default for Queue {
    fn default() -> Queue {
        Queue {
            tree: Tree::new(),
            sequence: 0,
            waiting: 0,
            wakeups: VecDeque::new(),
            offers_since: None,
            grace: OFFER_GRACE,
        }
    }
}

impl Queue {
    /// Has it keep memory for a few only from now on, while it is empty.
    pub(crate) fn free_memory_when_empty(&mut self) {
        self.tree.frees_memory_when_empty = true;
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.tree.is_empty()
    }

    /// Whether any entry, held or waiting, overlaps `range`.
    #[cfg(feature = "parts")]
    pub fn overlaps(&self, range: ByteRange) -> bool {
        self.tree.first(range) != NIL
    }

    /// How many entries wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// How many entries a new request would have to wait for; and whether one that it conflicts
    /// with is of a task that has not taken its grant.
    fn blockers(&self, range: ByteRange, mode: Mode) -> (u32, bool) {
        let (mut blockers, mut behind_task) = (0, false);
        let mut at = self.tree.first(range);
        while at != NIL {
            let entry = &self.tree[at];
            if entry.mode.conflicts_with(mode) {
                blockers += u32::from(!entry.is_lapsed());
                behind_task |= entry.grant != GrantState::Taken;
            }
            at = self.tree.next(at, range);
        }
        (blockers, behind_task)
    }

    /// Appends a request that has `in_front` blockers in the front: held if it has none at all,
    /// else waiting, and then it takes `notify`. `None`, and nothing happened, if it would have to
    /// wait and there is nobody to tell.
    pub fn insert(
        &mut self,
        range: ByteRange,
        mode: Mode,
        in_front: u32,
        notify: &mut Option<Notify>,
    ) -> Option<Request<Ticket, Ticket>> {
        self.expire();
        let (blockers, behind_task) = self.blockers(range, mode);
        let blockers = in_front + blockers;
        if blockers == 0 {
            return Some(Request::Granted(self.append(range, mode, 0, None)));
        }
        let notify = notify.take()?;
        self.waiting += 1;
        let ticket = self.append(range, mode, blockers, Some(notify));
        Some(Request::Queued(Ticket { patience: behind_task.then_some(self.grace), ..ticket }))
    }

    /// Takes over a range that was held in the front, with all that counted it there.
    pub(crate) fn adopt(&mut self, range: ByteRange, mode: Mode) {
        let ticket = self.append(range, mode, 0, None);
        let entry = &mut self.tree[ticket.at];
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
                return Some(Ticket::from_number(at));
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
        let of_task = notify.as_ref().is_some_and(Notify::is_task);
        Ticket::from_number(self.tree.insert(Entry {
            links: Links::new(),
            range,
            sequence: self.sequence,
            blockers,
            grant: if of_task { GrantState::Pending } else { GrantState::Taken },
            mode,
            adopted: false,
            notify,
        }))
    }

    /// Collects a grant, or else has `notify` told of it; what was to be told before comes back in
    /// `notify`, to be dropped outside of the mutex (Q6). A lapsed request has `in_front` blockers
    /// in the front now.
    pub fn poll(
        &mut self,
        ticket: Ticket,
        in_front: u32,
        notify: &mut Option<Notify>,
    ) -> Request<Ticket, Ticket> {
        // First our own, then the clock (L1).
        if self.try_take(&ticket) {
            self.expire();
            return Request::Granted(ticket);
        }
        self.expire();
        if self.tree[ticket.at].is_lapsed() {
            self.renew(&ticket, in_front);
        }
        if self.try_take(&ticket) {
            return Request::Granted(ticket);
        }
        std::mem::swap(&mut self.tree[ticket.at].notify, notify);
        Request::Queued(ticket)
    }

    /// Turns a grant into a hold.
    fn try_take(&mut self, ticket: &Ticket) -> bool {
        let entry = &mut self.tree[ticket.at];
        let granted = entry.is_granted();
        if granted {
            entry.grant = GrantState::Taken;
        }
        granted
    }

    /// Makes a lapsed request count and be counted again, at its old place.
    #[cold]
    fn renew(&mut self, ticket: &Ticket, in_front: u32) {
        let Entry { range, sequence, mode, .. } = self.tree[ticket.at];
        let mut blockers = in_front;
        let mut at = self.tree.first(range);
        while at != NIL {
            let entry = &mut self.tree[at];
            if at != ticket.at && !entry.is_lapsed() && entry.mode.conflicts_with(mode) {
                if entry.is_waiting() && entry.sequence > sequence {
                    entry.blockers += 1;
                } else {
                    blockers += 1;
                }
            }
            at = self.tree.next(at, range);
        }
        let entry = &mut self.tree[ticket.at];
        entry.grant = GrantState::Pending;
        entry.blockers = blockers;
        self.waiting += usize::from(blockers > 0);
    }

    /// Lets the offers lapse that nobody has taken in time.
    #[inline]
    pub fn expire(&mut self) {
        if let Some(since) = self.offers_since
            && self.has_expired(since)
        {
            self.expire_all();
        }
    }

    /// O(entries), at most once in a time of grace.
    #[cold]
    fn expire_all(&mut self) {
        self.offers_since = None;
        let mut at = self.tree.first(ByteRange::ALL);
        while at != NIL {
            let Entry { range, mode, grant, .. } = self.tree[at];
            match grant {
                GrantState::Offered(since) if self.has_expired(since) => {
                    self.tree[at].grant = GrantState::Lapsed;
                    self.unblock(range, 0, |other| other.conflicts_with(mode));
                }
                GrantState::Offered(since) => self.note_offer(since),
                _ => {}
            }
            at = self.tree.next(at, ByteRange::ALL);
        }
    }

    fn note_offer(&mut self, since: Instant) {
        self.offers_since = Some(self.offers_since.map_or(since, |oldest| oldest.min(since)));
    }

    #[cfg(not(any(loom, shuttle)))]
    fn has_expired(&self, since: Instant) -> bool {
        since.elapsed() >= self.grace
    }

    /// The models have no clock: every offer has expired, or none.
    #[cfg(any(loom, shuttle))]
    fn has_expired(&self, _since: Instant) -> bool {
        self.grace.is_zero()
    }

    /// How long an offer lasts at least, from now on.
    pub fn set_grace(&mut self, grace: Duration) {
        self.grace = grace;
    }

    /// Whether a poll has to renew it, and to say what is in front of it.
    pub fn is_lapsed(&self, ticket: &Ticket) -> bool {
        self.tree[ticket.at].is_lapsed()
    }

    /// Whether it has been granted, and has not lapsed.
    pub fn is_granted(&self, ticket: &Ticket) -> bool {
        self.tree[ticket.at].is_granted()
    }

    /// Ends a hold or a wait (Q2). The notification that is left comes back, to be dropped outside
    /// of the mutex (Q6).
    #[must_use]
    pub fn remove(&mut self, ticket: Ticket) -> Option<Notify> {
        self.expire();
        let entry = self.tree.remove(ticket.at);
        self.waiting -= usize::from(entry.is_waiting());
        if !entry.is_lapsed() {
            // A waiting entry counted every hold, but of the waiting entries only the earlier (Q1).
            let after = if entry.is_waiting() { entry.sequence } else { 0 };
            self.unblock(entry.range, after, |mode| mode.conflicts_with(entry.mode));
        }
        entry.notify
    }

    /// Shared to exclusive; true if no entry that overlaps is held, or waits from before.
    pub fn try_upgrade(&mut self, ticket: &Ticket) -> bool {
        let Entry { range, sequence, .. } = self.tree[ticket.at];
        let mut at = self.tree.first(range);
        while at != NIL {
            let entry = &self.tree[at];
            let ahead = entry.is_granted() || entry.is_waiting() && entry.sequence < sequence;
            if at != ticket.at && ahead {
                return false;
            }
            at = self.tree.next(at, range);
        }
        self.tree[ticket.at].mode = Mode::Exclusive;
        self.block_shared(range);
        true
    }

    /// Exclusive to shared (Q2).
    pub fn downgrade(&mut self, ticket: &Ticket) {
        let entry = &mut self.tree[ticket.at];
        entry.mode = Mode::Shared;
        let range = entry.range;
        self.unblock(range, 0, |mode| mode == Mode::Shared);
    }

    /// A range left the front.
    pub fn front_released(&mut self, range: ByteRange, mode: Mode) {
        // Every overlapping entry is later (Q3): sequence 0.
        self.unblock(range, 0, |other| other.conflicts_with(mode));
    }

    /// How many entries that overlap `range` are held.
    pub fn count_held(&self, range: ByteRange) -> u32 {
        let mut count = 0;
        let mut at = self.tree.first(range);
        while at != NIL {
            count += u32::from(self.tree[at].is_granted());
            at = self.tree.next(at, range);
        }
        count
    }

    /// A shared range of the front became exclusive; nothing that overlaps it is held here.
    pub fn front_upgraded(&mut self, range: ByteRange) {
        self.block_shared(range);
    }

    /// An exclusive range of the front became shared.
    pub fn front_downgraded(&mut self, range: ByteRange) {
        self.unblock(range, 0, |other| other == Mode::Shared);
    }

    /// Takes one blocker from each waiting entry after `sequence` (0: from each) that overlaps and is in a
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
                    self.grant(at);
                }
            }
            at = self.tree.next(at, range);
        }
    }

    /// An entry has no blockers any more: a thread has it, a task is offered it.
    fn grant(&mut self, at: u32) {
        let entry = &mut self.tree[at];
        self.waiting -= 1;
        self.wakeups.extend(entry.notify.take());
        if entry.grant == GrantState::Pending {
            let now = Instant::now();
            entry.grant = GrantState::Offered(now);
            self.note_offer(now);
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
        self.tree[ticket.at].range
    }
}

/// How many are told between two looks at the queue.
const WAKE_BATCH: usize = 8;

/// Ends a critical section and tells those that were granted in it (Q5).
pub fn unlock_and_wake<'a, T>(
    mutex: &'a Mutex<T>,
    mut guard: MutexGuard<'a, T>,
    queue: impl Fn(&mut T) -> &mut Queue,
) {
    loop {
        let wakeups = &mut queue(&mut guard).wakeups;
        if wakeups.is_empty() {
            return;
        }
        let mut batch: [Option<Notify>; WAKE_BATCH] = Default::default();
        for place in &mut batch {
            *place = wakeups.pop_front();
        }
        let more = !wakeups.is_empty();
        drop(guard);
        batch.into_iter().flatten().for_each(Notify::wake);
        if !more {
            return;
        }
        guard = lock(mutex);
    }
}
