//! Which file it is, whatever its names.

/// An inode, by its device and number, for as long as somebody has it open.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

impl FileId {
    pub(crate) fn of(stat: &rustix::fs::Stat) -> FileId {
        FileId { device: stat.st_dev, inode: stat.st_ino }
    }

    /// For tests of what is given it otherwise.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn of_fd(fd: impl std::os::fd::AsFd) -> FileId {
        FileId::of(&rustix::fs::fstat(fd).expect("a descriptor"))
    }
}
