//! Aligned memory between a caller's memory and direct I/O.

use std::io;

use crate::copy;
use crate::io::segment::SegmentIter;
use crate::memory::try_zeros;

/// The maximum size of a bounce buffer. Longer requests are performed in parts. Untuned.
pub(crate) const BOUNCE_BYTES_MAX: u64 = 1 << 20;
/// The maximum alignment of bounce buffers; devices that need more are refused at open.
const BOUNCE_ALIGN_BYTES: usize = 4096;

/// Aligned memory for an unaligned request.
pub(crate) struct Bounce {
    memory: Box<[u64]>,
    skip: usize,
}

impl Bounce {
    pub(crate) fn new(bytes: u64) -> io::Result<Bounce> {
        let words = (bytes as usize + BOUNCE_ALIGN_BYTES).div_ceil(size_of::<u64>());
        let memory = try_zeros(words)?;
        let skip = memory.as_ptr().cast::<u8>().align_offset(BOUNCE_ALIGN_BYTES);
        Ok(Bounce { memory, skip })
    }

    pub(crate) fn len(&self) -> u64 {
        (size_of_val(&*self.memory) - BOUNCE_ALIGN_BYTES) as u64
    }

    pub(crate) fn base(&mut self) -> *mut u8 {
        // SAFETY: `skip` is less than the alignment, and the block is longer than the request by at
        // least that.
        unsafe { self.memory.as_mut_ptr().cast::<u8>().add(self.skip) }
    }

    /// Copies all of `part` to byte `to` of the buffer; false if its memory faults.
    pub(crate) fn take_at(&mut self, to: u64, part: SegmentIter<'_>) -> bool {
        assert!(to + part.left() <= self.len());
        // SAFETY: within the buffer, by the check above.
        let mut at = unsafe { self.base().add(to as usize) };
        for piece in part {
            // SAFETY: the buffer has room for all of the part; the caller guarantees the source.
            unsafe {
                if copy::copy(at, piece.base(), piece.len()) > 0 {
                    return false;
                }
                at = at.add(piece.len());
            }
        }
        true
    }
}
