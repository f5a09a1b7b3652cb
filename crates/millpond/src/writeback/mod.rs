//! Write-back: how what is DIRTY reaches the back end, and what a sync promises.
//!
//! ```text
//!   write --> DIRTY --- claim ---> WRITEBACK --- acknowledged ---> UNSTABLE --- sync ---> clean
//!               ^                      |                              |
//!               +------- failed -------+------- the sync failed ------+
//! ```
//!
//! Whoever writes back, the flusher, a sync, a writer over the dirty limit, takes pages out of the
//! file's set ([`dirty`]), claims each by its word, and hands contiguous ones to the back end as one
//! vectored transfer, several at once ([`flush`]). It takes no range guard. What the back end took is
//! in one of three [`generations`] until a [`sync`] has covered it.
//!
//! - **B1** A page that is EMPTY, as far as it lies below the size, is in the back end: a page
//!   leaves the cache only when it is clean (W4), and a write that leaves a gap behind the old end
//!   has the back end extend the file first.
//! - **B2**, **B3**: [`dirty`]. **G1** to **G7**: [`generations`].
//! - **B4** Nobody waits for a page while it has claimed pages that are not submitted.
//! - **B5** The size is read after the pages are claimed. Who cuts the file hides the pages first,
//!   and waits for write-backs then, so the back end's file is never longer than the size.
//!
//! *Tail.* Direct I/O ends with the last whole block below the size; what is left follows as one
//! exact-length transfer, which the back end takes through the kernel's cache.
//!
//! *Errors.* A transfer that failed is tried page by page; pages that fail are DIRTY again, and
//! the first error is latched until a sync succeeds. After a failed sync of the back end, all that
//! was written since the last good one is DIRTY again where it is cached; where it is not, syncs
//! say so for as long as the file is open ([`Error::Lost`]).
//!
//! Locks: `syncing` -> range guards (shared) -> `state` -> `generations`; who has a range guard does
//! not wait for `syncing`; under `generations` only page words and the table are touched.
//! The flusher's own lock is a leaf.

pub(crate) mod dirty;
pub(crate) mod generations;
pub(crate) mod stream;
pub(crate) mod untold;

#[cfg(all(test, loom))]
mod loom_tests;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::cache::Cache;
use crate::cache::heap::HeapCharge;
use crate::cache::ledger::Share;
use crate::cache::table::PageIndex;
use crate::error::{Error, Op, Result};
use crate::flush::{BATCH_BYTES, Patience, flush};
use crate::inode::CachedFile;
use crate::inode::registry::FileId;
use crate::inode::space;
use crate::io::backend::descriptors;
use crate::writeback::dirty::Dirty;
use crate::writeback::generations::Generations;
use crate::writeback::stream::Stream;

pub(crate) use crate::flush::flusher::{Flusher, Limits};
pub(crate) use crate::flush::sync::{sync, sync_written};
pub(crate) use crate::flush::throttle::{VIEW_RELIEF_MAX, WRITE_RELIEF_MAX, relieve, throttle};
pub(crate) use crate::flush::unpin;
pub(crate) use crate::writeback::generations::{Copy, Epoch, Pass, Ticket};
pub(crate) use crate::writeback::untold::forget_parent;

/// The last page that a file can have, and so "to the end".
pub(crate) const LAST_PAGE: PageIndex = i64::MAX as u64 >> 12;

const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);

/// What a file owes to its back end.
#[derive(Default)]
pub(crate) struct Writeback {
    pub(crate) state: Mutex<State>,
    pub(crate) flush_ended: Condvar,
    pub(crate) generations: Generations,
    pub(crate) syncing: Mutex<()>,
    /// A sync has pages written just now. A hint, for who would write others.
    pub(crate) is_written_for_sync: AtomicBool,
    pub(crate) share: Arc<Share>,
    /// What the sets of the state take, and those of the generations.
    pub(crate) dirty_heap: HeapCharge,
    pub(crate) owed_heap: HeapCharge,
    /// Whether a page may be DIRTY or under write-back. Set under the guard of a writer.
    pub(crate) begun: AtomicBool,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) dirty: Dirty,
    pub(crate) stream: Stream,
    pub(crate) failure: Option<Failure>,
    pub(crate) retry: Option<(Instant, Duration)>,
    pub(crate) listed: bool,
}

/// An error that outlives the call that met it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) errno: i32,
}

impl Failure {
    pub(crate) const UNKNOWN: Failure = Failure { offset: 0, len: 0, errno: libc::EIO };

    pub(crate) fn new(offset: u64, len: u64, error: &io::Error) -> Failure {
        Failure { offset, len, errno: error.raw_os_error().unwrap_or(libc::EIO) }
    }

    pub(crate) fn source(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }

    /// Whether a durable transfer that was told of this was refused, and the back end has lost nothing: a
    /// write that is refused is not followed by a sync. Some errors are said by both, as where space is
    /// found missing only when it is written back; `repeat` tells them apart: what was taken once is
    /// taken again.
    pub(crate) fn is_refusal(&self, repeat: impl FnOnce() -> bool) -> bool {
        use libc::{EBADF, EDQUOT, EFAULT, EFBIG, EINVAL, ENOSPC, EOPNOTSUPP, EPERM, ETXTBSY};
        match self.errno {
            EBADF | EFAULT | EFBIG | EINVAL | EOPNOTSUPP | EPERM | ETXTBSY => true,
            ENOSPC | EDQUOT => !repeat(),
            _ => false,
        }
    }

    pub(crate) fn error(&self, op: Op) -> Error {
        Error::io(op, self.offset, self.len, self.source())
    }
}

impl Writeback {
    /// The inode is opened anew: takes over an error that nobody was told of.
    pub(crate) fn inherit(&self, id: FileId, fd: BorrowedFd<'_>) {
        if let Some(failure) = untold::take(id, fd) {
            self.generations.inherit(failure);
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// The file is no more.
    pub(crate) fn uncharge(&self, cache: &Cache) {
        self.dirty_heap.set(cache, 0);
        self.owed_heap.set(cache, 0);
    }

    /// Whether a page may be DIRTY or under write-back. Under an exclusive guard, what is said of
    /// its range stays true for as long as no sync fails.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Acquire)
    }
}

impl State {
    /// Has the flusher wait before it tries again.
    pub(crate) fn back_off(&mut self) {
        let pause = self.retry.map_or(RETRY_MIN, |(_, pause)| (pause * 2).min(RETRY_MAX));
        self.retry = Some((Instant::now() + pause, pause));
    }
}

/// Counts what the sets take. Without their locks.
pub(crate) fn count_heap(file: &CachedFile) {
    let writeback = &file.writeback;
    let dirty = writeback.state().dirty.heap_bytes();
    writeback.dirty_heap.set(file.cache(), dirty);
    let owed = writeback.generations.lock().heap_bytes();
    writeback.owed_heap.set(file.cache(), owed);
}

/// Notes that the back end took the pages from `first` to `last` of a transfer begun in `epoch` (G1).
pub(crate) fn took(file: &CachedFile, first: PageIndex, last: PageIndex, copy: Copy, epoch: Epoch) {
    let mut generations = file.writeback.generations.lock();
    generations.took(first..=last, copy, epoch);
    let heap_bytes = generations.heap_bytes();
    drop(generations);
    file.writeback.owed_heap.set(file.cache(), heap_bytes);
}

/// Notes pages whose words the caller has made DIRTY, under its guard (B2).
pub(crate) fn dirtied(file: &CachedFile, first: PageIndex, last: PageIndex) {
    let writeback = &file.writeback;
    writeback.begun.store(true, Relaxed);
    let mut state = writeback.state();
    state.dirty.insert(first..=last);
    let (least, batch) = stream_pages(file);
    let due = state.stream.advance(first, last, least, batch);
    let heap_bytes = state.dirty.heap_bytes();
    drop(state);
    writeback.dirty_heap.set(file.cache(), heap_bytes);
    if due {
        file.shared.flusher.tell();
    }
    tell_flusher(file);
}

/// Pages of the file are DIRTY, and in its set.
pub(crate) fn tell_flusher(file: &CachedFile) {
    let flusher = &file.shared.flusher;
    if !std::mem::replace(&mut file.writeback.state().listed, true) {
        flusher.add(file);
    }
    flusher.notice(file.cache().ledger.dirty());
}

/// How long a stream must be to be written back the first time, and then.
pub(crate) fn stream_pages(file: &CachedFile) -> (u64, u64) {
    let shift = file.core().page_shift;
    let least = file.shared.flusher.limits.dirty_bytes_max / 8;
    (least >> shift, BATCH_BYTES >> shift)
}

/// Notes that the pages from `first` to `last`, which the caller has found EMPTY and not shown yet, are
/// read from the back end (G5).
#[inline]
pub(crate) fn read_back(file: &CachedFile, first: PageIndex, last: PageIndex) {
    file.writeback.generations.read_back(first, last);
}

fn tells_of_others(file: &CachedFile) -> bool {
    file.backing.descriptor(false).is_some_and(descriptors::tells_of_others)
}

/// A write that is not durable has failed: counts what it may have been told of other bytes (G2).
pub(crate) fn tell_of_others(file: &CachedFile, failure: Failure) {
    use libc::{EDQUOT, EFBIG, EIO, ENOSPC};
    if [EDQUOT, EFBIG, EIO, ENOSPC].contains(&failure.errno) && tells_of_others(file) {
        file.writeback.generations.told(failure);
    }
}

/// Whether bytes that the back end took are durable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Durability {
    /// A sync has to cover them.
    Owed,
    Durable,
    /// It depends on others (G3). Until then a sync has to cover them.
    Pending(Ticket),
    /// They should be, and may be lost.
    Lost(Failure),
}

/// A durable transfer has ended, and was `told` of an error, or not. Waits for others that are under way
/// (G3). `repeat` does the same, not durable, and says whether the back end took anything of it.
pub(crate) fn conclude(
    file: &CachedFile,
    pass: Pass,
    told: Option<Failure>,
    repeat: impl FnOnce() -> bool,
) -> Durability {
    match conclude_apart(file, pass, told, repeat) {
        Durability::Pending(ticket) => file.writeback.generations.wait(ticket).into(),
        known => known,
    }
}

/// [`conclude`], and waits for nobody.
pub(crate) fn conclude_apart(
    file: &CachedFile,
    pass: Pass,
    told: Option<Failure>,
    repeat: impl FnOnce() -> bool,
) -> Durability {
    let generations = &file.writeback.generations;
    let is_refusal = |failure: &Failure| !tells_of_others(file) && failure.is_refusal(repeat);
    match told {
        Some(failure) if !is_refusal(&failure) => {
            generations.fail(pass, failure);
            Durability::Lost(failure)
        }
        _ => {
            let ticket = generations.leave(pass);
            generations.verdict(ticket).map_or(Durability::Pending(ticket), Durability::from)
        }
    }
}

impl From<std::result::Result<(), Failure>> for Durability {
    fn from(verdict: std::result::Result<(), Failure>) -> Durability {
        verdict.map_or_else(Durability::Lost, |()| Durability::Durable)
    }
}

/// Forgets the pages from `first` to `last`, whose bytes are gone from the file.
pub(crate) fn forget(file: &CachedFile, first: PageIndex, last: PageIndex) {
    if first <= last {
        file.writeback.state().dirty.forget(first, last);
        file.writeback.generations.forget(first, last);
    }
}

/// Forgets errors that are told until the file is closed, as it is; but for one that nobody was told of,
/// which is for whoever opens it next. (The flusher, or a writer over the dirty limit, may keep it from
/// being dropped for a moment, in which it is opened again.)
pub(crate) fn forget_failures(file: &CachedFile) {
    file.writeback.state().failure = None;
    if let Some(failure) = file.writeback.generations.forget_failures() {
        untold::keep(file.id, &*file.backing, failure);
    }
}

/// Writes back what is DIRTY now of the pages from `first` to `last`, and waits until the back end
/// has acknowledged it. May be called under any guard, with no page of the range HIDDEN by the
/// caller.
pub(crate) fn write_back(
    file: &CachedFile,
    first: PageIndex,
    last: PageIndex,
    op: Op,
) -> Result<()> {
    match flush(file, first, last, Patience::Wait, false).failure {
        Some(failure) => Err(failure.error(op)),
        None => Ok(()),
    }
}

/// Waits until none of the pages from `first` to `last`, which the caller has HIDDEN, is under
/// write-back.
pub(crate) fn await_ends(file: &CachedFile, first: PageIndex, last: PageIndex) {
    if !file.writeback.has_begun() {
        return;
    }
    file.core().for_each_page(file.cache(), first, last, &mut |_, _, word| {
        loop {
            let seen = word.load();
            if !seen.is_under_writeback() {
                break;
            }
            if let Some(armed) = word.arm(seen) {
                word.sleep(armed);
            }
        }
    });
}

/// Has the suspect pages from `first` to `last` be DIRTY, before bytes of theirs are read past the cache,
/// or overwritten in part (G6). Caller: a guard over them.
pub(crate) fn redirty_suspects(file: &CachedFile, first: PageIndex, last: PageIndex) {
    crate::flush::sync::redirty_guarded(file, first, last);
}

/// What syncs of the file would complain of, as it is closed.
pub(crate) fn close(file: &CachedFile) -> Result<()> {
    let written = write_back(file, 0, LAST_PAGE, Op::Close);
    let generations = &file.writeback.generations;
    let outcome = match (generations.lost(), written, file.writeback.state().failure) {
        (Some(lost), ..) => Err(Error::Lost { source: lost.source() }),
        (None, Err(error), _) => Err(error),
        (None, Ok(()), Some(failure)) => Err(failure.error(Op::Close)),
        (None, Ok(()), None) => Ok(()),
    };
    if outcome.is_err() {
        generations.tell();
    }
    outcome
}

impl CachedFile {
    /// Whether a page is DIRTY or may be under write-back.
    pub(crate) fn owes(&self) -> bool {
        !self.writeback.state().dirty.is_clean()
    }

    /// The last handle is gone: writes back what is DIRTY, and leaves it to the flusher if that
    /// fails.
    pub(crate) fn leave(self: Arc<Self>) {
        if !self.writeback.has_begun() {
            // A write that was to wait may have gone around the cache after all.
            if self.is_kept()
                || space::is_reserved(&self)
                || self.writeback.generations.has_failed()
            {
                self.rest();
            }
            return;
        }
        if write_back(&self, 0, LAST_PAGE, Op::Close).is_err() || self.owes() {
            let shared = Arc::clone(&self.shared);
            shared.flusher.adopt(self);
        } else {
            self.rest();
        }
    }
}
