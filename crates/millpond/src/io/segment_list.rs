//! Scatter/gather lists: the buffers of one vectored read or write, like an array of `iovec`.
//!
//! The public API makes a list of the caller's buffers. The engine reads the list, and does not change it.

use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;

use crate::buffers::{Buffer, RegionId};
use crate::io::segment::{Misalignment, Segment, SegmentIter};

/// What may be done with the memory of a [`SegmentList`]: [`Const`] or [`Mut`].
pub trait Access: sealed::Sealed {
    /// Whether the memory may be written.
    const IS_MUT: bool;
}

/// The memory is read: it is written to a file.
#[derive(Debug, Clone, Copy)]
pub enum Const {}

/// The memory may be written, too: a file can be read into it.
#[derive(Debug, Clone, Copy)]
pub enum Mut {}

impl Access for Const {
    const IS_MUT: bool = false;
}

impl Access for Mut {
    const IS_MUT: bool = true;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Const {}
    impl Sealed for super::Mut {}
}

/// Pieces of memory that one request reads into or writes from, in order.
///
/// A list borrows the caller's slices, or owns [`Buffer`]s; it is made once and serves any number
/// of requests. Nothing is copied on the way to the device, neither bytes nor slices, and a request
/// costs the same however many segments it has (after the kernel's requests that borrow their
/// vectors, Linux 5.12). Empty slices are dropped here; only a list with empty slices is copied for
/// that.
///
/// While a request has the list, the memory cannot be used otherwise, nor freed:
///
/// ```compile_fail,E0505
/// use millpond::direct::{DirectRequest, SegmentList};
/// # fn demo(file: &millpond::File, mut pipeline: millpond::direct::Pipeline) {
/// let mut memory = vec![0; 4096];
/// let mut first = Some(DirectRequest::read(file, SegmentList::from_slice_mut(&mut memory), 0));
/// drop(memory); // borrowed by the request
/// pipeline.run(|_| first.take());
/// # }
/// ```
///
/// It must outlive the list:
///
/// ```compile_fail,E0597
/// use millpond::direct::{DirectRequest, SegmentList};
/// # fn demo(file: &millpond::File, mut pipeline: millpond::direct::Pipeline) {
/// let mut first;
/// {
///     let memory = vec![0; 4096];
///     first = Some(DirectRequest::write(file, SegmentList::from_slice(&memory), 0));
/// } // borrowed by the request
/// pipeline.run(|_| first.take());
/// # }
/// ```
///
/// It cannot be read while it may change, nor can the array of slices be changed:
///
/// ```compile_fail,E0502
/// use millpond::direct::{DirectRequest, SegmentList};
/// # fn demo(file: &millpond::File, mut pipeline: millpond::direct::Pipeline, mut buffer: millpond::Buffer) {
/// let mut first = Some(DirectRequest::read(file, SegmentList::from_buffer_mut(&mut buffer), 0));
/// pipeline.run(|_| {
///     let _peek = buffer[0]; // borrowed by the request
///     first.take()
/// });
/// # }
/// ```
///
/// ```compile_fail,E0506
/// use millpond::direct::{DirectRequest, SegmentList};
/// use std::io::IoSlice;
/// # fn demo(file: &millpond::File, mut pipeline: millpond::direct::Pipeline, memory: &[u8]) {
/// let mut slices = [IoSlice::new(memory)];
/// let mut first = Some(DirectRequest::write(file, SegmentList::from_io_slices(&slices), 0));
/// slices[0] = IoSlice::new(&[]); // borrowed by the request
/// pipeline.run(|_| first.take());
/// # }
/// ```
///
/// Buffers that a list owns belong to the request until it has ended:
///
/// ```compile_fail,E0382
/// use millpond::direct::{DirectRequest, SegmentList};
/// # fn demo(file: &millpond::File, mut pipeline: millpond::direct::Pipeline, buffers: Vec<millpond::Buffer>) {
/// let mut first = Some(DirectRequest::read(file, SegmentList::from_buffers(buffers), 0));
/// pipeline.run(|_| first.take());
/// let _byte = buffers[0][0]; // moved into the list; `into_buffers` gives them back
/// # }
/// ```
///
/// A file stays open while it has requests:
///
/// ```compile_fail,E0505
/// use millpond::direct::{DirectRequest, SegmentList};
/// # fn demo(file: millpond::File, mut pipeline: millpond::direct::Pipeline, buffers: Vec<millpond::Buffer>) {
/// let mut first = Some(DirectRequest::read(&file, SegmentList::from_buffers(buffers), 0));
/// drop(file); // borrowed by the request
/// pipeline.run(|_| first.take());
/// # }
/// ```
///
/// Nor does shared memory make a list that can be read into:
///
/// ```compile_fail,E0308
/// use millpond::direct::{DirectRequest, SegmentList};
/// # fn demo(file: &millpond::File) {
/// let memory = vec![0; 4096];
/// let request = DirectRequest::read(file, SegmentList::from_slice(&memory), 0);
/// # }
/// ```
///
/// # Examples
///
/// ```
/// use std::io::{IoSlice, IoSliceMut};
/// use millpond::direct::{Access, Const, Mut, SegmentList};
///
/// let (mut head, mut body) = ([1u8; 4], [2u8; 8]);
/// let mut slices = [IoSliceMut::new(&mut head), IoSliceMut::new(&mut body)];
/// let mut list: SegmentList<'_, Mut> = SegmentList::from_io_slices_mut(&mut slices);
/// assert_eq!((list.len(), list.segments(), list.is_empty()), (12, 2, false));
/// list.slices_mut().for_each(|part| part.fill(3));
/// assert!(list.slices().flatten().all(|&byte| byte == 3));
/// assert!(list.into_buffers().is_empty(), "it owns nothing");
///
/// fn bytes<A: Access>(list: &SegmentList<'_, A>) -> u64 {
///     list.len()
/// }
/// let parts = [IoSlice::new(b"one"), IoSlice::new(b"two")];
/// let list: SegmentList<'_, Const> = SegmentList::from_io_slices(&parts);
/// assert_eq!(bytes(&list), 6);
/// ```
#[derive(Debug)]
pub struct SegmentList<'a, A: Access = Const> {
    raw: RawList<'a>,
    access: PhantomData<A>,
}

/// A list without the access type.
#[derive(Debug)]
pub(crate) struct RawList<'a> {
    segments: Storage<'a>,
    total: u64,
    misalignment: Misalignment,
    /// Set if all of the memory lies in one region that may be registered.
    region: Option<RegionId>,
    /// The buffers that the list owns.
    buffers: Vec<Buffer>,
}

enum Storage<'a> {
    One([Segment<'a>; 1]),
    Borrowed(&'a [Segment<'a>]),
    Owned(Box<[Segment<'a>]>),
}

impl std::fmt::Debug for Storage<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.as_slice().iter().map(Segment::len)).finish()
    }
}

impl<'a> Storage<'a> {
    #[inline]
    fn as_slice(&self) -> &[Segment<'a>] {
        match self {
            Storage::One(segment) => segment,
            Storage::Borrowed(segments) => segments,
            Storage::Owned(segments) => segments,
        }
    }
}

impl<'a> RawList<'a> {
    fn new(segments: Storage<'a>, region: Option<RegionId>, buffers: Vec<Buffer>) -> RawList<'a> {
        let list = segments.as_slice();
        // Slices that exist at the same time cannot be longer than the address space together. An
        // iovec may be wrong, and is then refused because of its length.
        let total = list.iter().fold(0u64, |sum, segment| sum.saturating_add(segment.len() as u64));
        let misalignment = Misalignment::of(list);
        RawList { segments, total, misalignment, region, buffers }
    }

    #[inline]
    fn one(segment: Segment<'a>, region: Option<RegionId>) -> RawList<'a> {
        let total = segment.len() as u64;
        if total == 0 {
            return RawList::new(Storage::Borrowed(&[]), None, Vec::new());
        }
        let segments = [segment];
        let misalignment = Misalignment::of(&segments);
        let segments = Storage::One(segments);
        RawList { segments, total, misalignment, region, buffers: Vec::new() }
    }

    /// The segments of an array of `iovec`.
    ///
    /// # Safety
    ///
    /// As for [`Segment::new`], for each of them.
    pub(crate) unsafe fn from_iovecs(iovecs: &'a [libc::iovec]) -> RawList<'a> {
        // SAFETY: Segment is a transparent iovec.
        let segments: &'a [Segment<'a>] =
            unsafe { std::slice::from_raw_parts(iovecs.as_ptr().cast(), iovecs.len()) };
        let segments = if segments.iter().all(|segment| segment.len() > 0) {
            Storage::Borrowed(segments)
        } else {
            let kept = segments.iter().filter(|segment| segment.len() > 0);
            Storage::Owned(kept.copied().collect())
        };
        RawList::new(segments, None, Vec::new())
    }

    /// The same for borrowed memory that outlives the array. `of`: the buffer that contains all of
    /// the memory.
    ///
    /// # Safety
    ///
    /// As for [`Segment::new`], for each of them, until the list is dropped. The buffer must live
    /// as long.
    pub(crate) unsafe fn borrowed(iovecs: &[libc::iovec], of: Option<&Buffer>) -> RawList<'static> {
        // SAFETY: the caller guarantees this.
        let segment = |one: &libc::iovec| unsafe { Segment::new(one.iov_base.cast(), one.iov_len) };
        let segments = match iovecs {
            [one] if one.iov_len > 0 => Storage::One([segment(one)]),
            all => Storage::Owned(all.iter().filter(|one| one.iov_len > 0).map(segment).collect()),
        };
        RawList::new(segments, of.map(Buffer::region_id), Vec::new())
    }

    /// A list of non-empty segments, whose creator guarantees their memory.
    pub(crate) fn of_segments(segments: Box<[Segment<'a>]>) -> RawList<'a> {
        RawList::new(Storage::Owned(segments), None, Vec::new())
    }

    #[inline]
    pub(crate) fn iter(&self) -> SegmentIter<'_> {
        SegmentIter::new(self.segments.as_slice(), self.total, self.misalignment)
    }

    #[inline]
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    #[inline]
    pub(crate) fn misalignment(&self) -> Misalignment {
        self.misalignment
    }

    pub(crate) fn into_buffers(self) -> Vec<Buffer> {
        self.buffers
    }

    pub(crate) fn region(&self) -> Option<RegionId> {
        self.region
    }

    pub(crate) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        // SAFETY: the memory is valid for `'a`, and is not written while the list is borrowed: it
        // is shared, or ours.
        self.iter().map(|piece| unsafe { std::slice::from_raw_parts(piece.base(), piece.len()) })
    }

    /// # Safety
    ///
    /// The list must have been made with access [`Mut`].
    pub(crate) unsafe fn slices_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        // SAFETY: as in `slices`; exclusively ours, as the caller guarantees, and segments of
        // exclusive slices do not overlap.
        let slice = |piece: Segment<'_>| unsafe {
            std::slice::from_raw_parts_mut(piece.base(), piece.len())
        };
        self.iter().map(slice)
    }
}

impl<'a> SegmentList<'a, Const> {
    /// One piece of memory to write from.
    #[must_use]
    pub fn from_slice(memory: &'a [u8]) -> Self {
        // SAFETY: valid for `'a`; a list with this access is only read from.
        let segment = unsafe { Segment::new(memory.as_ptr().cast_mut(), memory.len()) };
        SegmentList { raw: RawList::one(segment, None), access: PhantomData }
    }

    /// Several pieces of memory to write from.
    #[must_use]
    pub fn from_io_slices(slices: &'a [IoSlice<'a>]) -> Self {
        // SAFETY: IoSlice is laid out like iovec, by its documentation, and valid for reads.
        let raw = unsafe {
            let iovecs = std::slice::from_raw_parts(slices.as_ptr().cast(), slices.len());
            RawList::from_iovecs(iovecs)
        };
        SegmentList { raw, access: PhantomData }
    }
}

impl<'a> SegmentList<'a, Mut> {
    /// One piece of memory to read into.
    #[must_use]
    pub fn from_slice_mut(memory: &'a mut [u8]) -> Self {
        // SAFETY: exclusively the list's for `'a`.
        let segment = unsafe { Segment::new(memory.as_mut_ptr(), memory.len()) };
        SegmentList { raw: RawList::one(segment, None), access: PhantomData }
    }

    /// Several pieces of memory to read into.
    #[must_use]
    pub fn from_io_slices_mut(slices: &'a mut [IoSliceMut<'_>]) -> Self {
        // SAFETY: IoSliceMut is laid out like iovec, by its documentation; the slices, and their
        // memory, are exclusively the list's for `'a`.
        let raw = unsafe {
            let iovecs = std::slice::from_raw_parts(slices.as_ptr().cast(), slices.len());
            RawList::from_iovecs(iovecs)
        };
        SegmentList { raw, access: PhantomData }
    }

    /// One buffer, borrowed.
    #[must_use]
    pub fn from_buffer_mut(buffer: &'a mut Buffer) -> Self {
        let region = Some(buffer.region_id());
        // SAFETY: exclusively the list's for `'a`.
        let segment = unsafe { Segment::new(buffer.as_mut_ptr(), buffer.len()) };
        SegmentList { raw: RawList::one(segment, region), access: PhantomData }
    }

    /// The pieces, in turn, to be changed.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        // SAFETY: the access is Mut.
        unsafe { self.raw.slices_mut() }
    }
}

impl SegmentList<'static, Mut> {
    /// Buffers that the list owns; [`SegmentList::into_buffers`] gives them back. Requests of
    /// buffers that come from one region ([`Buffer::same_region`]) are the fastest.
    #[must_use]
    #[inline]
    pub fn from_buffers(mut buffers: Vec<Buffer>) -> Self {
        if let [one] = &mut *buffers {
            let (base, len, region) = (one.as_mut_ptr(), one.len(), Some(one.region_id()));
            // SAFETY: the list has the buffer, whose memory stays where it is when it is moved; of some
            // length, as all buffers.
            let segments = Storage::One([unsafe { Segment::new(base, len) }]);
            let misalignment = Misalignment::of_one(base, len);
            let raw = RawList { segments, total: len as u64, misalignment, region, buffers };
            return SegmentList { raw, access: PhantomData };
        }
        let region = buffers.first().map(Buffer::region_id);
        let region = region.filter(|&id| buffers.iter().all(|buffer| buffer.region_id() == id));
        // SAFETY: the list has the buffers, whose memory stays where it is when they are moved.
        let segment =
            |buffer: &mut Buffer| unsafe { Segment::new(buffer.as_mut_ptr(), buffer.len()) };
        let segments = Storage::Owned(buffers.iter_mut().map(segment).collect());
        SegmentList { raw: RawList::new(segments, region, buffers), access: PhantomData }
    }
}

impl<'a, A: Access> SegmentList<'a, A> {
    /// The number of bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.raw.total
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.raw.total == 0
    }

    /// The number of segments.
    #[must_use]
    pub fn segments(&self) -> usize {
        self.raw.segments.as_slice().len()
    }

    /// The pieces, in turn.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.raw.slices()
    }

    /// The buffers that the list owns; none if it borrows.
    #[must_use]
    pub fn into_buffers(self) -> Vec<Buffer> {
        self.raw.buffers
    }

    pub(crate) fn into_raw(self) -> RawList<'a> {
        self.raw
    }
}

impl<'a> From<SegmentList<'a, Mut>> for SegmentList<'a, Const> {
    fn from(list: SegmentList<'a, Mut>) -> Self {
        SegmentList { raw: list.raw, access: PhantomData }
    }
}
