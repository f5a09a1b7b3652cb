//! The table's leaves, to look at many pages in a row.

use crate::cache::table::{HeldLeaf, HoldError};
use crate::inode::CachedFile;
use crate::units::PageIndex;

/// The leaf that was used last.
pub(crate) struct Leaves<'c> {
    file: &'c CachedFile,
    held: Option<HeldLeaf<'c>>,
}

impl<'c> Leaves<'c> {
    pub(crate) fn new(file: &'c CachedFile) -> Leaves<'c> {
        Leaves { file, held: None }
    }

    pub(crate) fn hold(
        &mut self,
        page: PageIndex,
        create: bool,
    ) -> std::result::Result<&HeldLeaf<'c>, HoldError> {
        if !self.held.as_ref().is_some_and(|held| held.covers(page)) {
            self.held = None;
            self.held = Some(self.file.core().hold(self.file.cache(), page, create)?);
        }
        Ok(self.held.as_ref().expect("just set"))
    }
}
