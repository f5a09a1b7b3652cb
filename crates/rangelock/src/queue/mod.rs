//! The queue of a lock: waiting requests in FIFO order, and the requests granted from the queue.
//!
//! Every implementation has one queue, under a mutex. An implementation may keep other held ranges in its *front*
//! (stripes, a tree, a counter), where the common case is fast. Requests wait in the queue, and stay in it when they are
//! granted.
//!
//! ```text
//! insert -> Waiting -> (blockers reach 0) -> thread: Held -> remove
//!                                         -> task: Offered -> poll -> Held -> remove
//!                                            Offered -> expire -> Lapsed -> poll -> Held | Waiting
//! insert -> Held -> remove            Waiting | Offered | Lapsed -> remove (cancelled)
//! ```
//!
//! - Q1. A waiting entry counts its *blockers*: the overlapping and conflicting entries that are held or offered, in the
//!   queue or in the front, and the ones that wait with a lower sequence number. When the count reaches zero, the entry is
//!   held, or offered.
//! - Q2. The call that removes or weakens an entry (downgrade, expire) decrements the count of every waiting entry that
//!   counted it. The call that strengthens an entry (upgrade, or a poll that renews a lapsed one) increments them. Entries
//!   whose count reaches zero are granted in the same critical section.
//! - Q3. Front entries precede every queue entry that they overlap: while a queue entry exists, no overlapping range enters
//!   the front. So the blockers in the front are exactly the overlapping and conflicting ranges, and need no sequence
//!   numbers.
//! - Q4. Counts refer only to held or offered entries, or to earlier ones (by sequence). So there is no cycle: the oldest of
//!   any set of waiting entries is blocked by held and offered entries alone.
//! - Q5. A grant wakes exactly its own waiter, after the mutex is released. The wake-up is the last access to that waiter.
//! - Q6. No waker is cloned, woken or dropped under the mutex, as wakers are the caller's code and may use this lock.
//!
//! # Offers
//!
//! A thread takes its grant when it is woken. A task may be woken and not polled for long: its executor is busy, or the
//! future is part of a `select!` that is not polled. So a task gets an *offer*: for a grace period it excludes other
//! requests as a hold does. After that it may *lapse*: it excludes no request, but keeps its sequence number. The next poll
//! *renews* a lapsed entry. It is held at once if no conflicting entry is held or waits with a lower sequence number, else
//! it waits for exactly those. Later entries that still wait then wait for it again.
//!
//! - L1. Only a poll turns an offer into a hold, and only `expire` lets it lapse, both under the mutex: the first one wins.
//!   A poll takes its own offer before it checks the clock.
//! - L2. A lapsed entry has no blockers and blocks no entry. It is still in the tree, so no range enters the front over it,
//!   and its blockers in the front can be counted again.
//! - L3. No timer runs. Each `insert`, `poll` and `remove`, anywhere in the file, expires offers, and a thread that waits
//!   behind a task's request sleeps no longer than the grace period. (If only tasks wait and no call is made on the lock,
//!   the offer stays; the next call lets it lapse.)
//!
//! Without tasks this costs a test of a flag under the mutex.

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

/// Default time for which a granted [`lock_async`](crate::RangeLock::lock_async) that is not polled excludes other
/// requests; [`set_offer_grace`](crate::RangeLock::set_offer_grace) changes it.
pub const OFFER_GRACE: Duration = Duration::from_millis(10);

/// Identifies an entry of a queue. Its owner passes it back exactly once, by value.
#[derive(Debug)]
pub struct Ticket {
    at: u32,
    /// Time that its thread may sleep before it has to call `expire` (L3). `None`: it sleeps until it is woken.
    patience: Option<Duration>,
}

impl Ticket {
    /// For a caller that packs it into a word with other data.
    pub(crate) fn into_number(self) -> u32 {
        self.at
    }

    /// The inverse of `into_number`.
    pub(crate) fn from_number(number: u32) -> Ticket {
        Ticket { at: number, patience: None }
    }

    /// Time that a thread waiting with it may sleep before it has to call `expire` (L3).
    pub fn patience(&self) -> Option<Duration> {
        self.patience
    }
}

/// The queued requests of a lock, held and waiting; under a mutex.
#[derive(Debug)]
pub struct Queue {
    tree: Tree,
    sequence: u64,
    waiting: usize,
    /// Waiters granted in this critical section, to be woken after it (Q5).
    wakeups: VecDeque<Notify>,
    /// Lower bound of the offers' times; `Some` if there is an offer.
    offers_since: Option<Instant>,
    /// Minimum duration of an offer.
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
    /// Sets the queue to free most of its memory whenever it becomes empty.
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

    /// Number of waiting entries.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Number of entries that a new request would have to wait for, and whether a conflicting entry belongs to a task that
    /// has not taken its grant.
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

    /// Appends a request that has `in_front` blockers in the front. It is held if it has no blockers, else it waits and
    /// takes `notify`. `None`, without any change, if it would have to wait and `notify` is `None`.
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

    /// Moves a held range from the front to the queue, where the same waiting entries count it.
    pub(crate) fn adopt(&mut self, range: ByteRange, mode: Mode) {
        let ticket = self.append(range, mode, 0, None);
        let entry = &mut self.tree[ticket.at];
        entry.adopted = true;
        // Before all overlapping entries, as in the front (Q3).
        entry.sequence = 0;
    }

    /// Finds an adopted range. Two equal ranges are interchangeable.
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

    /// Takes a grant, or else stores `notify` for it. The previous notification is returned in `notify`, to be dropped
    /// outside of the mutex (Q6). `in_front`: for a lapsed request, its present blockers in the front.
    pub fn poll(
        &mut self,
        ticket: Ticket,
        in_front: u32,
        notify: &mut Option<Notify>,
    ) -> Request<Ticket, Ticket> {
        // First take the own grant, then check the clock (L1).
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

    /// Makes a lapsed request block and be blocked again, at its old place in the order.
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

    /// Lets the offers lapse that have exceeded the grace period.
    #[inline]
    pub fn expire(&mut self) {
        if let Some(since) = self.offers_since
            && self.has_expired(since)
        {
            self.expire_all();
        }
    }

    /// O(entries), at most once per grace period.
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

    /// The models have no clock: either all offers have expired, or none has.
    #[cfg(any(loom, shuttle))]
    fn has_expired(&self, _since: Instant) -> bool {
        self.grace.is_zero()
    }

    /// Sets the minimum duration of an offer.
    pub fn set_grace(&mut self, grace: Duration) {
        self.grace = grace;
    }

    /// Whether a poll has to renew the entry, and to pass its number of blockers in the front.
    pub fn is_lapsed(&self, ticket: &Ticket) -> bool {
        self.tree[ticket.at].is_lapsed()
    }

    /// Whether the entry has been granted and has not lapsed.
    pub fn is_granted(&self, ticket: &Ticket) -> bool {
        self.tree[ticket.at].is_granted()
    }

    /// Removes a held or waiting entry (Q2). Returns its unused notification, to be dropped outside of the mutex (Q6).
    #[must_use]
    pub fn remove(&mut self, ticket: Ticket) -> Option<Notify> {
        self.expire();
        let entry = self.tree.remove(ticket.at);
        self.waiting -= usize::from(entry.is_waiting());
        if !entry.is_lapsed() {
            // Waiting entries count every held entry, but only the earlier ones of the waiting entries (Q1).
            let after = if entry.is_waiting() { entry.sequence } else { 0 };
            self.unblock(entry.range, after, |mode| mode.conflicts_with(entry.mode));
        }
        entry.notify
    }

    /// Shared to exclusive; false if an overlapping entry is held, or waits with a lower sequence number.
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

    /// Call after a range was released in the front.
    pub fn front_released(&mut self, range: ByteRange, mode: Mode) {
        // Every overlapping entry is later (Q3): sequence 0.
        self.unblock(range, 0, |other| other.conflicts_with(mode));
    }

    /// Number of held entries that overlap `range`.
    pub fn count_held(&self, range: ByteRange) -> u32 {
        let mut count = 0;
        let mut at = self.tree.first(range);
        while at != NIL {
            count += u32::from(self.tree[at].is_granted());
            at = self.tree.next(at, range);
        }
        count
    }

    /// Call after a shared range in the front became exclusive. No overlapping entry is held in the queue.
    pub fn front_upgraded(&mut self, range: ByteRange) {
        self.block_shared(range);
    }

    /// Call after an exclusive range in the front became shared.
    pub fn front_downgraded(&mut self, range: ByteRange) {
        self.unblock(range, 0, |other| other == Mode::Shared);
    }

    /// Decrements the blockers of each overlapping entry that waits after `sequence` (0: of all) in a mode that `counted`
    /// accepts.
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

    /// Grants an entry without blockers: a thread holds it, a task gets an offer.
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

    /// Increments the blockers of each overlapping shared entry that waits: it did not count the range that has just become
    /// exclusive, and comes after it.
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

/// Waiters woken between two acquisitions of the mutex.
const WAKE_BATCH: usize = 8;

/// Ends a critical section and wakes the waiters that were granted in it (Q5).
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
