//! Putting the pages of a write in place together.

use crate::cache::class::Class;
use crate::cache::evict::Arrival;
use crate::cache::page::{PageWord, Shown, State, Word};
use crate::cache::step::Hiding;
use crate::flush;
use crate::inode::leaves::Leaves;
use crate::units::FrameIndex;
use crate::write::{CHUNK_PAGES, Write};

impl Write<'_> {
    /// Puts the pages that were taken in place together, and drops the others.
    pub(super) fn install(
        &self,
        leaves: &mut Leaves<'_>,
        fresh: &[FrameIndex],
        moved: u64,
        size: u64,
        dirty: bool,
    ) {
        if let [frame] = fresh
            && size == self.size
            && moved == self.len
            && *frame != FrameIndex::NONE
            && self.replace(leaves, *frame, dirty)
        {
            if dirty {
                self.vacate(leaves, 1);
            }
            return;
        }
        let core = self.file.core();
        let cache = self.file.cache();
        let class = Class::page(core.page_shift);
        let shown = Shown { referenced: true, marker: false, dirty };
        let mut old = [FrameIndex::NONE; CHUNK_PAGES];
        let mut was_dirty = dirty;
        let mut hiding = Hiding::new(&core.epoch);
        for ((page, &frame), old) in self.first.onwards().zip(fresh).zip(&mut old) {
            let Ok(held) = leaves.hold(page, frame != FrameIndex::NONE) else { continue };
            let word = held.word(page);
            if frame == FrameIndex::NONE && word.load().state() == State::Empty {
                continue;
            }
            // A write that is dirty has done so before.
            if !dirty {
                held.occupy();
            }
            let was = hiding.hide(word);
            if was.is_ready() {
                held.vacated();
                *old = was.frame();
            }
        }
        // Before anything that tells of the write.
        hiding.finish();
        if dirty {
            let pages = self.first.onwards().zip(fresh.iter().copied());
            self.file.commit(pages, (size != self.size).then_some(size));
        }
        if size != self.size {
            self.file.set_size(size);
        }
        for ((page, &frame), old) in self.first.onwards().zip(fresh).zip(&mut old) {
            let Ok(held) = leaves.hold(page, false) else {
                if frame != FrameIndex::NONE {
                    cache.frames.free(frame, class);
                }
                continue;
            };
            let word = held.word(page);
            if word.load().state() != State::Hidden {
                // Had no leaf in the first pass, and was not hidden.
                if frame != FrameIndex::NONE {
                    cache.frames.free(frame, class);
                }
                continue;
            }
            let acknowledged = self.part(page).1 <= self.offset + moved;
            if frame != FrameIndex::NONE && acknowledged {
                if dirty {
                    self.supersede(word.load());
                }
                let change = word.show(frame, shown);
                was_dirty &= change.was.is_dirty();
                self.file.note(change);
                word.wake(change.sleepers());
                if *old == FrameIndex::NONE {
                    let arrival = Arrival { frame, core, page, prefetched: false, kept: dirty };
                    cache.arrived(std::iter::once(arrival));
                }
            } else {
                let change = word.drop_hidden();
                self.file.note(change);
                word.wake(change.sleepers());
                held.vacated();
                if *old != FrameIndex::NONE {
                    cache.discarded(std::mem::replace(old, FrameIndex::NONE), class);
                }
                if frame != FrameIndex::NONE {
                    cache.frames.free(frame, class);
                }
            }
        }
        // Those that are left have a fresh frame each, which is in place by now.
        cache.replaced(&mut old[..fresh.len()], fresh, class);
        // Pages that were DIRTY before are in the set, or will be put back (writeback.B2).
        if dirty && !was_dirty {
            flush::dirtied(self.file, self.first, self.last);
        }
    }

    /// A newer content of the page was committed and is about to be shown: from then on the old one
    /// must not survive alone (survival.K4).
    pub(super) fn supersede(&self, seen: Word) {
        if seen.is_dirty() || seen.is_under_writeback() {
            self.file.forget_frame(seen.frame());
        }
    }

    /// The same of a page that is READY: it may be written back and evicted meanwhile, and the pin
    /// keeps its frame from being used for another page, whose record this would be (survival.K7).
    pub(super) fn supersede_ready(&self, word: &PageWord) {
        let seen = word.load();
        let owes = seen.is_dirty() || seen.is_under_writeback();
        if !seen.is_ready() || !owes || !self.file.is_kept() {
            return;
        }
        self.file.cache().frames.meta(seen.frame()).pins.pin();
        let now = word.load();
        if now.is_ready() && now.frame() == seen.frame() {
            self.file.forget_frame(seen.frame());
        }
        flush::unpin(self.file, seen.frame());
    }

    /// Puts one page in place where it is READY, in one step.
    pub(super) fn replace(&self, leaves: &mut Leaves<'_>, frame: FrameIndex, dirty: bool) -> bool {
        let core = self.file.core();
        let Ok(held) = leaves.hold(self.first, false) else { return false };
        let shown = Shown { referenced: true, marker: false, dirty };
        let word = held.word(self.first);
        if !word.load().is_ready() {
            return false;
        }
        if dirty {
            self.file.commit(std::iter::once((self.first, frame)), None);
            self.supersede_ready(word);
        }
        match word.try_replace(frame, shown, &core.epoch) {
            Ok(change) => {
                let cache = self.file.cache();
                self.file.note(change);
                let class = Class::page(core.page_shift);
                cache.replaced(&mut [change.was.frame()], &[frame], class);
                if dirty && !change.was.is_dirty() {
                    flush::dirtied(self.file, self.first, self.first);
                }
                true
            }
            Err(_) => {
                // Evicted meanwhile, and so clean: the frame is committed anew with its page hidden.
                if dirty {
                    self.file.forget_frame(frame);
                }
                false
            }
        }
    }
}
