//! What the keeper must know of a file, and when it is told.
//!
//! Between the file's operations and `survival`, which has the tables and the protocol.
//!
//! - **P1** A file is handed to the keeper before its first page becomes DIRTY, and taken back when
//!   nothing is dirty and writes go through, or its last handle is gone. Where the keeper does not
//!   take it, writes go through.
//! - **P2** While the keeper has the file, every change of its size is told: the keeper sets the file
//!   to exactly the size that it knows. Who changes the size has a guard to the end of the file, and
//!   tells after the core knows; `slot` reads the core's size under the lock that tellers take.
//! - **P3** A shrinking file is announced before the back end is told, and settled after the pages
//!   beyond its end are gone.
//! - **P4** A write commits its pages before they are shown, and cleans the dirty frames that they
//!   replace before that, too (K4 of `survival`).
//!
//! A page that a failed sync makes DIRTY again is not the keeper's: the kernel had taken its bytes.

use std::io;
use std::sync::atomic::Ordering::Acquire;
use std::sync::{Mutex, MutexGuard};

use crate::cache::frame::FrameIndex;
use crate::cache::table::PageIndex;
use crate::cached::CachedFile;
use crate::survival::{FileSlot, Intent, Survival};

/// Whether the keeper has the file.
#[derive(Default)]
pub(crate) struct Kept {
    slot: Mutex<Option<FileSlot>>,
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, Option<FileSlot>> {
        self.slot.lock().expect("no panic under the lock")
    }

    /// Hands the file over if it was not yet (P1). `None`: there is no keeper, and need not be.
    pub(crate) fn slot(&self, file: &CachedFile) -> io::Result<Option<FileSlot>> {
        let (Some(survival), Some(fd)) = (survival(file), file.backing.descriptor()) else {
            return Ok(None);
        };
        // Acquire: pairs with the Release of `Engine::leave_keeper`.
        if file.shared.parted.load(Acquire) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let mut slot = self.lock();
        if slot.is_none() {
            let core = file.core();
            let (device, inode) = file.id();
            let size = core.size.load(Acquire);
            *slot = Some(survival.adopt(fd, device, inode, size, core.page_shift)?);
        }
        Ok(*slot)
    }

    /// The core knows a new size (P2).
    pub(crate) fn resized(&self, file: &CachedFile) {
        if let Some(survival) = survival(file)
            && let Some(slot) = *self.lock()
        {
            survival.set_size(slot, file.core().size.load(Acquire));
        }
    }

    /// The back end is about to cut the file to `len` bytes (P3).
    pub(crate) fn begin_cut(&self, file: &CachedFile, len: u64) {
        if let Some(survival) = survival(file)
            && let Some(slot) = *self.lock()
        {
            survival.set_intent(slot, Intent::Truncate { len });
        }
    }

    /// It has, or has refused.
    pub(crate) fn end_cut(&self, file: &CachedFile) {
        if let Some(survival) = survival(file)
            && let Some(slot) = *self.lock()
        {
            survival.clear_intent(slot);
        }
    }

    /// New contents of pages, and a new size if given, count from now on (P4). Caller: exclusive
    /// guard, and [`Kept::slot`] before.
    pub(crate) fn commit(
        &self,
        file: &CachedFile,
        pages: impl Iterator<Item = (PageIndex, FrameIndex)> + Clone,
        size: Option<u64>,
    ) {
        if let Some(survival) = survival(file)
            && let Some(slot) = *self.lock()
        {
            survival.commit(slot, pages, size);
        }
    }

    /// The frame is not dirty any more: its bytes are in the back end, or replaced.
    #[inline]
    pub(crate) fn clean(&self, file: &CachedFile, frame: FrameIndex) {
        if let Some(survival) = survival(file) {
            survival.clean(frame);
        }
    }

    /// Nothing is dirty, and the caller sees to it that nothing becomes so meanwhile.
    pub(crate) fn forget(&self, file: &CachedFile) {
        if let Some(survival) = survival(file)
            && let Some(slot) = self.lock().take()
        {
            survival.forget(slot);
        }
    }
}

#[inline]
fn survival(file: &CachedFile) -> Option<&Survival> {
    file.cache().frames.survival()
}
