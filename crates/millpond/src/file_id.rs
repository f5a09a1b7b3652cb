//! Which file it is, whatever its names.

/// An inode, by its device and number, for as long as somebody has it open.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}
