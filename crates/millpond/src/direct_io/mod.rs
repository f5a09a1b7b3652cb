//! Direct I/O: transfers between the caller's memory and the backend that bypass the cache and are
//! coherent with it.
//!
//! ```text
//!   read:   shared guard -> write back what is DIRTY of the range -> backend -> release
//!   write:  exclusive guard -> hide -> wait for write-backs (page.W7) -> backend -> size -> EMPTY
//!           -> release                                             (`write::bypass_write`)
//! ```
//!
//! A direct operation is atomic with respect to every other operation on its file, direct or
//! cached, as all of them take the same guard. The part between [`begin`] and [`StartedDirect::end`]
//! belongs to the backend: `File` waits for it, a `Pipeline` has many in progress.
//!
//! - **D1** The caller that begins an operation ends it: until then its pages are hidden, and its
//!   range is held. With an operation in progress it waits for no other guard, nor for a flush,
//!   which may wait for the hidden pages.
//! - **D2** Alignment is checked before anything is done. Unaligned requests are refused, or, if
//!   the handle permits it, served through a bounce buffer and counted.

use std::io;
use std::time::Instant;

use millpond_rangelock::Mode;

use crate::copy::Source;
use crate::error::{Error, Op, Result};
use crate::inode::{Blocking, CachedFile, FileGuard};
use crate::io::bounce::{BOUNCE_BYTES_MAX, Bounce};
use crate::io::segment::{Misalignment, Segment, SegmentIter};
use crate::io::transfer::{Direction, Transfer};
use crate::latency::LatencyKind;
use crate::write::{self, Account, BypassWrite, Write, Written};
use crate::writeback::state::EndedOp;
use crate::writeback::{self, Durability};

/// An operation and its range of the file.
#[derive(Clone, Copy)]
pub(crate) struct DirectRange<'f> {
    pub(crate) file: &'f CachedFile,
    pub(crate) direction: Direction,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) durable: bool,
}

/// The same with its memory.
#[derive(Clone, Copy)]
pub(crate) struct Operation<'a> {
    pub(crate) extent: DirectRange<'a>,
    pub(crate) segments: SegmentIter<'a>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begin {
    Begun,
    /// Another operation holds a part of the range, or it must be written back before.
    Conflict,
    /// There is nothing to move.
    Nothing,
}

/// An operation under its guard, between cache and backend (D1).
#[must_use]
pub(crate) struct StartedDirect<'f> {
    held: Held<'f>,
    /// For a write.
    write: Option<(BypassWrite, Account)>,
}

/// The common state of an operation in progress; a read has no more.
#[must_use]
pub(crate) struct Held<'f> {
    guard: FileGuard<'f>,
    /// The size of the file, which is stable in this range while the guard is held (write.W5).
    size: u64,
    /// When it began, if it is timed.
    since: Option<Instant>,
}

/// Makes the cache coherent with an operation that begins, and stores its state in `begun`.
#[inline]
pub(crate) fn begin<'f>(
    extent: DirectRange<'f>,
    blocking: Blocking,
    begun: &mut Option<StartedDirect<'f>>,
) -> Result<Begin> {
    if extent.len == 0 {
        return Ok(Begin::Nothing);
    }
    match extent.direction {
        Direction::Read => {
            begin_read(extent, blocking, begun, |held| StartedDirect { held, write: None })
        }
        Direction::Write => {
            let since = extent.begins();
            let (file, end) = (extent.file, extent.offset + extent.len);
            let Some((guard, size)) = write::lock_for_write(file, extent.offset, end, blocking)
            else {
                return Ok(Begin::Conflict);
            };
            file.check_untorn_end(Op::Write, end, size)?;
            if blocking == Blocking::Try && extent.write(size).has_to_wait() {
                return Ok(Begin::Conflict);
            }
            *begun = Some(begin_write(extent, since, guard, size, blocking)?);
            Ok(Begin::Begun)
        }
    }
}

fn begin_write<'f>(
    extent: DirectRange<'f>,
    since: Option<Instant>,
    guard: FileGuard<'f>,
    size: u64,
    blocking: Blocking,
) -> Result<StartedDirect<'f>> {
    let around = extent.write(size).begin_bypass(blocking)?;
    extent.file.begin_change(extent.offset + extent.len);
    let account = Account::open(extent.file, extent.durable, extent.offset + extent.len);
    Ok(StartedDirect { held: Held { guard, size, since }, write: Some((around, account)) })
}

/// [`begin`] for a read. The state is constructed in its place: each move of it costs 2 ns.
#[inline(always)]
pub(crate) fn begin_read<'f, T>(
    extent: DirectRange<'f>,
    blocking: Blocking,
    begun: &mut Option<T>,
    started: impl FnOnce(Held<'f>) -> T,
) -> Result<Begin> {
    let (file, offset, end) = (extent.file, extent.offset, extent.offset + extent.len);
    if extent.len == 0 || offset >= file.core().size.get() {
        return Ok(Begin::Nothing);
    }
    let since = extent.begins();
    let guard = match blocking {
        Blocking::Wait => file.lock(offset, end, Mode::Shared),
        Blocking::Try => match file.try_lock(offset, end, Mode::Shared) {
            Some(guard) => guard,
            None => return Ok(Begin::Conflict),
        },
    };
    let size = file.core().size.get();
    if offset >= size {
        return Ok(Begin::Nothing);
    }
    let (first, last) = (file.page_of(offset), file.page_of(end.min(size) - 1));
    if writeback::needs_writeback(file, first, last) {
        if blocking == Blocking::Try {
            return Ok(Begin::Conflict);
        }
        writeback::redirty_suspects(file, first, last);
        writeback::write_back(file, first, last, Op::Read)?;
    }
    *begun = Some(started(Held { guard, size, since }));
    Ok(Begin::Begun)
}

/// Writes at the end of the file. Returns that offset, and the number of bytes. The offset of the
/// operation is ignored.
pub(crate) fn append(mut operation: Operation<'_>, bounce: bool) -> Result<(u64, usize)> {
    let (file, len) = (operation.extent.file, operation.extent.len);
    if len == 0 {
        return Ok((file.core().size.get(), 0));
    }
    let since = operation.extent.begins();
    let _turn = file.turn_to_append();
    let (guard, end) = write::lock_end(file, len)?;
    file.check_untorn_end(Op::Write, end + len, end)?;
    operation.extent.offset = end;
    let alignment = operation.check_alignment();
    let is_aligned = alignment.is_ok();
    if !bounce {
        alignment?;
    }
    let bounce = if is_aligned { None } else { operation.bounce()? };
    let begun = begin_write(operation.extent, since, guard, end, Blocking::Wait)?;
    let moved = match is_aligned {
        true => operation.finish(begun),
        false => operation.write_bounced(begun, bounce),
    };
    Ok((end, moved?))
}

impl<'f> DirectRange<'f> {
    /// Checks D2 for memory with this alignment.
    #[inline]
    pub(crate) fn check_alignment(&self, memory: Misalignment) -> Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        let mut alignment = self.file.backing.alignment(true);
        if let (Direction::Write, Some(bytes)) = (self.direction, self.file.untorn) {
            // Each block is in one segment (untorn_blocks.UB1).
            alignment.offset_bytes = alignment.offset_bytes.max(bytes);
        }
        match alignment.first_misaligned(self.offset, memory) {
            None => Ok(()),
            Some((what, limit_bytes)) => {
                let &DirectRange { offset, len, .. } = self;
                Err(Error::Unaligned { op: self.op(), offset, len, what, limit_bytes })
            }
        }
    }

    #[inline]
    fn begins(&self) -> Option<Instant> {
        self.file.cache().counters.local().direct_begins()
    }

    pub(crate) fn op(&self) -> Op {
        match self.direction {
            Direction::Read => Op::Read,
            Direction::Write => Op::Write,
        }
    }

    fn write(&self, size: u64) -> Write<'f> {
        Write::around_cache(self.file, self.offset, self.len, size, self.durable)
    }
}

impl<'a> Operation<'a> {
    pub(crate) fn transfer(&self) -> Transfer<'a> {
        let DirectRange { direction, offset, durable, .. } = self.extent;
        let mut transfer = Transfer::new(direction, offset, self.segments);
        transfer.durable = durable;
        transfer.direct = true;
        transfer
    }

    pub(crate) fn check_alignment(&self) -> Result<()> {
        self.extent.check_alignment(self.segments.misalignment())
    }

    /// Performs the operation and waits for it.
    pub(crate) fn run(&self) -> Result<usize> {
        match self.begin()? {
            Some(begun) => self.finish(begun),
            None => Ok(0),
        }
    }

    /// `None`: there is nothing to move.
    fn begin(&self) -> Result<Option<StartedDirect<'a>>> {
        let mut begun = None;
        let outcome = begin(self.extent, Blocking::Wait, &mut begun)?;
        debug_assert!(outcome != Begin::Conflict, "waited for");
        Ok(begun)
    }

    fn finish(&self, begun: StartedDirect<'_>) -> Result<usize> {
        begun.end(self.extent, self.extent.file.carry_out_one(self.transfer()))
    }

    /// Performs an unaligned operation.
    pub(crate) fn run_bounced(&self) -> Result<usize> {
        // Before the pages of a write are hidden, and its durable operation begins.
        let bounce = self.bounce()?;
        let Some(begun) = self.begin()? else { return Ok(0) };
        match (self.extent.direction, bounce) {
            (Direction::Read, Some(bounce)) => self.read_bounced(begun, bounce),
            (Direction::Read, None) => unreachable!("all reads are bounced"),
            (Direction::Write, bounce) => self.write_bounced(begun, bounce),
        }
    }

    fn offset_block(&self) -> u64 {
        u64::from(self.extent.file.backing.alignment(true).offset_bytes)
    }

    /// The bounce buffer of the operation. `None`: a write without whole blocks.
    fn bounce(&self) -> Result<Option<Bounce>> {
        let DirectRange { direction, offset, len, .. } = self.extent;
        let block = self.offset_block();
        let bytes = match direction {
            // The blocks around the range count in full.
            Direction::Read => BOUNCE_BYTES_MAX.min(len) + 2 * block,
            // It has its own buffer.
            Direction::Write if self.extent.file.untorn.is_some() => return Ok(None),
            Direction::Write if !(offset | len).is_multiple_of(block) => return Ok(None),
            Direction::Write => BOUNCE_BYTES_MAX.min(len),
        };
        Bounce::new(bytes)
            .map(Some)
            .map_err(|error| Error::io(self.extent.op(), offset, len, error))
    }

    /// Reads the whole blocks around the range, and copies the requested bytes.
    fn read_bounced(&self, begun: StartedDirect<'_>, mut bounce: Bounce) -> Result<usize> {
        self.extent.file.cache().counters.local().bounced();
        let (start, len) = (self.extent.offset, self.extent.len);
        let end = start + len;
        let end = end.min(begun.held.size);
        let block = self.offset_block();
        let mut dst = self.segments;
        let mut at = start;
        let mut failure = None;
        while at < end {
            let first = at - at % block;
            let whole_end = end.next_multiple_of(block).min(i64::MAX as u64);
            let wanted = (whole_end - first).min(bounce.len());
            let (moved, error) = self.transfer_bounced(&mut bounce, first, wanted);
            let got = (first + moved).min(end).saturating_sub(at);
            // SAFETY: the bounce buffer holds `moved` bytes from `first` on; the caller guarantees
            // `dst`.
            let copied = unsafe {
                let from = bounce.base().add((at - first) as usize);
                crate::read::hit::copy_out(dst.split(got), from, Source::Near)
            };
            if copied.is_err() {
                return Err(Error::Fault { op: Op::Read, offset: start, len });
            }
            at += got;
            failure = error;
            if moved < wanted {
                break;
            }
        }
        let moved = at - start;
        begun.end(self.extent, Transfer { moved, error: failure, ..self.transfer() })
    }

    /// Writes whole blocks by a bounce buffer. Partial blocks are written through the kernel's page
    /// cache, which preserves the bytes around them.
    fn write_bounced(&self, begun: StartedDirect<'_>, bounce: Option<Bounce>) -> Result<usize> {
        self.extent.file.cache().counters.local().bounced();
        let (offset, total) = (self.extent.offset, self.extent.len);
        if self.extent.file.untorn.is_some() {
            let transfer = self.extent.write(begun.held.size).transfer_blocks(self.segments);
            return begun.end(self.extent, transfer);
        }
        let Some(mut bounce) = bounce else {
            let transfer = Transfer { direct: false, ..self.transfer() };
            return begun.end(self.extent, self.extent.file.carry_out_one(transfer));
        };
        let mut src = self.segments;
        let mut done = 0;
        let mut failure = None;
        while done < total && failure.is_none() {
            let part = src.split(bounce.len());
            let len = part.left();
            if !bounce.take_at(0, part) {
                failure = Some(io::Error::from_raw_os_error(libc::EFAULT));
                break;
            }
            let (moved, error) = self.transfer_bounced(&mut bounce, offset + done, len);
            done += moved;
            failure = error;
        }
        // Its memory is not aligned.
        let all = Transfer { direct: false, ..self.transfer() };
        begun.end(self.extent, Transfer { moved: done, error: failure, ..all })
    }

    fn transfer_bounced(
        &self,
        bounce: &mut Bounce,
        offset: u64,
        len: u64,
    ) -> (u64, Option<io::Error>) {
        // SAFETY: within the buffer, which outlives the transfer.
        let segment = unsafe { [Segment::new(bounce.base(), len as usize)] };
        let transfer = Transfer { offset, segments: (&segment).into(), ..self.transfer() };
        let Transfer { moved, error, .. } = self.extent.file.carry_out_one(transfer);
        (moved, error)
    }
}

impl<'f> StartedDirect<'f> {
    /// Ends the operation after the backend has ended it. Waits for a guard if the file's length is
    /// in doubt, and for other durable operations in flight after a durable write.
    fn end(self, extent: DirectRange<'_>, transfer: Transfer<'_>) -> Result<usize> {
        let DirectEnd { outcome, is_len_in_doubt } =
            match self.end_with(extent, transfer, Blocking::Wait) {
                Conclusion::Ended(ended) => ended,
                Conclusion::Undecided(undecided) => undecided.end_write(extent),
            };
        if is_len_in_doubt {
            extent.file.adopt_size()?;
        }
        outcome
    }

    /// Ends the operation after the backend has ended it, without waiting for a guard.
    #[inline]
    pub(crate) fn end_with(
        self,
        extent: DirectRange<'_>,
        transfer: Transfer<'_>,
        blocking: Blocking,
    ) -> Conclusion<'f> {
        let StartedDirect { held, write } = self;
        let Some((around, account)) = write else {
            return Conclusion::Ended(held.end_read(extent, transfer.moved, transfer.error));
        };
        let file = extent.file;
        file.cache().counters.local().took_if(LatencyKind::DirectWrite, held.since);
        file.end_change();
        let written = account.close(file, transfer, blocking);
        match written.durability {
            Durability::Pending(ended) => {
                Conclusion::Undecided(Undecided { held, around, written, ended })
            }
            _ => Conclusion::Ended(held.end_write(extent, around, written)),
        }
    }
}

/// A durable write without an error from the backend. Whether it has succeeded depends on other
/// operations in flight (generations.G3). Its range is held until that is known, so that no durable
/// page is recorded as not durable.
#[must_use]
pub(crate) struct Undecided<'f> {
    held: Held<'f>,
    around: BypassWrite,
    written: Written,
    ended: EndedOp,
}

impl Undecided<'_> {
    /// Whether [`Undecided::settle`] would not wait.
    pub(crate) fn is_decided(&self, extent: DirectRange<'_>) -> bool {
        extent.file.writeback.generations.verdict(self.ended).is_some()
    }

    /// Ends the write. Waits for durable operations in flight; those wait for no guard and no page.
    pub(crate) fn end_write(self, extent: DirectRange<'_>) -> DirectEnd {
        let Undecided { held, around, mut written, ended } = self;
        written.durability = extent.file.writeback.generations.wait(ended).into();
        held.end_write(extent, around, written)
    }
}

impl Held<'_> {
    fn end_write(
        self,
        extent: DirectRange<'_>,
        around: BypassWrite,
        written: Written,
    ) -> DirectEnd {
        let write = extent.write(self.size);
        let outcome = write.end_bypass(written, around);
        extent
            .file
            .cache()
            .counters
            .local()
            .moved_past_cache(*outcome.as_ref().unwrap_or(&0) as u64);
        let is_len_in_doubt = write.release_apart(self.guard, &outcome);
        DirectEnd { outcome, is_len_in_doubt }
    }

    /// Ends a read of which `moved` bytes were moved, without any wait.
    #[inline(always)]
    pub(crate) fn end_read(
        self,
        extent: DirectRange<'_>,
        moved: u64,
        error: Option<io::Error>,
    ) -> DirectEnd {
        let DirectRange { file, offset, len, .. } = extent;
        let slot = file.cache().counters.local();
        slot.took_if(LatencyKind::DirectRead, self.since);
        let wanted = (offset + len).min(self.size) - offset;
        drop(self.guard);
        let moved = moved.min(wanted);
        slot.moved_past_cache(moved);
        match error {
            Some(error) if moved == 0 => {
                DirectEnd::of(Err(Error::io(Op::Read, offset, len, error)))
            }
            // The bytes before it, as the kernel does.
            Some(_) => DirectEnd::of(Ok(moved as usize)),
            // If it is short, another process truncated the file below.
            None => DirectEnd { outcome: Ok(moved as usize), is_len_in_doubt: moved < wanted },
        }
    }
}

/// The state of an operation that the backend has ended.
#[must_use]
pub(crate) enum Conclusion<'f> {
    Ended(DirectEnd),
    Undecided(Undecided<'f>),
}

/// The outcome of an operation.
#[must_use]
pub(crate) struct DirectEnd {
    pub(crate) outcome: Result<usize>,
    /// The length of the file may have changed. [`CachedFile::adopt_size`] must be called when the
    /// caller may wait for a guard.
    pub(crate) is_len_in_doubt: bool,
}

impl DirectEnd {
    fn of(outcome: Result<usize>) -> DirectEnd {
        DirectEnd { outcome, is_len_in_doubt: false }
    }
}
