//! Runs: contiguous pages that are claimed, read by one transfer, and published.
//!
//! ```text
//!   Claims::next_run: EMPTY pages get frames and become FILLING       (one filler of a page, page.W9)
//!   the transfer:     by a thread that waits (`fill`), or Run::start
//!   Run::finish:      zero what is beyond the size, hand over the bytes, READY or EMPTY, wake
//! ```
//!
//! All of it is done under a guard over the pages (page.W3), so none of them is HIDDEN, and the size does
//! not change as far as it concerns them (write.W5).

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::cache::policy::fifo::{PageOrigin, ReadyPage};
use crate::cache::table::HeldLeaf;
use crate::cache::table::page::{PageState, PageWord, PublishFlags};
use crate::copy;
use crate::inode::CachedFile;
use crate::inode::leaves::Leaves;
use crate::io::backend::shared_ring::SharedRing;
use crate::io::segment::Segment;
use crate::io::transfer::Segments;
use crate::read::background::{self, ReadsInFlight};
use crate::units::{FrameIndex, PageIndex};

/// The number of pages from which a run counts as frames in a row. A shorter run says little about the leaf's 512
/// pages. Chosen, not measured.
const RUN_NOTED: usize = 16;

/// A page whose bytes are complete, before any other thread can see it.
pub(crate) struct FilledPage {
    pub(crate) page: PageIndex,
    pub(crate) frame: FrameIndex,
}

/// Contiguous pages that the owner of this has made FILLING.
pub(crate) struct Run {
    pub(crate) first: PageIndex,
    pub(crate) frames: SmallVec<[FrameIndex; 4]>,
    /// Size of the file.
    pub(crate) size: u64,
    pub(crate) prefetched: bool,
    /// Mark the first page for the reader that continues the read-ahead.
    pub(crate) marker: bool,
}

/// The result of a search for the next run.
pub(crate) enum Next {
    Run(Run),
    /// There is no page left that is EMPTY and below the size.
    End,
    NoFrame,
    NoSlot,
}

/// Claims the EMPTY pages of a range, run by run.
pub(crate) struct Claims<'f> {
    file: &'f CachedFile,
    leaves: Leaves<'f>,
    pages: Range<PageIndex>,
    size: u64,
    /// The range is one page, and may be the first of many pages at random.
    pub(crate) alone: bool,
}

impl<'f> Claims<'f> {
    pub(crate) fn new(file: &'f CachedFile, pages: Range<PageIndex>, size: u64) -> Claims<'f> {
        Claims { file, leaves: Leaves::new(file), pages, size, alone: false }
    }

    /// The leaf that is held, for [`Run::finish`]: a claimed page keeps its leaf anyway.
    pub(crate) fn into_leaves(self) -> Leaves<'f> {
        self.leaves
    }

    /// The first page that is still to be claimed: behind the last run, or the page without a frame or slot.
    pub(crate) fn next(&self) -> PageIndex {
        self.pages.start
    }

    /// Claims the next run. Before its first page, `slot` returns whether it may be read. The run ends where frames
    /// run out.
    pub(crate) fn next_run(&mut self, slot: &mut dyn FnMut() -> bool) -> Next {
        let mut frames = SmallVec::new();
        let mut first = self.pages.start;
        let refused = loop {
            let page = self.pages.start;
            if page >= self.pages.end || self.file.start_of(page) >= self.size {
                break Next::End;
            }
            let Ok(held) = self.leaves.hold(page, true) else { break Next::NoFrame };
            let word = held.word(page);
            let mut claimed = None;
            if word.load().state() == PageState::Empty {
                if frames.is_empty() && !slot() {
                    break Next::NoSlot;
                }
                let cache = self.file.cache();
                let Some(frame) = cache.take_page_frame(held, page, self.alone) else {
                    break Next::NoFrame;
                };
                if try_claim(held, word, frame) {
                    claimed = Some(frame);
                } else {
                    self.file.free_frame(frame);
                }
            }
            match claimed {
                Some(frame) => {
                    if frames.is_empty() {
                        first = page;
                    }
                    frames.push(frame);
                }
                None if !frames.is_empty() => break Next::End,
                None => {}
            }
            self.pages.start += 1;
        };
        if frames.is_empty() {
            return refused;
        }
        // Before they are published (generations.G5).
        let last = first + frames.len() as u64 - 1;
        self.file.writeback.generations.read_back(first, last);
        Next::Run(Run { first, frames, size: self.size, prefetched: false, marker: false })
    }
}

/// Makes a page FILLING, if it is EMPTY. Returns whether it was.
pub(crate) fn try_claim(held: &HeldLeaf<'_>, word: &PageWord, frame: FrameIndex) -> bool {
    held.occupy();
    let claimed = word.try_fill(frame).is_ok();
    if !claimed {
        held.vacated();
    }
    claimed
}

/// Ends the fill of a page, of which `arrived` bytes or more are there, of a file of `size` bytes. The page is handed
/// to `take` and becomes READY, or becomes EMPTY again if bytes are missing. Returns whether it is READY.
pub(crate) fn publish_page(
    file: &CachedFile,
    held: &HeldLeaf<'_>,
    filled: &FilledPage,
    size: u64,
    arrived: u64,
    flags: PublishFlags,
    take: impl FnOnce(&FilledPage),
) -> bool {
    let &FilledPage { page, frame } = filled;
    let page_bytes = file.core().page_bytes() as u64;
    let valid = page_bytes.min(size.saturating_sub(file.start_of(page)));
    let word = held.word(page);
    if arrived < valid || valid == 0 {
        word.wake(word.abort_fill());
        held.vacated();
        file.free_frame(frame);
        return false;
    }
    // write.W5: nothing but zeros beyond the size.
    // SAFETY: the rest of the filler's frame.
    unsafe {
        let bytes = file.cache().frames.bytes(frame);
        copy::zero(bytes.add(valid as usize), (page_bytes - valid) as usize);
    }
    take(filled);
    word.wake(word.finish_fill(frame, flags));
    true
}

impl Run {
    /// The memory of its pages. The pages own it until the run is finished.
    pub(crate) fn memory(&self, file: &CachedFile) -> Segments {
        let page_bytes = file.core().page_bytes();
        let frames = self.frames.iter().map(|&frame| file.cache().frames.bytes(frame));
        // SAFETY: the frames of pages that are FILLING, of a file that the reader keeps.
        frames.map(|bytes| unsafe { Segment::new(bytes, page_bytes) }).collect()
    }

    /// Has the back end read and finish the run; as for [`background::start_read`]. The memory beyond the size is
    /// read as well.
    pub(crate) fn start<K: Send + 'static>(
        self,
        file: &Arc<CachedFile>,
        keep: K,
        completion: Option<Arc<ReadsInFlight>>,
        ring: Option<&Arc<SharedRing>>,
    ) -> bool {
        let offset = file.start_of(self.first);
        let bytes = (self.frames.len() * file.core().page_bytes()) as u64;
        let bytes = bytes.min(self.size.saturating_sub(offset));
        let segments = self.memory(file);
        // A failed or short read leaves its pages EMPTY: the next reader reads them.
        let publish = move |file: &CachedFile, moved| {
            let _ = self.finish(file, &mut Leaves::new(file), moved, &mut |_| {});
        };
        background::start_read(file, ring, (offset, bytes), segments, keep, completion, publish)
    }

    /// Ends the fills of the run's pages after `moved` bytes arrived. Returns whether all are READY. `leaves`: the one
    /// that is held, if any, may be the first page's.
    pub(crate) fn finish<'f>(
        &self,
        file: &'f CachedFile,
        leaves: &mut Leaves<'f>,
        moved: u64,
        take: &mut dyn FnMut(&FilledPage),
    ) -> bool {
        let run_start = file.start_of(self.first);
        let mut ready = 0;
        for (page, frame) in self.first.onwards().zip(self.frames.iter().copied()) {
            let arrived = (run_start + moved).saturating_sub(file.start_of(page));
            let held = leaves.hold(page, false).expect("a FILLING page holds its leaf");
            let flags = PublishFlags {
                referenced: !self.prefetched,
                marker: self.marker && page == self.first,
                dirty: false,
            };
            if !publish_page(
                file,
                held,
                &FilledPage { page, frame },
                self.size,
                arrived,
                flags,
                &mut *take,
            ) {
                continue;
            }
            debug_assert!(self.first + ready as u64 == page, "bytes arrive in order");
            ready += 1;
            if ready % RUN_NOTED == 0 {
                held.record_run(page, frame);
            }
        }
        file.cache().counters.local().filled(ready as u64);
        let published = self.first.onwards().zip(self.frames.iter().copied()).take(ready);
        let core = file.core();
        let origin = if self.prefetched { PageOrigin::Prefetched } else { PageOrigin::Missed };
        file.cache().insert_pages(published.map(|(page, frame)| ReadyPage {
            frame,
            core,
            page,
            origin,
        }));
        ready == self.frames.len()
    }
}
