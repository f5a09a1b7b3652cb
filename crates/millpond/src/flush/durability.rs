//! What becomes of what a transfer was error: whether its bytes are durable, and whose error it was.

use crate::inode::CachedFile;
use crate::io::backend::descriptors;
use crate::writeback::failure::Failure;
use crate::writeback::generations::{DurableOp, EndedOp};

/// Whether bytes that the back end took are durable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Durability {
    /// A sync has to cover them.
    Unsynced,
    Durable,
    /// It depends on others (generations.G3). Until then a sync has to cover them.
    Pending(EndedOp),
    /// They should be, and may be lost.
    Lost(Failure),
}

impl From<std::result::Result<(), Failure>> for Durability {
    fn from(verdict: std::result::Result<(), Failure>) -> Durability {
        verdict.map_or_else(Durability::Lost, |()| Durability::Durable)
    }
}

/// A durable transfer has ended, and was `error` of an error, or not. Waits for others that are under way
/// (generations.G3). `repeat` does the same, not durable, and says whether the back end took anything of it.
pub(crate) fn conclude(
    file: &CachedFile,
    pass: DurableOp,
    error: Option<Failure>,
    repeat: impl FnOnce() -> bool,
) -> Durability {
    match try_conclude(file, pass, error, repeat) {
        Durability::Pending(ended) => file.writeback.generations.wait(ended).into(),
        known => known,
    }
}

/// [`conclude`], and waits for nobody.
pub(crate) fn try_conclude(
    file: &CachedFile,
    pass: DurableOp,
    error: Option<Failure>,
    repeat: impl FnOnce() -> bool,
) -> Durability {
    let generations = &file.writeback.generations;
    let is_refusal =
        |failure: &Failure| !reports_foreign_errors(file) && failure.is_refusal(repeat);
    match error {
        Some(failure) if !is_refusal(&failure) => {
            // generations.G8
            file.backing.drop_kernel_copy();
            generations.fail(pass, failure);
            Durability::Lost(failure)
        }
        _ => {
            let ended = generations.end_durable(pass);
            generations.verdict(ended).map_or(Durability::Pending(ended), Durability::from)
        }
    }
}

fn reports_foreign_errors(file: &CachedFile) -> bool {
    file.backing.descriptor(true).is_some_and(descriptors::reports_foreign_errors)
}

/// A write that is not durable has failed: counts what it may have been error of other bytes (generations.G2).
pub(crate) fn report_foreign_error(file: &CachedFile, failure: Failure) {
    use libc::{EDQUOT, EFBIG, EIO, ENOSPC};
    if [EDQUOT, EFBIG, EIO, ENOSPC].contains(&failure.errno) && reports_foreign_errors(file) {
        file.writeback.generations.fail_nondurable(failure);
    }
}
