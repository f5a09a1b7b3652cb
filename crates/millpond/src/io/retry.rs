//! Transfers with retries until they are complete.
//!
//! A backend tries each transfer once and may move fewer bytes than requested. This module
//! continues short transfers and repeats interrupted ones ([`TransientRetries`]). So the cache sees
//! one of these results: all bytes; fewer bytes because the file ended (reads); or an error with
//! the bytes that were moved before it.

use std::io;

use crate::io::backend::BackingFile;
use crate::io::transfer::{Direction, Transfer, TransientRetries, is_end, is_transient};

/// Performs all transfers of `batch`, concurrently if the backend can do that, and returns when
/// they have ended.
pub(crate) fn run(file: &dyn BackingFile, batch: &mut [Transfer<'_>]) {
    file.try_all(batch);
    for transfer in batch {
        if transfer.error.is_some() || transfer.is_short() {
            finish(file, transfer);
        }
    }
}

/// Tries a transfer once. Returns the number of bytes moved.
pub(crate) fn try_one(file: &dyn BackingFile, transfer: Transfer<'_>) -> io::Result<usize> {
    let mut batch = [transfer];
    file.try_all(&mut batch);
    let [transfer] = batch;
    transfer.error.map_or(Ok(transfer.moved as usize), Err)
}

/// Continues after a first attempt that did not move all bytes.
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

/// Direct reads cannot continue from within a block; they stop there only at the end of the file.
pub(crate) fn block_bytes(file: &dyn BackingFile, transfer: &Transfer<'_>) -> u64 {
    match transfer.direction {
        Direction::Read if transfer.direct => u64::from(file.alignment(true).offset_bytes),
        Direction::Read => u64::from(file.alignment(false).offset_bytes),
        Direction::Write => 1,
    }
}
