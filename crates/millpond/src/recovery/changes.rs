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

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use crate::io::backend::descriptors::Descriptors;
use crate::io::backend::{BackingFile, OpenedFor, Seek};
use crate::io::transfer::{BackgroundRead, Direction, Transfer};
use crate::recovery::Recovery;
use crate::recovery::layout::{ChangeWords, EntryUse, mtime_ns};
use crate::recovery::tables::unbroken;
use crate::sync::MutexExt;

/// The changes of one file that are in flight.
#[derive(Default)]
pub(crate) struct Changes {
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
    fn end_change_of(&mut self, recovery: &Recovery, fd: Option<BorrowedFd<'_>>) {
        let Some(entry) = self.entry else { return };
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
    /// Records the start of a change that makes the file no longer than `reach`.
    pub(crate) fn begin(&self, recovery: &Recovery, reach: u64) {
        let mut state = self.state.acquire();
        state.in_flight += 1;
        state.reach = state.reach.max(reach);
        if let Some(entry) = state.entry {
            let _ = recovery.tables().try_begin_change(entry, state.words(), unbroken);
        }
    }

    /// Records the end of a change, or its failure.
    pub(crate) fn end(&self, recovery: &Recovery, fd: Option<BorrowedFd<'_>>) {
        let mut state = self.state.acquire();
        state.in_flight -= 1;
        state.end_change_of(recovery, fd);
    }

    /// Records that space is about to be reserved beyond the end.
    fn reserving(&self) {
        self.state.acquire().is_reserved = true;
    }

    /// Records the file's length, under a guard to its end, with no space reserved beyond.
    pub(crate) fn truncated(&self, len: u64) {
        let mut state = self.state.acquire();
        (state.reach, state.is_reserved) = (len, false);
    }

    /// The file has an entry now; its changes are recorded there.
    pub(crate) fn enter(&self, recovery: &Recovery, entry: EntryUse, fd: BorrowedFd<'_>) {
        let mut state = self.state.acquire();
        state.entry = Some(entry);
        state.end_change_of(recovery, Some(fd));
    }

    /// The file has no entry any more.
    pub(crate) fn remove_entry(&self) {
        self.state.acquire().entry = None;
    }
}

/// A backing file with descriptors, whose changes are recorded.
pub(crate) struct ToldFile {
    inner: Arc<dyn BackingFile>,
    changes: Arc<Changes>,
    recovery: Weak<Recovery>,
}

impl ToldFile {
    pub(crate) fn new(
        inner: Arc<dyn BackingFile>,
        changes: &Arc<Changes>,
        recovery: &Arc<Recovery>,
    ) -> ToldFile {
        ToldFile { inner, changes: Arc::clone(changes), recovery: Arc::downgrade(recovery) }
    }

    fn change<R>(&self, reach: u64, act: impl FnOnce() -> R) -> R {
        // A thread that changes the file keeps it alive, and so the engine.
        let Some(recovery) = self.recovery.upgrade() else { return act() };
        // C1.
        self.changes.begin(&recovery, reach);
        let outcome = act();
        self.changes.end(&recovery, self.inner.descriptor(true));
        outcome
    }
}

impl BackingFile for ToldFile {
    fn descriptors(&self) -> Option<&Descriptors> {
        self.inner.descriptors()
    }

    fn try_all(&self, batch: &mut [Transfer<'_>]) {
        let writes = batch.iter().filter(|transfer| transfer.direction == Direction::Write);
        match writes.map(|transfer| transfer.offset + transfer.segments.left()).max() {
            Some(reach) => self.change(reach, || self.inner.try_all(batch)),
            None => self.inner.try_all(batch),
        }
    }

    fn start(self: Arc<Self>, read: BackgroundRead) -> Result<(), BackgroundRead> {
        Arc::clone(&self.inner).start(read)
    }

    fn transfer_bytes(&self) -> u64 {
        self.inner.transfer_bytes()
    }

    fn attach(&self, fd: OwnedFd, opened: OpenedFor) -> io::Result<Option<OwnedFd>> {
        self.inner.attach(fd, opened)
    }

    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(len, || {
            let set = self.inner.set_len(len);
            if set.is_ok() {
                self.changes.truncated(len);
            }
            set
        })
    }

    fn zero(&self, offset: u64, len: u64, keep_space: bool) -> io::Result<()> {
        self.change(0, || self.inner.zero(offset, len, keep_space))
    }

    fn allocate(&self, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        if keep_size {
            self.changes.reserving();
        }
        let reach = if keep_size { 0 } else { offset + len };
        self.change(reach, || self.inner.allocate(offset, len, keep_size))
    }

    fn seek(&self, offset: u64, to: Seek) -> io::Result<Option<u64>> {
        self.inner.seek(offset, to)
    }

    fn sync(&self, data_only: bool) -> io::Result<()> {
        self.inner.sync(data_only)
    }

    fn drop_kernel_copy(&self) {
        // It may change the file's times.
        self.change(0, || self.inner.drop_kernel_copy());
    }

    fn free_blocks_beyond(&self, len: u64, leased: bool) {
        self.change(len, || self.inner.free_blocks_beyond(len, leased));
        self.changes.truncated(len);
    }
}
