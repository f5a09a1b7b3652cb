//! Segments of memory, as the kernel wants them, and a position in a list of them.

use std::marker::PhantomData;

/// A piece of memory; laid out like `struct iovec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Segment<'a> {
    raw: libc::iovec,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a segment says where memory is; who made it vouches that the memory may be used by the
// thread that carries out the transfer.
unsafe impl Send for Segment<'_> {}
// SAFETY: as above; the segment itself is never changed.
unsafe impl Sync for Segment<'_> {}

impl<'a> Segment<'a> {
    /// # Safety
    ///
    /// The memory must stay valid for `'a`, for writes if the segment is read into, save that it
    /// may fault where the operation that it is for allows that.
    pub(crate) unsafe fn new(base: *mut u8, len: usize) -> Segment<'a> {
        Segment { raw: libc::iovec { iov_base: base.cast(), iov_len: len }, memory: PhantomData }
    }

    /// The segments of an array of `iovec`.
    ///
    /// # Safety
    ///
    /// As for [`Segment::new`], for each of them.
    pub(crate) unsafe fn from_iovecs(iovecs: &'a [libc::iovec]) -> &'a [Segment<'a>] {
        // SAFETY: Segment is a transparent iovec.
        unsafe { std::slice::from_raw_parts(iovecs.as_ptr().cast(), iovecs.len()) }
    }

    #[inline]
    pub(crate) fn base(&self) -> *mut u8 {
        self.raw.iov_base.cast()
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.raw.iov_len
    }
}

/// The sum of the segments' lengths; `None` if it overflows.
pub(crate) fn total_len(segments: &[Segment<'_>]) -> Option<u64> {
    segments.iter().try_fold(0u64, |sum, segment| sum.checked_add(segment.len() as u64))
}

/// The pieces of `segments` that hold bytes `from..from + len` of the whole.
pub(crate) fn pieces<'a>(
    segments: &'a [Segment<'a>],
    from: u64,
    len: u64,
) -> impl Iterator<Item = Segment<'a>> {
    let mut skip = from;
    let mut left = len;
    segments.iter().filter_map(move |segment| {
        let segment_len = segment.len() as u64;
        if skip >= segment_len {
            skip -= segment_len;
            return None;
        }
        let piece = (segment_len - skip).min(left);
        if piece == 0 {
            return None;
        }
        // SAFETY: part of a segment whose memory was vouched for.
        let piece_segment =
            unsafe { Segment::new(segment.base().add(skip as usize), piece as usize) };
        left -= piece;
        skip = 0;
        Some(piece_segment)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cut_at_both_ends_and_skip_empty_segments() {
        let mut memory: Vec<u8> = (0..20).collect();
        let base = memory.as_mut_ptr();
        // SAFETY: pieces of `memory`, which outlives them.
        let segments = unsafe {
            [
                Segment::new(base, 5),
                Segment::new(base.add(5), 0),
                Segment::new(base.add(5), 5),
                Segment::new(base.add(10), 10),
            ]
        };
        assert_eq!(total_len(&segments), Some(20));
        for from in 0..=20u64 {
            for len in 0..=20 - from {
                let bytes: Vec<u8> = pieces(&segments, from, len)
                    // SAFETY: as above.
                    .flat_map(|s| unsafe { std::slice::from_raw_parts(s.base(), s.len()) }.to_vec())
                    .collect();
                assert_eq!(bytes, (from as u8..(from + len) as u8).collect::<Vec<_>>());
            }
        }
    }
}
