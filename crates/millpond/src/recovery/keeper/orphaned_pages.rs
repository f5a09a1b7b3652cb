//! The dirty pages of a dead process: the latest contents of each page, from its tables.

use std::collections::HashMap;
use std::io;

use crate::memory::no_memory;
use crate::recovery::layout::{EntryUse, FileEntryWords, OpWords, RecordWords};
use crate::units::PageIndex;

/// A dirty page: the frame, and the write sequence of its contents.
#[derive(Clone, Copy)]
pub(super) struct DirtyPage {
    pub(super) page: PageIndex,
    pub(super) sequence: u64,
    pub(super) frame: u32,
}

/// Collects dirty pages by file word.
#[derive(Default)]
pub(super) struct DirtyPages(HashMap<u64, Vec<DirtyPage>>);

impl DirtyPages {
    /// Notes the page of a frame, if it is dirty; ENOMEM where the heap has no room.
    pub(super) fn note(
        &mut self,
        ops: &[OpWords],
        frame: u32,
        record: RecordWords,
    ) -> io::Result<()> {
        if record.is_dirty(ops) {
            let RecordWords { file, page, sequence, .. } = record;
            let page = PageIndex(page);
            self.0.try_reserve(1).map_err(|_| no_memory())?;
            let pages = self.0.entry(file).or_default();
            pages.try_reserve(1).map_err(|_| no_memory())?;
            pages.push(DirtyPage { page, sequence, frame });
        }
        Ok(())
    }

    /// The latest contents of each page of `file`, by page.
    pub(super) fn latest(&mut self, file: EntryUse) -> Vec<DirtyPage> {
        let mut pages = self.0.remove(&file.word()).unwrap_or_default();
        pages.sort_unstable_by_key(|dirty| (dirty.page, std::cmp::Reverse(dirty.sequence)));
        pages.dedup_by_key(|dirty| dirty.page);
        pages
    }
}

/// The size of `file`, given its entry and the op slots.
pub(super) fn size_of(file: EntryUse, entry: &FileEntryWords, ops: &[OpWords]) -> u64 {
    ops.iter().find_map(|op| op.size_of(file)).unwrap_or(entry.size)
}
