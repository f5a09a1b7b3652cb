//! Writes past the cache.
//!
//! All cached pages of the range are hidden first and dropped in the end, so readers see the old bytes or the new
//! ones. After a failed write, pages that were not overwritten are published again where they are still needed. The back
//! end's write lies between [`Write::begin_bypass`] and [`Write::end_bypass`], for callers that have several such
//! writes in flight at once.

use crate::cache::table::HeldLeaf;
use crate::cache::table::page::{PageState, PageWord, PublishFlags, Word};
use crate::cache::table::step::Hiding;
use crate::error::{Op, Result};
use crate::inode::space;
use crate::inode::{Blocking, CachedFile};
use crate::options::WriteMode;
use crate::units::{FrameIndex, PageIndex};
use crate::write::{Account, Write, Written};
use crate::writeback::state::Copy;
use crate::writeback::{self, Durability};

/// The hidden pages of a write past the cache.
#[must_use]
#[derive(Clone, Copy)]
pub(crate) struct BypassWrite {
    /// Pages of the range may be hidden.
    is_cached: bool,
}

impl Write<'_> {
    /// A write past the cache. None of its pages stays cached.
    pub(super) fn write_past_cache(&self) -> Result<usize> {
        let around = self.begin_bypass(Blocking::Wait)?;
        let written = match self.file.untorn {
            None => self.transfer(self.src),
            Some(_) => {
                let account = Account::open(self.file, self.how.durable, self.offset + self.len);
                account.close(self.file, self.transfer_blocks(self.src), Blocking::Wait)
            }
        };
        self.end_bypass(written, around)
    }

    /// Hides the pages. After that, no write-back of them is in flight. With [`Blocking::Try`], the caller has
    /// checked that [`Write::has_to_wait`] is false.
    pub(crate) fn begin_bypass(&self, blocking: Blocking) -> Result<BypassWrite> {
        let file = self.file;
        if blocking == Blocking::Wait {
            self.clear_end()?;
        }
        // Cached pages keep their leaf. No page is added: the guard is ours (page.W3).
        let is_there = |word: Word| word.state() != PageState::Empty;
        if !file.core().any_word(&file.cache().frames, self.first, self.last, is_there) {
            return Ok(BypassWrite { is_cached: false });
        }
        // Under our guard, no writer makes the pages DIRTY again.
        let kept = (blocking == Blocking::Wait).then(|| self.pages_to_clean());
        for (first, last) in kept.into_iter().flatten() {
            if writeback::needs_writeback(file, first, last) {
                writeback::redirty_suspects(file, first, last);
                writeback::write_back(file, first, last, Op::Write)?;
            }
        }
        hide_pages(file, self.first, self.last);
        writeback::await_ends(file, self.first, self.last);
        Ok(BypassWrite { is_cached: true })
    }

    /// Whether [`Write::begin_bypass`] would have to wait: to write back pages itself, or for write-backs of pages
    /// that it hides, as the flusher may claim a DIRTY page at any time. Under the guard, a result of false stays
    /// false.
    pub(crate) fn has_to_wait(&self) -> bool {
        let end = self.offset + self.len;
        writeback::needs_writeback(self.file, self.first, self.last)
            || writeback::has_pages_at_risk(self.file, end)
            || (self.offset > self.size && space::has_reserved_ahead(self.file, self.size))
    }

    /// To be called before a write past the cache. After it, no dirty page counts on blocks that the write may free
    /// (space.SP2), and none are reserved where the write leaves a hole (space.SP5). Caller: has hidden no page of
    /// the file.
    pub(super) fn clear_end(&self) -> Result<()> {
        writeback::write_back_at_risk(self.file, self.offset + self.len)?;
        if self.offset > self.size && space::has_reserved_ahead(self.file, self.size) {
            space::trim(self.file, self.size);
        }
        Ok(())
    }

    /// After a write past the cache that moved `moved` bytes, with the file's size set.
    pub(super) fn end_cleared(&self, moved: u64) {
        if self.offset + self.len > self.size {
            space::end_moved(self.file, self.size, moved == self.len);
        }
    }

    /// The pages that must be clean before the back end is given new bytes for them: those that are not overwritten
    /// whole, and all pages of a file with a keeper. Otherwise the keeper could write an old page over a part of the
    /// new bytes.
    fn pages_to_clean(&self) -> impl Iterator<Item = (PageIndex, PageIndex)> {
        let all = self.file.is_kept().then_some((self.first, self.last));
        let ends = [self.first, self.last].into_iter().filter(|&page| self.keeps_rest(page));
        all.into_iter().chain(ends.map(|page| (page, page)))
    }

    /// Records the outcome of the back end's write.
    pub(crate) fn end_bypass(&self, written: Written, around: BypassWrite) -> Result<usize> {
        let Written { moved, error, epoch, durability } = written;
        let file = self.file;
        let end = if around.is_cached { self.acknowledged(moved) } else { self.offset + moved };
        let size = match self.mode {
            WriteMode::Through => self.size_after(moved),
            WriteMode::Back => self.size_trimmed(moved, end),
        };
        if size > self.size {
            file.set_size(size);
        }
        let is_durable = matches!(durability, Durability::Durable);
        if !is_durable && moved > 0 {
            file.writeback.record_written(file.cache(), self.first, self.last, Copy::None, epoch);
        }
        self.note_whole_pages(moved, is_durable);
        self.end_cleared(moved);
        if around.is_cached {
            self.drop_or_publish(end);
        }
        self.result(end - self.offset, error, durability)
    }

    /// The end of the bytes that count of a write past the cache: a page that is not durable yet is overwritten
    /// whole, or stays as it was.
    pub(super) fn acknowledged(&self, moved: u64) -> u64 {
        let end = self.offset + moved;
        let page = self.file.page_of(end);
        let word = self.file.core().hold(self.file.cache(), page, false);
        match word.map(|held| held.word(page).load()) {
            Ok(seen) if moved < self.len && (seen.is_dirty() || seen.is_unstable()) => {
                self.file.start_of(page).max(self.offset)
            }
            _ => end,
        }
    }

    /// The size after a write past the cache, in mode Back, of which `moved` bytes were acknowledged and those before
    /// `end` count. The back end may have stored more, but its file must never be longer than ours: the excess is cut
    /// off, or else counts.
    pub(super) fn size_trimmed(&self, moved: u64, end: u64) -> u64 {
        let size = if end > self.offset { self.size.max(end) } else { self.size };
        let end = self.offset + self.len;
        // Within the file, the guard does not keep other threads from moving its end; and no byte was stored beyond
        // it.
        if moved == self.len || end <= self.size {
            return size;
        }
        match self.file.backing.len() {
            // Cut off, as the next write beyond it would expose the stored bytes.
            Ok(kept) if kept > size && space::set_len(self.file, size).is_err() => kept.min(end),
            _ => size,
        }
    }

    /// Makes those hidden pages EMPTY of which the back end has new bytes up to `end`, and clean ones. Shows the
    /// others again. A page that is UNSTABLE and was not overwritten whole becomes DIRTY: a device that failed may
    /// have lost bytes that no sync has covered, and this is their only copy.
    pub(super) fn drop_or_publish(&self, end: u64) {
        let file = self.file;
        let class = file.core().page_class();
        let shown = PublishFlags { referenced: true, ..PublishFlags::default() };
        file.core().for_each_page(file.cache(), self.first, self.last, &mut |held, page, word| {
            let seen = word.load();
            if seen.state() != PageState::Hidden {
                return;
            }
            let written = self.part(page).1 <= end;
            if !written && (seen.is_dirty() || seen.is_unstable()) {
                if !seen.is_dirty() {
                    file.commit(std::iter::once((page, seen.frame())), None);
                }
                let change = word.publish(seen.frame(), PublishFlags { dirty: true, ..shown });
                file.note(change);
                word.wake(change.sleepers());
                writeback::record_dirty(file, page, page);
                return;
            }
            drop_hidden(file, held, word);
            if seen.frame() != FrameIndex::NONE {
                file.cache().release_discarded(seen.frame(), class);
            }
        });
    }
}

/// Hides the READY pages from `first` to `last`, and fences. Caller: exclusive guard.
pub(crate) fn hide_pages(file: &CachedFile, first: PageIndex, last: PageIndex) {
    let core = file.core();
    let mut hiding = Hiding::new(&core.epoch);
    core.for_each_page(file.cache(), first, last, &mut |held, _, word| {
        if word.load().is_ready() {
            held.occupy();
            let was = hiding.hide(word);
            // Evicted between the look and the hiding: the page's own hold was released with it.
            if was.is_ready() {
                held.vacated();
            }
        }
    });
    hiding.finish();
}

/// Makes the HIDDEN pages from `first` to `last` EMPTY. Caller: hid them.
pub(crate) fn drop_pages(file: &CachedFile, first: PageIndex, last: PageIndex) {
    let class = file.core().page_class();
    file.core().for_each_page(file.cache(), first, last, &mut |held, _, word| {
        let seen = word.load();
        if seen.state() == PageState::Hidden {
            drop_hidden(file, held, word);
            if seen.frame() != FrameIndex::NONE {
                file.cache().release_discarded(seen.frame(), class);
            }
        }
    });
}

/// Makes a HIDDEN page EMPTY. Caller: hid it, and frees its frame.
pub(crate) fn drop_hidden(file: &CachedFile, held: &HeldLeaf<'_>, word: &PageWord) {
    let change = word.drop_hidden();
    file.note(change);
    word.wake(change.sleepers());
    held.vacated();
}
