//! Writes: into the cache, and to the back end, at once or later.
//!
//! ```text
//!   exclusive guard over the pages
//!     back:     space -> build the new frames -> commit, show all DIRTY
//!     through:  build the new frames -> back end -> show all
//!     bypass:   hide all -> wait for write-backs -> back end -> drop all
//!   -> release
//! ```
//!
//! A write *through* returns after the back end took the bytes, so it is as safe from a crash of this process as a
//! write to the kernel. Readers see the old bytes until the back end is done, then the new ones, all at once; a write
//! to one page that leaves the size alone is a single RMW. A write *back* leaves its bytes in the cache, to be
//! written back later (`writeback`). Three kinds of writes *bypass* the cache: those of more pages than are put in
//! place together, those beside pages that wait to be written back, and direct I/O.
//!
//! - **W5** A write that moves the end of the file takes its guard from the old end on, so that no other thread moves
//!   the end during the write and no fill sees it move.

mod back;

mod through;

mod bypass_write;

mod install;

mod blocks;

pub(crate) mod extent_change;

use std::io;

use millpond_rangelock::Mode;

use crate::copy;
use crate::error::{Error, Op, Result};
use crate::inode::{Blocking, CachedFile, FileGuard};
use crate::io::retry;
use crate::io::segment::SegmentIter;
use crate::io::transfer::{Direction, Transfer};
use crate::latency::LatencyKind;
use crate::options::WriteMode;
use crate::read::hit::FAR_BYTES_MIN;
use crate::units::{FrameIndex, PageIndex};
use crate::writeback::state::{FailureEpoch, WritebackFailure};
use crate::writeback::{self, Durability, DurableTransfer};

pub(crate) use bypass_write::{BypassWrite, drop_hidden, drop_pages, hide_pages};

/// Pages that a write puts in place together: of small pages, 1 MiB. Longer writes are not cached. Chosen, not
/// measured.
const CHUNK_PAGES: usize = 256;
/// From this length on, a write's bytes are not expected to be read soon. Chosen, not measured.
const AWAY_BYTES_MIN: u64 = 256 << 10;

/// Writes `src` at `offset`; returns how many bytes were taken.
pub(crate) fn write(
    file: &CachedFile,
    src: SegmentIter<'_>,
    offset: u64,
    how: How,
) -> Result<usize> {
    let len = src.left();
    if len == 0 {
        return Ok(0);
    }
    let slot = file.cache().counters.local();
    let since = slot.write_begins();
    let may_wait = may_wait(file, len)?;
    let locked = lock_for_write(file, offset, offset + len, Blocking::Wait);
    let (guard, size) = locked.expect("waited for");
    file.check_untorn_end(Op::Write, offset + len, size)?;
    let moved = write_locked(file, src, offset, size, guard, how, may_wait)?;
    sync_if(file, how.durable, offset, moved)?;
    slot.took_if(LatencyKind::Write, since);
    Ok(moved.bytes)
}

/// Writes `src` at the end of the file; returns where, and how many bytes were taken.
pub(crate) fn append(
    file: &CachedFile,
    src: SegmentIter<'_>,
    durable: bool,
) -> Result<(u64, usize)> {
    let len = src.left();
    if len == 0 {
        return Ok((file.core().size.get(), 0));
    }
    let slot = file.cache().counters.local();
    let since = slot.write_begins();
    let may_wait = may_wait(file, len)?;
    let turn = file.turn_to_append();
    let (guard, end) = lock_end(file, len)?;
    file.check_untorn_end(Op::Write, end + len, end)?;
    let how = How { durable, is_constant: false };
    let moved = write_locked(file, src, end, end, guard, how, may_wait)?;
    drop(turn);
    sync_if(file, durable, end, moved)?;
    slot.took_if(LatencyKind::Write, since);
    Ok((end, moved.bytes))
}

/// Whether a write may leave its bytes in the cache; waits for room below the dirty limit, while
/// the caller holds no guard.
fn may_wait(file: &CachedFile, len: u64) -> Result<bool> {
    if file.write_mode() == WriteMode::Through {
        return Ok(false);
    }
    writeback::throttle(file, len + 2 * file.core().page_bytes() as u64)
}

/// The outcome of a write.
#[derive(Clone, Copy)]
struct WriteProgress {
    bytes: usize,
    /// They are in the cache, and the back end was not asked.
    waits: bool,
}

/// Ends a durable write whose bytes wait in the cache.
fn sync_if(file: &CachedFile, durable: bool, offset: u64, moved: WriteProgress) -> Result<()> {
    if !durable || !moved.waits || moved.bytes == 0 {
        return Ok(());
    }
    let (first, last) = (file.page_of(offset), file.page_of(offset + moved.bytes as u64 - 1));
    writeback::sync_written(file, first, last)
}

/// The caller's demands on a write, and its promises.
#[derive(Clone, Copy)]
pub(crate) struct How {
    /// It returns when the bytes are on the device.
    pub(crate) durable: bool,
    /// The source does not change during the write, by any action of the program.
    pub(crate) is_constant: bool,
}

/// An exclusive guard for `len` bytes at the end of the file, and the offset of that end, which does not move under
/// the guard. Caller: has the turn to append.
///
/// Waits twice at most, however fast other writers move the end. A writer that moves it holds the bytes from the old
/// end on (W5). So a guard from the end as last read to the last possible byte covers the end, unless the file was
/// cut before the guard was granted. Then the next guard is for the whole file. A guard for the bytes of the append
/// alone would come too late each time that another writer extends the file while it is pending.
pub(crate) fn lock_end(file: &CachedFile, len: u64) -> Result<(FileGuard<'_>, u64)> {
    let check = |end: u64| match end.checked_add(len) {
        Some(to) if to <= i64::MAX as u64 => Ok(to),
        _ => Err(Error::InvalidRange { op: Op::Write, offset: end, len }),
    };
    file.refresh_size()?;
    let seen = file.core().size.get();
    // The common case is that no other thread has a guard there. The bytes beyond the append stay free for other
    // writers.
    if let Ok(to) = check(seen)
        && let Some(guard) = file.try_lock(seen, to, Mode::Exclusive)
        && file.core().size.get() == seen
    {
        return Ok((guard, seen));
    }
    let mut start = seen;
    loop {
        let guard = file.lock(start, u64::MAX, Mode::Exclusive);
        let end = file.core().size.get();
        if guard.range().start() <= end {
            check(end)?;
            return Ok((guard, end));
        }
        start = 0;
    }
}

/// An exclusive guard for a write, and the size, which cannot change under it if it matters. `None`: another thread
/// has a part of the range, and the caller must not wait. Asks twice at most.
pub(crate) fn lock_for_write(
    file: &CachedFile,
    offset: u64,
    end: u64,
    blocking: Blocking,
) -> Option<(FileGuard<'_>, u64)> {
    let mut size = file.core().size.get();
    loop {
        let start = if end > size { offset.min(size) } else { offset };
        let guard = match blocking {
            Blocking::Wait => file.lock(start, end, Mode::Exclusive),
            Blocking::Try => file.try_lock(start, end, Mode::Exclusive)?,
        };
        size = file.core().size.get();
        if end <= size || guard.range().start() <= offset.min(size) {
            return Some((guard, size));
        }
        // The file was cut before the guard was granted, and may be cut again: the next guard is from the first byte
        // on, and so covers any end.
        size = 0;
    }
}

fn write_locked(
    file: &CachedFile,
    src: SegmentIter<'_>,
    offset: u64,
    size: u64,
    guard: FileGuard<'_>,
    how: How,
    may_wait: bool,
) -> Result<WriteProgress> {
    let len = src.left();
    let mut write = Write::new(file, src, offset, size, how);
    let (first, last) = (write.first, write.last);
    let fits = last - first < file.chunk_pages(CHUNK_PAGES) as u64;
    let pages = (last - first + 1) as usize;
    if write.mode == WriteMode::Back && write.is_of_log() {
        write.mode = WriteMode::Through;
    }
    let mode = write.mode;
    let counters = &file.cache().counters;
    let waits = fits && may_wait && mode == WriteMode::Back && write.back(pages)?;
    let moved = if waits {
        Ok(len as usize)
    } else if fits
        && mode == WriteMode::Through
        && file.mapped_pages.is_none()
        && write.clear_writeback()
    {
        write.through(pages)
    } else {
        let moved = write.write_past_cache();
        counters.local().bypassed(*moved.as_ref().unwrap_or(&0) as u64);
        moved
    };
    counters.local().moved_slowly(*moved.as_ref().unwrap_or(&0) as u64);
    write.release(guard, &moved)?;
    Ok(WriteProgress { bytes: moved?, waits })
}

/// The bytes that the back end took, and whether they are durable.
pub(crate) struct Written {
    pub(crate) moved: u64,
    pub(crate) error: Option<io::Error>,
    /// The epoch before the write began.
    pub(crate) epoch: FailureEpoch,
    pub(crate) durability: Durability,
}

/// The record of a write in flight to the back end, for the generations of write-back.
#[must_use]
pub(crate) enum Account {
    Plain(FailureEpoch),
    Durable(DurableTransfer),
}

impl Account {
    /// `end`: of the bytes that will be written.
    pub(crate) fn open(file: &CachedFile, durable: bool, end: u64) -> Account {
        match durable {
            true => Account::Durable(DurableTransfer::begin(file, end)),
            false => Account::Plain(file.writeback.generations.epoch()),
        }
    }

    /// Ends the record of a transfer that has ended. With [`Blocking::Try`] the durability of its bytes may still be
    /// pending.
    pub(crate) fn close(
        self,
        file: &CachedFile,
        transfer: Transfer<'_>,
        blocking: Blocking,
    ) -> Written {
        let (offset, len) = (transfer.offset, transfer.segments.left());
        let failure =
            transfer.error.as_ref().map(|error| WritebackFailure::new(offset, len, error));
        let (epoch, durability) = match self {
            Account::Plain(epoch) => {
                if let Some(failure) = failure {
                    writeback::report_foreign_error(file, failure);
                }
                (epoch, Durability::Unsynced)
            }
            Account::Durable(durable) => {
                let repeat = || {
                    let again = Transfer { durable: false, ..transfer.rest() };
                    retry::try_one(&*file.backing, again).is_ok_and(|moved| moved > 0)
                };
                let (epoch, end) = (durable.epoch(), offset + transfer.moved);
                (epoch, writeback::conclude(file, durable, end, failure, blocking, repeat))
            }
        };
        let Transfer { moved, error, .. } = transfer;
        Written { moved, error, epoch, durability }
    }
}

/// A write under its guard.
pub(crate) struct Write<'a> {
    file: &'a CachedFile,
    src: SegmentIter<'a>,
    len: u64,
    offset: u64,
    /// Size of the file before the write.
    size: u64,
    first: PageIndex,
    last: PageIndex,
    how: How,
    /// Loaded under the guard.
    mode: WriteMode,
}

impl<'a> Write<'a> {
    fn new(
        file: &'a CachedFile,
        src: SegmentIter<'a>,
        offset: u64,
        size: u64,
        how: How,
    ) -> Write<'a> {
        Write { src, how, ..Write::around_cache(file, offset, src.left(), size, how.durable) }
    }

    /// A write that the caller hands to the back end itself, between [`Write::begin_bypass`] and
    /// [`Write::end_bypass`].
    pub(crate) fn around_cache(
        file: &'a CachedFile,
        offset: u64,
        len: u64,
        size: u64,
        durable: bool,
    ) -> Write<'a> {
        let (first, last) = (file.page_of(offset), file.page_of(offset + len - 1));
        let how = How { durable, is_constant: false };
        let (src, mode) = (SegmentIter::EMPTY, file.write_mode());
        Write { file, src, len, offset, size, first, last, how, mode }
    }

    /// Whether it extends the file in the way of a log (writeback.log), and all other bytes are in the back end, so
    /// that it may go there as if no earlier write had stayed in the cache.
    fn is_of_log(&self) -> bool {
        let file = self.file;
        self.offset + self.len > self.size
            && file.writeback.log.grows()
            && !file.is_kept()
            && !file.has_dirty_pages()
    }

    /// Releases the guard of a write that is over.
    fn release(&self, guard: FileGuard<'_>, outcome: &Result<usize>) -> Result<()> {
        if self.release_apart(guard, outcome) {
            self.file.adopt_size()?;
        }
        Ok(())
    }

    /// Releases the guard of a write that is over. Returns whether the back end may have stored more than it
    /// acknowledged, so that its file may be longer than our size.
    pub(crate) fn release_apart(&self, guard: FileGuard<'_>, outcome: &Result<usize>) -> bool {
        drop(guard);
        let done = *outcome.as_ref().unwrap_or(&0) as u64;
        let extends = self.offset + self.len > self.size;
        done < self.len && extends && self.mode == WriteMode::Through
    }

    /// Whether the page has bytes, below the size, that the write leaves alone.
    fn keeps_rest(&self, page: PageIndex) -> bool {
        let (from, to) = self.part(page);
        let start = self.file.start_of(page);
        let end = start + self.file.core().page_bytes() as u64;
        (from > start && self.size > start) || (to < end && self.size > to)
    }

    /// Notes the pages of which the back end took all bytes. Caller: has set the size after the write.
    ///
    /// Durable pages leave every generation: an error of a later sync does not concern them.
    fn note_whole_pages(&self, moved: u64, is_durable: bool) {
        let file = self.file;
        let page_bytes = file.core().page_bytes() as u64;
        let start = self.offset.next_multiple_of(page_bytes);
        let mut end = self.offset + moved;
        if end >= file.core().size.get() {
            // The last page ends with the file.
            end = end.next_multiple_of(page_bytes);
        }
        if start + page_bytes > end {
            return;
        }
        let (first, last) = (file.page_of(start), file.page_of(end - 1));
        match is_durable {
            true => writeback::forget_durable(file, first, last),
            false => file.writeback.generations.overwritten(first, last),
        }
    }

    /// Copies the caller's bytes of a page into its fresh frame.
    fn copy_new(&self, page: PageIndex, fresh: FrameIndex) -> Result<()> {
        let (from, to) = self.part(page);
        let bytes = self.file.cache().frames.bytes(fresh);
        let mut at = (from - self.file.start_of(page)) as usize;
        let whole = to - from == self.file.core().page_bytes() as u64;
        let far = self.len >= AWAY_BYTES_MIN || (whole && self.size >= FAR_BYTES_MIN);
        // The kernel may copy the bytes from there at once, so they had better be in the processor's caches then.
        let goes_on = self.mode == WriteMode::Through && !self.goes_from_source();
        let away = far && (!goes_on || self.file.backing.is_direct());
        for piece in self.src.slice(from - self.offset, to - from) {
            // SAFETY: within our frame; the source is the caller's promise.
            let left = unsafe {
                if away {
                    copy::copy_away(bytes.add(at), piece.base(), piece.len())
                } else {
                    copy::copy(bytes.add(at), piece.base(), piece.len())
                }
            };
            if left > 0 {
                return Err(Error::Fault { op: Op::Write, offset: self.offset, len: self.len });
            }
            at += piece.len();
        }
        Ok(())
    }

    /// Has the back end write `segments`, and waits for the outcome.
    fn transfer(&self, segments: SegmentIter<'_>) -> Written {
        let account = Account::open(self.file, self.how.durable, self.offset + self.len);
        let transfer = Transfer::new(Direction::Write, self.offset, segments);
        let transfer = self.file.carry_out_one(Transfer { durable: self.how.durable, ..transfer });
        account.close(self.file, transfer, Blocking::Wait)
    }

    /// The result for the caller of the write.
    fn result(
        &self,
        moved: u64,
        error: Option<io::Error>,
        durability: Durability,
    ) -> Result<usize> {
        match (durability, error) {
            (Durability::Lost(failure), _) => {
                self.file.writeback.generations.mark_reported();
                Err(Error::io(Op::Write, self.offset, self.len, failure.source()))
            }
            (_, Some(error)) if moved == 0 => {
                Err(Error::io(Op::Write, self.offset, self.len, error))
            }
            // A short write, as in POSIX: the next write returns the error.
            _ => Ok(moved as usize),
        }
    }

    /// Whether a write through gives the back end the caller's memory, rather than the frames with the same bytes.
    /// The frames are aligned, as direct I/O requires.
    fn goes_from_source(&self) -> bool {
        self.how.is_constant && !self.file.backing.is_direct()
    }

    fn free(&self, fresh: &[FrameIndex]) {
        let taken = fresh.iter().filter(|&&frame| frame != FrameIndex::NONE);
        taken.for_each(|&frame| self.file.free_frame(frame));
    }

    /// The bytes that are written of `page`, as file offsets.
    fn part(&self, page: PageIndex) -> (u64, u64) {
        let start = self.file.start_of(page);
        let end = start + self.file.core().page_bytes() as u64;
        (start.max(self.offset), end.min(self.offset + self.len))
    }
}
