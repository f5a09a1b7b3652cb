//! Changes of a file's extent: truncation, holes, reserved space, and changes made by other processes.
//!
//! ```text
//!   truncate, punch, zero:
//!     exclusive guard over the pages concerned -> write back what is kept of pages at the ends
//!     -> hide -> wait for write-backs (page.W7) -> back end -> size -> EMPTY
//!     on failure: show again; where the back end may have done a part, what is clean is EMPTY
//!   allocate: guard, exclusive from the old end on if that moves -> back end -> size
//! ```
//!
//! Each takes a guard over exactly its range, and from the end of the file on where it moves that. I/O to other
//! ranges goes on. No fill can begin under an exclusive guard (page.W3), so none can put a page in place between the
//! start of its invalidation and the end of its removal (as in XFS). Only pages that have a leaf are visited, so the
//! length of a range costs nothing by itself.

use std::io;
use std::sync::atomic::Ordering::Acquire;

use millpond_rangelock::Mode;

use crate::cache::table::page::{PageState, PublishFlags};
use crate::copy;
use crate::error::{Error, Op, Result};
use crate::inode::space;
use crate::inode::{CachedFile, FileGuard};
use crate::io::backend::Seek;
use crate::io::backend::allocation::Overwrites;
use crate::io::segment::Segment;
use crate::io::transfer::{Direction, Transfer};
use crate::recovery::Intent;
use crate::units::{FrameIndex, PageIndex};
use crate::write::{Write, drop_hidden, drop_pages, hide_pages};
use crate::writeback;
use crate::writeback::state::Copy;

const SHOWN: PublishFlags = PublishFlags { referenced: true, marker: false, dirty: false };

/// Pages at the ends of a range that are covered in part.
type Edges = [Option<PageIndex>; 2];

/// Bytes of zeros that one transfer writes, where the file system can't zero a range by itself: 256
/// segments of one block. Chosen, not measured.
const ZEROS_BYTES: u64 = 1 << 20;

/// A block of zeros, aligned for direct I/O.
#[repr(align(4096))]
struct Zeros([u8; 4096]);

static ZEROS: Zeros = Zeros([0; 4096]);

/// A failure of the back end to change the file.
struct ExtentFailure {
    error: io::Error,
    /// Nothing was changed.
    refused: bool,
}

impl From<io::Error> for ExtentFailure {
    fn from(error: io::Error) -> ExtentFailure {
        use libc::{EBADF, EFBIG, EINVAL, ENODEV, ENOSYS, EOPNOTSUPP, EPERM, ETXTBSY};
        let refusals = [EBADF, EFBIG, EINVAL, ENODEV, ENOSYS, EOPNOTSUPP, EPERM, ETXTBSY];
        let refused = error.raw_os_error().is_some_and(|errno| refusals.contains(&errno));
        ExtentFailure { error, refused }
    }
}

impl CachedFile {
    /// Sets the file's size.
    pub(crate) fn truncate(&self, len: u64) -> Result<()> {
        let (guard, size) = self.lock_from_end(len);
        self.check_untorn_end(Op::Truncate, len, 0)?;
        let intent = Intent::Truncate { len };
        let outcome = if len >= size {
            self.intending(intent, || self.extend(size, len))
        } else {
            let first = self.page_of(len);
            let tail = (len > self.start_of(first)).then_some(first);
            self.hide_and_settle(Op::Truncate, first, PageIndex::LAST, [tail, None])?;
            self.mapped_pages.as_deref().inspect(|pages| pages.note_cut(len));
            self.intending(intent, || self.cut(len, first, tail))
        };
        drop(guard);
        outcome
    }

    /// Moves the end of the file from `size` up to `len`.
    fn extend(&self, size: u64, len: u64) -> Result<()> {
        let is_longer = len > size && self.backing.len().is_ok_and(|now| now < len);
        let set =
            if is_longer { space::extend(self, size, len) } else { space::set_len(self, len) };
        set.map_err(|error| Error::io(Op::Truncate, len, 0, error))?;
        self.set_size(len);
        Ok(())
    }

    /// Cuts the file, whose pages from `first` on are hidden, to `len`, which lies in page `tail`.
    fn cut(&self, len: u64, first: PageIndex, tail: Option<PageIndex>) -> Result<()> {
        let fresh = tail.and_then(|page| self.cut_tail(page, len));
        if let Err(error) = space::set_len(self, len) {
            self.publish_hidden(first, PageIndex::LAST);
            if let Some(frame) = fresh {
                self.free_frame(frame);
            }
            return Err(Error::io(Op::Truncate, len, 0, error));
        }
        self.set_size(len);
        if let (Some(page), Some(frame)) = (tail, fresh) {
            self.publish_tail(page, frame);
        }
        drop_pages(self, first, PageIndex::LAST);
        self.writeback.forget(first + u64::from(tail.is_some()), PageIndex::LAST);
        Ok(())
    }

    /// Makes the bytes of `offset..end` that lie below the size zero, and gives up their space.
    pub(crate) fn punch(&self, offset: u64, end: u64) -> Result<()> {
        self.clear(Op::Punch, offset, end, |size| {
            // To the end of the file's last page, so that its block goes, too.
            let end = end.min(size.next_multiple_of(self.core().page_bytes() as u64));
            if self.untorn.is_some() {
                return self.punch_blocks(offset, end, size);
            }
            Ok(space::zero(self, offset, end - offset, false)?)
        })
    }

    /// Makes the bytes of `offset..end` that lie below the size zero.
    pub(crate) fn zero(&self, offset: u64, end: u64) -> Result<()> {
        self.clear(Op::Zero, offset, end, |size| {
            let end = end.min(size);
            if self.untorn.is_some() {
                self.zero_data(offset, end, size)?;
                return Ok(space::allocate(self, offset, end - offset, true)?);
            }
            match space::zero(self, offset, end - offset, true) {
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    self.zero_by_writes(offset, end, size)
                }
                outcome => Ok(outcome?),
            }
        })
    }

    fn zero_by_writes(
        &self,
        offset: u64,
        end: u64,
        size: u64,
    ) -> std::result::Result<(), ExtentFailure> {
        let epoch = self.writeback.generations.epoch();
        let written = self.write_zeros(offset, end, size);
        // Also after a failure: a part may have been written, and is not cached.
        let (first, last) = (self.page_of(offset), self.page_of(end - 1));
        self.writeback.record_written(self.cache(), first, last, Copy::None, epoch);
        written.map_err(|error| ExtentFailure { error, refused: false })
    }

    /// Writes zeros over the data of `offset..end`, and frees the space of its whole blocks (untorn.UT5).
    fn punch_blocks(
        &self,
        offset: u64,
        end: u64,
        size: u64,
    ) -> std::result::Result<(), ExtentFailure> {
        self.zero_data(offset, end.min(size), size)?;
        let bytes = self.untorn.map_or(1, u64::from);
        let (from, to) = (offset.next_multiple_of(bytes), end - end % bytes);
        if from < to {
            // A file system that punches no holes has kept the zeros.
            let _ = space::zero(self, from, to - from, false);
        }
        Ok(())
    }

    /// Writes zeros over the data of `offset..end`; holes are zero (untorn.UT5).
    fn zero_data(
        &self,
        offset: u64,
        end: u64,
        size: u64,
    ) -> std::result::Result<(), ExtentFailure> {
        let mut at = offset;
        while at < end {
            let from = match self.backing.seek(at, Seek::Data) {
                Ok(from) => from.unwrap_or(end).max(at),
                Err(_) => at,
            };
            let hole = self.backing.seek(from.min(end), Seek::Hole).ok().flatten();
            let to = hole.filter(|&hole| hole > from).unwrap_or(end).min(end);
            if from < to {
                self.zero_by_writes(from, to, size)?;
            }
            at = to.max(from);
        }
        Ok(())
    }

    /// Calls `act` with the size, to clear `offset..end` below the cache.
    fn clear(
        &self,
        op: Op,
        offset: u64,
        end: u64,
        act: impl FnOnce(u64) -> std::result::Result<(), ExtentFailure>,
    ) -> Result<()> {
        if offset >= self.core().size.get() {
            return Ok(());
        }
        let guard = self.lock(offset, end, Mode::Exclusive);
        // Does not change under the guard, as far as it concerns the range (write.W5).
        let size = self.core().size.get();
        if offset >= size {
            return Ok(());
        }
        let (first, last) = (self.page_of(offset), self.page_of(end.min(size) - 1));
        let edges = self.edges(offset, end, size);
        if op == Op::Zero && self.backing.overwrites() == Overwrites::InPlaceUnlessShared {
            // space.SP1: XFS frees the range first, and may then find no space for it.
            writeback::write_back(self, first, last, op)?;
        }
        self.hide_and_settle(op, first, last, edges)?;
        let (start, stop) = (offset, end.min(size));
        let intent = match op {
            Op::Punch => Intent::Punch { start, end: stop },
            _ => Intent::Zero { start, end: stop },
        };
        let outcome = self.intending(intent, || {
            let outcome = act(size);
            match outcome {
                Ok(()) => {
                    drop_pages(self, first, last);
                    // The edges stay recorded: a sync that fails must know that bytes of them were written.
                    let [head, tail] = edges.map(|edge| u64::from(edge.is_some()));
                    if first + head + tail <= last {
                        self.writeback.forget(first + head, last - tail);
                    }
                }
                Err(ExtentFailure { refused: true, .. }) => self.publish_hidden(first, last),
                Err(_) => self.publish_dirty(first, last),
            }
            outcome
        });
        if outcome.as_ref().is_err_and(|failure| !failure.refused) {
            // space.SP1. A failed write-back is recorded, and its pages stay dirty.
            let _ = writeback::write_back(self, first, last, op);
        }
        drop(guard);
        outcome.map_err(|failure| Error::io(op, offset, end - offset, failure.error))
    }

    /// Reserves space for `offset..end`. The file grows to `end` if it is shorter.
    pub(crate) fn allocate(&self, offset: u64, end: u64) -> Result<()> {
        let mut size = self.core().size.get();
        loop {
            // Either guard covers the last byte, so no other thread can cut the file below `end` during the call,
            // which would leave space reserved beyond its end.
            let guard = if end > size {
                self.lock(size, end, Mode::Exclusive)
            } else {
                self.lock(offset, end, Mode::Shared)
            };
            let now = self.core().size.get();
            if end > now && (end <= size || guard.range().start() > now) {
                // The file was cut before the guard was granted, and may be cut again: from the first byte on,
                // exclusive.
                size = 0;
                continue;
            }
            self.check_untorn_end(Op::Allocate, end, now)?;
            let reserved = space::allocate(self, offset, end - offset, end <= now);
            if reserved.is_ok() && end > now {
                // write.W5: no page beyond the old end is READY, and the old tail page is zero there.
                self.set_size(end);
            }
            if reserved.is_err() {
                // space.SP1. A failed write-back is recorded there, and its pages stay dirty.
                let (first, last) = (self.page_of(offset), self.page_of(end - 1));
                let _ = writeback::write_back(self, first, last, Op::Allocate);
            }
            drop(guard);
            return match reserved {
                Ok(()) => Ok(()),
                Err(error) => {
                    if end > now {
                        // The back end may have extended the file by a part.
                        self.adopt_size()?;
                    }
                    Err(Error::io(Op::Allocate, offset, end - offset, error))
                }
            };
        }
    }

    /// The first byte from `offset` on that is in data, or in a hole. Takes no guard, as with any guard the result
    /// may be out of date when it returns.
    pub(crate) fn seek(&self, offset: u64, to: Seek) -> Result<Option<u64>> {
        let size = self.core().size.get();
        if offset >= size {
            return Ok(None);
        }
        writeback::write_back(self, self.page_of(offset), PageIndex::LAST, Op::Seek)?;
        let found =
            self.backing.seek(offset, to).map_err(|error| Error::io(Op::Seek, offset, 0, error))?;
        Ok(match to {
            Seek::Data => found.filter(|&at| at < size),
            // The file below may have become shorter than `offset`.
            Seek::Hole => Some(found.unwrap_or(offset).min(size)),
        })
    }

    /// Hides the READY pages from `first` to `last`, and waits until no write-back conflicts with a change of them
    /// below the cache. The pages of `edges` are clean then; others may be DIRTY. Caller: has an exclusive guard.
    fn hide_and_settle(
        &self,
        op: Op,
        first: PageIndex,
        last: PageIndex,
        edges: Edges,
    ) -> Result<()> {
        // The last page in any case: pages that become EMPTY must lie within the back end's file (state.WB1).
        for page in edges.into_iter().flatten().chain([last]) {
            writeback::write_back(self, page, page, op)?;
        }
        hide_pages(self, first, last);
        writeback::await_ends(self, first, last);
        Ok(())
    }

    /// Shows those of the hidden pages from `first` to `last` that are DIRTY, and so will be written again. The
    /// others become EMPTY.
    fn publish_dirty(&self, first: PageIndex, last: PageIndex) {
        self.core().for_each_page(self.cache(), first, last, &mut |_, _, word| {
            let seen = word.load();
            if seen.state() == PageState::Hidden && seen.is_dirty() {
                word.wake(word.publish(seen.frame(), SHOWN).sleepers());
            }
        });
        drop_pages(self, first, last);
    }

    /// The pages of `offset..end` that have bytes outside of it, below `size`.
    fn edges(&self, offset: u64, end: u64, size: u64) -> Edges {
        let (first, last) = (self.page_of(offset), self.page_of(end - 1));
        let last_end = self.start_of(last) + self.core().page_bytes() as u64;
        let head = offset > self.start_of(first);
        let tail = end < last_end.min(size) && !(head && first == last);
        [head.then_some(first), tail.then_some(last)]
    }

    /// Writes zeros below the cache.
    fn write_zeros(&self, offset: u64, end: u64, size: u64) -> io::Result<()> {
        let mut at = offset;
        while at < end {
            // Whole pieces from the second on, which direct I/O can take.
            let len = (end - at).min(ZEROS_BYTES - at % ZEROS_BYTES);
            let block = ZEROS.0.len() as u64;
            let segments: Vec<Segment<'_>> = (0..len.div_ceil(block))
                .map(|number| {
                    let bytes = (len - number * block).min(block);
                    // SAFETY: within a static, which a write only reads.
                    unsafe { Segment::new(ZEROS.0.as_ptr().cast_mut(), bytes as usize) }
                })
                .collect();
            let transfer = if self.untorn.is_some() {
                let write = Write::around_cache(self, at, len, size, false);
                write.transfer_blocks((&segments).into())
            } else {
                self.carry_out_one(Transfer::new(Direction::Write, at, &segments))
            };
            if let Some(error) = transfer.error {
                return Err(error);
            }
            at += len;
        }
        Ok(())
    }

    /// After the last handle is dropped and all pages are written back: gives back space beyond the end that was
    /// reserved for later writes, and the file's place at the keeper.
    pub(crate) fn release_reservations(&self) {
        let guard = self.lock(0, u64::MAX, Mode::Exclusive);
        // Argued: a thread that opens the file again has raised the count before it gets a guard, and does nothing to
        // the file before that.
        if self.handles.load(Acquire) == 0 && !self.has_dirty_pages() {
            space::trim(self, self.core().size.get());
            self.release_keeper_slot();
            self.writeback.forget_failures(self.id, &*self.backing);
        }
        drop(guard);
    }

    /// An exclusive guard from the smaller of the size and `len` on, and the size. Waits twice at most.
    fn lock_from_end(&self, len: u64) -> (FileGuard<'_>, u64) {
        let mut start = self.core().size.get().min(len);
        loop {
            let guard = self.lock(start, u64::MAX, Mode::Exclusive);
            let size = self.core().size.get();
            if guard.range().start() <= size.min(len) {
                return (guard, size);
            }
            // The file was cut before the guard was granted, and may be cut again: the next guard is from the first
            // byte on, and so covers any end.
            start = 0;
        }
    }

    /// The contents of the hidden page that holds the new end of the file, zero beyond it, in a
    /// fresh frame; `None` if the page was not cached or there is no frame.
    fn cut_tail(&self, page: PageIndex, len: u64) -> Option<FrameIndex> {
        let held = self.core().hold(self.cache(), page, false).ok()?;
        let seen = held.word(page).load();
        if seen.state() != PageState::Hidden || seen.frame() == FrameIndex::NONE {
            return None;
        }
        let fresh = self.cache().take_frame(self.core().page_class())?;
        let (kept, page_bytes) = ((len - self.start_of(page)) as usize, self.core().page_bytes());
        let frames = &self.cache().frames;
        // SAFETY: within the two frames. The old one is in a HIDDEN word, so no thread frees it, and no other thread
        // has ours.
        unsafe {
            let _ = copy::copy(frames.bytes(fresh), frames.bytes(seen.frame()), kept);
            copy::zero(frames.bytes(fresh).add(kept), page_bytes - kept);
        }
        Some(fresh)
    }

    fn publish_tail(&self, page: PageIndex, fresh: FrameIndex) {
        let held = self.core().hold(self.cache(), page, false).expect("hidden pages hold a leaf");
        let word = held.word(page);
        let (frames, old) = (&self.cache().frames, word.load().frame());
        let spare = frames.inherit_queue_node(old, fresh);
        word.wake(word.publish(fresh, SHOWN).sleepers());
        frames.set_queue_node(old, spare);
        frames.release(old, self.core().page_class());
    }

    /// Shows the hidden pages from `first` to `last` as they were.
    fn publish_hidden(&self, first: PageIndex, last: PageIndex) {
        self.core().for_each_page(self.cache(), first, last, &mut |held, _, word| {
            let seen = word.load();
            if seen.state() == PageState::Hidden && seen.frame() != FrameIndex::NONE {
                word.wake(word.publish(seen.frame(), SHOWN).sleepers());
            } else if seen.state() == PageState::Hidden {
                drop_hidden(self, held, word);
            }
        });
    }

    /// Drops the cached bytes of a range that was changed from outside of this engine, and adopts the size that the
    /// file has now.
    pub(crate) fn invalidate(&self, offset: u64, end: u64) -> Result<()> {
        if end > offset {
            let guard = self.lock(offset, end, Mode::Exclusive);
            let (first, last) = (self.page_of(offset), self.page_of(end - 1));
            writeback::write_back(self, first, last, Op::Stat)?;
            self.hide_and_settle(Op::Stat, first, last, [None, None])?;
            drop_pages(self, first, last);
            self.space.forget(offset, end);
            drop(guard);
        }
        // Even if the length is as before: a change to another length has freed the blocks beyond the end.
        space::lost_from(self, self.core().size.get());
        self.adopt_size().map(drop)
    }

    /// Adopts the size of the file below the cache, if another process changed it. Returns the size.
    pub(crate) fn adopt_size(&self) -> Result<u64> {
        let failed = |error| Error::io(Op::Stat, 0, 0, error);
        if self.backing.len().map_err(failed)? == self.core().size.get() {
            return Ok(self.core().size.get());
        }
        let guard = self.lock(0, u64::MAX, Mode::Exclusive);
        // The back end's length counts only when it has everything.
        writeback::write_back(self, PageIndex::FIRST, PageIndex::LAST, Op::Stat)?;
        let (old, new) = (self.core().size.get(), self.backing.len().map_err(failed)?);
        if old != new {
            // The page of the smaller end, too: its bytes change there.
            let end = old.min(new);
            let first = self.page_of(end);
            self.hide_and_settle(Op::Stat, first, PageIndex::LAST, [None, None])?;
            self.set_size(new);
            self.backing.note_length(end);
            self.space.forget(end, u64::MAX);
            drop_pages(self, first, PageIndex::LAST);
        }
        drop(guard);
        Ok(new)
    }
}
