//! Switches files to write-through, for a time or permanently. Dirty pages are written back first.

use std::sync::atomic::Ordering::AcqRel;
use std::sync::{Arc, Weak};

use millpond_rangelock::Mode;

use crate::error::{Op, Result};
use crate::inode::space;
use crate::inode::{CachedFile, Shared, registry};
use crate::options::WriteMode;
use crate::units::PageIndex;
use crate::writeback::dirty_pages::write_back;

impl CachedFile {
    /// Makes writes go through until [`CachedFile::resume_writeback`], and writes back dirty pages.
    /// When this returns, the backend has all bytes, the keeper has nothing to write for the file,
    /// which other programs may change, and its descriptors have their original flags.
    pub(crate) fn suspend_writeback(&self) -> Result<()> {
        // AcqRel: before the guard is acquired. The holder of a conflicting guard may not have seen
        // the change, and is waited for; a later holder has. Argued: the guard that is acquired
        // here is released after this and before the next guard. No model has guards of the range
        // lock.
        self.through.fetch_add(1, AcqRel);
        let flushed = self.flush_and_trim(true);
        self.backing.set_plain(true);
        flushed
    }

    /// Writes back dirty pages and trims reserved space, so that no later work shows in the times
    /// of the file.
    pub(crate) fn flush_and_trim(&self, release_entry: bool) -> Result<()> {
        if self.opened_mode == WriteMode::Through {
            return Ok(());
        }
        let guard = self.lock(0, u64::MAX, Mode::Exclusive);
        write_back(self, PageIndex::FIRST, PageIndex::LAST, Op::Sync)?;
        space::trim(self, self.core().size.get());
        if release_entry {
            self.release_keeper_slot();
        }
        drop(guard);
        Ok(())
    }

    /// Detaches all files of the engine from its keeper, which writes their dirty pages. Later
    /// writes go through.
    ///
    /// Files are written back first, so that the keeper finds nothing to write. If that fails, the
    /// keeper may succeed. Until it is done, the guards of those files are held. So no write comes
    /// in between, and the flusher writes only bytes that the keeper writes too.
    pub(crate) fn detach_keeper(shared: &Arc<Shared>) {
        let Some(recovery) = shared.cache.frames.recovery() else { return };
        recovery.begin_detach();
        let files: Vec<_> = registry()
            .all()
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|file| Arc::ptr_eq(&file.shared, shared))
            .collect();
        let mut held = Vec::new();
        for file in &files {
            // Before the guard is acquired, as in `suspend_writeback`.
            file.keep_write_through();
            if file.flush_and_trim(true).is_err() {
                held.push(file.lock(0, u64::MAX, Mode::Exclusive));
            }
        }
        recovery.detach();
        drop(held);
    }
}
