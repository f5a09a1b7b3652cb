//! Segments of memory, as the kernel wants them, and a position in a list of them.
//!
//! A transfer borrows its segments from its caller, down to the device (after the kernel's bio
//! vectors, Linux 5.12). Position is an iterator of three numbers over them: advancing, rewinding
//! and splitting write to no segment and copy none, for any number of segments. Lists from outside
//! are built by `io::segment_list`, which drops empty segments and determines the alignment of all
//! segments once.

use std::marker::PhantomData;

/// A piece of memory; laid out like `struct iovec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Segment<'a> {
    raw: libc::iovec,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a segment describes memory; its creator guarantees that the thread that performs the
// transfer may use the memory.
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

    #[inline]
    pub(crate) fn base(&self) -> *mut u8 {
        self.raw.iov_base.cast()
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.raw.iov_len
    }

    /// The part of `len` bytes that begins `from` bytes in.
    #[inline]
    fn part(&self, from: usize, len: usize) -> Segment<'a> {
        debug_assert!(from + len <= self.len());
        // SAFETY: part of a segment whose memory was vouched for.
        unsafe { Segment::new(self.base().wrapping_add(from), len) }
    }
}

/// The address and length bits that are set in any segment of a list: its misalignment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Misalignment {
    pub(crate) base: u32,
    pub(crate) len: u32,
}

impl Misalignment {
    pub(crate) fn of_one(base: *const u8, len: usize) -> Misalignment {
        Misalignment { base: base as u32, len: len as u32 }
    }

    pub(crate) fn of(segments: &[Segment<'_>]) -> Misalignment {
        segments.iter().fold(Misalignment::default(), |sum, segment| Misalignment {
            base: sum.base | segment.base() as u32,
            len: sum.len | segment.len() as u32,
        })
    }
}

/// A range of bytes in a list of segments: its start and length.
#[derive(Clone, Copy)]
pub(crate) struct SegmentIter<'a> {
    segments: &'a [Segment<'a>],
    /// The current segment, or the number of segments at the end of the list.
    index: usize,
    /// Bytes of the current segment that were passed: less than its length, or 0.
    done: usize,
    left: u64,
    /// `left` ends where the list does.
    is_whole: bool,
    misalignment: Misalignment,
}

/// The front of the remaining bytes, for one system call.
pub(crate) enum Front<'a> {
    /// A segment, or a part of one.
    One(Segment<'a>),
    /// Whole segments.
    Many(&'a [Segment<'a>]),
}

impl<'a> Front<'a> {
    pub(crate) fn as_slice(&self) -> &[Segment<'a>] {
        match self {
            Front::One(segment) => std::slice::from_ref(segment),
            Front::Many(segments) => segments,
        }
    }
}

impl<'a> From<&'a [Segment<'a>]> for SegmentIter<'a> {
    fn from(segments: &'a [Segment<'a>]) -> Self {
        let total = segments.iter().map(|segment| segment.len() as u64).sum();
        let mut iter = SegmentIter::new(segments, total, Misalignment::of(segments));
        iter.advance(0);
        iter
    }
}

impl<'a, const N: usize> From<&'a [Segment<'a>; N]> for SegmentIter<'a> {
    fn from(segments: &'a [Segment<'a>; N]) -> Self {
        segments.as_slice().into()
    }
}

impl<'a> From<&'a Vec<Segment<'a>>> for SegmentIter<'a> {
    fn from(segments: &'a Vec<Segment<'a>>) -> Self {
        segments.as_slice().into()
    }
}

impl<'a> SegmentIter<'a> {
    pub(crate) const EMPTY: SegmentIter<'static> =
        SegmentIter::new(&[], 0, Misalignment { base: 0, len: 0 });

    /// All bytes of `segments`, whose lengths add up to `total`.
    #[inline]
    pub(crate) const fn new(
        segments: &'a [Segment<'a>],
        total: u64,
        misalignment: Misalignment,
    ) -> SegmentIter<'a> {
        SegmentIter { segments, index: 0, done: 0, left: total, is_whole: true, misalignment }
    }

    #[inline]
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// The bits of addresses and lengths that would prevent an aligned transfer.
    pub(crate) fn misalignment(&self) -> Misalignment {
        let cut = if self.is_whole { 0 } else { self.left as u32 };
        let Misalignment { base, len } = self.misalignment;
        Misalignment { base: base | self.done as u32, len: len | self.done as u32 | cut }
    }

    /// Advances by `bytes`, which must remain.
    pub(crate) fn advance(&mut self, bytes: u64) {
        assert!(bytes <= self.left, "{bytes} bytes of {}", self.left);
        self.left -= bytes;
        if self.left == 0 && self.is_whole {
            self.index = self.segments.len();
            self.done = 0;
            return;
        }
        let mut passed = self.done as u64 + bytes;
        while let Some(segment) = self.segments.get(self.index)
            && passed >= segment.len() as u64
        {
            passed -= segment.len() as u64;
            self.index += 1;
        }
        self.done = passed as usize;
    }

    /// Goes back by `bytes`, which must have been passed.
    pub(crate) fn rewind(&mut self, bytes: u64) {
        self.left += bytes;
        let mut back = bytes;
        while back > self.done as u64 {
            back -= self.done as u64;
            assert!(self.index > 0, "{back} bytes before the first");
            self.index -= 1;
            self.done = self.segments[self.index].len();
        }
        self.done -= back as usize;
    }

    /// The first `bytes` of the remaining bytes, or all if they are fewer.
    #[inline]
    pub(crate) fn limited(self, bytes: u64) -> SegmentIter<'a> {
        if bytes >= self.left {
            return self;
        }
        SegmentIter { left: bytes, is_whole: false, ..self }
    }

    /// Takes the first `bytes` bytes off, and returns them.
    #[inline]
    pub(crate) fn split(&mut self, bytes: u64) -> SegmentIter<'a> {
        let first = self.limited(bytes);
        self.advance(first.left);
        first
    }

    /// Bytes `from..from + len` of the remaining bytes.
    pub(crate) fn slice(mut self, from: u64, len: u64) -> SegmentIter<'a> {
        self.advance(from);
        self.limited(len)
    }

    /// The bytes for one system call with at most `segments_max` segments; the rest follows as
    /// after a short transfer. Empty only if nothing remains.
    pub(crate) fn front(&self, segments_max: usize) -> Front<'a> {
        let rest = &self.segments[self.index..];
        match rest.first() {
            Some(first) if self.left > 0 => {
                let first_left = first.len() - self.done;
                if self.done > 0 || rest.len() == 1 || first_left as u64 > self.left {
                    let len = (first_left as u64).min(self.left) as usize;
                    return Front::One(first.part(self.done, len));
                }
                let rest = &rest[..rest.len().min(segments_max)];
                if self.is_whole {
                    return Front::Many(rest);
                }
                let mut left = self.left;
                let whole = rest.iter().take_while(|segment| {
                    let fits = segment.len() as u64 <= left;
                    left = left.saturating_sub(segment.len() as u64);
                    fits
                });
                Front::Many(&rest[..whole.count()])
            }
            _ => Front::Many(&[]),
        }
    }
}

/// The pieces, none of them empty.
impl<'a> Iterator for SegmentIter<'a> {
    type Item = Segment<'a>;

    #[inline]
    fn next(&mut self) -> Option<Segment<'a>> {
        while self.left > 0 {
            let segment = self.segments[self.index];
            let len = ((segment.len() - self.done) as u64).min(self.left) as usize;
            let piece = segment.part(self.done, len);
            self.left -= len as u64;
            if self.done + len == segment.len() {
                self.index += 1;
                self.done = 0;
            } else {
                self.done += len;
            }
            if len > 0 {
                return Some(piece);
            }
        }
        None
    }
}

#[cfg(any(fuzzing, all(test, not(loom))))]
pub(crate) mod fuzz;

#[cfg(all(test, not(loom)))]
mod tests;
