//! Writes and appends: by [`crate::write`] or directly.

use std::io::IoSlice;

use crate::api::file::{File, check_range};
use crate::direct_io::{self, DirectRange, Operation};
use crate::error::{Error, Op, Result};
use crate::io::segment::{Segment, SegmentIter};
use crate::io::segment_list::{RawList, SegmentList};
use crate::io::transfer::Direction;
use crate::write::{self, How};

impl File {
    /// Writes `src` at byte `offset`; returns the bytes written. In mode
    /// [`Through`](crate::WriteMode::Through) the storage backend has accepted them on return, and they are
    /// as safe as writes to the kernel; in mode [`Back`](crate::WriteMode::Back) they are in the cache.
    /// [`File::sync_data`] makes them durable.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRange`] and [`Error::NotPermitted`] as for reads. [`Error::Io`]: no byte was
    /// acknowledged. If the backend accepted only a part before it failed, the length of that part is
    /// returned instead. In mode Back reads may return the bytes nevertheless: if another write-back has found the disk
    /// full since their space was reserved, and they could not be written at once.
    pub fn write_at(&self, src: &[u8], offset: u64) -> Result<usize> {
        self.write_slice(src, offset, self.dsync)
    }

    /// Like [`File::write_at`], and returns when the bytes, and the metadata to find them, are durable: one
    /// write with `RWF_DSYNC`, and a sync of the file if an earlier, unsynced write has moved its end beyond these bytes.
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`] and [`File::sync_data`]; the bytes may have been written.
    pub fn write_at_dsync(&self, src: &[u8], offset: u64) -> Result<usize> {
        self.write_slice(src, offset, true)
    }

    /// Like [`File::write_at`], from several buffers in turn, as one atomic write.
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`].
    pub fn write_vectored_at(&self, src: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        self.write_segments(SegmentList::from_io_slices(src).into_raw().iter(), offset)
    }

    /// Writes all of `src`; not atomically if the backend accepts it in parts.
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`]; a part may have been written.
    pub fn write_all_at(&self, src: &[u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < src.len() {
            done += self.write_at(&src[done..], offset + done as u64)?;
        }
        Ok(())
    }

    /// Writes `src` at the end of the file; returns the offset of its first byte. Appends never interleave
    /// and leave no gaps.
    ///
    /// # Errors
    ///
    /// As for [`File::write_at`]. Also [`Error::Io`] of kind `WriteZero`, if the backend accepted only a
    /// part: its `offset` is the start of that part, its `len` the part's length.
    pub fn append(&self, src: &[u8]) -> Result<u64> {
        self.append_vectored(&[IoSlice::new(src)])
    }

    /// Like [`File::append`], from several buffers in turn.
    ///
    /// # Errors
    ///
    /// As for [`File::append`].
    pub fn append_vectored(&self, src: &[IoSlice<'_>]) -> Result<u64> {
        let list = SegmentList::from_io_slices(src).into_raw();
        let (offset, moved) = self.append_list(&list)?;
        if (moved as u64) < list.total() {
            let part = std::io::ErrorKind::WriteZero;
            return Err(Error::io(Op::Write, offset, moved as u64, part));
        }
        Ok(offset)
    }

    fn write_slice(&self, src: &[u8], offset: u64, durable: bool) -> Result<usize> {
        // SAFETY: a shared slice is valid for reads of its length; a write only reads.
        let segment = unsafe { [Segment::new(src.as_ptr().cast_mut(), src.len())] };
        self.write_as((&segment).into(), offset, How { durable, is_constant: true })
    }

    pub(crate) fn write_segments(&self, src: SegmentIter<'_>, offset: u64) -> Result<usize> {
        self.write_as(src, offset, How { durable: self.dsync, is_constant: false })
    }

    fn write_as(&self, src: SegmentIter<'_>, offset: u64, how: How) -> Result<usize> {
        check_range(Op::Write, offset, src.left())?;
        self.check(self.write, Op::Write, offset, src.left())?;
        if self.direct {
            return self.direct(Direction::Write, src, offset, how.durable);
        }
        write::write(&self.cached, src, offset, how)
    }

    /// Appends all of `list`; returns the offset and the number of bytes written.
    pub(crate) fn append_list(&self, list: &RawList<'_>) -> Result<(u64, usize)> {
        check_range(Op::Write, 0, list.total())?;
        self.check(self.write, Op::Write, 0, list.total())?;
        if self.direct {
            let (file, direction) = (&*self.cached, Direction::Write);
            let (len, durable) = (list.total(), self.dsync);
            let extent = DirectRange { file, direction, offset: 0, len, durable };
            return direct_io::append(Operation { extent, segments: list.iter() }, self.bounce);
        }
        write::append(&self.cached, list.iter(), self.dsync)
    }
}
