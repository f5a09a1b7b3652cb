//! The file systems whose mappings show the bytes that a read returns.

use std::os::fd::BorrowedFd;

/// File systems that read and map the same pages of the kernel's page cache. Not in the list:
///
/// - overlay: a mapping of a description that was opened before the copy-up shows the lower file;
/// - tmpfs: a fault in a hole allocates a page of the file system;
/// - ZFS: a mapping is a second copy of its own cache;
/// - network file systems and FUSE: the server may change a file without a notice.
pub const PAGE_CACHED: [i64; 6] = [
    0x0000_EF53, // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683E, // btrfs
    0xF2F5_2010, // F2FS
    0x3153_464A, // JFS
    0x5265_4973, // ReiserFS
];

/// Whether a mapping of the description at `fd` shows the bytes that a read returns, and costs the file system no
/// space.
pub(crate) fn maps_what_it_reads(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|stat| PAGE_CACHED.contains(&stat.f_type))
}
