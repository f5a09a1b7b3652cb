//! Files of which a power cut tears no block: whether a file can be one, and its length.
//!
//! ```text
//!   open: check -> sync -> UntornBlocks (io/backend/untorn_blocks) in the file's descriptors
//!   write, in part of a block: read the rest -> whole blocks -> RWF_ATOMIC
//!   write-back: pages, which are whole blocks -> RWF_ATOMIC
//! ```
//!
//! - **UT1** A file is opened so only if its file system reports blocks of that size
//!   (`STATX_WRITE_ATOMIC`). The open fails otherwise, and names the requirements.
//! - **UT2** The file's length is a multiple of the block, at the open and after each operation. So
//!   every byte is in a whole block, and no end of the file is written in another way.
//! - **UT3** A page is one or more blocks. A dirty page is written back as whole blocks, from one
//!   frame, which never changes (page.W2).
//! - **UT4** A write past the cache that covers a part of a block reads the rest, under its exclusive
//!   guard, when the pages' dirty bytes are in the back end (`write/blocks`).
//! - **UT5** Zeros are written like other bytes. Holes are punched only where the file has zeros: a
//!   file system frees the extents of a block one by one.
//! - **UT6** The open syncs the file. No buffered write of another program is pending then, whose
//!   delayed allocation would make direct reads beside atomic writes fail on XFS.
//! - **UT7** The back end's refusal of a block fails the write or the sync, and the pages stay dirty.
//!   There is no other way to write them (untorn_blocks.UB1).
//! - **UT8** XFS gets the hint to allocate the space for an overwrite by blocks (`cowextsize`). By
//!   default it allocates 128 KiB for each written block and keeps the rest reserved for half an
//!   hour: overwrites then fail with ENOSPC on a file system that is half free. An owner's hint stays.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, StatxFlags};

use crate::error::{Error, Op, Result};
use crate::inode::{CachedFile, Shared};
use crate::options::{OpenOptions, PAGE_BYTES_MAX};

/// `STATX_WRITE_ATOMIC` (Linux 6.11).
const STATX_WRITE_ATOMIC: StatxFlags = StatxFlags::from_bits_retain(0x1_0000);

const EXT4: u32 = libc::EXT4_SUPER_MAGIC as u32;
const XFS: u32 = libc::XFS_SUPER_MAGIC as u32;

/// The sizes of blocks that the file system writes as a whole.
struct Units {
    min: u32,
    max: u32,
}

/// `None`: the file system or the kernel reports none.
fn units(fd: BorrowedFd<'_>) -> rustix::io::Result<Option<Units>> {
    let stat = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, STATX_WRITE_ATOMIC)?;
    let is_reported = stat.stx_mask & STATX_WRITE_ATOMIC.bits() != 0;
    let (min, max) = (stat.stx_atomic_write_unit_min, stat.stx_atomic_write_unit_max);
    Ok((is_reported && max > 0).then_some(Units { min, max }))
}

/// The largest block that [`OpenOptions::untorn`] takes for the file; 0: none.
pub(crate) fn bytes_max(fd: BorrowedFd<'_>) -> rustix::io::Result<u32> {
    Ok(units(fd)?.map_or(0, |units| units.max.min(PAGE_BYTES_MAX)))
}

/// UT1, UT2.
pub(super) fn check(shared: &Shared, fd: BorrowedFd<'_>, options: &OpenOptions) -> Result<()> {
    let Some(bytes) = options.untorn else { return Ok(()) };
    let unsupported = |what: String| Err(Error::Unsupported { op: Op::Open, what });
    if !shared.backend.has_files() {
        return unsupported("untorn writes need a back end with files".into());
    }
    if shared.cache.frames.recovery().is_some() {
        return unsupported(
            "untorn writes need an engine without a keeper, which writes pages in other ways"
                .into(),
        );
    }
    let failed = |error| Error::io(Op::Open, 0, 0, error);
    match units(fd).map_err(failed)? {
        Some(Units { min, max }) if (min..=max).contains(&bytes) => {}
        Some(Units { min, max }) => {
            return unsupported(format!(
                "untorn blocks of {bytes} bytes: this file system writes blocks of {min} to {max} \
                 bytes as a whole; {}",
                needs(fd, bytes)
            ));
        }
        None => {
            return unsupported(format!(
                "untorn blocks: the kernel reports none for this file; {}",
                needs(fd, bytes)
            ));
        }
    }
    let len = rustix::fs::fstat(fd).map_err(failed)?.st_size as u64;
    if !options.truncate && !len.is_multiple_of(u64::from(bytes)) {
        return unsupported(format!(
            "untorn blocks of {bytes} bytes: the file's length, {len}, is not a multiple; extend it \
             with truncate before"
        ));
    }
    Ok(())
}

/// The requirements of a file system for blocks of `bytes`.
fn needs(fd: BorrowedFd<'_>, bytes: u32) -> String {
    let kind = rustix::fs::fstatfs(fd).map_or(0, |system| system.f_type as u32);
    match kind {
        XFS => format!(
            "XFS needs Linux 6.16, a file system made with `mkfs.xfs -m reflink=1` (the default), \
             not mounted with a smaller `max_atomic_write`, and a file outside of a realtime volume; \
             or a device whose /sys/block/*/queue/atomic_write_unit_max_bytes is at least {bytes}"
        ),
        EXT4 => format!(
            "ext4 needs Linux 6.13, and a device whose \
             /sys/block/*/queue/atomic_write_unit_max_bytes is at least {bytes}, and for blocks \
             above its own `mkfs.ext4 -O bigalloc -C {bytes}` and Linux 6.16; XFS with reflink needs \
             no such device"
        ),
        _ => {
            "XFS made with `mkfs.xfs -m reflink=1` has them on any device from Linux 6.16 on, and \
              ext4 on a device with atomic writes"
                .into()
        }
    }
}

/// UT8. Without permission the file is written without the hint.
pub(super) fn hint_extents(fd: BorrowedFd<'_>, bytes: u32) {
    /// `struct fsxattr`.
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        flags: u32,
        extent_bytes: u32,
        extents: u32,
        project: u32,
        copied_extent_bytes: u32,
        padding: [u8; 8],
    }
    const FS_IOC_FSGETXATTR: u64 = 0x801C_581F;
    const FS_IOC_FSSETXATTR: u64 = 0x401C_5820;
    const FS_XFLAG_COWEXTSIZE: u32 = 0x1_0000;
    if rustix::fs::fstatfs(fd).map_or(0, |system| system.f_type as u32) != XFS {
        return;
    }
    let mut attributes = Attributes::default();
    let control = |number: u64, attributes: &mut Attributes| {
        // SAFETY: the structure has the layout that the kernel expects, and outlives the call.
        let outcome = unsafe {
            libc::syscall(libc::SYS_ioctl, fd.as_raw_fd(), number, std::ptr::from_mut(attributes))
        };
        outcome == 0
    };
    let is_known = control(FS_IOC_FSGETXATTR, &mut attributes);
    if is_known && attributes.flags & FS_XFLAG_COWEXTSIZE == 0 {
        attributes.flags |= FS_XFLAG_COWEXTSIZE;
        attributes.copied_extent_bytes = bytes;
        control(FS_IOC_FSSETXATTR, &mut attributes);
    }
}

/// The first opener's choice stands.
pub(super) fn check_known(known: &Arc<CachedFile>, options: &OpenOptions) -> Result<()> {
    match (options.untorn, known.untorn) {
        (None, _) => Ok(()),
        (Some(asked), Some(has)) if asked == has => Ok(()),
        (Some(_), Some(has)) => {
            let what = format!("the file is open already, with untorn blocks of {has} bytes");
            Err(Error::InvalidInput { op: Op::Open, what })
        }
        (Some(_), None) => {
            let what = "the file is open already, without untorn blocks".into();
            Err(Error::InvalidInput { op: Op::Open, what })
        }
    }
}

impl CachedFile {
    /// UT2, for an operation that ends at `end` of a file of `size` bytes, or sets that length.
    #[inline]
    pub(crate) fn check_untorn_end(&self, op: Op, end: u64, size: u64) -> Result<()> {
        match self.untorn.map(u64::from) {
            Some(bytes) if !end.is_multiple_of(bytes) && end.next_multiple_of(bytes) > size => {
                let what = format!(
                    "the length of a file with untorn blocks of {bytes} bytes is a multiple of \
                     that, not {end}"
                );
                Err(Error::InvalidInput { op, what })
            }
            _ => Ok(()),
        }
    }
}
