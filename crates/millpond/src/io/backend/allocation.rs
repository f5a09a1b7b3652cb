//! What a file's blocks promise, and whether others may make it longer.
//!
//! That a write will have room is known of bytes whose blocks are there and will be overwritten where
//! they are. Some file systems never do that: each write takes new blocks. Others do it unless the blocks
//! are shared with another file, by a reflink.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// What overwriting bytes takes of the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overwrites {
    /// Nothing.
    InPlace,
    /// Nothing, unless their blocks are shared.
    InPlaceUnlessShared,
    /// New blocks; or nobody knows.
    Elsewhere,
}

/// Whether others may make the file longer while we hold its range lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Company {
    /// Nobody: there is a lease on our description.
    Leased,
    /// Nobody had it open just now.
    Alone,
    Others,
}

const OVERLAY: i64 = 0x794C_7630;
const XFS: i64 = 0x5846_5342;
const OCFS2: i64 = 0x7461_636F;
const IN_PLACE: [i64; 9] = [
    0xEF53,      // ext2, ext3, ext4
    0x0102_1994, // tmpfs
    0x8584_58F6, // ramfs
    0x3153_464A, // JFS
    0x4D44,      // FAT
    0x2011_BAB0, // exFAT
    0x5346_544E, // NTFS
    // Not in place, but counted so: a block that is written anew gives its old place back at once.
    0xF2F5_2010, // F2FS
    0x7366_746E, // NTFS3
];
/// Whose kernel, too, is told by the server only when it writes back: their writes promise no more there.
const SERVED: [i64; 7] = [
    0x6969,      // NFS
    0xFF53_4D42, // CIFS
    0xFE53_4D42, // SMB2
    0x6573_5546, // FUSE
    0x0102_1997, // 9P
    0x00C3_6400, // Ceph
    0x0BD0_0BD0, // Lustre
];

/// What overwriting takes of the file system of a file that is open for reading by `read`, if at all, and
/// for writing by `write`.
pub(crate) fn overwrites(read: Option<BorrowedFd<'_>>, write: BorrowedFd<'_>) -> Overwrites {
    let Ok(system) = rustix::fs::fstatfs(write) else { return Overwrites::Elsewhere };
    let kind: i64 = system.f_type;
    match kind {
        _ if IN_PLACE.contains(&kind) || SERVED.contains(&kind) => Overwrites::InPlace,
        XFS | OCFS2 => Overwrites::InPlaceUnlessShared,
        // Whichever file system lies below. Those that can't share blocks overwrite in place: the others
        // are not told apart from here.
        OVERLAY if !can_share(read, write) => Overwrites::InPlace,
        _ => Overwrites::Elsewhere,
    }
}

/// Whether the file system can share blocks between files, as far as it says.
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
    // The whole file to where it is: refused with EINVAL by file systems that know how.
    let range = Range { from_fd: read.as_raw_fd().into(), from: 0, len: 0, to: 0 };
    // SAFETY: the structure is what the kernel expects, and outlives the call.
    let outcome = unsafe {
        libc::syscall(libc::SYS_ioctl, write.as_raw_fd(), FICLONERANGE, &raw const range)
    };
    let error = io::Error::last_os_error().raw_os_error();
    outcome == 0 || !matches!(error, Some(libc::EOPNOTSUPP | libc::ENOTTY))
}

/// What is known of a file's blocks from some byte on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// There are blocks for all bytes before.
    pub(crate) there_until: u64,
    /// None of those before it is shared with another file.
    pub(crate) own_until: u64,
}

/// The blocks of a file from `start` on, as far as the file system tells at a time (`FS_IOC_FIEMAP`, which
/// unlike a search for holes moves no file offset, and so needs no description of its own).
pub(crate) fn blocks(fd: BorrowedFd<'_>, start: u64) -> io::Result<Blocks> {
    const FS_IOC_FIEMAP: u64 = 0xC020_660B;
    const SHARED: u32 = 0x2000;
    const LAST: u32 = 1;
    const EXTENTS: usize = 32;
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Extent {
        logical: u64,
        physical: u64,
        len: u64,
        reserved: [u64; 2],
        flags: u32,
        more: [u32; 3],
    }
    #[repr(C)]
    struct Map {
        start: u64,
        len: u64,
        flags: u32,
        mapped: u32,
        extents_max: u32,
        reserved: u32,
        extents: [Extent; EXTENTS],
    }
    let mut map = Map {
        start,
        len: i64::MAX as u64 - start,
        flags: 0,
        mapped: 0,
        extents_max: EXTENTS as u32,
        reserved: 0,
        extents: [Extent::default(); EXTENTS],
    };
    // SAFETY: the structure is what the kernel expects, with room for as many extents as it says, and
    // outlives the call.
    if unsafe { libc::syscall(libc::SYS_ioctl, fd.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let extents = &map.extents[..(map.mapped as usize).min(EXTENTS)];
    let mut there_until = start;
    for extent in extents {
        if extent.logical > there_until {
            break;
        }
        there_until = there_until.max(extent.logical.saturating_add(extent.len));
    }
    let shared = extents.iter().find(|extent| extent.flags & SHARED != 0);
    let own_until = match (shared, extents.last()) {
        (Some(shared), _) => shared.logical.max(start),
        // There are more.
        (None, Some(last)) if extents.len() == EXTENTS && last.flags & LAST == 0 => {
            last.logical.saturating_add(last.len)
        }
        _ => u64::MAX,
    };
    Ok(Blocks { there_until, own_until })
}

/// Has nobody else open the file while `body` runs: by a lease, for which an open of another process
/// waits. `None` where somebody has it open, by another descriptor of this process at least, or there are
/// no leases. (A child of a fork, which has inherited the description itself, is not kept out.)
pub(crate) fn alone<T>(fd: BorrowedFd<'_>, body: impl FnOnce() -> T) -> Option<T> {
    const F_SETSIG: i32 = 10;
    const F_GETSIG: i32 = 11;
    let fd = fd.as_raw_fd();
    // The raw system call: a library that takes the place of libc's functions would take it for the
    // program's.
    // SAFETY: no memory involved in any of these.
    let control =
        |command: i32, arg: i32| unsafe { libc::syscall(libc::SYS_fcntl, fd, command, arg) as i32 };
    // The kernel tells of an open by a signal: by one that nobody minds.
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
