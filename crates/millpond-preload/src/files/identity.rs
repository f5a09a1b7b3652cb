//! Identifies the file of a descriptor or path: its inode, its directory, and the abilities of its file system.
//!
//! All by system calls of our own, without memory from the heap: an answer may be needed anywhere.

use std::os::fd::RawFd;

use millpond::internals::page_cache::PAGE_CACHED;

use crate::runtime::sys::sys;
use crate::runtime::{config, link};

/// Device and inode: which file it is.
pub type FileId = (u64, u64);

/// The part of `fstat`'s answer that the library uses.
pub struct Identity {
    pub id: FileId,
    pub is_regular: bool,
}

pub fn identify(fd: RawFd) -> Option<Identity> {
    // The older call where a filter of system calls refuses the newer one.
    identify_known(fd).or_else(|| stat_of(fd).as_ref().map(Identity::of))
}

/// Who owns the file behind `fd`.
pub fn owner(fd: RawFd) -> Option<u32> {
    stat_of(fd).map(|stat| stat.st_uid)
}

/// How long the file behind `fd` is in the kernel.
pub fn len(fd: RawFd) -> Option<u64> {
    stat_of(fd).map(|stat| stat.st_size as u64)
}

/// Device and inode as the kernel has them cached: a server that does not answer can't hold the caller, who may have the
/// registry locked.
fn identify_known(fd: RawFd) -> Option<Identity> {
    const FLAGS: i32 = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    const WANTED: u32 = libc::STATX_TYPE | libc::STATX_INO;
    let mut stat = std::mem::MaybeUninit::<libc::statx>::uninit();
    // SAFETY: the path is NUL-terminated, and the kernel fills `stat`.
    unsafe {
        let told = sys!(libc::SYS_statx, fd, c"".as_ptr(), FLAGS, WANTED, stat.as_mut_ptr());
        (told == 0).then(|| {
            let stat = stat.assume_init_ref();
            Identity {
                id: (libc::makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino),
                is_regular: u32::from(stat.stx_mode) & libc::S_IFMT == libc::S_IFREG,
            }
        })
    }
}

fn stat_of(fd: RawFd) -> Option<libc::stat64> {
    let mut stat = std::mem::MaybeUninit::<libc::stat64>::uninit();
    // SAFETY: the kernel fills `stat`, whose layout is the kernel's on 64-bit targets.
    unsafe { (sys!(libc::SYS_fstat, fd, stat.as_mut_ptr()) == 0).then(|| stat.assume_init()) }
}

pub fn identify_path(dir: RawFd, path: *const libc::c_char, follow: bool) -> Option<Identity> {
    let flags = if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
    let mut stat = std::mem::MaybeUninit::<libc::stat64>::uninit();
    // SAFETY: as in `identify`; a bad `path` makes the kernel return EFAULT.
    unsafe {
        (sys!(libc::SYS_newfstatat, dir, path, stat.as_mut_ptr(), flags) == 0)
            .then(|| Identity::of(stat.assume_init_ref()))
    }
}

impl Identity {
    fn of(stat: &libc::stat64) -> Self {
        Self {
            id: (stat.st_dev, stat.st_ino),
            is_regular: stat.st_mode & libc::S_IFMT == libc::S_IFREG,
        }
    }
}

/// Whether the file behind `fd` lies in a served directory, independent of the path that opened it.
pub fn is_in_served_directory(fd: RawFd) -> bool {
    let path = &mut [0; libc::PATH_MAX as usize];
    let path = link::path_of(fd, path);
    !path.is_empty() && config::is_served_path(path)
}

/// Whether the kernel can write at an offset to a descriptor with `O_APPEND` (Linux 6.9).
pub fn can_ignore_append(fd: RawFd) -> bool {
    const RWF_NOAPPEND: i32 = 0x20;
    // SAFETY: no vectors, so no memory is touched.
    unsafe { sys!(libc::SYS_pwritev2, fd, 0, 0, 0, 0, RWF_NOAPPEND) == 0 }
}

/// Whether the file behind `fd` can be read and written with `O_DIRECT`, as far as that is known.
pub fn knows_direct(fd: RawFd) -> bool {
    let is_in_memory = file_system(fd).is_none_or(|kind| [TMPFS, RAMFS].contains(&kind));
    let mut stat = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is NUL-terminated, and the kernel fills `stat`.
    let told = unsafe {
        let flags = libc::AT_EMPTY_PATH;
        let mask = libc::STATX_DIOALIGN;
        sys!(libc::SYS_statx, fd, c"".as_ptr(), flags, mask, stat.as_mut_ptr()) == 0
            && stat.assume_init_ref().stx_mask & mask != 0
    };
    // SAFETY: zeroed, and all integers.
    let alignment = unsafe { stat.assume_init_ref() }.stx_dio_offset_align;
    !is_in_memory && (!told || (1..=4096).contains(&alignment))
}

/// Local file systems whose mappings are not used:
///
/// - overlay: a mapping of a description that was opened before the copy-up shows the lower file, and `read`
///   the upper one;
/// - tmpfs, ramfs: a fault in a hole allocates a page of the file system, and `read` of a hole takes none;
/// - ZFS: `read` copies from a cache of its own, and a mapping is a second copy of that.
const LOCAL_UNMAPPED: [i64; 4] = [
    0x794C_7630, // overlay
    TMPFS,
    RAMFS,
    0x2FC1_2FC1, // ZFS
];
const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58F6;

/// Whether the file system behind `fd` is a local one: its files change only through this kernel's system calls,
/// it knows leases, and device and inode name one file. bcachefs is none: a file and its snapshot have the same
/// device and inode.
///
/// `fstatfs` may wait for the server of a network file system: no lock is held here.
pub fn is_local(fd: RawFd) -> bool {
    let is_listed = |kind| PAGE_CACHED.contains(&kind) || LOCAL_UNMAPPED.contains(&kind);
    is_on_named_device(fd) || file_system(fd).is_some_and(is_listed)
}

/// Whether a mapping of the description at `fd`, on a local file system, shows the bytes that a read returns,
/// and costs the file system no space.
pub fn maps_what_it_reads(fd: RawFd) -> bool {
    is_on_named_device(fd) || file_system(fd).is_some_and(|kind| PAGE_CACHED.contains(&kind))
}

/// `MILLPOND_LOCAL_DEVICE` names the device of `fd`.
fn is_on_named_device(fd: RawFd) -> bool {
    let named = config::get().local_device;
    named.is_some() && identify(fd).map(|identity| identity.id.0) == named
}

/// What kind of file system is behind `fd`, by its magic number.
fn file_system(fd: RawFd) -> Option<i64> {
    let mut info = std::mem::MaybeUninit::<libc::statfs64>::uninit();
    // SAFETY: the kernel fills `info`.
    unsafe {
        (sys!(libc::SYS_fstatfs, fd, info.as_mut_ptr()) == 0).then(|| info.assume_init_ref().f_type)
    }
}

/// How the kernel has the description at `fd` open, or a negative errno.
pub fn status_flags(fd: RawFd) -> i32 {
    // SAFETY: no memory involved.
    unsafe { sys!(libc::SYS_fcntl, fd, libc::F_GETFL) as i32 }
}
