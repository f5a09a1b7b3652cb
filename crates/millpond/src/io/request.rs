//! Transfers brought to their end.
//!
//! A back end tries each transfer once and may move less than was asked for. Here short transfers
//! are continued and interrupted ones repeated ([`TransientRetries`]), so that the cache sees one of: all bytes, fewer
//! because the file ended (reads), or an error with what was moved before it.

use std::io;

use crate::io::backend::BackingFile;
use crate::io::transfer::{Direction, Transfer, TransientRetries, is_end, is_transient};

/// Carries out all transfers of `batch`, all at once where the back end can, and returns when
/// they have ended.
pub(crate) fn run(file: &dyn BackingFile, batch: &mut [Transfer<'_>]) {
    file.try_all(batch);
    for transfer in batch {
        if transfer.error.is_some() || transfer.is_short() {
            finish(file, transfer);
        }
    }
}

/// Tries a transfer once; the bytes moved.
pub(crate) fn try_one(file: &dyn BackingFile, transfer: Transfer<'_>) -> io::Result<usize> {
    let mut batch = [transfer];
    file.try_all(&mut batch);
    let [transfer] = batch;
    transfer.error.map_or(Ok(transfer.moved as usize), Err)
}

/// Continues after a first attempt that moved less than all.
#[cold]
fn finish(file: &dyn BackingFile, transfer: &mut Transfer<'_>) {
    let total = transfer.segments.left();
    let block_bytes = block_bytes(file, transfer);
    let mut ended = transfer.error.is_none() && is_end(transfer.moved, block_bytes);
    let mut retries = TransientRetries::default();
    loop {
        match transfer.error.take() {
            Some(error) if is_transient(&error) && retries.may_try() => {}
            Some(error) => {
                transfer.error = Some(error);
                return;
            }
            None if ended || !transfer.is_short() => break,
            None => {}
        }
        let mut attempt = [transfer.rest()];
        file.try_all(&mut attempt);
        let [attempt] = attempt;
        ended = attempt.error.is_none() && is_end(attempt.moved, block_bytes);
        if attempt.moved > 0 {
            retries.reset();
        }
        transfer.moved += attempt.moved;
        transfer.error = attempt.error;
    }
    if transfer.direction == Direction::Write && transfer.moved < total {
        transfer.error = Some(io::ErrorKind::WriteZero.into());
    }
}

/// Direct reads can't go on from within a block; they stop there at the end of the file only.
pub(crate) fn block_bytes(file: &dyn BackingFile, transfer: &Transfer<'_>) -> u64 {
    match transfer.direction {
        Direction::Read if transfer.direct => u64::from(file.alignment(true).offset_bytes),
        Direction::Read => u64::from(file.alignment(false).offset_bytes),
        Direction::Write => 1,
    }
}
