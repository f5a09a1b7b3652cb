//! Slabs: frames that contain the cores of open files.
//!
//! A slab is a frame of 4 KiB, divided into cores of 64 bytes. So all memory that a cached read
//! accesses, including the core, lies in the cache's address range and counts against the memory
//! limit. Slabs are never freed: their number follows from the maximum number of files that were
//! open at the same time.
//!
//! A client of a shared cache may still read a core whose file is closed (see `shared`). So a core keeps the size of its
//! pages for good, and the next file with such pages reopens it.
//!
//! Locks: one around the free list; a leaf lock.

use std::ptr::NonNull;
use std::sync::Mutex;

use crate::cache::frames::Frames;
#[cfg(doc)]
use crate::cache::frames::class::Class;
use crate::cache::table::FileCore;
use crate::sync::MutexExt;
use crate::units::{FrameIndex, PAGE_SHIFTS, UNIT_BYTES};

const CORES: usize = UNIT_BYTES / size_of::<FileCore>();

/// The free cores of a cache.
#[derive(Default)]
pub(crate) struct Slab {
    free: Mutex<FreeCores>,
}

#[derive(Default)]
struct FreeCores {
    /// No file has had them.
    fresh: Vec<CorePointer>,
    /// By the size of their pages.
    used: [Vec<CorePointer>; PAGE_SHIFTS.end as usize - PAGE_SHIFTS.start as usize],
}

impl FreeCores {
    /// The free cores of files with such pages. `None`: no file has them.
    fn used(&mut self, page_shift: u32) -> Option<&mut Vec<CorePointer>> {
        self.used.get_mut(page_shift.checked_sub(PAGE_SHIFTS.start)? as usize)
    }
}

#[derive(Clone, Copy)]
struct CorePointer(NonNull<FileCore>);

// SAFETY: a free core is a piece of memory without owner.
unsafe impl Send for CorePointer {}

impl Slab {
    /// Takes a free core, for an empty table; `None` if there is none.
    pub(in crate::cache) fn take(&self, size: u64, page_shift: u32) -> Option<NonNull<FileCore>> {
        let mut free = self.free.acquire();
        if let Some(CorePointer(core)) = free.used(page_shift).and_then(Vec::pop) {
            // SAFETY: the core is ours, within a slab that is never freed, and was written by its first file.
            unsafe { core.as_ref() }.reopen(size);
            return Some(core);
        }
        let CorePointer(core) = free.fresh.pop()?;
        // SAFETY: the core is ours, and within a slab that is never freed. It has no late reader, as no file has had it.
        unsafe { core.write(FileCore::new(size, page_shift)) };
        Some(core)
    }

    /// Divides `frame`, of [`Class::SLAB`], into cores. It belongs to the slab from now on.
    pub(in crate::cache) fn add(&self, frames: &Frames, frame: FrameIndex) {
        let slab = frames.bytes(frame).cast::<FileCore>();
        self.free.acquire().fresh.extend((0..CORES).map(|i| {
            // SAFETY: the frame has room for CORES cores.
            CorePointer(unsafe { NonNull::new_unchecked(slab.add(i)) })
        }));
    }

    /// Takes back a core whose table was torn down.
    pub(crate) fn free(&self, core: NonNull<FileCore>) {
        // SAFETY: the caller's core, until it is in the list.
        let retired = unsafe { core.as_ref() };
        retired.retire();
        if let Some(used) = self.free.acquire().used(retired.page_shift) {
            used.push(CorePointer(core));
        }
    }
}
