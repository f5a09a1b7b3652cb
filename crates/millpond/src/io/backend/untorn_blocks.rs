//! Writes of a file whose blocks a power cut must not tear: one request with `RWF_ATOMIC` for each
//! block.
//!
//! A transfer is cut into aligned blocks. The direct description writes each of them, and the file
//! system stores all of a block or nothing (Linux 6.13; XFS on any device from 6.16 on).
//!
//! - **UB1** No write of the file goes to the kernel without `RWF_ATOMIC`. A transfer that is not
//!   made of whole blocks, each in one piece of memory, fails with EINVAL.
//! - **UB2** The blocks below the durable end are in flight together, [`BLOCKS_TOGETHER`] at a time. A block beyond it is in flight
//!   alone, follows the earlier blocks of its transfer, and is not written if one of them failed.
//!   So the file never grows beyond a hole that a failed block has left. Several blocks in flight that
//!   move the end of an XFS file have cost it its length: after a power cut the file was shorter than
//!   a sync had made it before.
//!   The durable end is that of `durable_length`.
//!
//! Locks: `growth`, which is held while the kernel writes blocks.

use std::io;
use std::sync::{PoisonError, RwLock};

use crate::io::transfer::{Direction, Transfer};

/// The kernel writes all bytes of the request or none (Linux 6.11).
pub(crate) const RWF_ATOMIC: i32 = 0x40;

/// The number of blocks that are in flight together at most, so that the list of a long write is short.
const BLOCKS_TOGETHER: usize = 256;

/// See the module header.
pub(crate) struct UntornBlocks {
    pub(crate) block_bytes: u32,
    /// Exclusive for a block beyond the durable end (UB2).
    growth: RwLock<()>,
}

impl UntornBlocks {
    pub(crate) fn new(block_bytes: u32) -> UntornBlocks {
        UntornBlocks { block_bytes, growth: RwLock::new(()) }
    }

    /// Whether `transfer` is one whole block in one piece of memory (UB1).
    pub(crate) fn is_block(&self, transfer: &Transfer<'_>) -> bool {
        let bytes = u64::from(self.block_bytes);
        let front = transfer.segments.front(2);
        transfer.offset.is_multiple_of(bytes)
            && transfer.segments.left() == bytes
            && matches!(front.as_slice(), [one] if one.len() as u64 == bytes)
    }

    /// Tries the writes of `batch`, by `try_all`, which tries single blocks. A transfer ends before
    /// its first block that failed.
    pub(crate) fn write_all(
        &self,
        durable_end: u64,
        batch: &mut [Transfer<'_>],
        mut try_all: impl FnMut(&mut [Transfer<'_>]),
    ) {
        debug_assert!(batch.iter().all(|transfer| transfer.direction == Direction::Write));
        self.write_below(durable_end, batch, &mut try_all);
        for transfer in batch {
            self.write_growth(transfer, &mut try_all);
        }
    }

    /// Writes the blocks before `durable_end` together.
    fn write_below(
        &self,
        durable_end: u64,
        batch: &mut [Transfer<'_>],
        try_all: &mut impl FnMut(&mut [Transfer<'_>]),
    ) {
        let (mut blocks, mut transfers) = (Vec::new(), Vec::new());
        for number in 0..batch.len() {
            let mut at = 0;
            while batch[number].error.is_none()
                && let Some(block) = self.block(&batch[number], at)
                && block.offset + u64::from(self.block_bytes) <= durable_end
            {
                blocks.push(block);
                transfers.push(number);
                at += u64::from(self.block_bytes);
                if blocks.len() == BLOCKS_TOGETHER {
                    self.write_together(&mut blocks, &mut transfers, batch, try_all);
                }
            }
        }
        if !blocks.is_empty() {
            self.write_together(&mut blocks, &mut transfers, batch, try_all);
        }
    }

    /// Writes `blocks`, of which each belongs to a transfer of `batch`.
    fn write_together<'a>(
        &self,
        blocks: &mut Vec<Transfer<'a>>,
        transfers: &mut Vec<usize>,
        batch: &mut [Transfer<'a>],
        try_all: &mut impl FnMut(&mut [Transfer<'_>]),
    ) {
        // A panic elsewhere leaves nothing behind in a lock without data.
        let shared = self.growth.read().unwrap_or_else(PoisonError::into_inner);
        try_all(blocks);
        drop(shared);
        for (block, number) in blocks.drain(..).zip(transfers.drain(..)) {
            if batch[number].error.is_none() {
                self.add(&mut batch[number], block);
            }
        }
    }

    /// Writes the rest of `transfer`, block by block.
    fn write_growth(
        &self,
        transfer: &mut Transfer<'_>,
        try_all: &mut impl FnMut(&mut [Transfer<'_>]),
    ) {
        while transfer.error.is_none() && transfer.moved < transfer.segments.left() {
            let Some(block) = self.block(transfer, transfer.moved) else {
                transfer.error = Some(io::Error::from_raw_os_error(libc::EINVAL));
                return;
            };
            let mut one = [block];
            let alone = self.growth.write().unwrap_or_else(PoisonError::into_inner);
            try_all(&mut one);
            drop(alone);
            let [block] = one;
            self.add(transfer, block);
        }
    }

    /// The block at byte `at` of `transfer`, if it is a whole one.
    fn block<'a>(&self, transfer: &Transfer<'a>, at: u64) -> Option<Transfer<'a>> {
        let bytes = u64::from(self.block_bytes);
        if transfer.segments.left().saturating_sub(at) < bytes {
            return None;
        }
        let (offset, segments) = (transfer.offset + at, transfer.segments.slice(at, bytes));
        let block = Transfer { offset, segments, moved: 0, error: None, ..*transfer };
        self.is_block(&block).then_some(block)
    }

    /// Adds the outcome of the next block to that of its transfer.
    fn add(&self, transfer: &mut Transfer<'_>, block: Transfer<'_>) {
        match block.error {
            Some(error) => transfer.error = Some(error),
            None if block.moved == u64::from(self.block_bytes) => transfer.moved += block.moved,
            None => transfer.error = Some(io::ErrorKind::WriteZero.into()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::io::segment::Segment;

    const BLOCK: usize = 8192;

    /// The offsets and numbers of blocks that each call of a fake backend gets. It fails the block at
    /// `failing`.
    fn written(
        durable_end: u64,
        offset: u64,
        pieces: &[usize],
        failing: u64,
    ) -> (Vec<Vec<u64>>, u64, Option<i32>) {
        let mut memory = vec![0u8; pieces.iter().sum()];
        let mut at = 0;
        let segments: Vec<Segment<'_>> = (pieces.iter())
            .map(|&len| {
                at += len;
                // SAFETY: within the vector, which lives until the end of the function.
                unsafe { Segment::new(memory.as_mut_ptr().add(at - len), len) }
            })
            .collect();
        let mut calls = Vec::new();
        let mut batch = [Transfer::new(Direction::Write, offset, &segments)];
        UntornBlocks::new(BLOCK as u32).write_all(durable_end, &mut batch, |tried| {
            calls.push(tried.iter().map(|block| block.offset / BLOCK as u64).collect());
            for block in tried {
                block.set(match block.offset == failing {
                    true => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
                    false => Ok(block.segments.left() as usize),
                });
            }
        });
        let [transfer] = batch;
        (calls, transfer.moved, transfer.error.and_then(|error| error.raw_os_error()))
    }

    /// Goal: UB2.
    #[test]
    fn blocks_beyond_the_durable_end_are_written_alone_and_in_order() {
        let block = BLOCK as u64;
        let end = 3 * block;
        let (calls, moved, error) = written(end, block, &[4 * BLOCK], u64::MAX);
        assert_eq!((calls, moved, error), (vec![vec![1, 2], vec![3], vec![4]], 4 * block, None));
        // A failure below the end keeps the file from growing.
        let (calls, moved, error) = written(end, block, &[4 * BLOCK], block);
        assert_eq!((calls, moved, error), (vec![vec![1, 2]], 0, Some(libc::ENOSPC)));
        let (calls, moved, error) = written(end, block, &[4 * BLOCK], 3 * block);
        assert_eq!(
            (calls, moved, error),
            (vec![vec![1, 2], vec![3]], 2 * block, Some(libc::ENOSPC))
        );
    }

    /// Goal: the list of blocks in flight is as short for a long write, which also ends before its first failure.
    #[test]
    fn a_long_write_is_cut_into_short_lists() {
        let block = BLOCK as u64;
        let (many, end) = (2 * BLOCKS_TOGETHER + 3, 1000 * block);
        let (calls, moved, error) = written(end, 0, &[many * BLOCK], u64::MAX);
        let lens: Vec<usize> = calls.iter().map(Vec::len).collect();
        assert_eq!(lens, [BLOCKS_TOGETHER, BLOCKS_TOGETHER, 3]);
        assert_eq!((moved, error), (many as u64 * block, None));
        let failing = BLOCKS_TOGETHER as u64 + 1;
        let (calls, moved, error) = written(end, 0, &[many * BLOCK], failing * block);
        assert_eq!((calls.len(), moved, error), (2, failing * block, Some(libc::ENOSPC)));
    }

    /// Goal: UB1. Method: pieces of memory and offsets that a block spans.
    #[test]
    fn a_part_of_a_block_is_never_written() {
        let block = BLOCK as u64;
        let end = 100 * block;
        let invalid = Some(libc::EINVAL);
        assert_eq!(written(end, 512, &[BLOCK], u64::MAX), (vec![], 0, invalid));
        let (calls, moved, error) = written(end, 0, &[BLOCK + 4096], u64::MAX);
        assert_eq!((calls, moved, error), (vec![vec![0]], block, invalid));
        let (calls, moved, error) = written(end, 0, &[BLOCK, 4096, 4096], u64::MAX);
        assert_eq!((calls, moved, error), (vec![vec![0]], block, invalid));
        let (calls, moved, error) = written(end, 0, &[BLOCK, 2 * BLOCK], u64::MAX);
        assert_eq!((calls, moved, error), (vec![vec![0, 1, 2]], 3 * block, None));
    }
}
