//! The alignment that direct I/O requires.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, StatxFlags};

use crate::io::segment::Misalignment;

/// The alignment of direct I/O. 1: no alignment is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alignment {
    pub(crate) memory_bytes: u32,
    pub(crate) offset_bytes: u32,
}

impl Alignment {
    pub(crate) const NONE: Alignment = Alignment { memory_bytes: 1, offset_bytes: 1 };

    /// The unaligned value of a transfer, and the required alignment, in bytes.
    #[inline]
    pub(crate) fn first_misaligned(
        self,
        offset: u64,
        found: Misalignment,
    ) -> Option<(&'static str, u32)> {
        let is_off = |bits: u32, limit_bytes: u32| bits & (limit_bytes - 1) != 0;
        if is_off(offset as u32, self.offset_bytes) {
            Some(("offset", self.offset_bytes))
        } else if is_off(found.len, self.offset_bytes) {
            Some(("length of a segment", self.offset_bytes))
        } else if is_off(found.base, self.memory_bytes) {
            Some(("memory of a segment", self.memory_bytes))
        } else {
            None
        }
    }
}

/// The alignment of a file, as reported by its file system.
///
/// # Errors
///
/// Of kind `InvalidInput` if the file system has no direct I/O.
pub(crate) fn direct_alignment(fd: BorrowedFd<'_>) -> io::Result<Alignment> {
    let stat = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        // Before Linux 6.1, or if the file system does not report it: a page is sufficient
        // everywhere.
        return Ok(Alignment { memory_bytes: 4096, offset_bytes: 4096 });
    }
    let wanted = stat.stx_dio_offset_align.max(stat.stx_dio_mem_align);
    if stat.stx_dio_offset_align == 0 || wanted > 4096 {
        let (offset, memory) = (stat.stx_dio_offset_align, stat.stx_dio_mem_align);
        let what = format!("its alignment is {offset}, of memory {memory}, and must be 1 to 4096");
        return Err(no_direct(&what));
    }
    Ok(Alignment {
        memory_bytes: stat.stx_dio_mem_align.max(1),
        offset_bytes: stat.stx_dio_offset_align,
    })
}

pub(crate) fn no_direct(why: &str) -> io::Error {
    let what = format!("no direct I/O on this file or file system: {why}");
    io::Error::new(io::ErrorKind::InvalidInput, what)
}
