//! Putting the pages of a write in place together.

use crate::cache::policy::fifo::{PageOrigin, ReadyPage};
use crate::cache::table::page::{PageState, PageWord, PublishFlags, Word};
use crate::cache::table::step::Hiding;
use crate::inode::leaves::Leaves;
use crate::units::FrameIndex;
use crate::write::{CHUNK_PAGES, Write, drop_hidden};
use crate::writeback;

impl Write<'_> {
    /// Puts the acknowledged pages in place together, and drops the others from the cache.
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
        self.install_hidden(leaves, fresh, moved, size, dirty);
    }

    /// As [`Write::install`], with the pages hidden first.
    fn install_hidden(
        &self,
        leaves: &mut Leaves<'_>,
        fresh: &[FrameIndex],
        moved: u64,
        size: u64,
        dirty: bool,
    ) {
        let mut old = [FrameIndex::NONE; CHUNK_PAGES];
        let old = &mut old[..fresh.len()];
        // Before any sign of the write is visible.
        self.hide_all(leaves, fresh, old, dirty);
        if dirty {
            let pages = self.first.onwards().zip(fresh.iter().copied());
            self.file.commit(pages, (size != self.size).then_some(size));
        }
        if size != self.size {
            self.file.set_size(size);
        }
        let were_dirty = self.publish_all(leaves, fresh, old, moved, dirty);
        if old.iter().any(|&old| old != FrameIndex::NONE) {
            self.file.cache().frames.release_many(old, self.file.core().page_class());
        }
        // Pages that were DIRTY before are in the set, or will be put back (state.WB2).
        if dirty && !were_dirty {
            writeback::record_dirty(self.file, self.first, self.last);
        }
    }

    /// Hides the pages, and fences. Fills `old` with the frames of those that were READY.
    fn hide_all(
        &self,
        leaves: &mut Leaves<'_>,
        fresh: &[FrameIndex],
        old: &mut [FrameIndex],
        dirty: bool,
    ) {
        let mut hiding = Hiding::new(&self.file.core().epoch);
        for ((page, &frame), old) in self.first.onwards().zip(fresh).zip(old) {
            let Ok(held) = leaves.hold(page, frame != FrameIndex::NONE) else { continue };
            let word = held.word(page);
            if frame == FrameIndex::NONE && word.load().state() == PageState::Empty {
                continue;
            }
            // A write into the cache (`dirty`) has done so before.
            if !dirty {
                held.occupy();
            }
            let was = hiding.hide(word);
            if was.is_ready() {
                held.vacated();
                *old = was.frame();
            }
        }
        hiding.finish();
    }

    /// Shows the acknowledged pages, with their fresh frames, and makes the other hidden pages EMPTY. Returns whether
    /// all shown pages had been DIRTY.
    fn publish_all(
        &self,
        leaves: &mut Leaves<'_>,
        fresh: &[FrameIndex],
        old: &mut [FrameIndex],
        moved: u64,
        dirty: bool,
    ) -> bool {
        let (core, cache) = (self.file.core(), self.file.cache());
        let class = core.page_class();
        let shown = PublishFlags { referenced: true, marker: false, dirty };
        let mut were_dirty = true;
        for ((page, &frame), old) in self.first.onwards().zip(fresh).zip(old) {
            // A page that had no leaf when the others were hidden is not HIDDEN.
            let held = leaves.hold(page, false).ok();
            let hidden = held.filter(|held| held.word(page).load().state() == PageState::Hidden);
            let Some(held) = hidden else {
                self.free(&[frame]);
                continue;
            };
            let word = held.word(page);
            let acknowledged = self.part(page).1 <= self.offset + moved;
            if frame != FrameIndex::NONE && acknowledged {
                if dirty {
                    self.supersede(word.load());
                }
                let spare = (*old != FrameIndex::NONE)
                    .then(|| cache.frames.inherit_queue_node(*old, frame));
                let change = word.publish(frame, shown);
                were_dirty &= change.was.is_dirty();
                self.file.note(change);
                word.wake(change.sleepers());
                if let Some(spare) = spare {
                    cache.frames.set_queue_node(*old, spare);
                } else {
                    let arrival = ReadyPage { frame, core, page, origin: PageOrigin::Written };
                    cache.insert_pages(std::iter::once(arrival));
                }
            } else {
                drop_hidden(self.file, held, word);
                if *old != FrameIndex::NONE {
                    cache.release_discarded(std::mem::replace(old, FrameIndex::NONE), class);
                }
                self.free(&[frame]);
            }
        }
        were_dirty
    }

    /// A newer content of the page was committed and is about to be shown. From then on the old content must not
    /// survive alone (recovery.K4).
    pub(super) fn supersede(&self, seen: Word) {
        if seen.is_dirty() || seen.is_under_writeback() {
            self.file.forget_frame(seen.frame());
        }
    }

    /// The same for a page that is READY. It may be written back and evicted during the call. The pin keeps its frame
    /// from being used for another page, whose record would be superseded instead (recovery.K7).
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
        self.file.unpin(seen.frame());
    }

    /// Puts one page in place where it is READY, in one step.
    pub(super) fn replace(&self, leaves: &mut Leaves<'_>, frame: FrameIndex, dirty: bool) -> bool {
        let core = self.file.core();
        let Ok(held) = leaves.hold(self.first, false) else { return false };
        let shown = PublishFlags { referenced: true, marker: false, dirty };
        let word = held.word(self.first);
        let seen = word.load();
        if !seen.is_ready() {
            return false;
        }
        if dirty {
            self.file.commit(std::iter::once((self.first, frame)), None);
            self.supersede_ready(word);
        }
        let (frames, old) = (&self.file.cache().frames, seen.frame());
        let spare = frames.inherit_queue_node(old, frame);
        match word.try_replace(frame, shown, &core.epoch) {
            Ok(change) => {
                debug_assert_eq!(change.was.frame(), old, "a guard excludes fills");
                frames.set_queue_node(old, spare);
                self.file.note(change);
                frames.release(old, core.page_class());
                if dirty && !change.was.is_dirty() {
                    writeback::record_dirty(self.file, self.first, self.first);
                }
                true
            }
            Err(_) => {
                frames.set_queue_node(frame, spare);
                // Evicted since the look, and so clean: the frame is committed again with its page hidden.
                if dirty {
                    self.file.forget_frame(frame);
                }
                false
            }
        }
    }
}
