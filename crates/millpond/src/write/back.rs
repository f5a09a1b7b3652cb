//! Writes that stay in the cache and are written back later.
//!
//! Space is reserved first, so that a full disk fails the write itself. Every page's leaf is held before the first
//! page is published, so that the write can't run out of memory from then on.

use crate::cache::frames::class::Class;
use crate::cache::table::step;
use crate::copy;
use crate::error::{Error, Op, Result};
use crate::inode::leaves::Leaves;
use crate::inode::space;
use crate::io::read_limit::Slots;
use crate::io::segment::Segment;
use crate::io::transfer::Transfer;
use crate::units::{FrameIndex, PageIndex};
use crate::write::{CHUNK_PAGES, Write};
use crate::writeback;

/// The number of times that a write has pages written back to get one frame. Chosen, not measured.
const RELIEVED_MAX: usize = 3;

impl Write<'_> {
    /// A write into the cache, which is written back later. False: it must go to the back end now.
    pub(super) fn back(&self, pages: usize) -> Result<bool> {
        let (start, end) = (self.file.start_of(self.first), self.offset + self.len);
        let end = end.next_multiple_of(self.file.core().page_bytes() as u64);
        if !self.file.keep() {
            self.file.keep_write_through();
            return Ok(false);
        }
        let leaves = &mut Leaves::new(self.file);
        let losses = self.file.space.losses();
        let reserved = space::reserve(self.file, start, end, self.size);
        let waits = reserved
            && ((pages == 1 && self.overwrite(leaves)?) || self.back_many(leaves, pages)?);
        if self.file.space.losses() != losses {
            // space.SP1, space.SP3: dirty pages of the range, this write's among them, may have no blocks.
            writeback::write_back(self.file, self.first, self.last, Op::Write)?;
        }
        Ok(waits)
    }

    /// As [`Write::back`], of any pages.
    fn back_many(&self, leaves: &mut Leaves<'_>, pages: usize) -> Result<bool> {
        let mut fresh = [FrameIndex::NONE; CHUNK_PAGES];
        let fresh = &mut fresh[..pages];
        if !self.occupy(leaves, pages) {
            return Ok(false);
        }
        let built = self.build_whole(fresh).and_then(|built| Ok(built && self.close_gap()?));
        if !matches!(built, Ok(true)) {
            self.free(fresh);
            self.vacate(leaves, pages);
            return built;
        }
        self.install(leaves, fresh, self.len, self.size.max(self.offset + self.len), true);
        Ok(true)
    }

    /// A write within one page, if the page is READY and a frame is free. False: nothing was done. The shared memory
    /// that it writes is the range's stripe, the leaf's holds and the page's word.
    fn overwrite(&self, leaves: &mut Leaves<'_>) -> Result<bool> {
        let Some(frame) = self.build_over(leaves)? else { return Ok(false) };
        let replaced = self.replace(leaves, frame, true);
        if !replaced {
            self.free(&[frame]);
        }
        Ok(replaced)
    }

    /// The new content of the write's only page, in a fresh frame. `None` if the page is not READY for long enough,
    /// if the write moves the end of the file, or if no frame is free.
    pub(super) fn build_over(&self, leaves: &mut Leaves<'_>) -> Result<Option<FrameIndex>> {
        let (file, page) = (self.file, self.first);
        let Some(word) = leaves.hold(page, false).ok().map(|held| held.word(page)) else {
            return Ok(None);
        };
        let look = step::HeldPage::begin(word, &file.core().epoch);
        let seen = look.seen;
        if !seen.is_ready() || self.offset + self.len > self.size {
            return Ok(None);
        }
        let (frames, page_bytes) = (&file.cache().frames, file.core().page_bytes());
        let class = file.core().page_class();
        let Some(fresh) = frames.try_alloc(class) else { return Ok(None) };
        let head = (self.offset - file.start_of(page)) as usize;
        let tail = head + self.len as usize;
        let (to, from) = (frames.bytes(fresh), frames.bytes(seen.frame()));
        // SAFETY: both frames are a page long. No other thread has our frame. The other may be evicted and reused
        // during the copy, which `copy_if_unchanged` detects.
        let copy_rest = || unsafe {
            let _ = copy::copy(to, from, head);
            let _ = copy::copy(to.add(tail), from.add(tail), page_bytes - tail);
        };
        let is_whole = self.len as usize == page_bytes;
        let copied = is_whole || look.copy_if_unchanged(copy_rest).is_some();
        let built = if copied { self.copy_new(page, fresh).map(|()| true) } else { Ok(false) };
        if !matches!(built, Ok(true)) {
            frames.free(fresh, class);
        }
        Ok(built?.then_some(fresh))
    }

    /// Takes a hold on its leaf for each page, so that no memory is needed once the write begins to be visible. False
    /// if there is no memory for the tables.
    pub(super) fn occupy(&self, leaves: &mut Leaves<'_>, pages: usize) -> bool {
        for (done, page) in self.first.onwards().take(pages).enumerate() {
            match leaves.hold(page, true) {
                Ok(held) => held.occupy(),
                Err(_) => {
                    self.vacate(leaves, done);
                    return false;
                }
            }
        }
        true
    }

    pub(super) fn vacate(&self, leaves: &mut Leaves<'_>, pages: usize) {
        for page in self.first.onwards().take(pages) {
            leaves.hold(page, false).expect("held for the page").vacated();
        }
    }

    /// Builds the new contents of all pages, each in a fresh frame; false if that can't be done.
    pub(super) fn build_whole(&self, fresh: &mut [FrameIndex]) -> Result<bool> {
        let file = self.file;
        let class = file.core().page_class();
        let taken = file.cache().frames.try_alloc_many(class, fresh);
        for slot in &mut fresh[taken..] {
            let Some(frame) = self.take_frame(class) else { return Ok(false) };
            *slot = frame;
        }
        // Frames that are adjacent in memory become one segment of the write-back's transfer. The free list may have them
        // in any order, as pages leave the cache one by one.
        fresh.sort_unstable_by_key(|frame| frame.0);
        let edges = [(0, self.first), (fresh.len() - 1, self.last)];
        let edges = &edges[..edges.len().min(fresh.len())];
        let mut missing = Vec::new();
        for &(at, page) in edges {
            let (from, to) = self.part(page);
            let start = file.start_of(page);
            let end = start + file.core().page_bytes() as u64;
            if self.keeps_rest(page) {
                if !self.copy_old(page, fresh[at]) {
                    missing.push((page, fresh[at]));
                }
            } else {
                let bytes = file.cache().frames.bytes(fresh[at]);
                // SAFETY: within our frame.
                unsafe {
                    copy::zero(bytes, (from - start) as usize);
                    copy::zero(bytes.add((to - start) as usize), (end - to) as usize);
                }
            }
        }
        if !self.read_old(&missing)? {
            return Ok(false);
        }
        for (page, &frame) in self.first.onwards().zip(&*fresh) {
            self.copy_new(page, frame)?;
        }
        Ok(true)
    }

    /// A free frame. Has pages written back for it if need be.
    pub(super) fn take_frame(&self, class: Class) -> Option<FrameIndex> {
        for _ in 0..RELIEVED_MAX {
            if let Some(frame) = self.file.cache().take_frame(class) {
                return Some(frame);
            }
            if !writeback::reclaim(self.file, writeback::WRITE_RECLAIM_WAIT_MAX) {
                break;
            }
        }
        self.file.cache().take_frame(class)
    }

    /// Copies a page from its cached frame. False if it is not cached, or not for long enough.
    pub(super) fn copy_old(&self, page: PageIndex, fresh: FrameIndex) -> bool {
        let frames = &self.file.cache().frames;
        let Ok(held) = self.file.core().hold(self.file.cache(), page, false) else { return false };
        let word = held.word(page);
        let look = step::HeldPage::begin(word, &self.file.core().epoch);
        let seen = look.seen;
        if !seen.is_ready() {
            return false;
        }
        let page_bytes = self.file.core().page_bytes();
        let (to, from) = (frames.bytes(fresh), frames.bytes(seen.frame()));
        // SAFETY: both frames are a page long. No other thread has our frame. The other may be evicted and reused
        // during the copy, which `copy_if_unchanged` detects.
        let copied = look.copy_if_unchanged(|| unsafe { copy::copy(to, from, page_bytes) });
        copied.is_some()
    }

    /// Reads pages from the back end, all at once. False if that is not possible.
    pub(super) fn read_old(&self, pages: &[(PageIndex, FrameIndex)]) -> Result<bool> {
        let file = self.file;
        if pages.is_empty() {
            return Ok(true);
        }
        if !file.backing.permits(false) {
            return Ok(false);
        }
        pages.iter().for_each(|&(page, _)| file.writeback.generations.read_back(page, page));
        let page_bytes = file.core().page_bytes();
        let frames = &file.cache().frames;
        // SAFETY: the frames are ours until they are published.
        let segments: Vec<_> = pages
            .iter()
            .map(|&(_, frame)| unsafe { [Segment::new(frames.bytes(frame), page_bytes)] })
            .collect();
        let mut batch: Vec<_> = (pages.iter().zip(&segments))
            .map(|(&(page, _), segment)| {
                Transfer::of_pages(file.start_of(page), segment, self.size)
            })
            .collect();
        let mut rest = &mut batch[..];
        while !rest.is_empty() {
            let mut slots = Slots::new(&file.shared.flight);
            while slots.count() < rest.len() && slots.add() {}
            let (part, after) = rest.split_at_mut(slots.count());
            file.carry_out(part);
            rest = after;
        }
        for (transfer, &(_, frame)) in batch.into_iter().zip(pages) {
            let valid = (self.size - transfer.offset).min(page_bytes as u64);
            if let Some(error) = transfer.error {
                return Err(Error::io(Op::Write, transfer.offset, page_bytes as u64, error));
            }
            if transfer.moved < valid {
                // Another process cut the file: the kernel decides the outcome of the write.
                return Ok(false);
            }
            // SAFETY: the rest of our frame. write.W5: nothing but zeros beyond the size.
            unsafe {
                let bytes = frames.bytes(frame);
                copy::zero(bytes.add(valid as usize), page_bytes - valid as usize);
            }
        }
        Ok(true)
    }

    /// Has the back end extend the file up to the first page of a write beyond its end, so that the bytes in between
    /// can be read (state.WB1-back). False if it refuses.
    pub(super) fn close_gap(&self) -> Result<bool> {
        let start = self.file.start_of(self.first);
        if self.size < start {
            return Ok(space::extend(self.file, self.size, start).is_ok());
        }
        Ok(true)
    }
}
