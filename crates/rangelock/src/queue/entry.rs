//! An entry of the queue: one request, and its links in the tree.

use std::time::Instant;

use crate::range::{ByteRange, Mode};
use crate::wait::Notify;

/// State of an entry without blockers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrantState {
    /// A thread's entry, or held.
    Taken,
    /// A task's entry: the task has to take the grant by polling.
    Pending,
    /// Granted to a task at this time.
    Offered(Instant),
    Lapsed,
}

/// One request.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) links: Links,
    pub(super) range: ByteRange,
    pub(super) sequence: u64,
    /// The entry waits while this is not 0 (queue.Q1).
    pub(super) blockers: u32,
    pub(super) grant: GrantState,
    pub(super) mode: Mode,
    /// Moved here from the front when the table grew; its guard does not have its ticket.
    pub(super) adopted: bool,
    /// The thread or task to wake; set only while waiting.
    pub(super) notify: Option<Notify>,
}

impl Entry {
    pub(super) fn is_waiting(&self) -> bool {
        self.blockers > 0
    }

    pub(super) fn is_lapsed(&self) -> bool {
        self.grant == GrantState::Lapsed
    }

    /// Whether conflicting requests have to wait for it (held or offered).
    pub(super) fn is_granted(&self) -> bool {
        !self.is_waiting() && !self.is_lapsed()
    }
}

/// The null link.
pub(super) const NIL: u32 = u32::MAX;

/// The tree links of an entry.
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
