//! Submission entries of a ring for transfers.

use io_uring::{IoUring, opcode, squeue, types};

use crate::io::segment::{Front, Segment};
use crate::io::transfer::{Direction, SEGMENTS_MAX, Transfer};

/// The maximum length of one transfer in the kernel: MAX_RW_COUNT.
const MOVED_MAX: usize = 0x7fff_f000;

/// The entry for the part of a transfer that fits into one request; the rest follows as after a
/// short one. `buffer`: the index of the registered buffer that contains all of the memory.
pub(crate) fn entry(
    fd: types::Fd,
    flags: i32,
    transfer: &Transfer<'_>,
    buffer: Option<u16>,
) -> squeue::Entry {
    let offset = transfer.offset;
    match (transfer.direction, transfer.segments.front(SEGMENTS_MAX), buffer) {
        (Direction::Read, Front::One(piece), Some(index)) => {
            let read = opcode::ReadFixed::new(fd, piece.base(), clipped(piece), index);
            read.offset(offset).build()
        }
        (Direction::Read, Front::One(piece), None) => {
            opcode::Read::new(fd, piece.base(), clipped(piece)).offset(offset).build()
        }
        (Direction::Read, Front::Many(pieces), Some(index)) if has_vectored_fixed() => {
            let (iovecs, count) = iovecs(pieces);
            opcode::ReadvFixed::new(fd, iovecs, count, index).offset(offset).build()
        }
        (Direction::Read, Front::Many(pieces), _) => {
            let (iovecs, count) = iovecs(pieces);
            opcode::Readv::new(fd, iovecs, count).offset(offset).build()
        }
        (Direction::Write, Front::One(piece), Some(index)) => {
            let write = opcode::WriteFixed::new(fd, piece.base(), clipped(piece), index);
            write.offset(offset).rw_flags(flags).build()
        }
        (Direction::Write, Front::One(piece), None) => {
            let write = opcode::Write::new(fd, piece.base(), clipped(piece));
            write.offset(offset).rw_flags(flags).build()
        }
        (Direction::Write, Front::Many(pieces), Some(index)) if has_vectored_fixed() => {
            let (iovecs, count) = iovecs(pieces);
            let write = opcode::WritevFixed::new(fd, iovecs, count, index);
            write.offset(offset).rw_flags(flags).build()
        }
        (Direction::Write, Front::Many(pieces), _) => {
            let (iovecs, count) = iovecs(pieces);
            opcode::Writev::new(fd, iovecs, count).offset(offset).rw_flags(flags).build()
        }
    }
}

/// The array of a list's segments, which outlives its submission as they do.
fn iovecs(segments: &[Segment<'_>]) -> (*const libc::iovec, u32) {
    (segments.as_ptr().cast(), segments.len() as u32)
}

/// The kernel moves no more at once; the rest follows as after a short transfer.
fn clipped(segment: Segment<'_>) -> u32 {
    segment.len().min(MOVED_MAX) as u32
}

/// Whether the kernel has READV_FIXED and WRITEV_FIXED (Linux 6.15): determined once.
fn has_vectored_fixed() -> bool {
    static HAS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *HAS.get_or_init(|| {
        let mut probe = io_uring::Probe::new();
        let Ok(ring) = IoUring::new(2) else { return false };
        ring.submitter().register_probe(&mut probe).is_ok()
            && probe.is_supported(opcode::ReadvFixed::CODE)
            && probe.is_supported(opcode::WritevFixed::CODE)
    })
}
