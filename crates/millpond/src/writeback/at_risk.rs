//! Writes back dirty pages whose blocks a bypass write may free (space.SP2).

use crate::error::{Op, Result};
use crate::inode::CachedFile;
use crate::options::WriteMode;
use crate::units::PageIndex;
use crate::writeback::dirty_pages::write_back;

/// Writes back the pages that a bypass write up to `end` puts at risk: the pages beyond the end of
/// the backend's file. Afterwards that is the end of the file, until the caller's guard is
/// released.
///
/// # Errors
///
/// Errors of that write-back. The caller must not make its write then.
pub(crate) fn write_back_at_risk(file: &CachedFile, end: u64) -> Result<()> {
    match first_at_risk(file, end) {
        Some(first) => write_back(file, first, PageIndex::LAST, Op::Write),
        None => Ok(()),
    }
}

/// Whether [`write_back_at_risk`] would have to write back pages.
pub(crate) fn has_pages_at_risk(file: &CachedFile, end: u64) -> bool {
    first_at_risk(file, end).is_some()
}

fn first_at_risk(file: &CachedFile, end: u64) -> Option<PageIndex> {
    // A file without dirty pages is as long at the backend as here (state.WB1).
    if file.opened_mode == WriteMode::Through
        || !file.writeback.has_begun()
        || !file.has_dirty_pages()
    {
        return None;
    }
    let len = file.backing.len().unwrap_or(0);
    (end > len && len < file.core().size.get()).then(|| file.page_of(len))
}
