//! A file's place at the keeper. It is taken before the file's first page is DIRTY, and given up after the last
//! handle is dropped and all pages are written back.
//!
//! The keeper sets a file to the size that it knows. So it must know the right size, also of a file that it adopts
//! while other threads change the size. A change of the size is stored in the core first, and then sent to the
//! keeper, under `sizes`. An adoption publishes the place and sends the core's size in one step under `sizes`. So the
//! last thread that sends a size has read the last size.
//!
//! Locks: `adopting`, under range guards. A thread that holds it calls the keeper or the back end, and waits for no
//! guard. The lock keeps a file from being adopted in the middle of a change that was not announced. Then `sizes`.
//!
//! Argued: `slot` is stored under `adopting` and `sizes`, and by `release_keeper_slot` under a guard over the whole file. A thread
//! that loads it without those locks holds a guard, and loads it again under `adopting` if it finds none. Release and
//! Acquire serve `keeper_slot` alone: they order the tables' entries for the place before it. No model has guards and the
//! keeper.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::event::event;
use crate::inode::CachedFile;
use crate::io::backend::ChangeObserver;
use crate::recovery::{EntryUse, Intent, Recovery};
use crate::sync::MutexExt;
use crate::units::{FrameIndex, PageIndex};

impl CachedFile {
    fn recovery(&self) -> Option<&Recovery> {
        self.cache().frames.recovery().map(Arc::as_ref)
    }

    fn kept(&self) -> Option<(&Recovery, EntryUse)> {
        let recovery = self.recovery()?;
        let word = self.kept.slot.load(Acquire);
        (word != 0).then(|| (recovery, EntryUse::from_word(word)))
    }

    /// Whether pages of the file survive this process from now on, as far as the engine wants that. Each write that
    /// may stay in the cache calls this, so the next write notices a keeper that died. Caller: holds a writer's
    /// guard.
    pub(crate) fn keep(&self) -> bool {
        let Some(recovery) = self.recovery() else { return true };
        if !recovery.has_keeper() {
            recovery.report_lost();
            return false;
        }
        if self.kept.slot.load(Acquire) != 0 {
            return true;
        }
        let one = self.kept.adopting.acquire();
        if self.kept.slot.load(Acquire) != 0 {
            return true;
        }
        let Some(fd) = self.backing.descriptor(true) else { return false };
        let size = self.core().size.get();
        let adopted =
            recovery.adopt(fd, self.id.device, self.id.inode, size, self.core().page_shift);
        match adopted {
            Ok(slot) => {
                self.kept.changes.enter(slot, fd);
                let _told = self.kept.sizes.acquire();
                self.kept.slot.store(slot.word(), Release);
                recovery.set_size(slot, self.core().size.get());
                true
            }
            Err(error) => {
                let inode = self.id.inode;
                drop(one);
                event!(debug, inode, %error, "a file without a keeper: its writes go through");
                false
            }
        }
    }

    /// The keeper drops its descriptor. Caller: holds an exclusive guard over the whole file, of which no page is
    /// DIRTY.
    pub(crate) fn release_keeper_slot(&self) {
        if let Some((recovery, slot)) = self.kept() {
            self.kept.slot.store(0, Release);
            self.kept.changes.remove_entry();
            recovery.forget(slot);
        }
    }

    /// New contents of pages survive from here on, all or none, and with them a new size. To be called before the
    /// pages are published.
    pub(crate) fn commit(
        &self,
        pages: impl Iterator<Item = (PageIndex, FrameIndex)> + Clone,
        size: Option<u64>,
    ) {
        if let Some((recovery, slot)) = self.kept() {
            recovery.commit(slot, pages, size);
        }
    }

    /// The frame's bytes are at the back end, or older than the committed ones.
    pub(crate) fn forget_frame(&self, frame: FrameIndex) {
        if let Some(recovery) = self.recovery() {
            recovery.clean(frame);
        }
    }

    /// Calls `act`, which changes the file below the cache and then the cache's state of it. The keeper finishes the
    /// change if the process dies during the call.
    pub(crate) fn intending<R>(&self, intent: Intent, act: impl FnOnce() -> R) -> R {
        if self.recovery().is_none() {
            return act();
        }
        let _one = self.kept.adopting.acquire();
        let Some((recovery, slot)) = self.kept() else { return act() };
        recovery.set_intent(slot, intent);
        let outcome = act();
        recovery.clear_intent(slot);
        outcome
    }

    /// A caller is about to change the file below the cache without its back end. The file will be no longer than
    /// `reach`.
    pub(crate) fn begin_change(&self, reach: u64) {
        if self.recovery().is_some() {
            self.kept.changes.begin(reach);
        }
    }

    /// Ends what [`CachedFile::begin_change`] began.
    pub(crate) fn end_change(&self) {
        if self.recovery().is_some() {
            self.kept.changes.end(self.backing.descriptor(true));
        }
    }

    /// Changes the size, under an exclusive guard to the end of the file.
    pub(crate) fn set_size(&self, size: u64) {
        self.core().size.set(size);
        if self.recovery().is_some() {
            let _told = self.kept.sizes.acquire();
            if let Some((recovery, slot)) = self.kept() {
                recovery.set_size(slot, size);
            }
        }
    }

    /// The size that the keeper would set, if it has the file.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn keeper_size(&self) -> Option<u64> {
        let (recovery, slot) = self.kept()?;
        Some(recovery.tables().files[slot.index as usize].size.load(Acquire))
    }

    /// Whether DIRTY pages survive this process.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept().is_some()
    }
}
