//! Writes of whole untorn blocks (untorn.UT4): the rest of a block that is written in part is read.

use std::io;

use crate::error::Result;
use crate::inode::Blocking;
use crate::inode::leaves::Leaves;
use crate::io::bounce::{BOUNCE_BYTES_MAX, Bounce};
use crate::io::segment::{Segment, SegmentIter};
use crate::io::transfer::{Direction, Transfer};
use crate::units::FrameIndex;
use crate::write::{Account, Write};

impl<'a> Write<'a> {
    /// A write through of pages that are built whole in `fresh`. Without frames for them it bypasses the cache.
    pub(super) fn through_blocks(
        &self,
        leaves: &mut Leaves<'_>,
        fresh: &mut [FrameIndex],
    ) -> Result<usize> {
        let built = self.build_whole(fresh);
        if !matches!(built, Ok(true)) {
            self.free(fresh);
            return built.and_then(|_| self.write_past_cache());
        }
        let (file, durable) = (self.file, self.how.durable);
        let (start, end) = self.blocks();
        let frames = &file.cache().frames;
        let page_bytes = file.core().page_bytes() as u64;
        let segments: Vec<Segment<'_>> = (self.first.onwards().zip(&*fresh))
            .map(|(page, &frame)| {
                let page_start = file.start_of(page);
                let (from, to) = (start.max(page_start), end.min(page_start + page_bytes));
                // SAFETY: within the frame, which is ours until it is published, and does not change after that (page.W2).
                unsafe {
                    let at = frames.bytes(frame).add((from - page_start) as usize);
                    Segment::new(at, (to - from) as usize)
                }
            })
            .collect();
        let account = Account::open(file, durable, end);
        let transfer = Transfer::new(Direction::Write, start, &segments);
        let transfer = file.carry_out_one(Transfer { durable, ..transfer });
        let mut written = account.close(file, transfer, Blocking::Wait);
        written.moved = self.moved_until(start + written.moved);
        self.end_through(leaves, fresh, written)
    }

    /// Writes `src`, the bytes of the write, as whole blocks, by way of aligned memory. Caller: an exclusive guard, and
    /// the pages that are covered in part are clean and hidden.
    pub(crate) fn transfer_blocks(&self, src: SegmentIter<'a>) -> Transfer<'a> {
        let mut all = Transfer::new(Direction::Write, self.offset, src);
        (all.durable, all.direct) = (self.how.durable, false);
        let (start, end) = self.blocks();
        let mut bounce = match Bounce::new(BOUNCE_BYTES_MAX.min(end - start)) {
            Ok(bounce) => bounce,
            Err(error) => return Transfer { error: Some(error), ..all },
        };
        let mut at = start;
        while at < end && all.error.is_none() {
            let to = end.min(at + bounce.len());
            let outcome = self.transfer_chunk(src, &mut bounce, at, to);
            all.moved = self.moved_until(outcome.0);
            all.error = outcome.1;
            at = to;
        }
        all
    }

    /// Writes the whole blocks of `start..end`. Returns the end of the bytes that the back end took.
    fn transfer_chunk(
        &self,
        src: SegmentIter<'_>,
        bounce: &mut Bounce,
        start: u64,
        end: u64,
    ) -> (u64, Option<io::Error>) {
        let block_bytes = self.block_bytes();
        let (from, to) = (start.max(self.offset), end.min(self.offset + self.len));
        let head = (from > start).then_some(start);
        let tail = (to < end).then_some(end - block_bytes).filter(|&tail| Some(tail) != head);
        for block in [head, tail].into_iter().flatten() {
            if let Err(error) = self.read_block(bounce, start, block) {
                return (start, Some(error));
            }
        }
        if !bounce.take_at(from - start, src.slice(from - self.offset, to - from)) {
            return (start, Some(io::Error::from_raw_os_error(libc::EFAULT)));
        }
        // SAFETY: within the buffer, which outlives the transfer.
        let segment = unsafe { [Segment::new(bounce.base(), (end - start) as usize)] };
        let transfer = Transfer::new(Direction::Write, start, &segment);
        let transfer = self.file.carry_out_one(Transfer { durable: self.how.durable, ..transfer });
        (start + transfer.moved, transfer.error)
    }

    /// Reads the block at `block` to its place in a buffer whose first byte is that at `start`.
    fn read_block(&self, bounce: &mut Bounce, start: u64, block: u64) -> io::Result<()> {
        let block_bytes = self.block_bytes() as usize;
        // SAFETY: the block lies within the buffer.
        let at = unsafe { bounce.base().add((block - start) as usize) };
        if block >= self.size {
            // SAFETY: as above. Bytes beyond the end are zero.
            unsafe { at.write_bytes(0, block_bytes) };
            return Ok(());
        }
        // SAFETY: as above.
        let segment = unsafe { [Segment::new(at, block_bytes)] };
        let transfer = self.file.carry_out_one(Transfer::of_pages(block, &segment, self.size));
        match transfer.error {
            Some(error) => Err(error),
            // Another program has cut the file.
            None if transfer.moved < block_bytes as u64 => Err(io::ErrorKind::UnexpectedEof.into()),
            None => Ok(()),
        }
    }

    /// The whole blocks of the write.
    fn blocks(&self) -> (u64, u64) {
        let bytes = self.block_bytes();
        (self.offset - self.offset % bytes, (self.offset + self.len).next_multiple_of(bytes))
    }

    fn block_bytes(&self) -> u64 {
        u64::from(self.file.untorn.expect("a file with untorn blocks"))
    }

    /// How many bytes of the write lie before `end`.
    fn moved_until(&self, end: u64) -> u64 {
        end.saturating_sub(self.offset).min(self.len)
    }
}
