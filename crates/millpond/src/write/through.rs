//! Writes through the cache: the back end has the bytes when they return.
//!
//! - A page that is cached, or whose other bytes are all zero, gets a fresh frame (page.W2), and the back end writes
//!   from that frame. So the cached and the written bytes are the same even if the caller changes its buffer during
//!   the write. (A buffer that the caller can't change may be written from directly.) Any other page is written
//!   straight from the caller's memory and stays EMPTY: no page is read in order to write it.
//! - After a failed or short write the pages that were not acknowledged become EMPTY.

use smallvec::SmallVec;

use crate::cache::table::step;
use crate::copy;
use crate::error::{Op, Result};
use crate::inode::leaves::Leaves;
use crate::io::segment::Segment;
use crate::options::WriteMode;
use crate::units::FrameIndex;
use crate::write::{CHUNK_PAGES, Write, Written};
use crate::writeback::state::Copy;
use crate::writeback::{Durability, write_back};

impl<'a> Write<'a> {
    /// Writes back the pages of the write that a failed sync made DIRTY again. Returns whether no page is DIRTY or under
    /// write-back then; the caller's guard keeps it so.
    ///
    /// In a file opened for writes through, only a failed sync makes pages DIRTY. The write can keep copies of its pages
    /// once they are clean, and a later sync has bytes to write again. A write past the cache would leave none.
    pub(super) fn clear_writeback(&self) -> bool {
        if !self.meets_writeback() {
            return true;
        }
        self.file.opened_mode == WriteMode::Through
            && write_back(self.file, self.first, self.last, Op::Write).is_ok()
            && !self.meets_writeback()
    }

    fn meets_writeback(&self) -> bool {
        let mut meets = false;
        if self.file.writeback.has_begun() {
            let (core, cache) = (self.file.core(), self.file.cache());
            core.for_each_page(cache, self.first, self.last, &mut |_, _, word| {
                // One look: a write-back that fails goes from the one to the other.
                let seen = word.load();
                meets |= seen.is_dirty() || seen.is_under_writeback();
            });
        }
        meets
    }

    /// A write to the back end, of few enough pages to cache them.
    pub(super) fn through(&self, pages: usize) -> Result<usize> {
        self.clear_end()?;
        let leaves = &mut Leaves::new(self.file);
        if self.file.untorn.is_some() {
            return self.through_blocks(leaves, &mut [FrameIndex::NONE; CHUNK_PAGES][..pages]);
        }
        if pages == 1 {
            // A page that is READY; otherwise as any other write.
            let mut fresh = [self.build_over(leaves)?.unwrap_or(FrameIndex::NONE)];
            return self.through_pages(leaves, &mut fresh);
        }
        self.through_pages(leaves, &mut [FrameIndex::NONE; CHUNK_PAGES][..pages])
    }

    /// The same of pages of which the first may be built.
    fn through_pages(&self, leaves: &mut Leaves<'_>, fresh: &mut [FrameIndex]) -> Result<usize> {
        if fresh[0] == FrameIndex::NONE
            && let Err(fault) = self.build(leaves, fresh)
        {
            self.free(fresh);
            return Err(fault);
        }
        for (page, _) in
            self.first.onwards().zip(&*fresh).filter(|(_, it)| **it == FrameIndex::NONE)
        {
            let (from, to) = self.part(page);
            self.file.cache().counters.local().bypassed(to - from);
        }
        let segments;
        let source = if self.goes_from_source() {
            self.src
        } else {
            segments = self.segments(fresh);
            (&*segments).into()
        };
        let written = self.transfer(source);
        self.end_through(leaves, fresh, written)
    }

    /// Records the outcome of the back end's write, and shows the pages that it has.
    pub(super) fn end_through(
        &self,
        leaves: &mut Leaves<'_>,
        fresh: &[FrameIndex],
        written: Written,
    ) -> Result<usize> {
        let Written { moved, error, epoch, durability } = written;
        let is_cached = !fresh.contains(&FrameIndex::NONE);
        self.install(leaves, fresh, moved, self.size_after(moved), false);
        self.end_cleared(moved);
        let is_durable = matches!(durability, Durability::Durable);
        if !is_durable && moved > 0 {
            let last = self.file.page_of(self.offset + moved - 1);
            let copy = if is_cached { Copy::Cached } else { Copy::None };
            self.file.writeback.record_written(self.file.cache(), self.first, last, copy, epoch);
        }
        if is_durable {
            self.note_whole_pages(moved, true);
        }
        self.result(moved, error, durability)
    }

    /// The source of the back end's write: the frames' bytes, or the caller's for pages without a frame.
    fn segments(&self, fresh: &[FrameIndex]) -> SmallVec<[Segment<'a>; 4]> {
        let mut segments = SmallVec::with_capacity(fresh.len());
        for (page, &frame) in self.first.onwards().zip(fresh) {
            let (from, to) = self.part(page);
            if frame == FrameIndex::NONE {
                segments.extend(self.src.slice(from - self.offset, to - from));
            } else {
                let bytes = self.file.cache().frames.bytes(frame);
                // SAFETY: the part lies within the frame, which is ours until it is published, and
                // does not change after that (page.W2).
                segments.push(unsafe {
                    let at = bytes.add((from - self.file.start_of(page)) as usize);
                    Segment::new(at, (to - from) as usize)
                });
            }
        }
        segments
    }

    /// Builds the new contents of the pages that will be cached, each in a fresh frame.
    fn build(&self, leaves: &mut Leaves<'_>, fresh: &mut [FrameIndex]) -> Result<()> {
        let cache = self.file.cache();
        let class = self.file.core().page_class();
        for (page, slot) in self.first.onwards().zip(fresh) {
            let (from, to) = self.part(page);
            let start = self.file.start_of(page);
            let end = start + self.file.core().page_bytes() as u64;
            // Whether all bytes of the page outside the part are beyond the size.
            let rest_is_zero =
                (from == start || self.size <= start) && (to == end || self.size <= to);
            let old = match leaves.hold(page, rest_is_zero) {
                Ok(held) => Some(step::HeldPage::begin(held.word(page), &self.file.core().epoch)),
                Err(_) => None,
            };
            let seen = old.as_ref().map(|look| look.seen).filter(|seen| seen.is_ready());
            let leaf_is_missing = old.is_none() && rest_is_zero;
            if leaf_is_missing || (seen.is_none() && !rest_is_zero) {
                continue;
            }
            let Some(frame) = cache.take_frame(class) else { continue };
            let bytes = cache.frames.bytes(frame);
            let (head, tail) = ((from - start) as usize, (end - to) as usize);
            // SAFETY: all within the two frames. No other thread has ours. The old one may be evicted and reused
            // during the copy, which is checked below.
            let kept = unsafe {
                let after = bytes.add((to - start) as usize);
                match (seen, &old) {
                    (Some(seen), Some(look)) if !rest_is_zero => {
                        let old_bytes = cache.frames.bytes(seen.frame());
                        let copied = look.copy_if_unchanged(|| {
                            let _ = copy::copy(bytes, old_bytes, head);
                            let _ = copy::copy(after, old_bytes.add((to - start) as usize), tail);
                        });
                        copied.is_some()
                    }
                    _ => {
                        copy::zero(bytes, head);
                        copy::zero(after, tail);
                        true
                    }
                }
            };
            if !kept {
                cache.frames.free(frame, class);
                continue;
            }
            *slot = frame;
            self.copy_new(page, frame)?;
        }
        Ok(())
    }

    /// The size after a write through of which `moved` bytes were acknowledged. The back end may have stored more of
    /// a write that failed, and then the file is that long. Readers see the end move at the moment at which they see
    /// the stored bytes before it.
    pub(super) fn size_after(&self, moved: u64) -> u64 {
        let acknowledged = self.size.max(if moved > 0 { self.offset + moved } else { 0 });
        let end = self.offset + self.len;
        if moved == self.len || end <= self.size {
            return acknowledged;
        }
        // write.W5: the guard reaches from the old end to the end of the write. Where the back end can't report its
        // length, or another process has extended the file, `write_locked` adopts it.
        self.file.backing.len().map_or(acknowledged, |kept| acknowledged.max(kept.min(end)))
    }
}
