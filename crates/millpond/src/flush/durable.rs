//! What becomes of what a transfer was told: whether its bytes are durable, and whose error it was.

use crate::inode::CachedFile;
use crate::io::backend::descriptors;
use crate::writeback::failure::Failure;
use crate::writeback::generations::{Pass, Ticket};

/// Whether bytes that the back end took are durable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Durability {
    /// A sync has to cover them.
    Owed,
    Durable,
    /// It depends on others (generations.G3). Until then a sync has to cover them.
    Pending(Ticket),
    /// They should be, and may be lost.
    Lost(Failure),
}

impl From<std::result::Result<(), Failure>> for Durability {
    fn from(verdict: std::result::Result<(), Failure>) -> Durability {
        verdict.map_or_else(Durability::Lost, |()| Durability::Durable)
    }
}

/// A durable transfer has ended, and was `told` of an error, or not. Waits for others that are under way
/// (generations.G3). `repeat` does the same, not durable, and says whether the back end took anything of it.
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
            // generations.G8
            file.backing.drop_kernel_copy();
            generations.fail(pass, failure);
            Durability::Lost(failure)
        }
        _ => {
            let ticket = generations.leave(pass);
            generations.verdict(ticket).map_or(Durability::Pending(ticket), Durability::from)
        }
    }
}

fn tells_of_others(file: &CachedFile) -> bool {
    file.backing.descriptor(true).is_some_and(descriptors::tells_of_others)
}

/// A write that is not durable has failed: counts what it may have been told of other bytes (generations.G2).
pub(crate) fn tell_of_others(file: &CachedFile, failure: Failure) {
    use libc::{EDQUOT, EFBIG, EIO, ENOSPC};
    if [EDQUOT, EFBIG, EIO, ENOSPC].contains(&failure.errno) && tells_of_others(file) {
        file.writeback.generations.told(failure);
    }
}
