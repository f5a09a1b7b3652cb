//! One request of a queue, and its place in the tree.

use std::time::Instant;

use crate::range::{ByteRange, Mode};
use crate::wait::Notify;

/// What an entry without blockers is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrantState {
    /// Of a thread; or held.
    Taken,
    /// Of a task that has to take its grant by polling.
    Pending,
    /// Granted to a task, at that time.
    Offered(Instant),
    Lapsed,
}

/// One request.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) links: Links,
    pub(super) range: ByteRange,
    pub(super) sequence: u64,
    /// Waiting while not 0 (queue.Q1).
    pub(super) blockers: u32,
    pub(super) grant: GrantState,
    pub(super) mode: Mode,
    /// Came from the front when that was rebuilt; its guard does not know its ticket.
    pub(super) adopted: bool,
    /// What to wake; only while waiting.
    pub(super) notify: Option<Notify>,
}

impl Entry {
    pub(super) fn is_waiting(&self) -> bool {
        self.blockers > 0
    }

    pub(super) fn is_lapsed(&self) -> bool {
        self.grant == GrantState::Lapsed
    }

    /// Whether others have to wait for it to end (held, offered).
    pub(super) fn is_granted(&self) -> bool {
        !self.is_waiting() && !self.is_lapsed()
    }
}

/// No node.
pub(super) const NIL: u32 = u32::MAX;

/// The tree's part of an entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub(super) max_end: u64,
    pub(super) left: u32,
    pub(super) right: u32,
    pub(super) parent: u32,
    pub(super) priority: u32,
}

impl Links {
    pub(super) const fn new() -> Links {
        Links { max_end: 0, left: NIL, right: NIL, parent: NIL, priority: 0 }
    }
}
