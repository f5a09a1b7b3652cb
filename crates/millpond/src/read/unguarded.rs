//! Reads that the kernel completes in a queue of the program's: past the cache, and without a guard (`inode::unguarded`).
//!
//! The kernel reads into the program's memory, or where that is not aligned as the device wants it, into a frame that no
//! word has, of which the bytes are copied in the end.

use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::class::Class;
use crate::copy::Source;
use crate::inode::CachedFile;
use crate::io::segment::{Segment, SegmentIter};
use crate::io::transfer::{Direction, Transfer};
use crate::read::around;
use crate::read::hit::copy_out;
use crate::units::FrameIndex;

/// Frames that such reads have, of all engines: a program may leave its completions where they are. Chosen, not measured.
const FRAMES_MAX: u64 = 1024;
/// And of an engine's frames one in so many.
const FRAMES_PART: u64 = 16;

static FRAMES: AtomicU64 = AtomicU64::new(0);

/// What the kernel is to be told: a `pread` of `len` bytes to `memory`.
#[doc(hidden)]
pub struct KernelRead {
    pub fd: RawFd,
    pub memory: *mut u8,
    pub len: usize,
}

/// A read under way, of a file that outlives it.
#[doc(hidden)]
pub struct UnguardedRead {
    offset: u64,
    len: u64,
    changes: u64,
    bounce: Option<Bounce>,
}

/// A frame of the file's cache.
struct Bounce {
    file: NonNull<CachedFile>,
    frame: FrameIndex,
}

/// Begins a read of `len` bytes at `offset` to `start`. `None`: it is to be read in another way. Does not block.
///
/// # Safety
///
/// The memory is valid for writes until the kernel has completed the read, though a part may fault; the file until
/// the read was dropped, which is not before.
pub(crate) unsafe fn begin(
    file: &CachedFile,
    start: *mut u8,
    len: usize,
    offset: u64,
) -> Option<(KernelRead, UnguardedRead)> {
    if !file.backing.is_direct() || len == 0 {
        return None;
    }
    // SAFETY: the caller's promise.
    let segment = [unsafe { Segment::new(start, len) }];
    let dst: SegmentIter<'_> = (&segment).into();
    let alignment = file.backing.alignment(false);
    let is_aligned = alignment.first_misaligned(offset, dst.misalignment()).is_none();
    let bounce = if is_aligned { None } else { Some(Bounce::take(file, len)?) };
    let memory = bounce.as_ref().map_or(start, Bounce::bytes);
    // SAFETY: as above; or a frame of `bounce`, of as many bytes.
    let segment = [unsafe { Segment::new(memory, len) }];
    let dst: SegmentIter<'_> = (&segment).into();
    file.unguarded.prepare();
    let guard = around::begin_first(file, (offset, len as u64), dst.misalignment())?;
    let fd = file.backing.direct_route(&Transfer::new(Direction::Read, offset, dst))?;
    let (first, last) = (file.page_of(offset), file.page_of(offset + len as u64 - 1));
    let changes = file.unguarded.changes(first, last);
    drop(guard);
    let read = UnguardedRead { offset, len: len as u64, changes, bounce };
    Some((KernelRead { fd, memory, len }, read))
}

impl UnguardedRead {
    /// Whether what the kernel has read, all of it, counts; then it is at `dst`. Else it is to be read anew. Does not block.
    ///
    /// # Safety
    ///
    /// It is of this file, and `dst` valid for writes of as many bytes, though a part may fault.
    pub(crate) unsafe fn end(self, file: &CachedFile, dst: *mut u8) -> bool {
        let (first, last) = (file.page_of(self.offset), file.page_of(self.offset + self.len - 1));
        if file.unguarded.changes(first, last) != self.changes {
            return false;
        }
        if let Some(bounce) = &self.bounce {
            // SAFETY: the caller's promise; the frame is ours, and the kernel has done with it.
            let copied = unsafe {
                let segment = [Segment::new(dst, self.len as usize)];
                copy_out((&segment).into(), bounce.bytes(), Source::Near)
            };
            if copied.is_err() {
                return false;
            }
        }
        file.cache().counters.mine().passed(self.len);
        true
    }
}

impl Bounce {
    /// For `len` bytes, if those are a page.
    fn take(file: &CachedFile, len: usize) -> Option<Bounce> {
        if len != file.core().page_bytes() {
            return None;
        }
        let frames_max = file.cache().frames.limit_bytes() / len as u64 / FRAMES_PART;
        // Relaxed: a number.
        let taken = FRAMES.fetch_add(1, Relaxed);
        let is_room = taken < frames_max.min(FRAMES_MAX);
        let frame = || file.cache().take_frame(Class::page(file.core().page_shift));
        let frame = is_room.then(frame).flatten();
        if frame.is_none() {
            FRAMES.fetch_sub(1, Relaxed);
        }
        frame.map(|frame| Bounce { file: NonNull::from(file), frame })
    }

    fn bytes(&self) -> *mut u8 {
        // SAFETY: the file outlives the read (`begin`).
        let file = unsafe { self.file.as_ref() };
        file.cache().frames.bytes(self.frame)
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: as in `bytes`.
        let file = unsafe { self.file.as_ref() };
        file.cache().frames.free(self.frame, Class::page(file.core().page_shift));
        FRAMES.fetch_sub(1, Relaxed);
    }
}
