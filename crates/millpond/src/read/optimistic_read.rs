//! Reads that the kernel completes in a queue of the program's: past the cache, and without a guard
//! (`inode::optimistic`).
//!
//! The kernel reads into the program's memory. Where that is not aligned as the device requires, the kernel reads
//! into a frame that no word refers to, and the bytes are copied in the end.

use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

use crate::copy::Source;
use crate::inode::CachedFile;
use crate::io::segment::{Segment, SegmentIter};
use crate::io::transfer::{Direction, Transfer};
use crate::read::hit::copy_out;
use crate::read::plan::{self, BypassPolicy};
use crate::units::FrameIndex;

/// Frames in use by such reads of an engine, at most: a program may leave its completions in the queue. Chosen, not
/// measured.
const FRAMES_MAX: u64 = 1024;
/// At most this part of all frames, too: one in that many.
const FRAMES_PART: u64 = 16;

/// The request for the kernel: a `pread` of `len` bytes to `memory`.
pub struct KernelRead {
    /// The file's descriptor for direct reads.
    pub fd: RawFd,
    /// Where the bytes go.
    pub memory: *mut u8,
    /// Their number.
    pub len: usize,
}

/// A read under way. Its file outlives it.
pub struct UnguardedRead {
    offset: u64,
    len: u64,
    changes: u64,
    bounce: Option<ReadBounce>,
}

/// A frame of the file's cache.
struct ReadBounce {
    file: NonNull<CachedFile>,
    frame: FrameIndex,
}

/// The outcome of beginning a read.
pub enum Begun {
    /// The kernel is to carry it out.
    ByKernel(KernelRead, UnguardedRead),
    /// It is to fill its pages, as this is not their first miss.
    Fills,
    /// It is to be read in another way.
    Not,
}

/// Begins a read of `len` bytes at `offset` to `start`. Does not block.
///
/// # Safety
///
/// The memory is valid for writes until the kernel has completed the read, though a part may fault. The file is valid
/// until the read is dropped, which must not be before that.
pub(crate) unsafe fn begin(file: &CachedFile, start: *mut u8, len: usize, offset: u64) -> Begun {
    if !file.backing.reads_directly() || len == 0 {
        return Begun::Not;
    }
    // SAFETY: the caller's promise.
    let segment = [unsafe { Segment::new(start, len) }];
    let dst: SegmentIter<'_> = (&segment).into();
    let alignment = file.backing.alignment(false);
    let is_aligned = alignment.first_misaligned(offset, dst.misalignment()).is_none();
    file.unguarded.prepare();
    let (policy, range) = (BypassPolicy::FirstMiss, (offset, len as u64));
    let guarded = plan::try_guard(file, policy, range, is_aligned.then_some(dst));
    let Some((guard, extent)) = guarded else { return Begun::Not };
    let bounce = if is_aligned { None } else { ReadBounce::take(file, len) };
    if !is_aligned && bounce.is_none() {
        return Begun::Not;
    }
    if !policy.refuses(file, extent) {
        return Begun::Fills;
    }
    file.cache().counters.local().missed(extent.page_count(file));
    let memory = bounce.as_ref().map_or(start, ReadBounce::bytes);
    // SAFETY: as above; or a frame of `bounce`, of as many bytes.
    let segment = [unsafe { Segment::new(memory, len) }];
    let transfer = Transfer::new(Direction::Read, offset, &segment);
    // None, if another thread has locked it by now. The admission filter was asked.
    let Some(fd) = file.backing.direct_route(&transfer) else { return Begun::Fills };
    let (first, last) = extent.pages(file);
    let changes = file.unguarded.changes(first, last);
    drop(guard);
    let read = UnguardedRead { offset, len: len as u64, changes, bounce };
    Begun::ByKernel(KernelRead { fd, memory, len }, read)
}

impl UnguardedRead {
    /// Whether the bytes that the kernel has read, all of them, count. If so, they are at `dst`; otherwise the read
    /// is to be repeated. Does not block.
    ///
    /// # Safety
    ///
    /// The read is one of this file, and `dst` is valid for writes of as many bytes, though a part may fault.
    pub(crate) unsafe fn end(self, file: &CachedFile, dst: *mut u8) -> bool {
        let (first, last) = (file.page_of(self.offset), file.page_of(self.offset + self.len - 1));
        if file.unguarded.changes(first, last) != self.changes {
            return false;
        }
        if let Some(bounce) = &self.bounce {
            // SAFETY: the caller's promise; the frame is ours, and the kernel's request has ended.
            let copied = unsafe {
                let segment = [Segment::new(dst, self.len as usize)];
                copy_out((&segment).into(), bounce.bytes(), Source::Near)
            };
            if copied.is_err() {
                return false;
            }
        }
        file.cache().counters.local().moved_past_cache(self.len);
        true
    }
}

impl ReadBounce {
    /// A frame for `len` bytes, if those are a page.
    fn take(file: &CachedFile, len: usize) -> Option<ReadBounce> {
        if len != file.core().page_bytes() {
            return None;
        }
        let frames_max = file.cache().frames.limit_bytes() / len as u64 / FRAMES_PART;
        // Relaxed: a number.
        let taken = file.shared.bounces.fetch_add(1, Relaxed);
        let is_room = taken < frames_max.min(FRAMES_MAX);
        let frame = || file.cache().take_frame(file.core().page_class());
        let frame = is_room.then(frame).flatten();
        if frame.is_none() {
            file.shared.bounces.fetch_sub(1, Relaxed);
        }
        frame.map(|frame| ReadBounce { file: NonNull::from(file), frame })
    }

    fn bytes(&self) -> *mut u8 {
        // SAFETY: the file outlives the read (`begin`).
        let file = unsafe { self.file.as_ref() };
        file.cache().frames.bytes(self.frame)
    }
}

impl Drop for ReadBounce {
    fn drop(&mut self) {
        // SAFETY: as in `bytes`.
        let file = unsafe { self.file.as_ref() };
        file.free_frame(self.frame);
        file.shared.bounces.fetch_sub(1, Relaxed);
    }
}
