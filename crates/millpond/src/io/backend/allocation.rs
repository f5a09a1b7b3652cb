//! The guarantees of a file's allocated blocks, and whether another process may make the file
//! longer.
//!
//! A write is known to have room if the blocks of its bytes are allocated and will be overwritten
//! in place. Some file systems never overwrite in place: each write takes new blocks. Others do,
//! unless the blocks are shared with another file, by a reflink.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The target of a seek.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seek {
    Data,
    Hole,
}

/// How the file system overwrites bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overwrites {
    /// In place.
    InPlace,
    /// In place, unless the blocks are shared.
    InPlaceUnlessShared,
    /// New blocks; or nobody knows.
    Elsewhere,
}

/// Whether others may make the file longer while we hold its range lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Company {
    /// None: there is a lease on our description.
    Leased,
    /// None had it open at the time of the check.
    Alone,
    Others,
}

const OVERLAY: i64 = 0x794C_7630;
const XFS: i64 = 0x5846_5342;
const OCFS2: i64 = 0x7461_636F;
const EXT: i64 = 0xEF53; // ext2, ext3, ext4
const IN_PLACE: [i64; 9] = [
    EXT,
    0x0102_1994, // tmpfs
    0x8584_58F6, // ramfs
    0x3153_464A, // JFS
    0x4D44,      // FAT
    0x2011_BAB0, // exFAT
    0x5346_544E, // NTFS
    // Not in place, but treated as such: a block that is written elsewhere frees its old place at
    // once.
    0xF2F5_2010, // F2FS
    0x7366_746E, // NTFS3
];
/// On network file systems the server reports missing space only at write-back: an allocated block
/// guarantees no more there.
const SERVED: [i64; 7] = [
    0x6969,      // NFS
    0xFF53_4D42, // CIFS
    0xFE53_4D42, // SMB2
    0x6573_5546, // FUSE
    0x0102_1997, // 9P
    0x00C3_6400, // Ceph
    0x0BD0_0BD0, // Lustre
];

/// How the file system overwrites bytes of a file that is open for reading by `read`, if at all,
/// and for writing by `write`.
pub(crate) fn overwrites(read: Option<BorrowedFd<'_>>, write: BorrowedFd<'_>) -> Overwrites {
    let Ok(system) = rustix::fs::fstatfs(write) else { return Overwrites::Elsewhere };
    let kind: i64 = system.f_type;
    match kind {
        _ if IN_PLACE.contains(&kind) || SERVED.contains(&kind) => Overwrites::InPlace,
        XFS | OCFS2 => Overwrites::InPlaceUnlessShared,
        // An overlay reports nothing about the file system below. If it cannot share blocks, it
        // overwrites in place.
        OVERLAY if !can_share(read, write) => Overwrites::InPlace,
        _ => Overwrites::Elsewhere,
    }
}

/// Whether an allocation beyond the end of the file moves the end without writing zeros.
pub(crate) fn has_unwritten_extents(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|system| matches!(system.f_type, EXT | XFS))
}

/// Whether the file system reports that it can share blocks between files.
fn can_share(read: Option<BorrowedFd<'_>>, write: BorrowedFd<'_>) -> bool {
    #[repr(C)]
    struct Range {
        from_fd: i64,
        from: u64,
        len: u64,
        to: u64,
    }
    const FICLONERANGE: u64 = 0x4020_940D;
    let Some(read) = read else { return true };
    // Clones the whole file onto itself: file systems with support refuse this with EINVAL.
    let range = Range { from_fd: read.as_raw_fd().into(), from: 0, len: 0, to: 0 };
    // SAFETY: the structure has the layout that the kernel expects, and outlives the call.
    let outcome = unsafe {
        libc::syscall(libc::SYS_ioctl, write.as_raw_fd(), FICLONERANGE, &raw const range)
    };
    let error = io::Error::last_os_error().raw_os_error();
    outcome == 0 || !matches!(error, Some(libc::EOPNOTSUPP | libc::ENOTTY))
}

/// The known allocation of a file from some byte on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// There are blocks for all bytes before.
    pub(crate) there_until: u64,
    /// None of the blocks before it is shared with another file.
    pub(crate) own_until: u64,
}

/// Extents of a file, as far as the file system reports them in one call (`FS_IOC_FIEMAP`).
#[repr(C)]
pub(crate) struct Extents {
    start: u64,
    len: u64,
    flags: u32,
    found: u32,
    found_max: u32,
    reserved: u32,
    extents: [Extent; Extents::MAX],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    physical: u64,
    len: u64,
    reserved: [u64; 2],
    flags: u32,
    more: [u32; 3],
}

impl Extent {
    const LAST: u32 = 1;
    const UNWRITTEN: u32 = 0x800;
    const SHARED: u32 = 0x2000;

    pub(crate) fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// It has blocks that were not written: it reads as zeros.
    pub(crate) fn is_unwritten(&self) -> bool {
        self.flags & Extent::UNWRITTEN != 0
    }

    fn is_shared(&self) -> bool {
        self.flags & Extent::SHARED != 0
    }

    fn is_last(&self) -> bool {
        self.flags & Extent::LAST != 0
    }
}

impl Extents {
    pub(crate) const MAX: usize = 32;

    /// The extents from byte `start` on. Unlike a search for holes, it moves no file offset, and so needs no separate
    /// description.
    pub(crate) fn from(fd: BorrowedFd<'_>, start: u64) -> io::Result<Extents> {
        const FS_IOC_FIEMAP: u64 = 0xC020_660B;
        let mut map = Extents {
            start,
            len: (i64::MAX as u64).saturating_sub(start),
            flags: 0,
            found: 0,
            found_max: Extents::MAX as u32,
            reserved: 0,
            extents: [Extent::default(); Extents::MAX],
        };
        // SAFETY: the structure has the layout that the kernel expects, with room for as many extents as it says, and
        // outlives the call.
        let asked =
            unsafe { libc::syscall(libc::SYS_ioctl, fd.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) };
        if asked < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(map)
    }

    pub(crate) fn as_slice(&self) -> &[Extent] {
        &self.extents[..(self.found as usize).min(Extents::MAX)]
    }
}

/// The blocks of a file from `start` on, as far as the file system reports them in one call.
pub(crate) fn blocks(fd: BorrowedFd<'_>, start: u64) -> io::Result<Blocks> {
    let found = Extents::from(fd, start)?;
    let extents = found.as_slice();
    let mut there_until = start;
    for extent in extents {
        if extent.start > there_until {
            break;
        }
        there_until = there_until.max(extent.end());
    }
    let shared = extents.iter().find(|extent| extent.is_shared());
    let own_until = match (shared, extents.last()) {
        (Some(shared), _) => shared.start.max(start),
        // There are more.
        (None, Some(last)) if extents.len() == Extents::MAX && !last.is_last() => last.end(),
        _ => u64::MAX,
    };
    Ok(Blocks { there_until, own_until })
}

/// Runs `body` while a lease keeps the file from being opened: an open by another process waits.
/// `None`: the file is open already, at least by another descriptor of this process, or there are
/// no leases. (A child of a fork, which has inherited the description, is not kept out.)
pub(crate) fn alone<T>(fd: BorrowedFd<'_>, body: impl FnOnce() -> T) -> Option<T> {
    const F_SETSIG: i32 = 10;
    const F_GETSIG: i32 = 11;
    let fd = fd.as_raw_fd();
    // The raw system call: a library that replaces libc's functions would treat it as the
    // program's.
    // SAFETY: no memory involved in any of these.
    let control =
        |command: i32, arg: i32| unsafe { libc::syscall(libc::SYS_fcntl, fd, command, arg) as i32 };
    // The kernel reports an open by a signal. This selects a signal that is ignored by default.
    let signal = control(F_GETSIG, 0);
    if control(libc::F_GETLEASE, 0) != libc::F_UNLCK || control(F_SETSIG, libc::SIGURG) < 0 {
        return None;
    }
    let outcome = (control(libc::F_SETLEASE, libc::F_WRLCK) == 0).then(|| {
        let outcome = body();
        control(libc::F_SETLEASE, libc::F_UNLCK);
        outcome
    });
    control(F_SETSIG, signal.max(0));
    outcome
}

/// Whether there is a write lease on the description already.
pub(crate) fn is_leased(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: no memory involved.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLEASE) == libc::F_WRLCK }
}

/// Whether another process may make the file longer. Takes a lease for a moment.
pub(crate) fn company(fd: BorrowedFd<'_>) -> Company {
    if is_leased(fd) {
        return Company::Leased;
    }
    alone(fd, || Company::Alone).unwrap_or(Company::Others)
}

/// The bytes that this process may still allocate on the file system, `u64::MAX` where it reports none.
pub(crate) fn free_bytes(fd: BorrowedFd<'_>) -> u64 {
    rustix::fs::fstatvfs(fd).map_or(u64::MAX, |it| it.f_bavail.saturating_mul(it.f_frsize))
}
