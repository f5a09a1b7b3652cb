//! Records the changes of an engine with a keeper to a file below its cache.
//!
//! After a death the keeper must know whether another process has changed the file (target.TG2), and which
//! length a change in flight can have given to it (replay.RP6). So each change of the file is recorded
//! before and after:
//!
//! ```text
//!   none in flight, time of the last one -- begin --> in flight, reach -- end --> none, its time
//! ```
//!
//! | killed                                 | the keeper finds       | and knows                         |
//! |----------------------------------------|------------------------|-----------------------------------|
//! | before `begin` has stored all          | none in flight         | the file is as after the last one |
//! | until `end` has stored that it is over | in flight, reach       | it may be done, in part or whole  |
//! | after                                  | none in flight, a time | the file is as at that time       |
//!
//! The *reach* is the furthest byte that a change by this engine may have made the file's last, since it
//! was truncated: a size is recorded only after the backend has the bytes, and bytes beyond the recorded
//! size are truncated if the process is killed in between.
//!
//! - **C1** A change begins before the call of the backend, and ends after its return.
//! - **C2** The time is read when no change is in flight: under the lock, so that none begins during that.
//!
//! Locks: `state`, under range guards; the backend's `fstat` under it.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};

use crate::io::backend::ChangeObserver;
use crate::recovery::Recovery;
use crate::recovery::layout::{ChangeWords, EntryUse, mtime_ns};
use crate::recovery::tables::unbroken;
use crate::sync::MutexExt;

/// The changes of one file that are in flight.
#[derive(Default)]
pub(crate) struct Changes {
    recovery: Weak<Recovery>,
    state: Mutex<InFlight>,
}

#[derive(Default)]
struct InFlight {
    /// The file's entry, if it has one.
    entry: Option<EntryUse>,
    in_flight: u64,
    reach: u64,
    is_reserved: bool,
    changed_ns: u64,
}

impl InFlight {
    fn words(&self) -> ChangeWords {
        ChangeWords::new(self.in_flight, self.is_reserved, self.changed_ns, self.reach)
    }

    /// C2. If `fstat` fails, the change stays in flight, for the keeper.
    fn end_change_of(&mut self, recovery: &Weak<Recovery>, fd: Option<BorrowedFd<'_>>) {
        let (Some(entry), Some(recovery)) = (self.entry, recovery.upgrade()) else { return };
        let mut words = self.words();
        if self.in_flight == 0 {
            match fd.map(rustix::fs::fstat) {
                Some(Ok(stat)) => self.changed_ns = mtime_ns(&stat),
                _ => words = ChangeWords::new(1, self.is_reserved, 0, self.reach),
            }
            words.changed_ns = self.changed_ns;
        }
        let _ = recovery.tables().try_end_change(entry, words, unbroken);
    }
}

impl Changes {
    pub(crate) fn new(recovery: &Arc<Recovery>) -> Changes {
        Changes { recovery: Arc::downgrade(recovery), state: Mutex::default() }
    }

    /// The file has an entry now; its changes are recorded there.
    pub(crate) fn enter(&self, entry: EntryUse, fd: BorrowedFd<'_>) {
        let mut state = self.state.acquire();
        state.entry = Some(entry);
        state.end_change_of(&self.recovery, Some(fd));
    }

    /// The file has no entry any more.
    pub(crate) fn remove_entry(&self) {
        self.state.acquire().entry = None;
    }
}

/// A thread that changes the file keeps the engine alive, and so its `recovery`.
impl ChangeObserver for Changes {
    fn begin(&self, reach: u64) {
        let mut state = self.state.acquire();
        state.in_flight += 1;
        state.reach = state.reach.max(reach);
        if let (Some(entry), Some(recovery)) = (state.entry, self.recovery.upgrade()) {
            let _ = recovery.tables().try_begin_change(entry, state.words(), unbroken);
        }
    }

    fn end(&self, fd: Option<BorrowedFd<'_>>) {
        let mut state = self.state.acquire();
        state.in_flight -= 1;
        state.end_change_of(&self.recovery, fd);
    }

    fn reserving(&self) {
        self.state.acquire().is_reserved = true;
    }

    fn truncated(&self, len: u64) {
        let mut state = self.state.acquire();
        (state.reach, state.is_reserved) = (len, false);
    }
}
