//! Write-back, as far as operations wait for it. Every write goes through, so there is none yet.

use crate::cache::table::PageIndex;
use crate::cached::CachedFile;
use crate::error::Result;

/// Pages at the ends of a range that are covered in part.
pub(crate) type Edges = [Option<PageIndex>; 2];

/// Before the back end changes the HIDDEN pages from `first` to `last`, and they are dropped: waits
/// until none of them is under WRITEBACK (W7), and writes back those of `edges` that are DIRTY, as
/// some of their bytes stay. Caller: who hid them, under an exclusive guard.
///
/// # Errors
///
/// An edge could not be written back: it is still DIRTY, and the caller shows the pages again.
pub(crate) fn settle(
    file: &CachedFile,
    first: PageIndex,
    last: PageIndex,
    edges: Edges,
) -> Result<()> {
    let _ = (file, first, last, edges);
    Ok(())
}
