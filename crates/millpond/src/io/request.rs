//! Transfers between memory and a backing file, brought to their end.
//!
//! A back end tries each transfer once and may move less than was asked for. Here short transfers
//! are continued and interrupted ones repeated, so that the cache sees one of: all bytes, fewer
//! because the file ended (reads), or an error with what was moved before it.

use std::io;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::io::backend::BackingFile;
use crate::io::backend::shared_ring::SharedRing;
use crate::io::segment::{Segment, SegmentIter};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// A vectored read or write of contiguous bytes of a file.
pub(crate) struct Transfer<'a> {
    pub(crate) direction: Direction,
    pub(crate) offset: u64,
    /// Its memory.
    pub(crate) segments: SegmentIter<'a>,
    /// Past the kernel's cache; the caller has seen to alignment.
    pub(crate) direct: bool,
    /// Of a write: ends when the bytes, and what is needed to find them, are on the device.
    pub(crate) durable: bool,
    /// Bytes moved so far.
    pub(crate) moved: u64,
    pub(crate) error: Option<io::Error>,
}

impl<'a> Transfer<'a> {
    pub(crate) fn new(
        direction: Direction,
        offset: u64,
        segments: impl Into<SegmentIter<'a>>,
    ) -> Self {
        let segments: SegmentIter<'a> = segments.into();
        Transfer {
            direction,
            offset,
            // No file has bytes beyond, and the kernel refuses all of a transfer that ends there: that
            // of the page with the last of them.
            segments: segments.limited((i64::MAX as u64).saturating_sub(offset)),
            direct: false,
            durable: false,
            moved: 0,
            error: None,
        }
    }

    /// What has not been moved.
    pub(crate) fn rest(&self) -> Transfer<'a> {
        let mut segments = self.segments;
        let missing = segments.left() - self.moved;
        if missing < self.moved {
            segments.advance(segments.left());
            segments.rewind(missing);
        } else {
            segments.advance(self.moved);
        }
        let offset = self.offset + self.moved;
        Transfer { offset, segments, moved: 0, error: None, ..*self }
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
        if transfer.error.is_some() || transfer.moved < transfer.segments.left() {
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
        let mut attempt = [transfer.rest()];
        file.try_all(&mut attempt);
        let [attempt] = attempt;
        ended = attempt.error.is_none() && is_end(attempt.moved, block_bytes);
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
        Direction::Read if transfer.direct => u64::from(file.direct_alignment().offset_bytes),
        Direction::Read => u64::from(file.read_alignment().offset_bytes),
        Direction::Write => 1,
    }
}

/// Whether an attempt that moved so much has met the end of the file.
pub(crate) fn is_end(moved: u64, block_bytes: u64) -> bool {
    moved == 0 || !moved.is_multiple_of(block_bytes)
}

pub(crate) fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED))
}

/// Segments of their owner's. It may move while a transfer of them is under way: a single segment is not
/// referred to then ([`Front`](crate::io::segment::Front)), and more have a place of their own.
pub(crate) type Segments = SmallVec<[Segment<'static>; 1]>;

/// A read for which no thread waits: it owns what it needs, and tells whoever cares when it ends.
pub(crate) struct BackgroundRead {
    pub(crate) offset: u64,
    /// A task waits for it: it is not given back for being one too many (`io::flight` sees to that).
    pub(crate) wanted: bool,
    /// As of a [`Transfer`].
    pub(crate) direct: bool,
    /// Where it is to go, if the back end has rings.
    pub(crate) ring: Option<Arc<SharedRing>>,
    /// Into memory that `done` keeps valid.
    pub(crate) segments: Segments,
    pub(crate) done: Box<dyn FnOnce(io::Result<usize>) + Send>,
}

impl BackgroundRead {
    pub(crate) fn transfer(&self) -> Transfer<'_> {
        let transfer = Transfer::new(Direction::Read, self.offset, &*self.segments);
        Transfer { direct: self.direct, ..transfer }
    }
}
