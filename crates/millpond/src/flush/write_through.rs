//! Files whose writes go through for a while, or for good: what waits is written back first.

use std::sync::atomic::Ordering::AcqRel;
use std::sync::{Arc, Weak};

use millpond_rangelock::Mode;

use crate::error::{Op, Result};
use crate::flush::dirty_pages::write_back;
use crate::inode::space;
use crate::inode::{CachedFile, Shared, registry};
use crate::options::WriteMode;
use crate::units::PageIndex;

impl CachedFile {
    /// Has writes go through until [`CachedFile::resume_writeback`], and writes back what waits: when
    /// this returns, the back end has it all, and the keeper has nothing to do with the file, which
    /// others may change; and the flags of its descriptors are as they were given.
    pub(crate) fn suspend_writeback(&self) -> Result<()> {
        // AcqRel: before the guard is asked for. A holder of one that conflicts may not have seen
        // it, and is waited for; a later holder has. Argued: the release of the guard that is asked
        // for here comes after this, and before the next guard; no model has guards of the range
        // lock.
        self.through.fetch_add(1, AcqRel);
        let flushed = self.flush_and_trim(true);
        self.backing.set_plain(true);
        flushed
    }

    /// Writes back what waits, and gives back space that was reserved for more: nothing is left to
    /// be done later that would show in the file's times.
    pub(crate) fn flush_and_trim(&self, release_entry: bool) -> Result<()> {
        if self.opened_mode == WriteMode::Through {
            return Ok(());
        }
        let guard = self.lock(0, u64::MAX, Mode::Exclusive);
        write_back(self, PageIndex::FIRST, PageIndex::LAST, Op::Sync)?;
        space::trim(self, self.core().size.get());
        if release_entry {
            self.let_go();
        }
        drop(guard);
        Ok(())
    }

    /// Parts all files of the engine from its keeper, which writes what is dirty: writes that begin later
    /// go through.
    ///
    /// Files are written back first, so that the keeper finds nothing to write. The keeper may have
    /// more luck with what can't be written back now; until it is done the guards of those files
    /// are held, so that no write comes in between, and the flusher writes nothing but what the
    /// keeper writes.
    pub(crate) fn detach_keeper(shared: &Arc<Shared>) {
        let Some(survival) = shared.cache.frames.survival() else { return };
        survival.part();
        let files: Vec<_> = registry()
            .all()
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|file| Arc::ptr_eq(&file.shared, shared))
            .collect();
        let mut held = Vec::new();
        for file in &files {
            // Before the guard is asked for, as in `suspend_writeback`.
            file.stay_through();
            if file.flush_and_trim(true).is_err() {
                held.push(file.lock(0, u64::MAX, Mode::Exclusive));
            }
        }
        survival.goodbye();
        drop(held);
    }
}
