//! The page cache in models, which have no files: nothing is mapped.

use std::convert::Infallible;
use std::os::fd::BorrowedFd;

/// No value exists.
pub(crate) struct Inode(Infallible);

impl Inode {
    pub(crate) fn new(_: (u64, u64)) -> Inode {
        unreachable!("models have no files with mapped backing")
    }

    pub(crate) fn read_with(
        &self,
        _: BorrowedFd<'_>,
        _: usize,
        _: u64,
        _: impl FnOnce(*const u8) -> bool,
    ) -> bool {
        match self.0 {}
    }

    pub(crate) fn readable(&self) -> u64 {
        match self.0 {}
    }

    pub(crate) fn is_mapped(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn map(&self, _: BorrowedFd<'_>, _: u64) -> bool {
        match self.0 {}
    }

    pub(crate) fn drop_pages(&self, _: u64, _: u64) {
        match self.0 {}
    }

    pub(crate) fn unmap(&self) {
        match self.0 {}
    }

    pub(crate) fn begin_change(&self, _: u64, _: u64) {
        match self.0 {}
    }

    pub(crate) fn end_change(&self, _: u64, _: u64) {
        match self.0 {}
    }

    pub(crate) fn note_cut(&self, _: u64) {
        match self.0 {}
    }
}

pub(crate) fn maps_what_it_reads(_: BorrowedFd<'_>) -> bool {
    false
}
