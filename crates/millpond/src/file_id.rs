//! The identity of a file, under any of its names.

/// An inode, by its device and number, for as long as a descriptor of it is open.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

impl FileId {
    pub(crate) fn of(stat: &rustix::fs::Stat) -> FileId {
        FileId { device: stat.st_dev, inode: stat.st_ino }
    }

    /// For tests of code that is otherwise given the id.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn of_fd(fd: impl std::os::fd::AsFd) -> FileId {
        FileId::of(&rustix::fs::fstat(fd).expect("a descriptor"))
    }
}
