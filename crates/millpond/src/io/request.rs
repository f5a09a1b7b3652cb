//! Transfers between memory and a backing file, brought to their end.
//!
//! A back end tries each transfer once and may move less than was asked for. Here short transfers
//! are continued and interrupted ones repeated, so that the cache sees one of: all bytes, fewer
//! because the file ended (reads), or an error with what was moved before it.

use std::io;

use crate::io::backend::BackingFile;
use crate::io::segment::{self, Segment};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// A vectored read or write of contiguous bytes of a file.
pub(crate) struct Transfer<'a> {
    pub(crate) direction: Direction,
    pub(crate) offset: u64,
    pub(crate) segments: &'a [Segment<'a>],
    /// Of a write: ends when the bytes, and what is needed to find them, are on the device.
    pub(crate) durable: bool,
    /// Bytes moved so far.
    pub(crate) moved: u64,
    pub(crate) error: Option<io::Error>,
}

impl<'a> Transfer<'a> {
    pub(crate) fn new(direction: Direction, offset: u64, segments: &'a [Segment<'a>]) -> Self {
        Transfer { direction, offset, segments, durable: false, moved: 0, error: None }
    }

    /// Notes the outcome of an attempt to move the first bytes.
    pub(crate) fn set(&mut self, outcome: io::Result<usize>) {
        match outcome {
            Ok(moved) => self.moved = moved as u64,
            Err(error) => self.error = Some(error),
        }
    }
}

/// Carries out all transfers of `batch`, all at once where the back end can, and returns when
/// they have ended.
pub(crate) fn run(file: &dyn BackingFile, batch: &mut [Transfer<'_>]) {
    file.try_all(batch);
    for transfer in batch {
        let total = segment::total_len(transfer.segments).expect("lengths were checked");
        if transfer.error.is_some() || transfer.moved < total {
            finish(file, transfer, total);
        }
    }
}

/// Continues after a first attempt that moved less than all.
#[cold]
fn finish(file: &dyn BackingFile, transfer: &mut Transfer<'_>, total: u64) {
    // Direct reads can't go on from within a block; they stop there at the end of the file only.
    let block_bytes = match transfer.direction {
        Direction::Read => u64::from(file.read_alignment().offset_bytes),
        Direction::Write => 1,
    };
    let is_end = |moved: u64| moved == 0 || !moved.is_multiple_of(block_bytes);
    let mut ended = transfer.error.is_none() && is_end(transfer.moved);
    loop {
        match transfer.error.take() {
            Some(error) if is_transient(&error) => {}
            Some(error) => {
                transfer.error = Some(error);
                return;
            }
            None if ended || transfer.moved == total => break,
            None => {}
        }
        let rest: Vec<Segment<'_>> =
            segment::pieces(transfer.segments, transfer.moved, total - transfer.moved).collect();
        let offset = transfer.offset + transfer.moved;
        let mut attempt = [Transfer::new(transfer.direction, offset, &rest)];
        attempt[0].durable = transfer.durable;
        file.try_all(&mut attempt);
        let [attempt] = attempt;
        ended = attempt.error.is_none() && is_end(attempt.moved);
        transfer.moved += attempt.moved;
        transfer.error = attempt.error;
    }
    if transfer.direction == Direction::Write && transfer.moved < total {
        transfer.error = Some(io::ErrorKind::WriteZero.into());
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED))
}

/// A read for which no thread waits: it owns what it needs, and tells whoever cares when it ends.
pub(crate) struct BackgroundRead {
    pub(crate) offset: u64,
    /// A task waits for it: it is not given back for being one too many (`io::flight` sees to that).
    pub(crate) wanted: bool,
    /// Into memory that `done` keeps valid.
    pub(crate) segments: Box<[Segment<'static>]>,
    pub(crate) done: Box<dyn FnOnce(io::Result<usize>) + Send>,
}
