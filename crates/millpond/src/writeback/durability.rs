//! The outcome of a transfer: whether its bytes are durable, and which bytes an error is about.

use crate::inode::{Blocking, CachedFile};
use crate::io::backend::descriptors;
use crate::writeback::state::failure::WritebackFailure;
use crate::writeback::state::generations::{DurableOp, EndedOp, FailureEpoch};

/// Whether bytes that the backend accepted are durable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Durability {
    /// A sync has to cover them.
    Unsynced,
    Durable,
    /// The outcome depends on other operations (generations.G3). Until it is known, a sync has to
    /// cover them.
    Pending(EndedOp),
    /// The transfer promised durability, and the bytes may be lost.
    Lost(WritebackFailure),
}

impl From<std::result::Result<(), WritebackFailure>> for Durability {
    fn from(verdict: std::result::Result<(), WritebackFailure>) -> Durability {
        verdict.map_or_else(Durability::Lost, |()| Durability::Durable)
    }
}

/// A durable transfer in flight.
#[must_use]
#[derive(Debug)]
pub(crate) struct DurableTransfer {
    durable_op: DurableOp,
    /// A sync has to follow ([`BackingFile::is_beyond_durable_length`]).
    ///
    /// [`BackingFile::is_beyond_durable_length`]: crate::io::backend::BackingFile::is_beyond_durable_length
    needs_sync: bool,
}

impl DurableTransfer {
    /// Begins a transfer of bytes before `end`.
    pub(crate) fn begin(file: &CachedFile, end: u64) -> DurableTransfer {
        let needs_sync = file.backing.is_beyond_durable_length(end);
        DurableTransfer { durable_op: file.writeback.generations.begin_durable(), needs_sync }
    }

    pub(crate) fn epoch(&self) -> FailureEpoch {
        self.durable_op.epoch()
    }
}

/// Ends a durable transfer that returned `error` or succeeded; the backend accepted bytes before
/// `end`. `blocking`: whether to wait for other durable operations in flight (generations.G3).
/// `repeat` makes the same transfer, not durable, and returns whether the backend accepted any of it.
pub(crate) fn conclude(
    file: &CachedFile,
    transfer: DurableTransfer,
    end: u64,
    error: Option<WritebackFailure>,
    blocking: Blocking,
    repeat: impl FnOnce() -> bool,
) -> Durability {
    let DurableTransfer { durable_op, needs_sync } = transfer;
    let generations = &file.writeback.generations;
    // A refused transfer has not reached its end.
    let is_whole = error.is_none();
    let is_refusal =
        |failure: &WritebackFailure| !reports_foreign_errors(file) && failure.is_refusal(repeat);
    let failure = error.filter(|failure| !is_refusal(failure)).or_else(|| {
        let synced = if needs_sync { file.backing.sync(true) } else { Ok(()) };
        synced.err().map(|error| WritebackFailure::new(0, 0, &error))
    });
    match failure {
        Some(failure) => {
            // generations.G8
            file.backing.drop_kernel_copy();
            generations.fail(durable_op, failure);
            Durability::Lost(failure)
        }
        None => {
            let ended = generations.end_durable(durable_op);
            let verdict = match blocking {
                Blocking::Wait => Some(generations.wait(ended)),
                Blocking::Try => generations.verdict(ended),
            };
            let durability = verdict.map_or(Durability::Pending(ended), Durability::from);
            if is_whole && matches!(durability, Durability::Durable) {
                file.backing.note_durable_length(end);
            }
            durability
        }
    }
}

fn reports_foreign_errors(file: &CachedFile) -> bool {
    file.backing.descriptor(true).is_some_and(descriptors::reports_foreign_errors)
}

/// Records the error of a write that is not durable, if the error may be about other bytes
/// (generations.G2).
pub(crate) fn report_foreign_error(file: &CachedFile, failure: WritebackFailure) {
    use libc::{EDQUOT, EFBIG, EIO, ENOSPC};
    if [EDQUOT, EFBIG, EIO, ENOSPC].contains(&failure.errno) && reports_foreign_errors(file) {
        file.writeback.generations.fail_nondurable(failure);
    }
}
